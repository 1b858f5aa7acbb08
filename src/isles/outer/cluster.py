"""The outer step of one cluster: its weights, whatever holds them, against its outer parameters."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from isles.dist.world import World
from isles.errors import TrainingError, UserError
from isles.outer.average import average_size
from isles.outer.codec import UnsoundUpdateError
from isles.outer.diloco import FragmentShare, Mode, OuterSettings, clip_scale, total_norm
from isles.outer.layout import Fragment, Layout
from isles.outer.rank_files import RankFiles


class Weights(Protocol):
    """The trained weights of one cluster as whole tensors; an engine of `strategies` is one."""

    def trained_shapes(self) -> Mapping[str, torch.Size]: ...

    def whole_weight(self, name: str) -> Tensor: ...

    def set_whole_weight(self, name: str, value: Tensor) -> None: ...

    def weights_set(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Applied:
    """An outer step of a fragment that has been made; the same on all ranks.

    Args:
        digest: of the fragment's outer parameters: equal on all clusters.
        norm: of the averaged pseudo-gradient, before it was clipped.
    """

    digest: str
    norm: float


_LONGEST_HEAD = 100 * 2**20
_FIX = "let the cluster take it from another one, or from the hub, once more"


class Cluster:
    """Outer parameters, momentum and errors, split over the ranks of a cluster. All must make one.

    No rank ever holds more than one whole parameter beside its own share of the outer state.

    Args:
        weights: the engine.
        layout: made of `weights.trained_shapes()`.
        settings: of the outer optimizer.
    """

    def __init__(
        self, weights: Weights, world: World, layout: Layout, settings: OuterSettings
    ) -> None:
        self._weights, self._world = weights, world
        self._layout, self._settings = layout, settings
        # Two: one fragment may be encoded in a thread while another one's average is taken in.
        self._files, self._encoding_files = RankFiles(world), RankFiles(world)
        self._shares = [
            FragmentShare(
                [fragment.pieces[i] for i in fragment.share(world.rank, world.world_size)],
                layout.codec,
                settings,
                is_pinned=world.device.type == "cuda",
            )
            for fragment in layout.fragments
        ]
        self._moves: dict[int, Tensor | None] = {}

    @torch.no_grad()
    def begin(self) -> None:
        """The weights as they are become the outer parameters. All ranks must call this.

        Clusters must begin with the same: compare `digest`. Under bf16 or fp16 DeepSpeed rounds the
        weights that it is given, so a cluster that differs takes the state of the first one.
        """
        for number, share in enumerate(self._shares):
            share.drop_snapshot()
            self._read(number, share.split(share.outer_param))

    @torch.no_grad()
    def snapshot(self, fragment: int) -> None:
        """Copy a fragment's weights, from which `encode` makes the contribution.

        All ranks must call this, between two inner steps. A contribution that was under way and
        that no average has answered is replaced.
        """
        self._read(fragment, self._shares[fragment].begin_snapshot())

    @torch.no_grad()
    def encode(self, fragment: int, path: Path) -> float:
        """Encode what `snapshot` has copied into a file on rank 0. All ranks must call this.

        It touches neither the engine nor the GPU: inner steps may go on meanwhile, in another
        thread.

        Returns:
            The norm of the pseudo-gradient, before it was encoded and without the residual.

        Raises:
            TrainingError: an update is not finite, or the file cannot be written; the same error on
                all ranks.
        """
        share = self._shares[fragment]
        squares: list[float] = []
        failure = None
        try:
            squares = share.encode()
        except UnsoundUpdateError as error:
            failure = TrainingError(
                f"what this cluster has learnt cannot be averaged: {error}",
                where=f"fragment {fragment}, rank {self._world.rank} on {self._world.host}",
                fix="the weights have become so in the inner steps: lower "
                "training.learning_rate, or go on from an earlier checkpoint",
            )
        norm = total_norm([*itertools.chain(*self._encoding_files.agree(squares, failure))])
        assert share.encoded is not None
        self._encoding_files.gather(b"", [share.encoded], path)
        return norm

    def contribution(self, fragment: int, path: Path) -> float:
        """`snapshot` and `encode` at once. All ranks must call this."""
        self.snapshot(fragment)
        return self.encode(fragment, path)

    def apply(
        self,
        fragment: int,
        average: Path,
        mode: Mode,
        *,
        alpha: float = 0.0,
        is_warmup: bool = False,
    ) -> Applied:
        """`advance` and `give` at once. All ranks must call this, between two inner steps."""
        applied = self.advance(fragment, average, mode, alpha=alpha, is_warmup=is_warmup)
        self.give(fragment)
        return applied

    @torch.no_grad()
    def advance(
        self,
        fragment: int,
        average: Path,
        mode: Mode,
        *,
        alpha: float = 0.0,
        is_warmup: bool = False,
    ) -> Applied:
        """Make the outer step with an average; the weights follow when they are given it.

        All ranks must call this. It touches neither the engine nor the GPU: under overlap and late
        inner steps may go on meanwhile, in another thread; until `give` nothing may be saved.
        on_time, idle: the weights become the outer parameters, the same bits on all clusters.
            overlap: they go the way from the contribution's weights to the outer parameters, or 1 -
            alpha of it, and keep what was learnt since. late: they go the way from the old outer
            parameters to the new one, and keep all that they have learnt since the former.

        Args:
            fragment: of the outer step.
            average: the file on rank 0.
            alpha: for overlap, 0 to 1.
            is_warmup: average only, with learning rate 1 and no momentum; the same on all clusters.

        Raises:
            TrainingError: the file cannot be used; nothing has changed. The same on all ranks.
        """
        assert fragment not in self._moves, "the last average was not given to the weights"
        share = self._shares[fragment]
        num_parts = self._num_parts(fragment, average)
        data = torch.empty(sum(share.average_sizes(num_parts)), dtype=torch.uint8)
        self._files.scatter(average, 0, [data])
        squares = self._files.agree(share.square_sums(data, num_parts))
        norm = total_norm([*itertools.chain(*squares)])
        if not math.isfinite(norm):
            raise TrainingError(
                f"the average of fragment {fragment} is not finite",
                where=str(average),
                fix="a cluster of another version of isles, or a broken one, has taken part: "
                "look at the hub's log",
            )
        scale = clip_scale(norm, self._settings.max_norm)
        self._moves[fragment] = share.step(
            data, num_parts, mode, alpha=alpha, scale=scale, is_warmup=is_warmup
        )
        return Applied(self.digest(fragment), norm)

    @torch.no_grad()
    def give(self, fragment: int) -> None:
        """Give the weights what follows from `advance`.

        All ranks must call this, between two inner steps.
        """
        move = self._moves.pop(fragment)
        outer_param = self._shares[fragment].outer_param
        self._write(fragment, outer_param if move is None else move, adds=move is not None)

    def drop(self, fragment: int) -> None:
        self._shares[fragment].drop_snapshot()

    @torch.no_grad()
    def go_back(self) -> None:
        """Weights become the outer parameters; what was learnt since is dropped. All call this."""
        for number, share in enumerate(self._shares):
            share.drop_snapshot()
            if share.error is not None:
                share.error.zero_()
            self._write(number, share.outer_param, adds=False)

    @property
    def pending(self) -> list[int]:
        """The fragments whose contribution no average has answered yet."""
        return [i for i, share in enumerate(self._shares) if share.snapshot is not None]

    def digest(self, fragment: int) -> str:
        """SHA-256 over the pieces of a fragment's outer parameters. All ranks must call this.

        Equal on all clusters that have applied the same averages.
        """
        hashes = self._files.agree(self._shares[fragment].hashes())
        return hashlib.sha256(b"".join(itertools.chain(*hashes))).hexdigest()

    def expect(self, pending: Sequence[int]) -> None:
        """Make room for the snapshots of a checkpoint that is about to be loaded.

        Args:
            pending: what `pending` was when it was saved.
        """
        for number, share in enumerate(self._shares):
            share.drop_snapshot()
            if number in pending:
                share.begin_snapshot()

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's tensors by name, for a checkpoint: as they are held, not copies.

        Each is held by one rank only; names and shapes do not depend on the number of ranks, nor
        on that of fragments. Filled in place, they are the state.
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
                    parts = zip(share.pieces, share.split(flat), strict=True)
                    state |= {f"outer.{field}.{piece.key}": part for piece, part in parts}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state_dict` gave, on any number of ranks; see `expect`.

        This rank needs its own pieces only.
        """
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])

    def export_state(self, fragment: int, path: Path, *, version: int) -> None:
        """Write a fragment's outer state as safetensors on rank 0. All ranks must call this.

        Args:
            version: outer steps that this cluster has applied.
        """
        share = self._shares[fragment]
        parts = (
            [share.outer_param] if share.momentum is None else [share.outer_param, share.momentum]
        )
        head = state_head(self._layout, fragment, has_momentum=len(parts) > 1, version=version)
        self._files.gather(head, parts, path)

    @torch.no_grad()
    def import_state(self, fragment: int, path: Path, *, keeps_steps: bool) -> int:
        """Take over a fragment that `export_state` wrote. All ranks must call this.

        Args:
            path: the file on rank 0.
            keeps_steps: whether the weights keep what they have learnt since the last outer step;
                otherwise they become the outer parameters, and nothing is owed.

        Returns:
            The outer steps that the other cluster had applied.

        Raises:
            TrainingError: the file cannot be used; nothing has changed. The same on all ranks.
        """
        share = self._shares[fragment]
        fresh = [torch.empty_like(share.outer_param)]
        if share.momentum is not None:
            fresh.append(torch.empty_like(share.momentum))
        found, failure = (0, 0), None
        if self._world.is_main:
            try:
                found = check_state(path, self._layout, fragment, has_momentum=len(fresh) > 1)
            except UserError as error:
                failure = error
        offset, version = self._files.agree(found, failure)[0]
        self._files.scatter(path, offset, fresh)
        move = share.adopt(fresh[0], fresh[1] if len(fresh) > 1 else None)
        if not keeps_steps and share.error is not None:
            share.error.zero_()
        self._write(fragment, move if keeps_steps else share.outer_param, adds=keeps_steps)
        return version

    def _num_parts(self, fragment: int, average: Path) -> int:
        counts, text = self._layout.piece_counts(fragment), self._layout.codec.text
        one = sum(average_size(text, count, 1) for count in counts)
        two = sum(average_size(text, count, 2) for count in counts)
        if one == two:
            return 1
        size, failure = 0, None
        if self._world.is_main:
            try:
                size = average.stat().st_size
                if size == 0 or size % one:
                    failure = TrainingError(
                        f"{average.name} has {size} bytes, which is not a multiple of {one}",
                        where=str(average),
                        fix="delete it: it is brought here once more",
                    )
            except OSError as error:
                failure = TrainingError(
                    f"{average.name}: {error.strerror}", where=str(average), fix="see the log"
                )
        return self._files.agree(size, failure)[0] // one

    def _read(self, fragment: int, goals: Sequence[Tensor]) -> None:
        pieces, mine = self._layout.fragments[fragment].pieces, self._mine(fragment)
        for name, places in self._layout.fragments[fragment].by_name():
            whole = self._weights.whole_weight(name).reshape(-1)
            for place in places:
                if place in mine:
                    piece = pieces[place]
                    part = whole[piece.start : piece.stop]
                    goals[place - mine.start].copy_(part, non_blocking=True)
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)

    def _write(self, fragment: int, flat: Tensor, *, adds: bool) -> None:
        own = self._layout.fragments[fragment]
        mine, owners = self._mine(fragment), self._owners(own)
        parts = self._shares[fragment].split(flat)
        for name, places in own.by_name():
            shape = self._layout.shapes[name]
            whole = torch.empty(math.prod(shape), device=self._world.device)
            for place in places:
                piece = own.pieces[place]
                part = whole[piece.start : piece.stop]
                if place in mine:
                    part.copy_(parts[place - mine.start])
                if self._world.world_size > 1:
                    dist.broadcast(part, src=owners[place])
            whole = whole.view(shape)
            if adds:
                whole.add_(self._weights.whole_weight(name))
            self._weights.set_whole_weight(name, whole)
        self._weights.weights_set()

    def _mine(self, fragment: int) -> range:
        return self._layout.fragments[fragment].share(self._world.rank, self._world.world_size)

    def _owners(self, fragment: Fragment) -> list[int]:
        size = self._world.world_size
        return [rank for rank in range(size) for _ in fragment.share(rank, size)]


# A fragment's outer state is a safetensors file that any cluster can read: tensors
# `outer_param.NAME` and `momentum.NAME`, whole, in fp32, in the order of the layout. It is written
# and read as a stream: no rank has it whole.


def state_head(layout: Layout, fragment: int, *, has_momentum: bool, version: int) -> bytes:
    """What such a file begins with; after it come the tensors in the order of the layout.

    Args:
        has_momentum: whether the outer optimizer has any.
        version: outer steps that have been applied.
    """
    entries = _tensors(layout, fragment, has_momentum)
    known = {"layout": layout.digest, "fragment": str(fragment), "version": str(version)}
    text = json.dumps({"__metadata__": known, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def check_state(
    path: Path, layout: Layout, fragment: int, *, has_momentum: bool
) -> tuple[int, int]:
    """Look whether a file holds a fragment of this layout.

    Returns:
        Where its tensors begin, and the outer steps that have been applied.

    Raises:
        TrainingError: it does not.
    """
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > _LONGEST_HEAD:
                raise ValueError(f"a head of {length} bytes")
            found = json.loads(stream.read(length))
        known: dict[str, Any] = found.pop("__metadata__")
        version = int(known["version"])
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise TrainingError(
            f"{path.name} is no outer state: {error}", where=str(path), fix=_FIX
        ) from error
    wanted = _tensors(layout, fragment, has_momentum)
    size = 8 + length + sum(4 * math.prod(entry["shape"]) for entry in wanted.values())
    what = None
    if known.get("layout") != layout.digest or known.get("fragment") != str(fragment):
        what = (
            f"is of layout {str(known.get('layout'))[:16]}..., fragment {known.get('fragment')}, "
            f"not of {layout.digest[:16]}..., fragment {fragment}"
        )
    elif found != wanted:
        what = "holds other tensors than this run has"
    elif path.stat().st_size != size:
        what = f"has {path.stat().st_size} bytes, not {size}"
    if what is not None:
        raise TrainingError(f"{path.name} {what}", where=str(path), fix=_FIX)
    return 8 + length, version


def _tensors(layout: Layout, fragment: int, has_momentum: bool) -> dict[str, dict[str, Any]]:
    entries: dict[str, dict[str, Any]] = {}
    end = 0
    for field in ("outer_param", "momentum") if has_momentum else ("outer_param",):
        for name in layout.fragments[fragment].names:
            shape = layout.shapes[name]
            start, end = end, end + 4 * math.prod(shape)
            entries[f"{field}.{name}"] = {
                "dtype": "F32",
                "shape": list(shape),
                "data_offsets": [start, end],
            }
    return entries
