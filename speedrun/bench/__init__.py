"""Side by side on this machine, in one run: what we use, its definition, and the arithmetic that bounds both."""
