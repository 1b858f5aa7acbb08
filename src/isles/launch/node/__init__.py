"""What answers on a host while it is started or checked: its facts, and starting its agent."""
