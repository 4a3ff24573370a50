"""One way to have a process elsewhere."""
