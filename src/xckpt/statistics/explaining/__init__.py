"""Why tensors differ: what `compare(explain=True)` says of them."""
