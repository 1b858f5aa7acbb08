"""A run of several clusters: started, shown, followed and stopped from one place.

Each cluster is a child process of `isles train --cluster NAME` (`child.py`); `start.py` starts
them and their hub, `follow.py` watches them, `report.py` shows them. Open `train.py` first.
"""
