"""Attention over a KV cache of e4m3 keys and values with scales.

The reference is dense float64 attention over the dequantized keys and values. Unused cache rows and
the scales of unused pages are NaN.
"""

import ml_dtypes
import numpy as np
import pytest
from helpers.far_device import FarDevice
from helpers.merged import merged

import cupyfa
from cupyfa import Rotary, Scaled
from cupyfa.arrays import kv_cache
from cupyfa.errors import Unsupported
from cupyfa.lab.analysis.resources import compile_launch, limits_of
from cupyfa.ladder.forward import for_decoding
from cupyfa.numerics import tolerance
from cupyfa.planner import choose_kernel as planning
from cupyfa.problem import optional_inputs
from cupyfa.problem.dtypes import E4M3
from cupyfa.problem.problem import Problem
from cupyfa.runtime.simulator import Simulator

SIZE, MOST = 16, 6  # page size, pages per sequence
N = SIZE * MOST
BATCH, HEADS, KV_HEADS, D, DV = 4, 4, 2, 48, 24
LENGTHS = np.array([0, 1, SIZE + 5, N], "i4")
COUNT = BATCH * MOST + 3  # number of pages
DTYPE = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
SMALL = {"Br": 16, "Bc": 32, "Wr": 16, "stages": 2}  # two pages per tile of keys
SCALES = {None: None, "heads": (KV_HEADS,), "batch": (BATCH, KV_HEADS), "pages": (COUNT, KV_HEADS)}


def drawn(shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def scale(form, seed):
    """Returns random scales between 2**-6 and 2**2, or None."""
    if form is None:
        return None
    return 2 ** np.random.default_rng(seed).uniform(-6, 2, SCALES[form]).astype("f4")


def scaled(arrays, scales):
    """Wraps each array that has a scale in Scaled."""
    return [x if of is None else Scaled(x, of) for x, of in zip(arrays, scales, strict=True)]


def tokens(count, dtype=np.float16):
    sizes = (HEADS, D), (KV_HEADS, D), (KV_HEADS, DV)
    return tuple(drawn((BATCH, h, count, x), x, dtype) for h, x in sizes)


class Filled:
    """A cache and its dequantized values: k and v [batch, rows, kv_heads, columns]."""

    def __init__(
        self, *, pages=False, layout="bshd", forms=(None, None), lengths=LENGTHS, room=0, **how
    ):
        self.lengths = lengths
        table = np.random.default_rng(5).permutation(COUNT)[: BATCH * MOST].reshape(BATCH, MOST)
        table = table.astype("i4")
        rows = (COUNT, SIZE) if pages else (BATCH, N)
        self.at = np.arange(BATCH)[:, None], np.arange(N)[None]
        if pages:
            self.at = np.repeat(table, SIZE, 1), np.tile(np.arange(SIZE), MOST)[None]
        used = np.arange(N) < lengths[:, None]
        self.stored, self.factors, scales = [], [], []
        for seed, (columns, form) in enumerate(zip((D, DV), forms)):
            array = np.full((*rows, KV_HEADS, columns), np.nan, E4M3)
            numbers = drawn((BATCH, N, KV_HEADS, columns), seed).astype(E4M3)
            array[tuple(x[used] for x in np.broadcast_arrays(*self.at))] = numbers[used]
            factor = scale(form, seed)
            if form == "pages":
                unused = np.ones(COUNT, bool)
                for b, n in enumerate(lengths):
                    unused[table[b, : -(-int(n + room) // SIZE)]] = False
                factor[unused] = np.nan
            self.stored.append(array)
            scales.append(factor)
            of_rows = np.ones((BATCH, N, KV_HEADS), "f4")
            if form is not None:
                of_rows *= factor[self.at[0]] if form == "pages" else factor[..., None, :]
            self.factors.append(of_rows[..., None])
        if pages:
            for b, n in enumerate(lengths):  # unused entries hold invalid page indices
                table[b, -(-int(n + room) // SIZE) :] = -7 if b % 2 else 2**30
        arrays = [x if layout == "bshd" else x.swapaxes(1, 2).copy() for x in self.stored]
        table = table if pages else None
        arrays = scaled(arrays, scales)
        self.cache = cupyfa.KVCache(*arrays, lengths.copy(), table, layout=layout, **how)

    def bits(self):
        """Returns the stored k and v in sequence order, [batch, rows, kv_heads, columns]."""
        found = (self.cache.k, self.cache.v)
        bshd = [x if self.cache.layout == "bshd" else x.swapaxes(1, 2) for x in found]
        return [x[np.broadcast_arrays(*self.at)[0], self.at[1]] for x in bshd]

    def numbers(self):
        return [x.astype("f8") * y for x, y in zip(self.bits(), self.factors)]


def require(out, lse, q, filled, lengths, left=None):
    k, v = filled.numbers()
    for b, n in enumerate(lengths):
        its = (x[b : b + 1, :n].swapaxes(1, 2) for x in (k, v))
        first = int(n) - q.shape[2]
        how = {"scale": D**-0.5, "causal_offset": first}
        how |= {} if left is None else {"window_offset": first - left}
        wanted = tolerance.expected_attention(
            q[b : b + 1].astype("f8"), *its, dtype=str(q.dtype), **how
        )[None]
        found = {"O": out[b : b + 1], "lse": lse[b : b + 1]}
        tolerance.require(tolerance.compare(found, wanted), f"sequence {b} of {n} keys")


def decoded(backend, q, filled, **how):
    return cupyfa.attention(q, filled.cache, backend=backend, return_lse=True, **how)


FORMS = [
    (False, "bshd", ("heads", "batch"), "float16"),
    (True, "bhsd", ("pages", "pages"), "bfloat16"),
    *(
        pytest.param(*x, marks=pytest.mark.slow)
        for x in (
            (False, "bhsd", ("batch", None), "bfloat16"),
            (True, "bhsd", ("heads", "pages"), "float16"),
            (True, "bshd", ("pages", "batch"), "float16"),
            (True, "bshd", (None, "heads"), "bfloat16"),
        )
    ),
]


@pytest.mark.parametrize("splits", ["auto", 1, 3])
@pytest.mark.parametrize("pages, layout, forms, dtype", FORMS)
def test_scales_of_all_forms(backend, pages, layout, forms, dtype, splits):
    filled = Filled(pages=pages, layout=layout, forms=forms)
    q = drawn((BATCH, HEADS, 3, D), 7, DTYPE[dtype])
    out, lse = decoded(backend, q, filled, check=True, tiles={**SMALL, "splits": splits})
    require(out, lse, q, filled, LENGTHS)
    assert out.dtype == q.dtype and lse.dtype == np.float32


@pytest.mark.parametrize("tokens, tiles", [(1, {}), (9, {}), (20, {}), (5, {**SMALL, "Wr": 16})])
def test_tiles_of_few_and_of_many_rows(backend, tokens, tiles):
    filled = Filled(pages=True, forms=("pages", "heads"))
    q = drawn((BATCH, HEADS, tokens, D), 7, np.float16)
    out, lse = decoded(backend, q, filled, tiles=tiles)
    require(out, lse, q, filled, LENGTHS)


def test_a_window_hides_what_is_not_finite(backend):
    """Rows whose tile contains a hidden NaN key are repaired."""
    filled = Filled(pages=True, forms=("pages", "pages"))
    b, (place, row) = 3, np.broadcast_arrays(*filled.at)
    for name in ("k", "v"):
        getattr(filled.cache, name)[place[b, 40], row[b, 40]] = np.nan
    q = drawn((BATCH, HEADS, 1, D), 7, np.float16)
    out, lse = decoded(backend, q, filled, window=(50, None), tiles={"splits": 2})
    assert np.isfinite(out).all()
    for name in ("k", "v"):
        getattr(filled.cache, name)[place[b, 40], row[b, 40]] = 0
    require(out, lse, q, filled, LENGTHS, left=50)


def test_scores_change_as_in_attention(backend):
    filled = Filled(forms=("batch", "heads"))
    q = drawn((BATCH, HEADS, 2, D), 7, DTYPE["bfloat16"])
    slopes = np.linspace(0.1, 1, HEADS, dtype="f4")
    for options in ({"softcap": 3.0, "sink": slopes}, {"alibi_slopes": slopes, "scale": -0.3}):
        decoded(backend, q, filled, check=True, **options)


# Appended tokens

NEW_LENGTHS = np.array([0, 1, SIZE - 2, N - 3], "i4")


@pytest.mark.parametrize("pages, layout, forms, dtype", FORMS)
def test_new_rows_are_divided_and_rounded(backend, pages, layout, forms, dtype):
    """Values beyond ±448 saturate, and NaN stays NaN."""
    filled = Filled(pages=pages, layout=layout, forms=forms, lengths=NEW_LENGTHS, room=3)
    q, new_k, new_v = tokens(3, DTYPE[dtype])
    new_v *= np.asarray(2.0**9, new_v.dtype)
    new_v[0, 0, 0, :2] = np.inf, -np.inf
    new_k[1, 1, 2, 5] = np.nan
    before = filled.bits()
    how = {"append": (new_k, new_v), "tiles": {"splits": 2}}
    _, lse = decoded(backend, q, filled, check=True, **how)
    at = NEW_LENGTHS[:, None] + np.arange(3)
    every = np.arange(BATCH)[:, None]
    for new, old, found, factors in zip((new_k, new_v), before, filled.bits(), filled.factors):
        quotient = new.swapaxes(1, 2).astype("f4") / factors[every, at]
        wanted = np.clip(quotient, -448, 448).astype(E4M3)
        np.testing.assert_array_equal(found[every, at].astype("f4"), wanted.astype("f4"))
        old[every, at] = found[every, at]
        np.testing.assert_array_equal(old.view("u1"), found.view("u1"))  # no other row is written
    assert np.isnan(lse[1, 2:, 2]).all()
    assert np.isfinite(np.delete(lse, 1, axis=0)).all()


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_keys_are_turned_before_they_are_rounded(backend, interleaved):
    angles = np.random.default_rng(1).uniform(-7, 7, (N, D // 2))
    rotary = [f(angles).astype("f4") for f in (np.cos, np.sin)]
    how = {"forms": ("pages", "heads"), "rotary": Rotary(*rotary, interleaved)}
    filled = Filled(pages=True, lengths=NEW_LENGTHS, room=2, **how)
    q, new_k, new_v = tokens(2)
    out, lse = decoded(backend, q, filled, append=(new_k, new_v), check=True)
    turned = np.empty_like(q)
    for b, n in enumerate(NEW_LENGTHS):
        tables = [x[n : n + 2] for x in rotary]
        options = {"interleaved": interleaved, "dtype": "float16"}
        turned[b] = tolerance.expected_rotation(q[b], *tables, **options).value
        made = tolerance.expected_rotation(new_k[b], *tables, **options)
        factor = filled.factors[0][b, n : n + 2].swapaxes(0, 1)
        wanted = tolerance.expected_e4m3(made, factor)
        found = filled.bits()[0][b, n : n + 2].swapaxes(0, 1).astype("f8")
        assert (np.abs(found - wanted.value) <= wanted.bound).all()
    assert np.isfinite(out).all() and np.isfinite(lse).all()


def test_a_check_finds_a_row_that_is_rounded_wrongly(monkeypatch):
    filled = Filled(forms=("heads", "heads"), lengths=NEW_LENGTHS)
    q, new_k, new_v = tokens(1)
    write = kv_cache._New.write

    def wrongly(self):
        write(self)
        bits = self._arrays["cache.k"].view("u1")
        bits[2, 1, NEW_LENGTHS[2], 3] ^= 2  # two units in the last place

    monkeypatch.setattr(kv_cache._New, "write", wrongly)
    with pytest.raises(cupyfa.WrongResult, match="append_keys on .*\n.*cache.k"):
        decoded("simulator", q, filled, append=(new_k, new_v), check=True)


@pytest.mark.parametrize("pages", [False, True], ids=["contiguous", "pages"])
def test_numpy_caches_are_copied_to_a_device_and_new_rows_back(pages):
    results, caches = [], []
    for backend in (FarDevice(), "simulator"):
        forms = ("pages", "batch") if pages else ("heads", None)
        filled = Filled(pages=pages, forms=forms, lengths=NEW_LENGTHS, room=2)
        q, new_k, new_v = tokens(2)
        results.append(decoded(backend, q, filled, append=(new_k, new_v)))
        caches.append(filled.bits())
    for one, other in zip(*results):
        assert one.tobytes() == other.tobytes()
    for one, other in zip(*caches):
        np.testing.assert_array_equal(one.view("u1"), other.view("u1"))


def test_devices_before_sm_89_are_refused(monkeypatch):
    filled, q = Filled(), drawn((BATCH, HEADS, 1, D), 7, np.float16)
    limits = limits_of("80")
    monkeypatch.setattr(Simulator, "limits", limits)
    with pytest.raises(Unsupported, match="is sm_80, but a float8_e4m3fn cache requires sm_89"):
        decoded(Simulator(), q, filled)


# Compiled programs, and tests on a GPU


def launches(dtype, arch, *, cached=E4M3, size, by_page=False, M=1, d=128, N=8192):
    """Yields the programs that decoding launches for a cache of this dtype and size."""
    count = N // size if size else 0
    rows = (count, 8, size, d) if size else (1, 8, N, d)
    q, k = np.zeros((1, 32, M, d), DTYPE[dtype]), np.zeros(rows, cached)
    lengths, table = np.zeros(1, "i4"), np.zeros((1, max(count, 1)), "i4")
    read = {"lengths_k": lengths} | ({"page_table": table} if size else {})
    scales = np.zeros((count, 1, 8) if by_page else (1, 8), "f4")
    read |= dict.fromkeys(optional_inputs.SCALES, scales) if cached == E4M3 else {}
    operands = tuple(optional_inputs.of_value(*x) for x in read.items())
    p = Problem.of(q, k, k, causal=True, operands=operands)
    kernel = for_decoding("auto", "auto", dtype, 4, is_e4m3=cached == E4M3)
    kernel = planning.select(kernel, "forward", p, limits_of(arch))
    assert kernel.name.startswith("mma_split_kv")
    yield from planning.plan(kernel, p, limits_of(arch)).programs
    cache = cupyfa.KVCache(k, k, lengths, table if size else None)
    new, angles = np.zeros((1, 8, M, d), DTYPE[dtype]), np.zeros((N, d // 2), DTYPE[dtype])
    arrays = {"q": q, "cache.k": k, "cache.v": k, "lengths": lengths}
    arrays |= {"pages": table} if size else {}
    arrays |= {x: y for x, y in read.items() if x in optional_inputs.SCALES}
    arrays |= {"k": new, "v": new, "cos": angles, "sin": angles, "used": lengths, "turned": q}
    yield from kv_cache._plan(arrays, cache, limits_of(arch)).programs


@pytest.mark.parametrize(
    "arch, dtype, form",
    [
        ("90", "float16", {"size": 0, "cached": np.float16}),
        ("90", "float16", {"size": 16, "cached": np.float16}),
        ("90", "bfloat16", {"size": 0}),
        pytest.param("90", "bfloat16", {"size": 16, "by_page": True}, marks=pytest.mark.slow),
        pytest.param("89", "float16", {"size": 16, "by_page": True}, marks=pytest.mark.slow),
        pytest.param("89", "bfloat16", {"size": 0}, marks=pytest.mark.slow),
        pytest.param("100", "bfloat16", {"size": 64, "by_page": True}, marks=pytest.mark.slow),
        pytest.param("120", "float16", {"size": 64}, marks=pytest.mark.slow),
        pytest.param("90", "float16", {"size": 0, "d": 64}, marks=pytest.mark.slow),
    ],
)
def test_nvrtc_compiles_what_decoding_launches(arch, dtype, form):
    for program in launches(dtype, arch, **form):
        assert compile_launch(program, arch).spilled_bytes == 0
        assert program.begins_early == (int(arch) >= 90)


@pytest.mark.gpu
@pytest.mark.parametrize("forms", [("heads", "batch"), ("pages", "pages")], ids=str)
def test_arrays_in_gpu_memory_and_a_captured_call(cuda, forms):
    """A captured call reads lengths, page table and scales when its graph runs."""
    import cupy

    pages = "pages" in forms
    lengths = np.full(BATCH, SIZE, "i4")
    filled = Filled(pages=pages, forms=forms, lengths=lengths, room=20)
    host, dtype = filled.cache, np.float16
    there = [cupy.asarray(x.view("u1")).view(E4M3) for x in (host.k, host.v)]
    there = scaled(there, map(cupy.asarray, (host.k_scale, host.v_scale)))
    table = None if host.pages is None else cupy.asarray(host.pages)
    cache = cupyfa.KVCache(*there, cupy.asarray(host.lengths), table, layout="bshd")
    q, new_k, new_v = tokens(1, dtype)
    out = cupy.empty((BATCH, HEADS, 1, DV), dtype)
    new = cupy.asarray(new_k), cupy.asarray(new_v)
    how = {"append": new, "out": out, "return_lse": True}
    queries = cupy.asarray(q)
    cupyfa.attention(queries, cache, **how, check=True)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        cupyfa.attention(queries, cache, **how)
        cache.lengths += 0
        stream.begin_capture()
        _, lse = cupyfa.attention(queries, cache, **how)
        cache.lengths += 1
        graph = stream.end_capture()
        for _ in range(3):
            graph.launch()
            stream.synchronize()
            for name in ("k", "v"):
                getattr(host, name).view("u1")[...] = getattr(cache, name).view("u1").get()
            require(out.get(), lse.get(), q, filled, cache.lengths.get())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPE)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_long_sequences_on_a_gpu(cuda, d, dtype):
    """Uses the tiles and the number of splits selected for the GPU."""
    rng = np.random.default_rng(d)
    lengths = np.array([3000, 1234], "i4")
    k, v = (rng.standard_normal((2, 3000, 2, d)).astype(E4M3) for _ in range(2))
    scales = [rng.uniform(0.5, 2, (2, 2)).astype("f4") for _ in range(2)]
    q = rng.standard_normal((2, 8, 1, d)).astype(DTYPE[dtype])
    cache = cupyfa.KVCache(*scaled((k, v), scales), lengths, layout="bshd")
    cupyfa.attention(q, cache, backend=cuda, check=True)


@pytest.mark.parametrize("form", [None, "heads"])
@pytest.mark.parametrize("in_cache", [False, True], ids=["arrays", "cache"])
def test_a_prefix_of_e4m3_stands_before_the_keys(backend, form, in_cache):
    """Results match a call on one cache that holds the prefix and the sequence's own keys."""
    n, scales = 20, [None, None]
    q = drawn((BATCH, HEADS, 1, D), 9, np.float16)
    shared = [drawn((1, n, KV_HEADS, x), x).astype(E4M3) for x in (D, DV)]
    prefix = tuple(x.swapaxes(1, 2) for x in shared)
    if in_cache:
        scales = [scale(form, seed) for seed in range(2)]
        prefix = cupyfa.KVCache(*scaled(prefix, scales), np.array([n], "i4"))
    filled = Filled(forms=(form, form), prefix=prefix)
    out, lse = decoded(backend, q, filled, check=True)
    factors = [np.ones(KV_HEADS, "f4") if x is None else x for x in scales]
    before = [x.astype("f8") * f[:, None] for x, f in zip(shared, factors)]
    own = filled.numbers()
    for b, length in enumerate(LENGTHS):
        sequence = [
            np.concatenate([x, y[b : b + 1, :length]], 1).swapaxes(1, 2)
            for x, y in zip(before, own)
        ]
        parts = [[x[:, :, :n] for x in sequence], [x[:, :, n:] for x in sequence]]
        expected = [
            tolerance.expected_attention(
                q[b : b + 1].astype("f8"), *x, dtype="float16", scale=D**-0.5
            )[None]
            for x in (*parts, sequence)
        ]
        wanted = merged(expected[:2], expected[2], "float16")
        found = {"O": out[b : b + 1], "lse": lse[b : b + 1]}
        tolerance.require(tolerance.compare(found, wanted), f"sequence {b}")
