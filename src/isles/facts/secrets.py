"""Secrets in texts: which names mean one, and taking values out of a text that is passed on."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator
from urllib.parse import quote

REMOVED = "[removed]"

_LEAST = 6
"""Characters of a value that is looked for by itself: a shorter one would be found in any text."""

_ENDINGS = (
    "TOKEN SECRET PASSWORD PASSWD PASSPHRASE CREDENTIALS? COOKIE DSN _PASS _PWD _KEY APIKEY _AUTH"
)
_KEYS = r"(?:api|access|secret|private|account|auth|signing|encryption)[_-]?key"
_NAME = (
    rf"[A-Za-z0-9_.-]*(?:{'|'.join(_ENDINGS.split())}"
    rf"|(?i:token|secret|password|passwd|passphrase|signature|credentials?|{_KEYS}))"
)
_START = r"(?<![A-Za-z0-9_.-])"
"""A name is tried at its first character alone: at each, a long text would take for ever."""

# All of them match without a closing mark too: a line may be cut.
_QUOTED = r""""(?:\\.|[^"\\\n])*"?|'[^'\n]*'?"""
_IN_JSON = r"""\\+["'](?:\\+[^"'\\\n]|[^"'\\\n])*"""
_LIST = rf"""\[(?:{_QUOTED}|[^\]"'\n])*\]?"""
_PLAIN = r"""(?!\{(?:["'\s\\]|$))[^\s,;&}\]"'<>]+"""
_VALUE = rf"{_QUOTED}|{_IN_JSON}|{_LIST}|{_PLAIN}"
_ENDS = r"""\\*["']?\s*[:=]"""
_NAMED = re.compile(
    rf"""(?P<name>{_START}(?:{_NAME}{_ENDS}\s*(?:\\n\s+)?"""
    rf"""|--?{_NAME}(?:\s+|["'],\s*(?=["']))"""
    r"""|[\w.-]*(?i:password|passwd|passphrase)\s+(?:is\s+)?(?=\S{6})(?=\S*\d)))"""
    rf"""(?P<value>{_VALUE})"""
)
_NOTHING = ("", "[]", "[", "{", "|", ">", "|-", ">-", "true", "false", "null", "none", "yes", "no")
_TOKEN = re.compile(r"token\W*(?:\\n\s+)?")
_VOCABULARY = re.compile(r"[\d.]+|<[^<>]*>|\[[A-Z_]+\d?\]|\[[\d., ]*\]")
"""Values of a `token` that are no secrets: a number, or a token of a vocabulary."""

_HINT = re.compile(
    r"""(?:token|secret|passw(?:or)?d|passphrase|credentials?|cookie|dsn|_pass|_pwd|key|auth"""
    r"""|signature)\\*["']?(?:\s*[:=]|\s|,)"""
)
"""In small letters, what a line has that `_NAMED` may match: it is tried on no other."""

_OPEN = re.compile(rf"\s*(?:- )?[\"']?{_NAME}{_ENDS}\s*(?P<block>[|>][+-]?|\[)?\s*")
_BELOW = re.compile(r"""(\s*(?:- +)?)(?:"[^"\n]*"|'[^'\n]*'|[^\s"':]+(?::[^\s"':]+)*),?\s*""")
"""A key whose value is on the lines below it; one word there, which is no key itself."""

_PATTERNS = (
    # The secret half of a join line; user and password of an address, not its port.
    (("isles://",), re.compile(r"(isles://[^\s#]{1,300}#)[\w.-]+"), rf"\1{REMOVED}"),
    (
        ("://",),
        re.compile(r"://(?:[^\s/'\"<>]*|[^\s/:@'\"<>[]{0,100}:(?!\d{1,5}/)[^\s@'\"<>]{0,200})@"),
        f"://{REMOVED}@",
    ),
    # Headers, to the end of the line.
    (
        ("uthorization", "UTHORIZATION", "ookie", "COOKIE"),
        re.compile(
            r"""(?i)((?:authorization|cookie)\\*["']?[ \t]*[:=][ \t]*"""
            r"""(?:\[(?!removed)[ \t]*)?(?:\\*["'])?)[^\s"'\\[][^"'\\\r\n]*"""
        ),
        rf"\1{REMOVED}",
    ),
    # Options of programs; two numbers are a user and a group. Signatures of Azure.
    (
        ("-u", "--user"),
        re.compile(
            r"""(?<![\w-])((?:-u|--user)(?:["'],[ ]?|[ =])["']?(?!\d+:\d)[^\s:"']{1,80}:)"""
            r"""(?!//)[^\s"']+"""
        ),
        rf"\1{REMOVED}",
    ),
    (
        ("sshpass",),
        re.compile(rf"""(sshpass["']?,?\s*["']?-p(?:["'],\s*["']|\s*))(?:{_QUOTED}|[^\s"']+)"""),
        rf"\1{REMOVED}",
    ),
    (("sig=",), re.compile(r"(\bsig=)[\w%+/=.~-]{8,}"), rf"\1{REMOVED}"),
    (
        ("earer ", "BEARER ", "asic ", "BASIC "),
        re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}"),
        rf"\1 {REMOVED}",
    ),
    # Keys that their issuers mark: Hugging Face, W&B, GitHub, GitLab, OpenAI, Slack, AWS, Google,
    # NVIDIA, Replicate, Tailscale, and signed tokens.
    (
        (
            *("hf_", "api_org_", "wandb_v", "gh", "glpat-", "sk-", "xox", "AKIA", "ASIA", "AIza"),
            *("nvapi-", "r8_", "tskey-", "eyJ"),
        ),
        re.compile(
            r"\b(?:(?:hf|api_org)_[A-Za-z0-9]{8,}|wandb_v\d_\w{16,}|gh[pousr]_[A-Za-z0-9]{16,}"
            r"|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[\w-]{16,}|xox[abprs]-[\w-]{10,}"
            r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}"
            r"|nvapi-[\w-]{8,}|r8_[A-Za-z0-9]{8,}|tskey-[a-z]+-[\w-]{8,}"
            r"|(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
        ),
        REMOVED,
    ),
)
"""Words of which one must be there, what is taken out, and what stands there instead."""

_PRIVATE = "PRIVATE KEY-----"
_PRIVATE_KEYS = re.compile(
    rf"(?:-----BEGIN [A-Z ]*{_PRIVATE}|\A).*?-----END [A-Z ]*{_PRIVATE}"
    rf"|-----BEGIN [A-Z ]*{_PRIVATE}.*",
    re.S,
)
_HEX_KEY = re.compile(r"\b[0-9a-f]{40}\b")
"""W&B's keys look like this, and so do git's commits."""

_COMMIT = re.compile(r"(?i)commit|revision|sha|snapshots/|refs|git|@$")


def may_be_secret(name: str) -> bool:
    """Whether a variable or key of this name may hold a secret; also names that often do not."""
    return re.fullmatch(_NAME, name) is not None


class Redactor:
    """Takes secrets out of texts: known values, values of names that mean one, and known forms.

    Args:
        values: secrets that are known here, in any order.
    """

    def __init__(self, values: Iterable[str]) -> None:
        forms = {
            form
            for value in map(str.strip, values)
            if len(value) >= _LEAST
            for form in (value, json.dumps(value)[1:-1], quote(value, safe=""), shlex.quote(value))
        }
        self._values = sorted(forms, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        for value in self._values:
            text = text.replace(value, REMOVED)
        if _PRIVATE in text:
            text = _PRIVATE_KEYS.sub(REMOVED, text)
        for words, pattern, instead in _PATTERNS:
            if any(word in text for word in words):
                text = pattern.sub(instead, text)
        if _HINT.search(text.lower()):
            text = "".join(_without_values(text.splitlines(keepends=True)))
        return _HEX_KEY.sub(_without_key, text)


def _without_values(lines: list[str]) -> Iterator[str]:
    key = None  # the line whose value the next ones may be
    for line in lines:
        if key is not None:
            depth = len(line) - len(line.lstrip())
            is_inside = depth > len(key.string) - len(key.string.lstrip())
            below = _BELOW.fullmatch(line)
            if is_inside and (key["block"] or "")[:1] in ("|", ">"):
                yield f"{line[:depth]}{REMOVED}\n"
                continue
            if below is not None and (is_inside or line.lstrip().startswith("- ")):
                yield f"{below[1]}{REMOVED}\n"
                continue
            key = None
        if _HINT.search(line.lower()):
            key = _OPEN.fullmatch(line)
            yield _NAMED.sub(_without_value, line)
        else:
            yield line


def _without_value(match: re.Match[str]) -> str:
    name, value = match["name"], match["value"]
    mark = value[: len(value) - len(value.lstrip("\\"))]
    mark = value[: len(mark) + 1] if value[len(mark) : len(mark) + 1] in ("'", '"') else ""
    inner = value.removeprefix(mark).removesuffix(mark) if mark else value
    if inner.startswith(REMOVED[:-1]) or (name.islower() and inner.lower() in _NOTHING):
        return match[0]
    if name.islower() and _TOKEN.search(name) and _VOCABULARY.fullmatch(inner):
        return match[0]
    is_closed = mark and len(value) > len(mark) and value.endswith(mark)
    return f"{name}{mark}{REMOVED}{mark if is_closed else ''}"


def _without_key(match: re.Match[str]) -> str:
    before = match.string[max(0, match.start() - 24) : match.start()]
    return match[0] if _COMMIT.search(before) else REMOVED


_REFERENCE = re.compile(
    r"\$\{\w+(?::?\?[^}]{0,100})?\}|\$\w+|\$\([^()]*\)|`[^`]*`|<[^<>]*>|\*{3,}|\{\{.{0,100}?\}\}"
)
"""What stands for a value that is elsewhere."""

_USER = re.compile(
    r"""://[^\s/@:'"<>?#[]*:(?!\d{1,5}/)(?P<secret>[^\s@'"<>]{1,300})@(?!sha\d+:)"""
    r"""|(?:^|(?<==))[^\s/@:'"<>=]+:(?P<bare>[^\s/@:'"<>]+)@(?!sha\d+:)[\w.-]+(?::\d+)?/?$"""
    r"""|https?://(?=[^\s/@]*\d)(?=[^\s/@]*[a-z])(?P<alone>[\w.~%+-]{20,})@"""
    r"""|\b(?:curl|wget)\b[^\n|;]{0,300}\s(?:-u|--user|--proxy-user)(?:\s+|=)["']?[^\s:"']+:"""
    r"""(?P<option>[^\s"']+)"""
)
"""User and password of an address, not its port nor the digest of an image."""

_KEY = re.compile(
    r"\b(?:(?:hf|api_org)_[A-Za-z0-9]{20,}|wandb_v\d_\w{16,}|gh[pousr]_[A-Za-z0-9]{16,}"
    r"|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-(?=[\w-]{0,200}\d)[\w-]{16,}|xox[abprs]-[\w-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}\b|AIza[\w-]{30,}|nvapi-[\w-]{20,}|r8_[A-Za-z0-9]{20,}"
    r"|tskey-[a-z]+-[\w-]{8,}|(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
    r"|isles://[^\s#]{1,300}#[\w.-]+|\bsig=[\w%+/=.~-]{8,}"
    r"|(?i:\b(?:authorization|cookie)\\*[\"']?\s*[:=]\s*[^\s<].*"
    r"|\bbearer\s+(?=[\w.~+/=-]*\d)[\w.~+/=-]{16,})"
    rf"|sshpass\s+-p\s*[^\s<]+|(?s:-----BEGIN [A-Z ]*{_PRIVATE}.*)"
)
_OF_VOCABULARY = re.compile(
    r"(?i)(?:pad|eos|bos|unk|mask|sep|cls|stop|end|start|image|audio|special|next)[_-]?token\W*"
)
_PATH = re.compile(r"(?:~|\.{0,2})/|file:|[A-Za-z]:\\")


def secrets_in(text: str) -> Iterator[tuple[int, int]]:
    """The places in a text of the user's own that hold a secret beyond doubt, in order.

    Such a text is refused or written with gaps, so unlike in a report, a doubt is no secret: words,
    paths, digests, and references such as `$HF_TOKEN` or `$(cat FILE)` are none.
    """
    masked = _REFERENCE.sub(lambda match: "<" * len(match[0]), text)
    found = [match.span() for match in _KEY.finditer(masked)]
    found += [
        match.span(match.lastgroup or 0)
        for match in _USER.finditer(text)
        if not _REFERENCE.fullmatch(match[match.lastgroup or 0])
    ]
    if _HINT.search(masked.lower()):
        found += [
            match.span("value")
            for match in _NAMED.finditer(masked)
            if is_secret(match["name"], match["value"])
        ]
    end = 0
    for start, stop in sorted(found):
        if start >= end:
            yield start, stop
            end = stop


def is_secret(name: str, value: str) -> bool:
    """Whether the value of a name that means a secret is one; the name ends with its `=` or `:`."""
    inner = value.strip("\\\"'")
    if inner.lower() in _NOTHING or inner[:1] in ("<", "[", "{", "…") or _PATH.match(inner):
        return False
    if _OF_VOCABULARY.search(name) or (_TOKEN.search(name) and _VOCABULARY.fullmatch(inner)):
        return False
    if inner.isdecimal() and len(inner) < _LEAST and "pass" not in name.lower():
        return False
    is_assigned = name.rstrip().endswith("=") or name.startswith("-")
    return is_assigned or (len(inner) >= _LEAST and any(c.isdigit() for c in inner))


def without_secrets(text: str) -> str:
    """A text with a mark in place of each of `secrets_in`."""
    end, parts = 0, []
    for start, stop in secrets_in(text):
        parts += [text[end:start], REMOVED]
        end = stop
    return "".join([*parts, text[end:]])
