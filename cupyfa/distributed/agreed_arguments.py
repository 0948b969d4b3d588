"""Checks a distributed call's arguments, and that all ranks agree on them, before communication."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from cupyfa.call.call import Call, Operation
from cupyfa.call.keywords import list_arguments
from cupyfa.call.pullback import check_dlse, check_like_result
from cupyfa.distributed import gather, ring
from cupyfa.distributed.agreement import difference
from cupyfa.distributed.communicator import Group
from cupyfa.distributed.job import Job
from cupyfa.distributed.shards import Sharded, Shards
from cupyfa.errors import Unsupported, described
from cupyfa.ladder.kernel import Kernel
from cupyfa.partition.part_call import options_of_parts, planned
from cupyfa.partition.position_names import places
from cupyfa.partition.whole_problem import read_problem, require_four_axes
from cupyfa.planner.plan import Limits
from cupyfa.problem.options import read_flag
from cupyfa.problem.problem import Problem, whole
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.call_cache import make_room
from cupyfa.runtime.choose_backend import adopt
from cupyfa.score.expressions import Expression

# Immutable argument types.
_FIXED = {type(None), bool, int, float, str, tuple, Kernel}
_FLAGS = ("check", "deterministic", "return_lse")
_NO_OPTIONS = {"kernel", "tiles", "backend", "out", "dlse", *_FLAGS}
_SCHEDULES: Mapping[str, Any] = {"gather": gather, "ring": ring}
_form = attrgetter("shape", "dtype")


class AgreedCall(NamedTuple):
    """A checked call with prepared steps.

    fields: descriptions of the call, which must be equal on all ranks. run: computes this rank's
    results.
    """

    fields: Mapping[str, str]
    run: Callable[..., tuple[Any, ...]]


def agree_on_call(
    function: Callable[..., Any],
    operation: Operation,
    arguments: Mapping[str, Any],
    of_rows: Mapping[str, Any] | None = None,
) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Returns the prepared call and its arrays if the calls of all ranks are valid and equal.

    Otherwise all ranks raise. arguments: the call's arguments by name. of_rows: dout, out, lse and
    dlse, if given.
    """
    of_rows = of_rows or {}
    shards = {name: arguments[name] for name in "qkv"}
    group = next(x.group for x in shards.values() if isinstance(x, Sharded))
    if not isinstance(group, Group):
        raise TypeError(
            f"group is {described(group)}; it must be the result of cupyfa.distributed.group()"
        )
    group.calls += 1
    fields: dict[str, str] = {}
    error: Exception | None = None
    with group.agreeing():
        try:
            _check_shards(shards)
            q, k, v = shards.values()
            fields["call"] = (
                f"{operation} number {group.calls} ({', '.join(of_rows)}) with "
                f"schedule={q.schedule!r}, order={q.order!r}"
            )
            how = list_arguments(function, arguments)
            backend, arrays = adopt(
                how.get("backend", "auto"), q=q.array, k=k.array, v=v.array, **of_rows
            )
            group.require_place(not isinstance(arrays[0], np.ndarray))
            given = _Given(function, operation, q, k, how, dict(zip(of_rows, arrays[3:])), backend)
            call = given.known_or_checked(arrays[:3])
            fields |= call.fields
        except Exception as found:
            error = found
        different = difference(group, fields, error)
    try:
        if different is not None:
            raise different
    finally:  # break the reference cycle of exception and frame, which keeps the arrays alive
        del different, error
    return call.run, arrays


def _check_shards(shards: Mapping[str, Any]) -> None:
    """Raises TypeError or ValueError unless q, k and v are Sharded in the same way."""
    for name, x in shards.items():
        if not isinstance(x, Sharded):
            other = next(y for y, z in shards.items() if isinstance(z, Sharded))
            raise TypeError(
                f"{name} is {described(x)}, but {other} is Sharded; pass q, k and v as Sharded"
            )
    q, k, v = shards.values()
    for name in ("group", "order", "schedule"):
        if not getattr(q, name) == getattr(k, name) == getattr(v, name):
            raise ValueError(
                f"q, k and v have different {name}; pass the same {name} for all three"
            )
    if k.rows != v.rows:
        raise ValueError(f"k has rows={k.rows}, but v has rows={v.rows}; rows must be equal")


@dataclass(frozen=True)
class _Given:
    """One rank's arguments of a call.

    how: keyword arguments that differ from their defaults. of_rows: dout, out, lse and dlse, if
    given.
    """

    function: Callable[..., Any]
    operation: Operation
    q: Sharded
    k: Sharded
    how: Mapping[str, Any]
    of_rows: Mapping[str, Any]
    backend: Backend

    def known_or_checked(self, arrays: Sequence[Any]) -> AgreedCall:
        """Returns the checked call from the group's cache, or checks it, which takes about 1 ms.

        arrays: q, k and v.
        """
        key, known = self._key(arrays), self.q.group.known
        try:
            made: AgreedCall | None = known.get(key)
        except TypeError:  # a tuple may contain a list
            key = made = None
        if made is None:
            made = self._checked(*arrays)
            if key is not None:
                make_room(known)
                known[key] = made
        return made

    def _key(self, arrays: Sequence[Any]) -> tuple[Any, ...] | None:
        """Returns the call's cache key, or None if an argument is mutable.

        The key contains the shapes and dtypes of arrays, but not the arrays themselves.
        """
        named: dict[str, Any] = {}
        for name, x in self.how.items():
            if isinstance(x, Mapping):
                named |= {f"{name}.{y}": z for y, z in x.items()}
            elif name != "dlse":
                named[name] = x
        of_shards = self.q.rows, self.k.rows, self.q.order, self.q.schedule
        values = (*of_shards, *named.values())
        kinds = tuple(map(type, values))
        if not {*kinds} <= _FIXED:
            return None
        forms = *map(_form, arrays), *map(_form, self.of_rows.values())
        # Include the repr of floats, because 0.0 equals -0.0.
        asked = tuple(named), kinds, values, repr([x for x in values if type(x) is float])
        of_arrays = type(arrays[0]), forms, tuple(self.of_rows)
        return self.operation, self.backend.limits, *of_arrays, *asked

    def _checked(self, q: Any, k: Any, v: Any) -> AgreedCall:
        how, of_out = self.how, self.of_rows.get("out")
        options = {name: x for name, x in how.items() if name not in _NO_OPTIONS}
        dtype = how.get("out")
        if of_out is not None and str(of_out.dtype) != str(q.dtype):
            dtype = str(of_out.dtype)
        schedule = _find_schedule(self.q.schedule)
        Problem.of(q, k, v)  # raises if this rank's shapes or dtypes do not match
        for name, x in zip("qkv", (q, k, v)):
            require_four_axes(name, x)
        of_q, of_k = _read_shards("q", self.q, q), _read_shards("k", self.k, k)
        whole_arrays = [_of_whole(x, s.n) for x, s in ((q, of_q), (k, of_k), (v, of_k))]
        p = read_problem(self.function, whole_arrays, options, dtype)
        _refuse_places(p, self.q.schedule)
        self._check_rows(q, v, p)
        flags = {x: read_flag(x, how.get(x, False)) for x in _FLAGS}
        kernel, tiles, limits = how.get("kernel", "auto"), how.get("tiles"), self.backend.limits
        which = {"persistent": schedule.PERSISTENT, "deterministic": flags["deterministic"]}
        of_kernel = planned(self.operation, p, limits, kernel, tiles, **which)
        call = Call(
            self.operation,
            backend=self.backend,
            options=options_of_parts(p),
            return_lse=self.operation == "forward",
            deterministic=flags["deterministic"],
            inputs=("mods.dlse",) if "dlse" in self.of_rows else (),
            numbers=p.operands,
            **of_kernel,
        )
        on_host = isinstance(q, np.ndarray)
        job = Job(self.q.group, p, of_q, of_k, call, flags["check"], self.backend, on_host)
        run = partial(getattr(schedule, self.operation), job, schedule.prepare(job))
        return AgreedCall(_describe_call(p, of_kernel, limits), run)

    def _check_rows(self, q: Any, v: Any, p: Problem) -> None:
        """Raises unless dout, out, lse and dlse match this rank's results in shape and dtype."""
        of_lse = tuple(q.shape[:3])
        of_out = (*of_lse, v.shape[3])
        results = {
            "dout": (of_out, p.dtype.numpy),
            "out": (of_out, p.out_dtype.numpy),
            "lse": (of_lse, p.dtype.sums),
        }
        for name, x in self.of_rows.items():
            if name == "dlse":
                check_dlse(x, self.of_rows["lse"])
            else:
                check_like_result(name, x, *results[name])


def _find_schedule(name: Any) -> Any:
    """Returns the module of a schedule; raises ValueError if its name is unknown."""
    if not isinstance(name, str) or name not in _SCHEDULES:
        known = " or ".join(map(repr, _SCHEDULES))
        raise ValueError(f"schedule is {described(name)}; use {known}")
    return _SCHEDULES[name]


def _read_shards(name: str, given: Sharded, array: Any) -> Shards:
    """Returns the division of rows; raises ValueError if this rank's array has a wrong length."""
    have, group = array.shape[2], given.group
    n = have * group.ranks if given.rows is None else whole("rows", given.rows, 0)
    shards = Shards.of(n, group.ranks, given.order)
    own = shards.sizes[group.rank]
    if have != own:
        raise ValueError(
            f"{name} has {have} rows, but rank {group.rank} of {group.ranks} must have {own} of "
            f"the {n} rows; pass the rows listed by rows({n}, group, order={given.order!r})"
        )
    return shards


def _of_whole(array: Any, rows: int) -> np.ndarray:
    """Makes a zero-stride array with the shape and dtype of the whole sequence."""
    batch, heads, _, columns = array.shape
    return np.broadcast_to(np.empty((), array.dtype), (batch, heads, rows, columns))


def _describe_call(p: Problem, how: Mapping[str, Any], limits: Limits) -> dict[str, str]:
    sizes = ("batch", "heads", "kv_heads", "M", "N", "d", "dv")
    options: dict[str, Any] = {f"captured.{x.name}": x.value for x in p.operands}
    for name, x in p.options.changed.items():
        options[name] = x.text if isinstance(x, Expression) else x
    kernel = how["kernel"]
    return {
        "dtype": p.dtype.name,
        "sizes": ", ".join(f"{x}={getattr(p, x)}" for x in sizes),
        "options": ", ".join(f"{x}={options[x]}" for x in sorted(options)),
        "kernel": f"{getattr(kernel, 'name', kernel)} {how['tiles']}",
        "device": str(limits),
    }


def _refuse_places(p: Problem, schedule: str) -> None:
    """Raises Unsupported for indices that have other values on a rank than in the whole problem."""
    for place, name in places(p.options).items():
        if place not in _SCHEDULES[schedule].KNOWN:
            others = [repr(x) for x, s in _SCHEDULES.items() if place in s.KNOWN]
            instead = f"use schedule={' or '.join(others)}" if others else "write position - key"
            raise Unsupported(
                f"{name} uses the index {place}, which starts at 0 on each rank with "
                f'schedule="{schedule}"; {instead}, or leave {name} out'
            )
