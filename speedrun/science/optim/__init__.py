"""Optimisers by the optax contract, and schedules."""
