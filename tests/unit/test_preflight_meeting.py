"""Whether clusters will reach the hub of their run: real sockets of this machine."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from isles.check.checks.network import dial, hub_finding, hub_stand_in
from isles.check.plan import Extent
from isles.check.verb import CheckOptions, run_check
from isles.config.load import Loaded, load_run_file
from isles.errors import ConfigError

CLUSTERS = [{"name": "here"}, {"name": "far", "launcher": {"kind": "ssh", "hosts": ["a1"]}}]


def loaded_with(folder: Path, clusters: list[dict[str, Any]], **outer: Any) -> Loaded:
    content = {
        "name": "x",
        "model": {"name_or_path": "llama-2m", "init": "scratch"},
        "data": {"sources": [{"type": "fake"}], "seq_length": 32, "validation_fraction": 0},
        "training": {"max_steps": 10, "eval_steps": None},
        "outer": {"kind": "diloco", "sync_every": 5, **outer},
        "clusters": clusters,
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_run_file(path)


def dialled(loaded: Loaded) -> dict[str, Any]:
    outer = loaded.config.diloco
    assert outer is not None and outer.hub is not None
    host, _, port = outer.hub.rpartition(":")
    return dial(host, int(port), 2.0)


def test_this_machine_listens_in_place_of_the_hub(tmp_path: Path) -> None:
    with hub_stand_in(loaded_with(tmp_path, CLUSTERS, public="127.0.0.1:0")) as loaded:
        assert dialled(loaded)["state"] == "ok"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        place = f"127.0.0.1:{port}"
        with hub_stand_in(loaded_with(tmp_path, CLUSTERS, public=place)) as loaded:
            assert dialled(loaded)["state"] == "ok", "who listens there is the hub"
    with hub_stand_in(loaded_with(tmp_path, CLUSTERS, public=place)) as loaded:
        answer = dialled(loaded)
        outer = loaded.config.diloco
        assert outer is not None
        finding = hub_finding("a1", outer, answer)
        assert (finding.level, finding.where) == ("ok", "a1") and place in finding.text
    finding = hub_finding("a1", outer, dialled(loaded))
    assert finding.level == "error" and "nothing listens there" in finding.text
    assert f"open port {port} on this machine" in finding.fix


@pytest.mark.parametrize(
    ("clusters", "outer"),
    [
        ([{"name": "a"}, {"name": "b"}], {}),
        (CLUSTERS, {"hub": "hub.example.org:29400"}),
    ],
)
def test_nothing_listens_where_nobody_would_come(
    tmp_path: Path, clusters: list[dict[str, Any]], outer: dict[str, Any]
) -> None:
    given = loaded_with(tmp_path, clusters, **outer)
    with hub_stand_in(given) as loaded:
        assert loaded is given


def test_a_place_where_nothing_can_listen_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As port 80 is for everybody but root; here this test is root."""

    def refused(*_: Any, **__: Any) -> socket.socket:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refused)
    with (
        pytest.raises(
            ConfigError, match=r"cannot listen at .* port 80: Permission denied"
        ) as caught,
        hub_stand_in(loaded_with(tmp_path, CLUSTERS, public="127.0.0.1:80")),
    ):
        pass
    assert "outer.public" in caught.value.where and "HOST:PORT" in caught.value.fix


def test_a_name_that_leads_nowhere_is_told(tmp_path: Path) -> None:
    loaded = loaded_with(tmp_path, CLUSTERS, hub="nowhere.invalid:29400")
    outer = loaded.config.diloco
    assert outer is not None
    finding = hub_finding("a1", outer, dialled(loaded))
    assert finding.level == "error" and "nowhere.invalid:29400" in finding.text
    assert "name" in finding.text.lower() and "is nowhere.invalid its name" in finding.fix


def test_what_is_wrong_with_a_cluster_names_its_own_keys(tmp_path: Path) -> None:
    launcher = {"kind": "slurm", "bin_path": "/nowhere"}
    loaded_with(
        tmp_path,
        [{"name": name, "launcher": launcher, "gpus_per_node": 1} for name in ("x1", "x2")],
        public="127.0.0.1:0",
    )
    texts: list[str] = []
    options = CheckOptions(tmp_path / "run.yaml", (), (), Extent(net=False, timeout_s=30.0))
    assert run_check(options, texts.append) == 2
    for index, text in enumerate(texts):
        assert f"fix: on a login node: clusters[{index}].launcher.login" in text, text
        assert f"clusters[{1 - index}]" not in text
