"""`isles check` of this machine alone, with a source that is not there."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from isles.errors import ExitCode
from tests.e2e.typed import isles
from tests.programs import program
from tests.run_files import load

RUN = """\
model: {name_or_path: llama-2m, init: scratch}
tokenizer: {train_vocab_size: 300}
data: {sources: [{path: a.txt}]}
training: {max_steps: 4}
"""


def test_a_source_that_is_not_there_is_one_finding(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "y.jsonl").symlink_to("/nowhere/y.jsonl")
    (tmp_path / "run.yaml").write_text(
        "model: {name_or_path: llama-2m, init: scratch}\n"
        "tokenizer: {train_vocab_size: 300}\n"
        "data: {sources: [{path: '*.jsonl', type: text}], seq_length: 16}\n"
        "training: {max_steps: 1, warmup_steps: 0}\n"
    )
    asked = ("check", "run.yaml", "--no-net", "--json")
    command = isles(*asked, cwd=tmp_path, expected=ExitCode.PREFLIGHT)
    found = [f for f in json.loads(command.out)["findings"] if f["level"] == "error"]
    assert [finding["id"] for finding in found] == ["files.data"]
    assert "rm y.jsonl" in found[0]["fix"]


@pytest.mark.brief("wrong")
@pytest.mark.parametrize("fault", ["wrong", "hang"])
def test_gpus_that_cannot_read_each_other_get_the_variable_that_helps(tmp_path, fault):
    """The all-reduce is tried again in new processes, and the fix can be copied."""
    gpus = [f"{index}, NVIDIA GeForce RTX 4090, GPU-{index}, 24564 MiB" for index in range(2)]
    program(tmp_path, "nvidia-smi", {"--query-gpu=index": "\n".join(gpus)})
    fakes = Path(__file__).parents[1] / "fake_gpus"
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": f"{fakes}:{os.environ.get('PYTHONPATH', '')}",
        "FAKE_P2P": fault,
    }
    command = isles(
        *("check", "--json", "--timeout", "40s"),
        cwd=tmp_path,
        env=environ,
        expected=ExitCode.PREFLIGHT,
    )
    (bad,) = [f for f in json.loads(command.out)["findings"] if f["id"].startswith("reduce")]
    assert bad["level"] == "error" and bad["measured"] == "NCCL_P2P_DISABLE"
    assert ("is wrong" if fault == "wrong" else "no answer in time") in bad["text"]
    assert "it works without direct copies between GPUs" in bad["text"]
    assert "GPUs 0 and 1 of" in bad["text"] and "have no peer access" in bad["text"]
    fix = 'set clusters.0.environment.variables to {NCCL_P2P_DISABLE: "1"}'
    assert bad["fix"].startswith(fix)
    (variables,) = re.findall(r"variables to (\{.*?\})", bad["fix"])
    given = (f"clusters.0.environment.variables={variables}",)
    cluster = load(tmp_path, RUN, *given).config.clusters[0]
    assert cluster.environment.variables == {"NCCL_P2P_DISABLE": "1"}
