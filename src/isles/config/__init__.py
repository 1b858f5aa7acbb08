"""The run file: its sections, its rules, its loading."""
