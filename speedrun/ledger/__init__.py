"""Records: what they hold, how they are written, checked and drawn. Nothing here imports JAX."""
