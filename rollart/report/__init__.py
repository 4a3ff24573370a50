"""Folds over the events of a run, and the tables that people read."""
