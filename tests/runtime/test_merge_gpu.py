"""merge and merge_vjp on a GPU: arrays stay on it, calls are captured, and large arrays fit."""

import numpy as np
import pytest

import cupyfa
from cupyfa.numerics import merge_bounds, tolerance
from cupyfa.runtime.merging import MOST_PARTS

pytestmark = pytest.mark.gpu


def drawn(count, *shape, dtype=np.float16, seed=0):
    import cupy

    rng = np.random.default_rng(seed)

    def draw(shape, dtype):
        return cupy.asarray(rng.standard_normal(shape).astype(dtype))

    return [(draw(shape, dtype), draw(shape[:-1], np.float32)) for _ in range(count)]


def on_host(parts):
    return [(x.get(), y.get()) for x, y in parts]


def same_bits(one, other):
    return all(x.get().tobytes() == y.tobytes() for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("count", [2, MOST_PARTS + 1])
def test_arrays_of_the_host_and_of_the_gpu_have_the_same_bits(cuda, count):
    parts = drawn(count, 2, 3, 5, 24)
    (out, lse), pullback = cupyfa.merge_vjp(parts)
    wanted, back = cupyfa.merge_vjp(on_host(parts), backend="cuda")
    assert cuda.owns(out) and same_bits((out, lse), wanted)
    gradients, right = pullback(out, lse), back(*wanted)
    assert all(cuda.owns(x) for pair in gradients for x in pair)
    assert all(same_bits(x, y) for x, y in zip(gradients, right, strict=True))


def steps_of_columns(parts):
    """Returns the same values with a column stride of 2; kernels need contiguous copies of them."""
    import cupy

    return [(cupy.repeat(x, 2, axis=-1)[..., ::2], y) for x, y in parts]


@pytest.mark.parametrize("count", [3, MOST_PARTS + 1])
@pytest.mark.parametrize("view", [list, steps_of_columns])
def test_a_graph_merges_what_parts_contain_when_it_runs(cuda, count, view):
    import cupy

    parts, dout = view(drawn(count, 2, 3, 50, 64)), drawn(1, 2, 3, 50, 64, seed=1)[0][0]
    _, pullback = cupyfa.merge_vjp(parts)
    pullback(dout)  # compiles
    out = cupy.empty((2, 3, 50, 64), np.float16)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        _, lse = cupyfa.merge(parts, out=out)
        (_, of_graph), again = cupyfa.merge_vjp(parts)
        gradients = again(dout, of_graph)
        graph = stream.end_capture()
        # Overwrites free memory of the pool, which must not include the graph's memory.
        sizes = [2**x for x in range(8, 20)] * 10
        taken = [cupy.full(size, np.nan, np.float32) for size in sizes]
    for seed in (2, 3):
        for (x, y), (other, rows) in zip(parts, drawn(count, 2, 3, 50, 64, seed=seed)):
            x[...], y[...] = other, rows
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        wanted, back = cupyfa.merge_vjp(parts)
        assert same_bits((out, lse), [x.get() for x in wanted])
        for found, right in zip(gradients, back(dout, wanted[1]), strict=True):
            assert same_bits(found, [x.get() for x in right])
    del taken


def test_a_call_does_not_wait(cuda):
    import cupy

    parts = drawn(3, 2, 3, 50, 64)
    cupyfa.merge(parts)
    text = """extern "C" __global__ void hold(long long cycles) {
      for (const long long start = clock64(); clock64() - start < cycles;) {}
    }"""
    hold = cupy.RawKernel(text, "hold")
    done = cupy.cuda.Event()
    hold((1,), (1,), (10,))
    cupy.cuda.Device().synchronize()
    hold((1,), (1,), (2_000_000_000,))
    cupyfa.merge(parts)
    done.record()
    assert not done.done
    done.synchronize()


def test_more_rows_than_an_int_counts(cuda, much_memory):
    import cupy

    heads, M = 3, 2**30
    ones, threes = (cupy.broadcast_to(cupy.array(x, "f2"), (heads, M, 1)) for x in (1, 3))
    some = cupy.zeros((heads, M), np.float32)
    some[1, 7] = some[-1, -1] = -np.inf
    zeros = cupy.broadcast_to(cupy.array(0, "f4"), some.shape)
    out, lse = cupyfa.merge([(ones, some), (threes, zeros)])
    assert out[1, 7, 0] == out[-1, -1, 0] == 3 and lse[1, 7] == lse[-1, -1] == 0
    assert int((out == 2).sum()) == heads * M - 2
    assert abs(float(lse[-1, -2]) - np.log(2)) < 1e-6


@pytest.mark.parametrize("dv", [128, 513])
def test_many_heads(cuda, dv):
    parts = drawn(4, 7, 1000, 3, dv)
    cupyfa.merge(parts, check=True)
    (out, lse), pullback = cupyfa.merge_vjp(parts, check=True)
    pullback(out, lse)


def test_tensors_of_torch(cuda):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    parts = on_host(drawn(2, 2, 3, 5, 24))
    there = [tuple(torch.from_numpy(x).cuda() for x in part) for part in parts]
    into = torch.empty_like(there[0][0])
    out, lse = cupyfa.merge(there, out=into)
    assert out is into
    right = merge_bounds.expected_merge(*map(np.stack, zip(*parts)), dtype="float16")
    found = {"out": out.cpu().numpy(), "lse": lse.get()}
    tolerance.require(tolerance.compare(found, right), "merge of tensors")


def test_memories_are_not_mixed(cuda):
    part, (host,) = drawn(1, 2, 3, 5, 24)[0], on_host(drawn(1, 2, 3, 5, 24))
    with pytest.raises(TypeError, match="in host memory and others in GPU memory"):
        cupyfa.merge([part, host])
    with pytest.raises(
        TypeError, match="out is of type ndarray, but parts\\[0\\] contains CuPy arrays"
    ):
        cupyfa.merge([part], out=host[0])
    with pytest.raises(TypeError, match="the simulator requires NumPy arrays"):
        cupyfa.merge([part], backend="simulator")
