"""Text to token ids: loading, training and naming a tokenizer."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isles.config.foreign import (
    MAX_CONFIG_BYTES,
    TOKENIZER_FILES,
    check_folder,
    is_open_to_others,
    is_plain,
    read_json,
    unchanging,
)
from isles.config.scratch import scratch_folder
from isles.data.tokens.steps import check_steps
from isles.errors import DataError, UserError
from isles.facts.probe import PROBE

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

log = logging.getLogger(__name__)

END_OF_TEXT = "<|endoftext|>"
"""The special token that ends a text, in a tokenizer trained here."""

TURN_STARTS, TURN_ENDS = "<|im_start|>", "<|im_end|>"
"""Special tokens around each message of a chat, in a tokenizer trained here on conversations."""

TRAINING_TEXT_BYTES = 256 * 2**20
"""A tokenizer is trained on at most this much text, about."""

PIECE_CHARS = 2**18
"""Longer documents are tokenized in pieces of about this many characters, each cut after a line.

A tokenizer needs about 100 bytes per token, and may be quadratic in a text without spaces.
"""

_LOCAL_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
_CONFIG = "tokenizer_config"
_HUB_FILES = ("tokenizer.json", *TOKENIZER_FILES, "added_tokens.json")
_NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_SLOW_S = 20.0
_SLOW = "tokenizer=%s takes long for a short text: its tokenizer.json may have a rule that never "
"ends"
_FIX = (
    "set tokenizer.name_or_path to a folder or Hugging Face id with a tokenizer, or train one on "
    "the data with tokenizer.train_vocab_size"
)
OTHER_TOKENIZER = (
    "use the tokenizer that belongs to the model, or train one: tokenizer.train_vocab_size with "
    "model.init: scratch"
)
"""Fix for tokens that a model does not know."""


def load_tokenizer(
    name_or_path: str, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """A Hugging Face tokenizer from a local folder or Hugging Face.

    DataError or ConfigError: it is missing, does not work, or would read a file elsewhere.
    """
    from transformers import AutoTokenizer

    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if not any((path / name).is_file() for name in _LOCAL_FILES):
            raise DataError(
                "the folder does not contain a tokenizer",
                where=str(path),
                fix=_FIX,
                id="data.tokenizer",
            )
        name_or_path = str(path)
    elif name_or_path.startswith(("/", ".", "~")):
        raise DataError("folder not found", where=name_or_path, fix=_FIX, id="data.tokenizer")
    folder = _check_files(path, name_or_path)
    place = name_or_path
    slow = threading.Timer(_SLOW_S, log.warning, [_SLOW, name_or_path])
    slow.daemon = True
    slow.start()
    try:
        with clear_panics(name_or_path), ExitStack() as copies:
            if folder is not None and not trust_remote_code:  # code may do what it wants anyway
                if not path.is_dir() and is_open_to_others(folder):
                    # This fetches all files from Hugging Face that the library uses. The result is
                    # dropped, as another user may have exchanged a file.
                    AutoTokenizer.from_pretrained(name_or_path)
                copy = copies.enter_context(unchanging(folder))
                if copy != folder:
                    place, folder = str(copy), _check_files(copy, str(copy))
            tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
            tokenizer = _as_its_file(tokenizer, name_or_path, folder)
            tokenizer.name_or_path = name_or_path
            # Some classes copy their vocabulary from its file when they are saved.
            weakref.finalize(tokenizer, copies.pop_all().close)
        # A model type without tokenizer files yields an empty vocabulary instead of an error.
        if not encode(tokenizer, ["The quick brown fox."])[0]:
            raise DataError(
                "the tokenizer has no tokens", where=name_or_path, fix=_FIX, id="data.tokenizer"
            )
    except UserError:
        raise
    # Its classes let whatever their files provoke pass through, and those come from elsewhere.
    except Exception as error:
        raise DataError(
            f"cannot load the tokenizer: {type(error).__name__}: {str(error)[:500]}",
            where=name_or_path,
            fix=_FIX,
            id="data.tokenizer",
        ) from error
    finally:
        slow.cancel()
    return tokenizer


def _check_files(folder: Path, name: str) -> Path | None:
    # The folder of the files, if there are any.
    if not folder.is_dir():
        fetched = _fetch(name, _HUB_FILES)
        if not fetched:
            return None  # no files, or no answer from Hugging Face: loading reports it
        folder = fetched[0].parent
        if versions := _versions(folder):
            _fetch(name, versions)
    check_folder(folder)
    # tokenizer_config.json may name another version, such as tokenizer.4.0.0.json.
    named = {folder / version for version in _versions(folder)}
    for path in sorted(named | set(folder.glob("tokenizer*.json"))):
        if path.stem == _CONFIG:
            continue
        try:
            check_steps(path)
        except OSError:
            continue  # loading reports the reason
        except ValueError as error:
            raise DataError(
                f"the tokenizer cannot be used: {error}",
                where=str(path),
                fix=_FIX,
                id="data.tokenizer",
            ) from None
    return folder


def _as_its_file(
    tokenizer: PreTrainedTokenizerBase, name: str, folder: Path | None
) -> PreTrainedTokenizerBase:
    # For some model types and classes transformers 5 takes only the vocabulary of a tokenizer.json,
    # and normalizes and splits a text by its own rules (transformers#45488). The file wins.
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast
    from transformers.tokenization_utils_base import get_fast_tokenizer_file

    kind = type(tokenizer)
    is_foreign = not kind.__module__.startswith("transformers.")
    if folder is None or not tokenizer.is_fast or kind is PreTrainedTokenizerFast or is_foreign:
        return tokenizer
    file = folder / get_fast_tokenizer_file(_versions(folder))
    # With this setting transformers repairs a wrong file.
    if not file.is_file() or getattr(tokenizer, "fix_mistral_regex", False):
        return tokenizer
    own = Tokenizer.from_file(str(file))
    own.no_truncation()
    own.no_padding()
    vocab = own.get_vocab()
    asked = set(vocab).union(*map(_texts_in, _settings(folder)))
    added = sorted(set(tokenizer.get_added_vocab()) - asked)
    different = _probe_ids(tokenizer.backend_tokenizer) != _probe_ids(own)
    if not added and not different and _cut(tokenizer.backend_tokenizer) == _cut(own):
        return tokenizer
    named = {f"{key}_token": getattr(tokenizer, f"{key}_token", None) for key in _NAMED_TOKENS}
    plain = PreTrainedTokenizerFast.from_pretrained(
        str(folder), **{key: token for key, token in named.items() if token in vocab}
    )
    if plain.backend_tokenizer.post_processor is None:
        plain.backend_tokenizer.post_processor = tokenizer.backend_tokenizer.post_processor
    if _probe_ids(plain.backend_tokenizer) != _probe_ids(own):
        raise DataError(
            "transformers gives other ids than its tokenizer.json",
            where=str(file),
            fix=_FIX,
            id="data.tokenizer",
        )
    if different or added:
        what = "gives other ids" if different else f"adds the token {added[0]!r}"
        text = "tokenizer=%s follows its tokenizer.json, because %s of transformers %s"
        log.warning(text, name, kind.__name__, what)
    plain.name_or_path = tokenizer.name_or_path
    return plain


def _probe_ids(backend: Tokenizer) -> list[list[int]]:
    # Special tokens stand in the middle of the second text: some rules look at what follows one.
    special = [t.content for t in backend.get_added_tokens_decoder().values() if t.special]
    texts = [PROBE, f" a{special[0]}b {special[0]} c" if special else ""]
    return [backend.encode(text, add_special_tokens=False).ids for text in texts]


def _cut(backend: Tokenizer) -> list[str]:
    # What a vocabulary is applied to. It differs also where a small vocabulary gives the same ids.
    text = PROBE if backend.normalizer is None else backend.normalizer.normalize_str(PROBE)
    if backend.pre_tokenizer is None:
        return [text]
    return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


def _settings(folder: Path) -> Iterator[Any]:
    for name in (*TOKENIZER_FILES, "added_tokens.json"):
        with suppress(OSError, ValueError):  # it need not be there
            yield read_json(folder / name, MAX_CONFIG_BYTES)


def _texts_in(value: Any) -> set[str]:
    # Every text in JSON, keys among them.
    if isinstance(value, dict):
        return set(value).union(*map(_texts_in, value.values()))
    if isinstance(value, list):
        return set().union(*map(_texts_in, value))
    return {value} if isinstance(value, str) else set()


def _fetch(name: str, files: Sequence[str]) -> list[Path]:
    from transformers.utils.hub import cached_files

    try:
        found = cached_files(
            name,
            list(files),
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_connection_errors=False,
        )
    except (OSError, ValueError):
        return []
    return [Path(file) for file in found or ()]


def _versions(folder: Path) -> list[str]:
    try:
        config = read_json(folder / f"{_CONFIG}.json", MAX_CONFIG_BYTES)
    except (OSError, ValueError):
        return []  # check_folder says why
    files = config.get("fast_tokenizer_files") if isinstance(config, dict) else None
    return [file for file in files if is_plain(file)] if isinstance(files, list) else []


@contextmanager
def clear_panics(where: str) -> Iterator[None]:
    """Raise a DataError in place of a panic of the package tokenizers, which is no Exception.

    Args:
        where: the name of the tokenizer.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(
            f"the tokenizer gives up on a text: {' '.join(str(error).split())[:300]}",
            where=where,
            fix=f"its tokenizer.json has a broken rule; {_FIX}",
            id="data.tokenizer",
        ) from None


def train_tokenizer(
    documents: Iterable[str], vocab_size: int, *, is_chat: bool = False, model_type: str = ""
) -> PreTrainedTokenizerFast:
    """A byte-level BPE of this many tokens; the same documents give the same tokenizer.

    Only about the first TRAINING_TEXT_BYTES of the documents are used. END_OF_TEXT, id 0, ends
    documents and pads; of chats TURN_ENDS ends them, so that generation stops where the assistant
    has spoken.

    Args:
        model_type: the type of the model. For some types, such as qwen2, transformers ignores the
            rules of the files and splits a text by fixed rules. Then isles uses these rules, too.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = [END_OF_TEXT, TURN_STARTS, TURN_ENDS] if is_chat else [END_OF_TEXT]
    assert vocab_size >= 256 + len(special), "256 bytes and the special tokens"
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    read = _read_for(model_type, bpe) if model_type else None
    if read is not None and _cut(read) != _cut(bpe):
        bpe.normalizer, bpe.pre_tokenizer = read.normalizer, read.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(_first_pieces(documents), trainer)
    if bpe.get_vocab_size() < vocab_size:
        log.warning(
            "tokenizer tokens=%d asked=%d: the text has no more pairs to merge",
            bpe.get_vocab_size(),
            vocab_size,
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=special[-1],
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def _read_for(model_type: str, backend: Tokenizer) -> Tokenizer | None:
    # What transformers makes of a tokenizer.json beside a model of this type; None: no byte-level
    # tokenizer, or a type that it does not know.
    from transformers import AutoTokenizer

    with scratch_folder("isles-tokenizer-") as folder:
        backend.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
        for name, content in {_CONFIG: settings, "config": {"model_type": model_type}}.items():
            (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
        try:
            read: Tokenizer = AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer
        except (ValueError, OSError, KeyError):
            return None
    return read if '"ByteLevel"' in json.dumps(json.loads(read.to_str())["pre_tokenizer"]) else None


def _first_pieces(documents: Iterable[str]) -> Iterator[str]:
    read = 0
    for document in documents:
        for piece in _pieces(document):
            yield piece
            read += len(piece)
            if read >= TRAINING_TEXT_BYTES:
                log.info("tokenizer trained_on_chars=%d: the rest is not needed", read)
                return


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A fingerprint of the settings that affect ids; equal before saving and after loading."""
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        # Truncation and padding change with use; the last two do not touch ids as we ask for them.
        for part in ("truncation", "padding", "post_processor", "decoder"):
            state.pop(part, None)
    else:
        state = {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab()}
        vocab_file = getattr(tokenizer, "vocab_file", None)
        if vocab_file and Path(vocab_file).is_file():
            state["file"] = hashlib.sha256(Path(vocab_file).read_bytes()).hexdigest()
    state["eos"] = tokenizer.eos_token_id
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def end_of_text_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that ends every document. DataError: the tokenizer has none."""
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the tokenizer has no eos_token, which ends every document",
            where=str(tokenizer.name_or_path or type(tokenizer).__name__),
            fix="set eos_token in its tokenizer_config.json, or train a tokenizer on the data with "
            "tokenizer.train_vocab_size",
            id="data.tokenizer",
        )
    return int(tokenizer.eos_token_id)


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest id; larger than the number of tokens where ids have gaps."""
    return max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=0))


def check_vocabulary(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, *, is_trained: bool = False
) -> str:
    """A warning about tokens that the model does not know, or an empty text.

    Added tokens may be unknown: Gemma 3's tokenizer has one for images, which its text models lack.
    DataError: weights that are still to be trained lack more than these.
    """
    unknown = {id: token for token, id in tokenizer.get_vocab().items() if id >= vocab_size}
    if not unknown:
        return ""
    added = unknown.keys() & tokenizer.added_tokens_decoder.keys()
    first = min(unknown.keys() - added or added)
    more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
    what = (
        f"the tokenizer has {len(tokenizer)} tokens, the model knows {vocab_size}: it lacks "
        f"{unknown[first]!r} (token {first}){more}"
    )
    if is_trained or len(added) == len(unknown):
        return f"{what}; isles cannot train on a text with one of them, or use it as a prompt"
    raise DataError(what, where="tokenizer.name_or_path", fix=OTHER_TOKENIZER, id="data.tokenizer")


def affixes(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Ids that the tokenizer puts before and after a text, such as BOS of Llama and Gemma.

    The end-of-text token does not count, because every document ends with it.
    """
    bare: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole: list[int] = tokenizer("a")["input_ids"]
    for at in range(len(whole) - len(bare) + 1):
        if whole[at : at + len(bare)] == bare:
            last = whole[at + len(bare) :]
            is_end = last[-1:] == [tokenizer.eos_token_id]
            return whole[:at], last[:-1] if is_end else last
    return [], []


def add_nothing(tokenizer: PreTrainedTokenizerBase) -> None:
    """Stop a tokenizer from adding tokens before and after a text.

    DataError: its class does so anyway.
    """
    for name in ("add_bos_token", "add_eos_token"):
        if hasattr(tokenizer, name):
            setattr(tokenizer, name, False)
    if affixes(tokenizer) != ([], []):
        raise DataError(
            "the tokenizer adds tokens to a text even with add_bos_token and add_eos_token off",
            where="tokenizer.add_special_tokens",
            fix="delete this key, or use another tokenizer",
            id="data.tokenizer",
        )


def encode(tokenizer: PreTrainedTokenizerBase, documents: list[str]) -> list[list[int]]:
    """The ids of each document; special tokens that are written out are read, none are added."""
    pieces = [_pieces(document) for document in documents]
    with clear_panics(str(tokenizer.name_or_path or type(tokenizer).__name__)):
        encoded: list[list[int]] = tokenizer(
            [piece for parts in pieces for piece in parts],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # a document may be longer than the model's context
        )["input_ids"]
    if len(encoded) == len(documents):
        return encoded
    rest = iter(encoded)
    return [[token for _ in parts for token in next(rest)] for parts in pieces]


def _pieces(text: str) -> list[str]:
    cuts = [0]
    while len(text) - cuts[-1] > PIECE_CHARS:
        earliest, latest = cuts[-1] + PIECE_CHARS // 2, cuts[-1] + PIECE_CHARS
        line = text.rfind("\n", earliest, latest) + 1
        # A space belongs to the word after it.
        cuts.append(line or max(text.rfind(" ", earliest, latest), 0) or latest)
    return [text[start:end] for start, end in pairwise([*cuts, len(text)])]
