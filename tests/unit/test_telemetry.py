"""What the agent of a node samples, what is kept of it, and what becomes of it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import time
from pathlib import Path
from types import SimpleNamespace as Space
from typing import Any

import psutil
import pynvml
import pytest

from isles.agent.live import LiveRecord
from isles.agent.telemetry import SampleFile, Telemetry
from isles.run.limits import memory
from isles.run.live import SUMS, SampledMeans
from isles.run.records import read_record, read_rows, write_record
from isles.train.metrics import waiting_s
from tests.agent_table import table
from tests.deadline import until


def test_a_sample_tells_of_this_machine_and_its_ranks(tmp_path: Path) -> None:
    ranks = {
        0: {"pid": os.getpid(), "alive": True, "exit": None, "at": 1.0, "step": 7, "gpu": None},
        1: {"pid": 2**22 + 1, "alive": True, "exit": None, "at": 1.0},  # has just ended
        2: {"pid": os.getpid(), "alive": False, "exit": -9, "at": 1.0},
    }
    telemetry = Telemetry(tmp_path, tmp_path / "none.jsonl", None, 1, lambda: ranks)
    telemetry.begin()
    telemetry.sample()
    began = time.process_time()
    while time.process_time() - began < 0.2:
        pass
    sample = telemetry.sample()
    host, own = sample["host"], sample["ranks"]["0"]
    assert 0 < host["cpu"] <= 1 and host["cores"] == psutil.cpu_count() and host["cpu_name"]
    assert 0 < host["memory_bytes"] < host["memory_total_bytes"] == memory().total
    assert host["disk_free_bytes"] > 0 and host["interface"] is None
    assert host["net_in"] >= 0 and host["net_out"] >= 0
    assert 0 < own["cpu"] < 10 and own["step"] == 7
    assert 0 < own["resident_bytes"] < host["memory_total_bytes"]
    assert sample["ranks"]["1"]["cpu"] is None
    assert (sample["ranks"]["2"]["alive"], sample["ranks"]["2"]["exit"]) == (False, -9)
    assert sample["sums"]["samples"] == 2 and sample["sums"]["cpu"] >= host["cpu"]
    assert sample["gpus"] or sample["sums"]["gpu_use"] is None
    json.dumps(sample, allow_nan=False)


def test_a_sample_that_fails_costs_nothing_but_itself(tmp_path: Path) -> None:
    calls: list[int] = []

    def ranks() -> dict[int, dict[str, Any]]:
        calls.append(1)
        if len(calls) == 1:
            raise OSError(24, "Too many open files")
        return {}

    with Telemetry(tmp_path, tmp_path / "t" / "node-0.jsonl", None, 0, ranks) as telemetry:
        until(lambda: telemetry.last)
    assert len(calls) > 1 and list(read_rows(tmp_path / "t" / "node-0.jsonl"))


def test_the_whole_run_stays_visible_in_a_file_of_one_size(tmp_path: Path) -> None:
    path, limit = tmp_path / "telemetry" / "node-3.jsonl", 10_000
    for start in range(0, 2_000, 500):  # each a start of the run
        file = SampleFile(path, limit)
        for number in range(start, start + 500):
            file.append({"number": number, "ranks": {}})
            assert path.stat().st_size <= limit
        with path.open("ab") as stream:
            stream.write(b'{"torn": ')
    numbers = [row["number"] for row in read_rows(path)]
    assert numbers[0] == 0 and numbers[-1] == 1_999 and numbers == sorted(numbers)
    assert len(numbers) > 150
    gaps = [later - number for number, later in itertools.pairwise(numbers)]
    quarter = len(gaps) // 4
    assert statistics.mean(gaps[:quarter]) > 4 * statistics.mean(gaps[-quarter:])
    shutil.rmtree(path.parent)
    file.append({"number": 2_000})
    assert not path.parent.exists(), "of a run directory that was deleted"


def sample_of_cards(monkeypatch, reasons: list[int], *silent: str, visible: str) -> dict[str, Any]:
    """The second sample on a machine with four cards, by a stand-in for NVIDIA's library.

    `silent`: calls that its driver does not support.
    """
    counter = itertools.count()

    def links(card: int, fields: list[tuple[int, int]]) -> list[Space]:
        assert all(scope == 2**32 - 1 for _, scope in fields)
        value = Space(ullVal=next(counter) << 20)
        return [Space(nvmlReturn=pynvml.NVML_SUCCESS, value=value) for _ in fields]

    def unknown(*arguments: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    calls = {
        "Count": lambda: 4,
        "HandleByIndex": lambda index: index,
        "UUID": lambda card: f"GPU-{card}{card}aa",
        "Name": lambda card: "A card",
        "UtilizationRates": lambda card: Space(gpu=90 + card, memory=10),
        "MemoryInfo": lambda card: Space(used=card << 30, total=80 << 30),
        "Temperature": lambda card, sensor: 60 + card,
        "PowerUsage": lambda card: 350_500,
        "ClockInfo": lambda card, kind: 1980,
        "CurrentClocksEventReasons": lambda card: reasons[card],
        "PcieThroughput": lambda card, way: (1_000, 2_000)[way],
        "FieldValues": links,
        **dict.fromkeys(("TemperatureV", "CurrentClocksThrottleReasons", *silent), unknown),
    }
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    for name, call in calls.items():
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", call, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    rank = {"pid": os.getpid(), "alive": True, "exit": None, "at": 0.0, "gpu": 1}
    telemetry = Telemetry(Path(), Path("none"), None, 2, lambda: {0: rank})
    telemetry.begin()
    telemetry.sample()
    return telemetry.sample()


def test_the_cards_that_the_ranks_see_are_read(monkeypatch) -> None:
    sample = sample_of_cards(monkeypatch, [0x0, 0x4, 0x48, 0x28], visible="3,GPU-11,0")
    first, second = sample["gpus"]
    assert (first["index"], second["index"]) == (3, 1), "of two ranks; the third card is another's"
    assert (first["uuid"], first["name"], first["clock_mhz"]) == ("GPU-33aa", "A card", 1980)
    assert (first["use"], first["power_w"], first["temperature_c"]) == (0.93, 350.5, 63)
    assert (first["memory_bytes"], first["memory_total_bytes"]) == (3 << 30, 80 << 30)
    assert (first["throttle"], second["throttle"]) == ("heat", "its power limit")
    assert (first["pcie_in"], first["pcie_out"]) == (2e6, 1e6)
    assert first["nvlink_in"] == first["nvlink_out"] > 1 << 30
    assert sample["ranks"]["0"]["gpu"] == 1, "as nvidia-smi counts"
    assert sample["sums"]["gpu_use"] == pytest.approx(2 * (0.93 + 0.91) / 2)
    # What a card does not know is null.
    silent = ("UtilizationRates", "Temperature", "PowerUsage", "PcieThroughput", "FieldValues")
    sample = sample_of_cards(monkeypatch, [0x80, 0x8, 0, 0], *silent, visible="0,1")
    first, second = sample["gpus"]
    unknown = ("use", "temperature_c", "power_w", "pcie_in", "pcie_out", "nvlink_in", "nvlink_out")
    assert {first[key] for key in unknown} == {None} and second["memory_bytes"] == 1 << 30
    assert (first["throttle"], second["throttle"]) == ("the power supply", "the hardware")
    assert sample["sums"]["gpu_power_w"] is None and sample["sums"]["gpu_memory_bytes"] == 1 << 30
    none = sample_of_cards(monkeypatch, [0] * 4, visible="")
    assert none["gpus"] == [] and none["sums"]["gpu_use"] is None


def sums(samples: int, **totals: float | None) -> dict[str, Any]:
    return {"sums": {"samples": samples, **dict.fromkeys(SUMS.values()), "cpu": 0.0, **totals}}


def test_rows_get_the_means_of_what_was_sampled_since_the_last(tmp_path: Path) -> None:
    path = tmp_path / "live.json"

    def write(*nodes: dict[str, Any]) -> None:
        write_record(path, {"nodes": dict(enumerate(nodes))})

    assert SampledMeans(path).since_last() == {}
    write(sums(10, cpu=5.0), sums(100, cpu=9.0, gpu_use=50.0))
    means = SampledMeans(path, rest=0)
    assert means.since_last() == {}, "nothing since this start"
    missing = {"sums": {}}  # of a node that has not come
    write(sums(12, cpu=6.0), sums(104, cpu=12.0, gpu_use=53.0), missing)
    found = means.since_last()
    assert found["cpu_use"] == pytest.approx((0.5 + 0.75) / 2)
    assert found["gpu_use"] == pytest.approx(0.75) and found["gpu_power_w"] is None
    assert means.since_last() == {}
    write(sums(12, cpu=6.0), sums(2, cpu=0.4, gpu_use=1.0))  # a new agent
    assert means.since_last()["cpu_use"] == pytest.approx(0.2)
    for text in ("{}", "[]", '{"nodes": {"0": 3}}', "half of"):
        path.write_text(text)
        assert means.since_last() == {}


def test_live_json_names_every_node_and_survives_what_a_node_sends(tmp_path: Path) -> None:
    with table(tmp_path, 3, least=2) as made:
        first, last = made.join(0), made.join(2)
        live = LiveRecord(made.attempt, made.fleet, made.server)
        sample = {"at": 5.0, "name": "else", "host": {"cpu": 0.5}, "ranks": {"0": {"step": 3}}}
        for connection in (first, last):
            connection.report({"state": "idle", "telemetry": sample})

        def nodes() -> dict[str, Any]:
            live.write({0: (0, 1), 2: (1, 3)}, 4, now=True)
            return (read_record(made.attempt.live) or {}).get("nodes", {})

        made.look_until(lambda: nodes()["2"]["host"], "both have reported")
        found = nodes()
        assert list(found) == ["0", "1", "2"]
        second, third = found["1"], found["2"]
        assert (second["state"], second["ranks"], second["num_ranks"]) == ("missing", {}, 2)
        assert (third["name"], third["state"], third["first_rank"]) == ("h2", "there", 1)
        assert abs(third["skew_s"]) < 60 and third["ranks"]["0"]["step"] == 3
        assert (read_record(made.attempt.live) or {})["restart"] == 4
        before = made.attempt.live.read_bytes()
        live.write({}, 5)
        assert made.attempt.live.read_bytes() == before, "two seconds are not over"
        last.report({"state": "idle", "telemetry": {"at": float("nan"), "host": {"cpu": 2.0}}})
        odd = made.server.peers()[2]
        made.look_until(lambda: odd.report["telemetry"]["host"]["cpu"] == 2.0, "it has come")
        assert nodes()["2"]["host"]["cpu"] == 0.5, "the last whole record stays"
        shutil.rmtree(made.attempt.path)
        live.write({}, 5, now=True)
        assert not made.attempt.path.exists()


def test_who_waits_is_told_by_the_blocks_of_all_ranks() -> None:
    assert waiting_s((1.0, 0.2), [(1.0, 0.2), (1.0, 0.1)]) == 0.0, "the slower one"
    assert waiting_s((1.0, 0.1), [(1.0, 0.2), (1.0, 0.1)]) == 0.5
    assert waiting_s((1.0, 0.0), [(1.0, 0.2), (1.0, 0.0)]) == 1.0, "it has no rows"
    assert waiting_s((1.0, 0.1), [(1.0, None), (1.0, 0.1)]) is None
    assert waiting_s((1.0, 0.0), [(1.0, 0.0), (1.0, 0.0)]) is None
