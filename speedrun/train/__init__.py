"""One run in several processes on this machine."""
