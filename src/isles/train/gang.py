"""The ranks of one node under torch's elastic agent, from first start to exit code."""

from __future__ import annotations

import os
import time

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from isles.errors import ExitCode
from isles.rundir.nodes import living_nodes
from isles.rundir.records import read_record
from isles.train.elastic import Concluded, ElasticAgent, Gang, say, stopped_between
from isles.train.members import Waiting
from isles.train.relay import SignalRelay, StopBetween
from isles.train.verdict import trouble, write_failure

_START_S = 60.0
"""How long the first nodes wait for the others before they begin with fewer."""

_KEEP_ALIVE_S, _MISSED = 3, 3
"""A node is taken for lost after so many missed signs of life, so far apart."""

_READ_S = 30
"""How long a node waits for a word of the others over the store."""

_LAST_CALL_S = 3
"""How long nodes that have met wait for one more."""


def run_gang(gang: Gang, relay: SignalRelay) -> int:
    """Run the ranks of this node to the end of the run; returns the run's exit code."""
    # INT and TERM are ours: the elastic agent would kill the ranks before they have saved.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    handler = None
    try:
        handler = _make_handler(gang)
        _wait_for_all(gang, relay)
        result = ElasticAgent(gang, relay, handler).run()
        if result is None or result.is_failed():
            return _exit_code(gang)
        return int(max(result.return_values.values()))
    except StopBetween:
        return stopped_between(gang, relay)
    except (Concluded, RendezvousClosedError):
        return _exit_code(gang)
    except (RendezvousTimeoutError, RendezvousConnectionError) as error:
        return _lost(gang, error)
    finally:
        if handler is not None:
            handler.shutdown()


def _make_handler(gang: Gang) -> RendezvousHandler:
    meeting = gang.meeting
    run_id = f"{gang.run_dir.name}.{gang.attempt.number}"
    if meeting is None:
        # Ranks of one machine meet in a file: no port is opened, none can be taken.
        return get_rendezvous_handler(
            RendezvousParameters(
                backend="c10d",
                endpoint=str(gang.scratch / "rendezvous"),
                run_id=run_id,
                min_nodes=1,
                max_nodes=1,
                local_addr="127.0.0.1",
                store_type="file",
            )
        )
    return get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint=f"{meeting.address}:{meeting.port}",
            run_id=run_id,
            min_nodes=meeting.min_nodes,
            max_nodes=meeting.max_nodes,
            local_addr=meeting.address,
            is_host="0",
            read_timeout=_READ_S,
            join_timeout=int(gang.timeout_s),
            last_call_timeout=_LAST_CALL_S,
            keep_alive_interval=_KEEP_ALIVE_S,
            keep_alive_max_attempt=_MISSED,
        )
    )


def _wait_for_all(gang: Gang, relay: SignalRelay) -> None:
    """The first start waits for all nodes, so that it need not begin again for each that comes."""
    meeting = gang.meeting
    if meeting is None or (gang.attempt.path / "members.json").exists():
        return
    deadline = time.monotonic() + _START_S
    with relay.between_ranks(), Waiting(gang.run_dir, gang.attempt, meeting):
        while time.monotonic() < deadline:
            if len(living_nodes(gang.attempt, meeting.max_nodes)) == meeting.max_nodes:
                return
            time.sleep(0.1)
    say("not all nodes have come: beginning with those that are there")


def _exit_code(gang: Gang) -> int:
    outcome = read_record(gang.attempt.outcome) or {}
    return int(outcome.get("exit_code", ExitCode.TRAINING))


def _lost(gang: Gang, error: Exception) -> int:
    """The other nodes, or the store through which they meet, cannot be reached."""
    meeting = gang.meeting
    if gang.attempt.outcome.exists() or meeting is None:
        say(f"{type(error).__name__}: {error}")
        return _exit_code(gang)
    if isinstance(error, RendezvousTimeoutError):
        there = living_nodes(gang.attempt, meeting.max_nodes)
        what = (
            f"only {len(there)} of at least {meeting.min_nodes} nodes were there within "
            f"{gang.timeout_s:.0f} s: {', '.join(f'node {node}' for node in there)}"
        )
        fix = "bring the missing nodes back, or lower the least number in clusters[0].nodes"
    else:
        process = meeting.supervisor_process
        what = (
            f"the supervisor on {process.host} (pid {process.pid}), through which the nodes meet, "
            f"cannot be reached at {meeting.address}:{meeting.port}"
        )
        fix = "it was killed, or the network between the nodes is cut"
    culprit = trouble(what, fix)
    say(what)
    write_failure(gang.attempt, culprit)
    return int(ExitCode.COMMUNICATION)
