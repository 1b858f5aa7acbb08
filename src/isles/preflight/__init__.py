"""Checks of the machines before a run: findings, each with its measured value and the fix."""
