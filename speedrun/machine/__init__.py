"""This machine: what it can run, and how fast its operations are beside their bounds."""
