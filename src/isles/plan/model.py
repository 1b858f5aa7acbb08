"""The model of a plan: its config.json, from this machine or from Hugging Face, and its sizes."""

from __future__ import annotations

import http.client
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request

from isles.config.files import find_shape, may_be_huggingface_id
from isles.config.foreign import MAX_CONFIG_BYTES, check_config, open_foreign, parse_json
from isles.config.layout import Layout
from isles.config.memory import architecture, setting_of
from isles.config.roofline import forward_flops
from isles.config.sections.run import RunConfig
from isles.errors import UserError
from isles.facts.memory.architecture import Architecture
from isles.facts.memory.count import Count
from isles.facts.memory.setting import Holding
from isles.facts.models import shape_names
from isles.launch.huggingface import huggingface_issue
from isles.run.env import huggingface_access, huggingface_cache
from isles.run.web import ask_url

_FETCH_S = 5.0
"""Timeout in seconds for a config.json."""

_ALIKE = 2
"""Files with this many times more or fewer numbers are of another model, or of a part of one."""

_ALONE = Layout(1, 1, 1, 1, 1)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of a model.

    Args:
        origin: source of its config.json.
        params, trained, active: counts of numbers. `trained` includes adapters; `active` are the
            numbers that one token uses.
        flops_per_token: FLOPs of training, forward and backward, without recomputation.
        files_params: numbers in the safetensors files on this machine. None: no files.
        is_guess: its kind is unknown, and it is counted as a Llama.
        is_on_huggingface: its weights have to be downloaded.
    """

    name: str
    kind: str
    origin: str
    architecture: Architecture
    params: int
    trained: int
    active: int
    layers: int
    flops_per_token: float
    files_params: int | None
    is_guess: bool
    is_on_huggingface: bool


@dataclass(frozen=True, slots=True)
class Shape:
    """A config.json and its source."""

    config: dict[str, Any]
    origin: str


def shape_of(config: RunConfig) -> Shape:
    """The config.json of a run's model.

    Raises:
        UserError: it is not on this machine and cannot be fetched.
    """
    name = config.model.name_or_path
    shape = find_shape(config.model, huggingface_cache())
    if shape is not None:
        return Shape(shape, _origin(name))
    return Shape(_fetched(name), "config.json from Hugging Face (not cached)")


def model_facts(config: RunConfig, shape: Shape) -> ModelFacts:
    """Sizes of the run's model. UserError: its config.json does not have the sizes."""
    name = config.model.name_or_path
    model = architecture(config, shape.config)
    files = files_params(name)
    if files is not None and not model.is_known and files < _ALIKE * model.params:
        # Use the count of its files. If they have at most half of the numbers, ignore them.
        model = model.with_params(files) if files * _ALIKE > model.params else model
    setting = setting_of(config, _ALONE, rows=1, micro_batches=1)
    count = Count(model, setting, Holding())
    return ModelFacts(
        name=name,
        kind=model.name or "unknown",
        origin=shape.origin,
        architecture=model,
        params=count.params,
        trained=count.trained,
        active=count.active,
        layers=model.layers,
        flops_per_token=train_flops(count) / setting.length,
        files_params=files,
        is_guess=not model.is_known,
        is_on_huggingface=files is None and not Path(name).expanduser().exists(),
    )


def train_flops(count: Count) -> float:
    """FLOPs of a micro-batch, forward and backward. Frozen weights get no gradients."""
    products, attention = forward_flops(count)
    return products * (3.0 if count.setting.is_whole else 2.0) + 3.0 * attention


def _origin(name: str) -> str:
    if name in shape_names():
        return "a shape shipped with isles"
    path = Path(name).expanduser()
    if path.exists():
        return str(path / "config.json" if path.is_dir() else path)
    return "config.json from the cache"


def files_params(name: str) -> int | None:
    """Numbers in a model's safetensors files, from their headers. None: no files were found."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        cached = huggingface_cache() / f"models--{name.replace('/', '--')}"
        try:
            commit = (cached / "refs" / "main").read_text(encoding="utf-8").strip()
        except OSError:
            return None
        folder = cached / "snapshots" / commit
    total = 0
    for file in folder.glob("*.safetensors"):
        with suppress(OSError, ValueError, struct.error, LookupError, TypeError):
            total += sum(map(_numbers, header(file).values()))
    return total or None


def header(file: Path) -> dict[str, Any]:
    """The header of a safetensors file. ValueError: it is not a safetensors file."""
    with open_foreign(file)[0] as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > 100 << 20:
            raise ValueError(f"{file} is not a safetensors file")
        found = parse_json(stream.read(length))
    if not isinstance(found, dict):
        raise ValueError(f"{file} is not a safetensors file")
    found.pop("__metadata__", None)
    return found


def _numbers(tensor: Mapping[str, Any]) -> int:
    product = 1
    for size in tensor["shape"]:
        product *= int(size)
    return product


def _fetched(name: str) -> dict[str, Any]:
    # Fetch the config.json alone, by its URL, and explain a failure in the words of `isles check`.
    if not may_be_huggingface_id(name) or Path(name).expanduser().exists():
        raise UserError(
            f"no readable config.json in {name}",
            where="model.name_or_path",
            fix="use a folder with a config.json, a Hugging Face id, or a shape: "
            + ", ".join(shape_names()),
            id="files.model",
        )
    access = huggingface_access()
    if access.is_offline:
        raise _refused(name, "offline", "HF_HUB_OFFLINE is set")
    request = Request(f"{access.endpoint}/{name}/resolve/main/config.json")
    if access.token:
        request.add_header("Authorization", f"Bearer {access.token}")
    try:
        answer = ask_url(request, _FETCH_S, MAX_CONFIG_BYTES)
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise _refused(name, "unreachable", f"{reason}") from error
    if answer.status != 200:
        code = answer.headers.get("X-Error-Code", "")
        is_gated = code == "GatedRepo" or answer.status == 403
        state = "license" if is_gated else "missing" if answer.status in (401, 404) else "failing"
        raise _refused(name, state, f"HTTP {answer.status} {code}".strip())
    try:
        loaded = parse_json(answer.body)
    except ValueError as error:
        raise _refused(name, "failing", "its config.json is not valid JSON") from error
    if not isinstance(loaded, dict):
        raise _refused(name, "failing", "its config.json is not a JSON object")
    check_config(loaded, f"config.json of {name}")
    return loaded


def _refused(name: str, state: str, answer: str) -> UserError:
    row = {"kind": "model", "name": name, "state": state, "answer": answer}
    id, what, fix = huggingface_issue({**row, "page": f"huggingface.co/{name}"})
    return UserError(what, where="model.name_or_path", fix=fix, id=id)
