"""What training takes: FLOPs, and bytes of weights, gradients, optimizer state and activations."""

from __future__ import annotations

from dataclasses import dataclass

_STATE_NUMBERS = {"adamw": 2, "muon": 2, "sgd": 1}
"""Numbers of the weights' type that an optimizer keeps for each weight, at most."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What memory depends on; `num_frozen` of the parameters are not trained, beside an adapter."""

    num_params: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_frozen: int = 0

    @property
    def num_trained(self) -> int:
        """Parameters that have gradients and optimizer state."""
        return self.num_params - self.num_frozen


def weight_bytes(num_params: int, precision: str) -> int:
    """The weights themselves, as they are trained: fp32, or bf16 under bf16-true."""
    return num_params * (2 if precision == "bf16-true" else 4)


def frozen_bytes(num_params: int, precision: str) -> int:
    """Weights that are not trained: as the forward pass computes with them."""
    return num_params * (4 if precision == "32-true" else 2)


def copy_bytes(num_params: int, precision: str) -> int:
    """The 16-bit copy of the weights that a forward pass under mixed precision computes with."""
    return num_params * 2 if precision.endswith("mixed") else 0


def state_bytes(num_params: int, precision: str, optimizer: str) -> int:
    """Gradients and optimizer state."""
    weights = weight_bytes(num_params, precision)
    return weights + optimizer_bytes(num_params, weights, optimizer)


def optimizer_bytes(num_params: int, weights_bytes: float, optimizer: str) -> int:
    """Optimizer state of so many trained parameters, which take `weights_bytes` themselves."""
    if optimizer == "adamw_8bit":
        # Two codes, and two fp32 scales for every 64 to 256 numbers, as rows are long.
        return num_params * 2 + num_params // 8
    return int(weights_bytes * _STATE_NUMBERS[optimizer])


def activation_bytes(
    size: ModelSize, rows: int, seq_length: int, *, precision: str, checkpointing: str
) -> int:
    """What one micro-batch keeps for the backward pass, with fused attention, and its logits.

    34 bytes a token and hidden unit in a block with 16-bit numbers, 2 with full recomputation (and
    one block at work); a third for selective.

    Source: Korthikanti et al. 2022 (arXiv:2205.05198), equation 2 without its attention term, which
    fused attention does not keep.
    """
    wide = 1 if precision.endswith("mixed") or precision == "bf16-true" else 2
    units = rows * seq_length * size.hidden_size * wide
    match checkpointing:
        case "full":
            blocks = units * (2 * size.num_layers + 34)
        case "selective":
            blocks = units * 34 * size.num_layers // 3
        case _:
            blocks = units * 34 * size.num_layers
    logits = rows * seq_length * size.vocab_size * (2 * wide + 8)  # as made, in fp32, and gradient
    return blocks + logits


def train_flops_per_token(
    *,
    matmul_params: int,
    num_layers: int,
    hidden_size: int,
    seq_length: int,
    frozen_params: int = 0,
) -> float:
    """Training FLOPs for one token, forward and backward, of a causal transformer.

    Args:
        matmul_params: parameters that multiply activations: all but the input embedding.
        num_layers: transformer blocks.
        hidden_size: width of the attention (heads x head size).
        seq_length: context length, tokens.
        frozen_params: those of `matmul_params` that are not trained: gradients go through them, and
            none are made for them.

    Returns:
        FLOPs, not FLOP/s. Recomputation is not counted; attention is counted as causal (half).

    Source: Kaplan et al. 2020 (arXiv:2001.08361), section 2.1; attention term as in Chowdhery et
    al. 2022 (arXiv:2204.02311), appendix B, halved for the causal mask.
    """
    matrices = 6.0 * matmul_params - 2.0 * frozen_params
    return matrices + 6.0 * num_layers * hidden_size * seq_length
