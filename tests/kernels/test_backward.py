"""Gradients: every rung of the backward ladder, and the functions that launch the rungs."""

import numpy as np
import pytest
from helpers.device_code import launch
from helpers.gradients import BACKWARD, MMA, reference_gradients, tiles_of
from helpers.problems import check_case, inputs_of, name, planned

import cupyfa
from cupyfa import Problem
from cupyfa.lab.analysis.resources import limits_of
from cupyfa.lab.bench.sweeps import usual_dtype
from cupyfa.lab.bench.trial import trial
from cupyfa.lab.verify.tasks import difference
from cupyfa.ladder import backward
from cupyfa.numerics import reference
from cupyfa.planner import choose_kernel as planning
from cupyfa.planner.source import KERNELS as FILES, ROOT
from cupyfa.problem.dtypes import DTYPES
from cupyfa.runtime import guard
from cupyfa.runtime.simulator import Simulator

KERNELS = pytest.mark.parametrize("kernel", BACKWARD.values(), ids=name)
SMALL = {"batch": 2, "heads": 2, "kv_heads": 1, "M": 19, "N": 23, "d": 8}


SCALAR_TILES = [(5, 11), (16, 3), (1, 1), (40, 18), (7, 64)]
MMA_TILES = {
    "mma_columns": [(32, 64, 4, 2), (64, 32, 8, 1), (128, 16, 1, 2)],
    # 1, 2 and then 4 warps share a group of 16 keys.
    "mma_f64_columns": [(32, 64, 4, 2), (16, 32, 4, 1), (16, 16, 4, 1)],
    "mma_two_pass": [(32, 64, 4, 2, 32, 32, 32, 1, 1), (64, 32, 8, 1, 48, 16, 16, 2, 2)],
    # 1 and then 4 warps share a group of 16 keys.
    "mma_fp16x2_two_pass": [(32, 64, 4, 2, 32, 32, 32, 1), (64, 32, 8, 1, 48, 16, 16, 2)],
    "mma_slices_backward": [(64, 64, 16, 64, 32, 3, 1)],
}


@pytest.mark.each_choice("kernel")
@pytest.mark.parametrize(
    "kernel, tile",
    [
        (k, x)
        for k in BACKWARD.values()
        if k in MMA or ("Br" in k.choice.names and not k.rules)
        for x in MMA_TILES.get(k.name, SCALAR_TILES)
    ],
    ids=name,
)
def test_tiles_of_other_sizes(backend, kernel, tile):
    sizes = {"heads": 2, "M": 50, "N": 45, "d": 9, "dv": 6, "window": (17, 2)}
    check_case(kernel, backend, sizes, **tiles_of(kernel, *tile))


@pytest.mark.few(1)
@pytest.mark.parametrize("d", [96, 144])
@pytest.mark.parametrize("kernel", [*MMA, BACKWARD["wgmma_fp16x2_two_pass"]], ids=name)
def test_default_tiles(backend, kernel, d):
    """Four warps share 96 columns of dQ, or two warps share 80 columns of a slice, unevenly."""
    sizes = {"heads": 2, "kv_heads": 1, "M": 150, "N": 140, "d": d, "causal": True}
    check_case(kernel, backend, sizes)


@pytest.mark.each_choice
@pytest.mark.parametrize("d", [64, 256])
@pytest.mark.parametrize("M, fewest", [(1025, 1), (4097, 1), (1025, 2)])
def test_the_last_block_of_a_key_head_finishes_dQ_or_a_launch_does(
    backend, monkeypatch, M, fewest, d
):
    """A separate launch finishes dQ if each key head has many rows or there are few key heads."""
    monkeypatch.setattr(backward, "FEWEST_FINISHING", fewest)
    sizes = {"heads": 2, "kv_heads": 2 if M == 4097 else 1, "M": M, "N": 130, "d": d}
    plan = planned(BACKWARD["wgmma_columns"], backend, {**sizes, "window": (None, 30)})
    assert len(plan.launches) == (2 if (M, fewest) == (1025, 1) else 3)
    guard.checked(backend, plan, inputs_of(plan), {})


@pytest.mark.each_choice
@pytest.mark.parametrize(
    "sizes, persistent",
    [
        ({"kv_heads": 1, "M": 100, "N": 140, "d": 64}, True),
        ({"kv_heads": 2, "M": 200, "N": 300, "d": 40, "causal": "top-left"}, True),
        ({"kv_heads": 2, "M": 1, "N": 140, "d": 64, "causal": "top-left"}, True),
        ({"kv_heads": 2, "M": 0, "N": 140, "d": 64}, False),
    ],
)
def test_blocks_go_from_one_tile_of_keys_to_the_next(backend, monkeypatch, sizes, persistent):
    """A top-left causal mask hides the last tiles of keys from all rows.

    If M is 0, no launch clears the tile counter, so each block computes a single tile.
    """
    monkeypatch.setattr(backward, "FEWEST_PERSISTENT", 1)
    plan = planned(BACKWARD["wgmma_columns"], backend, {"batch": 3, "heads": 2, **sizes})
    assert plan.launches[1].constants["persistent"] == persistent
    assert not persistent or plan.launches[2].entry == "finish_dQ"
    guard.checked(backend, plan, inputs_of(plan), {})


@pytest.mark.few(1)
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(
    "fewest_persistent, sizes",
    [
        (1, {"M": 130, "N": 140, "d": 64}),
        (1000, {"M": 130, "N": 130, "d": 96, "dv": 128}),
        (1000, {"M": 150, "N": 140, "d": 40, "dv": 60, "dropout": 0.2, "dropout_seed": 1}),
        (1000, {"M": 20, "N": 300, "d": 16, "dv": 128}),
    ],
)
def test_blocks_share_the_query_heads_of_a_group(
    backend, monkeypatch, heads, fewest_persistent, sizes
):
    monkeypatch.setattr(backward, "FEWEST_PERSISTENT", fewest_persistent)
    monkeypatch.setattr(backward, "FEWEST_FINISHING", 1000)
    monkeypatch.setattr(backward, "block_heads", lambda *_, **__: heads)
    sizes = {"batch": 2, "heads": 8, "kv_heads": 2, "causal": True, **sizes}
    plan = planned(BACKWARD["wgmma_columns"], backend, sizes)
    launch = plan.launches[1]
    assert launch.constants["shares_groups"]
    assert launch.constants["persistent"] == (fewest_persistent == 1)
    assert plan.unordered == {"dQ", "dK", "dV"}
    for values in ("normal", "nan"):
        guard.checked(backend, plan, inputs_of(plan, values=values), {})


IN_ORDER = ("mma_columns", "mma_two_pass", "mma_f64_columns", "wgmma_two_pass")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", IN_ORDER)
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(
    "sizes",
    [
        {"M": 70, "N": 90, "d": 32, "causal": True},
        {"M": 40, "N": 30, "d": 40, "dv": 60, "dropout": 0.2, "dropout_seed": 1},
    ],
)
def test_the_last_block_of_a_group_adds_in_the_order_of_shares(
    backend, monkeypatch, name, heads, sizes
):
    monkeypatch.setattr(backward, "FEWEST_FINISHING", 1000)
    monkeypatch.setattr(backward, "block_heads", lambda *_, **__: heads)
    sizes = {"batch": 2, "heads": 8, "kv_heads": 2, **sizes}
    kernel = BACKWARD[name]
    plan = planned(kernel, backend, sizes, usual_dtype(kernel))
    assert any(x.constants.get("shares_groups") for x in plan.launches)
    assert plan.unordered <= {"dQ"}
    for values in ("normal", "nan"):
        guard.checked(backend, plan, inputs_of(plan, values=values), {})


@pytest.mark.each_choice
@pytest.mark.parametrize(
    "name",
    ["wgmma_columns", *(pytest.param(x, marks=pytest.mark.slow) for x in IN_ORDER)],
)
def test_blocks_share_the_groups_of_sequences(backend, monkeypatch, name):
    monkeypatch.setattr(backward, "block_heads", lambda *_, **__: 1)
    checked = cupyfa.check(name, lengths="150,0,70,130", causal=True, samples=2, backend=backend)
    assert checked.right == checked.runs == 2


@pytest.mark.parametrize(
    "d, heads, kv_heads, batch, M, causal, expected",
    [
        (64, 32, 4, 32, 512, True, 8),
        (64, 32, 4, 16, 1024, True, 8),
        (64, 32, 4, 4, 4096, True, 4),
        (64, 32, 1, 1, 16384, True, 2),
        (64, 9, 3, 8, 2048, True, 3),
        (128, 16, 2, 4, 4096, True, 2),
        (128, 32, 8, 2, 1024, True, 2),
        (128, 32, 8, 2, 8192, True, 4),
        (128, 28, 4, 1, 4096, True, 1),
        (128, 32, 8, 1, 1024, False, 2),
        (128, 16, 1, 4, 4096, False, 16),
        (128, 16, 1, 1, (128, 65536), True, 16),
        (128, 16, 16, 4, 4096, True, 1),
        (256, 8, 1, 4, 4096, True, 8),
    ],
)
def test_heads_of_a_block_follow_the_measurements(
    monkeypatch, d, heads, kv_heads, batch, M, causal, expected
):
    monkeypatch.setattr(backward, "FEWEST_FINISHING", 128)  # conftest.py lowers it
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "d": d}
    sizes["M"], sizes["N"] = M if isinstance(M, tuple) else (M, M)
    problem = Problem.of_sizes(**sizes, dtype="bfloat16", causal=causal)
    plan = planning.plan(BACKWARD["wgmma_columns"], problem, limits_of("90"))
    blocks = {x.entry: x for x in plan.launches if x.entry.startswith("wgmma_columns")}
    splits = heads // kv_heads // expected
    (launch,) = blocks.values()
    assert launch.constants.get("shares_groups", False) == (splits > 1)
    if splits > 1:
        assert next(x for x in launch.arguments if x.name == "splits").value == splits


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "columns, rows, sizes",
    [
        ((16, 32, 4), (32, 16), {"d": 250, "dv": 40, "causal": True}),
        ((32, 32, 4), (64, 32), {"d": 144, "dv": 200, "window": (17, 2)}),
        ((16, 64, 8), (64, 16), {"d": 60, "dv": 256, "dropout": 0.2, "dropout_seed": 1}),
    ],
)
def test_warps_that_share_sums_of_wide_heads(backend, columns, rows, sizes):
    """In a team, two or four warps compute weights.

    Each warp accumulates some columns of d or dv; a warp may accumulate no columns.
    """
    tiles = dict(zip(("Br", "Bc", "warps", "Qr", "Qc"), (*columns, *rows)))
    sizes = {"heads": 2, "kv_heads": 1, "M": 40, "N": 70, **sizes}
    kernel = BACKWARD["mma_fp16x2_two_pass"]
    check_case(kernel, backend, sizes, **tiles, Qw=16, stages=1, Qs=1)


@pytest.mark.each_choice
@KERNELS
@pytest.mark.parametrize("empty", ["batch", "heads", "M", "N", "d", "dv"])
def test_any_size_may_be_zero(backend, kernel, empty):
    sizes = {"batch": 2, "heads": 2, "M": 5, "N": 7, "d": 8, "dv": 8, empty: 0}
    q, k, v, out, lse, dout = forward(Problem.of_sizes(**sizes, dtype=usual_dtype(kernel)))
    grads = cupyfa.backward(
        *(dout, q, k, v, out, lse),
        kernel=kernel,
        backend=backend,
        check=True,
        tiles=tiles_of(kernel),
    )
    for x, grad in zip((q, k, v), grads):
        assert grad.shape == x.shape and np.isfinite(grad).all()
    if empty in "MN":
        assert all((grad == 0).all() for grad in grads)


@pytest.mark.each_choice
@KERNELS
def test_nan_and_infinity_reach_only_rows_that_see_them(backend, kernel):
    """Inputs contain a NaN gradient, a NaN key and an infinite value."""
    sizes = {"heads": 1, "M": 40, "N": 40, "d": 8, "causal": True}
    usual = {"Br": 8, "Bc": 16} if "Br" in kernel.choice.names and not kernel.rules else {}
    plan = planned(kernel, backend, sizes, **(tiles_of(kernel) or usual))
    inputs = {x: array.copy() for x, array in inputs_of(plan).items()}
    inputs["dO"][0, 0, 2] = inputs["K"][0, 0, 30] = np.nan
    inputs["V"][0, 0, 35, 1] = np.inf
    score = {"scale": plan.problem.scale, "causal_offset": 0}
    out, lse = reference.attention(*(inputs[x] for x in "QKV"), **score)
    inputs["O"], inputs["lse"] = out.astype(inputs["Q"].dtype), lse.astype(inputs["lse"].dtype)
    guard.checked(backend, plan, inputs, {})


def test_warps_that_compute_nonfinite_rows_again_write_only_their_own_columns(backend):
    """dQ is computed in two slices, each narrower than the columns that the warps cover."""
    sizes = {"heads": 1, "M": 40, "N": 40, "d": 150}
    check_case(BACKWARD["mma_columns"], backend, sizes, "float16", values="nan")


@pytest.mark.each_choice
@KERNELS
def test_rows_without_a_key_add_nothing(backend, kernel):
    sizes = {"heads": 1, "M": 30, "N": 10, "d": 8, "causal": True}
    plan = planned(kernel, backend, sizes, **tiles_of(kernel))
    inputs = inputs_of(plan)
    for array in ("Q", "dO"):
        inputs[array][0, 0, :20] = np.nan
    guard.checked(backend, plan, inputs, {})
    inputs["K"][...], inputs["lse"][...] = np.inf, -np.inf
    for result in guard.checked(backend, plan, inputs, {}).values():
        assert (result == 0).all()


@pytest.mark.few(1)
@pytest.mark.parametrize("kernel", ["two_pass", "mma_two_pass", "mma_slices_backward"])
def test_runs_without_atomics_give_the_same_bits(kernel):
    kernel, engine = BACKWARD[kernel], Simulator()
    plan = planned(kernel, engine, {**SMALL, "M": 70, "N": 90}, **tiles_of(kernel))
    inputs = inputs_of(plan)
    results = guard.checked(engine, plan, inputs, {})
    assert difference(engine, plan, inputs, results, 3) is None


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["columns", "rows", "mma_columns"])
def test_runs_with_atomics_differ_but_are_right(kernel):
    kernel = BACKWARD[kernel]
    sizes = {**SMALL, "heads": 4, "kv_heads": 1, "M": 150, "N": 150}
    plan = planned(kernel, Simulator(), sizes, **(tiles_of(kernel) or {"Br": 8, "Bc": 8}))
    inputs = inputs_of(plan)
    runs = [guard.checked(Simulator(schedule=i, workers=2), plan, inputs, {}) for i in range(1, 5)]
    differing = {
        name for name in plan.outputs if any((x[name] != runs[0][name]).any() for x in runs)
    }
    assert differing <= set(kernel.unordered)
    assert trial(Simulator(), plan, inputs, reruns=2).passed


def forward(p, seed=0):
    """Returns q, k, v, the forward results, and an output gradient."""
    case = cupyfa.lab.Case("backward", p, seed)
    return tuple(case.inputs()[name] for name in ("Q", "K", "V", "O", "lse", "dO"))


def problem(**sizes):
    return Problem.of_sizes(**{**SMALL, "causal": True, **sizes})


def expected(p, q, k, v, dout):
    return reference_gradients(
        dout, q, k, v, scale=p.scale, causal_offset=p.causal_offset if p.causal else None
    )


def close(actual, wanted):
    for one, other in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_pullback_of_a_call(backend, dtype):
    p = problem(dtype=dtype)
    q, k, v, _, _, dout = forward(p)
    out, pullback = cupyfa.vjp(q, k, v, causal=True, backend=backend, scale=0.3)
    np.testing.assert_array_equal(
        out, cupyfa.attention(q, k, v, causal=True, backend=backend, scale=0.3)
    )
    again = pullback(dout)
    for grad, x, once in zip(pullback(dout), (q, k, v), again, strict=True):
        assert grad.shape == x.shape and grad.dtype == x.dtype
        np.testing.assert_array_equal(grad, once)
    right = reference_gradients(dout, q, k, v, scale=0.3, causal_offset=p.causal_offset)
    loose = {"float16": 5e-3, "bfloat16": 4e-2}.get(dtype, 1e-4)
    for grad, other in zip(again, right):
        np.testing.assert_allclose(grad.astype(float), other, atol=loose * 2, rtol=loose)


@pytest.mark.parametrize("lead", [(), (3,), (2, 2, 3)], ids=str)
def test_leading_axes(backend, lead):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(*lead, n, 4)).astype(np.float32) for n in (9, 7, 7))
    out, pullback = cupyfa.vjp(q, k, v, backend=backend, check=True)
    assert [grad.shape for grad in pullback(out)] == [q.shape, k.shape, v.shape]


def test_bshd_is_bhsd_with_heads_inside(backend):
    p = problem(N=19)
    arrays = forward(p)
    whole = cupyfa.backward(arrays[5], *arrays[:5], causal=True, backend=backend)
    q, k, v, out, dout = (np.ascontiguousarray(arrays[i].swapaxes(1, 2)) for i in (0, 1, 2, 3, 5))
    tokens = cupyfa.backward(
        *(dout, q, k, v, out, arrays[4]), causal=True, backend=backend, layout="bshd"
    )
    for one, other in zip(tokens, whole):
        np.testing.assert_array_equal(one.swapaxes(1, 2), other)


def test_gradients_are_written_to_given_arrays(backend):
    q, k, v, out, lse, dout = forward(problem())
    mine = tuple(np.full_like(x, 7) for x in (q, k, v))
    grads = cupyfa.backward(dout, q, k, v, out, lse, backend=backend, grads=mine)
    assert all(grad is x for grad, x in zip(grads, mine))
    close(mine, cupyfa.backward(dout, q, k, v, out, lse, backend=backend))
    partly = cupyfa.backward(
        *(dout, q, k, v, out, lse), backend=backend, grads=(None, mine[1], None)
    )
    assert partly[1] is mine[1] and partly[0] is not mine[0]


def test_cupy_in_cupy_out(cuda):
    import cupy

    arrays = [cupy.asarray(x) for x in forward(problem())]
    grads = cupyfa.backward(arrays[5], *arrays[:5], causal=True, deterministic=True)
    assert all(isinstance(grad, cupy.ndarray) for grad in grads)
    host = [x.get() for x in arrays]
    close([grad.get() for grad in grads], expected(problem(), *host[:3], host[5]))


def test_deterministic_kernels():
    limits = Simulator().limits
    for p in (problem(), problem(dtype="float16", window=(3, None))):
        chosen = planning.select("auto", "backward", p, limits, deterministic=True)
        assert not chosen.unordered
    assert planning.select("two_pass", "backward", p, limits, deterministic=True).name == "two_pass"
    q, k, v, out, lse, dout = forward(problem())
    with pytest.raises(cupyfa.Unsupported, match="columns sums dQ in arbitrary order.*two_pass"):
        cupyfa.backward(
            *(dout, q, k, v, out, lse), kernel="columns", deterministic=True, backend="simulator"
        )
    of_array = Problem.of_sizes(M=8, N=8, d=8, bias="1hmn")
    able = "two_pass, mma_fp16x2_two_pass, wgmma_fp16x2_two_pass"
    with pytest.raises(cupyfa.Unsupported, match=f"; deterministic kernels: {able}$"):
        planning.select("columns", "backward", of_array, limits_of("90"), deterministic=True)


@pytest.mark.parametrize("lead", [(), (1,), (1, 1, 1)], ids=str)
def test_a_gradient_of_lse_has_the_axes_of_lse(lead):
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 1, 9, 8))
    how = {"return_lse": True, "backend": "simulator"}
    (_, lse), pullback = cupyfa.vjp(q, k, v, **how)
    wanted = pullback(dout, lse)
    (_, lse), pullback = cupyfa.vjp(*(x.reshape(*lead, 9, 8) for x in (q, k, v)), **how)
    for found, x in zip(pullback(dout.reshape(*lead, 9, 8), lse), wanted):
        np.testing.assert_array_equal(found, x.reshape(*lead, 9, 8))


def joined_to(library):
    """Returns the function that docs/howto/frameworks.md defines for a library.

    Skips the test if the library is not installed.
    """
    pytest.importorskip(library)
    page = (ROOT / "docs" / "howto" / "frameworks.md").read_text(encoding="utf-8")
    names = {}
    exec(page.split(f"<!-- for_{library}.py -->\n```python\n")[1].split("```")[0], names)
    return names["attention"]


def test_gradients_for_jax():
    attention = joined_to("jax")
    import jax

    p = problem()
    q, k, v, _, _, dout = (jax.numpy.asarray(x) for x in forward(p))
    options = (("causal", True), ("backend", "simulator"))
    out, pullback = jax.vjp(lambda *x: attention(*x, options), q, k, v)
    assert out.shape == dout.shape
    host = (np.asarray(x) for x in (q, k, v, dout))
    close(map(np.asarray, pullback(dout)), expected(p, *host))


def test_gradients_for_torch():
    attention = joined_to("torch")
    import torch

    p = problem()
    q, k, v, _, _, dout = forward(p)
    tensors = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    attention(*tensors, causal=True, backend="simulator").backward(torch.from_numpy(dout))
    close([x.grad.numpy() for x in tensors], expected(p, q, k, v, dout))
    sink, slope = (torch.ones(p.heads, requires_grad=True) for _ in range(2))
    how = {"score_mod": "score * slope[head]", "causal": True, "backend": "simulator"}
    attention(*tensors, {"sink": sink, "slope": slope}, **how).backward(torch.from_numpy(dout))
    for i, learned in enumerate((sink, slope)):
        ones = np.ones(p.heads, np.float32)
        read = {"sink": ones, "captured": {"slope": ones}}
        _, pullback = cupyfa.vjp(q, k, v, wrt=("sink", "slope"), **read, **how)
        np.testing.assert_array_equal(learned.grad.numpy(), pullback(dout)[i])


@pytest.mark.parametrize("d, dv", [(256, 256), (192, 128), (40, 250)])
@pytest.mark.parametrize("kernel", ["wgmma_columns", "wgmma_two_pass"])
def test_wide_tiles_fit_and_others_are_refused(kernel, d, dv):
    problem = Problem.of_sizes(M=64, d=d, dv=dv, dtype="float16")
    wide = planning.plan(BACKWARD[kernel], problem, limits_of("90"))
    assert [x.entry.endswith("_wide") for x in wide.launches[:2]] == [False, True]
    assert wide.constants["Bc"] == 64
    with pytest.raises(ValueError, match="Bc is 128, or 64 above d = 128"):
        planning.plan(BACKWARD[kernel], problem, limits_of("90"), Bc=128)


def test_stages_for_which_there_are_no_named_barriers_are_refused():
    problem, kernel = Problem.of_sizes(M=64, d=16, dtype="float16"), BACKWARD["wgmma_columns"]
    tiles = {"Br": 64, "Bc": 128, "dS_stages": 1}
    planning.plan(kernel, problem, limits_of("90"), stages=6, **tiles)
    with pytest.raises(ValueError, match="stages is at most 6"):
        planning.plan(kernel, problem, limits_of("90"), stages=7, **tiles)


@pytest.mark.parametrize("tiles, heads", [(1, 300), (3, 100), (16, 5), (16, 20), (300, 2)])
def test_each_tile_has_a_block_and_the_longest_of_the_last_heads_come_first(tiles, heads):
    header = (FILES / "backward/parts/longest_first.cuh").read_text()
    head = header.replace(
        "#pragma once", "using real = float;\nconstexpr bool causal = true, packed = false;"
    )
    head = head.replace("attention/extent.cuh", "tile/math.cuh")
    order = np.zeros(tiles * heads, np.int32)
    body = "for (int i = 0; i < s0; ++i) A[i] = longest_first(i, s0, s1);"
    launch(body, order, scalars=(np.int32(tiles * heads), np.int32(tiles)), head=head, threads=1)
    last = min(-(-264 // tiles), heads)  # number of heads whose tiles are scheduled together
    earlier = (heads - last) * tiles
    np.testing.assert_array_equal(order[:earlier], np.arange(earlier))
    assert sorted(order[earlier:]) == list(range(earlier, tiles * heads))
    assert (np.diff(order[earlier:] % tiles) >= 0).all()
