"""What is made of the end of a script of the user's own."""

from __future__ import annotations

import signal
from pathlib import Path

from isles.agent.script.run import failed_record
from isles.run.paths import Attempt
from tests.each import each
from tests.ranks import rank_env

TRACEBACK = """\
sum 6
Traceback (most recent call last):
  File "/shared/mine.py", line 14, in <module>
    raise RuntimeError("no such shard")
RuntimeError: no such shard
terminate called after throwing an instance of 'std::system_error'
"""


@each(
    ("code", "log", "what"),
    [
        (1, TRACEBACK, "mine.py failed: RuntimeError: no such shard"),
        # torch takes the process down with it, as Python ends.
        (-signal.SIGABRT, TRACEBACK, "mine.py failed: RuntimeError: no such shard"),
        (-signal.SIGABRT, "sum 6\nterminate called\n", "rank 0 was killed by SIGABRT"),
        (-signal.SIGKILL, TRACEBACK, "rank 0 was killed by SIGKILL"),
        (3, "sum 6\n", "mine.py ended with exit code 3"),
    ],
)
def test_the_error_is_the_one_that_the_script_has_raised(
    tmp_path: Path, code: int, log: str, what: str
) -> None:
    attempt = Attempt(tmp_path, 1)
    attempt.rank_log(0).parent.mkdir(parents=True, exist_ok=True)
    attempt.rank_log(0).write_text(log)
    script, env = Path("/shared/mine.py"), rank_env(0, 1, tmp_path / "store")
    error = failed_record(attempt, env, script, code, log_start=0, took_s=5.0)
    assert error["what"] == what
    assert error["will_recur"] == (code > 0 or "failed" in what)
    assert ("mine.py:14" in error["where"]) == ("failed" in what)
    first = error["traceback"].splitlines()[0]
    assert first == (TRACEBACK if "failed" in what else log).splitlines()["failed" in what]


def test_the_errors_that_an_error_came_from_are_shown(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, 1)
    attempt.rank_log(0).parent.mkdir(parents=True, exist_ok=True)
    cause = "\nDuring handling of the above exception, another exception occurred:\n\n"
    one = TRACEBACK.partition("terminate")[0]
    attempt.rank_log(0).write_text(one + "trying again\n" + one + cause + one)
    script, env = Path("/shared/mine.py"), rank_env(0, 1, tmp_path / "store")
    trace = failed_record(attempt, env, script, 1, log_start=0, took_s=5.0)["traceback"]
    assert trace.startswith("Traceback") and trace.count("Traceback") == 2
