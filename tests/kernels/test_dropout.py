"""Dropout: all kernels and tiles, forward and backward, drop the same weights as NumPy."""

import numpy as np
import pytest
from helpers.gradients import BACKWARD, tiles_of
from helpers.problems import FORWARD, able, check_case, inputs_of, name, planned, usual_first

import cupyfa
from cupyfa import Dropout, Problem, Simulator
from cupyfa.lab.bench.sweeps import usual_dtype
from cupyfa.planner import choose_kernel as planning, source as sources
from cupyfa.problem.dtypes import DTYPES
from cupyfa.problem.options import AttentionOptions
from cupyfa.runtime import guard

F = np.float32
KERNELS = able("dropout")
DROPOUT = Dropout(0.3, 2**40 + 7, 3)
OPTIONS = {"dropout": 0.3, "dropout_seed": 2**40 + 7, "dropout_offset": 3}  # options of a Problem
SIZES = {"batch": 2, "heads": 2, "kv_heads": 1, "M": 35, "N": 41, "d": 16}


def check(backend, kernel, values="normal", tiles=None, **given):
    check_case(kernel, backend, {**SIZES, **OPTIONS, **given}, values=values, **tiles or {})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("d", [16, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kernel", usual_first(KERNELS))
def test_every_kernel(backend, kernel, d):
    check(backend, kernel, d=min(d, kernel.largest_d or d))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("values", ["nan", "inf", "huge"])
@pytest.mark.parametrize("kernel", usual_first(KERNELS, ["mma_split_kv", "mma_two_pass"]))
def test_rows_that_are_computed_again(backend, kernel, values):
    check(backend, kernel, values, causal=True, heads=4, kv_heads=2, M=50)


@pytest.mark.sampled(6)
@pytest.mark.slow
@pytest.mark.parametrize("values", ["nan", "inf"])
@pytest.mark.parametrize("kernel", KERNELS, ids=name)
def test_dropped_weights_of_a_text_keep_nan(backend, kernel, values):
    """A dropped weight times a NaN or infinite dO is NaN."""
    check(backend, kernel, values, score_mod="score * (1 + 0.1 * sin(key))", M=7)


@pytest.mark.few(2)
@pytest.mark.parametrize("out_dtype", [None, "float32"])
@pytest.mark.parametrize("kernel", ["mma_two_pass", "columns", "wgmma_columns", "wgmma_two_pass"])
def test_gradients_of_a_hidden_key_are_zero(backend, kernel, out_dtype):
    """A mark in the last bit of a weight, times a large dO, is a normal number in bfloat16."""
    hidden = 5
    changes = {"score_mod": "score * (1 + 0.1 * sin(key))", "mask_mod": f"key != {hidden}"}
    sizes = {**SIZES, **OPTIONS, **changes, "out_dtype": out_dtype}
    plan = planned(BACKWARD[kernel], backend, sizes, "bfloat16", **tiles_of(BACKWARD[kernel]))
    inputs = inputs_of(plan)
    inputs["dO"] *= 2**20
    found = guard.checked(backend, plan, inputs, {})
    assert not found["dK"][:, :, hidden].any() and not found["dV"][:, :, hidden].any()


@pytest.mark.parametrize(
    "kernel, sizes, tiles",
    [
        ("fa2", {"heads": 4, "M": 20, "N": 37}, {"Br": 4, "Bc": 4}),
        # Three heads share a tile.
        ("mma_pipelined", {"heads": 6, "M": 5, "N": 70}, {}),
        (
            "mma_split_kv",
            {"heads": 4, "M": 9, "N": 120},
            {"Br": 16, "Bc": 16, "Wr": 16, "stages": 3, "blocks_per_sm": 3},
        ),
    ],
)
def test_tiles_do_not_matter(backend, kernel, sizes, tiles):
    check(backend, FORWARD[kernel], tiles=tiles, **{"kv_heads": 2, **sizes})


def test_calls_take_it(backend):
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 2, 3, 20, 8))
    by_name = {"causal": True, "dropout": DROPOUT, "backend": backend}
    out, lse = cupyfa.attention(q, k, v, return_lse=True, **by_name)
    plain, lse_of_plain = cupyfa.attention(q, k, v, causal=True, return_lse=True, backend=backend)
    np.testing.assert_array_equal(lse, lse_of_plain)
    assert not np.allclose(out, plain)
    same, pullback = cupyfa.vjp(q, k, v, **by_name)
    np.testing.assert_array_equal(out, same)
    gradients = cupyfa.backward(dout, q, k, v, out, lse, **by_name)
    for one, other in zip(gradients, pullback(dout)):
        np.testing.assert_allclose(one, other, 1e-12)
    for other in ({"seed": 1}, {"offset": 4}, {"rate": 0.31}):
        of_other = {**by_name, "dropout": DROPOUT._replace(**other)}
        assert not np.allclose(out, cupyfa.attention(q, k, v, **of_other))


@pytest.mark.parametrize("kernel", ["fa2", "wgmma_columns"])
def test_numbers_are_not_compiled_in(kernel):
    def text(**options):
        record = next(k for k in KERNELS if k.name == kernel)
        p = Problem.of_sizes(**SIZES, dtype=usual_dtype(record), **options)
        return [sources.text(x) for x in planning.plan(record, p, Simulator().limits).launches]

    plain, one = text(), text(**OPTIONS)
    assert one == text(dropout=0.01, dropout_seed=0) != plain
    assert plain == text(dropout=0.0, dropout_seed=5) == text(dropout=1e-7, dropout_seed=5)


def test_without_dropout_a_seed_changes_nothing():
    assert AttentionOptions(dropout_seed=5, dropout_offset=3) == AttentionOptions()
    assert AttentionOptions(dropout=None) == AttentionOptions(dropout=np.float32(0))


# Pairs of equivalent Dropouts: seed or offset passed as arrays, and passed as scalars.
IN_MEMORY = (
    (Dropout(0.3, np.array([2**40 + 7]), np.array(3, np.uint32)), DROPOUT),
    (Dropout(0.3, np.array(-5), np.array([-1])), Dropout(0.3, 2**64 - 5, 2**32 - 1)),
    (Dropout(0.3, np.array([2**63 + 9], np.uint64)), Dropout(0.3, 2**63 + 9)),
    (Dropout(0.3, 7, np.array([3])), Dropout(0.3, 7, 3)),
)


def results(kernel, backend, dropout):
    """Returns a kernel's results with dropout, except sums without a fixed order."""
    dtype = DTYPES[usual_dtype(kernel)].numpy
    rng = np.random.default_rng(2)
    q, k, v, dout = (
        rng.standard_normal((1, heads, 35, 16)).astype(dtype) for heads in (2, 1, 1, 2)
    )
    how = {"dropout": dropout, "backend": backend, "causal": True}
    if kernel.operation == "forward":
        return (cupyfa.attention(q, k, v, kernel=kernel, **how),)
    if kernel.operation == "tangent":
        (out, _), (d_out, _) = cupyfa.jvp(q, k, v, tangents=(dout, v, k), kernel=kernel, **how)
        return out, d_out
    in_16_bits = usual_dtype(kernel) in ("float16", "bfloat16")
    of_forward = {**how, "kernel": "mma_pipelined" if in_16_bits else "fa2"}
    wrt = tuple(x for x in "qkv" if f"d{x.upper()}" not in kernel.unordered)
    return cupyfa.vjp(q, k, v, backward_kernel=kernel, wrt=wrt, **of_forward)[1](dout)


def test_the_mask_of_a_seed_in_memory():
    sizes = {"batch": 1, "heads": 2, "M": 20, "N": 30}
    for given, numbers in IN_MEMORY:
        kept = cupyfa.dropout_mask(given, **sizes)
        np.testing.assert_array_equal(kept, cupyfa.dropout_mask(numbers, **sizes))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("given, numbers", IN_MEMORY, ids=str)
@pytest.mark.parametrize("kernel", usual_first(KERNELS, ["mma_pipelined"]))
def test_a_seed_in_memory(backend, kernel, given, numbers):
    for one, other in zip(results(kernel, backend, given), results(kernel, backend, numbers)):
        np.testing.assert_array_equal(one, other)


def test_prepared_calls_read_a_seed_each_time(backend):
    rng = np.random.default_rng(3)
    q, k, v, dout = rng.standard_normal((4, 1, 2, 20, 8))
    seed, offset = np.array([1]), np.array(2)
    how = {"dropout": Dropout(0.5, seed, offset), "backend": backend}
    given = {"dropout_seed": seed, "dropout_offset": offset}
    prepared = cupyfa.compile(q, k, v, return_lse=True, **how)
    out, lse = prepared(q, k, v, **given)
    same = {"deterministic": True}
    back = cupyfa.compile(dout, q, k, v, out, lse, **same, **how)
    for of_seed, of_offset in ((1, 2), (5, 2), (5, 9)):
        seed[0], offset[()] = of_seed, of_offset
        numbers = {"dropout": Dropout(0.5, of_seed, of_offset), "backend": backend}
        out, lse = prepared(q, k, v, dropout=how["dropout"])
        np.testing.assert_array_equal(out, cupyfa.attention(q, k, v, **numbers))
        expected = cupyfa.backward(dout, q, k, v, out, lse, **same, **numbers)
        np.testing.assert_array_equal(back(dout, q, k, v, out, lse, seed, offset), expected)
    cupyfa.attention(q, k, v, check=True, **how)
    by_shape = cupyfa.compile(q.shape, k.shape, v.shape, dtype="float64", **how)
    given["dropout_offset"] = offset.reshape(1)
    placed = {name: backend.upload(x) for name, x in given.items()}
    found = by_shape(*map(backend.upload, (q, k, v)), **placed)
    np.testing.assert_array_equal(backend.download(found), out)
    plan = cupyfa.plan(M=20, d=8, heads=2, **how)
    assert [x.name for x in plan.problem.operands] == ["dropout_seed", "dropout_offset"]


@pytest.mark.parametrize("given", [np.array([1, 2]), np.array([1.0]), np.array(True)], ids=str)
def test_without_dropout_a_seed_in_memory_is_not_read(backend, given):
    x = np.zeros((1, 2, 3), F)
    cupyfa.attention(x, x, x, dropout=Dropout(0.0, given), backend=backend)
