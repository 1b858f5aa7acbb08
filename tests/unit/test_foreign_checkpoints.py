"""Checkpoints from elsewhere: nothing in one is run, and what is not sound is refused in words."""

from __future__ import annotations

import builtins
import io
import json
import os
import pickle
import pickletools
import zipfile
from itertools import pairwise
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict_saver import save

from isles.checkpoint.load import load_tensors, restore_rng, rng_file
from isles.checkpoint.tensors import TensorPlanner, TensorReader, TensorWriter
from isles.errors import TrainingError
from isles.run.checkpoints import list_checkpoints, read_checkpoint, verify_checkpoint
from isles.run.index import IndexFault, index_from, read_index
from isles.run.manifest import MANIFEST, Manifest, ManifestError
from isles.run.paths import RunDir
from isles.run.pickled import PickleFault, read_pickle
from isles.run.records import read_record, write_record
from tests.each import each
from tests.old_checkpoints import (
    Call,
    change_index,
    change_json,
    hash_again,
    run_code,
    tensors_of,
    write_old,
)

MANIFEST_OF = {"step": 4, "created_at": 1.0, "samples": 8, "tokens": 64, "elapsed_s": 1.0}


def some_tensors() -> dict[str, torch.Tensor]:
    """Of many types, shapes and orders in memory."""
    torch.manual_seed(0)
    numbers = torch.randn(6, 4)
    types = ("float8_e4m3fn", "bfloat16", "float16", "float64", "complex64", "int8", "uint16")
    return {
        "model.weight": numbers,
        "model.turned": torch.randn(4, 6).t(),
        "optimizer.step": torch.tensor(3.0),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False]),
        **{f"as.{name}": numbers.to(getattr(torch, name)) for name in types},
    }


def write_checkpoint(folder: Path, *, is_old: bool) -> Path:
    """A whole checkpoint of step 4."""
    path = folder / "checkpoints" / "step-00000004"
    path.mkdir(parents=True)
    if is_old:
        write_old(some_tensors(), path)
    else:
        save(some_tensors(), storage_writer=TensorWriter(path), no_dist=True)
    hash_again(path, version=1 if is_old else 2, **MANIFEST_OF)
    return path


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    views = [t.contiguous().view(-1).view(torch.uint8) for t in (left, right)]
    return torch.equal(*views)


def refusals(folder: Path) -> tuple[str, str]:
    """What `isles checkpoint verify` and a load say of a checkpoint."""
    goal = {name: torch.empty_like(value) for name, value in some_tensors().items()}
    with pytest.raises(TrainingError) as caught:
        load_tensors(goal, folder, alone=True)
    return "; ".join(verify_checkpoint(folder)), caught.value.what


@pytest.mark.filterwarnings("ignore")
@each(True, False)
def test_every_tensor_is_read_bit_for_bit_whole_or_in_parts(is_old: bool, *, tmp_path: Path):
    folder = write_checkpoint(tmp_path, is_old=is_old)
    assert verify_checkpoint(folder) == []
    found = tensors_of(folder)
    wrong = [name for name, value in some_tensors().items() if not same_bytes(value, found[name])]
    assert wrong == []
    turned = {"model.weight": torch.zeros(4, 6).t()}
    load_tensors(turned, folder, alone=True)
    assert torch.equal(turned["model.weight"], some_tensors()["model.weight"])
    names = {path.name for path in folder.iterdir()}
    assert names == {MANIFEST} | (
        {".metadata", "__0_0.distcp"} if is_old else {"tensors.json", "tensors-00000.bin"}
    )


@pytest.mark.filterwarnings("ignore")
@each(True, False)
def test_a_part_of_a_piece_is_read_as_other_ranks_need_it(is_old: bool, *, tmp_path: Path):
    folder, goal = write_checkpoint(tmp_path, is_old=is_old), torch.zeros(3, 2)
    reader = TensorReader(folder)
    reader.read_metadata()
    index = MetadataIndex("model.weight", (0, 0))
    sizes = torch.Size((3, 2))
    item = ReadItem(LoadItemType.TENSOR, index, sizes, index, torch.Size((2, 1)), sizes)
    planner: Any = SimpleNamespace(resolve_tensor=lambda _: goal, commit_tensor=lambda *_: None)
    reader.read_data(LoadPlan([item]), planner)
    assert torch.equal(goal, some_tensors()["model.weight"][2:5, 1:3])


@pytest.mark.filterwarnings("ignore")
@each("optimizer.step", "model.weight")
def test_an_entry_that_is_a_pickle_is_neither_run_nor_called_whole(victim: str, *, tmp_path: Path):
    folder, mark = write_checkpoint(tmp_path, is_old=True), tmp_path / "it-ran"
    run_code(folder, victim, os.mkdir, str(mark))
    hash_again(folder)
    said, refused = refusals(folder)
    assert not mark.exists()
    assert f"{victim} is not a tensor" in said and f"{victim} is not a tensor" in refused


def test_numbers_of_another_kind_are_refused_and_another_precision_is_read(tmp_path: Path):
    wrong = []
    for is_old in (False, True):
        path = write_checkpoint(tmp_path / f"{is_old}", is_old=is_old)
        for name, dtype, is_read in (
            ("model.weight", torch.bfloat16, True),
            ("as.bfloat16", torch.float32, True),
            ("model.weight", torch.int32, False),
            ("model.weight", torch.uint8, False),
            ("as.complex64", torch.float32, False),
            ("as.int8", torch.float32, False),
            ("as.float8_e4m3fn", torch.bfloat16, False),
            ("flags", torch.float32, False),
        ):
            goal = torch.ones(some_tensors()[name].shape, dtype=dtype)
            try:
                load_tensors({name: goal}, path, alone=True)
                is_right = is_read and torch.equal(goal, some_tensors()[name].to(dtype))
            except TrainingError as error:
                is_right = error.id == "checkpoint.unlike" and f"{name} is " in str(error)
                is_right = is_right and not is_read and bool((goal == 1).all())
            if not is_right:
                wrong.append((is_old, name, dtype))
    assert not wrong


def test_the_planner_takes_tensors_alone():
    item: Any = type("Item", (), {"dest_index": type("Index", (), {"fqn": "a"})})
    with pytest.raises(TrainingError, match="a is not a tensor"):
        TensorPlanner().load_bytes(item, io.BytesIO())


METADATA = "torch.distributed.checkpoint.metadata"
REPLACES_A_METHOD = b"cpathlib\nPosixPath\n(N}Vread_text\nc%s\nMetadata\nstb." % METADATA.encode()
"""BUILD sets an attribute of the class itself."""


@each(
    (pickle.dumps(Call(os.mkdir, "it-ran")), "mkdir"),
    (pickle.dumps(Call(builtins.eval, "1")), "eval"),
    (pickle.dumps(Call(getattr, torch.Size, "mro")), "does not belong in an index"),
    (pickle.dumps(Call(getattr, _MEM_FORMAT_ENCODING, "__class__")), "it lacks a"),
    (pickle.dumps(Metadata({"a": Call(os.mkdir, "it-ran")})), "mkdir"),  # type: ignore[dict-item]
    (REPLACES_A_METHOD, "opcode UNICODE"),
    (REPLACES_A_METHOD.replace(b"Vread_text\n", b"\x8c\x09read_text"), "fills an object"),
    (b"", "not an index"),
    (b"\x80", "not an index"),
    (b"not a pickle at all", "not an index"),
    (pickle.dumps({(((1,),),): 1}), "an invalid key"),
    (pickle.dumps([1, 2]), "it lacks a"),
    (pickle.dumps(Metadata({}, storage_data=None)), "lists no tensors"),
    (b"\x80\x04" + b"]\x94" * 9 + b"(" * 9 + b".", "not an index"),
    (b"\x80\x02" + b"]" * (1 << 21) + b".", "more than 1048576 opcodes"),
)
def test_a_pickle_that_is_no_index_is_refused(data: bytes, words: str, *, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = PosixPath.read_text
    with pytest.raises(IndexFault, match=words):
        index_from(data, {}, is_old=True)
    assert PosixPath.read_text is before
    assert list(tmp_path.iterdir()) == [], "it ran"


def test_members_of_an_enum_are_read_as_python_3_11_2_wrote_them():
    member = Call(getattr, _MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT")
    data = pickle.dumps(Metadata({}, planner_data={"a": member}, storage_data={}))
    assert index_from(data, {}, is_old=True).tensors == {}


def place(change: dict[str, Any]) -> Any:
    """Changes the place of each tensor in an old index."""

    def apply(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            info.__dict__.update(change)

    return apply


@pytest.mark.filterwarnings("ignore")
@each(
    *(place({"relative_path": name}) for name in ("/etc/passwd", "../x", "..", "a\n", "gone.bin")),
    *(place({"relative_path": name}) for name in (b"__0_0.distcp", None, PosixPath("a"))),
    *(place({"offset": n}) for n in (-1, 10**9, 2**70, 1.5, None, True)),
    *(place({"length": n}) for n in (-1, 10**9, 3, "3")),
    place({"transform_descriptors": ["zstd"]}),
    lambda metadata: metadata.storage_data.clear(),
    lambda metadata: metadata.state_dict_metadata["flags"].chunks.clear(),
    lambda metadata: setattr(metadata.state_dict_metadata["flags"], "size", torch.Size([9])),
    lambda metadata: setattr(metadata.state_dict_metadata["flags"].properties, "dtype", "int"),
)
def test_an_old_index_with_an_odd_value_is_refused(change: Any, *, tmp_path: Path):
    folder = write_checkpoint(tmp_path, is_old=True)
    change_index(folder, change)
    hash_again(folder)
    said, refused = refusals(folder)
    assert ".metadata: " in said and "cannot read the checkpoint's index" in refused


def piece(**change: Any) -> Any:
    """Changes a piece of a tensor in an index."""
    return lambda record: record["tensors"]["model.weight"]["pieces"][0].update(change)


def entry(**change: Any) -> Any:
    """Changes a tensor of an index."""
    return lambda record: record["tensors"]["model.weight"].update(change)


def overlap(record: Any) -> None:
    """All numbers are there by their count, but two rows come twice and two never."""
    entry = record["tensors"]["model.weight"]
    (whole,) = entry["pieces"]
    half = {**whole, "sizes": [3, 4], "length": 48}
    entry["pieces"] = [{**half, "offsets": [0, 0]}, {**half, "offsets": [1, 0]}]


@pytest.mark.filterwarnings("ignore")
@each(
    overlap,
    piece(file="tensors.json"),
    *(piece(file=f) for f in ("/etc/passwd", "../manifest.json", "..", "x\0", "", 3, None, [])),
    *(piece(start=n) for n in (-1, 1 << 70, 10**6, 0.5, "0", None, True)),
    *(piece(length=n) for n in (-1, 95, 97, None, [])),
    *(piece(offsets=o) for o in ([-1, 0], [9, 0], [0], "00", None, {"a": 1})),
    *(piece(sizes=o) for o in ([7, 4], [6], [5, 4], [1 << 80, 1], None)),
    *(entry(dtype=d) for d in ("float31", "load", None, 3, ["float32"], "Tensor")),
    *(entry(shape=s) for s in ([6, 5], [1 << 40, 1 << 40], [1] * 70, "6", None)),
    *(entry(pieces=p) for p in ([], None, {}, [1], [[]])),
    lambda record: record.update(format=9),
    lambda record: record.update(tensors=[]),
    lambda record: record["tensors"].update(flags=3),
)
def test_an_index_with_an_odd_value_is_refused(change: Any, *, tmp_path: Path):
    folder = write_checkpoint(tmp_path, is_old=False)
    change_json(folder / "tensors.json", change)
    hash_again(folder)
    said, refused = refusals(folder)
    assert "tensors.json: " in said and "cannot read the checkpoint's index" in refused


def test_an_index_of_tiny_values_or_longer_than_its_tensors_is_refused(tmp_path: Path):
    for tiny in (b"[]", b'{"a":1}', b"1"):
        data = b'{"format":1,"tensors":{},"x":[' + (tiny + b",") * 9_999 + b"0]}"
        with pytest.raises(IndexFault, match="more lists"):
            index_from(data, {}, is_old=False)
    with (tmp_path / "tensors.json").open("wb") as stream:
        stream.truncate(17 << 20)
    with pytest.raises(IndexFault, match="too long for its tensors"):
        read_index(tmp_path)


def test_an_index_that_the_manifest_does_not_list_is_a_fault(tmp_path: Path):
    folder = write_checkpoint(tmp_path, is_old=True)
    (folder / "tensors.json").write_text("{}")
    assert "this index is not in the manifest" in verify_checkpoint(folder)[0]


def archive(program: bytes, *, method: int = zipfile.ZIP_STORED, numbers: bytes = b"0" * 96) -> Any:
    """An archive as `torch.save` writes it, with another program in it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as made:
        made.writestr("archive/data.pkl", program)
        made.writestr("archive/data/0", numbers)
    return buffer.getvalue()


def program_of(folder: Path) -> bytes:
    with zipfile.ZipFile(io.BytesIO((folder / "__0_0.distcp").read_bytes())) as made:
        return made.read("archive/data.pkl")


@pytest.mark.filterwarnings("ignore")
@each(
    lambda _: b"no archive",
    lambda _: b"",
    lambda _: pickle.dumps(Call(os.mkdir, "it-ran")),
    lambda _: archive(pickle.dumps(Call(os.mkdir, "it-ran"))),
    lambda _: archive(pickle.dumps(Call(torch._utils._rebuild_tensor_v2, 1, 2, 3, 4))),
    lambda program: archive(program, method=zipfile.ZIP_DEFLATED),
    lambda program: archive(program, numbers=b"0" * 95),
    lambda program: archive(program.replace(b"K\x06K\x04", b"K\x07K\x04")),
    lambda program: archive(program.replace(b"K\x04K\x01\x86", b"K\x04K\xff\x86")),
    lambda program: archive(program + b"." * (2 << 20)),
)
def test_a_tensor_that_is_no_archive_of_numbers_is_refused(
    make: Any, *, tmp_path: Path, monkeypatch: Any
):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "old"
    write_old({"model.weight": some_tensors()["model.weight"]}, folder)
    data = make(program_of(folder))
    file, size = folder / "__0_0.distcp", (folder / "__0_0.distcp").stat().st_size
    length = max(size, len(data))
    # The end of an archive is where its list is.
    file.write_bytes(bytes(length - len(data)) + data)
    change_index(folder, place({"offset": length - len(data), "length": max(len(data), 96)}))
    with pytest.raises(TrainingError):
        load_tensors({"model.weight": torch.empty(6, 4)}, folder, alone=True)
    assert not (tmp_path / "it-ran").exists()


@each(b"", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{}")
def test_a_random_state_that_is_none_is_refused(data: bytes, *, tmp_path: Path):
    rng_file(tmp_path, 0).write_bytes(data)
    with pytest.raises(TrainingError, match="random state in rng-00000"):
        restore_rng(tmp_path, 0, saved_world_size=1, world_size=1)


SHA256 = "0" * 64
ODD_NAMES = (
    "/etc/passwd",
    "../x",
    "a/b",
    "..",
    ".",
    "",
    "a\0b",
    "a\nb",
    "a b",
    "\u00e4",
    "x" * 300,
)


@pytest.mark.filterwarnings("ignore")
@each(
    *({"files": {name: {"size": 1, "sha256": SHA256}}} for name in (*ODD_NAMES, MANIFEST)),
    *({"files": {"a": {"size": n, "sha256": SHA256}}} for n in (-1, 1.5, "1", None, True, 1 << 70)),
    *({"files": {"a": {"size": 1, "sha256": h}}} for h in (None, 1, "", SHA256 + "\n", "g" * 64)),
    *({"files": f} for f in (None, [], "x", {"a": "str"}, {"a": None}, {"a": []})),
    *({"step": s} for s in (-1, "x", None, 1.5, 10**30, True, [], {}, 5)),
    *({"created_at": t} for t in ("x", -1, 1e300, [], True)),
    *({"world_size": n} for n in ("x", -1, 0.5, {})),
    *({"outer": o} for o in (3, "x", [])),
    *({"version": v} for v in (3, "2", None, [], {})),
)
def test_a_manifest_with_an_odd_value_is_refused_by_every_reader(change: Any, *, tmp_path: Path):
    folder = write_checkpoint(tmp_path, is_old=False)
    record = read_record(folder / MANIFEST) or {}
    write_record(folder / MANIFEST, {**record, **change})
    assert list_checkpoints(RunDir(tmp_path)) == []
    with pytest.raises(TrainingError):
        read_checkpoint(folder)
    [fault] = verify_checkpoint(folder)
    assert fault.isprintable()


def test_a_value_that_a_manifest_lacks_is_named(tmp_path: Path):
    manifest = Manifest.from_record({"step": 1, "files": {}})
    assert manifest.get("samples") is None and "samples" not in manifest
    with pytest.raises(TrainingError, match="has no 'samples'"):
        manifest["samples"]


@pytest.mark.filterwarnings("ignore")
def test_what_is_no_file_is_not_followed(tmp_path: Path):
    folder, secret = write_checkpoint(tmp_path, is_old=False), tmp_path / "secret"
    data = folder / "tensors-00000.bin"
    data.replace(secret)
    data.symlink_to(secret)
    assert verify_checkpoint(folder) == ["tensors-00000.bin: not a regular file"]
    data.unlink()
    os.mkfifo(data)
    assert verify_checkpoint(folder) == ["tensors-00000.bin: not a regular file"]
    (folder / MANIFEST).unlink()
    os.mkfifo(folder / MANIFEST)
    assert "no readable manifest.json" in verify_checkpoint(folder)[0]


# Fuzzing: whatever the bytes are, a reader ends with a value or with its own error.

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=12,
)
KEYS = st.sampled_from(
    (
        *("files", "step", "size", "sha256", "version", "outer", "created_at", "a", "tensors"),
        *("format", "pieces", "shape", "dtype", "offsets", "sizes", "file", "start", "length"),
    )
)
RECORDS = st.recursive(
    JSON | st.sampled_from((SHA256, "float32", "a", "../a", 0, 1, -1, 1 << 63)),
    lambda inner: st.dictionaries(KEYS, inner, max_size=6) | st.lists(inner, max_size=3),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(RECORDS)
def test_any_record_is_a_manifest_or_a_fault(record: object):
    for value in (record, {"step": 1, "files": {}, **(record if isinstance(record, dict) else {})}):
        try:
            manifest = Manifest.from_record(value)
        except ManifestError as error:
            assert str(error).isprintable()
        else:
            assert all("/" not in name and name not in (".", "..") for name in manifest.files)
            assert manifest.size_bytes >= 0 and manifest.step >= 0 and manifest.created_at >= 0


@settings(max_examples=300, deadline=None)
@given(RECORDS, st.binary(max_size=40))
def test_any_text_is_an_index_or_a_fault(record: object, data: bytes):
    whole = {"format": 1, "tensors": {"a": record}}
    for text in (json.dumps(record).encode(), json.dumps(whole).encode(), data, b"[" * 100_000):
        try:
            index = index_from(text, {"a": 100}, is_old=False)
        except IndexFault:
            continue
        assert all(p.file == "a" for e in index.tensors.values() for p in e.pieces)


PROTOCOL_0_TO_4 = [opcode.code.encode("latin-1") for opcode in pickletools.opcodes]


def real_index() -> bytes:
    """An index as torch writes it."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        write_old({"a": torch.zeros(2, 2), "b": torch.tensor(1.0)}, Path(folder))
        return (Path(folder) / ".metadata").read_bytes()


@pytest.fixture(scope="module")
def real() -> bytes:
    return real_index()


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_pickle_is_an_index_or_a_fault(real: bytes, data: st.DataObject):
    """Real ones with bytes and whole opcodes changed, and opcodes by chance."""
    cuts = [position for _, _, position in pickletools.genops(real)] + [len(real)]
    parts = [real[a:b] for a, b in pairwise(cuts)]
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(parts) - 1))
        other = data.draw(
            st.sampled_from(parts) | st.sampled_from(PROTOCOL_0_TO_4) | st.binary(max_size=3)
        )
        match data.draw(st.sampled_from(("replace", "insert", "delete", "mutate"))):
            case "replace":
                parts[at] = other
            case "insert":
                parts.insert(at, other)
            case "delete" if len(parts) > 1:
                del parts[at]
            case _:
                parts[at] = other[:1] + parts[at][1:]
    text = b"".join(parts)
    try:
        index_from(text, {"__0_0.distcp": 10_000}, is_old=True)
    except IndexFault as error:
        assert str(error).isprintable()
    by_chance = data.draw(
        st.lists(st.sampled_from(PROTOCOL_0_TO_4) | st.sampled_from(parts), max_size=30)
    )
    try:
        read_pickle(b"".join(by_chance) + b".")
    except PickleFault as error:
        assert str(error).isprintable()
