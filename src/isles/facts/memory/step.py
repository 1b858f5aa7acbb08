"""Memory of a rank in one training step, by cause and by phase.

It is the only count, for `strategy: auto`, the search for a micro-batch, `isles check` and `isles
plan`. `count.py`, `forward.py` and `architecture.py` count the tensors of autograd. This file adds
the tensors of the engines.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from isles.facts.memory.architecture import Architecture
from isles.facts.memory.count import Count, chunk_tokens
from isles.facts.memory.forward import FP32
from isles.facts.memory.layers import layers_of_ranks
from isles.facts.memory.result import PhaseMemory, StepMemory
from isles.facts.memory.setting import Holding, MemorySettings, state_bytes


def memory_of(
    model: Architecture, setting: MemorySettings, holding: Holding, pp_rank: int | None = None
) -> StepMemory:
    """Memory of a rank in a step.

    Args:
        pp_rank: the rank of a pipeline. None: its fullest rank.
    """
    count = Count(model, setting, holding)
    layers = layers_of_ranks(model, setting.seen or setting.length, holding)
    chosen = range(holding.pipeline) if pp_rank is None else (pp_rank,)
    found = [_Stage(count, rank, layers[rank]).memory() for rank in chosen]
    return max(found, key=lambda memory: memory.peak.total)


def most_layers(
    model: Architecture, setting: MemorySettings, holding: Holding, limits: Sequence[float]
) -> list[int]:
    """The most layers that fit on each rank of a pipeline, with its embedding and head.

    Args:
        limits: bytes of each rank.
    """
    count = Count(model, setting, holding)

    def most(rank: int, limit: float) -> int:
        def exceeds(layers: int) -> bool:
            return _Stage(count, rank, layers).memory().peak.total > limit

        return bisect_left(range(1, model.layers + 1), True, key=exceeds)

    return [most(rank, limit) for rank, limit in enumerate(limits)]


class _Stage:
    # Tensors of a rank with stages of a pipeline, or with the whole model.

    def __init__(self, count: Count, pp_rank: int, layers: int) -> None:
        setting, holding = count.setting, count.holding
        self._count, self._setting, self._holding = count, setting, holding
        self._rank, self._layers = pp_rank, layers
        has_embedding = self._has_embedding = pp_rank == 0
        last = 0 if holding.returns else holding.pipeline - 1
        has_head = self._has_head = pp_rank == last
        ends = holding.tensor if holding.cuts_ends else 1
        self._block = float(count.block.params)
        """Numbers of a block on this rank, before data-parallel sharding."""
        self._ends = 0.0
        if has_embedding:
            self._ends += count.embedding.params / ends
        if has_head:
            is_apart = not has_embedding or holding.returns
            own = count.model.head_params if is_apart else count.head_params
            self._ends += own / ends + count.last.params
        whole = setting.is_whole
        self._block_trained = self._block if whole else float(count.block.adapter_params)
        self._ends_trained = self._ends if whole or setting.trains_ends else 0.0
        self._trained = self._layers * self._block_trained + self._ends_trained
        is_copy = count.model.is_tied and has_head and (not has_embedding or holding.returns)
        self._ends_learned = self._ends_trained
        """Numbers with optimizer state. The last stage has only a copy of a tied head."""
        if is_copy and self._ends_trained:
            self._ends_learned -= count.model.head_params / ends
        self._frozen_block = 0.0 if whole else count.block.frozen_bytes(setting.block_bits)
        """Bytes of a frozen block on this rank, before data-parallel sharding."""
        self._frozen_ends = self._ends - self._ends_trained

    def memory(self) -> StepMemory:
        return StepMemory(tuple(self._moments()), self._host(), self._saved())

    def _moments(self) -> Iterator[PhaseMemory]:
        setting, holding = self._setting, self._holding
        weights, state = self._weights(), self._state()
        width = holding.gradient_width or setting.trained_width
        gradients = self._gradients(width / holding.gradients)
        bucket = min(holding.bucket, self._trained)
        forward, backward, end = (bucket * width for width in holding.bucket_widths)
        head = self._head()
        made, ends = self._activations(), self._end_activations()
        gathered = self._gathered()
        # Gradients exist already if there were earlier micro-batches. If all forward passes run
        # first, the first backward pass makes them, and its activations are freed.
        before = gradients if holding.keeps_gradients or setting.accumulates else 0.0
        if self._losses > 1:
            before = max(0.0, gradients - made.kept / self._passes - head.earlier)
        yield PhaseMemory(
            "the loss, at the end of the forward pass",
            weights,
            state,
            before + forward,
            gathered.at_loss,
            made.kept + made.copies + ends,
            head.forward,
        )
        # The last block is first: its gradients exist together with all other blocks' activations.
        block_gradients = (self._ends_trained + self._block_trained) * width
        is_here = holding.offloaded_weights < 1
        came = before or block_gradients / holding.gradients * is_here
        is_whole = setting.checkpointing == "none"
        if not is_whole:
            yield PhaseMemory(
                "recomputing the last block",
                weights,
                state,
                came + backward,
                gathered.backward,
                made.kept
                + made.again
                + made.block_copies
                + self._count.embedding.saved_bytes * self._has_embedding,
                head.kept,
            )
        yield PhaseMemory(
            "the backward pass of the last block",
            weights,
            state,
            came + backward,
            gathered.backward,
            made.kept
            + made.recomputed
            + made.gradients
            + (made.copies if is_whole else made.block_copies)
            + self._count.embedding.saved_bytes * self._has_embedding,
            head.kept,
        )
        yield PhaseMemory(
            "the backward pass of the first block",
            weights,
            state,
            gradients + backward,
            gathered.first,
            made.first + made.gradients + self._count.embedding.saved_bytes * self._has_embedding,
        )
        if end:
            name = "the end of the backward pass, with the exchange of gradients"
            yield PhaseMemory(name, weights, state, gradients + end)
        yield PhaseMemory("the optimizer's step", weights, state, gradients)
        # Copied tensor by tensor to main memory. DeepSpeed's are gathered for it.
        model = self._count.model
        whole = max(self._count.embedding.params, model.widest_matrix, model.head_params)
        gathered_whole = whole * FP32 if holding.second_copy else 0.0
        kept = gradients if holding.keeps_gradients else 0.0
        yield PhaseMemory("copying a checkpoint", weights, state, kept, gathered_whole)

    def _host(self) -> float:
        # Bytes in main memory.
        setting, holding = self._setting, self._holding
        share = holding.offloaded_weights
        found = _offloaded(self._weights_held(), share)
        found += _offloaded(self._state_held(), holding.offloaded_state)
        # Gradients are where their weights are.
        width = setting.trained_width / holding.weights
        found += _offloaded(self._trained_parts(width), share)
        if setting.checkpointing == "offload":
            found += self._passes * self._layers * self._count.hidden.size_bytes / holding.stages
        return found

    def _saved(self) -> float:
        # Bytes of this rank's part of a checkpoint: trained weights and their state.
        setting, holding = self._setting, self._holding
        # The stages of a pipeline save each name of a tied head from their own copy.
        twice = 0 if holding.pipeline > 1 else self._count.saved_twice
        if holding.second_copy:
            # It includes the fp32 weights: collected in main memory, and copied there again.
            return 2 * (sum(self._state_held()) + twice * FP32 / holding.state)
        weights = (self._trained + twice) * setting.trained_width / holding.weights
        return (weights + sum(self._state_held())) / holding.savers

    def _weights(self) -> float:
        held = self._weights_held()
        return sum(held) - _offloaded(held, self._holding.offloaded_weights)

    def _weights_held(self) -> _Parts:
        setting, holding = self._setting, self._holding
        width: float = setting.trained_width
        if holding.second_copy and setting.is_mixed:
            width = 2
        blocks, ends = self._trained_parts(width / holding.weights)
        blocks += self._layers * self._frozen_block / holding.weights
        return blocks, ends + self._frozen_ends * setting.compute_width / holding.weights

    def _trained_parts(self, width: float) -> _Parts:
        return self._layers * self._block_trained * width, self._ends_trained * width

    def _gradients(self, width: float) -> float:
        parts = self._trained_parts(width)
        return sum(parts) - _offloaded(parts, self._holding.offloaded_weights)

    def _state(self) -> float:
        held = self._state_held()
        return sum(held) - _offloaded(held, self._holding.offloaded_state)

    def _state_held(self) -> _Parts:
        count, setting, holding = self._count, self._setting, self._holding
        blocks, short = self._layers * self._block_trained, self._layers * count.block.short_params
        width, optimizer = setting.trained_width, setting.optimizer
        of_blocks = state_bytes(blocks, 0.0, width, optimizer, short=short)
        of_ends = state_bytes(0.0, self._ends_learned, width, optimizer)
        if holding.second_copy:
            of_blocks += blocks * FP32
            of_ends += self._ends_trained * FP32
        return of_blocks / holding.state, of_ends / holding.state

    def _activations(self) -> _Activations:
        # Activations after the forward pass, and those that the backward pass of a block adds.
        count, setting, holding = self._count, self._setting, self._holding
        whole = count.block.saved_bytes
        stream = count.hidden.size_bytes
        again = whole - (stream if count.keeps_input else 0)
        copies = count.block.copy_bytes
        gradients: float = 2 * count.block.widest_bytes
        if setting.block_bits:
            # One matrix in 16 bits at a time.
            gradients += count.model.widest_matrix / self._holding.tensor * setting.compute_width
        high = count.block.high_bytes - (whole - again)
        kept_input = setting.checkpointing != "none" or count.keeps_input
        kept: float
        match setting.checkpointing:
            case "none":
                kept, recomputed, first = self._layers * whole, 0.0, whole
            case "full":
                kept, recomputed, first = self._layers * stream, again, stream + again
            case "offload":
                # The input of one block at a time is on the device.
                kept, recomputed, first = 0.0, stream + again, stream + again
                high += stream
            case "selective":
                products = count.block.product_bytes
                kept = self._layers * (stream + products)
                recomputed = max(0.0, again - products)
                first = stream + again
                high -= products
        if holding.returns:
            # If a backward pass has two parts, recomputation saves nothing.
            kept = self._layers * whole
        return _Activations(
            again=high,
            kept=self._passes * kept / holding.stages + self._traveling(kept_input),
            recomputed=recomputed,
            first=first,
            gradients=gradients,
            copies=self._layers * copies,
            block_copies=copies,
        )

    @property
    def _passes(self) -> int:
        return self._holding.in_flight[self._rank]

    @property
    def _losses(self) -> int:
        # Micro-batches after the forward pass of the last stage, and before its backward pass.
        return self._holding.in_flight[-1] if self._holding.stages == 1 else 1

    def _traveling(self, kept_input: bool) -> float:
        # Between stages: receive buffers, some of which blocks keep, and sent tensors.
        holding, stream = self._holding, self._count.hidden.size_bytes
        if holding.pipeline == 1:
            return 0.0
        received = 2 * holding.stages - 1 - holding.returns
        passes = self._passes / holding.stages
        first = passes if self._has_embedding else 0.0
        last = passes if self._has_head else 0.0
        found = received * holding.micro_batches + holding.stages * passes - last
        if kept_input:
            found -= holding.stages * passes - first
        return found * stream

    def _end_activations(self) -> float:
        found = 0.0
        if self._has_embedding:
            found += self._count.embedding.saved_bytes
        if self._has_head:
            found += self._losses * self._count.last.saved_bytes
        return found

    def _head(self) -> _Head:
        # The loss: whole logits, or chunks of them, and their gradients.
        if not self._has_head:
            return _Head(0.0, 0.0, 0.0)
        setting, model, count = self._setting, self._count.model, self._count
        tensor = self._holding.tensor if self._holding.cuts_ends else 1
        tokens, width = setting.rows * setting.length, setting.compute_width
        hidden = count.hidden.size_bytes
        if not (setting.is_chunked and model.has_plain_head):
            # The log-probabilities in fp32, and the gradients of these and of the logits.
            # Tensor parallel gathers them.
            logits = tokens * model.vocab
            # A pipeline keeps a stage's output, and the log-probabilities of earlier micro-batches.
            earlier = logits * (width + FP32)
            all_earlier = (self._losses - 1) * earlier
            given = logits * width if self._holding.pipeline > 1 else 0
            narrow = model.head_params / tensor * width if width != count.width else 0
            # In fp32, the tanh's result is freed before its gradient is complete.
            capped = logits * width if model.caps_logits and width != FP32 else 0
            made = logits * 3 * FP32 + narrow + capped + given + all_earlier
            return _Head(made, logits * width + capped + all_earlier, earlier)
        vocab, params = model.vocab // tensor, model.head_params // tensor
        chunk = min(tokens, chunk_tokens(vocab, setting.gpu_bytes)) * vocab
        is_trained = setting.is_whole or setting.trains_ends
        made = chunk * (width + FP32)  # the logits, and their log-probabilities in fp32
        gradient = narrow = 0
        if is_trained:
            gradient = params * FP32
        if width != FP32 and not setting.gpu_bytes:
            # A CPU copies the logits to fp32 first, and makes the gradient of the head in 16 bits.
            product = params * width if is_trained else 0
            made = max(made + chunk * FP32, chunk * width + product)
        if width != count.width:
            narrow = params * width
        if width != count.hidden.width:
            narrow += tokens * model.hidden * width
        return _Head(made + gradient + narrow + hidden, hidden, 0.0)

    def _gathered(self) -> _Gathered:
        # FSDP2 keeps the buffer of its last gathering. Until the end of the last micro-batch, it
        # also keeps the buffer of its last reduction, which is the embedding's.
        setting, holding, count = self._setting, self._holding, self._count
        if holding.gathers == "nothing":
            return _Gathered(0.0, 0.0, 0.0)
        if holding.gathers == "copies":
            copies = self._trained * setting.compute_width
            # The gradients of a group of weights are cast to fp32 together, when the activations of
            # its block are free.
            cast, narrow = setting.compute_width + FP32, self._block_trained * setting.compute_width
            block, end = max(narrow, self._block_trained * cast - count.block.saved_bytes), 0.0
            if self._has_embedding and self._ends_trained:
                end = count.embedding.params * cast
            # The gradient of a tied head waits for the embedding's, to be cast with it.
            is_shared = count.model.is_tied and self._has_head and holding.pipeline == 1
            tied = end * setting.compute_width / cast if is_shared else 0.0
            return _Gathered(copies, copies + block + tied, copies + max(block + tied, end))
        width = setting.compute_width if holding.casts_whole else setting.trained_width
        cut = holding.tensor if holding.cuts_ends else 1
        embedding = count.embedding.params / cut if self._has_embedding else 0.0
        head = count.model.head_params / cut if self._has_head else 0.0
        if holding.gathers == "modules":
            # The matrices that autograd keeps are whole, and freed with the block's activations.
            kept = self._layers * self._block if setting.checkpointing == "none" else 0.0
            one = max(embedding, head, self._block)
            return _Gathered((kept + head) * width, (kept + one) * width, one * width)
        buffer, block = head * width, self._block * width
        if setting.block_bits:
            # Gathered as held, and with the adapters, which weigh little next to 16-bit weights.
            block = self._frozen_block + self._block_trained * width
        if holding.gathers in ("all", "backward"):
            whole = self._layers * block + self._ends * width
            whole += buffer if holding.weights > 1 else 0.0
            # After a forward pass, only embedding and head are still gathered.
            at_loss = whole if holding.gathers == "all" else self._ends * width
            # The last gradients are copied into a buffer to be sent. The embedding's is the widest.
            end = embedding if self._ends_trained else 0.0
            sent = max(end, self._block_trained) * FP32 if holding.weights > 1 else 0.0
            return _Gathered(at_loss, whole, whole + sent)
        ends = max(embedding, head) * width
        reducing = 0.0
        if setting.accumulates and self._ends_trained:
            reducing = embedding * FP32
        # Weights of two blocks, gradients of one, and its fp32 buffer for the reduction.
        reduced = self._block_trained * (width + FP32)
        backward = 2 * block + reduced
        # A frozen embedding is not gathered for the backward pass, except with a tied head.
        first = backward + (ends if self._ends_trained or count.model.is_tied else 0.0)
        return _Gathered(ends + buffer + reducing, backward + ends, first)


_Parts = tuple[float, float]
"""The part of all blocks, and the part of embedding and head."""


def _offloaded(parts: _Parts, share: float) -> float:
    # What of it is in main memory.
    blocks, ends = parts
    return blocks * share + ends * (share == 1)


@dataclass(frozen=True, slots=True)
class _Activations:
    again: float
    kept: float
    recomputed: float
    first: float
    gradients: float
    copies: float
    block_copies: float


@dataclass(frozen=True, slots=True)
class _Gathered:
    at_loss: float
    backward: float
    first: float


@dataclass(frozen=True, slots=True)
class _Head:
    forward: float
    kept: float
    earlier: float
