"""Named hosts over plain ssh.

`start.py` starts an agent on every host: it opens a channel to each (`channel.py`: JSON lines on
the standard streams of one ssh), which `node.py` serves on the host. `hosts.py` queries all hosts
for their facts (`facts.py`), compares them, and determines addresses and ranks. `shell.py` runs a
local or remote command and explains ssh's errors. `environment.py` has the lines of bash that come
before Python. Open `start.py` first.
"""
