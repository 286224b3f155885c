"""From files of tokens to batches: the file format, and the order in which tokens are read. NumPy, no JAX."""
