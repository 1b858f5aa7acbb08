"""Writes docs/run-file.md, the reference of the run file, from the schema itself.

    python docs/make_run_file.py

The text of each key is the docstring below its field in `src/isles/config/sections/`; change it
there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isles.config import keys
from isles.config.sections.run import RunConfig
from isles.config.yaml import scalar_text
from isles.facts.memory.architecture import Architecture
from isles.facts.models import (
    CONTEXT_PARALLEL,
    PIPELINE,
    TENSOR_PARALLEL,
    load_shape,
    shape_names,
)
from isles.facts.units import format_count, write_duration

TARGET = Path(__file__).with_name("run-file.md")

HEAD = """\
# The run file

<!-- Written by docs/make_run_file.py from the schema. Change the docstrings in
     src/isles/config/sections/, then run it again; tests/unit/test_docs.py compares. -->

For looking up a key: one YAML file describes a whole run, and this page lists all of its keys.
`isles init` writes a file to start from. `isles config show run.yaml` prints every value and where
it came from: a line of the file, the command line, or a default. `isles config schema` prints a
JSON schema, which many editors use to complete and check keys while you type.

## How it is read

- **YAML 1.2.** `4e-4` is a number, `on` and `no` are text, only `true` and `false` are truth
  values. Anchors work; merge keys (`<<`) do not. The file cannot run code.
- **A time has a unit**: `90s`, `20m`, `23h30m`, `2d` or `12:30:00`.
- **On the command line**, `key.path=value` replaces a value, such as
  `isles train run.yaml training.max_steps=500`. Items of a list are numbered from 0:
  `data.sources.0.path=notes.txt`. Values are YAML as well: `'track=[jsonl]'`.
- **Unknown keys are refused**, with the nearest name; for a key of another tool, such as
  `per_device_train_batch_size` or `lr`, with isles' name for it.
- **Every issue is reported at once**, each with the file, the line, the key and a fix.
- **Values are never changed** by the checks. What follows from them, such as the number of ranks,
  is shown under `# derived` by `isles config show`.

Only `model`, `data` and a length (`training.max_steps`, `num_train_epochs` or `max_time`) must be
given.

## At the top
"""

RULES = """\
## Rules between keys

These are checked before anything is started, together with the types above:

- One of `training.max_steps`, `training.num_train_epochs` and `training.max_time` is given, and not
  both of the first two. `max_time` alone needs `lr_scheduler_type: constant`, since the other
  shapes need to know the last step.
- `training.warmup_steps` is smaller than `training.max_steps`; `training.decay_steps` belongs to
  `wsd`, and fits behind the warm-up.
- `training.global_batch_size` is at least the number of data-parallel ranks, and a multiple of
  `training.micro_batch_size` where that is a number; with `balance: even`, of the two multiplied.
  The message names the two nearest that are.
- A shape shipped with isles has no weights: it needs `model.init: scratch`. It has no tokenizer
  either: give `tokenizer.train_vocab_size` or `tokenizer.name_or_path`.
- `tokenizer.train_vocab_size` goes with `model.init: scratch` only: weights that exist belong to
  the tokenizer that they were trained with.
- Either every source has a `weight`, or none has. A `fake` source stands alone.
- A key of `strategy` with another value than its default must mean something: `shard_size` only
  with `HYBRID_SHARD`, `cp_method` with `cp_size`, `pp_schedule` with `pp_size`, `nvme_path` with an
  offload to nvme, and ddp's own keys only where nothing is cut (`tp_size` and `pp_size` 1).
- The ranks are a multiple of `tp_size` x `cp_size` x `pp_size`. `cp_size` divides
  `data.seq_length`, and needs `attn_implementation: sdpa`; `pp_size` goes with every precision but
  `fp16-mixed`.
- `offload_param` and an offload of the optimizer to nvme need `zero_stage: 3`; an offload to nvme
  needs `nvme_path`. Neither `muon` nor `bf16-true` goes with `deepspeed`, and what a `config_file`
  says must not contradict the run file.

These need the model's `config.json`. Where it is on this machine they are checked before the start
too, otherwise by the ranks:

- `data.seq_length` is at most the model's `max_position_embeddings`.
- `tp_size` divides its attention heads, key-value heads and `intermediate_size`; with
  `cp_method: ulysses`, `cp_size` divides the key-value heads of each tensor-parallel rank.
- It has a layer for every stage of the pipeline, and a head of its own (no `tie_word_embeddings`).
- It is of a kind for which that way of cutting is known to be exact, see below. `fsdp` without
  these sizes and `deepspeed` cut any model.
- With rotary scaling of type `longrope`, `data.seq_length` is at most the model's
  `original_max_position_embeddings`, unless every sample is full, as with packed text.
  transformers uses the frequencies of the longest document for all rows of a batch.

Before the first step, when the number of samples is known, the ranks check one more rule.
The epochs (`num_train_epochs`) have at least `warmup_steps` steps, plus `decay_steps` with `wsd`.

Data that is named by a path or a glob must be there when the run is started.

## Going on with other values

`isles train` goes on with the newest unfinished run of the same name. If a value has changed that
the weights depend on, it stops and names it, and you choose: put it back, `--resume no` for a new
run, or `--resume runs/NAME-N` to go on with the new value.

The length of the run (`training.max_steps`, `training.num_train_epochs`, or `training.max_time`
where it is given alone) is such a value in two cases:

- It is shorter: the run would end earlier, or at once where so many steps are done already.
- It is longer, and changes the learning rate of the next step: with `linear` and `cosine` after the
  warm-up, with `wsd` once the decay has begun. The message has both rates. The rest of the curve
  follows the new length.

A longer one may change freely otherwise: with `constant`, in the warm-up, before the decay of
`wsd`. So may all of these:

"""


def write() -> str:
    """The whole reference."""
    schema = keys.tree()
    top = {key: node for key, node in keys.children(schema).items() if _section(node) is None}
    parts = [HEAD, *_table(top, "")]
    for key, node in keys.children(schema).items():
        parts += _section_text(key, key, node)
    parts += ["", *_shapes(), "", RULES + _free_keys(), "", *_architectures()]
    return "\n".join(parts).rstrip() + "\n"


def _section(node: keys.Schema) -> keys.Schema | None:
    """The section that a key holds, or that the items of its list are; None for a value."""
    inner = keys.items(node) or node
    return inner if keys.is_section(inner) else None


def _section_text(title: str, path: str, node: keys.Schema) -> Iterator[str]:
    section = _section(node)
    if section is None:
        return
    is_list = keys.items(node) is not None
    yield f"\n## `{title}`\n"
    yield _sentence(node)
    if is_list:
        items = "one item, begun" if _maximum(node) == 1 else "one or more items, each begun"
        yield f"\nA list: {items} with `- `."
    yield ""
    inside = keys.children(section)
    if len(keys.by_kind(section)) > 1:
        yield from _kinds_text(section)
        return
    yield from _table({k: n for k, n in inside.items() if _section(n) is None}, path)
    for key, child in inside.items():
        below = f"{path}.{key}"
        yield from _section_text(below, below, child)


def _kinds_text(section: keys.Schema) -> Iterator[str]:
    """The keys of a section that comes in kinds, under the kinds that have them."""
    forms, inside = keys.by_kind(section), keys.children(section)
    yield "`kind` says which; it must be given where the section is.\n"
    yield "| kind | | |"
    yield "|---|---|---|"
    for kind, form in forms.items():
        yield f"| `{kind}` | {_sentence(form)} | {_sentence(form['properties']['kind'])} |"
    groups: dict[tuple[str, ...], dict[str, keys.Schema]] = {}
    for key, node in inside.items():
        if key != "kind":
            groups.setdefault(keys.kinds_with(section, key), {})[key] = node
    for kinds, nodes in sorted(groups.items(), key=lambda group: -len(group[0])):
        yield f"\n### With {' or '.join(f'`kind: {kind}`' for kind in kinds)}\n"
        yield from _table(nodes, "")


def _table(nodes: dict[str, keys.Schema], path: str) -> Iterator[str]:
    yield "| key | may hold | default | |"
    yield "|---|---|---|---|"
    for key, node in nodes.items():
        cells = (f"`{key}`", keys.allowed(node), _default(node), _sentence(node))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(node: keys.Schema) -> str:
    option = node if "default" in node else next(iter(node.get("anyOf", [{}])), {})
    if "default" not in option:
        return "must be given"
    value: Any = option["default"]
    if value == {}:
        return "`{}`"
    if isinstance(value, float) and "duration" in keys.value_types(node):
        return f"`{write_duration(value)}`"
    return f"`{scalar_text(value)}`"


def _sentence(node: keys.Schema) -> str:
    """The docstring of a field on one line; of a key that comes in kinds, of each of them.

    A field that says the same as its section's class has no text of its own in the schema.
    """
    if "description" in node:
        return " ".join(str(node["description"]).split())
    texts = [
        f"{option['const']}: {_sentence(option)}"
        for option in node.get("anyOf", ())
        if "const" in option
    ]
    return " ".join(texts)


def _maximum(node: keys.Schema) -> int | None:
    found = node.get("maxItems")
    return int(found) if found is not None else None


def _shapes() -> Iterator[str]:
    yield "## Shapes shipped with isles\n"
    yield "Llama architectures for `model.name_or_path` with `init: scratch`. The number of"
    yield "parameters is that with the vocabulary in the table; a tokenizer that is trained for the"
    yield "run brings its own size.\n"
    yield "| name | parameters | vocabulary | longest sequence | layers | width |"
    yield "|---|---|---|---|---|---|"
    for name in shape_names():
        shape = load_shape(name)
        cells = (
            f"`{name}`",
            format_count(Architecture.of(shape).params),
            shape["vocab_size"],
            shape["max_position_embeddings"],
            shape["num_hidden_layers"],
            shape["hidden_size"],
        )
        yield "| " + " | ".join(map(str, cells)) + " |"


def _architectures() -> Iterator[str]:
    yield "## Models that can be cut in special ways\n"
    yield "By the `model_type` in their `config.json`, without sliding windows for the last two:\n"
    for key, kinds in (
        ("tp_size", TENSOR_PARALLEL),
        ("cp_size", CONTEXT_PARALLEL),
        ("pp_size", PIPELINE),
    ):
        yield f"- `{key}`: {', '.join(sorted(kinds))}"


def _free_keys() -> str:
    from isles.config.resume import _FREE_KEYS, _FREE_SECTIONS, _ROUNDING

    order = [".".join(map(str, path)) for path in keys.all_paths()]
    free = [f"`{key}`" for key in order if key in _FREE_KEYS]
    sections = (f"`{section}*`" for section in _FREE_SECTIONS if section[:-1] not in _FREE_KEYS)
    for section in sections:
        bound = [f"`{key}`" for key in _ROUNDING if key.startswith(section.strip("`*"))]
        free.append(section + (f", except {' and '.join(bound)}" if bound else ""))
    return "\n".join(f"- {key}" for key in free) + "\n"


if __name__ == "__main__":
    assert set(keys.children(keys.tree())) == set(RunConfig.model_fields)
    if "--check" in sys.argv:
        sys.exit(TARGET.read_text(encoding="utf-8") != write())
    TARGET.write_text(write(), encoding="utf-8")
