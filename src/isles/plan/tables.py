"""The tables of a plan for one cluster: memory, ladder, strategies, time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import groupby

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from isles.facts.units import format_bytes, format_count, format_duration
from isles.plan.apply import changed, typed
from isles.plan.ladder import SHORTER, Rung
from isles.plan.measured import Measured
from isles.plan.report import ClusterPlan, Plan, Speed, cost
from isles.plan.step import Job, Outcome, RankPlan, StepTime
from isles.plan.strategies import Candidate, name_of

_GIB = 2**30
_CAUSES = ("weights", "gradients", "optimizer", "activations", "logits", "gathered")
_LABELS = ("weight", "grad", "optim", "activ", "logit", "gather")
_KNOWN_BY = {"measured": "here", "given": "given", "table": "table", "guess": "guess"}
_AFTER = 2
"""Rungs that are shown behind the first that fits."""


def facts(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, Text(text))
    return table


def clusters_table(clusters: Sequence[ClusterPlan]) -> Table:
    """A row for each cluster: its tightest rank, its speed, and what it needs beside its cards."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    heads = ("", "Cluster", "strategy", "peak", "limit", "s/step", "tokens/s", "to the end")
    for head in (*heads, "memory", "disk"):
        is_text = head in ("", "Cluster", "strategy")
        table.add_column(head, justify="left" if is_text else "right", no_wrap=True)
    for cluster in clusters:
        own, speed, name = cluster.own, cluster.speed, cluster.job.machines.name
        if own.refused:
            table.add_row("refused", name, name_of(own.strategy))
            continue
        memory = max(s.needed_bytes for s in cluster.stores if s.what == "main memory")
        left = speed.left_s if speed is not None else None
        table.add_row(
            _mark(own.fits),
            name,
            name_of(own.strategy),
            gib(own.tightest.peak_bytes),
            gib(own.tightest.limit_bytes),
            seconds_text(speed.step_s) if speed is not None else "?",
            format_count(speed.tokens_per_s) if speed is not None else "?",
            "?" if left is None else format_duration(left),
            format_bytes(memory),
            format_bytes(cluster.stores[-1].needed_bytes),
        )
    return table


def _mark(fits: bool | None) -> Text:
    text = {True: "fits", False: "no", None: "?"}[fits]
    return Text(text, style={True: "green", False: "red", None: "yellow"}[fits])


def gib(size_bytes: float | None) -> str:
    if size_bytes is None:
        return "?"
    value = size_bytes / _GIB
    return "-" if size_bytes == 0 else f"{value:.2f}" if abs(value) < 1 else f"{value:.1f}"


def _amount(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def seconds_text(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:.0f}"
    return f"{seconds:.3g}" if seconds >= 0.0005 else "0"


def memory_table(own: Outcome) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    heads = ("GiB", "GPU", "rows", "total", *_LABELS, "peak", "limit", "left", "by")
    for head in heads:
        is_text = head in ("GiB", "GPU", "by")
        table.add_column(head, justify="left" if is_text else "right", no_wrap=True)
    for ranks in folded(own.ranks):
        first = ranks[0]
        causes = first.memory.peak.by_cause()
        limit = first.limit_bytes
        margin = None if limit is None else limit - first.peak_bytes
        style = {True: "green", False: "red", None: "yellow"}[first.fits]
        total, free = gib(first.device.memory_bytes), first.device.free_bytes
        table.add_row(
            _ranks_text(own.ranks, ranks),
            _short(first.device.name),
            f"{first.rows}/{first.micro_batch}",
            total if free is None else f"{total}/{gib(free)}",
            *(gib(causes[cause]) for cause in _CAUSES),
            Text(gib(first.peak_bytes), style="bold"),
            gib(limit),
            Text(gib(margin), style=style),
            _KNOWN_BY.get(first.device.confidence, "?"),
        )
    return table


def _short(name: str) -> str:
    return name if len(name) <= 17 else f"{name[:16]}…"


def folded(ranks: Sequence[RankPlan]) -> list[list[RankPlan]]:
    def key(rank: RankPlan) -> tuple[object, ...]:
        free = rank.device.free_bytes
        return (rank.device.name, free, rank.rows, rank.micro_batch, rank.peak_bytes)

    return [list(group) for _, group in groupby(ranks, key)]


def _ranks_text(all_ranks: Sequence[RankPlan], ranks: Sequence[RankPlan]) -> str:
    first = next(number for number, rank in enumerate(all_ranks) if rank is ranks[0])
    hosts = list(dict.fromkeys(rank.host for rank in ranks))
    numbers = f"{first}" if len(ranks) == 1 else f"{first}-{first + len(ranks) - 1}"
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    return f"{numbers} {_short(where)}"


def peak_line(own: Outcome) -> Text:
    tightest = own.tightest
    text = f"Peak: {tightest.memory.peak.name}. "
    if tightest.device.is_cuda:
        text += "The limit is 85 % of a card; the rest is for CUDA and NCCL "
        text += f"({gib(tightest.context_bytes)} GiB, guess) and fragmentation"
    else:
        text += "The limit is 85 % of main memory"
    free = tightest.device.free_bytes
    if free is not None and tightest.limit_bytes is not None:
        text += f"; {gib(free)} GiB are free now"
    return Text(f"{text}.", style="dim")


def moments_table(rank: RankPlan) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("GiB at each moment of the tightest rank")
    for head in (*_LABELS, "sum"):
        table.add_column(head, justify="right")
    for moment in rank.memory.moments:
        causes = moment.by_cause()
        table.add_row(moment.name, *(gib(causes[c]) for c in _CAUSES), gib(moment.total))
    return table


def stores_table(cluster: ClusterPlan, details: bool) -> Table:
    rows = []
    needs = [(store.what, store.needed_bytes, store.has_bytes) for store in cluster.stores]
    for number, store in enumerate(cluster.stores):
        alike = needs.count(needs[number])
        if needs[number] in needs[:number] and not details:
            continue
        parts = [
            f"{item.name} {format_bytes(item.size_bytes)}{' (guess)' * item.is_guess}"
            for item in store.items
        ]
        text = f"{format_bytes(store.needed_bytes)}: {', '.join(parts)}"
        if store.has_bytes is not None:
            short = store.has_bytes < store.needed_bytes
            text += f"; {format_bytes(store.has_bytes)} there{', TOO LITTLE' * short}"
        name = store.what.capitalize()
        if store.what == "main memory" and len(cluster.job.machines.hosts) > 1:
            name += f", each of {alike}" if alike > 1 and not details else f", {store.host}"
        rows.append((name, text))
    return facts(rows)


def ladder(cluster: ClusterPlan, details: bool) -> Iterator[RenderableType]:
    rungs = list(cluster.ladder)
    own = cluster.own.fits
    if own is True and not details:
        yield Text("Ladder: it fits as written; --details shows what would save more.")
        return
    first = next((number for number, rung in enumerate(rungs) if rung.is_first), None)
    if first is not None and not details:
        rungs = rungs[: first + 1 + _AFTER]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for head in ("", "Ladder (micro-batch of 1)", "peak", "limit", "s/step", "price"):
        is_text = head in ("", "price") or head.startswith("Ladder")
        table.add_column(head, justify="left" if is_text else "right", no_wrap=head != "price")
    for rung in rungs:
        table.add_row(*_rung_cells(rung))
    yield table
    if first is not None and own is False:
        yield from _faster(cluster, rungs, first)
    if own is False and first is None:
        yield Text("Nothing on the ladder fits: a smaller model, or more or larger cards.")


def _faster(cluster: ClusterPlan, rungs: Sequence[Rung], first: int) -> Iterator[Text]:
    # A later rung may cost less time, though it changes more.
    def seconds(rung: Rung) -> float:
        return rung.outcome.time.total_s if rung.outcome.time else math.inf

    fitting = [rung for rung in cluster.ladder if rung.outcome.fits and rung.price != SHORTER]
    best = min(fitting, key=seconds, default=rungs[first])
    if seconds(best) < seconds(rungs[first]) / 2:
        text = f"Faster, of those that fit: {best.name}, {seconds_text(seconds(best))} s a step: "
        yield Text(text + " ".join(typed(changed(best.changes))))


def _rung_cells(rung: Rung) -> tuple[str | Text, ...]:
    tightest = rung.outcome.tightest
    mark = {True: "fits", False: "no", None: "?"}[rung.outcome.fits]
    mark = "-> fits" if rung.is_first else f"   {mark}"
    time = rung.outcome.time
    return (
        Text(mark, style="bold green" if rung.is_first else ""),
        rung.name,
        gib(tightest.least.peak.total),
        gib(tightest.limit_bytes),
        seconds_text(time.total_s) if time else "?",
        rung.price,
    )


def strategies_table(candidates: Sequence[Candidate], details: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for head in ("", "Strategy", "peak", "limit", "s/step", "sent/step", " "):
        is_text = head in ("", " ", "Strategy")
        table.add_column(head, justify="left" if is_text else "right", no_wrap=head != " ")
    for each in candidates:
        found = each.outcome
        if found.refused:
            if details:
                table.add_row("   refused", each.name, "", "", "", "", Text(found.refused))
            continue
        mark = {True: "fits", False: "no", None: "?"}[found.fits]
        tightest = found.tightest
        table.add_row(
            f"-> {mark}" if each.is_chosen else f"   {mark}",
            each.name,
            gib(tightest.least.peak.total),
            gib(tightest.limit_bytes),
            seconds_text(found.time.total_s) if found.time else "?",
            format_bytes(found.time.sent_bytes) if found.time else "?",
            Text("" if each.is_chosen else each.note),
        )
    return table


def time_rows(plan: Plan, cluster: ClusterPlan) -> Iterator[tuple[str, str]]:
    time, speed = cluster.own.time, cluster.speed
    if time is None:
        yield "Time", "not known: the speed of a card is not in the table"
    else:
        parts = {
            "compute": time.compute_s,
            "optimizer": time.optimizer_s,
            "exposed communication": time.exposed_s,
            "idle by imbalance": time.idle_s,
            "pipeline bubble": time.bubble_s,
        }
        shown = {name: own for name, own in parts.items() if own or "b" not in name}
        texts = [f"{name} {seconds_text(own)}" for name, own in shown.items()]
        yield "Time", f"{seconds_text(time.total_s)} s a step: {', '.join(texts)} (guess)"
    if speed is None:
        return
    if speed.measured is not None:
        yield "Measured", _measured_text(cluster, speed.measured)
    text = f"{format_count(speed.tokens_per_s)} tokens/s"
    text += f", MFU {speed.mfu:.1%}" if speed.mfu is not None else ", MFU unknown"
    if speed.left_s is not None:
        text += f", {format_duration(speed.left_s)} for {plan.data.steps} steps"
    elif plan.config.training.max_time is None:
        text += "; how many steps is known when the data is prepared"
    yield "", text
    if time is not None:
        yield from _balance_rows(cluster, speed, time)
        yield from _link_rows(time, cluster.job)
    gains = [f"{name} x{gain:.2f}" for name, gain in speed.gains.items()]
    if gains:
        yield "Gains", f"{', '.join(gains)} (guess)"
    if (found := cost(plan, cluster)) is not None:
        text = f"{_amount(found['gpu_hours'])} GPU hours"
        if "kwh" in found:
            text += f", {_amount(found['kwh'])} kWh at the cards' limit of {speed.watts:.0f} W"
        if "money" in found:
            text += f", {_amount(found['money'])} at the given price"
        yield "Energy", text


def _measured_text(cluster: ClusterPlan, measured: Measured) -> str:
    when = datetime.fromtimestamp(measured.at).strftime("%Y-%m-%d")
    text = f"{seconds_text(measured.step_s)} s a step of {measured.rows} sequences in run "
    text += f"{measured.run}, steps {measured.first_step} to {measured.last_step}, {when}"
    if measured.memory_bytes is not None:
        text += f"; {format_bytes(measured.memory_bytes)} at most"
        rank = cluster.own.tightest
        if rank.device.is_cuda:
            return f"{text} on a card, {format_bytes(rank.peak_bytes)} counted here"
        return f"{text} of a process"
    return text


def _balance_rows(cluster: ClusterPlan, speed: Speed, time: StepTime) -> Iterator[tuple[str, str]]:
    rows = [str(ranks[0].rows) for ranks in folded(cluster.own.ranks)]
    if speed.even_s is not None and len(rows) > 1:
        text = f"rows {' + '.join(rows)}: x{speed.even_s / time.total_s:.2f} of even rows"
        if speed.alone_s is not None:
            text += f", x{speed.alone_s / time.total_s:.2f} of the {speed.fastest} alone"
        else:
            text += f"; on the {speed.fastest} alone it does not fit"
        yield "Balance", text
    elif speed.alone_s is not None:
        yield "Scaling", f"x{speed.alone_s / time.total_s:.2f} of one {speed.fastest} alone"


def _link_rows(time: StepTime, job: Job) -> Iterator[tuple[str, str]]:
    network = job.machines.network
    if time.line_bytes:
        text = f"each host sends {format_bytes(time.line_bytes)} a step to the next: "
        text += f"{seconds_text(time.line_s)} s at {network.name} ({network.confidence}), of which "
        yield "Links", f"{text}{seconds_text(time.exposed_s)} s are not hidden"
        if time.exposed_s > time.total_s / 2:
            less = "outer steps between the machines (outer: {kind: diloco})"
            if job.config.adapter.type == "none" and job.config.model.init == "pretrained":
                less = f"an adapter, or {less},"
            yield "", f"most of a step is the network: {less} would send less"
