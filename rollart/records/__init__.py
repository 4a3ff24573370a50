"""Finished trajectories in the run directory: written while a job runs, read by people afterwards."""
