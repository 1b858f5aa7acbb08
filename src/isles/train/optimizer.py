"""Optimizers: torch's AdamW, SGD and Muon, and torchao's AdamW for small memories."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from isles.config.sections.training import TrainingConfig, missing_torchao

_LEAST_NUMEL = 4096
"""Smaller tensors keep fp32 moments: they use little memory, and norms are sensitive to noise."""

_LONGEST_BLOCK, _SHORTEST_BLOCK = 256, 32
"""Numbers that share one scale. Smaller blocks would spend the saved memory on scales."""

_MOMENTS = ("exp_avg", "exp_avg_sq")


def make_optimizers(
    config: TrainingConfig, model: nn.Module, *, seed: int = 0
) -> Sequence[Optimizer]:
    """The run file's optimizers over a model's parameters.

    Weight decay applies to matrices only. Muon gets the matrices inside the blocks. Embeddings, the
    head, norms and biases go to AdamW with the same learning rate, because Muon's updates are
    scaled to AdamW's size.

    Args:
        model: its trained parameters must be allocated, whole or sharded.
        seed: of stochastic rounding; the same on all ranks.

    Raises:
        MissingDependencyError: torchao is needed and not installed.

    Source: Loshchilov and Hutter 2019 (arXiv:1711.05101); Liu et al. 2025 (arXiv:2502.16982) for
    Muon's scale.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    match config.optimizer:
        case "adamw" if not config.stochastic_rounding:
            return [_adamw(config, trained)]
        case "adamw" | "adamw_8bit":
            if error := missing_torchao(config):
                raise error
            low_memory = LowMemoryAdamW(
                _decay_groups(config, trained),
                lr=config.learning_rate,
                betas=(config.adam_beta1, config.adam_beta2),
                eps=config.adam_epsilon,
                eight_bit=config.optimizer == "adamw_8bit",
                rounds_at_random=config.stochastic_rounding,
                seed=seed,
            )
            return [low_memory]
        case "sgd":
            groups = _decay_groups(config, trained)
            # The fused kernel does not support shards. Without it, a step waits for the GPU.
            is_whole = not any(isinstance(p, DTensor) for p in trained)
            sgd = torch.optim.SGD(
                groups, lr=config.learning_rate, momentum=config.momentum, fused=is_whole
            )
            if config.momentum:
                _start_momentum(sgd)
            return [sgd]
        case "muon":
            head = model.get_output_embeddings()  # type: ignore[operator]
            outer: list[nn.Module] = [p for p in model.modules() if isinstance(p, nn.Embedding)]
            outer += [] if head is None else [head]
            ends = {id(p) for part in outer for p in part.parameters()}
            inner = [p for p in trained if p.ndim == 2 and id(p) not in ends]
            chosen = {id(p) for p in inner}
            rest = [p for p in trained if id(p) not in chosen]
            is_cpu = any(p.device.type == "cpu" for p in inner)
            muon = (MuonFp32 if is_cpu else torch.optim.Muon)(
                inner,
                lr=config.learning_rate,
                momentum=config.momentum,
                weight_decay=config.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
            _start_momentum(muon)
            return [muon, _adamw(config, rest)] if rest else [muon]  # an adapter has no rest


class MuonFp32(torch.optim.Muon):
    """torch's Muon with its iterations in fp32, for parameters on a CPU.

    Source: torch/optim/_muon.py, with Nesterov momentum and `match_rms_adamw`.
    """

    # torch's own iterates in bf16, which a CPU without AVX-512 emulates eight times slower.
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step the parameters; see `torch.optim.Muon`."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                buffer = self.state[parameter]["momentum_buffer"]
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(buffer, group["momentum"]).float()
                update = _orthogonalized(update, group)
                scale = 0.2 * max(parameter.shape) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * scale)
        return loss


def _orthogonalized(matrix: Tensor, group: dict[str, Any]) -> Tensor:
    # The nearest matrix whose singular values are about 1, by Newton-Schulz iterations.
    a, b, c = group["ns_coefficients"]
    is_tall = matrix.shape[0] > matrix.shape[1]
    # The Gram matrix of the rows is smaller if there are fewer rows than columns.
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _start_momentum(optimizer: Optimizer) -> None:
    # Start with a momentum of zeros, which is the same mathematics. Without it, torch's fused SGD
    # leaves garbage in the buffer if its first step is skipped, and a checkpoint from before the
    # first step lacks the buffer.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _adamw(config: TrainingConfig, parameters: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(
        _decay_groups(config, parameters),
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )


def _decay_groups(
    config: TrainingConfig, parameters: list[nn.Parameter]
) -> list[dict[str, object]]:
    groups: list[dict[str, object]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class LowMemoryAdamW(Optimizer):
    """torchao's AdamW on this rank's part of each parameter: 8-bit moments, stochastically rounded
    bf16 weights, or both.

    torchao gets plain tensors. Blocks of codes lie within rows, so codes and scales are sharded
    like the matrix, and any number of ranks can load a checkpoint bit for bit. Random numbers
    depend on the seed, the step and the place of the shard. Ranks with the same weights therefore
    round them alike, and a resumed run rounds like an uninterrupted run.

    Args:
        groups: parameters with their `weight_decay`, whole or sharded (DTensors).
        eight_bit: hold the moments of matrices in 8 bits, other moments in fp32.
        rounds_at_random: round bf16 weights stochastically. Without eight_bit, moments have the
            weights' type.
        seed: of the random numbers; the same on all ranks.

    Source: Dettmers et al. 2022 (arXiv:2110.02861) for the 8-bit type and its blocks; Gupta et al.
    2015 (arXiv:1502.02551) for the rounding.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        eight_bit: bool,
        rounds_at_random: bool,
        seed: int,
    ) -> None:
        from torchao.optim import AdamW8bit

        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self._rounds_at_random = rounds_at_random
        self._seed = seed
        self._inner: dict[nn.Parameter, Any] = {}
        plain_dtype = torch.float32 if eight_bit or not rounds_at_random else None
        for group in self.param_groups:
            for parameter in group["params"]:
                block = _block_length(parameter) if eight_bit else None
                # Created at the start, so that a checkpoint before the first step includes it.
                state = self.state[parameter] = {"step": torch.tensor(0.0)}
                for moment in _MOMENTS:
                    state |= _zero_moment(moment, parameter, block, plain_dtype)
                plain = nn.Parameter(_local(parameter.data), requires_grad=False)
                self._inner[parameter] = inner = AdamW8bit(
                    [plain], lr=lr, betas=betas, eps=eps, bf16_stochastic_round=rounds_at_random
                )
                if plain.numel():
                    inner.state[plain] = _torchao_state(state, block)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient; the gradients stay as they are."""
        assert closure is None, "isles evaluates a loss once a step"
        device = _local(self.param_groups[0]["params"][0].data).device
        devices = [device] if device.type == "cuda" else []
        # Compiled, a step never holds fp32 copies of a matrix; a CPU may have no compiler.
        stance = "default" if device.type == "cuda" else "force_eager"
        with (
            torch.compiler.set_stance(stance),
            # Rounding sets seeds, and dropout must not start again from them.
            torch.random.fork_rng(devices=devices, enabled=self._rounds_at_random),
        ):
            place = -1
            for group in self.param_groups:
                for parameter in group["params"]:
                    place += 1
                    if parameter.grad is not None:
                        self._step_one(parameter, group, place)

    def _step_one(self, parameter: nn.Parameter, group: dict[str, Any], place: int) -> None:
        inner = self._inner[parameter]
        (inner_group,) = inner.param_groups
        (plain,) = inner_group["params"]
        plain.data = _local(parameter.data)
        if not plain.numel():  # more ranks than rows
            self.state[parameter]["step"] += 1
            return
        inner_group["lr"].fill_(group["lr"])
        inner_group["weight_decay"] = group["weight_decay"]
        if self._rounds_at_random:
            torch.manual_seed(self._shard_seed(parameter, place))
        plain.grad = _local(parameter.grad)
        inner.step()
        plain.grad = None

    def _shard_seed(self, parameter: nn.Parameter, place: int) -> int:
        data: Any = parameter.data
        shard: tuple[int, ...] = ()
        if isinstance(data, DTensor):
            where = data.device_mesh.get_coordinate() or ()
            cuts = zip(where, data.placements, strict=True)
            shard = tuple(index for index, placement in cuts if placement.is_shard())
        text = f"{self._seed} {int(self.state[parameter]['step'])} {place} {shard}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load moments in place, bit for bit; torch's own method would turn codes into floats.

        Hyperparameters stay: they come from the run file.
        """
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, key in zip(group["params"], saved["params"], strict=True):
                for name, value in state_dict["state"][key].items():
                    _local(self.state[parameter][name]).copy_(_local(value))


def _block_length(parameter: nn.Parameter) -> int | None:
    # Numbers of a row that share a scale; None: this tensor keeps plain moments. The result depends
    # only on values that are equal on all ranks, so that ranks have the same kinds of state.
    if parameter.ndim < 2 or parameter.numel() < _LEAST_NUMEL:
        return None
    width = _local(parameter.data).shape[-1]
    block = min(_LONGEST_BLOCK, width & -width)
    return block if block >= _SHORTEST_BLOCK else None


def _zero_moment(
    name: str, parameter: nn.Parameter, block: int | None, plain_dtype: torch.dtype | None
) -> dict[str, Tensor]:
    # A moment in checkpoint form: numbers, or codes and a scale per block.
    if block is None:
        return {name: torch.zeros_like(parameter.data, dtype=plain_dtype)}
    codes = torch.zeros_like(parameter.data, dtype=torch.uint8)
    local = _local(codes)
    scale = torch.zeros((*local.shape[:-1], local.shape[-1] // block), device=local.device)
    if isinstance(codes, DTensor):
        shape = torch.Size((*codes.shape[:-1], codes.shape[-1] // block))
        scale = DTensor.from_local(
            scale,
            codes.device_mesh,
            codes.placements,
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        ).to(local.device)  # from_local moves offloaded ones to the GPU
    return {name: codes, f"{name}_scale": scale}


def _torchao_state(state: dict[str, Tensor], block: int | None) -> dict[str, Tensor]:
    # The same memory, as torchao's types.
    from torchao.optim.subclass_8bit import OptimState8bit

    found = {"step": state["step"]}
    for name in _MOMENTS:
        found[name] = values = _local(state[name])
        if block is not None:
            is_signed = name == "exp_avg"
            qmap = OptimState8bit.zeros((block,), is_signed, block, values.device).qmap
            scale = _local(state[f"{name}_scale"]).view(-1)
            found[name] = OptimState8bit(values, scale, qmap, is_signed)
    return found


def _local(tensor: Any) -> Any:
    # This rank's part of a sharded tensor; other tensors unchanged.
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
