"""Routers of a mixture of experts, by the records of transformers."""

from __future__ import annotations

from torch import Tensor, nn

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Keys of the number of experts in a model's config."""


def find_routers(model: nn.Module) -> dict[str, int]:
    """The routers of a Hugging Face model by their names, and the number of experts of each.

    A router returns the scores of all experts [N, E], and the weights and indices of the chosen
    experts [N, K]. transformers records the outputs of these modules. The result is empty for other
    models, and for models with a different number of experts in each layer.

    Args:
        model: not sharded yet.
    """
    kinds: list[type] = []
    for module in model.modules():
        recorded = (getattr(module, "_can_record_outputs", None) or {}).get("router_logits")
        if recorded is not None and getattr(recorded, "index", None) == 0:
            kinds.append(recorded.target_class)
    text = model.config.get_text_config() if kinds else None  # type: ignore[operator, union-attr]
    experts = {getattr(text, key, None) for key in _EXPERTS}
    found = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, tuple(kinds)) and isinstance(weight, Tensor):
            found[name] = weight.shape[0]
    # Some routers also have rows for experts that every token uses.
    return found if len(set(found.values())) == 1 and experts & {*found.values()} else {}
