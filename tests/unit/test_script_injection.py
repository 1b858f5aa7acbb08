"""Values of a run file in scripts: hostile ones are refused or quoted, and none of them runs."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from isles.config import keys
from isles.config.load import Loaded, load_run_file
from isles.config.yaml import KeyPath
from isles.errors import UserError
from isles.launch.queue.script import JobText, job_script
from isles.launch.render import render
from isles.run.paths import RunDir
from tests.deadline import run_program
from tests.programs import write_program

BASE = """\
model: {name_or_path: llama-2m, init: scratch}
tokenizer: {train_vocab_size: 300}
data: {sources: [{path: python-docs}], seq_length: 32}
training: {max_steps: 20, global_batch_size: 16, micro_batch_size: 2}
"""
To = Literal["sbatch", "pbs", "torchrun", "skypilot", "kubernetes", "job"]
"""What `isles render` writes, and the job that isles submits itself."""
HOURS = {"time": "2h"}
LAUNCHERS: dict[To, tuple[dict[str, Any], ...]] = {
    "sbatch": ({"kind": "slurm"},),
    "pbs": ({"kind": "pbs", **HOURS}, {"kind": "pbs", "dialect": "torque", **HOURS}),
    "torchrun": ({"kind": "ssh", "hosts": ["127.0.0.1", {"ssh": "127.0.0.2"}]},),
    "skypilot": ({"kind": "skypilot"},),
    "kubernetes": (
        {"kind": "kubernetes", "image": "i", "volumes": [{"claim": "c", "path": "/runs"}]},
    ),
    "job": ({"kind": "slurm"}, {"kind": "pbs", **HOURS}, {"kind": "pbs", "dialect": "torque"}),
}
PAYLOADS = ("x$(touch {0})`touch {0}`", "x'; touch {0}; '", 'x"; touch {0}; "', "x; touch {0} #")
LINES = ("x\ntouch {0}\n", "x\rtouch {0}", "x\x1b[2J", "x\x9b31m", "x\u2028", "x\u202ey", "x\x7f")
BY_DESIGN = ("setup", "script")
"""Lines of bash, and a program of the user's own."""
VARIABLE: KeyPath = ("clusters", 0, "environment", "variables", "A_B")
"""Its value alone may have lines."""


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


def keys_of(launcher: dict[str, Any]) -> list[KeyPath]:
    """The text keys of a run file with this launcher."""
    place: KeyPath = ("clusters", 0, "launcher")
    form = keys.by_kind(keys.schema_at(place) or {})[launcher["kind"]]
    paths = {path for path in text_keys(keys.tree(), ()) if "launcher" not in path}
    return sorted({*paths, *text_keys(form, place), VARIABLE}, key=str)


def run_file(to: To, launcher: dict[str, Any], python: str) -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(BASE)
    count = {} if launcher["kind"] == "ssh" else {"nodes": 2}
    # A copy of its lists too: `put` changes them.
    own = {"launcher": deepcopy(launcher), "gpus_per_node": 1, "device": "cpu", **count}
    if to not in ("kubernetes", "skypilot"):
        own["environment"] = {"python": python}
    if to == "kubernetes":
        data["output_dir"] = "/runs"
    data["clusters"] = [own]
    return data


def put(data: Any, path: KeyPath, value: object) -> bool:
    """Set a key, where its section is there or has no kind."""
    if path[-1] in ("venv", "conda"):  # in place of the Python that there is
        data["clusters"][0].get("environment", {}).pop("python", None)
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


def text_of(loaded: Loaded, to: To) -> str:
    if to != "job":
        return render(loaded, to).text
    # As start_in_queue makes it.
    cluster, config = loaded.config.clusters[0], loaded.config
    output_dir = Path(config.output_dir).expanduser().absolute()
    attempt = RunDir(output_dir / f"{config.name}-1").attempt(1)
    job = JobText(cluster.launcher, 2, 1, "cpu", cluster.workdir or str(Path.cwd()))
    return job_script(config, replace(job, nodes=cluster.max_nodes).of(attempt))


def scripts(text: str) -> Iterator[str]:
    """What bash reads of a text."""
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


class Bash:
    """Runs many scripts in one bash, each in a subshell, among programs that do nothing.

    The scripts come to their ends: what starts a node runs it here, names have the address 0.0.0.0,
    where nobody listens, and a folder that is not there does not stop them. Their Python is one of
    these programs, since those of this machine would begin to train.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder, folder / "bin"
        self.python = str(self.bin / "python")
        self._count = 0
        self._names: dict[int, str] = {}
        self.bin.mkdir()
        (folder / "scripts").mkdir()
        # HOME has the venv that SkyPilot's nodes make.
        (folder / ".isles" / "venv" / "bin").mkdir(parents=True)
        (folder / ".isles" / "venv" / "bin" / "activate").write_text("")
        (folder / "nodes").write_text(f"{os.uname().nodename}\nn2\n")
        idle = "module conda sky qsub sleep rm env timeout kill pkill flock ssh scancel dirname"
        for name in idle.split():
            (self.bin / name).symlink_to("/bin/true")
        for name in ("bash", *shlex.split("touch mkdir cat head sed awk date nproc ls find")):
            (self.bin / name).symlink_to(f"/usr/bin/{name}")
        self._ended = folder / "ended"
        ended = f'echo "$SCRIPT" >>{shlex.quote(str(self._ended))}'
        for name in ("python", "torchrun", "python3", "python3.11"):
            write_program(self.bin / name, ended)
        write_program(self.bin / "getent", "echo 0.0.0.0 STREAM")
        write_program(self.bin / "hostname", "echo 0.0.0.0")
        write_program(self.bin / "ip", "echo 1: lo inet 0.0.0.0/8 dev lo")
        write_program(self.bin / "scontrol", "echo n1 NodeAddr=n1")
        write_program(self.bin / "srun", 'while [ "$1" != bash ]; do shift; done; exec "$@"')
        task = 'while [ "$1" != -- ]; do shift; done; shift; shift 2; exec bash "$@"'
        write_program(self.bin / "pbsdsh", task)

    @property
    def mark(self) -> str:
        """The file that the next script makes if a value of it runs."""
        return str(self.folder / f"RAN-{self._count}")

    def add(self, name: str, text: str) -> None:
        """Take in the scripts of a text that hold the mark; `name` for the list of what has run."""
        for number, script in enumerate(scripts(text)):
            if Path(self.mark).name in script:
                (self.folder / "scripts" / f"{self._count}.{number}").write_text(script)
        self._names[self._count] = name
        self._count += 1

    def run(self, *args: str) -> list[str]:
        """Run all; the names of those with values that have run."""
        words = shlex.join(args)
        line = f"""
cd() {{ builtin cd "$@" 2>/dev/null || :; }}
source() {{ builtin source "$@" 2>/dev/null || :; }}
for SCRIPT in scripts/*; do
  export SCRIPT; export PBS_JOBID=1.${{SCRIPT#*/}}
  (set -- {words}; . "$SCRIPT") </dev/null >/dev/null 2>>errors || :
done
"""
        job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NODEID": "0"}
        job |= {"PBS_O_WORKDIR": str(self.folder), "PBS_NODEFILE": str(self.folder / "nodes")}
        job |= {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "127.0.0.1"}
        env = {"PATH": str(self.bin), "HOME": str(self.folder), **job}
        done = run_program(["/bin/bash", "-c", line], self.folder, env)
        assert done.returncode == 0, done.stderr
        ran = [int(path.name.removeprefix("RAN-")) for path in self.folder.glob("RAN-*")]
        ended = set(self._ended.read_text().split()) if self._ended.exists() else set()
        said = (self.folder / "errors").read_text()[:2000]
        assert len(ended) > 10, (
            f"of {self._count} scripts {len(ended)} came to their values: {said}"
        )
        return [self._names[number] for number in sorted(ran)]


@pytest.mark.parametrize("to", LAUNCHERS)
def test_no_value_of_a_run_file_runs(to: To, tmp_path: Path) -> None:
    bash, done = Bash(tmp_path), set[tuple[str, KeyPath]]()
    for launcher in LAUNCHERS[to]:
        for path in keys_of(launcher):
            dialect = launcher.get("dialect", "") if "launcher" in path else ""
            if (place := (f"{launcher['kind']}{dialect}", path)) in done:
                continue
            done.add(place)
            for payload in (*PAYLOADS, *(LINES if path == VARIABLE else ())):
                data = run_file(to, launcher, bash.python)
                if not put(data, path, payload.format(bash.mark)):
                    continue
                try:
                    loaded = load_run_file(tmp_path / "run.yaml", text=yaml.safe_dump(data))
                    text = text_of(loaded, to)
                except UserError:
                    continue
                bash.add(f"{path}: {payload!r}", text)
    ran = bash.run(*(["0"] if to == "torchrun" else []))
    assert not ran, "\n".join(ran)


def test_no_key_but_that_of_a_variable_takes_lines(tmp_path: Path) -> None:
    taken, done = [], set[KeyPath]()
    for to, launchers in LAUNCHERS.items():
        for launcher, payload in itertools.product(launchers[:1], LINES):
            for path in keys_of(launcher):
                if path == VARIABLE or ("launcher" not in path and path in done):
                    continue
                data = run_file(to, launcher, "python")
                if not put(data, path, payload.format(tmp_path)):
                    continue
                try:
                    load_run_file(tmp_path / "run.yaml", text=yaml.safe_dump(data))
                except UserError:
                    continue
                taken.append(f"{path}: {payload!r}")
        done.update(keys_of(launchers[0]))
    assert not taken, "\n".join(taken)


def test_the_name_of_the_folder_is_no_line_of_a_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bash = Bash(tmp_path)
    for to, launchers in LAUNCHERS.items():
        for index, launcher in enumerate(launchers):
            for payload in (*PAYLOADS, "x\ntouch {0}\n", "x\n#PBS -W {0}\n"):
                folder = tmp_path / f"{to}{index}{payload.format(Path(bash.mark).name)}"
                folder.mkdir(exist_ok=True)
                monkeypatch.chdir(folder)
                text = yaml.safe_dump(run_file(to, launcher, bash.python))
                try:
                    found = text_of(load_run_file(Path("run.yaml"), text=text), to)
                except UserError:
                    continue
                lines = found.splitlines()
                # Schedulers read their options above the first command.
                head = itertools.takewhile(lambda line: not line or line[0] == "#", lines)
                assert not any(line.startswith("#PBS -W") for line in head)
                bash.add(f"{to}: {payload!r}", found)
    ran = bash.run("0")
    assert not ran, "\n".join(ran)
