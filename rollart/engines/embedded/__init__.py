"""The engine of ours: torch, on a CPU or one GPU."""
