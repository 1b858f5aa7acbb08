"""Values of a run file in scripts: hostile ones are refused or quoted, and none of them runs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from isles.config import keys
from isles.config.load import load_run_file
from isles.config.yaml import KeyPath
from isles.errors import UserError
from isles.launch.render import Kind, render
from tests.deadline import run_program
from tests.programs import write_program

BASE = """\
model: {name_or_path: llama-2m, init: scratch}
tokenizer: {train_vocab_size: 300}
data: {sources: [{path: python-docs}], seq_length: 32}
training: {max_steps: 20, global_batch_size: 16, micro_batch_size: 2}
"""
LAUNCHERS: dict[Kind, tuple[dict[str, Any], ...]] = {
    "sbatch": ({"kind": "slurm"},),
    "pbs": ({"kind": "pbs"}, {"kind": "pbs", "dialect": "torque"}),
    "torchrun": ({"kind": "ssh", "hosts": ["127.0.0.1", {"ssh": "127.0.0.2"}]},),
    "skypilot": ({"kind": "skypilot"},),
    "kubernetes": (
        {"kind": "kubernetes", "image": "i", "volumes": [{"claim": "c", "path": "/runs"}]},
    ),
}
PAYLOADS = ("x$(touch {0})`touch {0}`", "x'; touch {0}; '", 'x"; touch {0}; "', "x; touch {0} #")
LINES = ("x\ntouch {0}\n", "x\rtouch {0}", "x\x1b[2J", "x\x9b31m", "x\u2028", "x\u202ey", "x\x7f")
BY_DESIGN = ("setup", "script")
"""Lines of bash, and a program of the user's own."""


def text_keys(node: keys.Schema, path: KeyPath) -> Iterator[KeyPath]:
    """Every key below that may hold text of the user's own."""
    for key, child in keys.children(node).items():
        here = (*path, key)
        if key in (*BY_DESIGN, "kind", "resources", "file_mounts"):
            continue
        item = keys.items(child)
        if item is not None:
            own = (*here, 0)
            yield from text_keys(item, own)
            if "string" in keys.value_types(item) and not keys.literals(item):
                yield own
        elif keys.children(child):
            yield from text_keys(child, here)
        if "string" in keys.value_types(child) and not keys.literals(child):
            yield here


def run_file(to: Kind, launcher: dict[str, Any]) -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(BASE)
    count = {} if launcher["kind"] == "ssh" else {"nodes": 2}
    count = {} if launcher["kind"] == "local" else count
    own = {"launcher": {**launcher}, "gpus_per_node": 1, "device": "cpu", **count}
    if to == "kubernetes":
        data["output_dir"] = "/runs"
    data["clusters"] = [own]
    return data


def put(data: Any, path: KeyPath, value: object) -> bool:
    """Set a key, where its section is there or has no kind."""
    for part, following in pairwise(path):
        empty: Any = [] if isinstance(following, int) else {}
        if isinstance(data, list):
            if not data:
                data.append(empty)
        elif not isinstance(data, dict) or data.get(part) is None:
            data[part] = empty
        data = data[part]
        if isinstance(data, str):
            return False
    if isinstance(data, list):
        data[:1] = [value]
    elif isinstance(data, dict):
        data[path[-1]] = value
    return True


def scripts(text: str) -> Iterator[str]:
    """What bash reads of a rendered text."""
    if text.startswith("#!"):
        yield text
        return

    def walk(value: Any) -> Iterator[str]:
        match value:
            case dict():
                for key, inner in value.items():
                    yield from walk(inner)
                    if key in ("setup", "run") and isinstance(inner, str):
                        yield inner
            case list():
                for before, inner in zip(["", *value], value, strict=False):
                    yield from walk(inner)
                    if before == "-c" and isinstance(inner, str):
                        yield inner
            case _:
                pass

    for document in yaml.safe_load_all(text):
        yield from walk(document)


@pytest.fixture
def stubs(tmp_path: Path) -> dict[str, str]:
    """Every program that a script may call, as one that does nothing; the shell is the real one."""
    folder = tmp_path / "bin"
    folder.mkdir()
    names = (
        "python python3 torchrun srun scontrol getent ip qsub pbsdsh sleep hostname date sed awk"
    )
    for name in (names + " module conda sky timeout find ls env rm kill nproc head cat").split():
        write_program(folder / name, "exit 0\n")
    (folder / "touch").symlink_to("/usr/bin/touch")
    (tmp_path / "nodes").write_text("n1\nn2\n")
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NODEID": "0"}
    job |= {"PBS_O_WORKDIR": str(tmp_path), "PBS_JOBID": "1.x", "MASTER_ADDR": "127.0.0.1"}
    job |= {"PBS_NODEFILE": str(tmp_path / "nodes"), "SKYPILOT_NODE_RANK": "0"}
    return {"PATH": str(folder), "HOME": str(tmp_path), "SKYPILOT_NODE_IPS": "127.0.0.1", **job}


@pytest.mark.parametrize("to", ["sbatch", "kubernetes"])
def test_no_value_of_a_run_file_runs(to: Kind, tmp_path: Path, stubs: dict[str, str]) -> None:
    ran, taken, rendered = [], [], 0
    mark = tmp_path / "MARK"
    for launcher in LAUNCHERS[to]:
        form = keys.by_kind(keys.schema_at(("clusters", 0, "launcher")) or {})[launcher["kind"]]
        paths = {p for p in text_keys(keys.tree(), ()) if "launcher" not in p}
        paths |= set(text_keys(form, ("clusters", 0, "launcher")))
        paths.add(("clusters", 0, "environment", "variables", "A_B"))
        for path in sorted(paths, key=str):
            for payload in (*PAYLOADS, *LINES):
                data = run_file(to, launcher)
                if not put(data, path, payload.format(mark)):
                    continue
                try:
                    loaded = load_run_file(tmp_path / "run.yaml", text=yaml.safe_dump(data))
                    if payload in LINES and path[-1] != "A_B":
                        taken.append((path, payload))
                    text = render(loaded, to).text
                except UserError:
                    continue
                rendered += 1
                for script in scripts(text):
                    run_program(["/bin/bash", "-c", script, "bash", "0"], tmp_path, stubs)
                if mark.exists():
                    ran.append((path, payload))
                    mark.unlink()
    assert rendered > 30
    assert not ran, "\n".join(map(str, ran))
    assert not taken, "\n".join(map(str, taken))


def test_the_name_of_the_folder_is_no_line_of_a_script(
    tmp_path: Path, stubs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "MARK"
    folder = tmp_path / "a\ntouch MARK\n"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for to, launchers in [("sbatch", LAUNCHERS["sbatch"])]:
        text = yaml.safe_dump(run_file(to, launchers[0]))
        for script in scripts(render(load_run_file(Path("run.yaml"), text=text), to).text):
            run_program(["/bin/bash", "-c", script, "bash", "0"], tmp_path, stubs)
            assert not mark.exists(), to
