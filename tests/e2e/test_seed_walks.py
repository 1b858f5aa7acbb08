"""The documents in tests/seeds, line by line: a test runs it, or walk.txt says why none does.

walk.txt has headings, and below each the lines of the documents that it holds for:

    = run: TEST …             by these tests, on CPUs, where need be with other addresses and sizes
    = here: …                 run by this module as they stand, in an empty home
    = needs: …                hardware, machines or an account that are not here
    = not ours: …             programs and folders of others, which work as they do without isles
    = instead: …              what isles does in its place, and why

A line is `S0` and the command as it is typed, or `S1 json 2` for the second block of a language.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.deadline import run_program
from tests.documents import ROOT, blocks, commands
from tests.programs import write_program
from tests.unit.test_requirements import functions_of

SEEDS = ROOT / "tests" / "seeds"
KINDS = ("run", "here", "needs", "not ours", "instead")


def pieces(document: str) -> list[str]:
    """Every command line and every other block of a document, each once, in its order."""
    found: list[str] = []
    count: Counter[str] = Counter()
    for block in blocks(SEEDS / f"{document}.md"):
        if block.is_shell:
            # Options of a job are comments to a shell and commands to a queue.
            text = re.sub(r"^#(SBATCH|PBS) ", r"\1 ", block.text, flags=re.M)
            found += [f"{document} {line}" for line in commands(text)]
        else:
            language = block.language or "text"
            count[language] += 1
            found.append(f"{document} {language} {count[language]}")
    return list(dict.fromkeys(found))


def walk() -> list[tuple[str, str, str]]:
    """Each line of walk.txt: its kind, what stands behind it, and the line of the document."""
    found: list[tuple[str, str, str]] = []
    kind = what = ""
    for line in (SEEDS / "walk.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("= "):
            kind, _, what = line[2:].partition(": ")
        elif line and not line.startswith("#"):
            found.append((kind, what, line))
    return found


def test_every_line_of_the_documents_is_in_the_walk_once() -> None:
    wanted = [piece for document in EXPECTED for piece in pieces(document)]
    assert len(wanted) > 150
    assert sorted(line for _, _, line in walk()) == sorted(wanted)


def test_every_kind_has_its_tests_or_its_reason() -> None:
    for kind, what, line in walk():
        assert kind in KINDS, f"{kind}: {line}"
        if kind != "run":
            assert len(what.split()) > 2, f"no reason: {line}"
            continue
        assert what, f"no test: {line}"
        for name in what.split():
            file, _, function = name.partition("::")
            assert function in functions_of(file), f"{name}: {line}"


EXPECTED = {
    "S0": ("CUDA available: ", "Device count: "),
    "S1": ("NCCL_ASYNC_ERROR_HANDLING=1", "NCCL_SOCKET_IFNAME=^lo,docker"),
    "S2": ("CUDA: ", "NCCL_IB_GID_INDEX=3"),
    "S3": ("NCCL_DEBUG=INFO",),
    "S4": ("CUDA: ", "OK", "scripts", "id_ed25519.pub"),
}
"""What the lines of a document that are run here leave to be seen."""


def bash(script: str, folder: Path, *bins: Path) -> str:
    """What a script prints, in a home of its own; it must end well."""
    path = ":".join([*map(str, bins), str(Path(sys.executable).parent), os.environ["PATH"]])
    environ = {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HOME": str(folder),
        "PATH": path,
    }
    done = run_program(["bash", "-c", script], folder, environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("document", EXPECTED)
def test_lines_that_need_nothing_run_as_they_stand(document: str, tmp_path: Path) -> None:
    here = (line.partition(" ") for kind, _, line in walk() if kind == "here")
    lines = [typed for name, _, typed in here if name == document]
    (tmp_path / ".ssh").mkdir()
    said = bash("\n".join(["set -e", *lines, "set +e", "env", "find ~ | sort"]), tmp_path)
    assert [text for text in EXPECTED[document] if text not in said] == [], said


@pytest.mark.long
def test_the_training_lines_of_the_slurm_example(tmp_path: Path) -> None:
    """Each on one rank, with an srun that only starts what it is given."""
    lines = [line for line in pieces("S3") if line.startswith("S3 srun python train_distributed")]
    assert len(lines) == 2
    folder = tmp_path / "example"
    shutil.copytree(ROOT / "examples" / "slurm_ddp", folder)
    bins = write_program(tmp_path / "bin" / "srun", 'exec "$@"').parent
    long, small = (bash(line.removeprefix("S3 "), folder, bins) for line in lines)
    assert "Epochs: 20, Batch size: 64, LR: 0.0001\n" in long
    assert "Epoch 20/20, Average Loss: " in long
    assert "Batch 70, Loss: " in long, "5000 samples are 79 batches of 64"
    assert "Epochs: 10, Batch size: 16, LR: 0.001\n" in small
    assert (folder / "model_distributed.pt").is_file()
