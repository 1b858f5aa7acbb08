"""Environment of this process. Nothing else reads environment variables."""

from __future__ import annotations

import os
import pwd
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from isles.config.scratch import naming_scratch
from isles.errors import UserError

RUN_DIR = "ISLES_RUN_DIR"
ATTEMPT = "ISLES_ATTEMPT"
NAMED = "ISLES_NAMED"
"""Suffix of a run's name on the machine that shows the output of this one."""
IN_POD = "kubernetes:"
"""Prefix of a destination in a pod, for kubectl. See `launch/kubernetes/reach.py`."""
MACHINE = "ISLES_MACHINE"
"""Destination of this machine for `Shell` on the machine that shows the output of this process."""
CONTAINER = "ISLES_CONTAINER"
"""Set inside a container: number and start time of the host process that has entered it."""
TELEMETRY = "ISLES_TELEMETRY"
"""off: agents take no samples, for comparison in benchmarks."""

SKY_TOKEN = "ISLES_TOKEN"
"""Token of an attempt, which a SkyPilot task gets as a secret."""
SKY_JOIN = "ISLES_JOIN"
"""Join line of an attempt, also a SkyPilot secret."""

_HOME = "isles-home-"
_SETTLED = "ISLES_SETTLED_HOME"
"""The replacement for HOME that a parent process has made."""

_SPECIAL_STEP = 0xFFFFFFF0
"""Slurm gives special steps, such as the interactive step of `salloc`, numbers from here on."""

SET_BY_TORCHRUN = {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT"}
"""Variables of torchrun's ranks that no other module of isles sets."""


@dataclass(frozen=True, slots=True)
class RankEnv:
    """Place of one process among the ranks: torchrun's variables and ours.

    Args:
        rank, local_rank, world_size, local_world_size: torchrun's values. Without torchrun, a
            process is rank 0 of 1.
        attempt: number of the attempt, or 0 without a launcher of isles.
        store: file for the rendezvous of ranks on one machine, or None for env://.
        restart: number of earlier restarts of all ranks in this attempt.
        store_address: host and port of the store of the agents or of torchrun, for the rendezvous
            of ranks on several nodes. None means `store` or env://.
        in_job: whether the run is in a queue's job, which may be requeued after a stop.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    attempt: int
    store: Path | None
    restart: int = 0
    store_address: tuple[str, int] | None = None
    in_job: bool = False


def read_rank_env(environ: Mapping[str, str] = os.environ) -> RankEnv:
    """Place of this process among the ranks."""
    world_size = int(environ.get("WORLD_SIZE", "1"))
    address = None
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        address = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    return RankEnv(
        rank=int(environ.get("RANK", "0")),
        local_rank=int(environ.get("LOCAL_RANK", "0")),
        world_size=world_size,
        local_world_size=int(environ.get("LOCAL_WORLD_SIZE", str(world_size))),
        attempt=int(environ.get(ATTEMPT, "0")),
        store=None,
        store_address=address,
    )


def allocation(environ: Mapping[str, str] = os.environ) -> str | None:
    """The Slurm job of this process, or None."""
    return environ.get("SLURM_JOB_ID") or None


def is_job_node(environ: Mapping[str, str] = os.environ) -> bool:
    """True if this process is on a node of its Slurm job. A shell of salloc may be on another
    host."""
    return bool(environ.get("SLURMD_NODENAME"))


def run_dir_of_script(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The run directory of the calling script, or None if isles has not started it."""
    value = environ.get(RUN_DIR)
    return Path(value) if value else None


def is_sampled(environ: Mapping[str, str] = os.environ) -> bool:
    """True if the agent of this process samples its node and ranks."""
    return environ.get(TELEMETRY) != "off"


def is_in_container(environ: Mapping[str, str] = os.environ) -> bool:
    """True if isles has put this process into a container."""
    return bool(environ.get(CONTAINER))


def container_host(environ: Mapping[str, str] = os.environ) -> tuple[int, float] | None:
    """Number and start time of the host process that has entered this container, if known."""
    words = environ.get(CONTAINER, "").split()
    return (int(words[0]), float(words[1])) if len(words) == 2 else None


def scratch_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The folder for temporary files from the user or a job."""
    return Path(environ["TMPDIR"]) if environ.get("TMPDIR") else None


def forget_window_size() -> None:
    """Remove COLUMNS and LINES, which programs use as the size of a window, though it may
    change."""
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)


def refuse_kernels() -> None:
    """Let transformers fetch no kernels, unless the user has set USE_HUB_KERNELS.

    If the package `kernels` is installed, the type in a model's config.json is enough for
    transformers to download compiled code and run it. Every process that builds a model must call
    this before it imports transformers.
    """
    os.environ.setdefault("USE_HUB_KERNELS", "NO")


def connect_when_used() -> None:
    """Let groups of gloo connect two ranks at their first message, unless the user has decided.

    By default each group connects all ranks as it is made: with four groups of 512 ranks, 2,044
    sockets a rank. Collective operations use about 2 log2(n) of them. Call this before the groups
    are made.
    """
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def num_restarts(environ: Mapping[str, str] = os.environ) -> int:
    """Number of earlier restarts of the ranks of this attempt, by isles agents or torchrun."""
    return int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def home(environ: Mapping[str, str] = os.environ) -> Path:
    """The user's home folder, or a folder below TMPDIR instead.

    In a container the user may be a bare number, without a name and a home, or with the home /,
    which only root can write to.
    """
    found = Path(environ["HOME"]) if environ.get("HOME") else None
    if found is None:
        with suppress(RuntimeError):
            found = Path.home()
    if found is not None and _may_keep(found):
        return found
    with naming_scratch():
        below = environ.get("TMPDIR", "")
        if not below or not os.access(below, os.W_OK | os.X_OK):
            below = tempfile.gettempdir()
        folder = Path(environ.get(_SETTLED) or Path(below) / f"{_HOME}{os.getuid()}")
        with suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            # Others can write to this folder's parent, and may have made it.
            own = folder.lstat()
            if stat.S_ISDIR(own.st_mode) and own.st_uid == os.getuid() and not own.st_mode & 0o022:
                return folder
        return Path(tempfile.mkdtemp(prefix=_HOME))


def _may_keep(folder: Path) -> bool:
    # Whether isles can create caches below it, or they exist.
    # `Path.exists` would raise an error if this user may not look into the folder.
    if os.path.exists(folder / ".cache"):  # noqa: PTH110
        return True
    above = next(path for path in (folder, *folder.parents) if os.path.exists(path))  # noqa: PTH110
    return os.access(above, os.W_OK | os.X_OK)


def settle_home() -> str:
    """Give this process and its children a home and a user name, which libraries expect.

    Each process that no other process of isles has started must call this.

    Returns:
        A line for the user if the caches are now in a folder for temporary files, or empty.
    """
    found, before = home(), os.environ.get("HOME", "")
    names = ("LOGNAME", "USER", "LNAME", "USERNAME")
    if not any(os.environ.get(name) for name in names):
        try:
            pwd.getpwuid(os.getuid())
        except KeyError:
            os.environ["USER"] = str(os.getuid())
    if before and Path(before) == found:
        return ""
    has_caches = bool(os.environ.get("XDG_CACHE_HOME"))
    if before in ("", "/") or not Path(before).is_dir():
        os.environ["HOME"] = str(found)
    else:  # it may have files to read, such as .netrc
        os.environ[_SETTLED] = str(found)
        if not has_caches:
            os.environ["XDG_CACHE_HOME"] = f"{found}/.cache"
    if has_caches or not found.name.startswith(_HOME):
        return ""
    why = f"HOME is {before}, which is not writable" if before else "this user has no HOME"
    return f"{why}: caches are in {found}. To keep them, set HOME, or XDG_CACHE_HOME and HF_HOME"


def cache_home(environ: Mapping[str, str] = os.environ) -> Path:
    """Folder for caches, by the XDG base directory specification."""
    return Path(environ.get("XDG_CACHE_HOME") or home(environ) / ".cache") / "isles"


def state_home(environ: Mapping[str, str] = os.environ) -> Path:
    """Folder for the state of a user's programs, by the XDG base directory specification."""
    return Path(environ.get("XDG_STATE_HOME") or home(environ) / ".local" / "state") / "isles"


def visible_devices(environ: Mapping[str, str] = os.environ) -> list[str] | None:
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    return [entry.strip() for entry in value.split(",") if entry.strip() not in ("", "-1")]


def huggingface_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """Folder for downloads of huggingface_hub, by its documentation."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(name):
            return Path(environ[name]).expanduser()
    return _hub_home(environ) / "hub"


def datasets_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """Folder for prepared data of the datasets library, by its documentation."""
    folder = environ.get("HF_DATASETS_CACHE")
    return Path(folder).expanduser() if folder else _hub_home(environ) / "datasets"


@dataclass(frozen=True, slots=True)
class HuggingFaceAccess:
    """Access to Hugging Face, by huggingface_hub's documentation.

    `token` is a secret, or empty.
    """

    endpoint: str
    token: str = field(repr=False)
    is_offline: bool


def huggingface_access(environ: Mapping[str, str] = os.environ) -> HuggingFaceAccess:
    """The address of Hugging Face, the token of this account, and whether downloads are off."""
    endpoint = (environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    token = environ.get("HF_TOKEN") or environ.get("HUGGING_FACE_HUB_TOKEN") or ""
    if not token and not _is_on(environ, "HF_HUB_DISABLE_IMPLICIT_TOKEN"):
        given = environ.get("HF_TOKEN_PATH")
        path = Path(given).expanduser() if given else _hub_home(environ) / "token"
        with suppress(OSError):
            token = path.read_text(encoding="utf-8").strip()
    return HuggingFaceAccess(endpoint, token, _is_on(environ, "HF_HUB_OFFLINE"))


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    # The same reading of variables as in huggingface_hub.
    return environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")


def _hub_home(environ: Mapping[str, str]) -> Path:
    if environ.get("HF_HOME"):
        return Path(environ["HF_HOME"]).expanduser()
    caches = environ.get("XDG_CACHE_HOME") or home(environ) / ".cache"
    return Path(caches, "huggingface").expanduser()


def has_mlflow_server(environ: Mapping[str, str] = os.environ) -> bool:
    return bool(environ.get("MLFLOW_TRACKING_URI"))


def pbs_job(environ: Mapping[str, str] = os.environ) -> str | None:
    """The PBS job of this process, or None."""
    return environ.get("PBS_JOBID")


def pod_index(environ: Mapping[str, str] = os.environ) -> int:
    """Index of this pod in its Indexed Job, set by Kubernetes."""
    return int(environ.get("JOB_COMPLETION_INDEX", "0"))


def pod_address(environ: Mapping[str, str] = os.environ) -> str:
    """Address of this pod, set by the manifest."""
    return environ["ISLES_POD_IP"]


def inherited(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    return dict(environ)


def job_node(names: Sequence[str], environ: Mapping[str, str] = os.environ) -> int | None:
    """Number of this node among the hosts of its job, by Slurm or by the host's name; or None."""
    number = environ.get("SLURM_NODEID")
    if number is not None:
        return int(number)
    own = os.uname().nodename.partition(".")[0]
    short = [name.partition(".")[0] for name in names]
    return short.index(own) if own in short else None


@dataclass(frozen=True, slots=True)
class SkyStart:
    """Variables of a SkyPilot task on its first node.

    Args:
        addresses: addresses of the nodes, in the order of their numbers.
        token: secret of the attempt.
        join: join line, a secret, or empty.
    """

    addresses: tuple[str, ...]
    token: str = field(repr=False)
    join: str = field(default="", repr=False)


def take_sky_start() -> SkyStart:
    """Read SkyPilot's variables, and remove the secrets from the environment.

    Raises:
        UserError: isles has not written this task.
    """
    addresses = tuple(os.environ.get("SKYPILOT_NODE_IPS", "").split())
    token, join = os.environ.pop(SKY_TOKEN, ""), os.environ.pop(SKY_JOIN, "")
    if addresses and token:
        return SkyStart(addresses, token, join)
    missing = SKY_TOKEN if addresses else "SKYPILOT_NODE_IPS"
    raise UserError(
        f"{missing} is not set",
        where="environment",
        fix=f"start the task with sky launch --secret {SKY_TOKEN} TASK.yaml, and a random "
        f"{SKY_TOKEN} in the environment",
        id="start.refused",
    )


_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variable of torch's allocator, and its older name."""

_ROUNDS_ON_REQUEST = (2, 13)
"""torch 2.13 has `pinned_max_round_threshold_mb` (c10/core/AllocatorConfig.h)."""


def rank_defaults(
    *, device: str, nproc: int, interface: str | None, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Default variables for ranks, if the user has not set them.

    Args:
        interface: network interface to the other ranks, or None if unknown.
    """
    added = {}
    if device == "cpu" or nproc > 1:
        # Without it every rank starts a thread per core, and the ranks compete for the cores.
        added["OMP_NUM_THREADS"] = str(max(1, usable_cores(environ) // nproc))
    if device == "cuda" and not is_wsl() and not set(_ALLOCATOR) & set(environ):
        added[_ALLOCATOR[0]] = _allocator_options()
    if interface is not None:
        added["GLOO_SOCKET_IFNAME"] = interface
        added["NCCL_SOCKET_IFNAME"] = interface
    return {
        key: value
        for key, value in added.items()
        if key not in environ or (key == "OMP_NUM_THREADS" and _is_set_by_pbs(environ))
    }


def _allocator_options() -> str:
    # Rows of many widths would leave memory in pieces that fit no other width.
    options = "expandable_segments:True"
    # torch rounds each pinned tensor up to a power of two: an offloaded matrix of 768 MiB takes
    # 1 GiB. An older torch may not know the option, and would refuse to start.
    if _torch_version() >= _ROUNDS_ON_REQUEST:
        options += ",pinned_max_round_threshold_mb:1"
    return options


def _torch_version() -> tuple[int, ...]:
    # Read from the installed files, because the control wing does not import torch.
    try:
        numbers = metadata.version("torch").split(".")[:2]
    except metadata.PackageNotFoundError:
        return ()
    return tuple(int(number) for number in numbers)


def is_wsl() -> bool:
    """True in WSL2. Its driver has no memory segments that grow, and limits pinned memory."""
    return "microsoft" in os.uname().release.lower()


def usable_cores(environ: Mapping[str, str] = os.environ) -> int:
    """Cores that this process and its children may use.

    If a queue does not bind cores, a job sees all cores of its node, and other jobs use them too.
    Then only the variables of the queue show how many cores the job has.
    """
    from isles.run.limits import cores  # psutil, which `isles --help` does not need

    names = ["NCPUS", "PBS_NUM_PPN"] if pbs_job(environ) is not None else []
    if allocation(environ) is not None:
        # A step of srun has one task of isles on a node; a batch script has all tasks of the node.
        names = ["SLURM_CPUS_ON_NODE"]
        step = environ.get("SLURM_STEP_ID", "")
        is_step = step.isdecimal() and int(step) < _SPECIAL_STEP
        names += ["SLURM_CPUS_PER_TASK"] if is_step else []
    given = (environ.get(name, "") for name in names)
    return min([cores(), *(max(1, int(value)) for value in given if value.isdecimal())])


def _is_set_by_pbs(environ: Mapping[str, str]) -> bool:
    # PBS sets it to all cores of the job on the node, not to the cores of a rank.
    value = environ.get("OMP_NUM_THREADS")
    return pbs_job(environ) is not None and value in (
        environ.get("NCPUS"),
        environ.get("PBS_NUM_PPN"),
    )


def named_elsewhere(environ: Mapping[str, str] = os.environ) -> str | None:
    """Suffix of a run's name on the machine that shows the output, or None if it is this
    machine."""
    return environ.get(NAMED)


def machine_elsewhere(environ: Mapping[str, str] = os.environ) -> str:
    """Destination of this machine for `Shell` on the machine that shows the output, or empty if it
    is this machine."""
    return environ.get(MACHINE, "")


def shown_place(path: Path, machine: str | None = None) -> str:
    """A path for the user of the machine that shows the output. isles adds this machine's name if
    the machines differ. In a pod the path stays, as scp does not reach it."""
    machine = machine_elsewhere() if machine is None else machine
    if not machine:
        return str(path)
    text = str(path.absolute())
    return text if machine.startswith(IN_POD) else f"{machine}:{text}"


@contextmanager
def hidden(*packages: str) -> Iterator[None]:
    """Hide packages, so that they look as if they were not installed. Call it before their import.

    For libraries that import a whole optional package if it is installed, even without using it.
    """
    modules: dict[str, Any] = sys.modules
    new = [package for package in packages if package not in modules]
    modules |= dict.fromkeys(new)  # None, by which Python blocks an import
    try:
        yield
    finally:
        for package in new:
            del modules[package]
