"""Timing, results, peers and tuning."""

import sys
from types import ModuleType
from typing import Any


class _Package(ModuleType):
    """Makes the package ``cupyfa.bench`` callable: it is also a function of the library."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from cupyfa.bench.bench import bench

        return bench(*args, **kwargs)


sys.modules[__name__].__class__ = _Package
