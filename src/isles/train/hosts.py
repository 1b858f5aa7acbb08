"""What a run needs on every host: a run directory, and the model where it is a folder."""

from __future__ import annotations

from pathlib import Path

from isles.config.sections.model import ModelConfig
from isles.dist.files import find_disks
from isles.dist.world import World, place_of, raise_first
from isles.errors import UserError
from isles.facts.models import shape_names
from isles.run.paths import Attempt, RunDir
from isles.run.records import write_text_atomic


def own_run_dir(run_dir: RunDir, attempt: Attempt, world: World) -> tuple[RunDir, Attempt]:
    """The run directory as this rank knows it, with what ranks read in it. All must call this.

    Rank 0 has made it. Nodes that do not see it get a hidden one of their own beside where it would
    be, so that it is never taken for a run of theirs.

    Args:
        run_dir: rank 0's.
        attempt: this start of it.
        world: the ranks.

    Raises:
        UserError: a node's disk does not take it; on every rank.
    """
    disks = find_disks(world, run_dir.path)
    if not disks.apart_leaders:
        return run_dir, attempt
    head = world.broadcast(world.host if world.is_main else None)
    text = world.main_first(lambda: run_dir.resolved.read_text(encoding="utf-8"))
    if disks.is_apart[world.rank]:
        path = run_dir.path.absolute()
        run_dir = RunDir(path.parent / f".of-{head}" / path.name)
        attempt = run_dir.attempt(attempt.number)
    fault = None
    if world.rank in disks.apart_leaders:
        try:
            attempt.path.mkdir(parents=True, exist_ok=True)
            write_text_atomic(run_dir.resolved, text)
        except OSError as error:
            fault = UserError(
                f"no folder for this run can be made: {error.strerror or error}",
                where=f"{run_dir.path}, rank {world.rank} on {world.host}",
                fix="set an output_dir that can be written on every host",
                id="files.output",
            )
    raise_first(world.gather(fault))
    return run_dir, attempt


def check_model_folder(model: ModelConfig, world: World) -> None:
    """A model that is a folder must be there on every node. All ranks must call this.

    Raises:
        UserError: it is there on some nodes only; on every rank, with the names of the others.
    """
    name = model.name_or_path
    if world.world_size == world.local_world_size or name in shape_names():
        return
    folder = Path(name).expanduser()
    me = place_of(world)
    found = world.gather((me, me.is_leader and folder.is_dir(), str(folder.absolute())))
    leaders = [(place, is_there, path) for place, is_there, path in found if place.is_leader]
    has = [(place, path) for place, is_there, path in leaders if is_there]
    lacks = [place for place, is_there, _ in leaders if not is_there]
    if not has or not lacks:
        return  # on the hub, or nowhere: loading it says which
    owner, path = has[0]
    lines = [f"rsync -a --mkpath {path}/ {place.host}:{path}/" for place in lacks]
    raise UserError(
        f"the model {name!r} is a folder on {owner}, which {', '.join(map(str, lacks))} "
        f"{'lack' if len(lacks) > 1 else 'lacks'}",
        where="model.name_or_path",
        fix=f"on {owner.host}: {'; '.join(lines)}; or put it on a disk that all hosts share",
        id="files.model",
    )
