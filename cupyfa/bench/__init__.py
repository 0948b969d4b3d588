"""Timing, results, peers and tuning."""

import sys
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    """``cupyfa.bench`` is a function of the library and the package of its parts at once."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from cupyfa.bench.bench import bench

        return bench(*args, **kwargs)


sys.modules[__name__].__class__ = _Package
