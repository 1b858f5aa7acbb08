"""What runs on every node of a run, without torch: the agent, and the coordinator beside the first.

`__main__.py` is the process that launchers start. `lead.py` makes it the coordinator: it listens
(`server.py`), places agents in the job of a queue, and lets `coordinator.py` decide for all nodes,
with `members.py` (who trains now), `failure.py` (root causes, restarts) and `requeue.py` (jobs). An
agent (`agent.py`) carries out orders that come over `connection.py`: `workers.py` starts and ends
the ranks, `rank.py` is the process of one, `script/` of one that runs a user's own script. Reports
go back every second. Open `coordinator.py` first, then `agent.py`.
"""
