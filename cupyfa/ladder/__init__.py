"""The ladder: all kernel records in teaching order, ``LADDER[operation][name]``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cupyfa.ladder.kernel import Kernel

_OPERATIONS = ("softmax", "forward", "backward", "tangent")  # each is a module with a tuple KERNELS


class _Ladder(Mapping[str, "dict[str, Kernel]"]):
    """Records by operation. The first access to an operation imports its module.

    The modules take longer to import than most others, and few processes need all of them.
    """

    def __getitem__(self, operation: str) -> dict[str, Kernel]:
        if operation not in _OPERATIONS:
            raise KeyError(operation)
        return _load_records(operation)

    def __iter__(self) -> Iterator[str]:
        return iter(_OPERATIONS)

    def __len__(self) -> int:
        return len(_OPERATIONS)


@cache
def _load_records(operation: str) -> dict[str, Kernel]:
    records: tuple[Kernel, ...] = import_module(f"cupyfa.ladder.{operation}").KERNELS
    return {record.name: record for record in records}


LADDER = _Ladder()
