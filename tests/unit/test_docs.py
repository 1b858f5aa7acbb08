"""Pages that are right: links, commands, run files, generated parts, and where each block is tried.

A command block is typed by tests/e2e/test_doc_blocks.py, unless a comment stands before it:
`<!-- seen: … -->` names tests, scripts or pages that have its verbs and flags; `<!-- needs: … -->`
says what is not here. Files and commands of other tools have `<!-- not isles: Axolotl -->`.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import yaml

from isles.check.finding import IDS
from isles.cli import main
from isles.config.clusters import of_cluster
from isles.config.keys import run_schema
from isles.config.load import Base, load_run_file
from isles.config.resolve import resolve
from isles.errors import ConfigError, ConfigErrors, ExitCode
from isles.facts.troubleshooting import by_id
from tests.deadline import run_program
from tests.documents import (
    ALL_PAGES,
    EXAMPLES,
    PAGES,
    ROOT,
    Block,
    anchors,
    blocks,
    broken_links,
    is_key,
    isles_fault,
    named_in_text,
    simple_commands,
)
from tests.unit.test_requirements import functions_of

# What a section of a run file is put upon, to be one.
BASE: Mapping[str, object] = {
    "model": {"name_or_path": "llama-2m", "init": "scratch"},
    "tokenizer": {"train_vocab_size": 2048},
    "data": {"sources": [{"path": "python-docs"}]},
    "training": {"max_steps": 1000},
}
# Pages whose addresses other sites may link to.
PUBLISHED = {
    f"{name}.md"
    for name in re.findall(
        r"[\w-]+",
        """
    adapters architecture benchmarks bucket check checkpoints clusters coming-from commands
    containers data engines fine-tuning hangs hivemind home-lab index kubernetes manual one-machine
    own-script pbs plan quickstart ray reliability render requirements run-directory run-file scale
    security shared-files skypilot slurm ssh strategies trackers troubleshooting watching
    """,
    )
}
# Blocks that nothing here can run. Each one more is one fewer that is known to work.
MOST_NEEDS = 21
# What looks like a key or an id: Python's names, and keys that a page says are none.
NO_KEYS = {
    *("isles.report", "torch.distributed", "torch.float32", "torch.bfloat16"),
    *("model.dtype", "training.mixed_precision"),
}
# Messages on the page on trouble that come from other programs.
NOT_OURS = {
    *("connect() call failed", "no kernel image is available"),
    *("telnet HOST 29500", "Too many open files"),
}


def test_the_pages_link_to_what_there_is():
    broken = {page.name: found for page in ALL_PAGES if (found := broken_links(page))}
    assert not broken, broken


def test_every_page_is_in_the_navigation_once():
    text = read(ROOT / "mkdocs.yml")
    named = re.findall(r"^ +- .+: (\S+\.md)$", text, re.M)
    assert sorted(named) == [page.name for page in PAGES[1:]]


def test_a_removed_page_leads_to_a_page_that_exists():
    """And an address of the site, once published, is answered for good."""
    (moved,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(read(ROOT / "docs" / "make_site.py")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MOVED"
    )
    pages = {page.name: page for page in PAGES[1:]}
    for old, new in moved.items():
        name, _, anchor = new.partition("#")
        assert old not in pages, f"{old} is a page, so nothing may redirect from it"
        assert name in pages, f"{old} leads to {name}, which does not exist"
        assert not anchor or anchor in anchors(pages[name]), f"{old} leads to {new}: no such anchor"
    assert not PUBLISHED - pages.keys() - moved.keys(), "add removed pages to MOVED"


def test_the_reference_is_what_the_schema_says():
    """Also the tables of names of other tools, the table of models, and the charts."""
    scripts = ("make_run_file.py", "make_coming_from.py", "make_models.py", "make_charts.py")
    for script in scripts:
        done = run_program([sys.executable, ROOT / "docs" / script, "--check"])
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_example_of_an_error_is_what_is_printed(tmp_path, capsys):
    page = read(ROOT / "docs" / "coming-from.md")
    (shown,) = re.findall(r"^\$ isles config show run\.yaml\n(.*?)^```", page, re.M | re.S)
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {name_or_path: llama-2m, init: scratch}\n"
        "sequence_len: 512\n"
        "data: {sources: [{path: python-docs}]}\n"
        "training: {max_steps: 5, precision: bf16}\n"
    )
    assert main(["config", "show", str(path)]) == ExitCode.USER
    assert capsys.readouterr().err.replace(f"{path}", "run.yaml") == shown


def test_paths_named_in_the_architecture_exist():
    """But for x.py, which stands for a file that somebody adds."""
    text = read(ROOT / "docs" / "architecture.md")
    named = [name for name in re.findall(r"`([\w/]+/\w+\.py)", text) if not name.endswith("/x.py")]
    assert len(named) > 40
    places = (ROOT, ROOT / "src" / "isles")
    missing = [name for name in named if not any((place / name).exists() for place in places)]
    assert not missing, missing


def test_commands_between_backticks_exist():
    """Or are messages of isles, which also begin with its name."""
    source = "".join(map(read, (ROOT / "src" / "isles").rglob("*.py")))
    unknown = [
        f"{page.name}: {text}: {word}"
        for page in ALL_PAGES
        for text, word in named_in_text(read(page))
        if word.startswith("-") or " ".join(text.split()[:3]) not in source
    ]
    assert not unknown, unknown


def test_keys_and_ids_between_backticks_exist():
    sections = {*run_schema()["properties"], "launcher"}
    roots = sections | {id.partition(".")[0] for id in (*by_id(), *IDS)}
    unknown = [
        f"{page.name}: {name}"
        for page in ALL_PAGES
        for name in re.findall(r"`([a-z_]+(?:\.[a-z0-9_]+)+)(?:`|: )", without_others(page))
        if name.partition(".")[0] in roots
        and not name.endswith((".py", ".json", ".yaml", ".sqlite", ".sif", ".sqsh"))
        and not (is_key(name) or name in by_id() or name in IDS or name in NO_KEYS)
    ]
    assert not unknown, unknown


def test_messages_of_the_page_on_trouble_are_said_somewhere() -> None:
    """What stands between backticks in the head of a paragraph, but for values in it."""
    text = read(ROOT / "docs" / "troubleshooting.md")
    words = "\n".join(
        node.value
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(read(path)))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    heads = re.findall(r"^\*\*(.*?)\*\*", text, re.M | re.S)
    codes = {" ".join(code.split()) for head in heads for code in re.findall(r"`([^`]*)`", head)}
    messages = {code for code in codes if " " in code} - NOT_OURS
    assert len(messages) >= 90
    for message in messages:
        for piece in re.split(r"…|\d[\d.]*", message):
            assert piece.strip() in words, message


def test_every_block_is_right_and_few_need_what_is_not_here():
    """Commands are understood, run files and sections of one resolve, and marks are true."""
    pages = [page for page in ALL_PAGES if not page.is_symlink()]
    all_blocks = [(page, block) for page in pages for block in blocks(page)]
    found = [
        f"{page.relative_to(ROOT)}:{block.line}: {fault}"
        for page, block in all_blocks
        for fault in faults_of(page, block)
        if fault
    ]
    assert not found, "\n".join(found)
    needs = [block for _, block in all_blocks if block.is_shell and block.kind == "needs"]
    assert len(needs) <= MOST_NEEDS, needs


def faults_of(page: Path, block: Block) -> Iterator[str]:
    """What is wrong with a block, with empty texts for what is right. Python and JSON raise."""
    # A block without a language, or of text, may begin with a command of isles.
    is_typed = block.language in ("", "text") and re.match("isles |python -m isles", block.text)
    if block.kind != "not isles" and (block.is_shell or is_typed):
        yield from (fault_of(line, block) for line in block.lines)
    if block.is_shell and block.kind:
        yield mark_fault(block)
    if block.language == "yaml" and not block.kind:
        yield from (run_file_fault(text, page) for text in documents_of(block.text))
    if block.language == "python":
        ast.parse(block.text, f"{page.name}:{block.line}")
    if block.language == "json":
        whole = block.text.startswith("{\n")
        for text in [block.text] if whole else block.text.splitlines():
            json.loads(text)


# Commands.


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
        case "python" | "python3" | "torchrun" | "bash" | "sbatch" | "qsub":
            scripts = (word for word in words if re.fullmatch(r"[\w./-]+\.(py|sh|pbs)", word))
            name = next(scripts, "")
            return "" if is_script(name) else f"there is no {name}"
    return ""


def is_script(name: str) -> bool:
    """Whether the repository or an example has it, or a script of an example writes it."""
    places = [folder / name for folder in (ROOT, *EXAMPLES, *(e / "scripts" for e in EXAMPLES))]
    scripts = (path for example in EXAMPLES for path in example.rglob("*.py"))
    return any(p.exists() for p in places) or any(f'"{name}"' in read(path) for path in scripts)


def without_others(page: Path) -> str:
    """The text of a page without the names of other tools: first in a row or in an item."""
    text = read(page)
    is_about_others = page.name.startswith("coming-from")
    return re.sub(r"^(?:\|[^|]*|- [^:]*)", "", text, flags=re.M) if is_about_others else text


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
    if any(training.get(key) for key in ("max_steps", "num_train_epochs", "max_time")):
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
        if file.startswith("tests/") and function not in functions_of(file.removeprefix("tests/")):
            return f"there is no {name}"
        if file.startswith("examples/") and f"python {file}\n" not in read(ROOT / "Makefile"):
            return f"no target of the Makefile starts {file}"
    text = "".join(texts_of(tuple(names))).replace("_", "-")
    found = (words for line in block.lines for words in simple_commands(line))
    missing = [
        word
        for words in found
        for word in wanted(words)
        if not re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text)
    ]
    return f"not in any of them: {missing}" if missing else ""


def wanted(words: list[str]) -> list[str]:
    """The verb of isles that a line types, and the flags of any program."""
    rest = words[words.index("isles") + 1 :] if "isles" in words else []
    verb = rest[: 2 if rest[:1] in (["checkpoint"], ["config"], ["data"]) else 1]
    flags = [word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)]
    return [word.replace("_", "-") for word in (*verb, *flags)]


@cache
def texts_of(names: tuple[str, ...]) -> list[str]:
    """What tests, scripts and pages say: also helpers and seed documents that a test takes."""
    waiting = [ROOT / name.partition("::")[0] for name in names]
    found: dict[Path, str] = {}
    while waiting:
        if (file := waiting.pop()) not in found:
            found[file] = read(file)
            helpers = re.findall(r"^from (tests\.[\w.]+) import", found[file], re.M)
            others = [ROOT / f"{name.replace('.', '/')}.py" for name in helpers]
            others += [ROOT / "tests/seeds" / seed for seed in re.findall(r"S\d\.md", found[file])]
            waiting += [other for other in others if file.suffix == ".py" and other.is_file()]
    return list(found.values())
