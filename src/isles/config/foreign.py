"""Limits for foreign files: files that come with a model or from another machine.

Read foreign JSON only through `read_json`. `model_config` reads a model's config.json, and uses it
only for the sizes of the model.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeGuard

from isles.config.links import check_found, follow
from isles.config.scratch import scratch_folder
from isles.errors import ConfigError

MAX_JSON_BYTES = 64 * 2**20
"""The largest known tokenizer.json has 35 MiB, and the largest index of weights has 15 MiB."""

MAX_CONFIG_BYTES = 10 * 2**20
MAX_VALUES = 4_000_000
"""The largest known tokenizer.json has half as many."""

_MAX_DEPTH = 64
_PLAIN_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")

# Sizes in a config.json, by all the names that architectures use, and the largest sensible value.
# A list has one value for each layer.
_SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 2**20),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 2_000),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads"), 2**16),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size"), 2**24),
    "head_dim": 2**16,
    "max_position_embeddings": 2**40,
    "n_inner": 2**24,
    "n_positions": 2**40,
    "vocab_size": 2**26,
}
_LARGE = ("model.safetensors.index.json", "tokenizer.json", "vocab.json")
_TEXTS = (".jinja", ".model", ".tiktoken", ".txt")
"""Files of tokenizers that libraries read as a whole."""

GENERATION_CONFIG = "generation_config.json"
TOKENIZER_FILES = ("tokenizer_config.json", "special_tokens_map.json")
"""transformers passes all their values to the class of the tokenizer."""

_FROM_FOLDER = (
    *("tokenizer_file", "special_tokens_map_file", "added_tokens_file", "tokenizer_config_file"),
    *("chat_template_file", "name_or_path"),
)
"""Keys of a tokenizer_config.json that transformers replaces or does not use: they may be stale."""

_CARRIERS = (
    *("vocab", "merges", "entity_vocab", "init_inputs", "vocab_files_names", "tokenizer_object"),
    *("gguf_file", "post_processor", "tokenizer_padding", "tokenizer_truncation", "cache_dir"),
    *("subfolder", "proxies", "_json_padding", "_json_truncation", "_spm_precompiled_charsmap"),
)
"""With these keys a class would take a vocabulary or a file from elsewhere. No model has them."""

_FILE_KEY = re.compile(r"(file|path|dir|vocab|merges|model|dic)(s|_names?)?$")
_TOKEN_KEY = re.compile(r".*_tokens?|added_tokens_decoder|chat_template|response_(schema|template)")
_TOKEN_ID = re.compile(r"(bos|eos|pad|decoder_start|forced_bos|forced_eos)_token_id")
_COUNT = re.compile(r"(n|num)_labels|(.*_)?(blocks|codebooks|experts|groups|heads|layers)")
_MOST_COUNTED = 2**16
"""Libraries create an object for each of them, some while they read the file."""
_SHARE = re.compile(r"(.*_)?(dropout|pdrop)")
_ABOVE_ZERO = ("layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps", "rope_theta")
_NAMES = ("model_type", "hidden_act", "hidden_activation", "activation_function", "rope_type")
_ROPE_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "attention_factor")
_SECTIONS = ("rope_parameters", "rope_scaling", "text_config")


def check_values(text: bytes | str, most: int) -> None:
    """Raise a ValueError if a JSON text may have more than `most` values.

    To be called before the text is parsed: an empty list of two bytes becomes an object of fifty.
    Each value but the first follows a comma or a bracket; those in strings are counted too.
    """
    marks: tuple[Any, ...] = (b",", b"[", b"{") if isinstance(text, bytes) else (",", "[", "{")
    if sum(map(text.count, marks)) > most:
        raise ValueError(f"it has more than {most:,} values")


def parse_json(text: bytes | str, most_values: int = MAX_VALUES) -> Any:
    """Parse foreign JSON.

    ValueError: it is not JSON, has too many values, or is nested deeper than any file that isles
    knows.
    """
    check_values(text, most_values)
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested more than {_MAX_DEPTH} deep") from None
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [item for each in level for item in _items(each)]
        if not level:
            return value
    raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")


def read_json(path: Path, most_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read foreign JSON from a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not JSON, is too large or too deep, or is not a regular file.
    """
    return parse_json(read_bytes(path, most_bytes))


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """Read a foreign file. Raises the errors of `read_json`, except for JSON."""
    with open_foreign(path)[0] as stream:
        data = stream.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"it is larger than {most_bytes / 2**20:.0f} MiB")
    return data


def open_regular(path: Path | str, flags: int = 0, folder: int | None = None) -> io.BufferedReader:
    """Open a foreign file for reading.

    Args:
        flags: more flags of `os.open`, such as O_NOFOLLOW.
        folder: descriptor of the folder that `path` begins in; None: the working directory.

    Raises:
        OSError: the file cannot be opened.
        UnsupportedOperation: it is not a regular file. This error is a ValueError too.
    """
    # Opening a pipe would wait for a writer, and reading a device might never end.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise io.UnsupportedOperation("it is not a regular file")
    return os.fdopen(handle, "rb")


def open_foreign(path: Path, root: Path | None = None) -> tuple[io.BufferedReader, bool]:
    """Open a regular file, but follow no link of another user to a file that is not that user's.

    See `links.follow`. Raises its errors, and UnsupportedOperation if it is not a regular file.
    """
    return follow(path, open_regular, root)


@contextmanager
def unchanging(folder: Path, names: Iterable[str] = ()) -> Iterator[Path]:
    """A folder with the same small files, which no other user can change in the meantime.

    A library opens the files of a model by their paths. If another user can write to the folder,
    that user could replace a file by a link to a private file, after isles has checked it.

    Args:
        names: the files to copy. Default: all files that `check_folder` checks, without weights.

    Yields:
        `folder` itself if no other user can write to it, or else a copy, which this function
        deletes at the end. The caller must check the copy again: the files may have changed.

    Raises:
        OSError: a file cannot be read.
        ScratchError: the disk has no space for a copy.
        ValueError: a file is too large, or is not a regular file.
    """
    if not is_open_to_others(folder):
        yield folder
        return
    with scratch_folder("isles-copy-") as made:
        for path in [folder / name for name in names] or _files_to_check(folder):
            if path.is_file() and (names or path.suffix in (".json", ".py", *_TEXTS)):
                copy = made / path.relative_to(folder)
                copy.parent.mkdir(exist_ok=True)
                copy.write_bytes(read_bytes(path, MAX_JSON_BYTES))
        yield made


def is_open_to_others(folder: Path) -> bool:
    """True if a user other than this one and root can replace the folder, or a file in it."""
    absolute = folder.absolute()
    for place in (absolute, folder.resolve()):
        for above in (place, *place.parents):
            found = above.stat()
            is_sticky = above != place and found.st_mode & stat.S_ISVTX
            if found.st_uid not in (0, os.geteuid()) or (found.st_mode & 0o022 and not is_sticky):
                return True
    return False


@contextmanager
def folder_below(root: Path, parts: Iterable[str], *, make: bool = False) -> Iterator[int]:
    """Open a folder below `root` and follow no link on the way. Yields a descriptor.

    Work relative to this descriptor stays in that folder, even if somebody replaces a part of its
    path.

    Args:
        make: create missing folders.

    Raises:
        OSError: the folder cannot be opened or made; ELOOP: a part of its path is a link.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    if make:
        root.mkdir(parents=True, exist_ok=True)
    handle = os.open(root, flags)
    try:
        for part in parts:
            if make:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=handle)
            try:
                below = os.open(part, flags | os.O_NOFOLLOW, dir_fd=handle)
            except NotADirectoryError as error:  # Linux raises it for a link, too
                found = os.stat(part, dir_fd=handle, follow_symlinks=False)
                if stat.S_ISLNK(found.st_mode):
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), part) from error
                raise
            os.close(handle)
            handle = below
        yield handle
    finally:
        os.close(handle)


def is_plain(name: object) -> TypeGuard[str]:
    """True if `name` is a file name without folders, blanks and control characters."""
    return isinstance(name, str) and bool(_PLAIN_NAME.fullmatch(name)) and name not in (".", "..")


def names_code(folder: Path) -> bool:
    """True if a tokenizer's folder has Python code, or a JSON file that names code (`auto_map`)."""
    for path in sorted(folder.glob("*")):
        if path.suffix == ".json":
            with suppress(OSError, ValueError):  # the code that loads it reports why it fails
                level = [read_json(path)]
                while level:
                    if any("auto_map" in each for each in level if isinstance(each, dict)):
                        return True
                    level = [item for each in level for item in _items(each)]
        elif path.suffix == ".py" or path.is_dir():
            return True
    return False


def weight_files(path: Path) -> dict[str, str]:
    """Read an index of safetensors files: the file of each weight.

    Raises:
        OSError: the index cannot be read.
        ValueError: it is not an index, or names a file outside its folder.
    """
    index = read_json(path)
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict):
        raise ValueError("it has no weight_map")
    for file in files.values():
        if not is_plain(file):
            raise ValueError(f"its weight_map names {str(file)[:200]!r}, not a file next to it")
    return files


def model_config(path: Path) -> dict[str, Any]:
    """A model's config.json.

    Raises:
        OSError: it cannot be read.
        ConfigError: it is not a config.json, or a size in it is invalid.
    """
    try:
        config = read_json(path, MAX_CONFIG_BYTES)
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except ValueError as error:
        raise _refused(str(path), f"isles cannot use the model's config.json: {error}") from None
    check_config(config, str(path))
    return config


def check_folder(folder: Path) -> None:
    """Refuse a model's folder if one of its files is too dangerous for a library.

    ConfigError: a JSON file is too large, too deep or odd, a text is too large, a tokenizer would
    read a file elsewhere, or a pipe, a socket or a device has the name of a file.
    """
    for path in _files_to_check(folder):
        try:
            is_file = path.is_file()
            if not is_file and path.exists() and not path.is_dir():
                raise ValueError("it is not a regular file")
            # Such as a chat template of a stranger that is a link to a file of whoever loads it.
            if is_file:
                open_foreign(path)[0].close()
                check_found([path], folder)
            if path.suffix != ".json":
                if is_file and path.suffix in _TEXTS and path.stat().st_size > MAX_JSON_BYTES:
                    raise ValueError(f"it is larger than {MAX_JSON_BYTES >> 20} MiB")
            # Libraries read the large files again, with their own limits of depth.
            elif path.name in _LARGE:
                if not is_file or path.stat().st_size > MAX_JSON_BYTES:
                    raise ValueError(f"it is not a file of at most {MAX_JSON_BYTES >> 20} MiB")
            elif path.name == GENERATION_CONFIG:
                check_generation(path)
            elif path.name in TOKENIZER_FILES:
                _check_tokenizer(path)
            else:
                read_json(path, MAX_CONFIG_BYTES)
        except ValueError as error:
            raise _refused(str(path), f"isles cannot use this file: {error}") from None
        except OSError:
            continue  # the code that needs the file reports it


def _files_to_check(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*"), *folder.glob("additional_chat_templates/*")])


def _check_tokenizer(path: Path) -> None:
    found = read_json(path, MAX_CONFIG_BYTES)
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    for key, value in found.items():
        if what := _odd_setting(key, value, is_map=path.name != TOKENIZER_FILES[0]):
            raise ConfigError(
                what,
                where=f"{path} {key}",
                fix="delete this key, or use another tokenizer (tokenizer.name_or_path)",
                id="data.tokenizer",
            )


def _odd_setting(key: str, value: object, *, is_map: bool) -> str:
    # What is wrong with a value that a tokenizer's class gets; "" if nothing is.
    if key == "chat_template":
        return _odd_template(value)
    if key == "fast_tokenizer_files":
        is_list = isinstance(value, list) and all(map(is_plain, value))
        return "" if is_list else f"{_short(value)} is not a list of plain names of files"
    if key in _CARRIERS and value not in (None, [], {}):
        return f"{_short(value)}: a tokenizer takes its vocabulary only from files of its folder"
    # The map has the last word, so none of its values is replaced.
    if (key in _FROM_FOLDER and not is_map) or _TOKEN_KEY.fullmatch(key):
        return ""
    for name, text in _named_texts(key, value):
        if ("/" in text or _FILE_KEY.search(name)) and os.path.lexists(_with_home(text)):
            return f"{_short(text)} is a file of this machine, which a tokenizer must not read"
    return ""


def _odd_template(value: object) -> str:
    if isinstance(value, list):
        if not all(isinstance(each, dict) and len(each) == 2 for each in value):
            return "it is not a list of names and templates"
        value = {str(each.get("name")): each.get("template") for each in value}
    if isinstance(value, dict):
        is_good = all(is_plain(name) and isinstance(text, str) for name, text in value.items())
        return "" if is_good else "it does not hold a text for each plain name"
    return "" if value is None or isinstance(value, str) else f"{_short(value)} is not text"


def _named_texts(key: str, value: object) -> Iterator[tuple[str, str]]:
    # All texts in a value, each with the key that holds it.
    if isinstance(value, str):
        yield key, value
    for name, each in value.items() if isinstance(value, dict) else ():
        yield from _named_texts(name, each)
    for each in value if isinstance(value, list) else ():
        yield from _named_texts(key, each)


def _with_home(path: str) -> str:
    try:
        return str(Path(path).expanduser())
    except RuntimeError:  # ~name of no user
        return path


def check_generation(path: Path) -> None:
    """Refuse a generation_config.json with invalid token ids.

    Raises:
        OSError: it cannot be read.
        ConfigError: an id is not a whole number, or the file is not a JSON object.
    """
    try:
        found = read_json(path, MAX_CONFIG_BYTES)
        if not isinstance(found, dict):
            raise ValueError("it is not a JSON object")
    except ValueError as error:
        raise _refused(str(path), f"isles cannot use this file: {error}") from None
    for name, value in found.items():
        if what := _odd_tokens(name, value):
            raise _refused(f"{path} {name}", what)


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Refuse a config.json with invalid sizes. ConfigError, with the key."""
    for key, what in _odd(config):
        raise _refused(f"{where} {key}", what)


def _odd(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, most in _SIZES.items():
        value = config.get(name)
        for each in value if isinstance(value, list) else [value]:
            is_whole = isinstance(each, int) and not isinstance(each, bool)
            if each is not None and not (is_whole and 1 <= each <= most):
                yield prefix + name, f"{_short(each)} is not a whole number from 1 to {most:,}"
    for name in _ABOVE_ZERO:
        value = config.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and 0 < value < float("inf")):
            yield prefix + name, f"{_short(value)} is not a number above 0"
    yield from _odd_choices(config, prefix)
    heads, shared = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(shared, int) and shared > 0 and heads % shared:
        yield (
            f"{prefix}num_key_value_heads",
            f"{shared} does not divide the {heads} attention heads",
        )
    for name, value in config.items():
        if isinstance(value, dict) and not _TOKEN_ID.fullmatch(name):
            yield from _odd(value, f"{prefix}{name}.")
        elif value is not None and (what := _odd_value(name, value)):
            yield prefix + name, what


def _odd_choices(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name in _NAMES:
        value = config.get(name)
        if value is not None and not is_plain(value):
            yield prefix + name, f"{_short(value)} is not a name"
    for name in _ROPE_NUMBERS:
        value = config.get(name)
        if value is not None and not (isinstance(value, int | float) and value > 0):
            yield prefix + name, f"{_short(value)} is not a number above 0"
    # A further config.json, by its version, would not be checked.
    files = config.get("configuration_files")
    if files not in (None, [], ["config.json"]):
        yield f"{prefix}configuration_files", f"{_short(files)} is not config.json alone"
    kinds, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if kinds is not None and not (isinstance(kinds, list) and all(map(is_plain, kinds))):
        yield f"{prefix}layer_types", f"{_short(kinds)} is not a list of names"
    elif kinds is not None and isinstance(layers, int) and len(kinds) != layers:
        yield f"{prefix}layer_types", f"the list has {len(kinds)} kinds for {layers} layers"


def _odd_tokens(name: str, value: object) -> str:
    if not _TOKEN_ID.fullmatch(name) or value is None:
        return ""
    for each in value if isinstance(value, list) else [value]:
        # -1 stands for no token in some published models.
        if not isinstance(each, int) or isinstance(each, bool) or not -1 <= each < 2**31:
            return f"{_short(value)} is not a token id or a list of token ids"
    return ""


def _odd_value(name: str, value: object) -> str:
    if what := _odd_tokens(name, value):
        return what
    if name in _SECTIONS:
        return f"{_short(value)} is not a JSON object"
    if name in _SIZES or not isinstance(value, int | float):
        return ""
    if _COUNT.fullmatch(name) and not value <= _MOST_COUNTED:
        return f"{_short(value)} is more than {_MOST_COUNTED:,}"
    is_odd = _SHARE.fullmatch(name) and not 0 <= value <= 1
    return f"{_short(value)} is not a share from 0 to 1" if is_odd else ""


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _refused(where: str, what: str) -> ConfigError:
    return ConfigError(
        what,
        where=where,
        fix="correct the file, or use another model (model.name_or_path)",
        id="model.config",
    )


def _items(value: object) -> Iterator[Any]:
    if isinstance(value, dict):
        return iter(value.values())
    return iter(value if isinstance(value, list) else ())
