"""Installs isles and its packages on a host; sent there as text, so it needs only Python.

Reads one JSON object from stdin: `wheel` (base64), `wheel_name`, `extras`, `requirements`,
`constraints`, `check`, `wanted` (a fingerprint). Writes to stdout one line per step, for a person.
The last line begins with `RESULT ` and is JSON: `changed`, `error`, `fingerprint`.
"""

from __future__ import annotations

import base64
import fcntl
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_LOOK = "import json; from isles.launch.ssh.facts import fingerprint as f; print(json.dumps(f()))"


def look() -> tuple[dict[str, str] | None, str]:
    """The fingerprint of the installation; or None, and why there is no fingerprint."""
    done = _run([sys.executable, "-c", _LOOK])
    if done.returncode:
        return None, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return json.loads(done.stdout), ""


_NO_INDEX = (
    "Connection to",
    "NewConnectionError",
    "ConnectTimeoutError",
    "Temporary failure in name resolution",
    "Name or service not known",
    "Network is unreachable",
)
"""Signs of an unreachable package index in pip's output."""


def ensure(asked: dict[str, Any]) -> tuple[str, bool]:
    """Install missing packages; returns an error text, and whether anything was installed."""
    wanted = {key: asked[key] for key in ("extras", "requirements", "constraints")}
    wanted["code"] = asked["wanted"]["code"]
    # Two hosts may share this environment: one of them installs, and the other finds it done.
    with (Path(sys.prefix) / ".isles-setup.json").open("a+") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.seek(0)
        is_done = stream.read() == json.dumps(wanted)
        found, _ = look()
        if is_done and found is not None and found["code"] == wanted["code"]:
            return "", False
        _print_line(f"installing isles and its packages into {sys.prefix}")
        with tempfile.TemporaryDirectory(prefix="isles-setup-") as folder:
            error = _install(asked, Path(folder))
        if not error:
            stream.truncate(0)
            stream.write(json.dumps(wanted))
        return error, True


def _install(asked: dict[str, Any], folder: Path) -> str:
    # Run pip; returns an error text, or an empty text.
    wheel, constraints = folder / asked["wheel_name"], folder / "constraints.txt"
    wheel.write_bytes(base64.b64decode(asked["wheel"]))
    constraints.write_text("".join(f"{line}\n" for line in asked["constraints"]))
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    needs = [f"isles[{','.join(asked['extras'])}] @ file://{wheel}", *asked["requirements"]]
    for words in (
        ["--constraint", str(constraints), *needs],
        # Installs exactly this code, even over an older build of the same version.
        ["--no-deps", "--no-index", "--force-reinstall", str(wheel)],
    ):
        done = _run([*pip, *words])
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            errors = [line for line in lines if line.startswith("ERROR")] or lines[-5:]
            if any(sign in done.stderr for sign in _NO_INDEX):
                errors.insert(
                    0,
                    "this host cannot reach the package index. Check its network, or set a mirror "
                    "or proxy with clusters.0.environment.variables: {PIP_INDEX_URL: ADDRESS} or "
                    "{HTTPS_PROXY: ADDRESS}",
                )
            return "\n".join(["pip failed:", *errors, f"(exit code {done.returncode})"])
    return ""


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _print_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Install on this host, or only check it."""
    asked = json.load(sys.stdin)
    error, changed = "", False
    if not asked["check"]:
        try:
            error, changed = ensure(asked)
        except OSError as failure:
            error = f"cannot write to {sys.prefix}: {failure.strerror}"
    found, why = look()
    if found is None and not error:
        error = f"isles is not installed for {sys.executable}: {why}"
    _print_line("RESULT " + json.dumps({"changed": changed, "error": error, "fingerprint": found}))


if __name__ == "__main__":
    main()
