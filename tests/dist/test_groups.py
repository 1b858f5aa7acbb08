"""What the process groups of a rank take of the kernel."""

from __future__ import annotations

import math
import resource
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from isles.dist.world import join_world, leave_world
from isles.run.env import RankEnv
from tests.deadline import DEADLINE_S
from tests.ranks import run_ranks

RANKS = 8


def _sockets() -> int:
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the folder itself
            found += str(path.readlink()).startswith("socket:")
    return found


def _join(env: RankEnv) -> tuple[int, int, int, bool]:
    """Sockets of four groups: as they are made, and after each operation that ranks use; files that
    may be open."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    before = _sockets()
    world = join_world(env, device="cpu", timeout_s=DEADLINE_S)
    made = _sockets() - before
    world.gather(env.rank)
    world.broadcast(env.rank)
    dist.barrier(group=world.control)
    ones = torch.ones(1 << 20)
    dist.all_reduce(ones, group=world.control)
    assert ones[0] == RANKS
    used = _sockets() - before
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limit = min(2**20, hard if hard != resource.RLIM_INFINITY else 2**20)
    world.gather(None, group=world.saving)  # no rank leaves while others count
    leave_world()
    return made, used, files, files == limit


def test_groups_connect_only_ranks_that_send_to_each_other_and_files_may_be_many():
    """A rank of n opens some 2 log2(n) sockets in a group, not n: 512 ranks stay below 1,024."""
    each = 2 * math.log2(RANKS)
    for made, used, files, is_raised in run_ranks(_join, RANKS):
        # A socket that listens in each group; three groups have met.
        assert made <= 4 + 3 * each < 4 * (RANKS - 1)
        assert used <= made + each
        assert is_raised, files
