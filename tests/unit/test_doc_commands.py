"""Each command and run file that the pages show is understood here, or says what it needs.

Files and commands of other tools have a comment right before them: `<!-- not isles: Axolotl -->`.
That a block was run, or why not: tests/e2e/test_doc_blocks.py and tests/unit/test_doc_marks.py.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import yaml

from isles.config.clusters import of_cluster
from isles.config.load import Base, load_run_file
from isles.config.resolve import resolve
from isles.errors import ConfigError, ConfigErrors
from tests.documents import (
    EXAMPLE_PAGES,
    EXAMPLES,
    PAGES,
    ROOT,
    SHELLS,
    Block,
    blocks,
    broken_links,
    isles_fault,
    named_in_text,
    simple_commands,
)
from tests.each import each

ALL = (*PAGES, *EXAMPLE_PAGES)
IDS = [str(page.relative_to(ROOT)) for page in ALL]
# What a section of a run file is put upon, to be one.
BASE: Mapping[str, object] = {
    "model": {"name_or_path": "llama-2m", "init": "scratch"},
    "tokenizer": {"train_vocab_size": 2048},
    "data": {"sources": [{"path": "python-docs"}]},
    "training": {"max_steps": 1000},
}
# Programs of the system, and where their flags are somebody else's to test.
LENGTHS = ("max_steps", "num_train_epochs", "max_time")
SYSTEM = {
    "apt-get": "Debian", "cat": "coreutils", "cd": "shell", "conda": "conda", "cp": "coreutils",
    "chmod": "coreutils", "dig": "bind", "df": "coreutils", "echo": "shell", "export": "shell",
    "for": "shell", "do": "shell", "done": "shell", "free": "procps", "getent": "libc",
    "git": "git", "grep": "grep", "head": "coreutils", "hf": "huggingface_hub",
    "hostname": "coreutils", "install": "coreutils", "ip": "iproute2", "iperf3": "iperf3",
    "journalctl": "systemd", "loginctl": "systemd", "ls": "coreutils", "mkdir": "coreutils",
    "mount": "util-linux", "mv": "coreutils", "nc": "netcat", "nvidia-smi": "NVIDIA's driver",
    "openssl": "openssl", "ping": "iputils", "resolvectl": "systemd", "rm": "coreutils",
    "rsync": "rsync", "scontrol": "Slurm", "sinfo": "Slurm", "squeue": "Slurm", "scancel": "Slurm",
    "srun": "Slurm", "qstat": "PBS", "pbsnodes": "PBS", "source": "shell", ".": "shell",
    "ss": "iproute2", "ssh": "OpenSSH", "ssh-copy-id": "OpenSSH", "ssh-keygen": "OpenSSH",
    "sudo": "sudo", "systemctl": "systemd", "tail": "coreutils", "tensorboard": "tensorboard",
    "timedatectl": "systemd", "touch": "coreutils", "ufw": "ufw", "ulimit": "shell",
    "wandb": "wandb", "watch": "procps",
}  # fmt: skip


def test_the_pages_link_to_what_there_is() -> None:
    broken = {page.name: found for page in ALL if (found := broken_links(page))}
    assert not broken, broken


def test_every_page_is_in_the_navigation_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r"^ +- .+: (\S+\.md)$", text, re.M)
    assert sorted(named) == [page.name for page in PAGES[1:]]


def is_said(text: str, unknown: str) -> bool:
    """Whether it is no command, but begins as a message of isles does."""
    return not unknown.startswith("-") and " ".join(text.split()[:3]) in source()


@cache
def source() -> str:
    """The program's text."""
    files = sorted((ROOT / "src" / "isles").rglob("*.py"))
    return "".join(file.read_text(encoding="utf-8") for file in files)


@each("page", ALL, ids=IDS)
def test_commands_between_backticks_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    unknown = [named for named in named_in_text(text) if not is_said(*named)]
    assert not unknown, unknown


@each("page", ALL, ids=IDS)
def test_commands_of_blocks_are_understood(page: Path) -> None:
    issues = [
        f"{page.name}:{block.line}: {line}: {issue}"
        for block in blocks(page)
        if block.language in SHELLS or is_shell_all_the_same(block)
        if block.kind != "not isles"
        for line in block.lines
        if (issue := line_fault(line, block))
    ]
    assert not issues, "\n".join(issues)


@each("page", ALL, ids=IDS)
def test_run_files_and_sections_resolve(page: Path) -> None:
    issues = [
        f"{page.name}:{block.line}: {issue}"
        for block in blocks(page)
        if block.language == "yaml" and not block.mark
        for text in documents_of(block.text)
        if (issue := run_file_fault(text, page))
    ]
    assert not issues, "\n".join(issues)


@each("page", ALL, ids=IDS)
def test_python_and_json_of_blocks_can_be_read(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            ast.parse(block.text, f"{page.name}:{block.line}")
        elif block.language == "json":
            lines = [block.text] if block.text.startswith("{\n") else block.text.splitlines()
            for line in lines:
                json.loads(line)


@each(
    ("line", "word"),
    [
        ("isles trian run.yaml", "trian"),
        ("isles train run.yaml --dry", "--dry"),
        ("isles train run.yaml training.max_stepps=5", "max_stepps"),
        ("isles render run.yaml --to word", "word"),
        ("isles status && isles lgos", "lgos"),
        ("frobnicate run.yaml", "frobnicate"),
        ("python benchmarks/lop.py", "lop.py"),
        ("python benchmarks/loop.py --quik", "--quik"),
        ("python -m isles.trian run.yaml", "isles.trian"),
        ("torchrun --nproc_per_nod=2 -m isles.train run.yaml", "--nproc_per_nod"),
        ("torchrun --nproc_per_node=2 exampels/own_script/ddp.py", "exampels"),
        ("make tset", "tset"),
        ("pip install 'isles[trian]'", "trian"),
    ],
)
def test_a_wrong_command_is_found(line: str, word: str) -> None:
    assert word in line_fault(line, Block(1, "sh", line, ""))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("trianing: {max_steps: 5}", "trianing"),
        ("clusters: [{launcher: {kind: shh, hosts: [a]}}]", "shh"),
        ("strategy: {kind: fsdp, tp_size: 3}\nclusters: [{gpus_per_node: 2}]", "tp_size"),
        ("outer: {kind: diloco, sync_evry: 5}", "sync_evry"),
    ],
)
def test_a_wrong_section_is_found(text: str, word: str) -> None:
    assert word in run_file_fault(text, PAGES[0])


def is_shell_all_the_same(block: Block) -> bool:
    """A block without a language, or of text, that begins with a command of isles."""
    return block.language in ("", "text") and block.text.startswith(("isles ", "python -m isles"))


def line_fault(line: str, block: Block) -> str:
    """What is wrong with a line of a shell block; empty: it is understood."""
    if is_meant_to_fail(line, block):
        return ""
    found = (command_fault(words) for words in simple_commands(line))
    return "; ".join(issue for issue in found if issue)


def is_meant_to_fail(line: str, block: Block) -> bool:
    """Whether the block shows, behind the command, the error that it gives."""
    if block.language != "console":
        return False
    _, _, behind = block.text.partition(f"$ {line}\n")
    return behind.removeprefix("…\n").startswith("error:")


def command_fault(words: list[str]) -> str:
    """What is wrong with one program and its words."""
    program, *rest = words
    if program in PROGRAMS:
        return PROGRAMS[program](rest)
    if program in SYSTEM or file_text(program):
        return ""
    return f"unknown program {program}"


def make_fault(targets: list[str]) -> str:
    """Targets that the Makefile has not."""
    known = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    return ", ".join(name for name in targets if "=" not in name and name not in known)


def pip_fault(words: list[str]) -> str:
    """Extras of isles that its pyproject.toml has not."""
    return ", ".join(extra for word in words for extra in unknown_extras(word))


def unknown_extras(text: str) -> list[str]:
    """Extras of isles in an argument of pip that its pyproject.toml has not."""
    match = re.match(r"(?:isles|\.)\[(.*)\]", text)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    return [extra for extra in match[1].split(",") if extra not in extras] if match else []


def script_fault(words: list[str]) -> str:
    """What is wrong with a script, or `-m` and a module, or `-c` and code; and with its flags."""
    if words[0] == "-c":
        ast.parse(words[1])
        return ""
    if words[0] == "-m":
        text, what, rest = module_text(words[1]), f"module {words[1]}", words[2:]
    else:
        text, what, rest = file_text(words[0]), f"file {words[0]}", words[1:]
    if not text:
        return f"there is no {what}"
    return flags_fault(text + flags_beside(words[0]), rest)


def flags_beside(name: str) -> str:
    """The flags of an example's script that a table in another module of its folder has."""
    paths = [path for e in EXAMPLES if (e / name).is_file() for path in e.glob("*_flags.py")]
    texts = "".join(path.read_text(encoding="utf-8") for path in paths)
    names = re.findall(r'^ +(?:Flag\()?"([a-z][\w.-]+)",', texts, re.M)
    return "".join(f" --{name} --no-{name}" for name in names)


def file_fault(words: list[str]) -> str:
    """What is wrong with a file that a shell or a queue is given; an example may write it."""
    file = next((word for word in words if not word.startswith("-")), "")
    writers = (path.read_text(encoding="utf-8") for e in EXAMPLES for path in e.rglob("*.py"))
    is_written = any(f'"{file}"' in text for text in writers)
    return "" if is_written else script_fault([file])


def flags_fault(text: str, words: list[str]) -> str:
    """Flags that a program's text does not name."""
    flags = [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]
    known = set(re.findall(r"--[a-z][\w-]*", text.replace('"--', " --")))
    return ", ".join(flag for flag in flags if flag not in known and "." not in flag)


def module_text(name: str) -> str:
    """The program that `python -m` runs, without importing it; empty: there is none."""
    path = Path(*name.split("."))
    package = importlib.util.find_spec(path.parts[0])
    if package is None or not package.submodule_search_locations:
        return ""
    folder = Path(package.submodule_search_locations[0]).parent
    for file in (folder / path.with_suffix(".py"), folder / path / "__main__.py"):
        if file.is_file():
            return file.read_text(encoding="utf-8")
    return ""


def file_text(name: str) -> str:
    """The text of a file of the repository, or of one of its examples; empty: there is none."""
    places = (folder / name for folder in (ROOT, *EXAMPLES, *(e / "scripts" for e in EXAMPLES)))
    file = next((place for place in places if place.is_file()), None)
    return "" if file is None else file.read_text(encoding="utf-8")


def torchrun_fault(words: list[str]) -> str:
    """What is wrong with torchrun's own flags, and with what it starts."""
    own = words[: next((n for n, word in enumerate(words) if word == "-m" or word[0] != "-"), None)]
    issue = flags_fault(module_text("torch.distributed.run"), own)
    return issue or script_fault(words[len(own) :])


def hivemind_fault(words: list[str]) -> str:
    """What is wrong with the flags of hivemind-dht."""
    return flags_fault(module_text("hivemind.hivemind_cli.run_dht"), words)


PROGRAMS = {
    "isles": isles_fault,
    "make": make_fault,
    "pip": pip_fault,
    "python": script_fault,
    "python3": script_fault,
    "bash": file_fault,
    "sbatch": file_fault,
    "qsub": file_fault,
    "torchrun": torchrun_fault,
    "hivemind-dht": hivemind_fault,
}


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
    """The launcher of the page's own run file, for a section that says nothing of it."""
    texts = (block.text for block in blocks(page) if block.language == "yaml")
    whole = (yaml.safe_load(text) for text in texts if "\nmodel:" in text and "\nclusters:" in text)
    return next((file["clusters"][0].get("launcher") for file in whole), None)
