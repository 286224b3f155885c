"""What this machine can run, check by check. Nothing here imports JAX before its versions are known to be right."""
