"""The local launcher, and the GPUs it counts."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from isles.config.load import load_run_file
from isles.config.resolve import resolve
from isles.config.sections.cluster import ClusterConfig
from isles.errors import UserError
from isles.launch.base import StartOptions
from isles.launch.gpus import find_gpus
from isles.launch.local import added_variables, start_agent
from isles.launch.start import start
from isles.launch.verbs import normalize_overrides
from isles.run.begin import new_attempt
from tests.each import each
from tests.programs import write_program
from tests.runs import bare_run

FOUR = "".join(f"{n}, NVIDIA H100 80GB HBM3, GPU-{n}{n}aa-beef, 81559 MiB\n" for n in range(4))


def fake_smi(folder: Path, lines: str) -> dict[str, str]:
    """An environment in which nvidia-smi is these lines of bash."""
    write_program(folder / "nvidia-smi", lines)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def four_gpus(folder: Path) -> dict[str, str]:
    return fake_smi(folder, f'echo "$@" >{folder}/asked\nprintf %s "{FOUR}"')


def test_gpus_are_counted_without_torch(tmp_path: Path) -> None:
    found = find_gpus(four_gpus(tmp_path))
    assert [gpu.uuid[:8] for gpu in found.gpus] == ["GPU-00aa", "GPU-11aa", "GPU-22aa", "GPU-33aa"]
    assert found.gpus[0].name == "NVIDIA H100 80GB HBM3"
    assert found.gpus[0].memory_bytes == 81559 * 2**20
    assert not found.warning
    assert "--query-gpu=index,name,uuid,memory.total" in (tmp_path / "asked").read_text()


@each(
    ("", [], ""),
    ("-1", [], ""),
    ("3,0", ["GPU-33aa", "GPU-00aa"], ""),
    ("GPU-11aa-beef,GPU-2", ["GPU-11aa", "GPU-22aa"], ""),
    ("MIG-1234", ["MIG-1234"], ""),
    ("1,7,2", ["GPU-11aa"], "contains 7"),  # as CUDA itself takes it
)
def test_cuda_visible_devices_is_honored(visible, expected, warning, *, tmp_path):
    found = find_gpus({**four_gpus(tmp_path), "CUDA_VISIBLE_DEVICES": visible})
    assert [gpu.uuid[:8] for gpu in found.gpus] == expected
    assert warning in found.warning and bool(found.warning) == bool(warning)


def test_a_broken_driver_is_a_warning_not_silence(tmp_path: Path) -> None:
    text = "echo 'Failed to initialize NVML: Driver/library version mismatch' >&2; exit 18"
    found = find_gpus(fake_smi(tmp_path, text))
    assert found.gpus == ()
    assert "exit code 18" in found.warning and "version mismatch" in found.warning
    found = find_gpus(fake_smi(tmp_path, "exec tail -f /dev/null"), timeout_s=0.3)
    assert "did not answer within 0.3 s" in found.warning
    # A machine without a driver, or without a card, has no GPU.
    no_card = fake_smi(tmp_path / "bin", "echo No devices were found; exit 6")
    for environ in ({"PATH": str(tmp_path / "none")}, no_card):
        found = find_gpus(environ)
        assert (found.gpus, found.warning) == ((), "")


def test_a_dry_run_shows_the_exact_command(run_file, tmp_path, monkeypatch):
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


def test_nodes_are_a_number_or_a_range() -> None:
    for nodes, least, most in ((4, 4, 4), ("1:3", 1, 3), ("2:2", 2, 2)):
        cluster = ClusterConfig.model_validate({"nodes": nodes})
        assert (cluster.min_nodes, cluster.max_nodes) == (least, most)
    for wrong in (0, "3:1", "0:2", "1:", "a:b", "1-3", 1.5, True):
        with pytest.raises(ValidationError):
            ClusterConfig.model_validate({"nodes": wrong})


def test_the_users_own_variables_stay(run_file: Path) -> None:
    def added(*overrides: str) -> dict[str, str]:
        resolved = resolve(load_run_file(run_file, overrides), nproc=(4,), device="cpu")
        return added_variables(resolved, mine)

    mine = {"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "ib0"}
    assert added() == {}
    own = "clusters.0.environment={variables: {OMP_NUM_THREADS: '3'}}"
    assert added(own) == {"OMP_NUM_THREADS": "3"}


def test_a_program_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    attempt = new_attempt(bare_run(tmp_path / "a-1"))
    with pytest.raises(UserError, match="cannot start the run"):
        start_agent(attempt, [str(tmp_path / "no-python")], {}, world_size=1, device="cpu")


@each(
    ("train r.yaml --training.max-steps 5", "train r.yaml training.max_steps=5"),
    ("train r.yaml --a.b=5 --dry-run", "train r.yaml a.b=5 --dry-run"),
    ("train r.yaml --a.b -1 --c.d-e --resume no", "train r.yaml a.b=-1 c.d_e=true --resume no"),
    ("train r.yaml -- --a.b 1", "train r.yaml -- --a.b 1"),
    ("config show r.yaml --a.b 1", "config show r.yaml a.b=1"),
    ("generate --prompt --a.b", "generate --prompt --a.b"),
)
def test_dotted_flags_are_overrides(given: str, expected: str) -> None:
    assert normalize_overrides(given.split()) == expected.split()
