"""Arrays with structure: block masks and caches of keys and values."""
