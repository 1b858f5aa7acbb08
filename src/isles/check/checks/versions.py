"""What the nodes have installed, compared: the odd one out is named, with both values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from isles.check.finding import Finding, Level

Facts = Mapping[str, Mapping[str, Any]]
"""By the host's name: what `isles.launch.ssh.facts` says."""

_SETUP = "make the hosts equal: isles setup run.yaml"
_FURTHER = ("safetensors", "datasets", "peft", "deepspeed")


def duplicates(facts: Facts) -> Iterator[Finding]:
    """Names that lead to one machine."""
    first: dict[str, str] = {}
    for name, own in facts.items():
        other = first.setdefault(own["machine_id"] or name, name)
        host = own["host"]
        if other != name:
            text = f"{other} and {name} are one machine, {host}"
            fix = "name it once; gpus says how many ranks it has"
            yield Finding("host.duplicate", "error", name, text, host, fix=fix)


def compare_versions(
    facts: Facts,
    imported: Mapping[str, Mapping[str, str | None]],
    drivers: Mapping[str, str],
    here: str | None,
) -> Iterator[Finding]:
    """Versions over all hosts.

    Args:
        facts: what pip knows on each.
        imported: torch, cuda and nccl as a rank has imported them; None: it has not.
        drivers: of the GPUs, where there are any.
        here: isles on this machine, where that counts.
    """
    yield from _missing(facts)
    python = {name: own["python"] for name, own in facts.items()}
    # Another patch release matters little; another minor release unpickles otherwise.
    minors = {".".join(version.split(".")[:2]) for version in python.values()}
    level: Level = "error" if len(minors) > 1 else "warning"
    yield from _compare("version.python", "Python", python, level)
    yield from _isles({name: own["isles"] for name, own in facts.items()}, here)
    packages = {name: own["packages"] for name, own in facts.items()}
    torch = {name: own["torch"] for name, own in packages.items() if "torch" in own}
    yield from _compare("version.torch", "torch", torch, "error")
    library = {n: own["transformers"] for n, own in packages.items() if "transformers" in own}
    yield from _compare("version.transformers", "transformers", library, "warning")
    for package in _FURTHER:
        versions = {name: own.get(package, "none") for name, own in packages.items()}
        if set(versions.values()) != {"none"}:
            yield from _compare("version.packages", package, versions, "warning")
    yield from _doubled(torch, imported)
    used = {name: own for name, own in imported.items() if own["torch"]}
    cuda = {name: own["cuda"] or "none" for name, own in used.items()}
    yield from _compare("version.cuda", "CUDA of torch", cuda, "error")
    nccl = {name: own["nccl"] or "none" for name, own in used.items()}
    if set(nccl.values()) != {"none"}:
        yield from _compare("version.nccl", "NCCL", nccl, "error")
    yield from _compare("version.driver", "the NVIDIA driver", drivers, "warning")


def _missing(facts: Facts) -> Iterator[Finding]:
    for name, own in facts.items():
        if not own["missing"]:
            continue
        missing = ", ".join(own["missing"])
        text = f"training needs packages that are not installed for {own['executable']}: {missing}"
        fix = (
            "isles setup run.yaml installs them; by hand: pip install 'isles[train]'; or name the "
        )
        fix += "right Python in clusters[0].environment"
        yield Finding("packages.missing", "error", name, text, f"missing: {missing}", fix=fix)


def _isles(versions: Mapping[str, str], here: str | None) -> Iterator[Finding]:
    odd = {name: version for name, version in versions.items() if version != here}
    if here is None or not odd:
        yield from _compare("version.isles", "isles", versions, "error")
        return
    for name, version in odd.items():
        yield _odd("version.isles", "isles", name, version, f"{here} on this machine", "error")


def _doubled(
    installed: Mapping[str, str], imported: Mapping[str, Mapping[str, str | None]]
) -> Iterator[Finding]:
    # A package that pip knows beside another that Python finds first.
    for name, own in imported.items():
        told, real = installed.get(name), own["torch"]
        # A wheel's local version (+cu128) is not always part of what pip knows.
        if told and real and told.partition("+")[0] != real.partition("+")[0]:
            text = f"pip knows torch {told}, and Python imports {real}: two are installed"
            fix = "look at PYTHONPATH and `python -m pip list -v` there; remove one of the two"
            yield Finding("version.torch", "error", name, text, real, told, fix)


def _compare(
    finding_id: str, what: str, values: Mapping[str, str], level: Level
) -> Iterator[Finding]:
    """One finding where all are equal; else one for each host that differs from most, or from the
    first where there is no most."""
    if not values:
        return
    usual, _ = Counter(values.values()).most_common(1)[0]
    same = [name for name, value in values.items() if value == usual]
    if len(same) == len(values):
        where = same[0] if len(values) == 1 else "all hosts"
        yield Finding(finding_id, "ok", where, f"{what} {usual}", measured=usual)
    for name, value in values.items():
        if value != usual:
            yield _odd(finding_id, what, name, value, f"{usual} on {', '.join(same)}", level)


def _odd(finding_id: str, what: str, name: str, value: str, usual: str, level: Level) -> Finding:
    fix = _SETUP
    if finding_id == "version.driver":
        fix = f"install the same driver on {name}, as on Ubuntu: sudo ubuntu-drivers install"
    text = f"it has {what} {value}, and there is {usual}"
    limit = usual.partition(" on ")[0]
    return Finding(finding_id, level, name, text, value, limit, fix)
