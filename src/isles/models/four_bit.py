"""Linear layers whose frozen weight is held in 4 bits and can be sharded over ranks.

bitsandbytes keeps the constants of a 4-bit weight next to the tensor, where FSDP2 does not see
them. Here the constants are parameters too. The weight is a matrix with a row of bytes for each
block of 64 numbers, so that every shard has whole blocks, and each rank quantizes only its blocks.
Numbers and products equal the results of bitsandbytes.

These parameters hold bytes, but their type is the type that the model computes in. FSDP2 of torch
2.11 would cast bytes to that type, and later versions gather tensors of several types more slowly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from isles.config.sections.model import AdapterConfig

Read = Callable[[tuple[int, ...], tuple[slice, ...]], Tensor]
"""Reads a part of one weight from the files, by the weight's shape and the part."""

CONSTANTS = (".absmax_4bit", ".nested_4bit")
"""Ends of the names of parameters that have no name in the files of a model."""

PACKED = "_4bit"
"""End of the name of a packed weight, after its name in the files."""

_BLOCK = 64
"""Numbers with one constant: the default of bitsandbytes, which transformers does not change."""

_NESTED_BLOCK = 256
"""Constants that share one constant, with double quantization."""

_BLOCKS_AT_ONCE = 2**12
"""Blocks that are read and quantized together: 262,144 numbers. On a CPU, bitsandbytes makes
several copies of them in 32 bits."""


class FourBitLinear(nn.Linear):
    """A linear layer with a frozen weight in 4 bits.

    Its tensors have no values before `fill`.

    Args:
        dtype: type of the weight before it is quantized, and of the product.
        is_transposed: whether the files hold the weight with the inputs first (GPT-2).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        adapter: AdapterConfig,
        dtype: torch.dtype,
        device: torch.device,
        is_transposed: bool = False,
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's would allocate the whole weight
        self.in_features, self.out_features = in_features, out_features
        self._dtype, self._quant_type = dtype, adapter.bnb_4bit_quant_type
        self._is_nested, self._is_transposed = adapter.bnb_4bit_use_double_quant, is_transposed
        blocks = -(-self.numbers // _BLOCK)

        def frozen(rows: int, row_bytes: int, numbers: int = 0) -> nn.Parameter:
            value = torch.empty(rows, row_bytes // dtype.itemsize, dtype=dtype, device=device)
            parameter = nn.Parameter(value, requires_grad=False)
            parameter.numbers = numbers  # type: ignore[attr-defined]  # see `num_numbers`
            return parameter

        self.weight_4bit = frozen(blocks, _BLOCK // 2, self.numbers)
        self.absmax_4bit = frozen(-(-blocks // 4) if self._is_nested else blocks, 4)
        if self._is_nested:
            # A constant for every 256 constants; the last row is the mean of all constants.
            self.nested_4bit = frozen(-(-blocks // _NESTED_BLOCK) + 1, 4)
        own = torch.empty(out_features, dtype=dtype, device=device)
        self.register_parameter("bias", nn.Parameter(own, requires_grad=False) if bias else None)

    @property
    def numbers(self) -> int:
        """Numbers of the weight."""
        return self.in_features * self.out_features

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The whole weight in 16 or 32 bits, computed for each use. On the meta device and while it
        is sharded, only its shape and type."""
        if self.weight_4bit.is_meta or isinstance(self.weight_4bit, DTensor):
            return torch.empty(self._shape, dtype=self._dtype, device="meta")
        from bitsandbytes.functional import dequantize_4bit

        found: Tensor = dequantize_4bit(self._packed(), self._state())
        return found

    def forward(self, x: Tensor) -> Tensor:
        from bitsandbytes import matmul_4bit

        bias = None if self.bias is None else self.bias.to(self._dtype)
        product: Tensor = matmul_4bit(
            x.to(self._dtype), self._packed(), quant_state=self._state(), bias=bias
        )
        return product.to(x.dtype)

    @torch.no_grad()
    def fill(self, read: Read) -> None:
        """Read and quantize this rank's blocks. All ranks that share the layer must call this."""
        from bitsandbytes.functional import quantize_4bit

        rows, first = _rows(self.weight_4bit)
        packed, parts = _local_bytes(self.weight_4bit), []
        for start in range(0, rows, _BLOCKS_AT_ONCE):
            part = packed[start : start + _BLOCKS_AT_ONCE]
            numbers = self._read(read, (first + start) * _BLOCK, len(part) * _BLOCK)
            codes, state = quantize_4bit(numbers, blocksize=_BLOCK, quant_type=self._quant_type)
            part.view(-1)[: codes.numel()].copy_(codes.view(-1))
            parts.append(state.absmax)
        own = torch.cat(parts) if parts else torch.empty(0, device=self._device)
        absmax = _gathered(own, self.weight_4bit)
        if self._is_nested:
            absmax, nested = self._nest(absmax)
            _store(self.nested_4bit, nested)
        _store(self.absmax_4bit, absmax)

    def as_held(self, read: Read) -> Tensor:
        """The whole weight as 4 bits hold it, from the files."""
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        whole = self._read(read, 0, self.numbers).view(self._shape)
        codes, state = quantize_4bit(
            whole,
            blocksize=_BLOCK,
            compress_statistics=self._is_nested,
            quant_type=self._quant_type,
        )
        found: Tensor = dequantize_4bit(codes, state)
        return found

    @property
    def _shape(self) -> torch.Size:
        return torch.Size((self.out_features, self.in_features))

    @property
    def _device(self) -> torch.device:
        # Where to quantize: of offloaded shards, the device that computes.
        held = self.weight_4bit
        if isinstance(held, DTensor):
            return torch.device(held.device_mesh.device_type)
        return held.device

    def _read(self, read: Read, start: int, count: int) -> Tensor:
        # Successive numbers of the weight, by whole rows.
        stop, width = min(start + count, self.numbers), self.in_features
        first, last = start // width, -(-stop // width)
        rows, columns = slice(first, last), slice(0, width)
        if self._is_transposed:
            values = read((width, self.out_features), (columns, rows)).T
        else:
            values = read(tuple(self._shape), (rows, columns))
        flat = values.reshape(-1)[start - first * width : stop - first * width]
        return flat.to(self._device, self._dtype).contiguous()

    def _nest(self, absmax: Tensor) -> tuple[Tensor, Tensor]:
        # Constants in 8 bits, and the constants of these. The order of bitsandbytes' quantize_4bit.
        from bitsandbytes.functional import quantize_blockwise

        mean = absmax.mean()
        codes, state = quantize_blockwise(absmax - mean, blocksize=_NESTED_BLOCK)
        return codes, torch.cat([state.absmax, mean.view(1)])

    def _packed(self) -> Tensor:
        # As bitsandbytes holds it. The last block may be shorter than its row.
        assert self.weight_4bit.dtype == self._dtype, "the bytes were cast"
        return self.weight_4bit.view(torch.uint8).view(-1)[: -(-self.numbers // 2)].view(-1, 1)

    def _state(self) -> Any:
        from bitsandbytes.functional import QuantState

        absmax, mean, nested = self.absmax_4bit.view(torch.uint8).view(-1), None, None
        if self._is_nested:
            absmax = absmax[: len(self.weight_4bit)]
            constants = self.nested_4bit.view(torch.float32).view(-1)
            nested = QuantState(
                absmax=constants[:-1],
                code=_nested_code(absmax.device),
                blocksize=_NESTED_BLOCK,
                dtype=torch.float32,
            )
            mean = constants[-1]
        else:
            absmax = absmax.view(torch.float32)
        return QuantState(
            absmax=absmax,
            shape=self._shape,
            dtype=self._dtype,
            blocksize=_BLOCK,
            quant_type=self._quant_type,
            offset=mean,
            state2=nested,
        )


def use_four_bits(model: nn.Module, adapter: AdapterConfig, dtype: torch.dtype) -> None:
    """Replace the layers that transformers would load in 4 bits, in a model on the meta device."""
    from bitsandbytes.nn import Linear4bit
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import HfQuantizer

    kept: Any = getattr(model, "_keep_in_fp32_modules", None)
    kept = HfQuantizer.get_modules_to_not_convert(model, None, kept)
    replace_with_bnb_linear(model, kept, BitsAndBytesConfig(load_in_4bit=True))
    for name, layer in list(model.named_modules()):
        if isinstance(layer, Linear4bit):
            own = FourBitLinear(
                layer.in_features,
                layer.out_features,
                bias=layer.bias is not None,
                adapter=adapter,
                dtype=dtype,
                device=torch.device("meta"),
                is_transposed=issubclass(layer.source_cls, Conv1D),
            )
            model.set_submodule(name, own)


def four_bit_layers(model: nn.Module) -> dict[int, FourBitLinear]:
    """The layers in 4 bits, by the id of their packed weight."""
    found = (module for module in model.modules() if isinstance(module, FourBitLinear))
    return {id(layer.weight_4bit): layer for layer in found}


def is_four_bit(module: nn.Module) -> bool:
    """True for a layer in 4 bits, also of bitsandbytes."""
    return isinstance(module, FourBitLinear) or type(module).__name__ == "Linear4bit"


def num_numbers(parameter: nn.Parameter) -> int:
    """Numbers of a parameter that is not sharded. A weight in 4 bits counts its unpacked numbers,
    and its constants count 0."""
    own: int | None = getattr(parameter, "numbers", None)
    if own is not None:
        return own
    state: Any = getattr(parameter, "quant_state", None)  # bitsandbytes' own
    return parameter.numel() if state is None else int(state.shape.numel())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _nested_code(device: torch.device) -> Tensor:
    # The 256 values of a constant in 8 bits. A copy for each product would wait for the GPU.
    # torch.compile ignores the cache, and its graph would break where the values are made.
    return _nested_code_once(device)


@functools.cache
def _nested_code_once(device: torch.device) -> Tensor:
    from bitsandbytes.functional import create_dynamic_map

    found: Tensor = create_dynamic_map().to(device)
    return found


def _local_bytes(tensor: Tensor) -> Tensor:
    # The rows of this rank.
    own = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    return own.view(torch.uint8)


def _store(parameter: Tensor, constants: Tensor) -> None:
    # Copy this rank's rows of constants that it has whole.
    _, first = _rows(parameter)
    own = _local_bytes(parameter)
    flat = constants.view(torch.uint8).view(-1)[first * own.shape[1] :][: own.numel()]
    own.view(-1)[: flat.numel()].copy_(flat)


def _rows(tensor: Tensor) -> tuple[int, int]:
    # The number of rows of this rank, and the first of them.
    if not isinstance(tensor, DTensor):
        return len(tensor), 0
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return shape[0], offset[0]


def _gathered(own: Tensor, like: Tensor) -> Tensor:
    # The values of all ranks, with one value for each row of `like`.
    if not isinstance(like, DTensor):
        return own
    whole = DTensor.from_local(
        own,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=torch.Size((like.shape[0],)),
        stride=(1,),
    )
    found: Tensor = whole.full_tensor()
    return found
