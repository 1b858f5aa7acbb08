"""What all tests share: a tiny model, a little text, a cache of their own."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import yaml

from tests.as_it_was import State, changes
from tests.inputs import OTHER, write_model, write_words

# Before anything imports the hub's library, which reads it once: no test reaches for a network.
os.environ["HF_HUB_OFFLINE"] = "1"
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # So a shell starts what is in the background; what tests interrupt must not inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The same examples in every run: a change is to blame for what fails, and not chance.
hypothesis.settings.register_profile("isles", derandomize=True, deadline=None)
hypothesis.settings.load_profile("isles")
# All that tests import stays: it is not searched for garbage, neither now nor in any test.
gc.disable()
_IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
# Tests and ranks run side by side: a thread per core in each of them would fight for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


_DURATIONS = Path(__file__).with_name("durations.json")
"""Seconds of every test that takes more than a moment, by its id without the case."""
_seconds: Counter[str] = Counter()
"""How long tests have taken, by their ids with the case."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("isles")
    words = "run the K-th of N parts that take equally long"
    group.addoption("--part", metavar="K/N", type=_k_of_n, help=words)
    words = "run the tests in the order of this seed; `random`: of a new one"
    group.addoption("--random-order", metavar="SEED", type=_seed, help=words)
    group.addoption(
        "--record-durations", action="store_true", help="write down in durations.json what was seen"
    )


def _seed(text: str) -> int:
    return random.SystemRandom().randrange(10**6) if text == "random" else int(text)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    # A worker reads `random` from its own command line again, and all need one order.
    node.workerinput["order"] = _order_of(node.config)


def _order_of(config: pytest.Config) -> int | None:
    own: int | None = config.getoption("--random-order")
    given: int | None = getattr(config, "workerinput", {}).get("order", own)
    return given


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = _order_of(config)
    return None if seed is None else f"order of the tests: --random-order {seed}"


def _k_of_n(text: str) -> tuple[int, int]:
    number, count = map(int, text.split("/"))
    if not 1 <= number <= count:
        raise ValueError
    return number, count


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    """Mark what takes a test cluster and what is for `make test-all`; the longest go first.

    Tests that share a fixture of their module stay together, on one worker of pytest-xdist.
    """
    known = {(_plain_id(item.nodeid), _case_of(item)) for item in items}
    unknown: set[tuple[str, str]] = set()
    for item in items:
        names = item.fixturenames if isinstance(item, pytest.Function) else ()
        if any(name == "lab" or name.endswith("_lab") for name in names):
            item.add_marker("lab")
        if brief := item.get_closest_marker("brief"):
            unknown |= {(_plain_id(item.nodeid), case) for case in brief.args} - known
            if _case_of(item) not in brief.args:
                item.add_marker("long")
        if "::" not in (group := _group_of(item)):
            item.add_marker(pytest.mark.xdist_group(group))
    if unknown and not any("[" in argument for argument in config.args):
        raise pytest.UsageError(f"mark brief: no such case: {sorted(unknown)}")
    yield
    seconds = json.loads(_DURATIONS.read_text())
    total: Counter[str] = Counter()
    for item in items:
        total[_group_of(item)] += seconds.get(_plain_id(item.nodeid), 0)
    if part := config.getoption("--part"):
        _keep_part(config, items, part, total)
    if (seed := _order_of(config)) is not None:
        _shuffle(items, seed)
    else:
        items.sort(key=lambda item: -total[_group_of(item)])


def _shuffle(items: list[pytest.Item], seed: int) -> None:
    # The same on every worker. Tests that share a fixture stay together.
    chance = random.Random(seed)
    chance.shuffle(items)
    place = {group: chance.random() for group in sorted({_group_of(item) for item in items})}
    items.sort(key=lambda item: place[_group_of(item)])


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def _keep_part(
    config: pytest.Config, items: list[pytest.Item], part: tuple[int, int], total: Counter[str]
) -> None:
    number, count = part
    sums = [0.0] * count
    place: dict[str, int] = {}
    for group, seconds in sorted(total.items(), key=lambda entry: (-entry[1], entry[0])):
        place[group] = sums.index(min(sums))
        sums[place[group]] += seconds + 0.1
    config.hook.pytest_deselected(items=[i for i in items if place[_group_of(i)] != number - 1])
    items[:] = [item for item in items if place[_group_of(item)] == number - 1]


def _group_of(item: pytest.Item) -> str:
    """Its module, where a fixture of that is shared, else the test itself."""
    if isinstance(item, pytest.Function):
        fixtures = item._fixtureinfo.name2fixturedefs.values()
        if any(found[-1].scope in ("module", "package") for found in fixtures):
            return item.nodeid.partition("::")[0]
    return item.nodeid.partition("@")[0]


def _plain_id(nodeid: str) -> str:
    return nodeid.partition("@")[0].partition("[")[0]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid.rpartition("@")[0] or report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _IS_WORKER or not session.config.getoption("--record-durations"):
        return
    seen = {_plain_id(nodeid) for nodeid in _seconds}
    most = {test: s for test, s in json.loads(_DURATIONS.read_text()).items() if test not in seen}
    for nodeid, seconds in _seconds.items():
        if seconds >= 0.5:
            plain = _plain_id(nodeid)
            most[plain] = max(most.get(plain, 0.0), round(seconds, 1))
    _DURATIONS.write_text(json.dumps(dict(sorted(most.items())), indent=0) + "\n")


def _case_of(item: pytest.Item) -> str:
    return item.callspec.id if hasattr(item, "callspec") else ""


def _as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    before = State.now()
    yield
    if found := changes(before):
        lines = "\n  ".join(found)
        pytest.fail(f"{request.node.nodeid} has changed the process:\n  {lines}", pytrace=False)


# Set up before all other fixtures of their scopes, and so torn down after them.
_module_as_it_was = pytest.fixture(_as_it_was, scope="module", autouse=True)
_test_as_it_was = pytest.fixture(_as_it_was, autouse=True)


@pytest.fixture(autouse=True)
def _own_cache(_test_as_it_was: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def own_environ() -> Iterator[None]:
    """For a test of what sets variables for the rest of its process."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    return write_model(tmp_path)


@pytest.fixture
def words(tmp_path: Path) -> Path:
    return write_words(tmp_path)


@pytest.fixture
def run_file(tmp_path: Path, tiny_model: Path, words: Path) -> Path:
    """A run file that trains the tiny model on the words for 20 steps in fp32."""
    content = yaml.safe_load(_RUN)
    content["output_dir"] = str(tmp_path / "runs")
    content["model"]["name_or_path"] = str(tiny_model)
    content["data"]["sources"] = [{"path": str(words)}]
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


_RUN = """\
name: tiny
model: {init: scratch}
tokenizer: {train_vocab_size: 300}
data: {seq_length: 32, packing: false, validation_fraction: 0.1}
training: {max_steps: 20, global_batch_size: 12, micro_batch_size: auto, learning_rate: 0.001,
  warmup_steps: 3, precision: 32-true, logging_steps: 5, eval_steps: null}
balance: even
checkpoint: {every_steps: null, every_minutes: null, export_on_finish: false}
track: [jsonl]
"""


@pytest.fixture
def give() -> Callable[..., None]:
    """Gives files to the user OTHER."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files to another user")

    def to_another(*paths: Path) -> None:
        for path in paths:
            os.chown(path, OTHER, OTHER, follow_symlinks=False)

    return to_another
