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
from isles.models.four_bit import use_four_bits

log = logging.getLogger(__name__)

_SENSELESS = (ValueError, TypeError, AttributeError, RecursionError)
"""Errors of transformers for a generation_config.json that it cannot use."""

_NO_ADAPTER = AdapterConfig()

# Errors of transformers and safetensors for an invalid config or invalid weights.
_LOAD_ERRORS = (
    ImportError,
    OSError,
    ValueError,
    KeyError,
    TypeError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
    # Raised for impossible numbers and names in a config.
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
        frozen_dtype: of the parameters that an adapter leaves frozen. Default: as the others.

    Raises:
        MissingDependencyError: a package that the adapter needs is not installed.
        UserError: the model or its safetensors are missing, or it needs remote code that was not
            allowed.
    """
    if adapter.type != "none":
        import_peft(adapter)  # before reading large files
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
        model.tie_weights()  # type: ignore[operator]  # to_empty allocates each name separately
        fill_fresh(model, seed)
    except NotCoveredError:  # third-party code that initializes in its constructors
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
    """The model on the meta device, with shapes but no memory, to shard before filling.

    Arguments and errors as for `build_model`.
    """
    if adapter.type == "none":
        return _from_config(config, vocab_size, dtype, torch.device("meta")).train()  # type: ignore[no-any-return]
    import_peft(adapter)
    held = frozen_dtype or dtype
    model = _from_config(config, vocab_size, held, torch.device("meta")).train()
    if adapter.type == "qlora":
        use_four_bits(model, adapter, held)
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
    """The model with `num_layers` blocks and arbitrary weights, to measure the cost of a layer.

    Other arguments as for `build_model`. Matrices of qlora are measured in 16 or 32 bits.
    """
    held = frozen_dtype or dtype
    probe: nn.Module = _from_config(config, vocab_size, held, device, num_layers)
    if adapter.type != "none":
        # Names may match layers that this small model lacks.
        ends = adapter.model_copy(update={"target_modules": "all-linear", "modules_to_save": ()})
        add_adapter(probe, ends, dtype=dtype, name=config.name_or_path)
    return probe.train()


def fill_model(model: nn.Module, config: ModelConfig, *, seed: int) -> None:
    """Fill an allocated model that was built empty, or this rank's part of it.

    Raises:
        UserError: the weights cannot be read, or the model does not support filling in pieces.
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
            f"{type(model).__name__} cannot be filled piece by piece, because it initializes "
            f"{error} "
            "outside _init_weights",
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
        # Ids of another tokenizer are meaningless; the run's tokenizer sets its own.
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


def load_model_config(config: ModelConfig) -> Any:
    """The Hugging Face config that the run file names.

    Raises:
        UserError: the config cannot be found or read, or is invalid.
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
        model_config(file)  # its errors show this file's path, not a copy's
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
    # A file of the model as returned by `unchanging`. Code of the model can do anything regardless,
    # and finds its other files next to this file.
    if config.trust_remote_code:
        yield file
    else:
        with unchanging(file.parent, [file.name]) as folder:
            yield folder / file.name


def _refuse_methods(known: Mapping[str, Any], holder: Any) -> None:
    # A key with the name of a method would replace the method.
    for key in known:
        if callable(getattr(type(holder), key, None)):
            raise ValueError(f"the key {key!r} is the name of a method of {type(holder).__name__}")


def _try_generation_config(config: ModelConfig) -> None:
    # The export writes it at the end of the run, too late to report an error.
    from transformers import GenerationConfig

    known = _generation_config(config)
    if known is not None:
        _refuse_methods(known, GenerationConfig())
        with contextlib.suppress(*_SENSELESS):  # `take_generation_config` ignores it
            GenerationConfig(**known).to_json_string(keys_to_pop=["compile_config"])


def _generation_config(config: ModelConfig) -> dict[str, Any] | None:
    # The generation settings of a model, or None.
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
    # programs that transformers would download and run.
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
    """Write the run's config.json and generation settings into a folder.

    Raises:
        UserError: the files cannot be found or read.
        OSError: the disk refuses them.
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
    # transformers cannot build a model whose padding id is outside its vocabulary.
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
    """Copy the base model's generation settings to a model."""
    from transformers import GenerationConfig

    if config.init == "pretrained" and model.can_generate():
        # Many models have no generation settings; then the values in their config stay.
        with contextlib.suppress(OSError, ValueError):
            known = _generation_config(config)
            try:
                if known is not None:
                    model.generation_config = GenerationConfig.from_dict(known)
            except _SENSELESS as error:
                text = "model=%s has an invalid generation_config.json: %s"
                log.warning(text, config.name_or_path, error)


def _load_pretrained(
    config: ModelConfig, dtype: torch.dtype, adapter: AdapterConfig, device: torch.device
) -> Any:
    # The whole model on its device. For qlora, each matrix is converted to 4 bits there.
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GenerationConfig

    name = with_home(config.name_or_path)
    # Each weight goes from the mapped file to the device. Otherwise each rank of a node holds the
    # whole model in main memory first.
    options: dict[str, Any] = {"device_map": {"": device}}
    hf_config = load_model_config(config)
    if adapter.type == "qlora":
        four_bits = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=adapter.bnb_4bit_quant_type,
            bnb_4bit_use_double_quant=adapter.bnb_4bit_use_double_quant,
            bnb_4bit_compute_dtype=dtype,
        )
        options["quantization_config"] = four_bits
    try:
        check_files(name)
        model, report = AutoModelForCausalLM.from_pretrained(
            name,
            config=hf_config,
            generation_config=GenerationConfig(),  # otherwise it is read from the path unchecked
            dtype=dtype,
            attn_implementation=config.attn_implementation,
            trust_remote_code=config.trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below
            **options,
        )
    except _LOAD_ERRORS as error:
        raise _model_error(config, error) from error
    if model.can_generate():
        model.generation_config = GenerationConfig.from_model_config(hf_config)
    take_generation_config(model, config)
    # transformers invents missing weights, drops extra weights and continues. A run must not.
    for name, saved, own in sorted(report.get("mismatched_keys") or ()):
        raise _mixed(config, f"has {name!r} with shape {tuple(own)}, its files with {tuple(saved)}")
    for keys, what in (("missing_keys", "lacks"), ("unexpected_keys", "has no place for")):
        names = sorted(report.get(keys) or ())
        if names:
            raise _mixed(config, f"{what} {len(names)} weights, the first {names[0]!r}")
    # transformers keeps two weights that the config ties together, if the files differ.
    for other, first in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if model.get_parameter(other) is not model.get_parameter(first):
            raise untied(config, first, other)
    # On a CPU with AVX512-BF16, bitsandbytes repacks the weights at the first forward pass in eval
    # mode. This fails if a row is not a multiple of the block size, and no gradient passes then.
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def _mixed(config: ModelConfig, what: str) -> UserError:
    # The error for a folder with files of two models.
    return UserError(
        f"the model of {config.name_or_path} {what}: config.json and the weights do not belong "
        "together",
        where="model.name_or_path",
        fix="use a folder that holds one whole model, or init: scratch",
        id="model.load",
    )


def _refuse_quantized(config: ModelConfig, hf_config: Any) -> None:
    # A base model with quantized files cannot be sharded, quantized or merged.
    if getattr(hf_config, "quantization_config", None):
        raise UserError(
            f"the weights of {config.name_or_path} are already quantized",
            where="model.name_or_path",
            fix="use the unquantized model; adapter.type: qlora quantizes it to 4 bits",
        )


def _model_error(config: ModelConfig, error: Exception) -> Exception:
    if isinstance(error, torch.OutOfMemoryError):
        return error
    name = config.name_or_path
    text = str(error).strip().splitlines()
    first = text[0] if text else type(error).__name__
    folder = Path(with_home(name))
    if "trust_remote_code" in str(error) or "custom code" in str(error):
        fix = "read the model's code. If you trust it, set model.trust_remote_code: true"
    elif "scaled_dot_product_attention" in str(error):
        fix = "set model.attn_implementation: eager"
    elif folder.is_dir():
        weights = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
        if not (folder / "config.json").is_file():
            fix = "use a folder with config.json and *.safetensors"
        elif weights and not list(folder.glob("*.safetensors")):
            fix = (
                f"{weights[0]} is a pickle, which can run code; convert the folder to safetensors "
                "(save_pretrained does it)"
            )
        else:
            fix = "check config.json and the *.safetensors files of this folder"
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        fix = "the folder does not exist; give a folder with config.json, or a Hugging Face id"
    else:
        fix = (
            "check the Hugging Face id, your network, and for a gated model its license page and "
            f"`hf auth login`; or use a shipped shape: {', '.join(shape_names())}"
        )
    return UserError(
        f"cannot load the model {name!r}: {first}",
        where="model.name_or_path",
        fix=fix,
        id="model.load",
    )
