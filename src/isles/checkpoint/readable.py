"""Write config.json and tokenizer files that old and new versions of transformers read.

transformers 5 renamed some keys and classes. Version 4 and other readers (vLLM, llama.cpp) know
only the old names. If an old name is missing, they use a default and print no warning. So isles
writes both names, and reads the file again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isles.config.foreign import MAX_CONFIG_BYTES, read_json
from isles.errors import DataError
from isles.facts.probe import PROBE

log = logging.getLogger(__name__)

TOKENIZER_CONFIG = "tokenizer_config.json"
_PLAIN = "PreTrainedTokenizerFast"
"""Name, in all versions, of the class that reads tokenizer.json unchanged."""

_CODE = "tokenizer_of_file.py"
_AS_ITS_FILE = {"AutoTokenizer": [None, f"{_CODE.removesuffix('.py')}.TokenizerOfFile"]}
_CODE_TEXT = '''"""The tokenizer of tokenizer.json, whatever the type of its model."""

from transformers import PreTrainedTokenizerFast


class TokenizerOfFile(PreTrainedTokenizerFast):
    """Adds nothing to its base class."""
'''

_NEW_CLASSES = (None, "TokenizersBackend", "PythonBackend", "SentencePieceBackend")
_OF_THIS_MACHINE = ("backend", "is_local", "local_files_only", "name_or_path")
_RENAMED = ("num_experts",)
"""Old names in `attribute_map` that version 4 reads. If one is missing, it uses a default."""

_NOT_KEPT = (
    *("transformers_version", "_name_or_path", "_commit_hash", "dtype", "torch_dtype"),
    *("_attn_implementation", "_experts_implementation", "_attn_implementation_autoset"),
    # Code and weights of the base model, which are not in the export.
    *("auto_map", "quantization_config", "kernel_config", "transformers_weights"),
)


def save_config(config: Any, folder: Path, base: Mapping[str, Any]) -> None:
    """Write config.json with the names of transformers 5 and the old names.

    Args:
        config: of the exported model.
        base: the config.json that the run started with; all its keys are kept.
    """
    config.save_pretrained(folder)
    path = folder / "config.json"
    new = read_json(path, MAX_CONFIG_BYTES)
    if type(config).__module__.startswith("transformers."):
        new.pop("auto_map", None)  # the export does not need or contain this code
    # Some readers accept rope_scaling only in the form in which the model was published.
    for keeps_scaling in (True, False):
        _write(path, _with_old_names(new, config, base, keeps_scaling=keeps_scaling))
        if _is_same(config, folder):
            return
    _write(path, new)
    log.warning(
        "config=%s has only the names of transformers 5: the old names would change it",
        path,
    )


def _is_same(config: Any, folder: Path) -> bool:
    try:
        again = type(config).from_pretrained(folder).to_dict()
    except Exception:  # a config class may raise anything for its values
        return False
    known = config.to_dict()
    return all(again.get(k) == v for k, v in known.items() if k not in _NOT_KEPT)


def _with_old_names(
    new: Mapping[str, Any], config: Any, base: Mapping[str, Any], *, keeps_scaling: bool
) -> dict[str, Any]:
    found = dict(new)
    rope = new.get("rope_parameters")
    if isinstance(rope, dict):
        found |= _rope_names(rope, new)
        if keeps_scaling and "rope_scaling" in base:
            found["rope_scaling"] = base["rope_scaling"]
    if "dtype" in new:
        found["torch_dtype"] = new["dtype"]
    for old, name in type(config).attribute_map.items():
        if old in _RENAMED and name in new:
            found.setdefault(old, new[name])
    for key, value in base.items():
        if key not in found and key not in _NOT_KEPT:
            # The config's current value under a name that it does not write, such as the id of a
            # token that no longer exists.
            own = getattr(config, key, value)
            found[key] = own if _is_plain(own) else value
    for name in config.sub_configs:
        part, below = getattr(config, name, None), base.get(name)
        if part is not None and isinstance(new.get(name), dict):
            below = below if isinstance(below, dict) else {}
            found[name] = _with_old_names(new[name], part, below, keeps_scaling=keeps_scaling)
    return found


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | bool | list | dict)


def _rope_names(rope: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    # Each kind of layer has its own values; the old names are for full attention layers.
    local, main = rope.get("sliding_attention"), rope.get("full_attention", rope)
    if not isinstance(main, dict) or "rope_theta" not in main:
        return {}
    names: dict[str, Any] = {"rope_theta": main["rope_theta"]}
    if isinstance(local, dict):
        names["rope_local_base_freq"] = local.get("rope_theta")
    if "partial_rotary_factor" in main:
        names["partial_rotary_factor"] = main["partial_rotary_factor"]
    if str(config.get("model_type")).startswith("gpt_neox"):
        names["rotary_emb_base"] = main["rope_theta"]
        names["rotary_pct"] = main.get("partial_rotary_factor")
    scaling = {k: v for k, v in main.items() if k not in ("rope_theta", "partial_rotary_factor")}
    if scaling.get("rope_type") == "longrope":
        # Version 4 accepts only these three here, and the length next to them.
        length = scaling.pop("original_max_position_embeddings", None)
        names |= {} if length is None else {"original_max_position_embeddings": length}
        scaling = {k: v for k, v in scaling.items() if k in ("short_factor", "long_factor")}
        scaling["type"] = "longrope"
    is_default = scaling.get("rope_type", "default") == "default" and "type" not in scaling
    return {**names, "rope_scaling": None if is_default else scaling}


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer's files into a folder, with the class from its own files.

    Raises:
        OSError: the disk refuses them.
        DataError: a value in the tokenizer's source files cannot be written.
    """
    try:
        tokenizer.save_pretrained(folder)
        if tokenizer.is_fast:
            _name_class(tokenizer, folder)
    except OSError:
        raise
    # The values come from a third party, and may have any type.
    except Exception as error:
        raise DataError(
            f"cannot write the tokenizer: {type(error).__name__}: {str(error)[:300]}",
            where=str(tokenizer.name_or_path or type(tokenizer).__name__),
            fix="repair its tokenizer_config.json, or set another tokenizer in "
            "tokenizer.name_or_path",
            id="data.tokenizer",
        ) from error


def _name_class(tokenizer: Any, folder: Path) -> None:
    path, base = folder / TOKENIZER_CONFIG, _settings_of(tokenizer)
    new = {k: v for k, v in read_json(path).items() if k not in _OF_THIS_MACHINE}
    extra = new.get("extra_special_tokens")
    if isinstance(extra, list):  # version 4 accepts only an object under this name
        texts = [each["content"] if isinstance(each, dict) else each for each in extra]
        new["additional_special_tokens"] = texts
        del new["extra_special_tokens"]
    # Without these keys, version 4 uses its class's defaults instead of the file's values.
    ids = tokenizer("a")["input_ids"]
    new["add_bos_token"] = ids[:1] == [tokenizer.bos_token_id]
    new["add_eos_token"] = ids[-1:] == [tokenizer.eos_token_id]
    if new.get("auto_map") == _AS_ITS_FILE:  # from an earlier export
        del new["auto_map"]
    if "auto_map" in new:  # third-party code has its own class
        _write(path, new)
        return
    wanted = [base.get("tokenizer_class"), new.get("tokenizer_class")]
    for name in [each for each in wanted if each not in _NEW_CLASSES] + [_PLAIN]:
        _write(path, {**new, "tokenizer_class": name})
        if _reads_as(tokenizer, folder):
            return
    # For some types of models, such as qwen2, transformers 5 ignores both this class and the rules
    # of tokenizer.json, but not if the tokenizer has custom code. A user who does not trust the
    # code gets the class above, and never runs the code.
    (folder / _CODE).write_text(_CODE_TEXT, encoding="utf-8")
    _write(path, {**new, "tokenizer_class": _PLAIN, "auto_map": _AS_ITS_FILE})
    if _reads_as(tokenizer, folder):
        return
    (folder / _CODE).unlink()
    _write(path, {**new, "tokenizer_class": _PLAIN})
    log.warning(
        "tokenizer=%s AutoTokenizer of transformers 5 ignores parts of its tokenizer.json: "
        "use PreTrainedTokenizerFast.from_pretrained",
        folder.name,
    )


def _settings_of(tokenizer: Any) -> dict[str, Any]:
    # The tokenizer_config.json that it was loaded from.
    from transformers.utils.hub import cached_file

    if not tokenizer.name_or_path:
        return {}  # trained by isles
    try:
        found = cached_file(
            tokenizer.name_or_path,
            TOKENIZER_CONFIG,
            local_files_only=True,
            _raise_exceptions_for_missing_entries=False,
        )
        settings = read_json(Path(found), MAX_CONFIG_BYTES) if found else {}
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


def _reads_as(tokenizer: Any, folder: Path) -> bool:
    # Whether a user who loads the folder gets the same ids, including special tokens.
    from transformers import AutoTokenizer

    try:
        again = AutoTokenizer.from_pretrained(folder)
    except Exception:  # a class may raise anything for its files
        return False
    # A class may have more names for a token than the run has.
    has_names = tokenizer.special_tokens_map.items() <= again.special_tokens_map.items()
    return has_names and _probed(again) == _probed(tokenizer) and len(again) == len(tokenizer)


def _probed(tokenizer: Any) -> Any:
    special = next(iter(sorted(tokenizer.added_tokens_encoder)), "")
    texts = [PROBE, f" a{special}b {special} c"]
    return tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]


def _write(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")
