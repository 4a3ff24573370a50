"""The trainer: losses, packing, the optimizer, checkpoints, and the single-device trainer over them."""
