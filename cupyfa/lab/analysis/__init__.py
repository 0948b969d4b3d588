"""Roofline, resources and timelines of kernels; reports on caches and on the installation."""
