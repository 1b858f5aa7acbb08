"""Checks what a tokenizer.json does with a text before any library runs it.

The steps are a program: four steps that each replace a letter by ten thousand letters turn one
letter into 10^16. So the growth of a text by all steps together has a limit.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isles.config.foreign import MAX_JSON_BYTES, read_bytes

MOST_GROWTH = 100.0
"""How many times as long a text may become. The known tokenizers stay below 10."""

_CHARSMAP_BYTES = 40
"""The longest replacement in the character maps of SentencePiece has 33 bytes."""

_MOST_STEPS = 500
_MOST_TEXT = 50_000
"""Characters in the patterns and contents of all steps of a part. The check puts each text through
each step, so more characters would take minutes."""
_AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")


def check_steps(path: Path) -> None:
    """Check a tokenizer.json.

    Raises:
        OSError: it cannot be read.
        ValueError: a text could become more than MOST_GROWTH times as long, or the file is not a
            tokenizer.json.
    """
    try:
        found = json.loads(read_bytes(path, MAX_JSON_BYTES))
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        steps = list(_steps(found.get(part)))
        if len(steps) > _MOST_STEPS:
            raise ValueError(f"its {part} has {len(steps)} steps, more than {_MOST_STEPS}")
        if (size := sum(map(len, map(_texts, steps)))) > _MOST_TEXT:
            what = f"the steps of its {part} have {size} characters of text"
            raise ValueError(f"{what}, more than {_MOST_TEXT}")
        if (growth := _growth(steps)) > MOST_GROWTH:
            raise ValueError(
                f"its {part} makes a text more than {MOST_GROWTH:.0f} times as long "
                f"({min(growth, 1e300):.3g} times)"
            )
    model = found.get("model")
    for key in _AFFIXES:
        if isinstance(model, dict) and len(str(model.get(key) or "")) > MOST_GROWTH:
            raise ValueError(f"its model adds {key} of more than {MOST_GROWTH:.0f} characters")


def _steps(part: object) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict):
        yield part
        for key in ("normalizers", "pretokenizers", "decoders"):
            below = part.get(key)
            for each in below if isinstance(below, list) else ():
                yield from _steps(each)


def _growth(steps: list[dict[str, Any]]) -> float:
    # What becomes of each text that a step looks for or writes, as a step may find what another has
    # written. A regex is not tried: it counts as if it matched between any two letters.
    seeds = {"e"}
    for step in steps:
        seeds |= {text for text in (_pattern(step)[0], _text(step, "content")) if text}
    # Character maps may be large, so each is read once.
    maps = [_map_growth(step) if step.get("type") == "Precompiled" else 1.0 for step in steps]
    return max(_grown(seed, steps, maps) / len(seed) for seed in seeds)


def _grown(seed: str, steps: list[dict[str, Any]], maps: list[float]) -> float:
    text, factor = seed, 1.0
    for step, map_growth in zip(steps, maps, strict=True):
        factor *= map_growth
        match step.get("type"):
            case "Replace":
                content, (pattern, is_regex) = _text(step, "content"), _pattern(step)
                if is_regex:
                    factor *= 1 + len(content)
                    text += content
                elif pattern:
                    length = len(text) + text.count(pattern) * (len(content) - len(pattern))
                    if length > MOST_GROWTH * len(seed):
                        return length * factor
                    text = text.replace(pattern, content)
                else:
                    factor *= 1 + len(content)
            case "Prepend":
                text = _text(step, "prepend") + text
        if len(text) * factor > MOST_GROWTH * len(seed):
            break
    return len(text) * factor


def _text(step: dict[str, Any], key: str) -> str:
    value = step.get(key)
    return value if isinstance(value, str) else ""


def _texts(step: dict[str, Any]) -> str:
    # All texts that a step looks for or writes, without its character map.
    return _pattern(step)[0] + _text(step, "content") + _text(step, "prepend")


def _pattern(step: dict[str, Any]) -> tuple[str, bool]:
    pattern = step.get("pattern")
    if not isinstance(pattern, dict):
        return "", False
    regex = pattern.get("Regex")
    return (regex, True) if isinstance(regex, str) else (_text(pattern, "String"), False)


def _map_growth(step: dict[str, Any]) -> float:
    # A length, a trie of that many bytes, and the replacements, each ended by a zero.
    try:
        data = base64.b64decode(_text(step, "precompiled_charsmap"))
    except ValueError:
        return 1.0  # the library says so
    texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
    return max(1.0, max(map(len, texts)) / _CHARSMAP_BYTES)
