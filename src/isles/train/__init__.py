"""One rank's program.

`worker.py` runs one rank from start to exit code. `build.py` and `data.py` assemble the `parts.py`
from the other packages, `optimizer/` has the optimizers, and `loop.py` trains. `length.py` and
`reach.py` warn about runs that cannot learn. `stop.py`, `hang.py` (with `clock.py`),
`telemetry.py` and `record.py` run next to the loop. `host.py` collects garbage at fixed steps.
`outer/` is the ranks' work between clusters. An agent starts ranks through `preload.py` and
`isles.agent.workers`; torchrun starts them through `__main__.py`. Open `loop.py` first, then
`build.py`.
"""
