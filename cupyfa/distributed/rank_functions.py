"""The functions of ranks, which all call at the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from cupyfa.call.keywords import list_arguments
from cupyfa.distributed.agreed_arguments import Given
from cupyfa.distributed.communicator import Group
from cupyfa.distributed.shards import Order
from cupyfa.errors import described
from cupyfa.problem.options import read_flag
from cupyfa.problem.structured_arrays import KINDS, Structured

Schedule = Literal["gather", "ring"]
Pullback = Callable[..., tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class Sharded(Structured):
    """The rows of a sequence that this rank has, of an array that is divided among ranks.

    ``cupyfa.attention``, ``vjp`` and ``backward`` take q, k and v as Sharded arrays of one group,
    order and schedule; all ranks call with the same other arguments.

    array: q [batch, heads, rows, d], k [batch, kv_heads, rows, d] or v [batch, kv_heads, rows, dv],
        of float16, bfloat16, float32 or float64: the rows ``rows(n, group, order=order)`` of all
        batch elements and heads. A rank may have none.
    group: of the ranks that compute together.
    rows: n, the number of rows in the whole sequence; by default ranks times those that this rank
        has, so it is needed if ranks do not divide them.
    order: how the sequence is divided, as for ``rows``.
    schedule: what ranks send each other, see docs/many-gpus.md. "gather": each rank collects the
        keys of some heads at a time. "ring": keys travel from rank to rank.

    Results are plain arrays of this rank's rows. Kernel and tiles are chosen for the whole problem.
    Expressions may name the score and position - key, and what docs/many-gpus.md lists for the
    schedule. With "gather", and rows divided at multiples of the kernel's tiles, out has the bits
    of one call on the whole with the same kernel and tiles, except with kernels that the page
    names. Gradients of keys are summed over the ranks in float32 (float64 for float64), in the
    order of ranks; with ``deterministic`` every run with as many ranks gives the same bits.

    Calls raise, on all ranks the same: TypeError, ValueError and Unsupported for wrong arguments of
    any rank, ValueError if shapes, dtypes, options, versions or devices differ. DeviceError if
    another rank fails, ends or does not answer within the time-out of the group, which then has
    ended.
    """

    array: Any
    group: Group
    rows: int | None = None
    order: Order = "zigzag"
    schedule: Schedule = "gather"


KINDS[Sharded] = __name__


def attention_of_others(attention: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """``attention`` of this rank's rows. arguments: those of the call by name."""
    given = _given(attention, "forward", arguments)
    call, arrays = given.agreed()
    with given.group.calling():
        out, lse = call.schedule.forward(call.job, *arrays)
    return (out, lse) if given.how.get("return_lse") else out


def backward_of_others(
    backward: Callable[..., Any], arguments: Mapping[str, Any]
) -> tuple[Any, Any, Any]:
    """``backward`` of this rank's rows. arguments: those of the call by name."""
    of_rows = {x: arguments[x] for x in ("dout", "out", "lse", "dlse") if arguments[x] is not None}
    given = _given(backward, "backward", arguments, of_rows)
    call, (q, k, v, *rows) = given.agreed()
    with given.group.calling():
        dq, dk, dv = call.schedule.backward(call.job, (q, *rows), k, v)
    return dq, dk, dv


def vjp_of_others(vjp: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[Any, Pullback]:
    """``vjp`` of this rank's rows. arguments: those of the call by name."""
    from cupyfa.api import attention

    given = list_arguments(vjp, arguments)
    return_lse, deterministic = (
        read_flag(x, given.pop(x, False)) for x in ("return_lse", "deterministic")
    )
    kernels = {"kernel": given.pop("kernel", "auto"), "tiles": given.pop("tiles", None)}
    of_backward = {
        "kernel": given.pop("backward_kernel", "auto"),
        "tiles": given.pop("backward_tiles", None),
        "deterministic": deterministic,
    }
    dtype = given.pop("out", None)
    q, k, v = (arguments[name] for name in "qkv")
    out, lse = attention(q, k, v, return_lse=True, out=dtype, **kernels, **given)
    pull = partial(_pullback, (q, k, v, out, lse), {**of_backward, **given})
    return ((out, lse) if return_lse else out), pull


def _pullback(
    arrays: tuple[Any, ...], how: Mapping[str, Any], dout: Any, dlse: Any = None
) -> tuple[Any, ...]:
    from cupyfa.api import backward

    return backward(dout, *arrays, dlse=dlse, **how)


def _given(
    function: Callable[..., Any],
    operation: str,
    arguments: Mapping[str, Any],
    of_rows: Mapping[str, Any] | None = None,
) -> Given:
    """The arguments of a call of this rank; all ranks raise what is wrong with them."""
    given = list_arguments(function, arguments)
    given.pop("dlse", None)
    shards = {name: arguments[name] for name in "qkv"}
    group = next(x.group for x in shards.values() if isinstance(x, Sharded))
    try:
        _check_shards(shards)
    except (TypeError, ValueError) as error:
        return Given(function, operation, group, (), {}, error=error)
    q, k, v = shards.values()
    how = {"M": q.rows, "N": k.rows, "order": q.order, "schedule": q.schedule, **given}
    return Given(function, operation, group, [x.array for x in (q, k, v)], how, of_rows or {})


def _check_shards(shards: Mapping[str, Any]) -> None:
    """Raises TypeError and ValueError for q, k and v that do not belong to one sequence."""
    for name, x in shards.items():
        if not isinstance(x, Sharded):
            other = next(y for y, z in shards.items() if isinstance(z, Sharded))
            raise TypeError(
                f"{name} is {described(x)}, and {other} is Sharded; give q, k and v as Sharded"
            )
    q, k, v = shards.values()
    for name in ("group", "order", "schedule"):
        if not getattr(q, name) == getattr(k, name) == getattr(v, name):
            raise ValueError(f"q, k and v have different {name}; give all the same")
    if k.rows != v.rows:
        raise ValueError(f"k has rows={k.rows} and v rows={v.rows}; every key has a value")
