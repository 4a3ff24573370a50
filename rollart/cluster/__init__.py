"""What runs the workers of a job: local processes, and later Ray."""
