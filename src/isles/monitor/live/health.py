"""`isles status --check`: five lines that tell whether a run is well.

`check_lines` makes them from a snapshot: processes, memory, loss, ranks in step, records.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from json import dumps
from pathlib import Path
from typing import Any, Literal

from isles.errors import ExitCode, PreflightError, UserError
from isles.facts.units import format_bytes, format_duration, parse_duration_s
from isles.launch.remote.login import pass_on
from isles.monitor.hub import find_hub
from isles.monitor.live.model import HostRow, Point, RankRow, Snapshot
from isles.monitor.live.rows import MOST_RANKS
from isles.monitor.live.source import Watch
from isles.monitor.live.source import snapshot as snapshot_of
from isles.run.exported import export_failure
from isles.run.find import find_any, typed_name
from isles.run.hang import STAGES
from isles.run.owner import shown_only
from isles.run.paths import RunDir
from isles.run.remote import RemoteRun
from isles.run.state import script_of

State = Literal["ok", "not yet", "wrong"]

SILENT_S = 15.0
"""A rank or host without a heartbeat for this time is listed, in seconds."""

_LISTED = 3
_LEAST_POINTS = 9
"""Recorded steps that are needed to judge a loss: three at each end, and three between."""

_SMALL = 0.01
"""A loss that rises by less than this part of it is level."""

_LEAST_AGE_S = 30.0
_SLOW_RECORDS = 4.0
"""Records are late after this multiple of the longest interval between the last records."""

_STEADY_PHASES = ("training", "")
_OVER = ("finished", "stopped", "failed", "killed", "gone")
_SAID_EVERY_S, _SAME_EVERY_S = 3.0, 15.0
_LOOK_EVERY_S, _NEWS_S = 1.0, 20.0
_AGAIN_S = 20.0
"""One look may call a rank behind that something else has held up for a moment: it is looked at for
so much longer."""


@dataclass(frozen=True, slots=True)
class CheckLine:
    """One of the five.

    Args:
        state: `not yet` if it is too early to tell.
        where: affected hosts and ranks, or empty for the whole run.
        next: the next command to run, or empty if all is well.
    """

    id: Literal["processes", "memory", "loss", "ranks", "records"]
    state: State
    text: str
    where: str = ""
    next: str = ""


def is_over(snapshot: Snapshot) -> bool:
    """True if the run has ended, for any reason."""
    return snapshot.run.state in _OVER


def check_lines(snapshot: Snapshot, typed: str = "", *, is_script: bool = False) -> list[CheckLine]:
    """The five lines of a running run, or one line for a run that waits for its start.

    Args:
        typed: argument that names the run on the command line. Default: its name.
        is_script: the run trains with the user's own script, whose steps isles does not see.
    """
    named = typed or snapshot.run.name
    if snapshot.run.state in ("queued", "new"):
        why = f": {snapshot.run.reason}" if snapshot.run.reason else ""
        text = f"its job is queued{why}" if snapshot.run.state == "queued" else "it has not begun"
        return [CheckLine("processes", "not yet", text, next=f"isles status {named}")]
    lines = [_processes(snapshot, named), _memory(snapshot, named)]
    if is_script:
        unseen = "not seen by isles: a script of your own trains"
        lines.append(CheckLine("loss", "ok", unseen))
        lines.append(_ranks(snapshot, named, has_steps=False))
        return [*lines, CheckLine("records", "ok", unseen)]
    return [*lines, _loss(snapshot, named), _ranks(snapshot, named), _records(snapshot, named)]


def wait_until_healthy(
    look: Callable[[], Snapshot],
    lines_of: Callable[[Snapshot], list[CheckLine]],
    wait_s: float,
    say: Callable[[str], object],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Snapshot, list[CheckLine]]:
    """Look until all five are ok, the time is up, or the run has ended; the last look.

    Args:
        look: waits a moment, and returns a new snapshot.
        say: called every few seconds with the reason for the wait.
    """
    begun = clock()
    said, said_at = "", -math.inf
    while True:
        snapshot = look()
        lines = lines_of(snapshot)
        left_s = begun + wait_s - clock()
        waiting = [line for line in lines if line.state != "ok"]
        if not waiting or left_s <= 0 or is_over(snapshot):
            return snapshot, lines
        text = "; ".join(f"{line.id}: {line.text}" for line in waiting)
        kind = re.sub(r"\d[\d.:]*", "#", text)  # the same trouble with other figures is no news
        if clock() - said_at >= (_SAID_EVERY_S if kind != said else _SAME_EVERY_S):
            say(f"waiting, {format_duration(left_s)} at most, for {text}")
            said, said_at = kind, clock()


def text_lines(snapshot: Snapshot, lines: Sequence[CheckLine], typed: str = "") -> list[str]:
    """The five lines for a terminal; of a run that has ended, how."""
    run = snapshot.run
    named = typed or run.name
    of = f" of {run.total_steps}" if run.total_steps else ""
    head = f"{run.name} at step {run.step}{of}" if run.step is not None else run.name
    shown = [head if run.state == "running" else f"{head}: {run.state}"]
    if not lines:
        why = f" ({run.reason})" if run.reason else ""
        ended = f"it has ended{why}: there is nothing to check"
        return [*shown, f"  {ended}", f"  next: isles status {named}"]
    for line in lines:
        state = line.state.upper() if line.state == "wrong" else line.state
        shown.append(f"  {state:<8}{line.id:<11}{line.text}")
        if line.next:
            shown.append(f"{'':<21}next: {line.next}")
    return shown


def record_of(snapshot: Snapshot, lines: Sequence[CheckLine], *, is_well: bool) -> dict[str, Any]:
    """The same as JSON."""
    run = snapshot.run
    head = {"name": run.name, "state": run.state, "step": run.step, "at": snapshot.at}
    return {**head, "is_well": is_well, "lines": [asdict(line) for line in lines]}


def check_run(
    run: str | None,
    output_dir: Path,
    *,
    wait: tuple[str, ...] | None,
    json: bool,
    print_line: Callable[[str], object],
    note: Callable[[str], object],
) -> int:
    """`isles status --check`; the exit code.

    Args:
        wait: the words after --wait, or None without --wait.

    Raises:
        UserError: the run is unknown, or its machine is unreachable.
    """
    try:
        wait_s = parse_duration_s(*(wait or ("5m",)))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{' '.join(wait or ())} is not a valid duration",
            where="--wait",
            fix="name the run first: isles status RUN --check --wait 5m",
        ) from error
    if find_hub(run, output_dir) is not None:
        raise UserError(
            f"{run} is a hub, and has no ranks",
            where="--check",
            fix="name the run of a cluster; `isles top` shows the hub",
            id="run.unknown",
        )
    found = find_any(run, output_dir)
    if isinstance(found, RemoteRun):
        words = ["status", found.path, "--check", *(["--json"] if json else [])]
        return pass_on(found, [*words, *(["--wait", *wait] if wait is not None else [])])
    if owner := found.owner:
        note(shown_only(owner))
    typed, is_script = typed_name(found), isinstance(found, RunDir) and bool(script_of(found))

    def lines_of(shown: Snapshot) -> list[CheckLine]:
        return [] if is_over(shown) else check_lines(shown, typed, is_script=is_script)

    shown = snapshot_of(found)
    lines = lines_of(shown)
    is_behind = any(row.mark == "straggler" for row in shown.ranks)
    if wait is not None or (is_behind and lines):
        with Watch(found, output_dir, _LOOK_EVERY_S) as watch:
            look = _looks(watch)
            seconds, say = (_AGAIN_S, lambda _: None) if wait is None else (wait_s, note)
            shown, lines = wait_until_healthy(lambda: next(look), lines_of, seconds, say)
    is_well = bool(lines) and all(line.state == "ok" for line in lines)
    if shown.run.state == "finished":
        is_well = not (isinstance(found, RunDir) and export_failure(found))
    if json:
        print_line(dumps(record_of(shown, lines, is_well=is_well), indent=1))
    else:
        print_line("\n".join(text_lines(shown, lines, typed)))
    return ExitCode.OK if is_well else ExitCode.PREFLIGHT


def _looks(watch: Watch) -> Iterator[Snapshot]:
    at = 0.0
    while (shown := watch.wait(at, _NEWS_S)) is not None:
        at = shown.at
        yield shown
    raise PreflightError(
        watch.error or f"no news of it for {_NEWS_S:.0f} s",
        where=watch.typed,
        fix="`isles status` shows its last known state",
        id="host.answers",
    )


def _processes(snapshot: Snapshot, named: str) -> CheckLine:
    rows = snapshot.ranks
    missing, num_missing = _missing(snapshot)
    gone = [row for row in rows if row.mark == "dead"]
    late = [row for row in rows if row.pid is None and row.mark != "dead"]
    if gone:
        text = "; ".join(f"{_name(row)} is gone{_note(row)}" for row in gone[:_LISTED])
        text += _more(gone)
        return CheckLine("processes", "wrong", text, _where(gone), _logs(named, gone[0]))
    if not rows or missing or late:
        names = [*missing, *(_name(row) for row in late)][:_LISTED]
        more = num_missing + len(late) - len(names)
        and_more = f" and {more:,} more" if more > 0 else ""
        text = f"{', '.join(names)}{and_more} not started" if names else ""
        text = text or f"no rank has started ({snapshot.run.phase or snapshot.run.state})"
        is_late = snapshot.run.step is not None and bool(rows)
        state: State = "wrong" if is_late else "not yet"
        return CheckLine("processes", state, text, ", ".join(names), f"isles logs {named}")
    hosts = len({row.host for row in rows})
    on_gpus = all(row.limit_bytes for row in rows)
    each = "one on each GPU" if on_gpus else "one for each rank"
    text = (
        f"{_count(len(rows), 'process', 'processes')} on {_count(hosts, 'host', 'hosts')}, {each}"
    )
    return CheckLine("processes", "ok", text)


def _missing(snapshot: Snapshot) -> tuple[list[str], int]:
    # The first ranks that a host is to have, and of which nothing is known; and how many there are.
    known = {(row.cluster, row.rank) for row in snapshot.ranks}
    names, count = list[str](), -len(known)
    if len(known) >= MOST_RANKS:
        return [], 0  # it has no row for the others
    for host in snapshot.hosts:
        first, last = host.ranks or (0, -1)
        count += max(0, last - first + 1)
        # Among so many ranks in a row are enough that are not known.
        unknown = (
            f"rank {rank} on {host.host}"
            for rank in range(first, min(last, first + len(known) + _LISTED) + 1)
            if (host.cluster, rank) not in known
        )
        names += islice(unknown, _LISTED - len(names))
    return names, max(count, len(names))


def _memory(snapshot: Snapshot, named: str) -> CheckLine:
    rows = [row for row in snapshot.ranks if row.mark != "dead"]
    empty = [row for row in rows if not row.memory_bytes]
    if not rows or empty:
        text = "no rank has reported its memory yet"
        if rows:
            text = (
                f"nothing is in use yet by {', '.join(map(_name, empty[:_LISTED]))}{_more(empty)}"
            )
        # A rank that has done a step has used memory.
        wrong = [row for row in empty if row.memory_bytes == 0 and row.step]
        if wrong:
            return CheckLine("memory", "wrong", text, _where(wrong), _logs(named, wrong[0]))
        return CheckLine("memory", "not yet", text, _where(empty), f"isles logs {named}")
    used = [row.memory_bytes or 0 for row in rows]
    text = _range(used)
    limits = [row.limit_bytes for row in rows if row.limit_bytes]
    if limits:
        text += f" of {_range(limits)}"
    peaks = [row.peak_bytes for row in rows if row.peak_bytes]
    peak = f"; at most {format_bytes(max(peaks))} so far" if peaks else ""
    return CheckLine("memory", "ok", f"{text} in use by each rank{peak}")


def _loss(snapshot: Snapshot, named: str) -> CheckLine:
    points = [point for point in snapshot.curve if point.loss is not None]
    # Records have null for NaN; a point of an evaluation alone has its own loss.
    bad = [p.step for p in snapshot.curve if p.loss is None and p.eval_loss is None]
    bad = [step for step in bad if not points or step > points[-1].step]
    bad += [point.step for point in points if not math.isfinite(point.loss or 0.0)]
    if bad:
        text = f"it is not finite since step {min(bad)}"
        return CheckLine("loss", "wrong", text, next="isles explain loss.finite")
    if len(points) < _LEAST_POINTS:
        return CheckLine("loss", "not yet", _steps_missing(points), next=f"isles logs {named}")
    first, last, noise = _ends(points)
    spans = f"{first.loss:.4g} around step {first.step}, {last.loss:.4g} around step {last.step}"
    fall = (first.loss or 0.0) - (last.loss or 0.0)
    if fall > noise:
        return CheckLine("loss", "ok", f"falling: {spans}")
    begun = statistics.median(point.loss or 0.0 for point in points[: _LEAST_POINTS // 3])
    is_rising = -fall > max(3 * noise, _SMALL * abs(first.loss or 0.0))
    if not is_rising and begun - (last.loss or 0.0) > noise and len(points) > 2 * _LEAST_POINTS:
        # Late in a run it falls more slowly than one sees within its noise.
        return CheckLine("loss", "ok", f"level now: {spans}; it began at {begun:.4g}")
    if not is_rising:
        text = f"not to be told from noise yet: {spans}"
        return CheckLine("loss", "not yet", text, next=f"isles logs {named}")
    text = f"rising: {spans}; is training.learning_rate too high?"
    return CheckLine("loss", "wrong", text, next=f"isles stop {named}")


def _steps_missing(points: Sequence[Point]) -> str:
    wanted = _LEAST_POINTS - len(points)
    if len(points) < 2:
        return f"{_count(wanted, 'recorded step is', 'recorded steps are')} missing to tell"
    every = max(1, round((points[-1].step - points[0].step) / (len(points) - 1)))
    missing = _count(wanted * every, "step is", "steps are")
    return f"{missing} missing to tell; {points[-1].loss:.4g} at step {points[-1].step}"


def _ends(points: Sequence[Point]) -> tuple[Point, Point, float]:
    # Medians of the first and last third of the newer half of the curve (of all of a short one),
    # and what two such medians differ by without a reason: by the median difference of
    # neighbors, which neither a trend nor single jumps disturb.
    since = points[-1].step - (points[-1].step - points[0].step) / 2
    recent = [point for point in points if point.step >= since]
    if len(recent) < 3 * _LEAST_POINTS:
        recent = list(points[-3 * _LEAST_POINTS :])
    third = len(recent) // 3
    ends = []
    for part in (recent[:third], recent[-third:]):
        middle = statistics.median(point.loss or 0.0 for point in part)
        ends.append(Point(step=part[len(part) // 2].step, loss=middle))
    jumps = [abs((b.loss or 0.0) - (a.loss or 0.0)) for a, b in pairwise(recent)]
    # Of normal noise: the median of |difference of two| is 0.954 sigma; a median of n has 1.253
    # sigma / sqrt(n).
    sigma = statistics.median(jumps) / 0.954
    return ends[0], ends[1], 1.253 * sigma * math.sqrt(2 / third)


def _ranks(snapshot: Snapshot, named: str, *, has_steps: bool = True) -> CheckLine:
    rows = snapshot.ranks
    if (trouble := _out_of_step(snapshot, named)) is not None:
        return trouble
    waited = [row for row in rows if row.step is None] if has_steps else []
    if waited or not rows:
        text = f"no step yet by {', '.join(map(_name, waited[:_LISTED]))}{_more(waited)}"
        text = text if rows else "no rank has started"
        return CheckLine("ranks", "not yet", text, _where(waited), f"isles logs {named}")
    if len(rows) == 1:
        at = f" is at step {rows[0].step}" if has_steps else ""
        return CheckLine("ranks", "ok", f"the only rank{at}, last heartbeat {_heard(rows)}")
    low, high = (f([row.step or 0 for row in rows]) for f in (min, max))
    between = f" at step {low}" if low == high else f" at steps {low} to {high}"
    if len({row.cluster for row in rows}) > 1:
        between += ", each cluster in step"
    text = f"all {len(rows)}{between if has_steps else ''}, last heartbeat {_heard(rows)}"
    throttled = [row for row in rows if row.mark == "throttled"]
    if throttled:
        text += f", throttled: {', '.join(map(_name, throttled[:_LISTED]))}{_more(throttled)}"
    return CheckLine("ranks", "ok", text)


def _out_of_step(snapshot: Snapshot, named: str) -> CheckLine | None:
    rows = snapshot.ranks
    silent = [row for row in rows if _is_silent(row)]
    # Who waits for a silent rank, or is waited for by its last step, is not out of step.
    behind = [row for row in rows if row.mark in ("straggler", "dead")] or _behind(rows)
    away = [cluster for cluster in snapshot.clusters if cluster.mark in ("dead", "silent")]
    if meant := silent or behind:
        how = _silence if silent else _lateness
        words = [f"{_name(row)} {how(row)}" for row in meant[:_LISTED]]
        text = f"{'; '.join(words)}{_more(meant)}"
        return CheckLine("ranks", "wrong", text, _where(meant), _logs(named, meant[0]))
    if away:
        text = "; ".join(f"cluster {c.name} is {c.mark}{_note(c)}" for c in away[:_LISTED])
        names = ", ".join(cluster.name for cluster in away)
        return CheckLine("ranks", "wrong", text + _more(away), names, f"isles status {named}")
    return None


def _behind(rows: Iterable[RankRow]) -> list[RankRow]:
    # Ranks of one cluster meet in every step, so one step apart is as far as they can be seen.
    newest: dict[str, int] = {}
    known = [row for row in rows if row.step is not None]
    for row in known:
        newest[row.cluster] = max(newest.get(row.cluster, 0), row.step or 0)
    return [row for row in known if (row.step or 0) < newest[row.cluster] - 1]


def _records(snapshot: Snapshot, named: str) -> CheckLine:
    run, age_s = snapshot.run, snapshot.run.recorded_age_s
    lost = [h for h in snapshot.hosts if h.mark == "silent" or (h.heard_s or 0.0) > SILENT_S]
    if lost:
        text = "; ".join(f"nothing comes from {_host(host)}" for host in lost[:_LISTED])
        where = ", ".join(host.host for host in lost)
        return CheckLine("records", "wrong", f"{text}{_more(lost)}", where, f"isles status {named}")
    steps = [point for point in snapshot.curve if point.loss is not None]
    if age_s is None or not steps:
        text = f"no step is recorded yet ({run.phase or run.state})"
        return CheckLine("records", "not yet", text, next=f"isles logs {named}")
    intervals = [later.elapsed_s - earlier.elapsed_s for earlier, later in pairwise(steps[-9:])]
    limit_s = max(_LEAST_AGE_S, _SLOW_RECORDS * max(intervals, default=0.0))
    text = f"step {steps[-1].step} was recorded {format_duration(age_s)} ago"
    if age_s <= limit_s:
        return CheckLine("records", "ok", text)
    away = [row.stage for row in snapshot.ranks if row.stage and row.stage not in STAGES]
    if len(snapshot.clusters) < 2 and run.phase.partition(",")[0] not in _STEADY_PHASES:
        away.insert(0, run.phase)
    if away:
        text = f"{text}, and now it is {away[0]}"
        return CheckLine("records", "not yet", text, next=f"isles logs {named}")
    text = f"{text}, and nothing since; one was due after {format_duration(limit_s)} at most"
    return CheckLine("records", "wrong", text, next=f"isles logs {named}")


def _host(host: HostRow) -> str:
    since = f", last heartbeat {format_duration(host.heard_s)} ago" if host.heard_s else ""
    return f"{host.host}{since}"


def _is_silent(row: RankRow) -> bool:
    return row.mark == "silent" or (row.heard_s or 0.0) > SILENT_S


def _silence(row: RankRow) -> str:
    since = f" for {format_duration(row.heard_s)}" if row.heard_s else ""
    doing = f", then in {row.stage}" if row.stage else ""
    return f"sends no heartbeat{since}{doing}"


def _lateness(row: RankRow) -> str:
    return f"is behind{_note(row)}"


def _heard(rows: Sequence[RankRow]) -> str:
    ages = [row.heard_s for row in rows if row.heard_s is not None]
    return f"{format_duration(max(ages))} ago at most" if ages else "now"


def _name(row: RankRow) -> str:
    cluster = f"{row.cluster} " if row.cluster else ""
    return f"{cluster}rank {row.rank} on {row.host}"


def _note(row: Any) -> str:
    return f": {row.note}" if row.note else ""


def _where(rows: Sequence[RankRow]) -> str:
    return ", ".join(map(_name, rows))


def _logs(named: str, row: RankRow) -> str:
    cluster = f" --cluster {row.cluster}" if row.cluster else ""
    return f"isles logs {named}{cluster} --rank {row.rank}"


def _range(sizes: Sequence[int]) -> str:
    low, high = format_bytes(min(sizes)), format_bytes(max(sizes))
    return low if low == high else f"{low} to {high}"


def _more(items: Sequence[object]) -> str:
    return f" and {len(items) - _LISTED} more" if len(items) > _LISTED else ""


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
