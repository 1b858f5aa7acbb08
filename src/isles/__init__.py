"""isles: train or fine-tune one language model on whatever GPUs you have."""

__version__ = "0.1.0"
