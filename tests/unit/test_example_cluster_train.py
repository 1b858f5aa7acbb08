"""examples/cluster_train: its words, its health checks, and how an end is told."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deadline import run_program
from tests.documents import ROOT
from tests.each import each
from tests.ports import free_port
from tests.programs import write_program

EXAMPLE = ROOT / "examples" / "cluster_train"
DOCUMENT = (ROOT / "tests" / "seeds" / "S2.md").read_text(encoding="utf-8")

# Says which words and which variables reach the Python part.
PYTHON = """\
[ "$1" != -c ] || exit 0
printf '%s|' "${@:2:5}" "${NPROC_PER_NODE-}" "$BACKEND" "$LOG_LEVEL" "${CONDA_DEFAULT_ENV-}"
"""

# A conda that knows the environments of the document; as the real one it defines a function.
CONDA = """\
cat <<'END'
conda() {
  case $2 in
  purrsight | my_env | base) export CONDA_DEFAULT_ENV=$2 ;;
  *) echo "EnvironmentNameNotFound: Could not find conda environment: $2" >&2; return 1 ;;
  esac
}
END
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the example, and with a python and a conda that only tell."""
    folder = tmp_path / "example"
    shutil.copytree(EXAMPLE, folder)
    write_program(tmp_path / "bin" / "python", PYTHON)
    write_program(tmp_path / "bin" / "conda", CONDA)
    return folder


def typed(place: Path, line: str, *, has_conda: bool = True) -> subprocess.CompletedProcess[str]:
    """A line of the document, in a shell."""
    if not has_conda:
        (place.parent / "bin" / "conda").unlink()
    given = ("BACKEND", "LOG_LEVEL", "NPROC_PER_NODE", "CONDA_ENV", "VIRTUAL_ENV")
    environ = {key: value for key, value in os.environ.items() if key not in given}
    environ["PATH"] = f"{place.parent}/bin:/usr/local/bin:/usr/bin:/bin"
    return run_program(["bash", "-c", line], place, environ)


LINES = sorted(set(re.findall(r"^(?:\w+=\S+ )*\./cluster_train\.sh (?!\[).*$", DOCUMENT, re.M)))


@each(*[line for line in LINES if "$" not in line and "help" not in line])
def test_a_line_of_the_document(line: str, *, place: Path) -> None:
    """Word for word: its words are what is started, and everything else is as documented."""
    logs = place / "logs" / "distributed_training"
    shutil.rmtree(logs, ignore_errors=True)
    done = typed(place, line)
    assert done.returncode == 0, done.stdout + done.stderr
    variables = dict(re.findall(r"(\w+)=(\S+) ", line))
    words = line.partition("./cluster_train.sh ")[2].split()
    expected = words + ["config/train_config.yaml", "1", "0", "localhost", "29500"][len(words) :]
    values = {"BACKEND": "nccl", "LOG_LEVEL": "INFO", "CONDA_ENV": "purrsight"} | variables
    keys = ("NPROC_PER_NODE", "BACKEND", "LOG_LEVEL", "CONDA_ENV")
    expected += [values.get(key, "") for key in keys]
    assert done.stdout.splitlines()[-1] == "|".join(expected) + "|"
    (log,) = logs.glob("cluster_train_*.log")
    assert re.fullmatch(rf"cluster_train_\d{{8}}_\d{{6}}_node{expected[2]}\.log", log.name)
    assert (logs / f"latest_node{expected[2]}.log").resolve() == log


def test_help_and_the_environment_that_it_would_have(place: Path) -> None:
    assert len(LINES) == 13
    done = typed(place, "CONDA_ENV=base LOG_LEVEL=DEBUG ./cluster_train.sh --help")
    assert done.returncode == 0
    defaults = re.findall(r"^- `(\w+)`: .*\(default: `?(\S+?)`?\)$", DOCUMENT, re.M)
    assert len(defaults) == 5
    for name, value in defaults:
        assert re.search(rf"^  {name} .*\(default: {re.escape(value)}\)$", done.stdout, re.M)
    assert "[config_path] [num_nodes] [node_rank] [master_addr] [master_port]" in done.stdout
    assert f"the environment has {place.parent}/bin/python" in done.stdout
    assert not (place / "logs").exists()
    done = typed(place, "./cluster_train.sh --help")
    assert done.returncode == 0 and "[DEBUG]" not in done.stdout


@each(
    ("./cluster_train.sh x.yaml 2 2", "node_rank is '2'", "from 0 to 1"),
    ("./cluster_train.sh x.yaml 08 7 h 99999", "master_port is '99999'", "from 1 to 65535"),
    ("./cluster_train.sh x.yaml 1 0 h 29500 more", "there are 6 words", "--help"),
    ("./cluster_train.sh --nodes=2", "no option --nodes=2", "--help"),
    ("BACKEND=mpi ./cluster_train.sh", "BACKEND is 'mpi'", "nccl gloo"),
    ("NPROC_PER_NODE=0 ./cluster_train.sh", "NPROC_PER_NODE is '0'", "from 1 to 1024"),
)
def test_a_wrong_word_is_refused(line: str, what: str, fix: str, *, place: Path) -> None:
    done = typed(place, line)
    assert done.returncode == 1 and what in done.stderr and fix in done.stderr, done.stderr
    assert not (place / "logs").exists()


HINTS = (
    "Ensure conda is in PATH",
    "Verify environment exists on all nodes",
    "Use `CONDA_ENV` variable to specify correct environment",
)


def test_an_environment_that_is_not_there(place: Path) -> None:
    """With conda, and then without; where none is asked for, it goes on without."""
    for has_conda in (True, False):
        done = typed(place, "CONDA_ENV=nope ./cluster_train.sh", has_conda=has_conda)
        assert done.returncode == 2
        log = (place / "logs" / "distributed_training" / "latest_node0.log").read_text()
        for text in ("Failed to activate conda environment: nope", *HINTS):
            assert text in done.stderr and text in log
        assert ("conda is not on PATH" in log) == (not has_conda)
        shutil.rmtree(place / "logs")
    done = typed(place, "./cluster_train.sh")
    assert done.returncode == 0 and "conda is not on PATH: going on" in done.stdout


def start(place: Path, config: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The Python part itself, as cluster_train.sh starts it."""
    environ = {"BACKEND": "gloo", "LOG_LEVEL": "INFO", "START_TIMEOUT": "1", **variables}
    words = (config, "1", "0", "localhost", "29500", "--log", "node.log")
    return run_program([sys.executable, "launch.py", *words], place, os.environ | environ)


@each(
    (None, "cannot be read"),
    ("epochs: many\n", "epochs: input should be a valid integer"),
    ("epochs: [3\n", "config/bad.yaml:"),
    ("model: {name_or_path: llama-2m}\nlr: 1\n", "config/bad.yaml:2"),
)
def test_a_wrong_configuration(text: str | None, said: str, *, place: Path) -> None:
    """Also of a run file of isles, which isles itself judges."""
    if text is not None:
        (place / "config" / "bad.yaml").write_text(text)
    done = start(place, "config/bad.yaml")
    assert done.returncode == 1 and said in done.stdout, done.stdout + done.stderr
    assert "fix:" in done.stdout and "Traceback" not in done.stderr
    assert done.stdout.splitlines()[-1] in (place / "node.log").read_text()


def test_the_training_script_must_be_there(place: Path) -> None:
    (place / "train_phase2.py").unlink()
    done = start(place, "config/train_config.yaml")
    assert done.returncode == 1 and "train_phase2.py: the training script is not" in done.stdout


def test_nccl_without_a_gpu(place: Path) -> None:
    done = start(place, "config/train_config.yaml", BACKEND="nccl", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    said = done.stdout[done.stdout.index("error: ") :]
    hints = ("Check GPU compatibility", "Verify CUDA installation", "Try `BACKEND=gloo` for debug")
    assert [text for text in ("NCCL initialization failed", *hints) if text not in said] == []


def inside(place: Path, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A few lines of Python beside launch.py, for node 1 of 2; their output is what is said."""
    head = "import sys; from pathlib import Path; from health import *; from launch import *\n"
    head += "from isles.errors import UserError\n"
    head += "node = Node(Path('x'), 2, NODE, '127.0.0.1', PORT, Path('node.log'))\n"
    head += "output = Output(open('node.log', 'w'), 'node', 'INFO')\n"
    text = head + code
    for name, value in variables.items():
        text = text.replace(name, value)
    return run_program([sys.executable, "-c", text], place)


NETWORK = """
try:
    print(check_network(node, 0.5, output))
except UserError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def test_a_master_that_is_not_there_and_one_that_cannot_listen(place: Path) -> None:
    """Each is said with its hints, and by its exit code."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        there = inside(place, NETWORK, NODE="1", PORT=port)
        taken = inside(place, NETWORK, NODE="0", PORT=port)
    assert there.returncode == 0 and f"node 0 answers at 127.0.0.1:{port}" in there.stdout
    assert taken.returncode == 5 and f"cannot listen at 127.0.0.1:{port}" in taken.stdout
    gone = inside(place, NETWORK, NODE="1", PORT=port)
    assert gone.returncode == 5
    fixes = gone.stdout[gone.stdout.index(f"Cannot connect to master node at 127.0.0.1:{port}") :]
    for fix in ("firewall settings", "master node is running", "correct IP address and port"):
        assert fix in fixes


END = """
import os
ranks = Ranks(["bash", "-c", SCRIPT], dict(os.environ), output)
status = ranks.wait(WAIT, "all")
sys.exit(conclude(node, ranks, status, WAIT, output))
"""


MET = "echo 'check 5/5 PyTorch distributed: right'; "
FULL = "echo 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB'"  # torch's words
TERM = "kill -TERM $PPID; while :; do sleep 0.1; done"
LEVERS = ("Reduce batch size in config", "Use gradient accumulation", "Enable mixed precision")


@each(
    (MET, 0, ("training has finished",)),
    (f"{MET}{FULL}; exit 1", 4, ("error: CUDA out of memory\n", *LEVERS)),
    ("echo 'error: NCCL initialization failed: rank 3'; exit 1", 2, ("rank 3",)),
    (MET + "exit 7", 3, ("training has ended with exit code 7", "LOG_LEVEL=DEBUG")),
    ("exit 1", 5, ("the ranks of 2 nodes have not met at 127.0.0.1:", "node_rank")),
    ("exec sleep 100", 5, ("have not met at", "within 1 s")),
    (f"{MET}trap 'echo saving; exit 9' TERM; {TERM}", 143, ("saving\n", "ended by SIGTERM")),
)
def test_its_end_is_told(script: str, code: int, words: tuple[str, ...], *, place: Path) -> None:
    """Where torchrun is this script: by what is printed, its exit code, and what did not come."""
    wait_s = "1" if script.startswith("exec sleep") else "60"
    values = {"SCRIPT": repr(script), "WAIT": wait_s, "NODE": "0", "PORT": "29500"}
    done = inside(place, END, **values)
    assert done.returncode == code, done.stdout + done.stderr
    for text in words:
        assert text in done.stdout


@pytest.mark.long
def test_a_rank_that_nccl_fails_for(place: Path) -> None:
    """On a torch without CUDA, with what a GPU's rank would do: the text, its hints, and where."""
    environ = {"BACKEND": "nccl", "CHECK_TIMEOUT": "20", "CHECK_CONFIG": "config/isles.yaml"}
    environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": ""}
    environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = ["rank_check.py", "train_phase2.py"]
    done = run_program([sys.executable, *words], place, os.environ | environ)
    assert done.returncode == 1
    for text in ("NCCL initialization failed: rank 0 of 1 on ", "Verify CUDA installation"):
        assert text in done.stderr, done.stderr


def test_the_documents_own_validation(place: Path) -> None:
    """python -c "from train.train_llm.train_llm_conf import load_config; …", and an empty file."""
    (line,) = re.findall(r"^python -c \"from train.*$", DOCUMENT, re.M)
    environ = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = run_program(["bash", "-c", line], place, environ)
    assert done.returncode == 0, done.stderr
    assert "batch_size=8" in done.stdout and "gradient_checkpointing=False" in done.stdout
