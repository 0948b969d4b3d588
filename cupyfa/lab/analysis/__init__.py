"""Costs of kernels: caches, roofline, resources, timelines; and a check of the installation."""
