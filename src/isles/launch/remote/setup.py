"""`isles setup`: installs equal Python environments on all hosts, in parallel, and
compares them."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import io
import json
import re
import shlex
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from isles import __version__
from isles.config.load import Loaded
from isles.config.sections.cluster import (
    ClusterConfig,
    EnvironmentConfig,
    QueueSection,
    SshLauncherConfig,
)
from isles.config.sections.output import tracker_sections
from isles.config.sections.run import RunConfig
from isles.config.sections.training import needs_torchao
from isles.errors import ConfigError, PreflightError
from isles.facts.units import format_duration
from isles.launch.answers import read_answer
from isles.launch.ssh.environment import python_of, quoted, setting_lines, tool_lines
from isles.launch.ssh.facts import PACKAGES, code_files, fingerprint
from isles.launch.ssh.hosts import refuse
from isles.launch.ssh.shell import SSH_FAILED, Shell, on_all

PrintLine = Callable[[str], object]

_INSTALL_S = 3600.0
_RESULT = "RESULT "

_WHEEL = "Wheel-Version: 1.0\nGenerator: isles\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_THEN = (2020, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class _InstallResult:
    # The result of `install.py`; without a fingerprint isles is not installed.
    changed: bool
    error: str
    fingerprint: dict[str, str] | None


def setup(loaded: Loaded, *, check: bool, print_line: PrintLine) -> bool:
    """Make the environments of the hosts of each cluster equal, or only compare them.

    Args:
        check: install nothing.
        print_line: prints a line for each step of each host.

    Returns:
        Whether all hosts have equal versions of everything that must be equal.

    Raises:
        ConfigError: the run file has no other machine.
        PreflightError: hosts that could not be reached or set up.
    """
    clusters = [c for c in loaded.config.clusters if _hosts(c)]
    if not clusters:
        kind = loaded.config.clusters[0].launcher.kind
        raise ConfigError(
            f"with launcher {kind}, isles setup has no other machine to set up",
            where=loaded.where("clusters.0.launcher"),
            fix="install on this machine with pip install 'isles[train]'. isles setup is for "
            "launcher ssh, and for slurm and pbs with login",
        )
    is_equal = True
    for cluster in clusters:
        if len(clusters) > 1:
            print_line(f"cluster {cluster.name}")
        is_equal &= _setup_cluster(loaded, cluster, check=check, print_line=print_line)
    return is_equal


def _setup_cluster(
    loaded: Loaded, cluster: ClusterConfig, *, check: bool, print_line: PrintLine
) -> bool:
    launcher, timeout_s = cluster.launcher, 10.0
    if isinstance(launcher, SshLauncherConfig):
        timeout_s = launcher.connect_timeout
    shells = [Shell(host, timeout_s) for host in _hosts(cluster)]
    workdir = cluster.workdir or str(Path.cwd())
    payload = _payload(loaded, cluster, check)
    make = [] if check else make_lines(cluster.environment, workdir)
    lines, python = setting_lines(cluster, workdir), shlex.quote(python_of(cluster.environment))
    program = Path(__file__).with_name("install.py").read_text(encoding="utf-8")
    script = "\n".join([*make, *lines, f"exec {python} -c {shlex.quote(program)}"])
    answers, failures = on_all(shells, lambda shell: _install(shell, script, payload, print_line))
    refuse([failure for _, failure in failures], len(shells))
    results = {s.name: r for s, r in zip(shells, answers, strict=True) if r is not None}
    for name, result in results.items() if not check else ():
        print_line(f"{name}: {'installed' if result.changed else 'was ready'}")
    return _compare({name: r.fingerprint or {} for name, r in results.items()}, print_line)


def difference_lines(found: dict[str, dict[str, str]]) -> tuple[list[str], bool]:
    """Differences between hosts, one per line, and whether any of them must be fixed.

    Args:
        found: fingerprints by host.
    """
    lines, is_bad = [], False
    names = sorted({name for own in found.values() for name in own})
    for name in names:
        values = {host: own.get(name, "none") for host, own in found.items()}
        if len(set(values.values())) == 1:
            continue
        words = ", ".join(f"{value} on {host}" for host, value in values.items())
        # Only the first two parts of Python's version decide which code it can run.
        short = {".".join(value.split(".")[:2]) for value in values.values()}
        must = name in ("isles", "code", "torch") or (name == "python" and len(short) > 1)
        is_bad = is_bad or must
        lines.append(f"{name} differs{'' if must else ' (this is allowed)'}: {words}")
    return lines, is_bad


def _compare(found: dict[str, dict[str, str]], print_line: PrintLine) -> bool:
    lines, is_bad = difference_lines(found)
    if not is_bad:
        # On the launching machine only isles itself must be equal: it may lack torch.
        here = {"this machine": fingerprint(), **found}
        both = ("isles", "code")
        own = {h: {key: all_.get(key, "none") for key in both} for h, all_ in here.items()}
        more, is_bad = difference_lines(own)
        lines += more
    if not is_bad:
        first = next(iter(found.values()))
        words = " · ".join(f"{k} {first[k]}" for k in ("python", "isles", "torch") if k in first)
        lines.append(
            f"{len(found)} hosts are equal: {words}" if len(found) > 1 else f"ready: {words}"
        )
    for line in lines:
        print_line(line)
    return not is_bad


def _hosts(cluster: ClusterConfig) -> list[str]:
    # Machines of a cluster that are reached by ssh; empty: this machine, or another start.
    launcher = cluster.launcher
    if isinstance(launcher, SshLauncherConfig):
        return [host.ssh for host in cluster.hosts]
    if isinstance(launcher, QueueSection) and launcher.login is not None:
        return [launcher.login]
    return []


def extras_of(config: RunConfig, cluster: ClusterConfig) -> list[str]:
    """The extras of isles that the nodes of a cluster need."""
    if cluster.environment.container is not None:
        return []  # the image has them; the Python of the hosts needs only isles
    kinds = {tracker.kind for tracker in tracker_sections(config.track)}
    strategy = cluster.strategy or config.strategy
    extras = {
        "train": True,
        "bucket": config.diloco is not None and config.diloco.engine == "bucket",
        "deepspeed": strategy.kind == "deepspeed",
        "hivemind": config.diloco is not None and config.diloco.engine == "hivemind",
        "qlora": config.adapter.type == "qlora",
        "torchao": needs_torchao(config.training),
        "wandb": "wandb" in kinds,
        "mlflow": "mlflow" in kinds,
    }
    return [name for name, is_needed in extras.items() if is_needed]


def _payload(loaded: Loaded, cluster: ClusterConfig, check: bool) -> str:
    # Input of `install.py`.
    wanted = fingerprint()
    named = {
        re.split(r"[\[=<>!~; ]", text, maxsplit=1)[0].lower()
        for text in cluster.environment.packages
    }
    # The versions of this machine, without the suffix of the GPU type.
    pins = [
        f"{name}=={wanted[name].partition('+')[0]}"
        for name in PACKAGES
        if name in wanted and name not in named
    ]
    return json.dumps(
        {
            "wheel": "" if check else base64.b64encode(wheel_bytes()).decode(),
            "wheel_name": wheel_name(),
            "extras": extras_of(loaded.config, cluster),
            "requirements": list(cluster.environment.packages),
            "constraints": pins,
            "check": check,
            "wanted": wanted,
        }
    )


def make_lines(environment: EnvironmentConfig, workdir: str) -> list[str]:
    """Bash that creates the environment if it is missing."""
    minor = "{}.{}".format(*sys.version_info[:2])
    if environment.venv is not None:
        venv = quoted(environment.venv)
        lock = f"{venv}/.isles-lock"
        make = [
            f"[ -x {venv}/bin/python ] && exit 0",
            f"for p in python{minor} python3; do",
            "  $p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break",
            "  p=",
            "done",
            f'[ -n "$p" ] || {{ echo "no Python 3.11 or newer found; run sudo apt install '
            f'python{minor} python{minor}-venv" >&2; exit 1; }}',
            # An incomplete venv, without pip, must not count as a venv the next time.
            f"$p -m venv {venv} || {{ rm -f {venv}/bin/python; exit 1; }}",
            f"echo made {venv} with $($p --version)",
        ]
    elif environment.conda is not None:
        name = quoted(environment.conda)
        flag = "-p" if "/" in environment.conda else "-n"
        lock = "~/.isles/conda-lock"
        make = [
            f"conda run {flag} {name} true >/dev/null 2>&1 && exit 0",
            f"conda create -y -q {flag} {name} python={minor} || exit 1",
            f"echo made conda environment {name} with Python {minor}",
        ]
    else:
        return []
    # The hosts may share the environment: only one of them creates it.
    wait = f'mkdir -p "$(dirname {lock})" && exec 9>>{lock} || exit 1'
    wait += "; command -v flock >/dev/null && flock 9"  # macOS has none
    folder = f"mkdir -p {quoted(workdir)} && cd {quoted(workdir)} || exit 1"
    return [folder, "(", *tool_lines(environment), wait, *make, ") </dev/null || exit 1"]


def _install(shell: Shell, script: str, payload: str, print_line: PrintLine) -> _InstallResult:
    # Run `install.py` there, and print its steps.
    answers: list[str] = []

    def take(line: str) -> None:
        if line.startswith(_RESULT):
            answers.append(line.removeprefix(_RESULT))
        elif line.startswith(("made ", "installing ")):
            print_line(f"{shell.name}: {line}")

    command = ["bash", "-c", script]
    code, text = shell.stream(command, take, stdin=payload, timeout_s=_INSTALL_S)
    if not answers and code == SSH_FAILED:
        raise shell.failure(text)
    where = f"host {shell.name}"
    fix = "fix the error above, then run isles setup again; clusters.0.environment sets the Python "
    fix += "and the packages for pip"
    if answers:
        result = read_answer(
            _InstallResult,
            answers[-1],
            by="isles setup there",
            where=where,
            fix="check the output of its Python at the start (set by clusters.0.environment): "
            f"ssh {shell.name}",
            id="setup.failed",
        )
        if not result.error:
            return result
        what = result.error
    elif code is None:
        limit = format_duration(_INSTALL_S)
        what = f"it was not set up within {limit}; pip may still be running"
        fix = f"check it with ssh {shell.name} 'ps -ef | grep pip'; isles setup continues from the "
        fix += "current state if you run it again"
    else:
        what = f"could not set it up: {(text.strip().splitlines() or [f'exit code {code}'])[-1]}"
    raise PreflightError(what, where=where, fix=fix, id="setup.failed")


def wheel_name() -> str:
    """The file name of `wheel_bytes`, which pip reads."""
    return f"isles-{__version__}-py3-none-any.whl"


def wheel_bytes() -> bytes:
    """The installed isles of this machine as a wheel: the same bytes for the same code."""
    distribution = importlib.metadata.distribution("isles")
    info = f"isles-{__version__}.dist-info"
    scripts = [e for e in distribution.entry_points if e.group == "console_scripts"]
    entries = "".join(f"{entry.name} = {entry.value}\n" for entry in scripts)
    files = [(f"isles/{name}", content) for name, content in code_files()]
    files += [
        (f"{info}/METADATA", (distribution.read_text("METADATA") or "").encode()),
        (f"{info}/WHEEL", _WHEEL.encode()),
        (f"{info}/entry_points.txt", f"[console_scripts]\n{entries}".encode()),
    ]
    rows = "".join(f"{name},{_digest(content)},{len(content)}\n" for name, content in files)
    files.append((f"{info}/RECORD", f"{rows}{info}/RECORD,,\n".encode()))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files:
            archive.writestr(zipfile.ZipInfo(name, _THEN), content, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _digest(content: bytes) -> str:
    value = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=")
    return f"sha256={value.decode()}"
