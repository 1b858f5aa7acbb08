"""The section `adapter`: a few trained matrices beside a frozen model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from isles.config.section import Section

Name = Annotated[str, Field(min_length=1)]


class AdapterConfig(Section):
    """Low-rank adapters, by peft."""

    type: Literal["none", "lora", "qlora"] = "none"
    """none: every weight is trained. lora: the model is frozen, and small matrices beside its own
    are trained. qlora: as lora, and the frozen matrices are held in 4 bits by bitsandbytes."""

    r: Annotated[int, Field(ge=1, le=65_536)] = 16
    """Rank of the small matrices."""

    alpha: Annotated[float, Field(gt=0)] = 32.0
    """What they compute is scaled by alpha / r (with rslora: by alpha / sqrt(r))."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on what goes into them."""

    target_modules: (
        Literal["all-linear"] | Annotated[tuple[Name, ...], Field(min_length=1, strict=False)]
    ) = "all-linear"
    """Matrices that get an adapter, by the ends of their names such as [q_proj, v_proj].
    all-linear: every one but the head."""

    modules_to_save: Annotated[tuple[Name, ...], Field(strict=False)] = ()
    """Modules that are trained and saved whole besides, such as [embed_tokens, lm_head]."""

    use_rslora: bool = False
    """Rank-stabilised scale (arXiv:2312.03732)."""

    use_dora: bool = False
    """Weight-decomposed adapters: magnitude and direction apart (arXiv:2402.09353)."""

    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    """qlora: the 4-bit type."""

    bnb_4bit_use_double_quant: bool = True
    """qlora: quantise the quantisation constants too, about 0.4 bits a weight less."""
