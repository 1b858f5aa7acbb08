"""Every rank's program, and for now the agent that starts it.

`worker.py` is one rank from start to exit code: `build.py` assembles the `parts.py` from all
other rooms, and `loop.py` trains. `stop.py`, `hang/` and `record.py` stand beside the loop;
`outer/` is what ranks do between clusters. `agent.py` starts the ranks of a node, alone or under
a `supervisor.py`; `script/` does that for a script of the user's own. Open `loop.py` first, then
`build.py`.
"""
