"""Conversations. `talks.py` makes conversations of rows, by the messages that `messages.py` reads.
`template.py` renders a conversation as text and finds what the assistant says in it: `dialogue.py`
knows what stands around answers, `fields.py` what the template leaves out, and `sandbox.py` limits
the template's work. Open `template.py` first."""
