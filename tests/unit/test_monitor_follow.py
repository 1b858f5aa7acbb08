"""Following a run: its progress, its end, and its logs."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from isles.errors import UserError
from isles.monitor.follow import RunFollower, progress_text, row_text
from isles.monitor.logs import LineTail, LogChoice, choose_attempt, log_lines
from isles.monitor.outcome import finished_lines, report_outcome
from isles.monitor.stop import Signals, wait_for_end
from isles.run.records import write_record
from tests.deadline import DEADLINE_S
from tests.each import each
from tests.runs import Agent, bare_run, running_agent

ROW = {"kind": "train", "step": 10, "loss": 5.25, "learning_rate": 0.003, "tokens_per_second": 1234}


def script(*steps: Callable[[], object]) -> Callable[[float], None]:
    """A pause that does the next step instead of waiting, and nothing after the last."""
    left = list(steps)

    def pause(_: float) -> None:
        if left:
            left.pop(0)()

    return pause


def follow(agent: Agent, console: Console, *steps: Callable[[], object]) -> int:
    """Follow the agent's run, with a step between two looks."""
    follower = RunFollower(agent.run_dir, agent.attempt, console, Console(file=io.StringIO()))
    return follower.follow(Signals(), pause=script(*steps))


def end(agent: Agent, state: str = "finished") -> None:
    agent.order("outcome", state=state, exit_code=0, step=60, reason="", error=None)
    agent.order("exit", code=0)
    assert wait_for_end(agent.process, DEADLINE_S)


def test_plain_lines_for_phases_rows_and_saves(tmp_path: Path) -> None:
    run_dir = bare_run(tmp_path / "a-1")
    out = io.StringIO()
    with running_agent(run_dir) as agent:
        running = {"phase": "training", "step": 10, "total_steps": 60, "loss": 5.25, "eta_s": 65.0}
        follow(
            agent,
            Console(file=out, width=200),
            lambda: agent.order("status", phase="preparing data", detail="tokens 1.2M"),
            lambda: agent.order("status", **running),
            lambda: agent.order("row", **ROW),
            lambda: agent.order("status", **{**running, "phase": "evaluating"}),
            lambda: agent.order("row", kind="eval", step=10, loss=5.0, perplexity=148.41),
            lambda: agent.order("status", **running, checkpoint_step=10, checkpoint_at=9e9),
            lambda: agent.order("row", **{**ROW, "step": 20, "loss": None}),
            lambda: end(agent),
        )
    assert out.getvalue().splitlines()[:7] == [
        "starting",
        "preparing data: tokens 1.2M",
        "step 10/60  loss 5.2500  lr 3.00e-03  1.2k tokens/s  1m 05s left",
        "step 10  eval loss 5.0000  perplexity 148.41",
        "checkpoint of step 10 saved",
        "step 20/60  loss not finite  lr 3.00e-03  1.2k tokens/s  1m 05s left",
        "a-1 is finished",
    ]


def test_a_terminal_gets_a_bar_and_the_results(tmp_path: Path) -> None:
    run_dir = bare_run(tmp_path / "a-1")
    out = io.StringIO()
    with running_agent(run_dir) as agent:
        follow(
            agent,
            Console(file=out, width=120, force_terminal=True),
            lambda: agent.order("status", phase="building model", detail="llama-2m"),
            lambda: agent.order("row", kind="eval", step=10, loss=5.0, perplexity=148.41),
            lambda: end(agent),
        )
    assert "building model" in out.getvalue()
    assert "eval loss 5.0000" in out.getvalue()


def test_the_bars_text_drops_the_least_important_first() -> None:
    status = {"step": 30, "total_steps": 60, "loss": 4.5, "eta_s": 65.0, "tokens_per_second": 5e3}
    assert progress_text(status, 80) == "30/60  loss 4.5000  1m 05s left  5.0k tok/s"
    assert progress_text(status, 36) == "30/60  loss 4.5000  1m 05s left"
    assert progress_text(status, 3) == "30/60"
    assert progress_text({"step": 0, "detail": "compiling"}, 80) == "compiling"


def test_rows_of_earlier_attempts_are_not_shown_again(tmp_path: Path) -> None:
    run_dir = bare_run(tmp_path / "a-1")
    run_dir.metrics.write_text('{"kind": "train", "step": 1, "loss": 9.0, "at": 5.0}\n')
    out = io.StringIO()
    with running_agent(run_dir) as agent:

        def rewrite() -> None:
            # Resuming cuts the rows after the checkpoint: another file, shorter than before.
            run_dir.metrics.unlink()
            run_dir.metrics.write_text("")

        follow(
            agent,
            Console(file=out, width=200),
            rewrite,
            lambda: agent.order("row", **ROW),
            lambda: end(agent),
        )
    steps = [line for line in out.getvalue().splitlines() if line.startswith("step")]
    assert [line.split()[1] for line in steps] == ["10"]


def test_a_finished_run_is_summed_up(tmp_path: Path) -> None:
    run_dir = bare_run(tmp_path / "a-1")
    with running_agent(run_dir) as agent:
        end(agent)
        write_record(run_dir.summary, {"first_loss": 7.6, "last_loss": 3.2, "steps": 60})
        run_dir.model.mkdir()
        out = io.StringIO()
        console = Console(file=out, width=200)
        assert report_outcome(run_dir, agent.attempt, console, console) == 0
    text = out.getvalue()
    assert "7.6000 -> 3.2000" in text
    assert str(run_dir.model) in text
    assert str(run_dir.loss_plot) not in text, "only what is there"
    assert f'isles generate {run_dir.path} --prompt "Once"' in text, "it is not in ./runs"
    run_dir.tokenizer.mkdir()
    (run_dir.tokenizer / "chat_template.jinja").write_text("{{ messages }}")
    assert f'  isles generate {run_dir.path} --chat --prompt "Once"' in finished_lines(run_dir)


def test_logs_of_all_ranks_carry_their_rank(tmp_path: Path) -> None:
    run_dir = bare_run(tmp_path / "a-1")
    with running_agent(run_dir, world_size=2) as agent:
        agent.order("log", rank=0, text="a\nb\nc\n")
        agent.order("log", rank=1, text="d\nun")

        def shown(rank: int | None, last: int | None) -> list[str]:
            attempt = choose_attempt(run_dir, None)
            return list(log_lines(run_dir, attempt, LogChoice(rank=rank, last=last)))

        assert shown(None, 2) == [
            "[agent] agent is ready",
            "[rank 0] b",
            "[rank 0] c",
            "[rank 1] d",
            "[rank 1] un",
        ]
        assert shown(1, None) == ["d", "un"]
        assert shown(0, 0) == []
        with pytest.raises(UserError, match="the ranks there are: 0, 1"):
            shown(7, None)
        with pytest.raises(UserError, match="no attempt 5"):
            choose_attempt(run_dir, 5)


def test_followed_logs_end_with_the_run(tmp_path: Path) -> None:
    run_dir = bare_run(tmp_path / "a-1")
    with running_agent(run_dir) as agent:
        lines = log_lines(
            run_dir,
            agent.attempt,
            LogChoice(rank=0, last=5, follow=True),
            pause=script(
                lambda: agent.order("log", rank=0, text="first\nsec"),
                lambda: agent.order("log", rank=0, text="ond\n"),
                lambda: agent.order("log", rank=0, text="no end"),
                lambda: end(agent),
            ),
        )
        assert list(lines) == ["first", "second", "no end"]


@each(
    ("last", "expected"), [(None, ["a", "b", "c"]), (0, []), (2, ["b", "c"]), (9, ["a", "b", "c"])]
)
def test_the_last_lines(tmp_path: Path, last: int | None, expected: list[str]) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"a\nb\r\nc\n")
    assert LineTail(path, last=last).read() == expected


def test_the_last_lines_of_a_long_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"{number:09d}\n" for number in range(50_000)))
    tail = LineTail(path, last=10_000)
    lines = tail.read()
    assert (len(lines), lines[0], lines[-1]) == (10_000, "000040000", "000049999")
    with path.open("a") as stream:
        stream.write("x\n")
    assert tail.read() == ["x"]


def test_an_averaging_is_one_line() -> None:
    row = {
        "kind": "outer",
        "step": 500,
        "outer_step": 3,
        "weights": {"a": 9, "b": 7},
        "mode": "late",
    }
    row |= {"sent_bytes": 2048, "received_bytes": 0, "exposed_s": 1.25}
    assert row_text(row, {}) == (
        "step 500  averaged outer step 3 of a 56%, b 44%  without this cluster  2.0 KiB up  "
        "waited 1.2s"
    )
