"""Every sort of input on every path of calls, from the memory of the host and of a device."""

from itertools import product

import numpy as np
import pytest
from helpers.gpu_like import GpuArray, GpuLike
from helpers.inputs import PATHS, Calls, require_equal, sorts_of

from cupyfa.runtime import select


def on_host(array):
    return np.asarray(array)


# The first ones are those with most kinds of inputs.
TABLE = sorted(
    ((path, sort) for path in PATHS for sort in sorts_of(path)),
    key=lambda x: (x[1] != "both", x[0] not in ("packed", "cache", "lists")),
)
MEMORIES = [*product(("host", "device"), repeat=2)]  # of q, k and v, and of what else is read


@pytest.fixture
def like_a_gpu(monkeypatch):
    device = GpuLike()
    monkeypatch.setitem(select._owners, GpuArray, device)
    return device


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
