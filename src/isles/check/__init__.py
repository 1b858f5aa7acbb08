"""`isles check`: what is wrong with the machines, before a run.

`verb.py` reads the run file and finds the hosts; `conduct.py` asks each node, over a channel of ssh
or as a step of a job (`step.py`), and has the answers judged; `report.py` prints the findings. What
a node measures is in `node/`, what that means in `judge/`, what a scheduler is asked in `queue/`.
Open `conduct.py` first.
"""
