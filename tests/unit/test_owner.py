"""What another user has written is shown, and never acted on: one process, files that are given."""

from __future__ import annotations

import os
import socket
import subprocess
import zipfile
from pathlib import Path

import pytest

from isles.cli import main
from isles.config.load import load_run_file
from isles.config.resolve import dump_resolved, resolve
from isles.config.yaml import dump_yaml
from isles.errors import ExitCode, UserError
from isles.launch.queue.status import queue_job
from isles.launch.remote.login import remote_script
from isles.launch.ssh.shell import Shell
from isles.launch.worker import run_verb
from isles.monitor import bundle
from isles.monitor.live.history import MetricsReader
from isles.monitor.logs import LineTail, LogChoice, log_lines
from isles.run.begin import begin_run, new_attempt
from isles.run.choose import choose_run, refuse_second
from isles.run.links import keep_links, measured_links, read_links
from isles.run.nodes import read_fleet, read_own_fleet
from isles.run.owner import OwnRecord
from isles.run.process import ProcessId
from isles.run.records import read_own, read_record, read_rows, write_record
from isles.run.remote import list_remotes
from isles.run.resolved import read_resolved
from isles.run.restarts import read_last_step
from isles.run.stop import request_stop, send_signal
from tests.inputs import OTHER
from tests.run_records import GONE, recorded_run, two_hosts
from tests.runs import bare_run

RUN_FILE = """
name: theirs
output_dir: /zz
model: {name_or_path: zz/model, trust_remote_code: true}
tokenizer: {name_or_path: zz/tokenizer, chat_template: zz.jinja}
data:
  sources: [{path: zz.txt, type: chat, subset: zz, columns: {messages: zz}}]
  cache_dir: /zz
  seq_length: 77
training: {max_steps: 9, global_batch_size: 2}
checkpoint: {remote: 's3://zz/b', push_to_hub: zz/model}
track: [jsonl, {kind: wandb, project: zz}, {kind: mlflow, experiment: zz, tracking_uri: 'http://zz'}]
clusters:
- launcher: {kind: ssh, hosts: [zz]}
  workdir: /zz
  environment: {setup: [touch zz], python: ./zz, variables: {LD_PRELOAD: zz}, container: zz}
"""


def test_a_record_is_own_by_the_file_that_was_read(tmp_path: Path, give) -> None:
    own, other, link = (tmp_path / name for name in ("own.json", "other.json", "link.json"))
    for path in (own, other):
        write_record(path, {"pid": 1})
    link.symlink_to(own)
    give(other)
    assert isinstance(read_record(own), OwnRecord)
    for path in (other, link):
        assert read_record(path) == {"pid": 1} and read_own(path) is None
    os.mkfifo(tmp_path / "pipe.json")
    assert read_record(tmp_path / "pipe.json") is None, "nobody waits for a writer"


def test_no_process_is_signaled_that_only_anothers_record_names(tmp_path: Path, give) -> None:
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as child:
        try:
            path = tmp_path / "launch.json"
            write_record(path, ProcessId.of(child.pid).record())
            give(path)
            process = ProcessId.from_record(read_record(path) or {})
            assert process is not None and process.is_alive()
            with pytest.raises(UserError, match="only in a record of another user"):
                send_signal(process, 9, to_group=True)  # type: ignore[arg-type]
            assert child.poll() is None
        finally:
            child.kill()


def test_a_start_is_anothers_by_its_folder_its_record_or_a_link(tmp_path: Path, give) -> None:
    launch = {"launcher": "slurm", "job_id": "4711", "bin_path": "/evil"}
    wrong = []
    for name, given in {"folder": ".", "record": "launch.json", "run": "../..", "link": ""}.items():
        run_dir, attempt = recorded_run(tmp_path / name, launch)
        two_hosts(attempt, "slurm")
        if given:
            give(attempt.path / given)
        else:
            attempt.path.parent.rename(tmp_path / "away")
            attempt.path.parent.symlink_to(tmp_path / "away")
            with pytest.raises(OSError, match="symbolic links"):
                request_stop(attempt, "save")
        # Several may start a run in turn: the folder of the run itself does not matter.
        is_own = name == "run"
        acts = queue_job(run_dir, attempt) is not None, read_own_fleet(attempt) is not None
        if acts != (is_own, is_own) or bool(run_dir.owner) == is_own:
            wrong.append(f"{name}: {acts}, {run_dir.owner!r}")
        assert read_fleet(attempt) is not None, "it is shown all the same"
    assert not wrong


def test_anothers_resolved_file_has_nothing_that_acts(
    tmp_path: Path, give, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = bare_run(tmp_path / "x-1")
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    resolved = resolve(load_run_file(tmp_path / "run.yaml"), num_gpus=0)
    run_dir.resolved.write_text(dump_resolved(resolved))
    assert read_resolved(run_dir).config == resolved.config
    give(run_dir.resolved)
    theirs = read_resolved(run_dir)
    text = dump_yaml(theirs.config.values())
    assert "zz" not in text and not theirs.config.model.trust_remote_code, text
    assert (theirs.config.name, theirs.config.data.seq_length) == ("theirs", 77)
    assert (theirs.config.data.sources[0].type, theirs.config.track[1].kind) == ("chat", "wandb")
    for verb in ("generate", "eval"):
        assert run_verb(verb, run_dir, {}) == ExitCode.PREFLIGHT
    assert "does not load a model that the run names" in capfd.readouterr().err
    shape = dump_resolved(resolved).replace("name_or_path: zz/model", "name_or_path: llama-2m")
    run_dir.resolved.write_text(shape)
    assert read_resolved(run_dir).config.model.name_or_path == "llama-2m", "it comes with isles"
    with pytest.raises(UserError, match="give --output"):
        run_verb("export", run_dir, {})


def test_a_remembered_run_of_another_is_listed_and_its_lines_are_not_run(
    tmp_path: Path, give
) -> None:
    folder = tmp_path / ".remote"
    folder.mkdir()
    record = {"name": "q-1", "ssh": "me@h", "path": "/q", "lines": ["touch x"], "python": "py"}
    record |= {"launcher": "ssh", "hosts": ["me@h"], "started_at": 1.0, "owner": ""}
    bad = {"ssh": "-oProxyCommand=x", "python": "-c", "path": "-x", "hosts": ["-E"]}
    for number, (key, value) in enumerate(bad.items()):
        write_record(folder / f"{number}.json", {**record, key: value})
    assert not list_remotes(tmp_path), "words that are options are refused"
    write_record(folder / "q.json", record)
    (own,) = list_remotes(tmp_path)
    assert "touch x" in remote_script(own, ["status"])
    give(folder / "q.json")
    (other,) = list_remotes(tmp_path)
    with pytest.raises(UserError, match="belongs to"):
        remote_script(other, ["status"])


def test_a_destination_is_never_an_option_of_ssh() -> None:
    argv = Shell("-oProxyCommand=touch x").argv(["true"])
    assert argv.index("--") == argv.index("-oProxyCommand=touch x") - 1


def test_a_report_follows_no_link_out_of_the_run(tmp_path: Path) -> None:
    run_dir, attempt = recorded_run(tmp_path / "x-1", {"launcher": "local"})
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "id.log").write_text("my key\n")
    (attempt.path / "rank-0.log").symlink_to(tmp_path / "secret" / "id.log")
    attempt.hangs.symlink_to(tmp_path / "secret")
    gathered = bundle.gather(run_dir, tmp_path)
    assert b"my key" not in b"".join(gathered.files.values())
    assert sum("leads out" in text for text in gathered.left_out) == 2


def test_the_run_of_another_is_neither_resumed_nor_written_into(
    tmp_path: Path, run_file: Path, give
) -> None:
    folder = f"output_dir={tmp_path / 'shared'}"
    loaded = load_run_file(run_file, [folder])
    resolved, text = resolve(loaded, num_gpus=0), run_file.read_text()
    theirs = begin_run(resolved, text, "auto").run_dir
    new_attempt(theirs)
    for path in (theirs.path, *theirs.path.rglob("*")):
        give(path)
    before = {path: path.stat().st_mtime_ns for path in theirs.path.rglob("*")}
    # Their run goes on: its process is this one.
    refuse_second(theirs.path.parent, "tiny", "auto")
    begun = begin_run(resolved, text, "auto")
    assert (begun.resumed, begun.run_dir.name) == (False, "tiny-2")
    assert "tiny-1 belongs to" in begun.note and "a new run, tiny-2" in begun.note
    checkpoint = theirs.checkpoints / "step-00000004"
    for given in (theirs.path, "tiny-1", checkpoint):
        with pytest.raises(UserError, match="does not write into tiny-1, a folder of") as caught:
            choose_run(resolved, str(given))
        assert caught.value.ids == ("run.foreign",)
    assert {path: path.stat().st_mtime_ns for path in theirs.path.rglob("*")} == before
    # The own one is resumed, though theirs has a higher number now.
    write_record(new_attempt(begun.run_dir).launch, GONE)
    theirs.path.rename(theirs.path.with_name("tiny-7"))
    again = choose_run(resolved, "auto")
    assert (again.resumed, again.run_dir.name) == (True, "tiny-2")
    # Nobody uses up the numbers of others.
    (theirs.path.parent / f"tiny-{'9' * 200}").mkdir()
    give(theirs.path.with_name("tiny-7"))
    assert choose_run(resolved, "no").run_dir.name == "tiny-3"


def test_a_log_of_another_shows_no_file_of_this_user(tmp_path: Path, give) -> None:
    run_dir, attempt = recorded_run(tmp_path / "x-1", {"launcher": "local"})
    secret, pipe, fine = tmp_path / "id_rsa", attempt.rank_log(1), attempt.rank_log(2)
    secret.write_text("my key\n")
    attempt.rank_log(0).symlink_to(secret)
    os.mkfifo(pipe)
    fine.write_text("line\n")
    for path in (attempt.path, attempt.launch, attempt.rank_log(0), pipe, fine):
        give(path)
    lines = list(log_lines(run_dir, attempt, LogChoice()))
    assert "[rank 2] line" in lines and "my key" not in " ".join(lines)
    assert sum("isles cannot read " in line for line in lines) == 2, lines


def test_a_link_of_another_to_a_folder_shows_no_file_of_this_user(
    tmp_path: Path, give, capsys: pytest.CaptureFixture[str]
) -> None:
    private = tmp_path / "private"
    (private / "001").mkdir(parents=True)
    for folder in (private, private / "001", private / "distributed_training"):
        folder.mkdir(exist_ok=True)
        for name in ("rank-0.log", "agent.log", "node-0.log", "latest_node0.log", "x.out"):
            (folder / name).write_text("my key\n")
        write_record(folder / "outcome.json", {"state": "failed", "reason": "my key"})
        write_record(folder / "launch.json", {"launcher": "local", "device": "my key", **GONE})
    wrong = []
    for number, name in enumerate(("attempts/001", "attempts", "logs", "telemetry")):
        run_dir, _ = recorded_run(tmp_path / f"x-{number}", {"launcher": "local", **GONE})
        link = run_dir.path / name
        link.rename(tmp_path / f"away-{number}") if link.exists() else None
        link.symlink_to(private)
        verbs = (["status"], ["logs"], ["logs", "--by-node"], ["top", "--json"])
        for owner in (OTHER, os.geteuid()):
            os.chown(link, owner, owner, follow_symlinks=False)
            report = tmp_path / f"{number}-{owner}.zip"
            for words in (*verbs, ["report", "--yes", "-o", str(report)]):
                main([words[0], str(run_dir.path), *words[1:]])
            said = capsys.readouterr()
            if report.exists():
                with zipfile.ZipFile(report) as archive:
                    texts = [archive.read(each).decode() for each in archive.namelist()]
            is_shown = "my key" in said.out + said.err + "".join(texts)
            # A user may well move a folder of a run to another disk.
            if is_shown != (owner != OTHER and name != "telemetry"):
                wrong.append((name, owner, said.out))
    assert not wrong, wrong


def test_records_that_are_pipes_are_waited_for_by_nobody(tmp_path: Path) -> None:
    run_dir, attempt = recorded_run(tmp_path / "x-1", {"launcher": "local"})
    for path in (run_dir.metrics, run_dir.status, attempt.last_step, attempt.outcome):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    assert not list(read_rows(run_dir.metrics)) and read_last_step(attempt, None) is None
    history = MetricsReader(run_dir.metrics)
    history.read()
    assert not history.newest
    assert main(["status", str(run_dir.path)]) == 0
    assert main(["logs", str(run_dir.path)]) == 0


def test_a_file_without_line_ends_is_read_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as stream:
        stream.truncate(1 << 40)  # a sparse file: it takes no space
        stream.seek(0, os.SEEK_END)
        stream.write(b'\n{"a": 1}\n')
    assert list(read_rows(path, 1 << 20)) == [{"a": 1}]
    for last in (1, None):
        lines = LineTail(path, last=last).read()
        assert lines[-1] == '{"a": 1}' and sum(map(len, lines)) < 80 << 20


def test_an_unreadable_record_is_no_record(tmp_path: Path) -> None:
    """One of them would hide all other runs of a folder."""
    (tmp_path / "circle.json").symlink_to("circle.json")
    (tmp_path / "folder.json").mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket.json"))
        for name in ("circle", "folder", "socket"):
            assert read_record(tmp_path / f"{name}.json") is None, name


def test_a_link_in_place_of_a_record_opens_no_other_file(tmp_path: Path, monkeypatch) -> None:
    """The owner of the folder swaps the file while it is written, at a moment when it can."""
    secret = tmp_path / "secret"
    secret.write_text("a key")
    secret.chmod(0o600)
    write = os.fsync

    def swap(handle: int) -> None:
        write(handle)
        for partial in tmp_path.glob(".record.json.*"):
            partial.unlink()
            partial.symlink_to(secret)

    monkeypatch.setattr(os, "fsync", swap)
    write_record(tmp_path / "record.json", {})
    assert secret.stat().st_mode & 0o777 == 0o600


def test_speeds_of_links_are_those_that_this_user_has_measured(tmp_path: Path, give) -> None:
    path = tmp_path / ".links.json"
    for pairs in ({"a": "x", "b": "y"}, {"a": {"b": [1]}}, {"a": {"b": {"rtt_s": "x"}}}, [], 3):
        write_record(path, {"at": 1.0, "names": 3, "pairs": pairs})
        assert not any(read_links(tmp_path).values()), pairs
        assert measured_links(tmp_path, ("a", "b")) is None
    link = {"bytes_per_s": 1e6, "rtt_s": 0.1}
    keep_links(tmp_path, {"a": {"b": link}, "b": {"a": link}}, {}, 1.0)
    assert measured_links(tmp_path, ("a", "b")) is not None
    give(path)
    assert measured_links(tmp_path, ("a", "b")) is None
    before = path.read_bytes()
    keep_links(tmp_path, {"a": {"b": link}, "b": {"a": link}}, {}, 2.0)
    assert measured_links(tmp_path, ("a", "b")) is not None and path.read_bytes() == before
