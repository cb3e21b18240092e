"""The command `qkv`: parsing arguments and printing, nothing else. Import from the defining files."""
