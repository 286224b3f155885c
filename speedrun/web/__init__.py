"""Trained models in the browser."""
