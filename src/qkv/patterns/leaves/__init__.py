"""The questions that patterns are made of, a kind a file."""
