"""Task files of SkyPilot, word for word, and what the launcher refuses."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import isles
from isles.config.load import load_run_file
from isles.errors import ConfigErrors
from isles.launch.render import render
from isles.launch.skypilot.task import TaskText, task_file
from tests.deadline import run_program
from tests.each import each
from tests.golden import check_golden
from tests.programs import write_program
from tests.run_files import load
from tests.skypilot_python import skypilot_python

RUN_FILE = """\
name: llama-1b
output_dir: ~/runs
model: {name_or_path: llama-1b, init: scratch}
tokenizer: {train_vocab_size: 32000}
data: {sources: [{path: words.jsonl}], seq_length: 2048}
training: {max_steps: 1000, global_batch_size: 256}
clusters:
- name: local
  nodes: 2
  gpus_per_node: 8
  launcher:
    kind: skypilot
    accelerators: [H100, A100-80GB]
    resources: {infra: aws, use_spot: true, job_recovery: {strategy: FAILOVER}}
    file_mounts: {~/runs: {source: 's3://my-runs', mode: MOUNT}}
    workdir: .
    secrets: [HF_TOKEN]
    autostop: 10m
"""
AT = "clusters.0."
ONE_NODE = (
    f"{AT}nodes=1",
    f"{AT}device=cpu",
    f"{AT}gpus_per_node=2",
    f"{AT}launcher={{kind: skypilot, setup: ['echo ready']}}",
    f"{AT}environment={{venv: /opt/venv, variables: {{A: '1 2'}}}}",
    f"{AT}workdir=~/my work",
)
GOLDEN = {
    "skypilot-two-nodes.yaml": (),
    "skypilot-one-node.yaml": ONE_NODE,
    "skypilot-from-slurm.yaml": (f"{AT}launcher={{kind: slurm, partition: gpu}}",),
}


def rendered(tmp_path: Path, *overrides: str) -> str:
    return render(load(tmp_path, RUN_FILE, *overrides), "skypilot", overrides=overrides).text


def test_the_task_word_for_word(tmp_path: Path) -> None:
    for name, overrides in GOLDEN.items():
        text = rendered(tmp_path, *overrides)
        check_golden(name, text)
        task = yaml.safe_load(text)
        for script in (task.get("setup", ""), task["run"]):
            done = run_program(["bash", "-n"], input=script)
            assert done.returncode == 0 and not done.stderr, done.stderr


def test_the_run_file_comes_through_the_script_as_it_is(tmp_path: Path) -> None:
    # The first node's Python is a program that keeps what it is given.
    odd = "# it's $HOME, \\, `date` and\n# ISLES_RUN_FILE\nISLES_RUN_FILE"
    kept = tmp_path / "kept"
    places = (f"{AT}environment.python={kept}.sh", f"{AT}workdir={tmp_path}")
    given = replace(load(tmp_path, RUN_FILE, *places), text=f"{odd}\n{RUN_FILE}")
    launcher: Any = given.config.clusters[0].launcher
    write_program(kept.with_suffix(".sh"), f'echo "$@" >{kept}.words\ncat >{kept}')
    task = TaskText(launcher, ("name=it's",), "cpu", resume="no")
    script = yaml.safe_load(task_file(given, task))["run"]
    place = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "ISLES_TOKEN": "secret"}
    for rank, words, text in (
        ("0", "-m isles.launch.skypilot.head run.yaml name=it's --resume=no", given.text),
        ("1", "-m isles.agent 10.0.0.1:29500 --node 1", "secret\n"),
    ):
        environ = {**os.environ, **place, "SKYPILOT_NODE_RANK": rank}
        done = run_program(["bash", "-c", script], env=environ)
        assert done.returncode == 0, done.stderr
        assert kept.with_suffix(".words").read_text().strip() == words
        assert kept.read_text() == text


@each(
    (f"{AT}nodes=1:2", "SkyPilot stops all nodes of a job"),
    (f"{AT}gpus_per_node=auto", "cannot count the GPUs"),
    (f"{AT}launcher.accelerators=['H100:8']", "which belongs in gpus_per_node"),
    (f"{AT}device=cpu", "device is cpu, and accelerators requests H100"),
    (f"{AT}launcher.resources={{any_of: []}}", "both select GPUs"),
    (f"{AT}launcher.resources={{autostop: 5}}", "a separate key"),
    (f"{AT}launcher={{kind: skypilot, cluster: a, managed: true}}", "names the cluster"),
)
def test_what_skypilot_cannot_do_is_refused(override: str, words: str, *, tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors, match=words):
        rendered(tmp_path, override)


@pytest.mark.long
def test_the_real_skypilot_loads_every_task(tmp_path: Path) -> None:
    program = (
        "import json, sys, sky\n"
        "found = {}\n"
        "for path in sys.argv[1:]:\n"
        "    task = sky.Task.from_yaml(path)\n"
        "    task.update_secrets({'ISLES_TOKEN': 'a', 'HF_TOKEN': 'b'})\n"
        "    cards = sorted(str(r.accelerators) for r in task.resources)\n"
        "    codes = [r.job_recovery['recover_on_exit_codes'] for r in task.resources]\n"
        "    found[path] = [task.num_nodes, cards, codes]\n"
        "print(json.dumps(found))\n"
    )
    paths = []
    for name, overrides in GOLDEN.items():
        paths.append(tmp_path / name)
        paths[-1].write_text(rendered(tmp_path, *overrides))
    card = "clusters=[{gpus_per_node: 8, launcher: {kind: skypilot, accelerators: [H100]}}]"
    for template in sorted(Path(isles.__file__).parent.glob("config/templates/*.yaml")):
        paths.append(tmp_path / f"task-{template.name}")
        loaded = load_run_file(template, [card])
        paths[-1].write_text(render(loaded, "skypilot", overrides=[card]).text)
    assert len(paths) > 8
    command = [skypilot_python(), "-c", program, *paths]
    done = run_program(command, cwd=tmp_path, env={**os.environ, "HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    two, one, other, *templates = json.loads(done.stdout.splitlines()[-1]).values()
    assert two == [2, ["{'A100-80GB': 8}", "{'H100': 8}"], [[85], [85]]]
    assert one == [1, ["None"], [[85]]] and other == [2, ["None"], [[85]]]
    assert all(found == [1, ["{'H100': 8}"], [[85]]] for found in templates), templates
