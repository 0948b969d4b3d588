"""Draws random cases for a kernel, with sizes near the limits of its tiles, stages and schedules.

Many faults appear only at certain sizes: a mask's edge at the end of a tile, more keys than the
pipeline stages hold, more tiles than blocks. Lengths are therefore drawn relative to the constants
that the kernel is compiled with. Every option cycles through its values, so that a few samples
cover all of them. The first sample is plain: contiguous arrays of normal values, several tiles, a
common head dimension, no mask and no other option. Successive samples form groups that share one
compilation. A group is plain, or tests expressions, ragged batches, several arrays at once, the
whole grammar of expressions, pages, new tokens of a cache, or gradients of arrays. The last groups
of each cycle combine options such that every pair of them is met.
"""

import math
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import ml_dtypes

from cupyfa.errors import Unsupported
from cupyfa.lab.verify import transforms
from cupyfa.lab.verify.case import (
    EXTREME,
    FINITE,
    LAYOUTS,
    TOKENS,
    VALUES,
    Case,
    scale_near_the_end,
)
from cupyfa.lab.verify.option_pairs import (
    TEXTS_IN_TURN,
    Combination,
    Combiner,
    Pair,
    options_of,
    other_options,
    pairs_met,
)
from cupyfa.lab.verify.random_modifiers import MODIFIED, OF_SEQUENCES, some_arrays, some_expressions
from cupyfa.lab.verify.sizes import (
    STAGES,
    Crowd,
    Tile,
    crowds_of,
    is_on_few_blocks,
    lengths_near,
    longest,
    repaired_of,
    some_lengths,
    splits_of,
    window_near,
    with_long_rest,
    with_long_rows,
    without_rows,
    work_of,
)
from cupyfa.lab.verify.tasks import refuse_long
from cupyfa.ladder.common import WARP
from cupyfa.ladder.kernel import FEATURES, Kernel
from cupyfa.ladder.split_float32 import repairs_rows
from cupyfa.ladder.tiles import TILE_KEYS, round_up
from cupyfa.planner import choose_kernel
from cupyfa.planner.plan import Limits, Plan
from cupyfa.problem import shape_language
from cupyfa.problem.dtypes import DTYPES, E4M3_INPUTS, INPUTS
from cupyfa.problem.lengths import Packed, lengths_of, pairs_of
from cupyfa.problem.optional_inputs import (
    ALIBI,
    BIAS,
    DLSE,
    OF_PAIRS,
    ROW_MAX,
    SEEDS,
)
from cupyfa.problem.options import OPTIONS
from cupyfa.problem.problem import TEXTS, Problem, can_give
from cupyfa.problem.wrt import WRT
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.simulator import Simulator

Value = TypeVar("Value")

# What successive groups of samples test. Plain groups find most faults.
_GROUPS = (
    *(*("plain",) * 4, "arrays", "texts", "expressions", "sequences of texts"),
    *("pages", "new tokens"),
    *("combination",) * 6,
)
_COMBINED = _GROUPS.index("combination")  # the first group of a cycle that combines options
# Replacements for groups that the kernel does not support, and for groups of gradient kernels.
_INSTEAD = {"pages": "padded", "new tokens": "arrays"}
_OF_GRADIENTS = {"pages": "padded", "new tokens": "gradient of a bias"}
_MODIFIED = {"texts", "sequences of texts", "arrays", "expressions", "gradient of a bias"}

SAMPLES = {"simulator": 64, "cuda": 160}  # default number of samples per kernel
_ONE_IS_EXTREME = 7  # one in this many samples has values of _EXTREME_IN_TURN
TOGETHER = 4  # number of successive samples that share one compilation
_MOST_WORK = {"simulator": 3 * 2**24, "cuda": 2**29}  # maximum multiply-adds per case
_MOST_IN_TILES = {"simulator": 2**24, "cuda": 2**29}  # the same if all tiles count as full
_MOST_SCORES = 3 * 2**12  # maximum scores per case if options and expressions matter more
_LEAST_SCALE = 2.0**-126  # the smallest normal float32: slopes divided by it overflow with distance
_FEW_KEYS = 8  # smallest limit of a window in such a case
_MOST_REPAIRED = 384  # maximum rows and keys per case to repair; each occupies a whole block
# Share of the work per case if gradients have values with which kernels on tensor cores compute all
# rows and keys once more, one by one. This takes about 30 times as long.
_RECOMPUTED, _RECOMPUTED_SHARE = (*EXTREME, "nan", "inf"), 32
_SPLIT_PRODUCTS = 3  # number of products in place of one if operands are split
_ATTEMPTS = 8  # number of attempts to draw a sample that kernel and backend support
_WITH_SAME = 4  # number of successive attempts at a combination that compile the same
# Kinds of (query, key) lengths; "many" exceeds what the kernel processes at once.
_LENGTHS = (("below", "edge"), ("edge", "beyond"), ("beyond", "below"), ("many", "many"))
_PLAIN_LENGTHS = ("beyond", "beyond")
_NO_KEYS = (True, *(False,) * 15)  # one of the plain samples of a cycle has none
_HEADS = (
    (1, 1, 1),
    (2, 2, 2),
    (1, 3, 1),
    (3, 1, 2),
    (1, 2, 2),
    (2, 1, 1),
)  # batch, kv_heads, query heads per key head; 2 stands for one of _GROUPED
_DIMS = ("odd", 64, "edge", "usual", 128, "wide")
_USUAL_DIMS = (8, 16, 32, 48, 80, 96, 112, 144, 160, 192, 208, 256)
_PLAIN_DIM = 64
_NARROW, _NARROW_GROUP = 64, 3  # largest d and dv of groups with narrow heads
_WIDE = 128  # largest d and dv of usual heads
_WIDEST = 640  # largest d drawn for kernels that support any d
# Kinds of lengths, and (batch, kv_heads, query heads per key head), for heads with so few rows that
# several may share a row tile.
_FEW, _FEW_HEADS = ("few", "beyond"), (2, 2, 2)
_HEADS_OF_LENGTHS = ((3, 2, 2), (5, 2, 1), (2, 2, 2), (3, 1, 2))
_GROUPED = (2, 8, 3)  # query heads per key head, where there are several
_PAGE_SIZES = (16, 64, 32, 128)
_SMALL_PAGES = (16, 32)  # several pages fit in a key tile
_SIDES_PADDED = (("q", "k"), ("k",), ("q",))
_MASKS = (None, "bottom-right", None, "top-left")
_SIDES_IN_BLOCKS = ("left", "both")
_SIDES = ("neither", "both", "neither", "left", "neither", "right")
_SEEDS = ("i64[1]", "u64[1]", "i32[1]", "u32[1]")
_LEAST_ROWS = 4  # of a head, where more keys are drawn in place of rows
_FEW_ROWS, _FEW_OF_GROUP = 48, 240  # rows of a head, and of all heads of a key head
_MOVED = {"offset", "window"}  # options with which every other sample of a combination is moved
# The constant that a tile other than the planner's changes; None stands for any. Where a kernel has
# two numbers of stages, the default tiles usually vary "stages", so "Qs" occurs more often.
_OTHERS_FIRST = ("Qs", "stages", "Qs", None)
_LONG_PADDING = 257, 288  # range of the rows of a padded array with more than a block has threads
_OF_LONG_PADDING = 8  # maximum number of keys in such a case
_NEAR = tuple(layout for layout in LAYOUTS if layout != "far")
_OF_CACHES = ("bhsd", "bshd", "reversed", "gaps", "unaligned")  # layouts for new tokens
_OF_PAGES = ("bhsd", "reversed", "columns")  # layouts for groups with pages; rows are aligned
_VALUES = ("normal", "normal", *(x for x in VALUES if x != "largest"))
_EXTREME_IN_TURN = ("lowest", "largest", "lowest")
_REPAIRED = ("tiny", "lowest", "nan", "inf")  # values beyond float16: most rows need repair
# Error bounds of "tiny" would hide faults, and rotations would remove "steps".
_OF_TOKENS = tuple(x for x in FINITE if x not in ("tiny", "steps"))


@dataclass(frozen=True)
class Drawn:
    """A drawn case, its kernel, and the kernel constants on which its sizes are based."""

    case: Case
    kernel: Kernel
    constants: Mapping[str, int]
    multiprocessors: int | None = None  # number of simulated multiprocessors; None for the default


@dataclass(frozen=True)
class Fuzz:
    """Draws cases for a kernel or, if ``kernel`` is None, for the kernels that "auto" chooses.

    Sample i depends only on the seed and i. ``dtypes``, ``options`` (of attention) and ``arrays``
    (their forms) replace drawn values; sizes are limited so that indices stay inside these arrays.
    """

    kernel: Kernel | None
    backend: Backend
    seed: int = 0
    dtypes: Sequence[str] | None = None
    options: Mapping[str, Any] | None = None
    arrays: Mapping[str, Any] | None = None

    def sample(self, i: int) -> Drawn:
        """Returns sample i, which the kernel supports unless every attempt to draw it failed."""
        for attempt in range(_ATTEMPTS):
            try:
                drawn = self._drawn(i, attempt)
                multiprocessors = drawn.multiprocessors or self.backend.limits.multiprocessors
                limits = replace(self.backend.limits, multiprocessors=multiprocessors)
                choose_kernel.plan(drawn.kernel, drawn.case.problem, limits, **drawn.constants)
                refuse_long(self.backend, drawn.case.problem)
                return drawn
            except Unsupported:
                continue
            except ValueError:  # the record is invalid
                break
        return self._plain(i)

    def _turns(self, i: int, attempt: int) -> "_Turns":
        """Returns the choices of sample i's group.

        The first attempts at a combination keep what is compiled and draw other sizes.
        """
        turns = _Turns(self.seed, self._first_alike(i // TOGETHER), attempt)
        return replace(turns, attempt=attempt // _WITH_SAME) if self._combination(turns) else turns

    def _first_alike(self, group: int) -> int:
        """Returns the group whose compiled choices a group shares, usually the group itself.

        Once the groups of a cycle meet all pairs of options, each further group reuses a
        combination of this cycle and draws other sizes.
        """
        begin = group // len(_GROUPS) * len(_GROUPS) + _COMBINED
        combined = range(begin, group)
        if group < begin or self._combination(_Turns(self.seed, group)):
            return group
        found = [x for x in combined if self._combination(_Turns(self.seed, x))]
        return found[(group - begin) % len(found)] if found else group

    def _kind(self, turns: "_Turns") -> str:
        if self._lengths:
            return "sequences of texts" if turns.i % 8 >= 6 or turns.i % 2 else "sequences"
        if combination := self._combination(turns):
            return combination.kind
        kind, has = _GROUPS[turns.i % len(_GROUPS)], self._has
        if self._operation == "backward":
            kind = _OF_GRADIENTS.get(kind, kind)
        elif not has("paged"):
            kind = _INSTEAD.get(kind, kind)
        needed = {
            **{"padded": "lengths", "pages": "paged", "new tokens": "paged"},
            **{"gradient of a bias": "wrt", "sequences of texts": "ragged"},
        }
        refused = {*OF_PAIRS, shape_language.BLOCK_MASK, WRT, shape_language.PAGE_SIZE}
        is_able = self._operation != "softmax" and has(needed.get(kind, "places"))
        if kind == "combination":  # no pair of options is left
            return "plain"
        if kind in needed and refused & {*(self.arrays or {})}:
            return "plain"
        return kind if is_able else "plain"

    def _combination(self, turns: "_Turns") -> Combination | None:
        """Returns the options that the group combines, or None if it combines none.

        A group meets pairs of options that the groups before it, in the same cycle, do not meet.
        """
        if turns.i % len(_GROUPS) < _COMBINED or self._operation == "softmax":
            return None
        if self.options or self.arrays:
            return None
        if turns.i not in self._combinations:
            met = {
                x
                for group in range(turns.i // len(_GROUPS) * len(_GROUPS), turns.i)
                for x in self._pairs(group)
            }
            pick = random.Random(f"{self.seed} {turns.i} combination")
            self._combinations[turns.i] = self._combiner.draw(met, pick)
        return self._combinations[turns.i]

    @cached_property
    def _combinations(self) -> dict[int, Combination | None]:
        return {}

    @cached_property
    def _met(self) -> dict[int, set[Pair]]:
        return {}

    def _pairs(self, group: int) -> set[Pair]:
        """Returns the pairs of options that the samples of a group meet."""
        if group not in self._met:
            samples = range(group * TOGETHER, (group + 1) * TOGETHER)
            self._met[group] = {pair for i in samples for pair in pairs_met(self.sample(i).case)}
        return self._met[group]

    @cached_property
    def _combiner(self) -> Combiner:
        def supports(p: Problem) -> bool:
            return choose_kernel.can(self._record(p), p, self.backend.limits)

        return Combiner(self._operation, self._dtypes, supports)

    @cached_property
    def _planned(self) -> dict[Any, Plan]:
        """Cached plans of the latest group; drawing a sample uses each of them several times."""
        return {}

    def _plan(self, record: Kernel, p: Problem, constants: Mapping[str, int]) -> Plan:
        key = record.name, p, tuple(sorted(constants.items()))
        if key not in self._planned:
            made = choose_kernel.plan(record, p, self.backend.limits, **constants)
            if len(self._planned) > 3 * TOGETHER:
                self._planned.clear()
            self._planned[key] = made
            self._planned[record.name, p, tuple(sorted(made.constants.items()))] = made
        return self._planned[key]

    @cached_property
    def _operation(self) -> str:
        return self.kernel.operation if self.kernel else "forward"

    @cached_property
    def _dtypes(self) -> list[str]:
        known = INPUTS if self.kernel else DTYPES
        taken = [x for x in self.dtypes or known if not self.kernel or self.kernel.takes(x)]
        return taken or list(self.dtypes or DTYPES)

    def _values(self, p: Problem) -> Sequence[str]:
        """Returns kinds of input values that take turns, without "lowest" for some kernels."""
        takes_all = self.kernel is None or takes_extreme_scores(self.kernel, p)
        return _VALUES if takes_all else [x for x in _VALUES if x != "lowest"]

    @property
    def _most_dims(self) -> int:
        return (self.kernel and self.kernel.largest_d) or _WIDEST

    def _record(self, p: Problem) -> Kernel:
        return self.kernel or choose_kernel.select("auto", self._operation, p, self.backend.limits)

    def _has(self, feature: str) -> bool:
        return feature in (self.kernel.features if self.kernel else FEATURES)

    @cached_property
    def _lengths(self) -> Packed | None:
        """Sequence lengths passed by the caller, or None if lengths are drawn."""
        given = (self.arrays or {}).get(shape_language.LENGTHS_OF)
        return None if given is None else lengths_of(given)

    def _is_in_blocks(self, turns: "_Turns") -> bool:
        """Returns whether the group has a block mask: the first "arrays" group of each cycle."""
        return turns.i % len(_GROUPS) == _GROUPS.index("arrays")

    def _is_narrow(self, turns: "_Turns") -> bool:
        """Returns whether the group computes gradients for small d and dv without a window."""
        return self._operation == "backward" and turns.i % len(_GROUPS) == _NARROW_GROUP

    def _is_small(self, turns: "_Turns") -> bool:
        """Returns whether sizes matter less for the group than options and expressions."""
        return self._combination(turns) is not None or self._kind(turns) == "expressions"

    def _is_ragged(self, turns: "_Turns") -> bool:
        """Returns whether the group has ragged batches, with drawn or the caller's lengths."""
        return self._kind(turns).startswith("sequences")

    def _has_lengths(self, turns: "_Turns") -> bool:
        """Returns whether batch elements of the group have lengths, which several have to show."""
        return self._kind(turns) in ("pages", "new tokens", "padded")

    def _has_texts(self, turns: "_Turns") -> bool:
        """Returns whether expressions, arrays and dropout are drawn for the group."""
        return self._kind(turns) in _MODIFIED or (
            self._kind(turns) in ("pages", "padded") and turns.choose("texts", (True, False))
        )

    def _drawn(self, i: int, attempt: int) -> Drawn:
        """Draws sample i; compile-time choices vary by group, all other choices by sample."""
        turns, pick = self._turns(i, attempt), random.Random(f"{self.seed} {i} {attempt}")
        is_plain = i == attempt == 0
        compiled = self._compiled(turns, is_plain)
        record = self._record(compiled)
        constants = self._constants(record, compiled, turns)
        plan = self._plan(record, compiled, constants)
        each = _Turns(self.seed, i, attempt)
        values = "normal" if is_plain else each.choose("values", self._values(compiled))
        lengths = _PLAIN_LENGTHS if is_plain else each.choose("lengths", _LENGTHS)
        layout, tokens = _NEAR[0] if is_plain else each.choose("layout", _NEAR), "cached"
        if self._kind(turns) == "pages":
            layout = each.choose("layout of pages", _OF_PAGES)
        if self._kind(turns) == "new tokens":
            tokens = each.choose("tokens", tuple(TOKENS)[1:])
            values, layout = each.choose("values", _OF_TOKENS), each.choose("layout", _OF_CACHES)
        if self._kind(turns) == "gradient of a bias" and i % TOGETHER == 1:
            values = each.choose("values", ("nan", "inf"))  # which make kernels recompute rows
        if values == "scales" and _loses_small_values(plan):
            values = "normal"
        if self._has_steps(compiled, turns, each, lengths, values) and not is_plain:
            values = "steps"
        if self._is_extreme(compiled, turns, each) and not is_plain:
            values = each.choose("extreme values", _EXTREME_IN_TURN)
        if crowd := self._crowd(compiled, plan, turns, each, lengths):
            values = each.choose("values", ("steps", "uniform"))
        # If array sizes are compiled into the kernel, all samples of the group have the same sizes.
        has_sizes = any(" elements = " in x.mods for x in plan.launches)
        if has_sizes:
            sizes = turns.choose("lengths", _LENGTHS)
            each_values = "lowest" if repairs_rows(record) else "normal"  # values differ by sample
            problem = self._sized(
                compiled, plan, turns, turns, turns.random("sizes"), each_values, sizes, crowd
            )
        else:
            problem = self._sized(compiled, plan, turns, each, pick, values, lengths, crowd)
        is_free = not (has_sizes or self.arrays or self._is_recomputed(values))
        problem = self._in_kind(problem, turns, pick, is_free=is_free)
        if not problem.is_softmax:
            problem = self._scaled(problem, values, pick)
        tokens = tokens if problem.d > 1 else "cached"  # rotations need two columns
        case = Case(self._operation, problem, pick.randrange(2**31), values, layout, tokens)
        if self.kernel is None:  # "auto" may choose another kernel for the final sizes
            record = self._record(problem)
            constants = {}
        return Drawn(case, record, constants, crowd.multiprocessors if crowd else None)

    def _is_extreme(self, p: Problem, turns: "_Turns", each: "_Turns") -> bool:
        """Returns whether the sample has scores near the limits of float32, or one far score."""
        if self._operation == "softmax" or self._kind(turns) == "new tokens":
            return False
        if "lowest" not in self._values(p):
            return False
        return each.choose("lowest", (False,) * (_ONE_IS_EXTREME - 1) + (True,))

    def _is_recomputed(self, values: str) -> bool:
        """Returns whether some kernels compute all gradients of such values once more."""
        return self._operation == "backward" and values in _RECOMPUTED

    def _has_steps(
        self, p: Problem, turns: "_Turns", each: "_Turns", lengths: tuple[str, str], values: str
    ) -> bool:
        """Returns whether the sample has steps of scores.

        In plain groups, samples with many keys have them in place of other FINITE values, and so
        has the sample whose window hides a part of the first tile of keys.
        """
        if p.is_softmax or self._kind(turns) != "plain":
            return False
        has_tiles = lengths[1] in ("beyond", "many") and values in FINITE
        return has_tiles or self._hides_part(p, turns, each)

    def _crowd(
        self, p: Problem, plan: Plan, turns: "_Turns", each: "_Turns", lengths: tuple[str, str]
    ) -> Crowd | None:
        """Returns sizes that trigger a special schedule, or None, as for most samples."""
        is_free = isinstance(self.backend, Simulator) and self.backend.multiprocessors is None
        can = is_free and not (self.arrays or p.is_softmax) and self._kind(turns) == "plain"
        if lengths[0] != "many" or not can or self.kernel is None:
            return None
        found = crowds_of(p, Tile(plan), each.random("crowd itself"))
        return each.choose("crowd", found) if found else None

    def _in_kind(
        self, p: Problem, turns: "_Turns", pick: random.Random, *, is_free: bool
    ) -> Problem:
        """Adds the features that the group tests: pages, padded lengths or descales.

        is_free: whether the sample may have other sizes than the rest of the group, and many rows.
        """
        kind = self._kind(turns)
        if kind in ("pages", "new tokens"):
            sizes = _SMALL_PAGES if kind == "pages" else _PAGE_SIZES
            size = turns.choose("page size", sizes)
            if kind == "new tokens":
                p = transforms.resize(p, M=min(max(p.M, 1), max(p.N, 1), size))
            return p.in_pages(size)
        if kind == "padded":
            sides = turns.choose("padded", _SIDES_PADDED)
            if "q" in sides and is_free and pick.random() < 1 / TOGETHER:
                p = self._with_long_padding(p, pick)
            p = transforms.pad(p, sides)
        if p.dtype == E4M3_INPUTS and not p.is_ragged:
            count = turns.choose("descales", (3, 1, 2))
            p = transforms.add_descales(p, turns.random("descales itself").sample("qkv", count))
        return p

    def _with_long_padding(self, p: Problem, pick: random.Random) -> Problem:
        """Returns the problem with more rows than a block has threads, and few keys and heads."""
        few = 1 if p.group == max(_GROUPED) else 2
        heads = {"heads": few * p.group, "kv_heads": few}
        rows, keys = pick.randrange(*_LONG_PADDING), min(p.N, _OF_LONG_PADDING)
        return transforms.resize(p, batch=few, M=rows, N=keys, **heads)

    def _plain(self, i: int) -> Drawn:
        """Returns a sample for a kernel without a valid plan; running it reports the reason."""
        turns = _Turns(self.seed, i // TOGETHER)
        p = transforms.resize(self._problem(turns), M=i + 1, N=i + 2)
        p = self._in_form(p)
        return Drawn(Case(self._operation, p, i), self._record(p), {})

    def _compiled(self, turns: "_Turns", is_plain: bool) -> Problem:
        """Returns the group's problem, halving d and dv until the kernel has a plan for it."""
        problem = self._problem(turns, is_plain)
        for _ in range(6):
            try:
                self._plan(self._record(problem), problem, {})
                break
            except Unsupported:
                problem = replace(problem, d=-(-problem.d // 2), dv=-(-problem.dv // 2))
        return problem

    def _problem(self, turns: "_Turns", is_plain: bool = False) -> Problem:
        """Returns a problem of typical size with the group's dtype, head dimensions and options."""
        combination = self._combination(turns)
        dtype = combination.dtype if combination else turns.choose("dtype", self._dtypes)
        few = turns.choose("tiles", ("many", "many", "few")) == "few" and not is_plain
        M, N = (5, 1100) if few else (1024, 1024)
        if self._operation == "softmax":
            return Problem.of_row_sizes(M, N, dtype)
        if is_plain:
            d, given = min(_PLAIN_DIM, self._most_dims), dict(self.options or {})
            arrays = self._arrays
            p = Problem.of_sizes(M=M, N=N, heads=16, dtype=dtype, d=d, **given, **arrays)
            return transforms.make_ragged(p, self._lengths) if self._lengths else p
        d = self._dim(turns, "d")
        other = turns.choose("other dv", (False, False, False, True)) and self._has("dv")
        dv = self._dim(turns, "dv") if other else d
        if combination or self._is_narrow(turns):
            d, dv = min(d, _NARROW), min(dv, _NARROW)
        if combination:
            texts = turns.choose("texts of combinations", TEXTS_IN_TURN)
            pick = turns.random("combination itself")
            return combination.problem(pick, texts, M=M, N=N, d=d, dv=dv)
        sizes: dict[str, Any] = {"M": M, "N": N, "heads": 2 if few else 16, "dtype": dtype}
        given = self._modified(turns) | self._options(turns)
        if given.keys() & {*TEXTS, *shape_language.NAMES}:
            sizes["batch"] = 2  # more than 1, to test broadcasting
        asked = {
            DLSE: self._has_dlse(turns),
            shape_language.RETURN_MAX: self._has_row_max(turns, max(d, dv)),
        }
        given = asked | given
        p = Problem.of_sizes(**sizes, d=d, dv=dv, **given)
        if self._is_ragged(turns):
            # Half of the kernels get lengths with unused rows; the seed decides which.
            name = self.kernel.name if self.kernel else "auto"
            used = random.Random(f"{self.seed} unused rows {name}").random() < 0.5
            p = transforms.make_ragged(p, self._lengths or some_lengths(used=used))
            return self._differentiated(p, turns) if self._operation == "tangent" else p
        if self._kind(turns) == "padded" and self._operation == "tangent" and not self.arrays:
            return self._differentiated(p, turns)
        if self.arrays or self._kind(turns) in ("pages", "padded", "new tokens"):
            return p
        in_blocks = self._is_in_blocks(turns) or turns.choose("block mask", (True, False))
        p = p.in_blocks(p.has_mask and in_blocks)
        return self._differentiated(p, turns)

    def _differentiated(self, p: Problem, turns: "_Turns") -> Problem:
        """Requests gradients of some of the problem's arrays, or moves them, if the kernel can."""
        able = [x.name for x in p.operands if x.is_differentiable]
        if self._operation == "forward" or not self._has("wrt") or not able:
            return p
        if self._kind(turns) == "gradient of a bias":
            return transforms.differentiate(p, [BIAS])
        pick = turns.random("wrt itself")
        every = pick.random() < 0.4
        names = able if every else pick.sample(able, pick.randint(1, len(able)))
        # Slopes of functions of the score need a score that moves.
        may_rest = self._operation == "tangent" and self._kind(turns) != "expressions"
        if may_rest and pick.random() < 0.3:
            p = p.with_options(tangents="none")  # of q, k and v
        return transforms.differentiate(p, names)

    def _has_dlse(self, turns: "_Turns") -> bool:
        """Returns whether the group passes dlse, as about half of the groups with arrays do."""
        if self._operation != "backward" or not self._has(DLSE) or self._arrays:
            return False
        asked = turns.choose(DLSE, (True, False))
        return self._has_texts(turns) and (asked or self._kind(turns) == "arrays")

    def _has_row_max(self, turns: "_Turns", width: int) -> bool:
        """Returns whether the group returns row maxima, as every third group does.

        Of groups with wide heads, for which some kernels have other code, more than half do.
        """
        if self._operation != "forward" or not self._has(ROW_MAX) or self._arrays:
            return False
        is_wide = width > _WIDE and turns.choose("row maxima of wide heads", (True, False))
        return is_wide or turns.choose(ROW_MAX, (True, False, False))

    def _modified(self, turns: "_Turns") -> dict[str, Any]:
        """Returns score-modifying expressions and arrays: drawn, unless the caller passed some."""
        given = self.options or {}
        if self._arrays or any(name in given for name in TEXTS):
            return self._arrays
        if not self._has_texts(turns) or not self._has("places"):
            return {}
        if self._is_ragged(turns):
            return dict(turns.choose("text of sequences", OF_SEQUENCES))
        kind, pick = self._kind(turns), turns.random("modified itself")
        if kind == "arrays":
            return some_arrays(pick, self._has, in_blocks=self._is_in_blocks(turns))
        if kind == "expressions":
            return some_expressions(pick)
        if kind == "gradient of a bias":  # one element per (query, key), in the results' dtype
            return {BIAS: pick.choice(("bhmn", "1hmn", "b1mn", "11mn"))}
        of = self.kernel.name if self.kernel else ""  # the order of expressions varies by kernel
        return dict(turns.choose(f"text {of}", MODIFIED))

    def _dim(self, turns: "_Turns", name: str) -> int:
        """Draws a head dimension: small and odd, near a multiple of 16, common in models, or large.

        Groups that test pages avoid odd dimensions, whose rows are copied one element at a time.
        """
        kind, pick = turns.choose(name, _DIMS), turns.random(f"{name} itself")
        kind = "usual" if self._kind(turns) == "pages" else kind
        most = self._most_dims
        if isinstance(kind, int):
            return min(kind, most)
        if kind == "odd":
            return 2 * pick.randrange(1, 40) - 1
        if kind == "usual":
            return pick.choice([x for x in _USUAL_DIMS if x <= most] or [most])
        if kind == "edge":
            return min(pick.choice((16, 64)) * pick.randrange(1, 4) + pick.choice((-1, 1)), most)
        return round(math.exp(pick.uniform(math.log(min(80, most)), math.log(most))))

    def _options(self, turns: "_Turns") -> dict[str, Any]:
        """Draws the group's mask, window sides and other options; window sizes are drawn later."""
        is_plain = self._is_ragged(turns) and not self._has_texts(turns)
        masks: Sequence[str | None] = [x for x in _MASKS if x] if is_plain else _MASKS
        if self._is_in_blocks(turns):  # a mask with an offset
            masks = [x for x in _MASKS if x != "top-left"]
        causal = turns.choose("causal", self._able("causal", masks))
        if self._kind(turns) in ("new tokens", "gradient of a bias"):
            causal = "bottom-right"
        sides = turns.choose("sides", _SIDES_IN_BLOCKS if self._is_in_blocks(turns) else _SIDES)
        window = tuple(1 if sides in (side, "both") else None for side in ("left", "right"))
        is_able = self._able("window", (window,)) and not self._is_narrow(turns)
        window = window if is_able else (None, None)
        sign = -1.0 if turns.choose("sign", (1, 1, 1, -1)) < 0 and not is_plain else None
        found = {"causal": causal, "window": window, "scale": sign}
        for name in other_options():
            option = OPTIONS[name]
            tried = self._able(name, option.tried)
            found[name] = turns.choose(name, [option.default] * (3 * len(tried) or 1) + tried)
        if self._kind(turns) == "expressions" and "tangents" in found:  # slopes need moving scores
            found["tangents"] = OPTIONS["tangents"].default
        # Some groups with 16-bit inputs have float32 results.
        dtype = INPUTS[turns.choose("dtype", self._dtypes)]
        able = self._able("out_dtype", OPTIONS["out_dtype"].tried)
        tried = [x for x in able if can_give(x, dtype)]
        found["out_dtype"] = turns.choose("out_dtype", (None, None, None, *tried))
        return found | self._dropout(turns) | dict(self.options or {})

    def _dropout(self, turns: "_Turns") -> dict[str, Any]:
        """Draws the group's dropout, if any, with its seed and offset as numbers or arrays."""
        pick = turns.random("dropout itself")
        tried = self._able("dropout", (0.0, pick.choice((0.05, 0.5))))
        if not self._has_texts(turns) or not turns.choose("dropout", tried):
            return {}
        seeds: dict[str, Any] = dict(zip(SEEDS, (pick.randrange(2**64), pick.randrange(2**32))))
        forms_of = turns.random("seeds in memory").sample(_SEEDS, len(SEEDS))
        in_memory = turns.choose("seeds in memory", ((), SEEDS, (), SEEDS[:1]))
        seeds |= {name: form for name, form in zip(SEEDS, forms_of) if name in in_memory}
        return {"dropout": tried[-1], **seeds}

    def _able(self, name: str, values: Sequence[Any]) -> list[Any]:
        features = OPTIONS[name].features.items()
        return [
            x for x in values if all(self._has(what) or not needs(x) for what, needs in features)
        ]

    def _constants(self, record: Kernel, p: Problem, turns: "_Turns") -> Mapping[str, int]:
        """Returns the plan's constants.

        One in four groups has another tile than the planner's. About half of the groups use a small
        ``room`` for score tiles, which forces more rounds.
        """
        constants = dict(self._plan(record, p, {}).constants)
        if turns.i and turns.choose("other tile", (False, False, False, True)):
            constants = self._other_tile(record, p, constants, turns)
        if "room" in constants and turns.choose("room", (True, False)):
            constants["room"] = turns.random("room itself").randrange(2, 9)
        return constants

    def _other_tile(
        self, record: Kernel, p: Problem, usual: dict[str, int], turns: "_Turns"
    ) -> dict[str, int]:
        """Decreases one of the tile sizes or, most often, changes a number of stages.

        The number of keys may also increase, to at most twice the warp size. All values are
        candidates of `tune`. Returns the usual constants if the kernel has no others.
        """
        pick = turns.random("other tile itself")
        names, turn = [*record.candidates], turns.i // len(_OTHERS_FIRST)
        names = [names[(turn + i) % len(names)] for i in range(len(names))]
        if first := _OTHERS_FIRST[turn % len(_OTHERS_FIRST)]:
            names.sort(key=lambda name: (name not in STAGES, name != first))
        for name in names:
            most = math.inf if name in STAGES else usual[name]
            most = max(most, 2 * WARP) if name in TILE_KEYS else most
            others = [x for x in record.candidates[name] if x <= most and x != usual[name]]
            for value in pick.sample(others, len(others)):
                tile = {x: usual[x] for x in record.choice.names} | {name: value}
                with suppress(Unsupported, ValueError):
                    return dict(self._plan(record, p, tile).constants)
        return usual

    def _sized(
        self,
        p: Problem,
        plan: Plan,
        turns: "_Turns",
        each: "_Turns",
        pick: random.Random,
        values: str,
        lengths: tuple[str, str],
        crowd: Crowd | None = None,
    ) -> Problem:
        """Draws lengths, heads and window limits relative to the plan's tiles."""
        tile = Tile(plan)
        are_few = bool(p.operands) and not p.lengths and each.i % TOGETHER == 0
        of_rows, of_keys = _FEW if are_few else lengths
        M = tile.length(of_rows, tile.rows, tile.row_stages, pick)
        N = tile.length(of_keys, tile.keys, tile.stages, pick)
        if p.is_softmax:
            return Problem.of_row_sizes(min(M, 2**21 // max(N, 1)), N, p.dtype.name)
        how = {"shares": bool(p.operands), "is_packed": tile.packs_heads}
        batch, kv_heads, group = self._heads(turns, each, values, are_few, **how)
        if self._kind(turns) == "plain" and each.choose("no keys", _NO_KEYS):
            N = 0
        if p.operands or p.options.changed.keys() & {*TEXTS}:  # sizes 0 and 1 compile differently
            M, N = max(M, 2), max(N, 2)
        if crowd:
            (batch, kv_heads, group), M, N = crowd.heads, crowd.M, crowd.N
            group = group if self._has("gqa") else 1
        elif of_rows == "many" and tile.has_splits:  # few row tiles, so that keys are split
            batch, kv_heads, M = 1, 1, tile.length("below", tile.rows, 1, pick)
        hides_part = crowd is None and N > 0 and self._hides_part(p, turns, each)
        if hides_part:
            M = min(M, max(tile.keys // 2, 1))
            N = 2 * tile.keys + M + pick.randrange(tile.keys)
        heads: dict[str, Any] = {"heads": kv_heads * group, "kv_heads": kv_heads}
        if p.lengths:
            drawn = lengths_near(tile, p.lengths, pick, is_full=each.i % 2 == 0)
            if self._combination(turns) and each.i % 2:
                rare = without_rows if each.i % TOGETHER == 1 else with_long_rest
                drawn = rare(drawn, pick)
            p = transforms.make_ragged(p, p.lengths if self._lengths else drawn, **heads)
        else:
            p = transforms.resize(p, batch=batch, M=M, N=N, **heads)
        is_small = self._is_small(turns)
        p = self._smaller(p, values, scores=_MOST_SCORES if is_small else None)
        is_fixed = p.lengths or crowd or self.arrays or self._is_recomputed(values)
        if p.operands and not is_fixed and each.choose("last key", (False, False, True)):
            p = _without_last_key(p, tile.keys)
        if self._operation == "backward" and not (crowd or p.lengths or self._has_lengths(turns)):
            p = self._with_fewer_tiles(p, tile)
        if crowd is None and of_rows == "many" and is_on_few_blocks(plan, self.backend.limits):
            p = self._crowded(p, plan)
        p = self._in_form(p)
        given = (self.options or {}).keys()
        if "window" not in given and p.window != (None, None):
            sides = (side is not None for side in p.window)
            edge = each.choose("edge of the window", (None, -1, 0, 1))
            shift = 0 if p.causal == "top-left" else p.N - p.M
            near = window_near(sides, longest(p), tile.keys, pick, edge=edge, shift=shift)
            if hides_part and 2 * tile.keys <= p.N:
                near = shift - pick.randrange(1, max(tile.keys // 2, 2)), near[1]
            if is_small:  # a row that sees one key has a weight of 1, whatever its score is
                left, right = (side if side is None else max(side, _FEW_KEYS) for side in near)
                near = left, right
            p = p.with_options(window=near)
        is_split = tile.has_splits and (crowd or of_rows == "many") and not p.lengths
        if is_split and not given & {"causal", "window", "offset"}:
            return with_long_rows(p)
        return p if "offset" in given else self._moved(p, turns, each, tile)

    def _hides_part(self, p: Problem, turns: "_Turns", each: "_Turns") -> bool:
        """Returns whether the window begins in the first key tile of all rows, before whole tiles.

        Plain groups with a left edge of the window have one such sample. A maximum that a kernel
        takes over from the first tile then shows where the next one has larger scores.
        """
        if self._kind(turns) != "plain" or self.arrays or "window" in (self.options or {}):
            return False
        return p.left is not None and p.causal != "top-left" and each.i % TOGETHER == 2

    def _heads(
        self,
        turns: "_Turns",
        each: "_Turns",
        values: str,
        are_few: bool,
        *,
        shares: bool,
        is_packed: bool,
    ) -> tuple[int, int, int]:
        """Draws the batch size, the number of key heads, and the query heads per key head.

        are_few: whether heads have so few rows that they may share a row tile. shares: whether the
        problem has arrays, whose indexing compiles differently for a single batch element or head.
        """
        if values in ("nan", "inf"):  # the repair launch must find the right one of several heads
            batch, kv_heads, group = 2, 2, turns.choose("group", _GROUPED) if is_packed else 2
        else:
            usual = _HEADS_OF_LENGTHS if self._has_lengths(turns) or shares else _HEADS
            batch, kv_heads, group = _FEW_HEADS if are_few else each.choose("heads", usual)
            # The number of query heads may be compiled in, so samples of a group share it.
            group = group if group == 1 else turns.choose("group", _GROUPED)
            if (
                self._operation == "backward"
                and self._has_lengths(turns)
                and group == max(_GROUPED)
            ):
                kv_heads = 1  # these cases keep their batch elements and rows
        group = group if self._has("gqa") else 1
        return batch, max(kv_heads, 2) if shares and group == 1 else kv_heads, group

    def _moved(self, p: Problem, turns: "_Turns", each: "_Turns", tile: Tile) -> Problem:
        """Shifts the mask by a random offset in one of eight samples.

        In groups with a block mask or a combination with a window or an offset it is every other
        sample, and in one of four the window begins past the last key.
        """
        has_lengths = p.is_ragged or self._has_lengths(turns)
        if not p.is_masked or p.causal == "top-left" or has_lengths:
            return p
        combination, pick = self._combination(turns), each.random("offset itself")
        is_asked = self._is_in_blocks(turns) or (
            combination is not None and not combination.names.isdisjoint(_MOVED)
        )
        is_moved = each.i % 2 == 0 if is_asked else each.choose("offset", (False,) * 7 + (True,))
        if not is_moved:
            return p
        is_past = each.i % TOGETHER == 2 if is_asked else pick.random() < 0.5
        if p.left is None or not is_past or "window" in (self.options or {}):
            return p.with_options(offset=pick.randint(-p.M, p.N + 1))
        # The windows of half of the rows, or of all rows, begin past the last key.
        half = 0 if self._is_in_blocks(turns) else p.M // 2
        near, past = min(p.left, p.M // 4), pick.choice((half, 0))
        rows = tile.keys + pick.randrange(2, tile.keys)
        if not (past or self.arrays) and rows > p.M:
            p = transforms.resize(p, M=rows, N=max(p.N * p.M // rows, 2))
        return p.with_options(offset=p.N - past + near, window=(near, p.right))

    def _smaller(self, p: Problem, values: str, scores: int | None = None) -> Problem:
        """Drops heads, then rows, then keys, until the problem is quick to check.

        In the simulator, rows and keys that need repair take the most time. scores: the maximum
        number of scores; None for no maximum.
        """
        is_split, gradients = repairs_rows(self._record(p)), self._operation == "backward"
        most = _MOST_WORK[self.backend.name] // (_SPLIT_PRODUCTS if is_split and gradients else 1)
        if self._is_recomputed(values):
            most //= _RECOMPUTED_SHARE
        elif values not in FINITE:
            most //= 4
        least = 2 if p.operands else 1  # minimum batch size and number of heads
        few_rows = min(_FEW_ROWS, _FEW_OF_GROUP // max(p.group, 1))
        is_repaired = values in _REPAIRED and is_split
        while (
            work_of(p, self._operation) > most
            or (is_repaired and repaired_of(p, self._operation) > _MOST_REPAIRED)
            or (scores and p.heads * p.pairs > scores)
        ):
            if p.batch > least:
                p = transforms.resize(p, batch=least)
            elif p.kv_heads > 1 and p.heads > p.kv_heads:
                p = transforms.resize(p, heads=p.group, kv_heads=1)
            elif p.kv_heads > least:
                p = transforms.resize(p, heads=least, kv_heads=least)
            elif p.group > 2 and not p.operands:
                p = transforms.resize(p, heads=2)
            elif self._lengths or not p.N:
                break
            elif few_rows < p.M and not (p.lengths and p.N > p.M):  # cut the longer side
                p = transforms.resize(p, M=p.M // 2)
            else:
                p = transforms.resize(p, N=p.N // 2)
        return p

    def _with_fewer_tiles(self, p: Problem, tile: Tile) -> Problem:
        """Drops batch elements and heads beyond two while the tiles, when full, are much work.

        A kernel computes all elements of a tile, and gradients take several products of each. The
        largest group keeps its size; what remains is one key head, of one batch element.
        """
        is_much = tile.work_of(p, self._operation) > _MOST_IN_TILES[self.backend.name]
        if is_much and p.group == max(_GROUPED) and not p.operands:
            return transforms.resize(p, batch=1, heads=p.group, kv_heads=1)
        few = [
            ("batch", lambda p: {"batch": 2}),
            ("kv_heads", lambda p: {"heads": 2 * p.group, "kv_heads": 2}),
            ("group", lambda p: {"heads": 2 * p.kv_heads}),
        ]
        for name, sizes in few[: 2 if tile.packs_heads else 3]:
            is_much = tile.work_of(p, self._operation) > _MOST_IN_TILES[self.backend.name]
            if is_much and getattr(p, name) > 2:
                p = transforms.resize(p, **sizes(p))
        return p

    @property
    def _arrays(self) -> dict[str, Any]:
        """Forms of arrays passed by the caller, except sequence lengths."""
        given = (self.arrays or {}).items()
        return {name: x for name, x in given if name != shape_language.LENGTHS_OF}

    def _in_form(self, p: Problem) -> Problem:
        """Applies the caller's forms of arrays, and limits sizes to what these forms allow."""
        given = {x: y for x, y in self._arrays.items() if x != shape_language.BLOCK_MASK}
        if not given or p.is_softmax or self._lengths:
            return p
        return transforms.replace_arrays(p, given)

    def _crowded(self, p: Problem, plan: Plan) -> Problem:
        """Doubles the batch until blocks process several tiles or the work reaches its limit."""
        while p.M and p.N:
            now = choose_kernel.plan(plan.kernel, p, self.backend.limits, **plan.constants)
            most = _MOST_WORK[self.backend.name]
            if is_on_few_blocks(now, self.backend.limits) or 2 * work_of(p, self._operation) > most:
                break
            more = p.lengths and tuple(x.twice for x in p.lengths)
            p = transforms.make_ragged(p, more) if more else transforms.resize(p, batch=2 * p.batch)
        return p

    def _scaled(self, p: Problem, values: str, pick: random.Random) -> Problem:
        """Draws another scale of the same sign that keeps the scores of "huge" values finite."""
        if "scale" in (self.options or {}):
            return p
        size = pick.choice((1.0, pick.uniform(0.02, 0.5)))
        if values == "lowest":
            far = scale_near_the_end(p) if self._operation == "forward" else 1.0
            is_far = pick.random() < (0.5 if far > 1 else 0.25)  # small scores show less
            return p.with_options(scale=math.copysign(far if is_far else 1.0, p.scale))
        if p.options.scale is not None:
            # Only a quarter of the scales are 0, because scores then do not depend on q and k.
            size = 0.02 if values == "huge" else pick.choice((0.0, size, size, size))
            size = size or (0.5 if values in ("nan", "inf") else pick.choice((0.0, _LEAST_SCALE)))
            return p.with_options(scale=-size)
        if values == "huge" or pick.random() < 0.75:
            return p
        has_slopes = self._operation == "forward" and any(x.name == ALIBI for x in p.operands)
        return p.with_options(scale=_LEAST_SCALE if has_slopes and pick.random() < 0.5 else size)


def takes_extreme_scores(kernel: Kernel, p: Problem) -> bool:
    """Returns whether the results of a kernel are defined for values of EXTREME.

    A kernel's own reference need not define results for infinite scores or a rounded lse. Kernels
    that store scores in float16 cannot represent such scores.
    """
    _, kind = kernel.scratch.get("S", (None, "real"))
    return kernel.reference is None and not (kind == "scalar" and p.dtype.name == "float16")


def _loses_small_values(plan: Plan) -> bool:
    """Returns whether a kernel rounds V to e4m3 tile by tile, from a dtype of larger range."""
    wide = ml_dtypes.finfo(plan.problem.dtype.numpy).maxexp > ml_dtypes.finfo("float16").maxexp
    return plan.rounding == "float8_e4m3" and wide


def _without_last_key(p: Problem, keys: int) -> Problem:
    """Returns the problem with a last tile that lacks one of its keys, and with fewer rows for it.

    keys: the number of keys of a tile.
    """
    N = max(round_up(p.N, keys) - 1, 2)
    return transforms.resize(p, M=max(min(p.M, p.M * p.N // N), min(p.M, _LEAST_ROWS)), N=N)


def covers(plan: Plan, limits: Limits) -> dict[str, bool]:
    """Returns which options, and which sizes relative to the plan's constants, a problem covers."""
    p, tile = plan.problem, Tile(plan)
    sizes = list(pairs_of(*p.lengths)) if p.lengths else [(p.M, p.N)]
    lengths = [(M, tile.rows) for M, _ in sizes if tile.rows > 1]
    lengths += [(N, tile.keys) for _, N in sizes if tile.keys > 1]
    return {
        "below a tile": any(0 < length < size for length, size in lengths),
        "a tile's edge": any(
            length and min(length % size, -length % size) <= 1 for length, size in lengths
        ),
        "several tiles": any(length > size for length, size in lengths),
        "beyond the ring": tile.has_ring and tile.is_left(p),
        "several tasks a block": is_on_few_blocks(plan, limits),
        "several splits": splits_of(plan) > 1,
        "several spans": 0 < tile.span < p.N,
        "several rounds": any(plan.rounds_of(x) > 1 for x in plan.programs if x.launch.in_rounds),
        "slices of d": p.d > tile.slice,
        "no rows or keys": any(0 in x for x in sizes),
        "packed heads": any(x.constants.get("pack_gqa", 1) > 1 for x in plan.launches),
        **options_of(p),
        "gradients of arrays": bool(p.wrt),
    }


@dataclass(frozen=True)
class _Turns:
    """Random choices for sample (or group) i.

    Each choice has a name, which is part of its seed, so different choices are independent.
    """

    seed: int
    i: int
    attempt: int = 0

    def random(self, name: str) -> random.Random:
        return random.Random(f"{self.seed} {self.i} {self.attempt} {name}")

    def choose(self, name: str, values: Sequence[Value]) -> Value:
        """Returns one of the values; successive values of i cycle through them in random order."""
        turn, place = divmod(self.i, len(values))
        order = random.Random(f"{self.seed} {turn} {name}").sample(range(len(values)), len(values))
        return values[order[(place + self.attempt) % len(values)]]
