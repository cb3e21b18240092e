"""What every model does with files: reading what nobody vouches for, saving whole or not at all, tokenizers."""
