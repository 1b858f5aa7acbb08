"""examples/slurm_ddp on a real Slurm, as its document has it: srun a rank, and torchrun a node."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.deadline import run_program
from tests.documents import ROOT
from tests.lab.home import sh
from tests.lab.hosts import Lab
from tests.lab.slurm import OVER, job_fields, slurm, wait_for_job
from tests.programs import write_program

pytestmark = pytest.mark.long

NUM_HOSTS = 2
DOCUMENT = (ROOT / "tests" / "seeds" / "S3.md").read_text(encoding="utf-8")

NVIDIA_SMI = """\
[ "$*" = "--query-gpu=index,name,memory.total --format=csv,noheader,nounits" ] || exit 6
echo "0, NVIDIA H200, 143771"
"""


@dataclass
class Site:
    """A login node, and the folder of the example there."""

    lab: Lab
    folder: Path

    def type(self, line: str) -> str:
        """A line of bash in the example's folder on the login node."""
        path = f"/shared/bin:{Path(sys.executable).parent}:$PATH"
        setting = f"export PATH={path} OMP_NUM_THREADS=1 USER=root"
        return sh(self.lab, "ctl", f"cd /shared/{self.folder.name} && {setting} && {line}")

    def submit(self, line: str) -> str:
        """A line that submits a job; its number."""
        found = re.fullmatch(r"Submitted batch job (\d+)\n", self.type(line))
        assert found
        return found[1]

    def end(self, job: str) -> list[str]:
        """The lines of a job's output, once it has ended well."""
        # Its script may have ended well, and Slurm cleans up, which may take it minutes.
        state = wait_for_job(self.lab, job, *OVER, "COMPLETING")
        out, error = (self.folder / f"train_distributed_{job}.{end}" for end in ("out", "err"))
        code = job_fields(self.lab, job)["ExitCode"]
        assert state in ("COMPLETED", "COMPLETING") and code == "0:0", error.read_text()
        return out.read_text().splitlines()

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        """A finished model."""
        return dict(torch.load(self.folder / name / "model_distributed.pt"))


@pytest.fixture(scope="module")
def site(lab: Lab) -> Iterator[Site]:
    with pytest.MonkeyPatch.context() as patch:
        # As large as the document's nodes, as far as Slurm is concerned.
        patch.setenv("CPUS", "28")
        patch.setenv("MEM", "204800")
        folder = lab.shared / "slurm_ddp"
        shutil.copytree(ROOT / "examples" / "slurm_ddp", folder)
        write_program(lab.shared / "bin" / "nvidia-smi", NVIDIA_SMI)
        with slurm(lab):
            yield Site(lab, folder)


@pytest.fixture(scope="module")
def job(site: Site) -> str:
    """The document's own command."""
    line = "sbatch train_distributed_example.sh"
    assert f"\n{line}\n" in DOCUMENT
    return site.submit(line)


@pytest.fixture(scope="module")
def lines(site: Site, job: str) -> list[str]:
    """What the document's own command has printed."""
    return site.end(job)


def test_the_documents_job(site: Site, job: str, lines: list[str]) -> None:
    """The banner, the lines and the files of the document."""
    rule = "=" * 42
    assert lines[:3] == [rule, "Distributed Training Example", rule]
    shown = re.search(r"Job ID: 123\n(.*\n)*?Local rank: 0\n", DOCUMENT)
    assert shown is not None
    names = [line.partition(":")[0] for line in shown[0].splitlines()]
    values = (job, "2", "a[1-2]", site.lab.address("a1"), "2", "0", "0")
    assert lines[3:10] == [f"{n}: {value}" for n, value in zip(names, values, strict=True)]
    at = lines.index("Node information:")
    assert sorted(lines[at + 1 : at + 3]) == ["a1", "a2"]
    at = lines.index("GPU information:")
    assert lines[at + 1 : at + 3] == ["0, NVIDIA H200, 150755 MB"] * 2
    at = lines.index("Starting training...")
    assert lines[at + 1 : at + 6] == [
        rule,
        "Starting distributed training",
        "World size: 2, Rank: 0, Local rank: 0",
        "Device: cpu",
        "Epochs: 10, Batch size: 32, LR: 0.001",
    ]
    text = "\n".join(lines)
    assert len(re.findall(r"^Batch \d+, Loss: \d+\.\d{4}$", text, re.M)) == 10 * 2
    averages = [float(x) for x in re.findall(r"^Epoch \d+/10, Average Loss: (\S+)$", text, re.M)]
    assert len(averages) == 10 and averages[-1] < averages[0] / 10
    assert lines[-1] == "Training completed successfully!"
    assert lines.count(lines[-1]) == 1, "rank 0 alone speaks"
    files = {path.name for path in site.folder.glob("*.pt")}
    assert files == {"checkpoint_epoch_5.pt", "checkpoint_epoch_10.pt", "model_distributed.pt"}
    state = torch.load(site.folder / "checkpoint_epoch_10.pt")
    assert state["epoch"] == 10 and "state" in state["optimizer_state_dict"]
    assert state["model_state_dict"].keys() == site.weights(".").keys()


def test_torchrun_a_node_resumes_exactly(site: Site, lines: list[str]) -> None:
    """From the checkpoint of epoch 5: the weights of the run that went through, bit for bit."""
    words = "--resume checkpoint_epoch_5.pt --output_dir again"
    job = site.submit(f"LAUNCHER=torchrun sbatch train_distributed_example.sh {words}")
    said = site.end(job)
    assert "Going on after epoch 5" in said
    assert "World size: 2, Rank: 0, Local rank: 0" in said
    rest = [line for line in lines if re.match(r"Epoch ([6-9]|10)/", line)]
    assert [line for line in said if line.startswith("Epoch ")] == rest
    torch.testing.assert_close(site.weights("again"), site.weights("."), rtol=0, atol=0)


def test_two_ranks_of_one_node_sharded_and_accumulated(site: Site, lines: list[str]) -> None:
    """FSDP on half batches, twice as many: the mathematics of the document's run."""
    options = "--nodes=1 --ntasks-per-node=2 --cpus-per-task=14"
    words = "--fsdp --batch_size 16 --grad_accum 2 --epochs 5 --output_dir sharded"
    said = site.end(site.submit(f"sbatch {options} train_distributed_example.sh {words}"))
    assert "Number of nodes: 1" in said and "World size: 2" in said
    theirs = torch.load(site.folder / "checkpoint_epoch_5.pt")["model_state_dict"]
    torch.testing.assert_close(site.weights("sharded"), dict(theirs), rtol=1e-3, atol=1e-4)
    assert (site.folder / "sharded" / "checkpoint_epoch_5.pt").exists()


def test_what_the_document_looks_at_a_job_with(site: Site, job: str) -> None:
    for line in ("squeue -u $USER", "sinfo", "scontrol show nodes"):
        assert line in DOCUMENT
        assert site.type(line)
    assert f"JobId={job} " in site.type(f"scontrol show job {job}")
    # Within an allocation; ping itself is not on every machine of the tests.
    (line,) = re.findall(r"^srun -N 2 ping -c 3 .*$", DOCUMENT, re.M)
    line = line.replace("ping -c 3", "getent ahostsv4")
    text = site.type(f"salloc -N 2 bash -c '{line}'")
    assert text.count(f"{site.lab.address('a1')} ") >= 2


def test_isles_would_submit_the_same_script(site: Site) -> None:
    text = site.type("isles train run.yaml --dry-run")
    for words in ("--nodes=2", "--gres=gpu:1", "--cpus-per-task=28", "--mem=200G"):
        assert f"#SBATCH {words}\n" in text
    assert re.search(r"^  script: train_distributed_example.py ", text, re.M)


def test_alone_with_amp_and_a_tracker(tmp_path: Path) -> None:
    """One process needs no Slurm; MLflow has the figures that were printed."""
    script = ROOT / "examples" / "slurm_ddp" / "train_distributed_example.py"
    words = ["--epochs=2", "--data_size=32", "--amp", "--track=mlflow", "--checkpoint_every=1"]
    environ = {"MLFLOW_TRACKING_URI": str(tmp_path / "store"), "MLFLOW_ALLOW_FILE_STORE": "true"}
    environ |= {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = run_program([sys.executable, script, *words], tmp_path, environ)
    assert done.returncode == 0, done.stderr
    files = {path.name: path for path in (tmp_path / "store").glob("*/*/metrics/*")}
    assert files.keys() == {"loss", "val_loss", "val_within_0.1"}
    # One line a step: when, value, step.
    rows = [line.split() for line in files["loss"].read_text().splitlines()]
    assert [step for _, _, step in rows] == ["1", "2"]
    for _, value, epoch in rows:
        assert f"Epoch {epoch}/2, Average Loss: {float(value):.4f}\n" in done.stdout
    # After one step Adam's mean is a tenth of the gradient, and that has come through bf16.
    state = torch.load(tmp_path / "checkpoint_epoch_1.pt")["optimizer_state_dict"]["state"]
    gradient = state[0]["exp_avg"] * 10
    torch.testing.assert_close(gradient.bfloat16().float(), gradient, rtol=1e-5, atol=1e-9)
    assert (tmp_path / "checkpoint_epoch_2.pt").exists()
