"""Faults made by a program: mutants of kernels, and whether a check finds them."""
