"""A speedrun harness for FineWeb in JAX, and the recipes that run on it."""

__version__ = "0.1.0"
