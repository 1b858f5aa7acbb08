"""Time to prepare chats and text, against another version of isles.

    python benchmarks/prepare.py [--quick|--smoke] [--against COMMIT|FOLDER]

Two versions of isles prepare the same files with the same tokenizer: this one, and the one that
`--against` names by a commit of this repository or by the folder of a clone. Default: this version
against itself, which shows the noise floor. Each preparation is one `isles data show` with an empty
cache. The versions take turns, and which of them is first changes from round to round.

Cases: 100,000 chats of four messages as JSON lines, as Parquet, and with `train_on: last`, and 1 GB
of text as JSON lines. The words are those of Python's documentation and library. The start of each
version is measured once, with a few rows, and subtracted.

The last line is JSON, with a ratio for each case, of this version over the other one, medians of
the rounds; below 1 means that this version is faster:
    chats_jsonl, chats_parquet, chats_last, text: seconds of wall time.
    ..._cpu: seconds of CPU time, which other work on the machine changes less.
    same_tokens: the share of cases for which both versions make the same bytes.
"""

from __future__ import annotations

import io
import json
import os
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from common import ROOT, environment, make_parser, pick, print_figures, run_processes

DEADLINE_S = 1800.0
MESSAGES = 4
NAMES = "this", "other"

RUN_FILE = """\
name: prepare
output_dir: {folder}/runs
model: {{name_or_path: llama-2m, init: scratch}}
tokenizer: {{name_or_path: {folder}/tokenizer, chat_template: chatml}}
data:
  sources: [{{path: {file}, type: {type}{more}}}]
  cache_dir: {folder}/cache
training: {{max_steps: 1}}
"""


class Effort(NamedTuple):
    """How much is prepared, and how often by each version."""

    chats: int
    text_bytes: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of data: a file with all rows, and one with a few."""

    name: str
    ending: str
    type: str
    more: str = ""

    def run_file(self, folder: Path, *, few: bool = False) -> Path:
        """Write the run file, and give its path."""
        file = folder / f"{self.type}{'-few' if few else ''}{self.ending}"
        path = folder / f"{self.name}{'-few' if few else ''}.yaml"
        path.write_text(
            RUN_FILE.format(folder=folder, file=file, type=self.type, more=self.more),
            encoding="utf-8",
        )
        return path


CASES = (
    Case("chats_jsonl", ".jsonl", "chat"),
    Case("chats_parquet", ".parquet", "chat"),
    Case("chats_last", ".jsonl", "chat", ", train_on: last"),
    Case("text", ".jsonl", "text"),
)


class Made(NamedTuple):
    """One preparation: seconds of wall and CPU time, and a hash of the tokens."""

    wall_s: float
    cpu_s: float
    tokens: str


def paragraphs() -> list[str]:
    """The paragraphs of Python's documentation and library."""
    from isles.config.sections.data import SourceConfig
    from isles.data.sources.find import open_source
    from isles.data.sources.parse import make_parser as parser_of
    from isles.data.sources.rows import PLAIN, Row

    found = list[str]()
    for name in ("python-docs", "python-stdlib"):
        source = SourceConfig(path=name)
        for row in open_source(source).rows(parser_of(source)):
            assert isinstance(row, Row)
            found += [text for text in str(row.columns[PLAIN]).split("\n\n") if text.strip()]
    return found


def write_inputs(folder: Path, effort: Effort) -> None:
    """Write the tokenizer and the files of all cases."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from isles.data.tokens.tokenizer import train_tokenizer

    pieces, chance = paragraphs(), random.Random(0)
    tokenizer: Any = train_tokenizer(pieces[:20_000], 8192)
    tokenizer.save_pretrained(folder / "tokenizer")

    def chats() -> Iterator[dict[str, Any]]:
        for _ in range(effort.chats):
            said = (chance.choice(pieces).strip()[:600] for _ in range(MESSAGES))
            roles = ("user", "assistant") * (MESSAGES // 2)
            messages = [
                {"role": role, "content": text} for role, text in zip(roles, said, strict=True)
            ]
            yield {"messages": messages}

    def texts() -> Iterator[dict[str, Any]]:
        size = 0
        while size < effort.text_bytes:
            text = "\n\n".join(chance.choices(pieces, k=12))
            size += len(text.encode())
            yield {"text": text}

    talks = list(chats())
    for few, rows in (("", talks), ("-few", talks[:8])):
        write_lines(folder / f"chat{few}.jsonl", rows)
        pq.write_table(pa.Table.from_pylist(rows), folder / f"chat{few}.parquet")
    write_lines(folder / "text.jsonl", texts())
    write_lines(folder / "text-few.jsonl", islice(texts(), 8))


def write_lines(path: Path, rows: Any) -> None:
    """Write JSON lines."""
    with path.open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)


def other_version(against: str | None, folder: Path) -> Path:
    """The folder `src` of the other version, unpacked if `against` is a commit."""
    if against is None:
        return ROOT / "src"
    if (Path(against) / "src" / "isles").is_dir():
        return Path(against).resolve() / "src"
    git = ["git", "-C", str(ROOT), "archive", "--format=tar", against, "src"]
    done = subprocess.run(git, check=False, capture_output=True)
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip()
        sys.exit(f"--against {against} is neither a clone of isles nor a commit of this one: {why}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


def prepare(source: Path, run_file: Path, cache: Path) -> Made:
    """Prepare the data of a run file with the version in `source`, and delete the tokens."""
    command = [sys.executable, "-m", "isles", "data", "show", str(run_file), "--samples", "1"]
    before, began = os.times(), time.monotonic()
    run_processes([command], [environment(PYTHONPATH=str(source))], DEADLINE_S)
    wall_s, after = time.monotonic() - began, os.times()
    cpu_s = sum(after[2:4]) - sum(before[2:4])  # of children that have ended
    [manifest] = cache.glob("tokens-*/manifest.json")
    tokens = json.loads(manifest.read_text(encoding="utf-8"))["files"]["tokens.bin"]["sha256"]
    for path in sorted(cache.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    return Made(wall_s, cpu_s, tokens)


def measure(
    case: Case, folder: Path, versions: dict[str, Path], starts: dict[str, Made], rounds: int
) -> dict[str, float]:
    """Print one line of the table; the two ratios of a case, and whether the tokens are equal."""
    file, tokens = case.run_file(folder), set[str]()
    found: dict[str, list[Made]] = {name: [] for name in versions}
    for number in range(rounds):
        for name in sorted(versions, reverse=bool(number % 2)):
            whole, start = prepare(versions[name], file, folder / "cache"), starts[name]
            tokens.add(whole.tokens)
            wall_s, cpu_s = whole.wall_s - start.wall_s, whole.cpu_s - start.cpu_s
            found[name].append(Made(max(wall_s, 1e-3), max(cpu_s, 1e-3), whole.tokens))
    columns, figures = "", {"same": float(len(tokens) == 1)}
    for unit, key in (("wall_s", case.name), ("cpu_s", f"{case.name}_cpu")):
        ours, theirs = ([getattr(made, unit) for made in found[name]] for name in NAMES)
        figures[key] = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        columns += f"{statistics.median(ours):>9.1f}{statistics.median(theirs):>9.1f}"
        columns += f"{figures[key]:>8.3f}"
    same = "yes" if figures["same"] else "no"
    print(f"{case.name:<16}{columns}{same:>8}{rounds:>4}", flush=True)
    return figures


def main() -> None:
    parser = make_parser(__doc__, quick="10,000 chats and 100 MB of text, three rounds")
    parser.add_argument("--against", metavar="COMMIT|FOLDER", help="the version to compare with")
    parser.add_argument("--only", choices=[case.name for case in CASES], help="one case alone")
    options: Namespace = parser.parse_args()
    effort = pick(
        options,
        full=Effort(100_000, 10**9, 1),
        quick=Effort(10_000, 10**8, 3),
        smoke=Effort(200, 10**5, 1),
    )
    with tempfile.TemporaryDirectory(prefix="isles-prepare-") as made:
        folder = Path(made)
        (folder / "cache").mkdir()
        sources = ROOT / "src", other_version(options.against, folder / "other")
        versions = dict(zip(NAMES, sources, strict=True))
        write_inputs(folder, effort)
        few = CASES[0].run_file(folder, few=True)
        for source in sources:  # compiles its modules
            prepare(source, few, folder / "cache")
        starts = {name: prepare(source, few, folder / "cache") for name, source in versions.items()}
        names = f"{'this s':>9}{'other s':>9}{'ratio':>8}"
        print(f"{'':<16}{names}{names.replace(' s', 'CPU'):<26}{'same':>8}{'n':>4}", flush=True)
        figures, same = dict[str, float](), list[float]()
        for case in CASES:
            if options.only in (None, case.name):
                found = measure(case, folder, versions, starts, effort.rounds)
                same.append(found.pop("same"))
                figures |= found
    print_figures({**figures, "same_tokens": statistics.mean(same)})


if __name__ == "__main__":
    main()
