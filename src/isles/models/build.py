"""Hugging Face causal language models: from weights, from a config, or from a shipped shape."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn

from isles.config.foreign import (
    GENERATION_CONFIG,
    check_folder,
    check_generation,
    model_config,
    read_json,
    unchanging,
)
from isles.config.sections.model import AdapterConfig, ModelConfig
from isles.errors import UserError
from isles.facts.models import TOKEN_IDS, known_ids, load_shape, shape_names
from isles.models.adapter import add_adapter, import_peft
from isles.models.fill import (
    NotCoveredError,
    check_files,
    fill_adapter,
    fill_fresh,
    fill_magnitudes,
    fill_pretrained,
    untied,
    with_home,
)

log = logging.getLogger(__name__)

_SENSELESS = (ValueError, TypeError, AttributeError, RecursionError)
"""What transformers raises for a generation_config.json that it cannot use."""

_NO_ADAPTER = AdapterConfig()

# What transformers and safetensors raise for a config or weights that are not right.
_LOAD_ERRORS = (
    ImportError,
    OSError,
    ValueError,
    KeyError,
    TypeError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
    # Raised for numbers and names in a config that no model can have.
    ArithmeticError,
    AssertionError,
    AttributeError,
    IndexError,
    MemoryError,
)


def build_model(
    config: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    vocab_size: int | None,
    adapter: AdapterConfig = _NO_ADAPTER,
    frozen_dtype: torch.dtype | None = None,
) -> nn.Module:
    """The model on its device, in train mode, with the same weights on every rank.

    Args:
        vocab_size: size of a tokenizer trained for this run; None keeps the config's.
        frozen_dtype: of the parameters that an adapter leaves alone; None: as the others.

    Raises:
        MissingDependencyError: a package that the adapter needs is not installed.
        UserError: no such model, no safetensors, remote code that was not asked for.
    """
    if adapter.type != "none":
        import_peft(adapter)  # before anything large is read
    if config.init == "pretrained":
        loaded = _load_pretrained(config, frozen_dtype or dtype, adapter, device).train()
        if adapter.type != "none":
            add_adapter(loaded, adapter, dtype=dtype, name=config.name_or_path)
            fill_adapter(loaded, seed)
            fill_magnitudes(loaded)
        return loaded  # type: ignore[no-any-return]
    model: nn.Module = build_empty_model(config, dtype=dtype, vocab_size=vocab_size)
    try:
        model.to_empty(device=device)
        model.tie_weights()  # type: ignore[operator]  # to_empty gives each name its own memory
        fill_fresh(model, seed)
    except NotCoveredError:  # code from elsewhere that initialises in its constructors
        torch.manual_seed(seed)
        whole: nn.Module = _from_config(config, vocab_size, dtype, device)
        return whole.train()
    return model.train()


def build_empty_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    vocab_size: int | None,
    adapter: AdapterConfig = _NO_ADAPTER,
    frozen_dtype: torch.dtype | None = None,
) -> nn.Module:
    """The model on the meta device: shapes without memory, to be cut before it is filled.

    Arguments and errors as for `build_model`; of qlora the matrices are not in 4 bits here.
    """
    if adapter.type == "none":
        return _from_config(config, vocab_size, dtype, torch.device("meta")).train()  # type: ignore[no-any-return]
    import_peft(adapter)
    model = _from_config(config, vocab_size, frozen_dtype or dtype, torch.device("meta")).train()
    add_adapter(model, adapter, dtype=dtype, name=config.name_or_path)
    return model  # type: ignore[no-any-return]


def build_probe(
    config: ModelConfig,
    *,
    num_layers: int,
    device: torch.device,
    dtype: torch.dtype,
    vocab_size: int | None,
    adapter: AdapterConfig = _NO_ADAPTER,
    frozen_dtype: torch.dtype | None = None,
) -> nn.Module:
    """The model with `num_layers` blocks and any weights: to measure what a layer costs.

    Other arguments as for `build_model`; matrices of qlora are measured in 16 or 32 bits.
    """
    held = frozen_dtype or dtype
    probe: nn.Module = _from_config(config, vocab_size, held, device, num_layers)
    if adapter.type != "none":
        # Names may mean layers that are not among these few.
        ends = adapter.model_copy(update={"target_modules": "all-linear", "modules_to_save": ()})
        add_adapter(probe, ends, dtype=dtype, name=config.name_or_path)
    return probe.train()


def fill_model(model: nn.Module, config: ModelConfig, *, seed: int) -> None:
    """Weights for a model, or this rank's part of one, that was built empty and is allocated.

    Raises:
        UserError: the weights cannot be read, or the model cannot be filled piece by piece.
    """
    try:
        if config.init == "scratch":
            fill_fresh(model, seed)
        else:
            meta = torch.device("meta")
            whole = functools.partial(_from_config, config, None, torch.float32, meta)
            fill_pretrained(model, config, whole)
            fill_adapter(model, seed)
    except NotCoveredError as error:
        raise UserError(
            f"{type(model).__name__} cannot be filled piece by piece: it sets {error} elsewhere "
            "than in _init_weights",
            where="model.name_or_path",
            fix="use strategy: {kind: ddp}, which builds the model whole",
        ) from error


def _from_config(
    config: ModelConfig,
    vocab_size: int | None,
    dtype: torch.dtype,
    device: torch.device,
    num_layers: int | None = None,
) -> Any:
    from transformers import AutoModelForCausalLM

    hf_config = load_model_config(config)
    text = hf_config.get_text_config()
    if num_layers is not None:
        text.num_hidden_layers = num_layers
        if getattr(text, "layer_types", None):  # the kind of each
            text.layer_types = text.layer_types[:num_layers]
    if vocab_size is not None:
        text.vocab_size = vocab_size
        # Ids of another tokenizer would point anywhere; the run's tokenizer sets its own.
        for name in TOKEN_IDS:
            for holder in (hf_config, text):
                if getattr(holder, name, None) is not None:
                    setattr(holder, name, None)
    try:
        with device:
            return AutoModelForCausalLM.from_config(
                hf_config,
                attn_implementation=config.attn_implementation,
                dtype=dtype,
                trust_remote_code=config.trust_remote_code,
            )
    except _LOAD_ERRORS as error:
        raise _model_error(config, error) from error


def converts_weights(model: Any) -> bool:
    """Whether transformers holds the weights otherwise than files do: it joins experts."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    return bool(get_checkpoint_conversion_mapping(model.config.model_type))


def load_model_config(config: ModelConfig) -> Any:
    """The Hugging Face config that the run file names.

    Raises:
        UserError: it cannot be found or read, or makes no sense.
    """
    from transformers import AutoConfig
    from transformers.utils.hub import cached_file

    name = with_home(config.name_or_path)
    if name in shape_names():
        return AutoConfig.for_model(**load_shape(name))
    path = Path(name)
    try:
        if path.is_dir():
            check_folder(path)
        file = path if path.is_file() else Path(str(cached_file(name, "config.json")))
        model_config(file)  # its errors name this file, and not a copy
        with _unchanging(config, file) as copy:
            known = model_config(copy)
            place = name if copy == file else str(copy)
            found = AutoConfig.from_pretrained(place, trust_remote_code=config.trust_remote_code)
        found.name_or_path = name
        _refuse_methods(known, found)
        if config.init == "pretrained":
            _try_generation_config(config)
    except _LOAD_ERRORS as error:
        raise _model_error(config, error) from error
    if config.init == "pretrained":
        _refuse_quantized(config, found)
    _forget_choices(found)
    _forget_unknown_ids(found)
    return found


@contextlib.contextmanager
def _unchanging(config: ModelConfig, file: Path) -> Iterator[Path]:
    # A file of the model as `unchanging` gives it. Code of the model may do what it wants anyway,
    # and finds its other files beside this one.
    if config.trust_remote_code:
        yield file
    else:
        with unchanging(file.parent, [file.name]) as folder:
            yield folder / file.name


def _refuse_methods(known: Mapping[str, Any], holder: Any) -> None:
    # A key that is called as a method has: its value would stand in the method's place.
    for key in known:
        if callable(getattr(type(holder), key, None)):
            raise ValueError(f"the key {key!r} is the name of a method of {type(holder).__name__}")


def _try_generation_config(config: ModelConfig) -> None:
    # The export writes it at the end of the run, which is too late to find it odd.
    from transformers import GenerationConfig

    known = _generation_config(config)
    if known is not None:
        _refuse_methods(known, GenerationConfig())
        with contextlib.suppress(*_SENSELESS):  # `take_generation_config` does without it
            GenerationConfig(**known).to_json_string(keys_to_pop=["compile_config"])


def _generation_config(config: ModelConfig) -> dict[str, Any] | None:
    # The settings of generation that a model has; None: it has none.
    from transformers.utils.hub import cached_file

    name = with_home(config.name_or_path)
    options = {"_raise_exceptions_for_connection_errors": False}
    options["_raise_exceptions_for_missing_entries"] = False
    found = None if Path(name).is_file() else cached_file(name, GENERATION_CONFIG, **options)
    if not found:
        return None
    check_generation(Path(found))
    return dict(read_json(Path(found)))


def _forget_choices(config: Any) -> None:
    # The run file chooses how a model computes. Other names of attention and expert kernels are
    # programs, which transformers would download and run.
    from transformers import PreTrainedConfig

    config._attn_implementation_internal = None
    config._experts_implementation_internal = None
    config.output_attentions = config.output_hidden_states = False
    for unwanted in ("kernel_config", "quantization_config", "transformers_weights"):
        if hasattr(config, unwanted):
            delattr(config, unwanted)
    for name in config.sub_configs:
        if isinstance(part := getattr(config, name, None), PreTrainedConfig):
            _forget_choices(part)


def keep_files(config: ModelConfig, folder: Path) -> None:
    """Write the config.json and the settings of generation of the run's model into a folder.

    Raises:
        UserError: they cannot be found or read.
        OSError: the disk does not take them.
    """
    from transformers.utils.hub import cached_file

    load_model_config(config)  # checks them
    name = with_home(config.name_or_path)
    file = Path(name) if Path(name).is_file() else Path(str(cached_file(name, "config.json")))
    files = {"config.json": model_config(file), GENERATION_CONFIG: _generation_config(config)}
    for written, content in files.items():
        if content is not None:
            text = json.dumps(content, indent=2, ensure_ascii=False)
            (folder / written).write_text(text + "\n", encoding="utf-8")


def _forget_unknown_ids(config: Any) -> None:
    # transformers cannot build a model with a padding id that the model lacks.
    text = config.get_text_config()
    size = getattr(text, "vocab_size", None)
    for holder in {id(each): each for each in (config, text)}.values():
        for name in TOKEN_IDS:
            ids = getattr(holder, name, None)
            if isinstance(size, int) and known_ids(ids, size) != ids:
                log.warning(
                    "model=%s has %s %s, but %d tokens", config.name_or_path, name, ids, size
                )
                setattr(holder, name, known_ids(ids, size))


def take_generation_config(model: Any, config: ModelConfig) -> None:
    """Give a model the settings of generation that its base has."""
    from transformers import GenerationConfig

    if config.init == "pretrained" and model.can_generate():
        # Many models have none, and then what their config says stays.
        with contextlib.suppress(OSError, ValueError):
            known = _generation_config(config)
            try:
                if known is not None:
                    model.generation_config = GenerationConfig.from_dict(known)
            except _SENSELESS as error:
                text = "model=%s has a generation_config.json without sense: %s"
                log.warning(text, config.name_or_path, error)


def _load_pretrained(
    config: ModelConfig, dtype: torch.dtype, adapter: AdapterConfig, device: torch.device
) -> Any:
    # The whole model on its device; for qlora its matrices in 4 bits, made there one by one.
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GenerationConfig

    name, options = with_home(config.name_or_path), dict[str, Any]()
    hf_config = load_model_config(config)
    if adapter.type == "qlora":
        four_bits = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=adapter.bnb_4bit_quant_type,
            bnb_4bit_use_double_quant=adapter.bnb_4bit_use_double_quant,
            bnb_4bit_compute_dtype=dtype,
        )
        options = {"quantization_config": four_bits, "device_map": {"": device}}
    try:
        check_files(name)
        model, report = AutoModelForCausalLM.from_pretrained(
            name,
            config=hf_config,
            generation_config=GenerationConfig(),  # else it is read from the path without a check
            dtype=dtype,
            attn_implementation=config.attn_implementation,
            trust_remote_code=config.trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # named below
            **options,
        )
    except _LOAD_ERRORS as error:
        raise _model_error(config, error) from error
    if model.can_generate():
        model.generation_config = GenerationConfig.from_model_config(hf_config)
    take_generation_config(model, config)
    # transformers makes up what is missing, drops what is left over, and goes on; a run must not.
    for name, saved, own in sorted(report.get("mismatched_keys") or ()):
        raise _mixed(config, f"holds {name!r} in the shape {tuple(own)}, its files {tuple(saved)}")
    for keys, what in (("missing_keys", "lacks"), ("unexpected_keys", "has no place for")):
        names = sorted(report.get(keys) or ())
        if names:
            raise _mixed(config, f"{what} {len(names)} weights, the first {names[0]!r}")
    # transformers keeps two weights that the config says are one, if they differ in the files.
    for other, first in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if model.get_parameter(other) is not model.get_parameter(first):
            raise untied(config, first, other)
    if not options:
        return model.to(device)
    # On a CPU with AVX512-BF16 bitsandbytes packs the weights anew at the first forward pass in
    # eval mode, which fails where a row is no whole blocks; and no gradient passes then.
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def _mixed(config: ModelConfig, what: str) -> UserError:
    # A folder of which one part is of another model.
    return UserError(
        f"the model of {config.name_or_path} {what}: config.json and the weights do not belong "
        "together",
        where="model.name_or_path",
        fix="use a folder that holds one whole model, or init: scratch",
        id="model.load",
    )


def _refuse_quantized(config: ModelConfig, hf_config: Any) -> None:
    # A base whose files hold codes instead of numbers cannot be cut, quantised or merged.
    if getattr(hf_config, "quantization_config", None):
        raise UserError(
            f"the weights of {config.name_or_path} are quantised already",
            where="model.name_or_path",
            fix="use the model that they were made from; adapter.type: qlora makes 4 bits of it",
        )


def _model_error(config: ModelConfig, error: Exception) -> Exception:
    if isinstance(error, torch.OutOfMemoryError):
        return error
    name = config.name_or_path
    text = str(error).strip().splitlines()
    first = text[0] if text else type(error).__name__
    folder = Path(with_home(name))
    if "trust_remote_code" in str(error) or "custom code" in str(error):
        fix = "read the model's code; if you trust it, set model.trust_remote_code: true"
    elif "scaled_dot_product_attention" in str(error):
        fix = "set model.attn_implementation: eager"
    elif folder.is_dir():
        weights = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
        if not (folder / "config.json").is_file():
            fix = "the folder must hold config.json and *.safetensors"
        elif weights and not list(folder.glob("*.safetensors")):
            fix = (
                f"{weights[0]} is a pickle, which can run code; convert the folder to safetensors "
                "(save_pretrained does it)"
            )
        else:
            fix = "look at config.json and the *.safetensors files of this folder"
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        fix = "there is no such folder here; give a folder with config.json, or a hub id"
    else:
        fix = (
            "check the hub id, your network, and for a gated model its licence page and "
            f"`hf auth login`; or use a shipped shape: {', '.join(shape_names())}"
        )
    return UserError(
        f"cannot load the model {name!r}: {first}",
        where="model.name_or_path",
        fix=fix,
        id="model.load",
    )
