"""Prepared calls: planned and compiled, so that a call only needs its arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import combinations, pairwise, starmap
from math import prod
from numbers import Real
from operator import is_, or_
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupyfa.errors import OfThisProcess, Unsupported, described
from cupyfa.ladder.operations import OPERATIONS
from cupyfa.planner import choose_kernel as planning
from cupyfa.planner.evaluate import with_numbers
from cupyfa.planner.plan import Limits, Plan
from cupyfa.problem.optional_inputs import (
    LENGTHS,
    MAPS,
    SEEDS,
    Operand,
    is_of_scores,
    name_of,
    written,
)
from cupyfa.problem.options import DROPOUT, AttentionOptions
from cupyfa.problem.problem import Problem, four_axes
from cupyfa.problem.structured_arrays import Structured, unwrap
from cupyfa.runtime import ragged
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
from cupyfa.runtime.backend import Backend, Form
from cupyfa.runtime.call_cache import Repeats, shape_of
from cupyfa.runtime.choose_backend import adopt, as_array, writable_view
from cupyfa.runtime.environment import Progress
from cupyfa.runtime.launcher import Kernels, Launcher, Misaligned, compile_kernels, run
from cupyfa.runtime.workspace import PER_THREAD, Space, Workspace, allocate
from cupyfa.score.dropout import Dropout

if TYPE_CHECKING:
    from cupyfa.runtime.transfer import Pieces

# Maps the callers' names of arrays to the operation's names.
NAMES = {
    **{"q": "Q", "k": "K", "v": "V", "out": "O", "dout": "dO", "x": "S"},
    **{"dq": "Q_dot", "dk": "K_dot", "dv": "V_dot"},
}


class Result(NamedTuple):
    """One result of a call."""

    name: str  # the operation's name of the result
    shape: tuple[int, ...]  # shape of the array that is returned to the caller
    label: str | None  # names the caller's array in messages; None if callers cannot pass one


def viewed(problem: Problem, layout: str | None, axes: str, array: Any) -> Any:
    """Views a caller's array in the shape that the kernel expects."""
    if layout is None or len(axes.split()) != 4:
        return array.reshape(problem.shape(axes))
    return four_axes(array, layout)


def _reshaped(shape: tuple[int, ...], array: Any) -> Any:
    """Reshapes an array unless it has zero columns, for which the plan has one column."""
    return array.reshape(shape) if array.size == prod(shape) else array


class Prepared(OfThisProcess):
    """A compiled call for arrays of fixed shapes, strides and dtypes on one device.

    ``prepared(q, k, v, out=None)`` computes ``attention`` and ``prepared(dout, q, k, v, out, lse,
    grads=None)`` computes ``backward``, with the options that were compiled in; ``plan`` contains
    the kernel and its launches. Structured arrays are passed as such: ``prepared(Packed(q,
    offsets), …)``. Arrays of a custom kernel follow in the order of its record, or are passed by
    name; its floats are fixed. Optional arrays may be lists of numbers, or NumPy or CuPy arrays
    regardless of the type of q.

    A call launches kernels in CuPy's current stream, which may be captured. The graph may be
    launched as long as the Prepared lives, but not concurrently with another graph that was
    captured in the same stream, or in a later stream with the same handle: such graphs share
    temporaries. Calls are thread-safe. They are fastest if they pass arrays for the results and
    the same array objects as an earlier call.
    """

    _instead = "call cupyfa.compile there; its plan can be pickled"

    def __init__(
        self,
        backend: Backend,
        plan: Plan,
        inputs: Mapping[str, Any],
        results: Sequence[Result],
        *,
        layout: str | None,
        keep: bool,
        bound: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepares calls on arrays like ``inputs``, whose keys are the names that callers use.

        ``bound`` are the arrays of a block mask, which every call reads and no caller passes.
        Kernels are compiled here if they can read such inputs without copies. With ``keep``,
        kernels are always compiled here, and calls keep their temporaries and arguments.
        """
        for result in results:
            if result.name not in plan.outputs:
                raise Unsupported(
                    f"{plan.kernel.name} does not compute {result.name}; use another kernel"
                )
        operation, own = plan.operation, {**plan.kernel.inputs, **plan.kernel.outputs}
        self.plan = plan
        self._backend, self._device, self._keep = backend, backend.device, keep
        self._names = tuple(inputs)
        self._forms = backend.forms([*inputs.values()])
        # Whether lengths or offsets of sequences are host arrays, which each call has to check.
        self._lengths_seen = any(
            name_of(name) in LENGTHS and isinstance(x, np.ndarray) for name, x in inputs.items()
        )
        self._results = tuple(results)
        self._labelled = sum(x.label is not None for x in results)
        self._is_forward = operation.name != "backward"
        self._is_one = self._is_forward and len(results) == 1  # gradients are always a tuple
        self.all_new: tuple[Any, ...] = (None,) * len(results)
        self._others = self.all_new[1:]
        self._new = [(x.shape, plan.outputs[x.name][1]) for x in results]
        self._views = {
            name: partial(_reshaped, plan.arrays[name][0])
            if name in own or is_of_scores(name)
            else partial(viewed, plan.problem, layout, axes)
            for name, axes in operation.axes_of(plan.problem).items()
        }
        self._pieces: Pieces | None = None
        unasked = [x for x in plan.outputs if x not in {result.name for result in results}]
        self._workspace = Workspace(backend, plan, (*unasked, *plan.scratch), keep=keep)
        self._repeats = Repeats(backend)
        self._bound = dict(bound or {})
        inputs = {**inputs, **self._bound}
        p, seen = plan.problem, self._seen(inputs)
        known = operation.inputs_of(p)
        self._without_columns = any(
            tuple(x.shape) != known[name].shape(p) for name, x in seen.items()
        )
        self._owned = backend.owns(next(iter(inputs.values())))
        self._bound_at = tuple(map(backend.address, self._bound.values())) if self._owned else ()
        self._launcher = self._make_launcher(inputs) if self._owned else None
        self._kernels: Kernels | None = None  # for calls that cannot use the launcher
        if keep and self._launcher is None:
            self._kernels = compile_kernels(backend, plan)

    def with_numbers(self, options: AttentionOptions, numbers: Sequence[Operand]) -> Prepared:
        """Returns a copy with new captured numbers and new values of softcap and dropout.

        ``options`` may differ in these values only. ``numbers`` are all captured numbers.
        """
        p, by_name = self.plan.problem, {x.name: x for x in numbers}
        names = ("softcap", *DROPOUT)
        changed = replace(p.options, **{name: getattr(options, name) for name in names})
        operands = tuple(by_name.get(x.name, x) for x in p.operands)
        other = self._another()
        other.plan = with_numbers(self.plan, replace(p, options=changed, operands=operands))
        other._pieces, other._repeats = None, Repeats(self._backend)
        if self._launcher is not None:
            other._launcher = self._launcher.with_numbers(other.plan)
        return other

    def __call__(self, *arrays: Any, out: Any = None, grads: Any = None, **named: Any) -> Any:
        """Runs the prepared function on these arrays.

        Raises ValueError if arrays differ from the prepared ones in shape, strides, dtype or
        device, or if NumPy lengths or offsets are out of range. For ``out``, ``grads`` and device
        failures it raises the same errors as the function.
        """
        if named or len(arrays) != len(self._names):
            arrays, out = self._by_name(arrays, out, named)
        targets = self.targets(out, grads)
        repeated = self.again(arrays, targets)
        if repeated is not None:
            return repeated
        if not self._are_alike(arrays):
            given = self._where_q_is(self._with_unread_lse(arrays))
            arrays = tuple(self._adopted(given))
        elif self._lengths_seen:
            self._with_lengths(dict(zip(map(name_of, self._names), arrays)))
        return self.run(arrays, targets)

    def run(
        self,
        arrays: Sequence[Any],
        targets: Sequence[Any],
        *,
        check: bool = False,
        progress: Progress | None = None,
        devices: tuple[int, ...] = (),
        capturing: bool = False,
    ) -> Any:
        """Runs the call on arrays whose shapes, strides and dtypes have been checked.

        ``targets``: the caller's array for each result, or None to allocate it. ``devices``: the
        devices that share the work on host arrays, the current device first. ``capturing``: whether
        a graph is being captured, in a context that allows allocations.
        """
        backend, launcher = self._backend, self._launcher
        if launcher is None or check:
            return self._closely(arrays, targets, check, progress, devices)
        device, stream = where = backend.current()
        if device != self._device:
            with backend.working_on(arrays[0]):
                return self.run(arrays, targets)
        if stream and not capturing and backend.is_capturing:
            with backend.working_on(arrays[0]):
                return self.run(arrays, targets, capturing=True)
        try:
            addresses = (*map(backend.address, arrays), *self._bound_at)
            if targets is self.all_new:
                results = [*starmap(backend.empty, self._new)]
            elif self._takes(targets, addresses):
                results = [
                    backend.empty(*new) if mine is None else mine
                    for mine, new in zip(targets, self._new)
                ]
            else:
                return self._closely(arrays, targets, check, progress)
            space = self._workspace.at(stream, capturing)  # has to stay alive until the launch
            every = (*addresses, *map(backend.address, results), *space[1])
            if self._mask & reduce(or_, every, 0):
                return self._in_general(arrays, targets, check, progress)
            try:
                launcher(every, stream)
            except Misaligned:
                return self._in_general(arrays, targets, check, progress)
            if stream is not None and stream != PER_THREAD and not capturing:
                make = partial(self._fixed, every, stream, space)
                self._repeats.remember(where, arrays, targets, results, make)
        except backend.failures:
            with backend.working_on(arrays[0]):
                raise
        return results[0] if self._is_one else tuple(results)

    def _fixed(self, addresses: tuple[int, ...], stream: int, space: Space) -> tuple[Any, Any]:
        """Prepares launches at fixed addresses; returns them with the memory that they use."""
        assert self._launcher is not None
        launch, memory = self._launcher.fixed(addresses, stream)
        return launch, (memory, space)

    def again(
        self,
        arrays: Sequence[Any],
        targets: Sequence[Any],
        *,
        shapes: bool = False,
        before: Callable[[], None] | None = None,
    ) -> Any:
        """Repeats an earlier call on the same array objects; returns None if there was none.

        With ``shapes``, shapes are compared as well, since they can be changed in place. ``before``
        is called before the launches.
        """
        known, backend = self._repeats.known, self._backend
        if not known:
            return None
        where, every = backend.current(), (*arrays, *targets)
        repeat = known.get((where, *map(id, every)))
        if repeat is None:
            return None
        results, launch, spare = targets, repeat.launch, None
        if shapes:
            given = arrays if launch is None else every
            if list(map(shape_of, given)) != repeat.shapes:
                return None
        if before is not None:
            before()
        if where[1] and backend.is_capturing:  # a graph needs its own temporaries
            return self.run(arrays, targets)
        if launch is None:
            spare = repeat.spare(backend.allocator())
            if spare is None:
                return self.run(arrays, self.all_new)
            results, launch = spare.results, spare.launch
        try:
            launch()
        except backend.failures:
            with backend.working_on(arrays[0]):
                backend.use(self._device)  # a new thread has no CUDA context yet
                launch()
        if spare is not None:
            repeat.spares.append(spare)
        return results[0] if self._is_one else tuple(results)

    def __repr__(self) -> str:
        plan = self.plan
        return f"<prepared {plan.kernel.name} on {self._backend.name}: {plan.problem}>"

    def forget(self) -> None:
        """Frees the temporaries of streams, and the launches and results kept for repeated calls.

        Memory that graphs use is not freed.
        """
        self._repeats.known.clear()
        self._workspace.forget()

    def targets(self, out: Any, grads: Any) -> tuple[Any, ...]:
        """Returns an array for each result, from ``out`` or ``grads``, or None to allocate it."""
        if self._is_forward:
            if grads is not None:
                raise TypeError("attention has no argument grads; pass out")
            return self.all_new if out is None else (out, *self._others)
        if out is not None:
            raise TypeError("backward has no argument out; pass grads, with one array per gradient")
        if grads is None:
            return self.all_new
        if not isinstance(grads, tuple | list) or len(grads) != self._labelled:
            many = isinstance(grads, tuple | list)
            what = f"has {len(grads)} elements" if many else f"is {described(grads)}"
            names = [str(x.label).removesuffix(" of grads") for x in self._results if x.label]
            raise TypeError(
                f"grads {what}; pass {len(names)} arrays, for {', '.join(names)}; to allocate a "
                "gradient, pass None in place of its array"
            )
        return (*grads, *self.all_new[len(grads) :])

    # The arrays of a call

    def _by_name(
        self, arrays: tuple[Any, ...], out: Any, named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], Any]:
        """Returns the inputs in order, including ``named`` ones, and ``out`` if it is a result."""
        at = ("q" in self._names) and self._names.index("q")
        if any(isinstance(x, Structured) for x in arrays):
            qkv, structure = unwrap(*arrays[at : at + 3])
            arrays = *arrays[:at], *qkv, *arrays[at + 3 :]
            named |= structure
        if isinstance(dropout := named.pop("dropout", None), Dropout):
            seeds = zip(SEEDS, dropout[1:])
            named |= {name: x for name, x in seeds if f"mods.{name}" in self._names}
        named |= {f"mods.{name}": x for name, x in named.pop("captured", {}).items()}
        read = {name.removeprefix("mods."): name for name in self._names if "." in name}
        named = {
            name if name in self._names else read.get(name, name): x for name, x in named.items()
        }
        if "out" in self._names and out is not None:
            named, out = {**named, "out": out}, None
        left = self._names[len(arrays) :]
        if len(arrays) > len(self._names) or set(left) != set(named):
            raise TypeError(self._other_arrays(arrays, named))
        return (*arrays, *(named[name] for name in left)), out

    def _other_arrays(self, arrays: Sequence[Any], named: Mapping[str, Any]) -> str:
        """Describes missing, unknown and surplus arrays of a call, for an error message."""
        left = self._names[len(arrays) :]
        missing = [x for x in left if x not in named]
        known = [x for x in named if x in self._names]
        numbers = [x for x, y in named.items() if isinstance(y, Real | np.generic)]
        unknown = [x for x in named if x not in self._names and x not in numbers]
        twice = [x for x in known if x not in left]
        count = len(arrays) - len(self._names)
        found = {
            "missing": missing,
            "given twice": twice,
            "unknown": unknown,
            "compiled in and must be left out": numbers,
        }
        wrong = [
            f"{_listed(x)} {'is' if len(x) == 1 else 'are'} {why}" for why, x in found.items() if x
        ]
        wrong += [f"{count} too many {'was' if count == 1 else 'were'} given"] * (count > 0)
        return f"this call takes the arrays {_listed(self._names)}; {', '.join(wrong)}"

    def _with_unread_lse(self, arrays: Sequence[Any]) -> list[Any]:
        """Replaces lse=None with an uninitialised array if the kernel does not read lse."""
        given = list(arrays)
        if "lse" in self._names and not self.plan.kernel.reads_lse:
            at = self._names.index("lse")
            if given[at] is None:
                shape, _, dtype = self._forms[at][:3]
                empty = self._backend.empty if self._owned else np.empty
                given[at] = empty(shape, dtype)
        return given

    def _are_alike(self, arrays: Sequence[Any]) -> bool:
        """Returns whether these are backend arrays of the prepared shapes, strides and dtypes."""
        try:
            return tuple(map(self._backend.form, arrays)) == self._forms
        except (AttributeError, ValueError):  # host arrays, or arrays without readable ``data``
            return False

    def _where_q_is(self, arrays: Sequence[Any]) -> list[Any]:
        """Moves optional arrays to the memory that holds q, and checks lengths on the host."""
        backend, first = self._backend, len(OPERATIONS[self.plan.operation.name].inputs)
        names = [name_of(x) for x in self._names]
        read = {x: as_array(backend, x, y) for x, y in zip(names[first:], arrays[first:])}
        by_name = self._with_lengths({**dict(zip(names, arrays[:first])), **read})
        if self.plan.problem.sequences is not None:
            by_name = ragged.with_a_sequence(by_name)
        q = by_name.get("q", arrays[0])
        return [*arrays[:first], *(backend.move_beside(q, by_name[x]) for x in read)]

    def _with_lengths(self, by_name: dict[str, Any]) -> dict[str, Any]:
        """Converts lengths and offsets on the host to int32.

        Raises ValueError for lengths and offsets that exceed the arrays.
        """
        on_host = (np.ndarray, list, tuple)
        seen = {x: y for x, y in by_name.items() if x in LENGTHS and isinstance(y, on_host)}
        if not seen:
            return by_name
        p = self.plan.problem
        if p.modifiers.is_packed:
            given = {x: by_name[x] for x in LENGTHS if x in by_name}
            return by_name | ragged.lengths(by_name["q"], by_name["k"], given)
        return by_name | ragged.padded_lengths(seen, p.batch, (p.M, p.N))

    def _adopted(self, arrays: Sequence[Any]) -> list[Any]:
        """Converts arrays to the backend's type; raises ValueError if shapes or dtypes differ."""
        _, adopted = adopt(self._backend, **dict(zip(map(name_of, self._names), arrays)))
        forms = self._backend.forms(adopted)
        for name, given, wanted in zip(self._names, forms, self._forms):
            if given != wanted:
                raise ValueError(
                    f"{_listed([name])} is {_described(given)}, but this call was compiled for "
                    f"{_described(wanted)}; compile again for these arrays, or call attention or "
                    "backward directly"
                )
        return adopted

    def _takes(self, targets: Sequence[Any], addresses: tuple[int, ...]) -> bool:
        """Returns whether kernels can write directly to the caller's arrays.

        If not, ``_closely`` runs the call.
        """
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
                for other, (low, high) in zip(addresses, extents):
                    if start < other + high and other + low < start + size:
                        return False
            return self._labelled == 1 or self._are_apart(targets)
        except (AttributeError, ValueError):  # host arrays, or arrays of another library
            return False

    def _are_apart(self, targets: Sequence[Any]) -> bool:
        """Returns whether no two of the caller's (contiguous) result arrays share memory."""
        address, sizes = self._backend.address, self._result_bytes
        spans = sorted((address(x), size) for x, size in zip(targets, sizes) if x is not None)
        return all(start + size <= after for (start, size), (after, _) in pairwise(spans))

    def _make_launcher(self, arrays: Mapping[str, Any]) -> Launcher | None:
        """Returns a launcher if kernels can use arrays like these without copies, else None."""
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
        self._result_forms = backend.forms(made)
        self._result_bytes = [x.nbytes for x in made]
        on_host = isinstance(made[0], np.ndarray)  # addresses of NumPy arrays may be misaligned
        known = [x.dtype.itemsize for x in (*arrays.values(), *made)] if on_host else []
        self._mask = max((*known, *plan.paired.values()), default=1) - 1
        return Launcher(backend, plan, {**inputs, **outputs, **self._workspace.new()})

    # The general path, for arrays that need copies, another layout or a transfer to the device

    def _seen(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Views the inputs in the kernel's layout, by the operation's names."""
        names = ((NAMES.get(name, name), x) for name, x in arrays.items())
        return {name: self._views[name](x) for name, x in names}

    def _closely(
        self,
        arrays: Sequence[Any],
        targets: Sequence[Any],
        check: bool,
        progress: Progress | None,
        devices: tuple[int, ...] = (),
    ) -> Any:
        """Runs the call with output arrays (``targets``) of any layout and any library."""
        views = [
            mine
            if mine is None or isinstance(mine, np.ndarray) or self._backend.owns(mine)
            else writable_view(self._backend, str(result.label), mine)
            for result, mine in zip(self._results, targets)
        ]
        if all(map(is_, views, targets)):
            return self._in_general(arrays, targets, check, progress, devices)
        results = self.run(arrays, views, check=check, progress=progress, devices=devices)
        if self._is_one:
            return targets[0]
        return tuple(x if mine is None else mine for x, mine in zip(results, targets))

    def _in_general(
        self,
        arrays: Sequence[Any],
        targets: Sequence[Any],
        check: bool,
        progress: Progress | None,
        devices: tuple[int, ...] = (),
    ) -> Any:
        backend = self._backend
        with backend.working_on(arrays[0]):
            inputs = self._seen({**dict(zip(self._names, arrays)), **self._bound})
            if self._without_columns:
                inputs = with_planned_shapes(self.plan, inputs)
            in_place = self._written_in_place(targets, inputs)
            made = [
                self._fresh(*new) if there is None else there
                for new, there in zip(self._new, in_place)
            ]
            outputs = {x.name: self._views[x.name](y) for x, y in zip(self._results, made)}
            if not self._owned and self._pieces is None:
                self._pieces = pieces_of(backend, self.plan)
            if self._owned and self._kernels is None:
                self._kernels = compile_kernels(backend, self.plan)
            fill(
                *(backend, self.plan, inputs, outputs),
                check=check,
                progress=progress,
                pieces=self._pieces,
                kernels=self._kernels,
                devices=devices,
            )
            for mine, result in zip(targets, made):
                if mine is not None and mine is not result:
                    mine[...] = result
        results = [x if mine is None else mine for mine, x in zip(targets, made)]
        return results[0] if self._is_one else tuple(results)

    def _written_in_place(
        self, targets: Sequence[Any], inputs: Mapping[str, Any]
    ) -> list[Any | None]:
        """Returns each of the caller's arrays, or None if the kernel cannot write it in place."""
        named = [(str(x.label), mine) for x, mine in zip(self._results, targets)]
        found = []
        for (name, mine), result, (shape, dtype) in zip(named, self._results, self._new):
            view = self._views[result.name]
            found.append(
                None
                if mine is None
                else target(self._backend, name, mine, shape, dtype, inputs, view)
            )
        for (one, a), (other, b) in combinations([x for x in named if x[1] is not None], 2):
            if overlap(a, b):
                raise ValueError(f"{one} and {other} share memory; pass arrays that do not overlap")
        return found

    def _fresh(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Allocates a result array in the memory (host or device) that holds the inputs."""
        if self._owned:
            return self._backend.empty(shape, dtype)
        from cupyfa.runtime.transfer import new_result

        return new_result(self._backend, shape, dtype)


def fill(
    backend: Backend,
    plan: Plan,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    *,
    check: bool = False,
    progress: Progress | None = None,
    pieces: Pieces | None = None,
    kernels: Kernels | None = None,
    devices: tuple[int, ...] = (),
) -> None:
    """Computes ``outputs``; with ``check``, runs in guarded memory and compares with the reference.

    Arrays are [batch, heads, rows, columns], all on the host or all in the backend's memory.
    ``pieces`` and ``kernels`` may be kept from earlier calls of the plan. ``devices`` share the
    work on host arrays; checks run on the current device. Raises WrongResult if a check fails.
    """
    if check:
        from cupyfa.runtime import guard
    if not all(map(backend.owns, inputs.values())):
        if not check:
            from cupyfa.runtime.transfer import Call, spread

            pieces = pieces or pieces_of(backend, plan)
            if devices:
                spread(backend, pieces, inputs, outputs, devices, progress)
                return
            with backend.lanes() as lanes:
                Call(backend, lanes, pieces, inputs, outputs).run(progress)
            return
        written: Mapping[str, Any] = guard.checked(backend, plan, readable_inputs(plan, inputs), {})
    else:
        inputs = readable_inputs(plan, inputs)
        written = {
            name: outputs[name]
            if name in outputs and is_writable(plan, name, outputs[name])
            else allocate(backend, plan, name)
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


def pieces_of(backend: Backend, plan: Plan) -> Pieces:
    """Divides a plan's problem into pieces, which are planned with the same constants."""
    from cupyfa.runtime.transfer import Pieces

    return Pieces(plan, partial(_part, plan, backend.limits))


def _part(plan: Plan, limits: Limits, problem: Problem) -> Plan:
    made = planning.plan(plan.kernel, problem, limits, **plan.constants)
    if not any(x.name in MAPS for x in problem.operands):
        return made
    return planning.with_maps(made, limits, problem.modifiers.mask)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(written(name.removeprefix("mods.")) for name in names)


def _described(form: Form) -> str:
    shape, strides, dtype, *device = form
    how = f" with strides {strides}" if strides is not None else " in host memory"
    return f"{dtype} {shape}{how}" + (f" on device {device[0]}" if device else "")
