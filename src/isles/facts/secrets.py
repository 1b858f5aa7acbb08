"""Secrets in texts: names that mean a secret, and the removal of values from a text."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator
from urllib.parse import quote

REMOVED = "[removed]"

_LEAST = 6
"""Fewest characters of a known value to search for. A shorter value would appear in any text."""

_ENDINGS = (
    "TOKEN SECRET PASSWORD PASSWD PASSPHRASE CREDENTIALS? COOKIE DSN _PWD _KEY APIKEY _AUTH _PAT PW"
)
_KEYS = r"(?:api|access|secret|private|account|auth|signing|encryption)[_-]?key"
_WHOLE = r"-{0,2}(?:PASS|Pass|pass|pw|Pwd|pwd|PAT|AUTH|_?auth)"
"""These mean a secret only if they are the whole name. `PWD` is a folder."""
_NAME = (
    rf"(?:[A-Za-z0-9_.-]*(?:{'|'.join(_ENDINGS.split())}"
    rf"|(?i:token|secret|password|passwd|passphrase|signature|credentials?|pass|{_KEYS}))|{_WHOLE})"
)
_START = r"(?<![A-Za-z0-9_.-])"
"""Start of a name. A match may start only here: at every character, a long text takes forever."""

# All of them also match without a closing quote, as a line may be truncated.
_QUOTED = r""""(?:\\.|[^"\\\n])*"?|'[^'\n]*'?"""
_IN_JSON = r"""\\+["'](?:\\+[^"'\\\n]|[^"'\\\n])*"""
_LIST = rf"""\[(?:{_QUOTED}|[^\]"'\n])*\]?"""
_PLAIN = r"""(?!\{(?:["'\s\\]|$))[^\s,;&}\]"'<>]+"""
_HERE = r"[^()`\n]{0,80}(?<!<)<<<(?!<)"
_PRINTING = (
    rf"\$\(\s*(?:(?:echo|printf)\s|{_HERE})[^()\n]*\)?|`\s*(?:(?:echo|printf)\s|{_HERE})[^`\n]*`?"
    r"|\$\([^()`\n]{0,80}\bprint\([^()\n]*\)?[\"']?\s*\)?"
)
_VALUE = rf"{_QUOTED}|{_IN_JSON}|{_LIST}|{_PRINTING}|{_PLAIN}"
_ENDS = r"""\\*["']?\]?\s*(?:[:=]|\+=)"""
_NAMED = re.compile(
    rf"""(?P<name>{_START}(?:{_NAME}{_ENDS}\s*(?:\\n\s+)?"""
    rf"""|--?{_NAME}(?:\s+|["'],\s*(?=["']))"""
    rf"""|[\w.-]*(?i:password|passwd|passphrase|{_KEYS}|_token|_secret)"""
    r"""\s+(?:is\s+)?(?=\S{6})(?=\S*\d)))"""
    rf"""(?P<value>{_VALUE})"""
)
_DOUBTFUL = re.compile(
    r"""(?:(?:.*[_-])?(?i:pat|auth)|.*[A-Za-z]PW"""
    r"""|(?!.*(?i:db|sql|pg|ftp|mail|smtp|ldap|vnc|ssh|redis|root|user|admin|proxy|key|store)pass)"""
    r""".*[A-Za-z](?i:pass)|-{0,2}(?:[Pp]ass|[Pp]wd|pw))[\s"'\\\]:=]*"""
)
_ALGORITHM = r"(?i:(?:[a-z]+\d?-)*(?:oauth|sha|md|v|x|krb|ed|rsa|hs|rs|es)-?\d{1,5}(?:-[a-z]+)*)"
_OF_DOUBTFUL = re.compile(rf"(?=[^\s]{{6}})(?=[^\s]*\d)(?![\d.]+$)(?!{_ALGORITHM}$)")
"""Names such as `auth` and `pat` have other meanings too: their value must look like a secret."""
_NOTHING = ("", "[]", "[", "{", "|", ">", "|-", ">-", "true", "false", "null", "none", "yes", "no")
_TOKEN = re.compile(r"token\W*(?:\\n\s+)?")
_VOCABULARY = re.compile(r"[\d.]+|<[^<>]*>|\[[A-Z_]+\d?\]|\[[\d., ]*\]")
"""Values of a `token` that are not secret: a number, or a token of a vocabulary."""

_HINT = re.compile(
    r"""(?:token|secret|passw(?:or)?d|passphrase|credentials?|cookie|dsn|pass|pwd?|pat|key|auth"""
    r"""|signature)\\*["']?\]?(?:\s*[:=]|\+=|\s|,)"""
)
"""Lowercase words. Every line that `_NAMED` matches has one of them; other lines are skipped."""

_OPEN = re.compile(rf"\s*(?:- )?[\"']?{_NAME}{_ENDS}\s*(?P<block>[|>][+-]?|\[)?\s*")
_BELOW = re.compile(r"""(\s*(?:- +)?)(?:"[^"\n]*"|'[^'\n]*'|[^\s"':]+(?::[^\s"':]+)*),?\s*""")
"""A key whose value is on the next lines: one word on the line, which is not a key itself."""

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
    (("sig=",), re.compile(r"(\bsig=)[\w%+/=.~-]{8,}"), rf"\1{REMOVED}"),
    (
        ("earer ", "BEARER ", "asic ", "BASIC "),
        re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{8,}"),
        rf"\1 {REMOVED}",
    ),
)
"""Words (a text needs one of them), the pattern of the secret to remove, and its replacement."""

_PRIVATE = "PRIVATE KEY"
_BEGIN = rf"(?:-----BEGIN [A-Z ]*{_PRIVATE}(?: BLOCK)?-----|---- BEGIN SSH2 [A-Z ]*{_PRIVATE} ----)"
_PRIVATE_KEYS = re.compile(
    rf"(?:{_BEGIN}|\A).*?-----? ?END [A-Z0-9 ]*{_PRIVATE}(?: BLOCK)? ?-----?|{_BEGIN}.*", re.S
)
_HEX_KEY = re.compile(r"\b[0-9a-f]{40}\b")
"""W&B's keys look like this, and so do git's commits."""

_COMMIT = re.compile(r"(?i)commit|revision|sha|snapshots/|refs|git|@$")


def may_be_secret(name: str) -> bool:
    """True if a variable or key of this name may hold a secret, even if it rarely does."""
    return re.fullmatch(_NAME, name) is not None


class Redactor:
    """Removes secrets from texts: known values, values of secret names, and known forms of keys.

    Args:
        values: known secrets, in any order.
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
        text = without_secrets(_HEX_KEY.sub(_without_key, text))
        if _HINT.search(text.lower()):
            text = "".join(_without_values(text.splitlines(keepends=True)))
        return text


def _without_values(lines: list[str]) -> Iterator[str]:
    key = None  # a line whose value may be on the next lines
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
    if _DOUBTFUL.fullmatch(name) and not _OF_DOUBTFUL.match(inner):
        return match[0]
    is_closed = mark and len(value) > len(mark) and value.endswith(mark)
    return f"{name}{mark}{REMOVED}{mark if is_closed else ''}"


def _without_key(match: re.Match[str]) -> str:
    before = match.string[max(0, match.start() - 24) : match.start()]
    return match[0] if _COMMIT.search(before) else REMOVED


_PRINTED = (
    r"""\s*(?:echo|printf)\s+(?:-\w+\s+|["']?%s(?:\\n)?["']?\s+)*["']?[^\s"'$<%-]"""
    rf"""|{_HERE}\s*["']?\w|[^()`\n]{{0,80}}\bprint\(\\*["']"""
)
"""A command that prints a value from its own line."""

_INSIDE = r"(?:[^()]|\((?:[^()]|\([^()]*\))*\))*"
"""The rest of a command in brackets, with at most two more levels of brackets."""

_REFERENCE = re.compile(
    r"""\$\{\w+(?::?\?[^}]{0,100}|:?[-=+](?:<[<>]*|["']{0,2}))?\}|\$\w+"""
    rf"|\$\((?!{_PRINTED}){_INSIDE}\)|`(?!{_PRINTED})[^`]*`"
    r"|<[^<>]*>|\*{3,}|\{\{.{0,100}?\}\}|\[removed\]"
    r"""|(?<=[=:\s"'])(?:\.|\\[Sw]|\[\^[^\]\n]{1,20}\])[*+](?=[\s/|#,$"')\\]|$)"""
)
"""A reference to a value that is not in this text, or a pattern of sed that means any value."""

_NO_KEY = r"(?:api[-_]?)?(?:key|token|secret|password|passwd|pass|value|credentials?)"
_PLACEHOLDER = re.compile(
    r"(?i)\.{3,}|…|%[sbq](?:\\n)?|(?:[a-z]{1,8}[-_])*x{3,}|token-abc123"
    r"|(?:sk-)?(?:empty|none|null|unused|change[-_]?me|replace[-_]?me|placeholder|redacted|todo"
    rf"|(?:dummy|fake|placeholder)(?:[-_]{_NO_KEY})?"
    rf"|(?:no|not)[-_](?:{_NO_KEY}[-_])?(?:required|needed|used|set)|no[-_]{_NO_KEY}"
    rf"|(?:(?:put|insert|enter|add|paste)[-_])?your[-_](?:[a-z]{{1,20}}[-_]){{0,3}}?{_NO_KEY}"
    r"(?:[-_](?:goes[-_])?here)?)"
)
"""Placeholders instead of a secret: for a server without a password, or to be replaced."""

_USER = re.compile(
    r"""://[^\s/@:'"<>?#[]*:(?!\d{1,5}/)(?P<secret>[^\s@'"<>]{1,300})@(?!sha\d+:)"""
    r"""|(?:^|(?<==))[^\s/@:'"<>=]+:(?!\d{1,5}@)(?P<bare>[^\s/@:'"<>]+)@(?!sha\d+:)[\w.-]+(?::\d+)?/?$"""
    r"""|https?://(?=[^\s/@]*\d)(?=[^\s/@]*[a-z])"""
    r"""(?P<alone>[\w.~%+-]{8,300}(?=@(?!dev\.azure|bitbucket))|[\w.~%+-]{30,300}(?=@))"""
    r"""|https?://(?P<index>[^\s/@:'"<>$]{4,300})@[^\s/'"]{1,300}/(?:[^\s'"]{0,300}/)?simple\b"""
)
"""User and password of an address, not its port nor the digest of an image.

A user alone counts at an index of packages, or if it looks like a key: some hosts of code have the
user's name there.
"""

_ISSUED = (
    # Models and their tracking: Hugging Face, W&B, OpenAI and others with `sk-`, NVIDIA, Replicate,
    # Groq, xAI, Perplexity, Together, LangSmith, Kaggle, RunPod, Neptune.
    r"hf_(?:(?=[a-z]{0,200}[A-Z0-9])[A-Za-z0-9]{12,}|[a-z]{30,})|api_org_[A-Za-z0-9]{12,}|wandb_v\d_\w{16,}",
    r"sk-(?:(?:proj|ant|or|svcacct|admin)-(?=[\w-]{0,200}\d)[\w-]{12,}"
    r"|(?:[A-Za-z0-9]{1,12}-){0,3}(?=\w{0,200}\d)\w{16,})",
    r"nvapi-(?=[\w-]{0,200}\d)[\w-]{12,}|r8_(?=\w{0,200}\d)[A-Za-z0-9]{12,}|gsk_[A-Za-z0-9]{20,}",
    r"xai-[A-Za-z0-9]{20,}|pplx-[A-Za-z0-9]{20,}|tgp_v1_[\w-]{16,}|lsv2_(?:pt|sk)_\w{16,}",
    r"KGAT_\w{16,}|rpa_[A-Za-z0-9]{20,}|eyJhcGlfYWRkcmVzcyI6[\w=-]*",
    # Code and packages: GitHub, GitLab, Bitbucket and Atlassian, npm, PyPI, RubyGems, crates.io,
    # Docker, JFrog.
    r"gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|gl[a-z]{2,5}-(?=[\w-]{0,200}\d)[\w-]{16,}",
    r"AT[A-Z]TT3x[\w=-]{16,}|ATBB[A-Za-z0-9]{20,}|npm_[A-Za-z0-9]{20,}|pypi-Ag[\w-]{12,}",
    r"rubygems_[0-9a-f]{20,}|cio[A-Za-z0-9]{32}\b|dckr_[a-z]{3}_[\w-]{16,}|AKCp[A-Za-z0-9]{16,}",
    # Clouds: AWS, Google, Azure, DigitalOcean, Alibaba, Tencent, Databricks, Heroku, Fly,
    # Cloudflare, Tailscale, Terraform, Pulumi, Doppler, PlanetScale, Supabase, Netlify, Vault, age.
    r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}\b|AIza[\w-]{30,}|ya29\.[\w-]{16,}|GOCSPX-[\w-]{16,}",
    r"1//0[\w-]{30,}|\w{3}8Q~[\w.~-]{30,}|do[a-z]_v1_[0-9a-f]{20,}|LTAI[A-Za-z0-9]{12,}",
    r"AKID[A-Za-z0-9]{16,}|dapi[0-9a-f]{32}|HRKU-[\w-]{20,}|fm\d_[\w+/=-]{20,}",
    r"v1\.0-[0-9a-f]{20,200}-\w+",
    r"cf(?:ut|at|k)_[\w-]{20,}|tskey-[a-z]+-[\w-]{8,}|\w{14}\.atlasv1\.[\w-]{20,}|pul-[0-9a-f]{30,}",
    r"dp\.[a-z]{2,5}\.[\w.-]{20,}|pscale_[a-z]+_[\w.-]{16,}|sbp_[0-9a-f]{20,}|nfp_[A-Za-z0-9]{20,}",
    r"hv[sbr]\.[\w-]{12,}|AGE-SECRET-KEY-1[A-Z0-9]{16,}",
    # Messages, payment, monitoring: Slack, Discord, Telegram, SendGrid, Mailgun, Twilio, Stripe,
    # Shopify, Square, Linear, Notion, Figma, Postman, Sentry, Grafana, New Relic; signed tokens.
    r"xox[a-z]-[\w-]{10,}|xapp-\d-[\w-]{10,}|[MNO][\w-]{23,27}\.[\w-]{6}\.[\w-]{27,}",
    r"(?:bot)?\d{8,10}:AA[\w-]{30,}|SG\.[\w-]{8,}\.[\w-]{8,}|key-[0-9a-f]{32}\b|SK[0-9a-f]{32}\b",
    r"[srp]k_(?:live|test)_[A-Za-z0-9]{10,}|whsec_[\w+/=]{16,}|shp[a-z]{2}_[0-9a-f]{20,}",
    r"sq0[a-z]{3}-[\w-]{16,}|lin_api_[A-Za-z0-9]{16,}|ntn_[A-Za-z0-9]{20,}|figd_[\w-]{16,}",
    r"PMAK-[0-9a-f]{16,}|sntry[a-z]_[\w+/=-]{16,}|glsa_\w{16,}|glc_[\w=]{20,}|NRAK-[A-Z0-9]{16,}",
    r"eyJ[\w-]{8,2000}\.[\w-]{8,8000}\.[\w-]*",
)
"""Keys that their issuers mark by a prefix. Each repetition in the middle of a pattern has a
bound. Without it, a text with many beginnings of a key would take quadratic time."""

_GIVEN = r"""(?:"[^"\n<]+"|'[^'\n<]+'|[^\s"'<>|;&,-][^\s"'<>|;&]*)"""
_PRINTS = r"\b(?:echo|printf)\s+(?:-\w+\s+|[\"']?%s(?:\\n)?[\"']?\s+)*(?P<VALUE>"
_PIPED = rf"{_GIVEN})\s*(?=\|)[^\n;]{{0,300}}?[\s|/(\"']"
_READS = (
    r"(?:--(?:(?:password|token|pass|api-key)-stdin|with-token|passphrase-fd\s+0)"
    r"|kinit\b|chpasswd\b)"
)
_SUDO = r"sudo\s+(?:-\w+\s+)*-\w{0,9}S"
_COMMANDS = (
    # User and password in one word.
    r"\b(?:curl|wget|https?(?=\s)|xh)\bLINE\s(?:-\w{0,9}[uU]|--(?:proxy-)?user|-a|--auth)(?:\s*|=)[\"']?"
    r"[\w.@%+-]{1,80}:(?P<VALUE>(?!//)[^\s\"'<]+)",
    r"\blftp\bLINE\s(?:-u|--user)\s*[\"']?[\w.@-]{1,80},(?P<VALUE>[^\s\"'<]+)",
    # mount -t cifs -o
    r"(?:[\s,\"']|-o)user(?:name)?=[\w.@\\-]{1,80}%(?P<VALUE>[^\s,\"'<]{4,})",
    r"\b(?:smbclient|rpcclient|smbget|net)\bLINE\s(?:-U|--user)[\s=]*[\"']?[\w.@\\-]{1,80}%(?P<VALUE>[^\s\"'<]+)",
    r"\bcurl\bLINE\s(?:-\w{0,9}b|--cookie)(?:\s*|=)[\"']?[\w.-]{1,80}=(?P<VALUE>[^\s\"'<]+)",
    r"\b(?:curl|wget|https?(?=\s)|xh)\bLINE\s(?:-\w{0,9}H|--header)(?:\s*|=)[\"']?"
    r"[\w-]{0,80}(?i:key|token|secret|password)\s*:\s*(?P<VALUE>[^\s\"'<]+)",
    r"\b(?:sqlplus|sqlldr|expdp|impdp|rman)\bLINE\s[\w.$#]{1,80}/(?P<VALUE>[^\s/@\"'<]+)@",
    # A password without a space after its option, as the next word is a database or a file.
    r"\b(?:mysql\w*|mariadb[\w-]*|mycli)\bLINE\s-p(?P<VALUE>GIVEN)",
    r"\b(?:7z[ar]?|7zz|unrar|rar)\bLINE\s-h?p(?P<VALUE>GIVEN)",
    # An option and its value.
    r"\bsshpass\b[\"']?,?LINE\s*[\"']?-p[\"']?,?\s*(?P<VALUE>GIVEN)",
    r"\b(?:docker|podman|nerdctl|buildah|skopeo|helm|oras|crane|regctl|apptainer|singularity|az|oc|cf"
    r"|ibmcloud|argocd|harbor)\bLINE\slogin\bLINE\s-p(?:\s*|=)(?P<VALUE>GIVEN)",
    r"\b(?:mongo\w*|cqlsh|ncftp\w*|influx|impala-shell|twine)\bLINE\s-p\s+(?P<VALUE>GIVEN)",
    r"\b(?:redis-cli|valkey-cli|keydb-cli)\bLINE\s(?:-a|--pass)(?:\s*|=)(?P<VALUE>GIVEN)",
    r"\bldap(?:search|add|modify|delete|passwd|whoami)\bLINE\s-w\s*(?P<VALUE>GIVEN)",
    r"\b(?:sqlcmd|bcp|ipmitool|unzip|zip|tsql)\bLINE\s-P\s*(?P<VALUE>GIVEN)",
    r"\bopenssl\s+enc\bLINE\s-k\s+(?P<VALUE>GIVEN)",
    r"\s[\"']?-{1,2}pass(?:in|out)?[\s=]+[\"']?pass:(?P<VALUE>[^\s\"'<]+)",
    # A word without an option.
    r"\b(?:wandb|vault|comet|swanlab|neptune|replicate|tailscale)\s+login"
    r"(?:\s+--?(?:host|base-url)\s+[^\s-]\S*|\s+-(?!-?(?:host|base-url)\s)[\w-]+(?:=\S+)?)*\s+[\"']?"
    r"(?P<VALUE>(?=\S*\d)[\w.-]{6,})(?![\w.=-])",
    r"\blogin\(\s*(?:\w+\s*=\s*)?\\*[\"'](?P<VALUE>(?=[\w.-]*\d)[\w.-]{6,})",
    r"\bvault\s+login\s+(?P<VALUE>hv[sbr]\.[\w-]+)",
    r"\bhtpasswd\s+-\w{0,9}b\w{0,9}\s+(?:-\w+\s+)*\S+\s+\S+\s+(?P<VALUE>GIVEN)",
    r"\brequirepass\s+(?P<VALUE>GIVEN)",
    r"\bmachine\s+\S+\s+login\s+\S+\s+password\s+(?P<VALUE>[^\s\"'<\\]+)",
    r"(?:--from-literal[=\s]\S{1,200}?|\bvault\s+(?:kv\s+put|write)\s+\S+\s+\w+)=(?P<VALUE>GIVEN)",
    r"\bmc\s+(?:alias\s+set|config\s+host\s+add)(?:\s+\S+){3}\s+(?P<VALUE>GIVEN)",
    r"\b(?:useradd|usermod)\bLINE\s-p\s+(?P<VALUE>GIVEN)",
    r"\brclone\s+obscure\s+(?P<VALUE>GIVEN)",
    r"\bcurl\bLINE\s--oauth2-bearer[\s=]+(?P<VALUE>GIVEN)",
    r"--(?:src-|dest-)?creds[\s=]+[\"']?[^\s:\"'<]{1,80}:(?P<VALUE>[^\s\"'<]+)",
    r"\bpoetry\s+config\s+(?:http-basic\.\S+\s+\S+|pypi-token\.\S+)\s+(?P<VALUE>GIVEN)",
    r"\bngrok\s+(?:config\s+add-)?authtoken\s+(?P<VALUE>GIVEN)",
    r"\brclone\s+config\s+\w+\s\S+(?:\s\S+)?\s+pass\s+(?P<VALUE>GIVEN)",
    r"\bkaggle\s+config\s+set\s+-n\s+key\s+-v\s+(?P<VALUE>GIVEN)",
    r"\bb2\s+(?:account\s+)?authorize(?:[-_]account)?\s+\w+\s+(?P<VALUE>GIVEN)",
    # The builtins of shells that set a variable without `=`.
    rf"\b(?:setenv\s+{_NAME}\s|printf\s+-v\s+{_NAME}\s+[\"']?%s[\"']?\s"
    rf"|read\s+(?:-\w+\s+)*{_NAME}\s+<<<)"
    r"\s*(?P<VALUE>GIVEN)",
    # printf puts it after the name.
    r"\bprintf\s+[\"'][^\"'\n]{0,200}?(?i:password|passwd|token|secret|key)[\s=:]{1,3}%s"
    r"[^\"'\n]{0,100}[\"']\s+"
    r"(?=\S{6})(?=\S{0,200}\d)(?P<VALUE>GIVEN)",
    # A program that reads the secret from its input.
    f"{_PRINTS}{_PIPED}{_READS}",
    # sudo may need no password, so that a short word is for its command.
    rf"{_PRINTS}(?=[^\s|]{{6}}|[^\s|]{{0,5}}[^a-z\s|]){_PIPED}{_SUDO}",
    rf"(?<!\w)(?:{_READS}|{_SUDO})LINE<<<\s*(?P<VALUE>GIVEN)",
)
"""Programs that take a secret by a short option, or without one."""

_PROGRAMS = (
    "curl wget http xh lftp smb rpcclient net mysql mariadb mycli 7z rar sshpass login mongo cqlsh"
    " ncftp influx impala -cli ldap sqlcmd bcp ipmitool zip tsql openssl pass htpasswd stdin"
    " with-token sudo kinit chpasswd sqlplus sqlldr expdp impdp rman machine from-literal vault mc"
    " user= username= kaggle authorize rclone useradd usermod setenv printf <<< creds twine poetry"
    " ngrok"
)
"""Each text that matches `_COMMANDS` has one of these words, and the search for words is fast."""

_WORDS = re.compile(r"""(?:["'][^\s"',]+["'],\s*)+["'][^\s"',]+["']""")
"""A command as a list of words, as JSON and Python write it."""

_ADDRESS = r"https?://(?:(?!://)[^\s\"'<>]){1,200}?"
_HOOKS = (
    r"https?://(?:hooks\.slack\.com/\w+/|(?:\w+\.)?discord(?:app)?\.com/api/webhooks/"
    r"|[\w.-]+\.webhook\.office\.com/|outlook\.office\.com/webhook/|hooks\.zapier\.com/"
    r"|maker\.ifttt\.com/[^\s\"'<>]*key/|open\.(?:feishu\.cn|larksuite\.com)/[^\s\"'<>]*hook/)"
    r"(?P<VALUE>[\w@/%.-]{8,})",
    rf"{_ADDRESS}/(?:web)?hooks?/(?:catch/|incoming/|\d+/)*"
    r"(?P<VALUE>(?=[\w-]{0,200}\d)[\w-]{16,})",
    # An index of packages: conda's and Cloudsmith's. Topics of forums are also at /t/, as words.
    rf"{_ADDRESS}/t/"
    r"(?P<VALUE>tk-[\w-]{12,}|(?:\w\w-)?[0-9a-f]{8}-[0-9a-f-]{20,}"
    r"|(?=[A-Za-z]{0,200}\d)[A-Za-z0-9]{20,})",
    r"https?://dl\.cloudsmith\.io/(?P<VALUE>(?=[A-Za-z]{0,20}\d)[A-Za-z0-9]{12,})/",
    r"https?://[^\s\"'<>?]{1,300}\?(?:[^\s\"'<>]{0,300}?&)?(?:key|code|auth|sig)="
    # Words and a number name an object of a store.
    r"(?!(?:[a-z]{1,40}[-_./]){1,8}\d{1,8}(?![\w%+=-]))"
    r"(?P<VALUE>(?=[\w%.-]{0,200}\d)[\w%.~+/=-]{12,})",
)
"""Addresses that are secret: anyone who knows the address can post to it or read it."""

_PGPASS = (
    r"(?:^|[\s\"'])[\w.*-]+:(?:\d{2,5}|\*):(?:\*|[A-Za-z_][\w-]*):(?:\*|[A-Za-z_][\w-]*):"
    r"(?P<VALUE>[^\s:\"'<]{4,})"
)


def _joined(parts: Iterable[str]) -> str:
    # One pattern whose groups have unique names. LINE is the words between a program and its
    # option. LINE ends at the next mention of the program, which is matched separately. Otherwise
    # a line that repeats the program would take long.
    joined = []
    for number, part in enumerate(parts):
        *programs, option = part.split("LINE")
        lines = (rf"{each}(?:(?!{each})[^\n|;&]){{0,300}}?" for each in programs)
        whole = "".join([*lines, option])
        joined.append(whole.replace("GIVEN", _GIVEN).replace("VALUE", f"value{number}"))
    return "|".join(joined)


_KEY = re.compile(
    rf"(?<![A-Za-z0-9])(?=[\w.:/+~-]{{10}})(?:{'|'.join(_ISSUED)})"
    r"|isles://[^\s#]{1,300}#[\w.-]+|\bsig=[\w%+/=.~-]{8,}"
    r"|(?i:\b(?:authorization|cookie)\\*[\"']?\s*[:=]\s*(?!\w+\s+<)[^\s<].*"
    r"|\bbearer\s+(?=[\w.~+/=-]{0,200}\d)[\w.~+/=-]{16,})"
    rf"|(?s:{_BEGIN}.*)|PuTTY-User-Key-File-\d:(?s:.*)"
)
_GIVEN_TO = re.compile(_joined(_COMMANDS), re.M)
_IN_PLACES = re.compile(_joined((*_HOOKS, _PGPASS)), re.M)
_PART = re.compile(r"""=["']?<[<>]*["']?(?P<value>(?=\w*\d)(?=\w*[A-Za-z])[\w+/]{8,})""")
_BEFORE = re.compile(rf"{_START}{_NAME}\Z")
"""A value that contains a reference, and the text before it."""
_HARMLESS = re.compile(
    r"(?i)(?:.*[_-])?(?:(?:pad|eos|bos|unk|mask|sep|cls|stop|end|start|image|audio|special|next|split"
    r"|prompt|fim|document|doc|unknown|begin|first|last|new|padding|separator|class|query)[_-]?token"
    r"|(?:public|pub|sort|cache|primary|foreign|partition|group|order|index|join|row|column|field|text"
    r"|label|input|output|target|image|config|metric|lookup|dict|map)[_-]key"
    r"|(?:first|second|third|last|one|two|num|single|multi|forward|backward|gradient)[_-]pass)\W*"
)
"""Names that mean a token of a vocabulary, a key of a table or a pass over data."""
_OF_DATA = re.compile(
    r"(?i)(?:.*[_-])?(?:data|dataset|model|job|task|run|batch|hydra|mpi|slurm|node|feature|split)"
    r"[_-]key\W*"
)
_RANDOM = re.compile(r"(?=[A-Za-z+/]{0,200}\d)[A-Za-z0-9+/=]{20,}")
"""Names that mean a key of data, unless their value looks like this."""
_PATH = re.compile(r"(?:~|\.{0,2})/|file:|[A-Za-z]:\\")


def secrets_in(text: str) -> Iterator[tuple[int, int]]:
    """The places that certainly hold a secret in a text that the user wrote, in order.

    isles refuses such a text, or writes it with gaps. So words, paths, digests, and references such
    as `$HF_TOKEN` or `$(cat FILE)` do not count here; a report treats doubtful text as secret.
    """
    masked = text
    for _ in range(2):  # one reference may contain another
        # Not `<<<`, after which a shell has a value.
        masked = _REFERENCE.sub(lambda match: "<".ljust(len(match[0]), ">"), masked)
    found = [match.span() for match in _KEY.finditer(masked)]
    found += [match.span(match.lastgroup or 0) for match in _IN_PLACES.finditer(masked)]
    if any(word in masked for word in _PROGRAMS.split()):
        line = _WORDS.sub(lambda match: re.sub("[\"',]", " ", match[0]), masked)
        for each in {masked, line}:
            found += [match.span(match.lastgroup or 0) for match in _GIVEN_TO.finditer(each)]
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
        found += [
            match.span("value")
            for match in _PART.finditer(masked)
            if _BEFORE.search(masked, max(0, match.start() - 100), match.start())
        ]
    end = 0
    for start, stop in sorted(found):
        if start >= end and not _PLACEHOLDER.fullmatch(text[start:stop].strip("\\\"'")):
            yield start, stop
            end = stop


def is_secret(name: str, value: str) -> bool:
    """True if the value of a secret name is a secret. The name ends with its `=` or `:`."""
    inner = value.strip("\\\"'")
    if inner.lower() in _NOTHING or inner[:1] in ("<", "[", "{", ")", "…") or _PATH.match(inner):
        return False
    if _PLACEHOLDER.fullmatch(inner) or (_OF_DATA.fullmatch(name) and not _RANDOM.match(inner)):
        return False
    is_short = name.islower() and len(inner) < _LEAST
    is_word = _TOKEN.search(name) and (is_short or _VOCABULARY.fullmatch(inner))
    if _HARMLESS.fullmatch(name) or is_word:
        return False
    if inner.isdecimal() and len(inner) < (2 if "pass" in name.lower() else _LEAST):
        return False
    is_algorithm = "signature" in name.lower() and re.fullmatch(_ALGORITHM, inner)
    if is_algorithm or (_DOUBTFUL.fullmatch(name) and not _OF_DOUBTFUL.match(inner)):
        return False
    is_assigned = name.rstrip().endswith("=") or name.startswith("-")
    return is_assigned or (len(inner) >= _LEAST and any(c.isdigit() for c in inner))


def without_secrets(text: str) -> str:
    """A text with a placeholder for each secret of `secrets_in`."""
    end, parts = 0, []
    for start, stop in secrets_in(text):
        parts += [text[end:start], REMOVED]
        end = stop
    return "".join([*parts, text[end:]])
