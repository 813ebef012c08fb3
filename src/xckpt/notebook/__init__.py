"""What people see: the folded summary of a checkpoint as text and HTML, and the explorer."""
