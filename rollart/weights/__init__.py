"""Weight stores: how a version's tensors travel from the trainer to the engines."""
