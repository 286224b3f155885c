"""Records: their files, how they are assembled and checked. Nothing here imports JAX."""
