"""Buckets that others write to: nothing outside the run directory, and odd objects in words."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isles.config.foreign import is_plain
from isles.config.load import load_run_file
from isles.data.tokens.tokenizer import train_tokenizer
from isles.errors import ConfigError, DataError, UserError
from isles.outer.bucket import chain
from isles.run.begin import new_attempt
from isles.run.bucket import RunStore, find_named, find_newest
from isles.run.manifest import MAX_MANIFEST_BYTES, Manifest, number_of, step_of
from isles.run.objects import Folder, StoreError
from isles.run.paths import RunDir
from isles.run.records import read_metrics, read_rows, write_record
from isles.run.upload import Uploader
from isles.track.local import JsonlTracker
from isles.train.data import run_tokenizer
from tests.each import each
from tests.run_records import GONE
from tests.unit.test_remote_checkpoints import begin, saved, sent

FACTS = {"size": 7, "sha256": "239f59ed55e737c77147cf55ad0c1b030b6d7ee748a7426952f9b852d5a935e5"}
"""Of the seven bytes of `payload`."""


@pytest.fixture
def remote(run_file: Path, tmp_path: Path) -> Path:
    """A bucket with the run tiny-1 up to step 40."""
    made = tmp_path / "bucket"
    run_dir = begin(run_file, tmp_path / "a", made).run_dir
    sent(run_dir, made, 20, 40)
    return made


def names_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_names_in_a_manifest_write_no_file_outside(remote: Path, run_file: Path, tmp_path: Path):
    """The hash is right, and the object is where the name says."""
    home = tmp_path / "home"
    home.mkdir()
    folder = remote / "tiny-1" / "checkpoints" / "step-00000040"
    record = json.loads((folder / "manifest.json").read_text())
    machines = tmp_path / "machines"
    for number, name in enumerate((f"{home}/.bashrc", "../" * 5 + "home/.profile", "x/../y")):
        (target := folder / name).parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"payload")
        changed = {**record, "files": {**record["files"], name: FACTS}}
        (folder / "manifest.json").write_text(json.dumps(changed))
        target.unlink()
        begun = begin(run_file, machines / f"{number}", remote)
        notes: list[str] = []
        assert begun.found is not None
        faults = begun.found.copy.bring(40, begun.run_dir, notes.append)
        assert "which is not a plain name" in faults[0], faults
        assert list(home.iterdir()) == [] and list(begun.run_dir.path.glob("checkpoints/*")) == []
    assert names_in(machines) == names_in(machines) - {"home"}
    copy = RunStore(str(remote), "tiny-1")
    assert (copy.steps(), copy.manifest(40)) == ([20, 40], None)


def odd_objects(run: Path) -> None:
    """What others may leave beside the checkpoints."""
    for name in ("step-\u00b2", "step-7", "step-00000060", "step--1", "step-", "x"):
        (run / "checkpoints" / name).mkdir()
        (run / "checkpoints" / name / "manifest.json").write_text('{"files": {"x": "str"}}')
    (run / "checkpoints" / "step-00000080" / "manifest.json").mkdir(parents=True)
    (run / "owner" / "\u00b2").write_text("{}")
    (run / "owner" / "7").write_text("[")
    (run / "owner" / "00000000").write_text("[" * 100_000)


def test_odd_objects_in_a_bucket_are_left_out(remote: Path, run_file: Path, tmp_path: Path):
    odd_objects(remote / "tiny-1")
    (remote / "tiny-\u00b2").mkdir()
    begun = begin(run_file, tmp_path / "fresh", remote)
    assert begun.found is not None
    copy = begun.found.copy
    assert copy.steps() == [20, 40, 60]
    assert "has step None" in copy.bring(60, begun.run_dir, print)[0]
    assert copy.bring(40, begun.run_dir, print) == []
    notes: list[str] = []
    saved(begun.run_dir, 100)
    uploader = Uploader(copy, begun.run_dir, keep=3, note=notes.append)
    uploader.take(print)
    assert uploader.finish(print) == [] and notes == []


def test_the_newest_checkpoint_with_a_sound_manifest_is_found(
    remote: Path, run_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    newest = remote / "tiny-1" / "checkpoints" / "step-00000040" / "manifest.json"
    sound = json.loads(newest.read_bytes())
    wrong = ({}, [], {**sound, "step": 20}, {**sound, "elapsed_s": "1"}, {"step": 40})
    longer, named = "training.max_steps=600", f"{remote}/tiny-1"
    for number, record in enumerate(wrong):
        newest.write_text(json.dumps(record))
        with pytest.raises(UserError, match="steps left after step 20: 0 -> 580"):
            begin(run_file, tmp_path / f"{number}", remote, longer)
        note = begin(run_file, tmp_path / f"{number}", remote, longer, resume=named).note
        assert "from step 20" in note and "training.max_steps: 20 -> 600" in note
    assert f"skips step 40 at {named}, which is broken: it has no readable" in caplog.text
    (newest.parents[1] / "step-00000020" / "manifest.json").write_text("{}")
    assert find_newest(str(remote), "tiny") is None
    with pytest.raises(UserError, match="run not found"):
        begin(run_file, tmp_path / "fresh", remote, resume=named)


def test_a_resolved_file_of_a_bucket_is_not_read_without_limit(
    remote: Path, run_file: Path, tmp_path: Path
):
    many = "a:\n" + "- 1\n" * 60_000 + "@"
    for number, text in enumerate((many, "a: 1\n" + "#" * (2 << 20) + "\n@", "a: 1\n", "@")):
        (remote / "tiny-1" / "resolved.yaml").write_text(text)
        with pytest.raises(UserError, match=r"resolved\.yaml is not usable") as raised:
            begin(run_file, tmp_path / f"{number}", remote)
        assert raised.value.where == f"{remote}/tiny-1"
        assert ("this is not a run file" in raised.value.what) == (len(text) > 100)
        new = begin(run_file, tmp_path / f"{number}", remote, resume="no")
        assert new.run_dir.name == "tiny-2"


def test_no_link_of_a_bucket_is_followed(remote: Path, run_file: Path, tmp_path: Path):
    """Neither to read a secret into the run, which is sent back, nor to write."""
    secret, outside = tmp_path / "secret", tmp_path / "outside"
    secret.write_text("a key")
    outside.mkdir()
    run, fresh = remote / "tiny-1", tmp_path / "fresh"
    (run / "tokenizer").mkdir()
    (run / "tokenizer" / "key").symlink_to(secret)
    (run / "track").symlink_to(outside)
    (outside / "x.json").write_text("a key")
    begun = begin(run_file, fresh, remote)
    held = [path for path in fresh.rglob("*") if path.is_file() and b"a key" in path.read_bytes()]
    assert held == []
    (begun.run_dir.path / "track").mkdir()
    (begun.run_dir.path / "track" / "mine.json").write_text("{}")
    copy = RunStore(str(remote), "tiny-1")
    with pytest.raises(StoreError, match="is a link"):
        copy.send_records(begun.run_dir)
    assert [path.name for path in outside.iterdir()] == ["x.json"]
    (remote / "tiny-2").symlink_to(outside)
    with pytest.raises(UserError, match="is a link"):
        find_named(str(remote), "tiny-2")
    newest = find_newest(str(remote), "tiny")
    assert newest is not None and newest.name == "tiny-1"
    os.mkfifo(run / "tokenizer" / "pipe")
    (run / "resolved.yaml").unlink()
    os.mkfifo(run / "resolved.yaml")
    with pytest.raises(UserError, match="is not a regular file"):
        begin(run_file, tmp_path / "later", remote)


def test_no_link_or_pipe_of_a_run_directory_is_sent(remote: Path, run_file: Path, tmp_path: Path):
    begun = begin(run_file, tmp_path / "fresh", remote)
    secret, path = tmp_path / "secret", begun.run_dir.path
    secret.mkdir()
    (secret / "key.json").write_text("a key")
    (path / "tokenizer").mkdir(exist_ok=True)
    (path / "tokenizer" / "link").symlink_to(secret / "key.json")
    os.mkfifo(path / "tokenizer" / "pipe")
    (path / "track").symlink_to(secret)
    (path / "run.yaml").unlink()
    os.mkfifo(path / "run.yaml")
    (path / "balance.json").write_text("{}")
    copy = RunStore(str(remote), "tiny-9")
    copy.send_records(begun.run_dir)
    assert set(copy.store.sizes("")) >= {"balance.json", "resolved.yaml"}
    assert not set(copy.store.sizes("")) & {"run.yaml", "tokenizer/link", "tokenizer/pipe"}
    assert not any(name.startswith("track") for name in copy.store.sizes(""))
    new_attempt(begun.run_dir, "name: x")  # it compares the run file, and waits for none


@each(
    {"evil.py": ""},
    {"tokenizer_config.json": '{"a": [{"\\u0061uto_map": {"AutoTokenizer": "you/evil--x.Y"}}]}'},
    {"config.json": '{"auto_map": {"AutoTokenizer": ["x.Y", null]}}'},
    {"tokenizer_config.json": '{"tokenizer_class": "BertTokenizer", "vocab": "/etc/passwd"}'},
    {"special_tokens_map.json": '{"tokenizer_file": "/etc/passwd"}'},
)
def test_no_code_of_a_buckets_tokenizer_is_used_nor_a_file_that_it_names(
    files: dict[str, str], *, remote: Path, run_file: Path, tmp_path: Path
):
    """Not even by a run that trusts the code of its model: that has another author."""
    folder = remote / "tiny-1" / "tokenizer"
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    (folder / "tokenizer.json").write_text("{}")
    place = tmp_path / next(iter(files))
    begun = begin(run_file, place / "plain", remote)
    assert (begun.run_dir.tokenizer / "tokenizer.json").exists()
    for name, text in files.items():
        (folder / name).write_text(text)
    begun = begin(run_file, place / "fresh", remote)
    assert not begun.run_dir.tokenizer.exists()


EVIL_TOKENIZER = {
    "evil.py": "",
    "tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}}',
    "tokenizer.json": "{}",
}


def test_a_start_that_fails_or_is_killed_leaves_nothing_of_a_bucket_in_place(
    remote: Path, run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also in a run directory that was here, and while records are fetched."""
    run = remote / "tiny-1"
    for name, text in {"track/wandb.json": '{"id": "x"}', "metrics.jsonl": "{}\n"}.items():
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(text)
    (run / "tokenizer").mkdir(exist_ok=True)
    for name, text in EVIL_TOKENIZER.items():
        (run / "tokenizer" / name).write_text(text)
    plain = (run / "resolved.yaml").read_text()
    behind = RunDir(tmp_path / "behind" / "tiny-1")
    begin(run_file, behind.path.parent, tmp_path / "own")
    new_attempt(behind)
    write_record(behind.attempt(1).launch, GONE)
    fetch, seen = Folder.fetch, list[str]()

    def in_place(folder: Path) -> dict[str, str]:
        """All that is read, by name; what is fetched lies apart."""
        found = {n for n in names_in(folder) if not n.startswith(".partial-records")}
        return {n: (folder / n).read_text() for n in found if (folder / n).is_file()}

    def fails(self: Folder, name: str, path: Path, moved: Any) -> None:
        seen.append(name)
        # It was compared with the run file a moment ago.
        (run / "resolved.yaml").write_text(plain.replace("code: false", "code: true"))
        fetch(self, name, path, moved)
        assert in_place(place) == before, name
        if name == sorted(seen)[-1] and len(seen) > 4:
            raise StoreError("away", "503 Slow Down")

    for place in (tmp_path / "fresh" / "tiny-1", behind.path):
        before = in_place(place)
        seen.clear()
        monkeypatch.setattr(Folder, "fetch", fails)
        with pytest.raises(UserError, match="503 Slow Down"):
            begin(run_file, place.parent, remote)
        assert (
            seen
            and in_place(place) == before
            and not names_in(place) - set(before) - {*("attempts", "attempts/001")}
        )
        (run / "resolved.yaml").write_text(plain)
        # Another start was killed while it fetched.
        (place / ".partial-records" / "tokenizer").mkdir(parents=True)
        (place / ".partial-records" / "tokenizer" / "evil.py").write_text("")
        monkeypatch.setattr(Folder, "fetch", fetch)
        run_dir = begin(run_file, place.parent, remote).run_dir
        assert not [name for name in names_in(place) if "evil" in name or "partial" in name]
        assert "trust_remote_code: true" not in run_dir.resolved.read_text()
        assert run_dir.run_file.read_text() == run_file.read_text()
        assert run_dir.tracker_record("wandb").read_text() == '{"id": "x"}'


@each(
    {"balance.json": "[1]"},
    {"balance.json": "[" * 100_000},
    {"track/wandb.json": '{"id": "../x"}'},
    {"track/mlflow.json": '{"run_id": {}}'},
    {"reference-training.npz": "x"},
    {"tokenizer/tokenizer_config.json": "[" * 100_000, "tokenizer/tokenizer.json": "{}"},
)
def test_a_record_of_a_bucket_that_is_none_is_not_taken(
    files: dict[str, str], *, remote: Path, run_file: Path, tmp_path: Path
):
    for name, text in files.items():
        (remote / "tiny-1" / name).parent.mkdir(exist_ok=True)
        (remote / "tiny-1" / name).write_text(text)
    machine = tmp_path / f"fresh-{hash(str(files))}"
    run_dir = begin(run_file, machine, remote).run_dir
    taken = [name for name in files if (run_dir.path / name).exists()]
    for name in files:
        (remote / "tiny-1" / name).unlink()
    assert taken == []


def test_a_bucket_with_more_records_than_a_run_has_is_refused(
    remote: Path, run_file: Path, tmp_path: Path
):
    (remote / "tiny-1" / "tokenizer").mkdir()
    for number in range(300):
        (remote / "tiny-1" / "tokenizer" / f"{number}.json").write_text("{}")
    with pytest.raises(UserError, match="300 records"):
        begin(run_file, tmp_path / "fresh", remote)
    assert not (tmp_path / "fresh" / "tiny-1").exists()


def test_trust_in_a_models_code_does_not_reach_the_tokenizer_of_a_bucket(
    remote: Path, run_file: Path, tmp_path: Path
):
    folder, mark = remote / "tiny-1" / "tokenizer", tmp_path / "mark"
    train_tokenizer(["a text"], 260).save_pretrained(folder)
    trusting = load_run_file(run_file, ["model.trust_remote_code=true"]).config
    run_dir = begin(run_file, tmp_path / "fresh", remote).run_dir
    assert len(run_tokenizer(trusting, run_dir)) == 260
    for name, text in EVIL_TOKENIZER.items():
        (run_dir.tokenizer / name).write_text(text)
    (run_dir.tokenizer / "evil.py").write_text(f"open({str(mark)!r}, 'w')\n")
    with pytest.raises(DataError, match=r"trust_remote_code|custom code"):
        run_tokenizer(trusting, run_dir)
    assert not mark.exists()


def test_rows_of_a_bucket_that_are_no_metrics_are_skipped(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    row = {"kind": "train", "step": 1, "loss": 5.0}
    wrong = [{"kind": "train"}, {"step": 1}, {**row, "step": 1e999}, {**row, "kind": {}}, 3]
    path.write_text("".join(json.dumps(each) + "\n" for each in [*wrong, row, {**row, "step": 9}]))
    JsonlTracker(path, resumed_step=4).close()
    assert list(read_metrics(path)) == [row] == list(read_rows(path))


@each("..", "../x", "a/../../x", "a\0b")
def test_no_name_leaves_a_folder(name: str, *, tmp_path: Path):
    store = Folder(str(tmp_path / "bucket"))
    for call in (
        store.read,
        lambda n: store.write(n, b""),
        store.sizes,
        lambda n: store.delete([n]),
    ):
        with pytest.raises(StoreError):
            call(name)
    with pytest.raises(StoreError):
        store.fetch(name, tmp_path / "here", print)
    assert names_in(tmp_path) <= {"here"}


def test_a_record_that_is_too_long_is_not_read(remote: Path, run_file: Path):
    path = remote / "tiny-1" / "checkpoints" / "step-00000040" / "manifest.json"
    path.write_text('{"files": {' + " " * MAX_MANIFEST_BYTES + "}}")
    with pytest.raises(UserError, match=r"does not accept: .*manifest.json is longer than"):
        find_newest(str(remote), "tiny")


def test_a_file_that_is_longer_than_announced_is_not_fetched(remote: Path, tmp_path: Path):
    folder = remote / "tiny-1" / "checkpoints" / "step-00000040"
    with (folder / "0.distcp").open("ab") as stream:
        stream.truncate(1 << 40)  # takes no room here
    run_dir = RunDir(tmp_path / "fresh" / "tiny-1")
    faults = RunStore(str(remote), "tiny-1").bring(40, run_dir, print)
    assert faults and "0.distcp: 1099511627776 bytes instead of" in faults[0]
    assert not run_dir.path.exists()


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=12) | st.sampled_from(("step-7", "step-\u0663", "+1", "1_0", "..", " 1")))
def test_names_from_elsewhere(name: str):
    """Each is plain or not, a number or not; what is one can be made into a path."""
    number = number_of(name)
    assert number is None or (number >= 0 and f"{number}" == name.lstrip("0").rjust(1, "0"))
    assert step_of(name) is None or name.startswith("step-")
    if is_plain(name):
        assert Path("folder", name).parent == Path("folder") and name.isprintable()


def entry(**tables: list[Any]) -> bytes:
    """An entry of a journal, with rows in its tables."""
    empty: dict[str, list[Any]] = {name: [] for name in chain._TABLES}
    record = {"format": 1, "chain": "c", "by": "x", "at": 1.0, "tables": {**empty, **tables}}
    return gzip.compress(json.dumps(record).encode())


@each(
    b"",
    b"no gzip",
    gzip.compress(b"[" * 100_000),
    gzip.compress(b"{}"),
    gzip.compress(b"null"),
    entry()[:-3],
    entry() + b"more",
    gzip.compress(bytes(chain._MOST_BYTES + 1)),
    entry(objects=[[1, "../../x", "", 1]]),
    entry(objects=[[1, 1, "../../x", 1]]),
    entry(objects=[[1, 1, "", 1 << 70]]),
    entry(objects=[[1, 1, ""]]),
    entry(objects=[3]),
    entry(rounds=[[1, "committed", "../x", 1, "", 0, 0]]),
    entry(rounds=[[1, "committed", "", 1, "", "x", 0]]),
    entry(events=[[1, 1.0, "a", "b", {}]]),
)
def test_what_is_no_entry_of_a_journal_is_refused(data: bytes):
    with pytest.raises(ConfigError, match=r"not an entry of a journal|another version"):
        chain._decode(data, "here")
    assert chain._decode(entry(events=[[1, 1.0, "a", "b", "c"]]), "here")["chain"] == "c"


JSON: Callable[[], Any] = lambda: st.recursive(  # noqa: E731
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=10,
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(chain._TABLES)), JSON(), st.binary(max_size=30))
def test_any_entry_is_one_or_refused(table: str, rows: Any, data: bytes):
    for each_one in (entry(**{table: rows}), entry(**{table: [rows]}), data, gzip.compress(data)):
        try:
            chain._decode(each_one, "here")
        except ConfigError as error:
            assert error.id == "bucket.refused"


def test_a_manifest_that_holds_is_written_as_it_was(tmp_path: Path):
    record = {"step": 3, "files": {}, "more": [1, {"a": None}], "version": 2}
    write_record(tmp_path / "manifest.json", Manifest.from_record(record).record)
    assert json.loads((tmp_path / "manifest.json").read_text()) == record
