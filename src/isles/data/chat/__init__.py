"""Conversations: `messages.py` reads them, `answers.py` those of questions and preferences,
`template.py` renders them, and `conversations.py` says what the assistant says; open that first."""
