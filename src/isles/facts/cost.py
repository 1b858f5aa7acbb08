"""FLOPs of training. For bytes, see `memory`."""

from __future__ import annotations


def train_flops_per_token(
    *,
    matmul_params: int,
    num_layers: int,
    hidden_size: int,
    seq_length: int,
    frozen_params: int = 0,
) -> float:
    """Training FLOPs per token, forward and backward, of a causal transformer.

    Args:
        matmul_params: parameters that multiply activations: all except the input embedding.
        num_layers: transformer blocks.
        hidden_size: width of the attention (heads x head size).
        seq_length: context length, tokens.
        frozen_params: frozen ones among `matmul_params`. Gradients pass through them, and they get
            no gradients.

    Returns:
        FLOPs, not FLOP/s. Recomputation is not counted. Attention is counted as causal (half).

    Source: Kaplan et al. 2020 (arXiv:2001.08361), section 2.1; attention term as in Chowdhery et
    al. 2022 (arXiv:2204.02311), appendix B, halved for the causal mask.
    """
    matrices = 6.0 * matmul_params - 2.0 * frozen_params
    return matrices + 6.0 * num_layers * hidden_size * seq_length
