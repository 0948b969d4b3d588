"""Prepared calls: the plan is made and the kernels are compiled; only the arrays are missing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations, pairwise
from operator import attrgetter
from sys import getrefcount
from typing import Any, NamedTuple
from weakref import getweakrefcount, getweakrefs, ref

import numpy as np

from cupyfa.errors import Unsupported, described
from cupyfa.operations import OPERATIONS
from cupyfa.planner import select as planning
from cupyfa.planner.plan import Limits, Plan
from cupyfa.problem import Problem, four_axes
from cupyfa.runtime import guard, transfer
from cupyfa.runtime.arrays import (
    address_of,
    extent,
    is_readable,
    is_writable,
    overlap,
    readable_inputs,
    target,
    with_planned_shapes,
)
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.launcher import Kernels, Launcher, Misaligned, compiled, run
from cupyfa.runtime.select import adopt, writable_view
from cupyfa.runtime.workspace import PER_THREAD, Space, Workspace, allocated

_MOST_REPEATS = 32  # calls whose launches are kept, by their arrays
_MOST_SPARES = 2  # results of a call that are kept for another: the caller usually holds one
_MOST_MISSES = 8  # calls that found all of these in use, after which no more are kept
_SMALL = 1 << 20  # bytes; results up to this size are kept
Form = tuple[Any, ...]
Progress = Callable[[int, int, str], None]
# Callers' names of arrays, where they are not the operation's.
NAMES = {"q": "Q", "k": "K", "v": "V", "out": "O", "dout": "dO", "x": "S"}
_shape_of = attrgetter("shape")


class Result(NamedTuple):
    """An array that a call returns, or that the caller gives for it."""

    name: str  # the operation's
    shape: tuple[int, ...]  # the caller's
    given: str | None  # what messages call the caller's array; None if there can be none


class _Ref(ref):
    """A reference to an array of a call that may be repeated."""

    __slots__ = ()


class _Spare(NamedTuple):
    """Results of a call before, and launches that write to them."""

    results: list[Any]
    shapes: tuple[Any, ...]
    allocator: Any
    launch: Callable[[], Any]
    memory: Any  # of arguments and temporaries
    holders: tuple[Any, ...]  # the objects that keep the results' memory alive
    references: int  # to the holders while nobody else has one

    def is_free(self) -> bool:
        """Whether nobody else has a reference to the results, nor has changed their shapes."""
        return (
            sum(map(getrefcount, self.holders)) == self.references
            and not (
                any(map(getweakrefcount, self.results)) and any(map(_is_watched, self.results))
            )
            and tuple(map(_shape_of, self.results)) == self.shapes
        )


def _is_watched(array: Any) -> bool:
    """Whether somebody else has a weak reference to an array, and may wait for its end."""
    return any(type(x) is not _Ref for x in getweakrefs(array))


class _Repeat:
    """The launches of a call on certain arrays, for calls on the very same arrays."""

    __slots__ = ("launch", "memory", "misses", "refs", "shapes", "spares")

    def __init__(self, arrays: Sequence[Any], forget: Callable[[Any], Any]) -> None:
        """``forget`` is called when one of the arrays is deleted: another may get its id."""
        self.refs = [_Ref(x, forget) for x in arrays]
        self.shapes = tuple(map(_shape_of, arrays))
        self.launch: Callable[[], Any] | None = None  # where the results are the caller's
        self.memory: Any = None  # of arguments and temporaries
        self.spares: deque[_Spare] = deque()  # where they are new
        self.misses = 0

    def spare(self, allocator: Any) -> _Spare | None:
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


def form(backend: Backend, array: Any) -> Form:
    """What decides how a call sees an array: shape, strides and dtype, and the device.

    For an array of the host that a device cannot reach the strides do not matter.
    """
    if backend.owns(array):
        return backend.form(array)
    return tuple(array.shape), None, array.dtype, backend.device


def viewed(problem: Problem, layout: str | None, axes: str, array: Any) -> Any:
    """A caller's array as the kernel sees it, with these axes; without a layout they are rows."""
    if layout is None or len(axes.split()) != 4:
        return array.reshape(problem.shape(axes))
    return four_axes(array, layout)


class Prepared:
    """A call for arrays of the same shapes, strides and dtypes on the same device.

    ``prepared(q, k, v, out=None)`` is ``attention`` and ``prepared(dout, q, k, v, out, lse,
    grads=None)`` is ``attention_backward``, with the options that it was made with; ``plan`` is
    what was decided. A call launches in CuPy's current stream. That may be captured: the graph may
    be launched as long as the Prepared lives, and not at the same time as another graph that was
    captured in that stream, or in a later one at its address, for these share temporaries. Any
    number of threads may call. It is fastest with arrays for the results, and with the very arrays
    of the call before, which it recognises by their identity.
    """

    def __init__(
        self,
        backend: Backend,
        plan: Plan,
        inputs: Mapping[str, Any],
        results: Sequence[Result],
        *,
        layout: str | None,
        keep: bool,
    ) -> None:
        """``inputs`` are arrays like those to come, by the callers' names.

        ``keep`` compiles everything, and holds temporaries and arguments from call to call.
        """
        for result in results:
            if result.name not in plan.outputs:
                raise Unsupported(
                    f"{plan.kernel.name} does not compute {result.name}; use another kernel"
                )
        operation = OPERATIONS[plan.kernel.operation]
        self.plan = plan
        self._backend, self._device, self._keep = backend, backend.device, keep
        self._names = tuple(inputs)
        self._forms = tuple(form(backend, x) for x in inputs.values())
        self._results = tuple(results)
        self._given = sum(x.given is not None for x in results)
        self._new = [(x.shape, plan.outputs[x.name][1]) for x in results]
        axes = operation.axes_of(plan.problem)
        self._views = {x: partial(viewed, plan.problem, layout, axes[x]) for x in axes}
        self._pieces: transfer.Pieces | None = None
        unasked = [x for x in plan.outputs if x not in {result.name for result in results}]
        self._workspace = Workspace(backend, plan, (*unasked, *plan.scratch), keep=keep)
        # By device, stream and the ids of the inputs and of the caller's arrays for the results.
        self._repeats: dict[tuple[int | None, ...], _Repeat] = {}
        self._seen_before: dict[
            int, tuple[_Ref, ...]
        ] = {}  # arrays of calls, by the first one's id
        p, seen = plan.problem, self._seen(inputs)
        self._without_columns = any(
            tuple(x.shape) != operation.inputs[name].shape(p) for name, x in seen.items()
        )
        self._owned = backend.owns(next(iter(inputs.values())))
        self._launcher = self._made_launcher(inputs) if self._owned else None
        self._kernels: Kernels | None = None  # for calls without the launcher
        if keep and self._launcher is None:
            self._kernels = compiled(backend, plan)

    def __call__(self, *arrays: Any, out: Any = None, grads: Any = None, **named: Any) -> Any:
        """What the function returns for these arrays.

        Raises ValueError for arrays unlike those that it was made for, and what the function
        raises for ``out``, ``grads`` and failures of the device.
        """
        if named or len(arrays) != len(self._names):
            arrays, out = self._by_name(arrays, out, named)
        targets = self.targets(out, grads)
        if self._repeats:
            repeated = self.again(arrays, targets, shapes=False)
            if repeated is not None:
                return repeated
        try:
            same = tuple(map(self._backend.form, arrays)) == self._forms
        except AttributeError:  # the host's, or another library's
            same = False
        if not same:
            arrays = tuple(self._adopted(arrays))
        return self.run(arrays, targets)

    def run(
        self,
        arrays: Sequence[Any],
        targets: Sequence[Any] | None = None,
        *,
        check: bool = False,
        progress: Progress | None = None,
    ) -> Any:
        """The call, for arrays that are known to be like those that it was made for.

        ``targets`` are the caller's arrays for the results, each None for a new one.
        """
        backend, launcher = self._backend, self._launcher
        if launcher is None or check:
            return self._closely(arrays, targets, check, progress)
        device, stream = where = backend.current()
        if device != self._device:
            with backend.working_on(arrays[0]):
                return self.run(arrays, targets)
        try:
            given = tuple(map(backend.address, arrays))
            if targets is None:
                results = [backend.empty(*x) for x in self._new]
            elif self._takes(targets, given):
                results = [
                    backend.empty(*new) if mine is None else mine
                    for mine, new in zip((*targets, None), self._new)
                ]
            else:
                return self._closely(arrays, targets, check, progress)
            space = self._workspace.at(stream)  # which must live until the launch
            every = (*given, *map(backend.address, results), *space[1])
            if self._mask and self._is_misaligned(every):
                return self._in_general(arrays, targets, check, progress)
            try:
                launcher(every, stream)
            except Misaligned:
                return self._in_general(arrays, targets, check, progress)
            if stream is not None and stream != PER_THREAD:
                self._remember(arrays, targets, results, every, where, space)
        except backend.failures:
            with backend.working_on(arrays[0]):
                raise
        return results[0] if len(results) == 1 else tuple(results)

    def again(
        self, arrays: Sequence[Any], targets: Sequence[Any] | None, *, shapes: bool = True
    ) -> Any:
        """The call on the very arrays of a call before; None if there was none.

        With ``shapes`` these are compared, too: a shape may have been changed in place.
        """
        backend = self._backend
        given = arrays if targets is None else (*arrays, *targets)
        where = backend.current()
        repeat = self._repeats.get((*where, *map(id, given)))
        if repeat is None or (shapes and tuple(map(_shape_of, given)) != repeat.shapes):
            return None
        if where[1] and backend.is_capturing:  # a graph has temporaries of its own
            return self.run(arrays, targets)
        results, launch, spare = targets, repeat.launch, None
        if results is None:
            spare = repeat.spare(backend.allocator())
            if spare is None:
                return self.run(arrays)
            results, launch = spare.results, spare.launch
        assert launch is not None
        try:
            launch()
        except backend.failures:
            with backend.working_on(arrays[0]):
                backend.use(self._device)  # a new thread has no CUDA context yet
                launch()
        if spare is not None:
            repeat.spares.append(spare)
        return results[0] if len(results) == 1 else tuple(results)

    def forget(self) -> None:
        """Drops the launches and results that are kept for calls on the same arrays."""
        self._repeats.clear()

    def targets(self, out: Any, grads: Any) -> Sequence[Any] | None:
        """The caller's arrays for the results: ``out``, or three ``grads``."""
        if self._given == 1:
            if grads is not None:
                raise TypeError("grads are of attention_backward; give out=")
            return None if out is None else (out,)
        if out is not None:
            raise TypeError("out= is of attention; give grads=, three arrays")
        if grads is None:
            return None
        if not isinstance(grads, tuple | list) or len(grads) != self._given:
            many = isinstance(grads, tuple | list)
            what = f"has {len(grads)} elements" if many else f"is {described(grads)}"
            raise TypeError(
                f"grads {what}; give the three arrays for dq, dk and dv, each None for a new one"
            )
        return grads

    # Which arrays were given

    def _by_name(
        self, arrays: tuple[Any, ...], out: Any, named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], Any]:
        """All inputs in order, some of which were given by name; and ``out``, if it is none."""
        if "out" in self._names and out is not None:
            named, out = {**named, "out": out}, None
        left = self._names[len(arrays) :]
        if len(arrays) > len(self._names) or set(left) != set(named):
            raise TypeError(
                f"the arrays are {', '.join(self._names)}; given are {len(arrays)} without a name"
                + (f" and {', '.join(named)}" if named else "")
            )
        return (*arrays, *(named[name] for name in left)), out

    def _adopted(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays as the backend's; raises for arrays unlike those that this was made for."""
        _, adopted = adopt(self._backend, **dict(zip(self._names, arrays)))
        for name, array, wanted in zip(self._names, adopted, self._forms):
            given = form(self._backend, array)
            if given != wanted:
                raise ValueError(
                    f"{name} is {_described(given)}, and this was compiled for "
                    f"{_described(wanted)}; compile it again, or call the function"
                )
        return adopted

    def _is_known(self, array: Any) -> bool:
        """Whether a caller's array for a result is of a kind that is written as it is."""
        return array is None or isinstance(array, np.ndarray) or self._backend.owns(array)

    def _views_of(self, targets: Sequence[Any]) -> list[Any]:
        """The caller's arrays for the results, other libraries' as NumPy's or the backend's."""
        found = list(targets)
        for at, (result, array) in enumerate(zip(self._results, targets)):
            if not self._is_known(array):
                assert result.given is not None
                found[at] = writable_view(self._backend, result.given, array)
        return found

    def _takes(self, targets: Sequence[Any], given: tuple[int, ...]) -> bool:
        """Whether the caller's arrays can be written as they are; else they are checked closely."""
        backend, extents = self._backend, self._extents
        if not backend.writes_in_place:
            return False
        try:
            for mine, wanted, size in zip(targets, self._result_forms, self._result_bytes):
                if mine is None:
                    continue
                if backend.form(mine) != wanted:
                    return False
                start = backend.address(mine)
                for other, (low, high) in zip(given, extents):
                    if start < other + high and other + low < start + size:
                        return False
            return len(targets) == 1 or self._are_apart(targets)
        except AttributeError:  # the host's, or another library's
            return False

    def _are_apart(self, targets: Sequence[Any]) -> bool:
        """Whether no two arrays for results, all contiguous, share memory."""
        address, sizes = self._backend.address, self._result_bytes
        spans = sorted((address(x), size) for x, size in zip(targets, sizes) if x is not None)
        return all(start + size <= after for (start, size), (after, _) in pairwise(spans))

    def _is_misaligned(self, addresses: Sequence[int]) -> bool:
        bits = 0
        for address in addresses:
            bits |= address
        return bool(bits & self._mask)

    # Launches

    def _made_launcher(self, arrays: Mapping[str, Any]) -> Launcher | None:
        """The short way to launch the plan, if arrays like these need no copy for it."""
        backend, plan = self._backend, self.plan
        inputs = self._seen(arrays)
        for (name, seen), array in zip(inputs.items(), arrays.values()):
            in_place = address_of(seen) == address_of(array)
            if not (in_place and is_readable(plan, name, seen)):
                return None
        outputs = {}
        made = [backend.empty(*x) for x in self._new]
        for result, array in zip(self._results, made):
            seen = outputs[result.name] = self._views[result.name](array)
            if not is_writable(plan, result.name, seen):
                return None
        self._extents = [extent(x) for x in arrays.values()]
        self._result_forms = [form(backend, x) for x in made]
        self._result_bytes = [x.nbytes for x in made]
        on_host = isinstance(made[0], np.ndarray)  # where addresses may be misaligned
        self._mask = max(x.dtype.itemsize for x in (*arrays.values(), *made)) - 1 if on_host else 0
        return Launcher(backend, plan, {**inputs, **outputs, **self._workspace.new()})

    def _remember(
        self,
        arrays: Sequence[Any],
        targets: Sequence[Any] | None,
        results: list[Any],
        addresses: tuple[int, ...],
        where: tuple[int, int | None],
        space: Space,
    ) -> None:
        """Keeps the launches of a call on arrays that have come before."""
        given = arrays if targets is None else (*arrays, *targets)
        if targets is not None and (len(targets) < len(results) or any(x is None for x in targets)):
            return
        key = (*where, *map(id, given))
        repeat = self._repeats.get(key)
        if repeat is None and not self._came_before(given):
            return
        if where[1] and self._backend.is_capturing:
            return
        if repeat is None:
            repeat = _Repeat(given, partial(self._repeats.pop, key))
        if targets is None:
            self._keep_results(repeat, results, addresses, where[1], space)
        elif repeat.launch is None:
            assert self._launcher is not None
            launch, memory = self._launcher.fixed(addresses, where[1])
            repeat.memory, repeat.launch = (memory, space), launch
        if key not in self._repeats:
            if len(self._repeats) >= _MOST_REPEATS:
                self._repeats.clear()
            self._repeats[key] = repeat

    def _came_before(self, arrays: Sequence[Any]) -> bool:
        """Whether there was a call on these arrays; remembers that there is one now."""
        before = self._seen_before.get(id(arrays[0]), ())
        if len(before) == len(arrays) and all(x() is y for x, y in zip(before, arrays)):
            return True
        if len(self._seen_before) >= _MOST_REPEATS:
            self._seen_before.clear()
        self._seen_before[id(arrays[0])] = tuple(map(_Ref, arrays))
        return False

    def _keep_results(
        self,
        repeat: _Repeat,
        results: list[Any],
        addresses: tuple[int, ...],
        stream: int | None,
        space: Space,
    ) -> None:
        """Keeps small results for later calls, which take them when the caller has dropped them."""
        full = len(repeat.spares) >= _MOST_SPARES or repeat.misses > _MOST_MISSES
        if full or sum(self._result_bytes) > _SMALL:
            return
        assert self._launcher is not None
        launch, memory = self._launcher.fixed(addresses, stream)
        holders = tuple(y for x in results for y in self._backend.holders(x))
        shapes, allocator = tuple(map(_shape_of, results)), self._backend.allocator()
        count = sum(map(getrefcount, holders))
        memory = (memory, space)
        spare = _Spare(results, shapes, allocator, launch, memory, holders, count)
        repeat.spares.append(spare)

    # All that arrays may need: copies, another layout, a way to the device

    def _seen(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs as the kernel sees them, by the operation's names."""
        names = ((NAMES.get(name, name), x) for name, x in arrays.items())
        return {name: self._views[name](x) for name, x in names}

    def _closely(
        self,
        arrays: Sequence[Any],
        targets: Sequence[Any] | None,
        check: bool,
        progress: Progress | None,
    ) -> Any:
        """The call for results that cannot be written at once; views of other libraries' arrays."""
        if targets is not None and not all(map(self._is_known, targets)):
            results = self.run(arrays, self._views_of(targets), check=check, progress=progress)
            return _as_given(results, targets)
        return self._in_general(arrays, targets, check, progress)

    def _in_general(
        self,
        arrays: Sequence[Any],
        targets: Sequence[Any] | None,
        check: bool,
        progress: Progress | None,
    ) -> Any:
        backend = self._backend
        with backend.working_on(arrays[0]):
            inputs = self._seen(dict(zip(self._names, arrays)))
            if self._without_columns:
                inputs = with_planned_shapes(self.plan, inputs)
            given = [*(targets or ()), *(None,) * len(self._results)][: len(self._results)]
            given = self._checked_targets(given, inputs)
            results = [
                self._fresh(*new) if there is None else there
                for new, (_, there) in zip(self._new, given)
            ]
            outputs = {x.name: self._views[x.name](y) for x, y in zip(self._results, results)}
            if not self._owned and self._pieces is None:
                self._pieces = pieces_of(backend, self.plan)
            if self._owned and self._kernels is None:
                self._kernels = compiled(backend, self.plan)
            fill(
                *(backend, self.plan, inputs, outputs),
                check=check,
                progress=progress,
                pieces=self._pieces,
                kernels=self._kernels,
            )
            delivered = [_delivered(result, mine) for result, (mine, _) in zip(results, given)]
        return delivered[0] if len(delivered) == 1 else tuple(delivered)

    def _checked_targets(
        self, given: Sequence[Any], inputs: Mapping[str, Any]
    ) -> list[tuple[Any, Any]]:
        """The caller's array for each result, and what of these the kernel writes in place."""
        found = []
        for result, mine, (shape, dtype) in zip(self._results, given, self._new):
            there = None
            if mine is not None:
                assert result.given is not None
                view = self._views[result.name]
                there = target(self._backend, result.given, mine, shape, dtype, inputs, view)
            found.append((mine, there))
        named = [(x.given, mine) for x, (mine, _) in zip(self._results, found) if mine is not None]
        for (one, a), (other, b) in combinations(named, 2):
            if overlap(a, b):
                raise ValueError(f"{one} and {other} overlap; give each memory of its own")
        return found

    def _fresh(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """A new array for a result, where the inputs are."""
        if self._owned:
            return self._backend.empty(shape, dtype)
        return transfer.fresh(self._backend, shape, dtype)


def fill(
    backend: Backend,
    plan: Plan,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    *,
    check: bool = False,
    progress: Progress | None = None,
    pieces: transfer.Pieces | None = None,
    kernels: Kernels | None = None,
) -> None:
    """Computes these outputs; with ``check`` in guarded memory, compared with the reference.

    Arrays are [batch, heads, rows, columns], all on the host or all the backend's. ``pieces``
    and ``kernels`` are those of the same plan's calls before. Raises WrongResult if a check fails.
    """
    if not all(map(backend.owns, inputs.values())):
        if not check:
            transfer.compute(backend, pieces or pieces_of(backend, plan), inputs, outputs, progress)
            return
        written: Mapping[str, Any] = guard.checked(backend, plan, readable_inputs(plan, inputs), {})
    else:
        inputs = readable_inputs(plan, inputs)
        written = {
            name: outputs[name]
            if name in outputs and is_writable(plan, name, outputs[name])
            else allocated(backend, plan, name)
            for name in plan.outputs
        }
        if check:
            for name, array in guard.checked(backend, plan, inputs, written).items():
                written[name][...] = backend.upload(array)
        else:
            run(backend, plan, inputs, written, kernels)
    for name, array in outputs.items():
        if written[name] is not array and array.size:
            array[...] = written[name]


def pieces_of(backend: Backend, plan: Plan) -> transfer.Pieces:
    """The pieces that a plan's problem is cut into, planned with the same constants."""
    return transfer.Pieces(plan, partial(_part, plan, backend.limits))


def _part(plan: Plan, limits: Limits, problem: Problem) -> Plan:
    return planning.plan(plan.kernel, problem, limits, **plan.constants)


def _delivered(result: Any, mine: Any) -> Any:
    """A result as the caller gets it: in the caller's array, if there is one."""
    if mine is None or result is mine:
        return result
    mine[...] = result
    return mine


def _as_given(results: Any, targets: Sequence[Any]) -> Any:
    """The results, the caller's own objects where there are any."""
    if not isinstance(results, tuple):
        return targets[0]
    given = (*targets, *(None,) * (len(results) - len(targets)))
    return tuple(x if mine is None else mine for x, mine in zip(results, given))


def _described(form: Form) -> str:
    shape, strides, dtype, *device = form
    how = f" with strides {strides}" if strides is not None else " in host memory"
    return f"{dtype} {shape}{how}" + (f" on device {device[0]}" if device else "")
