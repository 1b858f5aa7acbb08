"""Head and cross-entropy, chunk by chunk: the logits of all tokens never exist at the same time.

The logits of a chunk are turned into their own gradient in place. If ranks share the vocabulary,
each rank computes the logits of its columns, and one small collective per chunk gives the sums
over all columns.

N: tokens with a target. H: hidden size. V: vocabulary, or this rank's part of it. C: tokens per
chunk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from isles.dist.batch import IGNORE_INDEX
from isles.dist.world import gpu_bytes
from isles.facts.memory.setting import chunk_tokens

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Columns:
    """This rank's part of a vocabulary that several ranks share in equal parts.

    Args:
        group: the ranks.
        first: index of this rank's first column.
        gpu_bytes: memory of the smallest GPU of these ranks, so that all make the same chunks.
    """

    group: dist.ProcessGroup
    first: int
    gpu_bytes: int

    @classmethod
    def of(cls, weight_VH: Tensor, group: dist.ProcessGroup) -> Columns:
        """The columns of a rank that holds these rows of the head. All its ranks must call this."""
        least = torch.tensor(gpu_bytes(weight_VH.device), device=weight_VH.device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
        return cls(group, dist.get_rank(group) * weight_VH.shape[0], int(least))


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The head as this rank computes with it.

    Args:
        weight_VH, bias_V: the matrix, and its bias if it has one.
        columns: set if ranks share the vocabulary. The matrix is then this rank's rows, and the
            gradient of the hidden states is a part that the caller must sum over the ranks.
    """

    weight_VH: Tensor
    bias_V: Tensor | None = None
    columns: Columns | None = None


def loss_of_logits(logits: Tensor, targets: Tensor, reduction: str = "sum") -> Tensor:
    """Cross-entropy in fp32: summed over all tokens (`sum`), or per token of one row (`none`).

    Args:
        logits: with the vocabulary as last dimension.
        targets: shape of all other dimensions; IGNORE_INDEX at positions that are not trained.
        reduction: `sum` or `none`.
    """
    rows = logits.float().flatten(0, -2)
    return F.cross_entropy(rows, targets.flatten(), ignore_index=IGNORE_INDEX, reduction=reduction)


def fused_loss_sum(
    hidden_NH: Tensor, head: HeadWeights, targets_N: Tensor, *, may_ignore: bool
) -> Tensor:
    """The summed loss: an fp32 scalar with gradients. All ranks that share the head must call this.

    Args:
        may_ignore: whether targets may be IGNORE_INDEX.
    """
    loss: Tensor = _LossSum.apply(
        hidden_NH,
        head.weight_VH,
        head.bias_V,
        targets_N,
        head.columns,
        autocast_dtype(hidden_NH),
        torch.is_grad_enabled(),
        may_ignore,
    )  # type: ignore[no-untyped-call]
    return loss


def fused_token_losses(hidden_NH: Tensor, head: HeadWeights, targets_N: Tensor) -> Tensor:
    """The loss of each token, [N] in fp32 with gradients; 0 if the target is IGNORE_INDEX.

    All ranks that share the head must call this.
    """
    losses: Tensor = _TokenLosses.apply(
        hidden_NH,
        head.weight_VH,
        head.bias_V,
        targets_N,
        head.columns,
        autocast_dtype(hidden_NH),
    )  # type: ignore[no-untyped-call]
    return losses


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The type that autocast computes products in, if it is enabled for the device of `x`."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def narrow(
    dtype: torch.dtype | None, hidden_NH: Tensor, head: HeadWeights
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states, weight and bias in the type of the products, cast once for all chunks.

    Args:
        dtype: None: the type of the weight.
    """
    weight = head.weight_VH if dtype is None else head.weight_VH.to(dtype)
    bias = None if head.bias_V is None else head.bias_V.to(weight.dtype)
    return hidden_NH.to(weight.dtype), weight, bias


class _LossSum(torch.autograd.Function):
    """The summed loss, with the gradients computed in the forward pass: nothing is computed twice.

    Source: Hsu et al. 2024, Liger Kernel (arXiv:2410.10989), section 3.2.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        columns: Columns | None,
        dtype: torch.dtype | None,
        with_gradients: bool,
        may_ignore: bool,
    ) -> Tensor:
        wants = [need and with_gradients for need in ctx.needs_input_grad[:3]]
        gradients = _Gradients(hidden_NH, weight_VH, bias_V, wants)
        total = torch.zeros((), dtype=torch.float32, device=hidden_NH.device)
        narrow_NH, weight, bias = narrow(dtype, hidden_NH, HeadWeights(weight_VH, bias_V))
        for part in _chunks(len(targets_N), weight, columns):
            hidden_CH, targets_C = narrow_NH[part], targets_N[part]
            known_C = targets_C != IGNORE_INDEX
            places_C = targets_C.clamp(min=0)
            logits_CV = F.linear(hidden_CH, weight, bias)
            if any(wants):
                losses_C = _turn_into_gradient(logits_CV, places_C, columns)
                grad_CV = logits_CV.mul_(known_C.unsqueeze(1)) if may_ignore else logits_CV
                gradients.add(part, grad_CV, hidden_CH, weight)
            elif columns is None:
                losses_C = loss_of_logits(logits_CV, places_C, reduction="none")
            else:
                log_sum_C, chosen_C = _all_sums(logits_CV, places_C, columns)
                losses_C = log_sum_C - chosen_C
            total += torch.where(known_C, losses_C, 0).sum()
        ctx.save_for_backward(gradients.hidden_NH, gradients.weight_VH, gradients.bias_V)
        ctx.dtypes = weight_VH.dtype, None if bias_V is None else bias_V.dtype
        ctx.is_scaled = False
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        # A pipeline that splits its backward pass calls this once for the hidden states and once
        # for the weights, with the same factor.
        for each in () if ctx.is_scaled else (grad_hidden, grad_weight, grad_bias):
            if each is not None:
                # In place: a second copy of the head's gradient would set the peak memory of a
                # step. By `data`: autograd would refuse the second call.
                # With a dimension: a scalar factor would be rounded to bf16, and all gradients too.
                each.data.mul_(grad.view(1))
        ctx.is_scaled = True
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight_dtype),
            None if grad_bias is None else grad_bias.to(bias_dtype),
            *[None] * 5,
        )


class _TokenLosses(torch.autograd.Function):
    """The loss of each token; the backward pass, which knows each token's factor, computes the
    logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        columns: Columns | None,
        dtype: torch.dtype | None,
    ) -> Tensor:
        narrow_NH, weight, bias = narrow(dtype, hidden_NH, HeadWeights(weight_VH, bias_V))
        places_N = targets_N.clamp(min=0)
        log_sum_N = torch.empty(len(targets_N), dtype=torch.float32, device=hidden_NH.device)
        losses_N = torch.empty_like(log_sum_N)
        for part in _chunks(len(targets_N), weight, columns):
            logits_CV = F.linear(narrow_NH[part], weight, bias)
            log_sum_N[part], chosen_C = _all_sums(logits_CV, places_N[part], columns)
            losses_N[part] = log_sum_N[part] - chosen_C
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, log_sum_N)
        ctx.columns, ctx.dtype = columns, dtype
        return torch.where(targets_N != IGNORE_INDEX, losses_N, 0)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, log_sum_N = ctx.saved_tensors
        columns = ctx.columns
        gradients = _Gradients(hidden_NH, weight_VH, bias_V, ctx.needs_input_grad[:3])
        narrow_NH, weight, bias = narrow(ctx.dtype, hidden_NH, HeadWeights(weight_VH, bias_V))
        factors_N = torch.where(targets_N != IGNORE_INDEX, grad_N, 0)
        places_N = targets_N.clamp(min=0) - (columns.first if columns else 0)
        for part in _chunks(len(targets_N), weight, columns):
            logits_CV = F.linear(narrow_NH[part], weight, bias)
            _write_gradient(logits_CV, log_sum_N[part], places_N[part])
            grad_CV = logits_CV.mul_(factors_N[part].unsqueeze(1))
            gradients.add(part, grad_CV, narrow_NH[part], weight)
        grad_weight, grad_bias = gradients.weight_VH, gradients.bias_V
        return (
            gradients.hidden_NH,
            None if grad_weight is None else grad_weight.to(weight_VH.dtype),
            None if grad_bias is None or bias_V is None else grad_bias.to(bias_V.dtype),
            *[None] * 3,
        )


def _chunks(tokens: int, weight_VH: Tensor, columns: Columns | None) -> Iterator[slice]:
    # At least one chunk, so that gradients exist without tokens too.
    memory = gpu_bytes(weight_VH.device) if columns is None else columns.gpu_bytes
    size = chunk_tokens(weight_VH.shape[0], memory)
    for start in range(0, max(1, tokens), size):
        yield slice(start, start + size)


class _Gradients:
    """Gradients of the hidden states, the head's weight and its bias; None if not wanted."""

    def __init__(
        self, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, wants: Sequence[bool]
    ) -> None:
        self.hidden_NH = torch.empty_like(hidden_NH) if wants[0] else None
        # A sum over many chunks: bf16 would round it after each chunk.
        self.weight_VH = _zeros_fp32(weight_VH) if wants[1] else None
        self.bias_V = _zeros_fp32(bias_V) if wants[2] and bias_V is not None else None

    def add(self, part: slice, grad_CV: Tensor, hidden_CH: Tensor, weight_VH: Tensor) -> None:
        """Add the gradients of a chunk."""
        if self.hidden_NH is not None:
            self.hidden_NH[part] = grad_CV @ weight_VH
        if self.weight_VH is not None:
            _add_product(self.weight_VH, grad_CV, hidden_CH)
        if self.bias_V is not None:
            self.bias_V += grad_CV.sum(0, dtype=torch.float32)


def _zeros_fp32(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=torch.float32, device=like.device)


def _add_product(total_VH: Tensor, grad_CV: Tensor, hidden_CH: Tensor) -> None:
    # Adds grad_CV.t() @ hidden_CH, summed in fp32.
    if grad_CV.dtype == total_VH.dtype:
        total_VH.addmm_(grad_CV.t(), hidden_CH)
    elif total_VH.is_cuda:
        # A product in 16 bits and a sum would write and read a second matrix as large as the head.
        torch.addmm(total_VH, grad_CV.t(), hidden_CH, out_dtype=total_VH.dtype, out=total_VH)
    elif grad_CV.dtype == torch.float16:
        # These gradients have no loss scale yet. A sum over tokens could overflow fp16 at any
        # scale, so a mean is used.
        tokens = len(hidden_CH)
        total_VH.add_(grad_CV.t() @ (hidden_CH / tokens), alpha=tokens)
    else:
        total_VH.add_(grad_CV.t() @ hidden_CH)


def _turn_into_gradient(logits_CV: Tensor, targets_C: Tensor, columns: Columns | None) -> Tensor:
    # Overwrites logits with the gradient of their summed loss; the losses in fp32.
    if columns is None:
        losses_C: Tensor = _turn(logits_CV, targets_C)
        return losses_C
    log_sum_C, chosen_C = _all_sums(logits_CV, targets_C, columns)
    _write_gradient(logits_CV, log_sum_C, targets_C - columns.first)
    return log_sum_C - chosen_C


def _all_sums(
    logits_CV: Tensor, targets_C: Tensor, columns: Columns | None
) -> tuple[Tensor, Tensor]:
    # Over the whole vocabulary: the logarithm of the sum of exponentials, and the target's logit.
    if columns is None:
        own: tuple[Tensor, Tensor] = _sums(logits_CV, targets_C)
        return own
    own_2C = torch.stack(_sums(logits_CV, targets_C - columns.first))
    # Every rank adds the same numbers in the same order, so that all have the same loss.
    ranks = dist.get_world_size(columns.group)
    sums = own_2C.new_empty((2 * ranks, own_2C.shape[1]))
    dist.all_gather_into_tensor(sums, own_2C, group=columns.group)
    return sums[0::2].logsumexp(0), sums[1::2].sum(0)


def _sums_of_columns(logits_CV: Tensor, targets_C: Tensor) -> tuple[Tensor, Tensor]:
    # Targets may be outside of the columns; their logit is then 0.
    exact_CV, last = logits_CV.float(), logits_CV.shape[1] - 1
    chosen_C = exact_CV.gather(1, targets_C.clamp(0, last)[:, None]).squeeze(1)
    is_here_C = (targets_C >= 0) & (targets_C <= last)
    return exact_CV.logsumexp(1), torch.where(is_here_C, chosen_C, 0)


def _write_in_one_pass(logits_CV: Tensor, log_sum_C: Tensor, targets_C: Tensor) -> None:
    is_target_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == targets_C[:, None]
    probabilities_CV = (logits_CV.float() - log_sum_C[:, None]).exp()
    logits_CV.copy_(probabilities_CV - is_target_CV.float())


def _write_plainly(logits_CV: Tensor, log_sum_C: Tensor, targets_C: Tensor) -> None:
    _write_probabilities(logits_CV, logits_CV - log_sum_C[:, None], targets_C)


def _turn_in_one_pass(logits_CV: Tensor, targets_C: Tensor) -> Tensor:
    # `_turn_plainly`, in operations that the compiler merges.
    log_sum_C, chosen_C = _sums_of_columns(logits_CV, targets_C)
    _write_in_one_pass(logits_CV, log_sum_C, targets_C)
    return log_sum_C - chosen_C


def _turn_plainly(logits_CV: Tensor, targets_C: Tensor) -> Tensor:
    log_probs_CV = torch.log_softmax(logits_CV, 1, dtype=torch.float32)
    losses_C = -log_probs_CV.gather(1, targets_C[:, None]).squeeze(1)
    _write_probabilities(logits_CV, log_probs_CV, targets_C)
    return losses_C


def _write_probabilities(out_CV: Tensor, log_probs_CV: Tensor, targets_C: Tensor) -> None:
    # Probabilities, less 1 at the target if it is one of the columns.
    last = out_CV.shape[1] - 1
    places_C1 = targets_C.clamp(0, last)[:, None]
    chosen_C1 = log_probs_CV.gather(1, places_C1)
    is_here_C1 = ((targets_C >= 0) & (targets_C <= last))[:, None]
    torch.exp(log_probs_CV, out=out_CV)  # rounds once, without another matrix in fp32
    gradient_C1 = torch.where(is_here_C1, chosen_C1.expm1(), chosen_C1.exp())
    out_CV.scatter_(1, places_C1, gradient_C1.to(out_CV.dtype))


class _Compiled:
    """A function that is compiled on a GPU, and has a plain form for CPUs and failed compilers."""

    def __init__(self, function: Callable[..., Any], plain: Callable[..., Any]) -> None:
        self._function, self._plain = function, plain
        self._compiled: Callable[..., Any] | None = None
        self._fails = False

    def __call__(self, logits_CV: Tensor, *args: Tensor) -> Any:
        if not logits_CV.is_cuda or self._fails:
            return self._plain(logits_CV, *args)
        try:
            self._compiled = self._compiled or torch.compile(self._function)
            return self._compiled(logits_CV, *args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the compiler, its cache or Triton: of any type
            self._fails = True
            why = next(iter(str(error).splitlines()), type(error).__name__)
            log.warning("the loss is not compiled, because torch.compile failed: %s", why)
            return self._plain(logits_CV, *args)


# Compiled, a logit is read twice and written once. Single operations do more.
_turn = _Compiled(_turn_in_one_pass, _turn_plainly)
_sums = _Compiled(_sums_of_columns, _sums_of_columns)
_write_gradient = _Compiled(_write_in_one_pass, _write_plainly)
