"""Data of somebody else's making: it opens nothing, fills no memory, and is refused in words."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from isles.config.sections.data import SourceConfig
from isles.data.sources.find import HuggingFaceStream, open_huggingface, open_source
from isles.data.sources.parse import make_parser
from isles.data.sources.rows import Row
from isles.errors import DataError, UserError
from isles.outer.hub.server import make_identity
from isles.run.records import write_secret
from tests.data import write_parquet
from tests.deadline import run_program
from tests.each import each
from tests.made_watch import running

MIB = 2**20


def rows_of(path: Path, **keys: Any) -> list[Any]:
    source = SourceConfig(path=str(path), **keys)
    return list(open_source(source).rows(make_parser(source)))


def refusal(path: Path, **keys: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        rows_of(path, **keys)
    return caught.value


@pytest.fixture
def opened_files() -> Iterator[list[str]]:
    """The paths that the process opens, by its audit hook; sockets too."""
    seen: list[str] = []
    is_on = [True]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if is_on[0] and event in ("open", "socket.connect", "socket.getaddrinfo"):
            seen.append(f"{args[0]}" if event == "open" else f"{event} {args}")

    sys.addaudithook(hook)
    yield seen
    is_on[0] = False


def media(bait: Path) -> tuple[Any, dict[str, Any]]:
    """A dataset whose rows name a file and an address, and features that would open them."""
    import datasets

    struct = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    named = [{"bytes": None, "path": path} for path in (str(bait), "http://127.0.0.1:9/bait")]
    kinds = [k for k in ("Image", "Audio", "Video", "Pdf", "Nifti", "Mesh") if hasattr(datasets, k)]
    columns = {
        **dict.fromkeys(kinds, named),
        "listed": [[each] for each in named],
        "inner": [{"in": each} for each in named],
        "text": ["one", "two"],
    }
    plain = {
        **dict.fromkeys(kinds, struct),
        "listed": datasets.List(struct),
        "inner": {"in": struct},
        "text": datasets.Value("string"),
    }
    image = {"_type": "Image"}
    decoded = {
        **{kind: {"_type": kind} for kind in kinds},
        "listed": {"_type": "List", "feature": image},
        "inner": {"in": image},
        "text": {"_type": "Value", "dtype": "string"},
    }
    return datasets.Dataset.from_dict(columns, features=datasets.Features(plain)), decoded


def test_nothing_is_opened_because_a_row_names_it(tmp_path, opened_files, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    bait = tmp_path / "bait.png"
    bait.write_bytes(b"secret")
    made, features = media(bait)
    made.save_to_disk(tmp_path / "saved")
    (tmp_path / "saved/dataset_info.json").write_text(json.dumps({"features": features}))
    table, text = made.data.table, json.dumps({"info": {"features": features}})
    (tmp_path / "repo/data").mkdir(parents=True)
    parquet = tmp_path / "repo/data/train-0.parquet"
    import pyarrow.parquet as pq

    pq.write_table(table.replace_schema_metadata({"huggingface": text}), parquet)
    builder = datasets.load_dataset_builder(str(tmp_path / "repo"))
    opened_files.clear()
    wanted = [name for name in made.column_names if name != "text"]
    for name in wanted:
        source = SourceConfig(path="x", text_column=name)
        parser = make_parser(source)
        for opened in (
            open_source(SourceConfig(path=str(tmp_path / "saved"))),
            open_source(SourceConfig(path=str(parquet))),
            open_huggingface(str(tmp_path / "repo"), None, "train"),
            HuggingFaceStream("repo", builder, "train"),
        ):
            [row, _] = list(opened.rows(parser))
            assert isinstance(row, Row) and str(bait) in str(row.columns[name]), (opened, row)
    assert len(rows_of(tmp_path / "saved")) == 2
    assert not [path for path in opened_files if "bait" in path or "socket" in path]


def test_a_readme_names_no_file_outside_its_dataset(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "secret.txt").write_text("secret")
    repo = tmp_path / "repo"
    repo.mkdir()
    front = f"configs:\n- config_name: default\n  data_files: {tmp_path}/secret.txt\n"
    (repo / "README.md").write_text(f"---\n{front}---\n")
    with pytest.raises(DataError, match="not in the dataset"):
        open_huggingface(str(repo), None, "train")


def state(**changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = folder / "state.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def linked(folder: Path) -> None:
    [file] = folder.glob("*.arrow")
    file.rename(folder.parent / "elsewhere.arrow")
    file.symlink_to(folder.parent / "elsewhere.arrow")


def piped(folder: Path) -> None:
    [file] = folder.glob("*.arrow")
    file.unlink()
    os.mkfifo(file)


def flipped(folder: Path) -> None:
    # The second offset of the texts of the first batch, which begin with their lengths.
    [file] = folder.glob("*.arrow")
    data = bytearray(file.read_bytes())
    place = data.index(b"".join(n.to_bytes(4, "little") for n in (0, 3, 6, 9)))
    data[place + 4 : place + 8] = (2**31 - 5).to_bytes(4, "little")
    file.write_bytes(data)


def packed(folder: Path) -> None:
    import pyarrow as pa

    [file] = folder.glob("*.arrow")
    table = pa.ipc.open_stream(file.read_bytes()).read_all()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(file, table.schema, options=options) as stream:
        stream.write_table(pa.concat_tables([table] * 999).combine_chunks())


SAVED: list[Any] = [
    state(_data_files=[{"filename": "../saved/x.arrow"}]),
    state(_data_files=[{"filename": "/etc/passwd"}]),
    state(_data_files=[{"filename": 7}]),
    state(_data_files=[7]),
    state(_data_files="x"),
    state(_data_files=[]),
    state(_fingerprint={}),
    state(_split=7),
    state(_format_type="no-such"),
    state(_format_type="torch", _format_kwargs=[7]),
    state(_format_columns=10**400),
    write("state.json", "[" * 100_000),
    write("state.json", "[]"),
    write("state.json", "{}"),
    write("dataset_info.json", '{"features": {"text": {"_type": "Evil"}}}'),
    write("dataset_info.json", '{"features": {"text": {"_type": "partial"}}}'),
    write("dataset_info.json", '{"features": {"text": 7}}'),
    write("dataset_info.json", '{"features": 7}'),
    write("dataset_info.json", '{"features": {"text": {"_type": "Value", "dtype": {}}}}'),
    linked,
    piped,
    flipped,
    packed,
]


@each(*SAVED)
def test_an_odd_saved_dataset_is_refused_in_words(change, *, tmp_path):
    import datasets

    folder = tmp_path / "saved"
    datasets.Dataset.from_dict({"text": ["one", "two", "six"]}).save_to_disk(folder)
    change(folder)
    error = refusal(folder)
    assert str(folder) in str(error.where) and error.fix, error


def test_odd_splits_of_a_saved_dataset_are_refused_in_words(tmp_path):
    for splits in ('["../x"]', '["/etc"]', "7", "[7]", "{}", '"train"', '["none"]'):
        (tmp_path / "dataset_dict.json").write_text(f'{{"splits": {splits}}}')
        assert "saved dataset" in refusal(tmp_path).what


def columns() -> dict[str, Any]:
    import pyarrow as pa

    struct = pa.StructArray.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["x", "x"])
    return {
        "date": pa.array([2**31 - 1], pa.int32()).cast(pa.date32()),
        "timestamp": pa.array([2**62], pa.int64()).cast(pa.timestamp("s")),
        "zone": pa.array([0], pa.int64()).cast(pa.timestamp("s", tz="No/Where")),
        "nanoseconds": pa.array([2**62 + 1], pa.int64()).cast(pa.timestamp("ns")),
        "duration": pa.array([2**62], pa.int64()).cast(pa.duration("s")),
        "struct": struct,
        "decimal": pa.array([1]).cast(pa.decimal128(20)),
        "dictionary": pa.array([b"a"]).dictionary_encode(),
        "null": pa.nulls(1),
        "time": pa.array([2**62], pa.int64()).cast(pa.time64("ns")),
    }


def test_odd_types_of_columns_are_told_in_words(tmp_path):
    import datasets
    import pyarrow as pa

    wrong = []
    for name, column in columns().items():
        table = pa.table({"text": column})
        with pa.ipc.new_stream(str(tmp_path / "data.arrow"), table.schema) as writer:
            writer.write_table(table)
        saved = tmp_path / name
        datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(saved)
        (saved / "dataset_info.json").write_text("{}")
        [arrow] = saved.glob("*.arrow")
        (tmp_path / "data.arrow").rename(arrow)
        paths = [saved]
        with suppress(pa.ArrowException):  # not a type of Parquet
            paths.append(write_parquet(tmp_path / f"{name}.parquet", {"text": column}))
        for path in paths:
            source = SourceConfig(path=str(path))
            parser = make_parser(source)
            try:
                for row in open_source(source).rows(parser):
                    assert isinstance(row, Row)
                    parser.parse(row)
            except DataError as error:
                if not error.fix:
                    wrong.append(f"{path.name}: {error}")
            except Exception as error:
                wrong.append(f"{path.name}: {error!r}")
    assert not wrong, "\n".join(wrong)


def test_two_columns_of_one_name_are_refused(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("text,text\na,b\n")
    for name in ("a.parquet", "a.csv"):
        assert "several columns 'text'" in refusal(tmp_path / name).what


def test_what_is_not_a_file_is_refused_without_waiting(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe.jsonl")
    for ending in ("jsonl.gz", "parquet", "csv", "json", "txt"):
        os.mkfifo(tmp_path / f"pipe.{ending}")
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(tmp_path)  # its name may have 100 letters
        server.bind("socket.jsonl")
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    for path in sorted(tmp_path.iterdir()):
        assert refusal(path).fix, path


_BOUNDED = r"""
import re, sys
from itertools import islice
from pathlib import Path
from isles.config.sections.data import SourceConfig
from isles.data.sources.find import open_source
from isles.data.sources.parse import make_parser
from isles.errors import DataError
for path in sys.argv[1:]:
    source = SourceConfig(path=path, type="text")
    most = 64 if path.endswith("parquet") else 100_000
    try:
        rows = sum(1 for _ in islice(open_source(source).rows(make_parser(source)), most))
        print(path, rows, "rows")
    except DataError as error:
        print(error.where, error.what)
    # Not ru_maxrss, which a program has from the process that has started it.
    status = Path("/proc/self/status").read_text()
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) >> 10
    print("peak", peak, "MiB")
    assert peak < 600, (path, peak)
"""


def pyarrow_zstd() -> Callable[[bytes], bytes]:
    import pyarrow as pa

    return partial(pa.Codec("zstd").compress, asbytes=True)


def test_a_bomb_is_refused_in_bounded_memory(tmp_path):
    """What unpacks to 96 MiB, or has one line of eight GiB."""
    for name, begin, piece in (
        ("line.jsonl.gz", b'{"text": "', b"a" * MIB),
        ("cell.csv.gz", b'text\n"', b"a\n" * (MIB // 2)),
        ("array.json.gz", b"[", b"[],[]," * (MIB // 6)),
        ("long.json.gz", b'[{"text": "', b"a" * MIB),
    ):
        with gzip.open(tmp_path / name, "wb", compresslevel=1) as stream:
            stream.write(begin)
            for _ in range(96):
                stream.write(piece)
    zstd = pyarrow_zstd()
    for ending, pack in (("bz2", bz2.compress), ("xz", lzma.compress), ("zst", zstd)):
        packed = pack(b'{"text": "') + 96 * pack(b"a" * MIB)
        (tmp_path / f"line.jsonl.{ending}").write_bytes(packed)
    for name in ("sparse.jsonl", "sparse.csv", "sparse.json"):
        with (tmp_path / name).open("wb") as stream:
            stream.write(b'[{"text": "' if name.endswith("json") else b"text\n")
            stream.truncate(8 * 1024 * MIB)
    import pyarrow as pa
    import pyarrow.parquet as pq

    # A text of 32 MiB that the file has once, and a thousand rows name; one of 80 MiB.
    for name, size in (("repeated", 32), ("large", 80)):
        column = pa.DictionaryArray.from_arrays(pa.array([0] * 1024), ["a " * (size * MIB // 2)])
        table = pa.table({"text": column})
        path = tmp_path / f"{name}.parquet"
        options = {"store_schema": False, "dictionary_pagesize_limit": 2**30}
        pq.write_table(table, path, compression="zstd", **options)
    files = sorted(map(str, tmp_path.iterdir()))
    done = run_program([sys.executable, "-c", _BOUNDED, *files])
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    for name in (
        "line.jsonl.gz:1",
        "line.jsonl.bz2:1",
        "line.jsonl.xz:1",
        "line.jsonl.zst:1",
        "cell.csv.gz:",
        "sparse.jsonl:2",
        "sparse.csv:2",
        "repeated.parquet 64",
    ):
        assert f"{name}" in said, said
    assert said.count("of more than 64 MiB") == 9, said


@each("null", "bool", "fields")
def test_many_values_of_few_bytes_are_counted(kind, *, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 2**24 + 1
    values: Any = pa.nulls(number)
    if kind == "bool":
        values = pa.array([True]).take(pa.nulls(number, pa.int8()).fill_null(0))
    if kind == "fields":
        number = 2**20
        values = pa.StructArray.from_arrays([pa.nulls(number)] * 16, [f"f{n}" for n in range(16)])
    row = pa.ListArray.from_arrays(pa.array([0, number], pa.int32()), values)
    pq.write_table(pa.table({"text": row}), tmp_path / "a.parquet")
    assert "more than 64 MiB" in refusal(tmp_path / "a.parquet").what


def test_a_file_that_is_exchanged_after_the_check_is_not_read(tmp_path, monkeypatch):
    import pyarrow.parquet as pq

    path, private = tmp_path / "a.parquet", tmp_path / "private.parquet"
    write_parquet(path, {"text": ["public"]})
    write_parquet(private, {"text": ["private"]})
    read = pq.ParquetFile

    def exchange(*args: Any, **more: Any) -> Any:
        path.unlink()
        path.symlink_to(private)
        return read(*args, **more)

    monkeypatch.setattr(pq, "ParquetFile", exchange)
    assert "private" not in str(rows_of(path))


def test_files_that_hold_secrets_of_isles_are_no_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = f"isles://127.0.0.1:1/t#{'T' * 43}.{'T' * 43}\n"
    (tmp_path / "hub").mkdir()
    (tmp_path / "run").mkdir()
    make_identity(tmp_path / "hub")
    write_secret(tmp_path / "run/join", line)
    (tmp_path / "copied.txt").write_text(line)
    (tmp_path / "id_rsa").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n")
    for name in ("run/join", "*/join", "hub/token", "*/key.pem", "copied.txt", "id_*"):
        assert "not data" in str(refusal(Path(name))), name
    (tmp_path / "token").write_text("a text about tokens, and isles://host:1/run")
    assert len(rows_of(tmp_path / "token")) == 1


class DatasetHub(BaseHTTPRequestHandler):
    """A stand-in for Hugging Face: dataset e/NUMBER has the readme of that number, and a file."""

    readmes: ClassVar[list[str]] = []
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.asked.append(path)
        number = re.match(r"(?:/api)?/datasets/e/(\d+)", path)
        file = {"type": "file", "path": "data/a.txt", "size": 4, "oid": "b" * 40}
        folder = {"type": "directory", "path": "data", "oid": "c" * 40}
        code, body = 200, b"text"
        if number is None:
            code = 404
        elif path.endswith("README.md"):
            body = f"---\n{self.readmes[int(number[1])]}---\n".encode()
        elif "/tree/" in path:
            body = json.dumps([file] if "/data" in path.split("/tree/")[1] else [folder]).encode()
        elif "/paths-info/" in path:
            body = json.dumps([file]).encode()
        elif path.startswith("/api"):
            body = json.dumps({"id": f"e/{number[1]}", "sha": "a" * 40, "siblings": []}).encode()
        elif not path.endswith("/a.txt"):
            code = 404
        self.send_response(code)
        self.send_header("X-Error-Code", "EntryNotFound" if code == 404 else "")
        self.send_header("X-Repo-Commit", "a" * 40)
        self.send_header("ETag", f'"{len(body)}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Not on the tests' stderr."""


OPEN_ALL = """
import sys
from isles.config.sections.data import SourceConfig
from isles.data.sources.find import open_source
from isles.data.sources.parse import make_parser
for number in range(int(sys.argv[1])):
    for streams in (False, True) if number + 1 == int(sys.argv[1]) else (number % 2 == 0,):
        try:
            source = SourceConfig(path=f"e/{number}")
            [row] = list(open_source(source, streams=streams).rows(make_parser(source)))
            print("takes", row.columns)
        except Exception as error:
            print(str(error).replace("\\n", " ")[:300])
"""


def test_a_readme_of_hugging_face_names_no_file_of_this_machine_and_no_address(tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), DatasetHub) as server,
        ThreadingHTTPServer(("127.0.0.1", 0), DatasetHub) as near,
        running(server),
        running(near),
    ):
        address = f"http://127.0.0.1:{near.server_port}/near"
        secret = f"{tmp_path}/secret.txt"
        named = [
            *(secret, f"file://{secret}", f"file:{secret}", f"{tmp_path}/s*.txt"),
            *(f"{address}/a.txt", f"{address}/*.txt", f"text://*::{address}/a.zip"),
            *(f"simplecache::{address}/a.txt", f"zip://*.txt::{secret}", "zip://a.txt::secret.txt"),
            *("../../../secret.txt", "hf://datasets/other/private/a.txt", "s3://bucket/a.txt"),
            *(
                "hf://datasets/e/0/../../other/a.txt",
                "hf://datasets/e/00/a.txt",
                "hf://other/m/a.txt",
            ),
        ]
        fields = [f"data_files: {json.dumps(pattern)}" for pattern in named]
        fields.append(f"data_files: [{{split: train, path: [data/a.txt, {secret}]}}]")
        fields += [f"data_dir: {place}" for place in (tmp_path, address, "../../..")]
        DatasetHub.readmes[:] = [f"configs:\n- config_name: default\n  {f}\n" for f in fields]
        DatasetHub.readmes.append("configs:\n- config_name: default\n  data_files: data/*.txt\n")
        DatasetHub.asked.clear()
        env = os.environ | {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
        }
        count = len(DatasetHub.readmes)
        done = run_program([sys.executable, "-c", OPEN_ALL, str(count)], tmp_path, env)
    *refused, whole, streamed = done.stdout.splitlines()
    assert len(refused) == count - 1, done.stdout + done.stderr
    assert [line for line in refused if "not in the dataset" not in line] == []
    assert [path for path in DatasetHub.asked if path.startswith("/near")] == []
    assert (whole, streamed) == ("takes {'text': 'text'}",) * 2, done.stdout + done.stderr
