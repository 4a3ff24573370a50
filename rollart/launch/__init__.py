"""Composition: from a job to a run, real or simulated."""
