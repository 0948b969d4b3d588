"""Random cases for one kernel, with sizes near those of its tiles, rings and schedule.

A fault often needs a size: a mask's edge at the end of a tile, more keys than a ring of stages has
room for, more tasks than blocks. So lengths are drawn relative to the constants that the kernel is
compiled with. All choices take turns, so that few samples have each of them. The first sample is
plain: contiguous arrays of normal values, several tiles, no mask or other options, a usual head
dimension. From the ninth group of samples on, the first two of eight are ragged batches.
"""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, TypeVar

from cupyfa import forms
from cupyfa.dtypes import DTYPES, INPUTS
from cupyfa.errors import Unsupported
from cupyfa.ladder.common import WARP
from cupyfa.ladder.kernel import FEATURES, Kernel
from cupyfa.ladder.tiles import TILE_KEYS, TILE_ROWS
from cupyfa.modifiers import ALIBI, BIAS, DLSE, MAPS, MASK, SEEDS, SINK
from cupyfa.options import OPTIONS, Window
from cupyfa.planner import select
from cupyfa.planner.plan import Limits, Plan
from cupyfa.problem import TEXTS, Problem, can_give
from cupyfa.runtime.backend import Backend
from cupyfa.verify.case import LAYOUTS, VALUES, Case
from cupyfa.verify.tasks import refuse_long

Value = TypeVar("Value")

# Texts and arrays that change scores are in the last of eight groups, dropout in one of these:
# plain ones find most faults.
_PLAIN_OF_8 = 6
MODIFIED: tuple[Mapping[str, Any], ...] = (
    {"alibi_slopes": "h"},
    {"alibi_slopes": "bh", "mask": "b11n"},
    {"bias": "1hmn", "sink": "f16[h]"},
    {"bias": "f16[11mn]", "mask": "1h1n"},
    {"bias": "f32[bhm1]", "alibi_slopes": "bf16[h]"},
    {"bias": "b1mn", "mask_mod": "key <= position + 3"},
    {"mask": "bhmn", "sink": "bh"},
    {"score_mod": "score + slope[head] * (key - query)", "captured": {"slope": "f32[heads]"}},
    {"score_mod": "score + table[head, min(abs(position - key) // 4, 15)]"}  # T5's buckets
    | {"captured": {"table": "f32[heads,16]"}},
    {"score_mod": "cap * tanh(score / cap) + 0.1 * sin(key)", "captured": {"cap": 4.0}},
    {"score_mod": "max(score, -1.5) * x[head]", "captured": {"x": "f16[heads]"}},
    {"score_mod": "score if seen[batch, key] else score - 2"}
    | {"captured": {"seen": "bool[batch,N]"}},
    {"mask_mod": "doc[query] == doc[key]", "captured": {"doc": "i32[M|N]"}},
    {"mask_mod": "key <= position or key < prefix[batch]", "captured": {"prefix": "i64[batch]"}},
    {"mask_mod": "(position - key) % 2 == 0 or abs(position - key) < 8"},
    {"bias": "bf16[1hmn]", "mask": "b1mn", "alibi_slopes": "h"}
    | {"score_mod": "score + table[doc[key], head]", "mask_mod": "doc[query] <= doc[key]"}
    | {"captured": {"table": "f64[3,heads]", "doc": "u8[M|N]"}},
)

# Ragged batches are in the first two of eight groups, but not in the first eight. Those of the
# second of the two have these texts and arrays, those of the first have a causal mask.
_RAGGED_OF_8 = 2
OF_SEQUENCES: tuple[Mapping[str, Any], ...] = (
    {},
    *(x for x in MODIFIED if not x.keys() & {BIAS, MASK}),
)

SAMPLES = {"simulator": 40, "cuda": 200}  # by default
TOGETHER = 4  # successive samples that share what is compiled
_MOST_WORK = {"simulator": 2**26, "cuda": 2**29}  # multiply-adds of a case
_ATTEMPTS = 8  # at a sample that kernel and backend can run
_STAGES = ("stages", "Qs")  # names of constants
_BOX = 64  # columns of a slice of d that is copied by boxes
# Queries and keys of successive samples. "many" is more of them than the kernel does at once.
_LENGTHS = (("below", "edge"), ("edge", "beyond"), ("beyond", "below"), ("many", "many"))
_PLAIN_LENGTHS = ("beyond", "beyond")
_HEADS = (
    (1, 1, 1),
    (2, 2, 2),
    (1, 3, 1),
    (3, 1, 2),
    (1, 2, 5),
    (2, 1, 1),
)  # batch, kv_heads, group
_DIMS = ("odd", 64, "edge", "usual", 128, "wide")
_USUAL_DIMS = (8, 16, 32, 48, 80, 96, 112, 144, 160, 192, 208, 256)
_PLAIN_DIM = 64
_WIDEST = 640  # of kernels for any head dimension
_MASKS = (None, "bottom-right", None, "top-left")
_SIDES = ("neither", "both", "neither", "left", "neither", "right")
_USED = (False, True)  # whether seqused of q and k is given
_ROWS_OF_SEQUENCES = (  # kinds of lengths of queries and keys; the first is always there
    *(("edge", "beyond"), ("beyond", "edge"), ("below", "edge"), ("none", "below")),
    *(("edge", "none"), ("one", "one"), ("below", "below")),
)
_SEEDS = ("i64[1]", "u64[1]", "i32[1]", "u32[1]")
_FEW_ROWS = 48
_EMPTY = 0.03  # the share of lengths that are 0
_NEAR = tuple(layout for layout in LAYOUTS if layout != "far")
_VALUES = ("normal", "normal", *VALUES)


@dataclass(frozen=True)
class Drawn:
    """A case, the kernel it is for, and the constants that its sizes were drawn for."""

    case: Case
    kernel: Kernel
    constants: Mapping[str, int]


@dataclass(frozen=True)
class Fuzz:
    """Draws cases for a kernel, or for what "auto" chooses if it is None.

    Sample i of a seed does not depend on the other samples. dtypes, options of attention and arrays
    (their forms) replace the drawn ones; sizes are such that every index is inside its array.
    """

    kernel: Kernel | None
    backend: Backend
    seed: int = 0
    dtypes: Sequence[str] | None = None
    options: Mapping[str, Any] | None = None
    arrays: Mapping[str, Any] | None = None

    def sample(self, i: int) -> Drawn:
        """One sample; one that the kernel refuses only if no attempt finds another."""
        for attempt in range(_ATTEMPTS):
            pick = random.Random(f"{self.seed} {i} {attempt}")
            try:
                drawn = self._drawn(_Turns(self.seed, i // TOGETHER, attempt), i, pick)
                select.plan(drawn.kernel, drawn.case.problem, self._limits, **drawn.constants)
                refuse_long(self.backend, drawn.case.problem)
                return drawn
            except Unsupported:
                continue
            except ValueError:  # a mistake in the record
                break
        return self._plain(i)

    @property
    def _limits(self) -> Limits:
        return self.backend.limits

    @cached_property
    def _planned(self) -> dict[Any, Plan]:
        """The plans of the last group, of which each is asked for several times."""
        return {}

    def _plan(self, record: Kernel, p: Problem, constants: Mapping[str, int]) -> Plan:
        key = record.name, p, tuple(sorted(constants.items()))
        if key not in self._planned:
            made = select.plan(record, p, self._limits, **constants)
            if len(self._planned) > TOGETHER:
                self._planned.clear()
            self._planned[key] = made
            self._planned[record.name, p, tuple(sorted(made.constants.items()))] = made
        return self._planned[key]

    @cached_property
    def _operation(self) -> str:
        return self.kernel.operation if self.kernel else "forward"

    @cached_property
    def _dtypes(self) -> list[str]:
        taken = [x for x in self.dtypes or DTYPES if not self.kernel or self.kernel.takes(x)]
        return taken or list(self.dtypes or DTYPES)

    @property
    def _most_dims(self) -> int:
        return (self.kernel and self.kernel.largest_d) or _WIDEST

    def _record(self, p: Problem) -> Kernel:
        return self.kernel or select.select("auto", self._operation, p, self._limits)

    def _has(self, feature: str) -> bool:
        return feature in (self.kernel.features if self.kernel else FEATURES)

    @cached_property
    def _lengths(self) -> forms.Packed | None:
        """The lengths of sequences that replace drawn ones."""
        given = (self.arrays or {}).get(forms.LENGTHS_OF)
        return None if given is None else forms.lengths_of(given)

    def _is_ragged(self, turns: "_Turns") -> bool:
        """Whether a group is of ragged batches: by its number, or since lengths are given."""
        if self._lengths:
            return True
        of_turn = turns.i >= 8 and turns.i % 8 < _RAGGED_OF_8
        refused = {BIAS, MASK, forms.BLOCK_MASK, forms.WRT, forms.PAGE_SIZE}
        given = refused & {*(self.arrays or {})}
        return of_turn and not given and self._operation != "softmax" and self._has("ragged")

    def _has_texts(self, turns: "_Turns") -> bool:
        """Whether texts, arrays and dropout are drawn for a group."""
        return turns.i % 8 >= _PLAIN_OF_8 or (self._is_ragged(turns) and turns.i % 2 == 1)

    def _drawn(self, turns: "_Turns", i: int, pick: random.Random) -> Drawn:
        """A sample: what is compiled takes turns from group to group, the rest in each sample."""
        is_plain = i == turns.attempt == 0
        compiled = self._compiled(turns, is_plain)
        record = self._record(compiled)
        constants = self._constants(record, compiled, turns)
        plan = self._plan(record, compiled, constants)
        each = _Turns(self.seed, i, turns.attempt)
        values = "normal" if is_plain else each.choose("values", _VALUES)
        lengths = _PLAIN_LENGTHS if is_plain else each.choose("lengths", _LENGTHS)
        problem = self._sized(compiled, plan, each, pick, values, lengths)
        if not problem.is_softmax:
            problem = self._scaled(problem, values, pick)
        layout = _NEAR[0] if is_plain else each.choose("layout", _NEAR)
        case = Case(self._operation, problem, pick.randrange(2**31), values, layout)
        if self.kernel is None:  # other sizes, another choice
            record = self._record(problem)
            constants = {}
        return Drawn(case, record, constants)

    def _plain(self, i: int) -> Drawn:
        """A sample for a kernel whose tiles are not known; running it gives the reason."""
        turns = _Turns(self.seed, i // TOGETHER)
        p = self._problem(turns).resized(M=i + 1, N=i + 2)
        p = self._in_form(p)
        return Drawn(Case(self._operation, p, i), self._record(p), {})

    def _compiled(self, turns: "_Turns", is_plain: bool) -> Problem:
        """The problem of a group with head dimensions for which the kernel has a plan."""
        problem = self._problem(turns, is_plain)
        for _ in range(6):
            try:
                self._plan(self._record(problem), problem, {})
                break
            except Unsupported:
                problem = replace(problem, d=-(-problem.d // 2), dv=-(-problem.dv // 2))
        return problem

    def _problem(self, turns: "_Turns", is_plain: bool = False) -> Problem:
        """A problem of a usual size with the dtype, head dimensions and options of a group."""
        dtype = self._dtype(turns)
        few = turns.choose("tiles", ("many", "many", "few")) == "few" and not is_plain
        M, N = (5, 1100) if few else (1024, 1024)
        if self._operation == "softmax":
            return Problem.of_row_sizes(M, N, dtype)
        if is_plain:
            d, given = min(_PLAIN_DIM, self._most_dims), dict(self.options or {})
            arrays = self._arrays
            p = Problem.of_sizes(M=M, N=N, heads=16, dtype=dtype, d=d, **given, **arrays)
            return p.ragged(self._lengths) if self._lengths else p
        d = self._dim(turns, "d")
        other = turns.choose("other dv", (False, False, False, True)) and self._has("dv")
        dv = self._dim(turns, "dv") if other else d
        sizes: dict[str, Any] = {"M": M, "N": N, "heads": 2 if few else 16, "dtype": dtype}
        given = self._modified(turns) | self._options(turns)
        sizes |= {"batch": 2} if given.keys() & {*TEXTS, *forms.NAMES} else {}  # 1 is no broadcast
        given = {DLSE: self._has_dlse(turns)} | given
        p = Problem.of_sizes(**sizes, d=d, dv=dv, **given)
        if self._is_ragged(turns):
            return p.ragged(self._lengths or _some_lengths(turns.choose("used", _USED)))
        if self.arrays:
            return p
        p = p.in_blocks(p.has_mask and turns.choose("block mask", (True, False)))
        return self._differentiated(p, turns)

    def _differentiated(self, p: Problem, turns: "_Turns") -> Problem:
        """The problem with the gradients of some of its arrays, where the kernel gives such."""
        able = [x.name for x in p.operands if x.is_differentiable]
        if self._operation != "backward" or not self._has("wrt") or not able:
            return p
        some = turns.random("wrt itself").sample(able, len(able) // 2)
        return p.with_wrt(turns.choose("wrt", (able, able, some)))

    def _has_dlse(self, turns: "_Turns") -> bool:
        """Whether the gradient of lse is given, in half of the groups that have texts."""
        if self._operation != "backward" or not self._has(DLSE) or self._arrays:
            return False
        return self._has_texts(turns) and turns.choose(DLSE, (True, False))

    def _modified(self, turns: "_Turns") -> dict[str, Any]:
        """Texts and arrays that change scores: those given, or of the last groups drawn ones."""
        given = self.options or {}
        if self._arrays or any(name in given for name in TEXTS):
            return self._arrays
        if not self._has_texts(turns) or not self._has("places"):
            return {}
        if self._is_ragged(turns):
            return dict(turns.choose("text of sequences", OF_SEQUENCES))
        of = self.kernel.name if self.kernel else ""  # other kernels have other texts
        return dict(turns.choose(f"text {of}", MODIFIED))

    def _dim(self, turns: "_Turns", name: str) -> int:
        """A head dimension: mostly small and odd, or one that models use, or a large one."""
        kind, pick = turns.choose(name, _DIMS), turns.random(f"{name} itself")
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

    def _dtype(self, turns: "_Turns") -> str:
        return turns.choose("dtype", self._dtypes)

    def _options(self, turns: "_Turns") -> dict[str, Any]:
        """Mask, sides of the window and other options of a group; sizes are drawn later."""
        is_plain = self._is_ragged(turns) and not self._has_texts(turns)
        masks = [x for x in _MASKS if x] if is_plain else _MASKS
        causal = turns.choose("causal", self._able("causal", masks))
        sides = turns.choose("sides", _SIDES)
        window = tuple(1 if sides in (side, "both") else None for side in ("left", "right"))
        window = window if self._able("window", (window,)) else (None, None)
        sign = -1.0 if turns.choose("sign", (1, 1, 1, -1)) < 0 and not is_plain else None
        found = {"causal": causal, "window": window, "scale": sign}
        for name in other_options():
            option = OPTIONS[name]
            tried = self._able(name, option.tried)
            found[name] = turns.choose(name, [option.default] * (3 * len(tried) or 1) + tried)
        found["out_dtype"] = self._out_dtype(turns)
        return found | self._dropout(turns) | dict(self.options or {})

    def _out_dtype(self, turns: "_Turns") -> str | None:
        """float32 of some groups with 16-bit inputs."""
        dtype = INPUTS[self._dtype(turns)]
        able = self._able("out_dtype", OPTIONS["out_dtype"].tried)
        tried = [x for x in able if can_give(x, dtype)]
        return turns.choose("out_dtype", (None, None, None, *tried))

    def _dropout(self, turns: "_Turns") -> dict[str, Any]:
        """Dropout of a group, if it has any: its seed and offset, each a number or in memory."""
        pick = turns.random("dropout itself")
        tried = self._able("dropout", (0.0, pick.choice((0.05, 0.5))))
        if not self._has_texts(turns) or not turns.choose("dropout", tried):
            return {}
        seeds: dict[str, Any] = {
            "dropout_seed": pick.randrange(2**64),
            "dropout_offset": pick.randrange(2**32),
        }
        forms_of = turns.random("seeds in memory").sample(_SEEDS, len(SEEDS))
        in_memory = turns.choose("seeds in memory", ((), SEEDS, (), SEEDS[:1]))
        seeds |= {name: form for name, form in zip(SEEDS, forms_of) if name in in_memory}
        return {"dropout": tried[-1], **seeds}

    def _able(self, name: str, values: Sequence[Any]) -> list[Any]:
        """The values of an option for which the kernel has the features."""
        features = OPTIONS[name].features.items()
        return [
            x for x in values if all(self._has(what) or not needs(x) for what, needs in features)
        ]

    def _constants(self, record: Kernel, p: Problem, turns: "_Turns") -> Mapping[str, int]:
        """The plan's own constants; with little room, where the kernel works in rounds."""
        constants = dict(self._plan(record, p, {}).constants)
        if "room" in constants and turns.choose("room", (True, False)):
            constants["room"] = turns.random("room itself").randrange(2, 9)
        return constants

    def _sized(
        self,
        p: Problem,
        plan: Plan,
        each: "_Turns",
        pick: random.Random,
        values: str,
        lengths: tuple[str, str],
    ) -> Problem:
        """A problem with other lengths, heads and limits of the window, for the tiles of a plan."""
        tile, (of_rows, of_keys) = _Tile(plan), lengths
        M = tile.length(of_rows, tile.rows, tile.row_stages, pick)
        N = tile.length(of_keys, tile.keys, tile.stages, pick)
        if p.is_softmax:
            return Problem.of_row_sizes(min(M, 2**21 // max(N, 1)), N, p.dtype.name)
        batch, kv_heads, group = each.choose("heads", _HEADS)
        if values in ("nan", "inf"):  # what computes rows again finds its heads on its own
            batch, kv_heads, group = 2, 2, 2
        group = group if self._has("gqa") else 1
        if of_rows == "many" and tile.has_splits:  # few row tiles, whose keys are shared out
            batch, kv_heads, M = 1, 1, tile.length("below", tile.rows, 1, pick)
        heads: dict[str, Any] = {"heads": kv_heads * group, "kv_heads": kv_heads}
        if p.lengths:
            of = p.lengths if self._lengths else _lengths(tile, p.lengths, pick)
            p = p.ragged(of, **heads)
        else:
            p = p.resized(batch=batch, M=M, N=N, **heads)
        p = self._smaller(p)
        if of_rows == "many" and _on_few_blocks(plan, self._limits):
            p = self._crowded(p, plan)
        p = self._in_form(p)
        given = (self.options or {}).keys()
        if "window" not in given and p.window != (None, None):
            sides = (side is not None for side in p.window)
            p = p.with_options(window=_window(sides, _longest(p), tile.keys, pick))
        return p if "offset" in given else self._moved(p, each)

    def _moved(self, p: Problem, each: "_Turns") -> Problem:
        """The problem with an offset of its mask, in some samples: anywhere in reach of a key."""
        if not p.is_masked or p.causal == "top-left" or p.is_ragged:
            return p
        if not each.choose("offset", (False,) * 7 + (True,)):
            return p
        return p.with_options(offset=each.random("offset itself").randint(-p.M, p.N + 1))

    def _smaller(self, p: Problem) -> Problem:
        """The problem with fewer heads, then rows, then keys, if it takes long."""
        most = _MOST_WORK[self.backend.name]
        while _work(p) > most:
            if p.batch > 1:
                p = p.resized(batch=1)
            elif p.kv_heads > 1:
                p = p.resized(heads=p.group, kv_heads=1)
            elif p.group > 2:
                p = p.resized(heads=2)
            elif self._lengths:
                break
            else:
                p = p.resized(M=p.M // 2) if p.M > _FEW_ROWS else p.resized(N=p.N // 2)
        return p

    @property
    def _arrays(self) -> dict[str, Any]:
        """The forms that replace drawn ones, without the lengths of sequences."""
        given = (self.arrays or {}).items()
        return {name: x for name, x in given if name != forms.LENGTHS_OF}

    def _in_form(self, p: Problem) -> Problem:
        """The problem with the given forms of arrays, and with sizes for which they suffice."""
        given = {x: y for x, y in self._arrays.items() if x != forms.BLOCK_MASK}
        return p.with_arrays(given) if given and not (p.is_softmax or self._lengths) else p

    def _crowded(self, p: Problem, plan: Plan) -> Problem:
        """The problem with so many batch elements that blocks have several tasks, if it may be."""
        while p.M and p.N:
            now = select.plan(plan.kernel, p, self._limits, **plan.constants)
            if _on_few_blocks(now, self._limits) or 2 * _work(p) > _MOST_WORK[self.backend.name]:
                break
            more = p.lengths and tuple(x.twice for x in p.lengths)
            p = p.ragged(more) if more else p.resized(batch=2 * p.batch)
        return p

    def _scaled(self, p: Problem, values: str, pick: random.Random) -> Problem:
        """The problem with another scale of the same sign; scores of "huge" stay finite."""
        if "scale" in (self.options or {}):
            return p
        size = pick.choice((1.0, pick.uniform(0.02, 0.5)))
        if p.options.scale is not None:
            size = 0.02 if values == "huge" else pick.choice((0.0, size))
            return p.with_options(scale=-size)
        return p if values == "huge" or pick.random() < 0.75 else p.with_options(scale=size)


def covers(plan: Plan, limits: Limits) -> dict[str, bool]:
    """What a problem covers of its kernel: sizes relative to the constants of its plan, options."""
    p, tile = plan.problem, _Tile(plan)
    arrays = {x.name for x in p.operands}
    sizes = list(forms.pairs_of(*p.lengths)) if p.lengths else [(p.M, p.N)]
    lengths = [(M, tile.rows) for M, _ in sizes if tile.rows > 1]
    lengths += [(N, tile.keys) for _, N in sizes if tile.keys > 1]
    return {
        "below a tile": any(0 < length < size for length, size in lengths),
        "a tile's edge": any(
            length and min(length % size, -length % size) <= 1 for length, size in lengths
        ),
        "several tiles": any(length > size for length, size in lengths),
        "beyond the ring": tile.has_ring and tile.is_left(p),
        "several tasks a block": _on_few_blocks(plan, limits),
        "several splits": _splits(plan) > 1,
        "several spans": 0 < tile.span < p.N,
        "several rounds": any(plan.rounds_of(x) > 1 for x in plan.programs if x.launch.in_rounds),
        "slices of d": p.d > tile.slice,
        "no rows or keys": any(0 in x for x in sizes),
        "sequences": p.lengths is not None,
        "mask": p.right is not None,
        "window": p.left is not None,
        "offset": p.offset is not None,
        "float32 results": p.out_dtype != p.dtype,
        "GQA": p.group > 1,
        "packed heads": any(x.constants.get("pack_gqa", 1) > 1 for x in plan.launches),
        **{name: name in p.options.changed for name in (*other_options(), *TEXTS)},
        "ALiBi": ALIBI in arrays,
        "bias": BIAS in arrays,
        "mask array": MASK in arrays,
        "block mask": bool(arrays & {*MAPS}),
        "sink": SINK in arrays,
        "dropout": p.options.dropout > 0,
        "seed in memory": bool(arrays & {*SEEDS}),
        "gradient of lse": DLSE in arrays,
        "gradients of arrays": bool(p.wrt),
    }


def other_options() -> list[str]:
    """The options with values to try, besides those that grids have as axes of their own."""
    own = ("causal", "window", "scale", "out_dtype")
    return [name for name, option in OPTIONS.items() if option.tried and name not in own]


@dataclass(frozen=True)
class _Turns:
    """Choices for the turn i of a seed, each by its name and independent of the others."""

    seed: int
    i: int
    attempt: int = 0

    def random(self, name: str) -> random.Random:
        return random.Random(f"{self.seed} {self.i} {self.attempt} {name}")

    def choose(self, name: str, values: Sequence[Value]) -> Value:
        """The value whose turn it is: as many turns as there are values have each value once."""
        turn, place = divmod(self.i, len(values))
        order = random.Random(f"{self.seed} {turn} {name}").sample(range(len(values)), len(values))
        return values[order[(place + self.attempt) % len(values)]]


class _Tile:
    """The sizes of a plan that decide what a length covers."""

    def __init__(self, plan: Plan) -> None:
        constants = plan.constants
        # Without tiles of keys, those that a warp or a block takes at a time.
        threads = max((x.threads for x in plan.launches), default=1)
        at_a_time = WARP if any(name in constants for name in TILE_ROWS) else threads
        self.rows = max((constants[x] for x in TILE_ROWS if x in constants), default=1)
        self.keys = max((constants[x] for x in TILE_KEYS if x in constants), default=at_a_time)
        self.has_ring = any(x in constants for x in _STAGES)
        self.stages = max((constants[x] for x in _STAGES if x in constants), default=2)
        self.row_stages = self.stages if plan.kernel.operation == "backward" else 1
        self.span = constants.get("span", 0)
        boxed = any(x.boxes for x in plan.launches)
        is_sliced = plan.kernel.largest_d is None and (boxed or "Bd" in constants)
        self.slice = constants.get("Bd", _BOX) if is_sliced else math.inf
        self.has_splits = any("num_splits" in x.numbers for x in plan.launches)

    def is_left(self, p: Problem) -> bool:
        """Whether there are more keys, or rows of gradients, than stages hold at once."""
        rows = self.row_stages * self.rows
        return self.stages * self.keys < p.N or (self.row_stages > 1 and rows < p.M)

    def length(self, kind: str, size: int, stages: int, pick: random.Random) -> int:
        """A number of rows or keys of a kind, for tiles of a size."""
        if pick.random() < _EMPTY:
            return 0
        if kind == "below":  # a small part of a tile as often as a large one
            return min(int(math.exp(pick.uniform(0, math.log(max(size, 2))))), max(size - 1, 1))
        if kind == "edge":
            return max(
                size * pick.randrange(1, max(96 // size, 2) + 1) + pick.choice((-1, 0, 1)), 1
            )
        least = max(size * stages, self.span if kind == "many" and size == self.keys else 0)
        return least + pick.randrange(1, 2 * size + 32)


def _splits(plan: Plan) -> int:
    return max((x.numbers.get("num_splits", 1) for x in plan.launches), default=1)


def _on_few_blocks(plan: Plan, limits: Limits) -> bool:
    """Whether a launch would have more blocks on a device with more multiprocessors."""
    many = replace(limits, multiprocessors=2**20)
    fixed = SimpleNamespace(**plan.constants, multiprocessors=many.multiprocessors, round=0)
    for x in plan.launches:
        if x.launch.in_rounds or "num_splits" in x.numbers:
            continue
        blocks = x.launch.grid(plan.problem, fixed)
        if math.prod(blocks if isinstance(blocks, Sequence) else (blocks,)) > math.prod(x.grid):
            return True
    return False


def _work(p: Problem) -> int:
    return p.heads * p.pairs * (p.d + p.dv)


def _longest(p: Problem) -> int:
    """The most keys that a query may see."""
    return max(p.lengths[1].counts) if p.lengths else p.N


def _some_lengths(used: bool) -> forms.Packed:
    """Lengths in whose place others are drawn, with seqused or without."""
    one = forms.Lengths((64, 64), (64, 64) if used else None)
    return one, one


def _lengths(tile: "_Tile", like: forms.Packed, pick: random.Random) -> forms.Packed:
    """Sequences without rows, with one, near a tile and with several; and rows of no sequence."""
    kinds = [_ROWS_OF_SEQUENCES[0], *pick.sample(_ROWS_OF_SEQUENCES[1:], pick.randrange(1, 6))]
    pick.shuffle(kinds)

    def drawn(of: Sequence[str], size: int, is_used: bool) -> forms.Lengths:
        fixed = {"none": 0, "one": 1}
        rows = [fixed[x] if x in fixed else tile.length(x, size, 1, pick) for x in of]
        used = tuple(pick.choice((n, n // 2, n)) for n in rows) if is_used else None
        before, after = (pick.choice((0, 0, 1, size + 1)) for _ in range(2))
        return forms.Lengths(tuple(rows), used, before, after)

    sizes, used = (tile.rows, tile.keys), (x.used is not None for x in like)
    q, k = (drawn(*x) for x in zip(zip(*kinds), sizes, used))
    return q, k


def _window(limited: Iterable[bool], N: int, keys: int, pick: random.Random) -> Window:
    """Limits of 0 to N keys, uniform in their logarithm, or at the edge of a tile."""

    def side() -> int:
        if keys <= N and pick.random() < 0.3:
            return keys * pick.randrange(1, N // keys + 1) - pick.choice((0, 1))
        return round(math.exp(pick.uniform(0, math.log(N + 1)))) - 1

    left, right = (side() if has else None for has in limited)
    return left, right
