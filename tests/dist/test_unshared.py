"""Hosts with disks of their own: a run there is the run that it would be on one shared disk."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isles.config.load import load_run_file
from isles.config.resolve import resolve
from isles.errors import ExitCode, UserError
from isles.run.begin import begin_run, new_attempt
from isles.run.checkpoints import PARTIAL_PREFIX, list_checkpoints, verify_checkpoint
from isles.run.env import RankEnv
from isles.run.paths import Attempt, RunDir
from isles.run.records import read_record
from tests.disks import small_disk
from tests.dist.test_resume import same_bits, with_dropout
from tests.dist.test_strategy_resume import CONSTANT, check_state
from tests.ports import free_port
from tests.ranks import Gang, run_ranks, start_ranks, train_to_end

SAVES = ("checkpoint.every_steps=4", "checkpoint.keep=2", "training.logging_steps=1")


def there(run: Path, host: int) -> RunDir:
    """The run directory as a host knows it."""
    return RunDir(run if host == 0 else run.parents[1] / f"host-{host}" / run.name)


def rank_on_host(env: RankEnv, run: Path, attempt: int, resume_from: Path | None) -> int:
    """A rank that is alone on its host, and sees the disk of that alone."""
    from isles.train.worker import run_rank

    run_dir = there(run, env.rank)
    env = replace(env, local_rank=0, local_world_size=1)
    return run_rank(run_dir, run_dir.attempt(attempt), env, resume_from)


def start_on_hosts(
    run_file: Path, hosts: int, *overrides: str, resume: str = "auto"
) -> tuple[RunDir, Attempt, Gang]:
    """Begin or resume a run on the first host, as a launcher does, and start a rank on each."""
    loaded = load_run_file(run_file, overrides)
    resolved = resolve(loaded, num_gpus=0, world_size=hosts)
    begun = begin_run(resolved, loaded.text, resume)
    attempt = new_attempt(begun.run_dir, loaded.text)
    attempt.launch.unlink()
    for host in range(1, hosts):
        run_dir = there(begun.run_dir.path, host)
        run_dir.attempt(attempt.number).path.mkdir(parents=True)
        shutil.copy(begun.run_dir.resolved, run_dir.resolved)
    arguments = (begun.run_dir.path, attempt.number, begun.resume_from)
    return begun.run_dir, attempt, start_ranks(rank_on_host, hosts, *arguments)


def left_on(host: int, run_dir: RunDir) -> list[str]:
    """What lies in the checkpoint folder of another host."""
    folder = there(run_dir.path, host).checkpoints
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def log_of(gang: Gang) -> str:
    return gang.log.read_text(errors="replace")


@pytest.mark.long
def test_killed_and_resumed_it_equals_the_run_on_one_disk(run_file: Path) -> None:
    with_dropout(run_file)
    stream = ("data.streaming=true", "data.validation_fraction=0", "strategy={kind: ddp}")
    options = (*SAVES, *stream, "training.max_steps=12")
    shared, code = train_to_end(run_file, 2, *options)
    assert code == 0
    runs = f"output_dir={run_file.parent / 'apart'}"
    run_dir, _, gang = start_on_hosts(run_file, 2, *options, runs)
    while not list_checkpoints(run_dir):
        assert not gang.wait_or_timeout(0.01), log_of(gang)[-3000:]
    os.kill(gang.processes[-1].pid or 0, signal.SIGKILL)
    gang.kill()
    for info in list_checkpoints(run_dir):
        assert verify_checkpoint(info.path) == []
    again, _, gang = start_on_hosts(run_file, 2, *options, runs)
    assert gang.wait() == [0, 0], log_of(gang)[-3000:]
    assert again.path == run_dir.path
    assert "disks of their own" in log_of(gang) and "travels to ranks=[1]" in log_of(gang)
    assert same_bits(shared, again)
    assert left_on(1, run_dir) == []
    assert not [p for p in run_dir.checkpoints.iterdir() if p.name.startswith(PARTIAL_PREFIX)]


@pytest.mark.long
def test_one_machine_and_more_hosts_go_on_from_it(run_file: Path) -> None:
    """Two hosts, then one machine, then three hosts, under other strategies each time."""
    steps = ("checkpoint.every_steps=4", "checkpoint.keep=9")
    reference, code = train_to_end(run_file, 1, *CONSTANT, *steps, "training.max_steps=12")
    assert code == 0
    runs = (*CONSTANT, f"output_dir={run_file.parent / 'apart'}")
    first = (*runs, "training.max_steps=4", "strategy={kind: fsdp}")
    run_dir, _, gang = start_on_hosts(run_file, 2, *first)
    assert gang.wait() == [0, 0], log_of(gang)[-3000:]
    alone = train_to_end(run_file, 1, *runs, "training.max_steps=8", resume=str(run_dir.path))
    assert alone == (run_dir, 0)
    zero = ("strategy={kind: deepspeed, zero_stage: 2}", "checkpoint.async_save=false")
    third = (*runs, "training.max_steps=12", *zero)
    _, _, gang = start_on_hosts(run_file, 3, *third, resume=str(run_dir.path))
    assert gang.wait() == [0, 0, 0], log_of(gang)[-3000:]
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
        said = f"{record['what']} {record['where']}" if record else log_of(gang)
        assert "step 4 could not be saved: " in said, log_of(gang)[-3000:]
        assert "are free on this disk" in said
        assert str(disk) in said and "rank 1 on " in said
        assert list_checkpoints(run_dir) == []
        assert left_on(1, run_dir) == []


def by_hand(env: RankEnv, folder: Path, run_file: Path, port: int, words: list[str]) -> Any:
    """One rank as torchrun starts it, in the folder of its host."""
    from isles.train.__main__ import main

    os.chdir(folder / f"host-{env.rank}")
    variables = {"RANK": env.rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in variables.items()}
    os.environ["XDG_CACHE_HOME"] = str(folder / f"host-{env.rank}" / "cache")
    sys.argv = ["isles.train", str(run_file), *words]
    return main()


@pytest.mark.long
def test_torchrun_by_hand_where_the_other_host_has_the_data(run_file: Path, words: Path) -> None:
    """Rank 0 makes the run directory, the other host trains the tokenizer and sends its tokens."""
    folder = run_file.parent
    head, other = folder / "host-0", folder / "host-1"
    for host in (head, other):
        host.mkdir()
    words.rename(other / "words.jsonl")
    (other / "runs" / "tiny-1").mkdir(parents=True)  # a run of its own, which is let alone
    keys = ["output_dir=runs", "data.sources=[{path: words.jsonl}]", "training.max_steps=4"]
    port = free_port()
    gang = start_ranks(by_hand, 2, folder, run_file, port, keys)
    assert gang.wait() == [0, 0], log_of(gang)[-3000:]
    run_dir = RunDir(head / "runs" / "tiny-1")
    assert verify_checkpoint(list_checkpoints(run_dir)[-1].path) == []
    (kept,) = (other / "runs").glob(".of-*/tiny-1")
    for file in run_dir.tokenizer.iterdir():
        assert (kept / "tokenizer" / file.name).read_bytes() == file.read_bytes()
    assert list((other / "runs" / "tiny-1").iterdir()) == []


def fault_of(action: Callable[[], object]) -> str:
    """What an action that must fail says."""
    try:
        action()
    except UserError as error:
        return str(error)
    raise AssertionError("it went through")


class Done:
    """An operation that is over."""

    def wait(self, *_: object) -> None:
        """At once."""


def send(env: RankEnv, folder: Path, small: Path) -> dict[str, Any]:
    """What ranks 1 and 2 get from rank 0, well and damaged."""
    import torch.distributed as dist

    from isles.dist.files import broadcast_folder, gather_folder
    from isles.dist.world import join_world, leave_world

    def go(mine: Path, **files: str) -> list[int]:
        return broadcast_folder(mine, world, src=0, needs=env.rank > 0, files=files or None)

    def damaged(piece: Any, *args: Any) -> Any:
        receive(piece, *args).wait()
        piece[0] += 1
        return Done()

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
    assert "tiny is not what was to be sent: its SHA-256 has changed" in found[0]["wrong"]
    assert "No space left on device; 0 B are free" in found[0]["small"]
    assert str(small) in found[0]["small"]
    assert "is not what was to be sent" in found[0]["damaged"]
    assert "rank 2 on" in found[0]["damaged"]


def look_around(env: RankEnv, folder: Path) -> list[Any]:
    """What a rank finds out about the disks, and what it refuses."""
    from isles.checkpoint.load import refuse_other_run
    from isles.config.sections.model import ModelConfig
    from isles.dist.files import find_disks
    from isles.dist.world import join_world, leave_world, on_every_rank
    from isles.train.data import check_model_folder

    def fail() -> None:
        if env.rank == 1:
            raise UserError("it is missing", where="here")

    env = replace(env, local_rank=env.rank % 2, local_world_size=2)
    world = join_world(env, device="cpu", timeout_s=60)
    mine = folder / ("head" if env.rank < 2 else "other")
    os.chdir(mine)
    together, apart = find_disks(world, folder), find_disks(world, mine)
    model = ModelConfig.model_validate({"name_or_path": "./m", "init": "scratch"})
    found = [
        together.is_apart,
        together.apart_leaders,
        apart.is_apart,
        apart.apart_leaders,
        fault_of(lambda: refuse_other_run(RunDir(mine), world, apart)),
        fault_of(lambda: check_model_folder(model, world)),
        fault_of(lambda: on_every_rank(world, fail)),
    ]
    refuse_other_run(RunDir(mine), world, together)
    leave_world()
    return found


def spread(env: RankEnv, folder: Path) -> list[bool]:
    """Two hosts share a disk that rank 0 does not see; what each has after its news."""
    from isles.dist.files import broadcast_folder, find_disks
    from isles.dist.world import join_world, leave_world

    env = replace(env, local_rank=0, local_world_size=1)
    world = join_world(env, device="cpu", timeout_s=60)
    run_dir = RunDir(folder / ("head", "both", "both", "own")[env.rank])
    disks = find_disks(world, run_dir.path)
    kept = []
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
        kept.append(sorted(path.name for path in run_dir.tokenizer.iterdir()) == sorted(names))
    leave_world()
    return kept


@pytest.mark.long
def test_hosts_that_share_a_disk_without_rank_0_do_not_get_in_each_others_way(
    tmp_path: Path,
) -> None:
    for name in ("head", "both", "own"):
        (tmp_path / name).mkdir()
    assert run_ranks(spread, 4, tmp_path) == [[True] * 3] * 4
    assert not [*tmp_path.rglob(".probe-*"), *tmp_path.rglob(f"{PARTIAL_PREFIX}*")]


def test_who_sees_the_run_directory_and_what_a_host_lacks(tmp_path: Path) -> None:
    (tmp_path / "head" / "m").mkdir(parents=True)
    (tmp_path / "other" / "checkpoints" / "step-00000007").mkdir(parents=True)
    found = run_ranks(look_around, 4, tmp_path)
    assert all(result == found[0] for result in found)
    together, leaders, apart, apart_leaders, refused, model, missing = found[0]
    assert (together, leaders) == ((False,) * 4, ())
    assert (apart, apart_leaders) == ((False, False, True, True), (2,))
    assert "a run of its own under this name, with step-00000007" in refused
    assert str(tmp_path / "other") in refused and "rank 2" in refused
    assert "'./m' is a folder on" in model and "(rank 2) lacks" in model
    assert f"rsync -a --mkpath {tmp_path}/head/m/" in model
    assert missing.startswith("here on ") and "(rank 0): it is missing" in missing
    assert not list(tmp_path.rglob(".probe-*"))
