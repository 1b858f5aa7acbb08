"""A hub may answer anything; whoever follows it shows what can be shown, and goes on."""

from __future__ import annotations

import json
import ssl
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

from isles.monitor.hub import HubNews
from isles.outer.hub.server import fingerprint, make_identity
from isles.run.join_line import JoinLine
from tests.made_watch import running
from tests.unit.test_web import Near

ODD = (
    None,
    True,
    -1,
    1.5,
    1e308,
    "x",
    "\ud800",
    [],
    {},
    [1],
    [[]],
    {"a": 1},
    10**400,
    float("nan"),
)
EVENT = {"number": 1, "at": 1e9, "kind": "joined", "what": "w", "member": "a"}
COMMIT = {"round": 1, "at": 1e9, "weights": {"a": 1}, "size_bytes": 1, "seconds": 1.0}
SOUND: dict[str, Any] = {"round": 1, "members": [], "is_over": False}
SOUND |= {"events": [EVENT], "commits": [COMMIT]}


class AnyHub(Near):
    answer: ClassVar[dict[str, Any]] = {}

    def do_GET(self) -> None:
        body = json.dumps(self.answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", f"{len(body)}")
        self.end_headers()
        self.wfile.write(body)


def odd_answers() -> list[dict[str, Any]]:
    found = [{**SOUND, key: value} for key in SOUND for value in ODD]
    for value in ODD:
        found += [{**SOUND, "events": [{**EVENT, key: value}, EVENT]} for key in EVENT]
        found += [{**SOUND, "commits": [{**COMMIT, key: value}, COMMIT]} for key in COMMIT]
        found.append({**SOUND, "commits": [{**COMMIT, "weights": {"a": value, "\ud800": 1}}]})
    return found


def test_news_of_a_hub_with_odd_answers(tmp_path: Path) -> None:
    make_identity(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate.pem", tmp_path / "key.pem")
    with ThreadingHTTPServer(("127.0.0.1", 0), AnyHub) as hub:
        hub.socket = context.wrap_socket(hub.socket, server_side=True)
        token = (tmp_path / "token").read_text().strip()
        line = JoinLine("127.0.0.1", hub.server_address[1], "t", token, fingerprint(tmp_path))
        wrong, going = [], HubNews(lambda: line, since=0.0)
        with running(hub):
            for answer in odd_answers():
                AnyHub.answer = answer
                for news in (HubNews(lambda: line), HubNews(lambda: line, since=0.0), going):
                    try:
                        shown = news.look()
                        json.dumps(shown).encode()
                        if any(len(text) > 2000 or not text.isprintable() for *_, text in shown):
                            wrong.append(f"{answer}: {shown}")
                    except Exception as error:
                        wrong.append(f"{answer}: {error!r:.200}")
            assert not wrong, "\n".join(wrong)

            AnyHub.answer = {**SOUND, "events": [{**EVENT, "number": n} for n in range(3000)]}
            shown = HubNews(lambda: line, since=0.0).look()
            assert [kind for _, kind, _ in shown] == ["joined"] * 60 + ["round"]
            assert "more events like this" in shown[59][2]
