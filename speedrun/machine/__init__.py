"""This machine: what it can run, and how close its operations come to their bounds."""
