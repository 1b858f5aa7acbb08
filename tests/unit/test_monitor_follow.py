"""Following a run: its progress, its end, and its logs."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path

from isles.facts.console import Console
from isles.monitor.follow import RunFollower, progress_text
from isles.monitor.logs import LineTail, LogChoice, log_lines
from isles.monitor.stop import Signals, wait_for_end
from tests.deadline import DEADLINE_S
from tests.runs import Agent, bare_run, running_agent

ROW = {"kind": "train", "step": 10, "loss": 5.25, "learning_rate": 0.003, "tokens_per_second": 1234}
AVERAGE = {"kind": "outer", "step": 10, "outer_step": 3, "weights": {"a": 9, "b": 7}}


def script(*steps: Callable[[], object]) -> Callable[[float], None]:
    """A pause that does the next step instead of waiting, and nothing after the last."""
    left = list(steps)

    def pause(_: float) -> None:
        if left:
            left.pop(0)()

    return pause


def follow(agent: Agent, *steps: Callable[[], object]) -> str:
    """What is printed of the agent's run, with a step between two looks, and then its end."""
    out = io.StringIO()
    console = Console(file=out, width=200)
    follower = RunFollower(agent.run_dir, agent.attempt, console, Console(file=io.StringIO()))
    follower.follow(Signals(), pause=script(*steps, lambda: end(agent)))
    return out.getvalue()


def end(agent: Agent) -> None:
    agent.order("outcome", state="finished", exit_code=0, step=60, reason="", error=None)
    agent.order("exit", code=0)
    assert wait_for_end(agent.process, DEADLINE_S)


def test_plain_lines_for_phases_rows_and_saves(tmp_path: Path) -> None:
    running = {"phase": "training", "step": 10, "total_steps": 60, "loss": 5.25, "eta_s": 65.0}
    bytes_and_seconds = {"sent_bytes": 2048, "received_bytes": 0, "exposed_s": 1.25}
    run_dir, cut = bare_run(tmp_path / "a-1"), tmp_path / "cut"
    # Of an earlier attempt, which is not shown again. The next one cuts the rows after its
    # checkpoint: another file comes in the place of the first.
    run_dir.metrics.write_text('{"kind": "train", "step": 1, "loss": 9.0, "at": 5.0}\n')
    cut.touch()
    with running_agent(run_dir) as agent:
        text = follow(
            agent,
            lambda: agent.order("status", phase="preparing data", detail="tokens 1.2M"),
            lambda: agent.order("status", **running),
            lambda: cut.replace(run_dir.metrics),
            lambda: agent.order("row", **ROW),
            lambda: agent.order("status", **{**running, "phase": "evaluating"}),
            lambda: agent.order("row", kind="eval", step=10, loss=5.0, perplexity=148.41),
            lambda: agent.order("row", **AVERAGE, **bytes_and_seconds, mode="late"),
            lambda: agent.order("status", **running, checkpoint_step=10, checkpoint_at=9e9),
            lambda: agent.order("row", **{**ROW, "step": 20, "loss": None}),
        )
    assert text.splitlines()[:8] == [
        "starting",
        "preparing data: tokens 1.2M",
        "step 10/60  loss 5.2500  lr 3.00e-03  1.2k tokens/s  1m 05s left",
        "step 10  eval loss 5.0000  perplexity 148.41",
        "step 10  averaged outer step 3 of a 56%, b 44%  without this cluster  2.0 KiB up  "
        "waited 1.2s",
        "checkpoint of step 10 saved",
        "step 20/60  loss not finite  lr 3.00e-03  1.2k tokens/s  1m 05s left",
        "a-1 is finished",
    ]


def test_the_bars_text_drops_the_least_important_first() -> None:
    status = {"step": 30, "total_steps": 60, "loss": 4.5, "eta_s": 65.0, "tokens_per_second": 5e3}
    assert progress_text(status, 80) == "30/60  loss 4.5000  1m 05s left  5.0k tok/s"
    assert progress_text(status, 36) == "30/60  loss 4.5000  1m 05s left"
    assert progress_text(status, 3) == "30/60"
    assert progress_text({"step": 0, "detail": "compiling"}, 80) == "compiling"


def test_followed_logs_end_with_the_run(tmp_path: Path) -> None:
    run_dir = bare_run(tmp_path / "a-1")
    with running_agent(run_dir) as agent:
        choice = LogChoice(rank=0, last=0, follow=True)  # of what is there already
        texts = ("first\nsec", "ond\n", "no end")
        written = [partial(agent.order, "log", rank=0, text=text) for text in texts]
        pause = script(*written, lambda: end(agent))
        lines = log_lines(run_dir, agent.attempt, choice, pause=pause)
        assert list(lines) == ["first", "second", "no end"]


def test_the_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"a\nb\r\nc\n")
    for last, expected in ((None, "abc"), (0, ""), (2, "bc"), (9, "abc")):
        assert LineTail(path, last=last).read() == [*expected]
    path.write_text("".join(f"{number:09d}\n" for number in range(50_000)))
    tail = LineTail(path, last=10_000)
    lines = tail.read()
    assert (len(lines), lines[0], lines[-1]) == (10_000, "000040000", "000049999")
    with path.open("a") as stream:
        stream.write("x\n")
    assert tail.read() == ["x"]
