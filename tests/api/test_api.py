"""Semantics of calls: every statement of docs/semantics.md, on every backend."""

import gc
import warnings

import ml_dtypes
import numpy as np
import pytest
from helpers.foreign import Foreign
from helpers.problems import FORWARD, name
from helpers.threads import in_threads

import cupyfa
from cupyfa.lab.bench.sweeps import usual_dtype
from cupyfa.numerics import reference
from cupyfa.problem.dtypes import DTYPES
from cupyfa.problem.options import FLOAT8

NEG = -np.inf
KERNELS = pytest.mark.parametrize("kernel", FORWARD.values(), ids=name)


def arrays(*shape_q, N=None, dv=None, kv_heads=None, dtype=np.float32, seed=0):
    """Returns random q of shape_q, with matching k and v."""
    *lead, M, d = shape_q
    N, dv = M if N is None else N, d if dv is None else dv
    if kv_heads is not None:
        lead = [*lead[:-1], kv_heads]
    generator = np.random.default_rng(seed)
    shapes = (shape_q, (*lead, N, d), (*lead, N, dv))
    return [generator.standard_normal(shape).astype(dtype) for shape in shapes]


def arrays_for(kernel, *shape_q, **sizes):
    return arrays(*shape_q, dtype=DTYPES[usual_dtype(kernel)].numpy, **sizes)


def precision_of(kernel):
    """Returns a tolerance for the kernel's results."""
    if kernel.rounding == "float8_e4m3":
        return 0.15
    exact = kernel.rounding is None and usual_dtype(kernel) == "float32"
    return 2e-5 if exact else 5e-3


def skip_without_infinity(kernel):
    if kernel.rounding == "float8_e4m3":
        pytest.skip("e4m3 has no infinity: in q and k it counts as NaN")


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-6)


def expected(q, k, v, scale=None, causal_offset=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return reference.attention(q, k, v, scale=scale, causal_offset=causal_offset)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3)], ids=str)
def test_leading_axes(backend, lead):
    q, k, v = arrays(*lead, 9, 8, N=11, dv=5)
    o, lse = cupyfa.attention(q, k, v, backend=backend, return_lse=True, check=True)
    assert o.shape == (*lead, 9, 5)
    assert lse.shape == (*lead, 9)
    flat = [x.reshape(-1, 1, *x.shape[-2:]) for x in (q, k, v)]
    close(o.reshape(-1, 1, 9, 5), expected(*flat)[0])


def test_groups_of_query_heads_share_a_key_head(backend):
    q, k, v = arrays(2, 6, 9, 8, kv_heads=2)
    shared = cupyfa.attention(q, k, v, backend=backend, check=True)
    repeated = [np.repeat(x, 3, axis=1) for x in (k, v)]
    np.testing.assert_array_equal(shared, cupyfa.attention(q, *repeated, backend=backend))


@pytest.mark.parametrize("lead", [(3,), (2, 3), (2, 2, 3)], ids=str)
def test_bshd_is_bhsd_with_heads_inside(backend, lead):
    q, k, v = arrays(*lead, 9, 8, N=7)
    o, lse = cupyfa.attention(q, k, v, backend=backend, return_lse=True)
    tokens = [np.ascontiguousarray(x.swapaxes(-2, -3)) for x in (q, k, v)]
    o2, lse2 = cupyfa.attention(*tokens, backend=backend, layout="bshd", return_lse=True)
    np.testing.assert_array_equal(o2.swapaxes(-2, -3), o)
    np.testing.assert_array_equal(lse2, lse)


@pytest.mark.each_choice
@KERNELS
@pytest.mark.parametrize(
    "shape, N, dv",
    [((0, 2, 5, 8), 5, 8), ((2, 0, 5, 8), 5, 8), ((1, 2, 0, 8), 5, 8), ((1, 2, 5, 8), 5, 0)],
    ids=["batch", "heads", "M", "dv"],
)
def test_results_without_elements(backend, kernel, shape, N, dv):
    q, k, v = arrays_for(kernel, *shape, N=N, dv=dv)
    o, lse = cupyfa.attention(q, k, v, kernel=kernel, backend=backend, return_lse=True, check=True)
    assert o.shape == (*shape[:-1], dv)
    assert lse.shape == shape[:-1]
    assert np.isfinite(lse).all()


@KERNELS
def test_no_keys_make_empty_rows(backend, kernel):
    q, k, v = arrays_for(kernel, 1, 2, 5, 8, N=0)
    o, lse = cupyfa.attention(q, k, v, kernel=kernel, backend=backend, return_lse=True, check=True)
    assert (o == 0).all()
    assert (lse == NEG).all()


def test_no_rows_with_a_mask_in_memory(backend):
    """Both kernels copy the mask block by block; without rows there are no blocks."""
    q, k, v = (x.astype("f2") for x in arrays(1, 2, 0, 8, N=5))
    for kernel in ("wgmma_persistent", "mma_pipelined"):
        if backend.name == "simulator" or backend.limits.arch.startswith("90"):
            how = {"kernel": kernel, "backend": backend}
            o = cupyfa.attention(q, k, v, mask=np.ones((1, 1, 1, 5), bool), **how)
            assert o.shape == (1, 2, 0, 8)


def test_no_columns_make_equal_scores(backend):
    q, k, v = arrays(1, 2, 5, 0, N=7, dv=3)
    o, lse = cupyfa.attention(q, k, v, backend=backend, return_lse=True, check=True)
    close(o, np.broadcast_to(v.mean(2, keepdims=True), o.shape))
    close(lse, np.full(lse.shape, np.log(7)))


def test_noncontiguous_columns_are_copied(backend):
    q, k, v = (np.repeat(x, 2, axis=3)[..., ::2] for x in arrays(2, 2, 9, 8))
    close(cupyfa.attention(q, k, v, backend=backend, check=True), expected(q, k, v)[0])


def test_unaligned_memory_is_copied(backend):
    aligned = arrays(1, 1, 9, 8)
    q, k, v = (np.frombuffer(b"x" + x.tobytes(), np.uint8)[1:].view(x.dtype) for x in aligned)
    q, k, v = (x.reshape(1, 1, 9, 8) for x in (q, k, v))
    close(cupyfa.attention(q, k, v, backend=backend), expected(*aligned)[0])


@pytest.mark.gpu
def test_cupy_in_cupy_out_on_the_current_stream(cuda):
    import cupy

    host = arrays(2, 3, 50, 16, N=40)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        device = [cupy.asarray(x) for x in host]
        o, lse = cupyfa.attention(*device, return_lse=True)
        stream.synchronize()
    assert isinstance(o, cupy.ndarray) and isinstance(lse, cupy.ndarray)
    close(o.get(), expected(*host)[0])
    close(lse.get(), expected(*host)[1])


@pytest.mark.gpu
@KERNELS
def test_out_may_be_a_view_and_nothing_else_is_written(cuda, kernel):
    import cupy

    q = cupy.asarray(arrays_for(kernel, 1, 2, 5, 8)[0])
    memory = cupy.full((1, 2, 15, 8), 7, q.dtype)
    out = memory[:, :, 5:10][:, :, ::-1]
    assert cupyfa.attention(q, q, q, kernel=kernel, out=out) is out
    cupy.testing.assert_allclose(out, cupyfa.attention(q, q, q, kernel=kernel), atol=1e-3)
    assert (memory[:, :, :5] == 7).all() and (memory[:, :, 10:] == 7).all()


@pytest.mark.gpu
def test_cupy_views_and_out_are_used_in_place(cuda):
    import cupy

    host = arrays(2, 3, 50, 16)
    q, k, v = (cupy.asarray(x)[:, ::-1, ::2] for x in host)
    out = cupy.full((2, 25, 3, 16), np.nan, np.float32).swapaxes(1, 2)
    cupyfa.attention(q, k, v)  # allocates this stream's workspace
    before = cupy.get_default_memory_pool().used_bytes()
    assert cupyfa.attention(q, k, v, out=out) is out
    assert cupy.get_default_memory_pool().used_bytes() == before
    close(out.get(), expected(*(x[:, ::-1, ::2] for x in host))[0])


@pytest.mark.gpu
def test_out_of_unsupported_strides_is_copied_into(cuda):
    import cupy

    x = cupy.asarray(arrays(2, 3, 6, 8)[0])
    out = cupy.full((3, 2, 6, 16), np.nan, np.float32).swapaxes(0, 1)[..., ::2]
    assert cupyfa.softmax(x, out=out) is out
    cupy.testing.assert_array_equal(out, cupyfa.softmax(x))
    assert cupyfa.attention(x, x, x, out=out) is out
    cupy.testing.assert_array_equal(out, cupyfa.attention(x, x, x))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_torch_tensors_pass_through_dlpack(cuda, dtype):
    torch = pytest.importorskip("torch", reason="torch, a peer to exchange arrays with")
    import cupy

    q, k, v = (torch.from_numpy(x).to("cuda", getattr(torch, dtype)) for x in arrays(1, 2, 9, 8))
    o = cupyfa.attention(q, k, v, check=True)
    assert isinstance(o, cupy.ndarray)
    assert str(o.dtype) == dtype


def test_dlpack_arrays_on_the_host_are_accepted(backend):
    host = arrays(1, 2, 9, 8)
    o = cupyfa.attention(*(Foreign(x) for x in host), backend=backend)
    assert isinstance(o, np.ndarray)
    close(o, expected(*host)[0])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_dtypes_of_out_and_lse(backend, dtype):
    q, k, v = arrays(2, 9, 8, dtype=dtype)
    o, lse = cupyfa.attention(q, k, v, backend=backend, return_lse=True, check=True)
    assert o.dtype == dtype
    assert lse.dtype == (np.float64 if dtype is np.float64 else np.float32)


@pytest.mark.parametrize("dtype", [np.float16, np.dtype("f2"), "float16"])
def test_dtypes_are_given_by_name_or_as_those_of_numpy(dtype):
    shape = (1, 2, 9, 8)
    assert cupyfa.plan(M=9, d=8, dtype=dtype, backend="simulator").problem.dtype.name == "float16"
    made = cupyfa.compile(shape, shape, shape, dtype=dtype, backend="simulator")
    q, k, v = arrays(*shape, dtype=np.float16)
    assert made(q, k, v).dtype == np.float16
    out = cupyfa.attention(q, k, v, out=np.float32, backend="simulator")
    assert out.tobytes() == cupyfa.attention(q, k, v, out="float32", backend="simulator").tobytes()


@pytest.mark.parametrize("scale", [None, 0, -2.5, 1.0])
def test_scale(backend, scale):
    q, k, v = arrays(1, 1, 9, 8)
    o = cupyfa.attention(q, k, v, scale=scale, backend=backend, check=True)
    close(o, expected(q, k, v, scale)[0])


@pytest.mark.parametrize("M, N", [(9, 9), (9, 14), (14, 9), (70, 3)])
@pytest.mark.parametrize("causal", [True, "bottom-right", "top-left"])
def test_causal_alignments(backend, M, N, causal):
    q, k, v = arrays(1, 1, M, 8, N=N)
    o, lse = cupyfa.attention(q, k, v, causal=causal, backend=backend, return_lse=True, check=True)
    diagonal = 0 if causal == "top-left" else N - M
    for row in range(M):
        seen = max(0, min(N, row + diagonal + 1))
        if seen == 0:
            assert (o[..., row, :] == 0).all() and (lse[..., row] == NEG).all()
        else:
            alone = expected(q[:, :, row : row + 1], k[:, :, :seen], v[:, :, :seen])
            close(o[:, :, row : row + 1], alone[0])


@pytest.mark.each_choice
@KERNELS
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_masked_keys_never_matter(backend, kernel, poison):
    q, k, v = arrays_for(kernel, 1, 2, 40, 8, N=70, dv=70)
    clean = cupyfa.attention(q, k, v, kernel=kernel, causal="top-left", backend=backend)
    k[:, :, 35:] = v[:, :, 35:] = poison
    o, lse = cupyfa.attention(
        q, k, v, kernel=kernel, causal="top-left", backend=backend, return_lse=True, check=True
    )
    # If a tile contains a NaN, some kernels compute its rows again and sum in another order.
    tolerance = precision_of(kernel) / 2
    if getattr(kernel, "rounding", None) != FLOAT8:  # float8 kernels repair rows more precisely
        np.testing.assert_allclose(o[:, :, :35], clean[:, :, :35], rtol=tolerance, atol=tolerance)
    assert np.isfinite(lse[:, :, :35]).all()
    assert not np.isfinite(o[:, :, 35:]).any()


@KERNELS
def test_a_nan_score_makes_its_row_nan_and_no_other(backend, kernel):
    q, k, v = arrays_for(kernel, 1, 1, 40, 8)
    q[0, 0, 5, 3] = np.nan
    o, lse = cupyfa.attention(q, k, v, kernel=kernel, backend=backend, return_lse=True, check=True)
    hit = np.arange(40) == 5
    assert np.isnan(o[0, 0, hit]).all() and np.isnan(lse[0, 0, hit]).all()
    assert np.isfinite(o[0, 0, ~hit]).all() and np.isfinite(lse[0, 0, ~hit]).all()


@KERNELS
def test_scores_of_minus_infinity_have_no_weight(backend, kernel):
    skip_without_infinity(kernel)
    q, k, v = (
        np.ones_like(x) * one for x, one in zip(arrays_for(kernel, 1, 1, 3, 8, N=40), (1, 0, 1))
    )
    v[:] = arrays_for(kernel, 1, 1, 40, 8)[2]
    k[0, 0, ::2] = NEG
    o, lse = cupyfa.attention(q, k, v, kernel=kernel, backend=backend, return_lse=True, check=True)
    np.testing.assert_allclose(o[0, 0, 0], v[0, 0, 1::2].mean(0), atol=1e-3)
    np.testing.assert_allclose(lse, np.log(20), rtol=1e-5)


@KERNELS
def test_a_nan_value_propagates_with_weights_of_0(backend, kernel):
    skip_without_infinity(kernel)
    q, k, v = (np.ones_like(x) for x in arrays_for(kernel, 1, 1, 3, 8, N=40))
    k[:] = NEG
    v[0, 0, 7, 1] = np.nan
    o, lse = cupyfa.attention(q, k, v, kernel=kernel, backend=backend, return_lse=True, check=True)
    assert (o[..., 0] == 0).all() and np.isnan(o[..., 1]).all()
    assert (lse == NEG).all()


@KERNELS
@pytest.mark.parametrize("size", [1e2, -1e4])
def test_huge_scores_do_not_overflow(backend, kernel, size):
    q, k, v = arrays_for(kernel, 1, 1, 40, 8)
    q[..., 0], k[..., 0] = 1, size
    o, lse = cupyfa.attention(
        q, k, v, kernel=kernel, scale=1, backend=backend, return_lse=True, check=True
    )
    assert np.isfinite(o).all() and np.isfinite(lse).all()


@pytest.mark.parametrize("signs", [(1, 1), (-1, -1), (1, -1)], ids=str)
def test_a_check_does_not_judge_scores_beyond_float32(backend, signs):
    q = np.full((1, 1, 1, 2), 1e20, np.float32)
    k = (q * signs).astype(np.float32)
    out, pullback = cupyfa.vjp(q, k, np.ones_like(q), backend=backend, check=True)
    if signs != (1, -1):  # the score of (1, -1) is infinite or NaN
        assert (out == 0).all() if signs == (-1, -1) else np.isnan(out).all()
    pullback(np.ones_like(out))


@KERNELS
def test_results_repeat_and_do_not_depend_on_the_batch(backend, kernel):
    q, k, v = arrays_for(kernel, 3, 2, 40, 8, N=50)
    first, lse = cupyfa.attention(q, k, v, kernel=kernel, backend=backend, return_lse=True)
    again, lse2 = cupyfa.attention(q, k, v, kernel=kernel, backend=backend, return_lse=True)
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(lse, lse2)
    # cuBLAS may select another GEMM for a batch, and fa2_split_kv another number of splits.
    if not kernel.name.startswith(("baseline", "fa2_split_kv")):
        alone = cupyfa.attention(q[1:2], k[1:2], v[1:2], kernel=kernel, backend=backend)
        np.testing.assert_array_equal(first[1:2], alone)


@pytest.mark.parametrize("check", [False, True])
def test_out_is_filled_and_returned(backend, check):
    q, k, v = arrays(2, 3, 9, 8)
    out = np.full((2, 9, 3, 8), np.nan, np.float32).swapaxes(1, 2)
    assert cupyfa.attention(q, k, v, backend=backend, out=out, check=check) is out
    np.testing.assert_array_equal(out, cupyfa.attention(q, k, v, backend=backend))


def test_memory_mapped_inputs_go_with_a_plain_out(tmp_path):
    q, k, v = arrays(4, 8)
    np.save(tmp_path / "q.npy", q)
    mapped = np.load(tmp_path / "q.npy", mmap_mode="r")
    out = np.empty_like(q)
    cupyfa.attention(mapped, k, v, backend="simulator", out=out)
    np.testing.assert_array_equal(out, cupyfa.attention(q, k, v, backend="simulator"))


def test_an_error_leaves_out_untouched(backend):
    out = np.full((4, 8), 7, np.float32)
    with pytest.raises(cupyfa.Unsupported):
        cupyfa.attention(
            *arrays(4, 8), kernel="fa2", tiles={"Br": 1024, "Bc": 1024}, backend=backend, out=out
        )
    assert (out == 7).all()


@pytest.mark.gpu
def test_calls_keep_no_device_memory(cuda):
    import cupy

    used = []
    gc.collect()  # free garbage of earlier tests now rather than between two calls
    few = cupy.zeros((1, 4, 16), np.float32)
    for kernel in ("fa2", "baseline"):  # allocates workspaces for one and for several launches
        cupyfa.attention(few, few, few, kernel=kernel)
    del few
    for kernel in FORWARD.values():
        q, k, v = (cupy.asarray(x) for x in arrays_for(kernel, 2, 3, 50, 16))
        cupyfa.attention(q, k, v, kernel=kernel.name)
        del q, k, v
        used.append(cupy.get_default_memory_pool().used_bytes())
    # A call that kept memory would raise the total; garbage of earlier tests may still be freed.
    assert used == sorted(used, reverse=True)


def test_auto_without_a_device_takes_the_simulator_and_says_so_once(no_device):
    with pytest.warns(
        UserWarning, match="no CUDA device is visible: running in the simulator"
    ) as noted:
        cupyfa.attention(*arrays(4, 8))
    assert [note.filename for note in noted] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cupyfa.attention(*arrays(4, 8))


def test_several_threads_at_once(backend):
    q, k, v = arrays(2, 2, 40, 8)
    want = {d: cupyfa.attention(q[..., :d], k[..., :d], v, backend=backend) for d in (7, 8)}

    def work(d):
        for _ in range(5):
            got = cupyfa.attention(q[..., :d], k[..., :d], v, backend=backend)
            np.testing.assert_array_equal(got, want[d])

    in_threads(work, 4 * [*want])


def test_kernels_lists_every_record():
    assert {k.name for k in cupyfa.kernels("forward")} == set(FORWARD)
    assert len(cupyfa.kernels()) > len(FORWARD)


def test_a_function_is_traced_in_each_call(backend):
    # Python may reuse the address of a freed function for the next lambda.
    q, k, v = arrays(1, 2, 4, 16)
    for factor in (1.0, 2.0, 3.0):
        out = cupyfa.attention(q, k, v, score_mod=lambda score: score * factor, backend=backend)  # noqa: B023
        close(out, expected(q, k, v, scale=factor / 4)[0])


@pytest.mark.parametrize("M, N", [(0, 3), (3, 0)])
def test_arrays_of_texts_may_have_no_elements(backend, M, N):
    q, k, v = arrays(2, M, 16, N=N)
    out = cupyfa.attention(q, k, v, bias=np.zeros((2, M, N), np.float32), backend=backend)
    assert out.shape == (2, M, 16) and not out.any()


def test_arrays_of_texts_may_be_of_any_library(backend):
    q, k, v = arrays(1, 2, 4, 16)
    bias = np.random.default_rng(1).standard_normal((4, 4))
    plain = cupyfa.attention(q, k, v, bias=bias, backend=backend)
    for inputs in ((q, k, v), map(Foreign, (q, k, v))):
        np.testing.assert_array_equal(
            cupyfa.attention(*inputs, bias=Foreign(bias), backend=backend), plain
        )
