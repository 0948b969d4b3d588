"""Attention with everything decided once: what ``attention`` finds again, and ``compile`` gives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any
from weakref import ref

import numpy as np

from cupyfa.errors import Unsupported
from cupyfa.ladder.kernel import cdiv
from cupyfa.planner.plan import Plan
from cupyfa.problem import four_axes
from cupyfa.runtime import arrays as calls
from cupyfa.runtime import transfer
from cupyfa.runtime.backend import Backend, allocated, extent
from cupyfa.runtime.select import adopt

Form = tuple[Any, ...]
Progress = Callable[[int, int, str], None]
_NAMES = ("q", "k", "v")
_BELOW_16 = 15  # address bits that are 0 where memory begins at a multiple of 16 bytes
_PER_THREAD = 2  # the stream that is another one in every thread
_SPACE = 4 << 20  # bytes for temporaries that are kept for a stream, for calls of ``attention``
_MOST_SPACES = 16  # that calls of ``attention`` share in all; streams of a Bound
_ALIGNMENT = 512  # bytes
# Temporaries of calls of ``attention`` that became graphs: nobody says when these are gone.
_of_graphs: list[list[Any]] = []


def form(engine: Backend, array: Any) -> Form:
    """What decides how a call sees an array: shape, strides and dtype, and the device.

    Of arrays of the host that a device cannot reach the strides do not matter.
    """
    if engine.owns(array):
        return engine.form(array)
    return tuple(array.shape), None, array.dtype, engine.device


_Space = tuple[Any, Sequence[int]]  # memory, and where in it each temporary begins
# The arrays of a call, the addresses it was launched with, and the stream: the same for the same;
# and the temporaries, which have to be there until the launch.
_Last = tuple[ref, ref, ref, ref, tuple[int, ...], int | None, _Space]
_NO_SPACE: _Space = (None, ())
_BYTE = np.dtype(np.uint8)
_threads = threading.local()


def _this_thread() -> object:
    """Something of this thread's own; its number may be another's once it has ended."""
    try:
        return _threads.token
    except AttributeError:
        _threads.token = object()
        return _threads.token


def _laid_out(plan: Plan, names: Sequence[str]) -> tuple[list[int], int]:
    """Where each temporary begins in memory for all, and the bytes of that."""
    kinds, starts, end = {**plan.outputs, **plan.scratch}, [], 0
    for name in names:
        starts.append(end)
        size = prod(plan.stored_shape(name)) * kinds[name][1].itemsize
        end += cdiv(size, _ALIGNMENT) * _ALIGNMENT
    return starts, end


class Bound:
    """Attention for arrays of the same shapes, strides and dtypes on the same device.

    ``plan`` is what was decided. A call launches it in CuPy's current stream, also in one that is
    being captured; the graph may be launched as long as the Bound is there, and not at the same
    time as another that was captured in that stream or in a later one at its address, for these
    share temporaries. Any number of threads may call. It is fastest with an ``out``, and with the
    very arrays of the call before, which it knows by their identity.
    """

    def __init__(
        self,
        engine: Backend,
        plan: Plan,
        arrays: tuple[Any, Any, Any],
        *,
        layout: str,
        return_lse: bool,
        keep: bool,
    ) -> None:
        """``keep`` holds the memory for temporaries from call to call, one for each stream."""
        if return_lse and "lse" not in plan.outputs:
            raise Unsupported(f"{plan.kernel.name} does not compute lse; use another kernel")
        q, _, v = arrays
        self.plan = plan
        self._engine, self._device = engine, engine.device
        self._layout, self._return_lse, self._keep = layout, return_lse, keep
        self._forms = tuple(form(engine, x) for x in arrays)
        self._shape, self._lse_shape = (*q.shape[:-1], v.shape[-1]), rows_of(q, layout)
        self._dtype, self._sums = plan.problem.dtype.numpy, plan.problem.dtype.sums
        unasked = () if return_lse or "lse" not in plan.outputs else ("lse",)
        self._temporary = (*unasked, *plan.scratch)
        self._temporaries: dict[Any, _Space] = {}  # by stream
        self._in_graphs: dict[Any, _Space] = {}  # the same of streams that were captured
        self._spares: list[_Space] = []  # for the next one of these: then none can be had
        self._several = sum(all(step.grid) for step in plan.launches) > 1
        self._starts, self._space_bytes = _laid_out(plan, self._temporary)
        self._parts = transfer.Parts(plan, engine.limits)
        self._last: _Last | None = None
        self._before: tuple[int, ...] = ()  # the addresses of the call before
        self._launch: Any = self._launcher(arrays) if engine.owns(q) else None

    def __call__(self, q: Any, k: Any, v: Any, *, out: Any = None) -> Any:
        """What ``attention`` returns for these arrays.

        Raises ValueError for arrays that are not like those that it was made for, and what
        ``attention`` raises for ``out`` and the device's failures.
        """
        engine, last = self._engine, self._last
        if last is not None and out is not None:
            of_q, of_k, of_v, of_out, addresses, stream, _ = last
            if (
                (of_q() is q and of_k() is k and of_v() is v and of_out() is out)
                and engine.device == self._device
                and engine.stream == stream
                and not (stream and self._temporary and engine.is_capturing)
            ):
                try:
                    self._launch(addresses, stream)
                    return out
                except engine.failures:
                    with engine.working_on(q):
                        raise
        try:
            same = (engine.form(q), engine.form(k), engine.form(v)) == self._forms
        except AttributeError:  # the host's, or another library's
            same = False
        if same:
            return self.run(q, k, v, out)
        _, (q, k, v) = adopt(engine, q=q, k=k, v=v)
        for name, array, wanted in zip(_NAMES, (q, k, v), self._forms):
            given = form(engine, array)
            if given != wanted:
                raise ValueError(
                    f"{name} is {_told(given)}, and this was compiled for {_told(wanted)}; "
                    "compile it again, or call cupyfa.attention"
                )
        return self.run(q, k, v, out)

    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        out: Any = None,
        *,
        check: bool = False,
        progress: Progress | None = None,
    ) -> Any:
        """The call, for arrays that are known to be like those that it was made for."""
        engine, launch = self._engine, self._launch
        if launch is None or check:
            return self._in_general(q, k, v, out, check, progress)
        if engine.device != self._device:
            with engine.working_on(q):
                return self.run(q, k, v, out)
        try:
            given = q.data.ptr, k.data.ptr, v.data.ptr
            if out is not None and not self._takes(out, given):
                return self._in_general(q, k, v, out, check, progress)
            o = engine.empty(self._shape, self._dtype) if out is None else out
            to = o.data.ptr
            if self._boxed and (given[0] | given[1] | given[2] | to) & _BELOW_16:
                return self._in_general(q, k, v, out, check, progress)
            stream = engine.stream
            space = self._space(stream)  # which has to be there until the launch
            own = space[1]
            if self._return_lse:
                lse = engine.empty(self._lse_shape, self._sums)
                launch((*given, to, lse.data.ptr, *own), stream)
                return o, lse
            addresses = (*given, to, *own)
            launch(addresses, stream)
            if self._keep and o is out and stream != _PER_THREAD:
                usual = space is _NO_SPACE or space is self._temporaries.get(stream)
                if usual and addresses == self._before:  # else such a call may not come again
                    self._last = ref(q), ref(k), ref(v), ref(out), addresses, stream, space
                self._before = addresses
            return o
        except engine.failures:
            with engine.working_on(q):
                raise

    def _takes(self, out: Any, given: tuple[int, int, int]) -> bool:
        """Whether a kernel can write the caller's array as it is; else it is looked at closely."""
        try:
            if self._engine.form(out) != self._out_form:
                return False
            start = out.data.ptr
        except AttributeError:
            return False
        end, (a, b, c) = start + self._out_bytes, self._ends
        return (
            (start >= given[0] + a[1] or given[0] + a[0] >= end)
            and (start >= given[1] + b[1] or given[1] + b[0] >= end)
            and (start >= given[2] + c[1] or given[2] + c[0] >= end)
        )

    def _space(self, stream: Any) -> _Space:
        """Memory for temporaries, for work in a stream: what is in order there may share it."""
        if not self._temporary:
            return _NO_SPACE
        key: Any = stream if stream != _PER_THREAD else (stream, _this_thread())
        if stream and self._engine.is_capturing:  # the graph may be launched in any
            return self._graph_space(key)
        if not self._keep:
            return self._shared_space(key)
        if not self._spares:
            self._spares.append(self._new_space())
        found = self._temporaries.get(key)
        if found is None:
            if len(self._temporaries) >= _MOST_SPACES:
                self._temporaries.clear()
            found = self._temporaries[key] = self._new_space()
        return found

    def _graph_space(self, stream: Any) -> _Space:
        """Memory that stays as long as a graph may be launched."""
        if not self._keep:
            made = self._new_space()
            _of_graphs.append(made[0])
            return made
        found = self._in_graphs.get(stream)
        if found is None:
            try:
                found = self._spares.pop()
            except IndexError:
                found = self._new_space()
            self._in_graphs[stream] = found
        return found

    def _shared_space(self, stream: Any) -> _Space:
        """Memory that all such calls in a stream share, if that is enough.

        Between launches of one call, which find there what the one before has left, another
        thread's call may come, but none of several launches.
        """
        if self._space_bytes > _SPACE:
            return self._new_space()
        spaces, key = self._engine.spaces, (self._device, stream, self._several)
        found = spaces.get(key)
        if found is None:
            if len(spaces) >= _MOST_SPACES:
                spaces.clear()
            memory = self._engine.empty((_SPACE,), _BYTE)
            found = spaces[key] = memory, self._engine.address(memory)
        memory, start = found
        return memory, [start + x for x in self._starts]

    def _new_space(self) -> _Space:
        arrays = [allocated(self._engine, self.plan, name) for name in self._temporary]
        return arrays, [self._engine.address(x) for x in arrays]

    def _launcher(self, arrays: tuple[Any, Any, Any]) -> Any:
        """The short way to launch the plan, if these arrays need no copy for it."""
        engine, plan, view = self._engine, self.plan, partial(four_axes, layout=self._layout)
        inputs = dict(zip("QKV", map(view, arrays)))
        if len(plan.launches) < len(plan.steps):  # products of cuBLAS launch themselves
            return None
        if not all(calls.is_readable(plan, name, array) for name, array in inputs.items()):
            return None
        o = engine.empty(self._shape, self._dtype)
        if not calls.is_writable(engine, plan, "O", view(o)):
            return None
        self._boxed, self._out_form, self._out_bytes = bool(plan.boxed), form(engine, o), o.nbytes
        self._ends = [extent(x) for x in arrays]
        made, _ = space = self._new_space()
        outputs = {"O": view(o)}
        if self._return_lse:
            outputs["lse"] = allocated(engine, plan, "lse")
        if self._keep:
            self._spares.append(space)
        return engine.launcher(plan, {**inputs, **outputs, **dict(zip(self._temporary, made))})

    def _in_general(
        self, q: Any, k: Any, v: Any, out: Any, check: bool, progress: Progress | None
    ) -> Any:
        """The call with all that arrays may need: copies, another layout, a way to the device."""
        engine, plan, view = self._engine, self.plan, partial(four_axes, layout=self._layout)
        with engine.working_on(q):
            inputs = {"Q": view(q), "K": view(k), "V": view(v)}
            o = calls.target(engine, out, self._shape, self._dtype, inputs, view)
            outputs = {"O": view(o)}
            lse = None
            if self._return_lse or engine.owns(q):
                lse = calls.new(engine, q, self._lse_shape, self._sums)
                outputs["lse"] = lse.reshape(plan.problem.shape("batch heads M"))
            calls.fill(
                *(engine, plan, inputs, outputs),
                check=check,
                progress=progress,
                parts=self._parts,
            )
            result = calls.deliver(o, out)
        return (result, lse) if self._return_lse else result


def rows_of(q: Any, layout: str) -> tuple[int, ...]:
    """The shape of lse, [..., heads, M]: that of q without columns, heads before rows."""
    if layout == "bshd" and q.ndim > 2:
        return (*q.shape[:-3], q.shape[-2], q.shape[-3])
    return tuple(q.shape[:-1])


def _told(form: Form) -> str:
    shape, strides, dtype, *device = form
    how = f" with strides {strides}" if strides is not None else " in host memory"
    return f"{dtype} {shape}{how}" + (f" on device {device[0]}" if device else "")
