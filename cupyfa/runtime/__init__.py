"""Backends, memory and launches: what happens when a plan runs."""
