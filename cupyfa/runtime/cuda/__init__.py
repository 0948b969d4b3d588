"""The CUDA backend, on CuPy."""
