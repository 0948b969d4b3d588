"""Concurrent calls from several threads."""

from concurrent.futures import ThreadPoolExecutor


def in_threads(function, items):
    """What a function returns for each of the items, each in a thread of its own."""
    items = list(items)
    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(function, items))
