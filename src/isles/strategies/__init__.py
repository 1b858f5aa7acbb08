"""How a cluster holds the model."""
