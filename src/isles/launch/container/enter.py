"""The container runtime of a node, and the command line that continues a process in a container."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import SIGKILL
from typing import TYPE_CHECKING, Any, Literal, Never, assert_never

from pydantic import TypeAdapter

from isles.errors import PreflightError
from isles.launch.container.failure import MARK
from isles.run.env import (
    CONTAINER,
    cache_home,
    container_host,
    datasets_cache,
    huggingface_cache,
    inherited,
    scratch_folder,
)
from isles.run.process import ProcessId

if TYPE_CHECKING:  # agents use this file without the config classes, which are slow to import
    from isles.config.sections.cluster import ClusterConfig, Runtime
    from isles.config.sections.run import RunConfig

_PROGRAMS = {"apptainer": ("apptainer", "singularity"), "podman": ("podman",), "pyxis": ("srun",)}
_INSTALL = {
    "apptainer": "install it (https://apptainer.org/docs), or load its module: "
    "clusters.0.environment.modules",
    "podman": "install it: sudo apt install podman",
    "pyxis": "run isles on Slurm's login node, or set clusters.0.launcher.bin_path to the folder "
    "of srun",
}

_OF_THE_HOST = re.compile(
    # Variables about the host's programs and session, which would mislead programs inside.
    r"PATH|LD_.*|LIBRARY_PATH|CPATH|MANPATH|INFOPATH|PYTHON(PATH|HOME|STARTUP|USERBASE)|_"
    r"|VIRTUAL_ENV.*|CONDA_.*|_CE_.*|MAMBA_.*|CUDA_(HOME|ROOT|PATH)|ROCM_(HOME|PATH)"
    r"|PWD|OLDPWD|SHLVL|HOSTNAME|SHELL|PS[0-9]|PROMPT_COMMAND|BASH.*|ENV|LS_COLORS"
    r"|DBUS_.*|XDG_(RUNTIME_DIR|SESSION_.*|DATA_DIRS)|MODULE.*|LOADEDMODULES|_LM.*|__LMOD.*|LMOD_.*"
    r"|(APPTAINER|SINGULARITY|ENROOT|PODMAN|CONTAINERS)_.*"
)
_TOP = ("bin", "boot", "dev", "etc", "lib", "lib64", "opt", "proc", "run", "sbin", "sys", "usr")
_SYSTEM = {Path("/"), Path("/var"), *(Path("/", name) for name in _TOP)}
_LOOK_S = 0.2
_ASK_S = 20.0


@dataclass(frozen=True, slots=True)
class Container:
    """Settings of a container that do not depend on the node.

    Args:
        image, runtime, python, binds, extra: values of the run file.
        paths: values of the run file that may be a file or folder, unchanged.
        variables: names of variables that the run file sets, which always go inside.
        launcher: kind of the launcher.
        device: device of the ranks; auto: depends on the node.
    """

    image: str
    runtime: str
    python: str
    binds: tuple[str, ...]
    extra: tuple[str, ...]
    paths: tuple[str, ...]
    variables: tuple[str, ...]
    launcher: str
    device: str

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Container:
        """Make a container from its record."""
        return TypeAdapter(cls).validate_python(record)

    @property
    def is_file(self) -> bool:
        """True if the image is a file or folder of the node, judged by its name."""
        return is_file_image(self.image)

    def file(self, workdir: Path | str) -> str:
        """The absolute path of an image that is a file."""
        return os.path.normpath(Path(workdir) / Path(self.image).expanduser())

    @property
    def reference(self) -> str:
        """The image's name in a registry, without docker://."""
        return self.image.removeprefix("docker://")


def is_file_image(image: str) -> bool:
    """True if an image is a file or folder of the node, not a name in a registry."""
    suffixes = (".sif", ".simg", ".img", ".sqsh", ".squashfs")
    return image.startswith(("/", "./", "../", "~")) or (
        "://" not in image and image.endswith(suffixes)
    )


def container_record(
    cluster: ClusterConfig, config: RunConfig | None, device: str = "auto"
) -> dict[str, Any] | None:
    """The record of a cluster's container, as JSON; None: the cluster has no container."""
    found = cluster.environment.own_container
    if found is None:
        return None
    container = Container(
        image=found.image,
        runtime=found.runtime,
        python=found.python,
        binds=found.binds,
        extra=found.extra,
        paths=tuple(dict.fromkeys(_named_paths(config))) if config is not None else (),
        variables=tuple(cluster.environment.variables),
        launcher=cluster.launcher.kind,
        device=device,
    )
    return asdict(container)


def _named_paths(config: RunConfig) -> Iterator[str]:
    # Every value of a key that accepts a path.
    yield config.output_dir
    yield from (source.path for source in config.data.sources if source.path)
    named = (
        *(config.data.cache_dir, config.model.name_or_path, config.tokenizer.name_or_path),
        *(config.tokenizer.chat_template, config.training.script),
    )
    yield from (text for text in named if text)
    yield from (str(word).rpartition("=")[2] for word in config.training.script_args)
    for strategy in (config.strategy, *(c.strategy for c in config.clusters)):
        for key in ("nvme_path", "config_file"):
            if text := getattr(strategy, key, None):
                yield str(text)


# ---- The runtime of a node --------------------------------------------------------------------


def find_runtime(container: Container) -> tuple[Runtime, str]:
    """The runtime that runs the container on this node, and its program.

    Raises:
        PreflightError: this node has no such runtime.
    """
    wanted = wanted_runtimes(container)
    for runtime in wanted:
        for program in _PROGRAMS[runtime]:
            if shutil.which(program) and (runtime != "pyxis" or has_pyxis() or wanted[1:] == ()):
                return runtime, program
    names = " or ".join(program for runtime in wanted for program in _PROGRAMS[runtime])
    raise PreflightError(
        f"{names} not found on this host, needed to run the image {container.image}",
        where=f"host {os.uname().nodename}",
        fix=_INSTALL[wanted[0]],
        id="container.runtime",
    )


def wanted_runtimes(container: Container) -> tuple[Runtime, ...]:
    """Runtimes that can run the container, in the order in which isles looks for them."""
    match container.runtime:
        case "apptainer" | "podman" | "pyxis" as given:
            return (given,)
        case _:
            pass
    if container.image.endswith((".sqsh", ".squashfs")):
        return ("pyxis",)
    if container.image.endswith((".sif", ".simg", ".img")):
        return ("apptainer",)
    match container.launcher:
        case "slurm" if not container.is_file:
            return ("pyxis", "apptainer")
        case "slurm" | "pbs":
            return ("apptainer",)
        case _:
            return ("podman", "apptainer")


def has_pyxis(srun: str = "srun") -> bool:
    """True if srun of this Slurm accepts an image, according to its help text."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [srun, "--help"], capture_output=True, text=True, timeout=_ASK_S, check=False
        )
        return "--container-image" in done.stdout
    return False


# ---- Its command line -------------------------------------------------------------------------


def command_line(
    container: Container,
    runtime: Runtime,
    program: str,
    words: Sequence[str],
    mounts: Sequence[str],
    names: Sequence[str],
    workdir: Path | str,
    gpus: Sequence[str],
) -> list[str]:
    """The command line that runs a command in a container; for pyxis, only the options of srun.

    Args:
        words: the command inside.
        mounts: FROM:TO each, from `mounts_of`.
        names: names of the variables that go inside; no command line contains their values.
        workdir: the folder in which the command starts.
        gpus: vendors of the node's GPUs, from `gpu_makers`.
    """
    match runtime:
        case "apptainer":
            line = [program, "exec", "--pwd", str(workdir)]
            line += [{"nvidia": "--nv", "amd": "--rocm"}[maker] for maker in gpus]
            line += [word for mount in mounts for word in ("--bind", mount)]
            return [*line, *container.extra, _apptainer_image(container, workdir), *words]
        case "podman":
            # The container keeps the cgroup of the process that starts it, so the limits of a job,
            # and of a session that survives a log-out, hold inside too.
            line = [program, "--cgroup-manager=cgroupfs", "run", "--rm", "--interactive"]
            line += ["--pull=never", f"--log-driver={_log_driver()}", "--cgroups=no-conmon"]
            line += ["--pid=host", "--ipc=host", "--network=host", "--uts=host"]
            line += ["--security-opt", "label=disable", "--entrypoint", ""]
            line += [word for maker in gpus for word in _PODMAN_GPUS[maker]]
            if Path("/dev/infiniband").is_dir():
                line += ["--device", "/dev/infiniband"]
            line += ["--workdir", str(workdir)]
            line += [word for mount in mounts for word in ("--volume", mount)]
            line += [word for name in names for word in ("--env", name)]
            image = [container.reference]
            if container.is_file:
                image = ["--rootfs", container.file(workdir)]
            return [*line, *container.extra, *image, *words]
        case "pyxis":
            line = [f"--container-image={_pyxis_image(container, workdir)}"]
            line += [f"--container-mounts={','.join(mounts)}"] if mounts else []
            line += [f"--container-workdir={workdir}", "--no-container-mount-home"]
            return [*line, "--no-container-entrypoint", *container.extra]
        case _:
            assert_never(runtime)


def _log_driver() -> str:
    # Podman passes on its own streams, even after it has exited, but not a terminal.
    return "none" if any(os.isatty(stream) for stream in range(3)) else "passthrough"


_PODMAN_GPUS = {
    "nvidia": ("--device", "nvidia.com/gpu=all"),
    "amd": ("--device", "/dev/kfd", "--device", "/dev/dri", "--group-add", "keep-groups"),
}


def _apptainer_image(container: Container, workdir: Path | str) -> str:
    if container.is_file:
        return container.file(workdir)
    return container.image if "://" in container.image else f"docker://{container.image}"


def _pyxis_image(container: Container, workdir: Path | str) -> str:
    # enroot separates the registry from the rest by #.
    if container.is_file:
        return container.file(workdir)
    first, slash, rest = container.reference.partition("/")
    is_registry = slash and "#" not in first and (set(first) & set(".:") or first == "localhost")
    return f"{first}#{rest}" if is_registry else container.reference


def gpu_makers(
    container: Container, devices: Path = Path("/dev")
) -> list[Literal["nvidia", "amd"]]:
    """Vendors of the GPUs that this node passes to the container."""
    if container.device == "cpu":
        return []
    there: list[Literal["nvidia", "amd"]] = []
    there += ["nvidia"] if (devices / "nvidiactl").exists() else []
    there += ["amd"] if (devices / "kfd").exists() else []
    return there


def mounts_of(
    container: Container, folders: Sequence[Path | str], environ: Mapping[str, str]
) -> list[str]:
    """FROM:TO for each path visible inside: these folders, paths of the run file, the caches of
    isles and of Hugging Face, and the binds of the run file. All keep their paths.

    Args:
        folders: such as the run directory; relative paths are relative to the first one.
    """
    base = Path(folders[0])
    wanted = [Path(folder).absolute() for folder in folders]
    for text in container.paths:
        # For a pattern: the folder before it.
        plain = re.split(r"[*?\[]", text, maxsplit=1)[0]
        path = base / Path(plain).expanduser()
        wanted.append(path if plain == text or plain.endswith("/") else path.parent)
    downloads = huggingface_cache(environ)
    # The Hugging Face token, and files of transformers, are next to the cache of the Hugging Face
    # Hub.
    caches = [downloads.parent if downloads.name == "hub" else downloads, datasets_cache(environ)]
    for cache in (cache_home(environ), *caches):
        with suppress(OSError):  # a read-only home is mounted unchanged
            cache.mkdir(parents=True, exist_ok=True)
        wanted.append(cache)
    if (scratch := scratch_folder(environ)) is not None:
        wanted.append(scratch)
    there = [path for path in wanted if path.exists()]
    # If a path is a link, its target is mounted too.
    found = {Path(os.path.normpath(path)) for path in there} | {path.resolve() for path in there}
    found = {path for path in found if path not in _SYSTEM}
    outer = [
        path for path in sorted(found) if not any(path.is_relative_to(o) for o in found - {path})
    ]
    return [*(f"{path}:{path}" for path in outer), *(_bind(text, base) for text in container.binds)]


def _bind(text: str, base: Path) -> str:
    parts = text.split(":")
    source = str(base / Path(parts[0]).expanduser())
    return ":".join([source, *(parts[1:] or [source])])


def names_inside(container: Container, environ: Mapping[str, str]) -> list[str]:
    """Names of the variables that go inside, in alphabetical order."""
    return sorted(
        name
        for name in environ
        if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)
        and (name in container.variables or not _OF_THE_HOST.fullmatch(name))
    )


def inner_environ(
    container: Container, runtime: Runtime, program: str, environ: Mapping[str, str]
) -> dict[str, str]:
    """The environment of the runtime process."""
    # Packages that pip installed in the home belong to the host's Python.
    found = {"PYTHONNOUSERSITE": "1", **environ}
    if runtime == "podman":
        return found  # podman passes on only the variables that it is given by name
    for name in set(found) - set(names_inside(container, found)):
        # The runtime itself needs the first two; programs inside get the image's values.
        if name not in ("PATH", "LD_LIBRARY_PATH") and _is_misleading(name):
            del found[name]
    for name in container.variables:
        # Apptainer sets some variables itself, and passes on none of the host's.
        if runtime == "apptainer" and name in environ and _OF_THE_HOST.fullmatch(name):
            found[f"{program.upper()}ENV_{name}"] = environ[name]
    return found


def _is_misleading(name: str) -> bool:
    # The settings of the runtimes themselves stay: they are not for programs inside.
    return not re.match(r"(APPTAINER|SINGULARITY|ENROOT|XDG|DBUS|SLURM)_", name)


@dataclass(frozen=True, slots=True)
class EnterCommand:
    """Command line and environment that enter a container on this node."""

    words: list[str]
    environ: dict[str, str]
    runtime: str


def entry(
    container: Container, words: Sequence[str], folders: Sequence[Path | str]
) -> EnterCommand:
    """Make the entry for a command in the container; the command keeps this process' pid.

    Raises:
        PreflightError: the runtime or the image is missing on this node.
    """
    runtime, program = find_runtime(container)
    _require_image(container, folders[0])
    host = ProcessId.of(os.getpid())
    environ = inner_environ(container, runtime, program, inherited())
    environ[CONTAINER] = f"{host.pid} {host.started}"
    line = command_line(
        container,
        runtime,
        program,
        [container.python, *words],
        mounts_of(container, folders, environ),
        names_inside(container, environ),
        folders[0],
        gpu_makers(container),
    )
    return EnterCommand(line, environ, program)


def _require_image(container: Container, workdir: Path | str) -> None:
    path = container.file(workdir)
    if container.is_file and not Path(path).exists():
        raise PreflightError(
            f"image not found: {path}",
            where=f"host {os.uname().nodename}",
            fix="correct clusters.0.environment.container, or copy the image there; a name in a "
            "registry begins with docker://",
            id="container.image",
        )


def enter(container: Container, words: Sequence[str], folders: Sequence[Path | str]) -> Never:
    """Continue in the container, as Python with these arguments; this process becomes its runtime.

    Raises:
        PreflightError: the runtime or the image is missing on this node.
    """
    found = entry(container, words, folders)
    sys.stderr.write(f"{MARK} {container.image} (by {found.runtime})\n")
    sys.stderr.flush()
    os.execvpe(found.words[0], found.words, found.environ)


def step_options(
    container: Container, srun: str, folders: Sequence[Path | str]
) -> list[str] | None:
    """Options of srun for a step that starts in the container; None: the agents enter the container
    by themselves.

    Raises:
        PreflightError: the image is missing.
    """
    if "pyxis" not in wanted_runtimes(container) or not (
        container.runtime == "pyxis" or has_pyxis(srun)
    ):
        return None
    _require_image(container, folders[0])
    return command_line(
        container,
        "pyxis",
        srun,
        (),
        mounts_of(container, folders, inherited()),
        (),
        folders[0],
        gpu_makers(container),
    )


def step_environ(container: Container) -> list[str]:
    """`env …` before srun, because srun passes its whole environment into the container."""
    environ = inherited()
    gone = sorted(set(environ) - set(inner_environ(container, "pyxis", "srun", environ)))
    words = [word for name in gone for word in ("-u", name)]
    return ["env", *words, f"{CONTAINER}=pyxis", "PYTHONNOUSERSITE=1"]


# ---- Inside -----------------------------------------------------------------------------------


def end_with_host() -> None:
    """In a container: end this process group when the process that entered the container is gone.

    A killed runtime leaves its child processes to a helper process.
    """
    found = container_host()
    if found is None:
        return
    host = ProcessId(os.uname().nodename, *found)
    if not host.is_alive():
        return  # a runtime with its own PID namespace

    def watch() -> None:
        pause = threading.Event()
        while host.is_alive():
            pause.wait(_LOOK_S)
        os.killpg(0, SIGKILL)

    threading.Thread(target=watch, name="host", daemon=True).start()
