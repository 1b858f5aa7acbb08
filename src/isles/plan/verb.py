"""The command `isles plan`: read the run file, find the machines, print, and edit on request."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.text import Text

from isles.config.files import deepspeed_issues
from isles.config.load import Loaded, load_run_file
from isles.errors import ConfigError, ConfigErrors, ExitCode, UserError, more_lines
from isles.plan.apply import difference, edited, edits
from isles.plan.find import find_machines, parse_link
from isles.plan.machines import GUESSED_LINE, Link
from isles.plan.model import model_facts, shape_of
from isles.plan.report import Plan, Price, make_plan, record
from isles.plan.show import text_of
from isles.plan.simulate.fleet import Planned
from isles.run.records import explain_write_errors, write_text_atomic

Write = Callable[[str | Text], object]

_PRICE = re.compile(r"(\d+(?:\.\d+)?)\s*/\s*(kwh|h|hour)", re.I)


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of the command line; see `isles plan --help`."""

    gpus: str = ""
    nodes: int | None = None
    link: str = ""
    hub_link: str = ""
    price: str = ""
    as_json: bool = False
    apply: bool = False
    details: bool = False


def check_options(
    options: PlanOptions, played: Mapping[str, object], *, is_simulated: bool
) -> None:
    """Refuse options that have no effect.

    Args:
        options: options of a plan. `as_json` is also an option of a simulation.
        played: options of a simulation by their names. None: not given.

    Raises:
        UserError: an option of a plan was given to a simulation, or the other way round.
    """
    planned = {f"--{name.replace('_', '-')}": value for name, value in asdict(options).items()}
    del planned["--as-json"]
    machines = () if played.get("--fleet") is not None else ("--gpus", "--nodes", "--link")
    idle = [n for n, value in planned.items() if value and n not in machines]
    idle = idle if is_simulated else []
    if not is_simulated:
        idle = [name for name, value in played.items() if value is not None]
    if idle:
        beside = "with" if is_simulated else "without"
        fix = "remove it; --fleet has the links and speeds of a simulated fleet"
        raise UserError(
            f"{idle[0]} has no effect {beside} --simulate",
            where="the command line",
            fix=fix if is_simulated else "add --simulate",
        )


def planned_clusters(loaded: Loaded, options: PlanOptions) -> dict[str, Planned]:
    """Plan of each cluster of a run, which replaces the assumptions of a simulation."""
    if loaded.config.training.script is not None or deepspeed_issues(loaded):
        return {}
    plan = plan_of(loaded, options)
    speeds = {cluster.job.machines.name: cluster.speed for cluster in plan.clusters}
    found = {}
    for machines in plan.machines:
        speed, line = speeds.get(machines.name), machines.line
        by = "a guess of `isles plan`"
        if speed is not None and speed.measured is not None:
            by = f"measured in run {speed.measured.run}"
        is_known = line != GUESSED_LINE
        found[machines.name] = Planned(
            None if speed is None else speed.step_s,
            by,
            line.bytes_per_s if is_known else None,
            line.latency_s if is_known else None,
        )
    return found


def run_plan(run_file: Path, overrides: Sequence[str], options: PlanOptions, write: Write) -> int:
    """Plan, print, and return the exit code: 2 if the run does not fit.

    Raises:
        UserError: the run file or the command line is not valid.
    """
    loaded = load_run_file(run_file, overrides)
    plan = plan_of(loaded, options)
    if plan.issue is not None:
        _print(plan, options, write)
        if not options.as_json:
            error = plan.issue
            lines = [f"error: {error}", *more_lines(error.ids, str(error))]
            sys.stderr.write("\n".join(lines) + "\n")
        return int(plan.issue.exit_code)
    if options.apply:
        return _apply(plan, run_file, overrides, options, write)
    _print(plan, options, write)
    return _code(plan)


def plan_of(loaded: Loaded, options: PlanOptions) -> Plan:
    """The plan of a run file.

    Raises:
        UserError: the command line is not valid, or the run file runs a script.
    """
    config = loaded.config
    if config.training.script is not None:
        raise ConfigError(
            "isles cannot plan a script of your own",
            where=loaded.where("training.script"),
            fix="run `isles check`, which checks its machines",
        )
    if issues := deepspeed_issues(loaded):
        raise ConfigErrors(issues)
    machines = find_machines(loaded, options.gpus, options.nodes, options.link)
    hub = (
        parse_link(options.hub_link, flag="--hub-link")
        if options.hub_link
        else _hub(machines[0].line)
    )
    price = _price(options.price)
    try:
        shape = shape_of(config)
        model = model_facts(config, shape)
    except UserError as error:
        error.where = loaded.where(error.where)
        return make_plan(loaded, machines, error, {}, hub, price)
    return make_plan(loaded, machines, model, shape.config, hub, price)


def _hub(line: Link) -> Link:
    # If its uplink is not given, the hub has the same uplink as the first cluster.
    return (
        Link(line.bytes_per_s, line.latency_s, "guess", line.name) if line != GUESSED_LINE else line
    )


def _price(text: str) -> Price:
    if not text:
        return Price()
    found = _PRICE.fullmatch(text.strip())
    if found is None:
        raise UserError(
            f"{text!r} is not a valid price",
            where="--price",
            fix="write it as 0.30/kWh, or as 2.50/h for an hour of one GPU",
        )
    amount = float(found[1])
    return Price(per_kwh=amount) if found[2].lower() == "kwh" else Price(per_hour=amount)


def _print(plan: Plan, options: PlanOptions, write: Write) -> None:
    if options.as_json:
        write(json.dumps(record(plan), indent=1))
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 100
    is_terminal = sys.stdout.isatty()
    text = text_of(plan, details=options.details, is_terminal=is_terminal, width=width)
    write(Text.from_ansi(text))


def _code(plan: Plan) -> int:
    # 2 if a cluster does not fit as written.
    if any(cluster.own.refused for cluster in plan.clusters):
        return ExitCode.USER
    lost = [c for c in plan.clusters if c.own.fits is False]
    return ExitCode.PREFLIGHT if lost else ExitCode.OK


def _apply(
    plan: Plan, run_file: Path, overrides: Sequence[str], options: PlanOptions, write: Write
) -> int:
    # Cluster by cluster: an option for one cluster may be enough for the next.
    before = plan.loaded.text
    if plan.fits is not False:
        _print(plan, options, write)
        write("nothing to apply: it fits as written" if plan.fits else "nothing to apply")
        return _code(plan)
    text = before
    for index in range(len(plan.clusters)):
        cluster = plan.clusters[index]
        if cluster.own.fits is not False:
            continue
        rung = cluster.first_fit
        if rung is None:
            _print(plan, options, write)
            return ExitCode.PREFLIGHT
        text = edited(text, edits(plan.loaded, rung.changes, cluster=index))
        plan = plan_of(load_run_file(run_file, overrides, text=text), options)
    if plan.fits is not True:
        raise UserError(
            "the first option that fits cannot be written into this file",
            where=str(run_file),
            fix="remove the value on the command line, or of a cluster, that overrides it",
        )
    with explain_write_errors(
        run_file, "copy the file to a writable folder; isles did not change it"
    ):
        write_text_atomic(run_file.resolve(), text)
    if options.as_json:
        write(
            json.dumps({**record(plan), "diff": difference(str(run_file), before, text)}, indent=1)
        )
        return ExitCode.OK
    write(difference(str(run_file), before, text).rstrip("\n"))
    write("")
    _print(plan, options, write)
    return ExitCode.OK
