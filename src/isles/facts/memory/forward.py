"""Simulated forward pass: parameters, FLOPs, and the bytes that autograd keeps for backward.

It computes nothing. The caller lists the operations of a model in their order, as transformers runs
them, and `Forward` adds up the tensors that PyTorch saves. Two operations that save the same tensor
save it once. Sizes match `torch.autograd.graph.saved_tensors_hooks` on the real model.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

_storages = itertools.count()

FP32 = 4

SHORT = 32
"""Length of a row below which moments stay in fp32 under 8-bit AdamW."""

_COLUMNS = ("qkv_proj", "q_proj", "k_proj", "v_proj", "gate_up_proj", "gate_proj", "up_proj")
"""Matrices that tensor parallel shards by their output. All other matrices of a block are sharded
by their input."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of activations.

    Args:
        tokens: rows of the tensor.
        units: numbers per token.
        width: bytes per number.
        needs_grad: whether a gradient passes through it.
        storage: its memory, which views share.
    """

    tokens: int
    units: int
    width: int
    needs_grad: bool = True
    storage: int = field(default_factory=lambda: next(_storages))

    @property
    def size_bytes(self) -> int:
        return self.tokens * self.units * self.width

    def like(self, *, units: int | None = None, width: int | None = None) -> Value:
        """A new tensor with the same number of tokens."""
        return Value(
            self.tokens,
            self.units if units is None else units,
            self.width if width is None else width,
            self.needs_grad,
        )


@dataclass(frozen=True, slots=True)
class Adapter:
    """Low-rank matrices next to frozen matrices.

    Args:
        r: rank.
        width: bytes per number of the adapter.
        targets: matrices with an adapter, by the ends of their names. None: all.
        has_dropout: dropout keeps a mask of the input, and the masked input.
        experts: stacked matrices of experts with an adapter, by the ends of their names.
    """

    r: int
    width: int
    targets: frozenset[str] | None
    has_dropout: bool = False
    experts: frozenset[str] = frozenset()


class Forward:
    """One micro-batch's forward pass through a part of a model.

    Args:
        weight: bytes per number of the weights while they compute.
        autocast: bytes per number in matrix products under torch.autocast. None: no autocast.
        is_trained: whether weights get gradients, in addition to an adapter.
        adapter: adapter of the matrices.
        is_cuda: autocast's rules for a GPU: powers and norms are computed in fp32.
        shares: ranks that gather the keys and values of all tokens. 1: no gathering.
        swaps_heads: ranks exchange heads for tokens around attention.
        repeats_keys: each query head has its own keys and values, as the kernel for documents of
            different lengths requires.
        tensor: ranks that share the matrices of blocks. All counts are then of one rank.
        is_4bit: frozen matrices are bitsandbytes' 4-bit ones, widened for each product.
    """

    def __init__(
        self,
        *,
        weight: int,
        autocast: int | None = None,
        is_trained: bool = True,
        adapter: Adapter | None = None,
        is_cuda: bool = True,
        repeats_keys: bool = False,
        shares: int = 1,
        swaps_heads: bool = False,
        tensor: int = 1,
        is_4bit: bool = False,
    ) -> None:
        self.weight, self.autocast, self.is_cuda = weight, autocast, is_cuda
        self.repeats_keys, self.tensor, self.is_4bit = repeats_keys, tensor, is_4bit
        self.shares, self.swaps_heads = shares, swaps_heads
        self.is_trained, self.adapter = is_trained, adapter
        self.params = 0
        """Numbers of the model's own weights."""
        self.adapter_params = 0
        self.short_params = 0
        """Numbers of an adapter in rows shorter than `SHORT`."""
        self.active_params = 0
        """Numbers of its weights that one token uses."""
        self.stacked_params = 0
        """Numbers of its weights in stacks of experts, which are never quantized."""
        self.copy_bytes = 0
        """Copies of weights in autocast's type, which are kept like activations."""
        self.products = 0
        """FLOPs of matrix products with weights, forward, of all tokens."""
        self.repeated_products = 0
        """Those FLOPs of them that selective checkpointing computes again: every second product."""
        self.operand_bytes = 0
        """Bytes of the operands and results of these products, forward."""
        self.attention_flops = 0
        """FLOPs of attention, forward, of all tokens. Causal, so half of full attention."""
        self.widest_bytes = 0
        """The largest tensor: backward needs a gradient of its size."""
        self.high_bytes: float = 0.0
        """Peak of bytes: the tensors kept so far, plus the tensors of an operation."""
        self.held: tuple[Value, ...] = ()
        """Tensors that the model's code holds at present, even if autograd does not keep them."""
        self._saved: dict[int, Value] = {}
        self._products: list[Value] = []
        self._attended: list[Value] = []

    @property
    def saved_bytes(self) -> int:
        """Bytes that autograd keeps, without weights and copies of them."""
        return sum(value.size_bytes for value in self._saved.values())

    @property
    def product_bytes(self) -> int:
        """Results of attention and of every second matrix product, which selective checkpointing
        keeps."""
        return sum(value.size_bytes for value in (*self._products[::2], *self._attended))

    def frozen_bytes(self, bits: float) -> float:
        """Bytes of its weights if they are frozen.

        Args:
            bits: bits per number of a quantized matrix, or 0 if no matrix is quantized. Stacks of
                experts are not quantized.
        """
        wide = self.stacked_params if bits else self.params
        return (self.params - wide) * bits / 8 + wide * self.weight

    def keeps(self, value: Value) -> bool:
        """True if autograd keeps this tensor, or another view of its memory."""
        return value.storage in self._saved

    def save(self, *values: Value) -> None:
        """Let autograd keep these tensors."""
        for value in values:
            known = self._saved.get(value.storage)
            if known is None or known.size_bytes < value.size_bytes:
                self._saved[value.storage] = value

    def works_on(self, *values: Value, more_bytes: float = 0.0) -> None:
        """Count an operation with these tensors, and with some temporary memory."""
        alive = {value.storage: value for value in (*self.held, *values) if not self.keeps(value)}
        size = self.saved_bytes + sum(value.size_bytes for value in alive.values()) + more_bytes
        self.high_bytes = max(self.high_bytes, size)

    def made(self, value: Value) -> Value:
        """Count a new tensor."""
        self.widest_bytes = max(self.widest_bytes, value.size_bytes)
        return value

    def cast(self, value: Value, width: int | None) -> Value:
        """A copy in another type, or the value itself if it has that type."""
        return value if width in (None, value.width) else self.made(value.like(width=width))

    def linear(
        self, x: Value, units: int, name: str = "", *, bias: bool = False, rows: int | None = None
    ) -> Value:
        """A matrix, by its name in the model.

        Args:
            rows: tokens that use it, if a token uses only part of its weights. None: all.
        """
        if name in _COLUMNS:
            units //= self.tensor
        numbers = x.units * units
        own = numbers + (units if bias else 0)
        self.params += own
        self.active_params += own
        given = self.cast(x, self.autocast)
        self._multiply(x.tokens, x.units, units, given.width)
        if self.is_trained:
            self.save(given)
        if self.autocast is not None and self.autocast != self.weight:
            self.copy_bytes += own * self.autocast
        y = self.made(Value(x.tokens, units, given.width, x.needs_grad or self.is_trained))
        self._products.append(y)
        wide = numbers * (self.autocast or self.weight) if self.is_4bit else 0
        self.works_on(x, given, y, more_bytes=wide)
        adapter = self.adapter
        # all-linear leaves routers out, because transformers has its own class for them.
        is_target = adapter is not None and (adapter.targets is None or name in adapter.targets)
        if adapter is None or not is_target or name == "router":
            return y
        return self._adapted(x, y, adapter)

    def _adapted(self, x: Value, y: Value, adapter: Adapter) -> Value:
        # peft: y + B(A(dropout(x))) * scale, in the type that autocast chooses.
        numbers = adapter.r * (x.units + y.units)
        self.adapter_params += numbers
        self.short_params += adapter.r * y.units if adapter.r < SHORT else 0
        dropped = x
        if adapter.has_dropout:
            self.save(Value(x.tokens, x.units, 1))
            dropped = self.made(x.like())
        narrow = self.cast(dropped, self.autocast)
        inner = self.made(Value(x.tokens, adapter.r, narrow.width))
        self.save(narrow, inner)
        self._multiply(x.tokens, x.units, adapter.r, narrow.width)
        self._products.append(inner)
        self._multiply(x.tokens, adapter.r, y.units, narrow.width)
        self._products.append(y)
        self.works_on(x, y, dropped)
        if self.autocast is not None and self.autocast != adapter.width:
            self.copy_bytes += numbers * self.autocast
        return self.made(Value(y.tokens, y.units, y.width))

    def _multiply(self, tokens: int, inputs: int, outputs: int, width: int) -> None:
        # `_products` gets the result next.
        flops = 2 * tokens * inputs * outputs
        self.products += flops
        self.repeated_products += flops * (len(self._products) % 2)
        self.operand_bytes += (tokens * (inputs + outputs) + inputs * outputs) * width

    def rms_norm(self, x: Value, *, scales_wide: bool = False) -> Value:
        """RMSNorm as in transformers: in fp32, and scaled before (`scales_wide`: Gemma, OLMo 2) or
        after the cast back to the narrow type (Llama)."""
        self._norm_params(x.units)
        wide = self.cast(x, FP32)
        normed = self.made(wide.like())
        if x.needs_grad:
            self.save(wide, Value(x.tokens, 1, FP32))
        if scales_wide:
            if self.is_trained or x.needs_grad:
                self.save(*([normed] if self.is_trained else []))
            return self.cast(self.made(normed.like()), x.width)
        narrow = self.cast(normed, x.width)
        if self.is_trained:
            self.save(narrow)
        return self.made(narrow.like(width=max(self.weight, narrow.width)))

    def layer_norm(self, x: Value) -> Value:
        """torch's LayerNorm, with a scale and a shift."""
        self._norm_params(2 * x.units)
        wide = self.cast(x, FP32 if self.autocast is not None else None)
        self.save(wide, Value(x.tokens, 2, FP32 if wide.width == FP32 else wide.width))
        return self.made(wide.like())

    def centered_norm(self, x: Value) -> Value:
        """Cohere's LayerNorm: single operations in fp32, without a shift."""
        self._norm_params(x.units)
        wide = self.cast(x, FP32)
        parts = [self.made(wide.like()) for _ in range(3)]  # centered, centered again, normalized
        self.save(*parts[: 3 if self.is_trained else 2], Value(x.tokens, 1, FP32))
        return self.cast(self.made(wide.like()), x.width)

    def _norm_params(self, numbers: int) -> None:
        self.params += numbers
        self.active_params += numbers

    def activation(self, x: Value, kind: str) -> Value:
        """A nonlinearity, by its name in transformers."""
        if not x.needs_grad:
            return self.made(x.like())
        match kind:
            case "gelu_new":
                # As single operations: x/2, x^3, its tanh, and 1 + the tanh are kept.
                wide = self.cast(x, FP32 if self.autocast is not None and self.is_cuda else None)
                inner = [wide, wide.like(), wide.like(), x.like()]
                self.save(*map(self.made, inner))
                return self.made(wide.like())
            case "relu2":
                kept = self.made(x.like())
                self.save(kept)
                relu = FP32 if self.autocast is not None and self.is_cuda else x.width
                return self.made(x.like(width=relu))
            case _:
                self.save(x)
                return self.made(x.like())

    def multiply(self, a: Value, b: Value) -> Value:
        """Elementwise product of two tensors."""
        self.save(*([a] if b.needs_grad else []), *([b] if a.needs_grad else []))
        product = self.made(replace(a.like(width=max(a.width, b.width)), needs_grad=True))
        self.works_on(product)
        return product

    def add(self, a: Value, b: Value) -> Value:
        """A residual connection."""
        grad = a.needs_grad or b.needs_grad
        return self.made(Value(a.tokens, a.units, max(a.width, b.width), grad))

    def rotate(self, x: Value, width: int) -> Value:
        """Rotary positions, whose cosines have `width` bytes."""
        return self.made(x.like(width=max(x.width, width)))

    def attend(self, q: Value, k: Value, v: Value, *, heads: int, length: int) -> Value:
        """Fused causal attention, as a GPU's kernels keep it, without scores.

        Args:
            length: most tokens that a token attends to.

        Source: Dao 2023 (arXiv:2307.08691), algorithm 2: the output and one log-sum-exp per head.
        """
        if self.shares > 1 or self.swaps_heads:
            q, k, v = (self.cast(x, self.autocast) for x in (q, k, v))  # before they are sent
        if self.shares > 1:
            k, v = (self.made(replace(x.like(), tokens=x.tokens * self.shares)) for x in (k, v))
        elif self.swaps_heads:
            q, k, v = (self.made(x.like()) for x in (q, k, v))
        seen = [k, v]
        if self.repeats_keys and k.units != q.units:
            # A rank attends with two pieces of a sequence, and each has keys of its own.
            pieces = 2 if self.shares > 1 else 1
            seen = [self.made(x.like(units=q.units)) for x in (k, v) for _ in range(pieces)]
        q, *seen = (self.cast(x, self.autocast) for x in (q, *seen))
        out = self.made(q.like())
        self.save(q, *seen, out, Value(q.tokens, heads, FP32))
        self._attended.append(out)
        self.attention_flops += 2 * q.tokens * length * q.units
        # Exchanged for tokens, or joined from the attention of two pieces of a sequence.
        return self.made(out.like()) if self.swaps_heads or self.shares > 1 else out
