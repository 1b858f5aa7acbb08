"""A plan as text of at most 100 columns: one screen, or all of it with `details`."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import groupby

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from isles.config.length import guessed_issues
from isles.config.roofline import ASSUMPTIONS
from isles.facts.console import Console
from isles.facts.units import format_bytes, format_count, format_duration
from isles.plan.apply import changed, typed
from isles.plan.links import OuterPlan
from isles.plan.machines import summary
from isles.plan.measured import Measured
from isles.plan.outcome import Outcome, RankPlan, StepTime
from isles.plan.report import ClusterPlan, Plan, Price, Speed, cost
from isles.plan.step import Job
from isles.plan.ways import SHORTER, Candidate, Rung, name_of, offload_rows, stage_rows

_WIDTH = 100
_GIB = 2**30
_CAUSES = ("weights", "gradients", "optimizer", "activations", "logits", "gathered")
_LABELS = ("weight", "grad", "optim", "activ", "logit", "gather")
_KNOWN_BY = {"measured": "here", "given": "given", "table": "table", "guess": "guess"}
_AFTER = 2
"""Number of options to show after the first that fits."""


def text_of(plan: Plan, *, details: bool, is_terminal: bool, width: int) -> str:
    """The plan as text for people, with colors as ANSI codes. Names from outside are escaped."""
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=min(width, _WIDTH),
        force_terminal=is_terminal,
        no_color=not is_terminal,
    )
    for part in _parts(plan, details):
        console.print(part)
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    return "\n".join(lines).rstrip()


def _parts(plan: Plan, details: bool) -> Iterator[RenderableType]:
    yield _head(plan)
    yield _facts(list(_model_rows(plan)))
    is_several = len(plan.clusters) > 1
    if is_several:
        yield ""
        yield _clusters_table(plan.clusters)
    for cluster in plan.clusters:
        if is_several and cluster.own.fits is not False and not details:
            continue
        yield ""
        if is_several:
            yield Text(f"=== cluster {cluster.job.machines.name} ===", style="bold")
        yield from _cluster(plan, cluster, details)
    if plan.outer is not None:
        yield ""
        yield from _outer(plan.outer)
    if plan.clusters:
        yield ""
        for line in ASSUMPTIONS if details else ():
            yield Text(f"guess: {line}", style="dim")
        if not details:
            every = "cluster, option and strategy" if is_several else "phase, option and strategy"
            measured = [c for c in plan.clusters if c.speed is not None and c.speed.measured]
            text = "Times are guesses from table speeds; --details prints their rules, and"
            if measured and is_several:
                names = ", ".join(cluster.job.machines.name for cluster in measured)
                yield Text(f"Times of {names} are measured in earlier runs.", style="dim")
                text = text.replace("Times are", "Other times are")
            elif measured:
                text = text.replace("Times are", "Times that are not measured are")
            yield Text(f"{text} shows every {every}.", style="dim")


def _head(plan: Plan) -> Text:
    answers = {True: "fits", False: "does NOT fit as written", None: "whether it fits is not known"}
    text = f"{plan.loaded.path}: "
    if plan.model is None:
        return Text(f"{text}the model's size is not known", style="bold red")
    if any(cluster.own.refused for cluster in plan.clusters):
        return Text(f"{text}isles refuses it on these machines", style="bold red")
    style = {True: "bold green", False: "bold red", None: "bold yellow"}[plan.fits]
    head = Text(text + answers[plan.fits], style=style)
    fits = [cluster.first_fit for cluster in plan.clusters if cluster.own.fits is False]
    if plan.fits is False and any(fits):
        names = dict.fromkeys(rung.name for rung in fits if rung is not None)
        head.append(f"; first that fits: {', '.join(names)}", style="default")
    for store in (store for cluster in plan.clusters for store in cluster.stores):
        if store.has_bytes is not None and store.has_bytes < store.needed_bytes:
            head.append(f"; not enough {store.what} on {store.host}", style="bold red")
    return head


def _model_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    config, model = plan.config, plan.model
    if model is not None:
        text = f"{model.name}: {format_count(model.params)} parameters"
        is_whole = model.trained == model.params
        text += ", all trained" if is_whole else f", {format_count(model.trained)} trained"
        if model.active != model.params:
            text += f", {format_count(model.active)} active"
        yield "Model", f"{text}; {model.layers} layers; {model.origin}"
        if model.is_guess:
            yield "", f"GUESS: the kind {model.kind!r} is unknown, and is counted as a Llama"
        if model.files_params is not None and abs(model.files_params / model.params - 1) > 0.01:
            yield "", f"its safetensors files hold {format_count(model.files_params)} numbers"
    rows = config.training.global_batch_size
    words = "pairs of 2" if config.training.method == "dpo" else "sequences of"
    times = " x" if config.training.method == "dpo" else ""
    text = f"{format_count(plan.tokens_per_step)} tokens: {rows} {words}{times} "
    text += f"{config.data.seq_length}"
    if model is not None:
        text += f"; {model.flops_per_token / 1e9:.3g} GFLOPs per token"
    if plan.data.steps is not None:
        text += f"; {plan.data.steps} steps{' (a guess from the files)' * plan.data.is_guess}"
    yield "A step", text
    for issue in guessed_issues(config, plan.data):
        yield "", f"guess: {issue.what}; {issue.fix}"
    for machines in plan.machines:
        name = "Machines" if len(plan.machines) == 1 else machines.name
        yield name, summary(machines)
        for note in machines.notes:
            yield "", note


def _cluster(plan: Plan, cluster: ClusterPlan, details: bool) -> Iterator[RenderableType]:
    own = cluster.own
    if own.refused:
        text = f"{name_of(own.strategy)} is refused: {plan.refusal(cluster)}"
        yield Text(text, style="red")
        return
    yield _memory_table(own)
    yield _peak_line(own)
    if details:
        yield _moments_table(own.tightest)
    yield _stores_table(cluster, details)
    yield ""
    yield from _ladder(cluster, details)
    yield ""
    yield _strategies_table(cluster.strategies, details)
    if note := cluster.strategies[0].note:
        yield Text(f"{note[0].upper()}{note[1:]}.", style="dim")
    yield ""
    yield _facts(list(_time_rows(plan, cluster)))


def _outer(outer: OuterPlan) -> Iterator[RenderableType]:
    text = f"{format_count(outer.trained)} numbers in {outer.codec}, every "
    rows = [("Averaging", f"{text}{outer.sync_every or '?'} steps")]
    for line in outer.lines:
        text = f"sends {format_bytes(line.sent_bytes)}, fetches "
        text += f"{format_bytes(line.fetched_bytes)}: {format_duration(line.seconds)} at "
        text += f"{line.line.name} ({line.line.confidence})"
        if line.steps_s is not None:
            text += f", after {format_duration(line.steps_s)} of steps"
        rows.append((f"  {line.cluster}", text))
    text = f"in {format_bytes(outer.hub_in_bytes)}, out {format_bytes(outer.hub_out_bytes)}: "
    text += f"{format_duration(outer.hub_s)} at {outer.hub.name} ({outer.hub.confidence})"
    rows.append(("  the hub", text))
    if outer.overhead is not None:
        text = f"{outer.overhead:.1%} of the time"
        if outer.overhead > outer.max_overhead:
            text += f"; at most {outer.max_overhead:.0%} with sync_every: "
            text += f"{outer.least_sync_every} or more"
        rows.append(("  sync", text))
    if outer.waits and (slowest := outer.slowest_s):
        idle = {line.cluster: 1 - (line.steps_s or slowest) / slowest for line in outer.lines}
        waiting = [f"{name} {share:.0%}" for name, share in idle.items() if share > 0.1]
        if waiting:
            text = f"for the slowest cluster: {', '.join(waiting)} of the time; "
            rows.append(("  waiting", f"{text}outer.wait: {{time_boxed: 60s}} limits it"))
    yield _facts(rows)


def _facts(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, Text(text))
    return table


def _table_of(texts: Sequence[str], *heads: str, wraps: str | None = None) -> Table:
    """An empty table. Columns of numbers are aligned to the right, and one column may wrap."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for head in heads:
        is_text = head in texts
        table.add_column(head, justify="left" if is_text else "right", no_wrap=head != wraps)
    return table


def _clusters_table(clusters: Sequence[ClusterPlan]) -> Table:
    """A row for each cluster: its tightest rank, its speed, its main memory and its disk."""
    texts = ("", "Cluster", "strategy")
    heads = ("peak", "limit", "s/step", "tokens/s", "to the end", "memory", "disk")
    table = _table_of(texts, *texts, *heads)
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
            _gib(own.tightest.peak_bytes),
            _gib(own.tightest.limit_bytes),
            _seconds_text(speed.step_s) if speed is not None else "?",
            format_count(speed.tokens_per_s) if speed is not None else "?",
            "?" if left is None else format_duration(left),
            format_bytes(memory),
            format_bytes(cluster.stores[-1].needed_bytes),
        )
    return table


def _mark(fits: bool | None) -> Text:
    text = {True: "fits", False: "no", None: "?"}[fits]
    return Text(text, style={True: "green", False: "red", None: "yellow"}[fits])


def _gib(size_bytes: float | None) -> str:
    if size_bytes is None:
        return "?"
    value = size_bytes / _GIB
    return "-" if size_bytes == 0 else f"{value:.2f}" if abs(value) < 1 else f"{value:.1f}"


def _amount(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _seconds_text(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:.0f}"
    return f"{seconds:.3g}" if seconds >= 0.0005 else "0"


def _memory_table(own: Outcome) -> Table:
    heads = ("GiB", "GPU", "rows", "total", *_LABELS, "peak", "limit", "left", "by")
    table = _table_of(("GiB", "GPU", "by"), *heads)
    for ranks in _folded(own.ranks):
        first = ranks[0]
        causes = first.memory.peak.by_cause()
        limit = first.limit_bytes
        margin = None if limit is None else limit - first.peak_bytes
        style = {True: "green", False: "red", None: "yellow"}[first.fits]
        total, free = _gib(first.device.memory_bytes), first.device.free_bytes
        table.add_row(
            _ranks_text(own.ranks, ranks),
            _short(first.device.name),
            f"{first.rows}/{first.micro_batch}",
            total if free is None else f"{total}/{_gib(free)}",
            *(_gib(causes[cause]) for cause in _CAUSES),
            Text(_gib(first.peak_bytes), style="bold"),
            _gib(limit),
            Text(_gib(margin), style=style),
            _KNOWN_BY.get(first.device.confidence, "?"),
        )
    return table


def _short(name: str) -> str:
    return name if len(name) <= 17 else f"{name[:16]}…"


def _folded(ranks: Sequence[RankPlan]) -> list[list[RankPlan]]:
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


def _peak_line(own: Outcome) -> Text:
    tightest = own.tightest
    text = f"Peak: {tightest.memory.peak.name}. "
    if tightest.device.is_cuda:
        text += "The limit is 85 % of a GPU; the rest is for CUDA and NCCL "
        text += f"({_gib(tightest.context_bytes)} GiB, guess) and fragmentation"
    else:
        text += "The limit is 85 % of main memory"
    free = tightest.device.free_bytes
    if free is not None and tightest.limit_bytes is not None:
        text += f"; {_gib(free)} GiB are free now"
    return Text(f"{text}.", style="dim")


def _moments_table(rank: RankPlan) -> Table:
    first = "GiB in each phase of the tightest rank"
    table = _table_of((first,), first, *_LABELS, "sum", wraps=first)
    for moment in rank.memory.moments:
        causes = moment.by_cause()
        table.add_row(moment.name, *(_gib(causes[c]) for c in _CAUSES), _gib(moment.total))
    return table


def _stores_table(cluster: ClusterPlan, details: bool) -> Table:
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
            text += f"; {format_bytes(store.has_bytes)} free{', NOT ENOUGH' * short}"
        name = store.what.capitalize()
        if store.what == "main memory" and len(cluster.job.machines.hosts) > 1:
            name += f", each of {alike}" if alike > 1 and not details else f", {store.host}"
        rows.append((name, text))
    return _facts(rows)


def _ladder(cluster: ClusterPlan, details: bool) -> Iterator[RenderableType]:
    rungs = list(cluster.ladder)
    own = cluster.own.fits
    if own is True and not details:
        yield Text("Memory-saving options: not needed, the run fits. --details lists them.")
        return
    first = next((number for number, rung in enumerate(rungs) if rung.is_first), None)
    if first is not None and not details:
        rungs = rungs[: first + 1 + _AFTER]
    name = "Option (micro-batch of 1)"
    heads = ("", name, "peak", "limit", "s/step", "drawback")
    table = _table_of(("", name, "drawback"), *heads, wraps="drawback")
    for rung in rungs:
        table.add_row(*_rung_cells(rung))
    yield table
    if first is not None and own is False:
        yield from _faster(cluster, rungs, first)
    if own is False and first is None:
        yield Text("No option fits. Use a smaller model, or more or larger GPUs.")


def _faster(cluster: ClusterPlan, rungs: Sequence[Rung], first: int) -> Iterator[Text]:
    # A later option may be faster, although it changes more.
    def seconds(rung: Rung) -> float:
        return rung.outcome.time.total_s if rung.outcome.time else math.inf

    fitting = [rung for rung in cluster.ladder if rung.outcome.fits and rung.price != SHORTER]
    best = min(fitting, key=seconds, default=rungs[first])
    if seconds(best) < seconds(rungs[first]) / 2:
        text = f"Fastest option that fits: {best.name}, {_seconds_text(seconds(best))} s per step: "
        yield Text(text + " ".join(typed(changed(best.changes))))


def _rung_cells(rung: Rung) -> tuple[str | Text, ...]:
    tightest = rung.outcome.tightest
    mark = {True: "fits", False: "no", None: "?"}[rung.outcome.fits]
    mark = "-> fits" if rung.is_first else f"   {mark}"
    time = rung.outcome.time
    return (
        Text(mark, style="bold green" if rung.is_first else ""),
        rung.name,
        _gib(tightest.least.peak.total),
        _gib(tightest.limit_bytes),
        _seconds_text(time.total_s) if time else "?",
        rung.price,
    )


def _strategies_table(candidates: Sequence[Candidate], details: bool) -> Table:
    heads = ("", "Strategy", "peak", "limit", "s/step", "sent/step", " ")
    table = _table_of(("", "Strategy", " "), *heads, wraps=" ")
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
            _gib(tightest.least.peak.total),
            _gib(tightest.limit_bytes),
            _seconds_text(found.time.total_s) if found.time else "?",
            format_bytes(found.time.sent_bytes) if found.time else "?",
            Text("" if each.is_chosen else each.note),
        )
    return table


def _time_rows(plan: Plan, cluster: ClusterPlan) -> Iterator[tuple[str, str]]:  # a row each
    time, speed = cluster.own.time, cluster.speed
    if time is None:
        yield "Time", "unknown: the speed of a GPU is not in the table"
    else:
        parts = {
            "compute": time.compute_s,
            "optimizer": time.optimizer_s,
            "exposed communication": time.exposed_s,
            "idle by imbalance": time.idle_s,
            "pipeline bubble": time.bubble_s,
        }
        shown = {name: own for name, own in parts.items() if own or "b" not in name}
        texts = [f"{name} {_seconds_text(own)}" for name, own in shown.items()]
        yield "Time", f"{_seconds_text(time.total_s)} s per step: {', '.join(texts)} (guess)"
    if speed is None:
        return
    if speed.measured is not None:
        yield "Measured", _measured_text(cluster, speed.measured)
    text = f"{format_count(speed.tokens_per_s)} tokens/s"
    text += f", MFU {speed.mfu:.1%}" if speed.mfu is not None else ", MFU unknown"
    if speed.left_s is not None:
        text += f", {format_duration(speed.left_s)} for {plan.data.steps} steps"
    elif plan.config.training.max_time is None:
        text += "; the number of steps is known after the data is prepared"
    yield "", text
    if time is not None:
        yield from stage_rows(cluster.own)
        yield from offload_rows(cluster.own, cluster.job.model.layers)
        yield from _balance_rows(cluster, speed, time)
        yield from _link_rows(time, cluster.job)
    gains = [f"{name} x{gain:.2f}" for name, gain in speed.gains.items()]
    if gains:
        yield "Gains", f"{', '.join(gains)} (guess)"
    if (found := cost(plan, cluster)) is not None:
        text = f"{_amount(found['gpu_hours'])} GPU hours"
        if "kwh" in found:
            text += f", {_amount(found['kwh'])} kWh at the GPUs' power limit of {speed.watts:.0f} W"
        if "money" in found:
            text += f", {_amount(found['money'])} at the given price"
        yield "Energy", text
    elif plan.price != Price():
        steps = "the number of steps is unknown (training.max_steps)"
        yield "Energy", f"no price: {steps if speed.left_s is None else 'the ranks are on CPUs'}"


def _measured_text(cluster: ClusterPlan, measured: Measured) -> str:
    when = datetime.fromtimestamp(measured.at).strftime("%Y-%m-%d")
    text = f"{_seconds_text(measured.step_s)} s per step of {measured.rows} sequences in run "
    text += f"{measured.run}, steps {measured.first_step} to {measured.last_step}, {when}"
    if measured.memory_bytes is not None:
        text += f"; {format_bytes(measured.memory_bytes)} at most"
        rank = cluster.own.tightest
        if rank.device.is_cuda:
            counted = format_bytes(rank.peak_bytes)
            return f"{text} on a GPU (counted: {counted}), so it fits"
        return f"{text} per process"
    return text


def _balance_rows(cluster: ClusterPlan, speed: Speed, time: StepTime) -> Iterator[tuple[str, str]]:
    rows = [str(ranks[0].rows) for ranks in _folded(cluster.own.ranks)]
    single, layout = f"the run does not fit the {speed.fastest} alone", cluster.own.layout
    if speed.alone_s is not None:
        single = f"x{speed.alone_s / time.total_s:.2f} over the {speed.fastest} alone"
    if speed.even_s is not None and len(rows) > 1:
        if layout is not None and layout.dp_size == 1:  # all ranks read the same rows
            yield "Scaling", single
            return
        text = f"rows {' + '.join(rows)}: x{speed.even_s / time.total_s:.2f} over even rows"
        yield "Balance", f"{text}{'; ' if speed.alone_s is None else ', '}{single}"
    elif speed.alone_s is not None:
        yield "Scaling", f"x{speed.alone_s / time.total_s:.2f} over one {speed.fastest} alone"


def _link_rows(time: StepTime, job: Job) -> Iterator[tuple[str, str]]:
    network = job.machines.network
    if time.line_bytes:
        text = f"each host sends {format_bytes(time.line_bytes)} per step to the next: "
        text += f"{_seconds_text(time.line_s)} s at {network.name} ({network.confidence}), "
        yield "Links", f"{text}{_seconds_text(time.exposed_s)} s of it without overlap"
        if time.exposed_s > time.total_s / 2:
            less = "outer steps between hosts (outer: {kind: diloco})"
            if job.config.adapter.type == "none" and job.config.model.init == "pretrained":
                less = f"an adapter, or {less},"
            yield "", f"the network takes most of a step: {less} would send less"
