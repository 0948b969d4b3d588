"""Structured arguments: block masks, and caches of keys and values."""
