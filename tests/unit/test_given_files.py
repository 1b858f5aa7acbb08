"""The same rows from every file: docs/data.md's table of files, row by row, and odd files."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import re
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from isles.config.endings import ending_of
from isles.config.sections.data import SourceConfig
from isles.data.sources import arrow as arrow_files
from isles.data.sources import files, read, tables
from isles.data.sources.find import HuggingFaceStream, open_source
from isles.data.sources.parse import make_parser
from isles.data.sources.rows import Chat, Item, Row
from isles.errors import DataError

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
ROWS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": "one"}, {"text": "two\nthree"}],
    "chat": [
        {
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": answer},
            ]
        }
        for answer in ("Yes", "No, 50 %")
    ],
    "instruct": [{"instruction": "a", "output": "b, c"}, {"instruction": "d", "output": "e"}],
    "tokens": [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}],
    "preference": [{"prompt": "a", "chosen": "b", "rejected": "c"}] * 2,
}
Write = Callable[[list[dict[str, Any]]], bytes]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def array(rows: list[dict[str, Any]]) -> bytes:
    return json.dumps(rows, indent=1).encode()


def cells(rows: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter=delimiter)
    writer.writerow(rows[0])
    for row in rows:
        values = row.values()
        writer.writerow([v if isinstance(v, str) else json.dumps(v) for v in values])
    return out.getvalue().encode()


def tabs(rows: list[dict[str, Any]]) -> bytes:
    return cells(rows, "\t")


def parquet(rows: list[dict[str, Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), out := io.BytesIO())
    return out.getvalue()


def arrow(rows: list[dict[str, Any]], *, is_stream: bool = False, **options: Any) -> bytes:
    import pyarrow as pa

    table = pa.Table.from_pylist(rows)
    make = pa.ipc.new_stream if is_stream else pa.ipc.new_file
    chosen = pa.ipc.IpcWriteOptions(compression="zstd")
    with make(out := io.BytesIO(), table.schema, options=None if is_stream else chosen) as writer:
        writer.write_table(table, **options)
    return out.getvalue()


def stream(rows: list[dict[str, Any]]) -> bytes:
    return arrow(rows, is_stream=True)


def feather(rows: list[dict[str, Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.feather

    pyarrow.feather.write_feather(pa.Table.from_pylist(rows), out := io.BytesIO())
    return out.getvalue()


def plain(rows: list[dict[str, Any]]) -> bytes:
    return b"Some text,\nand more of it: {}\n"


def zstd(data: bytes) -> bytes:
    import pyarrow as pa

    half = len(data) // 2  # two frames behind one another, as `cat` makes them
    parts = (pa.Codec("zstd").compress(part, asbytes=True) for part in (data[:half], data[half:]))
    return b"".join(parts)


def twice(pack: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    return lambda data: pack(data[:7]) + pack(data[7:])


PACKED: dict[str, Callable[[bytes], bytes]] = {
    ".gz": twice(gzip.compress),
    ".bz2": twice(bz2.compress),
    ".xz": twice(lzma.compress),
    ".zst": zstd,
}
# By the first words of a row of the page: names, if they are not those that it has in backticks,
# and what writes such a file.
WRITTEN: dict[str, tuple[list[str], list[Write]]] = {
    ".jsonl": ([], [lines]),
    ".json": ([], [lines, array]),
    ".csv": ([], [cells]),
    ".tsv": ([], [tabs]),
    ".parquet": ([], [parquet]),
    ".arrow": ([], [arrow, stream, feather]),
    "a folder": ([], []),
    ".txt": ([], [plain]),
    "a text ending": ([".txt", ".md"], [lines, array]),
    "no known ending, such as": (["part-00000", "a.dat"], [lines, array, parquet, arrow]),
    "no known ending, with": (["a", "a.log"], [plain]),
    ".zip": ([], [lines]),
}


def table() -> list[list[str]]:
    text = PAGE.read_text(encoding="utf-8").split("## Files")[1].split("\n\n- ")[0]
    found = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert found[0] == ["file", *(f"`{kind}`" for kind in ROWS)]
    return found[1:]


def items(path: Path, kind: str = "text", **keys: Any) -> list[Item | None]:
    source = SourceConfig.model_validate({"path": str(path), "type": kind, **keys})
    parser, found = make_parser(source), []
    for row in open_source(source).rows(parser):
        if isinstance(row, DataError):
            raise row
        found.append(parser.parse(row))
    return found


def outcome(path: Path, kind: str, want: list[Item | None]) -> str:
    try:
        got = items(path, kind)
    except DataError as error:
        assert error.fix and "iconv" not in error.fix, error
        return "refused"
    if got == want:
        return "rows"
    return "one text" if got == [plain(ROWS[kind]).decode()] else f"{got}"


def files_of(first: str, rows: list[dict[str, Any]], folder: Path) -> Iterator[Path]:
    """Files by a row of the table, one after another."""
    import datasets

    plain_text = first.replace("`", "")
    key = max((k for k in WRITTEN if plain_text.startswith(k)), key=len)
    names, writers = WRITTEN[key]
    if key == "a folder":
        datasets.Dataset.from_list(rows).save_to_disk(folder)
        yield folder
    for number, write in enumerate(writers):
        for name in names or re.findall(r"`(\S+)`", first):
            file = folder.with_name(f"a{name}" if name.startswith(".") else name)
            packing, pack = list(PACKED.items())[(number + len(name)) % len(PACKED)]
            for each, data in (
                (file, write(rows)),
                (file.with_name(f"{file.name.upper()}.1"), write(rows)),
                (file.with_name(f"{file.name}{packing}"), pack(write(rows))),
            ):
                each.write_bytes(data)
                yield each
                each.unlink()


def test_the_pages_table_of_files_holds(tmp_path):
    wrong = []
    for first, *expected in table():
        for (kind, rows), want in zip(ROWS.items(), expected, strict=True):
            (tmp_path / "want.jsonl").write_bytes(lines(rows))
            wanted = items(tmp_path / "want.jsonl", kind)
            for path in files_of(first, rows, tmp_path / f"saved-{kind}"):
                if (got := outcome(path, kind, wanted)) != want:
                    wrong.append(f"{first}: {path.name} as {kind} is {got}, not {want}")
    assert not wrong, "\n".join(wrong)
    assert len(table()) == len(WRITTEN)


def test_the_number_of_a_piece_is_no_part_of_the_ending_and_other_digits_are():
    suffixes = {
        ".jsonl": "a.jsonl a.JSONL.1 a.jsonl-00001-of-00007 a.jsonl_03 a.jsonl.part2 a.jsonl.gz.1",
        ".csv": "a.csv.2024-01-02 a.csv-part-3 a.csvpart3 a.csv.2.gz",
        ".z": "core.z core.z.80",
        "": "core.z80 a.json5 a.json5.gz a.py3 a.db3 part-00000 squad.v2",
    }
    for suffix, names in suffixes.items():
        assert {name: ending_of(name).suffix for name in names.split()} == dict.fromkeys(
            names.split(), suffix
        )


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def talk(*calls: Any, tools: Any = None) -> dict[str, Any]:
    """A conversation whose answers are calls."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Rain?", "name": "Ann"}]
    for each in calls:
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [each]},
            {"role": "tool", "content": "no", "tool_call_id": "1"},
        ]
    return {"messages": messages, **({"tools": tools} if tools else {})}


UNEVEN = [
    talk(call("weather", city="Bonn"), tools=[tool("weather", city={"type": "string"})]),
    talk(call("search", query={"words": ["a"], "depth": {"most": 3}}), call("stop", now=True)),
    talk(call("search", query={"filters": [{"year": 1}, {"tags": [{"id": 1}, {"of": "b"}]}]})),
]


def test_nulls_that_a_table_invents_are_no_part_of_a_row(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "a.jsonl").write_bytes(lines(UNEVEN))
    want = items(tmp_path / "a.jsonl", "chat")
    for name, write in (("a.parquet", parquet), ("a.arrow", arrow), ("a.feather", feather)):
        (tmp_path / name).write_bytes(write(UNEVEN))
        assert items(tmp_path / name, "chat") == want, name
    datasets.Dataset.from_list(UNEVEN).save_to_disk(tmp_path / "saved")
    assert items(tmp_path / "saved", "chat") == want
    files = {"train": str(tmp_path / "a.parquet")}
    builder = datasets.load_dataset_builder("parquet", data_files=files)
    parser = make_parser(SourceConfig(path="x", type="chat"))
    rows = HuggingFaceStream("three rows", builder, "train").rows(parser)
    assert [parser.parse(row) for row in rows if isinstance(row, Row)] == want


def test_dates_and_decimals_are_as_in_json_lines(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def rows(day: Any, at: Any, costs: Any, count: Any) -> list[dict[str, Any]]:
        row = talk(call("weather", days=[day, None], at=at, costs=costs, count=count))
        return [{**row, "tools": [tool("weather", since={"minimum": day})]}]

    at = datetime(2024, 2, 3, 4, 5, tzinfo=UTC)
    values = rows(date(2024, 2, 3), at, Decimal("1.50"), Decimal(7))
    (tmp_path / "a.jsonl").write_bytes(lines(rows("2024-02-03", at.isoformat(), 1.5, 7)))
    want = items(tmp_path / "a.jsonl", "chat")
    for name, write in (("a.parquet", parquet), ("a.arrow", arrow)):
        (tmp_path / name).write_bytes(write(values))
        assert items(tmp_path / name, "chat") == want, name
    datasets.Dataset.from_list(values).save_to_disk(tmp_path / "saved")
    assert items(tmp_path / "saved", "chat") == want


def test_a_null_that_is_meant_stays(tmp_path):
    """In the JSON of JSON lines, and of a cell, from wherever it comes."""
    talks = [talk(call("weather", city="Bonn", unit=None))]
    text = json.dumps(talks[0]["messages"])
    (tmp_path / "a.jsonl").write_bytes(lines(talks))
    for name, write in (("a.parquet", parquet), ("a.csv", cells), ("a.arrow", arrow)):
        (tmp_path / name).write_bytes(write([{"messages": text}]))
    for name in ("a.jsonl", "a.parquet", "a.csv", "a.arrow"):
        [got] = items(tmp_path / name, "chat")
        assert isinstance(got, Chat), name
        found = got.messages[1]["tool_calls"][0]["function"]["arguments"]
        assert found == {"city": "Bonn", "unit": None}, name


def test_json_of_the_datasets_library_keeps_its_nulls(tmp_path):
    import datasets

    if not hasattr(datasets, "Json"):
        pytest.skip("this version has no type for JSON")
    called = {"name": "weather", "arguments": {"unit": None}}
    kind = {"name": datasets.Value("string"), "id": datasets.Value("string")}
    features = datasets.Features({"text": {**kind, "arguments": datasets.Json()}})
    rows = [{"text": {**called, "id": None}}]
    datasets.Dataset.from_list(rows, features=features).save_to_disk(tmp_path / "saved")
    source = open_source(SourceConfig(path=str(tmp_path / "saved")))
    [row] = source.rows(make_parser(SourceConfig()))
    assert isinstance(row, Row) and row.columns["text"] == called


def test_a_null_in_a_list_and_a_map_of_a_table_stay(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    kind = pa.struct({"one": pa.list_(pa.int64()), "two": pa.map_(pa.string(), pa.string())})
    values = [{"one": [1, None], "two": [("a", None), ("b", "c")]}, {"one": None, "two": []}, None]
    table = pa.table({"text": pa.array(values, kind)})
    pq.write_table(table, tmp_path / "a.parquet")
    source = open_source(SourceConfig(path=str(tmp_path / "a.parquet")))
    rows = list(source.rows(make_parser(SourceConfig())))
    found = [row.columns["text"] for row in rows if isinstance(row, Row)]
    assert found == [{"one": [1, None], "two": {"a": None, "b": "c"}}, {"two": {}}, None]


def refusal(path: Path, kind: str = "text") -> str:
    with pytest.raises(DataError) as caught:
        items(path, kind)
    assert caught.value.fix and str(path) in caught.value.where, caught.value
    return f"{caught.value}"


def test_marks_line_ends_empty_parts_and_uneven_parts(tmp_path):
    """BOM and CR LF, parts of no bytes, of no rows, of one and of many."""
    rows, bom = [{"text": f"text {number}"} for number in range(300)], b"\xef\xbb\xbf"
    for name, write in (("a.jsonl", lines), ("a.json", array), ("a.csv", cells), ("a", lines)):
        data = bom + write(rows).replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")
        (tmp_path / name).write_bytes(data)
        assert items(tmp_path / name) == [row["text"] for row in rows], name
    for write, ending in ((lines, "jsonl"), (cells, "csv"), (array, "json"), (parquet, "parquet")):
        for part, count in enumerate((1, 0, 250, 49)):
            done = sum((1, 0, 250, 49)[:part])
            data = write(rows[done : done + count]) if count else b""
            if ending == "parquet" and not count:
                data = parquet_without_rows()
            (tmp_path / f"part-{part}.{ending}").write_bytes(data)
        assert items(tmp_path / f"part-*.{ending}") == [row["text"] for row in rows], ending
    for name in ("b.jsonl", "b.json", "b.csv", "b.txt", "b.jsonl.gz", "b.jsonl.zst", "b"):
        (tmp_path / name).write_bytes(b"")
        assert items(tmp_path / name) == [], name
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/_SUCCESS").touch()
    (tmp_path / "parts/part-00000").write_bytes(lines(ROWS["chat"]))
    assert len(items(tmp_path / "parts/*", "chat")) == 2


def parquet_without_rows() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": pa.array([], pa.string())}), out := io.BytesIO())
    return out.getvalue()


def test_one_huge_line_is_read_up_to_a_limit(tmp_path, monkeypatch):
    row = {"text": "word " * 2_000_000}
    for name in ("a.jsonl", "a", "a.1"):
        (tmp_path / name).write_bytes(lines([row]))
        assert items(tmp_path / name) == [row["text"]], name
    (tmp_path / "a.txt").write_bytes(lines([row]))
    assert "JSON objects" in refusal(tmp_path / "a.txt")
    monkeypatch.setattr(read, "ROW_BYTES", 2**20)
    assert "of more than" in refusal(tmp_path / "a.jsonl")


def test_a_damaged_line_among_rows_does_not_make_them_text(tmp_path):
    rows = [{"text": f"text {number}"} for number in range(3000)]
    good = lines(rows)
    for damage in (b'{"text": "text 7"\n', b"\n<html>\n", b'["text 7"]\n'):
        damaged = good.replace(b'{"text": "text 7"}\n', damage)
        for name in ("a", "a.dat", "a.1"):
            (tmp_path / name).write_bytes(damaged)
            assert refused_line(tmp_path / name) == 8 + damage.startswith(b"\n"), name
        (tmp_path / "a.txt").write_bytes(damaged)
        assert "most lines are JSON objects" in refusal(tmp_path / "a.txt")
    (tmp_path / "a").write_bytes(lines(rows[:2]) + b'{"te')
    assert refused_line(tmp_path / "a") == 3
    for size in (50_000, 2**16 - 15):  # the first 64 KiB end inside the second row
        row = {"text": "a" * size}
        (tmp_path / "a.txt").write_bytes(lines([row] * 3))
        assert "most lines are JSON objects" in refusal(tmp_path / "a.txt"), size


def refused_line(path: Path) -> int:
    with pytest.raises(DataError) as caught:
        items(path)
    return int(caught.value.where.removeprefix(f"{path}:"))


def test_text_with_some_json_in_it_is_text(tmp_path):
    for name, text in (
        ("a.py", "{}\n"),
        ("a.md", '{"a": 1}\n'),
        ("a.txt", 'It answers:\n{"a": 1}\n'),
        ("a", 'It answers:\n{"a": 1}\n'),
        ("a.log", '{"a": 1}\nDone.\n' * 9000),
    ):
        (tmp_path / name).write_text(text)
        assert items(tmp_path / name) == [text], name


def test_a_packed_file_that_is_damaged_is_named_so(tmp_path):
    data = lines([{"text": f"text {number}"} for number in range(9000)])
    tests = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
    for ending, pack in PACKED.items():
        packed = pack(data)
        half = packed[: len(packed) // 2]
        (tmp_path / f"b.jsonl{ending}").write_bytes(data)
        assert f"it is not packed with {tests[ending]}" in refusal(tmp_path / f"b.jsonl{ending}")
        for bad in (half, packed[:-3], half + bytes(50) + half, packed + b"more"):
            (tmp_path / f"a.jsonl{ending}").write_bytes(bad)
            said = refusal(tmp_path / f"a.jsonl{ending}")
            assert f"{tests[ending]} file is damaged" in said, said
            assert f"{tests[ending]} -t" in said, said
        for whole in ("a.jsonl", f"a{ending}", f"a.{ending[1:].upper()}", "a"):
            (tmp_path / whole).write_bytes(packed)
            assert len(items(tmp_path / whole)) == 9000, whole


def test_an_xz_file_may_not_ask_for_any_memory(tmp_path):
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 2**30}]
    head = bytearray(lzma.compress(b'{"text": "a"}\n', filters=filters))
    (tmp_path / "a.jsonl.xz").write_bytes(head)
    assert "emory usage limit" in refusal(tmp_path / "a.jsonl.xz")


def test_what_is_not_text_is_refused_with_what_it_is(tmp_path):
    text = "Ünd some text.\n" * 300
    for name, data, what in (
        ("a.txt", b"%PDF-1.7\n1 0 obj\n", "a PDF document"),
        ("a.csv", b"PK\x03\x04\x14\0\x06\0", "a ZIP archive"),
        ("a.jsonl", parquet(ROWS["text"]), "a Parquet file"),
        ("a.txt", arrow(ROWS["text"]), "an Arrow file"),
        ("a", b"SQLite format 3\0\x10\0", "a database"),
        ("a.txt", text.encode("utf-16-le"), "iconv -f UTF-16LE"),
        ("a.csv", ("text\n" + text).encode("utf-16-be"), "iconv -f UTF-16BE"),
        ("a.jsonl", text.encode("utf-16"), "iconv -f UTF-16 "),
        ("a.md", bytes(100), "not text"),
        ("a.csv", b"text;n\na;1\n", "separated by semicolons"),
        ("a.json", b'{\n "data": [{"text": "a"}]\n}\n', "jq -c '.KEY[]'"),
        ("a.jsonl", lines([[{"role": "user", "content": "a"}]]), "jq -c '{messages: .}'"),
        ("a.jsonl", b'"some text"\n', "jq -c '{text: .}'"),
        ("a.csv", b"text\rone\rtwo\r", "tr "),
        ("a.tsv", b"text,n\na,1\n", "separated by commas"),
    ):
        (tmp_path / name).write_bytes(data)
        assert what in refusal(tmp_path / name), what


def test_arrow_files_are_whole_and_no_bombs(tmp_path, monkeypatch):
    import pyarrow as pa

    rows = [{"text": f"text {number}"} for number in range(2000)]
    path = tmp_path / "a.arrow"
    for is_stream in (False, True):
        path.write_bytes(arrow(rows, is_stream=is_stream, max_chunksize=99))
        chunks = list(read.file_chunks(path, make_parser(SourceConfig()), {}))
        for chunk in chunks[2:5]:
            [first, *_] = read.file_chunks(path, make_parser(SourceConfig()), chunk.begin)
            assert first == chunk
        whole = path.read_bytes()
        for end in (0, 7, 100, len(whole) // 2, len(whole) - 20 if not is_stream else 200):
            path.write_bytes(whole[:end])
            assert "damaged" in refusal(path), end
    path.write_bytes(arrow(rows))
    monkeypatch.setattr(arrow_files, "MOST_BATCH_BYTES", 2**12)
    assert "unpacks to more than" in refusal(path)
    write_arrow(path, text=pa.array(["a", "b"], pa.string_view()))
    assert "the type string_view" in refusal(path)


def write_arrow(path: Path, **columns: Any) -> None:
    import pyarrow as pa

    table = pa.table(columns)
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)


def test_values_that_rows_of_an_arrow_file_share_are_read(tmp_path, monkeypatch):
    import pyarrow as pa

    def texts(**source: Any) -> list[Any]:
        config = SourceConfig(path=str(path), **source)
        chunks = read.file_chunks(path, make_parser(config), {})
        return [row.columns for chunk in chunks for row in chunk.rows]  # type: ignore[union-attr]

    path = tmp_path / "a.arrow"
    given = ["one", "two", None, "one", "two"]
    for kind in (pa.string(), pa.large_string()):
        write_arrow(path, text=pa.array(given, kind).dictionary_encode())
        assert [row["text"] for row in texts()] == given
    # Inside of other types, as of messages; and of numbers.
    words = pa.dictionary(pa.int8(), pa.string())
    message = pa.struct({"role": words, "content": pa.string()})
    talk = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    for kind in (pa.list_(message), pa.large_list(message), pa.list_(message, 2)):
        write_arrow(path, messages=pa.array([talk] * 3, kind).slice(1))
        assert texts(type="chat") == [{"messages": talk}] * 2
    ids = pa.list_(pa.dictionary(pa.int8(), pa.int32()))
    write_arrow(path, input_ids=pa.array([[7, 8], [8, 8]], ids))
    assert texts(type="tokens") == [{"input_ids": [7, 8]}, {"input_ids": [8, 8]}]
    # A few bytes may be many large rows. They become Python's values a few at a time.
    monkeypatch.setattr(arrow_files, "ROW_BYTES", 2**14)
    sizes: list[int] = []
    rows = arrow_files.table_rows
    monkeypatch.setattr(
        tables, "table_rows", lambda part, *more: sizes.append(len(part)) or rows(part, *more)
    )
    write_arrow(path, text=pa.array(["a" * 1000, "b" * 2000] * 99).dictionary_encode())
    assert [len(row["text"]) for row in texts()] == [1000, 2000] * 99
    assert sum(sizes) == 198 and max(sizes) <= 3
    write_arrow(path, text=pa.array(["a", "b" * 2**14]).dictionary_encode())
    assert "row 1" in refusal(path) and "a row of more than" in refusal(path)
    # Indices that are wrong are no values of other memory.
    wrong = pa.DictionaryArray.from_arrays(pa.array([0, 5]), pa.array(["a"]), safe=False)
    write_arrow(path, text=wrong)
    assert "damaged" in refusal(path)


def test_a_row_with_a_field_twice_is_refused_and_named(tmp_path):
    """json keeps the last of two, and the other would be lost without a word."""
    twice = '{"messages": [{"role": "user", "content": "Why?", "content": "So?"}]}'
    good = json.dumps(ROWS["chat"][0])
    beside = '{"text": "a", "text": "b"}'
    for name, content, where in (
        ("a.jsonl", f"{good}\n{twice}\n", ":2"),
        ("a.json", f"[{good},\n{twice}, {good}]", " row 2"),
        ("b.json", f"[{'{'}{' ' * 2**21}{twice[1:]}, {good}]", " row 1"),
    ):
        (path := tmp_path / name).write_text(content)
        with pytest.raises(DataError) as caught:
            items(path, "chat")
        assert caught.value.where == f"{path}{where}"
        assert caught.value.what == "a JSON object has two fields 'content'"
        # The rows beside it are read.
        chunks = read.file_chunks(path, make_parser(SourceConfig(type="chat")), {})
        rows = [row for chunk in chunks for row in chunk.rows]
        assert [isinstance(row, Row) for row in rows].count(True) == content.count(good)
    (path := tmp_path / "c.jsonl").write_text(f"{beside}\n")
    assert "two fields 'text'" in refusal(path)
    # JSON in a cell, as CSV has it.
    told = [{"messages": '[{"role": "user", "role": "assistant", "content": "a"}]'}]
    (path := tmp_path / "d.csv").write_bytes(cells(told))
    assert "two fields 'role'" in refusal(path, "chat")


def test_a_packed_parquet_file_is_no_bomb(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "UNPACKED_BYTES", 2**10)
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress(bytes(2**11)))
    assert "unpacks to more than" in refusal(tmp_path / "a.parquet.gz")


def test_columns_that_nothing_reads_are_named_from_every_file(tmp_path):
    import datasets

    rows = [{**row, "origin": "old", "nothing": None} for row in ROWS["instruct"]]
    for name, write in (
        ("a.jsonl", lines),
        ("a.json", array),
        ("a.csv", cells),
        ("a.parquet", parquet),
        ("a.arrow", arrow),
    ):
        (tmp_path / name).write_bytes(write(rows))
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    for path in sorted(tmp_path.iterdir()):
        source = SourceConfig(path=str(path), type="instruct")
        parser = make_parser(source)
        for row in open_source(source).rows(parser):
            assert isinstance(row, Row)
            parser.read(row)
            assert parser.unread == {"origin"} | ({"nothing"} if path.suffix == ".csv" else set())
