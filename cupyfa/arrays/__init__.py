"""Structured arguments: block masks, KV caches and shared prefixes."""
