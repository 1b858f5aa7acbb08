"""The chat template of a run: the tokenizer's own, a file, or the one that is built in."""

from __future__ import annotations

import difflib
import logging
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from isles.config.files import CHATML, how_to_find
from isles.data.chat.template import Template, check_template
from isles.data.sources.opening import decode, opened
from isles.data.tokens.tokenizer import TURN_ENDS, TURN_STARTS
from isles.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


def use_template(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Give a tokenizer the chat template that the run file names.

    `chatml` works with any tokenizer: where it has no tokens of its own for the turns, they are
    written in letters, and the end-of-text token ends what the assistant says, so that generation
    stops there.

    Args:
        tokenizer: changed.
        name: `chatml`, or the path of a Jinja file.

    Raises:
        DataError: there is no such file, or it is no template.
    """
    if name == CHATML:
        known = tokenizer.get_added_vocab()
        has_tokens = TURN_STARTS in known and TURN_ENDS in known
        file = "chatml.jinja" if has_tokens else "chatml-text.jinja"
        if not has_tokens and tokenizer.eos_token is None:
            raise DataError(
                "the tokenizer has neither tokens for chatml nor an eos_token, so that generation "
                "would never stop",
                where="tokenizer.chat_template",
                fix="set eos_token in its tokenizer_config.json",
                id="data.template",
            )
        entry = resources.files("isles.data") / "templates" / file
        tokenizer.chat_template = entry.read_text(encoding="utf-8")
        return
    tokenizer.chat_template = _read_template(Path(name).expanduser())


def stop_at_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let the token that ends a turn of the chat template be the tokenizer's end of text.

    A base model's tokenizer often has a template whose turns end with another token than its
    eos_token. Generation would not stop there, however well the model has learnt to end a turn.
    Where the template itself writes eos_token, nothing is changed.

    Args:
        tokenizer: with a chat template; changed.
    """
    template = Template(tokenizer, "of the tokenizer")
    stop = template.stop_token
    if stop is None or stop == tokenizer.eos_token or "eos_token" in template.text:
        return
    log.info("tokenizer eos_token=%s was=%s: it ends a turn", stop, tokenizer.eos_token)
    tokenizer.eos_token = stop


def _read_template(path: Path) -> str:
    if not path.is_file():
        near = difflib.get_close_matches(str(path), [CHATML], n=1, cutoff=0.5)
        raise DataError(
            f"there is no chat template {path}",
            where="tokenizer.chat_template",
            fix="did you mean chatml?" if near else f"{how_to_find(path)}; or use chatml",
            id="data.template",
        )
    with opened(path) as stream:
        text = decode(stream.read(), path, 0, 1)
    if not text.strip():
        raise DataError(
            "the chat template is empty", where=str(path), fix="use chatml", id="data.template"
        )
    check_template(text, str(path))
    return text
