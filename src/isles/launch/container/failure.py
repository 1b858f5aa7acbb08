"""Explanations of failed container starts, and of containers without isles."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from isles import __version__
from isles.errors import PreflightError

MARK = "isles: in the container"
"""Prefix of the line on stderr before a container is entered."""


def refusal_line(error: PreflightError) -> str:
    """The line of stderr from which `explain` reads an error of this program itself."""
    found = {"what": error.what, "where": error.where, "fix": error.fix, "id": error.id}
    return f"{MARK}: {json.dumps(found)}\n"


def explain(text: str, record: Mapping[str, Any] | None = None) -> PreflightError | None:
    """Why a container could not be entered, or lacks isles, from its stderr; None: the text is not
    about a container.

    Args:
        text: the stderr.
        record: the container's record, if a scheduler entered the container without a line of
            isles.
    """
    if record is not None and MARK not in text:
        text = f"{MARK} {record['image']} (by pyxis)\n{text}"
    refused = re.search(rf"^{re.escape(MARK)}: (.*)$", text, re.M)
    if refused is not None:
        return PreflightError(**json.loads(refused[1]))
    begin = text.rfind(MARK)
    if begin < 0:
        return None
    line, _, words = text[begin:].partition("\n")
    image = line.removeprefix(MARK).strip()
    name = image.rpartition(" (by ")[0]
    where = f"host {os.uname().nodename}"
    for pattern, found_id, what, fix in _FAILURES:
        if re.search(pattern, words, re.MULTILINE):
            texts = [part.format(image=name, version=__version__) for part in (what, fix)]
            return PreflightError(texts[0], where=where, fix=texts[1], id=found_id)
    return None


_FAILURES = (
    (
        r"No module named '?isles'?$|No module named '?isles'?\)",
        "isles.installed",
        "the image {image} does not contain isles",
        "install isles in the image, as in a Dockerfile: RUN pip install "
        "'isles[train]=={version}' (or set clusters.0.environment.container.python to another "
        "Python of the image)",
    ),
    (
        r"No module named '?isles[.\w]+",
        "version.isles",
        "the image {image} has another version of isles",
        "install the same version in the image: pip install 'isles[train]=={version}'",
    ),
    (
        r"(?i)image not known|no such image|manifest unknown|does not resolve to an image"
        r"|pull policy|could not open image|failed to (import|pull)|unable to (get|pull)",
        "container.image",
        "the image {image} is not on this host",
        "fetch it on this host with podman pull {image}. For apptainer, run apptainer build "
        "image.sif docker://{image}, and set container: image.sif",
    ),
    (
        r"(?i)CDI device|nvidia\.com/gpu|nvidia-container-cli",
        "container.runtime",
        "the container cannot access the GPUs",
        "run sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml (NVIDIA Container Toolkit)",
    ),
    (
        r"(?i)newuidmap|newgidmap|no subuid|no subgid|not enough IDs|insufficient UIDs",
        "container.runtime",
        "this host has no subordinate user ids for rootless containers",
        "run sudo apt install uidmap && sudo usermod --add-subuids 100000-165535 --add-subgids "
        "100000-165535 $(id -un) && podman system migrate",
    ),
    (
        r"(?i)user namespace|cannot clone: |unshare",
        "container.runtime",
        "this kernel does not allow user namespaces",
        "run sudo sysctl -w user.max_user_namespaces=28633; on Ubuntu also "
        "kernel.apparmor_restrict_unprivileged_userns=0",
    ),
    (
        r"(?i)executable file .* not found|stat .*no such file|exec: .*not found"
        r"|execve.*No such file",
        "python.runs",
        "the image {image} does not contain this Python",
        "set clusters.0.environment.container.python, such as /opt/conda/bin/python",
    ),
    (
        r"(?i)unrecognized option.*container-image",
        "container.runtime",
        "this Slurm does not have pyxis",
        "set clusters.0.environment.container.runtime: apptainer",
    ),
)
