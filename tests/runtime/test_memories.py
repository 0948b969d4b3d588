"""Every kind of input in every form of call (see helpers.inputs), in host or device memory."""

from itertools import islice, product

import ml_dtypes
import numpy as np
import pytest
from helpers.gpu_like import GpuArray, GpuLike
from helpers.inputs import PATHS, Calls, require_equal, sorts_of

import cupyfa
from cupyfa.runtime import choose_backend


def on_host(array):
    return np.asarray(array)


# The combinations that exercise the most code run first.
TABLE = sorted(
    ((path, sort) for path in PATHS for sort in sorts_of(path)),
    key=lambda x: (x[1] != "both", x[0] not in ("packed", "cache", "lists")),
)
MEMORIES = [*product(("host", "device"), repeat=2)]  # of (q, k, v), and of the other inputs


@pytest.fixture
def like_a_gpu(monkeypatch):
    device = GpuLike()
    monkeypatch.setitem(choose_backend._owners, GpuArray, device)
    return device


@pytest.mark.sampled(6)
@pytest.mark.few(3)
@pytest.mark.parametrize("path, sort", TABLE)
def test_every_input_comes_from_any_memory(like_a_gpu, path, sort):
    wanted = Calls(path, sort, "simulator", on_host, on_host, on_host).results()
    ways = {"host": on_host, "device": lambda x: like_a_gpu.upload(np.asarray(x))}
    ways["list"] = np.ndarray.tolist if "memory" not in sort else on_host
    for q, read in (*MEMORIES, ("device", "list"), ("host", "list")):
        got = Calls(
            *(path, sort, like_a_gpu, ways[q], ways[read]),
            lambda x: x.host if isinstance(x, GpuArray) else x,
        )
        require_equal(got.results(), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("path, sort", TABLE)
def test_every_input_comes_from_any_memory_of_a_gpu(cuda, path, sort):
    import cupy

    ways = {"host": on_host, "device": cupy.asarray}
    wanted = Calls(path, sort, cuda, on_host, on_host, cupy.asnumpy).results()
    for q, read in MEMORIES:
        got = Calls(path, sort, cuda, ways[q], ways[read], cupy.asnumpy).results()
        require_equal(got, wanted)


# Host arrays of every dtype

DTYPES = ("float16", "bfloat16", "float32", "float64")


def of_dtype(*shape, dtype, seed=0):
    made = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return made.astype(getattr(ml_dtypes, dtype, dtype))


def host_calls(dtype, backend, several):
    """Yields name and results of every function on host arrays."""
    q, k, v = (of_dtype(2, 2, 20, 16, dtype=dtype, seed=i) for i in range(3))
    how = {"backend": backend, "causal": True}
    back = {"backward_kernel": "two_pass"}
    on = {**how, "backend": cupyfa.Devices([0], backend=backend)} if several else how
    (out, lse), pull = cupyfa.vjp(q, k, v, return_lse=True, kernel="fa2", **back, **how)
    yield "attention", [out, cupyfa.attention(q, k, v, kernel="fa2", **on)]
    yield "pullback", pull(out)
    prepared = cupyfa.compile(q, k, v, kernel="fa2", return_lse=True, **how)
    into = np.empty_like(out)
    yield "prepared", [*prepared(q, k, v), *prepared(q, k, v, out=into), into]
    gradients = cupyfa.compile(out, q, k, v, out, lse, kernel="two_pass", **how)
    arrays = [np.empty_like(x) for x in (q, k, v)]
    yield "prepared backward", gradients(out, q, k, v, out, lse, grads=arrays)
    rows = cupyfa.Packed(q[0].swapaxes(0, 1), np.array([0, 3, 20], np.int32))
    made, pull = cupyfa.vjp(rows, rows, rows, kernel="fa2", **back, **how)
    yield "packed", [made, *pull(made)]
    prepared = cupyfa.compile(rows, rows, rows, kernel="fa2", **how)
    yield "prepared packed", [prepared(rows, rows, rows)]
    lists, pull = cupyfa.vjp([*q], [*k], [*v], kernel="fa2", **back, **how)
    yield "lists", [*lists, *(y for x in pull(lists) for y in x)]
    bias = of_dtype(20, 20, dtype=dtype, seed=4)
    made, pull = cupyfa.vjp(q, k, v, bias=bias, wrt="q,bias", kernel="fa2", **back, **how)
    prepared = cupyfa.compile(q, k, v, bias=bias, kernel="fa2", **how)
    yield "bias", [made, *pull(made), prepared(q, k, v, bias=bias)]
    cache = cupyfa.KVCache(k.copy(), v.copy(), np.array([5, 9], np.int32))
    new = k[:, :, :1], v[:, :, :1]
    made = cupyfa.attention(q[:, :, :1], cache, append=new, backend=backend)
    yield "decode", [made, cache.k, cache.v]
    (made, total), pull = cupyfa.merge_vjp([(out, lse), (out, lse)], backend=backend)
    yield "merge", [made, total, *(y for x in pull(made) for y in x)]
    yield "softmax", [cupyfa.softmax(q, backend=backend)]


def require_same_calls(dtype, backend, wanted, several=False):
    for name, made in islice(host_calls(dtype, backend, several), len(wanted)):
        for x, y in zip(made, wanted[name], strict=True):
            assert isinstance(x, np.ndarray) and x.dtype == y.dtype, name
            np.testing.assert_array_equal(x, y, err_msg=name)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype, most", [("bfloat16", 4), *((x, 99) for x in DTYPES)])
def test_host_arrays_of_every_dtype(like_a_gpu, dtype, most):
    """Compares the first `most` functions: calls, prepared calls and gradients."""
    wanted = dict(islice(host_calls(dtype, "simulator", False), most))
    require_same_calls(dtype, like_a_gpu, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_host_arrays_of_every_dtype_on_a_gpu(cuda, dtype):
    """Results equal those of the same arrays on the device bit by bit."""
    import cupy

    def there(array):
        return cupy.asarray(array)

    q, k, v = (of_dtype(2, 2, 20, 16, dtype=dtype, seed=i) for i in range(3))
    found = dict(host_calls(dtype, cuda, False))
    require_same_calls(dtype, cuda, found, several=True)
    wanted = cupyfa.attention(*map(there, (q, k, v)), kernel="fa2", causal=True)
    for x in (found["attention"][0], found["prepared"][0]):
        np.testing.assert_array_equal(x, cupy.asnumpy(wanted))


def of_e4m3(backend, put):
    """Returns the bfloat16 results of calls on e4m3 arrays."""
    q, k, v = (of_dtype(2, 2, 64, 64, dtype="float8_e4m3fn", seed=i) for i in range(3))
    how, descale = {"backend": backend, "kernel": "wgmma_fp8"}, np.full((2, 2), 0.5, np.float32)
    q, k, v = (put(x) for x in (q, k, v))
    given = cupyfa.Scaled(q, descale), k, v
    out = cupyfa.attention(*given, **how)
    prepared = cupyfa.compile(*given, **how)
    rows = of_dtype(2, 32, 2, 64, dtype="float8_e4m3fn", seed=5)
    cache = cupyfa.KVCache(
        put(rows), put(rows.copy()), put(np.array([9, 30], np.int32)), layout="bshd"
    )
    token = put(of_dtype(2, 4, 1, 64, dtype="bfloat16"))
    new = tuple(put(of_dtype(2, 2, 1, 64, dtype="bfloat16")) for _ in "kv")
    decoded = [cupyfa.attention(token, cache, append=x, backend=backend) for x in (None, new)]
    return [out, prepared(*given), *decoded]


@pytest.mark.slow
def test_host_arrays_of_e4m3(like_a_gpu):
    wanted = of_e4m3("simulator", on_host)
    for x, y in zip(of_e4m3(like_a_gpu, on_host), wanted, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.gpu
def test_host_arrays_of_e4m3_on_a_gpu(hopper):
    import cupy

    wanted = [cupy.asnumpy(x) for x in of_e4m3(hopper, hopper.upload)]
    for x, y in zip(of_e4m3(hopper, on_host), wanted, strict=True):
        assert isinstance(x, np.ndarray)
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_prepared_calls_of_device_arrays_refuse_those_of_the_host(like_a_gpu, dtype):
    host = [of_dtype(2, 20, 16, dtype=dtype, seed=i) for i in range(3)]
    prepared = cupyfa.compile(*map(like_a_gpu.upload, host), backend=like_a_gpu, kernel="fa2")
    with pytest.raises(ValueError, match="q is .* in host memory .*this call was compiled for"):
        prepared(*host)
    q, k, v = map(like_a_gpu.upload, host)
    with pytest.raises(TypeError, match="mixed|is of type GpuArray"):
        prepared(host[0], k, v)
    with pytest.raises(
        TypeError, match="out is .*but the inputs are CuPy arrays; pass a CuPy array"
    ):
        prepared(q, k, v, out=np.empty_like(host[0]))
