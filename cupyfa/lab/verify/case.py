"""A case: a problem, and the seed, values and memory layout of its inputs."""

import ast
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from cupyfa.errors import DeviceError, Unsupported, nearest
from cupyfa.lab.verify import transforms
from cupyfa.lab.verify.command_line import words_of_problem
from cupyfa.ladder.kernel import Kernel
from cupyfa.ladder.operations import OF_KEYS, OPERATIONS, Arrays, Input, exact_attention
from cupyfa.numerics.deviation import as_float64
from cupyfa.planner import choose_kernel
from cupyfa.problem.dtypes import E4M3
from cupyfa.problem.optional_inputs import (
    ALIBI,
    BIAS,
    DESCALES,
    DLSE,
    GRADIENT,
    LENGTHS,
    MASK,
    PADDED,
    PAGE_TABLE,
    SEEDS,
    SINK,
    STARTS,
    USED,
    Operand,
    is_of_scores,
)
from cupyfa.problem.problem import Problem, whole
from cupyfa.problem.resizing import indices_of
from cupyfa.runtime.arrays import readable_inputs
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.guard import run_guarded
from cupyfa.runtime.prepared import fill
from cupyfa.score.expressions import Expression

# Kinds of input values; each kind reveals different faults.
VALUES = {
    "steps": "one key or range of keys has up to 2**120 times the weight of the others, or less; "
    "V is large, such that O overflows in forward passes if the maximum is wrong, and smaller for "
    "the first or the last keys",
    "scales": "normal, times a power of two for each head of Q, K and V and for each row of dO; "
    "the powers of Q and K cancel in scores; V is smaller for the first or the last keys",
    "normal": "normally distributed",
    "uniform": "from 0 to 1: sums grow instead of cancelling",
    "integers": "-2 … 2: products are exact; all scores of some queries are 0",
    "equal": "all keys are equal: every element of P is 1/n",
    "one_hot": "row j of V is 1 in column j mod dv: O has the elements of P",
    "huge": "scores up to about 10,000: exp overflows if no maximum is subtracted; half of the "
    "tangents of K have an infinite element",
    "largest": "normal, but one score of a head is far above or below all others, and may be the "
    "only one of its row",
    "tiny": "below the smallest normal number of the dtype",
    "nan": "NaN in two queries, one key, two values, and one sequence of a ragged batch",
    "inf": "infinity or -infinity in two queries, in one key or all keys of a head, in two values, "
    "and in one sequence of a ragged batch; all scores of such queries and heads may be -infinity",
    "lowest": "the lowest number of a dtype in rows and keys of a bias, a large one in a few "
    "pairs; without expressions, products of q and k near the ends of float32, or of the dtype, in "
    "some rows near the lower end only; such rows of scores, too",
    "outliers": "normal, but about one number in 1000 is about ten times as large",
}
# Memory layouts; kernels address every array as [batch, heads, rows, columns] with strides.
LAYOUTS = {
    "bhsd": "contiguous",
    "bshd": "[batch, rows, heads, columns] in memory",
    "packed": "Q, K and V (or K and V alone) are slices of one bshd array, where shapes allow",
    "reversed": "negative strides in batch, heads and rows",
    "gaps": "every second row of a wider array, NaN between",
    "columns": "column-major: neighbouring rows are adjacent in memory",
    "unaligned": "the address of element 0 is not a multiple of 16",
    "far": "the last batch element, head or row lies more than 2**31 elements from the first",
}
# How a paged cache receives the keys and values of new tokens.
TOKENS = {
    "cached": "the cache already holds the keys",
    "appended": "the keys are appended first",
    "rotated": "queries and keys are rotated in pairs (x, x + angles), and the keys appended",
    "interleaved": "queries and keys are rotated in pairs (2 x, 2 x + 1), and the keys appended",
    "turned": "the cache already holds the keys, and only the queries are rotated",
}
WRITTEN = ("appended", "rotated", "interleaved")  # kinds of TOKENS that write to the cache
# Kinds of values that cause neither NaN nor infinity.
FINITE = ("normal", "uniform", "integers", "equal", "one_hot", "steps", "tiny")
EXTREME = ("lowest", "largest")  # kinds of values whose scores may be beyond float16
E4M3_MOST = 448.0  # largest finite e4m3 number
_STEP = 130 * math.log(2)  # largest step of scores, and the share of it that other keys have
_OF_OTHERS = 0.1
_MOST_OF_STEPS = 64.0  # magnitude of the numbers of Q and K whose products are these steps
_RANGES = 3  # average number of ends of ranges of keys with equal steps
_SMALLER = 10  # powers of two by which V is smaller for the first or the last keys
_ROOM_OF_STEPS = 28  # powers of two between O and the end of the range of its sums
_NEAR_THE_END = 1e38  # magnitude of products q·k that approach the float32 maximum, 3.4e38
_END_OF_SUMS = 3.4  # quotient of the float32 maximum and _NEAR_THE_END
# Normal numbers are clipped to this magnitude before they are scaled: 1.8² · 1e38 < 3.4e38.
_MOST_OF_LOWEST = 1.8
_LEAST_OF_LOWEST = 1.5  # magnitude in rows and keys with all products near the lower end
_ALL_LOWEST = 3  # one in this many rows has them, with the last key head
# Some descales of Q are multiplied by 2 to this power or its negative, and K's by the inverse.
_FAR_DESCALE = 60.0
_FAR_ABOVE = 15.0  # a sink that leaves little weight to keys
_LARGEST_SINK = 0.9  # fraction of the largest number; its product with log2(e) overflows
_LARGEST_FACTOR = 1e18  # magnitude of the factors of a score that is far larger than all others
_ZERO = 0.1  # fraction of the queries of integers that are 0
_LINES = 0.1  # fraction of the rows, and of the keys, that half of the masks hide
_FAR = 2**31 + 64  # stride in elements
_SEEN = 0.8  # fraction of a mask's elements that are True
_GROUPS = 4  # number of distinct integers in a captured array
_WORK = 2e9  # multiply-adds that a float64 forward pass computes in about a second


@dataclass(frozen=True, repr=False)
class Case:
    """A problem with reproducible inputs: equal fields yield equal arrays on every machine."""

    operation: str
    problem: Problem
    seed: int = 0
    values: str = "normal"
    layout: str = "bhsd"
    tokens: str = "cached"

    def __post_init__(self) -> None:
        kinds: Mapping[str, Mapping[str, Any]] = {
            "operation": OPERATIONS,
            "values": VALUES,
            "layout": LAYOUTS,
            "tokens": TOKENS,
        }
        for what, known in kinds.items():
            if (value := getattr(self, what)) not in known:
                raise ValueError(
                    f"{what} {value!r} is unknown{nearest(value, known)}; use one of "
                    f"{', '.join(known)}"
                )
        object.__setattr__(self, "seed", whole("seed", self.seed, 0))
        object.__setattr__(self, "problem", self.problem.without_maps())

    def inputs(
        self, backend: Backend | None = None, kernel: Kernel | None = None
    ) -> dict[str, np.ndarray]:
        """Returns the operation's arrays [batch, heads, rows, columns].

        For a custom ``kernel``, also returns its additional inputs.

        For gradients, the reference computes O and lse. If the reference is too slow and there is
        a backend, the backend's fastest kernel computes both: the gradients are well-defined for
        any O and lse. Raises Unsupported if the backend does not support this layout.
        """
        if backend is not None:
            self.require_reach(backend)
        p, rng = self.problem, np.random.default_rng(self.seed)
        inputs = OPERATIONS[self.operation].inputs_of(p)
        # Extreme products of q and k would overflow when added to an extreme bias.
        values = "normal" if self.values in EXTREME and p.modifiers.score else self.values
        arrays = {
            name: _drawn(name, x.shape(p), values, x.dtype(p), rng)
            for name, x in inputs.items()
            if name not in ("O", "lse") and not name.startswith("mods.")
        }
        if self.values == "scales" and "Q" in arrays:
            self._scale_heads(arrays)
        if self.values == "steps" and "Q" in arrays:
            self._add_steps(arrays)
        if values == "largest" and "Q" in arrays:
            self._add_largest_score(arrays)
        if self.values == "inf" and "Q" in arrays and not p.pages:
            if rng.random() < 0.75:
                self._lower_scores_of_queries(arrays)
            if rng.random() < 0.5:
                self._lower_scores_of_keys(arrays)
        self._poison(arrays)
        arrays |= {x.input: self._read(x) for x in p.modifiers.arrays}
        if p.pages and p.cached is None:  # cached problems already have lengths and pages
            self._put_in_pages(arrays)
        elif p.is_ragged and p.sequences is None and p.cached is None:
            self._pad(arrays)
        if "lse" in inputs:
            arrays |= _forward(p, arrays, backend)
        read = {name: x for name, x in arrays.items() if is_of_scores(name)}
        made = arranged({name: arrays[name] for name in inputs if name not in read}, self.layout)
        made |= {
            name: _arranged(x, "bshd" if self.layout == "packed" else self.layout)
            for name, x in read.items()
        }
        return self.completed(made, kernel) if kernel else made

    def _scale_heads(self, arrays: dict[str, np.ndarray]) -> None:
        """Multiplies the heads of K by powers of two, and the heads of Q by their reciprocals."""
        rng = np.random.default_rng((self.seed, *b"scales"))
        k, dtype = arrays["K"], arrays["K"].dtype
        most = ml_dtypes.finfo(dtype).maxexp // 6
        powers = rng.integers(-most, most + 1, (len(arrays["Q"]), k.shape[1], 1, 1))
        if self.problem.pages:  # which belong to no batch element
            powers = powers[:1]
        of_heads = {"K": powers, "Q": -powers.repeat(self.problem.group, 1)}
        for name, exponents in of_heads.items():
            x = np.ldexp(arrays[name].astype(np.float64), exponents)
            arrays[name] = (x.clip(-E4M3_MOST, E4M3_MOST) if dtype == E4M3 else x).astype(dtype)

    def _add_steps(self, arrays: dict[str, np.ndarray]) -> None:
        """Gives Q and K, in the last column, numbers whose products are steps of the scores.

        Bounds suppose that errors of many terms add up. So the largest term comes last, when sums
        have grown, and its factors have few bits, which no kernel rounds but to e4m3.
        """
        p, q, k = self.problem, arrays["Q"], arrays["K"]
        if q.shape[3]:
            rng = np.random.default_rng((self.seed, *b"steps"))
            size = min(math.sqrt(_STEP / (abs(p.scale) or 1.0)), _MOST_OF_STEPS)
            q[..., -1] = (size * _of_rows(q.shape[:3], rng)).astype(ml_dtypes.bfloat16)
            k[..., -1] = (size * _steps(k.shape[:3], rng)).astype(ml_dtypes.bfloat16)
            self._enlarge_values(arrays, rng)

    def _add_largest_score(self, arrays: dict[str, np.ndarray]) -> None:
        """Gives one query row and one key of a key head a product of up to 1e36 in the last column.

        Their other products in this column are 0. The pair is the first, the last, or any other;
        the first is the only one of its row under a top-left mask. In pages and ragged batches the
        pair may be unused.
        """
        q, k = arrays["Q"], arrays["K"]
        if not (q.size and k.size):
            return
        rng = np.random.default_rng((self.seed, *b"largest"))
        *_, kv_heads, N, _ = k.shape
        head, (row, key) = int(rng.integers(kv_heads)), rng.integers(0, (q.shape[2], N))
        row, key = ((0, 0), (-1, -1), (row, key))[rng.integers(3)]
        of_group = slice(head * self.problem.group, (head + 1) * self.problem.group)
        size = min(_LARGEST_FACTOR, float(ml_dtypes.finfo(q.dtype).max))
        q[:, of_group, :, -1], k[:, head, :, -1] = 0, 0
        q[:, of_group, row, -1], k[:, head, key, -1] = size, rng.choice((size, -size))

    def _enlarge_values(self, arrays: dict[str, np.ndarray], rng: np.random.Generator) -> None:
        """Multiplies V by a power of two that is smaller for the first or the last keys."""
        v, p = arrays["V"], self.problem
        most = ml_dtypes.finfo(v.dtype).maxexp
        power = most // 3  # for which products with dO, or with tangents, remain finite
        if self.operation == "forward":
            power = min(most - 3, ml_dtypes.finfo(p.dtype.sums).maxexp - _ROOM_OF_STEPS)
        powers = power - min(power, _SMALLER) * _some_keys(v.shape[2], rng)
        arrays["V"] = np.ldexp(v.astype(np.float64), powers).astype(v.dtype)

    def _lower_scores_of_queries(self, arrays: dict[str, np.ndarray]) -> None:
        """Makes all scores of infinite queries -infinity, by the signs of K in one column."""
        p, q, k = self.problem, arrays["Q"], arrays["K"]
        for batch, head, row, col in np.argwhere(np.isinf(q.astype(np.float32))):
            keys = k[batch, head // p.group, :, col]
            keys[:] = -np.copysign(keys, p.scale * float(q[batch, head, row, col]))

    def _lower_scores_of_keys(self, arrays: dict[str, np.ndarray]) -> None:
        """Makes all keys of a head infinite in one column, and all their scores -infinity."""
        p, q, k = self.problem, arrays["Q"], arrays["K"]
        for batch, head, row, col in np.argwhere(np.isinf(k.astype(np.float32))):
            k[batch, head, :, col] = k[batch, head, row, col]
            queries = q[batch, head * p.group : (head + 1) * p.group, :, col]
            queries[:] = -np.copysign(queries, p.scale * float(k[batch, head, row, col]))

    def _poison(self, arrays: Arrays) -> None:
        """Writes NaN to padding rows, which belong to no sequence.

        For "nan" and "inf", also fills one sequence with NaN or infinity. None of these values may
        affect any other sequence.
        """
        if self.problem.lengths is None:
            return
        poison = {"nan": math.nan, "inf": math.inf}
        pick = np.random.default_rng((self.seed, *b"sequence"))
        chosen = int(pick.integers(len(self.problem.lengths[0].rows)))
        for name, array in arrays.items():
            if name.startswith(GRADIENT):  # the tangent of an array of scores
                continue
            of = self.problem.lengths[name in OF_KEYS]
            array[:, :, ~of.is_in_a_sequence()] = math.nan
            if self.values in poison:
                start = of.offsets[chosen]
                array[:, :, start : start + of.counts[chosen]] = poison[self.values]

    def _put_in_pages(self, arrays: dict[str, np.ndarray]) -> None:
        """Adds lengths and a page table, and writes NaN to keys that no batch element uses.

        Lengths are 0, 1, near a multiple of the page size, or the maximum. Pages are in random
        order, two batch elements may share a first page, and table entries after an element's last
        page are invalid. For "nan" and "inf", one batch element is chosen, and the keys that only
        it uses become NaN or infinity.
        """
        p, rng = self.problem, np.random.default_rng((self.seed, *b"pages"))
        size, most = p.page_size, p.N // p.page_size
        least = p.M if self.tokens in WRITTEN else 0
        edges = [x for x in (0, 1, size - 1, size, size + 1, p.N - 1, p.N) if least <= x <= p.N]
        lengths = np.resize(rng.permutation(edges or [p.N]), p.batch)
        if rng.random() < 0.25:  # a tile that ends after the keys reads past the end of the table
            lengths[-1:] = p.N
        table = rng.permutation(p.pages)[: p.batch * most].reshape(p.batch, most)
        may_share = p.batch > 1 and self.tokens not in WRITTEN
        for i in np.flatnonzero(rng.random(p.batch) < 0.5)[:1] if may_share else ():
            table[i, 0] = table[i - 1, 0]
        users = np.zeros((p.batch, p.pages, size), bool)  # [batch element, page, row]
        for b, length in enumerate(lengths):
            keys = np.arange(length)
            users[b, table[b, keys // size], keys % size] = True
        chosen = int(rng.integers(max(p.batch, 1)))
        poison = {"nan": math.nan, "inf": math.inf}.get(self.values)
        for name in "KV":
            array = arrays[name].swapaxes(1, 2)  # [pages, page_size, kv_heads, columns]
            array[~users.any(axis=0)] = math.nan
            if poison is not None and p.batch:
                array[users[chosen] & (users.sum(axis=0) == 1)] = poison
        wrong = rng.choice([-1, p.pages, 2**31 - 1, -(2**31)], table.shape)
        needed = np.arange(most) < -(-lengths[:, None] // size)
        arrays[f"mods.{PADDED[1]}"] = lengths.astype(np.int32)
        arrays[f"mods.{PAGE_TABLE}"] = np.where(needed, table, wrong).astype(np.int32)

    def _pad(self, arrays: dict[str, np.ndarray]) -> None:
        """Fills the unused rows of batch elements with NaN, which must not affect results."""
        for name, array in arrays.items():
            of = f"mods.{PADDED[name in OF_KEYS]}"
            if of in arrays and array.ndim > 2 and not is_of_scores(name):
                for element, length in zip(array, arrays[of]):
                    element[:, length:] = math.nan

    def completed(
        self, inputs: Arrays, kernel: Kernel, *, keep: bool = False
    ) -> dict[str, np.ndarray]:
        """Returns the inputs that a kernel reads; draws missing inputs of a custom kernel.

        If the record of a gradient kernel defines ``forward``, O and lse are recomputed with it,
        unless ``keep`` is true.
        """
        p, layout = self.problem, "bshd" if self.layout == "packed" else self.layout
        own = {
            name: _arranged(self._own(kernel, name, x), layout)
            for name, x in kernel.inputs.items()
            if x.when(p) and name not in inputs
        }
        known = kernel.computes().inputs_of(p)  # a file may hold inputs of another kernel
        found = {name: x for name, x in inputs.items() if name in known} | own
        if kernel.forward is None or keep or "lse" not in inputs:
            return found
        given = {name: as_float64(x) for name, x in found.items() if name not in ("O", "lse")}
        tile = kernel.choice.first
        c = SimpleNamespace(**tile, **kernel.floats_of(p, tile))
        with np.errstate(all="ignore"):
            there = kernel.forward_of(given, p, c)
        return found | {name: _arranged(x, layout) for name, x in there.items()}

    def _read(self, x: Operand) -> np.ndarray:
        """Draws an array that expressions read, independently of all other arrays.

        ALiBi slopes are between 0 and 1, most elements of a mask are True, and dropout seeds span
        the range of their dtype. All other integers ascend along the last axis and stay within the
        axes that they index.
        """
        rng, p = np.random.default_rng((self.seed, *x.name.encode())), self.problem
        dtype = x.numpy
        if x.name in LENGTHS and p.lengths:
            of = p.lengths[x.name in (STARTS[1], USED[1])]
            return of.offsets if x.name in STARTS else np.array(of.counts, dtype)
        if x.name == PADDED[1] and p.cached:
            return np.array(p.cached.rows, dtype)
        if x.name in PADDED:  # lengths: 0, 1, random, all but one row, all rows
            most = p.N if x.name == PADDED[1] else p.M
            some = (most, 0, min(most, 1), int(rng.integers(0, most + 1)), max(most - 1, 0))
            return np.resize(rng.permutation(some), p.batch).astype(dtype)
        if x.name in DESCALES:
            return self._descales(x, rng)
        if x.name == PAGE_TABLE and p.cached:
            return self._table(rng, x.shape[1])
        if x.name in SEEDS:
            numbers = np.iinfo(dtype)
            return rng.integers(numbers.min, numbers.max, x.shape, dtype, endpoint=True)
        if x.name == MASK and p.block_mask:
            return _in_tiles(x.shape, rng)
        if x.captured.kind == "bool":
            drawn = rng.random(x.shape) < _SEEN
            if x.name == MASK:
                drawn[_some_lines(drawn.shape, rng)] = False
            if x.name == MASK and drawn.size and not drawn.any():  # make one pair visible
                drawn.flat[0] = True
            return drawn
        if x.captured.kind == "int":
            texts = (*p.modifiers.score, *p.modifiers.mask)
            end = _largest_index(x, p.operands, texts)
            most = _GROUPS - 1 if end is None else max(min(end, _GROUPS - 1), 0)
            return np.sort(rng.integers(0, most + 1, x.shape), axis=-1).astype(dtype)
        if x.name == ALIBI:
            return (1 - rng.random(x.shape)).astype(dtype)
        if x.name == SINK:
            return self._sinks(x, rng)
        array = (rng.standard_normal(x.shape) * (1 if x.name == BIAS else 0.5)).astype(dtype)
        if x.name == BIAS and array.size and self.values == "lowest":
            _spread_ends(array, p.dtype.sums, rng)
        if x.name == BIAS and array.size and self.values in ("nan", "inf"):
            array[_some_lines(x.shape, rng)] = -np.inf
            array[tuple(rng.integers(0, x.shape))] = np.nan if self.values == "nan" else -np.inf
        return array

    def _descales(self, x: Operand, rng: np.random.Generator) -> np.ndarray:
        """Draws descales near 1, some of them negative.

        If both Q and K have descales, two thirds are also multiplied by 2**60 or 2**-60, which
        cancel in the scores.
        """
        exponents = rng.uniform(-2, 2, x.shape)
        read = {y.name for y in self.problem.operands}
        if x.name in DESCALES[:2] and read.issuperset(DESCALES[:2]):
            far = np.random.default_rng((self.seed, *b"descales")).integers(-1, 2, x.shape)
            exponents += _FAR_DESCALE * far * (1 if x.name == DESCALES[0] else -1)
        signs = np.where(rng.random(x.shape) < 0.25, -1, 1)
        return (signs * np.exp2(exponents)).astype(x.numpy)

    def _sinks(self, x: Operand, rng: np.random.Generator) -> np.ndarray:
        """Draws sinks: most near the scores, others far above them, near the lowest or the largest
        float, -infinity, or +infinity.

        A sink of +infinity makes the rows of its head NaN. So only "nan" and "inf" have it, and,
        in forward passes, other values that are not FINITE.
        """
        sinks = 0.5 * rng.standard_normal(x.shape)
        places = rng.permutation(sinks.size)
        spoils = self.values not in FINITE and self.operation == "forward"
        largest = _LARGEST_SINK * float(_smaller_range(x.numpy, self.problem.dtype.sums).max)
        ends = [(_FAR_ABOVE, 0.5), (rng.choice((largest, -largest)), 0.5), (-np.inf, 0.5)]
        ends.append((np.inf, 1.0 if self.values in ("nan", "inf") else 0.5 * spoils))
        drawn = [end for end, share in ends if rng.random() < share]
        for place, end in zip(places, rng.permutation(drawn)):
            sinks.flat[place] = end
        return sinks.astype(x.numpy)

    def _table(self, rng: np.random.Generator, most: int) -> np.ndarray:
        """Draws a cache's page table [batch, most]: pages in random order, then -1 as padding."""
        p = self.problem
        assert p.cached is not None
        needed = -(-np.array(p.cached.rows) // p.page_size)
        table = np.full((p.batch, most), -1, np.int32)
        table[np.arange(most) < needed[:, None]] = rng.permutation(p.pages)[: needed.sum()]
        return table

    def _own(self, kernel: Kernel, name: str, wanted: Input) -> np.ndarray:
        """Draws an input of a custom kernel, independently of all other arrays."""
        p, rng = self.problem, np.random.default_rng((self.seed, *name.encode()))
        shape, dtype = wanted.shape(p), wanted.dtype(p)
        if wanted.draw is None:
            return _drawn(name, shape, self.values, dtype, rng)
        drawn = np.asarray(kernel.evaluated(f"draw of {name}", wanted.draw, rng, p))
        if drawn.shape != shape:
            raise ValueError(
                f"{kernel.name}: the record's draw of {name} returned shape {drawn.shape} for {p}; "
                f"the shape must be {shape}"
            )
        return drawn.astype(dtype)

    def require_reach(self, backend: Backend) -> None:
        """Raises Unsupported if the backend does not support this layout."""
        if self.layout == "far" and backend.name == "simulator":
            raise Unsupported("the layout 'far' requires a GPU", "the layout 'far' requires a GPU")

    def options(self) -> list[str]:
        """Returns the command-line options that describe this case."""
        p = self.problem
        rows: dict[str, Any] = {"-M": p.M, "-N": p.N}
        sizes = {"-B": p.batch, "-H": p.heads, **rows, "-d": p.d}
        if p.is_softmax or p.lengths:
            sizes = rows if p.is_softmax else {"-H": p.heads, "-d": p.d}
        sizes |= {"--kv-heads": p.kv_heads} if p.kv_heads != p.heads else {}
        sizes |= {"--dv": p.dv} if p.dv != p.d else {}
        about: dict[str, Any] = {"--dtype": p.dtype.name, "--seed": self.seed}
        about |= {"--values": self.values} if self.values != "normal" else {}
        about |= {"--layout": self.layout} if self.layout != "bhsd" else {}
        about |= {"--new-keys": self.tokens} if self.tokens != "cached" else {}
        options = [*chain(*sizes.items()), *words_of_problem(p), *chain(*about.items())]
        return [str(option) for option in options]

    def __repr__(self) -> str:
        return f"<case {self.operation}: {self}>"

    def __str__(self) -> str:
        values = f" values={self.values}" if self.values != "normal" else ""
        tokens = f" tokens={self.tokens}" if self.tokens != "cached" else ""
        return f"{self.problem}{values}{tokens} layout={self.layout} seed={self.seed}"


def _largest_index(x: Operand, found: Iterable[Operand], texts: Iterable[Expression]) -> int | None:
    """Returns the largest index that the integer array ``x`` may hold.

    Returns None if no expression indexes an array with an element of ``x``.
    """
    ends = [
        array.shape[axis] - 1
        for text in texts
        for array in found
        for axis in range(len(array.shape))
        for index in indices_of(text, array.name, axis)
        if any(isinstance(node, ast.Name) and node.id == x.name for node in ast.walk(index))
    ]
    return min(ends, default=None)


def _drawn(
    name: str, shape: tuple[int, ...], values: str, dtype: np.dtype, rng: np.random.Generator
) -> np.ndarray:
    if dtype == np.bool_:
        return rng.random(shape) < 0.5
    if dtype.kind in "iu":
        return rng.integers(0, 3, shape, dtype)
    if values == "uniform":
        x = rng.random(shape, np.float32)
    elif values == "integers":
        x = rng.integers(-2, 3, shape).astype(np.float32)
        if name == "Q":
            x[rng.random(shape[:3]) < _ZERO] = 0.0
    elif values == "one_hot" and name == "V":
        x = np.zeros(shape, np.float32)
        rows = np.arange(shape[2] if shape[3] else 0)
        x[..., rows, rows % max(shape[3], 1)] = 1.0
    else:
        x = rng.standard_normal(shape, np.float32)
    if values == "equal" and name in ("K", "S"):
        x[...] = x[..., :1, :1] if name == "S" else x[..., :1, :]
    elif values == "huge" and name in ("Q", "K", "S"):
        x *= 2500 if name == "S" else 50
    elif values == "steps" and name == "S":
        x += _STEP * _of_rows((*shape[:3], 1), rng) * _steps((1, 1, shape[3]), rng)
    elif values == "scales" and name in ("V", "dO"):
        # The largest exponent for which products of V and dO remain finite.
        most = ml_dtypes.finfo(dtype).maxexp // 3
        heads_or_rows = (*shape[: 2 if name == "V" else 3], 1, 1)[:4]
        exponents = rng.integers(-most, most + 1, heads_or_rows)
        if name == "V":
            exponents = np.maximum(exponents - most * _some_keys(shape[2], rng), -most)
        x = np.ldexp(x.astype(np.float64), exponents)
    elif values == "lowest" and name in ("Q", "K") and x.size:
        _spread_products(x[..., 0], name, dtype)
    elif values == "lowest" and name == "S":
        x[..., ::_ALL_LOWEST, :] = x[..., ::_ALL_LOWEST] = ml_dtypes.finfo(dtype).min
    elif values == "tiny":
        x *= float(ml_dtypes.finfo(dtype).smallest_normal) / 4
    elif values == "outliers":
        x += 10 * rng.standard_normal(shape, np.float32) * (rng.random(shape) < 0.001)
    elif values in ("nan", "inf") and x.size:
        special = math.nan if values == "nan" else rng.choice((math.inf, -math.inf))
        x[tuple(rng.integers(0, shape))] = special
        if name in ("Q", "V"):  # K of the last batch element is finite, or that of others
            x[-1][tuple(rng.integers(0, shape[1:]))] = special
    elif values == "huge" and name == "K_dot" and x.size and rng.random() < 0.5:
        x[tuple(rng.integers(0, shape))] = math.inf  # also counts where the key's weight is 0
    if dtype == E4M3:  # numbers beyond the range of e4m3 would become NaN
        x = x.clip(-E4M3_MOST, E4M3_MOST)
    return x.astype(dtype)


def scale_near_the_end(p: Problem) -> float:
    """Returns a scale with which scores of the values "lowest" come near the ends of the sums.

    If their products do so themselves, it is one that brings them back to small numbers.
    """
    size = min(math.sqrt(_NEAR_THE_END), float(ml_dtypes.finfo(p.dtype.numpy).max) / 8)
    scale = float(ml_dtypes.finfo(p.dtype.sums).max) / _END_OF_SUMS / size**2
    return scale if scale > 2 else 2 / size**2


def _some_keys(N: int, rng: np.random.Generator) -> np.ndarray:
    """Draws a column [N, 1] that is True for the first or the last keys, about a half of them."""
    at, is_before = rng.integers(N // 4, 3 * N // 4 + 1), rng.random() < 0.5
    return ((np.arange(N) < at) == is_before)[:, None]


def _of_rows(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Draws factors of steps from -0.5 to 1: many near 1, and one in five negative."""
    return 1 - 1.5 * rng.random(shape) ** 2


def _steps(shape: tuple[int, int, int], rng: np.random.Generator) -> np.ndarray:
    """Draws a step for each key of [batch, heads, N]: of one key, or range of keys, it is 1."""
    *heads, N = shape
    share = 1.0 if rng.random() < 0.5 else _RANGES / max(N, 1)
    ranges = np.cumsum(rng.random(N) < share)
    chosen = rng.choice(ranges, (*heads, 1)) if N else 0
    others = rng.uniform(0, _OF_OTHERS, (*heads, N + 1))[..., ranges]
    return np.where(ranges == chosen, 1.0, others)


def _spread_products(x: np.ndarray, name: str, dtype: np.dtype) -> None:
    """Scales numbers of rows of Q or K so that products come near the ends of float32.

    If the dtype does not reach that far, a scale may. All products of some rows with the last key
    head come near the lower end, below the number with which the simulator fills variables.
    """
    size = min(math.sqrt(_NEAR_THE_END), float(ml_dtypes.finfo(dtype).max) / 8)
    low = _LEAST_OF_LOWEST + np.abs(x) % (_MOST_OF_LOWEST - _LEAST_OF_LOWEST)
    x.clip(-_MOST_OF_LOWEST, _MOST_OF_LOWEST, out=x)
    if name == "Q":
        x[..., ::_ALL_LOWEST] = low[..., ::_ALL_LOWEST]
    else:
        x[:, -1:] = -low[:, -1:]
    x *= size


def _some_lines(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Draws whole rows and columns of an array of pairs, in half of the cases none."""
    *_, M, N = shape
    share = _LINES * (rng.random() < 0.5)
    rows, keys = (rng.random(n) < share for n in (M, N))
    of_all = rows[:, None] & (M > 1) | keys & (N > 1)
    return np.broadcast_to(of_all, shape)


def _in_tiles(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Draws a mask that consists of rectangles in which all, none or most pairs are visible.

    Rectangles end at a tile's edge, or one row or key before or after it.
    """
    rows, keys = map(int, rng.choice((32, 127, 129, 256), 2))
    kinds = rng.random((*shape[:2], -(-shape[2] // rows), -(-shape[3] // keys)))
    whole = kinds.repeat(rows, 2).repeat(keys, 3)[:, :, : shape[2], : shape[3]]
    return (whole < 0.35) | ((whole < 0.65) & (rng.random(shape) < _SEEN))


def _smaller_range(*dtypes: np.dtype) -> Any:
    """Returns the limits of the dtype with the smallest range."""
    return min(map(ml_dtypes.finfo, dtypes), key=lambda x: float(x.max))


def _spread_ends(bias: np.ndarray, scores: np.dtype, rng: np.random.Generator) -> None:
    """Writes the lowest number to about a third of a bias's rows and columns, and half of the
    largest number to a few elements of the remaining rows.

    The numbers are in the range of both dtypes, that of the bias and that of the kernel's scores:
    a kernel with float32 scores reads a float64 bias of -1e308 as -inf.
    """
    ends = _smaller_range(bias.dtype, scores)
    rows, keys = (rng.random(n) < 0.3 for n in bias.shape[2:])
    bias[:, :, :, keys] = ends.min
    bias[rng.random(bias.shape) < 0.2 / max(bias.shape[3], 1)] = ends.max / 2
    bias[:, :, rows] = ends.min


def _forward(p: Problem, arrays: Arrays, backend: Backend | None) -> dict[str, np.ndarray]:
    """Computes O and lse of a forward pass exactly and rounds them to their dtypes."""
    if backend is not None and p.heads * p.pairs * (p.d + p.dv) > _WORK:
        with suppress(Unsupported, DeviceError):
            return _forward_by_kernel(p, arrays, backend)
    out, lse = exact_attention(arrays, p)
    with np.errstate(all="ignore"):
        return {"O": out.astype(p.out_dtype.numpy), "lse": lse.astype(p.dtype.sums)}


def _forward_by_kernel(p: Problem, arrays: Arrays, backend: Backend) -> dict[str, np.ndarray]:
    """Computes O and lse with the backend's fastest kernel that does not round float32 inputs."""
    p = p.with_options(precision="float32" if p.dtype.name == "float32" else None)
    p = transforms.differentiate(p, ())
    p = transforms.leave_out(p, DLSE)
    kernel = choose_kernel.select("auto", "forward", p, backend.limits)
    plan = choose_kernel.plan(kernel, p, backend.limits)
    outputs = {name: np.empty(*plan.outputs[name]) for name in ("O", "lse")}
    inputs = {name: arrays[name] for name in OPERATIONS["forward"].inputs_of(p)}
    with backend.working_on(None):
        if p.lengths:  # `fill` does not support packed arrays
            return run_guarded(backend, plan, readable_inputs(plan, inputs), outputs)
        fill(backend, plan, inputs, outputs)
    return outputs


def arranged(arrays: Arrays, layout: str) -> dict[str, np.ndarray]:
    """Copies contiguous arrays into one of LAYOUTS; values are unchanged."""
    if layout == "packed":
        return _packed(arrays)
    return {name: _arranged(array, layout) for name, array in arrays.items()}


def _arranged(x: np.ndarray, layout: str) -> np.ndarray:
    if x.ndim < 4:  # lse is always contiguous
        return x
    if layout == "bshd":
        return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
    if layout == "columns":
        return np.ascontiguousarray(x.mT).mT
    if layout == "reversed":
        return np.ascontiguousarray(x[::-1, ::-1, ::-1])[::-1, ::-1, ::-1]
    if layout == "gaps":
        *lead, heads, rows, columns = x.shape
        wide = np.full((*lead, heads + 1, 2 * rows, columns + 3), np.nan, x.dtype)
        wide[..., :heads, ::2, :columns] = x
        return wide[..., :heads, ::2, :columns]
    if layout == "unaligned":
        longer = np.empty(x.size + 1, x.dtype)
        longer[1:] = x.ravel()
        return longer[1:].reshape(x.shape)
    return _far(x) if layout == "far" else x


def _far(x: np.ndarray) -> np.ndarray:
    """Copies an array so that its first axis longer than 1 has a stride above 2**31 elements.

    The memory in between is never touched, so it takes up only address space.
    """
    axis = next((axis for axis in range(3) if x.shape[axis] > 1), None)
    if axis is None or not x.size:
        return x
    stride = max(_FAR, x.size)
    memory = np.empty((x.shape[axis] - 1) * stride + x.size, x.dtype)
    strides = [stride * x.itemsize if i == axis else x.strides[i] for i in range(x.ndim)]
    far = np.lib.stride_tricks.as_strided(memory, x.shape, strides)
    far[...] = x
    return far


def _packed(arrays: Arrays) -> dict[str, np.ndarray]:
    """Copies arrays into one array [batch, rows, all heads, columns] and returns views of it.

    An array is packed if it has the first array's dtype and, except for the number of heads, the
    shape of the last such 4-D array, which is V in a forward pass.
    """
    dtype = next(iter(arrays.values())).dtype
    like_first = {name: x for name, x in arrays.items() if x.ndim == 4 and x.dtype == dtype}
    *_, last = like_first.values()
    alike = {
        name: x.swapaxes(1, 2)
        for name, x in like_first.items()
        if (len(x), *x.shape[2:]) == (len(last), *last.shape[2:])
    }
    joined = np.concatenate(list(alike.values()), axis=2).swapaxes(1, 2)
    ends = np.cumsum([x.shape[2] for x in alike.values()])
    slices = dict(zip(alike, np.split(joined, ends[:-1], axis=1)))
    return {name: slices.get(name, _arranged(x, "bshd")) for name, x in arrays.items()}
