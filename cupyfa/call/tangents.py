"""The tangents in calls of ``jvp`` and ``hvp``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cupyfa.call.keywords import read_shape
from cupyfa.call.pullback import find_dtypes
from cupyfa.errors import described
from cupyfa.ladder.kernel import BoundKernel
from cupyfa.problem.optional_inputs import gradient_of
from cupyfa.problem.problem import four_axes
from cupyfa.problem.wrt import QKV, refuse_without_gradients


class Direction(NamedTuple):
    """The argument ``tangents`` of a call.

    moving: the arrays for q, k and v that are not None. letters: which of them, as for the option
    ``tangents``. others: the arrays for bias, sink and other arrays of scores, by name. directions:
    their number.
    """

    moving: list[Any]
    letters: str
    others: dict[str, Any]
    directions: int


def read_tangents(
    tangents: Sequence[Any] | Mapping[str, Any], q: Any, scores: Mapping[str, Any]
) -> Direction:
    """Reads ``tangents``, (dq, dk, dv) or a mapping from the names of ``wrt`` to arrays.

    scores: the keywords of the call, with its bias and other arrays. Raises TypeError or ValueError
    unless at least one tangent is an array, and for names of arrays that cannot move.
    """
    if isinstance(tangents, Mapping):
        by_name: Mapping[str, Any] = tangents
    elif not isinstance(tangents, tuple | list):
        raise TypeError(
            f"tangents is {described(tangents)}; pass (dq, dk, dv), or a dict such as "
            '{"q": dq, "bias": d_bias}'
        )
    elif len(tangents) != len(QKV):
        raise ValueError(f"tangents has {len(tangents)} elements; pass (dq, dk, dv)")
    else:
        by_name = dict(zip(QKV, tangents))
    given = {name: x for name, x in by_name.items() if x is not None}
    if not given:
        raise ValueError(
            "all tangents are None; pass an array for at least one of q, k, v and arrays of scores"
        )
    refuse_without_gradients(given, find_dtypes(scores), "tangents")
    letters = "".join(x for x in QKV if x in given)
    first = letters[0] if letters else next(iter(given))
    like = q if letters else (scores.get("captured") or {}).get(first, scores.get(first))
    has_directions = np.ndim(given[first]) == np.ndim(like) + 1  # type: ignore[arg-type]
    return Direction(
        [given[x] for x in letters],
        letters or "none",
        {name: x for name, x in given.items() if name not in QKV},
        np.shape(given[first])[0] if has_directions else 1,
    )


def read_tangent_shapes(
    tangents: Sequence[Any] | Mapping[str, Any], q: Sequence[int], scores: Mapping[str, Any]
) -> Direction:
    """Like ``read_tangents``, for the shapes of q, k, v and their tangents."""
    if isinstance(tangents, Mapping):
        tangents = [tangents.get(x) for x in QKV] if tangents.keys() <= {*QKV} else tangents
    if isinstance(tangents, Mapping):
        raise TypeError(
            f"tangents contains {', '.join(x for x in tangents if x not in QKV)}, but with shapes "
            "only q, k and v can move; pass arrays to compile"
        )
    if isinstance(tangents, tuple | list):  # arrays of these shapes, without memory
        tangents = [_form("a tangent", x) for x in tangents]
    along = read_tangents(tangents, _form("q", q), scores)
    return along._replace(moving=[x.shape for x in along.moving])


def _form(name: str, shape: Any) -> np.ndarray | None:
    if shape is None:
        return None
    return np.broadcast_to(0.0, read_shape(f"the shape of {name}", shape))


def check_tangents(inputs: Mapping[str, Any], names: Sequence[str]) -> tuple[int, ...]:
    """Raises if the shape or dtype of a tangent differs from that of its array.

    names: the arrays that may move. Tangents of several directions have a leading axis; returns its
    size, or () without it.
    """
    given = [x for x in (_Moving.of(name, inputs) for name in names) if x is not None]
    lead, shape = given[0].lead, tuple(inputs["q"].shape)
    for x in given:
        x.check(lead)
    if lead and len(shape) < 3:
        raise ValueError(
            f"q has shape {shape}, but several directions need a head axis; pass q[None], k[None] "
            "and v[None], and their tangents as dq[:, None]"
        )
    return lead


class _Moving(NamedTuple):
    """An array and its tangent; ``label`` is how messages refer to the tangent."""

    name: str
    array: Any
    tangent: Any
    label: str

    @classmethod
    def of(cls, name: str, inputs: Mapping[str, Any]) -> _Moving | None:
        if name not in QKV:
            array, tangent = inputs[f"mods.{name}"], inputs[gradient_of(name)]
            return cls(name, array, tangent, f"the tangent of {name}")
        label = f"d{name}"
        return cls(name, inputs[name], inputs[label], label) if label in inputs else None

    @property
    def lead(self) -> tuple[int, ...]:
        """The size of the axis of directions, or () if the tangent has none."""
        has_directions = len(self.tangent.shape) == len(self.array.shape) + 1
        return tuple(self.tangent.shape[:1]) if has_directions else ()

    def check(self, lead: tuple[int, ...]) -> None:
        wanted, shape = (*lead, *self.array.shape), tuple(self.tangent.shape)
        if shape != wanted:
            of = f"the {lead[0]} directions and the shape" if lead else "the shape"
            raise ValueError(
                f"{self.label} has shape {shape}; it must be {wanted}, {of} of {self.name}"
            )
        if self.tangent.dtype != self.array.dtype:
            raise TypeError(
                f"{self.label} is {self.tangent.dtype}; it must be {self.array.dtype}, the dtype "
                f"of {self.name}: convert it"
            )


def bound_hvp(
    qkv: Sequence[Any], tangents: Sequence[Any], d_out: Any, d_lse: Any, layout: str
) -> BoundKernel:
    """Binds the kernel of Hessian-vector products to a direction and the tangents of out and lse.

    Raises ValueError for several directions.
    """
    from cupyfa.ladder.hvp import HVP  # few processes need it

    if len(d_out.shape) > len(qkv[0].shape):
        raise ValueError(
            f"tangents have {len(d_out)} directions; hvp takes one: call it for each direction"
        )
    moving = (np.zeros_like(x) if y is None else y for x, y in zip(qkv, tangents))
    arrays = (four_axes(x, layout) for x in (*moving, d_out))
    named = dict(zip(("Q_dot", "K_dot", "V_dot", "O_dot"), arrays))
    return HVP.bind(**named, lse_dot=d_lse.reshape(named["O_dot"].shape[:3]))
