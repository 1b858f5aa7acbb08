"""Named hosts over plain ssh.

`start.py` starts an agent on every host: `hosts.py` asks them all what they have (over a
`channel.py`, JSON lines on the standard streams of one ssh), compares them, and finds addresses
and ranks; `shell.py` runs a command here or there and explains what ssh says. Open `start.py`
first.
"""
