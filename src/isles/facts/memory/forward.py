"""A forward pass on paper: parameters, FLOPs, and the bytes that autograd keeps for the way back.

Nothing is computed. A `Forward` is told the operations of a model in their order, as transformers
writes them, and notes what PyTorch saves of each: two operations that save the same tensor save it
once. Sizes come out as `torch.autograd.graph.saved_tensors_hooks` counts them on the real model.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

_storages = itertools.count()

FP32 = 4

SHORT = 32
"""Numbers of a row below which moments stay in fp32 under AdamW in 8 bits."""

_COLUMNS = ("qkv_proj", "q_proj", "k_proj", "v_proj", "gate_up_proj", "gate_proj", "up_proj")
"""Matrices of which tensor parallel cuts what comes out; of all other ones in a block, what goes
in."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of activations.

    Args:
        tokens: rows of it.
        units: numbers a token.
        width: bytes a number.
        needs_grad: whether a gradient goes through it.
        storage: the memory that it lies in, which views share.
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
        """A new tensor of as many tokens."""
        return Value(
            self.tokens,
            self.units if units is None else units,
            self.width if width is None else width,
            self.needs_grad,
        )


@dataclass(frozen=True, slots=True)
class Adapter:
    """Low-rank matrices beside frozen ones.

    Args:
        r: rank.
        width: bytes of a number of theirs.
        targets: matrices that get one, by the ends of their names; None: all.
        has_dropout: keeps a mask of what goes in, and what is left of it.
    """

    r: int
    width: int
    targets: frozenset[str] | None
    has_dropout: bool = False


class Forward:
    """One micro-batch's forward pass through a part of a model.

    Args:
        weight: bytes of a number of the weights, as they lie in the modules while they compute.
        autocast: bytes of a number in matrix products under torch.autocast; None: as their input.
        is_trained: whether weights get gradients, beside those of an adapter.
        adapter: beside the matrices.
        is_cuda: autocast's rules of a GPU: powers and norms are computed in fp32.
        shares: ranks that gather the keys and values of all tokens; 1: there are none.
        swaps_heads: ranks exchange heads for tokens around attention.
        repeats_keys: each query head has keys and values of its own, as the kernel for documents of
            different lengths wants it.
        tensor: ranks over which the matrices of blocks are cut; everything is then one rank's.
        is_4bit: frozen matrices are bitsandbytes', made wide for each product.
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
        """Of an adapter, those in rows below `SHORT` numbers."""
        self.active_params = 0
        """Of its weights, those that a token meets."""
        self.copy_bytes = 0
        """Copies of weights in autocast's type, which are kept as activations are."""
        self.products = 0
        """FLOPs of matrix products with weights, forward, of all tokens."""
        self.attention_flops = 0
        """FLOPs of attention, forward, of all tokens; causal, so half of a full one's."""
        self.widest_bytes = 0
        """The largest tensor: a gradient of its size is there on the way back."""
        self.high_bytes: float = 0.0
        """The most that is there at once: what is kept so far, and what an operation works on."""
        self.held: tuple[Value, ...] = ()
        """Tensors that the model's code holds meanwhile, whether autograd keeps them or not."""
        self._saved: dict[int, Value] = {}
        self._products: dict[int, Value] = {}

    @property
    def saved_bytes(self) -> int:
        """What autograd keeps, without weights and copies of them."""
        return sum(value.size_bytes for value in self._saved.values())

    @property
    def product_bytes(self) -> int:
        """Results of matrix products and attention: what selective checkpointing keeps."""
        return sum(value.size_bytes for value in self._products.values())

    def keeps(self, value: Value) -> bool:
        """Whether autograd keeps this tensor, or another view of its memory."""
        return value.storage in self._saved

    def save(self, *values: Value) -> None:
        """Autograd keeps these."""
        for value in values:
            known = self._saved.get(value.storage)
            if known is None or known.size_bytes < value.size_bytes:
                self._saved[value.storage] = value

    def works_on(self, *values: Value, more_bytes: float = 0.0) -> None:
        """An operation has these tensors at once, and some memory that only it uses."""
        alive = {value.storage: value for value in (*self.held, *values) if not self.keeps(value)}
        size = self.saved_bytes + sum(value.size_bytes for value in alive.values()) + more_bytes
        self.high_bytes = max(self.high_bytes, size)

    def made(self, value: Value) -> Value:
        """A new tensor has been made."""
        self.widest_bytes = max(self.widest_bytes, value.size_bytes)
        return value

    def cast(self, value: Value, width: int | None) -> Value:
        """In another type, in new memory; the value itself where it has that type."""
        return value if width in (None, value.width) else self.made(value.like(width=width))

    def linear(
        self, x: Value, units: int, name: str = "", *, bias: bool = False, rows: int | None = None
    ) -> Value:
        """A matrix, by its name in the model.

        Args:
            rows: tokens that meet it, of as many as it has weights for; None: all.
        """
        if name in _COLUMNS:
            units //= self.tensor
        numbers = x.units * units
        own = numbers + (units if bias else 0)
        self.params += own
        self.active_params += own
        self.products += 2 * x.tokens * numbers
        given = self.cast(x, self.autocast)
        if self.is_trained:
            self.save(given)
        if self.autocast is not None and self.autocast != self.weight:
            self.copy_bytes += own * self.autocast
        y = self.made(Value(x.tokens, units, given.width, x.needs_grad or self.is_trained))
        self._products[y.storage] = y
        wide = numbers * (self.autocast or self.weight) if self.is_4bit else 0
        self.works_on(x, given, y, more_bytes=wide)
        adapter = self.adapter
        if adapter is None or not (adapter.targets is None or name in adapter.targets):
            return y
        return self._adapted(x, y, adapter)

    def _adapted(self, x: Value, y: Value, adapter: Adapter) -> Value:
        # peft: y + B(A(dropout(x in the adapter's type))) * scale; beside 4 bits a GPU's autocast
        # finds the type.
        numbers = adapter.r * (x.units + y.units)
        self.adapter_params += numbers
        self.short_params += adapter.r * y.units if adapter.r < SHORT else 0
        self.products += 2 * x.tokens * numbers
        is_cast = not (self.is_4bit and self.autocast and self.is_cuda)
        given = dropped = self.cast(x, adapter.width) if is_cast else x
        if adapter.has_dropout:
            self.save(Value(x.tokens, x.units, 1))
            dropped = self.made(given.like())
        narrow = self.cast(dropped, self.autocast)
        inner = self.made(Value(x.tokens, adapter.r, narrow.width))
        self.save(narrow, inner)
        self._products[inner.storage] = inner
        self.works_on(x, y, given, dropped)
        if self.autocast is not None and self.autocast != adapter.width:
            self.copy_bytes += numbers * self.autocast
        return self.made(Value(y.tokens, y.units, y.width))

    def rms_norm(self, x: Value, *, scales_wide: bool = False) -> Value:
        """RMSNorm as transformers writes it: in fp32, and scaled before (`scales_wide`: Gemma,
        OLMo 2) or after it is made narrow again (Llama)."""
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

    def centred_norm(self, x: Value) -> Value:
        """Cohere's LayerNorm: written out in fp32, without a shift."""
        self._norm_params(x.units)
        wide = self.cast(x, FP32)
        parts = [self.made(wide.like()) for _ in range(3)]  # centred, centred again, normed
        self.save(*parts[: 3 if self.is_trained else 2], Value(x.tokens, 1, FP32))
        return self.cast(self.made(wide.like()), x.width)

    def _norm_params(self, numbers: int) -> None:
        self.params += numbers
        self.active_params += numbers

    def activation(self, x: Value, kind: str) -> Value:
        """A nonlinearity, by transformers' name of it."""
        if not x.needs_grad:
            return self.made(x.like())
        match kind:
            case "gelu_new":
                # Written out: x/2, x^3, its tanh, and 1 + that tanh are kept.
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
        """Two tensors, number by number."""
        self.save(*([a] if b.needs_grad else []), *([b] if a.needs_grad else []))
        product = self.made(replace(a.like(width=max(a.width, b.width)), needs_grad=True))
        self.works_on(product)
        return product

    def add(self, a: Value, b: Value) -> Value:
        """A residual connection."""
        grad = a.needs_grad or b.needs_grad
        return self.made(Value(a.tokens, a.units, max(a.width, b.width), grad))

    def rotate(self, x: Value, width: int) -> Value:
        """Rotary positions, whose cosines have `width`."""
        return self.made(x.like(width=max(x.width, width)))

    def attend(self, q: Value, k: Value, v: Value, *, heads: int, length: int) -> Value:
        """Fused causal attention, as a GPU's kernels keep it: no scores.

        Args:
            length: tokens that a token sees at most.

        Source: Dao 2023 (arXiv:2307.08691), algorithm 2: the output and one log-sum-exp a head.
        """
        if self.repeats_keys:
            k, v = (self.made(x.like(units=q.units)) if x.units != q.units else x for x in (k, v))
        if self.shares > 1:
            k, v = (self.made(replace(x.like(), tokens=x.tokens * self.shares)) for x in (k, v))
            self.save(Value(length // self.shares, length, 1))  # which keys each token sees
        elif self.swaps_heads:
            q, k, v = (self.made(x.like()) for x in (q, k, v))
        q, k, v = (self.cast(x, self.autocast) for x in (q, k, v))
        out = self.made(q.like())
        self.save(q, k, v, out, Value(q.tokens, heads, FP32))
        self._products[out.storage] = out
        self.attention_flops += 2 * q.tokens * length * q.units
        return self.made(out.like()) if self.swaps_heads else out
