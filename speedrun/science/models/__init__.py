"""Architectures: each has a table of parameters and a forward function."""
