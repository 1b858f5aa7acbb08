"""`isles check --in-job` from elsewhere: isles on the login node does it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from isles.check.finding import Finding
from isles.config.load import Loaded
from isles.errors import PreflightError, UserError, cut_more
from isles.launch.remote.login import copied_file_script, login_setting, place_there
from isles.launch.remote.passing import lost_python
from isles.launch.ssh.shell import Shell

_RUN_S = 300.0
"""Beyond the wait for nodes: what it may take in all."""


def check_on_login(
    loaded: Loaded, login: str, timeout_s: float, overrides: Sequence[str]
) -> tuple[list[Finding], list[str]]:
    """Findings of the nodes of a job that the login node submits, and their names.

    Args:
        loaded: the run file, which is here.
        login: the login node, as ssh takes it.
        timeout_s: as `--timeout`.
        overrides: of the command line.

    Raises:
        PreflightError: the login node cannot be reached, or has no isles.
        UserError: what isles there says.
    """
    lines, python = login_setting(loaded)
    there = place_there(loaded)
    words = ["check", there, *overrides, "clusters.0.launcher.login=null", "--in-job", "--json"]
    script = copied_file_script(there, lines, python, [*words, f"--timeout={timeout_s:.0f}s"])
    shell = Shell(login)
    done = shell.run(["bash", "-c", script], stdin=loaded.text, timeout_s=timeout_s + _RUN_S)
    start = done.stdout.find("{")
    if start < 0:
        text = done.stderr.replace(there, str(loaded.path)).strip()
        if fault := lost_python(login, python, text, done.returncode):
            raise fault
        text, id = cut_more(text)
        what, _, fix = text.partition("\n  fix: ")
        if not what.startswith("error: "):
            raise PreflightError(
                f"isles could not check there: {text or f'exit status {done.returncode}'}",
                where=f"host {login}",
                fix=f"try it by hand: ssh {login}",
                id="host.login",
            )
        raise UserError(what.removeprefix("error: "), where=f"host {login}", fix=fix, id=id)
    answer = json.loads(done.stdout[start:])
    findings = [Finding(**finding) for finding in answer["findings"]]
    columns = [finding.where for finding in findings if finding.id == "os.kernel"]
    return findings, columns or ["the job"]
