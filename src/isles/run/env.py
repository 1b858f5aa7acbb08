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
from pathlib import Path
from typing import Any

from isles.config.scratch import naming_scratch
from isles.errors import UserError

RUN_DIR = "ISLES_RUN_DIR"
ATTEMPT = "ISLES_ATTEMPT"
NAMED = "ISLES_NAMED"
"""Suffix of a run's name on the machine that shows the output of this one."""
IN_POD = "kubernetes:"
"""Begins a destination that is reached by kubectl, in a pod: see `launch/kubernetes/reach.py`."""
MACHINE = "ISLES_MACHINE"
"""This machine, as `Shell` reaches it from the machine that shows the output of this process."""
CONTAINER = "ISLES_CONTAINER"
"""Set inside a container: number and start of the process of the host that has entered it."""
TELEMETRY = "ISLES_TELEMETRY"
"""off: agents sample nothing, for benchmarks that compare with it."""

SKY_TOKEN = "ISLES_TOKEN"
"""Token of a start, which a task of SkyPilot gets as a secret."""
SKY_JOIN = "ISLES_JOIN"
"""Join line of a start, the same way."""

_HOME = "isles-home-"
_SETTLED = "ISLES_SETTLED_HOME"
"""The folder in place of HOME that a process above this one has made."""

_SPECIAL_STEP = 0xFFFFFFF0
"""Slurm gives special steps, such as the interactive step of `salloc`, numbers from here on."""

SET_BY_TORCHRUN = {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT"}
"""Variables of torchrun's ranks that no other module here sets."""


@dataclass(frozen=True, slots=True)
class RankEnv:
    """Place of one process among the ranks: torchrun's variables and ours.

    Args:
        rank, local_rank, world_size, local_world_size: as torchrun sets them; a process started
            by hand without torchrun is rank 0 of 1.
        attempt: which start of the run this is; 0 where no launcher of ours started it.
        store: file through which the ranks of one machine find one another; None: env://.
        restart: how often all ranks of this start were started again before.
        store_address: host and port of the store of the agents, or of torchrun, through which the
            ranks of several nodes find one another; None: `store` or env://.
        in_job: whether the run is in the job of a queue, which may be queued again after a stop.
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
    """This process' place among the ranks."""
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
    """The Slurm job that this process is a part of; None: it is in none."""
    return environ.get("SLURM_JOB_ID") or None


def is_job_node(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is on a node of its Slurm job; a shell of salloc may be elsewhere."""
    return bool(environ.get("SLURMD_NODENAME"))


def run_dir_of_script(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The run directory of the script that calls this; None where isles has not started it."""
    value = environ.get(RUN_DIR)
    return Path(value) if value else None


def is_sampled(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the agent of this process samples its node and ranks."""
    return environ.get(TELEMETRY) != "off"


def is_in_container(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether isles has put this process into a container."""
    return bool(environ.get(CONTAINER))


def container_host(environ: Mapping[str, str] = os.environ) -> tuple[int, float] | None:
    """Number and start of the process of the host that has entered this container, if known."""
    words = environ.get(CONTAINER, "").split()
    return (int(words[0]), float(words[1])) if len(words) == 2 else None


def scratch_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The folder for temporary files that the user or a job has named."""
    return Path(environ["TMPDIR"]) if environ.get("TMPDIR") else None


def forget_window_size() -> None:
    """Take out COLUMNS and LINES, which programs take for the size of a window that may change."""
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)


def refuse_kernels() -> None:
    """Let transformers fetch no kernels, unless the user has set USE_HUB_KERNELS.

    If the package `kernels` is installed, the type in a model's config.json is enough for
    transformers to download compiled code and run it. To be called before transformers is imported,
    by every process that builds a model.
    """
    os.environ.setdefault("USE_HUB_KERNELS", "NO")


def num_restarts(environ: Mapping[str, str] = os.environ) -> int:
    """How often the ranks of this start were started again before, by our agents or torchrun."""
    return int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def home(environ: Mapping[str, str] = os.environ) -> Path:
    """The user's home folder, or a folder below TMPDIR in its place.

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
            # Others can write to this folder's parent, and might have made it.
            own = folder.lstat()
            if stat.S_ISDIR(own.st_mode) and own.st_uid == os.getuid() and not own.st_mode & 0o022:
                return folder
        return Path(tempfile.mkdtemp(prefix=_HOME))


def _may_keep(folder: Path) -> bool:
    # Whether caches can be made below it, or are there already.
    # `Path.exists` would raise an error if this user may not look into the folder.
    if os.path.exists(folder / ".cache"):  # noqa: PTH110
        return True
    above = next(path for path in (folder, *folder.parents) if os.path.exists(path))  # noqa: PTH110
    return os.access(above, os.W_OK | os.X_OK)


def settle_home() -> str:
    """Give this process and its children a home and a user name, as libraries expect them.

    To be called by each process that no other process of isles has started.

    Returns:
        A line for the user if the caches lie in a folder for temporary files now; else empty.
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
    why = f"HOME is {before}, which cannot be written to" if before else "this user has no HOME"
    return f"{why}: caches are in {found}. To keep them, set HOME, or XDG_CACHE_HOME and HF_HOME"


def cache_home(environ: Mapping[str, str] = os.environ) -> Path:
    """Where caches belong by the XDG base directory specification."""
    return Path(environ.get("XDG_CACHE_HOME") or home(environ) / ".cache") / "isles"


def state_home(environ: Mapping[str, str] = os.environ) -> Path:
    """Where what a user's programs remember belongs by the XDG base directory specification."""
    return Path(environ.get("XDG_STATE_HOME") or home(environ) / ".local" / "state") / "isles"


def visible_devices(environ: Mapping[str, str] = os.environ) -> list[str] | None:
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    return [entry.strip() for entry in value.split(",") if entry.strip() not in ("", "-1")]


def hub_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """Where huggingface_hub keeps what it has downloaded; by its documentation."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(name):
            return Path(environ[name]).expanduser()
    return _hub_home(environ) / "hub"


def datasets_cache(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the datasets library keeps what it has prepared; by its documentation."""
    folder = environ.get("HF_DATASETS_CACHE")
    return Path(folder).expanduser() if folder else _hub_home(environ) / "datasets"


@dataclass(frozen=True, slots=True)
class HubAccess:
    """How the Hugging Face hub is reached; by huggingface_hub's documentation.

    `token` is a secret; empty: there is none.
    """

    endpoint: str
    token: str = field(repr=False)
    is_offline: bool


def hub_access(environ: Mapping[str, str] = os.environ) -> HubAccess:
    """The hub's address, the token of this account, and whether nothing may be fetched."""
    endpoint = (environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    token = environ.get("HF_TOKEN") or environ.get("HUGGING_FACE_HUB_TOKEN") or ""
    if not token and not _is_on(environ, "HF_HUB_DISABLE_IMPLICIT_TOKEN"):
        given = environ.get("HF_TOKEN_PATH")
        path = Path(given).expanduser() if given else _hub_home(environ) / "token"
        with suppress(OSError):
            token = path.read_text(encoding="utf-8").strip()
    return HubAccess(endpoint, token, _is_on(environ, "HF_HUB_OFFLINE"))


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    # As huggingface_hub reads its variables.
    return environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")


def _hub_home(environ: Mapping[str, str]) -> Path:
    if environ.get("HF_HOME"):
        return Path(environ["HF_HOME"]).expanduser()
    caches = environ.get("XDG_CACHE_HOME") or home(environ) / ".cache"
    return Path(caches, "huggingface").expanduser()


def has_mlflow_server(environ: Mapping[str, str] = os.environ) -> bool:
    return bool(environ.get("MLFLOW_TRACKING_URI"))


def pbs_job(environ: Mapping[str, str] = os.environ) -> str | None:
    """The PBS job that this process is a part of; None outside of one."""
    return environ.get("PBS_JOBID")


def pod_index(environ: Mapping[str, str] = os.environ) -> int:
    """Index of this pod in its Indexed Job, as Kubernetes sets it."""
    return int(environ.get("JOB_COMPLETION_INDEX", "0"))


def pod_address(environ: Mapping[str, str] = os.environ) -> str:
    """Address of this pod, as the manifest has it set."""
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
    """What a task of SkyPilot tells its first node.

    Args:
        addresses: of the nodes, in the order of their numbers.
        token: secret of the start.
        join: join line, a secret; empty: there is none.
    """

    addresses: tuple[str, ...]
    token: str = field(repr=False)
    join: str = field(default="", repr=False)


def take_sky_start() -> SkyStart:
    """What SkyPilot's variables say; the secrets are no longer in the environment after that.

    Raises:
        UserError: this is no task that isles has written.
    """
    addresses = tuple(os.environ.get("SKYPILOT_NODE_IPS", "").split())
    token, join = os.environ.pop(SKY_TOKEN, ""), os.environ.pop(SKY_JOIN, "")
    if addresses and token:
        return SkyStart(addresses, token, join)
    missing = SKY_TOKEN if addresses else "SKYPILOT_NODE_IPS"
    raise UserError(
        f"{missing} is not set",
        where="environment",
        fix=f"SkyPilot runs this: sky launch --secret {SKY_TOKEN} TASK.yaml, with a random "
        f"{SKY_TOKEN} in the environment",
        id="start.refused",
    )


def rank_defaults(
    *, device: str, nproc: int, interface: str | None, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Variables that make a good start of ranks, where the user has set none.

    Args:
        interface: the network interface over which they reach the others; None: not known.
    """
    added = {}
    if device == "cpu" or nproc > 1:
        # Without it every rank starts a thread per core, and they fight for the cores.
        added["OMP_NUM_THREADS"] = str(max(1, usable_cores(environ) // nproc))
    if interface is not None:
        added["GLOO_SOCKET_IFNAME"] = interface
        added["NCCL_SOCKET_IFNAME"] = interface
    return {
        key: value
        for key, value in added.items()
        if key not in environ or (key == "OMP_NUM_THREADS" and _is_set_by_pbs(environ))
    }


def usable_cores(environ: Mapping[str, str] = os.environ) -> int:
    """Cores that this process and its children may keep busy.

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
    """Suffix of a run's name on the machine that shows the output of this one; None: it is this."""
    return environ.get(NAMED)


def machine_elsewhere(environ: Mapping[str, str] = os.environ) -> str:
    """This machine, as `Shell` reaches it from the machine that shows the output; empty: no other
    machine shows it."""
    return environ.get(MACHINE, "")


def shown_place(path: Path, machine: str | None = None) -> str:
    """A path as the user at the machine that shows the output types it: with this machine before it
    if that is another one. In a pod the path stays, as scp does not reach it."""
    machine = machine_elsewhere() if machine is None else machine
    if not machine:
        return str(path)
    text = str(path.absolute())
    return text if machine.startswith(IN_POD) else f"{machine}:{text}"


@contextmanager
def hidden(*packages: str) -> Iterator[None]:
    """Let packages that are not imported yet look as if they were not installed.

    For libraries that import all of an optional package where it is installed, used or not.
    """
    modules: dict[str, Any] = sys.modules
    new = [package for package in packages if package not in modules]
    modules |= dict.fromkeys(new)  # None: Python's own way to say so
    try:
        yield
    finally:
        for package in new:
            del modules[package]
