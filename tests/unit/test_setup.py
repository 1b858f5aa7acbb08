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
    done = []

    def set_up(
        loaded: Loaded, cluster: ClusterConfig, *, check: bool, print_line: module.PrintLine
    ) -> bool:
        done.append((cluster.name, check))
        return cluster.name != "attic"

    monkeypatch.setattr(module, "_setup_cluster", set_up)
    lines: list[str] = []
    loaded = load(tmp_path, HERE, ATTIC, CAMPUS)
    assert not module.setup(loaded, check=True, print_line=lines.append), "not all are equal"
    assert done == [("attic", True), ("campus", True)]
    assert lines == ["cluster attic", "cluster campus"]
    assert module.setup(load(tmp_path, HERE, CAMPUS), check=False, print_line=lines.append)
    with pytest.raises(ConfigError, match="no other machine to set up"):
        module.setup(load(tmp_path, HERE), check=False, print_line=lines.append)


def test_extras_are_those_of_the_cluster(tmp_path: Path) -> None:
    config = load(tmp_path, ATTIC, CAMPUS).config
    attic, campus = (module._extras(config, cluster) for cluster in config.clusters)
    assert attic == ["train", "hivemind"] and campus == ["train", "deepspeed", "hivemind"]
