"""Concurrent calls from several threads."""

from concurrent.futures import ThreadPoolExecutor


def in_threads(function, items):
    """Calls a function on all items, each in its own thread; returns the results."""
    items = list(items)
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(function, items))
