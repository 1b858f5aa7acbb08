"""What clusters of one run share: the part of a run file that one of them is given by another."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from isles.config.emit import dump_yaml
from isles.config.resume import Change, changed_mathematics
from isles.config.sections.run import RunConfig
from isles.config.show import for_people

_SHARED = (
    "name",
    "seed",
    "model",
    "tokenizer",
    "adapter",
    "data",
    "training",
    "outer",
    "checkpoint",
)
_OWN = (
    "data.cache_dir",
    "training.script",
    "training.script_args",
    "training.micro_batch_size",
    "training.max_time",
    "outer.rendezvous",
    "outer.public",
    "outer.hivemind",
    "outer.max_rate",
    "checkpoint.push_to_hub",
)
"""Of the shared sections, what each cluster has for itself."""

_MAY_DIFFER = (
    re.compile(r"data\.sources\.\d+\.path"),  # the content is compared when a cluster joins
    re.compile(r"(model|tokenizer)\.name_or_path"),
    re.compile(r"tokenizer\.chat_template"),
    re.compile(r"training\.(precision|stochastic_rounding|global_batch_size)"),
    re.compile(r"strategy\..*"),
)
_MUST_TOO = (
    "name",
    "training.max_steps",
    "outer.engine",
    "outer.wait",
    "outer.min_clusters",
    "outer.dead_after",
    "outer.outlier",
)
"""Must be equal, although a resumed run may change them."""

_PATHS = re.compile(r"(data\.sources\.\d+\.path|.*\.name_or_path|tokenizer\.chat_template)")


def shared_values(config: RunConfig) -> dict[str, Any]:
    """The values that all clusters of a run have, by section."""
    data = config.values()
    found: dict[str, Any] = {key: deepcopy(data[key]) for key in _SHARED if key in data}
    for key in _OWN:
        section, _, name = key.partition(".")
        found.get(section, {}).pop(name, None)
    if found.get("training", {}).get("max_steps") is None and config.training.max_time:
        found["training"]["max_time"] = config.training.max_time  # it is the run's length
    return found


def shared_text(config: RunConfig) -> str:
    """The same as a run file, which says nothing of machines, folders or people."""
    people = for_people(shared_values(config), ())
    assert isinstance(people, Mapping)
    return dump_yaml(people)


def unlike(theirs: RunConfig, mine: RunConfig) -> list[Change]:
    """Values of a cluster that are not as all clusters of the run must have them."""
    changes = [
        change
        for change in changed_mathematics(theirs, mine)
        if not any(pattern.fullmatch(change.key) for pattern in _MAY_DIFFER)
    ]
    return changes + [
        Change(key, _get(theirs, key), _get(mine, key))
        for key in _MUST_TOO
        if _get(theirs, key) != _get(mine, key)
    ]


def leads_outside(key: str, value: object) -> bool:
    """Whether a value that another cluster has chosen is a path beyond the folder of the run."""
    if not _PATHS.fullmatch(key) or not isinstance(value, str):
        return False
    return value.startswith(("/", "~")) or ".." in re.split(r"[/\\]", value)


def _get(config: RunConfig, key: str) -> object:
    found: object = config
    for name in key.split("."):
        found = getattr(found, name, None)
    return found
