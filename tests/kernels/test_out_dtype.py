"""With 16-bit inputs, float32 results equal the kernel's results before rounding to 16 bits."""

import numpy as np
import pytest
from helpers.gradients import BACKWARD, tiles_of
from helpers.problems import FORWARD, drawn, qkv, usual_first

import cupyfa
from cupyfa import Problem
from cupyfa.lab import Case
from cupyfa.numerics import tolerance
from cupyfa.planner import choose_kernel as planning
from cupyfa.runtime import guard
from cupyfa.runtime.arrays import readable_inputs

SIZES = {"heads": 2, "kv_heads": 1, "M": 45, "N": 70, "causal": True}
KERNELS = usual_first(k for k in (*FORWARD.values(), *BACKWARD.values()) if k.takes("float16"))
GRADIENTS = ("dQ", "dK", "dV")


def inputs_of_call(dtype="float16"):
    return qkv(40, 50, dtype, d=32, dv=16)


def checked(kernel, backend, p, inputs):
    tiles = tiles_of(kernel)
    plan = planning.plan(kernel, p, backend.limits, **tiles)
    given = {**inputs, "O": inputs["O"].astype(p.out_dtype.numpy)} if "O" in inputs else inputs
    return guard.checked(backend, plan, readable_inputs(plan, given), {})


@pytest.mark.parametrize("dtype, d", [("float16", 64), ("bfloat16", 41)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_float32_results_round_to_those_of_16_bits(backend, kernel, dtype, d):
    """Both runs compute gradients from the same O.

    With d = 64 kernels store two elements at a time, with d = 41 one element.
    """
    p = Problem.of_sizes(**SIZES, d=d, dtype=dtype)
    inputs = Case(kernel.operation, p).inputs()
    narrow = checked(kernel, backend, p, inputs)
    wide = checked(kernel, backend, p.with_options(out_dtype="float32"), inputs)
    for name in {"O", *GRADIENTS} & narrow.keys():
        assert wide[name].dtype == np.float32
        rounded = wide[name].astype(p.dtype.numpy)
        assert np.mean(wide[name] == rounded.astype(np.float32)) < 0.05, name
        if name not in kernel.unordered:
            np.testing.assert_array_equal(rounded, narrow[name])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_bound_of_float32_results_lacks_a_rounding(dtype):
    p = Problem.of_sizes(**SIZES, d=32, dtype=dtype)
    inputs = Case("forward", p).inputs()
    given = [inputs[x] for x in "QKV"]
    how = {"dtype": dtype, "scale": p.scale, "causal_offset": p.causal_offset}
    narrow, wide = (
        tolerance.expected_attention(*given, **how, out_dtype=x)[None]["O"]
        for x in (None, "float32")
    )
    half = tolerance.Arithmetic(dtype).output_unit * np.abs(wide.value)
    seen = wide.bound > 0
    assert (narrow.bound - wide.bound >= 0.99 * half)[seen].all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_results_that_were_rounded_before_are_found(dtype):
    """Values that the dtype represents exactly, or nearly, are not reported."""
    values = np.random.default_rng(0).standard_normal((4, 64))
    exact = values.astype(np.dtype(dtype)).astype("f8")
    for value, is_right in ((values, False), (exact, True), (np.zeros((4, 64)), True)):
        expected = {"O": tolerance.Expected(value, np.ones_like(value))}
        tolerance.require_unrounded({"O": value.astype("f4")}, expected, dtype, "fa2")
        rounded = {"O": exact.astype("f4") if value is values else value.astype("f4")}
        if is_right:
            tolerance.require_unrounded(rounded, expected, dtype, "fa2")
            continue
        with pytest.raises(
            cupyfa.WrongResult, match=rf"O: \d+ of \d+ float32 elements were rounded to {dtype}"
        ):
            tolerance.require_unrounded(rounded, expected, dtype, "fa2")


def test_all_calls_give_float32():
    q, k, v = inputs_of_call()
    how = {"backend": "simulator", "out": "float32"}
    (out, lse), back = cupyfa.vjp(q, k, v, return_lse=True, **how)
    prepared = cupyfa.compile(q.shape, k.shape, v.shape, dtype="bfloat16", **how)
    assert {x.dtype.name for x in (out, *back(out.astype(q.dtype)))} == {"float32"}
    assert prepared.plan.outputs["O"][1] == np.float32
    shapes = (out.shape, q.shape, k.shape, v.shape, out.shape, lse.shape)
    gradients = cupyfa.compile(*shapes, dtype="float16", **how)
    grads = [np.empty(x.shape, np.float32) for x in (q, k, v)]
    assert gradients(out.astype(q.dtype), q, k, v, out, lse, grads=grads)[0] is grads[0]
    of_lists = cupyfa.attention([q[0], q[1]], [k[0], k[1]], [v[0], v[1]], **how)
    for x, y in zip(of_lists, out):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)
    into = np.empty_like(out)
    assert cupyfa.attention(q, k, v, out=into, backend="simulator") is into
    np.testing.assert_array_equal(into, out)


@pytest.mark.parametrize("prefix", [False, True])
def test_decoding_gives_float32(prefix):
    shapes = (2, 4, 1, 32), (2, 2, 50, 32), (2, 2, 50, 16), (1, 2, 9, 32), (1, 2, 9, 16)
    q, k, v, *shared = drawn(*shapes, dtype="float16")
    lengths = np.array([30, 50], np.int32)
    cache = cupyfa.KVCache(k, v, lengths, prefix=tuple(shared) if prefix else None)
    out = np.empty((2, 4, 1, 16), np.float32)
    made = cupyfa.attention(q, cache, out=out, check=True, backend="simulator")
    assert made is out and not (made == made.astype(np.float16)).all()
    again = cupyfa.attention(q, cache, out="float32", backend="simulator")
    np.testing.assert_array_equal(again, out)


def test_the_dtype_of_the_inputs_is_the_usual_one():
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        p = Problem.of_sizes(**SIZES, d=8, dtype=dtype, out_dtype=dtype)
        assert p == Problem.of_sizes(**SIZES, d=8, dtype=dtype) and p.out_dtype == p.dtype


def test_arrays_of_another_dtype_are_refused():
    q, k, v = inputs_of_call()
    how = {"backend": "simulator"}
    out, lse = cupyfa.attention(q, k, v, return_lse=True, out="float32", **how)
    narrow = out.astype(np.float16)
    with pytest.raises(ValueError, match="out is float64 .*, but the result is float16"):
        cupyfa.attention(q, k, v, out=out.astype(np.float64), **how)
    prepared = cupyfa.compile(q, k, v, out="float32", **how)
    with pytest.raises(ValueError, match=r"out is float16 .*, but the result is float32 .*; pass"):
        prepared(q, k, v, out=narrow)
    of_narrow = cupyfa.backward(narrow, q, k, v, narrow, lse, **how)
    of_wide = cupyfa.backward(narrow, q, k, v, out, lse, **how)
    assert [x.dtype.name for x in (*of_narrow, *of_wide)] == ["float16"] * 3 + ["float32"] * 3
    with pytest.raises(TypeError, match="dout is float32; it must be float16"):
        cupyfa.backward(out, q, k, v, out, lse, **how)
    with pytest.raises(ValueError, match="dq of grads is float16 .*, but the result is float32"):
        cupyfa.backward(narrow, q, k, v, out, lse, grads=(q, None, None), **how)
