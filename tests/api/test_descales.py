"""cupyfa.attention of q, k and v in e4m3 with descales.

The reference is float64 attention over the dequantized q, k and v.
"""

from itertools import product

import ml_dtypes
import numpy as np
import pytest
from helpers.far_device import FarDevice

import cupyfa
from cupyfa import Devices, Dropout, Problem, Scaled
from cupyfa.errors import Unsupported, WrongResult
from cupyfa.lab.analysis.resources import compile_launch, limits_of
from cupyfa.lab.verify import transforms
from cupyfa.ladder.operations import OPERATIONS
from cupyfa.numerics import reference, tolerance
from cupyfa.planner import choose_kernel as planning
from cupyfa.problem import optional_inputs
from cupyfa.problem.dtypes import E4M3
from cupyfa.problem.structured_arrays import wrap
from cupyfa.runtime import transfer

BATCH, HEADS, KV_HEADS, M, N, D, DV = 2, 4, 2, 70, 90, 40, 24
SMALL = {"Br": 64, "Bc": 32}
DESCALES = optional_inputs.DESCALES


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(E4M3)


def inputs(d=D):
    shapes = (BATCH, HEADS, M, d), (BATCH, KV_HEADS, N, d), (BATCH, KV_HEADS, N, DV)
    return [drawn(*shape, seed=i) for i, shape in enumerate(shapes)]


def descales(seed=0, least=-2.0):
    """Returns random descales of both signs, one of which is 0."""
    rng = np.random.default_rng(seed)
    found = {x: rng.uniform(least, 2, (BATCH, KV_HEADS)).astype("f4") for x in DESCALES}
    found["k_descale"][1, 0] = 0
    return found


def attended(*arrays, **how):
    return cupyfa.attention(*arrays, **{"backend": "simulator", "tiles": SMALL, **how})


def test_descales_multiply_the_heads_of_a_key_head():
    """Compares with float64 attention and with prepared calls.

    Inputs are multiples of 1/2 up to 4, so that their sums are exact.
    """
    arrays = [(np.round(2 * x.astype("f4")).clip(-8, 8) / 2).astype(E4M3) for x in inputs()]
    factors = descales()
    how = {"causal": True, "return_lse": True}
    out, lse = attended(*wrap(*arrays, factors), **how, check=True)
    assert (out.dtype, lse.dtype) == (ml_dtypes.bfloat16, np.float32)
    q, k, v = (x.astype("f8") for x in arrays)
    q *= factors["q_descale"].repeat(HEADS // KV_HEADS, axis=1)[..., None, None]
    k, v = (x * factors[y][..., None, None] for x, y in ((k, "k_descale"), (v, "v_descale")))
    exact, exact_lse = reference.attention(q, k, v, scale=D**-0.5, causal_offset=N - M)
    assert np.abs(lse - exact_lse).max() < 1e-5
    assert np.abs(out.astype("f8") - exact).max() < 0.1
    shapes = [x.shape for x in arrays]
    forms = {name: x.shape for name, x in factors.items()}
    made = dict(dtype="float8_e4m3fn", backend="simulator", tiles=SMALL, **how)
    prepared = cupyfa.compile(*wrap(*shapes, forms), **made)
    assert prepared(*wrap(*arrays, factors))[0].tobytes() == out.tobytes()
    assert prepared(*arrays, *factors.values())[0].tobytes() == out.tobytes()
    assert prepared(*arrays, **factors)[0].tobytes() == out.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        {"out": "float32", "window": (20, 3)},
        {"out": "float16", "scale": -0.3},
        {"softcap": 3.0, "sink": np.ones(HEADS, "f4"), "alibi_slopes": np.ones(HEADS, "f4")},
        {"dropout": Dropout(0.3, 4), "lse": False},
        {"mask": np.random.default_rng(0).random((1, 1, M, N)) < 0.5, "causal": True},
        {"bias": np.random.default_rng(1).standard_normal((1, HEADS, M, N), "f4")},
        {"score_mod": "score - 0.1 * abs(query - key)", "mask": "key % 3 != 1"},
    ],
    ids=lambda how: "-".join(how),
)
@pytest.mark.parametrize("given", [(), DESCALES[:1], DESCALES[1:]], ids="-".join)
def test_other_options_and_some_descales(how, given):
    factors = descales(least=0.3)
    how = {"return_lse": how.get("lse", True), **{x: y for x, y in how.items() if x != "lse"}}
    arrays = wrap(*inputs(), {name: factors[name] for name in given})
    attended(*arrays, **how, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [1, 31, 33])
def test_few_keys(keys):
    q, k, v = inputs()
    arrays = wrap(q, k[:, :, :keys], v[:, :, :keys], descales())
    attended(*arrays, return_lse=True, check=True)


@pytest.mark.parametrize("keys", [0, 5])
def test_rows_without_keys_are_0(keys):
    """The output is +0, not -0, even for negative descales."""
    q, k, v = inputs()
    factors = {x: -y for x, y in descales(least=0.3).items()}
    out = attended(*wrap(q, k[:, :, :keys], v[:, :, :keys], factors), causal=True)
    hidden = out[:, :, : M - keys]
    assert hidden.tobytes() == bytes(hidden.nbytes)


def _extremes():
    for name, value in product(DESCALES, (np.inf, -np.inf, np.nan, 1e-38, 1e18)):
        is_quick = name == "v_descale" and value == np.inf
        yield pytest.param(name, value, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.parametrize("name, value", list(_extremes()))
def test_extreme_descales(name, value):
    """A non-finite descale of one head changes no other head."""
    factors = descales(least=0.3)
    before = attended(*wrap(*inputs(), factors), causal=True)
    factors[name][1, 1] = value
    after = attended(*wrap(*inputs(), factors), causal=True, check=True)
    changed = np.zeros((BATCH, HEADS), bool)
    changed[1, 2:] = True
    np.testing.assert_array_equal(before[~changed].view("u2"), after[~changed].view("u2"))


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"scale": 10.0}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("large", [1e37, -3e38])
def test_descales_of_which_only_the_product_is_a_usual_number(large, how):
    factors = descales(least=0.3)
    factors["q_descale"][:], factors["k_descale"][:] = large, 0.7 / large
    attended(*wrap(*inputs(), factors), **how, return_lse=True, check=True)


def test_nan_reaches_those_who_see_it():
    """Rows are repaired although q · q_descale overflows float32 and k · k_descale is tiny."""
    q, k, v = inputs()
    q[..., 0] = 448
    q[0, 1, 3, 4] = k[0, 1, 60, 3] = v[1, 1, 85, 5] = np.nan
    factors = descales(least=0.3)
    factors["q_descale"] *= -1e37
    factors["k_descale"] *= 1e-37
    out = attended(*wrap(q, k, v, factors), causal=True, check=True)
    assert np.isfinite(out[1, :2].astype("f4")).all()
    assert np.isfinite(out[0, 2:, :40].astype("f4")).all()


@pytest.mark.slow
def test_arrays_of_any_strides():
    q, k, v = inputs()
    factors = descales(least=0.3)
    out = attended(*wrap(q, k, v, factors))
    turned = (x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in (q, k, v))
    columns = (np.asfortranarray(x) for x in (q, k, v))
    wide = np.repeat(factors["q_descale"], 2, axis=1)[:, ::2]
    backwards = (x[:, ::-1, ::-1, ::-1].copy()[:, ::-1, ::-1, ::-1] for x in (q, k, v))
    odd = (np.pad(x.ravel(), (1, 0))[1:].reshape(x.shape) for x in (q, k, v))  # unaligned addresses
    for arrays in (turned, columns, backwards, odd):
        again = attended(*wrap(*arrays, {**factors, "q_descale": wide}))
        assert again.tobytes() == out.tobytes()
    rows_first = (x.swapaxes(1, 2) for x in (q, k, v))
    again = attended(*wrap(*rows_first, factors), layout="bshd")
    assert again.swapaxes(1, 2).tobytes() == out.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("devices", [None, (0, 2)], ids=str)
def test_parts_of_numpy_arrays_have_their_descales(devices):
    arrays, factors = inputs(), descales(least=0.3)
    out = attended(*wrap(*arrays, factors))
    before = transfer.configure()
    transfer.configure(piece_bytes=20_000)
    try:
        far = FarDevice()
        found = attended(*wrap(*arrays, factors), backend=Devices(devices, backend=far))
        assert 4 in {size for *_, size in far.copied}  # 4 bytes: one key head's descale
    finally:
        transfer.configure(**vars(before))
    assert found.tobytes() == out.tobytes()


def test_bounds_find_what_is_wrong():
    """Errors exceed the bound for swapped or omitted descales and for inputs rounded twice."""
    q, k, v = inputs()
    factors = descales(least=0.5)
    p = Problem.of(
        *(q, k, v),
        operands=tuple(optional_inputs.of_value(*x) for x in factors.items()),
        out_dtype="float32",
    )
    given = {"Q": q, "K": k, "V": v, **{f"mods.{name}": x for name, x in factors.items()}}
    wanted = OPERATIONS["forward"].reference(given, p, ["float8_e4m3"])["float8_e4m3"]

    def ratio(factors, k=k):
        a, b, c = (factors[name][..., None, None] for name in DESCALES)
        arrays = q.astype("f8") * a.repeat(2, axis=1), k.astype("f8") * b, v.astype("f8") * c
        out, lse = reference.attention(*arrays, scale=D**-0.5)
        return [x.ratio for x in tolerance.compare({"O": out, "lse": lse}, wanted)]

    assert max(ratio(factors)) < 0.05
    for name in DESCALES:
        other = {**factors, name: factors[name][:, ::-1]}
        assert max(ratio(other)) > 1
    coarse = (k.astype("f4") / 16).astype(ml_dtypes.float8_e5m2).astype("f4") * 16
    assert max(ratio(factors, coarse)) > 1


def test_auto_takes_the_kernel_that_can(monkeypatch):
    p = Problem.of_sizes(M=100, d=64, dtype="float8_e4m3fn", k_descale=True)
    record = planning.select("auto", "forward", p, limits_of("90"))
    assert record.name == "wgmma_fp8"
    plan = planning.plan(record, p, limits_of("90"))
    assert [x.entry for x in plan.launches] == ["transpose_e4m3", "wgmma_fp8"]
    assert planning.can(record, transforms.resize(p, N=0), limits_of("90"))
    for arch, d, words in (
        ("80", 64, "it runs only on sm_90a, but this is sm_80; convert q, k and v to float16"),
        ("90", 300, "it supports head dimensions up to 256; convert q, k and v to float16"),
    ):
        with pytest.raises(Unsupported, match=f"wgmma_fp8 supports float8_e4m3fn, but {words}"):
            planning.select("auto", "forward", transforms.resize(p, d=d, dv=d), limits_of(arch))
    with pytest.raises(Unsupported, match="kernels that can: wgmma_fp8"):
        planning.plan(cupyfa.kernel("fa2"), p, limits_of("90"))


ONE = np.ones((BATCH, KV_HEADS), "f4")


def test_calls_on_parts_are_refused():
    array, _ = map(pytest.importorskip, ("dask.array", "cupyfa.dask"))
    q, k, v = (array.from_array(x, chunks=-1) for x in inputs())
    with pytest.raises(
        Unsupported, match="but partitioned calls do not support this dtype; convert"
    ):
        cupyfa.attention(q, k, v)
    with pytest.raises(TypeError, match="v is of type Scaled; pass a Dask array"):
        cupyfa.attention(q, k, Scaled(v, ONE))


@pytest.mark.slow
def test_a_check_finds_a_wrong_descale(monkeypatch):
    def twice(inputs, p):
        return before({**inputs, "mods.v_descale": 2 * inputs["mods.v_descale"]}, p)

    before = cupyfa.ladder.operations._without_descales
    monkeypatch.setattr(cupyfa.ladder.operations, "_without_descales", twice)
    with pytest.raises(WrongResult, match="wgmma_fp8 on"):
        attended(*wrap(*inputs(), descales(least=0.3)), causal=True, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("d, dv", [(64, 64), (128, 128), (256, 256), (72, 40)])
def test_nvrtc_compiles_what_is_launched(d, dv):
    forms = dict.fromkeys(DESCALES, (2, 8))
    p = Problem.of_sizes(
        batch=2, heads=32, kv_heads=8, M=4096, d=d, dv=dv, dtype="float8_e4m3fn", **forms
    )
    for program in planning.plan(cupyfa.kernel("wgmma_fp8"), p, limits_of("90")).programs:
        assert compile_launch(program, "90a").spilled_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128, 256])
def test_long_sequences_on_a_gpu(hopper, d):
    """Runs the Hopper kernel with the tiles selected for the GPU."""
    rng = np.random.default_rng(d)
    q, k, v = (drawn(2, heads, 1000, d, seed=heads) for heads in (8, 2, 2))
    factors = {x: rng.uniform(-2, 2, (2, 2)).astype("f4") for x in DESCALES}
    arrays = wrap(q, k, v, factors)
    for how in ({}, {"causal": True, "out": "float32"}):
        cupyfa.attention(*arrays, **how, backend=hopper, check=True)
        cupyfa.attention(*arrays, **how, backend=hopper)


@pytest.mark.gpu
def test_arrays_in_gpu_memory_and_a_captured_call(hopper):
    """A captured call reads descales when its graph runs; strided columns are copied."""
    import cupy

    q, k, v = inputs(48)  # rows are multiples of 16 bytes, so TMA loads them in place
    factors = descales(least=0.3)
    there = {name: cupy.asarray(x) for name, x in factors.items()}
    arrays = [hopper.upload(x) for x in (q, k, v)]
    wanted = cupyfa.attention(*wrap(q, k, v, factors), backend=hopper, check=True)
    for _ in range(3):  # repeats the call with the same arrays
        assert cupyfa.attention(*wrap(*arrays, there)).get().tobytes() == wanted.tobytes()
    columns = [cupy.asfortranarray(x.view("u1")).view(E4M3) for x in arrays]
    assert cupyfa.attention(*wrap(*columns, there)).get().tobytes() == wanted.tobytes()
    prepared = cupyfa.compile(*wrap(*arrays, there))
    shapes, forms = [x.shape for x in arrays], {name: x.shape for name, x in there.items()}
    of_shapes = cupyfa.compile(*wrap(*shapes, forms), dtype="float8_e4m3fn", backend=hopper)
    assert of_shapes(*arrays, **there).get().tobytes() == wanted.tobytes()
    out = cupy.empty(wanted.shape, ml_dtypes.bfloat16)
    prepared(*arrays, *there.values(), out=out)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        prepared(*arrays, *there.values(), out=out)
        graph = stream.end_capture()
        there["v_descale"] *= 2
        graph.launch()
        stream.synchronize()
    assert out.get().astype("f4").tobytes() == (2 * wanted.astype("f4")).tobytes()


@pytest.mark.gpu
def test_tensors_of_torch(hopper):
    torch = pytest.importorskip("torch")
    arrays, factors = inputs(), descales(least=0.3)  # rows of 40 bytes are copied for TMA
    wanted = cupyfa.attention(*wrap(*arrays, factors), backend=hopper)
    there = [torch.from_numpy(x.view("u1")).cuda().view(torch.float8_e4m3fn) for x in arrays]
    given = {name: torch.from_numpy(x).cuda() for name, x in factors.items()}
    found = cupyfa.attention(*wrap(*there, given))
    assert found.get().tobytes() == wanted.tobytes()
