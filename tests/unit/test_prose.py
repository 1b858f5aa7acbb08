"""Text stays easy to read: habits of tests/prose.py become rarer, never more frequent."""

from __future__ import annotations

import warnings

from tests import prose


def test_no_part_has_more_habits_than_before() -> None:
    now, most = prose.counts(), prose.allowed()
    more = {
        part: f"{count}, and {most.get(part, 0)} are allowed"
        for part, count in now.items()
        if count > most.get(part, 0)
    }
    assert not more, f"{more}: `python -m tests.prose PART` lists them, docs/STYLE.md has the rules"
    fewer = [part for part, count in most.items() if now.get(part, 0) < count]
    if fewer:
        warnings.warn(
            f"fewer habits in {', '.join(fewer)}: `python -m tests.prose --lower`", stacklevel=1
        )


def test_habits_are_found_in_text_and_not_in_code() -> None:
    def found(text: str) -> list[str]:
        return sorted(hit.habit for hit in prose._hits("docs", "a.md", 1, prose._prose(text)))

    assert found("A disk on\nwhich nobody goes on.") == ["relative", "verb"]
    assert found("Run `isles` so that it goes\non.\n\n```sh\nwhat is anew\n```\n") == ["verb"]
    assert found("For training a model.") == ["begin"]
    assert not found("Run isles. If it stops, the same command resumes the run.")
