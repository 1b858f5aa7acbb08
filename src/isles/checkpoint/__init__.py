"""Saving, verifying, loading, exporting."""
