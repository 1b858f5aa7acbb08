"""Command blocks of the pages that are not typed by tests/e2e/test_doc_blocks.py say why, truly.

`<!-- seen: … -->` names tests, or a script that `.ci/run` starts: what each line starts, its flags
and, of isles, its verbs must stand in a string of the test's module, or of a helper that this
imports. Or it names a page, on which the very same lines are typed. `<!-- needs: … -->` says what
is not here.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.documents import (
    EXAMPLE_PAGES,
    PAGES,
    ROOT,
    SHELLS,
    Block,
    blocks,
    simple_commands,
)
from tests.each import each
from tests.unit.test_requirements import functions_of

MARKED = [
    (page, block)
    for page in (*PAGES, *EXAMPLE_PAGES)
    if not page.is_symlink()
    for block in blocks(page)
    if block.language in SHELLS and block.mark
]
IDS = [f"{page.relative_to(ROOT)}:{block.line}" for page, block in MARKED]
GROUPS = ("checkpoint", "config", "data")
# What is no program of the line's own: it starts, shows or prepares another.
AROUND = {"cd", "bash", "python", "srun", "echo", "for", "do", "done", "export"}
# Blocks that nothing here can run. Each one more is one fewer that is known to work.
MOST_NEEDS = 21


def names_of(block: Block) -> list[str]:
    """Tests and scripts that a block's mark names."""
    return block.reason.split()


@cache
def text_of(name: str) -> str:
    """What runs when a test or a script runs: its module, and the helpers that this imports."""
    file = ROOT / name.partition("::")[0]
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        return text
    found = {file: text}
    waiting = [file]
    while waiting:
        for helper in imported(found[waiting.pop()]):
            if helper not in found:
                found[helper] = helper.read_text(encoding="utf-8")
                waiting.append(helper)
    return "\n".join(strings(source) for source in found.values())


def strings(source: str) -> str:
    """The strings of a module, without those that explain it; and the documents that it reads."""
    tree = ast.parse(source)
    said = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    found = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said
    ]
    seeds = set(re.findall(r"\bS\d(?=\.md\b)", "\n".join(found)))
    files = [ROOT / "tests" / "seeds" / f"{seed}.md" for seed in seeds]
    return "\n".join([*found, *(file.read_text(encoding="utf-8") for file in files)])


def imported(text: str) -> list[Path]:
    """The test helpers that a module imports."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    paths = [ROOT / f"{(node.module or '').replace('.', '/')}.py" for node in nodes]
    return [path for path in paths if path.is_relative_to(ROOT / "tests") and path.is_file()]


def wanted(words: list[str]) -> list[str]:
    """What must stand in a test that runs a command: its program, its verbs and its flags."""
    words = [Path(word).name if "/" in word and word[0] != "-" else word for word in words]
    words = words[next((n for n, word in enumerate(words) if word not in AROUND), len(words)) :]
    if not words:
        return []
    program, *rest = words
    flags = [word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)]
    if program == "isles":
        return [*rest[: 2 if rest[0] in GROUPS else 1], *flags]
    if program == "make":
        return [" ".join(words)]
    return [program, *flags]


def plain_line(line: str) -> str:
    """A line without the remark behind it."""
    return re.sub(r"\s+#.*", "", line)


def typed_on(name: str) -> set[str]:
    """The lines of a page that tests/e2e/test_doc_blocks.py types."""
    found = (block for block in blocks(ROOT / name) if block.language in SHELLS and not block.mark)
    return {plain_line(line) for block in found for line in block.lines}


def missing(block: Block) -> list[str]:
    """What of a block stands in none of the tests and pages that it names."""
    pages = [name for name in names_of(block) if name.endswith(".md")]
    typed = {line for name in pages for line in typed_on(name)}
    text = "\n".join(text_of(name) for name in names_of(block) if name not in pages)
    plain = text.replace("torch.distributed.run", "torchrun").replace("_", "-")
    return [
        f"{' '.join(words)}: {piece}"
        for line in block.lines
        if plain_line(line) not in typed
        for words in simple_commands(line)
        # A script that is named runs itself.
        if words[0] not in names_of(block)
        for piece in wanted(words)
        if not re.search(rf"(?<![\w-]){re.escape(piece.replace('_', '-'))}(?![\w-])", plain)
    ]


@each(("page", "block"), MARKED, ids=IDS)
def test_a_mark_is_true(page: Path, block: Block) -> None:
    assert block.kind in ("seen", "needs", "not isles")
    if block.kind != "seen":
        assert len(block.reason.split()) > 1, "a reason, in words"
        return
    for name in names_of(block):
        file, _, function = name.partition("::")
        assert (ROOT / file).is_file(), f"there is no {file}"
        if file.startswith("tests/"):
            assert function in functions_of(file.removeprefix("tests/")), f"there is no {name}"
        elif not name.endswith(".md"):
            assert file == ".ci/run" or is_started_by_ci(file), f".ci/run does not start {file}"
    assert not missing(block)


def is_started_by_ci(file: str) -> bool:
    """Whether .ci/run calls a target of the Makefile that starts this script."""
    targets = re.findall(r"^make ([a-z]+)$", text_of(".ci/run"), re.M)
    recipes = re.findall(
        r"^([a-z]+):.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M
    )
    return any(name in targets and f"python {file}\n" in recipe for name, recipe in recipes)


def test_few_blocks_need_what_is_not_here() -> None:
    needs = [where for where, (_, block) in zip(IDS, MARKED, strict=True) if block.kind == "needs"]
    assert len(needs) <= MOST_NEEDS, needs


@each(
    ("line", "word"),
    [
        ("isles frobnicate run.yaml", "frobnicate"),
        ("isles train run.yaml --frobnicate", "--frobnicate"),
        ("isles checkpoint frobnicate first", "frobnicate"),
        ("./frobnicate.sh 1 2", "frobnicate.sh"),
        ("make frobnicate", "make frobnicate"),
    ],
)
def test_a_command_that_no_test_runs_is_found(line: str, word: str) -> None:
    mark = "seen: tests/e2e/test_train.py::test_a_whole_run_and_what_it_leaves .ci/run"
    assert word in "".join(missing(Block(1, "sh", f"{line}\n", mark)))
