"""The calls that are known, so that a call like an earlier one is not planned again.

A public function looks a call up in this order:

1. ``repeat_call``: if its arguments that are no arrays are the very objects of the function's last
   call, the Prepared of that call is asked for launches on the very same arrays (``Repeats``, in
   ``Prepared.again``). Nothing is read, checked or planned.
2. ``CallCache.find`` with a key of all arguments and of the forms of the arrays: shapes, strides,
   dtypes and device. The Prepared runs on the new arrays.
3. ``CallCache.find`` with a key without numbers: the Prepared is copied with other numbers, and its
   compiled kernels are used again.

What is found nowhere is planned, and added under both keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import is_
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cupyfa.runtime.prepared import Prepared

_MOST_KNOWN = 256  # calls of a backend, each under up to two keys
is_none = partial(is_, None)  # functions of C, so that a repeated call enters few of Python
# By function: the arguments of its last call that are no arrays, and its Prepared.
last_calls: dict[str, tuple[tuple[Any, ...], Prepared]] = {}


class CallCache:
    """The prepared calls of a backend by their keys."""

    def __init__(self) -> None:
        self.prepared: dict[Any, Prepared] = {}

    def find(self, key: tuple[Any, ...]) -> Prepared | None:
        try:
            return self.prepared.get(key)
        except TypeError:  # an argument that cannot be hashed, and will be refused
            return None

    def add(self, key: tuple[Any, ...], prepared: Prepared) -> None:
        if any(x.path.is_absolute() for x in prepared.plan.launches):  # own files may change
            return
        if len(self.prepared) >= _MOST_KNOWN:
            self.prepared.clear()
        self.prepared[key] = prepared

    def clear(self) -> None:
        """Forgets all calls, also what ``repeat_call`` knows."""
        self.prepared.clear()
        last_calls.clear()


def repeat_call(
    function: str,
    fixed: tuple[Any, ...],
    arrays: Sequence[Any],
    out: Any = None,
    grads: Any = None,
    before: Callable[[], None] | None = None,
) -> Any:
    """The results of a call like the function's last one on the arrays of an earlier call.

    fixed: all that is no array, compared by identity, as True equals 1, which is refused; and which
    optional arrays are given. arrays: those that are given, in the order of calls. before: what is
    done ahead of the launches. Returns None if there was no such call.
    """
    last = last_calls.get(function)
    if last is None or len(last[0]) != len(fixed) or not all(map(is_, last[0], fixed)):
        return None
    prepared = last[1]
    return prepared.again(arrays, prepared.targets(out, grads), shapes=True, before=before)
