"""Markdown as the tests read it: fenced blocks, commands, links, anchors."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cyclopts import App

from isles.cli import app
from isles.launch.verbs import normalise_overrides

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
EXAMPLES = tuple(path for path in sorted((ROOT / "examples").iterdir()) if path.is_dir())
EXAMPLE_PAGES = tuple(page for folder in EXAMPLES for page in sorted(folder.glob("*.md")))
SHELLS = ("sh", "bash", "console")
_FENCE = re.compile(r"^(\s*)(`{3,})(\w*)\s*$")
_MARK = re.compile(r"^<!-- (needs|seen|not isles): (\S.*?) -->$")
_HEADING = re.compile(r"^(#{1,6}) (.*)$", re.M)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^()\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Args:
        line: that of its fence, from 1.
        language: as the fence names it; empty: not named.
        text: what stands in it, without the indentation of the fence.
        mark: what an HTML comment before it says: `needs: …` that is not here, `seen: …` by these
            tests, or `not isles: …`, whose it is.
    """

    line: int
    language: str
    text: str
    mark: str

    @property
    def kind(self) -> str:
        """`needs`, `seen`, `not isles`, or nothing."""
        return self.mark.partition(": ")[0]

    @property
    def reason(self) -> str:
        """What the mark says."""
        return self.mark.partition(": ")[2]

    @property
    def lines(self) -> list[str]:
        """What is typed in it."""
        return commands(self.text, prompts=self.language == "console")


@cache
def blocks(path: Path) -> tuple[Block, ...]:
    """The fenced blocks of a document, in their order."""
    return tuple(_blocks(path.read_text(encoding="utf-8").splitlines()))


def _blocks(lines: list[str]) -> Iterator[Block]:
    start, fence, mark, body = 0, None, "", list[str]()
    comment = ""
    for number, line in enumerate(lines, start=1):
        match = _FENCE.match(line)
        if fence is None:
            # A comment may go over several lines.
            is_comment = comment or line.lstrip().startswith("<!-- ")
            comment = f"{comment} {line.strip()}".strip() if is_comment else ""
            if comment and "-->" not in comment:
                continue
            if match:
                start, fence, body = number, match, []
            elif found := _MARK.search(comment):
                mark = f"{found[1]}: {found[2]}"
            elif line.strip():
                mark = ""
            comment = ""
        elif match and match[2] == fence[2] and not match[3]:
            yield Block(start, fence[3], "\n".join(body) + "\n", mark)
            fence, mark = None, ""
        else:
            indent = len(fence[1])
            body.append(line[indent:] if line[:indent].isspace() else line)
    assert fence is None, f"the fence of line {start} is not closed"


def commands(text: str, *, prompts: bool = False) -> list[str]:
    """The lines of a shell block, each with those that continue it, without comments.

    Args:
        text: the block.
        prompts: only lines behind `$ ` are typed; the others are what is printed.
    """
    found: list[str] = []
    is_open = False
    for raw in text.splitlines():
        line = raw.strip()
        if not is_open:
            if prompts and not line.startswith("$ "):
                continue
            line = line.removeprefix("$ ") if prompts else line
            if not line or line.startswith("#"):
                continue
            found.append("")
        is_open = line.endswith("\\")
        found[-1] = f"{found[-1]} {line.removesuffix(chr(92)).strip()}".strip()
    return found


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
        is_open = found[-1].endswith("\\") or not _is_whole(found[-1])
    return found


def _is_whole(text: str) -> bool:
    return subprocess.run(["bash", "-nc", text], check=False, capture_output=True).returncode == 0


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
    """What is wrong with the words after `isles`; empty: they are understood, as they stand."""
    tokens = normalise_overrides(words)
    try:
        _, bound, _ = app.parse_args(tokens, exit_on_error=False, print_error=False)
    except Exception as error:  # cyclopts has many, and each says what it is about
        return str(error)
    values = [
        value for many in bound.arguments.values() if isinstance(many, tuple) for value in many
    ]
    keys = [value.partition("=")[0] for value in values if "=" in str(value)]
    unknown = [key for key in keys if not is_key(key)]
    return f"no such key: {', '.join(unknown)}" if unknown else ""


def is_key(dotted: str) -> bool:
    """Whether a run file has this key; numbers of items, and `clusters`, may be left out."""
    return _leads(dotted.split(".")) or _leads(["clusters", *dotted.split(".")])


def _leads(parts: list[str]) -> bool:
    from isles.config import keys

    node: keys.Schema | None = keys.run_schema()
    for part in parts:
        assert node is not None
        if (item := keys.items(node)) is not None:
            node = item
            if part.isdigit():
                continue
        node = keys.children(node).get(part) or keys.named(node)
        if node is None:
            return False
    return True


def flags_of(*verbs: str) -> set[str]:
    """The flags of a command of isles, such as `checkpoint`, `export`."""
    command: App = app
    for verb in verbs:
        command = command[verb]
    if command.default_command is None:
        return {"--help"}
    collection = command.assemble_argument_collection(parse_docstring=False)
    return {name for argument in collection for name in argument.names} | {"--help"}


def named_in_text(text: str) -> Iterator[tuple[str, str]]:
    """Commands of isles between backticks, each with what it names that there is not."""
    verbs = {name for name in app if not name.startswith("-")}
    for code in re.findall(r"`([^`\n]+)`", text):
        words = code.split()
        if len(words) < 2 or words[0] != "isles" or not re.fullmatch(r"[a-z][a-z-]*,?", words[1]):
            continue
        verb = words[1].rstrip(",")
        if verb not in verbs:
            yield code, verb
            continue
        below = [verb]
        while len(words) > len(below) + 1 and words[len(below) + 1] in set(_under(below)):
            below.append(words[len(below) + 1])
        known = flags_of(*below)
        for word in words[len(below) + 1 :]:
            flag = word.partition("=")[0]
            if flag.startswith("-") and "." not in flag and flag != "-" and flag not in known:
                yield code, flag


def _under(verbs: list[str]) -> Iterator[str]:
    command: App = app
    for verb in verbs:
        command = command[verb]
    yield from (name for name in command if not name.startswith("-"))


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors of a document's headings, as they are made where its text is shown."""
    text = path.read_text(encoding="utf-8")
    outside = re.sub(r"^ *(`{3,})\w*\n.*?^ *\1 *$", "", text, flags=re.M | re.S)
    names = [slug(title) for _, title in _HEADING.findall(outside)]
    seen: Counter[str] = Counter()
    found = set()
    for name in names:
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return frozenset(found)


def slug(title: str) -> str:
    """The anchor of a heading: small letters, digits and dashes."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
    return re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")


def broken_links(path: Path) -> list[str]:
    """Links of a document that lead to no file of the repository, or to no heading in it."""
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
