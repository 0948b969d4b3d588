"""The CUDA backend, built on CuPy."""

from cupyfa import cache_folder

cache_folder.give_cupy_a_folder()  # before any module of this package imports CuPy
