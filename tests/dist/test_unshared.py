"""Hosts with disks of their own: a run there is the run that it would be on one shared disk."""

from __future__ import annotations

import functools
import os
import resource
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from isles.checkpoint.load import refuse_other_run
from isles.config.sections.model import ModelConfig
from isles.dist.files import broadcast_folder, find_disks, gather_folder
from isles.dist.world import join_world, leave_world, on_every_rank
from isles.errors import ExitCode, UserError
from isles.run.checkpoints import PARTIAL_PREFIX, list_checkpoints, verify_checkpoint
from isles.run.env import RankEnv, read_rank_env
from isles.run.paths import RunDir
from isles.run.records import read_record
from isles.train.data import check_model_folder
from tests.disks import small_disk
from tests.dist.test_resume import same_bits, with_dropout
from tests.dist.test_strategy_resume import CONSTANT, check_state
from tests.ranks import one_rank, run_ranks, start_training, train

SAVES = ("checkpoint.every_steps=4", "checkpoint.keep=2", "training.logging_steps=1")


def there(run: Path, host: int) -> RunDir:
    """The run directory as a host knows it."""
    return RunDir(run if host == 0 else run.parents[1] / f"host-{host}" / run.name)


def rank_on_host(env: RankEnv, run: Path, attempt: int, resume_from: Path | None) -> int:
    """A rank that is alone on its host, and sees the disk of that alone."""
    run_dir = there(run, env.rank)
    if env.rank:  # what a launcher brings there
        run_dir.attempt(attempt).path.mkdir(parents=True)
        shutil.copy(RunDir(run).resolved, run_dir.resolved)
    env = replace(env, local_rank=0, local_world_size=1)
    return one_rank(env, run_dir.path, attempt, resume_from)


start_on_hosts = functools.partial(start_training, rank=rank_on_host)


def left_on(host: int, run_dir: RunDir) -> list[str]:
    """What lies in the checkpoint folder of another host."""
    folder = there(run_dir.path, host).checkpoints
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


@pytest.mark.long
def test_killed_and_resumed_it_equals_the_run_on_one_disk(run_file: Path) -> None:
    with_dropout(run_file)
    stream = ("data.streaming=true", "data.validation_fraction=0", "strategy={kind: ddp}")
    options = (*SAVES, *stream, "training.max_steps=12")
    shared = train(run_file, 2, *options)
    runs = f"output_dir={run_file.parent / 'apart'}"
    run_dir, _, gang = start_on_hosts(run_file, 2, *options, runs)
    gang.until(lambda: list_checkpoints(run_dir))
    gang.processes[-1].kill()
    gang.kill()
    for info in list_checkpoints(run_dir):
        assert verify_checkpoint(info.path) == []
    again, _, gang = start_on_hosts(run_file, 2, *options, runs)
    assert gang.wait() == [0, 0], gang.said()
    assert again.path == run_dir.path
    log = gang.log.read_text()
    assert "separate disks" in log and "to ranks=[1]" in log
    assert same_bits(shared, again)
    assert left_on(1, run_dir) == []
    assert not [p for p in run_dir.checkpoints.iterdir() if p.name.startswith(PARTIAL_PREFIX)]


@pytest.mark.long
def test_one_machine_and_more_hosts_go_on_from_it(run_file: Path) -> None:
    """Two hosts, then one machine, then three hosts, under other strategies each time."""
    steps = ("checkpoint.every_steps=4", "checkpoint.keep=9", "checkpoint.async_save=false")
    reference = train(run_file, 1, *CONSTANT, *steps, "training.max_steps=12")
    runs = (*CONSTANT, f"output_dir={run_file.parent / 'apart'}")
    first = (*runs, "training.max_steps=4", "strategy={kind: fsdp}")
    run_dir, _, gang = start_on_hosts(run_file, 2, *first)
    assert gang.wait() == [0, 0], gang.said()
    alone = train(run_file, 1, *runs, "training.max_steps=8", resume=str(run_dir.path))
    assert alone == run_dir
    zero = "strategy={kind: deepspeed, zero_stage: 2}"
    third = (*runs, "training.max_steps=12", "checkpoint.async_save=false", zero)
    _, _, gang = start_on_hosts(run_file, 3, *third, resume=str(run_dir.path))
    assert gang.wait() == [0, 0, 0], gang.said()
    for step in (4, 8, 12):
        check_state(reference, run_dir, step, f"step {step}")


def test_a_full_disk_of_another_host_is_named(run_file: Path) -> None:
    runs = run_file.parent / "apart"
    disk = runs.parent / "host-1"
    with small_disk(disk, "160k"):
        run_dir, attempt, gang = start_on_hosts(run_file, 2, *SAVES, f"output_dir={runs}")
        codes = gang.wait()
        # Who hears of it a step later may have lost the other by then.
        assert {ExitCode.TRAINING} <= set(codes) <= {ExitCode.TRAINING, ExitCode.COMMUNICATION}
        # The record of rank 1 itself finds no room either, where rank 0 was too late to write it.
        record = read_record(attempt.rank_error(codes.index(ExitCode.TRAINING)))
        said = f"{record['what']} {record['where']}" if record else gang.said()
        assert "cannot save step 4: " in said, gang.said()
        assert "free on this disk" in said
        assert str(disk) in said and "rank 1 on " in said
        assert list_checkpoints(run_dir) == []
        assert left_on(1, run_dir) == []


def join_again(env: RankEnv, port: int, restart: int) -> list[int]:
    """Find the others by the variables of torchrun."""
    sizes = {"WORLD_SIZE": env.world_size, "LOCAL_WORLD_SIZE": env.local_world_size}
    place = {"RANK": env.rank, "LOCAL_RANK": env.local_rank}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    variables = {**sizes, **place, **store, "TORCHELASTIC_RESTART_COUNT": restart}
    os.environ |= {name: str(value) for name, value in variables.items()}
    if restart and env.rank == 0:
        time.sleep(2.0)
    return join_world(read_rank_env(), device="cpu", timeout_s=100.0).gather(env.rank)


def test_ranks_that_torchrun_starts_again_do_not_look_for_those_before():
    """Its store lives on, with the addresses of ranks that have ended."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for restart in range(2):
        assert run_ranks(join_again, 2, store.port, restart) == [[0, 1], [0, 1]]


def fault_of(action: Callable[[], object]) -> str:
    """What an action that must fail says."""
    with pytest.raises(UserError) as caught:
        action()
    return str(caught.value)


def send(env: RankEnv, folder: Path, small: Path) -> dict[str, Any]:
    """What ranks 1 and 2 get from rank 0, well and damaged."""

    def go(mine: Path, **files: str) -> list[int]:
        return broadcast_folder(mine, world, src=0, needs=env.rank > 0, files=files or None)

    def damaged(piece: Any, *args: Any) -> Any:
        receive(piece, *args).wait()
        piece[0] += 1
        return SimpleNamespace(wait=lambda _: None)  # an operation that is over

    world = join_world(env, device="cpu", timeout_s=60)
    source, own = folder / "0", folder / str(env.rank)
    own.mkdir(exist_ok=True)
    copy, spoilt = (own / name if env.rank else source for name in ("copy", "spoilt"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found: dict[str, Any] = {"first": go(copy)}
    found["grown_mb"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    found["again"] = go(copy)
    found["gone"] = fault_of(lambda: go(spoilt, gone="0" * 64))
    found["wrong"] = fault_of(lambda: go(spoilt, tiny="0" * 64))
    found["small"] = fault_of(lambda: go(small / "copy" if env.rank == 1 else spoilt))
    receive = dist.irecv
    if env.rank == 2:
        dist.irecv = damaged
    found["damaged"] = fault_of(lambda: go(spoilt))
    dist.irecv = receive
    assert env.rank == 0 or not spoilt.exists()
    # After all this the ranks still understand one another.
    parts = folder / "gathered" / str(env.rank)
    parts.mkdir(parents=True)
    (parts / f"of-{env.rank}").write_text(f"rank {env.rank}")
    gather_folder(parts, world, sends=env.rank > 0, group=world.saving)
    leave_world()
    return found


def test_files_travel_whole_or_not_at_all_in_little_memory(tmp_path: Path) -> None:
    contents = {"empty": b"", "sub/odd": os.urandom(9 * 2**20 + 17), "tiny": b"x"}
    for name, content in contents.items():
        (tmp_path / "0" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "0" / name).write_bytes(content)
    with (tmp_path / "0" / "large").open("wb") as stream:
        stream.truncate(160 * 2**20)
    small = tmp_path / "small"
    with small_disk(small, "4m"):
        found = run_ranks(send, 3, tmp_path, small)
    for rank in (1, 2):
        copy = tmp_path / str(rank) / "copy"
        assert {name: (copy / name).read_bytes() for name in contents} == contents
        assert (copy / "large").stat().st_size == 160 * 2**20
    assert not list(tmp_path.rglob(f"{PARTIAL_PREFIX}*"))
    texts = {path.name: path.read_text() for path in (tmp_path / "gathered" / "0").iterdir()}
    assert texts == {f"of-{rank}": f"rank {rank}" for rank in range(3)}
    assert max(result.pop("grown_mb") for result in found) < 48
    assert found[0] == found[1] == found[2], "all ranks say the same"
    assert found[0]["first"] == [1, 2]
    assert found[0]["again"] == [], "what is there already is not sent"
    assert "gone" in found[0]["gone"] and "No such file" in found[0]["gone"]
    assert "tiny was damaged: its SHA-256 changed" in found[0]["wrong"]
    assert "No space left on device; 0 B free" in found[0]["small"]
    assert str(small) in found[0]["small"]
    assert "was damaged: its SHA-256" in found[0]["damaged"]
    assert "rank 2 on" in found[0]["damaged"]


HOSTS = ("head", "both", "both", "own", "own")
"""Whose disk each rank sees: hosts of one rank, and a last one of two."""


def look_around(env: RankEnv, folder: Path) -> list[Any]:
    """What a rank finds out about the disks, what it refuses and gets.

    Two hosts share a disk that rank 0 does not see: they must not get in each other's way.
    """

    def fail() -> None:
        if env.rank == 1:
            raise UserError("it is missing", where="here")

    env = replace(env, local_rank=int(env.rank == 4), local_world_size=1 + (env.rank > 2))
    world = join_world(env, device="cpu", timeout_s=60)
    mine = folder / HOSTS[env.rank]
    os.chdir(mine)
    run_dir, disks = RunDir(mine), find_disks(world, mine)
    together = find_disks(world, folder)
    model = ModelConfig.model_validate({"name_or_path": "./m", "init": "scratch"})
    found = [
        together.is_apart,
        together.apart_leaders,
        disks.is_apart,
        disks.apart_leaders,
        fault_of(lambda: refuse_other_run(run_dir, world, disks)),
        fault_of(lambda: check_model_folder(model, world)),
        fault_of(lambda: on_every_rank(world, fail)),
    ]
    refuse_other_run(run_dir, world, together)
    for turn in range(3):
        names = [f"{turn}-{number}" for number in range(4)]
        if world.is_main:
            shutil.rmtree(run_dir.tokenizer, ignore_errors=True)
            run_dir.tokenizer.mkdir()
            for name in names:
                (run_dir.tokenizer / name).write_text(name)
        world.gather(None)
        needs = env.rank in disks.apart_leaders
        broadcast_folder(run_dir.tokenizer, world, src=0, needs=needs)
        assert sorted(path.name for path in run_dir.tokenizer.iterdir()) == names
    leave_world()
    return found


def test_hosts_that_share_a_disk_without_rank_0_do_not_get_in_each_others_way(tmp_path):
    for name in HOSTS:
        (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / "head" / "m").mkdir()
    (tmp_path / "both" / "checkpoints" / "step-00000007").mkdir(parents=True)
    found = run_ranks(look_around, 5, tmp_path)
    assert all(result == found[0] for result in found)
    together, leaders, apart, apart_leaders, refused, model, missing = found[0]
    assert (together, leaders) == ((False,) * 5, ())
    assert (apart, apart_leaders) == ((False, True, True, True, True), (1, 2, 3))
    assert "another run with this name, at step-00000007" in refused
    assert str(tmp_path / "both") in refused and "rank 1" in refused
    assert "'./m' is a folder on" in model
    assert "(rank 1), " in model and "(rank 3) lack" in model
    assert f"rsync -a --mkpath {tmp_path}/head/m/" in model
    assert missing.startswith("here on ") and "(rank 1): it is missing" in missing
    assert not [*tmp_path.rglob(".probe-*"), *tmp_path.rglob(f"{PARTIAL_PREFIX}*")]
