"""The outer step of one cluster: its weights, in any engine, against its outer parameters.

A fragment is spread over the ranks by pieces. Rank 0 has the files of contributions, averages and
states, see `rank_files.py`.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from isles.dist.world import World
from isles.errors import TrainingError
from isles.outer.codec import UnsoundUpdateError
from isles.outer.diloco import FragmentShare, Mode, OuterSettings, clip_scale, total_norm
from isles.outer.layout import FragmentLayout
from isles.outer.rank_files import RankFiles
from isles.outer.state_file import state_head


class Weights(Protocol):
    """The trained weights of one cluster as whole tensors; an engine of `strategies`
    implements it."""

    def trained_shapes(self) -> Mapping[str, torch.Size]: ...

    def whole_weight(self, name: str) -> Tensor: ...

    def set_whole_weight(self, name: str, value: Tensor) -> None: ...

    def weights_set(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A completed outer step of a fragment; equal on all ranks."""

    digest: str
    """Digest of the fragment's outer parameters: equal on all clusters."""
    norm: float
    """Norm of the averaged pseudo-gradient, before clipping."""


class Cluster:
    """Outer parameters, momentum and errors, split over the ranks of a cluster. Collective
    constructor.

    No rank ever holds more than one whole parameter in addition to its own share of the outer
    state. All ranks must call every public method, except `drop`, `pending`, `expect` and
    `state_dict`.

    Args:
        layout: made from `weights.trained_shapes()`.
    """

    def __init__(
        self, weights: Weights, world: World, layout: FragmentLayout, settings: OuterSettings
    ) -> None:
        self._weights, self._world = weights, world
        self._layout, self._settings = layout, settings
        # Two: a thread may encode one fragment while another fragment's average is applied.
        self._files, self._encoding_files = RankFiles(world), RankFiles(world)
        self._owners = [fragment.owners(world.world_size) for fragment in layout.fragments]
        is_pinned = world.device.type == "cuda"
        self._shares = []
        for number, fragment in enumerate(layout.fragments):
            pieces = [fragment.pieces[place] for place in self._places(number)]
            self._shares.append(FragmentShare(pieces, layout.codec, settings, is_pinned=is_pinned))
        self._moves: dict[int, Tensor | None] = {}

    @torch.no_grad()
    def begin(self) -> None:
        """Make the current weights the outer parameters.

        Clusters must begin with the same weights: compare `digest`. Under bf16 or fp16 DeepSpeed
        rounds the weights that it gets, so a cluster that differs copies the state of the first
        one.
        """
        for number, share in enumerate(self._shares):
            share.drop_snapshot()
            self._read(number, share.split(share.outer_param))

    @torch.no_grad()
    def snapshot(self, fragment: int) -> None:
        """Copy a fragment's weights, from which `encode` makes the contribution.

        Call this between two inner steps. It replaces a contribution in progress.
        """
        self._read(fragment, self._shares[fragment].begin_snapshot())

    @torch.no_grad()
    def encode(self, fragment: int, path: Path) -> float:
        """Encode the snapshot of a fragment into a file on rank 0.

        Uses neither the engine nor the GPU, so inner steps may continue in another thread.

        Returns:
            The norm of the pseudo-gradient, before encoding and without the residual.

        Raises:
            TrainingError: an update is not finite, or the file cannot be written; on all ranks.
        """
        share = self._shares[fragment]
        squares: list[float] = []
        failure = None
        try:
            squares = share.encode()
        except UnsoundUpdateError as error:
            failure = TrainingError(
                f"cannot average the update of this cluster: {error}",
                where=f"fragment {fragment}, rank {self._world.rank} on {self._world.host}",
                fix="the weights became invalid during the inner steps: lower "
                "training.learning_rate, or resume from an earlier checkpoint",
            )
        norm = total_norm([*itertools.chain(*self._encoding_files.agree(squares, failure))])
        assert share.encoded is not None
        self._encoding_files.gather(b"", [share.encoded], path)
        return norm

    def apply(
        self,
        fragment: int,
        average: Path,
        num_parts: int,
        mode: Mode,
        *,
        alpha: float = 0.0,
        is_warmup: bool = False,
    ) -> CompletedStep:
        """`advance` and `give` together, between two inner steps."""
        applied = self.advance(fragment, average, num_parts, mode, alpha=alpha, is_warmup=is_warmup)
        self.give(fragment)
        return applied

    @torch.no_grad()
    def advance(
        self,
        fragment: int,
        average: Path,
        num_parts: int,
        mode: Mode,
        *,
        alpha: float = 0.0,
        is_warmup: bool = False,
    ) -> CompletedStep:
        """Make the outer step with an average; `give` then updates the weights.

        Uses neither the engine nor the GPU: under overlap and late, inner steps may continue in
        another
        thread. Nothing may be saved until `give`.
        on_time, idle: the weights become the outer parameters, bit for bit the same on all
        clusters.
            overlap: they move from the contribution's weights to the outer parameters, or 1 - alpha
                of
            this distance, and keep the progress since the contribution. late: they move by the
            difference
            between the old and the new outer parameters, and keep all progress since the old ones.

        Args:
            average: the file on rank 0.
            num_parts: number of contributions in it.
            is_warmup: average only, with learning rate 1 and no momentum; the same on all clusters.

        Raises:
            TrainingError: the file cannot be used; nothing has changed. On all ranks.
        """
        assert fragment not in self._moves, "the last average was not given to the weights"
        share = self._shares[fragment]
        data = torch.empty(sum(share.average_sizes(num_parts)), dtype=torch.uint8)
        self._files.scatter(average, b"", [data])
        squares = self._files.agree(share.square_sums(data, num_parts))
        norm = total_norm([*itertools.chain(*squares)])
        if not math.isfinite(norm):
            raise TrainingError(
                f"the average of fragment {fragment} is not finite",
                where=str(average),
                fix="a cluster with another version of isles, or a broken cluster, has taken part; "
                "see the hub's log",
            )
        scale = clip_scale(norm, self._settings.max_norm)
        self._moves[fragment] = share.step(
            data, num_parts, mode, alpha=alpha, scale=scale, is_warmup=is_warmup
        )
        return CompletedStep(self.digest(fragment), norm)

    @torch.no_grad()
    def give(self, fragment: int) -> None:
        """Update the weights after `advance`, between two inner steps."""
        move = self._moves.pop(fragment)
        outer_param = self._shares[fragment].outer_param
        self._write(fragment, outer_param if move is None else move, adds=move is not None)

    def drop(self, fragment: int) -> None:
        self._shares[fragment].drop_snapshot()

    @torch.no_grad()
    def go_back(self) -> None:
        """Reset the weights to the outer parameters, and drop the progress since then."""
        for number, share in enumerate(self._shares):
            share.drop_snapshot()
            if share.error is not None:
                share.error.zero_()
            self._write(number, share.outer_param, adds=False)

    @property
    def pending(self) -> list[int]:
        """The fragments with a contribution that no average has answered yet."""
        return [i for i, share in enumerate(self._shares) if share.snapshot is not None]

    def digest(self, fragment: int) -> str:
        """SHA-256 of a fragment's outer parameters; equal after the same averages."""
        share = self._shares[fragment]
        return self._digest(share.split(share.outer_param))

    def expect(self, pending: Sequence[int]) -> None:
        """Allocate memory for the `pending` fragments of a checkpoint that is about to be
        loaded."""
        for number, share in enumerate(self._shares):
            share.drop_snapshot()
            if number in pending:
                share.begin_snapshot()

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's tensors by name, for a checkpoint, without copying.

        Only one rank holds each tensor; names and shapes depend neither on the number of ranks nor
        on the number of fragments. To load a state, fill them in place; see `expect`.
        """
        assert not self._moves, "an average was not given to the weights"
        state: dict[str, Tensor] = {}
        for share in self._shares:
            fields = {
                "outer_param": share.outer_param,
                "momentum": share.momentum,
                "error": share.error,
                "snapshot": share.snapshot,
            }
            for field, flat in fields.items():
                if flat is not None:
                    for piece, part in zip(share.pieces, share.split(flat), strict=True):
                        state[f"outer.{field}.{piece.name}.{piece.start}"] = part
        return state

    def export_state(self, fragment: int, path: Path, *, version: int) -> None:
        """Write a fragment's state after `version` outer steps as safetensors on rank 0."""
        share = self._shares[fragment]
        parts = [share.outer_param, *([] if share.momentum is None else [share.momentum])]
        self._files.gather(self._head(fragment, version), parts, path)

    @torch.no_grad()
    def import_state(
        self, fragment: int, path: Path, *, version: int, outer_params: str, keeps_steps: bool
    ) -> None:
        """Load a fragment that `export_state` wrote on another cluster.

        Args:
            outer_params: digest of its outer parameters.
            keeps_steps: whether the weights keep their progress since the last outer step;
                otherwise
                they become the outer parameters, and the residual is zero.

        Raises:
            TrainingError: the file cannot be used; nothing has changed. On all ranks.
        """
        share = self._shares[fragment]
        fresh = [torch.empty_like(share.outer_param)]
        if share.momentum is not None:
            fresh.append(torch.empty_like(share.momentum))
        self._files.scatter(path, self._head(fragment, version), fresh)
        if self._digest(share.split(fresh[0])) != outer_params:
            raise TrainingError(
                f"the outer parameters in {path.name} differ from those of the cluster that sent "
                "it",
                where=str(path),
                fix="restart this cluster, so that it fetches the state again",
            )
        move = share.adopt(fresh[0], fresh[1] if len(fresh) > 1 else None)
        if not keeps_steps and share.error is not None:
            share.error.zero_()
        self._write(fragment, move if keeps_steps else share.outer_param, adds=keeps_steps)

    def _head(self, fragment: int, version: int) -> bytes:
        numbers, has_momentum = (
            sum(self._layout.piece_counts(fragment)),
            bool(self._settings.momentum),
        )
        return state_head(
            self._layout.digest, fragment, version, numbers, has_momentum=has_momentum
        )

    def _digest(self, pieces: Sequence[Tensor]) -> str:
        # Hashed where it is: `tobytes` would copy each piece.
        mine = [hashlib.sha256(piece.numpy().data.cast("B")).digest() for piece in pieces]
        return hashlib.sha256(b"".join(itertools.chain(*self._files.agree(mine)))).hexdigest()

    def _read(self, fragment: int, goals: Sequence[Tensor]) -> None:
        # The weights of this rank's pieces.
        pieces, mine = self._layout.fragments[fragment].pieces, self._places(fragment)
        for name, places in self._layout.fragments[fragment].by_name():
            whole = self._weights.whole_weight(name).reshape(-1)
            for place in places:
                if place in mine:
                    part = whole[pieces[place].start : pieces[place].stop]
                    goals[mine[place]].copy_(part, non_blocking=True)
        if self._world.device.type == "cuda":
            # The copies may still run, and the caller reads the goals on the CPU.
            torch.cuda.synchronize(self._world.device)

    def _write(self, fragment: int, flat: Tensor, *, adds: bool) -> None:
        # Set the weights to the values in the ranks' pieces, or add these values.
        own, owners = self._layout.fragments[fragment], self._owners[fragment]
        mine = self._places(fragment)
        parts = self._shares[fragment].split(flat)
        for name, places in own.by_name():
            shape = self._layout.shapes[name]
            whole = torch.empty(math.prod(shape), device=self._world.device)
            for place in places:
                part = whole[own.pieces[place].start : own.pieces[place].stop]
                if place in mine:
                    part.copy_(parts[mine[place]])
                if self._world.world_size > 1:
                    dist.broadcast(part, src=owners[place])
            whole = whole.view(shape)
            if adds:
                whole.add_(self._weights.whole_weight(name))
            self._weights.set_whole_weight(name, whole)
        self._weights.weights_set()

    def _places(self, fragment: int) -> dict[int, int]:
        # Position of this rank's pieces in the fragment, and in the rank's share.
        mine = [i for i, owner in enumerate(self._owners[fragment]) if owner == self._world.rank]
        return {place: index for index, place in enumerate(mine)}
