"""The local launcher, and the GPUs it counts."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Literal

import pytest
from pydantic import ValidationError

from isles.config.load import load_run_file
from isles.config.resolve import Resolved, resolve
from isles.config.sections.cluster import ClusterConfig
from isles.errors import UserError
from isles.launch.base import StartOptions
from isles.launch.gpus import find_gpus
from isles.launch.local import added_variables, local_fleet, start_agent
from isles.launch.start import start
from isles.launch.verbs import normalise_overrides
from isles.monitor.stop import wait_for_end
from isles.run.begin import new_attempt
from isles.run.records import read_record
from isles.run.stop import kill_now
from tests.deadline import DEADLINE_S
from tests.each import each
from tests.runs import bare_run, running_agent

FOUR = "".join(
    f"{index}, NVIDIA H100 80GB HBM3, GPU-{index}{index}aa-beef, 81559 MiB\n" for index in range(4)
)


def fake_smi(folder: Path, script: str) -> dict[str, str]:
    """An environment in which nvidia-smi is this shell script."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def four_gpus(folder: Path) -> dict[str, str]:
    (folder / "answer").write_text(FOUR)
    return fake_smi(folder, f'echo "$@" >{folder}/asked\ncat {folder}/answer')


def test_gpus_are_counted_without_torch(tmp_path: Path) -> None:
    found = find_gpus(four_gpus(tmp_path))
    assert [gpu.uuid[:8] for gpu in found.gpus] == ["GPU-00aa", "GPU-11aa", "GPU-22aa", "GPU-33aa"]
    assert found.gpus[0].name == "NVIDIA H100 80GB HBM3"
    assert found.gpus[0].memory_bytes == 81559 * 2**20
    assert not found.warning
    assert "--query-gpu=index,name,uuid,memory.total" in (tmp_path / "asked").read_text()


@each(
    ("visible", "expected"),
    [
        ("", []),
        ("-1", []),
        ("2", ["GPU-22aa"]),
        ("3,0", ["GPU-33aa", "GPU-00aa"]),
        ("GPU-11aa-beef,GPU-2", ["GPU-11aa", "GPU-22aa"]),
        ("MIG-1234", ["MIG-1234"]),
    ],
)
def test_cuda_visible_devices_is_honoured(
    tmp_path: Path, visible: str, expected: list[str]
) -> None:
    found = find_gpus({**four_gpus(tmp_path), "CUDA_VISIBLE_DEVICES": visible})
    assert [gpu.uuid[:8] for gpu in found.gpus] == expected
    assert not found.warning


def test_a_device_that_is_not_there_ends_the_list_with_a_warning(tmp_path: Path) -> None:
    found = find_gpus({**four_gpus(tmp_path), "CUDA_VISIBLE_DEVICES": "1,7,2"})
    assert len(found.gpus) == 1
    assert "names 7" in found.warning


def test_no_nvidia_smi_means_no_gpu(tmp_path: Path) -> None:
    found = find_gpus({"PATH": str(tmp_path)})
    assert (found.gpus, found.warning) == ((), "")


def test_a_machine_with_the_driver_and_no_card_has_no_gpu(tmp_path: Path) -> None:
    found = find_gpus(fake_smi(tmp_path, "echo No devices were found; exit 6"))
    assert (found.gpus, found.warning) == ((), "")


def test_a_broken_driver_is_a_warning_not_silence(tmp_path: Path) -> None:
    script = "echo 'Failed to initialize NVML: Driver/library version mismatch' >&2; exit 18"
    found = find_gpus(fake_smi(tmp_path, script))
    assert found.gpus == ()
    assert "exit code 18" in found.warning
    assert "version mismatch" in found.warning


def test_a_hanging_nvidia_smi_is_given_up(tmp_path: Path) -> None:
    found = find_gpus(fake_smi(tmp_path, "exec tail -f /dev/null"), timeout_s=0.3)
    assert "no answer in 0.3 s" in found.warning


def four_ranks(run_file: Path, *overrides: str, device: Literal["cpu", "cuda"] = "cpu") -> Resolved:
    loaded = load_run_file(run_file, overrides)
    return resolve(loaded, nproc=(4,), device=device)


def test_a_dry_run_shows_the_exact_command(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    shown = start(StartOptions(run_file, ("clusters.0.gpus_per_node=2",), "auto", True, str, str))
    assert isinstance(shown, str)
    cores = len(os.sched_getaffinity(0))
    variables = [f"OMP_NUM_THREADS={max(1, cores // 2)}"]
    variables += ["GLOO_SOCKET_IFNAME=lo", "NCCL_SOCKET_IFNAME=lo"]
    agent = [sys.executable, "-m", "isles.agent", f"{tmp_path}/runs/tiny-1", "--attempt", "1"]
    assert shlex.split(shown.splitlines()[-1]) == ["env", *variables, *agent]
    assert not (tmp_path / "runs").exists()


def test_several_nodes_are_as_many_agents(run_file: Path) -> None:
    checkpoint = run_file.parent / "step-00000008"
    loaded = load_run_file(run_file, ["clusters.0.nodes=1:3"])
    resolved = resolve(loaded, nproc=(2, 2, 2), device="cpu")
    fleet = local_fleet(resolved, checkpoint)
    assert [node.nproc for node in fleet.nodes] == [2, 2, 2] and fleet.min_nodes == 1
    assert not fleet.has_own_node, "the coordinator outlives each of them"
    assert fleet.resume_from == str(checkpoint)


@pytest.mark.parametrize(
    ("nodes", "least", "most"), [(1, 1, 1), (4, 4, 4), ("1:3", 1, 3), ("2:2", 2, 2)]
)
def test_nodes_are_a_number_or_a_range(nodes: int | str, least: int, most: int) -> None:
    cluster = ClusterConfig(nodes=nodes)
    assert (cluster.min_nodes, cluster.max_nodes) == (least, most)


@each("nodes", [0, "3:1", "0:2", "1:", "a:b", "1-3", 1.5, True])
def test_other_numbers_of_nodes_are_refused(nodes: object) -> None:
    with pytest.raises(ValidationError):
        ClusterConfig.model_validate({"nodes": nodes})


def test_the_users_own_variables_stay(run_file: Path) -> None:
    mine = {"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "ib0"}
    assert added_variables(four_ranks(run_file), mine) == {}
    own = "clusters.0.environment={variables: {OMP_NUM_THREADS: '3'}}"
    assert added_variables(four_ranks(run_file, own), mine) == {"OMP_NUM_THREADS": "3"}


def test_submit_records_the_process_and_its_output(tmp_path: Path) -> None:
    with running_agent(bare_run(tmp_path / "a-1"), world_size=2) as agent:
        record = read_record(agent.attempt.launch)
        assert record is not None
        assert record["pid"] == agent.process.pid
        assert record["world_size"] == 2
        assert agent.process.is_alive()
        assert os.getsid(agent.process.pid) == agent.process.pid, "a session of its own"
        assert agent.attempt.agent_log.read_text() == "agent is ready\n"
        assert kill_now(agent.process)
        assert wait_for_end(agent.process, DEADLINE_S)


def test_a_program_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    attempt = new_attempt(bare_run(tmp_path / "a-1"))
    with pytest.raises(UserError, match="cannot be started"):
        start_agent(attempt, [str(tmp_path / "no-python")], {}, world_size=1, device="cpu")


@each(
    ("given", "expected"),
    [
        ("train r.yaml --training.max-steps 5", "train r.yaml training.max_steps=5"),
        (
            "train r.yaml --training.max-steps=5 --dry-run",
            "train r.yaml training.max_steps=5 --dry-run",
        ),
        ("train r.yaml --a.b -1 --c.d-e --resume no", "train r.yaml a.b=-1 c.d_e=true --resume no"),
        ("train r.yaml -- --a.b 1", "train r.yaml -- --a.b 1"),
        ("config show r.yaml --a.b 1", "config show r.yaml a.b=1"),
        ("generate --prompt --a.b", "generate --prompt --a.b"),
    ],
)
def test_dotted_flags_are_overrides(given: str, expected: str) -> None:
    assert normalise_overrides(given.split()) == expected.split()
