"""A model whose head returns the loss: the logits of all tokens never exist at the same time.

B: rows. T: tokens per row. N: tokens with a target. H: hidden size. V: vocabulary.
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
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate

from isles.dist.batch import IGNORE_INDEX
from isles.strategies.fused_loss import (
    Columns,
    HeadWeights,
    autocast_dtype,
    fused_loss_sum,
    fused_token_losses,
    loss_of_logits,
    narrow,
)

log = logging.getLogger(__name__)

_SIGN = 1.5
"""Placeholder for logits, to test whether a model returns its head's output unchanged."""

_LIGER = (0, 8)
"""The oldest version of liger-kernel whose function accepts our arguments."""

_TP = "tp"
"""The axis of the mesh over which tensor parallel shards."""


class LossHead:
    """Runs a causal language model with its head replaced by the loss.

    The head's weight is used at the point of its forward pass, when FSDP2 and ZeRO have gathered
    it. If tensor parallel shards the head, each rank computes with its own rows. A model that
    changes the logits after its head (Gemma's soft cap, a scale), or whose head is not a plain
    matrix (an adapter), runs unchanged.
    """

    def __init__(self, model: nn.Module, call: Callable[..., Any] | None = None) -> None:
        self._model = model
        self._call = call or model
        self._head: Any = getattr(model, "get_output_embeddings", lambda: None)()
        disable: Any = torch.compiler.disable  # torch leaves it untyped
        self._is_last: bool | None = None
        self._fused = _find_liger()
        self._instead: Callable[[Tensor], Tensor] | None = None
        self._columns: Columns | None = None
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

        def compute(hidden_NH: Tensor, head: HeadWeights, targets_N: Tensor) -> Tensor:
            if self._fused is not None and hidden_NH.is_cuda and head.columns is None:
                return self._fused(hidden_NH, head, targets_N)
            return fused_loss_sum(hidden_NH, head, targets_N, may_ignore=places_N is None)

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

        return self._run(forward, inputs, targets_BT, None, fused_token_losses).view(
            targets_BT.shape
        )

    def _run(
        self,
        forward: Callable[..., Any],
        inputs: Mapping[str, Any],
        targets_BT: Tensor,
        places_N: Tensor | None,
        compute: Callable[[Tensor, HeadWeights, Tensor], Tensor],
    ) -> Tensor:
        def instead(hidden_BTH: Tensor) -> Tensor:
            given, head = hidden_BTH, HeadWeights(self._head.weight, self._head.bias)
            if isinstance(head.weight_VH, DTensor):
                hidden_BTH, head = self._own_columns(hidden_BTH, head)
            hidden, targets = hidden_BTH.flatten(0, -2), targets_BT.flatten()
            if places_N is not None:
                hidden, targets = hidden[places_N], targets[places_N]
            # Not a view: FSDP2 attaches its hook to it, which an in-place operation would lose.
            loss = compute(hidden, head, targets).view(1, 1, -1).clone()
            if isinstance(given, DTensor):  # as the hooks of tensor parallel expect
                return DTensor.from_local(loss, given.device_mesh, [Replicate()], run_check=False)
            return loss

        with self._replaced(instead):
            result: Tensor = forward(**inputs, use_cache=False).logits
        return result

    def _own_columns(self, hidden_BTH: Any, head: Any) -> tuple[Tensor, HeadWeights]:
        # What this rank computes with, of a head that tensor parallel has sharded.
        weight_VH, bias_V = head.weight_VH.to_local(), head.bias_V
        if bias_V is not None:
            bias_V = bias_V.to_local()
        if self._columns is None:
            group = head.weight_VH.device_mesh.get_group(_TP)
            self._columns = Columns.of(weight_VH, group)
        # The gradient is a part because each rank has it from its own columns only.
        hidden_BTH = hidden_BTH.to_local(grad_placements=[Partial()])
        return hidden_BTH, HeadWeights(weight_VH, bias_V, self._columns)

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
        # Token ids and positions, or hidden states; masks have four dimensions.
        few = {name: x[:1, :2] for name, x in tensors.items() if x.ndim in (2, 3)}
        was_training = self._model.training
        self._model.eval()
        try:
            with self._replaced(instead), torch.compiler.set_stance("force_eager"):
                logits = self._call(**few, use_cache=False).logits
        finally:
            self._model.train(was_training)
            torch.clear_autocast_cache()  # the weights in the cache were cast without gradients
            for module in self._model.modules():
                # Without a backward pass FSDP2 keeps the head gathered, next to the embedding.
                if isinstance(module, FSDPModule):
                    module.reshard()
        if len(given) != 1 or logits.shape != given[0].shape:
            return False
        # Else compare by value: DeepSpeed passes a copy.
        return logits is given[0] or bool((logits == _SIGN).all())


def _is_plain(head: Any) -> bool:
    # A linear layer with its own floating-point weights, which tensor parallel may have sharded by
    # rows: not 4-bit, not adapted.
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        return False
    weight = head.weight
    if not (isinstance(weight, DTensor) and _TP in (weight.device_mesh.mesh_dim_names or ())):
        return True
    names = weight.device_mesh.mesh_dim_names or ()
    return weight.placements[names.index(_TP)].is_shard(0)


@functools.cache
def _find_liger() -> Callable[[Tensor, HeadWeights, Tensor], Tensor] | None:
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

    return functools.partial(_liger_loss_sum, liger_fused_linear_cross_entropy)


def _liger_loss_sum(
    liger: Callable[..., Tensor], hidden_NH: Tensor, head: HeadWeights, targets_N: Tensor
) -> Tensor:
    # Liger transposes the weight for each chunk, and autocast would cast each of these views.
    hidden_NH, weight_VH, bias_V = narrow(autocast_dtype(hidden_NH), hidden_NH, head)
    return liger(
        hidden_NH,
        weight_VH,
        targets_N,
        bias=bias_V,
        ignore_index=IGNORE_INDEX,
        reduction="sum",
        accum_dtype=torch.float32,
    )
