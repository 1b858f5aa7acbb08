"""Secrets in texts: which names mean one, and taking values out of a text that is passed on."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable
from urllib.parse import quote

REMOVED = "[removed]"

_LEAST = 6
"""Characters of a value that is looked for by itself: a shorter one would be found in any text."""

_SECRET_VARIABLE = re.compile(r"(?i)(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|API_KEY|ACCESS_KEY)$")
_ENDINGS = (
    "TOKEN SECRET PASSWORD PASSWD PASSPHRASE CREDENTIALS? COOKIE DSN _PASS _PWD _KEY APIKEY _AUTH"
)
_KEYS = r"(?:api|access|secret|private|account|auth|signing|encryption)[_-]?key"
_NAME = (
    rf"(?:[A-Z0-9_]*(?:{'|'.join(_ENDINGS.split())})"
    rf"|(?i:[a-z0-9_.-]*(?:token|secret|password|passwd|passphrase|signature|credentials?|{_KEYS})))"
)
_QUOTED = r""""(?:\\.|[^"\\\n])*"|'[^'\n]*'"""
_VALUE = rf"""{_QUOTED}|[^\s,;&}}\]"'<>]+"""
_NAMED = re.compile(
    rf"""(?P<name>(?<![A-Za-z0-9]){_NAME}["']?\s*(?::|=)\s*|--?{_NAME}\s+)(?P<value>{_VALUE})"""
)
_HARMLESS = re.compile(r"""["']?(?:[\d.]+|true|false|null|none|yes|no|)["',]?""", re.I)

_HINT = re.compile(
    r"""(?:token|secret|passw(?:or)?d|passphrase|credentials?|cookie|dsn|_pass|_pwd|key|auth"""
    r"""|signature)["']?(?:\s*[:=]|\s)"""
)
"""In small letters, what a line has that `_NAMED` may match: it is tried on no other."""

_PATTERNS = (
    # The secret half of a join line; user and password of an address.
    (("isles://",), re.compile(r"(isles://[^\s#]+#)[\w.-]+"), rf"\1{REMOVED}"),
    (("://",), re.compile(r"://[^\s/'\"<>]*@"), f"://{REMOVED}@"),
    (
        ("earer ", "BEARER ", "asic ", "BASIC "),
        re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}"),
        rf"\1 {REMOVED}",
    ),
    # Keys that their issuers mark: Hugging Face, W&B, GitHub, GitLab, OpenAI, Slack, AWS, Google,
    # and signed tokens.
    (
        ("hf_", "api_org_", "wandb_v", "gh", "glpat-", "sk-", "xox", "AKIA", "ASIA", "AIza", "eyJ"),
        re.compile(
            r"\b(?:(?:hf|api_org)_[A-Za-z0-9]{8,}|wandb_v\d_\w{16,}|gh[pousr]_[A-Za-z0-9]{16,}"
            r"|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[\w-]{16,}|xox[abprs]-[\w-]{10,}"
            r"|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
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


def is_secret_variable(name: str) -> bool:
    """Whether an environment variable of this name holds a secret, beyond doubt."""
    return _SECRET_VARIABLE.search(name) is not None


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
            lines = text.splitlines(keepends=True)
            text = "".join(
                _NAMED.sub(_without_value, line) if _HINT.search(line.lower()) else line
                for line in lines
            )
        return _HEX_KEY.sub(_without_key, text)


def _without_value(match: re.Match[str]) -> str:
    name, value = match["name"], match["value"]
    is_harmless = _HARMLESS.fullmatch(value) or value.strip("\"'")[:1] in ("<", "[")
    if value.startswith(REMOVED[:-1]) or (name.islower() and is_harmless):
        return match[0]  # a number of tokens, or a token of a vocabulary
    mark = value[0] if value[0] in "\"'" else ""
    return f"{name}{mark}{REMOVED}{mark}"


def _without_key(match: re.Match[str]) -> str:
    before = match.string[max(0, match.start() - 24) : match.start()]
    return match[0] if _COMMIT.search(before) else REMOVED
