"""Routers of a mixture of experts: the loss that balances their load, and the load itself.

L: layers with experts. N: tokens of a micro-batch. E: experts. K: experts that a token uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isles.dist.batch import IGNORE_INDEX, Batch
from isles.dist.mesh import Mesh
from isles.dist.world import World
from isles.strategies.sequence import own_places

_PLACE = "isles_router"
"""Attribute of a router's module with its `_Place`."""

LOAD = "router.load"
"""Key of the load in a checkpoint."""


def places_read(batch: Batch, mesh: Mesh | None) -> Tensor:
    """1 at the places of this rank that the model reads, 0 at padding; [B, t] in fp32.

    A row ends with its last target, as in `Dataset.lengths`. Rows without targets only fill up a
    batch.

    Args:
        mesh: the grid; None: this rank has whole sequences.
    """
    known_BT = batch.targets_BT != IGNORE_INDEX
    read_BT = known_BT.flip(1).cumsum(1).flip(1) > 0
    if mesh is not None and mesh.layout.cp > 1:
        read_BT = read_BT[:, own_places(read_BT.shape[1], mesh, read_BT.device)]
    return read_BT.float()


class Routers:
    """The balancing loss of a model's routers, and the share of tokens that each expert gets.

    The loss of a layer is `E * sum(f * P)`. For each expert, f is the number of tokens that chose
    it, and P the sum of its probabilities, both divided by the tokens of the global batch. The
    model's loss gets the mean over layers, times the coefficient. f has no gradient, and the
    gradient uses the f of the previous step. The f of a step is known only after its last
    micro-batch, so no other choice gives equal gradients on any number of ranks and micro-batches
    without a second forward pass. The first step of a run has no balancing.

    The gradient enters where a router returns its weights, so it also reaches routers in the first
    stages of a pipeline.

    Args:
        routers: of the whole model; see `isles.models.routers`.
        coefficient: weight of the balancing loss. If 0, isles only counts the load.
        counts: whether this rank counts its tokens; one rank counts for all ranks with the same
            tokens.

    Source: Fedus et al. 2021 (arXiv:2101.03961), section 2.2, with K experts per token as in
    transformers; over the global batch: Qiu et al. 2025 (arXiv:2501.11873).
    """

    def __init__(
        self, routers: Mapping[str, int], coefficient: float, world: World, *, counts: bool
    ) -> None:
        self._numbers = {name: index for index, name in enumerate(routers)}
        self.coefficient = coefficient
        """Weight of the balancing loss."""
        self._world, self._counts = world, counts
        shape = (len(routers), max(routers.values()))
        self._load_LE = torch.zeros(shape, dtype=torch.float64, device=world.device)
        self._loss = torch.zeros((), dtype=torch.float64, device=world.device)
        self._steps = self._tokens = 0
        self._places: dict[int, _Place] = {}

    def attach(self, model: nn.Module) -> None:
        """Use the routers in a model, or in a stage of a pipeline."""
        modules = dict(model.named_modules())
        for name, index in self._numbers.items():
            if name in modules:
                totals = torch.zeros_like(self._load_LE[index], dtype=torch.float32)
                place = self._places[index] = _Place(totals.expand(2, -1).clone())
                setattr(modules[name], _PLACE, place)
                modules[name].register_forward_hook(_balance)

    def begin_step(self, input_tokens: int) -> None:
        """Begin a training step over this many tokens of all ranks, without padding."""
        self._tokens = input_tokens

    def begin(self, read_Bt: Tensor, scale: float | Tensor) -> None:
        """Set the tokens of the next forward pass with gradients.

        Args:
            read_Bt: see `places_read`.
            scale: factor of the loss in its backward pass, without the division by tokens.
        """
        if not self._tokens:
            return
        slopes_LE = None
        if self.coefficient:
            per_token = self.coefficient / (len(self._load_LE) * self._tokens)
            slopes_LE = (self._load_LE * (self._load_LE.shape[1] * per_token)).float() * scale
        for index, place in self._places.items():
            place.read_N = read_Bt.flatten()
            place.slope_E = None if slopes_LE is None else slopes_LE[index]

    @torch.no_grad()
    def end_step(self, poison: Tensor) -> None:
        """Sum the load of the step over all ranks. All ranks must call this.

        Args:
            poison: 1.0 if this step or an earlier step was not finite, so that it changed no
                weight. The load then also stays.
        """
        if not self._tokens:
            return
        totals_L2E = self._load_LE.new_zeros((len(self._load_LE), 2, self._load_LE.shape[1]))
        for index, place in self._places.items():
            if self._counts:
                totals_L2E[index] = place.totals_2E
            place.totals_2E.zero_()
            place.read_N = place.slope_E = None
        if self._world.world_size > 1:
            dist.all_reduce(totals_L2E)
        load_LE, probability_LE = (totals_L2E / self._tokens).unbind(1)
        self._load_LE = torch.where(poison > 0, self._load_LE, load_LE)
        losses_L = (load_LE * probability_LE).sum(1) * load_LE.shape[1]
        self._loss += self.coefficient * losses_L.mean()
        self._steps += 1
        self._tokens = 0

    def figures(self) -> dict[str, float]:
        """Metrics since the last call, the same on every rank. Waits for the GPU.

        Returns:
            `router_loss`: the mean balancing loss of a step, if it has a coefficient.
            `router_entropy`: of the load of the last step, as a share of the entropy of an even
            load, mean over layers. `router_busiest_share`: the largest share of a layer's tokens
            that one expert got, as a multiple of an even share.
        """
        found = {}
        if self.coefficient and self._steps:
            found["router_loss"] = float(self._loss) / self._steps
        self._loss.zero_()
        self._steps = 0
        load_LE = self._load_LE[self._load_LE.sum(1) > 0].cpu()
        if len(load_LE):
            share_LE = load_LE / load_LE.sum(1, keepdim=True)
            entropy_L = torch.special.entr(share_LE).sum(1)
            even = float(torch.tensor(load_LE.shape[1]).log())
            found["router_entropy"] = float(entropy_L.mean()) / max(even, 1e-9)
            found["router_busiest_share"] = float(share_LE.max()) * load_LE.shape[1]
        return found

    def state_dict(self) -> dict[str, Any]:
        """The load that the next step needs; the same on every rank."""
        return {LOAD: self._load_LE} if self.coefficient else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state from `state_dict`. All ranks must call this.

        Only rank 0 needs the state. A checkpoint of an older isles has none.
        """
        if not self.coefficient:
            return
        self._load_LE = state.get(LOAD, self._load_LE).to(self._load_LE)
        if self._world.world_size > 1:
            dist.broadcast(self._load_LE, src=0)


@dataclass(slots=True, eq=False)
class _Place:
    # A router's part of the work. Only tensors differ between routers, so that torch.compile makes
    # one graph for all blocks.

    totals_2E: Tensor
    """Tokens that chose each expert, and the sum of its probabilities."""

    read_N: Tensor | None = None
    slope_E: Tensor | None = None


def _balance(module: Any, _inputs: Any, output: tuple[Tensor, ...]) -> Any:
    # Forward hook of a router.
    place = getattr(module, _PLACE)
    if place.read_N is None or not torch.is_grad_enabled():
        return output
    scores_NE, weights_NK, chosen_NK, *rest = output
    given = (weights_NK, scores_NE, chosen_NK, place.read_N, place.slope_E, place.totals_2E)
    return scores_NE, _Balanced.apply(*given), chosen_NK, *rest  # type: ignore[no-untyped-call]


class _Balanced(torch.autograd.Function):
    # The weights of the chosen experts as they are, with the gradient of the balancing loss added
    # to the scores. All work is in the backward pass, which runs once for each token, while
    # gradient checkpointing runs the forward pass twice.

    @staticmethod
    def forward(
        ctx: Any,
        weights_NK: Tensor,
        scores_NE: Tensor,
        chosen_NK: Tensor,
        read_N: Tensor,
        slope_E: Tensor | None,
        totals_2E: Tensor,
    ) -> Tensor:
        # A recomputed block saves its tensors again. The places belong to the first pass, as a
        # pipeline has other micro-batches between the two.
        ctx.read_N, ctx.slope_E, ctx.totals_2E = read_N, slope_E, totals_2E
        ctx.save_for_backward(chosen_NK, *(() if slope_E is None else (scores_NE,)))
        return weights_NK.view_as(weights_NK)

    @staticmethod
    def backward(ctx: Any, grad_NK: Tensor) -> tuple[Tensor | None, ...]:
        chosen_NK, *scores = ctx.saved_tensors
        counts_E = torch.zeros_like(ctx.totals_2E[0]).scatter_add_(
            0, chosen_NK.flatten(), ctx.read_N[:, None].expand_as(chosen_NK).flatten()
        )
        if not scores:
            ctx.totals_2E[0].add_(counts_E)
            return grad_NK, None, None, None, None, None
        # Of a softmax: its gradient needs no second product over the experts.
        share_NE = torch.softmax(scores[0].float(), -1) * ctx.read_N[:, None]
        ctx.totals_2E.add_(torch.stack([counts_E, share_NE.sum(0)]))
        grad_NE = share_NE * (ctx.slope_E - (share_NE @ ctx.slope_E)[:, None])
        return grad_NK, grad_NE.to(scores[0].dtype), None, None, None, None
