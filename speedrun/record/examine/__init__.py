"""Runs untrusted records again in a sandbox, and compares."""
