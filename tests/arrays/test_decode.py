"""Attention of new tokens to a contiguous or paged cache of keys and values.

Unused cache rows are NaN. The reference gathers each sequence's keys in a loop and computes dense
float64 attention.
"""

import ml_dtypes
import numpy as np
import pytest
from helpers.far_device import FarDevice
from helpers.merged import expected_causal
from helpers.problems import FORWARD

import cupyfa
from cupyfa import Rotary
from cupyfa.arrays import kv_cache
from cupyfa.lab.analysis.resources import limits_of
from cupyfa.ladder.forward import for_decoding
from cupyfa.numerics import tolerance
from cupyfa.planner import choose_kernel as planning
from cupyfa.problem.problem import Problem

DTYPES = {"float16": "f2", "bfloat16": ml_dtypes.bfloat16, "float32": "f4", "float64": "f8"}
SIZE, MOST, SPARE = 16, 4, 3  # page size, pages per sequence, unused pages
N = SIZE * MOST
BATCH, HEADS, KV_HEADS, D, DV = 6, 4, 2, 24, 16
LENGTHS = np.array([0, 1, SIZE - 1, SIZE, SIZE + 1, N], "i4")
SMALL = {"Br": 16, "Bc": 32, "Wr": 16, "stages": 2}  # two pages per tile of keys
RNG = np.random.default_rng(3)


def drawn(shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(DTYPES[dtype])


def laid_out(array, layout):
    return array.copy() if layout == "bshd" else np.ascontiguousarray(array.swapaxes(1, 2))


def cache_of(
    k, v, lengths=LENGTHS, *, pages=False, layout="bshd", size=SIZE, table=None, rotary=None
):
    """Makes a cache that holds the first lengths[b] rows of k and v; all other rows are NaN.

    k and v are [batch, rows, kv_heads, columns].
    """
    batch, rows = k.shape[:2]
    how = {"layout": layout, "rotary": rotary}
    if not pages:
        made = [np.full_like(x, np.nan) for x in (k, v)]
        for to, x in zip(made, (k, v)):
            for b, n in enumerate(lengths):
                to[b, :n] = x[b, :n]
        return cupyfa.KVCache(*(laid_out(x, layout) for x in made), lengths.copy(), **how)
    most = rows // size
    if table is None:
        table = np.random.default_rng(5).permutation(batch * most + SPARE)[: batch * most]
        table = table.reshape(batch, most).astype("i4")
    count = batch * most + SPARE
    made = [np.full((count, size, *x.shape[2:]), np.nan, x.dtype) for x in (k, v)]
    for to, x in zip(made, (k, v)):
        for b, n in enumerate(lengths):
            for j in range(n):
                to[table[b, j // size], j % size] = x[b, j]
    table = table.copy()
    for b, n in enumerate(lengths):  # unused entries hold invalid page indices
        table[b, -(-int(n) // size) :] = -7 if b % 2 else 2**30
    return cupyfa.KVCache(*(laid_out(x, layout) for x in made), lengths.copy(), table, **how)


def require(out, lse, q, k, v, lengths, **options):
    """Raises if results differ from attention over the first lengths[b] rows of k and v."""
    for b, n in enumerate(lengths):
        keys, values = (x[b, :n].swapaxes(0, 1) for x in (k, v))
        wanted = expected_causal(q[b], keys, values, **options)
        found = {"O": out[b : b + 1], "lse": lse[b : b + 1]}
        tolerance.require(tolerance.compare(found, wanted), f"sequence {b} of {n} keys")


def given(dtype, tokens=1, heads=HEADS, kv_heads=KV_HEADS, d=D, dv=DV, rows=N, batch=BATCH):
    q = drawn((batch, heads, tokens, d), dtype)
    k, v = (drawn((batch, rows, kv_heads, x), dtype, seed=x) for x in (d, dv))
    return q, k, v


def decoded(backend, q, cache, **how):
    return cupyfa.attention(q, cache, backend=backend, return_lse=True, **how)


# Kernels, dtypes and layouts


KERNELS = [
    ("mma_split_kv", "float16", SMALL),
    ("mma_split_kv", "bfloat16", {**SMALL, "Bc": 16}),
    ("fa2", "float32", {"Br": 8, "Bc": 8}),
    ("fa2_coalesced", "float64", {"Br": 8, "Bc": 8}),
    ("fa2_split_kv", "float32", {"Br": 4, "Bc": 16, "blocks_per_sm": 4}),
    ("fa2_split_kv", "float64", {"Br": 8, "Bc": 8, "blocks_per_sm": 1}),
    ("wgmma_slices", "bfloat16", {"Br": 128, "Bc": 64, "span": 64, "stages": 2}),
]


def able_or_skip(kernel, backend, dtype="float16"):
    if not planning.can(FORWARD[kernel], Problem.of_sizes(M=1, d=D, dtype=dtype), backend.limits):
        pytest.skip(f"{kernel} cannot run on {backend.limits.device}")


@pytest.mark.parametrize("pages", [False, True], ids=["contiguous", "pages"])
@pytest.mark.parametrize("kernel, dtype, tiles", KERNELS)
def test_each_sequence_has_its_own_keys(backend, kernel, dtype, tiles, pages):
    able_or_skip(kernel, backend, dtype)
    q, k, v = given(dtype, tokens=3)
    for layout in ("bshd", "bhsd"):
        cache = cache_of(k, v, pages=pages, layout=layout)
        how = {"kernel": kernel, "tiles": tiles, "check": True}
        out, lse = decoded(backend, q, cache, **how)
        require(out, lse, q, k, v, LENGTHS)
        assert out.dtype == q.dtype
        assert (out[0] == 0).all() and (lse[0] == -np.inf).all()
        # Two queries precede the only key.
        assert (out[1, :, :2] == 0).all() and (lse[1, :, :2] == -np.inf).all()


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize("size", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("d", [24, 64, 96, 128])
def test_pages_of_all_sizes(backend, size, d):
    """Covers pages smaller and larger than a tile of keys.

    The values of d cover every stride between the rows that one thread loads.
    """
    lengths = np.array([1, size - 1, size + 1, 2 * size], "i4")
    q, k, v = given("float16", rows=2 * size, batch=4, d=d, dv=d)
    cache = cache_of(k, v, lengths, pages=True, size=size)
    for tiles in ({}, {"Bc": 48, "Br": 32, "Wr": 16, "stages": 2}, {**SMALL, "Bc": 16}):
        out, lse = decoded(backend, q, cache, kernel="mma_split_kv", tiles=tiles)
        require(out, lse, q, k, v, lengths)


@pytest.mark.parametrize(
    "dtype, splits",
    [
        *(("float16", 1), ("float16", 3), ("float32", 1), ("float32", 3)),
        pytest.param("float64", 5, marks=pytest.mark.slow),
    ],
)
def test_the_bits_of_a_sequence_do_not_depend_on_the_batch(backend, dtype, splits):
    q, k, v = given(dtype)
    for pages in (False, True):
        cache = cache_of(k, v, pages=pages)
        how = {"tiles": {"splits": splits}}
        out, lse = decoded(backend, q, cache, **how)
        require(out, lse, q, k, v, LENGTHS)
        for b in (2, 5):
            one = slice(b, b + 1)
            its = cache_of(k[one], v[one], LENGTHS[one], pages=pages)
            alone = decoded(backend, q[one], its, **how)
            assert alone[0].tobytes() == out[one].tobytes()
            assert alone[1].tobytes() == lse[one].tobytes()


def test_sequences_may_share_pages(backend):
    q, k, v = given("float16", batch=2)
    k[1], v[1] = k[0], v[0]
    table = np.array([[3, 1, 0, 4], [3, 1, 0, 2]], "i4")
    lengths = np.array([N - 1, 2 * SIZE + 3], "i4")
    cache = cache_of(k, v, lengths, pages=True, table=table)
    out, lse = decoded(backend, q, cache, check=True)
    require(out, lse, q, k, v, lengths)


OPTIONS = (
    {"window": (20, None), "scale": -0.4},
    {"softcap": 3.0, "sink": np.linspace(-1, 1, HEADS, dtype="f4")},
    {"score_mod": "score + 0.1 * (key - position) + 0.01 * keys"},
    {"alibi_slopes": np.linspace(0.1, 1, HEADS, dtype="f4"), "mask": "key % 3 != 1"},
)
QUICK = (
    *(("mma_split_kv", 1), ("mma_split_kv", 3), ("fa2", 0), ("fa2", 2)),
    *(("fa2_split_kv", 1), ("fa2_split_kv", 2), ("wgmma_slices", 1)),
)


@pytest.mark.parametrize(
    "kernel, number",
    [
        pytest.param(kernel, i, marks=[pytest.mark.slow] * ((kernel, i) not in QUICK))
        for kernel in ("mma_split_kv", "fa2_split_kv", "fa2", "fa2_coalesced", "wgmma_slices")
        for i in range(len(OPTIONS))
    ],
)
def test_options_of_attention(backend, kernel, number):
    able_or_skip(kernel, backend)
    options = OPTIONS[number]
    q, k, v = given("float16", tokens=2)
    cache = cache_of(k, v, pages=True)
    out, lse = decoded(backend, q, cache, kernel=kernel, check=True, **options)
    options = {"mask_mod" if name == "mask" else name: x for name, x in options.items()}
    require(out, lse, q, k, v, LENGTHS, **options)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_few_tokens_of_wide_dtypes_fill_a_device(dtype):
    """One query and 8,192 keys fill the GPU with 8 key heads; many queries use other kernels."""
    limits = limits_of("90")
    for lengths in ({}, {"lengths_k": True}):
        p = Problem.of_sizes(M=1, N=8192, heads=32, kv_heads=8, d=128, dtype=dtype, **lengths)
        plan = planning.plan(FORWARD[for_decoding("auto", "auto", dtype, p.group)], p, limits)
        (blocks, *_), c = plan.launches[0].grid, plan.constants
        assert blocks >= 0.9 * limits.multiprocessors * c["blocks_per_sm"]
    assert for_decoding("auto", "auto", dtype, 100) == "auto"
    assert for_decoding("fa2", "auto", dtype, 1) == "fa2"


# Appended tokens


def turned(x, first, rotary, interleaved, dtype):
    """Returns x [..., tokens, d] rotated for positions from `first` on."""
    at = first + np.arange(x.shape[-2])
    cos, sin = (table[at] for table in rotary)
    return tolerance.expected_rotation(x, cos, sin, interleaved=interleaved, dtype=dtype)


def quarter_turns(positions, angles, dtype):
    """Returns cosines and sines of random multiples of 90°, which rotate exactly."""
    quarters = RNG.integers(0, 4, (positions, angles))
    return [np.array(x)[quarters].astype(DTYPES[dtype]) for x in ([1, 0, -1, 0], [0, 1, 0, -1])]


def rows_of(cache, array, b, rows):
    """Returns the rows of sequence b in a cache array, [rows, kv_heads, columns]."""
    found = array if cache.layout == "bshd" else array.swapaxes(1, 2)
    if cache.pages is None:
        return np.array(found[b, rows])
    size = cache.page_size
    return np.stack([found[cache.pages[b, j // size], j % size] for j in rows])


def with_room(cache, k, tokens):
    """Adds pages for new tokens to the page table and returns the cache."""
    if cache.pages is not None:
        used = {
            cache.pages[b, i]
            for b, n in enumerate(cache.lengths)
            for i in range(-(-int(n) // cache.page_size))
        }
        free = [x for x in range(len(cache.k)) if x not in used]
        for b, n in enumerate(cache.lengths):
            for i in range(-(-int(n) // SIZE), -(-int(n + tokens) // SIZE)):
                cache.pages[b, i] = free.pop()
    return cache


NEW_LENGTHS = np.array([0, 1, SIZE - 2, SIZE, SIZE + 1, N - 3], "i4")


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("layout, pages", [("bshd", True), ("bhsd", False), ("bhsd", True)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_new_tokens_are_turned_and_appended(backend, dtype, layout, pages, interleaved):
    """Rotations by multiples of 90° are exact, so cache rows are compared bit by bit."""
    q, k, v = given(dtype, tokens=3)
    new_k, new_v = (drawn((BATCH, KV_HEADS, 3, x), dtype, seed=9 + x) for x in (D, DV))
    rotary = quarter_turns(N, 5, dtype)
    turns = Rotary(*rotary, interleaved)
    cache = cache_of(k, v, NEW_LENGTHS, pages=pages, layout=layout, rotary=turns)
    cache = with_room(cache, k, 3)
    before = [x.copy() for x in (cache.k, cache.v)]
    out, lse = decoded(backend, q, cache, append=(new_k, new_v))
    assert (cache.lengths == NEW_LENGTHS).all()
    every_q = np.empty_like(q)
    for b, n in enumerate(NEW_LENGTHS):
        its = [turned(x[b], n, rotary, interleaved, dtype).value for x in (q, new_k)]
        every_q[b], rows = its[0], range(n, n + 3)
        k[b, rows], v[b, rows] = its[1].swapaxes(0, 1), new_v[b].swapaxes(0, 1)
        np.testing.assert_array_equal(rows_of(cache, cache.k, b, rows), k[b, rows])
        np.testing.assert_array_equal(rows_of(cache, cache.v, b, rows), v[b, rows])
    require(out, lse, every_q, k, v, NEW_LENGTHS + 3)
    written = BATCH * 3 * KV_HEADS
    for old, new, columns in ((before[0], cache.k, D), (before[1], cache.v, DV)):
        bits = f"u{old.itemsize}"
        changed = (old.view(bits) != new.view(bits)).sum()
        assert changed <= written * columns  # no other element is written


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_angles_turn_within_their_bounds(backend, dtype):
    q, k, v = given(dtype, tokens=2)
    new_k, new_v = (drawn((BATCH, KV_HEADS, 2, x), dtype, seed=x) for x in (D, DV))
    angles = RNG.uniform(-7, 7, (N, D // 2))
    for of in {DTYPES[dtype], "f8" if dtype == "float64" else "f4"}:
        rotary = [f(angles).astype(of) for f in (np.cos, np.sin)]
        turns = Rotary(*rotary, interleaved=of == "f4")
        cache = with_room(cache_of(k, v, NEW_LENGTHS, pages=True, rotary=turns), k, 2)
        decoded(backend, q, cache, append=(new_k, new_v), check=True)
        for b, n in enumerate(NEW_LENGTHS):
            wanted = turned(new_k[b], n, rotary, of == "f4", dtype)
            found = rows_of(cache, cache.k, b, range(n, n + 2)).swapaxes(0, 1)
            assert (np.abs(found.astype("f8") - wanted.value) <= wanted.bound).all()


def test_appending_alone_and_turning_alone(backend):
    q, k, v = given("float32", tokens=2)
    new_k, new_v = (drawn((BATCH, KV_HEADS, 2, x), seed=x) for x in (D, DV))
    cache = cache_of(k, v, NEW_LENGTHS)
    out, lse = decoded(backend, q, cache, append=(new_k, new_v), check=True)
    for b, n in enumerate(NEW_LENGTHS):
        k[b, n : n + 2], v[b, n : n + 2] = new_k[b].swapaxes(0, 1), new_v[b].swapaxes(0, 1)
    require(out, lse, q, k, v, NEW_LENGTHS + 2)

    rotary = quarter_turns(N, D // 2, "float32")
    cache = cache_of(k, v, NEW_LENGTHS + 2, rotary=tuple(rotary))
    out, lse = decoded(backend, q, cache, check=True)
    every_q = np.stack(
        [turned(q[b], n, rotary, False, "float32").value for b, n in enumerate(NEW_LENGTHS)]
    )
    require(out, lse, every_q.astype("f4"), k, v, NEW_LENGTHS + 2)


@pytest.mark.parametrize("layout, pages", [("bshd", True), ("bhsd", False)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_append_alone_writes_what_attention_does(backend, dtype, layout, pages):
    q, k, v = given(dtype, tokens=2)
    new = [drawn((BATCH, KV_HEADS, 2, x), dtype, seed=x) for x in (D, DV)]
    how = {"pages": pages, "layout": layout, "rotary": quarter_turns(N, 5, dtype)}
    before, after = (with_room(cache_of(k, v, NEW_LENGTHS, **how), k, 2) for _ in range(2))
    wanted = decoded(backend, q, before, append=new)
    assert after.append(*new, backend=backend, check=True) is None
    assert (after.lengths == NEW_LENGTHS).all()
    for name in ("k", "v"):
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
    after.lengths += 2
    found = decoded(backend, q, after)
    assert [x.tobytes() for x in found] == [x.tobytes() for x in wanted]


# Caches in another memory, and invalid caches


@pytest.mark.parametrize("pages", [False, True], ids=["contiguous", "pages"])
def test_numpy_caches_are_copied_to_a_device_and_new_rows_back(pages):
    q, k, v = given("float32", tokens=2)
    new_k, new_v = (drawn((BATCH, KV_HEADS, 2, x), seed=x) for x in (D, DV))
    rotary = quarter_turns(N, 5, "float32")
    results, caches = [], []
    for backend in (FarDevice(), "simulator"):
        cache = with_room(cache_of(k, v, NEW_LENGTHS, pages=pages, rotary=rotary), k, 2)
        out = np.empty((BATCH, HEADS, 2, DV), "f4")
        made = decoded(backend, q, cache, append=(new_k, new_v), out=out, kernel="fa2")
        assert made[0] is out and type(made[1]) is np.ndarray
        results.append(made)
        caches.append(cache)
    for one, other in zip(*results):
        assert one.tobytes() == other.tobytes()
    for name in ("k", "v"):
        np.testing.assert_array_equal(*(getattr(x, name) for x in caches))


def test_flashinfers_tables_are_read(backend):
    q, k, v = given("float16", batch=3)
    lengths = np.array([SIZE + 5, 0, 2 * SIZE], "i4")
    paged = cache_of(k, v, lengths, pages=True)
    pages = -(-lengths // SIZE)
    indices = np.concatenate([x[:n] for x, n in zip(paged.pages, pages)])
    indptr = np.cumsum([0, *pages]).astype("i4")
    last = np.array([5, 0, SIZE], "i4")
    cache = cupyfa.KVCache.from_csr(paged.k, paged.v, indptr, indices, last, layout="bshd")
    assert (cache.lengths == lengths).all() and cache.pages.shape == (3, 2)
    out, lse = decoded(backend, q, cache)
    require(out, lse, q, k, v, lengths)


def test_new_keys_need_arrays_of_their_own():
    """Appending requires that K and V do not overlap.

    K and V may be halves of one array along any axis, as in FlashInfer's pages.
    """
    q = drawn((2, 2, 1, 8))
    new = drawn((2, 1, 1, 8))
    lengths, table = np.array([3, 0], "i4"), np.array([[1], [0]], "i4")
    whole = np.zeros((2, 2, 2, 16, 8), "f4")

    def decode(halves, *new):
        cache = cupyfa.KVCache(*halves, lengths, table)
        how = {"backend": "simulator", "kernel": "fa2", "append": new or None}
        return cupyfa.attention(q, cache, **how)

    for halves in (
        (whole[0, :, :1], whole[1, :, :1]),
        (whole[:, 0, :1], whole[:, 1, :1]),
        (whole[:, 0, :1], whole[:, 0, 1:]),
        (whole[0, :, :1, :, :], whole[0, :, 1:, :, :]),
        (whole.reshape(2, 1, 16, -1)[..., :8], whole.reshape(2, 1, 16, -1)[..., 8:16]),
    ):
        whole[...] = 0
        decode(halves, new, -new)
        for half, written in zip(halves, (new, -new)):
            np.testing.assert_array_equal(half[table[:, 0], 0, lengths], written[:, 0, 0])
    rows = np.zeros((4, 1, 16, 8), "f4")
    for same in ((rows[:2], rows[:2]), (rows[:2], rows[1:3]), (rows[:2], rows[1::-1])):
        with pytest.raises(ValueError, match="cache.k and cache.v share memory.*do not overlap"):
            decode(same, new, new)
        decode(same)


@pytest.mark.each_choice
@pytest.mark.parametrize("pages", [False, True], ids=["contiguous", "pages"])
@pytest.mark.parametrize("kernel", ["mma_split_kv", "fa2_split_kv", "fa2"])
def test_wrong_pages_and_lengths_reach_nothing_outside(kernel, pages, monkeypatch):
    """Skips the host's checks, as for device arrays; the simulator reports stray accesses."""
    monkeypatch.setattr("cupyfa.arrays.kv_cache._check_contents", lambda *_: None)
    monkeypatch.setattr("cupyfa.runtime.ragged._check_counts", lambda *_: None)
    q, k, v = given("float16", tokens=3)
    new_k, new_v = (drawn((BATCH, KV_HEADS, 3, x), "float16") for x in (D, DV))
    cache = cache_of(k, v, pages=pages, rotary=quarter_turns(5, 2, "float16"))
    cache.lengths[:] = [-5, N - 1, N + 1, 2**31 - 1, -(2**31), 7]
    if pages:
        cache.pages[...] = np.where(np.arange(MOST) % 2, -(2**31), 2**31 - 1)
    before = cache.k.copy()
    for new in (None, (new_k, new_v)):
        decoded("simulator", q, cache, kernel=kernel, append=new)
    if pages:  # all pages are invalid, so nothing is written
        np.testing.assert_array_equal(before, cache.k)
    else:  # only new tokens whose rows lie within the cache are written
        changed = np.argwhere((before.view("u2") != cache.k.view("u2")).any(axis=(2, 3)))
        written = {0: range(3), 1: [N - 1], 4: range(3), 5: range(7, 10)}
        places = [[b, row] for b, rows in written.items() for row in rows]
        np.testing.assert_array_equal(changed, places)


def test_a_check_finds_rows_that_are_written_wrongly(monkeypatch):
    q, k, v = given("float32")
    new_k, new_v = (drawn((BATCH, KV_HEADS, 1, x)) for x in (D, DV))
    rotary = quarter_turns(N, 5, "float32")
    write = kv_cache._New.write

    lengths = np.full(BATCH, 7, "i4")
    for name, change in (
        ("cache.k", lambda arrays: arrays["cache.k"].__setitem__((2, 1, 7, 3), 0)),
        ("cache.v", lambda arrays: arrays["cache.v"].__setitem__((5, 0, 7, 0), np.nan)),
        ("turned", lambda arrays: arrays["turned"].__setitem__((0, 0, 0, 23), 0)),
    ):

        def wrongly(self, change=change):
            write(self)
            change(self._arrays)

        monkeypatch.setattr(kv_cache._New, "write", wrongly)
        cache = cache_of(k, v, lengths, rotary=rotary)
        how = {"append": (new_k, new_v), "check": True, "kernel": "fa2"}
        with pytest.raises(cupyfa.WrongResult, match=f"append_keys on .*\n.*{name}"):
            decoded("simulator", q, cache, **how)


@pytest.mark.gpu
@pytest.mark.parametrize("pages", [False, True], ids=["contiguous", "pages"])
def test_a_captured_call_takes_other_lengths(cuda, pages):
    import cupy

    q, k, v = given("float16", tokens=2)
    new_k, new_v = (drawn((BATCH, KV_HEADS, 2, x), "float16", seed=x) for x in (D, DV))
    rotary = quarter_turns(N, 5, "float16")
    host = cache_of(k, v, np.full(BATCH, N, "i4"), pages=pages)
    table = None if host.pages is None else cupy.asarray(host.pages)
    arrays = map(cupy.asarray, (host.k, host.v, host.lengths))
    of = {"layout": "bshd", "rotary": tuple(map(cupy.asarray, rotary))}
    cache = cupyfa.KVCache(*arrays, table, **of)
    there, out = cupy.asarray(q), cupy.empty((BATCH, HEADS, 2, DV), "f2")
    new = cupy.asarray(new_k), cupy.asarray(new_v)
    how = {"append": new, "out": out, "return_lse": True}
    cache.lengths[...] = 0
    cupyfa.attention(there, cache, **how, check=True)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        cupyfa.attention(there, cache, **how)  # compiles, and allocates this stream's workspace
        cache.lengths += 0
        stream.begin_capture()
        _, lse = cupyfa.attention(there, cache, **how)
        cache.lengths += 2
        graph = stream.end_capture()
        for n in range(0, N - 1, 2):
            graph.launch()
            stream.synchronize()
            its = [turned(x, n, rotary, False, "float16").value.astype("f2") for x in (q, new_k)]
            k[:, n : n + 2], v[:, n : n + 2] = its[1].swapaxes(1, 2), new_v.swapaxes(1, 2)
            require(out.get(), lse.get(), its[0], k, v, cache.lengths.get())


# Lets the next launch begin at once, and copies after about 100 µs.
LATE = r"""
extern "C" __global__ void copy_late(const short* from, short* to, int count) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  for (const long long start = clock64(); clock64() - start < 200000;) {}
  for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}
"""


@pytest.mark.gpu
@pytest.mark.parametrize("late", [0, 1, 2], ids=["q", "k", "lengths"])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_a_call_waits_for_the_kernel_before_it(cuda, captured, late):
    """The kernel before writes q, new keys or lengths while the call may already begin."""
    import cupy

    q, k, v = given("float16")
    new = [cupy.asarray(drawn((BATCH, KV_HEADS, 1, x), "float16", seed=x)) for x in (D, DV)]
    host = cache_of(k, v, np.minimum(LENGTHS, N - 1))
    arrays = map(cupy.asarray, (host.k, host.v, host.lengths))
    cache, there = cupyfa.KVCache(*arrays, layout="bshd"), cupy.asarray(q)
    out = cupy.empty((BATCH, HEADS, 1, DV), "f2")
    copy_late = cupy.RawKernel(LATE, "copy_late")
    copy_late.compile()
    to = (there, new[0], cache.lengths)[late]
    kept, other = to.copy(), cupy.zeros_like(to)
    cupy.cuda.Device().synchronize()

    def call():
        copy_late((1,), (256,), (kept, to, np.int32(to.nbytes // 2)))
        cupyfa.attention(there, cache, append=new, out=out)

    with cupy.cuda.Stream(non_blocking=True) as stream:
        cupyfa.attention(there, cache, append=new, out=out)
        right, written = out.get(), cache.k.get()
        if captured:
            stream.begin_capture()
            call()
            graph = stream.end_capture()
        for _ in range(20):
            to[...] = other
            graph.launch() if captured else call()
            np.testing.assert_array_equal(out.get(), right)
            np.testing.assert_array_equal(cache.k.get(), written)


def test_a_cache_describes_itself():
    _, k, v = given("float16")
    cache = cache_of(k, v, pages=True)
    assert (cache.batch, cache.capacity, cache.page_size) == (BATCH, N, SIZE)
    assert repr(cache) == (
        "<KVCache: 6 sequences of up to 64 keys in pages of 16, float16 bshd (27, 16, 2, 24)>"
    )
