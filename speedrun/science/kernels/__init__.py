"""One operation = one definition that runs anywhere, and faster forms beside it."""
