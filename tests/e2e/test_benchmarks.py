"""Every benchmark runs whole with `--smoke`, and ends with one line of JSON with sane figures."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.documents import ROOT

FOLDER = ROOT / "benchmarks"
DEADLINE_S = 600.0
STARTED_BY_OTHERS = {"bare_loop"}
"""Scripts with a command that another benchmark runs: loop.py runs this one."""

RATIO = 0.05, 20.0
SHARE = 0.0, 1.0
ANY = 0.0, math.inf

# Of each benchmark the figures in its last line, and the band of each; a number is the only value.
FIGURES: dict[str, dict[str, Any]] = {
    "balance": {"balanced_over_ideal": (0.1, 100.0), "even_over_ideal": (0.1, 100.0)},
    "chaos": {
        "faults": 1,
        "turns": (6, 100),
        "diverged": 0,
        "inner_steps_lost": 0,
        "deadline_s": 20.0,
    },
    "codec": {
        "copy_gb_per_s": (0.05, 500.0),
        "int8_encode_gb_per_s": (0.01, 500.0),
        "int8_decode_gb_per_s": (0.01, 500.0),
        "int8_over_copy": (0.1, 200.0),
        "sizes": {"int8": (0.25, 0.26), "int4": (0.12, 0.15)},
        "errors": {"none": 0.0, "int8": (0.001, 0.05)},
    },
    "diloco_quality": {
        "loss": {"sync": (1.0, 10.0), "2 int8+fragments": (1.0, 10.0)},
        "over_sync": {"sync": 0.0},
        "tokens": (1000, 10**9),
        "parameters": (10**4, 10**6),
        "rounds": (1, 100),
    },
    "finetune": {"lora_over_hf": RATIO, "padding_waste": SHARE},
    "gpu": {
        "rows": {kind: {"tokens_per_s": ANY} for kind in ("compiled", "eager", "isles")},
        "ratio": ANY,
        "ratio_eager": ANY,
    },
    "hub": {
        "clusters": 2,
        "upload_mb_per_s": (0.1, 1e5),
        "download_mb_per_s": (0.1, 1e5),
        "whole_turn_s": (0.001, 100.0),
        "server_peak_before_mb": (10, 10**4),
    },
    "live": {
        "agent_core_share": (1e-6, 1.0),
        "step_ratio": RATIO,
        "step_noise_floor": RATIO,
        "step_ms": (1.0, 1e5),
        "page_kb_per_s": (0.1, 1e4),
        "page_wall_ms": (0.1, 1e4),
        "page_cpu_ms": (0.1, 1e4),
    },
    "loop": {"ratio_1p": RATIO, "noise_floor": RATIO, "first_step_ratio": RATIO},
    "pipeline": {
        "uneven_of_ideal": (0.05, 1.5),
        "even_of_ideal": (0.05, 1.5),
        "uneven_speedup": RATIO,
        "bubble": 0.04,
    },
    "plan_memory": {"cases": (3, 5), "mean": (0.0, 0.05), "worst": (0.0, 0.05)},
    "plan_published": {
        "peaks": 19,
        "within_10_percent": 18,
        "worst": (0.1, 0.2),
        "speeds": 19,
        "speeds_within_25_percent": 19,
    },
    "prepare": {
        **dict.fromkeys(("chats_jsonl", "chats_parquet", "chats_last", "text"), ANY),
        **dict.fromkeys(("chats_jsonl_cpu", "text_cpu"), ANY),
        "same_tokens": 1.0,  # of this version and itself
    },
    "qlora_large": {
        "limit_bytes": 2 << 30,
        "group_peak_bytes": (1e8, 2 << 30),
        "group_over_plan": (0.5, 2.0),
        "rank_peak_bytes": (1e6, 1e9),
        "rank_over_plan": ANY,
        "oom_kills": 0,
        "steps": 4,
    },
    "scale": {
        "clusters": {"2": SHARE, "8": SHARE},
        "parameters": {"15M_int8": SHARE},
        "speed": {"100": ANY},
    },
    "simulate": {"most_points": (0.0, 100.0), "most_percent": ANY},
    "slow_link": {
        "compute_share": (0.01, 1.0),
        "ddp_compute_share": (0.001, 1.0),
        "bytes_ratio": (5.0, 1000.0),
        "exposed_s": ANY,
        "hidden_s": ANY,
    },
    "start_ray": {"ray_s": (1.0, 300.0), "ssh_s": (1.0, 300.0), "submit_s": (0.1, 300.0)},
    "start_ssh": {"isles_s": (1.0, 300.0), "torchrun_s": (1.0, 300.0)},
    "strategies": {"fsdp": RATIO},
    "watchdog": {"step_us": (0.01, 1e4), "thread_ms_per_s": (0.0, 1e3)},
}
OTHER_STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
BRIEF = ("codec", "gpu", "hub", "loop", "plan_published", "scale", "watchdog")


def test_no_benchmark_is_forgotten():
    with_command = {
        path.stem for path in FOLDER.glob("*.py") if 'if __name__ == "__main__"' in path.read_text()
    }
    assert with_command - STARTED_BY_OTHERS == set(FIGURES)


@pytest.mark.brief(*BRIEF)
@pytest.mark.parametrize("name", FIGURES)
def test_a_smoke_run_ends_with_sane_figures(name: str) -> None:
    done = type_benchmark(name, "--smoke")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert not list(faults(figures, FIGURES[name])), figures
    assert all(math.isfinite(number) for number in numbers(figures)), figures


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "figures"),
    [
        *((f"strategies --only {name}", {name: RATIO}) for name in OTHER_STRATEGIES),
        ("balance --strategy fsdp", FIGURES["balance"]),
        ("chaos --engine bucket", FIGURES["chaos"]),
        ("gpu --strategy fsdp --as-shipped", {**FIGURES["gpu"], "saving": ANY}),
        ("gpu --adapter lora", FIGURES["gpu"]),
        ("gpu --packed", FIGURES["gpu"]),
    ],
)
def test_each_choice_has_a_smoke_run(words: str, figures: dict[str, Any]) -> None:
    name, *options = words.split()
    done = type_benchmark(name, "--smoke", *options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert not list(faults(json.loads(done.stdout.splitlines()[-1]), figures))


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path) -> None:
    # The package that is missing, the benchmark that needs it, and what to install.
    cases = (
        ("trl", ["finetune", "--smoke"], "isles[bench]"),
        ("accelerate", ["finetune", "--quick"], "isles[bench]"),
        ("deepspeed", ["strategies", "--only", "zero2"], "isles[deepspeed]"),
        ("ray", ["start_ray", "--smoke"], "isles[ray]"),
        ("s3fs", ["chaos", "--engine", "bucket"], "isles[bucket]"),
        ("torch", ["codec", "--smoke"], "isles[train]"),
        ("torch", ["loop"], "isles[train]"),
        ("psutil", ["live", "--smoke"], "isles"),
        ("isles", ["loop", "--smoke"], "isles[train]"),
    )
    wrong = []
    for package, words, what in cases:
        done = type_benchmark(*words, path=packages_without(package, tmp_path / package))
        script = f"{words[0]}.py"
        text = f"{script} needs the package {package}, which is not installed: pip install '{what}'"
        if (done.returncode, done.stdout, done.stderr) != (1, "", text + "\n"):
            wrong.append((package, words, done.returncode, done.stdout, done.stderr))
    assert not wrong


def packages_without(name: str, folder: Path) -> list[Path]:
    """Folders for PYTHONPATH with all that is installed here, but for one package."""
    if not folder.exists():
        folder.mkdir()
        for place in map(Path, sys.path):
            if place.name == "site-packages":
                for entry in place.iterdir():
                    if entry.name != name and not (folder / entry.name).exists():
                        (folder / entry.name).symlink_to(entry)
    return [folder] if name == "isles" else [folder, ROOT / "src"]


def type_benchmark(
    name: str, *words: str, path: list[Path] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a benchmark to its end; with a path, only what is in these folders can be imported."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    if path:
        environ["PYTHONPATH"] = os.pathsep.join(map(str, path))
    python = [sys.executable, "-S"] if path else [sys.executable]
    child = subprocess.Popen(
        [*python, f"benchmarks/{name}.py", *words],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = child.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        child.terminate()  # it ends what it has started; a kill would leave that running
        output, errors = child.communicate(timeout=DEADLINE_S)
    return subprocess.CompletedProcess(child.args, child.returncode, output, errors)


def faults(found: dict[str, Any], wanted: dict[str, Any]) -> Iterator[str]:
    """Figures that are missing, or not in their band."""
    for key, band in wanted.items():
        value = found.get(key)
        if isinstance(band, dict):
            yield from faults(value or {}, band)
            continue
        low, high = band if isinstance(band, tuple) else (band, band)
        if not isinstance(value, int | float) or not low <= value <= high:
            yield f"{key}: {value}, not from {low} to {high}"


def numbers(found: dict[str, Any]) -> Iterator[float]:
    """All numbers among the figures."""
    for value in found.values():
        if isinstance(value, dict):
            yield from numbers(value)
        elif isinstance(value, int | float):
            yield value
