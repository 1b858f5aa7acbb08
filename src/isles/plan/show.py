"""A plan as text: one screen of at most 100 columns, and with `details` all of it."""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.text import Text

from isles.facts.units import format_bytes, format_count, format_duration
from isles.plan.links import OuterPlan
from isles.plan.machines import summary
from isles.plan.report import ClusterPlan, Plan
from isles.plan.roofline import ASSUMPTIONS
from isles.plan.strategies import name_of
from isles.plan.tables import (
    clusters_table,
    facts,
    ladder,
    memory_table,
    moments_table,
    peak_line,
    stores_table,
    strategies_table,
    time_rows,
)

_WIDTH = 100


def text_of(plan: Plan, *, details: bool, is_terminal: bool, width: int) -> str:
    """The plan for people."""
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=min(width, _WIDTH),
        highlight=False,
        force_terminal=is_terminal,
        no_color=not is_terminal,
    )
    for part in _parts(plan, details):
        console.print(part, markup=False)
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    return "\n".join(lines).rstrip()


def _parts(plan: Plan, details: bool) -> Iterator[RenderableType]:
    yield _head(plan)
    yield facts(list(_model_rows(plan)))
    is_several = len(plan.clusters) > 1
    if is_several:
        yield ""
        yield clusters_table(plan.clusters)
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
            every = "cluster, rung and strategy" if is_several else "moment, rung and strategy"
            text = "Times are guesses by the cards' table speed; --details says by which rules, and"
            yield Text(f"{text} shows every {every}.", style="dim")


def _head(plan: Plan) -> Text:
    answers = {True: "fits", False: "does NOT fit as written", None: "whether it fits is not known"}
    text = f"{plan.loaded.path}: "
    if plan.model is None:
        return Text(f"{text}the model's size is not known", style="bold red")
    if any(cluster.own.refused for cluster in plan.clusters):
        return Text(f"{text}isles does not take it on these machines", style="bold red")
    style = {True: "bold green", False: "bold red", None: "bold yellow"}[plan.fits]
    head = Text(text + answers[plan.fits], style=style)
    fits = [cluster.first_fit for cluster in plan.clusters if cluster.own.fits is False]
    if plan.fits is False and any(fits):
        names = dict.fromkeys(rung.name for rung in fits if rung is not None)
        head.append(f"; first that fits: {', '.join(names)}", style="default")
    for store in (store for cluster in plan.clusters for store in cluster.stores):
        if store.has_bytes is not None and store.has_bytes < store.needed_bytes:
            head.append(f"; {store.what} of {store.host} is too little", style="bold red")
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
            yield "", f"GUESS: the kind {model.kind!r} is not known, and is counted as a Llama"
        if model.files_params is not None and abs(model.files_params / model.params - 1) > 0.01:
            yield "", f"its safetensors files hold {format_count(model.files_params)} numbers"
    rows = config.training.global_batch_size
    words = "pairs of 2" if config.training.method == "dpo" else "sequences of"
    times = " x" if config.training.method == "dpo" else ""
    text = f"{format_count(plan.tokens_per_step)} tokens: {rows} {words}{times} "
    text += f"{config.data.seq_length}"
    if model is not None:
        text += f"; {model.flops_per_token / 1e9:.3g} GFLOPs a token"
    if plan.data.steps is not None:
        text += f"; {plan.data.steps} steps{' (a guess by the files)' * plan.data.is_guess}"
    yield "A step", text
    for machines in plan.machines:
        name = "Machines" if len(plan.machines) == 1 else machines.name
        yield name, summary(machines)
        for note in machines.notes:
            yield "", note


def _cluster(plan: Plan, cluster: ClusterPlan, details: bool) -> Iterator[RenderableType]:
    own = cluster.own
    if own.refused:
        yield Text(f"{name_of(own.strategy)} is refused: {own.refused}", style="red")
        return
    yield memory_table(own)
    yield peak_line(own)
    if details:
        yield moments_table(own.tightest)
    yield stores_table(cluster, details)
    yield ""
    yield from ladder(cluster, details)
    yield ""
    yield strategies_table(cluster.strategies, details)
    if note := cluster.strategies[0].note:
        yield Text(f"{note[0].upper()}{note[1:]}.", style="dim")
    yield ""
    yield facts(list(time_rows(plan, cluster)))


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
        text = f"{outer.overhead:.1%} of the time as written; below {outer.max_overhead:.0%} from "
        text += f"sync_every: {outer.least_sync_every}"
        rows.append(("  sync", text))
    if outer.waits and (slowest := outer.slowest_s):
        idle = {line.cluster: 1 - (line.steps_s or slowest) / slowest for line in outer.lines}
        waiting = [f"{name} {share:.0%}" for name, share in idle.items() if share > 0.1]
        if waiting:
            text = f"for the slowest cluster, of the time: {', '.join(waiting)}; "
            rows.append(("  waiting", f"{text}outer.wait: {{time_boxed: 60s}} ends it"))
    yield facts(rows)
