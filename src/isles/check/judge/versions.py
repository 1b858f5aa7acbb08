"""What the nodes have installed, compared: the odd one out is named, with both values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from isles.check.finding import Finding, Level
from isles.check.panel import Answers

_SETUP = "make the hosts equal: isles setup run.yaml"
_FURTHER = ("safetensors", "datasets", "peft", "deepspeed")


def judge_duplicates(facts: Answers) -> list[Finding]:
    """Names that lead to one machine."""
    first: dict[str, str] = {}
    findings = []
    for name, fact in facts.items():
        other = first.setdefault(fact["machine_id"] or name, name)
        if other != name:
            findings.append(
                Finding(
                    "host.duplicate",
                    "error",
                    name,
                    f"{other} and {name} are one machine, {fact['host']}",
                    measured=fact["host"],
                    fix="name it once; gpus says how many ranks it has",
                )
            )
    return findings


def judge_versions(
    facts: Answers, ranks: Answers, gpus: Answers, here: str | None
) -> list[Finding]:
    """Versions over all hosts.

    Args:
        facts: of `isles.launch.node.facts`.
        ranks: of `isles.check.node.ranks`.
        gpus: of `isles.check.node.gpus`.
        here: isles on this machine, where that counts.
    """
    findings = [*_missing(facts), *_python(facts), *_isles(facts, here)]
    packages = {name: fact["packages"] for name, fact in facts.items()}
    has_torch = {name: own["torch"] for name, own in packages.items() if "torch" in own}
    findings += _compare("version.torch", "torch", has_torch, "error")
    has_library = {n: own["transformers"] for n, own in packages.items() if "transformers" in own}
    findings += _compare("version.transformers", "transformers", has_library, "warning")
    for package in _FURTHER:
        values = {name: own.get(package, "none") for name, own in packages.items()}
        if set(values.values()) != {"none"}:
            findings += _compare("version.packages", package, values, "warning")
    first = {name: answer["ranks"][0] for name, answer in ranks.items()}
    findings += _imported(has_torch, first)
    for finding_id, what, key in (
        ("version.cuda", "CUDA of torch", "cuda"),
        ("version.nccl", "NCCL", "nccl"),
    ):
        values = {name: str(own[key]) for name, own in first.items() if own.get(key)}
        if values or key == "cuda":
            values = {n: values.get(n, "none") for n, own in first.items() if "torch" in own}
            findings += _compare(finding_id, what, values, "error")
    drivers = {n: answer["gpus"][0]["driver"] for n, answer in gpus.items() if answer["gpus"]}
    findings += _compare("version.driver", "the NVIDIA driver", drivers, "warning")
    return findings


def _missing(facts: Answers) -> Iterator[Finding]:
    for name, fact in facts.items():
        if fact["missing"]:
            yield Finding(
                "packages.missing",
                "error",
                name,
                f"training needs packages that are not installed for {fact['executable']}: "
                + ", ".join(fact["missing"]),
                measured="missing: " + ", ".join(fact["missing"]),
                fix="isles setup run.yaml installs them; by hand: pip install 'isles[train]'; or "
                "name the right Python in clusters[0].environment",
            )


def _python(facts: Answers) -> list[Finding]:
    """Another patch release matters little; another minor release unpickles otherwise."""
    values = {name: fact["python"] for name, fact in facts.items()}
    minors = {name: ".".join(value.split(".")[:2]) for name, value in values.items()}
    level: Level = "error" if len(set(minors.values())) > 1 else "warning"
    return _compare("version.python", "Python", values, level)


def _isles(facts: Answers, here: str | None) -> list[Finding]:
    values = {name: fact["isles"] for name, fact in facts.items()}
    if here is None:
        return _compare("version.isles", "isles", values, "error")
    odd = {name: value for name, value in values.items() if value != here}
    if not odd:
        return _compare("version.isles", "isles", values, "error")
    return [
        _odd("version.isles", "isles", name, value, f"{here} on this machine", "error")
        for name, value in odd.items()
    ]


def _imported(installed: Mapping[str, str], ranks: Answers) -> Iterator[Finding]:
    """A package that pip knows beside another that Python finds first."""
    for name, own in ranks.items():
        told, real = installed.get(name), own.get("torch")
        # A wheel's local version (+cu128) is not always part of what pip knows.
        if told and real and told.partition("+")[0] != real.partition("+")[0]:
            yield Finding(
                "version.torch",
                "error",
                name,
                f"pip knows torch {told}, and Python imports {real}: two are installed",
                measured=real,
                limit=told,
                fix="look at PYTHONPATH and `python -m pip list -v` there; remove one of the two",
            )


def _compare(finding_id: str, what: str, values: Mapping[str, str], level: Level) -> list[Finding]:
    """One finding where all are equal; else one for each host that differs from most, or from the
    first where there is no most."""
    if not values:
        return []
    usual, _ = Counter(values.values()).most_common(1)[0]
    same = [name for name, value in values.items() if value == usual]
    if len(same) == len(values):
        where = next(iter(values)) if len(values) == 1 else "all hosts"
        return [Finding(finding_id, "ok", where, f"{what} {usual}", measured=usual)]
    return [
        _odd(finding_id, what, name, value, f"{usual} on {', '.join(same)}", level)
        for name, value in values.items()
        if value != usual
    ]


def _odd(finding_id: str, what: str, name: str, value: str, usual: str, level: Level) -> Finding:
    fix = _SETUP
    if finding_id == "version.driver":
        fix = f"install the same driver on {name}, as on Ubuntu: sudo ubuntu-drivers install"
    return Finding(
        finding_id,
        level,
        name,
        f"it has {what} {value}, and there is {usual}",
        measured=value,
        limit=usual.partition(" on ")[0],
        fix=fix,
    )
