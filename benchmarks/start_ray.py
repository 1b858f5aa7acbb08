"""Time from the command to the first step on the nodes of a Ray cluster, against ssh.

    python benchmarks/start_ray.py [--quick|--smoke] [--hosts N] [--niceness N]

Needs root and `pip install 'isles[ray]'`: the hosts are network namespaces of this machine (see
tests/lab), each a node of one Ray cluster and with its own sshd. Both ways train the run of
start_ssh.py with the same agents, by `isles train` on the machine that has the key, and take turns:
ray ssh ssh ray … Each pair's difference is one figure. `--hosts`: three unless given; all of them
share the cores of this machine, so that with two cores each host has less than one; with --smoke
there is one host. `--niceness`: of Ray's workers, and so of the ranks; 0, as over ssh, unless
given; Ray's own default is 15.

The last line is JSON, medians in seconds; overhead_s is that of the differences ray - ssh, and
submit_s the time from the command to the driver's placement of the agents.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from common import make_parser, need, need_root, pick, print_figures
from start_ssh import BIN, HOSTS, PAIRS, QUICK_PAIRS, RUN_FILE, first_step_at, prepare
from tests.lab.hosts import Lab, hosts
from tests.lab.ray import ADDRESS, ray_cluster

from isles.run.paths import RunDir


def start(lab: Lab, name: str, number: int) -> tuple[float, float]:
    """Seconds to the first step of a run, and to the record of its nodes."""
    begun = time.time()
    words = f"{BIN / 'isles'} train /shared/{name}.yaml --resume no"
    done = lab.run("ctl", ["sh", "-c", f"cd /shared && {words}"])
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    fleet = RunDir(lab.shared / "runs" / f"{name}-{number}").attempt(1).fleet
    return first_step_at(lab, name, number) - begun, fleet.stat().st_mtime - begun


def main() -> None:
    """Measure, and print every pair."""
    parser = make_parser(__doc__, quick=f"{QUICK_PAIRS} pairs, not {PAIRS}")
    parser.add_argument("--niceness", type=int, default=0)
    parser.add_argument("--hosts", type=int, choices=(1, 2, 3), default=3)
    options = parser.parse_args()
    need("torch", "transformers", "ray")
    need_root()
    pairs = pick(options, full=PAIRS, quick=QUICK_PAIRS, smoke=1)
    among = HOSTS[: 1 if options.smoke else options.hosts]
    found: dict[str, list[float]] = {"ray": [], "isles": []}
    placed: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="isles-bench-") as folder,
        hosts(Path(folder), len(among)) as lab,
        ray_cluster(
            lab, dict.fromkeys(among, ("--num-cpus=1",)), *among, niceness=options.niceness
        ),
    ):
        prepare(lab, among)
        ray = f"ray, address: '{ADDRESS}'"
        shape = f"    nodes: {len(among)}\n    gpus_per_node: 1\n    device: cpu\n"
        text = RUN_FILE.format(name="ray", launcher=ray) + shape
        (lab.shared / "ray.yaml").write_text(text)
        for name in found:  # the tokenizer and the data, and files into memory
            start(lab, name, 1)
        for pair in range(pairs):
            for name in found if pair % 2 == 0 else reversed(found):
                first_s, fleet_s = start(lab, name, pair + 2)
                found[name].append(first_s)
                placed += [fleet_s] if name == "ray" else []
            ray_s, ssh_s = found["ray"][-1], found["isles"][-1]
            line = f"ray {ray_s:.2f} s (placed {placed[-1]:.2f} s), ssh {ssh_s:.2f} s"
            print(f"pair {pair + 1}: {line}, {ray_s - ssh_s:+.2f} s", flush=True)
    differences = [a - b for a, b in zip(found["ray"], found["isles"], strict=True)]
    figures = {
        "overhead_s": round(statistics.median(differences), 2),
        "ray_s": round(statistics.median(found["ray"]), 2),
        "ssh_s": round(statistics.median(found["isles"]), 2),
        "submit_s": round(statistics.median(placed), 2),
    }
    print_figures(figures)


if __name__ == "__main__":
    main()
