"""Pipeline parallel: stages on ranks in a row are the same model, and learn the same."""

from __future__ import annotations

import copy
import functools
import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, LlamaForCausalLM

from isles.config.load import load_run_file
from isles.config.sections.strategy import DDPStrategyConfig
from isles.dist import batch as batch_module
from isles.dist.batch import Batch, cu_seqlens, isolation_inputs
from isles.dist.world import join_world
from isles.errors import CommunicationError, UserError
from isles.facts.memory.architecture import Architecture
from isles.facts.memory.layers import assign_layers, work
from isles.facts.models import PIPELINE, WINDOWED
from isles.models.attention import use_maskless_attention
from isles.run.env import RankEnv
from isles.strategies import fused_loss
from isles.strategies.fused_loss import loss_of_logits
from isles.strategies.pipeline.stages import Inputs, MicroBatches, check_model, cut_stage
from isles.strategies.pipeline.waiting import Waiting
from isles.strategies.sequence import whole
from tests.dist.test_same_mathematics import (
    TOLERANCE,
    check_that_it_has_learned,
    figures_of,
    largest_difference,
    model_with,
    weights_of,
)
from tests.each import each
from tests.engines import engine_of, fake_run
from tests.ranks import refusal, run_ranks, train
from tests.small_models import small_config, small_model


@pytest.fixture
def five_layers(run_file: Path) -> Path:
    """The run file with a model whose layers no number of stages divides."""
    model_with(run_file, num_hidden_layers=5)
    return run_file


# Ranks, strategy, rows of a micro-batch. Of 12 rows, 2 make 6 batches on two ranks and 3 on four;
# 12 make one, fewer than the ranks in a row; 4 make three, and with interleaving an odd number.
# UNEVEN: of two pipelines one takes nine rows, five micro-batches of which the last is smaller.
UNEVEN = 'balance={"0": 3, "1": 1, "2": 3, "3": 1}'
CASES = (
    (2, "kind: ddp, pp_size: 2", 2),
    (2, "kind: fsdp, sharding_strategy: SHARD_GRAD_OP, pp_size: 2", 12),
    (4, "kind: fsdp, pp_size: 2", 2),
    (4, "kind: fsdp, cp_size: 2, pp_size: 2", 3),
    (4, "kind: ddp, tp_size: 2, pp_size: 2", 6),
    (2, "kind: ddp, pp_size: 2, pp_schedule: gpipe", 12),
    (2, "kind: ddp, pp_size: 2, pp_schedule: interleaved-1f1b", 4),
    (4, "kind: fsdp, pp_size: 2, pp_schedule: interleaved-1f1b", 2),
    (2, "kind: ddp, pp_size: 2, pp_schedule: zbv", 2),
    (4, "kind: fsdp, pp_size: 2, pp_schedule: zbv", 2),
    (4, "kind: fsdp, pp_size: 2, pp_schedule: zbv", 2, UNEVEN),
    (4, "kind: fsdp, pp_size: 2, pp_schedule: interleaved-1f1b", 2, UNEVEN),
    (4, "kind: ddp, tp_size: 2, pp_size: 2, pp_schedule: zbv", 3),
    (4, "kind: fsdp, pp_size: 4", 2),
)
SHORT = CASES[6:7]
TIED = (
    (2, "kind: ddp, pp_size: 2", 2),
    (4, "kind: fsdp, pp_size: 2", 2),
    (3, "kind: ddp, pp_size: 3", 2, 'balance={"0": 1, "1": 2, "2": 1}'),
    (2, "kind: fsdp, pp_size: 2, pp_schedule: zbv", 2),
    (2, "kind: ddp, pp_size: 2, pp_schedule: interleaved-1f1b", 4),
)


@pytest.mark.brief("short")
@pytest.mark.parametrize("cases", [SHORT, CASES], ids=["short", "others"])
def test_a_pipeline_learns_what_one_process_learns(five_layers, cases):
    reference = train(five_layers, 1, "training.micro_batch_size=12")
    check_that_it_has_learned(five_layers, reference)
    for ranks, strategy, micro, *balance in cases:
        size = f"training.micro_batch_size={micro}"
        run_dir = train(five_layers, ranks, f"strategy={{{strategy}}}", size, *balance, resume="no")
        assert largest_difference(reference, run_dir) < TOLERANCE, (ranks, strategy, micro)
        evaluations = figures_of(reference, kind="eval")
        assert figures_of(run_dir, kind="eval") == pytest.approx(evaluations, rel=1e-4)


@pytest.mark.brief("short")
@pytest.mark.parametrize("cases", [TIED[:1], TIED[1:]], ids=["short", "others"])
def test_a_tied_head_is_one_weight_on_two_stages(five_layers, cases):
    """Its gradients of both stages add up, and its copies stay equal, bit for bit."""
    model_with(five_layers, tie_word_embeddings=True)
    reference = train(five_layers, 1, "training.micro_batch_size=12")
    names = ("model.model.embed_tokens.weight", "model.lm_head.weight")
    for ranks, strategy, micro, *balance in cases:
        size = f"training.micro_batch_size={micro}"
        run_dir = train(five_layers, ranks, f"strategy={{{strategy}}}", size, *balance, resume="no")
        assert largest_difference(reference, run_dir) < TOLERANCE, (ranks, strategy)
        state = weights_of(run_dir)
        assert state.keys() == weights_of(reference).keys()
        assert torch.equal(state[names[0]], state[names[1]])
        assert figures_of(run_dir, "grad_norm") == pytest.approx(
            figures_of(reference, "grad_norm"), rel=1e-3
        )


def test_a_rank_waits_outside_its_stages(five_layers):
    clock = iter([0.0, 1.0, 3.0, 5.0, 6.0, 10.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: next(clock))
        waiting = Waiting(torch.device("cpu"))
        assert waiting.seconds() is None
        with waiting.step():  # from 0 to 10
            with waiting.computing():  # from 1 to 3
                pass
            with waiting.computing():  # from 5 to 6
                pass
        assert waiting.seconds() == 7.0
    options = (
        "strategy={kind: ddp, pp_size: 2}",
        "training.max_steps=3",
        "training.logging_steps=1",
        "training.warmup_steps=1",
    )
    run_dir = train(five_layers, 2, *options)
    waits, steps = figures_of(run_dir, "communication_s"), figures_of(run_dir, "step_time_s")
    assert all(0 < wait < step for wait, step in zip(waits, steps, strict=True))


def _ticks(env: RankEnv, model: Path, pp_size: int) -> float | None:
    """The communication of a step by a clock that ticks once at each look."""
    world = join_world(env, device="cpu", timeout_s=60)
    strategy = DDPStrategyConfig(pp_size=pp_size)
    engine: Any = engine_of(fake_run(model, precision="32-true"), strategy, world)
    engine._pipeline.waiting._mark = functools.partial(next, itertools.count())
    tokens = torch.ones(2, 8, dtype=torch.int64)
    engine.forward_backward(Batch(tokens, tokens, (0, 1)), loss_divisor=16, is_last=True)
    engine.optimizer_step(lr=0.0, max_norm=None)
    found: float | None = engine.communication_s()
    return found


def test_messages_after_the_passes_are_communication(tiny_model: Path) -> None:
    """Passes are two intervals of five ticks. Then come the gradients, and a tied head's weight."""
    assert run_ranks(_ticks, 2, tiny_model, 2) == [3.0 + 1.0] * 2
    config = AutoConfig.from_pretrained(tiny_model, tie_word_embeddings=True)
    config.save_pretrained(tiny_model)
    assert run_ranks(_ticks, 2, tiny_model, 2) == [3.0 + 1.0 + 1.0] * 2


def _alone(env: RankEnv, model: Path) -> str:
    """Rank 0 takes a step; rank 1 does not come, and lives."""
    world = join_world(env, device="cpu", timeout_s=3, work_timeout_s=60)
    engine = engine_of(fake_run(model, precision="32-true"), DDPStrategyConfig(pp_size=2), world)
    said = torch.zeros(1)
    if env.rank == 1:
        dist.broadcast(said, src=0, group=world.work)
        return ""
    tokens = torch.ones(2, 8, dtype=torch.int64)
    try:
        engine.forward_backward(Batch(tokens, tokens, (0, 1)), loss_divisor=16, is_last=True)
    except CommunicationError as error:
        dist.broadcast(said, src=0, group=world.work)
        return str(error)
    return "no error"


@pytest.mark.long
def test_a_stage_that_does_not_come_is_waited_for_no_longer_than_said(tiny_model: Path) -> None:
    said = run_ranks(_alone, 2, tiny_model)[0]
    for words in ("rank 0 on", "stage 0 (0 to 1) of the pipeline", "ranks 0, 1", "fix:"):
        assert words in said


def test_a_model_that_cannot_be_cut_is_refused_at_the_start(run_file: Path) -> None:
    model_with(run_file, model_type="granite", architectures=["GraniteForCausalLM"])
    error = refusal(run_file, 2, "strategy={kind: ddp, pp_size: 2}")
    assert "granite" in error["what"]
    assert "strategy.pp_size" in error["where"] + error["what"]


def test_a_model_with_code_of_its_own_is_not_cut_into_stages() -> None:
    class Own(LlamaForCausalLM):
        pass

    for model in (Own(small_config("llama")), small_model("gpt2")):
        with pytest.raises(UserError) as caught:
            check_model(model)
        assert "cannot be split into stages" in caught.value.what
        assert "pp_size" in caught.value.fix


@each(
    ("training.torch_compile=true", "torch_compile does not work with"),
    ("training.gradient_checkpointing=selective", "zbv needs recomputed activations twice"),
    ("training.gradient_checkpointing=offload", "zbv needs recomputed activations twice"),
)
def test_what_a_pipeline_cannot_do_is_said_before_the_start(override, what, *, run_file):
    with pytest.raises(UserError, match=what):
        load_run_file(run_file, ("strategy={kind: ddp, pp_size: 2, pp_schedule: zbv}", override))


@each(*itertools.product(sorted(PIPELINE), (torch.float32, torch.bfloat16)))
def test_stages_one_after_the_other_are_the_whole_model(kind: str, dtype: torch.dtype) -> None:
    """Every kind of model that is let through, bit for bit, trained weights and all."""
    model = small_model(kind, num_hidden_layers=4).eval().to(dtype)
    check_model(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    tokens = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    x, names = tokens, set[str]()
    for index, layers in enumerate(assign_layers([1] * 4, 3)):
        stage = cut_stage(model, layers, is_first=index == 0, is_last=index == 2, dtype=dtype)
        given, x = x, stage(x)
        own = {name for name, _ in stage.named_parameters()}
        assert not own & names, "no weight is on two stages"
        names |= own
    assert names == {name for name, _ in model.named_parameters()}
    assert torch.equal(x, model(input_ids=tokens).logits)
    loss = stage(given, targets=tokens)
    assert loss.item() == pytest.approx(loss_of_logits(x, tokens).item(), rel=1e-5)
    each = loss_of_logits(x, tokens, reduction="none").view(tokens.shape)
    assert torch.allclose(stage(given, targets=tokens, of_tokens=True), each, rtol=1e-4, atol=1e-4)


@each(*sorted(PIPELINE & WINDOWED))
def test_each_layer_keeps_its_sliding_window_on_any_stage(kind: str) -> None:
    """Alone in a row, and as one of several documents of a row, without a mask."""
    windows = {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1}
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    layers = {"num_hidden_layers": 4, "layer_types": kinds}
    model = small_model(kind, **layers, **windows).eval()
    plain = small_model(kind, num_hidden_layers=4).eval()
    tokens = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(7), torch.arange(5)]).expand(2, -1)
    for place in (None, positions):
        inputs: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
        starts = () if place is None else (place, cu_seqlens(place)[None])
        if place is not None:
            inputs |= isolation_inputs(model, place)
        wanted = model(**inputs).logits
        if place is None:
            assert not torch.allclose(wanted, plain(**inputs).logits, atol=1e-4), "windows matter"
        own = copy.deepcopy(model)
        if place is not None:
            assert use_maskless_attention(own, device=torch.device("cpu"))
        x = tokens
        for index, part in enumerate(assign_layers([1] * 4, 3)):
            ends = {"is_first": index == 0, "is_last": index == 2}
            x = cut_stage(own, part, dtype=torch.float32, **ends)(x, *starts)
        assert torch.allclose(x, wanted, atol=1e-5), place


class Largest(TorchDispatchMode):
    """The most numbers of a tensor that is as wide as the vocabulary."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        wide = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.shape[-1:] == (64,)]
        self.numbers = max([self.numbers, *(x.numel() for x in wide)])
        return result


@each(False, True)
def test_the_last_stage_never_has_whole_logits(holds_losses, *, monkeypatch):
    monkeypatch.setattr(fused_loss, "chunk_tokens", lambda vocab, gpu_bytes: 7)
    model = small_model("llama", intermediate_size=48, num_hidden_layers=4)
    stage = cut_stage(model, range(3, 4), is_first=False, is_last=True, dtype=torch.float32)
    stage.holds_losses = holds_losses
    hidden = torch.randn(2, 64, 32, requires_grad=True)
    targets = torch.randint(0, 64, (2, 64))
    wanted = loss_of_logits(stage(hidden), targets)
    exact = torch.autograd.grad(wanted, [hidden, stage.lm_head.weight])
    with Largest() as largest:
        loss = stage(hidden, targets=targets)
        # As a schedule that splits the backward pass: hidden states first, then the weights.
        mine = torch.autograd.grad(loss * 0.5, hidden, retain_graph=True)
        mine += torch.autograd.grad(loss * 0.5, stage.lm_head.weight)
    assert 7 * 64 <= largest.numbers <= 32 * 64, "a chunk, or the head itself"
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    for one, other in zip(mine, exact, strict=True):
        assert torch.allclose(one, other * 0.5, atol=1e-5)


def test_stages_get_the_ends_of_documents_and_make_no_mask(monkeypatch):
    """Also of micro-batches with fewer rows, or none, which are filled."""
    model = small_model("llama").eval()
    assert use_maskless_attention(model, device=torch.device("cpu"))
    stage = cut_stage(model, range(2), is_first=True, is_last=True, dtype=torch.float32)
    held, batches = MicroBatches(), []
    for documents in ([(3, 5), (2, 2, 4)], [(7, 1)]):
        positions = torch.tensor([[i for n in row for i in range(n)] for row in documents])
        tokens = torch.randint(3, 64, positions.shape)
        ends = cu_seqlens(positions)
        batches.append(Batch(tokens, tokens, (), position_ids_BT=positions, cu_seqlens_N=ends))
        held.hold(Inputs.of(batches[-1], whole(batches[-1], None)))
    step = held.take(3)
    assert step.position_ids is not None and step.cu_seqlens is not None
    starts = [[0, 3, 8, 10, 12, 16], [0, 7, 8, 16, 16, 16], [0, 8, 16, 16, 16, 16]]
    assert step.cu_seqlens.tolist() == starts
    for index, batch in enumerate(batches):
        assert batch.position_ids_BT is not None
        inputs = isolation_inputs(model, batch.position_ids_BT)
        wanted = model(input_ids=batch.input_ids_BT, **inputs, use_cache=False).logits
        with monkeypatch.context() as patch:
            patch.delattr(batch_module, "block_mask")
            rows = slice(2 * index, 2 * index + 2)
            found = stage(step.input_ids[rows], step.position_ids[rows], step.cu_seqlens[[index]])
        assert torch.allclose(found[: len(wanted)], wanted, atol=1e-5)


@each(
    ([10] * 8, 1, [2, 2, 2, 2]),
    ([10] * 5, 1, [3, 2]),
    ([10] * 6, 1, [1, 2, 2, 1]),
    ([10] * 7, 1, [2, 2, 2, 1]),
    ([10] * 32, 24, [8, 9, 9, 6]),
    ([10] * 8, 100, [2, 2, 3, 1]),  # a head that weighs more than all layers
    ([30, 30, 10, 10, 10, 10], 0, [1, 1, 4]),
)
def test_the_stage_with_most_work_has_as_little_as_possible(costs, head, counts):
    dealt = assign_layers(costs, len(counts), head=head)
    assert [index for part in dealt for index in part] == list(range(len(costs)))
    assert [len(part) for part in dealt] == counts


def test_a_head_of_a_large_vocabulary_weighs_as_much_as_two_layers():
    """Of Llama 3 8B, whose matrices have 525 and 218 million numbers."""
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    sizes |= {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
    each, head = work(Architecture.of({"model_type": "llama", **sizes}), length=8192)
    assert 2.0 < head / each < 2.2
