"""`isles report`: what a bug report needs of a run as one zip file, without secrets.

`gather` collects texts of a run (`Bundle`), on the machine that has its directory; every text goes
through a `Redactor`. For a run on another machine, isles on that machine packs the bundle
(`packed`), and this machine unpacks it. The files of each of several clusters are in a folder with
the cluster's name.
"""

from __future__ import annotations

import base64
import importlib.metadata
import io
import json
import netrc
import os
import platform
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isles import __version__
from isles.config.foreign import folder_below, open_regular
from isles.config.sections.outer import DiLoCoConfig
from isles.errors import PreflightError, UserError, cut_more
from isles.facts.secrets import Redactor, may_be_secret
from isles.facts.units import format_bytes
from isles.launch.gpus import ask_driver
from isles.launch.remote.login import ask_isles
from isles.monitor.live.source import snapshot
from isles.monitor.logs import LogChoice
from isles.monitor.stream import shown_lines
from isles.run.env import huggingface_access, inherited, usable_cores
from isles.run.find import run_of
from isles.run.join_line import JoinLine
from isles.run.live import ask_for_stacks
from isles.run.nodes import read_own_fleet
from isles.run.owner import owner_of, read_text, shown_only
from isles.run.paths import Attempt, RunDir
from isles.run.records import MAX_LIST_BYTES, explain_write_errors, read_record
from isles.run.remote import MultiClusterRun, RemoteRun, last_report
from isles.run.resolved import read_resolved
from isles.run.state import number_of, run_state

Found = RunDir | RemoteRun | MultiClusterRun | Path
"""A path: the state directory of a hub that was opened by itself."""

MOST_BYTES = 19 * 10**6
"""Largest sum of all texts, unpacked."""

ANSWER = "ISLES-BUNDLE "
"""Begins the line with the file, packed in base64."""

_SECRET_BYTES = 1 << 16
_RECORD_BYTES, _LOG_BYTES, _ROWS_BYTES = 1 << 20, 1 << 18, 1 << 19
_LEAST_BYTES = 1 << 13
_README_BYTES = 1 << 18
_LOGS_SHARE = 0.6
"""Largest part of the remaining bytes that the logs of one attempt may take."""

_ATTEMPTS = 4
"""Number of attempts, counted from the last, whose records and logs are in the bundle."""

_LINES_ELSEWHERE = 500
_STACKS_S, _LOOK_S, _THERE_S = 10.0, 0.1, 120.0
_NO_ARCHIVE = zipfile.BadZipFile, zlib.error, RuntimeError, EOFError, OSError
"""Errors of zipfile for a damaged archive. RuntimeError: the archive is encrypted."""

_RUN_FILES = {
    "run.yaml": "the run file as it was given",
    "resolved.yaml": "every value that the ranks read, and where it comes from",
    "clusters.json": "where the run of each cluster is",
    "node-of.json": "which host has the run itself",
    "status.json": "what the run said of itself last",
    "balance.json": "how rows were divided",
    "summary.json": "figures at the end",
}
_HUB_FILES = ("run.yaml", "settings.json", "process.json")
_ATTEMPT_FILES = ("run.yaml", "job.sh", "job-id", "last-step")


@dataclass(slots=True)
class Bundle:
    """Texts of a report by their names, each redacted when it is added.

    Args:
        left: bytes that may still be added.
        left_out: missing texts, each with the reason.
    """

    redact: Redactor
    left: int = MOST_BYTES
    files: dict[str, bytes] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    _is_cut: bool = False

    def add(self, name: str, text: str, about: str = "") -> None:
        """Add one text. If the text is too large, its beginning is cut off."""
        if self._is_full(name):
            return
        data = self.redact(text).encode("utf-8", errors="replace")
        if len(data) > self.left:
            data = data[len(data) - self.left :]
            data = data.partition(b"\n")[2]
            self.left_out.append(
                f"{name}: all but its last {format_bytes(len(data))}, for the size"
            )
        if data:
            self.left -= max(len(data), len(text) // 2)  # the search for secrets takes time
            self.files[name], self.about[name] = data, about

    def _is_full(self, name: str) -> bool:
        # Then no more files are read: there may be very many.
        if self.left > _LEAST_BYTES:
            return False
        if not self._is_cut:
            self._is_cut = True
            self.left_out.append(f"{name} and all files after it: the report is full")
        return True

    def add_end(self, name: str, path: Path, most: int, about: str = "") -> None:
        """Add the last lines of a file, if the file exists.

        `name` has as many folders as `path` has below the run directory. A link that leads out of
        that directory is skipped, because somebody else will read the report.
        """
        if self._is_full(name):
            return
        try:
            root = path.parents[name.count("/")].resolve(strict=True)
            resolved = path.resolve(strict=True)
            if not resolved.is_relative_to(root):
                self.left_out.append(f"{name}: it is a link that leads out of the run directory")
                return
            # Follow no further link: somebody may have put one in place since.
            *parts, last = resolved.relative_to(root).parts or (".",)
            with (
                folder_below(root, parts) as folder,
                open_regular(last, os.O_NOFOLLOW, folder) as stream,
            ):
                size = os.fstat(stream.fileno()).st_size
                stream.seek(max(0, size - most))
                data = stream.read(most)
        except (FileNotFoundError, NotADirectoryError):
            return
        except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
            why = getattr(error, "strerror", None) or error
            self.left_out.append(f"{name} cannot be read ({why})")
            return
        if size > most:
            # From the next whole line on: half of a secret would not be known as one.
            data = data.partition(b"\n")[2]
            about = f"{about or 'log'}, the last {format_bytes(len(data))} of {format_bytes(size)}"
        self.add(name, data.decode("utf-8", errors="replace"), about)

    def put(self, folder: str, files: Mapping[str, bytes]) -> None:
        """Add the files of another report below a folder."""
        for name, data in files.items():
            self.add(f"{folder}/{name}", data.decode("utf-8", errors="replace"))


def gather(found: Found, output_dir: Path, most_bytes: int | None = None) -> Bundle:
    """Collect what a report has of a run; takes some seconds.

    Raises:
        PreflightError: the machine of a run on another machine has no isles that can do it.
    """
    bundle = Bundle(Redactor(_known_secrets(found)), (most_bytes or MOST_BYTES) - _README_BYTES)
    bundle.add("versions.json", json.dumps(_versions(), indent=1), "this machine and its packages")
    if not isinstance(found, RemoteRun):  # its own machine does it
        _gather_snapshot(bundle, found)
    match found:
        case RunDir():
            _gather_run(bundle, found)
        case RemoteRun():
            _gather_remote(bundle, found, output_dir)
        case MultiClusterRun():
            _gather_clusters(bundle, found, output_dir)
        case _:
            _gather_hub(bundle, found, "")
    if owner := _owner(found):
        bundle.left_out.append(shown_only(owner))
    bundle.left += _README_BYTES
    bundle.add("README.txt", _readme(bundle))
    return bundle


def packed(bundle: Bundle) -> bytes:
    """The zip file."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ["README.txt", *(name for name in bundle.files if name != "README.txt")]:
            archive.writestr(name, bundle.files[name])
    return stream.getvalue()


def answer_line(bundle: Bundle) -> str:
    """The zip file as one line, for isles on another machine."""
    return ANSWER + base64.b64encode(packed(bundle)).decode()


def default_place(found: Found, output_dir: Path) -> Path:
    """Where a report is written if nothing else is asked for; of a run here, its directory."""
    name = f"report-{time.strftime('%Y%m%d-%H%M%S')}.zip"
    match found:
        case RemoteRun():
            return output_dir / f"{found.label.replace('/', '_')}-{name}"
        case _ if _owner(found):
            return Path(f"{found.name}-{name}")  # nothing is written into another user's folder
        case RunDir() | MultiClusterRun():
            return found.path / name
        case _:
            return found / name


def _owner(found: Found) -> str:
    return owner_of(found / "settings.json") if isinstance(found, Path) else found.owner


def is_inside(found: Found, path: Path) -> bool:
    """True if a path is in the run directory, so that isles need not ask."""
    if isinstance(found, RemoteRun):
        return False
    folder = found if isinstance(found, Path) else found.path
    return path.absolute().resolve().is_relative_to(folder.resolve())


def write_report(path: Path, bundle: Bundle) -> int:
    """Write the file, readable by this user alone; its size.

    Raises:
        UserError: the file exists, or cannot be written.
    """
    if path.exists():
        raise UserError(
            "there is something of this name already",
            where=str(path),
            fix="give another name: -o FILE",
            id="file.exists",
        )
    data = packed(bundle)
    with explain_write_errors(path, "give another file: -o FILE"):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
        except OSError:
            path.unlink(missing_ok=True)
            raise
    return len(data)


def contents(bundle: Bundle) -> list[str]:
    """Contents of a report, one line per file."""
    width = max(map(len, bundle.files))
    lines = []
    for name, data in sorted(bundle.files.items()):
        about = bundle.about.get(name, "")
        lines.append(f"{name:<{width}}  {format_bytes(len(data)):>9}  {about}".rstrip())
    return lines


def _readme(bundle: Bundle) -> str:
    lines = [
        f"A report of isles {__version__}, made on {time.strftime('%Y-%m-%d %H:%M:%S %z')}.",
        "",
        "It has no weights, no data and no environment variables. Tokens, passwords, keys and join",
        "lines are taken out as far as they are known or look like such. Look through it before",
        "you pass it on: host names, paths, addresses in your network and what your programs have",
        "printed are in it.",
        "",
        *contents(bundle),
    ]
    if bundle.left_out:
        lines += ["", "Not in it:", *(f"  {text}" for text in bundle.left_out)]
    return "\n".join(lines) + "\n"


def _gather_snapshot(bundle: Bundle, found: Found) -> None:
    try:
        text = snapshot(found).model_dump_json(indent=1)
    except UserError as error:
        bundle.left_out.append(f"snapshot.json: {error.what}")
    else:
        bundle.add("snapshot.json", text, "what `isles top --json` shows at this moment")


def _gather_run(bundle: Bundle, run_dir: RunDir) -> None:
    for name, about in _RUN_FILES.items():
        bundle.add_end(name, run_dir.path / name, _RECORD_BYTES, about)
    attempts = run_dir.attempts()[-_ATTEMPTS:]
    if attempts and run_state(run_dir).is_alive:
        _ask_stacks(bundle, attempts[-1])
    for attempt in reversed(attempts):
        _gather_attempt(bundle, attempt)
    bundle.add_end("metrics.jsonl", run_dir.metrics, _ROWS_BYTES, "records of the last steps")
    samples = sorted(run_dir.telemetry.glob("*.jsonl"))
    for path in samples:
        most = max(_LEAST_BYTES, min(_ROWS_BYTES, bundle.left // (2 * len(samples))))
        bundle.add_end(f"telemetry/{path.name}", path, most, "what the node's agent has sampled")
    older = run_dir.attempts()[:-_ATTEMPTS]
    if older:
        bundle.left_out.append(f"attempts {older[0].number} to {older[-1].number}: older starts")
    if attempts:
        _gather_elsewhere(bundle, run_dir, attempts[-1])


def _ask_stacks(bundle: Bundle, attempt: Attempt) -> None:
    end = time.monotonic() + _STACKS_S
    ranks: dict[str, Any] = {}
    why = f"rank 0 has not answered within {_STACKS_S:.0f} s"
    try:
        asked_at = ask_for_stacks(attempt)
        while not ranks and time.monotonic() < end:
            answer = read_record(attempt.stacks, MAX_LIST_BYTES) or {}
            if (number_of(answer, "asked_at") or 0.0) >= asked_at:
                ranks = answer.get("ranks") or {}
                break
            time.sleep(_LOOK_S)
    except OSError as error:
        why = f"the ranks cannot be asked: {error.strerror}"
    except UserError as error:
        why = error.what
    if ranks:
        text = json.dumps(ranks, indent=1)
        bundle.add("stacks-now.json", text, "the stack of each rank")
    else:
        bundle.left_out.append(f"stacks-now.json: {why}")


def _gather_attempt(bundle: Bundle, attempt: Attempt) -> None:
    folder = f"attempts/{attempt.path.name}"
    records = [*attempt.path.glob("*.json"), *attempt.hangs.glob("*")]
    for path in (*(attempt.path / name for name in _ATTEMPT_FILES), *sorted(records)):
        name = path.relative_to(attempt.path).as_posix()
        bundle.add_end(f"{folder}/{name}", path, _RECORD_BYTES)
    logs = [*attempt.path.glob("*.log"), *attempt.path.glob("*.out")]
    # Agents before ranks; of very many each gets little.
    logs.sort(key=lambda path: (path.name.startswith("rank-"), len(path.name), path.name))
    room = int(bundle.left * _LOGS_SHARE)
    most = max(_LEAST_BYTES, min(_LOG_BYTES, room // max(1, len(logs))))
    for path in logs:
        bundle.add_end(f"{folder}/{path.name}", path, most)


def _gather_elsewhere(bundle: Bundle, run_dir: RunDir, attempt: Attempt) -> None:
    # Logs that only other nodes have.
    try:
        fleet = read_own_fleet(attempt)
        if fleet is None or len(fleet) < 2 or fleet.launcher == "local":
            return
        choice = LogChoice(last=_LINES_ELSEWHERE)
        lines = list(shown_lines(run_dir, choice, bundle.left_out.append))
    except UserError as error:
        bundle.left_out.append(f"logs of other nodes: {error.what}")
        return
    bundle.add("logs-of-all-nodes.txt", "\n".join(lines) + "\n", "`isles logs`")


def _gather_remote(bundle: Bundle, run: RemoteRun, output_dir: Path) -> None:
    bundle.files["versions-here.json"] = bundle.files.pop("versions.json")
    bundle.about["versions-here.json"] = "the machine that the report was asked for on"
    try:
        words = ["report", run.path, "--print", "--most-bytes", str(bundle.left)]
        done = ask_isles(run, words, timeout_s=_THERE_S)
        answers = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
        if not answers:
            noise = cut_more(done.stderr)[0].strip().splitlines()
            what = noise[0].removeprefix("error: ") if noise else "no answer"
            raise PreflightError(what, where=f"host {run.host}", id="host.answers")
        data = base64.b64decode(answers[-1].removeprefix(ANSWER))
        for name, text in _unpacked(data):
            bundle.add("README-there.txt" if name == "README.txt" else name, text)
    except (UserError, ValueError, *_NO_ARCHIVE) as error:
        what = error.what if isinstance(error, UserError) else str(error)
        bundle.left_out.append(f"all that is on {run.host}, which cannot be asked: {what}")
        known = last_report(output_dir, run)
        if known is not None:
            text = json.dumps({"at": known[0], **known[1]}, indent=1)
            bundle.add("status-last-known.json", text, "the last answer to `isles status`")


def _unpacked(data: bytes) -> Iterator[tuple[str, str]]:
    # No file of another machine is believed to be small, nor its name to stay in a folder.
    left = MOST_BYTES
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            parts = info.filename.replace("\\", "/").split("/")
            if ".." in parts or parts[0] == "" or parts[0].endswith(":"):
                continue
            left -= info.file_size
            if left < 0:
                return
            with archive.open(info) as stream:
                yield info.filename, stream.read(info.file_size).decode("utf-8", errors="replace")


def _gather_clusters(bundle: Bundle, run: MultiClusterRun, output_dir: Path) -> None:
    for name in ("run.yaml", "clusters.json"):
        bundle.add_end(name, run.path / name, _RECORD_BYTES, _RUN_FILES[name])
    if run.state.is_dir():
        _gather_hub(bundle, run.state, "hub/")
    for count, cluster in enumerate(run.clusters):
        own = run_of(run, cluster)
        if own is None:
            bundle.left_out.append(f"{cluster.name}: it has no run directory")
            continue
        part = gather(own, output_dir, bundle.left // (len(run.clusters) - count))
        bundle.put(cluster.name, part.files)
        bundle.about |= {f"{cluster.name}/{name}": text for name, text in part.about.items()}
        bundle.left_out += [f"{cluster.name}: {text}" for text in part.left_out]


def _gather_hub(bundle: Bundle, state: Path, folder: str) -> None:
    for name in _HUB_FILES:
        bundle.add_end(f"{folder}{name}", state / name, _RECORD_BYTES)
    bundle.add_end(f"{folder}hub.log", state / "hub.log", _LOG_BYTES, "log of the hub")


def _versions() -> dict[str, Any]:
    packages = {
        dist.metadata["Name"]: dist.version
        for dist in importlib.metadata.distributions()
        if dist.metadata["Name"]
    }
    driver = ask_driver("--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    return {
        "isles": __version__,
        "python": platform.python_version(),
        "os": platform.platform(),
        "machine": platform.machine(),
        "cores": usable_cores(),
        "gpus": driver.splitlines(),
        "gpu_links": ask_driver("topo", "-m").splitlines(),
        "packages": dict(sorted(packages.items(), key=lambda item: item[0].lower())),
    }


def _known_secrets(found: Found) -> Iterator[str]:
    # Whatever this machine can read that must not be passed on.
    environ = inherited()
    yield from (value for name, value in environ.items() if may_be_secret(name))
    yield huggingface_access().token
    with suppress(OSError, netrc.NetrcParseError):
        yield from (entry[2] for entry in netrc.netrc().hosts.values() if entry[2])
    match found:
        case RunDir():
            yield from _secrets_of_run(found)
        case MultiClusterRun():
            yield from _texts([found.path / "join", *_hub_secrets(found.state)])
            for cluster in found.clusters:
                own = run_of(found, cluster)
                yield from _secrets_of_run(own) if isinstance(own, RunDir) else ()
        case Path():
            yield from _texts(_hub_secrets(found))
        case _:
            pass


def _hub_secrets(state: Path) -> list[Path]:
    return [state / "join", state / "token", state / "key.pem"]


def _secrets_of_run(run_dir: RunDir) -> Iterator[str]:
    yield from _texts([run_dir.join_line, *(a.token for a in run_dir.attempts())])
    yield str((read_record(run_dir.outer / "member.json") or {}).get("id") or "")
    with suppress(OSError, UserError, ValueError):
        config = read_resolved(run_dir).config
        for cluster in config.clusters:
            variables = cluster.environment.variables
            yield from (value for name, value in variables.items() if may_be_secret(name))
        hivemind = config.outer.hivemind if isinstance(config.outer, DiLoCoConfig) else None
        if hivemind is not None and hivemind.secret_file is not None:
            yield from _texts([Path(hivemind.secret_file).expanduser()])


def _texts(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        with suppress(OSError, ValueError):
            text = read_text(path, _SECRET_BYTES)[0].strip()
            try:
                yield JoinLine.parse(text).token  # its address is no secret
            except UserError:
                yield text


def ask_whether(bundle: Bundle, path: Path, ask: Callable[[str], str]) -> bool:
    """Show what would be written, and ask for a yes."""
    size = sum(map(len, bundle.files.values()))
    shown = "\n".join(f"  {line}" for line in contents(bundle))
    question = f"{shown}\nwrite these {format_bytes(size)}, packed, to {path}? [y/N] "
    return ask(question).strip().lower() in ("y", "yes")
