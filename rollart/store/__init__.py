"""Where weights, batches and checkpoints are kept."""
