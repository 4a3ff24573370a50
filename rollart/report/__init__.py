"""Folds over the events of a run, and what people read of it."""
