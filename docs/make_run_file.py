"""Writes docs/run-file.md, the reference of the run file, from the schema itself.

    python docs/make_run_file.py

The text of each key is the docstring below its field in `src/isles/config/sections/`; change it
there.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isles.config import keys
from isles.config.keys import _options
from isles.config.sections.run import RunConfig
from isles.config.yaml import scalar_text
from isles.facts.memory.architecture import Architecture
from isles.facts.models import load_shape, shape_names
from isles.facts.units import format_count, write_duration

TARGET = Path(__file__).with_name("run-file.md")
OWN_TYPES = {
    **dict.fromkeys(("text", "one-line", "interface"), "text"),
    **dict.fromkeys(("peer", "maddr"), "multiaddress"),
    "duration": "time",
    "range": "`MIN:MAX`",
    "login": "`USER@HOST`",
    "huggingface-id": "`OWNER/NAME`",
    "rate": "rate",
    "address": "`HOST:PORT`",
    "bucket": "URL",
}
TYPES = {
    "integer": "integer",
    "number": "number",
    "boolean": "boolean",
    "string": "text",
    "object": "section",
}
NAME = keys.children(keys.tree())["name"]["pattern"]
LIMITS = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))

HEAD = """\
# The run file

<!-- Written by docs/make_run_file.py from the schema. Change the docstrings in
     src/isles/config/sections/, then run it again; tests/unit/test_docs.py compares. -->

Look up any key of the run file, the YAML file that describes a whole run. `isles init` writes a run
file. `isles config show run.yaml` prints every value and its origin: a line of the file, the
command line, or a default. `isles config schema` prints a JSON schema for editors.

## How isles reads the file

- **The format is YAML 1.2.** `4e-4` is a number, `on` and `no` are text, and only `true` and
  `false` are booleans. Anchors work, but merge keys (`<<`) do not. The file cannot run code.
- **On the command line**, `key.path=value` replaces a value, such as
  `isles train run.yaml training.max_steps=500`. List items have numbers from 0:
  `data.sources.0.path=notes.txt`. Values are YAML too: `'track=[jsonl]'`.
- **isles refuses unknown keys**, and reports all issues of a file together, each with a fix. For a
  [key of another tool](coming-from.md), the fix shows the isles key.
- **isles never changes your values.** `isles config show` lists derived values, such as the number
  of ranks, under `# derived`.
- **Some sections have a key `kind`**, which is required and selects the other keys.

You must give only `model`, `data` and a length (`training.max_steps`, `num_train_epochs` or
`max_time`).

The types in the tables:

- *text*: one line.
- *name*: at most 63 letters, digits, `.`, `_` and `-`. The first is a letter or a digit.
- *time*: `90s`, `20m`, `23h30m`, `2d` or `12:30:00`.
- *rate*: bytes per second, such as `500kB` or `20MB`.
- *map*: names of yours with values, such as `{big-box: 3}`.

The default is bold or in parentheses. A key without a default is optional, unless it is marked as
required. Errors show further limits of a value.

## At the top
"""

RULES = """\
## Rules between keys

isles checks the types and these rules before it starts anything:

- Give `training.max_steps`, `training.num_train_epochs` or `training.max_time`, but not both of the
  first two. `max_time` alone needs `lr_scheduler_type: constant`.
- `training.warmup_steps` is smaller than `training.max_steps`. `training.decay_steps` needs
  `lr_scheduler_type: wsd`, and the decay must begin after the warm-up.
- `training.global_batch_size` is at least the number of data-parallel ranks. If
  `training.micro_batch_size` is a number, the batch size is a multiple of this number, and with
  `balance: even` of this number times the ranks.
- A shape shipped with isles needs `model.init: scratch`, and `tokenizer.train_vocab_size` or
  `tokenizer.name_or_path`. `tokenizer.train_vocab_size` also needs `model.init: scratch`.
- Either every source has a `weight`, or no source has one. A `fake` source must be the only source.
- In `strategy`, `shard_size` needs `HYBRID_SHARD`, `cp_method` needs `cp_size`, `pp_schedule` needs
  `pp_size`, and `nvme_path` needs an offload to nvme. The keys that only ddp has need `tp_size: 1`
  and `pp_size: 1`.
- The number of ranks is a multiple of `tp_size` x `cp_size` x `pp_size`. `cp_size` divides
  `data.seq_length`, and needs `attn_implementation: sdpa`. `pp_size` does not support `fp16-mixed`.
- `offload_param` and an offload of the optimizer to nvme need `zero_stage: 3`. An offload to nvme
  needs `nvme_path`. `deepspeed` supports neither `muon` nor `bf16-true`.

The next rules need the model's `config.json`. If the file is not on this machine, the ranks check
them:

- `data.seq_length` is at most the model's `max_position_embeddings`.
- `tp_size` divides the model's attention heads, key-value heads and `intermediate_size`. With
  `cp_method: ulysses`, `cp_size` divides the key-value heads of each tensor-parallel rank.
- With `pp_size`, the model has a layer for every stage. With `tp_size` too, it has a separate
  output head (no `tie_word_embeddings`).
- `tp_size`, `cp_size` and `pp_size` need a [model type](models.md#models-that-train) that supports
  them. `fsdp` without these keys, and `deepspeed`, can shard any model.
- With rotary scaling of type `longrope`, `data.seq_length` is at most the model's
  `original_max_position_embeddings`, unless every sample is full, as with packed text.

The ranks also check that a run of `num_train_epochs` has at least `warmup_steps` steps, plus
`decay_steps` with `wsd`.

## Resuming with other values

If you change a value that affects the weights, isles [lets you
choose](stop-and-resume.md#changed-values) between the old value, a new run, and the new value. A
new length affects the weights in two cases:

- The run becomes shorter.
- The run becomes longer, and this changes the learning rate of the next step: with `linear` and
  `cosine` after the warm-up, with `wsd` after the decay has begun. The error shows both rates.

In all other cases you may lengthen a run. You may also change these keys:
"""


def write() -> str:
    """The whole reference."""
    schema = keys.tree()
    top = {key: node for key, node in keys.children(schema).items() if _section(node) is None}
    parts = [HEAD, *_table(top)]
    for key, node in keys.children(schema).items():
        parts += _section_text(key, node)
    parts += ["", *_shapes(), "", RULES + _free_keys()]
    return "\n".join(parts).rstrip() + "\n"


def _section(node: keys.Schema) -> keys.Schema | None:
    """The section that a key holds, or that the items of its list are; None for a value."""
    inner = keys.items(node) or node
    return inner if keys.is_section(inner) else None


def _section_text(path: str, node: keys.Schema) -> Iterator[str]:
    section = _section(node)
    if section is None:
        return
    yield f"\n## `{path}`\n"
    is_list = keys.items(node) is not None
    yield _sentence(node) + (" A list: each item starts with `- `." if is_list else "")
    yield ""
    name, inside = path.rpartition(".")[2], keys.children(section)
    top = _section(keys.children(keys.tree()).get(name, {}))
    if "." in path and top is not None and keys.by_kind(top) == keys.by_kind(section) != {}:
        yield f"It has the keys of [`{name}`](#{name})."
        return
    if len(keys.by_kind(section)) > 1:
        given = node.get("default")
        yield from _kinds_text(section, path, given["kind"] if isinstance(given, dict) else None)
        return
    yield from _table({k: n for k, n in inside.items() if _section(n) is None})
    for key, child in inside.items():
        yield from _section_text(f"{path}.{key}", child)


def _kinds_text(section: keys.Schema, path: str, default: object) -> Iterator[str]:
    """The keys of a section that comes in kinds, under the kinds that have them."""
    forms = keys.by_kind(section)
    yield "| kind | Description |"
    yield "|---|---|"
    for kind, form in forms.items():
        mark = " (default)" if kind == default else ""
        yield f"| `{kind}`{mark} | {_sentence(form)} |"
    kinds: dict[str, list[tuple[keys.Schema, list[str]]]] = {}
    for kind, form in forms.items():
        for key, node in keys.children(form).items():
            equal = (names for other, names in kinds.setdefault(key, []) if other == node)
            names = next(equal, None)
            if names is None:
                kinds[key].append((node, [kind]))
            else:
                names.append(kind)
    groups: dict[tuple[str, ...], dict[str, keys.Schema]] = {}
    for key, found in kinds.items():
        for node, names in found:
            if key != "kind":
                groups.setdefault(tuple(names), {})[key] = node
    for names, nodes in sorted(groups.items(), key=lambda group: -len(group[0])):
        yield f"\n### {' or '.join(f'`kind: {kind}`' for kind in names)}\n"
        yield from _table(nodes)
        for key, node in nodes.items():
            # A page that the description links to has the keys.
            if (inner := _section(node)) is not None and ".md)" not in _sentence(node):
                yield f"\nKeys of `{path}.{key}`:\n"
                yield from _table(keys.children(inner))


def _table(nodes: dict[str, keys.Schema]) -> Iterator[str]:
    yield "| Key | Type (default) | Description |"
    yield "|---|---|---|"
    for key, node in nodes.items():
        words, default = _type(node), _default(node)
        if default not in ("`null`", "`[]`", "`{}`") and f"**{default}**" not in words:
            words += f" ({default})"
        cells = (f"`{key}`", words, _sentence(node))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(node: keys.Schema) -> str:
    """The type of a key in a few words. `null` only if it is not also the default."""
    words: list[str] = []
    for option in _options(node):
        if option.get("type") == "null":
            continue
        choices = [f"`{choice}`" for choice in keys.literals(option)]
        bold = [f"**{choice}**" if choice == _default(node) else choice for choice in choices]
        word = ", ".join(bold) or _word(option)
        words += [word] if word not in words else []
    if "null" in keys.value_types(node) and _default(node) != "`null`":
        words.append("`null`")
    return " or ".join(words)


def _word(option: keys.Schema) -> str:
    if (own := option.get("x-isles-type")) is not None:
        return OWN_TYPES[own]
    if (inner := keys.named(option)) is not None:
        return f"map of {_type(inner)}"
    if option.get("type") == "array":
        return f"list of {_type(option['items'])}"
    if keys.is_section(option):
        return "section"
    if option.get("pattern") == NAME:
        return "name"
    limits = [
        f"{sign}{option[limit]}"
        for limit, sign in LIMITS
        if 1e-3 < option.get(limit, 0) < 1000 or option.get(limit) == 0
    ]
    return " ".join((TYPES.get(option.get("type", ""), "any value"), *limits))


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
    """The docstring of a field or class on one line, with links to the pages that it names."""
    text = " ".join(str(node["description"]).split())
    return re.sub(r"docs/([\w-]+)\.md", r"[\1](\1.md)", text)


def _shapes() -> Iterator[str]:
    yield "## Shapes shipped with isles\n"
    yield "Llama architectures for `model.name_or_path` with `init: scratch`. The parameters"
    yield "include this vocabulary. A tokenizer that isles trains has its own vocabulary size.\n"
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


def _free_keys() -> str:
    from isles.config.resume import _FREE_KEYS, _FREE_SECTIONS, _ROUNDING

    order = [".".join(map(str, path)) for path in keys.all_paths()]
    free = [f"`{key}`" for key in order if key in _FREE_KEYS]
    sections = (f"`{section}*`" for section in _FREE_SECTIONS if section[:-1] not in _FREE_KEYS)
    for section in sections:
        bound = [f"`{key}`" for key in _ROUNDING if key.startswith(section.strip("`*"))]
        free.append(section + (f" (except {' and '.join(bound)})" if bound else ""))
    return ", ".join(free) + ".\n"


if __name__ == "__main__":
    assert set(keys.children(keys.tree())) == set(RunConfig.model_fields)
    if "--check" in sys.argv:
        sys.exit(TARGET.read_text(encoding="utf-8") != write())
    TARGET.write_text(write(), encoding="utf-8")
