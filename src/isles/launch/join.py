"""A cluster that joins a run of other people: their run file, with this site's own parts.

Text from the hub is read as a run file and nothing else: it cannot run code, choose where this
machine writes, or use paths outside the folder in which the run is started.
"""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from getpass import getpass
from pathlib import Path
from typing import Any

from isles import __version__
from isles.config.clusters import is_place, leads_outside, named_cluster, shared_text
from isles.config.files import named_files
from isles.config.load import Base, Loaded, load_run_file
from isles.config.resume import unlike
from isles.config.sections.cluster import ClusterConfig
from isles.config.sections.run import RunConfig
from isles.config.yaml import dump_yaml, read_text, scan_yaml
from isles.errors import ConfigError, ConfigErrors, DataError, PreflightError
from isles.facts.units import printable
from isles.run.find import NUMBERED, numbered_runs, other_owner
from isles.run.join_line import JoinLine, ask_hub
from isles.run.paths import RunDir
from isles.run.remote import RemoteRun, list_remotes

_ASK_S = 20.0
_LONGEST = 200
_MOST_LETTERS = 2**20
"""Limit for a run file from a hub, in characters. Run files of people have a few thousand."""


@dataclass(frozen=True, slots=True)
class Joiner:
    """Settings of the site that joins.

    Args:
        run_file: the site's own run file, which needs only `clusters`; None: there is no file.
        overrides: values of the command line; `launcher.partition=gpu` means this site's cluster.
        name: name of the cluster; empty: as in the run file, or this machine's name.
        launcher: kind of launcher; empty: as in the run file, or local.
    """

    run_file: Path | None = None
    overrides: tuple[str, ...] = ()
    name: str = ""
    launcher: str = ""


def read_join_line(given: str) -> JoinLine:
    """The join line from a command's argument: the line itself, `-` for stdin, or a file with the
    line.

    Raises:
        ConfigError: the argument is none of these.
    """
    if given == "-":
        is_typed = sys.stdin.isatty()
        text = (
            getpass("join line (not shown while you type): ") if is_typed else sys.stdin.readline()
        )
        return JoinLine.parse(text, where="stdin")
    if "#" in given or given.startswith("isles:"):
        return JoinLine.parse(given)
    path = Path(given).expanduser()
    if not path.exists():
        raise ConfigError(
            f"{given} is neither a join line nor an existing file",
            where="isles join",
            fix="pass the file that `isles hub` has written, or pass - and paste the line",
            id="join.line",
        )
    return JoinLine.given(path)


def joining_run(line: JoinLine, joiner: Joiner, warn: Callable[[str], object] = str) -> Loaded:
    """The run of this site's cluster, as `isles train` starts it.

    Raises:
        UserError: the hub cannot be queried, or its run file conflicts with this site's settings.
    """
    name = f"{line.run}@{line.address}"
    theirs = _theirs(line, name)
    document, _ = scan_yaml(shared_text(theirs.config), name)
    text, path = _own_text(joiner)
    names = _cluster_names(text, path)
    index = _index(names, joiner, path)
    overrides = [_of_cluster(override, index) for override in joiner.overrides]
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname().partition(".")[0]).strip("._-")
    own = joiner.name or names[index] or host[:40] or "here"
    if not names[index]:
        overrides.append(f"clusters.{index}.name={own}")
    loaded = load_run_file(path, overrides, text=text, base=Base(document.value, name))
    issues = [
        ConfigError(
            f"{_shown(change.new)} on this site, but {_shown(change.old)} in the run to join",
            where=loaded.where(change.key),
            fix="delete this value, so that the run's own value is used",
            id="join.unlike",
        )
        for change in unlike(theirs.config, loaded.config)
    ]
    issues += _untrusted(loaded, name)
    theirs_read = [
        f"{key}={_shown(_value(loaded, key))}"
        for key, origin in loaded.origins.items()
        if origin == name and is_place(key) and isinstance(_value(loaded, key), str)
    ]
    if theirs_read:
        warn(
            f"the run file of {line.run} sets {', '.join(theirs_read)}, which isles reads in "
            "the current folder or with this machine's Hugging Face account"
        )
    kind = loaded.config.clusters[index].launcher.kind
    if joiner.launcher and kind != joiner.launcher:
        where = loaded.where(f"clusters.{index}.launcher.kind")
        fix = "omit --on, or remove the cluster from the run file"
        issues.append(
            ConfigError(
                f"--on is {joiner.launcher}, but {own} has launcher {kind}", where=where, fix=fix
            )
        )
    if issues:
        raise ConfigErrors(issues)
    mine = named_cluster(loaded, loaded.config.clusters[index].name)
    _warn(ask_hub(line, "/v1/status", _ASK_S), line, mine, own, warn)
    return mine


def _warn(
    answer: dict[str, Any], line: JoinLine, mine: Loaded, own: str, warn: Callable[[str], object]
) -> None:
    # Before the cluster waits for hours in a queue. The hub may answer anything.
    if answer.get("is_over") is True:
        warn(f"all clusters of {line.run} have finished, so there may be nothing left to train")
    members = answer.get("members")
    living = [
        each.get("name")
        for each in (members if isinstance(members, list) else ())
        if isinstance(each, dict) and each.get("state") == "living"
    ]
    if own in living and not _has_run(mine.config):
        raise PreflightError(
            f"a cluster named {own} is already part of the run, and names must be unique",
            where=str(line),
            fix="choose another name with --name. If this cluster was killed, it is dropped "
            "within seconds; then run the command again",
            id="join.unlike",
        )


def _has_run(config: RunConfig) -> bool:
    # Whether this user has started the cluster on this machine. Its run may be in the workdir of a
    # queue or on another machine. The hub's run file may name the folder. If the folder cannot be
    # listed, the start reports it.
    found: list[RunDir | RemoteRun] = []
    for folder in (config.output_dir, f"{config.clusters[0].workdir or '.'}/{config.output_dir}"):
        with suppress(OSError, RuntimeError):
            path = Path(folder).expanduser()
            found += [run for _, run in numbered_runs(path, config.name) if not other_owner(run)]
            found += [run for run in list_remotes(path) if not run.owner]
    return any((name := NUMBERED.fullmatch(r.name)) and name["name"] == config.name for r in found)


def _theirs(line: JoinLine, name: str) -> Loaded:
    text = ask_hub(line, "/v1/run-file", _ASK_S).get("text")
    if not isinstance(text, str) or len(text) > _MOST_LETTERS:
        found_is = "not a text" if not isinstance(text, str) else f"{len(text):,} characters long"
        raise PreflightError(
            f"the run file from the hub is {found_is}; isles reads at most {_MOST_LETTERS:,} "
            "characters",
            where=str(line),
            fix="install the same version of isles on both machines; if the versions are equal, do "
            "not trust the hub",
            id="version.isles",
        )
    try:
        found = load_run_file(Path(name), text=text)
    except (ConfigError, ConfigErrors) as error:
        raise PreflightError(
            f"isles {__version__} does not accept the run file from the hub:\n"
            + printable(str(error)),
            where=str(line),
            fix="install the same version of isles on both machines",
            id="version.isles",
        ) from None
    if found.config.diloco is None or found.config.training.script is not None:
        raise PreflightError(
            "the run file from the hub is not for several clusters",
            where=str(line),
            fix="start the hub with a run file that has outer: {kind: diloco}",
        )
    outer = found.config.diloco
    if outer.engine != "hub" or outer.url is not None or outer.hivemind is not None:
        raise PreflightError(
            f"the run file from the hub sets another meeting place (outer.engine: {outer.engine}, "
            "outer.url or outer.hivemind), and this machine would write there",
            where=str(line),
            fix="clusters that join through a join line meet at its hub, so the owner of the hub "
            "must start it with outer.engine: hub",
            id="join.trust",
        )
    return found


def _own_text(joiner: Joiner) -> tuple[str, Path]:
    if joiner.run_file is not None:
        return read_text(joiner.run_file), joiner.run_file
    cluster: dict[str, object] = {"launcher": {"kind": joiner.launcher or "local"}}
    if joiner.name:
        cluster = {"name": joiner.name, **cluster}
    return dump_yaml({"clusters": [cluster]}), Path("isles-join")


def _cluster_names(text: str, path: Path) -> list[str]:
    # At least one entry; empty if it has no name.
    value = scan_yaml(text, str(path))[0].value
    clusters = value.get("clusters") if isinstance(value, dict) else None
    if not isinstance(clusters, list) or not clusters:
        return [""]
    return [str(c.get("name") or "") if isinstance(c, dict) else "" for c in clusters]


def _index(names: list[str], joiner: Joiner, path: Path) -> int:
    if joiner.name in names:
        return names.index(joiner.name)
    if len(names) == 1 and (not joiner.name or not names[0]):
        return 0
    raise ConfigError(
        f"the run file has no cluster named {joiner.name}"
        if joiner.name
        else "the run file has several clusters, and it is unknown which one is this site",
        where=f"{path} clusters",
        fix=f"pass --name with one of {', '.join(name or '(no name)' for name in names)}",
    )


def _of_cluster(override: str, index: int) -> str:
    # `launcher.partition=gpu` means the site's own cluster.
    key = override.lstrip("-").partition("=")[0].partition(".")[0].strip().replace("-", "_")
    if key in ClusterConfig.model_fields and key != "name":
        return f"clusters.{index}.{override.lstrip('-')}"
    return override


def _untrusted(loaded: Loaded, name: str) -> list[ConfigError]:
    # Values from the hub that are accepted only if the user has typed them too.
    issues: list[ConfigError] = []
    for key, origin in loaded.origins.items():
        if origin != name:
            continue
        value = _value(loaded, key)
        if leads_outside(key, value) or (is_place(key) and _leaves_folder(str(value))):
            issues.append(
                ConfigError(
                    f"the run to join has {_shown(value)}, a path or an address of another site"
                    if leads_outside(key, value)
                    else f"the run to join has {_shown(value)}, which leads out of this folder",
                    where=f"{name} {key}",
                    fix=f"pass the path of the same content on this machine, {key}=PATH",
                    id="join.trust",
                )
            )
        if key == "model.trust_remote_code" and value is True:
            issues.append(
                ConfigError(
                    "the model contains Python code, which the run to join allows",
                    where=f"{name} {key}",
                    fix="read that code; if you trust it, add model.trust_remote_code=true",
                    id="join.trust",
                )
            )
    return issues


def _leaves_folder(name: str) -> bool:
    # A path through a link in this folder: the sender cannot create a link, but may guess one.
    here = Path.cwd().resolve()
    try:
        files = [Path(name), *named_files(name)]
        return not all(file.resolve().is_relative_to(here) for file in files)
    except (OSError, RuntimeError, DataError):  # such as a loop of links
        return True


def _value(loaded: Loaded, key: str) -> object:
    found: Any = loaded.config.model_dump()
    for part in key.split("."):
        found = found[int(part)] if isinstance(found, list | tuple) else (found or {}).get(part)
    return found


def _shown(value: object) -> str:
    return printable(str(value), longest=_LONGEST)
