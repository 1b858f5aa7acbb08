"""torch.compile of the blocks: when `auto` chooses it, its graphs, and a compiler that fails."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.partitioners import min_cut_rematerialization_partition

from isles.balance.measure import ComputeMeter
from isles.cli import main
from isles.config.compilation import compiles
from isles.config.load import load_run_file
from isles.config.sections.training import TrainingConfig
from isles.models.attention import use_maskless_attention
from isles.models.recompute import set_gradient_checkpointing
from isles.strategies.fsdp import find_blocks
from isles.strategies.head import LossHead
from isles.strategies.mixed_precision import MixedPrecision
from isles.train.compiled import compile_blocks, resolve_compile
from isles.train.fp8 import use_fp8
from tests.each import each
from tests.small_models import small_model

CPU = torch.device("cpu")
PACKED = "data.packing=true"
_LOG = logging.getLogger("torch._dynamo.convert_frame")


@each(
    ((8, 0), 1000, [], True),
    ((12, 0), None, [], True),  # a run of some hours
    ((7, 5), 1000, [], False),
    (None, 1000, [], False),  # a CPU
    ((9, 0), 100, [], False),
    ((9, 0), 1000, ["data.packing=false"], False),
    ((9, 0), 1000, ["strategy={kind: fsdp}"], True),
    ((9, 0), 1000, ["strategy={kind: fsdp, pp_size: 2}"], False),
    ((9, 0), 1000, ["strategy={kind: deepspeed}"], False),
    ((7, 5), 100, ["training.torch_compile=true"], True),
    ((9, 0), 1000, ["training.torch_compile=false"], False),
    ((8, 9), 10, ["training.precision=fp8-mixed", "data.packing=false"], True),
)
def test_auto_compiles_where_it_pays(capability, steps, changes, expected, *, run_file):
    config = load_run_file(run_file, [PACKED, *changes]).config
    assert compiles(config, capability, steps) is expected


def test_pretraining_of_isles_init_is_compiled(tmp_path):
    path = tmp_path / "new.yaml"
    assert main(["init", "--template", "pretrain", "--output", str(path)]) == 0
    assert compiles(load_run_file(path, []).config, (9, 0), 20_000)


@each([(9, 0), (8, 6)], [(9, 0), (7, 5)], [(9, 0), None])
def test_the_oldest_gpu_decides_for_all_ranks(capabilities, *, run_file, monkeypatch):
    config = load_run_file(run_file, [PACKED]).config
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capabilities[0])
    device = torch.device("cuda", 0)
    world: Any = SimpleNamespace(
        device=device, world_size=2, gather=lambda own: [own, capabilities[1]]
    )
    found = resolve_compile(config, world, 1000, ()).training.torch_compile
    assert found is (capabilities[1] == (8, 6))


@pytest.fixture
def graphs(monkeypatch: Any) -> Iterator[list[int]]:
    """The sizes of the graphs that are compiled, and run as they are."""
    from torch._dynamo import config as dynamo
    from torch._functorch import config as autograd

    made: list[int] = []

    def keep(module: Any, inputs: Any) -> Any:
        made.append(len(module.graph.nodes))
        return module.forward

    _compile_with(monkeypatch, aot_autograd(fw_compiler=keep, bw_compiler=lambda m, _: m.forward))
    monkeypatch.setattr(dynamo, "optimize_ddp", dynamo.optimize_ddp)
    monkeypatch.setattr(dynamo, "suppress_errors", dynamo.suppress_errors)
    lowers = "force_non_lazy_backward_lowering"
    monkeypatch.setattr(autograd, lowers, getattr(autograd, lowers))
    monkeypatch.setattr(_LOG, "filters", [])
    yield made
    _forget()


def _forget() -> None:
    torch.compiler.reset()
    counters.clear()
    _LOG.filters.clear()


def _compile_with(monkeypatch: Any, backend: Any) -> None:
    own = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", functools.partialmethod(own, backend=backend))


def ids_of(rows: int) -> Tensor:
    return torch.randint(3, 64, (rows, 16), generator=torch.Generator().manual_seed(0))


class Learner:
    """A small model of six blocks, and what training it does."""

    def __init__(self, *, is_compiled: bool, checkpointing: str = "none") -> None:
        self.model = small_model("llama", num_hidden_layers=6)
        set_gradient_checkpointing(self.model, checkpointing)
        use_maskless_attention(self.model)
        if is_compiled:
            compile_blocks(self.model)
        self.head = LossHead(self.model)
        self.precision = MixedPrecision(self.model, "bf16-mixed", CPU)

    def learn(self, rows: int) -> list[Tensor]:
        ids = ids_of(rows)
        self.model.zero_grad()
        with self.precision.micro_batch():
            self.head.loss_sum(self.model, {"input_ids": ids}, ids).backward()
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]


@each("none", "selective", "full")
def test_all_blocks_share_one_graph_and_one_more_for_other_rows(checkpointing, *, graphs):
    _forget()
    graphs.clear()
    learner = Learner(is_compiled=True, checkpointing=checkpointing)
    plain = Learner(is_compiled=False, checkpointing=checkpointing)
    meter = ComputeMeter(find_blocks(learner.model), CPU)
    found = []
    for rows in (2, 2, 3, 4, 2):
        for mine, exact in zip(learner.learn(rows), plain.learn(rows), strict=True):
            torch.testing.assert_close(mine, exact, rtol=0.05, atol=0.02)
        meter.step_done()
        found.append(len(graphs))
    assert found == [1, 1, 2, 2, 2]
    assert not counters["graph_break"]
    assert not counters["recompile_limit"]
    assert len(meter.steps()) == 3, "the speed of compiled blocks is measured"


def compiled_block(precision: str) -> tuple[Counter[str], int]:
    """Products of a compiled block, forward and backward, and bytes that it keeps, besides its
    inputs. With fp8, these are the products of a GPU, which torch also has on a CPU."""
    products: Counter[str] = Counter()
    kept = []

    def count(module: Any) -> Any:
        names = (str(getattr(node.target, "name", str)()) for node in module.graph.nodes)
        products.update(name for name in names if "mm" in name)
        return module.forward

    def forward(module: Any, _inputs: Any) -> Any:
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        values = [node.meta["val"] for node in output.args[0][1:] if node.op != "placeholder"]
        kept.append(sum(x.nbytes for x in values if isinstance(x, Tensor)))
        return count(module)

    partition = min_cut_rematerialization_partition  # of the real compiler
    backend = aot_autograd(
        fw_compiler=forward, bw_compiler=lambda m, _: count(m), partition_fn=partition
    )
    model = small_model("llama", num_hidden_layers=1, hidden_size=64, head_dim=16)
    use_maskless_attention(model)
    if precision == "fp8-mixed":
        use_fp8(model, TrainingConfig(max_steps=1, precision=precision))
    (block,) = find_blocks(model)
    block.compile(backend=backend)
    with MixedPrecision(model, precision, CPU).micro_batch():
        model(input_ids=ids_of(2)).logits.float().sum().backward()
    assert not counters["graph_break"]
    _forget()
    return products, kept[0]


def test_all_products_of_a_compiled_block_are_in_fp8_and_keep_no_more():
    (plain, bytes_in_bf16), (products, kept) = map(compiled_block, ("bf16-mixed", "fp8-mixed"))
    assert plain == {"aten::mm": 21}
    assert products == {"aten::_scaled_mm": 21}
    assert 0.6 < kept / bytes_in_bf16 < 0.8


@each("forward", "backward")
def test_a_block_that_cannot_be_compiled_runs_uncompiled(pass_, *, graphs, monkeypatch, caplog):
    def fail(module: Any, inputs: Any) -> Any:
        raise RuntimeError("no working C compiler")

    compilers = {"fw_compiler": lambda m, _: m.forward, "bw_compiler": lambda m, _: m.forward}
    compilers["fw_compiler" if pass_ == "forward" else "bw_compiler"] = fail
    _forget()
    caplog.clear()
    _compile_with(monkeypatch, aot_autograd(**compilers))
    learner, plain = Learner(is_compiled=True), Learner(is_compiled=False)
    with caplog.at_level(logging.WARNING):
        assert all(map(torch.equal, learner.learn(2), plain.learn(2)))
        learner.learn(3)
    told = [r.getMessage() for r in caplog.records if "torch.compile failed" in r.getMessage()]
    assert len(told) == 1 and "no working C compiler" in told[0]
    assert not [record for record in caplog.records if record.exc_info], "no traceback"
