"""The page docs/troubleshooting.md, with its paragraphs as text for a terminal."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from functools import cache
from importlib import resources

_ID = re.compile(r"`([a-z]+(?:\.[a-z]+)*)`")
_HEAD = re.compile(r"\*\*(.+?)\*\*", re.S)
_HEADING = re.compile(r"(#+) (.+)")
_EXIT_CODE = re.compile(r"^\| (\d+) \| (.+?) \| (.+?) \|$", re.M)
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
_CODE = re.compile(r"`[^`]*`")
_ID_WIDTH = 22

RENAMED = {
    "hub.access": "huggingface.access",
    "hub.licence": "huggingface.license",
    "hub.upload": "huggingface.upload",
}
"""Ids of earlier versions, with their present names."""
_NO_BREAK = "\N{NO-BREAK SPACE}"


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A symptom, its meaning, and its fix.

    Args:
        chapter: heading of the part of the page.
        ids: ids of errors and of findings of `isles check`. Empty: only the symptom identifies it.
        head: the symptom, in Markdown.
        blocks: the rest of the paragraph, in Markdown: text and lists.
    """

    chapter: str
    ids: tuple[str, ...]
    head: str
    blocks: tuple[str, ...]

    def text(self, width: int) -> str:
        """The whole paragraph for a terminal of `width` columns."""
        body = [_filled(block, width) for block in self.blocks]
        return "\n\n".join([_filled(self.head.rstrip("."), width), *body])


@cache
def paragraphs() -> tuple[Paragraph, ...]:
    """All paragraphs of the page, in order."""
    found: list[Paragraph] = []
    chapter, is_open = "", False
    for block in re.split(r"\n{2,}", _page()):
        if heading := _HEADING.match(block):
            chapter = heading[2] if len(heading[1]) == 2 else chapter
            is_open = False
        elif head := _HEAD.match(block):
            body = block[head.end() :].strip()
            found.append(Paragraph(chapter, tuple(_ID.findall(head[1])), head[1], (body,)))
            is_open = True
        elif is_open and block.startswith("- "):
            last = found.pop()
            blocks = (*last.blocks, block)
            found.append(Paragraph(last.chapter, last.ids, last.head, blocks))
        else:
            is_open = False
    return tuple(found)


def by_id() -> dict[str, Paragraph]:
    """Paragraphs of all ids."""
    return {id: paragraph for paragraph in paragraphs() for id in paragraph.ids}


def exit_codes() -> dict[str, tuple[str, str]]:
    """Meaning of every exit code, and its chapter or fix."""
    return {code: (what, then) for code, what, then in _EXIT_CODE.findall(_page())}


def exit_code_text(code: str, width: int) -> str:
    """Meaning of an exit code, and the ids of its chapter, for `width` columns."""
    what, then = exit_codes()[code]
    link = _LINK.search(then)
    chapter = link[1] if link else ""
    rest = [_chapter_text(chapter, width)] if link else [f"then: {then}"]
    return "\n\n".join([f"exit code {code}: {what}", *rest])


def list_text(width: int) -> str:
    """All ids, each with the first words of its paragraph, for `width` columns."""
    chapters = dict.fromkeys(paragraph.chapter for paragraph in paragraphs() if paragraph.ids)
    return "\n\n".join(_chapter_text(chapter, width) for chapter in chapters)


def _chapter_text(chapter: str, width: int) -> str:
    rows = [row for p in paragraphs() if p.chapter == chapter for row in _rows(p, width)]
    return "\n".join([chapter, *rows])


def _rows(paragraph: Paragraph, width: int) -> list[str]:
    if not paragraph.ids:
        return []
    first, *others = paragraph.ids
    symptom = re.sub(r"^[,:;. ]+", "", _ID.sub("", paragraph.head).replace(" ,", ""))
    words = _plain(f"{symptom} {paragraph.blocks[0]}".strip())
    short = textwrap.shorten(words, max(20, width - _ID_WIDTH), placeholder=" …")
    rows = [f"{first:<{_ID_WIDTH}}{short}"]
    return rows + [f"{other:<{_ID_WIDTH}}as {first}" for other in others]


def _page() -> str:
    return (resources.files("isles.facts") / "troubleshooting.md").read_text(encoding="utf-8")


def _filled(block: str, width: int) -> str:
    # Wrap a block of Markdown. Text between backticks stays on one line.
    lines: list[str] = []
    for item in re.split(r"\n(?=- )", block):
        text = " ".join(_plain(item).split())
        lines += textwrap.wrap(
            _CODE.sub(lambda match: match[0].replace(" ", _NO_BREAK), text),
            width,
            subsequent_indent="  " if text.startswith("- ") else "",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines).replace(_NO_BREAK, " ")


def _plain(text: str) -> str:
    # Links as text, with the name of the page if it is another page.
    def words(match: re.Match[str]) -> str:
        label, page, _ = match.groups()
        if not page:
            return str(label)
        return f"docs/{page}" if label == page else f"{label} (docs/{page})"

    return _LINK.sub(words, text)
