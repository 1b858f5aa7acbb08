"""The only place that reads environment variables: what launchers and torchrun set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

RUN_DIR = "ISLES_RUN_DIR"
ATTEMPT = "ISLES_ATTEMPT"


@dataclass(frozen=True, slots=True)
class RankEnv:
    """What one process knows of its place: torchrun's variables and ours.

    Args:
        rank, local_rank, world_size, local_world_size: as torchrun sets them; a process started
            by hand without torchrun is rank 0 of 1.
        attempt: which start of the run this is; 0 where no launcher of ours started it.
        store: file through which the ranks of one machine find one another; None: env://.
        restart: how often all ranks of this start were started again before.
        meeting: host and port of the store through which the ranks of several nodes find one
            another; None: `store` or env://.
        agent_store: host and port of the store that a torchrun typed by hand shares.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    attempt: int
    store: Path | None
    restart: int = 0
    meeting: tuple[str, int] | None = None
    agent_store: tuple[str, int] | None = None


def read_rank_env(environ: Mapping[str, str] = os.environ) -> RankEnv:
    """This process' place among the ranks."""
    world_size = int(environ.get("WORLD_SIZE", "1"))
    shared = None
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        shared = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    return RankEnv(
        rank=int(environ.get("RANK", "0")),
        local_rank=int(environ.get("LOCAL_RANK", "0")),
        world_size=world_size,
        local_world_size=int(environ.get("LOCAL_WORLD_SIZE", str(world_size))),
        attempt=int(environ.get(ATTEMPT, "0")),
        store=None,
        agent_store=shared,
    )


def cache_home(environ: Mapping[str, str] = os.environ) -> Path:
    """Where caches belong by the XDG base directory specification."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "isles"


def visible_devices(environ: Mapping[str, str] = os.environ) -> list[str] | None:
    """The entries of CUDA_VISIBLE_DEVICES, or None where it is not set."""
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    return [entry.strip() for entry in value.split(",") if entry.strip() not in ("", "-1")]


def hub_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """Where huggingface_hub keeps what it has downloaded; by its documentation."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(name):
            return Path(environ[name]).expanduser()
    caches = environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = environ.get("HF_HOME") or f"{caches}/huggingface"
    return Path(home).expanduser() / "hub"


def has_mlflow_server(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether MLflow's own variable says where its server is."""
    return bool(environ.get("MLFLOW_TRACKING_URI"))
