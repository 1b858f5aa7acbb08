"""Conversations as text, by a chat template, and which of it the assistant says."""
