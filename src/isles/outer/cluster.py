"""The outer step of one cluster: its weights, in any engine, against its outer parameters.

A fragment is spread over the ranks by pieces. Rank 0 has the files of contributions, averages and
states, see `rank_files.py`.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
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
from isles.outer.parallel import in_order
from isles.outer.rank_files import RankFiles
from isles.outer.staging import Staging
from isles.outer.state_file import state_head

_BUCKET_NUMBERS = 1 << 26
"""Numbers of one exchange between ranks: 256 MiB in fp32."""


class Weights(Protocol):
    """The trained weights of one cluster as whole tensors; an engine of `strategies`
    implements it."""

    def trained_shapes(self) -> Mapping[str, torch.Size]: ...

    def whole_weights(self, names: Sequence[str]) -> Sequence[Tensor]: ...

    def set_whole_weight(self, name: str, value: Tensor) -> None: ...

    def add_to_weight(self, name: str, value: Tensor) -> None: ...

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
        # Where the outer arithmetic runs, and what copies the weights.
        is_gpu = world.device.type == "cuda" and not layout.codec.needs_cpu
        device = world.device if is_gpu else torch.device("cpu")
        self._staging, self._encoding = Staging(device), Staging(device)
        self._copying = self._staging if is_gpu else Staging(world.device)
        self._shares = []
        self._spans: list[list[tuple[int, int]]] = []
        """For each fragment and rank: the first number of the rank's share, and the end."""
        for fragment in layout.fragments:
            owners = fragment.owners(world.world_size)
            pieces = [*zip(fragment.pieces, owners, strict=True)]
            sizes = [sum(p.count for p, o in pieces if o == r) for r in range(world.world_size)]
            ends = [0, *itertools.accumulate(sizes)]
            self._spans.append([*itertools.pairwise(ends)])
            mine = [piece for piece, owner in pieces if owner == world.rank]
            self._shares.append(FragmentShare(mine, layout.codec, settings))
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
            self._read(number, share.outer_param)

    @torch.no_grad()
    def snapshot(self, fragment: int) -> None:
        """Copy a fragment's weights, from which `encode` makes the contribution.

        Call this between two inner steps. It replaces a contribution in progress.
        """
        self._read(fragment, self._shares[fragment].begin_snapshot())

    @torch.no_grad()
    def encode(self, fragment: int, path: Path) -> float:
        """Encode the snapshot of a fragment into a file on rank 0.

        Does not use the engine, and the GPU only in a separate stream, so inner steps may continue
        in another thread.

        Returns:
            The norm of the pseudo-gradient, before encoding and without the residual.

        Raises:
            TrainingError: an update is not finite, or the file cannot be written; on all ranks.
        """
        share = self._shares[fragment]
        squares: list[float] = []
        failure = None
        try:
            squares = share.encode(self._encoding)
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

        Does not use the engine, and the GPU only in a separate stream: under overlap and late,
        inner steps may continue in another thread. Nothing may be saved until `give`.
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
        squares = self._files.agree(share.square_sums(data, num_parts, self._staging))
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
            data, num_parts, mode, self._staging, alpha=alpha, scale=scale, is_warmup=is_warmup
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
        mine = [*in_order(_sha256, pieces, threads=torch.get_num_threads())]
        return hashlib.sha256(b"".join(itertools.chain(*self._files.agree(mine)))).hexdigest()

    def _read(self, fragment: int, goal: Tensor) -> None:
        # The weights of this rank's share.
        begin, end = self._spans[fragment][self._world.rank]
        with self._copying.open():
            for group in _groups(self._layout.fragments[fragment].by_name()):
                values = self._weights.whole_weights([name for name, _, _ in group])
                for value, (_, start, stop) in zip(values, group, strict=True):
                    first, last = max(begin, start), min(end, stop)
                    if first < last:
                        part = value.reshape(-1)[first - start : last - start]
                        self._copying.put(part, goal[first - begin : last - begin])

    def _write(self, fragment: int, flat: Tensor, *, adds: bool) -> None:
        # Set the weights to the values in the ranks' shares, or add these values.
        begin, _ = self._spans[fragment][self._world.rank]
        with self._copying.open():
            for group in _groups(self._layout.fragments[fragment].by_name()):
                (_, start, _), (_, _, stop) = group[0], group[-1]
                bucket = torch.empty(stop - start, device=self._world.device)
                for owner, span in enumerate(self._spans[fragment]):
                    first, last = max(span[0], start), min(span[1], stop)
                    if first >= last:
                        continue
                    part = bucket[first - start : last - start]
                    if owner == self._world.rank:
                        self._copying.bring(flat[first - begin : last - begin], part)
                    if self._world.world_size > 1:
                        dist.broadcast(part, src=owner)
                for name, first, last in group:
                    value = bucket[first - start : last - start].view(self._layout.shapes[name])
                    if adds:
                        self._weights.add_to_weight(name, value)
                    else:
                        self._weights.set_whole_weight(name, value)
        self._weights.weights_set()


def _sha256(piece: Tensor) -> bytes:
    # Hashed where it is: `tobytes` would copy the piece.
    return hashlib.sha256(piece.numpy().data.cast("B")).digest()


def _groups(
    positions: Sequence[tuple[str, int, int]],
) -> Iterator[list[tuple[str, int, int]]]:
    # Whole parameters that fit into a bucket together, or one larger parameter.
    group: list[tuple[str, int, int]] = []
    for position in positions:
        if group and position[2] - group[0][1] > _BUCKET_NUMBERS:
            yield group
            group = []
        group.append(position)
    yield group
