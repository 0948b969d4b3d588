"""The cache of calls, which saves reading and planning the arguments of a repeated call.

It has two levels, which are tried in this order:

1. The same arrays. ``repeat_call`` compares the arguments other than arrays with those of the last
   call of the function, by identity, and asks the Prepared of that call for its launches on
   identical arrays (``Repeats``). A KVCache keeps its own last call, since new tokens have to be
   written each time; ``call/decode.py`` compares it in the same way.
2. The same forms. ``CallCache.find`` takes a key of all arguments and of the forms of the arrays:
   shapes, strides, dtypes and device. The Prepared that it finds runs on the new arrays. A second
   key leaves out numbers; the Prepared that it finds is copied with new numbers, and its compiled
   kernels are used again.

A call that is found at neither level is planned, and added under both keys of the second level; if
it comes again, it also becomes the last call of its function.
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

_MOST_KNOWN = 256  # keys of calls (up to two per call) of a backend; also launchers of helpers
_MOST_REPEATS = 32  # sets of arrays for which a Prepared keeps launches
_MOST_SPARES = 2  # sets of results kept for reuse: the caller usually still holds one
_MOST_MISSES = 8  # calls that find all spares in use before no more spares are kept
_SMALL = 1 << 20  # bytes; larger results are not kept
# Functions implemented in C, so that a repeated call enters few Python functions.
is_none = partial(is_, None)
shape_of = attrgetter("shape")


class LastCall(NamedTuple):
    """The last call of a function or on a KVCache, which may be repeated."""

    fixed: tuple[Any, ...]  # the arguments that are not arrays
    prepared: Prepared


last_calls: dict[str, LastCall] = {}  # by function


def repeat_call(
    function: str, fixed: tuple[Any, ...], arrays: Sequence[Any], out: Any = None, grads: Any = None
) -> Any:
    """Repeats the function's last call if its arguments are the same and its arrays known.

    fixed: the arguments that are not arrays, and which optional arrays are present; compared by
    identity, since True equals 1, which is refused. arrays: the arrays that are present, in the
    order of arguments. Returns the results, or None if there was no such call.
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
        except TypeError:  # an unhashable argument, which is refused later
            return None

    def add(self, key: tuple[Any, ...], prepared: Prepared) -> None:
        # Files outside the library are a user's kernels, which may change.
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
    """Empties ``known`` if it has ``most`` entries."""
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
    memory: Any  # of arguments and temporaries, kept alive for the launches
    holders: tuple[Any, ...]  # the objects that keep the results' memory alive
    references: int  # the reference count of the holders while no caller has the results

    def is_free(self) -> bool:
        """Whether no caller has a reference to the results or has changed their shapes."""
        return (
            sum(map(getrefcount, self.holders)) == self.references
            and list(map(shape_of, self.results)) == self.shapes
            and (not any(map(getweakrefcount, self.results)) or not self._are_watched())
        )

    def _are_watched(self) -> bool:
        """Whether a caller has a weak reference to a result, and may wait for its deletion."""
        return any(type(y) is not _Ref for x in self.results for y in getweakrefs(x))


class Repeat:
    """The launches of a call, for later calls on identical arrays."""

    __slots__ = ("launch", "memory", "misses", "refs", "shapes", "spares")

    def __init__(self, arrays: Sequence[Any], forget: Callable[[Any], Any]) -> None:
        """``forget`` is called when one of the arrays is deleted: another may get its id."""
        self.refs = [_Ref(x, forget) for x in arrays]
        self.shapes = list(map(shape_of, arrays))
        self.launch: Callable[[], Any] | None = None  # if results are written to caller's arrays
        self.memory: Any = None  # of arguments and temporaries
        self.spares: deque[Spare] = deque()  # if results are new arrays
        self.misses = 0

    def spare(self, allocator: Any) -> Spare | None:
        """Takes results that may be reused out of the spares; the caller puts them back."""
        try:
            spare = self.spares.popleft()
        except IndexError:
            return None
        if spare.allocator is allocator and spare.is_free():
            self.misses = 0
            return spare
        if self.spares:  # all spares are in use
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
    """The calls of a Prepared, by the identity of their arrays: the first level of the cache."""

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
        """Keeps the launches of a call if an earlier call had the same arrays.

        ``make`` prepares launches that write to these results, and returns them with their memory.
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
