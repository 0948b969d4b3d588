"""Runs plans: backends, memory, launches and transfers."""
