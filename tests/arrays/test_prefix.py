"""Caches with prefixes: shared keys that precede each sequence's own keys.

The reference joins the prefix and a sequence's own keys, and computes dense float64 attention.
"""

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from helpers.far_device import FarDevice
from helpers.merged import expected_causal, merged

import cupyfa
from cupyfa.numerics import tolerance

DTYPES = {"float16": "f2", "bfloat16": ml_dtypes.bfloat16, "float32": "f4", "float64": "f8"}
BATCH, HEADS, KV_HEADS, D, DV, ROOM = 4, 4, 2, 24, 16, 32
LENGTHS = np.array([0, 1, 17, ROOM - 3], "i4")


def drawn(*shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(DTYPES[dtype])


class Case:
    """Sequences of different lengths that follow prefixes.

    prefixes: for each level, the number of prefixes and the number of keys per prefix.
    """

    def __init__(self, dtype="float32", tokens=1, prefixes=((1, 20),), appended=True):
        self.dtype, self.tokens = dtype, tokens
        self.q = drawn(BATCH, HEADS, tokens, D, dtype=dtype)
        self.shared = [
            tuple(drawn(g, KV_HEADS, n, x, dtype=dtype, seed=10 * i + x) for x in (D, DV))
            for i, (g, n) in enumerate(prefixes)
        ]
        own = [drawn(BATCH, ROOM, KV_HEADS, x, dtype=dtype, seed=x) for x in (D, DV)]
        self.lengths = LENGTHS.copy()
        self.used = LENGTHS + tokens if appended else LENGTHS
        self.own = own  # including the tokens to append
        self.given = [np.full_like(x, np.nan) for x in own]
        for b, n in enumerate(LENGTHS):
            for to, x in zip(self.given, own):
                to[b, :n] = x[b, :n]
        self.arrays = *self.given, self.lengths
        self.new = None
        if appended:
            rows = LENGTHS[:, None] + np.arange(tokens)
            at = np.arange(BATCH)[:, None], rows
            self.new = [x[at].swapaxes(1, 2).copy() for x in own]

    def keys_of(self, b):
        """Returns all keys and values of sequence b, [kv_heads, keys, columns].

        Also returns the offset at which each prefix and the sequence's own keys start.
        """
        parts = [[x[b * len(x) // BATCH] for x in pair] for pair in self.shared]
        parts.append([x[b, : self.used[b]].swapaxes(0, 1) for x in self.own])
        starts = np.cumsum([0, *(x[0].shape[1] for x in parts)])
        return (*(np.concatenate(x, axis=1) for x in zip(*parts)), starts)

    def decoded(self, backend, prefix=None, rotary=None, **how):
        given = self.shared if prefix is None else prefix
        cache = cupyfa.KVCache(*self.arrays, layout="bshd", rotary=rotary, prefix=given)
        how = {"return_lse": True, "append": self.new, **how}
        return cupyfa.attention(self.q, cache, backend=backend, **how)

    def require(self, out, lse, **options):
        sink = options.pop("sink", None)
        of_sink = {} if sink is None else {"sink": sink}
        for b in range(BATCH):
            k, v, starts = self.keys_of(b)
            mine = dict(options)
            if "score_mod" in mine:  # the reference computes a single sequence
                mine["score_mod"] = mine["score_mod"].replace("batch", str(b))
            hidden = mine.pop("mask", "True")
            parts = []
            for i, (a, end) in enumerate(pairwise(starts)):
                text = f"({hidden}) and {a} <= key and key < {end}"
                its = of_sink if i == len(self.shared) else {}
                parts.append(expected_causal(self.q[b], k, v, mask_mod=text, **its, **mine))
            whole = expected_causal(self.q[b], k, v, mask_mod=hidden, **of_sink, **mine)
            wanted = merged(parts, whole, self.dtype)
            found = {"O": out[b : b + 1], "lse": lse[b : b + 1]}
            tolerance.require(tolerance.compare(found, wanted), f"sequence {b}")


NESTED = ((1, 20), (2, 9))


@pytest.mark.few(3)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_of_a_prefix_stand_before_those_of_all(backend, dtype, tokens):
    case = Case(dtype, tokens)
    out, lse = case.decoded(backend, case.shared[0], check=True)
    assert out.dtype == case.q.dtype and out.shape == (BATCH, HEADS, tokens, DV)
    case.require(out, lse)


OPTIONS = (
    {},
    {"window": (14, None), "scale": -0.4},
    {"softcap": 3.0, "sink": np.linspace(-1, 1, HEADS, dtype="f4")},
    {"alibi_slopes": np.linspace(0.1, 1, HEADS, dtype="f4"), "mask": "key % 3 != 1"},
    {
        "score_mod": "score + 0.1 * key - 0.2 * position + 0.01 * keys + batch + query * queries",
        "alibi_slopes": np.linspace(0.1, 1, HEADS, dtype="f4"),
    },
)


@pytest.mark.few(2)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda x: "+".join(x) or "none")
def test_options_are_those_of_one_cache(backend, options):
    """With nested prefixes, two sequences share each inner prefix."""
    case = Case(tokens=2, prefixes=NESTED)
    case.require(*case.decoded(backend, check=True, **options), **options)


@pytest.mark.parametrize("new", [False, True], ids=["there already", "appended"])
def test_tokens_may_be_more_than_keys_of_their_own(backend, new):
    """If a sequence has more tokens than keys of its own, its first tokens lie in the prefix."""
    case = Case("float16", tokens=3, prefixes=NESTED, appended=new)
    case.require(*case.decoded(backend, check=True))


@pytest.mark.parametrize("tokens", [1, 2])
def test_positions_go_on_from_the_prefix(backend, tokens):
    """A prefix of rotated keys matches one cache that holds all keys."""
    case = Case(tokens=tokens, prefixes=NESTED)
    quarters = np.random.default_rng(1).integers(0, 4, (80, 5))
    # Multiples of 90° rotate exactly.
    rotary = [np.array(x, "f4")[quarters] for x in ([1, 0, -1, 0], [0, 1, 0, -1])]
    out, lse = case.decoded(backend, rotary=rotary, check=True)
    before = sum(n for _, n in NESTED)

    def turned(x, b):
        at = before + LENGTHS[b] + np.arange(tokens)
        cos, sin = (table[at] for table in rotary)
        return tolerance.expected_rotation(x, cos, sin, interleaved=False, dtype="float32").value

    for b, n in enumerate(LENGTHS):
        case.q[b] = turned(case.q[b], b)
        rows = slice(n, n + tokens)
        case.own[0][b, rows] = turned(case.new[0][b], b).swapaxes(0, 1)
        np.testing.assert_array_equal(case.given[0][b, rows], case.own[0][b, rows])
    case.require(out, lse)
    short = [x[: before + LENGTHS.max()] for x in rotary]
    with pytest.raises(ValueError, match=f"a sequence has {before + LENGTHS.max() + tokens} keys"):
        case.decoded(backend, rotary=short)


def in_pages(k, v, spare=2):
    """Returns a paged cache of k and v [1, kv_heads, up to 32, columns]; unused pages are NaN."""
    table = np.array([[1 + spare, 0]], "i4")
    made = []
    for x in (k, v):
        pages = np.full((2 + spare, 16, *x.shape[1::2]), np.nan, x.dtype)
        rows = np.pad(x[0], ((0, 0), (0, 32 - x.shape[2]), (0, 0))).swapaxes(0, 1)
        pages[table[0]] = rows.reshape(2, 16, *rows.shape[1:])
        made.append(pages)
    return cupyfa.KVCache(*made, np.array([k.shape[2]], "i4"), table, layout="bshd")


@pytest.mark.parametrize("pages", [False, True], ids=["contiguous", "pages"])
def test_a_prefix_may_be_a_cache(backend, pages):
    case = Case("float16", tokens=2)
    ((k, v),) = case.shared
    if pages:
        prefix = in_pages(k, v)
    else:
        room = [np.pad(x, ((0, 0), (0, 0), (0, 7), (0, 0)), constant_values=np.nan) for x in (k, v)]
        prefix = cupyfa.KVCache(*room, np.array([k.shape[2]], "i4"), layout="bhsd")
    options = {"score_mod": "score + 0.1 * key - 0.2 * position"}
    case.require(*case.decoded(backend, prefix, check=True, **options), **options)
    prefix.lengths[0] = 100
    with pytest.raises(ValueError, match=r"prefix: lengths\[0\] is 100.* lengths must be from 0"):
        case.decoded(backend, prefix)


def test_a_prefix_may_lie_in_pages_of_the_same_arrays(backend):
    """Models sequences that begin with pages written by another sequence."""
    case = Case("float16")
    ((k, v),) = case.shared
    arrays, table = [], np.arange(2 * BATCH, dtype="i4").reshape(BATCH, 2)
    for own, x in zip(case.given, (k, v)):
        pages = np.zeros((2 * BATCH + 2, 16, KV_HEADS, x.shape[3]), x.dtype)
        pages[: 2 * BATCH] = own.reshape(2 * BATCH, 16, KV_HEADS, -1)
        pages[2 * BATCH :].reshape(32, KV_HEADS, -1)[: x.shape[2]] = x[0].swapaxes(0, 1)
        arrays.append(pages)
    of_prefix = np.array([k.shape[2]], "i4"), 2 * BATCH + np.array([[0, 1]], "i4")
    prefix = cupyfa.KVCache(*arrays, *of_prefix, layout="bshd")
    case.arrays = *arrays, case.lengths, table
    case.require(*case.decoded(backend, prefix))


def test_prefixes_without_keys_and_many_of_them(backend):
    case = Case("float16", prefixes=((1, 0), (1, 3), (2, 0), (2, 5), (4, 1)))
    case.require(*case.decoded(backend))


@pytest.mark.parametrize("batch, tokens", [(0, 1), (2, 0)])
def test_nothing_to_decode(backend, batch, tokens):
    prefix = tuple(drawn(1, KV_HEADS, 5, x) for x in (D, DV))
    arrays = (drawn(batch, KV_HEADS, 8, x) for x in (D, DV))
    cache = cupyfa.KVCache(*arrays, np.ones(batch, "i4"), prefix=prefix)
    q = drawn(batch, HEADS, tokens, D)
    how = {"return_lse": True, "score_mod": "score + position", "window": (3, 0)}
    out, lse = cupyfa.attention(q, cache, backend=backend, **how)
    assert out.shape == (batch, HEADS, tokens, DV) and lse.shape == (batch, HEADS, tokens)


def test_numpy_arrays_are_copied_to_a_device():
    results = []
    for backend in (FarDevice(), "simulator"):
        case = Case(tokens=2, prefixes=NESTED)
        out = np.empty((BATCH, HEADS, 2, DV), "f4")
        options = {"kernel": "fa2", "score_mod": "score - 0.1 * position"}
        made = case.decoded(backend, out=out, **options)
        assert made[0] is out and type(made[1]) is np.ndarray
        results.append((*made, case.given[0]))
    for one, other in zip(*results):
        np.testing.assert_array_equal(one, other)


def test_the_kernel_is_for_keys_of_their_own(backend):
    case = Case("float16")
    tiles = {"splits": 3, "Br": 16, "Bc": 16, "Wr": 16}
    case.require(*case.decoded(backend, tiles=tiles))
    alone = case.decoded(backend, return_lse=False)
    np.testing.assert_array_equal(alone, case.decoded(backend)[0])


def test_what_is_refused_is_not_begun(backend):
    case = Case("float16")
    before = case.given[0].tobytes()
    with pytest.raises(cupyfa.Unsupported):
        case.decoded(backend, kernel="minimal")
    with pytest.raises(ValueError, match=r"out is float16 \(4, 4, 1, 5\), but the result"):
        case.decoded(backend, out=np.zeros((BATCH, HEADS, 1, 5), "f2"))
    assert case.given[0].tobytes() == before


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS[:2] + OPTIONS[-1:], ids=str)
def test_a_captured_call_takes_other_lengths(cuda, options):
    """Lengths of the cache and of a prefix cache change between replays."""
    import cupy

    case = Case("float16", tokens=2, prefixes=NESTED, appended=False)
    case.lengths[:] = case.used = np.array([2, 3, 17, ROOM], "i4")
    (first, second), most = case.shared, NESTED[0][1]
    outer = cupyfa.KVCache(*map(cupy.asarray, first), cupy.full(1, most, "i4"))
    of = {"layout": "bshd", "prefix": [outer, tuple(map(cupy.asarray, second))]}
    cache = cupyfa.KVCache(*map(cupy.asarray, case.own), cupy.asarray(case.used), **of)
    how = {"return_lse": True}
    how |= {x: cupy.asarray(y) if hasattr(y, "dtype") else y for x, y in options.items()}
    q = cupy.asarray(case.q)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        cupyfa.attention(q, cache, **how)  # compiles, and allocates memory
        stream.begin_capture()
        out, lse = cupyfa.attention(q, cache, **how)
        graph = stream.end_capture()
        # Overwrites free memory with NaN.
        noise = [cupy.full(1 << n, cupy.nan) for n in range(4, 20)]
        for used, n in (([2, 3, 17, ROOM], most), ([5, 2, 30, 2], 7), ([2, 2, 2, 2], 1)):
            cache.lengths[...] = cupy.asarray(used, "i4")
            outer.lengths[...] = n
            graph.launch()
            stream.synchronize()
            case.used = np.array(used, "i4")
            case.shared[0] = tuple(x[:, :, :n] for x in first)
            case.require(out.get(), lse.get(), **options)
        del noise


@pytest.mark.gpu
def test_a_long_prefix_is_read_once(cuda):
    """A shared prefix is at least 8 times as fast as a cache that repeats it per sequence.

    64 sequences share 32,768 keys and have 256 keys of their own.
    """
    import cupy

    batch, shared, own, heads, kv_heads, d = 64, 32768, 256, 32, 8, 128
    random = cupy.random.default_rng(0)

    def filled(*shape):
        return random.standard_normal(shape, cupy.float32).astype("f2")

    q, prefix = filled(batch, heads, 1, d), tuple(filled(1, kv_heads, shared, d) for _ in "kv")
    mine = [filled(batch, kv_heads, own, d) for _ in "kv"]
    cache = cupyfa.KVCache(*mine, cupy.full(batch, own, "i4"), prefix=prefix)
    whole = [cupy.empty((batch, kv_heads, shared + own, d), "f2") for _ in "kv"]
    for to, x, y in zip(whole, prefix, mine):
        to[:, :, :shared], to[:, :, shared:] = x, y
    all_keys = cupyfa.KVCache(*whole, cupy.full(batch, shared + own, "i4"))

    def once():
        return cupyfa.attention(q, cache)

    def by_each():
        return cupyfa.attention(q, all_keys)

    once_ms, by_each_ms = (min(cuda.time(call) for _ in range(10)) for call in (once, by_each))
    assert by_each_ms >= 8 * once_ms, (once_ms, by_each_ms)
