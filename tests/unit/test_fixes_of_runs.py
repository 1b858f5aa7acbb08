"""The fixes that isles prints for models, lengths, machines and runs: each is read and followed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from safetensors.torch import load_file, save_file

import isles
from isles.check.checks.network import bucket_finding, dial_bucket
from isles.cli import main
from isles.config.files import data_issues
from isles.config.interop.deepspeed import deepspeed_file_issues
from isles.config.load import load_run_file
from isles.config.rules.shape import check_shape
from isles.config.sections.cluster import ClusterConfig
from isles.dist.world import _device as device_of
from isles.errors import ExitCode, PreflightError, UserError
from isles.launch.base import StartOptions
from isles.launch.queue.submit import start_in_queue
from isles.launch.remote.setup import setup
from isles.launch.ssh.channel import open_channel
from isles.launch.ssh.environment import python_of, setting_lines
from isles.launch.ssh.shell import Shell, environment_failure
from isles.launch.verbs import train_command
from isles.monitor.outcome import finished_lines
from isles.monitor.status import next_start
from isles.run.begin import new_attempt, write_launch
from isles.run.paths import RunDir
from isles.run.process import ProcessId
from isles.run.records import explain_write_errors, write_record
from isles.train.verbs import exported_lines
from tests.buckets import bucket
from tests.deadline import DEADLINE_S
from tests.each import each
from tests.programs import write_program, write_ssh
from tests.run_files import load
from tests.small_models import small_model
from tests.unit.test_begin import add_checkpoint, begin
from tests.unit.test_deepspeed_file import run_config
from tests.unit.test_length import length, refused, resolved
from tests.unit.test_models import WAYS, make_base, same
from tests.unit.test_one_model import LONG, SCALED, rewrite

ODD = ["my runs", "it's", "a[1]", "a ~ b", "$HOME", "a b;c"]
"""Folders whose names a shell would change."""


def commands_in(text: str) -> list[list[str]]:
    """The words of each command that a text has in backticks."""
    return [shlex.split(command) for command in re.findall(r"`(isles [^`]+)`", text)]


def shell_words(text: str) -> list[str]:
    """The words that a shell makes of a text, with all that it expands."""
    shown = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {text}"], capture_output=True, text=True, check=True
    )
    return shown.stdout.split("\0")[:-1]


def start_typed(words: list[str]) -> Any:
    """What `isles train` chooses for these words, which follow the verb."""
    options = {"--resume": "auto"}
    rest = list(words)
    while "--resume" in rest:
        at = rest.index("--resume")
        options["--resume"] = rest[at + 1]
        del rest[at : at + 2]
    return begin(Path(rest[0]), *rest[1:], resume=options["--resume"])


def stopped(run_dir: RunDir, typed: str) -> None:
    attempt = new_attempt(run_dir, typed=typed)
    write_launch(
        attempt, ProcessId(os.uname().nodename, 1, 1.0), world_size=1, device="cpu", command=("x",)
    )
    write_record(attempt.outcome, {"state": "stopped", "exit_code": 0, "at": 1.0})


@each(*ODD)
def test_the_printed_command_goes_on_with_a_run(folder, *, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    run_file = tmp_path / "run.yaml"
    run_file.write_text(
        "name: tiny\nmodel: {name_or_path: llama-2m, init: scratch}\n"
        f"tokenizer: {{train_vocab_size: 300}}\ndata: {{sources: [{{path: {words}}}]}}\n"
        "training: {max_steps: 20}\n"
    )
    overrides = (f"output_dir={json.dumps('./' + folder)}", "seed=3")
    run_dir = begin(run_file, *overrides).run_dir
    typed = train_command(run_file, overrides, "auto")
    stopped(run_dir, typed)
    add_checkpoint(run_dir, 8)
    newer = begin(run_file, *overrides, resume="no").run_dir
    stopped(newer, typed)
    # Each run goes on by its own command, though they have one name.
    for each_dir in (run_dir, newer):
        (printed,) = re.findall(r"`(isles [^`]+)`", next_start(each_dir))
        begun = start_typed(shell_words(printed)[2:])
        assert begun.resumed and begun.run_dir.path.name == each_dir.name
    add_checkpoint(newer, 9)
    # Other values: as it was, a new run, a new name, and the new values.
    with pytest.raises(UserError, match="not finished") as caught:
        begin(run_file, overrides[0], "seed=4", resume="auto")
    fix = caught.value.fix
    (was,) = re.findall(r"started with `(isles [^`]+)`", fix)
    assert start_typed(shell_words(was)[2:]).resumed
    for option in re.findall(r"`(--resume [^`]+|name=…)`", fix):
        more = shell_words(option.replace("…", "other"))
        begun = start_typed([str(run_file), overrides[0], "seed=4", *more])
        assert begun.resumed == (str(newer.path) in more), option


def test_commands_of_a_finished_run_are_typed_as_they_are_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ODD:
        run_dir = RunDir(tmp_path / folder / "tiny-1")
        run_dir.path.mkdir(parents=True)
        lines = [line.strip() for line in finished_lines(run_dir)]
        printed = [shell_words(line) for line in lines if line.startswith("isles ")]
        assert len(printed) == 3
        for found in printed:
            named = found[3] if found[1] == "checkpoint" else found[2]
            assert Path(named) == run_dir.path


def test_a_card_that_is_not_known_is_answered_with_cards_that_are(tmp_path, capsys):
    text = SCALED.replace("a/b", "llama-15m, init: scratch").replace(
        "{path: a", "{path: python-docs"
    )
    load(tmp_path, text.replace("type: chat", "type: text"), "tokenizer={train_vocab_size: 300}")
    file = str(tmp_path / "run.yaml")
    given = "tokenizer={train_vocab_size: 300}"
    assert main(["plan", file, given, "--gpus", "4070x"]) == ExitCode.USER
    (meant,) = re.findall(r"did you mean ([^?]+)\?", capsys.readouterr().err)
    names = [name.partition(" (")[0] for name in re.split(r" or |, ", meant)]
    assert names
    for name in names:
        assert main(["plan", file, given, "--gpus", name]) == ExitCode.OK
        assert "fits" in capsys.readouterr().out


def test_nodes_of_a_queue_are_planned_with_the_cards_that_the_note_asks_for(tmp_path, capsys):
    slurm = "clusters=[{nodes: 2, gpus_per_node: 8, launcher: {kind: slurm, time: 1h}}]"
    words = ["tokenizer={train_vocab_size: 300}", "data.sources=[{path: python-docs}]", slurm]
    load(tmp_path, SCALED.replace("a/b", "llama-15m, init: scratch"), *words)
    asked = ["plan", str(tmp_path / "run.yaml"), *words]
    main(asked)
    found = re.search(r"name their GPUs, such as (--gpus \S+)", capsys.readouterr().out)
    assert found is not None
    assert main([*asked, *found[1].split(), "--nodes", "2"]) == ExitCode.OK
    assert "name their GPUs" not in capsys.readouterr().out


def test_a_rank_without_a_gpu_in_a_queue_trains_on_the_cpu(tmp_path, monkeypatch):
    env: Any = SimpleNamespace(local_rank=99, rank=0)
    with pytest.raises(PreflightError, match="rank 0 needs GPU 99") as caught:
        device_of(env, "cuda")
    (override,) = re.findall(r"clusters\.0\.device=\w+", caught.value.fix)
    monkeypatch.chdir(tmp_path)
    write_program(tmp_path / "bin" / "sbatch", "echo 7")
    write_program(tmp_path / "bin" / "squeue", "echo 7")
    (tmp_path / "run.yaml").write_text(
        "name: tiny\nmodel: {name_or_path: llama-2m, init: scratch}\n"
        "data: {sources: [{type: fake}], seq_length: 32}\ntraining: {max_steps: 8}\n"
        f"clusters: [{{gpus_per_node: 1, launcher: {{kind: slurm, bin_path: {tmp_path}/bin}}}}]\n"
    )

    def device(*overrides: str) -> str:
        loaded = load_run_file(Path("run.yaml"), overrides)
        options = StartOptions(Path("run.yaml"), overrides, "no", False, str, str)
        started = start_in_queue(loaded, loaded.config.clusters[0].launcher, options)
        return json.loads(started.attempt.launch.read_text())["device"]

    assert device() == "cuda", "what the nodes have is not known here"
    assert device_of(env, device(override)).type == "cpu"


def test_a_folder_that_is_closed_is_opened_by_the_printed_command(tmp_path):
    (folder := tmp_path / "it's mine").mkdir()
    with pytest.raises(UserError) as caught, explain_write_errors(folder):
        raise PermissionError(13, os.strerror(13), str(folder))
    (command,) = re.findall(r"sudo (chown .+?), or ", caught.value.fix)
    subprocess.run(["bash", "-u", "-c", command], check=True, env={"PATH": os.environ["PATH"]})
    assert folder.stat().st_uid == os.geteuid()


def test_a_script_is_copied_by_the_key_of_the_fix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "name: own\ntraining: {script: train_mlp.py}\n"
    ssh = "clusters=[{launcher: {kind: ssh, hosts: [a1]}, workdir: /x}]"
    (issue,) = data_issues(load(tmp_path, text, ssh))
    (key,) = re.findall(r"clusters\.0\.\w+", issue.fix)
    (tmp_path / "train_mlp.py").touch()
    assert data_issues(load(tmp_path, text, ssh, f"{key}={{paths: [.]}}")) == []


@each(*ODD)
def test_an_export_elsewhere_comes_by_the_printed_command(folder, *, tmp_path, monkeypatch):
    (there := tmp_path / folder / "my-model").mkdir(parents=True)
    (there / "config.json").touch()
    copies = '[ "$1" = -r ] && [ "${2%%:*}" = me@a1 ] && exec cp -r "${2#*:}" "$3"'
    scp = write_program(tmp_path / "bin" / "scp", copies)
    monkeypatch.setenv("ISLES_MACHINE", "me@a1")
    _, line = exported_lines(9, there)
    (run_dir := RunDir(tmp_path / folder / "tiny-1")).model.mkdir(parents=True)
    (run_dir.model / "config.json").touch()
    (brings,) = [line for line in finished_lines(run_dir) if "brings the model" in line]
    (here := tmp_path / "here").mkdir()
    for command in (line.partition(": ")[2], brings.partition("   brings")[0]):
        env = {"PATH": f"{scp.parent}:{os.environ['PATH']}"}
        subprocess.run(["bash", "-u", "-c", command], check=True, env=env, cwd=here)
    assert {str(path.relative_to(here)) for path in here.rglob("*.json")} == {
        "my-model/config.json",
        "tiny-1/config.json",
    }


# Environments of hosts.


def over_ssh(tmp_path: Path, monkeypatch: Any, **environment: Any) -> ClusterConfig:
    """A cluster of one host, which is this machine: it has the packages that isles needs, but not
    isles, and no package index."""
    folder = write_ssh(tmp_path / "bin").parent
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(torch.__file__).parents[1]))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    launcher = {"kind": "ssh", "hosts": ["me@a1"]}
    given = {"launcher": launcher, "workdir": str(tmp_path), "environment": environment}
    return ClusterConfig.model_validate(given)


def reaches(cluster: ClusterConfig) -> None:
    """Ask the host, as `isles check` and `isles train` do."""
    lines = setting_lines(cluster, cluster.workdir or "")
    python = python_of(cluster.environment)
    with open_channel(Shell("me@a1"), python=python, lines=lines) as channel:
        channel.call("facts", timeout_s=DEADLINE_S)


def set_up(cluster: ClusterConfig, tmp_path: Path) -> list[str]:
    """`isles setup` of the cluster."""
    text = (
        "name: a\nmodel: {name_or_path: llama-2m, init: scratch}\ndata: {sources: [{type: fake}]}"
    )
    loaded = load(tmp_path, f"{text}\ntraining: {{max_steps: 1}}\n")
    config = loaded.config.model_copy(update={"clusters": [cluster]})
    lines: list[str] = []
    assert setup(replace(loaded, config=config), check=False, print_line=lines.append), lines
    return lines


@pytest.mark.long
def test_a_venv_that_is_missing_is_made_by_each_way_of_the_fix(tmp_path, monkeypatch):
    cluster = over_ssh(tmp_path, monkeypatch, venv=str(tmp_path / "venv"))
    with pytest.raises(PreflightError, match="activate: No such file") as caught:
        reaches(cluster)
    assert "`isles setup run.yaml`" in caught.value.fix and "`python3 -m venv`" in caught.value.fix
    set_up(cluster, tmp_path)
    reaches(cluster)
    (key,) = re.findall(r"clusters\.0\.environment\.(\w+)", caught.value.fix)
    other = over_ssh(tmp_path, monkeypatch, **{key: str(tmp_path / "other")})
    venv = [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "other")]
    subprocess.run(venv, check=True)
    with pytest.raises(PreflightError, match="isles is not installed") as caught:
        reaches(other)
    assert "isles setup run.yaml" in caught.value.fix
    monkeypatch.setenv("PYTHONPATH", str(Path(isles.__file__).parents[1]), prepend=os.pathsep)
    reaches(other)


@pytest.mark.long
def test_a_host_without_a_package_index_uses_the_mirror_of_the_fix(tmp_path, monkeypatch):
    class Index(SimpleHTTPRequestHandler):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given, directory=str(tmp_path / "index"))

    files = tmp_path / "index" / "simple" / "tiny-thing"
    files.mkdir(parents=True)
    info = "tiny_thing-1.dist-info"
    with ZipFile(files / "tiny_thing-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_thing.py", "")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-thing\nVersion: 1\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    (files / "index.html").write_text("<a href='tiny_thing-1-py3-none-any.whl'>tiny_thing</a>")
    given: dict[str, Any] = {"venv": str(tmp_path / "venv"), "packages": ["tiny-thing"]}
    with pytest.raises(PreflightError, match="cannot reach the package index") as caught:
        set_up(over_ssh(tmp_path, monkeypatch, **given), tmp_path)
    ((key, name),) = re.findall(r"clusters\.0\.environment\.(\w+): {(\w+): ", str(caught.value))
    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        (serving := Thread(target=server.serve_forever)).start()
        given[key] = {name: f"http://127.0.0.1:{server.server_port}/simple"}
        set_up(over_ssh(tmp_path, monkeypatch, **given), tmp_path)
        server.shutdown()
        serving.join()
    assert list((tmp_path / "venv").rglob("tiny_thing.py"))


@each(False, True)
def test_a_module_is_loaded_or_not_asked_for_after_the_fix(is_job, *, tmp_path):
    def output(**given: Any) -> str:
        section = ClusterConfig.model_validate({"environment": given})
        lines = setting_lines(section, "/", is_login=is_job)
        # Nothing of this machine may define the command.
        lines = [line.replace("/etc/profile", "/dev/null") for line in lines]
        env = {"PATH": os.environ["PATH"]}
        done = subprocess.run(
            ["bash", "-c", "\n".join(lines)], check=False, capture_output=True, env=env
        )
        return (done.stdout + done.stderr).decode()

    found = environment_failure(output(modules=["cuda/12.8"]))
    assert found is not None and "module: command not found" in found[0]
    ((key, file),) = re.findall(r"clusters\.0\.environment\.(\w+): \[source (\S+)\]", found[1])
    (defines := tmp_path / Path(file).name).write_text("module() { echo module $*; }\n")
    given = {"modules": ["cuda/12.8"], key: [f"source {defines}"]}
    assert output(**given) == "module load cuda/12.8\n"
    (deleted,) = re.findall(r"delete clusters\.0\.environment\.(\w+)", found[1])
    del given[deleted], given[key]
    assert output(**given) == ""


# A bucket of clusters.


@pytest.mark.long
def test_a_bucket_is_usable_after_the_fix_of_its_finding(tmp_path, monkeypatch):
    from s3fs import S3FileSystem

    def check(url: str, expected: str = "ok") -> str:
        # Each check runs in a process of its own, which has no driver yet.
        S3FileSystem.clear_instance_cache()
        finding = bucket_finding("a1", url, dial_bucket(url))
        assert finding.measured == expected or expected == finding.level == "ok", finding
        return finding.fix

    with bucket(tmp_path / "s3") as server:
        check(server.url)
        # Credentials, in each place that the fix names for this provider.
        with monkeypatch.context() as patch:
            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
                patch.delenv(name)
            patch.setenv("HOME", str(tmp_path))
            fix = check(server.url, "forbidden")
            assert "~/.aws" in fix and "AWS_PROFILE" in fix
            keys = "aws_access_key_id = tests\naws_secret_access_key = tests\n"
            (tmp_path / ".aws").mkdir()
            (tmp_path / ".aws" / "credentials").write_text(f"[default]\n{keys}")
            check(server.url)
            (tmp_path / ".aws" / "credentials").write_text(f"[isles]\n{keys}")
            patch.setenv("AWS_PROFILE", "isles")
            check(server.url)
        # A bucket that is not there.
        fix = check("s3://another-one/runs", "missing")
        assert fix == "create the bucket, or correct outer.url"
        server.client.create_bucket(Bucket="another-one")
        check("s3://another-one/runs")
        server.have("unconditional")
        assert "or engine hub" in check(server.url, "unconditional")
        server.have("forbidden")
        check(server.url, "forbidden")
        server.have("full")
        assert "free some space" in check(server.url, "full")
        server.have("")
        check(server.url)


# Models.


def test_longrope_is_accepted_with_the_length_of_the_fix(tmp_path):
    (issue,) = check_shape(load(tmp_path, SCALED).config, {"rope_parameters": LONG})
    ((key, value),) = re.findall(r"set (data\.seq_length) to (\d+)", issue.fix)
    config = load(tmp_path, SCALED, f"{key}={value}").config
    assert check_shape(config, {"rope_parameters": LONG}) == []


@pytest.mark.parametrize("kind", ["llama", "gpt_neox"])
def test_a_tied_config_with_another_head_loads_after_each_fix(kind, tmp_path):
    folder = make_base(tmp_path, kind, tie_word_embeddings=True)
    file, config = folder / "model.safetensors", folder / "config.json"
    tied = small_model(kind, tie_word_embeddings=True)
    ((head, embedding),) = tied.get_expanded_tied_weights_keys().items()
    rewrite(folder, lambda tensors: tensors.update({head: tensors[embedding] * 1.5}))
    before = file.read_bytes(), config.read_text()
    with pytest.raises(UserError) as caught:
        WAYS[0](folder, "pretrained")
    key, value = re.findall(r"set (\w+): (\w+) in its config.json", caught.value.fix)[0]
    config.write_text(json.dumps({**json.loads(before[1]), key: json.loads(value)}))
    whole, cut = (way(folder, "pretrained") for way in WAYS)
    assert same(whole, cut)
    apart = dict(whole.named_parameters())
    assert head in apart and not apart[head].equal(apart[embedding])
    config.write_text(before[1])
    (name,) = re.findall(r"delete '([\w.]+)' from its files", caught.value.fix)
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    whole, cut = (way(folder, "pretrained") for way in WAYS)
    assert same(whole, cut) and head not in dict(whole.named_parameters())


@each("log", "LOG", "cosine")
def test_a_schedule_of_a_deepspeed_file_is_accepted_as_the_fix_writes_it(kind, *, tmp_path):
    content = {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_type": kind}}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    config = run_config(path, lr_scheduler_type="linear", warmup_steps=10)
    (issue,) = deepspeed_file_issues(path, config)
    (value,) = re.findall(r"^write (\w+)$", issue.fix)
    path.write_text(json.dumps(content).replace(json.dumps(kind), json.dumps(value)))
    assert deepspeed_file_issues(path, config) == []


# The length of a run.


@each(
    (3, "training.warmup_steps=100"),
    (20, "training.warmup_steps=100"),
    (400, "training.warmup_steps=100"),
    (20, "training.warmup_steps=5"),
)
def test_a_warm_up_has_the_length_of_the_fix(samples, override, *, tmp_path):
    text = refused(resolved(tmp_path, override), samples)
    (key,) = re.findall(r"command line (training\.\w+)", text)
    ((used, below),) = re.findall(r"fix: use (\d+) or another number below (\d+)", text)
    for value in (int(used), int(below) - 1):
        assert length(resolved(tmp_path, f"{key}={value}"), samples) == int(below)
    # Or more steps.
    assert "a smaller global_batch_size, or more num_train_epochs" in text
    for more in ("training.global_batch_size=1", "training.num_train_epochs=200"):
        values = [override.replace("=100", "=2"), more]
        assert (length(resolved(tmp_path, *values), samples) or 0) > int(below)


def test_the_note_of_a_short_run_is_gone_after_each_of_its_fixes(tmp_path):
    notes: list[str] = []
    length(resolved(tmp_path), 40, notes.append)
    (note,) = notes
    for key, value in {"lower (\\S+),": 1, "raise (\\S+)$": 8}.items():
        (found,) = re.findall(key, note)
        length(resolved(tmp_path, f"{found}={value}"), 40, notes.append)
    assert notes == [note]
