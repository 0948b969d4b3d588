"""The functions of ranks, which all call at the same time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from cupyfa.call.call import BackendName, Tiles
from cupyfa.distributed.agreed_arguments import Given
from cupyfa.distributed.communicator import Group
from cupyfa.distributed.shards import Order
from cupyfa.ladder.kernel import Kernel
from cupyfa.problem.options import NOT_GIVEN, AttentionOptions, Causal, read_flag
from cupyfa.runtime.backend import Backend

Schedule = Literal["gather", "ring"]
Pullback = Callable[..., tuple[Any, ...]]

# The arguments that ``Given`` takes by name, where a function has them.
_HOW = (
    *("M", "N", "order", "schedule", "kernel", "tiles", "backend", "check", "options", "captured"),
    *("deterministic", "return_lse"),
)


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
    causal: Causal | bool | None = NOT_GIVEN,
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
        keys of some heads at a time. "ring": keys travel from rank to rank.
    kernel, tiles: as for ``cupyfa.attention``; they are chosen for the whole problem.
    check: also compare the result of each part with the reference.
    captured: the numbers that score_mod and mask_mod name.
    options, others: causal, window, offset, scale, softcap, score_mod, mask_mod, out_dtype and
        precision, of the whole sequence, as for ``cupyfa.attention``. Texts may name the score and
        position - key, and what docs/many-gpus.md lists for the schedule.

    Returns out [batch, heads, rows, dv], with ``return_lse`` also lse [batch, heads, rows], of this
    rank's rows. With "gather", and rows divided at multiples of the kernel's tiles, out has the
    bits of one call on the whole with the same kernel and tiles, except with kernels that
    docs/many-gpus.md names.

    Raises, on all ranks the same: TypeError, ValueError and Unsupported for wrong arguments of any
    rank, ValueError if shapes, dtypes, options, versions or devices differ. DeviceError if another
    rank fails, ends or does not answer within the time-out of the group, which then has ended;
    else what ``cupyfa.attention`` raises.
    """
    how = _how(locals())
    given = Given(attention, "forward", group, (q, k, v), how, {"causal": causal, **others})
    call, arrays = given.agreed()
    with group.calling():
        out, lse = call.schedule.forward(call.job, *arrays)
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
    causal: Causal | bool | None = NOT_GIVEN,
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

    Returns dq, dk and dv, like q, k and v, or in float32 with ``out_dtype="float32"``, as out then
    is. Each part's dk and dv have this dtype; their sums over the ranks are of float32 (float64 for
    float64), in the order of ranks. Raises what ``attention`` raises.
    """
    how = _how(locals())
    of_rows = {"dout": dout, "out": out, "lse": lse} | ({} if dlse is None else {"dlse": dlse})
    given = Given(
        *(attention_backward, "backward", group, (q, k, v), how, {"causal": causal, **others}),
        of_rows,
    )
    call, (q, k, v, *rows) = given.agreed()
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
    return_lse, deterministic = (
        read_flag(*x) for x in (("return_lse", return_lse), ("deterministic", deterministic))
    )
    out, lse = attention(
        q, k, v, group=group, return_lse=True, kernel=kernel, tiles=tiles, **others
    )
    how = {"group": group, "deterministic": deterministic, **others}
    how |= {"kernel": backward_kernel, "tiles": backward_tiles}
    return ((out, lse) if return_lse else out), partial(_pullback, (q, k, v, out, lse), how)


def _pullback(
    arrays: tuple[Any, ...], how: Mapping[str, Any], dout: Any, dlse: Any = None
) -> tuple[Any, Any, Any]:
    return attention_backward(dout, *arrays, dlse=dlse, **how)


def _how(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: arguments[name] for name in _HOW if name in arguments}
