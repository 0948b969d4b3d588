"""The cache of calls: a call that came before is neither read nor planned again.

It has two levels, which are asked in this order:

1. The same arrays. ``repeat_call`` compares the arguments that are no arrays with those of the last
   call of the function, by identity, and asks the Prepared of that call for its launches on the
   very same arrays (``Repeats``). A KVCache keeps its own last call, whose step has to be written
   again, and ``call/decode.py`` compares that in the same way.
2. The same forms. ``CallCache.find`` takes a key of all arguments and of the forms of the arrays:
   shapes, strides, dtypes and device. The Prepared runs on the new arrays. With a key without
   numbers it finds a Prepared that is copied with other numbers; compiled kernels stay.

What is found nowhere is planned, and added under both keys of the second level; the second time it
is also the last call of its function.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, is_
from sys import getrefcount
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import getweakrefcount, getweakrefs, ref

if TYPE_CHECKING:
    from cupyfa.runtime.backend import Backend
    from cupyfa.runtime.launcher import Launcher
    from cupyfa.runtime.prepared import Prepared

_MOST_KNOWN = 256  # calls of a backend, each under up to two keys; and launches that are no rungs
_MOST_REPEATS = 32  # calls of a Prepared whose launches are kept, by their arrays
_MOST_SPARES = 2  # results of a call that are kept for another: the caller usually holds one
_MOST_MISSES = 8  # calls that found all of these in use, after which no more are kept
_SMALL = 1 << 20  # bytes; results up to this size are kept
# Functions of C, so that a repeated call enters few of Python.
is_none = partial(is_, None)
shape_of = attrgetter("shape")


class LastCall(NamedTuple):
    """The last call of a function, or on a KVCache, which may come again."""

    fixed: tuple[Any, ...]  # its arguments that are no arrays
    prepared: Prepared


last_calls: dict[str, LastCall] = {}  # by function


def repeat_call(
    function: str, fixed: tuple[Any, ...], arrays: Sequence[Any], out: Any = None, grads: Any = None
) -> Any:
    """The results of a call like the function's last one on the arrays of an earlier call.

    fixed: all that is no array, compared by identity, as True equals 1, which is refused; and which
    optional arrays are given. arrays: those that are given, in the order of calls. Returns None if
    there was no such call.
    """
    last = last_calls.get(function)
    if last is None or len(last.fixed) != len(fixed) or not all(map(is_, last.fixed, fixed)):
        return None
    prepared = last.prepared
    return prepared.again(arrays, prepared.targets(out, grads), shapes=True)


class CallCache:
    """The calls of a backend by their keys."""

    def __init__(self) -> None:
        self.prepared: dict[Any, Prepared] = {}
        self.launchers: dict[Any, Launcher] = {}  # see ``launcher.find_launcher``

    def find(self, key: tuple[Any, ...]) -> Prepared | None:
        try:
            return self.prepared.get(key)
        except TypeError:  # an argument that cannot be hashed, and will be refused
            return None

    def add(self, key: tuple[Any, ...], prepared: Prepared) -> None:
        if any(x.path.is_absolute() for x in prepared.plan.launches):  # own files may change
            return
        make_room(self.prepared)
        self.prepared[key] = prepared

    def clear(self) -> None:
        """Forgets all calls, also the last ones of functions."""
        self.prepared.clear()
        self.launchers.clear()
        last_calls.clear()


def make_room(known: dict[Any, Any], most: int = _MOST_KNOWN) -> None:
    """Forgets all if there is no room for more."""
    if len(known) >= most:
        known.clear()


class _Ref(ref):
    """A reference to an array of a call that may be repeated."""

    __slots__ = ()


class Spare(NamedTuple):
    """Results of an earlier call, and launches that write to them."""

    results: list[Any]
    shapes: list[Any]
    allocator: Any
    launch: Callable[[], Any]
    memory: Any  # of arguments and temporaries
    holders: tuple[Any, ...]  # the objects that keep the results' memory alive
    references: int  # to the holders while nobody else has one

    def is_free(self) -> bool:
        """Whether nobody else has a reference to the results, nor has changed their shapes."""
        return (
            sum(map(getrefcount, self.holders)) == self.references
            and list(map(shape_of, self.results)) == self.shapes
            and (not any(map(getweakrefcount, self.results)) or not self._are_watched())
        )

    def _are_watched(self) -> bool:
        """Whether somebody else has a weak reference to a result, and may wait for its end."""
        return any(type(y) is not _Ref for x in self.results for y in getweakrefs(x))


class Repeat:
    """The launches of a call on certain arrays, for calls on the very same arrays."""

    __slots__ = ("launch", "memory", "misses", "refs", "shapes", "spares")

    def __init__(self, arrays: Sequence[Any], forget: Callable[[Any], Any]) -> None:
        """``forget`` is called when one of the arrays is deleted: another may get its id."""
        self.refs = [_Ref(x, forget) for x in arrays]
        self.shapes = list(map(shape_of, arrays))
        self.launch: Callable[[], Any] | None = None  # where the results are the caller's
        self.memory: Any = None  # of arguments and temporaries
        self.spares: deque[Spare] = deque()  # where they are new
        self.misses = 0

    def spare(self, allocator: Any) -> Spare | None:
        """Results that may be used again; nobody else gets them until they are put back."""
        try:
            spare = self.spares.popleft()
        except IndexError:
            return None
        if spare.allocator is allocator and spare.is_free():
            self.misses = 0
            return spare
        if self.spares:  # more are in use than are kept
            self.misses += 1
        else:
            self.spares.append(spare)
        return None

    def keep(self, backend: Backend, results: list[Any], launch: Any, memory: Any) -> None:
        """Keeps results for later calls, which take them when the caller has dropped them."""
        holders = tuple(y for x in results for y in backend.holders(x))
        allocator, shapes = backend.allocator(), list(map(shape_of, results))
        count = sum(map(getrefcount, holders))
        spare = Spare(results, shapes, allocator, launch, memory, holders, count)
        self.spares.append(spare)


class Repeats:
    """The calls of a Prepared on arrays that may come again: the first level of the cache."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        # By device, stream and the ids of the inputs and of the caller's arrays for the results.
        self.known: dict[tuple[Any, ...], Repeat] = {}
        self._before: dict[int, tuple[_Ref, ...]] = {}  # arrays of calls, by the first one's id

    def remember(
        self,
        where: tuple[int, int | None],
        arrays: Sequence[Any],
        targets: Sequence[Any],
        results: list[Any],
        make: Callable[[], tuple[Any, Any]],
    ) -> None:
        """Keeps a call whose arrays have come before.

        ``make`` lays out launches that write to these results, with the memory they need.
        """
        own = all(x is None for x in targets)
        if not own and any(x is None for x in targets):
            return
        given = arrays if own else (*arrays, *targets)
        key = (where, *map(id, (*arrays, *targets)))
        repeat = self.known.get(key)
        if repeat is None and not self._came_before(given):
            return
        if repeat is None:
            repeat = Repeat(given, partial(self.known.pop, key))
        if not own:
            launch, repeat.memory = make()
            repeat.launch = launch
        elif (
            len(repeat.spares) < _MOST_SPARES
            and repeat.misses <= _MOST_MISSES
            and sum(x.nbytes for x in results) <= _SMALL
        ):
            repeat.keep(self._backend, results, *make())
        if key not in self.known:
            make_room(self.known, _MOST_REPEATS)
            self.known[key] = repeat

    def _came_before(self, arrays: Sequence[Any]) -> bool:
        """Whether there was a call on these arrays; remembers that there is one now."""
        before = self._before.get(id(arrays[0]), ())
        if len(before) == len(arrays) and all(x() is y for x, y in zip(before, arrays)):
            return True
        make_room(self._before, _MOST_REPEATS)
        self._before[id(arrays[0])] = tuple(map(_Ref, arrays))
        return False
