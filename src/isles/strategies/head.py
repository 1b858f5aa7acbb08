"""Loss fused with the head: the logits of all tokens never exist at the same time.

N: tokens with a target. H: hidden size. V: vocabulary. C: tokens per chunk.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from isles.dist.batch import IGNORE_INDEX
from isles.dist.world import gpu_bytes
from isles.facts.memory.step import chunk_tokens

log = logging.getLogger(__name__)

_SIGN = 1.5
"""Placeholder for logits, to test whether a model returns its head's output unchanged."""

_LIGER = (0, 8)
"""The oldest version of liger-kernel whose function accepts our arguments."""

_ROWS = ("input_ids", "position_ids")


class LossHead:
    """Runs a causal language model with its head replaced by the loss.

    The head's weight is used at the point of its forward pass, when FSDP2 and ZeRO have gathered
    it. A model that changes the logits after its head (Gemma's soft cap, a scale), or whose head is
    not a plain matrix (tensor parallel, an adapter), runs unchanged.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._head: Any = getattr(model, "get_output_embeddings", lambda: None)()
        disable: Any = torch.compiler.disable  # torch leaves it untyped
        self._is_last: bool | None = None
        self._fused = _find_liger()
        self._instead: Callable[[Tensor], Tensor] | None = None
        if self._head is not None and _is_plain(self._head):
            # Created once: torch.compile would compile again for every new function object.
            self._head.forward = disable(self._forward)
        else:
            self._is_last = False

    def loss_sum(
        self,
        forward: Callable[..., Any],
        inputs: Mapping[str, Any],
        targets_BT: Tensor,
        places_N: Tensor | None = None,
    ) -> Tensor:
        """The summed loss over target tokens: a scalar, with gradients if gradients are enabled.

        All ranks that share the model must call this.

        Args:
            forward: the model, or its wrapper.
            inputs: the model's inputs.
            targets_BT: shifted targets, IGNORE_INDEX at positions that are not trained.
            places_N: positions of the targets in the flattened rows; None: check every position.
        """
        if not self._can_chunk(inputs):
            return loss_of_logits(forward(**inputs, use_cache=False).logits, targets_BT)

        def compute(hidden_NH: Tensor, targets_N: Tensor) -> Tensor:
            if self._fused is not None and hidden_NH.is_cuda:
                return self._fused(hidden_NH, self._head, targets_N)
            return _fused_loss_sum(hidden_NH, self._head, targets_N, may_ignore=places_N is None)

        return self._run(forward, inputs, targets_BT, places_N, compute).view(())

    def token_losses(
        self, forward: Callable[..., Any], inputs: Mapping[str, Any], targets_BT: Tensor
    ) -> Tensor:
        """The loss of each token, [B, T] in fp32; 0 at positions that are not trained.

        All ranks that share the model must call this.
        """
        if not self._can_chunk(inputs):
            logits_BTV = forward(**inputs, use_cache=False).logits
            return loss_of_logits(logits_BTV, targets_BT, reduction="none").view(targets_BT.shape)

        def compute(hidden_NH: Tensor, targets_N: Tensor) -> Tensor:
            # Autograd keeps logits, log-probabilities and gradients of a chunk in fp32.
            vocab = self._head.weight.shape[0]
            chunks = zip(*_chunks(hidden_NH, targets_N, vocab, copies=2), strict=True)
            # Recomputed in the backward pass, when each token's factor is known.
            parts = [
                checkpoint(_chunk_losses, hidden, self._head, targets, use_reentrant=False)
                for hidden, targets in chunks
            ]
            return torch.cat(parts)

        return self._run(forward, inputs, targets_BT, None, compute).view(targets_BT.shape)

    def _run(
        self,
        forward: Callable[..., Any],
        inputs: Mapping[str, Any],
        targets_BT: Tensor,
        places_N: Tensor | None,
        compute: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        def instead(hidden_BTH: Tensor) -> Tensor:
            hidden, targets = hidden_BTH.flatten(0, -2), targets_BT.flatten()
            if places_N is not None:
                hidden, targets = hidden[places_N], targets[places_N]
            # Not a view: FSDP2 attaches its hook to it, which an in-place operation would lose.
            return compute(hidden, targets).view(1, 1, -1).clone()

        with self._replaced(instead):
            result: Tensor = forward(**inputs, use_cache=False).logits
        return result

    def _forward(self, hidden_BTH: Tensor) -> Tensor:
        if self._instead is not None:
            return self._instead(hidden_BTH)
        return F.linear(hidden_BTH, self._head.weight, self._head.bias)

    @contextlib.contextmanager
    def _replaced(self, instead: Callable[[Tensor], Tensor]) -> Iterator[None]:
        self._instead = instead
        try:
            yield
        finally:
            self._instead = None

    def _can_chunk(self, inputs: Mapping[str, Any]) -> bool:
        # Whether the head's output is the model's output; tested once with two tokens.
        if self._is_last is None:
            self._is_last = self._is_last_step(inputs)
            if not self._is_last:
                log.info("the loss is computed from whole logits: %s", type(self._model).__name__)
        return self._is_last

    @torch.no_grad()
    def _is_last_step(self, inputs: Mapping[str, Any]) -> bool:
        given: list[Tensor] = []

        def instead(hidden_BTH: Tensor) -> Tensor:
            given.append(hidden_BTH.new_full((1, 1, 1), _SIGN))
            return given[-1]

        tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
        few = {name: x[:1, :2] for name, x in tensors.items() if x.ndim == 2}
        was_training = self._model.training
        self._model.eval()
        try:
            with self._replaced(instead), torch.compiler.set_stance("force_eager"):
                logits = self._model(**few, use_cache=False).logits
        finally:
            self._model.train(was_training)
            torch.clear_autocast_cache()  # the weights in the cache were cast without gradients
        if len(given) != 1 or logits.shape != given[0].shape:
            return False
        # Else compare by value: DeepSpeed passes a copy.
        return logits is given[0] or bool((logits == _SIGN).all())


def loss_of_logits(logits: Tensor, targets: Tensor, reduction: str = "sum") -> Tensor:
    """Cross-entropy in fp32: summed over all tokens (`sum`), or per token of one row (`none`).

    Args:
        logits: with the vocabulary as last dimension.
        targets: shape of all other dimensions; IGNORE_INDEX at positions that are not trained.
        reduction: `sum` or `none`.
    """
    rows = logits.float().flatten(0, -2)
    return F.cross_entropy(rows, targets.flatten(), ignore_index=IGNORE_INDEX, reduction=reduction)


def _is_plain(head: Any) -> bool:
    # A linear layer with its own floating-point weights: not sharded into columns, not 4-bit.
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return False
    weight = head.weight
    return not (isinstance(weight, DTensor) and "tp" in (weight.device_mesh.mesh_dim_names or ()))


def _chunks(
    hidden_NH: Tensor, targets_N: Tensor, vocab_size: int, *, copies: int = 1
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    # `copies`: how many times the memory of the usual loss a logit takes.
    size = chunk_tokens(vocab_size, gpu_bytes(hidden_NH.device) // copies)
    return torch.split(hidden_NH, size), torch.split(targets_N, size)


def _chunk_losses(hidden_CH: Tensor, head: nn.Linear, targets_C: Tensor) -> Tensor:
    logits_CV = F.linear(hidden_CH, head.weight, head.bias)
    return loss_of_logits(logits_CV, targets_C, reduction="none")


def _fused_loss_sum(
    hidden_NH: Tensor, head: nn.Linear, targets_N: Tensor, *, may_ignore: bool
) -> Tensor:
    kind = hidden_NH.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    loss: Tensor = _FusedLoss.apply(
        hidden_NH, head.weight, head.bias, targets_N, dtype, torch.is_grad_enabled(), may_ignore
    )  # type: ignore[no-untyped-call]
    return loss


class _FusedLoss(torch.autograd.Function):
    """Head and cross-entropy, chunk by chunk, with the gradients computed in the forward pass.

    Nothing is computed twice: a chunk's logits are turned into their own gradient in place.

    Source: Hsu et al. 2024, Liger Kernel (arXiv:2410.10989), section 3.2.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        dtype: torch.dtype | None,
        with_gradients: bool,
        may_ignore: bool,
    ) -> Tensor:
        wants = [need and with_gradients for need in ctx.needs_input_grad[:3]]
        weight = weight_VH if dtype is None else weight_VH.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden_NH.device)
        grad_hidden = torch.empty_like(hidden_NH) if wants[0] else None
        # A sum over many chunks: bf16 would round it after each chunk.
        grad_weight = _zeros_fp32(weight_VH) if wants[1] else None
        grad_bias = _zeros_fp32(bias_V) if wants[2] and bias_V is not None else None
        start = 0
        narrow_NH = hidden_NH.to(weight.dtype)
        bias = None if bias_V is None else bias_V.to(weight.dtype)
        for hidden_CH, targets_C in zip(
            *_chunks(narrow_NH, targets_N, weight_VH.shape[0]), strict=True
        ):
            known_C = targets_C != IGNORE_INDEX
            places_C = targets_C.clamp(min=0)
            logits_CV = F.linear(hidden_CH, weight, bias)
            if any(wants):
                losses_C = _turn_into_gradient(logits_CV, places_C)
            else:
                losses_C = loss_of_logits(logits_CV, places_C, reduction="none")
            total += torch.where(known_C, losses_C, 0).sum()
            if any(wants):
                grad_CV = logits_CV.mul_(known_C.unsqueeze(1)) if may_ignore else logits_CV
                if grad_hidden is not None:
                    grad_hidden[start : start + len(targets_C)] = grad_CV @ weight
                if grad_weight is not None:
                    _add_product(grad_weight, grad_CV, hidden_CH)
                if grad_bias is not None:
                    grad_bias += grad_CV.sum(0, dtype=torch.float32)
            start += len(targets_C)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = weight_VH.dtype, None if bias_V is None else bias_V.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        # In place: a second copy of the head's gradient would set the peak memory of a step.
        # With a dimension: a scalar factor would be rounded to bf16, and all gradients with it.
        return (
            None if grad_hidden is None else grad_hidden.mul_(grad.view(1)),
            None if grad_weight is None else grad_weight.mul_(grad).to(weight_dtype),
            None if grad_bias is None else grad_bias.mul_(grad).to(bias_dtype),
            None,
            None,
            None,
            None,
        )


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


class _GradientPass:
    """Overwrites logits with the gradient of their summed loss, and returns the losses."""

    def __init__(self) -> None:
        self._compiled: Callable[[Tensor, Tensor], Tensor] | None = None
        self._fails = False

    def __call__(self, logits_CV: Tensor, targets_C: Tensor) -> Tensor:
        """The loss of each token, in fp32.

        Args:
            logits_CV: in any floating-point type; computed with in fp32.
            targets_C: indices within the vocabulary.
        """
        if not logits_CV.is_cuda or self._fails:
            return _turn_plainly(logits_CV, targets_C)
        try:
            # Compiled, a logit is read twice and written once. Single operations do more.
            self._compiled = self._compiled or torch.compile(_turn_in_one_pass)
            return self._compiled(logits_CV, targets_C)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of the compiler, its cache or Triton: of any type
            self._fails = True
            why = next(iter(str(error).splitlines()), type(error).__name__)
            log.warning("the loss is not compiled, because torch.compile failed: %s", why)
            return _turn_plainly(logits_CV, targets_C)


def _turn_in_one_pass(logits_CV: Tensor, targets_C: Tensor) -> Tensor:
    # `_turn_plainly`, in operations that the compiler merges.
    exact_CV = logits_CV.float()
    log_sum_C1 = exact_CV.logsumexp(1, keepdim=True)
    is_target_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == targets_C[:, None]
    losses_C = (log_sum_C1 - exact_CV.gather(1, targets_C[:, None])).squeeze(1)
    logits_CV.copy_((exact_CV - log_sum_C1).exp() - is_target_CV.float())
    return losses_C


def _turn_plainly(logits_CV: Tensor, targets_C: Tensor) -> Tensor:
    log_probs_CV = torch.log_softmax(logits_CV, 1, dtype=torch.float32)
    chosen_C1 = log_probs_CV.gather(1, targets_C[:, None])
    torch.exp(log_probs_CV, out=logits_CV)  # rounds once, without another matrix in fp32
    logits_CV.scatter_(1, targets_C[:, None], chosen_C1.expm1().to(logits_CV.dtype))
    return -chosen_C1.squeeze(1)


_turn_into_gradient = _GradientPass()


@functools.cache
def _find_liger() -> Callable[[Tensor, nn.Linear, Tensor], Tensor] | None:
    # Liger's Triton kernel for the same loss, if it is installed and there is a GPU.
    if not torch.cuda.is_available() or importlib.util.find_spec("liger_kernel") is None:
        return None
    found = version("liger-kernel")
    if tuple(int(part) for part in found.split(".")[:2]) < _LIGER:
        log.warning(
            "liger-kernel %s is not used because isles needs %d.%d; run pip install -U "
            "liger-kernel",
            found,
            *_LIGER,
        )
        return None
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    log.info("the loss is computed by liger_kernel")

    def loss_sum(hidden_NH: Tensor, head: nn.Linear, targets_N: Tensor) -> Tensor:
        loss: Tensor = liger_fused_linear_cross_entropy(
            hidden_NH,
            head.weight,
            targets_N,
            bias=head.bias,
            ignore_index=IGNORE_INDEX,
            reduction="sum",
            accum_dtype=torch.float32,
        )
        return loss

    return loss_sum
