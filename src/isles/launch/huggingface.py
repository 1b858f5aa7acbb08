"""Models and datasets of a run file on the Hugging Face Hub, and whether this machine can read
them.

`isles check` queries on every machine. A start queries once for missing files, before the ranks
start: each rank would retry for a minute.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from isles.config.files import BUILT_IN, may_be_huggingface_id
from isles.config.load import Loaded
from isles.config.sections.run import RunConfig
from isles.errors import ConfigError
from isles.facts.models import shape_names
from isles.run.env import datasets_cache, huggingface_cache, inherited

_REQUEST_S = 5.0

_ANSWER_S = 30
"""Longest wait of a start for the Hugging Face Hub; the library itself may be on a slow disk."""


def huggingface_repos(config: RunConfig) -> dict[tuple[str, str], str]:
    """Repositories that the run may download: kind (model or dataset) and id -> the key with its
    name.

    For a run file of a script these keys have placeholders, which do not exist.
    """

    def is_elsewhere(name: str) -> bool:
        return may_be_huggingface_id(name) and not Path(name).expanduser().exists()

    found: dict[tuple[str, str], str] = {}
    for key, section in (("model", config.model), ("tokenizer", config.tokenizer)):
        name = section.name_or_path
        if name is not None and name not in shape_names() and is_elsewhere(name):
            found.setdefault(("model", name), f"{key}.name_or_path")
    for index, source in enumerate(config.data.sources):
        name = source.path
        if name is None or source.type == "fake" or name in BUILT_IN or not is_elsewhere(name):
            continue
        found.setdefault(("dataset", name), f"data.sources.{index}.path")
    return found


def huggingface_issues(loaded: Loaded) -> list[ConfigError]:
    """Models and datasets that a run lacks on this machine and cannot download.

    An error of the Hugging Face Hub itself is not an issue: ranks retry.
    """
    keys = huggingface_repos(loaded.config)
    environ = {**inherited(), **loaded.config.clusters[0].environment.variables}
    wanted = [(kind, name) for kind, name in keys if not _is_cached(kind, name, environ)]
    if not wanted:
        return []
    # A separate process: the library reads the ranks' environment variables once, on import.
    words = [f"{kind}={name}" for kind, name in wanted]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "isles.launch.huggingface", *words],
            env=environ,
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            check=False,
        )
        answers = json.loads(done.stdout or "[]")
    except subprocess.TimeoutExpired:  # request timeouts do not cover the wait for a name server
        answer = f"no answer within {_ANSWER_S} s"
        answers = [_row(kind, name, answer, "unreachable") for kind, name in wanted]
    except (OSError, ValueError):
        return []  # the rank that reads it reports more
    issues = []
    for row in answers:
        if row["state"] not in ("ok", "cached", "unknown", "failing"):
            id, what, fix = huggingface_issue(row)
            where = loaded.where(keys[row["kind"], row["name"]])
            issues.append(ConfigError(what, where=where, fix=fix, id=id))
    return issues


def ask_huggingface(repos: Iterable[Sequence[str]]) -> list[dict[str, str]]:
    """Access of this machine to repositories of the Hugging Face Hub.

    Args:
        repos: pairs of kind (model or dataset) and id.

    Returns:
        For each its kind and name, a state (ok, cached, license, missing, unreachable, failing,
        offline, unknown), the answer of the Hugging Face Hub, and the page to visit.
    """
    answers: list[dict[str, str]] = []
    silent = ""
    for kind, name in repos:
        # If a query fails, the next query would only cost the same time again.
        state, answer = ("unreachable", silent) if silent else _ask(kind, name)
        silent = answer if state == "unreachable" else ""
        row = _row(kind, name, answer, state)
        with suppress(OSError):
            if state != "ok" and _is_cached(kind, name, inherited()):
                row["state"] = "cached"
        answers.append(row)
    return answers


def huggingface_issue(row: dict[str, str]) -> tuple[str, str, str]:
    """The id, the problem and the fix, for an answer of `ask_huggingface` that is not `ok`."""
    fetch = f"hf download {row['name']}" + " --repo-type dataset" * (row["kind"] == "dataset")
    values = {**row, "what": f"{row['kind']} {row['name']}", "fetch": fetch}
    id, what, fix = _WORDS.get(row["state"], _WORDS["unreachable"])
    return id, what.format(**values), fix.format(**values)


_WORDS = {
    "license": (
        "huggingface.license",
        "{what} requires a license that this account has not accepted ({answer})",
        "visit https://{page}, accept the license, and log in on this machine with hf auth login",
    ),
    "missing": (
        "huggingface.access",
        "{what} does not exist on Hugging Face, or is private ({answer})",
        "correct the name; write ./ before the name of a folder; for a private one, run hf auth "
        "login",
    ),
    "offline": (
        "huggingface.access",
        "{what} is not on this machine, and {answer}",
        "unset HF_HUB_OFFLINE, or download it first with {fetch}",
    ),
    "unknown": (
        "huggingface.access",
        "could not query {what}: {answer}",
        "run isles setup run.yaml, which installs the packages for training",
    ),
    "failing": (
        "huggingface.access",
        "Hugging Face returned an error for {what}: {answer}",
        "try again later, or download it on another machine with {fetch}",
    ),
    "unreachable": (
        "huggingface.access",
        "cannot reach Hugging Face for {what}: {answer}",
        "write ./ before the name of a folder or file; otherwise set a proxy (HTTPS_PROXY in "
        "clusters.0.environment.variables), or run {fetch} on a machine with internet access and "
        "copy the cache",
    ),
}


def _ask(kind: str, name: str) -> tuple[str, str]:
    try:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.errors import (
            EntryNotFoundError,
            GatedRepoError,
            HfHubHTTPError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
        )
    except ImportError:
        return "unknown", "the package huggingface_hub is missing"
    file = "config.json" if kind == "model" else "README.md"
    states = {
        EntryNotFoundError: "ok",  # the repository exists
        GatedRepoError: "license",
        RepositoryNotFoundError: "missing",
        OfflineModeIsEnabled: "offline",
        HfHubHTTPError: "failing",
    }
    try:
        get_hf_file_metadata(hf_hub_url(name, file, repo_type=kind), timeout=_REQUEST_S)
    except Exception as error:  # the library raises many errors: network, proxy, TLS, timeouts
        state = next((states[known] for known in states if isinstance(error, known)), "")
        if state in ("ok", "offline"):
            return state, "HF_HUB_OFFLINE is set" if state == "offline" else ""
        text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:200]
        return (state, text) if state else ("unreachable", f"{type(error).__name__}: {text}")
    return "ok", ""


def _row(kind: str, name: str, answer: str, state: str) -> dict[str, str]:
    page = f"huggingface.co/{'datasets/' if kind == 'dataset' else ''}{name}"
    return {"kind": kind, "name": name, "state": state, "answer": answer, "page": page}


def _is_cached(kind: str, name: str, environ: dict[str, str]) -> bool:
    # Cached by huggingface_hub, or prepared by the datasets library.
    folder = huggingface_cache(environ) / f"{kind}s--{name.replace('/', '--')}" / "snapshots"
    if folder.is_dir() and any(folder.iterdir()):
        return True
    prepared = datasets_cache(environ)
    return (
        kind == "dataset"
        and prepared.is_dir()
        and any(_plain(entry.name) == _plain(name) for entry in prepared.iterdir())
    )


def _plain(name: str) -> str:
    # The datasets library turns OWNER/MyName into owner___my_name.
    return name.replace("/", "").replace("_", "").lower()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(ask_huggingface(word.split("=", 1) for word in sys.argv[1:])))
