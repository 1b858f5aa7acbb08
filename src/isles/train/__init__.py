"""One rank's program.

`worker.py` is one rank from start to exit code: `build.py` and `data.py` assemble the `parts.py`
from all other rooms, and `loop.py` trains. `length.py` and `reach.py` warn
about runs that cannot learn.
`stop.py`, `hang.py` (by `clock.py`) and `record.py`
stand beside the loop; `outer/` is what ranks do between clusters. An agent starts ranks by
`preload.py` and `isles.agent.workers`; a torchrun typed by hand by `__main__.py`. Open `loop.py`
first, then `build.py`.
"""
