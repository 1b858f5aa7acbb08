"""Versions of what the nodes have installed, compared; findings name the node that differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from isles.check.finding import Finding, Level
from isles.facts.gpus import least_driver

Facts = Mapping[str, Mapping[str, Any]]
"""By the host's name, of `isles.launch.ssh.facts`."""

_SETUP = "make the hosts equal: isles setup run.yaml"
_FURTHER = ("safetensors", "datasets", "peft", "deepspeed")


def duplicates(facts: Facts) -> Iterator[Finding]:
    """Errors for names that lead to one machine."""
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
    here: str,
) -> Iterator[Finding]:
    """Compare versions over all hosts.

    Args:
        facts: of all hosts: what pip knows.
        imported: versions of torch, cuda and nccl that a rank has imported; None: it has not.
        drivers: of the GPUs, where there are any.
        here: isles on this machine.
    """
    packages = {name: own["packages"] for name, own in facts.items()}
    torch = {name: own["torch"] for name, own in packages.items() if "torch" in own}
    yield from _missing(facts)
    isles = {name: own["isles"] for name, own in facts.items()}
    odd = {name: version for name, version in isles.items() if version != here}
    for name, version in odd.items():
        yield _odd("version.isles", "isles", name, version, f"{here} on this machine", "error")
    # Another patch release matters little; another minor release unpickles otherwise.
    python = {name: own["python"] for name, own in facts.items()}
    minors = {version.rpartition(".")[0] for version in python.values()}
    library = {n: own["transformers"] for n, own in packages.items() if "transformers" in own}
    used = {name: own for name, own in imported.items() if own["torch"]}
    rows: list[tuple[str, str, Mapping[str, str], Level]] = [
        ("version.python", "Python", python, "error" if len(minors) > 1 else "warning"),
        ("version.isles", "isles", {} if odd else isles, "error"),
        ("version.torch", "torch", torch, "error"),
        ("version.transformers", "transformers", library, "warning"),
    ]
    for package in _FURTHER:
        versions = {name: own.get(package, "none") for name, own in packages.items()}
        rows.append(("version.packages", package, versions, "warning"))
    for key, what in (("cuda", "CUDA of torch"), ("nccl", "NCCL")):
        linked = {name: own[key] or "none" for name, own in used.items()}
        rows.append((f"version.{key}", what, linked, "error"))
    rows.append(("version.driver", "the NVIDIA driver", drivers, "warning"))
    for finding_id, what, values, level in rows:
        if set(values.values()) - {"none"}:
            yield from _compare(finding_id, what, values, level)
    yield from _old_drivers(used, drivers)
    yield from _doubled(torch, imported)


def _missing(facts: Facts) -> Iterator[Finding]:
    for name, own in facts.items():
        if not own["missing"]:
            continue
        missing = ", ".join(own["missing"])
        text = f"training needs packages that are not installed for {own['executable']}: {missing}"
        fix = (
            "isles setup run.yaml installs them; by hand: pip install 'isles[train]'; or name the "
        )
        fix += "right Python in clusters.0.environment"
        yield Finding("packages.missing", "error", name, text, f"missing: {missing}", fix=fix)


def _old_drivers(
    imported: Mapping[str, Mapping[str, str | None]], drivers: Mapping[str, str]
) -> Iterator[Finding]:
    # The CUDA of an image, or of a wheel, is newer than the driver of the host.
    for name, driver in drivers.items():
        cuda = imported.get(name, {}).get("cuda")
        least = least_driver(cuda) if cuda else None
        major = driver.partition(".")[0]
        if least is None or not major.isdecimal() or int(major) >= least:
            continue
        text = f"torch is built for CUDA {cuda}, which needs the driver {least} or newer, and it "
        text += f"has {driver}"
        fix = (
            f"install a newer driver on {name}, as on Ubuntu: sudo ubuntu-drivers install; or use "
        )
        fix += "an image, or a torch, of an older CUDA"
        yield Finding("version.driver", "error", name, text, driver, str(least), fix)


def _doubled(
    installed: Mapping[str, str], imported: Mapping[str, Mapping[str, str | None]]
) -> Iterator[Finding]:
    # A package that pip knows beside another that Python finds first.
    for name, own in imported.items():
        known, real = installed.get(name), own["torch"]
        # A wheel's local version (+cu128) is not always part of what pip knows.
        if known and real and known.partition("+")[0] != real.partition("+")[0]:
            text = f"pip knows torch {known}, and Python imports {real}: two are installed"
            fix = "look at PYTHONPATH and `python -m pip list -v` there; remove one of the two"
            yield Finding("version.torch", "error", name, text, real, known, fix)


def _compare(
    finding_id: str, what: str, values: Mapping[str, str], level: Level
) -> Iterator[Finding]:
    # One finding where all are equal; else one for each host that differs from most, or from the
    # first where there is no majority.
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
