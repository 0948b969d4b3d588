"""Caches calls, so that a repeated call skips the checks and the planning of its arguments.

The cache has two levels, which are tried in this order:

1. Same arrays. ``repeat_call`` compares the non-array arguments with those of the function's last
   call, by identity. If they match, it looks up launches on identical arrays in the Prepared of
   that call (``Repeats``). A KVCache keeps its own last call, since each call has to write new
   tokens; ``call/decode.py`` compares that call in the same way.
2. Same forms. ``CallCache.find`` looks up a key of all arguments and of the arrays' shapes,
   strides, dtypes and device; the Prepared that it returns runs on the new arrays. A second key
   omits numbers; a Prepared found by that key is copied with the new numbers and reuses its
   compiled kernels.

A call that neither level finds is planned, and added under both keys of the second level. When it
is repeated, it also becomes the last call of its function.
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

_MOST_KNOWN = 256  # maximum number of keys (up to two per call), and of helper launchers
_MOST_REPEATS = 32  # maximum number of sets of arrays for which a Prepared keeps launches
# Maximum number of sets of results that are kept for reuse. One is not enough, since the caller
# usually still holds the results of the last call.
_MOST_SPARES = 2
# If more calls than this in a row find all spares in use, no more spares are added.
_MOST_MISSES = 8
_SMALL = 1 << 20  # bytes; larger results are not kept
# Implemented in C, so that a repeated call enters few Python functions.
shape_of = attrgetter("shape")


class LastCall(NamedTuple):
    """The last call of a function or on a KVCache, which may be repeated."""

    fixed: tuple[Any, ...]  # the non-array arguments
    prepared: Prepared


last_calls: dict[str, LastCall] = {}  # by function name


def repeat_call(
    function: str, fixed: tuple[Any, ...], arrays: Sequence[Any], out: Any = None, grads: Any = None
) -> Any:
    """Repeats the function's last call if all arguments are identical; else returns None.

    fixed: the non-array arguments, and which optional arrays are present. They are compared by
    identity, because True equals 1, which is not a valid flag. arrays: the arrays that are present,
    in argument order.
    """
    last = last_calls.get(function)
    if last is None or len(last.fixed) != len(fixed) or not all(map(is_, last.fixed, fixed)):
        return None
    prepared = last.prepared
    return prepared.again(arrays, prepared.targets(out, grads), shapes=True)


class CallCache:
    """Maps call keys to prepared calls and launchers of one backend."""

    def __init__(self) -> None:
        self.prepared: dict[Any, Prepared] = {}
        self.launchers: dict[Any, Launcher] = {}  # see ``launcher.find_launcher``

    def find(self, key: tuple[Any, ...]) -> Prepared | None:
        try:
            return self.prepared.get(key)
        except TypeError:  # an unhashable argument, which is rejected later
            return None

    def add(self, key: tuple[Any, ...], prepared: Prepared) -> None:
        # Files outside the library are the user's kernels, which may change between calls.
        if any(x.path.is_absolute() for x in prepared.plan.launches):
            return
        make_room(self.prepared)
        self.prepared[key] = prepared

    def clear(self) -> None:
        """Forgets all calls, including the last call of each function."""
        self.prepared.clear()
        self.launchers.clear()
        last_calls.clear()


def make_room(known: dict[Any, Any], most: int = _MOST_KNOWN) -> None:
    """Clears the cache ``known`` if it contains ``most`` or more entries."""
    if len(known) >= most:
        known.clear()


class _Ref(ref):
    """A weak reference created by this cache; callers' references have another type."""

    __slots__ = ()


class Spare(NamedTuple):
    """Output arrays of an earlier call, kept for reuse, and the launches that write to them."""

    results: list[Any]
    shapes: list[Any]
    allocator: Any
    launch: Callable[[], Any]
    memory: Any  # memory of arguments and temporaries, kept alive for the launches
    holders: tuple[Any, ...]  # the objects that keep the results' memory alive
    references: int  # total reference count of ``holders`` while no caller holds the results

    def is_free(self) -> bool:
        """Returns whether no caller has a reference to the results or has changed their shapes."""
        return (
            sum(map(getrefcount, self.holders)) == self.references
            and list(map(shape_of, self.results)) == self.shapes
            and (not any(map(getweakrefcount, self.results)) or not self._are_watched())
        )

    def _are_watched(self) -> bool:
        """Returns whether a caller has a weak reference to a result, perhaps with a callback."""
        return any(type(y) is not _Ref for x in self.results for y in getweakrefs(x))


class Repeat:
    """The launches of a call, kept for later calls on identical arrays."""

    __slots__ = ("launch", "memory", "misses", "refs", "shapes", "spares")

    def __init__(self, arrays: Sequence[Any], forget: Callable[[Any], Any]) -> None:
        """``forget`` is called when an array is deleted, because a new array may get its id."""
        self.refs = [_Ref(x, forget) for x in arrays]
        self.shapes = list(map(shape_of, arrays))
        self.launch: Callable[[], Any] | None = None  # used if the caller passes result arrays
        self.memory: Any = None  # memory of arguments and temporaries
        self.spares: deque[Spare] = deque()  # used if results are new arrays
        self.misses = 0

    def spare(self, allocator: Any) -> Spare | None:
        """Removes a reusable spare from the spares and returns it; the caller must put it back."""
        try:
            spare = self.spares.popleft()
        except IndexError:
            return None
        if spare.allocator is allocator and spare.is_free():
            self.misses = 0
            return spare
        if self.spares:  # drop the oldest of several spares, which is in use
            self.misses += 1
        else:
            self.spares.append(spare)
        return None

    def keep(self, backend: Backend, results: list[Any], launch: Any, memory: Any) -> None:
        """Keeps results for later calls, which reuse them once the caller has dropped them."""
        holders = tuple(y for x in results for y in backend.holders(x))
        allocator, shapes = backend.allocator(), list(map(shape_of, results))
        count = sum(map(getrefcount, holders))
        spare = Spare(results, shapes, allocator, launch, memory, holders, count)
        self.spares.append(spare)


class Repeats:
    """The first level of the cache: calls of a Prepared, by the identity of their arrays."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        # By device, stream and the ids of the inputs and of the caller's result arrays.
        self.known: dict[tuple[Any, ...], Repeat] = {}
        # Weak references to the arrays of earlier calls, by the id of the first array.
        self._before: dict[int, tuple[_Ref, ...]] = {}

    def remember(
        self,
        where: tuple[int, int | None],
        arrays: Sequence[Any],
        targets: Sequence[Any],
        results: list[Any],
        make: Callable[[], tuple[Any, Any]],
    ) -> None:
        """Keeps the launches of a call if an earlier call used the same arrays.

        ``make`` prepares launches that write to ``results``; it returns them with their memory.
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
        """Returns whether an earlier call used these arrays; remembers this call."""
        before = self._before.get(id(arrays[0]), ())
        if len(before) == len(arrays) and all(x() is y for x, y in zip(before, arrays)):
            return True
        make_room(self._before, _MOST_REPEATS)
        self._before[id(arrays[0])] = tuple(map(_Ref, arrays))
        return False
