"""Architectures: a table of parameters and a forward function each."""
