"""A run file of several clusters: the part of one cluster, and the shared keys."""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import replace
from typing import Any

from isles.config.keys import as_written
from isles.config.load import Loaded
from isles.config.sections.run import RunConfig
from isles.config.yaml import dump_yaml
from isles.errors import ConfigError

MAX_NAME_LENGTH = 63
"""Longest name of a run."""

_OWN = ("strategy", "balance")
"""Keys at the top that a cluster can override."""

_SHARED: dict[str, tuple[str, ...]] = {
    "name": (),
    "seed": (),
    "model": (
        *("name_or_path", "init", "attn_implementation", "router_aux_loss_coef"),
        "trust_remote_code",
    ),
    "tokenizer": (
        *("name_or_path", "chat_template", "chat_template_kwargs", "add_special_tokens"),
        "train_vocab_size",
    ),
    "adapter": (
        *("type", "r", "alpha", "dropout", "target_modules", "modules_to_save"),
        *("use_rslora", "use_dora", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant"),
    ),
    "data": (
        *("sources", "seq_length", "packing", "isolate_documents", "too_long"),
        *("max_bad_fraction", "streaming", "validation_fraction"),
    ),
    "training": (
        *("method", "dpo_beta", "dpo_label_smoothing", "max_steps", "num_train_epochs"),
        *("global_batch_size", "learning_rate", "lr_scheduler_type", "warmup_steps"),
        *("decay_steps", "min_lr_ratio", "optimizer", "adam_beta1", "adam_beta2"),
        *("adam_epsilon", "momentum", "weight_decay", "max_grad_norm", "precision"),
        *("tf32", "stochastic_rounding", "gradient_checkpointing", "torch_compile"),
        *("logging_steps", "eval_steps", "eval_samples"),
    ),
    "outer": (
        *("kind", "sync_every", "max_sync_overhead", "lr", "momentum", "warmup_rounds"),
        *("warmup_sync_every", "max_norm", "codec", "fragments", "delay", "alpha", "wait"),
        *("min_clusters", "outlier", "dead_after", "deadline"),
    ),
    "checkpoint": (
        *("every_steps", "every_minutes", "keep", "async_save", "export_on_finish"),
        *("export_dtype", "merge_adapter", "max_shard_gb", "timeout"),
    ),
}
"""Keys that all clusters of a run share, by section: numbers, words of a list, and `_PATHS`.

None of these keys chooses a folder to write, an address to connect to or a program to start. Each
cluster sets every other key for itself, even a key that a later version of isles adds.
"""

_PATHS = re.compile(r"(data\.sources\.\d+\.path|.*\.name_or_path|tokenizer\.chat_template)")


def of_cluster(loaded: Loaded, index: int) -> Loaded:
    """The run file of one cluster, with the text and the origins of the whole file."""
    cluster = loaded.config.clusters[index]
    own = [name for name in _OWN if getattr(cluster, name) is not None]
    if len(loaded.config.clusters) == 1 and not own:
        return loaded
    given = f"clusters.{index}"
    origins: dict[str, str] = {}
    for key, origin in loaded.origins.items():
        first = key.partition(".")[0]
        if key == given or key.startswith(f"{given}."):
            inside = key.removeprefix(given).removeprefix(".")
            name = inside.partition(".")[0]
            if name not in _OWN:
                origins["clusters.0" + key.removeprefix(given)] = origin
            elif name in own:
                origins[inside] = origin
        elif first not in own and (first != "clusters" or key == first):
            origins[key] = origin
    return replace(loaded, config=loaded.config.of_cluster(index), origins=origins)


def keys_of_cluster(text: str, index: int) -> str:
    """A message of one cluster's run, with the cluster's number in the file instead of 0."""
    return re.sub(r"\bclusters(?:\.0\b|\[0\])", f"clusters.{index}", text)


def named_cluster(loaded: Loaded, name: str) -> Loaded:
    """The run of one of several clusters, RUN-CLUSTER, whose text loads again to the same values.

    ConfigError: the cluster does not exist, or both names together are too long.
    """
    names = [cluster.name for cluster in loaded.config.clusters]
    if name not in names:
        raise ConfigError(
            f"cluster {name} not found",
            where=loaded.where("clusters"),
            fix=f"use a cluster of the run file: {', '.join(names)}",
        )
    index = names.index(name)
    both = f"{loaded.config.name}-{name}"
    if len(both) > MAX_NAME_LENGTH:
        raise ConfigError(
            f"the cluster's run would have the name {both}, with {len(both)} characters",
            where=loaded.where(f"clusters.{index}.name", "clusters"),
            fix=f"use shorter names for run and cluster, with at most {MAX_NAME_LENGTH - 1} "
            "characters together",
        )
    config = loaded.config.model_copy(update={"name": both})
    own = of_cluster(replace(loaded, config=config), index)
    comment = f"# The cluster {name} of {loaded.path}; written by isles.\n"
    return replace(own, text=comment + dump_yaml(as_written(own.config.values())))


def shared_text(config: RunConfig) -> str:
    """The values that all clusters of a run have, as a run file: no machines, folders or people."""
    data = config.values()
    found: dict[str, Any] = {}
    for section, keys in _SHARED.items():
        if section in data:
            given = deepcopy(data[section])
            found[section] = {k: given[k] for k in keys if k in given} if keys else given
    if found.get("training", {}).get("max_steps") is None and config.training.max_time:
        found["training"]["max_time"] = config.training.max_time  # the length of the run
    return dump_yaml(as_written(found))


def is_place(key: str) -> bool:
    """True if a key is a place to read from: a path, or an id at Hugging Face."""
    return _PATHS.fullmatch(key) is not None


def leads_outside(key: str, value: object) -> bool:
    """True if a place from another cluster is outside of the folder of the run.

    Addresses of any kind are outside, as isles opens them with this machine's credentials. Hidden
    files are outside too, as they hold keys.
    """
    if not is_place(key) or not isinstance(value, str):
        return False
    is_address = re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", value) is not None or "$" in value
    parts = re.split(r"[/\\]", value)
    return is_address or value.startswith(("/", "~")) or any(p.startswith(".") for p in parts)
