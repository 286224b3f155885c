"""Experiments: declared batches, ablations, sweeps and what they show."""
