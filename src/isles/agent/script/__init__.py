"""A training script of the user's own: started, watched and ended as the built-in trainer is."""
