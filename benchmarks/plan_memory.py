"""The memory of a step on paper beside what a real step keeps, in hundreds of settings.

    python benchmarks/plan_memory.py            # all settings, some minutes
    python benchmarks/plan_memory.py --quick    # one in six
    python benchmarks/plan_memory.py --smoke    # three
    python benchmarks/plan_memory.py --only fsdp,qwen3

Each setting trains two steps of a real Hugging Face model by the engine that isles would take, with
its loss, optimizer and checkpointing. Tensors are torch's FakeTensors, which have shapes and no
memory, so that a model of 8B fits here; mixtures of experts, whose shapes depend on values, ddp,
tensor parallel and DeepSpeed are small and real. Other ranks are torch's fake process group; of a
pipeline the first and the last rank are counted, and the fuller one is shown. Every storage is
counted from its birth to its end. Stand-ins do what a GPU does: attention keeps what fused kernels
keep, and a product with a matrix in 4 bits makes it wide first. AdamW's step in 8 bits, which a GPU
compiles, is left out: what it holds of one matrix while it steps depends on that. At the end of
each setting a checkpoint is copied as a save does it, and its bytes are compared too.

Offloading cannot be counted here: where the device is a CPU, weights that lie in main memory are
on the device.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import math
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import common
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isles.checkpoint.staging import assigned
from isles.config.layout import Strategy, make_layout
from isles.config.memory import architecture, holding_of, setting_of
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import (
    DDPStrategyConfig,
    DeepSpeedStrategyConfig,
    FSDPStrategyConfig,
)
from isles.dist.batch import VARLEN, Batch
from isles.dist.mesh import Mesh, make_mesh
from isles.dist.world import World
from isles.facts.memory.result import StepMemory
from isles.facts.memory.step import memory_of
from isles.models import four_bit
from isles.models.adapter import add_adapter, frozen_dtype
from isles.models.recompute import set_gradient_checkpointing
from isles.strategies.sequence import use_context_parallel_attention
from isles.train.model import weights_dtype
from isles.train.optimizer.make import make_optimizers
from isles.train.strategy import is_sharded, make_engine, make_routers

BAR = 0.05

SMALL = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "pad_token_id": 0,
}
GPT2 = {"n_embd": 512, "n_inner": 1408, "n_head": 8, "n_layer": 4, "vocab_size": 4096}
DROPOUTS = (
    *("hidden_dropout", "attention_dropout", "resid_pdrop", "embd_pdrop", "residual_dropout"),
    *("embedding_dropout", "attn_pdrop"),
)


@dataclass(frozen=True)
class Case:
    """One setting.

    Args:
        kind: model_type of transformers.
        size: `small`, or `full`: as the config's class has it, which is a published model.
        training, adapter: of the run file.
        ranks: of the fake process group.
    """

    group: str
    kind: str
    size: str = "small"
    rows: int = 2
    length: int = 512
    training: dict[str, Any] = field(default_factory=dict)
    adapter: dict[str, Any] = field(default_factory=dict)
    strategy: Strategy = field(default_factory=DDPStrategyConfig)
    ranks: int = 1
    packs: bool = False
    whole_loss: bool = False
    micro_batches: int = 2
    place: int = 0
    """Rank of the fake process group that is counted."""

    @property
    def is_real(self) -> bool:
        """Whether its tensors are: what is done depends on their values, or on memory of theirs.

        So it is for torch's reducer, tensor parallel and DeepSpeed.
        """
        shares = getattr(self.strategy, "cp_size", 1) > 1 and self.packs  # by boundaries' values
        return self.group in ("ddp", "tensor", "zero") or self.kind in EXPERTS or shares

    @property
    def is_4bit(self) -> bool:
        return self.adapter.get("type") == "qlora"

    def config(self) -> RunConfig:
        return RunConfig.model_validate(
            {
                "model": {"name_or_path": "llama-2m", "init": "scratch"},
                "data": {
                    "sources": ({"path": "none", "type": "text"},),
                    "seq_length": self.length,
                    "isolate_documents": self.packs,
                },
                "training": {"max_steps": 2, **self.training},
                "adapter": self.adapter,
                "strategy": self.strategy,
            }
        )

    def __str__(self) -> str:
        said = [self.kind, self.size, f"{self.rows}x{self.length}"]
        said += [str(value) for value in self.training.values()]
        said += [str(value) for value in self.adapter.values()]
        said += ["packed"] * self.packs + ["whole logits"] * self.whole_loss
        if self.ranks > 1:
            said.append(f"{_name(self.strategy)} on {self.ranks}")
        return " ".join(said)


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of all storages that are alive, and the most there were."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[int, int] = {}
        self.now = self.peak = 0
        self.phase = self.at = ""
        self._func: Any = None
        for tensor in known:
            self._see(tensor)

    def __enter__(self) -> Tracker:
        # FSDP2 gives memory back by making storages small.
        self._resize = torch.UntypedStorage.resize_
        tracker, original = self, self._resize

        def resize(storage: Any, size: int) -> Any:
            result = original(storage, size)
            if storage._cdata in tracker._sizes:
                tracker._set(storage._cdata, storage.nbytes())
            return result

        setattr(torch.UntypedStorage, "resize_", resize)  # noqa: B010
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *args: Any) -> None:
        setattr(torch.UntypedStorage, "resize_", self._resize)  # noqa: B010
        super().__exit__(*args)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.logsumexp.default:
            # The kernel makes a tensor of its own, which is not seen here.
            self._note(self.now + args[0].nbytes, func)
        if "gemm_4bit" in str(func):
            self._note(self.now + math.prod(args[2]) * args[0].element_size(), func)
        out = func(*args, **(kwargs or {}))
        self._func = func
        for leaf in tree_leaves((out, args)):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        return out

    def _see(self, tensor: Any) -> None:
        while hasattr(tensor, "_local_tensor"):
            tensor = tensor._local_tensor
        for part in getattr(tensor, "__tensor_flatten__", lambda: ((), None))()[0]:
            self._see(getattr(tensor, part))
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            self._set(key, storage.nbytes())
            weakref.finalize(storage, self._gone, key)

    def _set(self, key: int, size: int) -> None:
        self.now += size - self._sizes[key]
        self._sizes[key] = size
        self._note(self.now, self._func)

    def _note(self, size: int, func: Any) -> None:
        if size > self.peak:
            self.peak, self.at = size, f"{self.phase}: {func}"

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


class _Fused(torch.autograd.Function):
    """Keeps what flash attention keeps: inputs, output and a log-sum-exp a head and token; and a
    mask as it is, where there is one."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        out = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, q.new_zeros(q.shape[:3], dtype=torch.float32), mask)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *_ = ctx.saved_tensors
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), None


def _fused(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **options: Any
) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        q, k, v = (x.to(dtype) for x in (q, k, v))
    out: Tensor = _Fused.apply(q, k, v, attn_mask)  # type: ignore[no-untyped-call]
    return out


def _attend(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any
) -> tuple[Tensor, None]:
    if options.get("cu_seq_lens_q") is not None:
        # As isles gives documents to torch's kernel for them: each query head has its own keys.
        shared = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    return _fused(q, k, v).transpose(1, 2), None


@contextlib.contextmanager
def as_a_gpu_keeps_it() -> Iterator[None]:
    """What a CPU does otherwise: its dropout keeps a mask of the numbers' own type, its attention
    all scores, and its AdamW in 8 bits, which is not compiled, copies. And what other stages of a
    pipeline answer: that they know the shapes, as this one does."""
    from torch.distributed.pipelining.stage import PipelineStage
    from torchao.optim import subclass_8bit

    subclass_8bit.get_qmap_signed()  # made by values, once
    subclass_8bit.get_qmap_unsigned()
    from isles.strategies import sequence
    from isles.train.optimizer import low_memory

    places = (
        (nn.functional, "dropout"),
        (nn.functional, "scaled_dot_product_attention"),
        (low_memory, "adamw_step"),
        (PipelineStage, "_warmup_backward_result"),
        (sequence, "causal_lower_right"),
    )
    before = [getattr(owner, name) for owner, name in places]

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        del inplace
        return torch.native_dropout(x, p, training)[0] if training and p else x

    try:
        for (owner, name), own in zip(
            places, (dropout, _fused, _step_nothing, _all_know, _no_mask), strict=True
        ):
            setattr(owner, name, own)
        yield
    finally:
        for (owner, name), own in zip(places, before, strict=True):
            setattr(owner, name, own)


def _no_mask(*sizes: int) -> None:
    """Instead of a description of a mask, which fused attention does not keep."""


def _step_nothing(*state: Any, **options: Any) -> None:
    """AdamW's step of a stack, which changes all in place."""


def _all_know(stage: Any, received_result: Any = None) -> Any:
    """The answer of all stages to whether they know the shapes that travel, as a tensor has it."""
    return SimpleNamespace(item=lambda: 1)


def hf_config(case: Case) -> Any:
    """The Hugging Face config of a case."""
    from transformers import CONFIG_MAPPING

    small = GPT2 if case.kind == "gpt2" else SMALL
    made = CONFIG_MAPPING[case.kind](**(small if case.size == "small" else {}))
    for name in DROPOUTS:
        if hasattr(made, name):
            setattr(made, name, 0.0)
    for name, value in {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}.items():
        if hasattr(made, name):
            setattr(made, name, value)
    return made


class Counted(NamedTuple):
    """The most bytes that the second step has at once, when, and those of what a save copies."""

    peak: int
    at: str
    saved: int


def counted(case: Case, shape: Any) -> Counted:
    """Bytes of a case, by training it."""
    if getattr(case.strategy, "pp_size", 1) > 1 and case.place == 0:
        last = counted(replace(case, place=case.ranks - 1), shape)
        return max(_counted(case, shape), last)
    return _counted(case, shape)


def _counted(case: Case, shape: Any) -> Counted:
    is_real = case.is_real
    fake = contextlib.nullcontext() if is_real else FakeTensorMode(allow_non_fake_inputs=True)
    world = _world(case.ranks, case.place, alone=case.group == "ddp")
    layout = make_layout(case.strategy, case.ranks, local_world_size=world.local_world_size)
    deals_ends = getattr(case.strategy, "cp_method", "") == "allgather"
    mesh = make_mesh(layout, world, is_sharded=is_sharded(case.strategy), deals_ends=deals_ends)
    model = _empty_model(case, shape)
    if layout.cp > 1:
        assert isinstance(case.strategy, DDPStrategyConfig | FSDPStrategyConfig)
        # On a CPU, documents are attended to one by one, and keys are repeated as for a kernel.
        use_context_parallel_attention(model, mesh, device=world.device if case.packs else None)
    with fake, _zeros_for_empty() if is_real else contextlib.nullcontext():
        _allocate(model)
        return _train(case, model, mesh, world)


@contextlib.contextmanager
def _zeros_for_empty() -> Iterator[None]:
    # What nobody sends would be NaN now and then, and with a NaN no optimizer steps.
    makers = ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty"))
    before = [getattr(owner, name) for owner, name in makers]
    try:
        for (owner, name), make in zip(makers, before, strict=True):
            setattr(owner, name, torch.no_grad()(partial(_filled, make)))
        yield
    finally:
        for (owner, name), make in zip(makers, before, strict=True):
            setattr(owner, name, make)


def _filled(make: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
    return make(*args, **options).zero_()


def _empty_model(case: Case, shape: Any) -> Any:
    from transformers import AttentionInterface, AutoModelForCausalLM

    config = case.config()
    precision = config.training.precision
    # Under isles' own name for it, so that it is told of documents.
    AttentionInterface.register(VARLEN, _attend)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            shape, dtype=frozen_dtype(precision, config.adapter) or weights_dtype(precision)
        )
        model.set_attn_implementation(VARLEN)
        if case.is_4bit and is_sharded(case.strategy):
            with torch.device("cpu"):
                four_bit._nested_code(torch.device("cpu"))  # made by values, once
            four_bit.use_four_bits(model, config.adapter, model.dtype)
        elif case.is_4bit:
            _make_4bit(model, config)
        if config.adapter.type != "none":
            add_adapter(model, config.adapter, dtype=weights_dtype(precision), name="none")
    model.train()
    set_gradient_checkpointing(model, config.training.gradient_checkpointing)
    return model


def _make_4bit(model: Any, config: RunConfig) -> None:
    # As transformers does for isles: all matrices but the head's.
    from bitsandbytes.functional import quantize_4bit
    from bitsandbytes.nn import Linear4bit

    options = {
        "compress_statistics": config.adapter.bnb_4bit_use_double_quant,
        "quant_type": config.adapter.bnb_4bit_quant_type,
    }
    with torch.device("cpu"):
        quantize_4bit(torch.zeros(64, 64), **options)  # tables are made by values, once
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
            narrow = Linear4bit(0, 0, bias=False, compute_dtype=model.dtype, **options)
            codes, state = quantize_4bit(module.weight.data, **options)
            # Not bitsandbytes' own class of weights, which wants memory.
            narrow.weight = nn.Parameter(codes, requires_grad=False)
            vars(narrow.weight).update(options, quant_state=state)
            narrow.in_features, narrow.out_features = module.in_features, module.out_features
            narrow.bias, narrow.compute_type_is_set = module.bias, True
            narrow.support_avx512bf16_for_cpu = False
            model.set_submodule(name, narrow)
    model.is_loaded_in_4bit = True


def _constants(weight: Any) -> Iterator[tuple[Any, str]]:
    # Of a matrix in 4 bits: what has tensors, and the names of these.
    state = getattr(weight, "quant_state", None)
    while state is not None:
        yield from ((state, name) for name in ("absmax", "code", "offset"))
        state = state.state2


def _held(engine: Any) -> Iterator[Tensor]:
    # All that the model has, the constants of matrices in 4 bits, and what optimizers begin with.
    model = engine.model
    yield from (*model.parameters(), *model.buffers())
    stepper = getattr(engine, "_stepper", None)
    for optimizer in itertools.chain(*getattr(stepper, "_optimizers", ())):
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
    for parameter in model.parameters():
        found = (getattr(*place) for place in _constants(parameter))
        yield from (tensor for tensor in found if tensor is not None)


def _allocate(model: nn.Module) -> None:
    # Memory for all tensors of a model on the meta device; a tied weight gets it once.
    made: dict[Any, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor not in made:
                    fresh: Tensor = torch.zeros(tensor.shape, dtype=tensor.dtype)
                    if isinstance(tensor, nn.Parameter):
                        fresh = nn.Parameter(fresh, requires_grad=tensor.requires_grad)
                        vars(fresh).update(vars(tensor))
                        for owner, part in _constants(fresh):
                            if (own := getattr(owner, part)) is not None:
                                setattr(owner, part, torch.zeros(own.shape, dtype=own.dtype))
                    made[tensor] = fresh
                if tensor is not None:
                    tensors[name] = made[tensor]


def _train(case: Case, model: Any, mesh: Mesh, world: World) -> Counted:
    config = case.config()
    training = config.training
    routers = make_routers(config.model, model, mesh, world)
    engine = make_engine(
        case.strategy,
        model,
        lambda module: None,
        lambda module: make_optimizers(training, module),
        mesh,
        world,
        config,
    )
    if routers is not None:
        engine.use_routers(routers)
    if case.whole_loss or case.kind in AFTER_HEAD:
        engine._bound._head._is_last = False  # type: ignore[attr-defined]
    with Tracker([*_held(engine)]) as tracker:
        for step in range(2):
            if step == 1:
                tracker.peak = tracker.now
            engine.begin_step(input_tokens=case.rows * case.length)
            for micro in range(case.micro_batches):
                tracker.phase = f"micro-batch {micro}"
                engine.forward_backward(
                    _batch(case), loss_divisor=100, is_last=micro == case.micro_batches - 1
                )
            tracker.phase = "step"
            engine.optimizer_step(lr=1e-3, max_norm=1.0)
    assert case.group != "zero" or engine.good_steps() is None, f"{case}: a NaN came from nobody"
    for parameter in model.parameters():
        vars(parameter).pop("quant_state", None)  # frozen, and asked for its values
    state = engine.state_dict()
    saved = sum(_local_bytes(tensor) for tensor in assigned(state, engine.replicas).values())
    if case.group == "zero":  # what it collects is in main memory already
        saved += sum(map(_local_bytes, state.values()))
    return Counted(tracker.peak, tracker.at, saved)


def _local_bytes(tensor: Any) -> int:
    return int(getattr(tensor, "_local_tensor", tensor).nbytes)


def _batch(case: Case) -> Batch:
    rows = case.rows * (2 if case.training.get("method") == "dpo" else 1)
    tokens = torch.zeros(rows, case.length, dtype=torch.long)
    batch = Batch(tokens, tokens, tuple(range(case.rows)))
    if case.training.get("method") == "dpo":
        batch = replace(batch, reference_B=torch.zeros(rows))
    if case.packs:
        positions = (torch.arange(case.length) % (case.length // 2)).repeat(rows, 1)
        starts = torch.arange(0, rows * case.length + 1, case.length // 2, dtype=torch.int32)
        batch = replace(batch, position_ids_BT=positions, cu_seqlens_N=starts)
    return batch


def _world(ranks: int, place: int, *, alone: bool) -> World:
    # DeepSpeed keeps the first group that it sees. torch's reducer wants a real one: of one rank,
    # which is told that there are more.
    members = 1 if alone else ranks
    if dist.is_initialized() and (
        alone or (dist.get_world_size(), dist.get_rank()) != (members, place)
    ):
        dist.destroy_process_group()
    if alone:
        dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    elif not dist.is_initialized() or dist.get_backend() != "fake":
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=place, world_size=ranks, store=FakeStore())
    group = dist.group.WORLD
    assert group is not None
    local = min(8, ranks)
    device = torch.device("cpu")
    return World(place, place % local, ranks, local, device, group, group, group, 60.0)


def on_paper(case: Case, shape: Any, pp_rank: int | None = None) -> StepMemory:
    """The same by isles' formula, for one rank of a pipeline or for its fullest."""
    config = case.config()
    model = architecture(config, shape.to_dict())
    layout = make_layout(case.strategy, case.ranks, local_world_size=min(8, case.ranks))
    setting = setting_of(config, layout, rows=case.rows, micro_batches=case.micro_batches)
    # Of autocast's rules those of the CPU, on which this runs.
    setting = replace(setting, is_cuda=False, is_chunked=setting.is_chunked and not case.whole_loss)
    holding = holding_of(config, case.strategy, layout, model, case.micro_batches)
    return memory_of(model, setting, holding, pp_rank)


DENSE = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo2", "phi3"),
    *("starcoder2", "gpt_neox", "gpt2", "phi", "cohere", "granite", "smollm3", "helium"),
)
EXPERTS = ("mixtral", "qwen3_moe", "olmoe")
AFTER_HEAD = ("gemma2", "cohere", "granite")
"""They do something to their logits, which is found out by a value, and FakeTensors have none."""

PRECISIONS = ("bf16-mixed", "bf16-true", "32-true")
SHARDING = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")
SCHEDULES: tuple[Literal["1f1b", "gpipe", "interleaved-1f1b", "zbv"], ...] = (
    *("1f1b", "gpipe", "interleaved-1f1b", "zbv"),
)
FULL = {"gradient_checkpointing": "full"}
CHECKPOINTING = ("none", "selective", "full")


def cases() -> list[Case]:
    """All settings, by group."""
    return [*_models(), *_adapters(), *_losses(), *_shapes(), *_strategies()]


def _models() -> Iterator[Case]:
    for kind, precision, kept in itertools.product(DENSE, PRECISIONS, CHECKPOINTING):
        training = {"precision": precision, "gradient_checkpointing": kept}
        yield Case("architectures", kind, training=training)
    for kind, kept in itertools.product(EXPERTS, ("none", "full")):
        yield Case("experts", kind, training={"gradient_checkpointing": kept})
    for kind in ("llama", "mistral", "qwen2", "gemma2", "gpt2", "olmo2"):
        yield Case("full size", kind, size="full", rows=1, length=1024, training=FULL)


def _adapters() -> Iterator[Case]:
    lora = {"type": "lora", "r": 16}
    some = {"target_modules": ("q_proj", "v_proj")}
    for kind, kept in itertools.product(("llama", "qwen3", "gemma", "phi3"), ("none", "full")):
        training = {"gradient_checkpointing": kept}
        for more in ({}, {"dropout": 0.1}, some) if kind != "phi3" else ({}, {"dropout": 0.1}):
            yield Case("adapters", kind, training=training, adapter=lora | more)
    for precision in ("bf16-true", "32-true"):
        yield Case("adapters", "llama", training={"precision": precision}, adapter=lora)
    qlora = lora | {"type": "qlora"}
    for kind, kept in itertools.product(("llama", "qwen3", "gemma", "phi3"), CHECKPOINTING):
        yield Case("4 bits", kind, training={"gradient_checkpointing": kept}, adapter=qlora)
    plain = {"bnb_4bit_use_double_quant": False}
    others: tuple[dict[str, Any], ...] = ({"dropout": 0.1}, some, plain, {"r": 64})
    for more in others:
        yield Case("4 bits", "llama", training=FULL, adapter=qlora | more)
    for precision in ("bf16-true", "32-true"):
        yield Case("4 bits", "llama", training={"precision": precision}, adapter=qlora)
    for sharding in ("FULL_SHARD", "SHARD_GRAD_OP"):
        for training in (FULL, {"precision": "32-true"}, {}):
            cut = FSDPStrategyConfig(sharding_strategy=sharding)
            yield Case("4 bits", "llama", training=training, adapter=qlora, strategy=cut, ranks=4)


def _losses() -> Iterator[Case]:
    for kind, precision in itertools.product(("llama", "qwen2", "gpt2"), PRECISIONS):
        yield Case("loss", kind, training={"precision": precision}, whole_loss=True)
    for kept in ("none", "full"):
        training = {"gradient_checkpointing": kept}
        yield Case("loss", "llama", training={"method": "dpo", **training})
        for kind in ("llama", "qwen3"):
            yield Case("packing", kind, training=training, packs=True)


def _shapes() -> Iterator[Case]:
    for optimizer in ("sgd", "muon"):
        yield Case("optimizers", "llama", training={"optimizer": optimizer})
    for kind, precision in itertools.product(("llama", "qwen2", "gpt2"), PRECISIONS):
        training = {"optimizer": "adamw_8bit", "precision": precision, **FULL}
        yield Case("8 bits", kind, training=training)
    training = {"optimizer": "adamw_8bit"}
    yield Case("8 bits", "llama", training=training, adapter={"type": "lora", "r": 16})
    yield Case("8 bits", "llama", training=training, strategy=FSDPStrategyConfig(), ranks=4)
    for length, rows in ((128, 1), (2048, 1), (512, 8), (128, 16)):
        for micro_batches in (1, 2):
            yield Case("shapes", "llama", "small", rows, length, micro_batches=micro_batches)


def _strategies() -> Iterator[Case]:
    for ranks in (2, 8):
        yield Case("ddp", "llama", ranks=ranks)
        yield Case("ddp", "qwen2", ranks=ranks, micro_batches=1)
    kinds = ("llama", "qwen3", "gemma")
    for kind, how, kept in itertools.product(kinds, SHARDING, ("none", "full")):
        ranks = 16 if how == "HYBRID_SHARD" else 4
        strategy = FSDPStrategyConfig.model_validate({"sharding_strategy": how})
        training = {"gradient_checkpointing": kept}
        yield Case("fsdp", kind, training=training, strategy=strategy, ranks=ranks)
    fsdp = FSDPStrategyConfig()
    for precision in ("bf16-true", "32-true"):
        yield Case("fsdp", "llama", training={"precision": precision}, strategy=fsdp, ranks=8)
    yield Case("fsdp", "llama", strategy=fsdp, ranks=8, adapter={"type": "lora"})
    yield Case("fsdp", "llama", "full", 1, training=FULL, strategy=fsdp, ranks=8)
    for kind, kept in itertools.product(("llama", "qwen3", "smollm3"), ("none", "full")):
        training = {"gradient_checkpointing": kept}
        grid = DDPStrategyConfig(tp_size=2)
        yield Case("tensor", kind, training=training, strategy=grid, ranks=2)
        both = FSDPStrategyConfig(tp_size=2)
        yield Case("tensor", kind, training=training, strategy=both, ranks=8)
    yield from _pipelines()
    yield from _sequences()
    precisions = ("bf16-mixed", "32-true")
    for level, precision, kept in itertools.product((1, 2, 3), precisions, ("none", "full")):
        training = {"precision": precision, "gradient_checkpointing": kept}
        zero = DeepSpeedStrategyConfig(zero_stage=level)
        yield Case("zero", "llama", training=training, strategy=zero, ranks=4)


def _pipelines() -> Iterator[Case]:
    for schedule, kept in itertools.product(SCHEDULES, ("none", "full")):
        training = {"gradient_checkpointing": kept}
        grid = DDPStrategyConfig(pp_size=2, pp_schedule=schedule)
        yield Case("pipeline", "llama", training=training, strategy=grid, ranks=2, micro_batches=4)
    for kind, kept in itertools.product(("qwen3", "mistral"), ("none", "full")):
        training = {"gradient_checkpointing": kept}
        grid = DDPStrategyConfig(pp_size=4)
        yield Case("pipeline", kind, training=training, strategy=grid, ranks=4, micro_batches=8)
    for precision in ("bf16-true", "32-true"):
        grid = DDPStrategyConfig(pp_size=2)
        training = {"precision": precision}
        yield Case("pipeline", "llama", training=training, strategy=grid, ranks=2, micro_batches=4)
    for schedule in SCHEDULES[1::2]:  # gpipe and zbv
        grid = DDPStrategyConfig(pp_size=2, pp_schedule=schedule)
        yield Case(
            "pipeline", "llama", "small", 1, 512, FULL, strategy=grid, ranks=2, micro_batches=9
        )
    cut = FSDPStrategyConfig(pp_size=2)
    yield Case("pipeline", "llama", training=FULL, strategy=cut, ranks=8, micro_batches=4)
    # Messages after the backward pass: of a tied head, and between ranks of the same stage.
    for kind, ranks in (("gemma", 2), ("gemma", 4), ("llama", 4)):
        for training in (FULL, {"optimizer": "sgd", **FULL}):
            grid = DDPStrategyConfig(pp_size=2)
            yield Case("pipeline", kind, "small", 1, 64, training, strategy=grid, ranks=ranks)


def _sequences() -> Iterator[Case]:
    methods: tuple[Literal["ulysses", "allgather"], ...] = ("ulysses", "allgather")
    for method, kind, kept in itertools.product(methods, ("llama", "qwen3"), ("none", "full")):
        training = {"gradient_checkpointing": kept}
        cut = FSDPStrategyConfig(cp_size=2, cp_method=method)
        for packs in (False, True):
            yield Case(
                "sequences", kind, "small", 2, 2048, training, strategy=cut, ranks=4, packs=packs
            )


def _name(strategy: Strategy) -> str:
    if isinstance(strategy, DeepSpeedStrategyConfig):
        return f"ZeRO-{strategy.zero_stage}"
    assert isinstance(strategy, DDPStrategyConfig | FSDPStrategyConfig)
    name = getattr(strategy, "sharding_strategy", "") or strategy.kind
    if strategy.pp_size > 1:
        name += f" pp {strategy.pp_size} {strategy.pp_schedule}"
    return name + f" cp {strategy.cp_size} {strategy.cp_method}" * (strategy.cp_size > 1)


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:.1f}"


def main() -> None:
    """Count, print a table, and as the last line the figures as JSON."""
    parser = common.make_parser(__doc__, quick="one setting in six")
    parser.add_argument("--only", default="", help="groups or model types, with commas")
    options = parser.parse_args()
    common.need("transformers", "peft", "bitsandbytes", "torchao", "deepspeed")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    wanted = set(filter(None, options.only.split(",")))
    chosen = [case for case in cases() if not wanted or {case.group, case.kind} & wanted]
    chosen = chosen[:: common.pick(options, full=1, quick=6, smoke=max(1, len(chosen) // 3))]
    off: dict[str, list[float]] = {}
    saves: list[float] = []
    began = time.monotonic()
    head = ("group", "setting", "counted, MiB", "on paper, MiB", "off", "saved, MiB", "off")
    print(*head, "peak on paper", "peak counted", sep=" | ")
    for case in chosen:
        shape = hf_config(case)
        with as_a_gpu_keeps_it():
            real = counted(case, shape)
        gc.collect()
        paper = on_paper(case, shape)
        error, save = paper.peak.total / real.peak - 1, paper.saved / real.saved - 1
        off.setdefault(case.group, []).append(abs(error))
        saves.append(abs(save))
        cells = [case.group, str(case), _mib(real.peak), _mib(paper.peak.total), f"{error:+.1%}"]
        cells += [_mib(real.saved), f"{save:+.1%}", paper.peak.name.split(",")[0], real.at]
        print(*cells, sep=" | ", flush=True)
    print("\ngroup | settings | mean | worst")
    for group, errors in off.items():
        mean = sum(errors) / len(errors)
        print(group, len(errors), f"{mean:.1%}", f"{max(errors):.1%}", sep=" | ")
    every = [error for errors in off.values() for error in errors]
    common.print_figures(
        {
            "cases": len(every),
            "within_5_percent": sum(error <= BAR for error in every),
            "mean": sum(every) / len(every),
            "worst": max(every),
            "worst_saved": max(saves),
            "seconds": round(time.monotonic() - began),
        }
    )


if __name__ == "__main__":
    main()
