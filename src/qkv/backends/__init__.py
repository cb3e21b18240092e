"""One way a file to answer a problem; `qkv.dispatch` chooses among them."""
