"""Text of runs, hosts, members, data, templates and models is shown on a terminal, not sent."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import sys
import threading
import unicodedata
from pathlib import Path

import pytest
import yaml

from isles.cli import main
from isles.facts.terminal import copy_drawn
from isles.facts.units import printable
from isles.run.records import read_record, write_record
from tests.data import write_rows
from tests.inputs import TINY
from tests.programs import write_program, write_ssh
from tests.run_records import FAR, GONE, rank_error, recorded_run, two_hosts
from tests.unit.test_begin import add_checkpoint

EVIL = "\x1b]0;OWNED\x07\x1b[2J\x9b31m\x7f\x08\u202egnp.exe\u2066\u2028\x00[red]:smile:[/]"
GOOD = "naïve\u00a0: می\u200cخواهم 👩\u200d💻 co\u00adop\ttab العربية עברית ខ្មែរ\u200bភាសា ❤\ufe0f"
SCOTLAND = "🏴" + "".join(chr(0xE0000 + ord(c)) for c in "gbsct") + "\U000e007f"


def controls(text: str) -> set[str]:
    """Whatever a terminal would obey, and line ends and tabs that are no part of a text."""
    kinds = {c for c in text if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t"}
    marks = "[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u2028\u2029\ufeff]"
    return kinds | set(re.findall(marks, text)) | set(re.findall("[\U000e0000-\U000e001f]", text))


def test_what_is_a_control_character() -> None:
    assert printable(GOOD + SCOTLAND) == GOOD + SCOTLAND
    every = "".join(map(chr, (*range(0x3000), *range(0xD7F0, 0xE010), 0xFEFF, 0x1F600, 0xE0001)))
    assert not controls(printable(every))
    assert controls(printable(every, keep="")) == set()
    shown = printable("run\u200f 1\u200e 2\u061c 3")
    assert shown == "run\\u200f 1\\u200e 2\\u061c 3", "they reorder numbers of a line"
    hidden = "".join(chr(0xE0000 + ord(c)) for c in "rm -rf")
    assert printable(f"a{hidden}").isascii(), "tags are text that nobody sees"
    assert json.loads(f'"{printable(hidden)}"') == hidden
    assert json.loads(f'"{printable(chr(0x7F) + EVIL)}"') == chr(0x7F) + EVIL, "as JSON has it"


def spoilt_run(path: Path, state: str) -> None:
    """A run whose records, logs and files say what they like."""
    launch = {**(FAR if state == "running" else GONE), "world_size": 3, "device": f"cuda{EVIL}"}
    launch |= {"typed": f"isles train {EVIL}", "launcher": f"local{EVIL}"}
    end = {"state": "failed", "exit_code": 4, "reason": f"lost {EVIL}", "step": 7}
    status = {"phase": EVIL, "detail": EVIL, "step": 7, "total_steps": 60, "hint": EVIL}
    outcome = end if state == "failed" else None
    run_dir, attempt = recorded_run(path, launch, outcome, status=status)
    two_hosts(attempt, "slurm")
    fleet = read_record(attempt.fleet) or {}
    for node in fleet.get("nodes", []):
        node.update(name=f"h{EVIL}", address=f"10.0.0.1{EVIL}")
    write_record(attempt.fleet, fleet)
    node = {"address": EVIL, "ranks": 2, "host": EVIL, "pid": 5, "started": 1.0, "why": EVIL}
    there = {**node, "node": 0, "name": EVIL, "first_rank": 0, "state": "lost"}
    write_record(attempt.nodes, {"nodes": [there]})
    found = [{"level": "warning", "text": EVIL, "where": EVIL, "id": EVIL, "fix": EVIL}]
    write_record(attempt.findings, {"findings": found})
    rank_error(attempt, 1, EVIL, id=f"memory{EVIL}", where=EVIL, fix=EVIL, traceback=EVIL)
    for log in (attempt.agent_log, attempt.rank_log(0), attempt.node_log(0)):
        log.write_bytes(f"a\r{GOOD}\n10%\r90%\r\n{EVIL}".encode())
    add_checkpoint(run_dir, 5)
    write_record(run_dir.summary, {"first_loss": 7.6, "note": EVIL})
    run_dir.run_file.write_text(yaml.safe_dump({"name": EVIL}))


VERBS = (
    *("status RUN", "status RUN --json", "status", "status --check", "logs RUN"),
    *("logs RUN --rank 0", "logs RUN --by-node", "top RUN", "top RUN --json"),
    *("checkpoint list RUN", "checkpoint list RUN --json", "checkpoint verify RUN"),
    *("status EVIL", "logs EVIL", "explain EVIL", "plan EVIL", "train EVIL", "EVIL", "top --EVIL"),
)


@pytest.mark.parametrize("state", ["running", "failed"])
def test_no_look_at_a_run_sends_what_its_records_say(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"ev{EVIL.replace('/', '').replace(chr(0), '')}-1"
    spoilt_run(tmp_path / "runs" / name, state)
    bad, shown = [], ""
    for verb in (*VERBS, *(("report RUN --yes",) if state == "failed" else ())):
        words = {"RUN": f"runs/{name}", "EVIL": EVIL.replace("\0", ""), "--EVIL": f"--{EVIL}"}
        main([words.get(word, word) for word in verb.split()])
        out, err = capfd.readouterr()
        if verb.endswith("--json") and out:
            json.loads(out)
        bad += [(verb, found) for text in (out, err) if (found := controls(text))]
        shown += out + err
    assert not bad, "\n".join(map(str, bad))
    assert "\\u001b]0;OWNED\\u0007" in shown, "it is shown"
    assert GOOD in shown and "90%" in shown and "10%" not in shown


def test_errors_that_quote_data_models_and_templates_send_nothing(
    run_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    data = write_rows(tmp_path / "odd.jsonl", [{f"a{EVIL}": f"b{EVIL}"}] * 3)
    said = [{"role": role, "content": EVIL} for role in ("user", "assistant")]
    chat = write_rows(tmp_path / "chat.jsonl", [{"messages": said}] * 9)
    model = tmp_path / "odd"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**TINY, "model_type": f"x{EVIL}"}))
    template = tmp_path / "template.jinja"
    template.write_text("{{ raise_exception(messages[0]['content']) }}")
    source = f"data.sources=[{{path: {chat}, type: chat}}]"
    cases = (
        ("data", "show", run_file, f"data.sources=[{{path: {data}}}]"),
        ("data", "show", run_file, source),
        ("data", "show", run_file, source, f"tokenizer.chat_template={template}"),
        ("data", "show", run_file, f"data.sources=[{{path: {json.dumps(EVIL)}}}]"),
        ("plan", run_file, f"model.name_or_path={model}"),
        ("check", run_file, f"name={json.dumps(EVIL)}", f"{EVIL[:9]}=3"),
    )
    bad = []
    for words in cases:
        main(list(map(str, words)))
        text = "".join(capfd.readouterr())
        if controls(text) or "]0;OWNED" not in text or "Traceback" in text:
            bad.append((words, ascii(text)))
    assert not bad, "\n".join(map(str, bad))


def test_a_follower_and_its_bar_send_nothing_on_a_terminal(tmp_path: Path) -> None:
    program = f"""if True:
        import sys
        from rich.table import Table
        from rich.text import Text
        from isles.facts.console import Console
        from isles.facts.terminal import shown_streams
        from isles.monitor.follow import _Bar
        evil = {EVIL!r}
        status = {{"phase": evil, "step": 1, "total_steps": 2, "detail": evil}}
        with shown_streams():
            console = Console()
            table = Table(evil, header_style="bold")
            table.add_row(Text(evil, "red"))
            bar = _Bar(console)
            bar.show(status, [("note", evil)])
            console.print(table)
            print(evil)
            print(evil, file=sys.stderr)
            bar.progress.stop()
            console.print(evil)
    """
    sent = on_a_terminal([sys.executable, "-c", program], tmp_path)
    assert "\x1b[31m" in sent and "\x1b[1m" in sent, "colors are ours"
    # What is left are colors, and the moves of the bar.
    rest = re.sub(r"\x1b\[(\?25[lh]|[0-9;]*[mKA]|2K)", "", sent).replace("\r", "")
    assert not controls(rest), ascii(rest)


BAR = "\x1b[?25l\r\x1b[2K\x1b[31mstep 1\x1b[0m\r\x1b[1A\x1b[2K\x1b[?25h"
MORE_EVIL = (
    "\x1b[6n\x1b[5;5H\x1b]8;;http://x\x1b\\\x1b[9A\x1b[2J\x1b[3J\x1bc\x1bP$q\x1b[?1049h\x1b["
)


def moves(text: str) -> list[str]:
    """What a bar may send, in order."""
    return re.findall(r"\x1b\[(?:\?25[lh]|[0-9;]*m|2K|1A)|\r", text)


def test_what_an_isles_elsewhere_draws_passes_in_any_pieces() -> None:
    text = f"{BAR}{EVIL}{MORE_EVIL}{GOOD}{BAR}{'x' * 70_000}\x1b["
    found = []
    for size in (1, 7, 1 << 20):
        begin, end = os.pipe2(os.O_DIRECT)  # each write is read alone

        def send(size: int = size, end: int = end) -> None:
            data = text.encode()
            with os.fdopen(end, "wb", buffering=0) as stream:
                for at in range(0, len(data), size):
                    stream.write(data[at : at + size])

        target, writer = io.StringIO(), threading.Thread(target=send)
        writer.start()
        with os.fdopen(begin, "rb"):
            copy_drawn(begin, target)
        writer.join()
        found.append(target.getvalue())
    assert len(set(found)) == 1
    assert moves(found[0]) == [*moves(BAR) * 2, "\x1b[0m", "\x1b[?25h"]
    rest = re.sub(r"\x1b\[(\?25[lh]|0m|31m|2K|1A)", "", found[0]).replace("\r", "")
    assert not controls(rest), ascii(rest)[:500]
    assert GOOD in rest and "\\u001b]0;OWNED" in rest


def test_another_machine_sends_nothing_but_its_bar(tmp_path: Path) -> None:
    """Of a host that is another's by now, each way in which isles there reaches this terminal."""
    write_ssh(tmp_path)
    (tmp_path / "evil").write_text(f"{BAR}{EVIL}{MORE_EVIL}\n")
    write_program(tmp_path / "python", "cat evil; cat evil >&2")
    program = f"""if True:
        import os, sys
        from isles.cli import main
        from isles.facts.terminal import shown_streams
        from isles.launch.remote.login import pass_on
        from isles.monitor.remote import RemoteFollower
        from isles.facts.console import Console
        from isles.run.remote import RemoteRun
        os.environ["PATH"] = {str(tmp_path)!r} + ":" + os.environ["PATH"]
        python, folder = {str(tmp_path / "python")!r}, {str(tmp_path)!r}
        run = RemoteRun("x-1", "h", folder, ("cd " + folder,), python, "ssh", ("h",), 1.0)
        with shown_streams():
            pass_on(run, ["logs"])
            follower = RemoteFollower(run, 1, Console(), Console(stderr=True))
            while follower.look() is None:
                follower._process.wait()
            follower.close()
    """
    sent = on_a_terminal([sys.executable, "-c", program], tmp_path)
    assert sent.count("OWNED") == 4 and sent.count("\x1b[31m") >= 2, ascii(sent)
    rest = re.sub(r"\x1b\[(\?25[lh]|[0-9;]*m|2K|1A)", "", sent).replace("\r", "")
    assert not controls(rest), ascii(rest)


def on_a_terminal(argv: list[str], folder: Path) -> str:
    """All that a program sends to its terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execvpe(argv[0], argv, {**os.environ, "TERM": "xterm-256color", "NO_COLOR": ""})
    sent = b""
    try:
        while block := os.read(terminal, 65536):
            sent += block
    except OSError:
        pass  # it has ended
    finally:
        os.close(terminal)
        _, code = os.waitpid(pid, 0)
    assert code == 0, sent.decode()
    return sent.decode()
