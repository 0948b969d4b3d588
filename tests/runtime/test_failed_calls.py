"""A failed call frees all memory that it allocated."""

import gc
import weakref
from contextlib import suppress

import numpy as np
import pytest
from helpers.gpu_like import GpuArray, GpuLike

import cupyfa
from cupyfa import DeviceError
from cupyfa.runtime import choose_backend

F = np.float32
Q = np.random.default_rng(0).standard_normal((1, 2, 40, 16)).astype(F)
LSE = np.ones((1, 2, 40), F)
ROWS = Q[0].swapaxes(0, 1)
TOKEN = Q[:, :, :1]
_MOST_ATTEMPTS = 40


class _Device:
    """A context manager for a device that is already current."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


class Counting(GpuLike):
    """A device that counts its live arrays; errors propagate as with CUDA."""

    def __init__(self):
        super().__init__()
        self.made = []

    def empty(self, shape, dtype):
        made = super().empty(shape, dtype)
        self.made.append(weakref.ref(made))
        return made

    def working_on(self, array):
        from cupyfa.runtime.cuda import device as cuda

        return cuda._Working(_Device())

    @property
    def alive(self):
        return sum(x() is not None for x in self.made)


@pytest.fixture
def device(monkeypatch):
    from cupyfa.runtime.cuda import device as cuda

    def found(error):
        return DeviceError(str(error)) if isinstance(error, ZeroDivisionError) else None

    monkeypatch.setattr(cuda, "_device_error", found)
    monkeypatch.setattr(cuda, "_exchange_of_capture_modes", lambda: lambda mode: None)
    made = Counting()
    monkeypatch.setitem(choose_backend._owners, GpuArray, made)
    return made


@pytest.fixture
def no_collection():
    """Disables garbage collection, which would free reference cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def cached(put, token, **how):
    k, v = (put(np.zeros((1, 8, 2, 16), F)) for _ in range(2))
    return cupyfa.attention(
        token, cupyfa.KVCache(k, v, put(np.zeros(1, np.int32)), layout="bshd"), **how
    )


# Calls on arrays that ``put`` makes from NumPy arrays.
CALLS = {
    "forward": lambda put, **on: cupyfa.attention(*map(put, (Q, Q, Q)), return_lse=True, **on),
    "split": lambda put, **on: cupyfa.attention(*map(put, (Q, Q, Q)), kernel="fa2_split_kv", **on),
    "prepared": lambda put, **on: cupyfa.compile(*map(put, (Q, Q, Q)), kernel="fa2", **on)(
        *map(put, (Q, Q, Q))
    ),
    "backward": lambda put, **on: cupyfa.backward(
        *map(put, (Q, Q, Q, Q, Q, LSE)), kernel="columns", **on
    ),
    "bias": lambda put, **on: cupyfa.backward(
        *map(put, (Q, Q, Q, Q, Q, LSE)),
        kernel="columns",
        bias=np.ones((40, 40), F),
        wrt="q,bias",
        **on,
    ),
    "pullback": lambda put, **on: cupyfa.vjp(
        *map(put, (Q, Q, Q)), kernel="fa2", backward_kernel="two_pass", **on
    )[1](put(Q)),
    "packed": lambda put, **on: cupyfa.attention(
        *(cupyfa.Packed(put(ROWS), [0, 9, 40]) for _ in "qkv"), **on
    ),
    "lists": lambda put, **on: cupyfa.attention([put(Q[0])], [put(Q[0])], [put(Q[0])], **on),
    "decode": lambda put, **on: cached(put, put(TOKEN), **on),
    "new tokens": lambda put, **on: cached(put, put(TOKEN), append=(put(TOKEN), put(TOKEN)), **on),
    "merge": lambda put, **on: cupyfa.merge_vjp([(put(Q), put(LSE))] * 2, **on)[1](put(Q)),
    "softmax": lambda put, **on: cupyfa.softmax(put(Q), **on),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_ran_out_of_memory_keeps_none(device, no_collection, where, call):
    put = device.upload if where == "device" else np.array
    CALLS[call](put, backend=device)  # allocates the shared workspace
    usual, attempts = device.alive, 0
    for attempts in range(_MOST_ATTEMPTS):
        device.calls.clear()
        device.left = attempts
        try:
            CALLS[call](put, backend=device)
            break
        except (ZeroDivisionError, DeviceError):
            pass
        finally:
            device.left = None
        assert device.alive <= usual, attempts
    assert 2 <= attempts < _MOST_ATTEMPTS - 1


@pytest.mark.gpu
@pytest.mark.parametrize("room", [0, 40, 260, 300, 560, 900], ids=lambda x: f"{x} MiB")
def test_a_limited_pool_is_as_before(cuda, no_collection, much_memory, room):
    import cupy

    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        q = cupy.zeros((1, 2**23, 16), np.float16)
        k = cupy.zeros((1, 64, 16), np.float16)
        lse = cupy.zeros((1, 2**23), F)
        calls = (
            lambda: cupyfa.attention(q, k, k, return_lse=True),
            lambda: cupyfa.backward(q, q, k, k, q, lse),
        )
        usual = pool.used_bytes()
        for call in calls:
            pool.free_all_blocks()
            pool.set_limit(pool.total_bytes() + room * 2**20)
            too_little = room * 2**20 < q.nbytes
            fails = pytest.raises if too_little else suppress
            with fails(cupyfa.OutOfMemory):
                call()
            pool.set_limit(0)
            # A workspace of 4 MiB per stream stays allocated, and small results may stay cached.
            assert pool.used_bytes() - usual <= 6 * 2**20
            cuda.spaces.clear()
    cuda.synchronize()
