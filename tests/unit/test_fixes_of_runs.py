"""The fixes that isles prints for models, lengths, machines and runs: each is read and followed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from isles.cli import main
from isles.config.files import data_issues
from isles.config.interop.deepspeed import deepspeed_file_issues
from isles.config.load import load_run_file
from isles.config.rules.shape import check_shape
from isles.dist.world import _device as device_of
from isles.errors import ExitCode, PreflightError, UserError
from isles.launch.base import StartOptions
from isles.launch.queue.submit import start_in_queue
from isles.launch.verbs import train_command
from isles.monitor.outcome import finished_lines
from isles.monitor.status import next_start
from isles.run.begin import new_attempt, write_launch
from isles.run.paths import RunDir
from isles.run.process import ProcessId
from isles.run.records import explain_write_errors, write_record
from tests.each import each
from tests.programs import write_program
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
