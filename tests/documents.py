"""Markdown as the tests read it: fenced blocks, commands, links, anchors."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from cyclopts import App
from markdown_it import MarkdownIt

from isles.cli import app
from isles.config import keys
from isles.launch.verbs import normalize_overrides
from tests.deadline import run_program

ROOT = Path(__file__).parents[1]
EXAMPLES = tuple(path for path in sorted((ROOT / "examples").iterdir()) if path.is_dir())
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
ALL_PAGES = (*PAGES, *(page for folder in EXAMPLES for page in sorted(folder.glob("*.md"))))
SHELLS = ("sh", "bash", "console")
_MARK = re.compile(r"<!-- (needs|seen|not isles): (\S.*?) -->")
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^()\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Args:
        line: that of its fence, from 1.
        language: as the fence names it; empty: not named.
        text: its lines, without the indentation of the fence.
        kind: of the HTML comment before it: `needs: …` that is not here, `seen: …` by these tests,
            `not isles: …`, another program's; empty: there is none.
        reason: the rest of that comment.
    """

    line: int
    language: str
    text: str
    kind: str = ""
    reason: str = ""

    @property
    def is_shell(self) -> bool:
        """Whether its lines are typed."""
        return self.language in SHELLS

    @property
    def lines(self) -> list[str]:
        """The lines that are typed, each with those that continue it."""
        return commands(self.text, prompts=self.language == "console")


@cache
def blocks(path: Path) -> tuple[Block, ...]:
    """The fenced blocks of a document, in their order."""
    text = path.read_text(encoding="utf-8")
    lines, found, mark = text.splitlines(), [], ("", "")
    for token in MarkdownIt().parse(text):
        if token.type == "fence":
            start, end = token.map or (0, 0)
            assert lines[end - 1].strip() == token.markup, f"{path}:{start + 1} is not closed"
            found.append(Block(start + 1, token.info, token.content, *mark))
        if token.type == "html_block":
            comment = _MARK.fullmatch(" ".join(token.content.split()))
            mark = (comment[1], comment[2]) if comment else ("", "")
        elif token.content:
            mark = ("", "")
    return tuple(found)


def commands(text: str, *, prompts: bool = False) -> list[str]:
    """The lines of a shell block, each with those that continue it, without comments.

    Args:
        text: the block.
        prompts: only lines behind `$ ` are typed; the others are output.
    """
    lines = [line.strip() for line in re.sub(r"\s*\\ *\n\s*", " ", text).splitlines()]
    if prompts:
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [line for line in lines if line and not line.startswith("#")]


def typed_lines(block: Block) -> list[str]:
    """The lines of a shell block as a shell takes them: a loop, or an open quotation, is one."""
    prefix = "$ " if block.language == "console" else ""
    found: list[str] = []
    is_open = False
    for line in block.text.splitlines():
        if is_open:
            found[-1] = f"{found[-1]}\n{line}"
        elif line.startswith(prefix) and line.strip() and not line.startswith("#"):
            found.append(line.removeprefix(prefix))
        else:
            continue
        is_open = found[-1].endswith("\\") or run_program(["bash", "-nc", found[-1]]).returncode > 0
    return found


def simple_commands(line: str) -> list[list[str]]:
    """The words of each program that a line starts, without redirections and variables."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>·")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    found: list[list[str]] = [[]]
    skips = False
    for word in lexer:
        if word in ("|", "||", "&&", "&", ";", "·"):
            found.append([])
        elif word in ("<", ">", ">>", "<<<"):
            skips = True
        elif skips:
            skips = False
        elif found[-1] or not re.match(r"\w+=", word):
            found[-1].append(word)
    return [words for words in found if words]


def isles_fault(words: list[str]) -> str:
    """What is wrong with the words after `isles`; empty: they are understood."""
    tokens = normalize_overrides(words)
    try:
        _, bound, _ = app.parse_args(tokens, exit_on_error=False, print_error=False)
    except Exception as error:  # cyclopts has many
        return str(error)
    values = [
        value for many in bound.arguments.values() if isinstance(many, tuple) for value in many
    ]
    given = [value.partition("=")[0] for value in values if "=" in str(value)]
    unknown = [key for key in given if not is_key(key)]
    return f"no such key: {', '.join(unknown)}" if unknown else ""


def is_key(dotted: str) -> bool:
    """Whether a run file has this key; numbers of items, and `clusters`, may be left out."""
    known = {".".join(part for part in path if part != 0) for path in keys.all_paths()}
    name = ".".join(part for part in dotted.split(".") if not part.isdigit())
    return name in known or f"clusters.{name}" in known


def named_in_text(text: str) -> Iterator[tuple[str, str]]:
    """Commands of isles between backticks that name an unknown verb or flag, each with that."""
    for code in re.findall(r"`(isles [a-z][a-z-]*\b(?!:)[^`\n]*)`", text):
        words = code.replace(",", " ").split()[1:]
        command: App = app
        while words and words[0] in set(command) and not words[0].startswith("-"):
            command = command[words.pop(0)]
        if command is app:
            yield code, words[0]
            continue
        arguments = []
        if command.default_command is not None:
            arguments = list(command.assemble_argument_collection(parse_docstring=False))
        known = {"-", "--help", *(name for argument in arguments for name in argument.names)}
        flags = [word.partition("=")[0] for word in words if word.startswith("-")]
        yield from ((code, flag) for flag in flags if "." not in flag and flag not in known)


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors of a document's headings: small letters, digits and dashes."""
    tokens = MarkdownIt().parse(path.read_text(encoding="utf-8"))
    titles = [
        title.content for opening, title in pairwise(tokens) if opening.type == "heading_open"
    ]
    seen: Counter[str] = Counter()
    found = set()
    for title in titles:
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "").lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return frozenset(found)


def broken_links(path: Path) -> list[str]:
    """Links of a document to no file of the repository, or to no heading in it."""
    found = []
    for target in _LINK.findall(path.read_text(encoding="utf-8")):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        is_there = file.exists() and file.is_relative_to(ROOT)
        if not is_there or (anchor and anchor not in anchors(file)):
            found.append(target)
    return found
