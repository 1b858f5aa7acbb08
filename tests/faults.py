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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "isles"
FAILED = 1  # pytest's exit code: tests were run, and some failed


@dataclass(frozen=True)
class Fault:
    """`old` stands once in `file`, below src/isles, and becomes `new`; `tests` must notice."""

    name: str
    file: str
    old: str
    new: str
    tests: str


# Each: its name; the file and the tests, below tests/; lines that go, and those that come instead.
_TABLE = r"""
= the pseudo-gradient has the other sign
outer/diloco.py unit/test_outer_diloco.py
- self.piece(self.outer_param, index) - self.piece(self.snapshot, index)
+ self.piece(self.snapshot, index) - self.piece(self.outer_param, index)
= the outer momentum is not Nesterov's
outer/diloco.py unit/test_outer_diloco.py
- gradient.add_(velocity * self._settings.momentum)
+ gradient.copy_(velocity)
= what an encoding left out is forgotten
outer/diloco.py unit/test_outer_diloco.py
- torch.sub(update, sent, out=self.piece(error, index))
+ self.piece(error, index).zero_()
= an average ignores the weights of the clusters
outer/average.py unit/test_outer_codec.py
- total.add_(one.mul_(weight))
+ total.add_(one.mul_(1.0 / len(parts)))
= a permutation may leave its range
data/order.py unit/test_data_loader.py
- outside = np.flatnonzero(placed >= n)
+ outside = np.flatnonzero(placed > n)
= every epoch has the same order
data/order.py unit/test_data_loader.py
- permute(place, total, key_from(self._seed, 0, epoch))
+ permute(place, total, key_from(self._seed, 0, epoch * 0))
= the cursor is one sample off
data/loader.py unit/test_data_loader.py
- next_sample=first + size,
+ next_sample=first + size + 1,
= ranks read the same rows
dist/split.py unit/test_data_loader.py
- return sum(self.rows[:dp_rank])
+ return 0
= the loss is divided by this rank's tokens
data/loader.py dist/test_same_mathematics.py
- loss_divisor=self._dataset.loss_divisor(sample_ids),
+ loss_divisor=self._dataset.loss_divisor(sample_ids[start : start + sum(sizes)]),
= gradients are not clipped
strategies/stepper.py unit/test_optimizer.py
- if max_norm is not None:
+ if max_norm is not None and max_norm < 0:
= a gradient that is not finite is stepped
strategies/stepper.py dist/test_failures.py unit/test_optimizer.py
-             self._guard.watch(norm)
-         if max_norm
+             pass
+         if max_norm
= a skipped step changes Muon's weights
train/optimizer/shards.py unit/test_optimizer.py
- torch.where(keeps, before, after, out=before)
+ before.copy_(after)
= Muon's updates come back to other ranks' rows
train/optimizer/muon.py dist/test_muon.py
- torch.cat([part.reshape(-1) for part in torch.split(whole, rows, dim=1)])
+ whole.reshape(-1)
= norms and biases decay
train/optimizer/make.py unit/test_optimizer.py
- if p.ndim < 2], "weight_decay": 0.0}
+ if p.ndim < 2], "weight_decay": config.weight_decay}
= the warmup begins at zero
config/sections/training.py unit/test_optimizer.py
- return peak * step / (warmup + 1)
+ return peak * (step - 1) / (warmup + 1)
= the learning rate falls a step early
config/sections/training.py unit/test_optimizer.py
- (step - 1 - start)
+ (step - start)
= the reference of DPO has the other sign
strategies/objective.py unit/test_loss_head.py
- losses_BT.sum(1) - part.reference_B
+ losses_BT.sum(1) + part.reference_B
= a broken checkpoint is gone on with
checkpoint/load.py
dist/test_resume.py::test_stops_and_a_broken_checkpoint_change_no_bit
- issues = verify_checkpoint(folder)
-         if not issues:
+ issues = verify_checkpoint(folder)
+         if not issues or record:
= one checkpoint more is removed than should be
checkpoint/save.py dist/test_resume.py::test_kills_at_any_instant_change_no_bit
- len(older) + 1 - self._config.keep
+ len(older) + 2 - self._config.keep
= changed bytes of a checkpoint are not seen
run/checkpoints.py
dist/test_resume.py::test_stops_and_a_broken_checkpoint_change_no_bit
- elif hashes and hash_file(file) != expected.sha256:
+ elif hashes and hash_file(file) == "":
= what is written is not on the disk before it is renamed
run/records.py unit/test_store.py
-             if durable:
-                 os.fsync(stream.fileno())
+             if durable:
+                 pass
= the files of a checkpoint are not on the disk before it is named
checkpoint/save.py unit/test_store.py
- os.fsync(handle)
-         _drop_cache(handle, 0, 0)
+ _drop_cache(handle, 0, 0)
= random numbers begin anew at a resume
checkpoint/load.py dist/test_resume.py
- torch.set_rng_state(
+ bool(
= the token of an agent is not compared
agent/protocol.py unit/test_agent_coordinator.py
- return hmac.compare_digest(str(given).encode(), proof(token, challenge, role).encode())
+ return bool(given)
= the file of a token may be read by all
run/records.py unit/test_outer_hub.py
- os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
+ os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
= the last error is taken for the cause
agent/failure.py unit/test_agent_failure.py
- return min(own, key=lambda error: float(error["at"]))
+ return max(own, key=lambda error: float(error["at"]))
= deaths without progress are repeated for ever
agent/failure.py unit/test_agent_failure.py
- and _furthest(reached, saved) <= _furthest(last.reached, last.saved)
+ and _furthest(reached, saved) < _furthest(last.reached, last.saved)
= there is one restart too many
agent/failure.py unit/test_agent_failure.py
- decision == "restart" and (last.count if last else 0) >= max_restarts
+ decision == "restart" and (last.count if last else 0) > max_restarts
= a frozen process takes its own pause for the silence of the others
agent/protocol.py
unit/test_agent_coordinator.py::test_a_process_that_was_frozen_does_not_take_the_others_for_lost
- self.seconds += min(now_s - self._looked_at, self._LONGEST_GAP_S)
+ self.seconds += now_s - self._looked_at
= a lease that is asked for twice gives two blocks
outer/hub/samples.py unit/test_outer_hub.py
- if number <= member["claim"]:
+ if number < 0:
= a block that one cluster holds is leased to another
outer/hub/samples.py unit/test_outer_hub.py
- free = "SELECT * FROM blocks WHERE owner = ? ORDER BY start LIMIT ?"
+ free = "SELECT * FROM blocks WHERE owner >= ? ORDER BY start LIMIT ?"
= a queue starts the same job in vain for ever
agent/requeue.py unit/test_slurm.py
- times += not entry.is_counted
+ times += 0
= an unknown key of a run file is let through
config/load.py unit/test_config_load.py
- config = _typed(_without_unknown(data, ()))
+ config, issues = _typed(_without_unknown(data, ())), []
= packed documents see one another
data/loader.py dist/test_packing.py
- "position_ids_BT": positions_BT,
+ "position_ids_BT": None,
"""


def _read(table: str) -> Iterator[Fault]:
    for part in table.strip().removeprefix("= ").split("\n= "):
        name, *lines = part.split("\n")
        file, *tests = " ".join(line for line in lines if line[0] not in "-+").split()
        old, new = ("\n".join(line[2:] for line in lines if line.startswith(sign)) for sign in "-+")
        yield Fault(name, file, old, new, " ".join(f"tests/{test}" for test in tests))


FAULTS = tuple(_read(_TABLE))


def is_caught(fault: Fault) -> bool:
    """Whether a test fails in a copy of the repository that has this fault."""
    with tempfile.TemporaryDirectory(prefix="isles-fault-") as folder:
        copy = Path(folder) / "isles"
        ignored = shutil.ignore_patterns(".*", "__pycache__", "runs", "site", "node_modules")
        shutil.copytree(ROOT, copy, ignore=ignored)
        file = copy / "src" / "isles" / fault.file
        text = file.read_text(encoding="utf-8")
        assert text.count(fault.old) == 1, f"{fault.name}: {fault.file} has it not once"
        file.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
        words = [*fault.tests.split(), "-q", "-x", "-n", "0", "-m", "not long and not gpu"]
        env = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests", *words]
        done = subprocess.run(command, cwd=copy, env=env, check=False, capture_output=True)
    assert done.returncode in (0, FAILED), (done.stdout[-3000:] + done.stderr[-3000:]).decode()
    return done.returncode == FAILED


def main() -> int:
    """Put in the faults one by one; the exit code is 1 where one is not caught."""
    wanted = [f for f in FAULTS if not sys.argv[1:] or any(w in f.name for w in sys.argv[1:])]
    missed = 0
    for fault in wanted:
        began = time.monotonic()
        caught = is_caught(fault)
        missed += not caught
        said = f"{'caught' if caught else 'MISSED'} {time.monotonic() - began:5.0f} s"
        sys.stdout.write(f"{said}  {fault.name}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(wanted) - missed} of {len(wanted)} faults are caught\n")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
