"""Upload of an export to Hugging Face, and its check before hours are spent."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from isles.errors import UserError
from isles.facts.units import format_bytes
from isles.run.objects import call_with_timeout

log = logging.getLogger(__name__)

_ASK_S = 30.0
_SLOWEST_BYTES_PER_S = 10**6
_UPLOAD_S = 600.0
_TOKEN = re.compile(r"hf_\w+")
_LOGIN = "run `hf auth login`, or set HF_TOKEN to a token with write access (hf.co/settings/tokens)"


def check_push(repo: str, *, where: str = "", timeout_s: float = _ASK_S) -> None:
    """Check that Hugging Face would accept an upload to `repo`. Creates nothing there.

    The token comes from huggingface_hub: HF_TOKEN, or the token stored by `hf auth login`.

    Args:
        where: the option that requests the upload. Default: the run file's key.

    Raises:
        UserError: the token is missing or unknown to Hugging Face, Hugging Face cannot be reached,
        or the token may not write to repositories of this owner.
    """
    from huggingface_hub import HfApi, constants, get_token

    later = "or remove it, and upload later with `isles checkpoint export RUN --push-to-hub`"
    where = where or f"checkpoint.push_to_hub: {repo}"
    if constants.HF_HUB_OFFLINE:
        raise UserError(
            "HF_HUB_OFFLINE is set, so nothing can be uploaded",
            where=where,
            fix=f"unset it, {later}",
            id="huggingface.upload",
        )
    if get_token() is None:
        raise UserError(
            "no Hugging Face token found",
            where=where,
            fix=f"{_LOGIN}; {later}",
            id="huggingface.upload",
        )
    api = HfApi()
    try:
        who = call_with_timeout(
            timeout_s, api.whoami, f"{constants.ENDPOINT} to say whose the token is"
        )
    except Exception as error:
        what = f"Hugging Face refuses the token: {_text(error)}"
        raise UserError(
            what, where=where, fix=f"{_LOGIN}; {later}", id="huggingface.upload"
        ) from None
    if (refusal := _refusal(repo, who)) is not None:
        raise UserError(refusal, where=where, fix=f"{_LOGIN}; {later}", id="huggingface.upload")


def push(folder: Path, repo: str, *, message: str) -> str:
    """Upload an export in one commit, and return the address of the repository.

    A new repository is private. An existing repository keeps its visibility, and keeps its files
    except weights that the export lacks.

    Raises:
        UserError: Hugging Face refuses or does not answer; the folder is unchanged.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils.tqdm import disable_progress_bars

    where = f"{repo} on {constants.ENDPOINT}"
    if constants.HF_HUB_OFFLINE:
        raise UserError(
            "HF_HUB_OFFLINE is set", where=where, fix="unset it", id="huggingface.upload"
        )
    disable_progress_bars()
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    api = HfApi()

    def upload() -> Any:
        # Remove weights of an earlier export, because from_pretrained prefers model.safetensors to
        # an index of several files.
        return api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message=message,
            delete_patterns=["*.safetensors", "*.safetensors.index.json"],
        )

    try:
        url = call_with_timeout(
            _ASK_S,
            lambda: api.create_repo(repo, private=True, exist_ok=True),
            f"{constants.ENDPOINT} to make the repository",
        )
        limit_s = _UPLOAD_S + size / _SLOWEST_BYTES_PER_S
        call_with_timeout(limit_s, upload, f"{constants.ENDPOINT} to take {format_bytes(size)}")
    except Exception as error:
        raise UserError(
            f"the upload failed: {_text(error)}",
            where=where,
            fix=f"retry, or {_LOGIN}",
            id="huggingface.upload",
        ) from None
    log.info("uploaded folder=%s repository=%s bytes=%d", folder, repo, size)
    return str(url)


def _refusal(repo: str, who: dict[str, Any]) -> str | None:
    # The reason why a token may not write to a repository; None if it may.
    owner, user = repo.partition("/")[0], str(who.get("name"))
    token = (who.get("auth") or {}).get("accessToken") or {}
    role = token.get("role")
    if role == "read":
        return f"the token of {user} is read-only"
    orgs = {str(org.get("name")): org for org in who.get("orgs") or []}
    names = {name.lower() for name in (user, *orgs)}
    if owner.lower() not in names:
        member = f" (member of {', '.join(orgs)})" if orgs else ""
        return f"the token belongs to {user}{member}, not to {owner}"
    matching = (org for name, org in orgs.items() if name.lower() == owner.lower())
    org: dict[str, Any] = next(matching, {})
    if owner.lower() != user.lower() and org.get("roleInOrg") == "read":
        return f"{user} has only read access to {owner}"
    if role == "fineGrained":
        scopes = (token.get("fineGrained") or {}).get("scoped") or []
        may = {
            str((scope.get("entity") or {}).get("name")).lower()
            for scope in scopes
            if "repo.write" in (scope.get("permissions") or [])
        }
        if not may & {owner.lower(), repo.lower()}:
            return f"the fine-grained token of {user} may not write to repositories of {owner}"
    return None


def _text(error: Exception) -> str:
    # The first line of a library's message, with any quoted token removed.
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return _TOKEN.sub("hf_...", lines[0] if lines else type(error).__name__)
