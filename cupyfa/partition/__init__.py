"""Helpers for calls on parts of a problem, shared by dask and distributed."""
