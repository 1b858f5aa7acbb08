"""Rules of docs/architecture.md: imports point down, form no circle, and never cross the sides."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from tests.deadline import run_program

SRC = Path(__file__).parents[1] / "src" / "isles"

# Package -> packages it may import, as in the drawing of docs/architecture.md.
GROUND = {"errors", "facts"}
SHARED = GROUND | {"config", "run"}
PARTS = {"models", "data", "track", "strategies", "balance", "checkpoint", "outer"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "facts": set(),
    "config": GROUND,
    "run": GROUND | {"config"},
    # control wing
    "launch": SHARED,
    **dict.fromkeys(("plan", "check", "monitor", "agent"), SHARED | {"launch"}),
    "cli": SHARED | {"launch", "monitor", "check", "plan"},
    # worker wing
    "dist": SHARED,
    **dict.fromkeys(PARTS, SHARED | {"dist"}),
    "train": SHARED | PARTS | {"dist"},
}
CONTROL_WING = ALLOWED.keys() - PARTS - {"dist", "train"}
HEAVY = {"torch", "numpy", "transformers", "datasets", "pyarrow", "tokenizers", "matplotlib"}
FILES = sorted(SRC.rglob("*.py"))


def room_of(path: Path) -> str:
    """The room a file belongs to: its top folder, or its name at the top level."""
    parts = path.relative_to(SRC).parts
    return parts[0] if len(parts) > 1 else parts[0].removesuffix(".py")


@cache
def tree(path: Path) -> ast.Module:
    """A file as Python reads it."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Every module that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports from the top, {ast.unparse(node)}"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def test_imports_point_down():
    wrong = {}
    for path in FILES:
        if (room := room_of(path)) not in ("__init__", "__main__"):
            rooms = {name.split(".")[1] for name in imports_of(path) if name.startswith("isles.")}
            wrong[path] = rooms - ALLOWED[room] - {room, "__version__"}
    assert not {path: rooms for path, rooms in wrong.items() if rooms}


def test_control_wing_imports_nothing_heavy():
    wing = [path for path in FILES if room_of(path) in CONTROL_WING]
    heavy = {path: {name.split(".")[0] for name in imports_of(path)} & HEAVY for path in wing}
    assert not {path: names for path, names in heavy.items() if names}


def file_graph() -> dict[str, set[str]]:
    """Which files each file imports, by their dotted names: everywhere in it, also inside functions
    and under TYPE_CHECKING."""
    names = {}
    for path in FILES:
        name = ".".join(("isles", *path.relative_to(SRC).with_suffix("").parts))
        names[name.removesuffix(".__init__")] = path
    graph = {}
    for name, path in names.items():
        found = {_file_of(other, names) for other in imports_of(path)} - {name, ""}
        # `from isles.a import b` says isles.a too, where b is a file of it.
        graph[name] = {f for f in found if not any(g.startswith(f"{f}.") for g in found)}
    return graph


UNPICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
LOADS = {
    *("torch.load", "np.load", "numpy.load", "pandas.read_pickle", "yaml.load", "yaml.unsafe_load"),
    *("yaml.full_load", "FileSystemReader", "FileSystemWriter", "DefaultLoadPlanner"),
    *("eval", "exec", "compile", "__import__"),
}
MAY_LOAD = {
    # To dump alone: what two agents say to their own children, over a pipe.
    "agent/workers.py": {"pickle"},
    # The user's own script, which `isles train` is told to run.
    "agent/script/main.py": {"exec", "compile"},
    # A planner that refuses all but tensors.
    "checkpoint/tensors.py": {"DefaultLoadPlanner"},
    # With allow_pickle=False.
    "train/reference.py": {"np.load"},
    "data/tokens/store.py": {"np.load"},
}


def test_nothing_that_is_read_can_run_code():
    """A file from elsewhere is data: no room unpickles, evaluates, or has torch do so."""
    wrong = {}
    for path in FILES:
        used = {name.split(".")[0] for name in imports_of(path)} & UNPICKLES
        used |= {name.rpartition(".")[2] for name in imports_of(path)} & LOADS
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in LOADS:
                flags = {k.arg: ast.unparse(k.value) for k in node.keywords}
                used |= (
                    {name} if name != "np.load" or flags.get("allow_pickle") == "False" else {"!"}
                )
        wrong[path] = used - MAY_LOAD.get(str(path.relative_to(SRC)), set())
    assert not {path: names for path, names in wrong.items() if names}


def test_no_circles_between_files():
    """A file may not reach itself through its imports."""
    TopologicalSorter(file_graph()).prepare()  # raises CycleError, which names them


def _file_of(name: str, names: Mapping[str, Path]) -> str:
    """The file that has what is imported by this name; empty where it is none of ours."""
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name


def test_a_concept_is_a_folder_and_no_prefix():
    """No three files of a folder begin with the same word: sail.py, sail_cloth.py, sail_loft.py."""
    words = Counter((path.parent, path.stem.split("_")[0]) for path in FILES)
    many = [f"{folder}/{word}*" for (folder, word), count in words.items() if word and count > 2]
    assert not many, many


OLD_WORDS = {
    *("conductor", "lobby", "seat", "strangers", "parcel", "verdict"),
    *("wish", "chief", "crew", "outlook", "roster", "anchor"),
}


def test_the_fields_words_name_things():
    """None of a dozen that the field does not have."""
    for path in FILES:
        for node in ast.walk(tree(path)):
            for kind in ("name", "id", "attr", "arg"):
                name = getattr(node, kind, None)
                if not isinstance(name, str) or name == "anchor":  # PyYAML's own, of an event
                    continue
                parts = {part.lower() for part in re.split(r"_|(?<=[a-z])(?=[A-Z])", name)}
                assert not parts & OLD_WORDS, f"{path}:{getattr(node, 'lineno', 0)}: {name}"


PROTOCOLS = {"Progress", "Recorder"}
"""A Protocol of outer/trainer/step.py has the name of the class of train/ that it describes."""


def test_a_class_name_has_one_meaning():
    """Each class has its own name in src/isles, private classes too."""
    classes = defaultdict[str, list[str]](list)
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef) and node.name not in PROTOCOLS:
                classes[node.name].append(f"{path}:{node.lineno}")
    assert not {name: places for name, places in classes.items() if len(places) > 1}


def test_every_room_says_what_is_in_it_and_what_to_open_first():
    for path in SRC.glob("*/**/__init__.py"):
        folder, text = path.parent, ast.get_docstring(tree(path)) or ""
        assert text, f"{path}: say what is in the folder"
        named = re.findall(r"`([a-z_]+\.py)`", text)
        assert named or folder.parent != SRC, f"{path}: say which file to open first"
        for name in named:
            found = [*folder.glob(name), *folder.glob(f"*/{name}")]
            assert found, f"{path} names {name}, which is not there"


def test_command_line_works_where_torch_is_not_installed():
    code = f"""
import sys
sys.modules.update(dict.fromkeys({sorted(HEAVY)!r}))  # as if they were not installed
import importlib, pkgutil, isles.cli
for room in {sorted(CONTROL_WING - {"errors", "cli"})!r}:
    package = importlib.import_module(f"isles.{{room}}")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"isles.{{room}}.{{module.name}}")
isles.cli.main(["--help"])
"""
    result = run_program([sys.executable, "-c", code])
    assert result.returncode == 0, result.stderr
    assert "train" in result.stdout


def test_files_and_functions_are_small_enough():
    wrong = [f"{path}: 500 lines at most" for path in FILES if path.read_text().count("\n") > 500]
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > 80:
                    wrong.append(f"{path}: {node.name}: {length} lines, 80 at most")
    assert not wrong, wrong
