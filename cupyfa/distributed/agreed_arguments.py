"""Arguments of the functions of ranks, checked and agreed on before arrays are sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from cupyfa.distributed import gather, ring
from cupyfa.distributed.agreement import difference
from cupyfa.distributed.communicator import Group
from cupyfa.distributed.job import Job
from cupyfa.distributed.shards import Shards
from cupyfa.errors import Unsupported, described
from cupyfa.ladder.kernel import Kernel
from cupyfa.partition import refused_arguments
from cupyfa.partition.part_call import Call, options_of_parts, planned
from cupyfa.partition.position_names import places
from cupyfa.planner.plan import Limits
from cupyfa.problem.options import AttentionOptions, OptionKeywords, read_flag
from cupyfa.problem.problem import Problem, whole
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.choose_backend import adopt
from cupyfa.score.expressions import Expression

# Types of arguments that cannot change between two calls.
_FIXED = {type(None), bool, int, float, str, tuple, Kernel}
_FLAGS = ("check", "deterministic", "return_lse")
# Arguments that are no options.
_OF_CALLS = (*("M", "N", "order", "schedule", "kernel", "tiles", "backend", "out", *_FLAGS),)
_MOST_KNOWN = 256  # calls that a group remembers


class Schedule(NamedTuple):
    """How ranks divide the work, and what they send each other."""

    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[..., tuple[Any, ...]]
    known: frozenset[str]  # what expressions may name: its calls count it as the whole does
    # Messages of another rank that is not ready hold multiprocessors for as long as a kernel takes.
    persistent: bool = True  # whether "auto" may be a kernel with persistent blocks all the same


_SCHEDULES = {
    "gather": Schedule(
        gather.forward, gather.backward, frozenset({"batch", "position", "key", "keys"})
    ),
    "ring": Schedule(ring.forward, ring.backward, frozenset({"batch"}), persistent=False),
}


class Made(NamedTuple):
    """A call that was checked. fields: what has to be equal on all ranks, as errors write it."""

    fields: Mapping[str, str]
    schedule: Schedule
    job: Job


@dataclass(frozen=True)
class Given:
    """The arguments of a call of one rank.

    of_q: q, k and v. how: arguments by name that are not at their defaults. of_rows: dout, out,
    lse and dlse, if there are any. error: what is wrong with them.
    """

    function: Callable[..., Any]
    operation: str
    group: Group
    of_q: Sequence[Any]
    how: Mapping[str, Any]
    of_rows: Mapping[str, Any] = field(default_factory=dict)
    error: Exception | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.group, Group):
            raise TypeError(
                f"group is {described(self.group)}; give Sharded that of cupyfa.distributed.group()"
            )

    def agreed(self) -> tuple[Made, Sequence[Any]]:
        """The call and its arrays, if that of every rank is right and like the others.

        Else all ranks raise.
        """
        self.group.calls += 1
        fields: dict[str, str] = {}
        made: Made | None = None
        error: Exception | None = None
        arrays: Sequence[Any] = ()
        with self.group.agreeing():
            try:
                if self.error is not None:
                    raise self.error
                fields["call"] = self._call()
                there, arrays = adopt(
                    self.how.get("backend", "auto"), **dict(zip("qkv", self.of_q)), **self.of_rows
                )
                self.group.require_place(not isinstance(arrays[0], np.ndarray))
                made = self._made(there, arrays)
                fields |= made.fields
            except Exception as found:
                error = found
            different = difference(self.group, fields, error)
        try:
            if different is not None:
                raise different
        finally:  # it refers to this frame, and so to the arrays
            del different, error
        assert made is not None
        return made, arrays

    def _call(self) -> str:
        """What ranks have to call at the same time."""
        return (
            f"{self.operation} number {self.group.calls} ({', '.join(self.of_rows)}) with "
            f"schedule={self.how['schedule']!r}, order={self.how['order']!r}"
        )

    def _made(self, backend: Backend, arrays: Sequence[Any]) -> Made:
        """The call; a plan takes a millisecond, so that of equal arguments is made once."""
        key = self._key(backend, arrays)
        known = self.group.known
        if key is not None and key in known:
            made: Made = known[key]
            return made
        made = self._checked(backend, arrays)
        if key is not None:
            if len(known) >= _MOST_KNOWN:
                known.clear()
            known[key] = made
        return made

    def _key(self, backend: Backend, arrays: Sequence[Any]) -> tuple[Any, ...] | None:
        """What decides a call besides the elements of arrays; None if that can change."""
        named: dict[str, Any] = {}
        for name, x in self.how.items():
            inner = x if isinstance(x, Mapping) else {}
            named |= {f"{name}.{y}": z for y, z in inner.items()} if inner else {name: x}
        kinds = tuple(map(type, named.values()))
        if not {*kinds} <= _FIXED:
            return None
        forms = tuple((tuple(x.shape), x.dtype) for x in arrays)
        key = (
            *(self.operation, backend.limits, type(arrays[0]), forms, tuple(self.of_rows)),
            # As numbers are written, too: 0.0 equals -0.0.
            *(kinds, tuple(named.items()), repr([x for x in named.values() if type(x) is float])),
        )
        try:
            hash(key)
        except TypeError:  # a tuple with a list, which is not checked yet
            return None
        return key

    def _checked(self, backend: Backend, arrays: Sequence[Any]) -> Made:
        how, (q, k, v, *of_rows) = self.how, arrays
        others = {name: x for name, x in how.items() if name not in _OF_CALLS}
        dtype = how.get("out")
        if "out" in self.of_rows and str(arrays[4].dtype) != str(q.dtype):
            dtype = str(arrays[4].dtype)
        asked_for = refused_arguments.options_of(self.function, others, dtype)
        schedule = _schedule_named(how["schedule"])
        q_shards, k_shards, p = self._whole(q, k, v, asked_for)
        _refuse_places(p, how["schedule"])
        _check_rows(q, v, p, dict(zip(self.of_rows, of_rows)))
        flags = {x: read_flag(x, how.get(x, False)) for x in _FLAGS}
        of_backward: Any = {}
        if self.operation == "backward":
            of_backward = {"deterministic": flags["deterministic"]}
        asked = how.get("kernel", "auto"), how.get("tiles")
        which: Any = {"persistent": schedule.persistent, **of_backward}
        of_kernel = planned(self.operation, p, backend.limits, *asked, **which)
        more = {"backend": how.get("backend", "auto"), "check": flags["check"], **of_backward}
        call = Call(options_of_parts(p), how.get("captured"), {**of_kernel, **more})
        in_host = isinstance(q, np.ndarray)
        job = Job(self.group, p, q_shards, k_shards, call, backend, in_host)
        return Made(_described(p, of_kernel, backend.limits), schedule, job)

    def _whole(
        self, q: Any, k: Any, v: Any, asked: OptionKeywords
    ) -> tuple[Shards, Shards, Problem]:
        """How queries and keys are divided, and the problem of all."""
        # Of this rank's rows: their shapes and dtypes go together.
        refused_arguments.without_e4m3(Problem.of(q, k, v))
        for name, x in (("q", q), ("k", k), ("v", v)):
            _check_axes(name, x)
        options = refused_arguments.without_dropout(AttentionOptions.of(None, asked))
        of_q, of_k = self._shards("q", q, "M", "queries"), self._shards("k", k, "N", "keys")
        arrays = (_of_whole(x, s.n) for x, s in ((q, of_q), (k, of_k), (v, of_k)))
        operands = refused_arguments.numbers(self.how.get("captured"))
        return of_q, of_k, Problem.of(*arrays, options=options, operands=operands)

    def _shards(self, name: str, array: Any, total: str, what: str) -> Shards:
        """How rows are divided. Raises ValueError for another number of them than this rank's."""
        have, group, order = array.shape[2], self.group, self.how["order"]
        n = self.how[total]
        n = have * group.ranks if n is None else whole(total, n, 0)
        shards = Shards.of(n, group.ranks, order)
        own = shards.sizes[group.rank]
        if have != own:
            raise ValueError(
                f"{name} has {have} rows, and rank {group.rank} of {group.ranks} has {own} of "
                f"{total}={n} {what}; give those of rows({n}, group, order={order!r})"
            )
        return shards


def _schedule_named(name: Any) -> Schedule:
    if not isinstance(name, str) or name not in _SCHEDULES:
        known = " or ".join(map(repr, _SCHEDULES))
        raise ValueError(f"schedule is {described(name)}; use {known}")
    return _SCHEDULES[name]


def _of_whole(array: Any, rows: int) -> np.ndarray:
    """An array with the shape and dtype that the whole has, without memory for its elements."""
    batch, heads, _, columns = array.shape
    return np.broadcast_to(np.empty((), array.dtype), (batch, heads, rows, columns))


def _described(p: Problem, how: Mapping[str, Any], limits: Limits) -> dict[str, str]:
    """What has to be equal on all ranks, as errors write it."""
    sizes = ("batch", "heads", "kv_heads", "M", "N", "d", "dv")
    options = {x: _written(y) for x, y in p.options.changed.items()}
    options |= {f"captured.{x.name}": str(x.value) for x in p.operands}
    kernel = how["kernel"]
    return {
        "dtype": p.dtype.name,
        "sizes": ", ".join(f"{x}={getattr(p, x)}" for x in sizes),
        "options": ", ".join(f"{x}={options[x]}" for x in sorted(options)),
        "kernel": f"{getattr(kernel, 'name', kernel)} {how['tiles']}",
        "device": str(limits),
    }


def _written(option: Any) -> str:
    """An option as errors write it."""
    return option.text if isinstance(option, Expression) else str(option)


def _check_axes(name: str, array: Any) -> None:
    if len(array.shape) != 4:
        raise ValueError(
            f"{name} has shape {tuple(array.shape)}; give [batch, heads, rows, d]: {name}[None] "
            "has one more axis"
        )


def _check_rows(q: Any, v: Any, p: Problem, of_rows: Mapping[str, Any]) -> None:
    """Raises for dout, out, lse or dlse of another shape or dtype than this rank's results."""
    of_out, of_lse = (*q.shape[:3], v.shape[3]), tuple(q.shape[:3])
    dtypes = {"dout": p.dtype.numpy, "out": p.out_dtype.numpy}
    for name, x in of_rows.items():
        shape, dtype = (of_out, dtypes[name]) if name in dtypes else (of_lse, p.dtype.sums)
        if tuple(x.shape) != shape:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; it must be {shape} for this rank's rows"
            )
        if x.dtype != dtype:
            raise TypeError(f"{name} is {x.dtype}; it must be {dtype}: convert it")


def _refuse_places(p: Problem, schedule: str) -> None:
    """Raises Unsupported for expressions that name what the calls of a rank count differently."""
    for place, name in places(p.options).items():
        if place not in _SCHEDULES[schedule].known:
            others = [repr(x) for x, s in _SCHEDULES.items() if place in s.known]
            instead = f"take schedule={' or '.join(others)}" if others else "write position - key"
            raise Unsupported(
                f"{name} names {place}, which the calls of a rank count from 0 with "
                f'schedule="{schedule}"; {instead}, or leave it out'
            )
