"""How the products of all heads are divided into calls of cuBLAS, each for evenly spaced heads."""

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

Three = tuple[int, int, int]  # a number of a, of b and of out


class Batch(NamedTuple):
    """Products of one call of cuBLAS; starts and steps from head to head are in bytes."""

    starts: Three
    steps: Three
    heads: int
    adds: bool  # whether the call adds its product to out


class _Axis(NamedTuple):
    size: int
    strides: Three
    is_summed: bool = False  # whether all members of the axis add to the same heads of out

    def holds(self, inner: "_Axis") -> bool:
        """Returns whether this axis and the one inside it are evenly spaced as a single axis."""
        return not inner.is_summed and self.strides == tuple(inner.size * x for x in inner.strides)


def batches(a: Any, b: Any, out: Any) -> list[Batch]:
    """Divides the products of all heads into as few calls as their spacing permits.

    a, b and out are arrays [batch, heads, …] that may have only the key heads. Batch elements, key
    heads and the query heads of a key head are three axes. Each call takes all members of the
    longest one, of several if they are evenly spaced together. If only out has key heads, the
    products of a group are added up, one call after the other.
    """
    axes = _axes(a, b, out)
    longest = max((x for x in axes if not x.is_summed), key=lambda x: x.size, default=None)
    count, steps = (longest.size, longest.strides) if longest else (1, (0, 0, 0))
    return [
        Batch(starts, steps, count, adds)
        for starts, adds in _places([x for x in axes if x is not longest])
    ]


def _axes(a: Any, b: Any, out: Any) -> list[_Axis]:
    """Returns the axes of heads that have more than one member, evenly spaced ones as one."""
    arrays, (batch, heads) = (a, b, out), a.shape[:2]
    kv_heads = min(x.shape[1] for x in arrays)
    group = heads // kv_heads
    has_all = [x.shape[1] == heads for x in arrays]
    of_heads = [x.strides[1] for x in arrays]
    found: list[_Axis] = []
    for axis in (
        _Axis(batch, _three(x.strides[0] for x in arrays)),
        _Axis(kv_heads, _three(x * (group if y else 1) for x, y in zip(of_heads, has_all))),
        _Axis(group, _three(x * y for x, y in zip(of_heads, has_all)), out.shape[1] < heads),
    ):
        if axis.size == 1:
            continue
        if found and found[-1].holds(axis):
            axis = axis._replace(size=found.pop().size * axis.size)
        found.append(axis)
    return found


def _places(axes: list[_Axis]) -> Iterator[tuple[Three, bool]]:
    """Yields the starts of each member of the axes, and whether it adds to an earlier one."""
    for indices in product(*(range(x.size) for x in axes)):
        at = [(i, axis) for i, axis in zip(indices, axes)]
        starts = _three(sum(i * axis.strides[x] for i, axis in at) for x in range(3))
        yield starts, any(i > 0 and axis.is_summed for i, axis in at)


def _three(values: Any) -> Three:
    a, b, out = values
    return a, b, out
