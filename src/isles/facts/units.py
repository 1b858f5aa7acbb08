"""Durations, bytes, counts and untrusted text: parsing, and formatting for people."""

from __future__ import annotations

import re
from decimal import Decimal

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_CLOCK = re.compile(r"(?:(\d+)-)?(\d{1,3}):([0-5]\d):([0-5]\d)")
_PARTS = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d)")
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B")
_CONTROL = re.compile(
    "[\\x00-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ud800-\\udfff"
    "\\ufeff\\ufff9-\\ufffb\\U000e0000-\\U000e001f]"
    # Tags are invisible text. After a black flag they draw the flag of a region, which is an emoji.
    "|(?<![\\U0001f3f4\\U000e0020-\\U000e007f])[\\U000e0020-\\U000e007f]+"
)
"""Control characters, characters that change the direction of text and so reorder a line, line
separators, invisible text (tags, annotations), and lone surrogates, which no stream can encode."""


def parse_duration_s(text: str) -> float:
    """Seconds of `90s`, `1h30m`, `2d`, `hh:mm:ss`, or Slurm's `d-hh:mm:ss`.

    ValueError: the text is not a duration. The message lists the forms.
    """
    stripped = text.strip().lower()
    if clock := _CLOCK.fullmatch(stripped):
        days, hours, minutes, seconds = (int(group or 0) for group in clock.groups())
        return days * 86400.0 + hours * 3600.0 + minutes * 60.0 + seconds
    if stripped and not _PARTS.sub("", stripped).strip():
        return sum(float(number) * _UNITS_S[unit] for number, unit in _PARTS.findall(stripped))
    raise ValueError(f"{text!r} is not a duration: write 90s, 20m, 23h30m, 2d or 12:30:00")


def parse_bytes(text: str) -> float:
    """Bytes of `500kB`, `20MB`, `1.5GiB`: powers of 1000, or of 1024 with an i.

    ValueError: the text is not a number of bytes.
    """
    found = _BYTES.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a number of bytes: write 500kB, 20MB or 1.5GiB")
    base = 1024.0 if found[3] else 1000.0
    power: int = " KMGT".index(found[2].upper() or " ")
    return float(float(found[1]) * base**power)


def format_duration(seconds: float) -> str:
    """Duration as `47s`, `12m 05s`, `3h 20m` or `2d 04h`, with at most two units."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def write_duration(seconds: float) -> str:
    """Duration for a run file, without loss: `20m`, `23h30m`, `0.5s`."""
    if seconds != int(seconds):
        return f"{Decimal(repr(seconds)):f}s"
    whole = int(seconds)
    parts = ((whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "m"))
    text = "".join(f"{number}{unit}" for number, unit in parts if number)
    return f"{text}{whole % 60}s" if whole % 60 or not text else text


def format_bytes(size_bytes: float) -> str:
    """Bytes as `512 B`, `1.5 KiB`, `13.5 GiB`: powers of 1024."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_count(number: float) -> str:
    """Count as `812`, `4.1k`, `2.1M` or `8.0B`: powers of 1000, as usual for parameters."""
    value = float(number)
    for unit in ("", "k", "M", "B"):
        if abs(value) < 1000:
            return f"{value:.0f}" if not unit else f"{value:.1f}{unit}"
        value /= 1000
    return f"{value:.1f}T"


def plural(count: int, noun: str) -> str:
    """Count with its noun: `1 rank`, `2 ranks`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def printable(text: str, *, keep: str = "\n\t", longest: int | None = None) -> str:
    """Text that has no effect on a terminal: control characters as JSON escapes them (`\\u001b`).

    Characters that change the shape of nearby letters stay, because Persian, Indic scripts and
    emoji need them: joiners and non-joiners, variation selectors, no-break spaces, soft hyphens.
    Arabic and Hebrew need no marks, because each of their letters has a direction.

    Args:
        text: from any source.
        keep: control characters that stay as they are.
        longest: maximum length, characters; an ellipsis replaces the rest.
    """
    if longest is not None and len(text) > longest:
        text = text[: longest - 1] + "…"
    return _CONTROL.sub(lambda m: m[0] if m[0] in keep else _escaped(m[0]), text)


def _escaped(text: str) -> str:
    # As JSON: a character beyond the first 65536 is a pair of halves.
    halves = text.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{halves[i : i + 4]}" for i in range(0, len(halves), 4))
