"""Durations, bytes and counts; the GPU table; the shapes shipped with isles."""

from __future__ import annotations

import math

import pytest

from isles.facts.cost import train_flops_per_token
from isles.facts.gpus import GPUS, find_gpu
from isles.facts.units import (
    format_bytes,
    format_count,
    format_duration,
    parse_duration_s,
    write_duration,
)
from tests.each import each


@each(
    ("text", "seconds"),
    [
        ("1.5h", 5400.0),
        ("23h30m", 84_600.0),
        (" 1d 2h ", 93_600.0),
        ("12:30:00", 45_000.0),
        ("1-00:00:10", 86_410.0),
    ],
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@each("text", ["", "5", "1h 5", "abc", "12:60:00", "1:2", "-5s", "1w", "h"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration_s(text)


def test_a_duration_is_short_and_reads_back_the_same() -> None:
    assert [write_duration(s) for s in (1200.0, 84_600.0, 172_800.0)] == ["20m", "23h30m", "2d"]
    for seconds in (0.0, 1.0, 59.0, 90.0, 90_061.0, 0.1, 1e-7, 1e300, math.pi):
        assert parse_duration_s(write_duration(seconds)) == seconds


def test_figures_are_written_for_people() -> None:
    durations = [format_duration(s) for s in (0.4, 47, 725, 12_000, 187_200)]
    assert durations == ["0s", "47s", "12m 05s", "3h 20m", "2d 04h"]
    sizes = [format_bytes(b) for b in (512, 1536, 13.5 * 2**30, 3 * 2**40)]
    assert sizes == ["512 B", "1.5 KiB", "13.5 GiB", "3.0 TiB"]
    assert [format_count(n) for n in (812, 4100, 2.1e6, 8e9)] == ["812", "4.1k", "2.1M", "8.0B"]


@each(
    ("reported", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX 3090 Ti"),
        ("Tesla T4", "T4"),
        ("NVIDIA GeForce RTX 4080 SUPER", "RTX 4080 SUPER"),
        ("NVIDIA GeForce RTX 2080 SUPER", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("Some GPU of 2031", None),
    ],
)
def test_a_gpu_is_known_or_unknown_never_guessed(reported: str, name: str | None) -> None:
    found = find_gpu(reported)
    assert (found.name if found else None) == name


def test_every_row_of_the_gpu_table_has_a_source() -> None:
    assert all(gpu.source and gpu.bf16_flops > 1e12 for gpu in GPUS)


def test_flops_grow_with_parameters_and_context() -> None:
    flops = train_flops_per_token(matmul_params=100, num_layers=2, hidden_size=8, seq_length=16)
    assert flops == 6 * 100 + 6 * 2 * 8 * 16
