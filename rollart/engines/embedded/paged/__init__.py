"""The back end with a paged cache: CUDA graphs and Triton kernels on a GPU, plain torch on a CPU (for tests)."""
