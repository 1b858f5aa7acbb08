"""A script that starts torchrun by hand: one line for one node, or one for each of several.

Only with static rendezvous does torchrun's --node_rank say where a node stands among the ranks.
"""

from __future__ import annotations

import shlex

from isles import __version__
from isles.config.load import Loaded
from isles.config.sections.cluster import ClusterConfig
from isles.launch.render import alone_command, node_lines
from isles.launch.render.size import Size
from isles.launch.script_template import fill_template


def torchrun_script(loaded: Loaded, size: Size, overrides: tuple[str, ...]) -> str:
    """The text of the script.

    Args:
        loaded: the run file.
        size: its nodes.
        overrides: of the command line.
    """
    config = loaded.config
    cluster = config.clusters[0]
    address, notes = _meeting(cluster, size)
    nodes = "one node" if size.nodes == 1 else f"{size.nodes} nodes"
    return fill_template(
        "torchrun.sh.jinja",
        head=[
            f"{config.name}: {size.world_size} ranks on {nodes} under torchrun",
            f"written by isles {__version__}; it does not need the command isles to run",
            *size.notes,
            *notes,
        ],
        setting=node_lines(cluster, size.workdir, nodes=size.nodes, device=size.device),
        gpus=size.device == "cuda",
        nproc=size.nproc,
        names=[host.ssh for host in cluster.hosts],
        address=shlex.quote(address) if address else None,
        interface=cluster.network.interface,
        port=cluster.network.port,
        command=shlex.join(alone_command(loaded, overrides)),
    )


def _meeting(cluster: ClusterConfig, size: Size) -> tuple[str | None, list[str]]:
    """The address of the first node, where it is known, and what to say of it."""
    if size.nodes == 1:
        return None, []
    notes = ["on every node, within a few minutes of one another: bash THIS_FILE NODE"]
    if not cluster.hosts:
        notes.append("before that: export MASTER_ADDR=the address at which the others reach node 0")
        return None, notes
    head = cluster.hosts[0]
    address = head.address or head.ssh.rpartition("@")[2]
    if not address.replace(".", "").isdigit():
        notes.append(f"every node must know {address} by an address that is not its loopback:")
        notes.append("launcher.hosts: [{ssh: ..., address: ...}] names one")
    return address, notes
