"""What all tests share: a tiny model, a little text, a cache of their own."""

from __future__ import annotations

import gc
import json
import os
import signal
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
import yaml

from tests.inputs import write_model, write_words

# Before anything imports the hub's library, which reads it once: no test reaches for a network.
os.environ["HF_HUB_OFFLINE"] = "1"
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # So a shell starts what is in the background; what tests interrupt must not inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
# All that tests import stays: it is not searched for garbage, neither now nor in any test.
gc.disable()
_IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if _IS_WORKER:
    # Tests run side by side: a thread per core in each of them would fight for the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


_DURATIONS = Path(__file__).with_name("durations.json")
"""Seconds of every test that takes more than a moment, by its id without the case."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("isles")
    group.addoption("--part", metavar="K/N", help="run the K-th of N parts that take equally long")
    group.addoption(
        "--record-durations", action="store_true", help="write down in durations.json what was seen"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record-durations") and not _IS_WORKER:
        config.pluginmanager.register(_Recorder())


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    """Mark what takes a test cluster and what is for `make test-all`; the longest go first.

    Tests that share a fixture of their module stay together, on one worker of pytest-xdist.
    """
    known = {(_plain_id(item.nodeid), case_of(item)) for item in items}
    unknown: set[tuple[str, str]] = set()
    for item in items:
        names = item.fixturenames if isinstance(item, pytest.Function) else ()
        if any(name == "lab" or name.endswith("_lab") for name in names):
            item.add_marker("lab")
        brief = item.get_closest_marker("brief")
        if brief is not None:
            test = _plain_id(item.nodeid)
            unknown |= {(test, case) for case in brief.args if (test, case) not in known}
            if case_of(item) not in brief.args:
                item.add_marker("long")
        if "::" not in (group := _group_of(item)):
            item.add_marker(pytest.mark.xdist_group(group))
    if unknown and not any("[" in argument for argument in config.args):
        raise pytest.UsageError(f"mark brief: no such case: {sorted(unknown)}")
    yield
    seconds = json.loads(_DURATIONS.read_text()) if _DURATIONS.exists() else {}
    total: Counter[str] = Counter()
    for item in items:
        total[_group_of(item)] += seconds.get(_plain_id(item.nodeid), 0)
    if part := config.getoption("--part"):
        _keep_part(config, items, part, total)
    items.sort(key=lambda item: -total[_group_of(item)])


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def _keep_part(
    config: pytest.Config, items: list[pytest.Item], part: str, total: Counter[str]
) -> None:
    number, _, count = part.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(
            f"--part {part}: two numbers such as 1/3, the first not above the second"
        )
    sums = [0.0] * int(count)
    place: dict[str, int] = {}
    for group, seconds in sorted(total.items(), key=lambda entry: (-entry[1], entry[0])):
        place[group] = sums.index(min(sums))
        sums[place[group]] += seconds + 0.1
    other = [item for item in items if place[_group_of(item)] != int(number) - 1]
    config.hook.pytest_deselected(items=other)
    items[:] = [item for item in items if place[_group_of(item)] == int(number) - 1]


def _group_of(item: pytest.Item) -> str:
    """Its module, where a fixture of that is shared, else the test itself."""
    if isinstance(item, pytest.Function):
        fixtures = item._fixtureinfo.name2fixturedefs.values()
        if any(found[-1].scope in ("module", "package") for found in fixtures):
            return item.nodeid.partition("::")[0]
    return item.nodeid.partition("@")[0]


def _plain_id(nodeid: str) -> str:
    return nodeid.partition("@")[0].partition("[")[0]


class _Recorder:
    """Writes down how long tests have taken, in the process that leads the workers."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.rpartition("@")[0] or report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        most: dict[str, float] = json.loads(_DURATIONS.read_text()) if _DURATIONS.exists() else {}
        for nodeid in {_plain_id(nodeid) for nodeid in self._seconds}:
            most.pop(nodeid, None)
        for nodeid, seconds in self._seconds.items():
            if seconds >= 0.5:
                plain = _plain_id(nodeid)
                most[plain] = max(most.get(plain, 0.0), round(seconds, 1))
        _DURATIONS.write_text(json.dumps(dict(sorted(most.items())), indent=0) + "\n")


def case_of(item: pytest.Item) -> str:
    """The id of a test's case, as it stands between brackets; empty: it has no cases."""
    return item.callspec.id if hasattr(item, "callspec") else ""


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    return write_model(tmp_path)


@pytest.fixture
def words(tmp_path: Path) -> Path:
    return write_words(tmp_path)


@pytest.fixture
def run_file(tmp_path: Path, tiny_model: Path, words: Path) -> Path:
    """A run file that trains the tiny model on the words for 20 steps in fp32."""
    content = {
        "name": "tiny",
        "output_dir": str(tmp_path / "runs"),
        "model": {"name_or_path": str(tiny_model), "init": "scratch"},
        "tokenizer": {"train_vocab_size": 300},
        "data": {
            "sources": [{"path": str(words)}],
            "seq_length": 32,
            "packing": False,
            "validation_fraction": 0.1,
        },
        "training": {
            "max_steps": 20,
            "global_batch_size": 12,
            "micro_batch_size": "auto",
            "learning_rate": 0.001,
            "warmup_steps": 3,
            "precision": "32-true",
            "logging_steps": 5,
            "eval_steps": None,
        },
        "balance": "even",
        "checkpoint": {"every_steps": None, "every_minutes": None, "export_on_finish": False},
        "track": ["jsonl"],
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    return path
