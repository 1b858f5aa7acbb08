"""The run of another user through the commands that read its checkpoints."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from isles.config.resolve import load_resolved
from tests.e2e.typed import isles, the_run

pytestmark = pytest.mark.long

OTHER = 5  # games, on every Debian
SHAPE = ("model.name_or_path=llama-2m", "training.max_steps=2", "training.warmup_steps=0")


def test_no_place_that_anothers_run_names_is_used(run_file: Path) -> None:
    """Nobody is asked, with the token of the viewer, and no file of the viewer is tokenized."""
    if os.geteuid() != 0:
        pytest.skip("only root can give files to another user")
    cwd, resolved = run_file.parent, the_run(run_file).resolved
    isles("train", str(run_file), *SHAPE, "checkpoint.every_steps=2", cwd=cwd)
    plain, private, callers = resolved.read_text(), cwd / "private.txt", list[object]()
    source = str(load_resolved(plain).config.data.sources[0].path)
    private.write_text("a secret of the viewer. " * 5000)
    private.chmod(0o600)
    cache = cwd / "cache" / "isles"
    with socket.create_server(("127.0.0.1", 0)) as hub:

        def count() -> None:
            while True:
                try:
                    caller, address = hub.accept()
                except OSError:
                    return
                callers.append(address)
                caller.close()

        thread = threading.Thread(target=count)
        thread.start()
        env = {
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}",
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(cwd / "hf"),
            "XDG_CACHE_HOME": str(cwd / "cache"),
        }
        try:
            isles("eval", "tiny", cwd=cwd, env=env)
            assert cache.stat().st_mode & 0o777 == 0o700
            prepared = sorted(cache.rglob("*"))
            for old, new in (
                (source, "evil/dataset"),
                (source, str(private)),
                ("llama-2m", "evil/model"),
            ):
                assert old in plain
                resolved.write_text(plain.replace(old, new))
                os.chown(resolved, OTHER, OTHER)
                done = isles("eval", "tiny", cwd=cwd, env=env, expected=2)
                assert "belongs to" in done.text and "Traceback" not in done.text, done.text
                words = ("generate", "tiny", "--prompt", "Once", "--max-new-tokens", "2")
                isles(*words, cwd=cwd, env=env, expected=2 if new == "evil/model" else 0)
            words = ("checkpoint", "export", "tiny", "--output", "exported")
            isles(*words, cwd=cwd, env=env, expected=2)
        finally:
            hub.shutdown(socket.SHUT_RDWR)
            thread.join()
    assert not callers and sorted(cache.rglob("*")) == prepared


def test_a_cache_that_was_open_is_closed_and_a_shared_one_stays_as_it_is(run_file: Path) -> None:
    cwd = run_file.parent
    home, shared = cwd / "cache" / "isles", cwd / "shared"
    for folder in (home, shared):
        folder.mkdir(parents=True)
        folder.chmod(0o755)
    env = {"XDG_CACHE_HOME": str(cwd / "cache")}
    for more in ((), (f"data.cache_dir={shared}",)):
        isles("data", "show", str(run_file), *more, cwd=cwd, env=env)
    assert [folder.stat().st_mode & 0o777 for folder in (home, shared)] == [0o700, 0o755]
    assert list(home.rglob("tokens.bin")) and list(shared.rglob("tokens.bin"))
