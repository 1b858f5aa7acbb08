"""`isles stop` of a run whose directory is on another machine, also where that one is gone."""

from __future__ import annotations

from collections.abc import Callable

from isles.errors import ExitCode, PreflightError, UserError, cut_more
from isles.launch.remote.passing import pass_on, remote_script
from isles.launch.ssh.shell import Shell, on_all
from isles.run.remote import RemoteRun
from isles.run.state import QUEUES

_CONNECT_S = 5.0
_END_S = 30.0


def stop_remote(run: RemoteRun, *, now: bool, timeout: str, say: Callable[[str], object]) -> int:
    """Stop a run where its directory is; with `now` also on hosts that have lost their head.

    Args:
        run: the run.
        now: end it without saving.
        timeout: longest wait, as it was typed.
        say: takes each line for the user.

    Returns:
        The exit code of the command.

    Raises:
        PreflightError: its machine cannot be reached.
    """
    words = ["stop", run.path, f"--timeout={timeout}", *(["--now"] if now else [])]
    try:
        return pass_on(run, words)
    except PreflightError as error:
        if run.launcher in QUEUES or len(run.hosts) < 2:
            raise
        if not now:
            raise PreflightError(
                error.what,
                where=error.where,
                fix=f"{error.fix}. If it is gone for good: the ranks on the other hosts end by "
                f"themselves, and `isles stop {run.typed} --now` ends them at once",
                id=error.id,
            ) from error
        return _stop_others(run, error, say)


def _stop_others(run: RemoteRun, error: PreflightError, say: Callable[[str], object]) -> int:
    say(f"{error.what}; ending what runs on the other hosts")
    others = run.hosts[1:]

    def end(host: str) -> str:
        script = remote_script(run, ["stop", run.path_on(host), "--now", "--here"])
        done = Shell(host, _CONNECT_S).run(["bash", "-c", script], timeout_s=_END_S)
        said, _ = cut_more(done.stdout if done.returncode == 0 else done.stderr)
        words = said.strip().splitlines()
        return f"  {host.rpartition('@')[2]}: {words[-1] if words else 'no word'}"

    answers, faults = on_all(others, end)
    for answer in answers:
        if answer is not None:
            say(answer)
    for host, fault in faults:
        say(f"  {host.rpartition('@')[2]}: {_one_line(fault)}")
    say(f"  {run.host}: not reached; what still runs there ends with the run's other nodes")
    return ExitCode.COMMUNICATION


def _one_line(error: UserError) -> str:
    return error.what.splitlines()[0]
