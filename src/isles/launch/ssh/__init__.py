"""Named hosts over plain ssh.

`start.py` starts an agent on every host: it opens a channel to each (`channel.py`: JSON lines on
the standard streams of one ssh), at whose other end `node.py` answers; `hosts.py` asks all for
their facts (`facts.py`), compares them, and finds addresses and ranks. `shell.py` runs a command
here or there and explains what ssh says; `environment.py` has the lines of bash that come before
Python. Open `start.py` first.
"""
