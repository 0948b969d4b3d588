"""The functions of ranks: arguments are checked and agreed on before arrays are sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from cupyfa.api import BackendName, Tiles
from cupyfa.distributed import gather, heads, ring
from cupyfa.distributed.agreement import require_agreement
from cupyfa.distributed.communicator import Group
from cupyfa.distributed.job import Job
from cupyfa.distributed.shards import Order, Shards
from cupyfa.errors import Unsupported, described
from cupyfa.ladder.kernel import Kernel
from cupyfa.options import OPTIONS, AttentionOptions, Causal
from cupyfa.parts import arguments
from cupyfa.parts.calls import Call, options_of_parts, planned
from cupyfa.parts.texts import places
from cupyfa.planner.plan import Limits
from cupyfa.problem import Problem, whole
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.select import adopt
from cupyfa.version import __version__

Schedule = Literal["gather", "heads", "ring"]
Pullback = Callable[..., tuple[Any, ...]]


class _Schedule(NamedTuple):
    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[..., tuple[Any, ...]]
    known: frozenset[str]  # what texts may name: its calls count it as the whole does


_SCHEDULES = {
    "gather": _Schedule(
        gather.forward, gather.backward, frozenset({"batch", "position", "key", "keys"})
    ),
    "heads": _Schedule(
        heads.forward,
        heads.backward,
        frozenset({"batch", "query", "queries", "position", "key", "keys"}),
    ),
    "ring": _Schedule(ring.forward, ring.backward, frozenset({"batch"})),
}
_ELSEWHERE = {
    "layout": "arrays are [batch, heads, rows, d]: give q.swapaxes(1, 2)",
    "out": "results are new arrays",
    "grads": "results are new arrays",
    **dict.fromkeys(("own", "return_own"), "a kernel's own arrays are not divided"),
    "progress": "ranks work in lockstep",
}


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    group: Group,
    M: int | None = None,
    N: int | None = None,
    order: Order = "zigzag",
    schedule: Schedule = "gather",
    causal: Causal | bool | None = False,
    return_lse: bool = False,
    kernel: str | Kernel = "auto",
    tiles: Tiles | None = None,
    backend: BackendName | Backend = "auto",
    check: bool = False,
    options: AttentionOptions | None = None,
    captured: Mapping[str, Any] | None = None,
    **others: Any,
) -> Any:
    """``cupyfa.attention`` of a sequence whose rows are divided among ranks.

    Each rank gives its rows of all batch elements and heads: q [batch, heads, rows, d],
    k [batch, kv_heads, rows, d] and v [batch, kv_heads, rows, dv] of one dtype, float16, bfloat16,
    float32 or float64. They are the rows ``rows(M, group, order=order)`` of q and
    ``rows(N, group, order=order)`` of k and v; a rank may have none. All ranks call with the same
    other arguments.

    group: of the ranks that compute together.
    M, N: the numbers of queries and keys in the whole sequence; by default ranks times those that
        this rank has, so they are needed if ranks do not divide them.
    order: how the sequence is divided, as for ``rows``.
    schedule: what ranks send each other, see docs/many-gpus.md. "gather": each rank collects the
        keys of some heads at a time. "heads": each computes some heads for the whole sequence, if
        ranks divide kv_heads. "ring": keys travel from rank to rank.
    kernel, tiles: as for ``cupyfa.attention``; they are chosen for the whole problem.
    check: also compare the result of each part with the reference.
    captured: the numbers that score_mod and mask_mod name.
    options, others: causal, window, offset, scale, softcap, score_mod, mask_mod and precision, of
        the whole sequence, as for ``cupyfa.attention``. Texts may name the score and
        position - key, and what docs/many-gpus.md lists for the schedule.

    Returns out [batch, heads, rows, dv], with ``return_lse`` also lse [batch, heads, rows], of this
    rank's rows. With "heads", and with "gather" if rows are divided at multiples of the kernel's
    tiles, out has the bits of one call on the whole with the same kernel and tiles, except with
    kernels that docs/many-gpus.md names.

    Raises, on all ranks the same: TypeError, ValueError and Unsupported for wrong arguments of any
    rank, ValueError if shapes, dtypes, options, versions or devices differ. DeviceError if another
    rank fails, ends or does not answer within the time-out of the group, which then has ended;
    else what ``cupyfa.attention`` raises.
    """
    given = _Given(attention, group, (q, k, v), {"causal": causal, **others})
    call = given.agreed(
        "forward", M=M, N=N, order=order, schedule=schedule, kernel=kernel, tiles=tiles,
        backend=backend, check=check, options=options, captured=captured,
    )  # fmt: skip
    with group.calling():
        out, lse = call.schedule.forward(call.job, *call.arrays)
    return (out, lse) if return_lse else out


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    group: Group,
    M: int | None = None,
    N: int | None = None,
    order: Order = "zigzag",
    schedule: Schedule = "gather",
    causal: Causal | bool | None = False,
    deterministic: bool = False,
    dlse: Any = None,
    kernel: str | Kernel = "auto",
    tiles: Tiles | None = None,
    backend: BackendName | Backend = "auto",
    check: bool = False,
    options: AttentionOptions | None = None,
    captured: Mapping[str, Any] | None = None,
    **others: Any,
) -> tuple[Any, Any, Any]:
    """The gradients of this rank's rows of q, k and v, for its rows of ``dout``.

    q, k, v and the other arguments are those of the call of ``attention``; ``out`` and ``lse`` its
    results with ``return_lse``. dout has the shape of out. ``dlse`` is the gradient of lse, by
    default 0; give it on all ranks or on none. With ``deterministic`` every run with as many ranks
    gives the same bits.

    Returns dq, dk and dv, like q, k and v. Each part's dk and dv are rounded to the dtype; their
    sums over the ranks are of float32 (float64 for float64), in the order of ranks. Raises what
    ``attention`` raises.
    """
    named = {"dout": dout, "out": out, "lse": lse, "dlse": dlse}
    of_rows = {name: x for name, x in named.items() if x is not None or name != "dlse"}
    given = _Given(
        attention_backward, group, (q, k, v), {"causal": causal, **others}, of_rows, deterministic
    )
    call = given.agreed(
        "backward", M=M, N=N, order=order, schedule=schedule, kernel=kernel, tiles=tiles,
        backend=backend, check=check, options=options, captured=captured,
    )  # fmt: skip
    q, k, v, *rows = call.arrays
    with group.calling():
        dq, dk, dv = call.schedule.backward(call.job, (q, *rows), k, v)
    return dq, dk, dv


def attention_vjp(
    q: Any,
    k: Any,
    v: Any,
    *,
    group: Group,
    return_lse: bool = False,
    deterministic: bool = False,
    kernel: str | Kernel = "auto",
    backward_kernel: str | Kernel = "auto",
    tiles: Tiles | None = None,
    backward_tiles: Tiles | None = None,
    **others: Any,
) -> tuple[Any, Pullback]:
    """``attention`` of this rank's rows, and the function that gives its gradients.

    Returns out and ``pullback``; ``pullback(dout)`` gives dq, dk and dv, as ``attention_backward``
    does, and all ranks call it. With ``return_lse`` it returns (out, lse) and ``pullback``;
    ``pullback(dout, dlse)`` takes the gradient of lse too. ``backward_kernel`` and
    ``backward_tiles`` are for the gradients. The other arguments, and what is raised, are those of
    ``attention``.
    """
    out, lse = attention(
        q, k, v, group=group, return_lse=True, kernel=kernel, tiles=tiles, **others
    )

    def pullback(dout: Any, dlse: Any = None) -> tuple[Any, Any, Any]:
        return attention_backward(
            *(dout, q, k, v, out, lse), group=group, deterministic=deterministic, dlse=dlse,
            kernel=backward_kernel, tiles=backward_tiles, **others,
        )  # fmt: skip

    return ((out, lse) if return_lse else out), pullback


class _Agreed(NamedTuple):
    """A call that all ranks make. arrays: q, k and v, and for gradients dout, out, lse and dlse."""

    schedule: _Schedule
    job: Job
    arrays: Sequence[Any]


@dataclass(frozen=True)
class _Given:
    """The arguments of a call that are this rank's own, or that are refused.

    of_rows: dout, out, lse and dlse. others: options by name, and what the function may not have.
    """

    function: Callable[..., Any]
    group: Group
    of_q: Sequence[Any]
    others: Mapping[str, Any]
    of_rows: Mapping[str, Any] | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.group, Group):
            raise TypeError(
                f"group is {described(self.group)}; give that of cupyfa.distributed.group()"
            )

    def agreed(self, operation: str, **how: Any) -> _Agreed:
        """The call, if that of every rank is right and like the others. Else all ranks raise."""
        fields = {"version": __version__, "call": self._call(operation, how)}
        made, error = None, None
        try:
            made = self._checked(operation, fields, **how)
        except Exception as found:
            error = found
        require_agreement(self.group, fields, error)
        assert made is not None
        return made

    def _call(self, operation: str, how: Mapping[str, Any]) -> str:
        self.group.calls += 1
        of_rows = ", ".join(self.of_rows or ())
        return (
            f"{operation} number {self.group.calls} ({of_rows}) with "
            f"schedule={how['schedule']!r}, order={how['order']!r}"
        )

    def _checked(
        self,
        operation: str,
        fields: dict[str, str],
        *,
        M: int | None,
        N: int | None,
        order: str,
        schedule: str,
        kernel: str | Kernel,
        tiles: Tiles | None,
        backend: BackendName | Backend,
        check: bool,
        options: AttentionOptions | None,
        captured: Mapping[str, Any] | None,
    ) -> _Agreed:
        """The call of this rank; fields get what has to be equal on all."""
        if not isinstance(schedule, str) or schedule not in _SCHEDULES:
            known = " or ".join(map(repr, _SCHEDULES))
            raise ValueError(f"schedule is {described(schedule)}; use {known}")
        arguments.refuse_others("cupyfa.distributed", self.function, self.others, _ELSEWHERE)
        there, arrays = adopt(backend, **dict(zip("qkv", self.of_q)), **(self.of_rows or {}))
        q, k, v, *of_rows = arrays
        in_host = isinstance(q, np.ndarray)
        self.group.require_place(not in_host)
        asked = {name: x for name, x in self.others.items() if name in OPTIONS}
        chosen = arguments.without_dropout(AttentionOptions.of(options, asked))
        q_shards, k_shards, p = self._whole((q, k, v), M, N, order, chosen, captured)
        _refuse_places(p, schedule)
        _require_heads(p, schedule, self.group.ranks)
        _check_rows(q, v, p, dict(zip(self.of_rows or {}, of_rows)))
        planned_how = planned(
            operation, p, there.limits, kernel, tiles, deterministic=self.deterministic
        )
        fields |= _described(p, captured, planned_how, there.limits)
        how = {**planned_how, "backend": backend, "check": check}
        if operation == "backward":
            how["deterministic"] = self.deterministic
        call = Call(options_of_parts(p), captured, how)
        job = Job(self.group, p, q_shards, k_shards, call, there, in_host)
        return _Agreed(_SCHEDULES[schedule], job, arrays)

    def _whole(
        self,
        arrays: Sequence[Any],
        M: int | None,
        N: int | None,
        order: str,
        options: AttentionOptions,
        captured: Mapping[str, Any] | None,
    ) -> tuple[Shards, Shards, Problem]:
        """How queries and keys are divided, and the problem of all."""
        q, k, v = arrays
        Problem.of(q, k, v)  # of this rank's rows: their shapes and dtypes go together
        for name, x in zip("qkv", arrays):
            _check_axes(name, x)
        of_q, of_k = self._shards("q", q, M, order), self._shards("k", k, N, order)
        whole_arrays = (_of_whole(x, s.n) for x, s in ((q, of_q), (k, of_k), (v, of_k)))
        numbers = arguments.numbers(captured)
        return of_q, of_k, Problem.of(*whole_arrays, options=options, operands=numbers)

    def _shards(self, name: str, array: Any, n: int | None, order: str) -> Shards:
        """How the rows of q, or of k, are divided. Raises for another number than this rank's."""
        size, total = ("queries", "M") if name == "q" else ("keys", "N")
        have, group = array.shape[2], self.group
        shards = Shards.of(
            have * group.ranks if n is None else whole(total, n, 0), group.ranks, order
        )
        own = shards.sizes[group.rank]
        if have != own:
            raise ValueError(
                f"{name} has {have} rows, and rank {group.rank} of {group.ranks} has {own} of "
                f"{total}={shards.n} {size}; give those of rows({shards.n}, group, order={order!r})"
            )
        return shards


def _of_whole(array: Any, rows: int) -> np.ndarray:
    """An array with the shape and dtype that the whole has, without memory for its elements."""
    batch, heads, _, columns = array.shape
    return np.broadcast_to(np.empty((), array.dtype), (batch, heads, rows, columns))


def _described(
    p: Problem, captured: Mapping[str, Any] | None, how: Mapping[str, Any], limits: Limits
) -> dict[str, str]:
    """What has to be equal on all ranks, as errors write it."""
    sizes = ("batch", "heads", "kv_heads", "M", "N", "d", "dv")
    options = p.options.changed
    kernel = how["kernel"]
    return {
        "dtype": p.dtype.name,
        "sizes": ", ".join(f"{x}={getattr(p, x)}" for x in sizes),
        "options": ", ".join(f"{x}={y}" for x, y in {**options, **(captured or {})}.items()),
        "kernel": f"{getattr(kernel, 'name', kernel)} {how['tiles']}",
        "device": str(limits),
    }


def _check_axes(name: str, array: Any) -> None:
    if len(array.shape) != 4:
        raise ValueError(
            f"{name} has shape {tuple(array.shape)}; give [batch, heads, rows, d]: {name}[None] "
            "has one more axis"
        )


def _check_rows(q: Any, v: Any, p: Problem, of_rows: Mapping[str, Any]) -> None:
    """Raises for dout, out, lse or dlse of another shape or dtype than this rank's results."""
    of_out, of_lse = (*q.shape[:3], v.shape[3]), tuple(q.shape[:3])
    for name, x in of_rows.items():
        shape, dtype = (of_lse, p.dtype.sums) if "lse" in name else (of_out, p.dtype.numpy)
        if tuple(x.shape) != shape:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; it must be {shape} for this rank's rows"
            )
        if x.dtype != dtype:
            raise TypeError(f"{name} is {x.dtype}; it must be {dtype}: convert it")


def _require_heads(p: Problem, schedule: str, ranks: int) -> None:
    """Raises ValueError if ranks do not divide the key heads and have to."""
    if schedule == "heads" and p.kv_heads % ranks:
        raise ValueError(
            f'kv_heads={p.kv_heads} is not a multiple of ranks={ranks}, and "heads" gives each '
            'rank as many; take schedule="gather"'
        )


def _refuse_places(p: Problem, schedule: str) -> None:
    """Raises Unsupported for texts that name what the calls of a rank count differently."""
    for place, name in places(p.options).items():
        if place not in _SCHEDULES[schedule].known:
            others = [repr(x) for x, s in _SCHEDULES.items() if place in s.known]
            instead = f"take schedule={' or '.join(others)}" if others else "write position - key"
            raise Unsupported(
                f"{name} names {place}, which the calls of a rank count from 0 with "
                f'schedule="{schedule}"; {instead}, or leave it out'
            )
