"""The reference results in NumPy, and the bounds of a kernel's errors."""
