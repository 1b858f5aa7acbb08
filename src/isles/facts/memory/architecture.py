"""Architectures of causal language models from their config.json: blocks for `forward.py`.

A row of `KINDS` has the differences between the blocks of one `model_type` of transformers 5 and
Llama's. No number in it was fitted. An unknown kind is counted as a Llama, and marked as a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from isles.facts.memory.forward import Forward, Value


@dataclass(frozen=True, slots=True)
class Kind:
    """Differences of one `model_type` from Llama.

    Args:
        norm: `rms`: RMSNorm, scaled after the cast to the narrow dtype; `rms_wide`: before;
            `layer`: torch's LayerNorm; `centered`: Cohere's.
        order: position of the norms: before attention and MLP (`pre`), after them (`post`), `both`;
            `parallel`: one norm for both, which run in parallel; `parallel_two`: one for each.
        mlp: `gated`, `gated_fused` (gate and up are one matrix), or `plain` (two matrices).
        activation: used if the config does not set it.
        qk_norm: norms of queries and keys: per head (`heads`), or over the `whole` vector.
        fuses_qkv: queries, keys and values are one matrix.
        qkv_bias, o_bias, mlp_bias: whether the matrix has a bias, or the config's key for it.
        shares_keys: several query heads may share keys and values, by num_key_value_heads.
        is_rotary: positions by rotation of queries and keys.
        narrows_rotated: rotated queries and keys are cast back to the input's dtype.
        is_tied: whether the head is the embedding, if the config does not set it.
        positions: the config's key for the number of learned positions; empty: no such embedding.
        has_experts: each token goes to a few MLPs of many (mixture of experts).
        experts_width: the config's key for the width of one expert.
        scales_logits: the logits are multiplied after the head.
        head_bias: the head has a bias.
        defaults: values of other keys that the config may omit, such as head_dim.
    """

    norm: Literal["rms", "rms_wide", "layer", "centered"] = "rms"
    order: Literal["pre", "post", "both", "parallel", "parallel_two"] = "pre"
    mlp: Literal["gated", "gated_fused", "plain"] = "gated"
    activation: str = "silu"
    qk_norm: Literal["", "heads", "whole"] = ""
    fuses_qkv: bool = False
    qkv_bias: bool | str = "attention_bias"
    o_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = "mlp_bias"
    shares_keys: bool = True
    is_rotary: bool = True
    narrows_rotated: bool = False
    is_tied: bool = False
    positions: str = ""
    has_experts: bool = False
    experts_width: str = "intermediate_size"
    scales_logits: bool = False
    head_bias: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


_LLAMA = Kind()
_GEMMA = Kind(norm="rms_wide", activation="gelu_pytorch_tanh", is_tied=True, mlp_bias=False)
_NEOX = Kind(norm="layer", mlp="plain", activation="gelu", mlp_bias=True)

KINDS: dict[str, Kind] = {
    "llama": _LLAMA,
    "mistral": replace(_LLAMA, defaults={"num_key_value_heads": 8}),
    "ministral3": replace(_LLAMA, defaults={"num_key_value_heads": 8, "head_dim": 128}),
    "granite": replace(_LLAMA, scales_logits=True),
    "smollm3": replace(_LLAMA, is_tied=True, defaults={"num_key_value_heads": 4}),
    "seed_oss": replace(
        _LLAMA, o_bias="attention_out_bias", defaults={"attention_bias": True, "head_dim": 128}
    ),
    "qwen2": replace(_LLAMA, qkv_bias=True, o_bias=False, mlp_bias=False),
    "qwen3": replace(_LLAMA, qk_norm="heads", mlp_bias=False, defaults={"head_dim": 128}),
    "gemma": replace(_GEMMA, defaults={"num_key_value_heads": 16, "head_dim": 256}),
    "gemma2": replace(_GEMMA, order="both", defaults={"num_key_value_heads": 4, "head_dim": 256}),
    "gemma3_text": replace(
        _GEMMA,
        order="both",
        qk_norm="heads",
        defaults={"num_key_value_heads": 4, "head_dim": 256},
    ),
    "olmo2": replace(_LLAMA, norm="rms_wide", order="post", qk_norm="whole", mlp_bias=False),
    "helium": replace(
        _LLAMA,
        norm="rms_wide",
        o_bias=False,
        narrows_rotated=False,
        defaults={"num_key_value_heads": 20, "head_dim": 128},
    ),
    "phi3": replace(
        _LLAMA, fuses_qkv=True, mlp="gated_fused", qkv_bias=False, o_bias=False, mlp_bias=False
    ),
    "starcoder2": replace(
        _NEOX,
        activation="gelu_pytorch_tanh",
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        is_tied=True,
        defaults={"use_bias": True, "num_key_value_heads": 2},
    ),
    "gpt_neox": replace(
        _NEOX,
        fuses_qkv=True,
        shares_keys=False,
        order="parallel_two",
        defaults={"attention_bias": True},
    ),
    "gpt2": replace(
        _NEOX,
        activation="gelu_new",
        fuses_qkv=True,
        shares_keys=False,
        qkv_bias=True,
        o_bias=True,
        is_rotary=False,
        is_tied=True,
        positions="max_position_embeddings",
    ),
    "phi": replace(
        _NEOX,
        activation="gelu_new",
        order="parallel",
        qkv_bias=True,
        o_bias=True,
        head_bias=True,
    ),
    "cohere": replace(
        _LLAMA,
        norm="centered",
        order="parallel",
        narrows_rotated=True,
        is_tied=True,
        mlp_bias=False,
        scales_logits=True,
    ),
    "mixtral": replace(
        _LLAMA,
        has_experts=True,
        defaults={"num_key_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": replace(
        _LLAMA,
        qk_norm="heads",
        has_experts=True,
        experts_width="moe_intermediate_size",
        defaults={"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8},
    ),
    "olmoe": replace(
        _LLAMA,
        qk_norm="whole",
        has_experts=True,
        defaults={"num_experts": 64, "num_experts_per_tok": 8},
    ),
}

_ALIASES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "num_attention_heads": ("n_head",),
    "intermediate_size": ("n_inner", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions",),
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "hidden_act": ("activation_function", "hidden_activation"),
}


class UnknownShapeError(ValueError):
    """A config.json without the size of its model. The message lists the keys."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model as its config.json describes it."""

    name: str
    kind: Kind
    is_known: bool
    """False: the kind is not in the table and is counted as a Llama."""
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocab: int
    positions: int
    activation: str
    is_tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    experts: int
    experts_used: int
    has_qk_norm: bool
    has_plain_head: bool
    """True if logits are unchanged after the head, so that the loss can be computed in chunks."""
    caps_logits: bool
    """True if a tanh limits the logits, which keeps its result."""
    other_params: int = 0
    """For an unknown kind, numbers of a block that are not in the walk (below 0: too many)."""

    @classmethod
    def of(cls, config: Mapping[str, Any], *, vocab_size: int | None = None) -> Architecture:
        """The architecture of a config.json.

        Args:
            vocab_size: vocabulary of a tokenizer that the run trains. None: the config's.

        Raises:
            UnknownShapeError: the config does not have the size of the model.
        """
        config = config.get("text_config") or config
        name = str(config.get("model_type", ""))
        kind = KINDS.get(name, _LLAMA)

        def value(key: str, default: Any = None) -> Any:
            for known in (key, *_ALIASES.get(key, ())):
                if config.get(known) is not None:
                    return config[known]
            return kind.defaults.get(key, default)

        def flag(given: bool | str) -> bool:
            return given if isinstance(given, bool) else bool(value(given, False))

        needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        if missing := [key for key in needed if not isinstance(value(key), int)]:
            raise UnknownShapeError(", ".join(missing))
        hidden, heads = int(value("hidden_size")), int(value("num_attention_heads"))
        layers = int(value("num_hidden_layers"))
        return cls(
            name=name,
            kind=kind,
            is_known=name in KINDS,
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=int(value("num_key_value_heads", heads)) if kind.shares_keys else heads,
            head_dim=int(value("head_dim", hidden // heads)),
            mlp_width=int(value(kind.experts_width, 4 * hidden)),
            vocab=vocab_size or int(value("vocab_size")),
            positions=int(value(kind.positions, 0)) if kind.positions else 0,
            activation=str(value("hidden_act", kind.activation)),
            is_tied=bool(value("tie_word_embeddings", kind.is_tied)),
            qkv_bias=flag(kind.qkv_bias),
            o_bias=flag(kind.o_bias),
            mlp_bias=flag(kind.mlp_bias),
            experts=int(value("num_experts", 0)) if kind.has_experts else 0,
            experts_used=int(value("num_experts_per_tok", 0)) if kind.has_experts else 0,
            has_qk_norm=bool(kind.qk_norm) or bool(value("use_qk_norm", False)),
            has_plain_head=not (kind.scales_logits or config.get("final_logit_softcapping")),
            caps_logits=bool(config.get("final_logit_softcapping")),
        )

    @property
    def params(self) -> int:
        """Numbers of the model's weights, with a tied head counted once."""
        walk = Forward(weight=4)
        x = self.end(walk, self.block(walk, self.embed(walk, 1), 1))
        del x
        ends = 0 if self.is_tied else self.head_params
        block = Forward(weight=4)
        self.block(block, Value(1, self.hidden, 4), 1)
        return walk.params + (self.layers - 1) * block.params + ends

    @classmethod
    def opaque(cls, params: int) -> Architecture:
        """A model with only the count of its numbers known."""
        narrow = {"model_type": "", "hidden_size": 1, "num_hidden_layers": 1, "vocab_size": 1}
        return cls.of({**narrow, "num_attention_heads": 1}).with_params(params)

    def with_params(self, params: int) -> Architecture:
        """The same architecture with a count of numbers from the model itself."""
        missing = (params - self.params) // self.layers
        return self if self.is_known else replace(self, other_params=self.other_params + missing)

    def embed(self, walk: Forward, tokens: int) -> Value:
        """The embeddings, which are the input of the first block."""
        own = self.vocab * self.hidden + self.positions * self.hidden
        walk.params += own
        x = walk.made(Value(tokens, self.hidden, walk.weight, walk.is_trained))
        walk.save(Value(tokens, 1, 8))
        return x

    def block(self, walk: Forward, x: Value, length: int) -> Value:
        """One block of the model. `length`: tokens that a token attends to."""
        walk.params += self.other_params
        walk.active_params += self.other_params

        def mlp(x: Value, held: Value) -> Value:
            walk.held = (x, held)
            return self._mlp(walk, x)

        match self.kind.order:
            case "pre":
                x = walk.add(x, self._attention(walk, self._norm(walk, x), length))
                return walk.add(x, mlp(self._norm(walk, x), x))
            case "post":
                x = walk.add(x, self._norm(walk, self._attention(walk, x, length)))
                return walk.add(x, self._norm(walk, mlp(x, x)))
            case "both":
                inner = self._attention(walk, self._norm(walk, x), length)
                x = walk.add(x, self._norm(walk, inner))
                return walk.add(x, self._norm(walk, mlp(self._norm(walk, x), x)))
            case "parallel":
                normed = self._norm(walk, x)
                attended = self._attention(walk, normed, length)
                return walk.add(x, walk.add(attended, mlp(normed, attended)))
            case "parallel_two":
                attended = self._attention(walk, self._norm(walk, x), length)
                return walk.add(x, walk.add(attended, mlp(self._norm(walk, x), attended)))

    def end(self, walk: Forward, x: Value) -> Value:
        """The last norm. The head is part of the loss (`step.py`)."""
        return self._norm(walk, x)

    @property
    def head_params(self) -> int:
        """Numbers of the head's matrix, tied or separate."""
        return self.vocab * (self.hidden + (1 if self.kind.head_bias else 0))

    @property
    def widest_matrix(self) -> int:
        """Numbers of the largest matrix of a block."""
        return self.hidden * max(self.mlp_width, self.heads * self.head_dim)

    def _norm(self, walk: Forward, x: Value) -> Value:
        match self.kind.norm:
            case "rms" | "rms_wide":
                return walk.rms_norm(x, scales_wide=self.kind.norm == "rms_wide")
            case "layer":
                return walk.layer_norm(x)
            case "centered":
                return walk.centered_norm(x)

    def _attention(self, walk: Forward, x: Value, length: int) -> Value:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        mine = queries // walk.tensor, keys // walk.tensor
        rotates = self.kind.is_rotary
        if self.kind.fuses_qkv:
            both = walk.linear(x, queries + 2 * keys, "qkv_proj", bias=self.qkv_bias)
            q, k, v = replace(both, units=mine[0]), both, both
            if rotates:
                q, k = (walk.rotate(both.like(units=units), walk.weight) for units in mine)
        else:
            q = walk.linear(x, queries, "q_proj", bias=self.qkv_bias)
            k = walk.linear(x, keys, "k_proj", bias=self.qkv_bias)
            v = walk.linear(x, keys, "v_proj", bias=self.qkv_bias)
            if self.has_qk_norm:
                q, k = (
                    self._qk_norm(walk, x, heads // walk.tensor)
                    for x, heads in ((q, self.heads), (k, self.kv_heads))
                )
            if rotates:
                width = v.width if self.kind.narrows_rotated else walk.weight
                q, k = (walk.rotate(x, width) for x in (q, k))
        out = walk.attend(q, k, v, heads=self.heads // walk.tensor, length=length)
        return walk.linear(out, self.hidden, "o_proj", bias=self.o_bias)

    def _qk_norm(self, walk: Forward, x: Value, heads: int) -> Value:
        if self.kind.qk_norm != "heads":
            return self._norm(walk, x)
        before, active = walk.params, walk.active_params
        # Each head is normalized separately, all with the same scale.
        split = replace(x, tokens=x.tokens * heads, units=self.head_dim)
        normed = self._norm(walk, split)
        walk.params, walk.active_params = before + self.head_dim, active + self.head_dim
        return replace(normed, tokens=x.tokens, units=x.units)

    def _mlp(self, walk: Forward, x: Value) -> Value:
        if self.experts:
            return self._experts(walk, x)
        width, bias, kind = self.mlp_width, self.mlp_bias, self.activation
        match self.kind.mlp:
            case "plain":
                inner = walk.activation(walk.linear(x, width, "up_proj", bias=bias), kind)
            case "gated":
                gate = walk.linear(x, width, "gate_proj", bias=bias)
                up = walk.linear(x, width, "up_proj", bias=bias)
                inner = walk.multiply(walk.activation(gate, kind), up)
            case "gated_fused":
                both = walk.linear(x, 2 * width, "gate_up_proj", bias=bias)
                half = both.like(units=both.units // 2)
                walk.save(both)  # its halves are views
                inner = walk.made(half.like())
                walk.save(walk.made(half))
        return walk.linear(inner, self.hidden, "down_proj", bias=bias)

    def _experts(self, walk: Forward, x: Value) -> Value:
        # Each token uses a few experts. All tokens of one expert are one product.
        scores = walk.linear(x, self.experts, "router")
        walk.save(scores.like(width=4))
        if walk.is_trained:  # for the gradient of the balancing loss
            walk.save(scores)
        routed = Value(x.tokens * self.experts_used, x.units, x.width)
        all_params = 3 * self.hidden * self.mlp_width * self.experts
        walk.params += all_params
        walk.stacked_params += all_params
        walk.active_params += all_params * self.experts_used // self.experts
        walk.products += 6 * routed.tokens * self.hidden * self.mlp_width
        walk.repeated_products += 6 * routed.tokens * self.hidden * self.mlp_width
        walk.operand_bytes += all_params * x.width + 2 * routed.size_bytes
        walk.operand_bytes += 3 * routed.tokens * self.mlp_width * x.width
        both = routed.like(units=2 * self.mlp_width)
        act, inner = routed.like(units=self.mlp_width), routed.like(units=self.mlp_width)
        out = walk.made(routed.like())
        if walk.is_trained:
            walk.save(routed, inner)
        walk.save(both, act, out)
        if walk.adapter is not None:
            shapes = {"gate_up_proj": (self.hidden, 2 * self.mlp_width)}
            shapes["down_proj"] = (self.mlp_width, self.hidden)
            for inputs, outputs in (shapes[name] for name in walk.adapter.experts):
                walk.adapter_params += walk.adapter.r * self.experts * (inputs + outputs)
                # peft adds the product of an adapter's matrices to the weights.
                walk.save(walk.made(Value(self.experts * inputs, outputs, x.width)))
        return walk.made(x.like())
