"""The linear family: attention by a state of fixed size, in time that follows the length."""
