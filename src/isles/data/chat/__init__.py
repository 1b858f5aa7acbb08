"""Conversations. `messages.py` reads messages, and `talks.py` makes conversations of rows.
`template.py` renders a conversation as text and finds the assistant's answers in it. `dialogue.py`
finds the text around an answer, `fields.py` finds fields that the template does not write, and
`sandbox.py` limits the template's work. Open `template.py` first."""
