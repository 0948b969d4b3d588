"""Launches the steps of a plan.

Arguments are laid out once. A call only writes its arrays' addresses into the arguments;
``replay`` fixes the addresses, too.

Calls, checks and benchmarks run their plans with this module, on CUDA and in the simulator.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cupyfa.ladder.kernel import Matmul, cdiv
from cupyfa.planner.plan import BOX_ALIGNMENT, Plan, PlannedLaunch, PlannedMatmul
from cupyfa.runtime.arrays import extent
from cupyfa.runtime.backend import Backend, Mapped, Region, Start
from cupyfa.runtime.call_cache import make_room
from cupyfa.runtime.kernel_arguments import arguments, describe_map
from cupyfa.runtime.workspace import allocate

Kernels = dict[int, Any]  # compiled kernels by the ``id`` of their Launch
_MOST_MAPS = 256  # maximum number of tensor maps that a thread keeps per launch
_WORD = 8  # bytes; the alignment of arguments
# One lock per device, held while a plan's launches are queued, because threads that launch in the
# same stream share the workspace of that stream.
_together: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)


def run(
    backend: Backend,
    plan: Plan,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    kernels: Kernels | None = None,
) -> None:
    """Runs a plan on arrays of the backend and fills the outputs.

    All kernels are compiled before the first launch, so compile errors leave outputs untouched.
    """
    scratch = {name: allocate(backend, plan, name) for name in plan.scratch}
    arrays = {**inputs, **outputs, **scratch}
    launcher = Launcher(backend, plan, arrays, kernels)
    launcher(tuple(map(backend.address, arrays.values())), backend.stream)


def replay(backend: Backend, plan: Plan, arrays: Mapping[str, Any]) -> Callable[[], None]:
    """Returns a function that launches a plan on these arrays, in the current stream."""
    launcher = Launcher(backend, plan, arrays)
    addresses = tuple(map(backend.address, arrays.values()))

    def launch(_keep: Any = arrays) -> None:
        launcher(addresses, backend.stream)

    return launch


def find_launcher(
    backend: Backend, key: tuple[Any, ...], arrays: Mapping[str, Any], make_plan: Callable[[], Plan]
) -> Launcher:
    """Returns a cached launcher of a helper plan (not a rung) for arrays of the same layout.

    key: identifies the plan together with the arrays' names, order, shapes, strides and dtypes.
    """
    known = backend.calls.launchers
    key = backend.device, *key, *arrays, *map(backend.form, arrays.values())
    launcher = known.get(key)
    if launcher is None:
        make_room(known)
        launcher = known[key] = Launcher(backend, make_plan(), arrays)
    return launcher


def compile_kernels(backend: Backend, plan: Plan) -> Kernels:
    """Compiles the kernels of a plan, in parallel; returns them by the ``id`` of their Launch."""
    programs = plan.programs
    kernels: Kernels = {}
    errors: list[BaseException] = []
    device = backend.device

    def compile_program(program: PlannedLaunch) -> None:
        try:
            backend.use(device)
            kernels[id(program.launch)] = backend.compile_launch(program)
        except BaseException as error:
            errors.append(error)

    def compile_in_thread(program: PlannedLaunch) -> None:
        with backend.working_on(None):  # the stream capture mode is set per thread
            compile_program(program)

    others = programs[1:] if backend.compiles_in_parallel else ()
    threads = [threading.Thread(target=compile_in_thread, args=(x,), daemon=True) for x in others]
    for thread in threads:
        thread.start()
    for program in programs[: len(programs) - len(others)]:
        compile_program(program)
    for thread in threads:
        thread.join()
    if errors:
        del errors[1:]
        raise errors.pop()  # a reference from this frame would keep the call's arrays alive
    return kernels


class Misaligned(Exception):
    """The address of an array is not aligned for a tensor map."""


class Place(NamedTuple):
    """The place of a step's array, which may be a slice of an array of the call."""

    array: int  # index of the array of the call
    offset: int  # bytes from its element 0 to that of the slice

    def among(self, addresses: Sequence[int]) -> int:
        return addresses[self.array] + self.offset


class EncodedLaunch(NamedTuple):
    """A launch without the addresses of its arrays."""

    step: PlannedLaunch
    kernel: Any  # as compiled by the backend
    start: Start
    values: tuple[bytes, ...]  # the encoded arguments, into which each call writes addresses
    addresses: tuple[tuple[int, int, Place], ...]  # (argument, byte offset, array) of each address
    maps: tuple[tuple[int, Place, Mapped], ...]  # (argument, array, contents) of each tensor map


class Launcher:
    """Launches a plan's steps for arrays of fixed shapes, strides and dtypes at given addresses.

    Each thread has its own memory for arguments, so calls are thread-safe.
    """

    def __init__(
        self,
        backend: Backend,
        plan: Plan,
        arrays: Mapping[str, Any],
        kernels: Kernels | None = None,
    ) -> None:
        """``arrays`` are all arrays of the plan; calls pass their addresses in this order."""
        self._backend, self._device = backend, backend.device
        self._mine, self._together = threading.local(), _together[backend.device]
        kernels = kernels or compile_kernels(backend, plan)
        written, in_order = {*plan.outputs, *plan.scratch}, _in_order(plan)
        # Arrays that launches before a step may still write.
        before = set(arrays) if _begins_early(in_order[:1]) else set[str]()
        # A launch that begins early has arguments which all threads share.
        self._is_alone = len(in_order) == 1 and not _begins_early(in_order)
        self._steps: list[partial[Any]] = []
        for step in in_order:
            seen, places = _seen(step, arrays)
            if isinstance(step, Matmul):
                operands = _operands(step, seen, places)
                self._steps.append(partial(_Operands, backend, plan, step, operands))
                continue
            kernel = kernels[id(step.launch)]
            launch = _launch(backend, step, kernel, seen, places, written, before)
            self._steps.append(partial(_Arguments, backend, launch))
            before |= written & _named(step)

    def with_numbers(self, plan: Plan) -> Launcher:
        """Returns a copy with another plan's scalar arguments; see planner.evaluate."""
        other = copy(self)
        other._mine = threading.local()
        other._steps = [
            make if isinstance(step, Matmul) else _with_values(make, step)
            for step, make in zip(_in_order(plan), self._steps)
        ]
        return other

    def __call__(self, addresses: Sequence[int], stream: int | None) -> None:
        """Launches the steps in a stream of the current device."""
        mine = self._mine
        try:
            steps = mine.steps
        except AttributeError:
            self._backend.use(self._device)  # a new thread has no CUDA context yet
            steps = mine.steps = [make() for make in self._steps]
            mine.addresses = None
        if mine.addresses != addresses:
            mine.addresses = None  # invalid until all are written: a signal may interrupt the loop
            for step in steps:
                step.write(addresses)
            mine.addresses = addresses
        if self._is_alone:
            (step,) = steps
            step.start(stream, step.pointers, 0)  # 0 is the unused ``extra``; see Start
            return
        with self._together:
            for step in steps:
                step.start(stream, step.pointers, 0)

    @property
    def launches(self) -> list[EncodedLaunch]:
        """The launches, for callers that write addresses and start kernels themselves.

        Raises TypeError if a step is a matrix product of a library.
        """
        if any(x.func is not _Arguments for x in self._steps):
            raise TypeError("the plan has products by cuBLAS; plan with Limits.no_matmul")
        return [x.args[1] for x in self._steps]

    def fixed(self, addresses: Sequence[int], stream: int | None) -> tuple[Callable, Any]:
        """Returns a function that launches the steps at these addresses, from any thread.

        Also returns the arguments' memory, which must stay alive as long as the function.
        """
        steps = [make() for make in self._steps]
        for step in steps:
            step.write(addresses)
        calls = [partial(step.start, stream, step.pointers, 0) for step in steps]
        return calls[0] if self._is_alone else partial(_call_all, self._together, calls), steps


def _in_order(plan: Plan) -> list[PlannedLaunch | PlannedMatmul]:
    """Lists the steps to launch; skips launches with an empty grid, which CUDA rejects.

    Disables programmatic dependent launch for a launch that is recorded, and, unless it waits
    before it accesses any array, for one that is the first step or follows a Matmul or an empty
    grid: it then waits for all earlier work.
    """
    steps: list[PlannedLaunch | PlannedMatmul] = []
    before: PlannedLaunch | PlannedMatmul | None = None
    for x, after in zip(plan.steps, (*plan.steps[1:], None)):
        if isinstance(x, PlannedLaunch):
            follows = isinstance(before, PlannedLaunch) and all(before.grid)
            may = (follows or x.launch.awaits_all) and not x.recording
            x = replace(
                x,
                begins_early=x.begins_early and may,
                keeps=_unawaited(after),
            )
        before = x
        if isinstance(x, Matmul) or all(x.grid):
            steps.append(x)
    return steps


def _begins_early(steps: Sequence[PlannedLaunch | PlannedMatmul]) -> bool:
    return any(isinstance(x, PlannedLaunch) and x.begins_early for x in steps)


def _unawaited(step: PlannedLaunch | PlannedMatmul | None) -> frozenset[str]:
    """Returns the arrays that a step reads without waiting for the launch before it."""
    if not isinstance(step, PlannedLaunch) or step.recording or not all(step.grid):
        return frozenset()
    return step.unawaited if step.begins_early else frozenset()


def _call_all(together: threading.Lock, calls: Sequence[Callable[[], Any]]) -> None:
    with together:
        for call in calls:
            call()


def _seen(
    step: PlannedLaunch | PlannedMatmul, arrays: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Place]]:
    """Returns the arrays as a step sees them, and their places among the arrays of the call."""
    seen, places = {}, {}
    for at, (name, array) in enumerate(arrays.items()):
        index = step.slices.get(name, ())
        starts = (x.start or 0 for x in index)
        seen[name] = array[index] if index else array
        places[name] = Place(at, sum(x * stride for x, stride in zip(starts, array.strides)))
    return seen, places


def _launch(
    backend: Backend,
    step: PlannedLaunch,
    kernel: Any,
    arrays: Mapping[str, Any],
    places: Mapping[str, Place],
    written: Set[str],
    before: Set[str],
) -> EncodedLaunch:
    values = tuple(np.asarray(x).tobytes() for x in arguments(backend, step, arrays))
    given = [(at, 0, x.name, x.form) for at, x in enumerate(step.arguments) if x.value is None]
    given += [
        (at, inside, name, "data")
        for at, x in enumerate(step.arguments)
        for name, inside in x.arrays
    ]
    regions = []
    for name, (at, inside) in {name: (at, inside) for at, inside, name, _ in given}.items():
        low, high = extent(arrays[name])
        itemsize, constant = arrays[name].dtype.itemsize, name not in written
        awaited, kept = name in before and name not in _unawaited(step), name in step.keeps
        regions.append(Region(name, at, low, high - low, itemsize, constant, inside, awaited, kept))
    return EncodedLaunch(
        step,
        kernel,
        backend.starter(kernel, step, [len(x) for x in values], regions),
        values,
        tuple((at, inside, places[name]) for at, inside, name, form in given if form != "map"),
        tuple(
            (at, places[name], describe_map(backend, step, name, arrays[name]))
            for at, _, name, form in given
            if form == "map"
        ),
    )


def _named(step: PlannedLaunch) -> set[str]:
    names = {x.name for x in step.arguments if x.value is None}
    return names | {name for x in step.arguments for name, _ in x.arrays}


def _with_values(make: partial[Any], step: PlannedLaunch) -> partial[Any]:
    """Replaces a launch's scalar arguments with those of another step, and keeps its arrays."""
    backend, launch = make.args
    values = list(launch.values)
    for at, argument in enumerate(step.arguments):
        if argument.value is None:
            continue
        value = np.array(argument.value)
        before = np.frombuffer(values[at], value.dtype, 1)[0]
        for name in (x.removeprefix("mods.") for x, _ in argument.arrays):
            value[name] = before[name]
        values[at] = value.tobytes()
    return partial(_Arguments, backend, launch._replace(values=tuple(values)))


def _operands(
    step: Matmul, arrays: Mapping[str, Any], places: Mapping[str, Place]
) -> list[tuple[Place, tuple[Any, ...]]]:
    """Returns (place of the array, (shape, dtype, strides)) for a, b and the result."""
    operands = []
    for name in (step.a, step.b, step.out):
        array = arrays[name.removesuffix(".T")]
        seen = array.swapaxes(-1, -2) if name.endswith(".T") else array
        form = seen.shape, seen.dtype, seen.strides
        operands.append((places[name.removesuffix(".T")], form))
    return operands


class _Arguments:
    """A launch with memory for its arguments."""

    def __init__(self, backend: Backend, launch: EncodedLaunch) -> None:
        starts, total = [], 0
        for value in launch.values:
            starts.append(total)
            total += cdiv(len(value), _WORD)
        self._memory = (ctypes.c_uint64 * max(total, 1))()
        base = ctypes.addressof(self._memory)
        for start, value in zip(starts, launch.values):
            ctypes.memmove(base + _WORD * start, value, len(value))
        self._table = (ctypes.c_uint64 * max(len(starts), 1))(*(base + _WORD * x for x in starts))
        self.start, self.pointers = launch.start, ctypes.addressof(self._table)
        self._slots = [(starts[at] + x // _WORD, place) for at, x, place in launch.addresses]
        # The last element caches encoded maps: array address -> address of the encoded map.
        self._maps = [(*x, dict[int, int]()) for x in launch.maps]
        self._backend, self._encoded = backend, list[Any]()

    def write(self, addresses: Sequence[int]) -> None:
        """Writes the arrays' addresses into the arguments."""
        memory = self._memory
        for slot, (array, offset) in self._slots:
            memory[slot] = addresses[array] + offset
        for at, place, like, known in self._maps:
            address = place.among(addresses)
            there = known.get(address)
            if there is None:
                there = known[address] = self._encode_map(like, address)
            self._table[at] = there

    def _encode_map(self, like: Mapped, address: int) -> int:
        """Encodes the tensor map of an array at ``address``; returns the address of the map."""
        if address % BOX_ALIGNMENT and like.address:
            raise Misaligned
        if len(self._encoded) >= _MOST_MAPS:
            self._forget()
        encoded = self._backend.tensor_map(like._replace(address=address if like.address else 0))
        self._encoded.append(encoded)
        return encoded.ctypes.data

    def _forget(self) -> None:
        for *_, known in self._maps:
            known.clear()
        self._dropped, self._encoded = self._encoded, []  # this call may still use the dropped maps


class _Operands:
    """A Matmul step with its operands."""

    pointers = 0

    def __init__(
        self, backend: Backend, plan: Plan, step: Matmul, operands: list[tuple[Place, Any]]
    ) -> None:
        self._backend, self._operands = backend, operands
        self._scale = plan.problem.scale if step.scaled else 1.0
        self._arrays: list[Any] = []

    def write(self, addresses: Sequence[int]) -> None:
        """Sets the operands to the arrays that start at these addresses."""
        at = self._backend.at
        self._arrays = [at(place.among(addresses), *form) for place, form in self._operands]

    def start(self, stream: int | None, pointers: int, extra: int) -> None:
        """Multiplies in the current stream; ``stream`` must be the current stream."""
        a, b, out = self._arrays
        self._backend.matmul(a, b, out, self._scale)
