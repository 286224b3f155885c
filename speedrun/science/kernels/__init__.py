"""Operations: each has one definition that runs anywhere, and faster implementations."""
