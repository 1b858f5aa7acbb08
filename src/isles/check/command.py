"""The verb `isles check`, as it is typed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from isles.errors import UserError

check_app = App(name="check", help="Check machines before a run: each finding with its fix.")


@check_app.default
def check(
    run_file: Path | None = None,
    /,
    *overrides: str,
    hosts: Annotated[tuple[str, ...], Parameter(consume_multiple=True, negative=())] = (),
    json: Annotated[bool, Parameter(negative=())] = False,
    net: Annotated[bool, Parameter(negative="--no-net")] = True,
    smoke: Annotated[bool, Parameter(negative=())] = False,
    in_job: Annotated[bool, Parameter(negative=())] = False,
    timeout: str = "60s",
) -> int:
    """Check machines before a run: each finding with its measured value and the fix.

    The exit code is 0 where all is well (also with warnings), 1 for a fault in the run file or the
    command line, and 2 where there are errors.

    Args:
        run_file: The run file; left out: the machines alone are checked.
        overrides: Values that replace those in the file, such as data.seq_length=512.
        hosts: These hosts, as ssh takes them, in place of the run file's.
        json: Print JSON.
        net: Also the links between hosts, and an all-reduce over all ranks.
        smoke: Also train a small model for three steps on each machine alone.
        in_job: Check the nodes that Slurm or PBS gives, by a short job, not by its own answers.
        timeout: Longest wait for one answer of a host.
    """
    from isles.check.plan import Extent
    from isles.check.verb import CheckOptions, run_check
    from isles.facts.units import parse_duration_s

    try:
        timeout_s = parse_duration_s(timeout)
    except ValueError as error:
        raise UserError(str(error), where="--timeout", fix="for example --timeout 3m") from error
    if timeout_s < 10:
        raise UserError(
            f"{timeout} is less than importing torch takes",
            where="--timeout",
            fix="for example --timeout 30s",
        )
    extent = Extent(net=net, smoke=smoke, timeout_s=timeout_s)
    options = CheckOptions(run_file, overrides, hosts, extent, as_json=json, in_job=in_job)
    return run_check(options, lambda text: sys.stdout.write(f"{text}\n"))
