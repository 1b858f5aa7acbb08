"""Processes on every node of a run, without torch: the agent, and the coordinator on the first
node.

`__main__.py` is the process that launchers start. `lead.py` makes it the coordinator: it listens
(`server.py`), starts agents in the job of a queue, and lets `coordinator.py` decide for all nodes,
with `members.py` (which nodes train now), `failure.py` (root causes, restarts) and `requeue.py`
(jobs). An agent (`agent.py`) applies the commands that it receives over its connection
(`connection.py`, `protocol.py`) and reports every second. `workers.py` starts, watches and ends the
ranks; `script/` runs a user's own script as a rank. `telemetry.py` samples the node and its GPUs;
`live.py` records the samples of all nodes. Open `coordinator.py` first, then `agent.py`.
"""
