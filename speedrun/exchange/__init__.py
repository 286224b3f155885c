"""Other people's logs in, ours out."""
