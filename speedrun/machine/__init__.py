"""Benchmarks on this machine: our kernels beside their definitions and the arithmetic that bounds both."""
