"""How ranks find one another."""

from __future__ import annotations

import os
import time

from torch.distributed import TCPStore

from isles.dist.world import join_world
from isles.run.env import RankEnv, read_rank_env
from tests.ranks import run_ranks

LATE_S, JOIN_S = 2.0, 100.0


def join_as_under_torchrun(env: RankEnv, port: int, restart: int) -> list[int]:
    variables = {
        "RANK": env.rank,
        "LOCAL_RANK": env.rank,
        "WORLD_SIZE": env.world_size,
        "LOCAL_WORLD_SIZE": env.world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": restart,
    }
    os.environ.update({key: str(value) for key, value in variables.items()})
    if restart and env.rank == 0:
        time.sleep(LATE_S)
    return join_world(read_rank_env(), device="cpu", timeout_s=JOIN_S).gather(env.rank)


def test_ranks_that_torchrun_starts_again_do_not_look_for_those_before() -> None:
    """Its store lives on, with the addresses of ranks that have ended."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for restart in range(2):
        found = run_ranks(join_as_under_torchrun, 2, store.port, restart)
        assert found == [[0, 1], [0, 1]]
