"""Calls on the very arrays of an earlier call: their launches, and small results used again."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from sys import getrefcount
from typing import Any, NamedTuple
from weakref import getweakrefcount, getweakrefs, ref

from cupyfa.runtime.backend import Backend

_MOST_REPEATS = 32  # calls whose launches are kept, by their arrays
_MOST_SPARES = 2  # results of a call that are kept for another: the caller usually holds one
_MOST_MISSES = 8  # calls that found all of these in use, after which no more are kept
_SMALL = 1 << 20  # bytes; results up to this size are kept
shape_of = attrgetter("shape")


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
    """The calls of a Prepared that may come again."""

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
            if len(self.known) >= _MOST_REPEATS:
                self.known.clear()
            self.known[key] = repeat

    def _came_before(self, arrays: Sequence[Any]) -> bool:
        """Whether there was a call on these arrays; remembers that there is one now."""
        before = self._before.get(id(arrays[0]), ())
        if len(before) == len(arrays) and all(x() is y for x, y in zip(before, arrays)):
            return True
        if len(self._before) >= _MOST_REPEATS:
            self._before.clear()
        self._before[id(arrays[0])] = tuple(map(_Ref, arrays))
        return False
