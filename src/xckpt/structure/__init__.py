"""What the tensors of a model are."""
