"""What people see: the folded summary of a checkpoint, from metadata alone."""
