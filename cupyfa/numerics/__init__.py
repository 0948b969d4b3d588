"""Reference results in NumPy, and error bounds for kernels."""
