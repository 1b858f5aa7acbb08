"""The page of a run in a real browser: of made snapshots, and saved as a file."""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from isles.errors import UserError
from isles.monitor.live.model import Snapshot
from isles.monitor.live.server import MAX_CONNECTIONS, Dashboard, export
from tests.browser import Browser, browser
from tests.deadline import DEADLINE_S, until
from tests.made_watch import MadeWatch, made, other, running, served

HOSTILE = "</script><img src=x onerror=document.title='broken'>\u2028\"'`${1}<!--"
# The ratio of each text to what is behind it, of all that is in sight (WCAG 2, 1.4.3).
CONTRAST = """(() => {
  const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => numbers(color).slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    const own = getComputedStyle(element).backgroundColor;
    return numbers(own)[3] === 0 && element.parentElement ? ground(element.parentElement) : own;
  };
  const low = [];
  for (const element of document.querySelectorAll("body *:not(script)")) {
    const is_read = [...element.childNodes].some((one) => one.nodeType === 3 && one.data.trim());
    if (!is_read || !element.checkVisibility()) continue;
    const style = getComputedStyle(element);
    const own = light(element.closest("svg") ? style.fill : style.color);
    const behind = light(ground(element));
    const ratio = (Math.max(own, behind) + 0.05) / (Math.min(own, behind) + 0.05);
    if (ratio < 4.5) low.push(`${element.className} ${element.textContent} ${ratio}`);
  }
  return low;
})()"""


@pytest.fixture(scope="module")
def page() -> Iterator[Browser]:
    """One browser for all tests here."""
    with browser() as started:
        yield started


def rows(page: Browser, table: str) -> list[str]:
    """The texts of the rows of a table that are not filtered out, in its order."""
    # Not innerText: of rows out of sight that is empty.
    words = "(tr) => [...tr.cells].map((cell) => cell.textContent.trim()).join(' ')"
    found = f"[...document.querySelectorAll('#{table} tbody tr:not([hidden])')].map({words})"
    return [" ".join(row.split()) for row in page.evaluate(found)]


def open_page(page: Browser, server: Dashboard) -> None:
    page.open(server.link)
    page.until("document.querySelectorAll('#ranks tbody tr').length === 6")


def assert_clean(page: Browser, origin: str) -> None:
    """Nothing was asked of anybody else, and the console has no errors."""
    assert all(url.startswith(origin) or url[:5] in ("data:", "about") for url in page.requests)
    assert page.errors == []


def test_a_run_is_followed_sorted_and_filtered_and_what_is_lost_is_said(page: Browser) -> None:
    watch = MadeWatch(made(1240, faults=False))
    with served(watch) as server:
        open_page(page, server)
        assert page.text("#step") == "Step 1,240" and page.text("#total") == "of 4,000"
        assert "Nothing is wrong" in page.text("#note-list")
        kept = "document.querySelector('#ranks tbody tr:nth-child(3)')"
        page.evaluate(f"window.kept = {kept}; getSelection().selectAllChildren(kept.cells[2])")
        page.evaluate("document.querySelector('#ranks .box').scrollLeft = 5")
        watch.show(made(1241))
        page.until("document.title.startsWith('step 1,241')")
        assert page.evaluate(f"kept === {kept} && getSelection().toString() === 'oslo-01'")
        shown = rows(page, "ranks")
        for mark in ("dead", "straggler", "throttled", "silent"):
            assert any(f" {mark} " in row for row in shown), (mark, shown)
        assert "rank 2 on oslo-01: it was killed" in page.text("#note-list")
        assert page.text("#spoken").startswith("rank 2 on oslo-01: it was killed")
        parts = page.evaluate("document.querySelector('#ranks .parts').ariaLabel")
        assert re.match(r"data [\d.]+ %, compute [1-9].* waiting [1-9]", parts), parts
        assert "round 24" in page.text(".hub") and "waits for lyon" in page.text(".hub")

        # By keyboard: to the head of a column, and pressed.
        assert page.evaluate("document.querySelector('#ranks .box').tabIndex") == 0
        page.evaluate("document.querySelector('#ranks .box').focus()")
        page.press("Tab", "Tab", "Tab", "Tab", "Enter")
        head = "document.activeElement.parentElement"
        assert page.evaluate(f"{head}.ariaSort") == "ascending"
        assert page.evaluate("document.activeElement.textContent") == "State"
        marks = [row.split()[3] for row in rows(page, "ranks")]
        assert marks[:4] == ["dead", "silent", "straggler", "throttled"]
        watch.show(made(1242))
        page.until("document.title.startsWith('step 1,242')")
        assert page.evaluate(f"{head}.ariaSort") == "ascending", "focus and order stay"
        page.press(" ")
        assert page.evaluate(f"{head}.ariaSort") == "descending"

        page.evaluate("document.getElementById('filter').focus()")
        page.press("lyon straggler")
        assert [row.split()[:2] for row in rows(page, "ranks")] == [["0", "lyon"]]
        assert page.text("#ranks-title") == "Ranks 1 of 6"
        assert rows(page, "hosts") == []
        page.evaluate("document.getElementById('filter').select()")
        page.press("Backspace")
        assert len(rows(page, "ranks")) == 6 and len(rows(page, "hosts")) == 2

        page.evaluate("document.querySelector('#axis input').focus()")
        page.press("ArrowRight")
        page.evaluate("document.getElementById('chart').focus()")
        page.press("Home")
        assert page.text("#readout").startswith("step 1, 524 k tokens")
        assert "arrow keys" in page.evaluate("document.getElementById('chart').ariaLabel")
        assert_clean(page, server.link.partition("?")[0])

        link, port = server.link, server.server_address[1]
        watch.error = "gpu-7 cannot be asked: it does not answer"
        watch.show(made(1243))
        page.until("document.getElementById('lost').textContent.includes('cannot be asked')")
        watch.error = ""
        watch.show(made(1244))
        page.until("document.getElementById('lost').textContent === ''")
    page.until("document.getElementById('lost').textContent.includes('Connection lost')")
    assert page.evaluate("document.body.classList.contains('stale')")
    with served(watch, port=port) as server:  # of another token
        page.until("document.getElementById('lost').textContent.includes('no longer valid')")
        assert server.link != link


def test_it_can_be_read_in_light_and_dark_on_a_wall_and_on_a_phone(page: Browser) -> None:
    with served(MadeWatch(made()), MadeWatch(other(900, 1, "narrow-1"))) as server:
        for scheme, more in (("light", "Dark"), ("dark", "Light")):
            page.prefer(scheme)
            open_page(page, server)
            assert page.text("#theme") == more
            assert page.evaluate(CONTRAST) == []
        page.evaluate("document.getElementById('theme').focus()")
        page.press("Enter")
        assert page.text("#theme") == "Dark" and page.evaluate(CONTRAST) == []
        page.until("document.querySelectorAll('#runs tbody tr').length === 2")  # they come later
        assert [row.split()[0] for row in rows(page, "runs")] == ["wide-3", "narrow-1"]
        assert page.evaluate("document.querySelectorAll('#chart .line').length") == 2
        for width, height in ((1920, 1080), (390, 844)):
            page.size(width, height, is_phone=width < 500)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.size(1440, 900)
        page.prefer("light")
        assert_clean(page, server.link.partition("?")[0])


def hostile() -> Snapshot:
    """Every text of a run is HTML."""

    def spoiled(value: object) -> object:
        if isinstance(value, dict):
            # A mark is one of four words, and no free text.
            return {k: v if k == "mark" else spoiled(v) for k, v in value.items()}
        if isinstance(value, list):
            return [spoiled(one) for one in value]
        return HOSTILE if isinstance(value, str) else value

    return Snapshot.model_validate(spoiled(made(clusters=1, gpus=2).model_dump(mode="json")))


def without_numbers(snapshot: Snapshot) -> Snapshot:
    """Two losses of its curve are none."""
    curve = list(snapshot.curve)
    for at, loss in ((2, math.nan), (3, math.inf)):
        curve[at] = curve[at].model_copy(update={"loss": loss})
    return snapshot.model_copy(update={"curve": tuple(curve)})


def test_whatever_a_run_holds_its_page_and_an_offline_export_show_it(page, tmp_path) -> None:
    path = tmp_path / "run.html"
    plain = [made(), other(900, 1, "narrow-1")]
    for runs in (plain, [hostile(), hostile()], list(map(without_numbers, plain))):
        export(runs, path)
        with served(*map(MadeWatch, runs)) as server:
            for url in (server.link, path.as_uri()):
                is_saved = url.startswith("file:")
                page.offline(is_saved)
                page.open(url)
                page.until("document.querySelectorAll('#chart .line').length === 2")
                assert page.text("#lost").startswith("Saved on 20") == is_saved
                name = page.evaluate("document.getElementById('name').textContent")
                assert name == runs[0].run.name
                assert page.evaluate("document.querySelectorAll('img').length") == 0
                assert len(rows(page, "ranks")) == len(runs[0].ranks)
                assert len(rows(page, "runs")) == 2 and "NaN" not in page.text("main")
                assert_clean(page, url.partition("?")[0])
                if is_saved:
                    assert [one for one in page.requests if one[:5] != "data:"] == [url]
                if is_saved and runs is plain:
                    assert page.text("#step") == "Step 1,240"
                    assert page.evaluate(CONTRAST) == []
    page.offline(False)


def test_an_export_replaces_only_an_export(tmp_path: Path) -> None:
    path, notes = tmp_path / "run.html", tmp_path / "notes.html"
    for step in (1240, 1241):
        export([made(step)], path)
        assert f'"step": {step}' in path.read_text()
        assert path.stat().st_mode & 0o777 == 0o600
        path.chmod(0o644)
    notes.write_text("<!doctype html>\n<p>mine")
    os.mkfifo(tmp_path / "pipe")
    for taken in (notes, tmp_path, tmp_path / "pipe"):
        with pytest.raises(UserError, match="the file exists") as refused:
            export([made()], taken)
        assert "another name" in (refused.value.fix or "")
    assert notes.read_text().endswith("mine")
    with pytest.raises(UserError, match="cannot write"):
        export([made()], tmp_path / "none" / "run.html")
    assert {one.name for one in tmp_path.iterdir()} == {"run.html", "notes.html", "pipe"}


def test_a_port_that_cannot_be_is_named() -> None:
    for port in (-1, 65536):
        with pytest.raises(UserError, match=f"--port: {port} is not between 0 and 65535"):
            Dashboard([], port)


def ask(
    server: Dashboard, path: str, *, method: str = "GET", token: bool = True, **headers: str
) -> tuple[int, str]:
    """Status and text of an answer."""
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=DEADLINE_S)
    query = f"?token={server.token}" if token else ""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path + query, headers=named)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    assert answer.headers["Access-Control-Allow-Origin"] is None
    assert answer.headers["Cache-Control"] == "no-store" and "Set-Cookie" not in answer.headers
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    connection.close()
    return found


class ForeignSite(SimpleHTTPRequestHandler):
    """Serves a folder."""

    # A browser opens connections in advance. It asks nothing on some of them, and the server's
    # thread would wait as long as the browser lives.
    timeout = 3.0


def test_only_who_has_the_link_is_answered(page: Browser, tmp_path: Path) -> None:
    with served(MadeWatch(made(name="secret-run"))) as server:
        here = f"127.0.0.1:{server.server_address[1]}"
        assert ask(server, "/")[0] == 200
        assert "secret-run" in ask(server, "/state.json")[1]
        assert ask(server, "/state.json", method="HEAD") == (200, "")
        assert ask(server, "/", Host="localhost:9999", Sec_Fetch_Site="none")[0] == 200
        opened = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
        assert ask(server, "/", **opened)[0] == 200, "a link in a mail or a chat"
        assert ask(server, "/state.json", Origin=f"http://{here}")[0] == 200
        assert ask(server, "/../../../etc/passwd")[0] == 404
        evil = "evil.example.org"
        hosts = (evil, f"{evil}:{server.server_address[1]}", f"127.0.0.1.{evil}", "[")
        refused = [{"Host": host} for host in hosts]
        refused += [{"Origin": origin} for origin in (f"http://{evil}", "null")]
        refused.append({"Sec_Fetch_Site": "cross-site"})
        refused.append({"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "cors"})
        for headers in refused:
            for path in ("/", "/state.json", "/events", "/page.js"):
                status, text = ask(server, path, **headers)
                assert status == 403 and "secret-run" not in text, (path, headers)
        assert ask(server, "/state.json", **opened)[0] == 403
        for path in ("/", "/state.json", "/events", "/page.js", f"/?token={server.token[:-1]}x"):
            status, text = ask(server, path, token=False)
            assert status == 403 and "no token" in text, path
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "CONNECT", "FROB"):
            assert ask(server, "/", method=method)[0] == 405, method

        # A page of another site, in the same browser, which even knows the token.
        tried = f"""<script src="http://{here}/page.js?token={server.token}"></script><script>
          const urls = ["http://{here}/state.json", "http://{here}/state.json?token={server.token}"];
          document.title = "trying";
          Promise.all([...urls.map((url) => fetch(url).then(() => "read", () => "refused")),
            new Promise((done) => {{ const s = new EventSource("http://{here}/events?token={server.token}");
              s.onmessage = () => done("read"); s.onerror = () => done("refused"); }})])
            .then((all) => {{ document.title = typeof view + " " + all.join(" "); }});</script>"""
        (tmp_path / "index.html").write_text(tried)
        foreign = partial(ForeignSite, directory=tmp_path)
        with ThreadingHTTPServer(("127.0.0.1", 0), foreign) as other_site, running(other_site):
            page.open(f"http://localhost:{other_site.server_address[1]}/")
            page.until("document.title.startsWith('undefined ')")
            assert page.evaluate("document.title") == "undefined refused refused refused"


def test_bad_requests_and_silent_connections_leave_it_answering(capfd, monkeypatch) -> None:
    short = {
        b"GET http://[ HTTP/1.1": 400,
        b"GET //[ HTTP/1.1": 403,
        b"GET": 400,
        b"GET / HTTP/x": 400,
        b"GET / HTTP/9.9": 505,
        b"GET / HTTP/0.9": 403,
        b"GET /": 403,
        b"POST /": 400,
        b"GET /?token=\xff%ff%00 HTTP/1.1\r\nHost: 127.0.0.1": 403,
        b"GET / HTTP/1.1\r\nHost: [::1": 403,
    }
    bad = [
        *short,
        b"",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200,
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1",
        b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999\r\n\r\nabc",
    ]

    def connect() -> socket.socket:
        return stack.enter_context(socket.create_connection(address, timeout=DEADLINE_S))

    def answer(text: bytes) -> bytes:
        """What comes until the end of the connection."""
        with connect() as one, one.makefile("rb") as stream:
            one.sendall(text)
            return stream.read()

    def broken(request: object) -> None:
        raise RuntimeError("made")

    watch = MadeWatch(made())
    with served(watch) as server, ExitStack() as stack:
        address = ("127.0.0.1", server.server_address[1])
        with monkeypatch.context() as patch:
            patch.setattr(server.RequestHandlerClass, "timeout", 1.0)
            for line, status in short.items():
                head, _, text = answer(line + b"\r\n\r\n").partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.0 %d " % status), (line, head)
                assert text.startswith(b"isles: ") and text.count(b"\n") == 1, (line, text)
            assert answer(b"") == b"", "one that asks nothing ends"
            patch.setattr(server, "has_asked", broken)
            asked = b"GET /?token=%s HTTP/1.1\r\nHost: localhost\r\n\r\n" % server.token.encode()
            assert answer(asked) == b""
        for number in range(1000):
            with connect() as one, suppress(OSError):
                one.sendall(bad[number % len(bad)] + b"\r\n\r\n")
                one.shutdown(socket.SHUT_WR)
                text = one.recv(4096)
                assert b"made" not in text and b" 200 " not in text.partition(b"\n")[0]
        streams = http.client.HTTPConnection(*address, timeout=DEADLINE_S)
        streams.request("GET", f"/events?token={server.token}")
        events = streams.getresponse()
        stack.callback(streams.close)
        for _ in range(MAX_CONNECTIONS + 44):
            connect()
        assert ask(server, "/")[0] == 200
        until(lambda: b"event: run" in events.readline(), "the open page goes on")
        assert b'"step":1240' in events.readline()
        watch.show(made(1241))
        until(lambda: b'"step":1241' in events.readline(), "and gets what is new")
        assert threading.active_count() < MAX_CONNECTIONS + 60
        assert json.loads(ask(server, "/state.json")[1])["run"]["step"] == 1241
        assert server.server_address[0] == "127.0.0.1"
    assert capfd.readouterr() == ("", ""), "nothing in the terminal"
