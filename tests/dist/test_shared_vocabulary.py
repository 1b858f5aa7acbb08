"""The loss over a vocabulary that tensor parallel ranks share equals that of one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isles.dist.batch import IGNORE_INDEX
from isles.dist.world import join_world
from isles.run.env import RankEnv
from isles.strategies import fused_loss
from isles.strategies.head import LossHead
from isles.strategies.objective import DPO
from isles.strategies.sequence import MicroBatchPart
from isles.strategies.tensor_parallel import apply_tensor_parallel
from tests.ranks import run_ranks
from tests.small_models import small_model

ROWS, T, VOCAB = 4, 17, 96
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"is_frozen": True}),  # a head that gets no gradient, and passes one on
    ("phi", {"layer_norm_eps": 1e-5}),  # a head with a bias
    ("llama", {"vocab_size": VOCAB + 1}),  # kept whole, as two ranks cannot share it
]


class Widths(TorchDispatchMode):
    """Collects the last dimension of every matrix that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen |= {
            x.shape[-1] for x in tree_leaves(result) if isinstance(x, Tensor) and x.ndim > 1
        }
        return result


def _losses(model: Any, head: LossHead | None, tokens: Tensor, targets: Tensor) -> list[Tensor]:
    """Of every token, summed with and without gradients, and of DPO; with all gradients."""
    places = (targets.flatten() != IGNORE_INDEX).nonzero().squeeze(1)
    inputs, reference = {"input_ids": tokens}, torch.tensor([-50.0, -49.0, -47.5, -52.0])
    part = MicroBatchPart(inputs, targets, reference_B=reference)
    if head is None:  # from whole logits
        logits = model(input_ids=tokens, use_cache=False).logits
        each = fused_loss.loss_of_logits(logits, targets, reduction="none").view(targets.shape)
        sums, evaluated = [each.sum(), each.sum()], each.sum()
        margins = 0.3 * (-each.sum(1) - reference)
        dpo = -torch.nn.functional.logsigmoid(margins[0::2] - margins[1::2]).sum()
    else:
        sums = [head.loss_sum(model, inputs, targets, p) for p in (None, places)]
        with torch.no_grad():
            evaluated = head.loss_sum(model, inputs, targets)
        dpo = DPO(model, beta=0.3).loss_sum(model, part)
    found = [x.detach() for x in (*sums, evaluated, dpo)]
    for loss in (sums[1] * 0.37, dpo):
        loss.backward(retain_graph=True)
        for parameter in model.parameters():
            if (grad := parameter.grad) is not None:
                found.append(grad.full_tensor() if isinstance(grad, DTensor) else grad.clone())
            parameter.grad = None
    return found


def _differences(env: RankEnv) -> list[tuple[list[float], list[bool], set[int]]]:
    join_world(env, device="cpu", timeout_s=60)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    fused_loss.chunk_tokens = lambda vocab, gpu_bytes: 7
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(0, VOCAB, (2, ROWS, T), generator=generator)
    targets[torch.rand((ROWS, T), generator=generator) < 0.4] = IGNORE_INDEX
    results = []
    for kind, settings in CASES:
        model = small_model(kind, **{"vocab_size": VOCAB, **settings})
        model.lm_head.weight.requires_grad_("is_frozen" not in settings)
        twin = copy.deepcopy(model)
        apply_tensor_parallel(model, mesh)
        ends = (model.get_input_embeddings().weight, model.lm_head.weight)
        head = LossHead(model)
        with Widths() as widths:
            found = _losses(model, head, tokens, targets)
        wanted = _losses(twin, None, tokens, targets)
        assert len(found) == len(wanted) > 20, "every parameter has the gradient that it should"
        apart = [
            float((one - other).abs().max() / other.abs().max().clamp(min=1e-8))
            for one, other in zip(found, wanted, strict=True)
        ]
        results.append((apart, [isinstance(end, DTensor) for end in ends], widths.seen))
    return results


def test_ranks_that_share_a_vocabulary_have_the_loss_of_one_and_no_whole_logits():
    for results in run_ranks(_differences, 2):
        for (_, settings), (apart, cut, widths) in zip(CASES, results, strict=True):
            assert max(apart) < 2e-5, settings
            vocab = settings.get("vocab_size", VOCAB)
            assert cut == [vocab == VOCAB] * 2
            if vocab == VOCAB:
                assert VOCAB // 2 in widths, "the logits of this rank's columns"
                assert VOCAB not in widths, settings


def _compiled(env: RankEnv) -> list[float]:
    join_world(env, device="cpu", timeout_s=60)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    tokens = torch.randint(0, VOCAB, (2, T), generator=torch.Generator().manual_seed(1))
    apart = []
    for is_tied in (False, True):
        model = small_model("llama", vocab_size=VOCAB, tie_word_embeddings=is_tied)
        twin = copy.deepcopy(model)
        apply_tensor_parallel(model, mesh)
        for block in model.model.layers:
            block.compile(backend="aot_eager")
        LossHead(model).loss_sum(model, {"input_ids": tokens}, tokens).backward()
        logits = twin(input_ids=tokens, use_cache=False).logits
        fused_loss.loss_of_logits(logits, tokens).backward()
        mine, other = (each.get_input_embeddings().weight.grad for each in (model, twin))
        apart.append(float((mine.full_tensor() - other).abs().max() / other.abs().max()))
    return apart


def test_compiled_blocks_pass_gradients_on_to_a_shared_embedding():
    for apart in run_ranks(_compiled, 2):
        assert max(apart) < 2e-5
