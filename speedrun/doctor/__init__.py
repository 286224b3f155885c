"""Check what this machine can run. JAX is imported only after its version was checked."""
