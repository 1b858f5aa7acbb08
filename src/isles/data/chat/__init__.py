"""Conversations: `messages.py` reads messages in the forms that data has, `template.py` renders
them as text and finds what the assistant says in it. Open `template.py` first."""
