"""The operations: inputs, outputs, reference and number of floating-point operations.

References import cupyfa.numerics when they are called: only checks need it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from cupyfa.problem.dtypes import E4M3, E4M3_INPUTS
from cupyfa.problem.lengths import pairs_of
from cupyfa.problem.optional_inputs import (
    DESCALES,
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
    from cupyfa.numerics.tolerance import Expected, ExpectedOfEach, Roundings
    from cupyfa.score.numpy_evaluation import Modifications

Arrays = Mapping[str, np.ndarray]
# Of inputs and outputs; NumPy's dtype where the problem does not decide it.
INPUT_KINDS = {
    **{"scalar": None, "result": None, "real": None, "float32": "f4", "float64": "f8"},
    **{"int": "i4", "int32": "i4", "int64": "i8", "uint8": "u1", "bool": "?"},
}


@dataclass(frozen=True)
class Excerpt:
    """Some rows of the outputs of one head: an index of [batch, heads, rows, …].

    ``keys`` are rows of the key head; by default the same number, at the same relative position.
    """

    batch: int
    head: int
    rows: slice
    keys: slice | None = None

    def of_keys(self, p: Problem) -> Excerpt:
        """The rows of the key head that this head reads."""
        if self.keys is not None:
            return Excerpt(self.batch, self.head // p.group, self.keys)
        count = min(self.rows.stop - self.rows.start, p.N)
        furthest = max(p.M - (self.rows.stop - self.rows.start), 1)
        start = min(self.rows.start * (p.N - count) // furthest, p.N - count)
        return Excerpt(self.batch, self.head // p.group, slice(start, start + count))

    def of(self, array: np.ndarray) -> np.ndarray:
        """These rows of an array, [1, 1, rows, …]."""
        here = slice(self.batch, self.batch + 1), slice(self.head, self.head + 1), self.rows
        return array[here]


def always(p: Problem) -> bool:
    """The condition that every problem meets."""
    return True


@dataclass(frozen=True)
class Input:
    """An array of an operation or of a kernel, in most cases an input.

    axes: its sizes by name, as "batch heads M"; or a formula of its shape, ``lambda p: (…,)``.
    kind: one of INPUT_KINDS: "scalar" is the problem's dtype, "result" its ``out_dtype``, "real"
        that of sums, "int" int32; of an array that an expression reads its dtype.
    when: the problems that take it.
    draw: its random elements in checks and benchmarks, ``lambda rng, p: …`` with a NumPy Generator.
        By default floats are drawn like Q, K and V, integers from 0 to 2, half of all bools True.
    """

    axes: str | Callable[[Problem], tuple[int, ...]]
    kind: str = "scalar"
    when: Callable[[Problem], bool] = always
    draw: Callable[[np.random.Generator, Problem], Any] | None = None

    def shape(self, p: Problem) -> tuple[int, ...]:
        return p.shape(self.axes) if isinstance(self.axes, str) else tuple(self.axes(p))

    def axes_for(self, p: Problem) -> str:
        """Its axes by name; "-" is one that has none."""
        return self.axes if isinstance(self.axes, str) else " ".join("-" for _ in self.shape(p))

    def in_pages(self) -> Input:
        """The same of keys that lie in pages."""
        axes = str(self.axes).replace("batch", "pages").replace("N", "page_size")
        return replace(self, axes=axes)

    def bytes(self, p: Problem) -> int:
        return prod(self.shape(p)) * self.dtype(p).itemsize

    def dtype(self, p: Problem) -> np.dtype:
        kinds = {"scalar": p.dtype.numpy, "result": p.out_dtype.numpy, "real": p.dtype.sums}
        kinds["e4m3"] = E4M3
        return np.dtype(kinds.get(self.kind) or INPUT_KINDS.get(self.kind) or self.kind)


def _form(array: Operand, p: Problem) -> tuple[int, ...]:
    return array.shape


@dataclass(frozen=True)
class Operation:
    """An operation on named arrays, each seen as [batch, heads, rows, columns].

    ``inputs`` are all that a problem may have. ``outputs`` are axes and kind of each array.
    ``reference(inputs, problem, roundings, excerpt)`` gives the expected results with bounds for
    each rounding, of all rows or of an excerpt. ``flops`` counts 2 for a multiply-add, and of a
    masked problem only the visible scores. What a kernel computes that has arrays or a reference of
    its own is derived from one of OPERATIONS: see ``Kernel.computes``.
    """

    name: str
    inputs: Mapping[str, Input]
    outputs: Mapping[str, tuple[str, str]]
    reference: Callable[..., ExpectedOfEach]
    flops: Callable[[Problem], int]

    def bytes(self, p: Problem) -> int:
        """The fewest bytes moved: every input is read once, every output is written once."""
        moved = [*self.inputs_of(p).values(), *self.outputs_of(p).values()]
        return sum(x.bytes(p) for x in moved)

    def inputs_of(self, p: Problem) -> dict[str, Input]:
        """The inputs of a problem, with the arrays that its expressions read."""
        read = {x.input: Input(partial(_form, x), x.dtype) for x in p.modifiers.arrays}
        own = {name: x for name, x in self.inputs.items() if x.when(p)}
        if p.modifiers.is_e4m3:
            own |= {name: replace(own[name], kind="e4m3") for name in "KV"}
        if p.pages:
            own |= {name: own[name].in_pages() for name in "KV"}
        return own | read

    def outputs_of(self, p: Problem) -> dict[str, Input]:
        """The outputs of a problem, with the gradients of arrays that its expressions read, and
        the largest scores if they are asked for.
        """
        asked = (x for x in p.modifiers.arrays if x.gradient and self.name == "backward")
        made = {gradient_of(x.name): Input(partial(_form, x), x.dtype) for x in asked}
        if p.modifiers.has_row_max:
            made[ROW_MAX] = Input("batch heads M", "real")
        return {name: Input(*of) for name, of in self.outputs.items()} | made

    def axes_of(self, p: Problem) -> dict[str, str]:
        """The axes of every input and output that a problem has."""
        every, read = self.inputs_of(p) | self.outputs_of(p), p.modifiers.arrays
        own = {name: x.axes for x in read for name in (x.input, gradient_of(x.name))}
        return {
            name: " ".join(own[name]) if name in own else x.axes_for(p) for name, x in every.items()
        }

    def place(self, output: str, excerpt: Excerpt, p: Problem) -> Excerpt:
        return excerpt.of_keys(p) if self._is_of_keys(output) else excerpt

    def excerpt_at(self, output: str, index: Sequence[int], p: Problem) -> Excerpt:
        """The smallest excerpt with this element of an output."""
        batch, head, row = index[:3]
        here = slice(row, row + 1)
        if self._is_of_keys(output):
            return Excerpt(batch, head * p.group, slice(0, 1), here)
        return Excerpt(batch, head, here)

    def _is_of_keys(self, output: str) -> bool:
        return output in self.outputs and "kv_heads" in self.outputs[output][0].split()


def visible_scores(p: Problem) -> int:
    """How many (query, key) pairs the mask lets through, per head and batch element.

    Of a ragged batch, whose one batch element has all sequences, these are the pairs of each.
    """
    if p.lengths is not None:
        return sum(visible_scores(p.sequence(*x)) for x in pairs_of(*p.lengths))
    visible = p.M * p.N if p.right is None else _scores_left_of(p, p.causal_offset + 1)
    return visible if p.left is None else visible - _scores_left_of(p, p.window_offset)


def _scores(p: Problem) -> int:
    """The same of all batch elements together, of a cache with the keys that each has."""
    if p.cached is None:
        return p.batch * visible_scores(p)
    return sum(visible_scores(p.sequence(p.M, n)) for n in p.cached.rows)


def _scores_left_of(p: Problem, diagonal: int) -> int:
    """How many pairs (i, j) have j < i + diagonal."""
    # Row i has clamp(i + diagonal, 0, N): none before `first`, all N from `full` on.
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
    """The expressions that change or hide scores of a problem, with the arrays that they name;
    dropout.

    first: batch, query head, query and key where the arrays of an excerpt begin. sequence: the one
    of a ragged batch that they are applied to.
    """
    from cupyfa.score.numpy_evaluation import Modifications

    texts, its = p.modifiers, sequence or p
    return Modifications(
        score_steps=texts.score,
        mask_steps=texts.mask,
        names=texts.numbers
        | {x.name: inputs[x.input] for x in texts.arrays if x.is_in_expressions},
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


def _sink(inputs: Arrays, batch: slice = slice(None), heads: slice = slice(None)) -> Any:
    """The sinks of these heads, [heads] or [batch, heads]; None without sinks."""
    sink = inputs.get("mods.sink")
    return sink if sink is None else sink[heads] if sink.ndim == 1 else sink[batch, heads]


def _score_arguments(
    inputs: Arrays,
    p: Problem,
    first: tuple[int, int, int, int] = (0, 0, 0, 0),
    sequence: Problem | None = None,
) -> dict[str, Any]:
    """The arguments of `reference.attention` that describe scores; the others as above."""
    shift, its = first[2] - first[3], sequence or p
    return {
        "scale": p.scale,
        "mods": modifications(inputs, p, first, sequence),
        "causal_offset": None if p.right is None else its.causal_offset + shift,
        "window_offset": None if p.left is None else its.window_offset + shift,
    }


@dataclass(frozen=True)
class _Sequence:
    """One sequence of a ragged batch, or some of its rows and keys.

    number: of the sequence. batch: the element of the arrays in which its rows and keys are. sizes:
    how many rows and keys the sequence has. first: the numbers in it of the first row and key.
    """

    number: int
    batch: int
    rows: slice
    keys: slice
    sizes: tuple[int, int]
    first: tuple[int, int] = (0, 0)

    def of(self, name: str, array: np.ndarray, start: int = 0) -> np.ndarray:
        """Its rows of an array of an operation, which are keys of K, V and their gradients.

        start: the number of the array's first row among all packed ones.
        """
        here = self.keys if name in ("K", "V", "dK", "dV") else self.rows
        own = slice(here.start - start, here.stop - start)
        return array[self.batch : self.batch + 1, :, own]

    def problem(self, p: Problem) -> Problem:
        return p.sequence(*self.sizes)

    def part(self, rows: slice | None, keys: slice | None) -> _Sequence:
        """What it has of some packed rows and keys; None: of all."""
        rows, keys = _common(self.rows, rows), _common(self.keys, keys)
        first = rows.start - self.rows.start, keys.start - self.keys.start
        return replace(self, rows=rows, keys=keys, first=first)


def _common(mine: slice, asked: slice | None) -> slice:
    if asked is None:
        return mine
    start = min(max(mine.start, asked.start), mine.stop)
    return slice(start, max(min(mine.stop, asked.stop), start))


def _sequences(inputs: Arrays, p: Problem) -> list[_Sequence]:
    """The sequences of a ragged batch, of the rows that count."""
    if not p.modifiers.is_packed:
        whole = np.full(p.batch, p.M), np.full(p.batch, p.N)
        counts = (inputs.get(f"mods.{name}", x) for name, x in zip(PADDED, whole))
        return [
            _Sequence(i, i, slice(0, int(rows)), slice(0, int(keys)), (int(rows), int(keys)))
            for i, (rows, keys) in enumerate(zip(*counts))
        ]

    def spans(starts: str, used: str) -> list[slice]:
        offsets = [int(x) for x in inputs[f"mods.{starts}"]]
        counts = inputs.get(f"mods.{used}", np.diff(offsets))
        return [
            slice(x, x + min(int(n), end - x)) for x, end, n in zip(offsets, offsets[1:], counts)
        ]

    every = zip(*(spans(starts, used) for starts, used in zip(STARTS, USED)))
    return [
        _Sequence(i, 0, rows, keys, (rows.stop - rows.start, keys.stop - keys.start))
        for i, (rows, keys) in enumerate(every)
    ]


def _of_sequences(
    inputs: Arrays,
    p: Problem,
    roundings: Roundings,
    outputs: Sequence[str],
    expected: Callable[[_Sequence], ExpectedOfEach],
    excerpt: Excerpt | None = None,
) -> ExpectedOfEach:
    """What is expected of all sequences, each by itself, in their rows of the arrays.

    Rows that do not count, or are of no sequence, see no key. Of an excerpt, only the outputs' rows
    there, or their keys.
    """
    from cupyfa.numerics.tolerance import Expected

    assert excerpt is None or p.modifiers.is_packed, "a padded batch is computed as a whole"
    operation = OPERATIONS["backward" if {"dQ", "dK"} & {*outputs} else "forward"]
    asked = operation.place(outputs[0], excerpt, p).rows if excerpt else None  # or keys

    def nothing(name: str) -> Expected:
        shape = operation.outputs_of(p)[name].shape(p)
        if asked is not None:
            shape = (1, 1, asked.stop - asked.start, *shape[3:])
        return Expected(
            np.full(shape, -np.inf if name in ("lse", ROW_MAX) else 0.0), np.zeros(shape)
        )

    found = {r: {name: nothing(name) for name in outputs} for r in roundings}
    of_keys = outputs[0] in ("dK", "dV")
    start = asked.start if asked else 0
    for sequence in _sequences(inputs, p):
        part = sequence.part(*((None, asked) if of_keys else (asked, None)))
        own = expected(part)
        for r in roundings:
            for name in outputs:
                for whole, its in zip(found[r][name], own[r][name]):
                    part.of(name, whole, start)[...] = its
    return found


def _without_scales(inputs: Arrays, p: Problem) -> tuple[Arrays, Problem]:
    """The same problem with keys and values that are numbers in one place, without scales."""
    scales = [np.asarray(inputs[f"mods.{x}"], np.float64) for x in SCALES]
    made = {**inputs, **{name: inputs[name].astype(np.float64) for name in "KV"}}
    for of_pages in (True, False):
        for name, scale in zip("KV", scales):
            if (scale.ndim == 3) == of_pages:
                made[name] = made[name] * scale.reshape(len(scale), scale.shape[-1], 1, 1)
        if of_pages and p.pages:
            made, p = without_pages(made, p)  # type: ignore[assignment]
    kept = tuple(x for x in p.operands if x.name not in SCALES)
    return made, replace(p, operands=kept)


def _without_descales(inputs: Arrays, p: Problem) -> tuple[Arrays, Problem]:
    """The same problem with queries, keys and values that were multiplied by their descales."""
    made = dict(inputs)
    for name, descale in zip("QKV", DESCALES):
        if (given := inputs.get(f"mods.{descale}")) is not None:
            factor = np.asarray(given, np.float64).repeat(p.group if name == "Q" else 1, axis=1)
            with np.errstate(invalid="ignore"):  # 0 * infinity
                made[name] = inputs[name].astype(np.float64) * factor[..., None, None]
    kept = tuple(x for x in p.operands if x.name not in DESCALES)
    return made, replace(p, operands=kept)


def without_pages(inputs: Arrays, p: Problem) -> tuple[Arrays, Problem]:
    """The inputs and problem with the keys and values of each batch element in one place."""
    table = np.clip(inputs[f"mods.{PAGE_TABLE}"], 0, p.pages - 1)

    def rows(array: np.ndarray) -> np.ndarray:
        found = array[table].swapaxes(1, 2)  # [batch, kv_heads, most, page_size, columns]
        return found.reshape(*found.shape[:2], p.N, array.shape[-1])

    dense = {**inputs, "K": rows(inputs["K"]), "V": rows(inputs["V"])}
    kept = tuple(x for x in p.operands if x.name != PAGE_TABLE)
    return dense, replace(p, operands=kept, rows=replace(p.rows, pages=0))


def exact_attention(inputs: Arrays, p: Problem) -> tuple[np.ndarray, np.ndarray]:
    """O and lse in float64, from the inputs of the forward operation."""
    from cupyfa.numerics import reference

    if p.dtype == E4M3_INPUTS:
        inputs, p = _without_descales(inputs, p)
    if not p.is_ragged:
        arrays = (inputs[name] for name in "QKV")
        return reference.attention(*arrays, **_score_arguments(inputs, p), sink=_sink(inputs))
    shape = p.batch, p.heads, p.M
    out, lse = np.zeros((*shape, p.dv)), np.full(shape, -np.inf)
    for one in _sequences(inputs, p):
        arrays = (one.of(name, inputs[name]) for name in "QKV")
        how = _score_arguments(inputs, p, (one.number, 0, 0, 0), one.problem(p))
        sink = _sink(inputs, slice(one.number, one.number + 1))
        one.of("O", out)[...], one.of("lse", lse)[...] = reference.attention(
            *arrays, **how, sink=sink
        )
    return out, lse


def _dtypes(p: Problem) -> dict[str, str]:
    """The arguments of `tolerance` that say in which dtypes inputs and results are."""
    return {"dtype": p.dtype.name, "out_dtype": p.out_dtype.name}


def _expected_of_sequences(
    inputs: Arrays, p: Problem, roundings: Roundings, excerpt: Excerpt | None
) -> ExpectedOfEach:
    """O and lse of a ragged batch."""
    from cupyfa.numerics import tolerance

    heads, shared = _heads_of(p, excerpt)

    def of(one: _Sequence) -> ExpectedOfEach:
        first = one.number, heads.start or 0, one.first[0], 0
        how = _score_arguments(inputs, p, first, one.problem(p))
        how |= {"sink": _sink(inputs, slice(one.number, one.number + 1), heads)}
        how |= {**_dtypes(p), "roundings": roundings, ROW_MAX: p.modifiers.has_row_max}
        own = (one.of(x, inputs[x][:, heads if x == "Q" else shared]) for x in "QKV")
        return tolerance.expected_attention(*own, **how)

    outputs = "O", "lse", *[ROW_MAX] * p.modifiers.has_row_max
    return _of_sequences(inputs, p, roundings, outputs, of, excerpt)


def _heads_of(p: Problem, excerpt: Excerpt | None) -> tuple[slice, slice]:
    """The head of an excerpt and the key head that it reads, or all."""
    if excerpt is None:
        return slice(None), slice(None)
    shared = excerpt.head // p.group
    return slice(excerpt.head, excerpt.head + 1), slice(shared, shared + 1)


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
    if p.is_ragged:
        return _expected_of_sequences(inputs, p, roundings, excerpt)
    arrays, first, sink = [inputs[name] for name in "QKV"], (0, 0, 0, 0), _sink(inputs)
    if excerpt:
        keys = Excerpt(excerpt.batch, excerpt.head // p.group, slice(None))
        arrays = [part.of(x) for part, x in zip((excerpt, keys, keys), arrays)]
        first = (excerpt.batch, excerpt.head, excerpt.rows.start, 0)
        here = (slice(x, x + 1) for x in first[:2])
        sink = _sink(inputs, *here)
    options = {**_dtypes(p), "roundings": roundings, **_score_arguments(inputs, p, first)}
    options[ROW_MAX] = p.modifiers.has_row_max
    return tolerance.expected_attention(*arrays, **options, sink=sink)


def _expected_gradients(
    inputs: Arrays, p: Problem, roundings: Roundings, excerpt: Excerpt | None = None
) -> ExpectedOfEach:
    """Of an excerpt: dQ of its rows, for which all keys count; dK and dV of its keys, likewise.

    The gradient of a sink takes all rows, so that an excerpt has none.
    """
    from cupyfa.numerics import tolerance

    def expected(
        cut: Callable[[str, np.ndarray], np.ndarray],
        first: tuple[int, int, int, int],
        sink: np.ndarray | None = None,
        sequence: Problem | None = None,
    ) -> Any:
        arrays = (cut(name, inputs[name]) for name in ("Q", "K", "V", "O", "lse", "dO"))
        dlse = cut("dlse", inputs["mods.dlse"]) if "mods.dlse" in inputs else None
        how = _score_arguments(inputs, p, first, sequence)
        how |= {**_dtypes(p), "roundings": roundings}
        wrt = {x.name: inputs[x.input] for x in p.modifiers.differentiated if excerpt is None}
        found = tolerance.expected_gradients(*arrays, **how, dlse=dlse, sink=sink, wrt=wrt)
        names = {"dsink": gradient_of(SINK), **{x: gradient_of(x) for x in wrt}}
        return {r: {names.get(x, x): y for x, y in of.items()} for r, of in found.items()}

    def of_sequences(
        outputs: Sequence[str], heads: slice = slice(None), shared: slice = slice(None)
    ) -> ExpectedOfEach:
        """These gradients of a ragged batch, or of an excerpt of it those of some heads."""

        def of(one: _Sequence) -> ExpectedOfEach:
            first = one.number, heads.start or 0, *one.first
            return expected(
                lambda name, x: one.of(name, x[:, shared if name in ("K", "V") else heads]),
                first,
                sequence=one.problem(p),
            )

        return _of_sequences(inputs, p, roundings, outputs, of, excerpt)

    if p.is_ragged and excerpt is None:
        return of_sequences(("dQ", "dK", "dV"))
    if excerpt is None:
        return expected(lambda name, array: array, (0, 0, 0, 0), _sink(inputs))
    keys = excerpt.of_keys(p)
    batch, shared = slice(keys.batch, keys.batch + 1), slice(keys.head, keys.head + 1)
    group = slice(keys.head * p.group, (keys.head + 1) * p.group)
    if p.sequences is not None:
        of_rows = of_sequences(("dQ",), *_heads_of(p, excerpt))
        of_keys = of_sequences(("dK", "dV"), group, shared)
        return {r: {**of_keys[r], **of_rows[r]} for r in roundings}
    of_rows = expected(
        lambda name, x: x[batch, shared] if name in ("K", "V") else excerpt.of(x),
        (excerpt.batch, excerpt.head, excerpt.rows.start, 0),
    )
    of_keys = expected(
        lambda name, x: keys.of(x) if name in ("K", "V") else x[batch, group],
        (keys.batch, keys.head * p.group, 0, keys.rows.start),
    )
    return {r: {**of_keys[r], "dQ": of_rows[r]["dQ"]} for r in roundings}


def _expected_softmax(
    inputs: Arrays, p: Problem, roundings: Roundings, excerpt: Excerpt | None = None
) -> ExpectedOfEach:
    from cupyfa.numerics import tolerance

    scores = excerpt.of(inputs["S"]) if excerpt else inputs["S"]
    return dict.fromkeys(roundings, tolerance.expected_softmax(scores, dtype=p.dtype.name))


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
            inputs={
                "Q": Input("batch heads M d"),
                "K": Input("batch kv_heads N d"),
                "V": Input("batch kv_heads N dv"),
            },
            outputs={"O": ("batch heads M dv", "result"), "lse": ("batch heads M", "real")},
            reference=_expected_attention,
            flops=lambda p: 2 * p.heads * _scores(p) * (p.d + p.dv),
        ),
        Operation(
            name="backward",
            inputs={
                "Q": Input("batch heads M d"),
                "K": Input("batch kv_heads N d"),
                "V": Input("batch kv_heads N dv"),
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
    )
}
