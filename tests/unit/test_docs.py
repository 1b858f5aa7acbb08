"""Pages that are right: links, commands, run files, generated parts, and where each block is tried.

A command block is typed by tests/e2e/test_doc_blocks.py, unless a comment stands before it:
`<!-- seen: … -->` names tests, or a script that `.ci/run` starts, whose text has what the block's
lines start, with their verbs and flags; or a page that has the very same lines. `<!-- needs: … -->`
says what is not here. Files and commands of other tools have `<!-- not isles: Axolotl -->`.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from itertools import takewhile
from pathlib import Path

import yaml

from isles.config.clusters import of_cluster
from isles.config.load import Base, load_run_file
from isles.config.resolve import resolve
from isles.errors import ConfigError, ConfigErrors
from tests.deadline import run_program
from tests.documents import (
    ALL_PAGES,
    EXAMPLES,
    PAGES,
    ROOT,
    Block,
    blocks,
    broken_links,
    isles_fault,
    named_in_text,
    simple_commands,
)
from tests.each import each
from tests.unit.test_requirements import functions_of

# What a section of a run file is put upon, to be one.
BASE: Mapping[str, object] = {
    "model": {"name_or_path": "llama-2m", "init": "scratch"},
    "tokenizer": {"train_vocab_size": 2048},
    "data": {"sources": [{"path": "python-docs"}]},
    "training": {"max_steps": 1000},
}
LENGTHS = ("max_steps", "num_train_epochs", "max_time")
# Blocks that nothing here can run. Each one more is one fewer that is known to work.
MOST_NEEDS = 21
GROUPS = ("checkpoint", "config", "data")
# Programs that only start, show or prepare another.
AROUND = {"cd", "bash", "python", "srun", "echo", "for", "do", "done", "export"}


def faults(judge: Callable[[Path, Block], object]) -> list[str]:
    """What a judge finds wrong with the blocks of all pages."""
    return [
        f"{page.relative_to(ROOT)}:{block.line}: {fault}"
        for page in ALL_PAGES
        if not page.is_symlink()
        for block in blocks(page)
        if (fault := judge(page, block))
    ]


def test_the_pages_link_to_what_there_is() -> None:
    broken = {page.name: found for page in ALL_PAGES if (found := broken_links(page))}
    assert not broken, broken


def test_every_page_is_in_the_navigation_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r"^ +- .+: (\S+\.md)$", text, re.M)
    assert sorted(named) == [page.name for page in PAGES[1:]]


def test_the_reference_is_what_the_schema_says() -> None:
    done = run_program([sys.executable, ROOT / "docs" / "make_run_file.py", "--check"])
    assert done.returncode == 0, done.stdout + done.stderr


def test_paths_named_in_the_architecture_exist() -> None:
    """But for x.py, which stands for a file that somebody adds."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = [name for name in re.findall(r"`([\w/]+/\w+\.py)", text) if not name.endswith("/x.py")]
    assert len(named) > 40
    places = (ROOT, ROOT / "src" / "isles")
    missing = [name for name in named if not any((place / name).exists() for place in places)]
    assert not missing, missing


def test_commands_between_backticks_exist() -> None:
    """Or are messages of isles, which also begin with its name."""
    source = "".join(
        file.read_text(encoding="utf-8") for file in sorted((ROOT / "src" / "isles").rglob("*.py"))
    )
    unknown = [
        f"{page.name}: {text}: {word}"
        for page in ALL_PAGES
        for text, word in named_in_text(page.read_text(encoding="utf-8"))
        if word.startswith("-") or " ".join(text.split()[:3]) not in source
    ]
    assert not unknown, unknown


def test_commands_of_blocks_are_understood() -> None:
    found = faults(
        lambda _, block: (
            "; ".join(fault for line in block.lines if (fault := fault_of(line, block)))
            if block.kind != "not isles" and (block.is_shell or is_isles(block))
            else ""
        )
    )
    assert not found, "\n".join(found)


def test_run_files_and_sections_resolve() -> None:
    found = faults(
        lambda page, block: (
            "; ".join(
                fault for text in documents_of(block.text) if (fault := run_file_fault(text, page))
            )
            if block.language == "yaml" and not block.kind
            else ""
        )
    )
    assert not found, "\n".join(found)


def test_python_and_json_of_blocks_can_be_read() -> None:
    for page in ALL_PAGES:
        for block in blocks(page):
            if block.language == "python":
                ast.parse(block.text, f"{page.name}:{block.line}")
            elif block.language == "json":
                whole = block.text.startswith("{\n")
                for text in [block.text] if whole else block.text.splitlines():
                    json.loads(text)


def test_every_mark_is_true() -> None:
    found = faults(lambda _, block: mark_fault(block) if block.is_shell and block.kind else "")
    assert not found, "\n".join(found)
    needs = faults(lambda _, block: block.is_shell and block.kind == "needs")
    assert len(needs) <= MOST_NEEDS, needs


@each(
    ("line", "word"),
    [
        ("isles trian run.yaml", "trian"),
        ("isles train run.yaml --dry", "--dry"),
        ("isles train run.yaml training.max_stepps=5", "max_stepps"),
        ("isles status && isles lgos", "lgos"),
        ("python benchmarks/loop.py --quik", "--quik"),
        ("torchrun --nproc_per_nod=2 -m isles.train run.yaml", "--nproc_per_nod"),
        ("make tset", "tset"),
    ],
)
def test_a_wrong_command_is_found(line: str, word: str) -> None:
    assert word in fault_of(line, Block(1, "sh", line))


def test_a_wrong_section_and_a_command_that_no_test_runs_are_found() -> None:
    assert "trianing" in run_file_fault("trianing: {max_steps: 5}", PAGES[0])
    test = "tests/e2e/test_train.py::test_a_whole_run_and_what_it_leaves"
    for line in ("isles train --frobnicate", "isles checkpoint frobnicate", "./frobnicate 1"):
        assert "frobnicate" in mark_fault(Block(1, "sh", f"{line}\n", "seen", test)), line


# Commands.


def is_isles(block: Block) -> bool:
    """A block without a language, or of text, that begins with a command of isles."""
    return block.language in ("", "text") and block.text.startswith(("isles ", "python -m isles"))


def fault_of(line: str, block: Block) -> str:
    """What is wrong with a line; empty: it is understood, or the block shows its error."""
    _, _, behind = block.text.partition(f"$ {line}\n")
    if behind.removeprefix("…\n").startswith("error:"):
        return ""
    found = (command_fault(*words) for words in simple_commands(line))
    return "; ".join(fault for fault in found if fault)


def command_fault(program: str, *words: str) -> str:
    """What is wrong with one program and its words, where it is one that is known here."""
    match program:
        case "isles":
            return isles_fault(list(words))
        case "make":
            targets = re.findall(r"^([a-z-]+):", read(ROOT / "Makefile"), re.M)
            return ", ".join(name for name in words if "=" not in name and name not in targets)
        case "python" | "python3":
            return script_fault(words, known="")
        case "torchrun":
            return script_fault(words, known=module_text("torch.distributed.run"))
        case "bash" | "sbatch" | "qsub":
            name = next((word for word in words if word[0] != "-"), "")
            # The scripts of an example may write others.
            written = [
                path for e in EXAMPLES for path in e.rglob("*.py") if f'"{name}"' in read(path)
            ]
            return "" if file_text(name) or written else f"there is no {name}"
    return ""


def script_fault(words: tuple[str, ...], known: str) -> str:
    """What is wrong with a script, or `-m` and a module; and with flags, its own or `known`."""
    own = list(takewhile(lambda word: word[0] == "-" and word not in ("-m", "-c"), words))
    rest = words[len(own) :]
    if not rest or rest[0] == "-c":
        return ""
    text = module_text(rest[1]) if rest[0] == "-m" else file_text(rest[0])
    if not text:
        return f"there is no {rest[1] if rest[0] == '-m' else rest[0]}"
    flags = [word.partition("=")[0] for word in words if re.match(r"--\w", word)]
    names = set(re.findall(r"--[a-z][\w-]*", (text + known).replace('"--', " --")))
    return ", ".join(flag for flag in flags if flag not in names and "." not in flag)


def module_text(name: str) -> str:
    """The program that `python -m` runs, without importing it; empty: there is none."""
    path = Path(*name.split("."))
    package = importlib.util.find_spec(path.parts[0])
    if package is None or not package.submodule_search_locations:
        return ""
    folder = Path(package.submodule_search_locations[0]).parent
    files = (folder / path.with_suffix(".py"), folder / path / "__main__.py")
    return next((read(file) for file in files if file.is_file()), "")


def file_text(name: str) -> str:
    """The text of a file of the repository or an example, with tables of flags beside it."""
    places = [folder / name for folder in (ROOT, *EXAMPLES, *(e / "scripts" for e in EXAMPLES))]
    file = next((place for place in places if name and place.is_file()), None)
    if file is None:
        return ""
    tables = "".join(read(path) for path in file.parent.glob("*_flags.py"))
    flags = re.findall(r'^ +(?:Flag\()?"([a-z][\w.-]+)",', tables, re.M)
    return read(file) + "".join(f" --{flag} --no-{flag}" for flag in flags)


@cache
def read(file: Path) -> str:
    """The text of a file."""
    return file.read_text(encoding="utf-8")


# Run files.


def documents_of(text: str) -> list[str]:
    """A yaml block; cut at its first key where that comes again, as in a list of examples."""
    first = re.match(r"\w+:", re.sub(r"^#.*\n", "", text, flags=re.M))
    if first is None or len(re.findall(rf"^{first[0]}", text, re.M)) == 1:
        return [text]
    return [part for part in re.split(rf"^(?={first[0]})", text, flags=re.M) if part.strip()]


def run_file_fault(text: str, page: Path) -> str:
    """What is wrong with a run file, or with a section of one put upon a plain run file."""
    given = yaml.safe_load(text)
    assert isinstance(given, dict), "a run file is a map"
    training = given.get("training", {})
    base = {key: value for key, value in BASE.items() if key not in given or key == "training"}
    if "adapter" in given:
        base["model"] = {"name_or_path": "someone/a-model"}
    if "model" in given or "adapter" in given:
        base.pop("tokenizer", None)
    if any(training.get(key) for key in LENGTHS):
        base.pop("training")
    if "script" in training:
        base = {}
    clusters = given.get("clusters", [{"launcher": None}])
    if "launcher" not in clusters[0] and (launcher := launcher_of(page)):
        text = yaml.safe_dump({**given, "clusters": [{"launcher": launcher, **clusters[0]}]})
    try:
        loaded = load_run_file(page, text=text, base=Base(base, page.name))
        for index, cluster in enumerate(loaded.config.clusters):
            hosts = getattr(cluster.launcher, "hosts", ())
            per_node = cluster.gpus_per_node if isinstance(cluster.gpus_per_node, int) else 1
            nproc = [per_node] * (len(hosts) or cluster.max_nodes)
            resolve(of_cluster(loaded, index), nproc=nproc, device="cuda")
    except (ConfigError, ConfigErrors) as error:
        return str(error)
    return ""


def launcher_of(page: Path) -> object:
    """The launcher of the page's own run file, for a section that names none."""
    texts = (block.text for block in blocks(page) if block.language == "yaml")
    whole = (yaml.safe_load(text) for text in texts if "\nmodel:" in text and "\nclusters:" in text)
    return next((file["clusters"][0].get("launcher") for file in whole), None)


# Marks.


def mark_fault(block: Block) -> str:
    """What is wrong with the mark of a shell block."""
    names = block.reason.split()
    if block.kind != "seen":
        return "" if len(names) > 1 else "a reason, in words"
    for name in names:
        file, _, function = name.partition("::")
        if not (ROOT / file).is_file():
            return f"there is no {file}"
        if file.startswith("tests/"):
            if function not in functions_of(file.removeprefix("tests/")):
                return f"there is no {name}"
        elif not (name.endswith(".md") or file == ".ci/run" or is_started_by_ci(file)):
            return f".ci/run does not start {file}"
    return "; ".join(missing(block, names))


def missing(block: Block, names: list[str]) -> list[str]:
    """What of a block is in none of the tests, scripts and pages that it names."""
    pages = [name for name in names if name.endswith(".md")]
    typed = {line for name in pages for line in typed_on(name)}
    text = "\n".join(text_of(name) for name in names if name not in pages)
    plain = text.replace("torch.distributed.run", "torchrun").replace("_", "-")
    return [
        f"{' '.join(words)}: {piece}"
        for line in block.lines
        if plain_line(line) not in typed
        for words in simple_commands(line)
        # A script that is named runs itself.
        if words[0] not in names
        for piece in wanted(words)
        if not re.search(rf"(?<![\w-]){re.escape(piece.replace('_', '-'))}(?![\w-])", plain)
    ]


def wanted(words: list[str]) -> list[str]:
    """What a test that runs a command must have in it: its program, its verbs and its flags."""
    words = [Path(word).name if "/" in word and word[0] != "-" else word for word in words]
    words = words[next((n for n, word in enumerate(words) if word not in AROUND), len(words)) :]
    if not words:
        return []
    program, *rest = words
    flags = [word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)]
    if program == "isles":
        return [*rest[: 2 if rest[0] in GROUPS else 1], *flags]
    return [" ".join(words)] if program == "make" else [program, *flags]


def plain_line(line: str) -> str:
    """A line without the remark behind it."""
    return re.sub(r"\s+#.*", "", line)


@cache
def typed_on(name: str) -> frozenset[str]:
    """The lines of a page that tests/e2e/test_doc_blocks.py types."""
    typed = (block for block in blocks(ROOT / name) if block.is_shell and not block.kind)
    return frozenset(plain_line(line) for block in typed for line in block.lines)


@cache
def text_of(name: str) -> str:
    """The strings of a test's module and of helpers that it imports; or a script's text."""
    file = ROOT / name.partition("::")[0]
    if file.suffix != ".py":
        return read(file)
    seen, waiting = {file}, [file]
    found: list[str] = []
    while waiting:
        tree = ast.parse(read(waiting.pop()))
        found += strings(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                helper = ROOT / f"{(node.module or '').replace('.', '/')}.py"
                if (
                    helper.is_relative_to(ROOT / "tests")
                    and helper.is_file()
                    and helper not in seen
                ):
                    seen.add(helper)
                    waiting.append(helper)
    return "\n".join(found)


def strings(tree: ast.Module) -> list[str]:
    """The strings of a module, without docstrings; and the seed documents that it reads."""
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said
    ]
    seeds = set(re.findall(r"\bS\d(?=\.md\b)", "\n".join(found)))
    return [*found, *(read(ROOT / "tests" / "seeds" / f"{seed}.md") for seed in sorted(seeds))]


def is_started_by_ci(file: str) -> bool:
    """Whether .ci/run calls a target of the Makefile that starts this script."""
    targets = re.findall(r"^make ([a-z]+)$", read(ROOT / ".ci" / "run"), re.M)
    recipes = re.findall(r"^([a-z]+):.*\n((?:\t.*\n)+)", read(ROOT / "Makefile"), re.M)
    return any(name in targets and f"python {file}\n" in recipe for name, recipe in recipes)
