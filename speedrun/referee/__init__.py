"""Runs a stranger's record again, apart, and compares."""
