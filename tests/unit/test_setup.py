"""`isles setup`: which clusters it is about, and what it would install."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from isles.config.load import Loaded, load_run_file
from isles.config.sections.cluster import ClusterConfig
from isles.errors import ConfigError
from isles.launch.remote import setup as module

CONTENT = {
    "name": "t",
    "model": {"name_or_path": "llama-2m", "init": "scratch"},
    "data": {"sources": [{"type": "fake"}]},
    "training": {"max_steps": 1000},
    "outer": {"kind": "diloco", "engine": "hivemind"},
}
HERE = "{name: here}"
ATTIC = "{name: attic, launcher: {kind: ssh, hosts: [me@a, me@b]}, workdir: /w}"
CAMPUS = (
    "{name: campus, launcher: {kind: slurm, login: me@campus, time: 1h}, workdir: /w, "
    "gpus_per_node: 4, strategy: {kind: deepspeed}}"
)


def load(folder: Path, *clusters: str) -> Loaded:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(CONTENT))
    return load_run_file(path, (f"clusters=[{', '.join(clusters)}]",))


def test_every_cluster_elsewhere_is_set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an earlier one is not equal; with the packages that its strategy needs."""
    found: dict[str, list[str]] = {}

    def set_up(loaded: Loaded, cluster: ClusterConfig, **_: object) -> bool:
        found[cluster.name] = module.extras_of(loaded.config, cluster)
        return cluster.name != "attic"

    monkeypatch.setattr(module, "_setup_cluster", set_up)
    lines: list[str] = []
    assert not module.setup(
        load(tmp_path, HERE, ATTIC, CAMPUS), check=True, print_line=lines.append
    )
    assert found == {"attic": ["train", "hivemind"], "campus": ["train", "deepspeed", "hivemind"]}
    assert lines == ["cluster attic", "cluster campus"]
    with pytest.raises(ConfigError, match="no other machine to set up"):
        module.setup(load(tmp_path, HERE), check=False, print_line=lines.append)
