"""Optimisers as optax transformations, and schedules."""
