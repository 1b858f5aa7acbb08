"""SGD on shards."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim.sgd import sgd

from isles.train.optimizer.shards import found_inf, local


class ShardedSGD(torch.optim.SGD):
    """torch's fused SGD on this rank's parts of sharded parameters (DTensors).

    torch's own step refuses DTensors, because its fused kernel does not support them.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient, unless `found_inf` is 1.0."""
        assert closure is None, "isles evaluates a loss once a step"
        for group in self.param_groups:
            # A rank has no rows of a matrix if there are more ranks than rows.
            stepped = [p for p in group["params"] if p.grad is not None and local(p).numel()]
            if not stepped:
                continue
            has_momentum = group["momentum"] != 0
            sgd(
                [local(p) for p in stepped],
                [local(p.grad) for p in stepped],
                [
                    local(self.state[p]["momentum_buffer"]) if has_momentum else None
                    for p in stepped
                ],
                fused=True,
                found_inf=found_inf(self),
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
