"""Memory, cores and threads as the container or the job has them."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from isles.check.checks.machine import machine
from isles.check.plan import NodePlan
from isles.config.auto import describe
from isles.config.layout import Layout
from isles.config.memory import CPU_MICRO_BATCH_SIZE
from isles.config.sections.strategy import DDPStrategyConfig, FSDPStrategyConfig
from isles.dist.mesh import make_mesh
from isles.dist.world import join_world, leave_world
from isles.models.build import build_probe
from isles.plan.find import find_machines
from isles.run import limits
from isles.run.env import RankEnv, rank_defaults, usable_cores
from isles.train import strategy
from isles.train.probe import cpu_micro_batch
from isles.train.strategy import resolve_strategy
from tests.each import each
from tests.run_files import load

ROOM = 1258291200
RUN = """\
model: {name_or_path: llama-2m, init: scratch}
tokenizer: {train_vocab_size: 512}
data: {sources: [{path: a.txt}]}
training: {max_steps: 4}
clusters: [{device: cpu}]
"""


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes files of a control group, and puts this process into it."""
    monkeypatch.setattr(limits, "CGROUPS", tmp_path)
    monkeypatch.setattr(limits, "OWN", tmp_path / "own")

    def write(own: str, **files: str) -> None:
        (tmp_path / "own").write_text(f"3:pids:/x\n{own}\n")
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("-", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


V1_STAT = "memory__memory-stat"
V1 = "memory__{}memory-limit_in_bytes", "memory__{}memory-usage_in_bytes"


@pytest.mark.parametrize(
    ("own", "limit", "used"),
    [
        ("0::/job_1", "job_1__memory-max", "job_1__memory-current"),  # a job without a namespace
        ("0::/job_1/step_0", "job_1__memory-max", "job_1__memory-current"),  # set above the step
        ("0::/", "memory-max", "memory-current"),  # a container
        ("9:memory:/docker/1", *(text.format("") for text in V1)),  # paths of the host
        ("9:cpu,memory:/x/job_2", *(text.format("x__") for text in V1)),
        (
            "9:memory:/slurm/uid_0/job_3/step_0/task_0",
            *(t.format("slurm__uid_0__job_3__") for t in V1),
        ),
        ("0::/user.slice/run-1.scope", "user.slice__memory-high", "user.slice__memory-current"),
        (
            "1:name=systemd:/s\n0::/s/a.scope",
            "s__a.scope__memory-max",
            "s__a.scope__memory-current",
        ),
        ("0::/../../outside", "memory-max", "memory-current"),  # in a namespace of its own
    ],
)
def test_memory_is_the_least_of_the_groups(group: Any, own: str, limit: str, used: str) -> None:
    cache = "anon 5\ninactive_file 100\ntotal_inactive_file 100\n"
    folder = limit.rpartition("memory-")[0]
    group(own, **{limit: f"{ROOM}\n", used: "1100\n", f"{folder}memory-stat": cache})
    found = limits.memory()
    assert found.total == ROOM and found.available == ROOM - 1000


def test_the_least_of_nested_limits_counts_and_the_room_of_each(group: Any) -> None:
    files = {"memory-max": f"{4 * ROOM}", "memory-current": f"{4 * ROOM - 10}"}
    files |= {"a__memory-max": "max", "a__memory-high": f"{ROOM}", "a__memory-current": "0"}
    group("0::/a/b", **files, **{"a__b__memory-max": f"{2 * ROOM}"})
    assert limits.memory() == limits.MainMemory(ROOM, 10), "another job has filled the group above"
    # A limit above what a container sees: only the kernel's count of it is there.
    stat = f"hierarchical_memory_limit {ROOM}\n"
    group("9:memory:/x", **{"memory__memory-limit_in_bytes": f"{1 << 62}", V1_STAT: stat})
    assert limits.memory().total == ROOM


def test_ulimit_counts(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    group("0::/")
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: (ROOM, ROOM))
    found = limits.memory()
    assert found.total == ROOM and found.available <= ROOM


def test_no_limit_is_the_machine(group: Any) -> None:
    group("0::/job_1", **{"job_1__memory-max": "max\n", "memory-max": f"{1 << 62}\n"})
    assert limits.memory().total == psutil.virtual_memory().total
    assert limits.cores() >= 1
    limits.OWN.unlink()
    assert limits.memory().total == psutil.virtual_memory().total


def test_check_and_plan_take_it_from_there(group: Any, tmp_path: Path) -> None:
    group("0::/job_1", **{"job_1__memory-max": f"{ROOM}", "job_1__memory-current": "0"})
    run = load(tmp_path, RUN)
    (found,) = find_machines(run, "", None, "")
    assert found.hosts[0].memory_bytes == ROOM and found.devices[0].memory_bytes == ROOM
    finding = next(f for f in machine(NodePlan(name="a1")) if f.id == "memory.free")
    assert "of 1.2 GiB" in finding.text


def test_the_strategy_and_the_micro_batch_take_it_from_there(
    group: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(tmp_path, RUN, "data.seq_length=16384").config
    world = join_world(RankEnv(0, 0, 1, 1, 0, None), device="cpu", timeout_s=10)
    try:
        options: dict[str, Any] = {"dtype": torch.float32, "vocab_size": 512}
        model = build_probe(config.model, num_layers=2, device=torch.device("meta"), **options)
        mesh = make_mesh(Layout(1, 1, 1, 1, 1), world, is_sharded=False)
        sizes = []
        for limit in (64 * ROOM, ROOM):
            group("0::/job_1", **{"job_1__memory-max": f"{limit}", "job_1__memory-current": "0"})
            sizes.append(cpu_micro_batch(model, config, DDPStrategyConfig(), mesh, world))
        _, why = resolve_strategy(config, world, lambda: model)
        assert "of 1.2 GiB on the smallest rank" in why
        both = [(DDPStrategyConfig(), 1), (FSDPStrategyConfig(), 1)]
        monkeypatch.setattr(strategy, "fitting_strategies", lambda *_: both)
        saved = {"world_size": 1, "sharding": "fsdp FULL_SHARD"}
        kept, why = resolve_strategy(config, world, lambda: model, saved)
        assert kept == FSDPStrategyConfig() and "as before the checkpoint" in why
        saved["sharding"] = describe(DDPStrategyConfig(pp_size=2))
        _, why = resolve_strategy(config, world, lambda: model, saved)
        assert "as before" not in why, "a pipeline is another strategy than ddp"
        saved["world_size"] = 2
        assert resolve_strategy(config, world, lambda: model, saved)[0] == DDPStrategyConfig()
        assert sizes == [CPU_MICRO_BATCH_SIZE, CPU_MICRO_BATCH_SIZE // 2]
    finally:
        leave_world()


def test_threads_are_the_cores_of_the_job(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    group("0::/", **{"cpu-max": "max 100000"})
    monkeypatch.setattr(limits.os, "sched_getaffinity", lambda _: set(range(16)))
    job = {"SLURM_JOB_ID": "9", "SLURM_CPUS_ON_NODE": "8"}
    step = {**job, "SLURM_STEP_ID": "0", "SLURM_CPUS_PER_TASK": "4"}
    pbs = {"PBS_JOBID": "3.head", "NCPUS": "6", "OMP_NUM_THREADS": "6"}
    for environ, cores in (({}, 16), (job, 8), (step, 4), (pbs, 6), ({**job, **step}, 4)):
        assert usable_cores(environ) == cores
        added = rank_defaults(device="cpu", nproc=2, interface=None, environ=environ)
        assert added["OMP_NUM_THREADS"] == str(cores // 2)
    batch = {**job, "SLURM_CPUS_PER_TASK": "2"}  # of each of four tasks in a job of the user
    assert usable_cores(batch) == 8
    assert usable_cores({**batch, "SLURM_STEP_ID": str(0xFFFFFFFA)}) == 8, "the shell of salloc"
    own = {**pbs, "OMP_NUM_THREADS": "3"}  # the user's
    assert rank_defaults(device="cpu", nproc=2, interface=None, environ=own) == {}


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("0::/pod", {"pod__cpu-max": "350000 100000"}),
        ("0::/pod/c", {"cpu-max": "400000 100000", "pod__cpu-max": "300000 100000"}),
        (
            "4:cpu,cpuacct:/p",
            {"cpu__cpu-cfs_quota_us": "300000", "cpu__cpu-cfs_period_us": "100000"},
        ),
    ],
)
def test_a_quota_of_processor_time_counts(
    group: Any, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str]
) -> None:
    monkeypatch.setattr(limits.os, "sched_getaffinity", lambda _: set(range(16)))
    group(own, **files)
    assert usable_cores({}) == 3
    plan = NodePlan(name="a1", nproc=2)
    finding = next(f for f in machine(plan) if f.id == "cpu.cores")
    assert "3 cores" in finding.text


_GROWS = "expandable_segments:True"
_UNROUNDED = f"{_GROWS},pinned_max_round_threshold_mb:1"


@each(
    ("6.1.0-microsoft-standard-WSL2", "2.13.0", None),
    ("6.1.0", "2.11.0+cu128", _GROWS),
    ("6.1.0", "2.13.0+cpu", _UNROUNDED),
)
def test_ranks_on_gpus_get_an_allocator_for_rows_of_many_widths(
    release, version, options, *, monkeypatch
):
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=release))
    monkeypatch.setattr(metadata, "version", {"torch": version}.__getitem__)
    added = rank_defaults(device="cuda", nproc=1, interface=None, environ={})
    assert added.get("PYTORCH_ALLOC_CONF") == options
    monkeypatch.undo()
    for own in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert rank_defaults(device="cuda", nproc=1, interface=None, environ={own: "x"}) == {}


@each(("6.1.0-microsoft-standard-WSL2", True), ("6.1.0", False))
def test_the_check_names_wsl(release, is_named, *, monkeypatch):
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=release))
    (system,) = (f for f in machine(NodePlan("a")) if f.id == "os.kernel")
    assert ("in WSL2" in system.text) == is_named
