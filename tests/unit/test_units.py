"""Durations, bytes and counts; FLOPs of a step."""

from __future__ import annotations

import math

import pytest

from isles.facts import units
from isles.facts.cost import train_flops_per_token


def test_durations_are_read_or_refused():
    texts = ("1.5h", "23h30m", " 1d 2h ", "12:30:00", "1-00:00:10")
    seconds = [units.parse_duration_s(text) for text in texts]
    assert seconds == [5400, 84_600, 93_600, 45_000, 86_410]
    for text in ("", "5", "1h 5", "abc", "12:60:00", "1:2", "-5s", "1w", "h"):
        with pytest.raises(ValueError, match="is not a duration"):
            units.parse_duration_s(text)


def test_a_duration_is_short_and_reads_back_the_same():
    texts = [units.write_duration(s) for s in (1200.0, 84_600.0, 172_800.0)]
    assert texts == ["20m", "23h30m", "2d"]
    for seconds in (0.0, 1.0, 59.0, 90.0, 90_061.0, 0.1, 1e-7, 1e300, math.pi):
        assert units.parse_duration_s(units.write_duration(seconds)) == seconds


def test_figures_are_written_for_people():
    durations = [units.format_duration(s) for s in (0.4, 47, 725, 12_000, 187_200)]
    assert durations == ["0s", "47s", "12m 05s", "3h 20m", "2d 04h"]
    sizes = [units.format_bytes(b) for b in (512, 1536, 13.5 * 2**30, 3 * 2**40)]
    assert sizes == ["512 B", "1.5 KiB", "13.5 GiB", "3.0 TiB"]
    counts = [units.format_count(n) for n in (812, 4100, 2.1e6, 8e9)]
    assert counts == ["812", "4.1k", "2.1M", "8.0B"]


def test_flops_grow_with_parameters_and_context():
    flops = train_flops_per_token(matmul_params=100, num_layers=2, hidden_size=8, seq_length=16)
    assert flops == 6 * 100 + 6 * 2 * 8 * 16
