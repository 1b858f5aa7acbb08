"""Faults put in by hand: each must be caught by the tests that are named with it.

    python -m tests.faults [NAME …]      all of them, or those whose name contains a word

Each is put into a copy of the repository, whose tests are run there; one that no test notices fails
this command. `make test` only looks whether each can still be put in (`tests/unit/test_faults.py`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "isles"
FAILED = 1  # pytest's exit code: tests were run, and some failed

_RESUME = "tests/dist/test_resume.py::test_"
_BROKEN = f"{_RESUME}a_broken_newest_checkpoint_is_named_and_the_one_before_is_taken"
_KILLED = f"{_RESUME}kills_at_any_instant_change_no_bit"


@dataclass(frozen=True)
class Fault:
    """`old` stands once in `file`, below src/isles, and becomes `new`; `tests` must notice."""

    name: str
    file: str
    old: str
    new: str
    tests: str


FAULTS = (
    Fault(
        "the pseudo-gradient has the other sign",
        "outer/diloco.py",
        "self.piece(self.outer_param, index) - self.piece(self.snapshot, index)",
        "self.piece(self.snapshot, index) - self.piece(self.outer_param, index)",
        "tests/unit/test_outer_diloco.py",
    ),
    Fault(
        "the outer momentum is not Nesterov's",
        "outer/diloco.py",
        "gradient.add_(velocity * self._settings.momentum)",
        "gradient.copy_(velocity)",
        "tests/unit/test_outer_diloco.py",
    ),
    Fault(
        "what an encoding left out is forgotten",
        "outer/diloco.py",
        "torch.sub(update, sent, out=self.piece(self.error, index))",
        "self.piece(self.error, index).zero_()",
        "tests/unit/test_outer_diloco.py",
    ),
    Fault(
        "an average ignores the weights of the clusters",
        "outer/average.py",
        "total.add_(one.mul_(weight))",
        "total.add_(one.mul_(1.0 / len(parts)))",
        "tests/unit/test_outer_codec.py",
    ),
    Fault(
        "a permutation may leave its range",
        "data/order.py",
        "outside = np.flatnonzero(placed >= n)",
        "outside = np.flatnonzero(placed > n)",
        "tests/unit/test_data_order.py",
    ),
    Fault(
        "every epoch has the same order",
        "data/order.py",
        "permute(place, total, key_from(self._seed, 0, epoch))",
        "permute(place, total, key_from(self._seed, 0, epoch * 0))",
        "tests/unit/test_data_order.py",
    ),
    Fault(
        "the cursor is one sample off",
        "data/loader.py",
        "next_sample=first + size,",
        "next_sample=first + size + 1,",
        "tests/unit/test_data_loader.py",
    ),
    Fault(
        "ranks read the same rows",
        "dist/split.py",
        "return sum(self.rows[:dp_rank])",
        "return 0",
        "tests/unit/test_data_loader.py",
    ),
    Fault(
        "the loss is divided by this rank's tokens",
        "data/loader.py",
        "loss_divisor=self._dataset.loss_divisor(sample_ids),",
        "loss_divisor=self._dataset.loss_divisor(sample_ids[start : start + sum(sizes)]),",
        "tests/dist/test_same_mathematics.py",
    ),
    Fault(
        "gradients are not clipped",
        "strategies/stepper.py",
        "if max_norm is not None:",
        "if max_norm is not None and max_norm < 0:",
        "tests/unit/test_optimizer.py",
    ),
    Fault(
        "a gradient that is not finite is stepped",
        "strategies/stepper.py",
        "            self._guard.watch(norm)\n        if max_norm",
        "            pass\n        if max_norm",
        "tests/dist/test_failures.py tests/unit/test_no_sync.py",
    ),
    Fault(
        "norms and biases decay",
        "train/optimizer.py",
        'if p.ndim < 2], "weight_decay": 0.0}',
        'if p.ndim < 2], "weight_decay": config.weight_decay}',
        "tests/unit/test_optimizer.py",
    ),
    Fault(
        "the warmup begins at zero",
        "config/sections/training.py",
        "return peak * step / (warmup + 1)",
        "return peak * (step - 1) / (warmup + 1)",
        "tests/unit/test_schedule.py",
    ),
    Fault(
        "the learning rate falls a step early",
        "config/sections/training.py",
        "(step - 1 - start)",
        "(step - start)",
        "tests/unit/test_schedule.py",
    ),
    Fault(
        "the reference of DPO has the other sign",
        "strategies/objective.py",
        "losses_BT.sum(1) - part.reference_B",
        "losses_BT.sum(1) + part.reference_B",
        "tests/unit/test_dpo.py",
    ),
    Fault(
        "a broken checkpoint is gone on with",
        "checkpoint/load.py",
        "issues = verify_checkpoint(folder)\n        if not issues:",
        "issues = verify_checkpoint(folder)\n        if not issues or record:",
        _BROKEN,
    ),
    Fault(
        "one checkpoint more is removed than should be",
        "checkpoint/save.py",
        "len(older) + 1 - self._config.keep",
        "len(older) + 2 - self._config.keep",
        _KILLED,
    ),
    Fault(
        "changed bytes of a checkpoint are not seen",
        "run/checkpoints.py",
        'elif hash_file(file) != expected["sha256"]:',
        'elif hash_file(file) == "":',
        _BROKEN,
    ),
    Fault(
        "what is written is not on the disk before it is renamed",
        "run/records.py",
        "            if durable:\n                os.fsync(stream.fileno())",
        "            if durable:\n                pass",
        "tests/unit/test_durable.py",
    ),
    Fault(
        "the files of a checkpoint are not on the disk before it is named",
        "checkpoint/save.py",
        "    for file in partial.iterdir():\n        _flush(file)",
        "    for file in partial.iterdir():\n        pass",
        "tests/unit/test_durable.py",
    ),
    Fault(
        "random numbers begin anew at a resume",
        "checkpoint/load.py",
        "torch.set_rng_state(",
        "bool(",
        "tests/dist/test_resume.py",
    ),
    Fault(
        "the token of an agent is not compared",
        "agent/protocol.py",
        "return hmac.compare_digest(str(given).encode(), proof(token, challenge, role).encode())",
        "return bool(given)",
        "tests/unit/test_agent_coordinator.py",
    ),
    Fault(
        "the file of a token may be read by all",
        "run/records.py",
        "os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)",
        "os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)",
        "tests/unit/test_outer_hub.py",
    ),
    Fault(
        "the last error is taken for the cause",
        "agent/failure.py",
        'return min(own, key=lambda error: float(error["at"]))',
        'return max(own, key=lambda error: float(error["at"]))',
        "tests/unit/test_agent_failure.py",
    ),
    Fault(
        "deaths without progress are repeated for ever",
        "agent/failure.py",
        "and _furthest(reached, saved) <= _furthest(last.reached, last.saved)",
        "and _furthest(reached, saved) < _furthest(last.reached, last.saved)",
        "tests/unit/test_agent_failure.py",
    ),
    Fault(
        "there is one restart too many",
        "agent/failure.py",
        'decision == "restart" and len(before) >= max_restarts',
        'decision == "restart" and len(before) > max_restarts',
        "tests/unit/test_agent_failure.py",
    ),
    Fault(
        "a frozen process takes its own pause for the silence of the others",
        "agent/protocol.py",
        "self.seconds += min(now_s - self._looked_at, self._LONGEST_GAP_S)",
        "self.seconds += now_s - self._looked_at",
        "tests/unit/test_agent_coordinator.py::test_a_process_that_was_frozen_does_not_take_the_others_for_lost",
    ),
    Fault(
        "a lease that is asked for twice gives two blocks",
        "outer/hub/samples.py",
        'if number <= member["claim"]:',
        "if number < 0:",
        "tests/unit/test_outer_hub.py",
    ),
    Fault(
        "a block that one cluster holds is leased to another",
        "outer/hub/samples.py",
        '"SELECT * FROM blocks WHERE owner = ? ORDER BY start"',
        '"SELECT * FROM blocks WHERE owner >= ? ORDER BY start"',
        "tests/unit/test_outer_hub.py",
    ),
    Fault(
        "a queue starts the same job in vain for ever",
        "agent/requeue.py",
        "times += not entry.is_counted",
        "times += 0",
        "tests/unit/test_agent_requeue.py",
    ),
    Fault(
        "an unknown key of a run file is let through",
        "config/load.py",
        "config = _typed(_without_unknown(data, ()))",
        "config, issues = _typed(_without_unknown(data, ())), []",
        "tests/unit/test_config_load.py",
    ),
    Fault(
        "packed documents see one another",
        "data/loader.py",
        '"position_ids_BT": positions_BT,',
        '"position_ids_BT": None,',
        "tests/dist/test_packing.py",
    ),
)


def put_in(fault: Fault, source: Path) -> None:
    """Change the file.

    Raises:
        ValueError: the line is not there, or several times.
    """
    path = source / fault.file
    text = path.read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: {fault.file} has {text.count(fault.old)} of {fault.old!r}")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")


def is_caught(fault: Fault) -> bool:
    """Whether a test fails in a copy of the repository that has this fault."""
    with tempfile.TemporaryDirectory(prefix="isles-fault-") as folder:
        copy = Path(folder) / "isles"
        ignored = shutil.ignore_patterns(".*", "__pycache__", "runs", "site", "node_modules")
        shutil.copytree(ROOT, copy, ignore=ignored)
        put_in(fault, copy / "src" / "isles")
        words = [*fault.tests.split(), "-q", "-x", "-n", "0", "-m", "not long and not gpu"]
        done = subprocess.run(
            [sys.executable, "-m", "tests", *words],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"},
            check=False,
            capture_output=True,
            text=True,
        )
    if done.returncode not in (0, FAILED):
        said = done.stdout[-3000:] + done.stderr[-3000:]
        raise RuntimeError(f"{fault.name}: the tests ended with {done.returncode}\n{said}")
    return done.returncode == FAILED


def _print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Put in the faults one by one; the exit code is 1 where one is not caught."""
    wanted = [f for f in FAULTS if not sys.argv[1:] or any(w in f.name for w in sys.argv[1:])]
    missed = 0
    for fault in wanted:
        began = time.monotonic()
        caught = is_caught(fault)
        missed += not caught
        seconds = time.monotonic() - began
        _print_line(f"{'caught' if caught else 'MISSED'} {seconds:5.0f} s  {fault.name}")
    _print_line(f"{len(wanted) - missed} of {len(wanted)} faults are caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
