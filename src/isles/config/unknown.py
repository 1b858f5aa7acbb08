"""What a user may have meant by a key that isles does not have."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from isles.config import keys
from isles.config.aliases.names import Foreign, find_foreign, foreign_names, normal
from isles.config.yaml import KeyPath, dotted

_OUTER = "outer"
"""A section whose keys, such as lr, are mostly meant for the inner steps where they stand alone."""
_MESH_KEYS = ("tp_size", "cp_size", "pp_size", "pp_schedule", "cp_method")
_NOT_WITH_DEEPSPEED = (
    "; DeepSpeed's ZeRO stands alone here: from stage 2 on it cuts the gradients that a pipeline "
    "still adds up, and it does not know matrices that are cut already. fsdp does what ZeRO-3 "
    "does, also in a pipeline"
)


@dataclass(frozen=True, slots=True)
class Meant:
    """A guess at what an unknown key was meant to be.

    Args:
        fix: what to write instead.
        keys: the dotted keys of isles that may have been meant.
        tools: the tools that have a key of this name.
    """

    fix: str
    keys: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()


def guess_meant(path: KeyPath) -> Meant:
    """The best guess: this spelling elsewhere, another tool's name, then the nearest name."""
    return next(_guesses(path))


def _guesses(path: KeyPath) -> Iterator[Meant]:
    name, parent = normal(str(path[-1])), path[:-1]
    siblings = keys.children(keys.schema_at(parent) or {})
    if name == path[-1] and (kinds := keys.kinds_with(keys.schema_at(parent) or {}, name)):
        why = _NOT_WITH_DEEPSPEED if name in _MESH_KEYS else ""
        yield Meant(f"it goes with kind: {' or '.join(kinds)}{why}", (dotted(path),))
    if name in siblings:
        yield Meant(f"write it as {name}", (dotted((*parent, name)),))
    foreign = find_foreign(path)
    if "." in name:
        inner = tuple(int(part) if part.isdecimal() else part for part in name.split("."))
        yield from _written_with_dots(parent, inner)
        if foreign is None:
            yield from _guesses((*parent, *inner))
    if foreign is not None and "." in foreign.name:
        yield _from_foreign(foreign)
    same = [known for known in keys.all_paths() if known[-1] == name]
    if elsewhere := tuple(dotted(known) for known in same if known[0] != _OUTER):
        yield Meant(f"it belongs {_place(elsewhere[0])}: {' or '.join(elsewhere)}", elsewhere)
    if foreign is not None:
        yield _from_foreign(foreign)
    if elsewhere := tuple(dotted(known) for known in same):
        yield Meant(f"it belongs {_place(elsewhere[0])}: {' or '.join(elsewhere)}", elsewhere)
    for near in difflib.get_close_matches(name, siblings, n=1, cutoff=0.7):
        yield Meant(f"did you mean {near}?", (dotted((*parent, near)),))
    leaves = {str(known[-1]): dotted(known) for known in reversed(keys.all_paths())}
    for near in difflib.get_close_matches(name, leaves, n=1, cutoff=0.8):
        target = leaves[near]
        yield Meant(f"did you mean {target}? It belongs {_place(target)}", (target,))
    for near in difflib.get_close_matches(name, foreign_names(), n=1, cutoff=0.85):
        yield _from_foreign(foreign_names()[near])
    there = f"{dotted(parent)} has" if parent else "the top of the file has"
    yield Meant(f"{there} these keys: {', '.join(siblings)}" if siblings else "delete it")


def _written_with_dots(parent: KeyPath, inner: KeyPath) -> Iterator[Meant]:
    for path in ((*parent, *inner), inner):
        if keys.schema_at(path) is not None:
            fix = f"a dotted key works on the command line only: write it {_place(dotted(path))}"
            yield Meant(fix, (dotted(path),))


def _from_foreign(foreign: Foreign) -> Meant:
    if foreign.target is None:
        return Meant(f"delete it: {foreign.note}", (), foreign.tools)
    note = f" ({foreign.note})" if foreign.note else ""
    return Meant(f"here it is called {foreign.target}{note}", (foreign.target,), foreign.tools)


def _place(target: str) -> str:
    section = target.rpartition(".")[0].replace(".0", "")
    return f"under {section}" if section else "at the top, without indentation"
