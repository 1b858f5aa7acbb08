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

Look up any key of the run file, the YAML file that describes a whole run. `isles init` writes a
first one. `isles config show run.yaml` prints every value and its origin: a line of the file, the
command line, or a default. `isles config schema` prints a JSON schema, which many editors use to
complete and check keys.

## How isles reads the file

- **The format is YAML 1.2.** `4e-4` is a number, `on` and `no` are text, and only `true` and
  `false` are booleans. Anchors work, but merge keys (`<<`) do not. The file cannot run code.
- **A time has a unit**: `90s`, `20m`, `23h30m`, `2d` or `12:30:00`.
- **On the command line**, `key.path=value` replaces a value, such as
  `isles train run.yaml training.max_steps=500`. List items have numbers from 0:
  `data.sources.0.path=notes.txt`. Values are YAML too: `'track=[jsonl]'`.
- **isles refuses unknown keys**, and suggests the nearest name. For a key of another tool, such as
  `per_device_train_batch_size` or `lr`, the error names the isles key.
- **One run reports all issues**, each with the file, the line, the key and a fix.
- **The checks never change a value.** `isles config show` lists derived values, such as the number
  of ranks, under `# derived`.

You must give only `model`, `data` and a length (`training.max_steps`, `num_train_epochs` or
`max_time`).

## At the top
"""

RULES = """\
## Rules between keys

isles checks these rules and the types above before it starts anything:

- Give one of `training.max_steps`, `training.num_train_epochs` and `training.max_time`, but not
  both of the first two. `max_time` alone needs `lr_scheduler_type: constant`, since the other
  shapes depend on the last step.
- `training.warmup_steps` is smaller than `training.max_steps`. `training.decay_steps` needs `wsd`,
  and must fit after the warm-up.
- `training.global_batch_size` is at least the number of data-parallel ranks, and a multiple of
  `training.micro_batch_size` if that is a number. With `balance: even` it is a multiple of the
  product of both. The error names the two nearest valid sizes.
- A shape shipped with isles has no weights and no tokenizer. It needs `model.init: scratch`, and
  `tokenizer.train_vocab_size` or `tokenizer.name_or_path`.
- `tokenizer.train_vocab_size` needs `model.init: scratch`, since pretrained weights depend on their
  own tokenizer.
- Either every source has a `weight`, or no source has one. A `fake` source must be the only source.
- A key of `strategy` with another value than its default must have an effect: `shard_size` needs
  `HYBRID_SHARD`, `cp_method` needs `cp_size`, `pp_schedule` needs `pp_size`, and `nvme_path` needs
  an offload to nvme. The keys of ddp itself need `tp_size` and `pp_size` of 1.
- The number of ranks is a multiple of `tp_size` x `cp_size` x `pp_size`. `cp_size` divides
  `data.seq_length`, and needs `attn_implementation: sdpa`. `pp_size` works with every precision
  except `fp16-mixed`.
- `offload_param` and an offload of the optimizer to nvme need `zero_stage: 3`. An offload to nvme
  needs `nvme_path`. `deepspeed` supports neither `muon` nor `bf16-true`, and its `config_file` must
  not contradict the run file.

More rules need the model's `config.json`. isles checks them before the start if the file is on this
machine; otherwise the ranks check them:

- `data.seq_length` is at most the model's `max_position_embeddings`.
- `tp_size` divides the model's attention heads, key-value heads and `intermediate_size`. With
  `cp_method: ulysses`, `cp_size` divides the key-value heads of each tensor-parallel rank.
- With `pp_size`, the model has a layer for every stage of the pipeline, and a separate output head
  (no `tie_word_embeddings`).
- isles supports this sharding for the model type, see the list below. `fsdp` without these sizes
  and `deepspeed` can shard any model.
- With rotary scaling of type `longrope`, `data.seq_length` is at most the model's
  `original_max_position_embeddings`, unless every sample is full, as with packed text.
  transformers uses the frequencies of the longest document for all rows of a batch.

The ranks check one more rule before the first step, when they know the number of samples: The
epochs (`num_train_epochs`) have at least `warmup_steps` steps, plus `decay_steps` with `wsd`.

Data given by a path or a glob must exist when the run starts.

## Resuming with other values

`isles train` resumes the newest unfinished run of the same name. It stops with an error if you have
changed a value that affects the weights. Then you have three options: restore the value, start a
new run with `--resume no`, or resume with the new value with `--resume runs/NAME-N`.

The length of the run counts as such a value in two cases. The length is `training.max_steps`,
`training.num_train_epochs`, or `training.max_time` if given alone.

- You shorten the run. It would end earlier, or immediately if it has already passed the new length.
- You lengthen the run, and this changes the learning rate of the next step: with `linear` and
  `cosine` after the warm-up, with `wsd` after the decay has begun. The error shows both rates. The
  rest of the curve follows the new length.

You may freely lengthen a run in all other cases: with `constant`, in the warm-up, or before the
decay of `wsd`. You may also freely change these keys:

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
        items = (
            "one item that starts" if _maximum(node) == 1 else "one or more items that each start"
        )
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
    yield "Required: `kind`, which selects the other keys.\n"
    yield "| kind | Description | Notes |"
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
    yield "| Key | Type | Default | Description |"
    yield "|---|---|---|---|"
    for key, node in nodes.items():
        cells = (f"`{key}`", keys.allowed(node), _default(node), _sentence(node))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(node: keys.Schema) -> str:
    option = node if "default" in node else next(iter(node.get("anyOf", [{}])), {})
    if "default" not in option:
        return "required"
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
    yield "parameters includes the vocabulary in the table. A tokenizer that isles trains for the"
    yield "run has its own vocabulary size.\n"
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
    yield "## Models with tensor, context and pipeline parallelism\n"
    yield "The lists show the `model_type` of `config.json`. `cp_size` and `pp_size` do not support"
    yield "sliding windows.\n"
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
