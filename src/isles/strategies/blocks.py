"""The blocks of a model: what is gathered, cut, and placed one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from isles.errors import UserError


def find_blocks(model: nn.Module, class_names: Sequence[str] = ()) -> list[nn.Module]:
    """The transformer blocks of a model, in order.

    Args:
        model: a Hugging Face model.
        class_names: names of the blocks' classes; empty: what the model itself says must not be
            split, else the longest list of modules of one class.

    Raises:
        UserError: there are none, or a class that was named does not occur.
    """
    if class_names:
        return _named_blocks(model, class_names)
    own = getattr(model, "_no_split_modules", None) or ()
    found = _of_classes(model, own)
    if not found:
        found = _longest_list(model)
    if not found:
        raise UserError(
            f"the blocks of {type(model).__name__} cannot be found: it has no list of modules of "
            "one class",
            where="strategy.transformer_layer_cls_to_wrap",
            fix=f"name the classes of its blocks; it has {_classes(model)}",
            id="strategy.model",
        )
    return found


def _named_blocks(model: nn.Module, class_names: Sequence[str]) -> list[nn.Module]:
    known = {type(module).__name__ for module in model.modules()}
    # One list may name the blocks of several models, as the tools write it that made it.
    if not known & set(class_names):
        raise UserError(
            f"{type(model).__name__} has no module of class {' or '.join(class_names)}",
            where="strategy.transformer_layer_cls_to_wrap",
            fix=f"delete the key to have the blocks found, or use one of {_classes(model)}",
            id="strategy.model",
        )
    return _of_classes(model, class_names)


def _of_classes(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    wanted = set(names)
    return [
        module
        for module in model.modules()
        if type(module).__name__ in wanted and module is not model
    ]


def _longest_list(model: nn.Module) -> list[nn.Module]:
    lists = [
        list(module)
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len({type(child) for child in module}) == 1
    ]
    return max(lists, key=len, default=[])


def _classes(model: nn.Module) -> str:
    # The classes that occur most, by how often: blocks are among them.
    counts = Counter(type(module).__name__ for module in model.modules() if any(module.children()))
    counts.pop(type(model).__name__, None)
    return ", ".join(name for name, _ in counts.most_common(6)) or "no modules within modules"
