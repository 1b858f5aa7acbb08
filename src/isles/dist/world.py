"""The ranks of one cluster: the process group, the device, nodes, and small collectives."""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store, TCPStore

from isles.errors import CommunicationError, ConfigErrors, PreflightError, UserError
from isles.run.env import RankEnv, connect_when_used, num_restarts
from isles.run.limits import raise_open_files

T = TypeVar("T")

log = logging.getLogger(__name__)

_FIRST_LOOK_S, _LOOK_S = 0.02, 0.5


def gpu_bytes(device: torch.device) -> int:
    """Memory of a GPU; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).total_memory)


@dataclass(frozen=True, slots=True)
class World:
    """This rank's position, and the process groups through which it communicates.

    Args:
        rank, local_rank, world_size, local_world_size: as in PyTorch and torchrun.
        device: the device on which this rank computes.
        control: a CPU group for small messages: stop requests, statistics.
        saving: a CPU group for the thread that writes checkpoints, with a long timeout.
        work: a CPU group for work of rank 0 while the others wait, with a long timeout.
        timeout_s: longest wait in one collective operation.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    control: dist.ProcessGroup
    saving: dist.ProcessGroup
    work: dist.ProcessGroup
    timeout_s: float

    @property
    def is_main(self) -> bool:
        """True if this is rank 0, which writes the records."""
        return self.rank == 0

    @property
    def host(self) -> str:
        """This machine's name."""
        return socket.gethostname()

    @property
    def device_name(self) -> str:
        """The GPU's model, or CPU."""
        is_gpu = self.device.type == "cuda"
        return torch.cuda.get_device_name(self.device) if is_gpu else "CPU"

    def gather(self, value: T, *, group: dist.ProcessGroup | None = None) -> list[T]:
        """Every rank's value, by rank, on every rank; over `control` or `group`. All ranks must
        call this."""
        values: list[T | None] = [None] * self.world_size
        dist.all_gather_object(values, value, group=group or self.control)
        return values  # type: ignore[return-value]  # filled by all_gather_object

    def broadcast(self, value: T | None) -> T:
        """Rank 0's value on every rank. All ranks must call this."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]  # type: ignore[return-value]  # rank 0 has put one in

    def main_first(
        self, work: Callable[[], T], *, group: dist.ProcessGroup | None = None, rank: int = 0
    ) -> T:
        """Run `work` on one rank; its result, or its error, on all. All ranks must call this.

        Args:
            work: runs on one rank; the others wait up to the group's timeout.
            group: the process group that sends the outcome; None: `control`.
            rank: the rank that runs `work`.
        """
        outcomes = [_caught(work) if self.rank == rank else (None, None)]
        dist.broadcast_object_list(outcomes, src=rank, group=group or self.control)
        value, failure = outcomes[0]
        if failure is not None:
            raise failure
        return value  # type: ignore[return-value]  # no error: `work` has returned


@dataclass(frozen=True, slots=True)
class RankLocation:
    """Node of a rank, for messages and for finding the ranks that share its disk.

    Args:
        rank: the rank.
        leader: rank of the node's first process, which identifies the node.
        host: the host's name.
    """

    rank: int
    leader: int
    host: str

    @property
    def is_leader(self) -> bool:
        """True if this rank acts for its node."""
        return self.rank == self.leader

    def __str__(self) -> str:
        return f"{self.host} (rank {self.leader})"


def place_of(world: World) -> RankLocation:
    """This rank's place."""
    return RankLocation(world.rank, world.rank - world.local_rank, world.host)


def on_every_rank(
    world: World, work: Callable[[], T], *, group: dist.ProcessGroup | None = None
) -> T:
    """Run `work` on every rank, and return this rank's result. All ranks must call this.

    Args:
        group: the process group that exchanges failures; None: `control`.

    Raises:
        UserError: of the first rank that failed, on every rank; lists the failed nodes unless all
            failed.
    """
    value, failure = _caught(work)
    found = world.gather((place_of(world), failure), group=group)
    failed = [(place, error) for place, error in found if error is not None]
    if not failed:
        return value  # type: ignore[return-value]  # no error: `work` has returned
    first = failed[0][1]
    is_some = len(failed) < len(found)
    if is_some and isinstance(first, UserError) and not isinstance(first, ConfigErrors):
        nodes = ", ".join(dict.fromkeys(str(place) for place, _ in failed))
        first.where = f"{first.where} on {nodes}" if first.where else nodes
    raise first


def raise_first(failures: Sequence[Exception | None]) -> None:
    """Raise the first failure, if any. All ranks must call this with the same failures."""
    for failure in failures:
        if failure is not None:
            raise failure


@dataclass(slots=True)
class _Share:
    # State of a rank's part of the work, sent to the other ranks.
    is_done: bool
    line: str = ""
    result: Any = None
    failure: Exception | None = None


def _caught(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    # The result, or the error in a form that can be sent to the waiting ranks.
    try:
        return work(), None
    except UserError as error:
        return None, error
    except Exception as error:
        # Not every exception can be sent; this rank's own log has its traceback.
        log.exception("failed while the other ranks waited")
        return None, RuntimeError(f"{type(error).__name__}: {error}")


def work_together(
    work: Callable[[Callable[[str], None]], T] | None,
    world: World,
    *,
    progress: Callable[[str], None],
    no_progress_s: float,
    doing: str = "prepare data",
) -> list[T | None]:
    """Run `work` on the ranks that have some; all wait for it. All ranks must call this.

    The ranks exchange their state every half second, so that the wait is limited by the reports of
    `work` and not by the timeout of one collective operation.

    Args:
        work: called in a thread, with a function that accepts a progress line; None: this rank has
            nothing to do.
        progress: called on every rank with the progress lines of the others.
        no_progress_s: longest time without a new report from any working rank.
        doing: description of the work, for the error.

    Returns:
        Every rank's result, by rank; None for ranks without work.

    Raises:
        Exception: the error of the first rank that failed, on every rank.
        CommunicationError: no working rank has reported anything new for too long.
    """
    share = _Share(is_done=work is None)

    def report(line: str) -> None:
        share.line = line

    def run() -> None:
        assert work is not None
        share.result, share.failure = _caught(lambda: work(report))
        share.is_done = True

    if work is not None:
        # A daemon thread: if another node fails, this process exits without waiting.
        threading.Thread(target=run, daemon=True).start()
    known: dict[int, str] = {}
    last_news, wait_s = time.monotonic(), _FIRST_LOOK_S
    while True:
        shares = world.gather(share)
        raise_first([each.failure for each in shares])
        for rank, each in enumerate(shares):
            if each.line != known.get(rank, ""):
                known[rank], last_news = each.line, time.monotonic()
                progress(each.line)
        running = [rank for rank, each in enumerate(shares) if not each.is_done]
        if not running:
            return [each.result for each in shares]
        # A rank may wait silently for another that prepares the same data on a shared disk.
        if time.monotonic() - last_news > no_progress_s:
            who = ", ".join(f"{rank} ({known.get(rank, 'nothing')!r})" for rank in running)
            raise CommunicationError(
                f"ranks that {doing} have reported nothing new for {no_progress_s:.0f} s; their "
                f"last reports are {who}",
                where=f"rank {min(running)}",
                fix="check the logs of these ranks",
                id="data.waiting",
            )
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _LOOK_S)


def join_world(
    env: RankEnv, *, device: str, timeout_s: float, work_timeout_s: float | None = None
) -> World:
    """Join the process group. All ranks must call this.

    Args:
        env: this rank's environment.
        device: cuda or cpu.
        timeout_s: longest wait for the others, now and in every later operation.
        work_timeout_s: longest wait for work of rank 0 alone, such as verifying a checkpoint.

    Raises:
        PreflightError: there is no GPU for this rank.
        CommunicationError: the others did not join in time.
    """
    chosen = _device(env, device)
    timeout = timedelta(seconds=timeout_s)
    store: Store | None = None
    if env.world_size > 1:
        connect_when_used()
        raise_open_files()
    try:
        if env.store is not None:
            store = FileStore(str(env.store), env.world_size)
        elif env.store_address is not None:
            # The agent's store. Each restart has separate keys: torchrun keeps the keys of the last
            # attempt, and a rank would look for ranks that have exited.
            tcp_store = TCPStore(*env.store_address, is_master=False, timeout=timeout)
            store = PrefixStore(f"ranks-{num_restarts()}", tcp_store)
        elif env.world_size == 1:
            store = HashStore()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo",
            store=store,
            rank=env.rank if store is not None else -1,
            world_size=env.world_size if store is not None else -1,
            timeout=timeout,
            device_id=chosen if chosen.type == "cuda" else None,
        )
        control = dist.new_group(backend="gloo", timeout=timeout)
        patient = timedelta(seconds=max(timeout_s, work_timeout_s or 0.0))
        # Messages of one group have one order, so the thread that saves needs a group for itself.
        saving = dist.new_group(backend="gloo", timeout=patient)
        work = dist.new_group(backend="gloo", timeout=patient)
        for group in (control, saving, work):
            # Ranks that cannot reach each other fail here, and not at a group's first use, hours
            # later and after five times its timeout.
            dist.barrier(group=group)
    except (dist.DistStoreError, dist.DistNetworkError, RuntimeError) as error:
        raise CommunicationError(
            f"rank {env.rank} of {env.world_size} could not join the others: {error}",
            where=f"rank {env.rank} on {socket.gethostname()}",
            fix="check the logs of the missing ranks with `isles logs`",
            id="rank.others",
        ) from error
    return World(
        rank=env.rank,
        local_rank=env.local_rank,
        world_size=env.world_size,
        local_world_size=env.local_world_size,
        device=chosen,
        control=control,
        saving=saving,
        work=work,
        timeout_s=timeout_s,
    )


def leave_world() -> None:
    """Leave the process group; called once, at the end of a rank."""
    if dist.is_initialized():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.destroy_process_group()


def is_communication_error(error: BaseException) -> bool:
    """True if an error only reports that another rank was lost: a consequence, not a cause."""
    if isinstance(error, CommunicationError | dist.DistBackendError | dist.DistNetworkError):
        return True
    text = str(error)
    signs = ("Connection closed by peer", "gloo/transport", "Timed out waiting", "NCCL", "TCPStore")
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)


def _device(env: RankEnv, kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if env.local_rank >= count:
        raise PreflightError(
            f"rank {env.rank} needs GPU {env.local_rank}, torch {torch.__version__} sees {count}",
            where=f"rank {env.rank} on {socket.gethostname()}",
            fix="compare `nvidia-smi` with `python -c 'import torch; print(torch.cuda."
            "is_available())'`. A CPU build of torch or an old driver hides GPUs. To train on the "
            "CPU, set clusters.0.device=cpu",
            id="gpu.count",
        )
    device = torch.device("cuda", env.local_rank)
    torch.cuda.set_device(device)
    return device


def serve_store(listener: socket.socket) -> None:
    """Serve the store that the ranks of all nodes use to rendezvous, until the agent exits.

    Args:
        listener: already bound, because torch would listen on every interface.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # ranks that are saving still need the store
    address, port = listener.getsockname()[:2]
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
        master_listen_fd=listener.detach(),
    )
    threading.Event().wait()
    del store
