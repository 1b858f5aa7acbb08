"""The variables of gloo and NCCL that follow from the section `network`."""

from __future__ import annotations

from isles.config.sections.cluster import NetworkConfig

_PROFILES = {
    "auto": {},
    "infiniband": {"NCCL_IB_DISABLE": "0"},
    # The index of the GID is a matter of RoCE; on InfiniBand it would choose a wrong one.
    "roce": {"NCCL_IB_DISABLE": "0", "NCCL_IB_GID_INDEX": "3"},
    "ethernet": {"NCCL_IB_DISABLE": "1"},
}


def network_variables(network: NetworkConfig, interface: str | None, device: str) -> dict[str, str]:
    """What the ranks of one node need in their environment to reach the others.

    Args:
        network: the cluster's section.
        interface: the interface that has the node's address, as found out; None: not known. What
            the section names wins.
        device: cpu or cuda.

    Returns:
        Variables; none for a network that its libraries are left to find out. Those of the user
        (`environment.variables`) are to win over them.
    """
    name = network.interface or interface
    # Ranks on GPUs also use gloo: for what is small, and for checkpoints beside training.
    variables = {"GLOO_SOCKET_IFNAME": name} if name else {}
    if device == "cuda":
        variables |= {"NCCL_SOCKET_IFNAME": name} if name else {}
        variables |= _PROFILES[network.profile]
    return variables


def network_line(network: NetworkConfig, interface: str | None, device: str) -> str:
    """The choice in one line, for the user."""
    variables = network_variables(network, interface, device)
    words = " ".join(f"{name}={value}" for name, value in variables.items())
    return f"network {network.profile}: {words or 'left to gloo and NCCL'}"
