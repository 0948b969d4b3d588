"""The CUDA backend, on CuPy."""

from cupyfa import store

store.give_cupy_a_folder()  # before any module of this package imports CuPy
