"""Task sets: data, environment and reward function, one file each. `api` is what such a file is written with."""
