"""Operations of kernels: inputs, outputs, reference and number of floating-point operations.

References import cupyfa.numerics when they are called, because only checks need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupyfa.problem.dtypes import E4M3, E4M3_INPUTS
from cupyfa.problem.lengths import pairs_of
from cupyfa.problem.optional_inputs import (
    DESCALES,
    GRADIENT,
    OFFSET,
    PADDED,
    PAGE_TABLE,
    ROW_MAX,
    SCALES,
    SEED,
    SINK,
    STARTS,
    USED,
    Operand,
    gradient_of,
)
from cupyfa.problem.problem import Problem
from cupyfa.score.dropout import KeptWeights

if TYPE_CHECKING:
    from cupyfa.numerics.reference import Tile
    from cupyfa.numerics.tolerance import Expected, ExpectedOfEach, Roundings
    from cupyfa.score.numpy_evaluation import Modifications

Arrays = Mapping[str, np.ndarray]
# Maps kinds of inputs and outputs to NumPy dtypes, or to None if the problem determines the dtype.
INPUT_KINDS = {
    **{"scalar": None, "result": None, "real": None, "float32": "f4", "float64": "f8"},
    **{"int": "i4", "int32": "i4", "int64": "i8", "uint8": "u1", "bool": "?"},
}


@dataclass(frozen=True)
class Excerpt:
    """A slice of output rows of one head, which indexes arrays [batch, heads, rows, …].

    ``keys`` is a slice of the keys; by default it is as long as ``rows``, and its relative position
    among the keys is that of ``rows`` among the queries.
    """

    batch: int
    head: int
    rows: slice
    keys: slice | None = None

    def of_keys(self, p: Problem) -> Excerpt:
        """Returns the corresponding excerpt of keys in the key head that ``head`` reads."""
        if self.keys is not None:
            return Excerpt(self.batch, self.head // p.group, self.keys)
        count = min(self.rows.stop - self.rows.start, p.N)
        furthest = max(p.M - (self.rows.stop - self.rows.start), 1)
        start = min(self.rows.start * (p.N - count) // furthest, p.N - count)
        return Excerpt(self.batch, self.head // p.group, slice(start, start + count))

    def of(self, array: np.ndarray) -> np.ndarray:
        """Slices an array; returns [1, 1, rows, …]."""
        here = slice(self.batch, self.batch + 1), slice(self.head, self.head + 1), self.rows
        return array[here]


def always(p: Problem) -> bool:
    return True


@dataclass(frozen=True)
class Input:
    """Describes an array of an operation or kernel, usually an input.

    axes: names of its axes, such as "batch heads M", or a formula for its shape,
        ``lambda p: (…,)``.
    kind: one of INPUT_KINDS: "scalar" is the problem's dtype, "result" its ``out_dtype``, "real"
        the accumulation type, "int" int32. For an array that an expression reads, the kind is the
        name of its dtype.
    when: whether a problem has the array.
    draw: draws random elements for checks and benchmarks, ``lambda rng, p: …`` with a NumPy
        Generator. By default floats are drawn like Q, K and V, integers from 0 to 2, and half of
        all bools are True.
    """

    axes: str | Callable[[Problem], tuple[int, ...]]
    kind: str = "scalar"
    when: Callable[[Problem], bool] = always
    draw: Callable[[np.random.Generator, Problem], Any] | None = None

    def shape(self, p: Problem) -> tuple[int, ...]:
        return p.shape(self.axes) if isinstance(self.axes, str) else tuple(self.axes(p))

    def axes_for(self, p: Problem) -> str:
        """Returns the names of the axes; "-" for axes of a shape formula."""
        return self.axes if isinstance(self.axes, str) else " ".join("-" for _ in self.shape(p))

    def in_pages(self) -> Input:
        """Returns the input as stored in a paged cache."""
        axes = str(self.axes).replace("batch", "pages").replace("N", "page_size")
        return replace(self, axes=axes)

    def bytes(self, p: Problem) -> int:
        return prod(self.shape(p)) * self.dtype(p).itemsize

    def dtype(self, p: Problem) -> np.dtype:
        kinds = {"scalar": p.dtype.numpy, "result": p.out_dtype.numpy, "real": p.dtype.sums}
        kinds["e4m3"] = E4M3
        return np.dtype(kinds.get(self.kind) or INPUT_KINDS.get(self.kind) or self.kind)


def _input_of(array: Operand) -> Input:
    return Input(lambda p: array.shape, array.dtype)


def _tangent_of(array: Operand) -> Input:
    return Input(lambda p: (p.directions, *array.shape), array.dtype)


@dataclass(frozen=True)
class Operation:
    """An operation on named arrays [batch, heads, rows, columns].

    ``inputs`` contains all arrays that a problem may have. ``outputs`` maps names to axes and kind.
    ``reference(inputs, problem, roundings, excerpt)`` returns the expected results with bounds for
    each rounding, for all rows or for an excerpt. ``flops`` counts 2 for a multiply-add and skips
    masked scores. Kernels with additional arrays or a custom reference derive their operation from
    one of OPERATIONS; see ``Kernel.computes``.
    """

    name: str
    inputs: Mapping[str, Input]
    outputs: Mapping[str, tuple[str, str]]
    reference: Callable[..., ExpectedOfEach]
    flops: Callable[[Problem], int]

    def bytes(self, p: Problem) -> int:
        """Returns the minimum memory traffic: every input is read and every output written once."""
        moved = [*self.inputs_of(p).values(), *self.outputs_of(p).values()]
        return sum(x.bytes(p) for x in moved)

    def inputs_of(self, p: Problem) -> dict[str, Input]:
        """Returns a problem's inputs, including the arrays that its expressions read and, for the
        operation "tangent", the tangents of these arrays.
        """
        read = {x.input: _input_of(x) for x in p.modifiers.arrays}
        if self.name == "tangent":
            moving = (x for x in p.modifiers.arrays if x.gradient)
            read |= {gradient_of(x.name): _tangent_of(x) for x in moving}
        own = {name: x for name, x in self.inputs.items() if x.when(p)}
        if p.modifiers.is_e4m3:
            own |= {name: replace(own[name], kind="e4m3") for name in "KV"}
        if p.pages:
            own |= {name: own[name].in_pages() for name in "KV"}
        return own | read

    def outputs_of(self, p: Problem) -> dict[str, Input]:
        """Returns a problem's outputs, including gradients of captured arrays, and row_max if the
        call returns it.
        """
        asked = (x for x in p.modifiers.arrays if x.gradient and self.name == "backward")
        made = {gradient_of(x.name): _input_of(x) for x in asked}
        if p.modifiers.has_row_max:
            made[ROW_MAX] = Input("batch heads M", "real")
        return {name: Input(*of) for name, of in self.outputs.items()} | made

    def axes_of(self, p: Problem) -> dict[str, str]:
        """Returns the axis names of all inputs and outputs of a problem."""
        every, read = self.inputs_of(p) | self.outputs_of(p), p.modifiers.arrays
        own = {name: x.axes for x in read for name in (x.input, gradient_of(x.name))}
        if self.name == "tangent":
            own |= {gradient_of(x.name): ("-", *x.axes) for x in read}
        return {
            name: " ".join(own[name]) if name in own else x.axes_for(p) for name, x in every.items()
        }

    def place(self, output: str, excerpt: Excerpt, p: Problem) -> Excerpt:
        return excerpt.of_keys(p) if self._is_of_keys(output) else excerpt

    def excerpt_at(self, output: str, index: Sequence[int], p: Problem) -> Excerpt:
        """Returns the smallest excerpt that contains element ``index`` of an output."""
        batch, head, row = index[:3]
        here = slice(row, row + 1)
        if self._is_of_keys(output):
            return Excerpt(batch, head * p.group, slice(0, 1), here)
        return Excerpt(batch, head, here)

    def _is_of_keys(self, output: str) -> bool:
        return output in self.outputs and "kv_heads" in self.outputs[output][0].split()


def visible_scores(p: Problem) -> int:
    """Returns the number of visible (query, key) pairs per head and batch element.

    For a packed batch, it is the sum over all sequences.
    """
    if p.lengths is not None:
        return sum(visible_scores(p.sequence(*x)) for x in pairs_of(*p.lengths))
    visible = p.M * p.N if p.right is None else _scores_left_of(p, p.causal_offset + 1)
    return visible if p.left is None else visible - _scores_left_of(p, p.window_offset)


def _scores(p: Problem) -> int:
    if p.cached is None:
        return p.batch * visible_scores(p)
    return sum(visible_scores(p.sequence(p.M, n)) for n in p.cached.rows)


def _scores_left_of(p: Problem, diagonal: int) -> int:
    """Returns the number of pairs (i, j) with j < i + diagonal."""
    # Row i has clamp(i + diagonal, 0, N) such pairs: 0 before row `first`, N from row `full` on.
    first = min(max(-diagonal, 0), p.M)
    full = min(max(p.N - diagonal, first), p.M)
    ramp = (full - first) * (first + full - 1 + 2 * diagonal) // 2
    return ramp + (p.M - full) * p.N


def modifications(
    inputs: Arrays,
    p: Problem,
    first: tuple[int, int, int, int] = (0, 0, 0, 0),
    sequence: Problem | None = None,
) -> Modifications:
    """Returns a problem's score and mask expressions with their arrays, and its dropout.

    first: the batch element, query head, query and key at which an excerpt begins. sequence: the
    sequence of a ragged batch to which the expressions apply.
    """
    from cupyfa.score.numpy_evaluation import Modifications

    modifiers, its = p.modifiers, sequence or p
    return Modifications(
        score_steps=modifiers.score,
        mask_steps=modifiers.mask,
        names=modifiers.numbers
        | {x.name: inputs[x.input] for x in modifiers.arrays if x.is_in_expressions},
        position=its.first_position,
        queries=its.M,
        keys=its.N,
        first=first,
        dropout=KeptWeights.of(
            *(p.options, p.heads),
            seed=inputs.get(f"mods.{SEED}"),
            offset=inputs.get(f"mods.{OFFSET}"),
        ),
    )


_ALL = slice(None)
OF_KEYS = ("K", "V", "dK", "dV", "K_dot", "V_dot")  # names of arrays with one row per key
_MOVED = ("Q_dot", "K_dot", "V_dot")


class _Part(NamedTuple):
    """A part of a problem: rows and keys of some heads, in all batch elements or in one sequence.

    first: indices of the first batch element or sequence, query head, query and key. batch, heads,
    kv_heads, rows, keys: slices of the arrays. sequence: in a ragged batch, the problem of the
    whole sequence or batch element.
    """

    first: tuple[int, int, int, int] = (0, 0, 0, 0)
    batch: slice = _ALL
    heads: slice = _ALL
    kv_heads: slice = _ALL
    rows: slice = _ALL
    keys: slice = _ALL
    sequence: Problem | None = None

    @classmethod
    def of_rows(cls, excerpt: Excerpt | None, p: Problem) -> _Part:
        """Returns the part with an excerpt's rows and all keys, or the whole problem for None."""
        if excerpt is None:
            return cls()
        batch, head, rows = excerpt.batch, excerpt.head, excerpt.rows
        first = batch, head, rows.start, 0
        return cls(first, _only(batch), _only(head), _only(head // p.group), rows)

    @classmethod
    def of_keys(cls, excerpt: Excerpt, p: Problem) -> _Part:
        """Returns the part with an excerpt's keys and all rows of the heads that read them."""
        of_keys = excerpt.of_keys(p)
        batch, head, keys = of_keys.batch, of_keys.head, of_keys.rows
        heads = slice(head * p.group, (head + 1) * p.group)
        first = batch, heads.start, 0, keys.start
        return cls(first, _only(batch), heads, _only(head), keys=keys)

    def of(self, name: str, array: np.ndarray) -> np.ndarray:
        """Slices an operation's array [batch, heads, rows, …]."""
        if name in OF_KEYS:
            return array[self.batch, self.kv_heads, self.keys]
        return array[self.batch, self.heads, self.rows]

    def sink(self, inputs: Arrays) -> np.ndarray | None:
        """Returns the part's sinks, [heads] or [batch, heads]; None without sinks."""
        return self.of_heads(inputs.get(f"mods.{SINK}"))

    def of_heads(self, array: np.ndarray | None) -> np.ndarray | None:
        """Slices an array [heads] or [batch, heads], such as the sinks; passes None through."""
        if array is None or array.ndim == 1:
            return array if array is None else array[self.heads]
        return array[_only(self.first[0]) if self.sequence else self.batch, self.heads]

    def sequences(self, inputs: Arrays, p: Problem) -> Iterator[_Part]:
        """Yields the part's intersection with each sequence of a ragged batch, without padding."""
        for number, (rows, keys) in enumerate(_spans(inputs, p)):
            if self.batch not in (_ALL, _only(number)) and not p.modifiers.is_packed:
                continue
            some_rows, some_keys = _common(rows, self.rows), _common(keys, self.keys)
            first = some_rows.start - rows.start, some_keys.start - keys.start
            yield self._replace(
                first=(number, self.first[1], *first),
                batch=_ALL if p.modifiers.is_packed else _only(number),
                rows=some_rows,
                keys=some_keys,
                sequence=p.sequence(rows.stop - rows.start, keys.stop - keys.start),
            )


def _only(number: int) -> slice:
    return slice(number, number + 1)


def _common(mine: slice, asked: slice) -> slice:
    if asked == _ALL:
        return mine
    start = min(max(mine.start, asked.start), mine.stop)
    return slice(start, max(min(mine.stop, asked.stop), start))


def _spans(inputs: Arrays, p: Problem) -> Iterable[tuple[slice, slice]]:
    if not p.modifiers.is_packed:
        whole = np.full(p.batch, p.M), np.full(p.batch, p.N)
        counts = (inputs.get(f"mods.{name}", x) for name, x in zip(PADDED, whole))
        return [(slice(0, int(rows)), slice(0, int(keys))) for rows, keys in zip(*counts)]

    def spans(starts: str, used: str) -> list[slice]:
        offsets = [int(x) for x in inputs[f"mods.{starts}"]]
        counts = inputs.get(f"mods.{used}", np.diff(offsets))
        return [
            slice(x, x + min(int(n), end - x)) for x, end, n in zip(offsets, offsets[1:], counts)
        ]

    rows, keys = (spans(*names) for names in zip(STARTS, USED))
    return zip(rows, keys)


def _score_arguments(inputs: Arrays, p: Problem, part: _Part) -> dict[str, Any]:
    shift, its = part.first[2] - part.first[3], part.sequence or p
    return {
        "scale": p.scale,
        "mods": modifications(inputs, p, part.first, part.sequence),
        "causal_offset": None if p.right is None else its.causal_offset + shift,
        "window_offset": None if p.left is None else its.window_offset + shift,
    }


def _by_sequences(
    inputs: Arrays,
    p: Problem,
    roundings: Roundings,
    outputs: Sequence[str],
    part: _Part,
    expected: Callable[[_Part], ExpectedOfEach],
    operation: str,
) -> ExpectedOfEach:
    """Computes expected results for a part of a ragged batch, sequence by sequence.

    Padding rows, and rows outside of sequences, see no keys.
    """
    from cupyfa.numerics.tolerance import Expected

    asked = part.keys if outputs[0] in OF_KEYS else part.rows
    start = asked.start or 0

    def nothing(name: str) -> Expected:
        shape = OPERATIONS[operation].outputs_of(p)[name].shape(p)
        if asked != _ALL:
            shape = (1, 1, asked.stop - asked.start, *shape[3:])
        empty = -np.inf if name in ("lse", ROW_MAX) else 0.0
        return Expected(np.full(shape, empty), np.zeros(shape))

    found = {r: {name: nothing(name) for name in outputs} for r in roundings}
    for one in part.sequences(inputs, p):
        own = expected(one)
        for r, name in product(roundings, outputs):
            rows = one.keys if name in OF_KEYS else one.rows
            batch = one.batch if part.batch == _ALL else _ALL
            where = batch, _ALL, slice(rows.start - start, rows.stop - start)
            for whole, its in zip(found[r][name], own[r][name]):
                whole[where] = its
    return found


def _without_scales(inputs: Arrays, p: Problem) -> tuple[Arrays, Problem]:
    """Multiplies keys and values by their scales; returns float64 inputs and their problem."""
    scales = [np.asarray(inputs[f"mods.{x}"], np.float64) for x in SCALES]
    made = {**inputs, **{name: inputs[name].astype(np.float64) for name in "KV"}}
    for of_pages in (True, False):
        for name, scale in zip("KV", scales):
            if (scale.ndim == 3) == of_pages:
                made[name] = made[name] * scale.reshape(len(scale), scale.shape[-1], 1, 1)
        if of_pages and p.pages:
            made, p = without_pages(made, p)  # type: ignore[assignment]
    return made, p.without(*SCALES)


def _without_descales(inputs: Arrays, p: Problem) -> tuple[Arrays, Problem]:
    """Multiplies Q, K and V by their descales; returns float64 inputs and their problem."""
    made = dict(inputs)
    for name, descale in zip("QKV", DESCALES):
        if (given := inputs.get(f"mods.{descale}")) is not None:
            factor = np.asarray(given, np.float64).repeat(p.group if name == "Q" else 1, axis=1)
            with np.errstate(invalid="ignore"):  # 0 * infinity
                made[name] = inputs[name].astype(np.float64) * factor[..., None, None]
    return made, p.without(*DESCALES)


def without_pages(inputs: Arrays, p: Problem) -> tuple[Arrays, Problem]:
    """Gathers keys and values from their pages; returns dense inputs and their problem."""
    table = np.clip(inputs[f"mods.{PAGE_TABLE}"], 0, p.pages - 1)

    def rows(array: np.ndarray) -> np.ndarray:
        found = array[table].swapaxes(1, 2)  # [batch, kv_heads, pages, page_size, columns]
        return found.reshape(*found.shape[:2], p.N, array.shape[-1])

    dense = {**inputs, "K": rows(inputs["K"]), "V": rows(inputs["V"])}
    return dense, replace(p.without(PAGE_TABLE), rows=replace(p.rows, pages=0))


def exact_attention(inputs: Arrays, p: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Computes O and lse in float64 from the inputs of the forward operation."""
    from cupyfa.numerics import reference

    if p.dtype == E4M3_INPUTS:
        inputs, p = _without_descales(inputs, p)
    shape, whole = (p.batch, p.heads, p.M), _Part()
    out, lse = np.zeros((*shape, p.dv)), np.full(shape, -np.inf)
    for part in whole.sequences(inputs, p) if p.is_ragged else (whole,):
        arrays = (part.of(name, inputs[name]) for name in "QKV")
        how = {**_score_arguments(inputs, p, part), "sink": part.sink(inputs)}
        part.of("O", out)[...], part.of("lse", lse)[...] = reference.attention(*arrays, **how)
    return out, lse


def tiles_of_scores(inputs: Arrays, p: Problem) -> Iterator[Tile]:
    """Splits a problem without packed sequences, pages and descales into the reference's tiles."""
    from cupyfa.numerics import reference

    how = {**_score_arguments(inputs, p, _Part()), "sink": _Part().sink(inputs)}
    return reference.tiles(inputs["Q"], inputs["K"], inputs["V"], **how)


def _dtypes(p: Problem) -> dict[str, str]:
    return {"dtype": p.dtype.name, "out_dtype": p.out_dtype.name}


def _expected_attention(
    inputs: Arrays, p: Problem, roundings: Roundings, excerpt: Excerpt | None = None
) -> ExpectedOfEach:
    from cupyfa.numerics import tolerance

    if p.dtype == E4M3_INPUTS:
        inputs, p = _without_descales(inputs, p)
    elif p.modifiers.is_e4m3:
        inputs, p = _without_scales(inputs, p)
    elif p.pages:
        inputs, p = without_pages(inputs, p)
    has_row_max = p.modifiers.has_row_max

    def expected(part: _Part) -> ExpectedOfEach:
        arrays = (part.of(name, inputs[name]) for name in "QKV")
        how = {**_score_arguments(inputs, p, part), "sink": part.sink(inputs), **_dtypes(p)}
        return tolerance.expected_attention(
            *arrays, **how, roundings=roundings, row_max=has_row_max
        )

    part = _Part.of_rows(excerpt, p)
    if not p.is_ragged:
        return expected(part)
    outputs = "O", "lse", *[ROW_MAX] * has_row_max
    return _by_sequences(inputs, p, roundings, outputs, part, expected, "forward")


def _expected_gradients(
    inputs: Arrays, p: Problem, roundings: Roundings, excerpt: Excerpt | None = None
) -> ExpectedOfEach:
    """Computes expected gradients; for an excerpt, only dQ of its rows and dK, dV of its keys.

    An excerpt has no gradient of the sink, which sums over all rows.
    """
    from cupyfa.numerics import tolerance

    def expected(part: _Part) -> ExpectedOfEach:
        arrays = (part.of(name, inputs[name]) for name in ("Q", "K", "V", "O", "lse", "dO"))
        dlse = part.of("dlse", inputs["mods.dlse"]) if "mods.dlse" in inputs else None
        how = {**_score_arguments(inputs, p, part), **_dtypes(p), "roundings": roundings}
        sink = part.sink(inputs) if part == _Part() else None
        wrt = {x.name: inputs[x.input] for x in p.modifiers.differentiated if excerpt is None}
        found = tolerance.expected_gradients(*arrays, **how, dlse=dlse, sink=sink, wrt=wrt)
        names = {"dsink": gradient_of(SINK), **{x: gradient_of(x) for x in wrt}}
        return {r: {names.get(x, x): y for x, y in of.items()} for r, of in found.items()}

    def gradients(outputs: Sequence[str], part: _Part) -> ExpectedOfEach:
        if not p.is_ragged:
            return expected(part)
        return _by_sequences(inputs, p, roundings, outputs, part, expected, "backward")

    if excerpt is None:
        return gradients(("dQ", "dK", "dV"), _Part())
    of_rows = gradients(("dQ",), _Part.of_rows(excerpt, p))
    of_keys = gradients(("dK", "dV"), _Part.of_keys(excerpt, p))
    return {r: {**of_keys[r], "dQ": of_rows[r]["dQ"]} for r in roundings}


def _expected_tangents(
    inputs: Arrays, p: Problem, roundings: Roundings, excerpt: Excerpt | None = None
) -> ExpectedOfEach:
    """Computes O, lse and their tangents; for an excerpt, tangents of the first direction only."""
    if excerpt is not None or p.directions == 1:
        one = p.with_options(directions=1)
        return _expected_tangents_along(inputs, one, roundings, excerpt)
    found: list[ExpectedOfEach] = []
    for i in range(p.directions):
        one, its = p.with_options(directions=1), slice(i * p.batch, (i + 1) * p.batch)
        along = {x: y[its] if x in _MOVED else y for x, y in inputs.items()}
        along |= {x: inputs[x][i : i + 1] for x in inputs if x.startswith(GRADIENT)}
        found.append(_expected_tangents_along(along, one, roundings, None))
    for r, name in product(roundings, ("O_dot", "lse_dot")):
        of_each = zip(*(x[r][name] for x in found))
        found[0][r][name] = type(found[0][r][name])(*map(np.concatenate, of_each))
    return found[0]


def _expected_tangents_along(
    inputs: Arrays, p: Problem, roundings: Roundings, excerpt: Excerpt | None
) -> ExpectedOfEach:
    from cupyfa.numerics import tangent_bounds

    operation = OPERATIONS["tangent"]

    def expected(part: _Part) -> ExpectedOfEach:
        names = (name for name in operation.inputs if name in inputs)
        arrays: dict[str, Any] = {x.lower(): part.of(x, inputs[x]) for x in names}
        how = {**_score_arguments(inputs, p, part), "sink": part.sink(inputs), **_dtypes(p)}
        moved = {x.name: inputs[gradient_of(x.name)][0] for x in p.modifiers.arrays if x.gradient}
        how["sink_dot"] = part.of_heads(moved.pop(SINK, None))
        return tangent_bounds.expected_tangents(
            **arrays, **how, arrays_dot=moved, roundings=roundings
        )

    part = _Part.of_rows(excerpt, p)
    if not p.is_ragged:
        return expected(part)
    outputs = tuple(operation.outputs)
    return _by_sequences(inputs, p, roundings, outputs, part, expected, operation.name)


def _flops_of_tangents(p: Problem) -> int:
    """Returns the operations for a pair: S and O, and each product with a tangent."""
    moved = p.d * (("q" in p.tangents) + ("k" in p.tangents))
    values = p.dv * ((p.tangents != "v") + ("v" in p.tangents))
    return 2 * (p.d + p.dv + p.directions * (moved + values))


def _expected_softmax(
    inputs: Arrays, p: Problem, roundings: Roundings, excerpt: Excerpt | None = None
) -> ExpectedOfEach:
    from cupyfa.numerics import tolerance

    scores = excerpt.of(inputs["S"]) if excerpt else inputs["S"]
    return dict.fromkeys(roundings, tolerance.expected_softmax(scores, dtype=p.dtype.name))


_QKV = {
    "Q": Input("batch heads M d"),
    "K": Input("batch kv_heads N d"),
    "V": Input("batch kv_heads N dv"),
}
OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation(
            name="softmax",
            inputs={"S": Input("batch heads M N")},
            outputs={"P": ("batch heads M N", "scalar"), "lse": ("batch heads M", "real")},
            reference=_expected_softmax,
            flops=lambda p: 5 * p.batch * p.heads * p.M * p.N,
        ),
        Operation(
            name="forward",
            inputs=_QKV,
            outputs={"O": ("batch heads M dv", "result"), "lse": ("batch heads M", "real")},
            reference=_expected_attention,
            flops=lambda p: 2 * p.heads * _scores(p) * (p.d + p.dv),
        ),
        Operation(
            name="backward",
            inputs={
                **_QKV,
                "O": Input("batch heads M dv", "result"),
                "lse": Input("batch heads M", "real"),
                "dO": Input("batch heads M dv"),
            },
            outputs={
                "dQ": ("batch heads M d", "result"),
                "dK": ("batch kv_heads N d", "result"),
                "dV": ("batch kv_heads N dv", "result"),
            },
            reference=_expected_gradients,
            flops=lambda p: 2 * p.batch * p.heads * visible_scores(p) * (3 * p.d + 2 * p.dv),
        ),
        Operation(
            name="tangent",
            inputs={
                **_QKV,
                "Q_dot": Input("tangent_batch heads M d", when=lambda p: "q" in p.tangents),
                "K_dot": Input("tangent_batch kv_heads N d", when=lambda p: "k" in p.tangents),
                "V_dot": Input("tangent_batch kv_heads N dv", when=lambda p: "v" in p.tangents),
            },
            outputs={
                "O": ("batch heads M dv", "result"),
                "lse": ("batch heads M", "real"),
                "O_dot": ("tangent_batch heads M dv", "result"),
                "lse_dot": ("tangent_batch heads M", "real"),
            },
            reference=_expected_tangents,
            flops=lambda p: p.heads * visible_scores(p) * p.batch * _flops_of_tangents(p),
        ),
    )
}
