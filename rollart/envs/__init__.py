"""Environment hosts."""
