"""What `qkv demo` shows: results as data, their rendering apart, printing left to the command line."""
