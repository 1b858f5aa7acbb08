"""Habits that make text hard to read: how often each part of the project has them.

Pages are the Markdown files, by folder. Of the code, docstrings are the strings in triple quotes
and messages all others with four words or more, by package. `tests/prose.json` has the numbers
that are allowed; docs/STYLE.md has the rules.

    python -m tests.prose [PART]     list the hits, such as those of docs or of src/agent messages
    python -m tests.prose --lower    write numbers that have fallen into tests/prose.json
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from tests.documents import ALL_PAGES, ROOT

ALLOWED = ROOT / "tests" / "prose.json"
SRC = ROOT / "src" / "isles"
# May be long: they are looked things up in, not read.
REFERENCES = {
    *("architecture", "benchmarks", "coming-from", "run-directory", "run-file", "security"),
    "troubleshooting",
}
MOST_WORDS = 1200
HABITS = {
    "relative": r"\b(?:of|by|with|in|to|from|for|at|on|through|behind|beside) (?:which|whom)\b",
    "what": r"\b[Ww]hat (?:is|are|was|were|has|have|had|it|they|comes|came|can|cannot|must|may|"
    r"the \w+ (?:has|have|had|is|are|was|were))\b(?![^.]*\?)",
    "one that": r"\b(?:one|ones|that|those) (?:that|which|who|whose|of)\b|\bwho(?:so|m)?ever\b",
    "Of first": r"(?:^|[.;:] )Of (?:a|an|all|the|each|every|many|several|one|X|[a-z]+)\b",
    "where": r"\bwhere (?:there|it|they|none|nothing|nobody|no|not|all|each) (?:is|are|was|has|"
    r"does|do|can|fits?|ha(?:s|ve)|\w+)\b|\b(?:except|but|only) where\b",
    "verb": r"\b(?:go|goes|going|went|gone) on\b|\b(?:lies?|lay|stands?|stood) (?:in|on|at|below|"
    r"behind|beside|between|there|here)\b|\bheard?s? (?:of|from|nothing)\b|\bis heard\b"
    r"|\bmend(?:s|ed|ing)?\b|\bdial(?:s|led|ing)?\b|\bto be had\b|\bbears? (?:a|the|some|it)\b"
    r"|\btypes? (?:it|by|the line)\b|\bbegin(?:s|ning)? anew\b",
    "so many": r"\bso (?:many|much|few|long|often|old)\b(?! as to)|\bas (?:many|long|often) as\b",
    "omitted": r"\b(?:left|leaves?|leaving) (?:it |them |this )?out\b"
    r"|\b(?:null|none|empty|0): (?!\d|error)[a-z]+",
    "agentless": r"\b(?:is|are|was|were|be) (?:said|told|named|tried|heard|meant|looked)\b",
    "is no": r"\b(?:is|are|was|were) (?:no|none)\b(?! (?:longer|more|different|way|need))",
    "archaic": r"\b(?:anew|besides?|thereby|hence|whence|whither|in vain|in words|meanwhile|"
    r"all the same|now and then|by hand|of (?:its|their|his|your) own|nobody else)\b",
    "private": r"\b(?:rungs?|wings?|sign of life|ladder|cards?|by its name alone)\b",
    "begin": r"^For (?:who(?:m|so)?ever|\w+ing\b)",
}
_HABITS = {name: re.compile(pattern, re.M) for name, pattern in HABITS.items()}
_NO_PROSE = re.compile(
    r"^---\n.*?^---\n|<!--.*?-->|^[ ]*(```|~~~).*?^[ ]*\1|`[^`\n]*`|\]\([^)]*\)", re.M | re.S
)
_VALUE = re.compile(r"`[^`\n]*`|\{[^{}\n]*\}|%[-\d.]*[sdrf]")
# A string goes over several lines as several literals.
_JOINT = re.compile(r'(?<!")"\s*\n\s*[fr]?"(?!")')
_LITERAL = re.compile(
    r"#[^\n]*" r'|"""(?P<doc>.*?)"""' r'|"(?P<text>(?:[^"\\\n]|\\.)*)"' r"|'(?:[^'\\\n]|\\.)*'",
    re.S,
)


class Hit(NamedTuple):
    """A habit in a part of the project, with its place and the words around it."""

    part: str
    habit: str
    where: str
    words: str


def hits() -> Iterator[Hit]:
    """Each hit in pages and in the code."""
    for page in ALL_PAGES:
        name = page.relative_to(ROOT)
        part = name.parts[0] if len(name.parts) > 1 else "README.md"
        yield from _hits(part, str(name), 1, _prose(page.read_text(encoding="utf-8")))
    for path in sorted(SRC.rglob("*.py")):
        name = path.relative_to(SRC)
        part = f"src/{name.parts[0]}" if len(name.parts) > 1 else "src"
        text = _JOINT.sub(lambda match: " " * match[0].count("\n"), path.read_text("utf-8"))
        for match in _LITERAL.finditer(text):
            doc, message = match["doc"], match["text"]
            line = text.count("\n", 0, match.start()) + 1
            words = _VALUE.sub("X", doc if doc is not None else message or "")
            if doc is not None:
                yield from _hits(f"{part} docstrings", f"src/isles/{name}", line, words)
            elif words.count(" ") >= 3:
                yield from _hits(f"{part} messages", f"src/isles/{name}", line, words)


def counts() -> dict[str, int]:
    """How many hits each part has, and how many words pages have above the limit of a page."""
    found = Counter(hit.part for hit in hits())
    longer = 0
    for page in ALL_PAGES:
        if page.stem not in REFERENCES:
            lines = _prose(page.read_text(encoding="utf-8")).splitlines()
            words = sum(len(line.split()) for line in lines if not line.startswith("|"))
            longer += max(0, words - MOST_WORDS)
    return {**dict(sorted(found.items())), "words above the limit of a page": longer}


def allowed() -> dict[str, int]:
    """The numbers that are allowed."""
    numbers: dict[str, int] = json.loads(ALLOWED.read_text(encoding="utf-8"))
    return numbers


def _prose(text: str) -> str:
    """A page without code, comments and targets of links, line by line."""
    return _NO_PROSE.sub(lambda match: "X" + "\n" * match[0].count("\n"), text)


def _hits(part: str, name: str, first: int, text: str) -> Iterator[Hit]:
    flat = text.replace("\n", " ")  # a phrase may be broken at the end of a line
    for habit, pattern in _HABITS.items():
        for match in pattern.finditer(text if habit == "begin" else flat):
            line = first + text.count("\n", 0, match.start())
            around = " ".join(flat[max(0, match.start() - 40) : match.end() + 40].split())
            yield Hit(part, habit, f"{name}:{line}", around)


def main(words: list[str]) -> int:
    """List the hits, or lower the numbers that are allowed."""
    if words != ["--lower"]:
        part = " ".join(words)
        for hit in hits():
            if hit.part.startswith(part):
                sys.stdout.write(f"{hit.where} [{hit.habit}] … {hit.words} …\n")
        return 0
    old, new = (allowed() if ALLOWED.is_file() else {}), counts()
    numbers = {name: min(number, old.get(name, number)) for name, number in new.items()}
    ALLOWED.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
