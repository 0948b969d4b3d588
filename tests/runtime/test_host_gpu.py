"""The host side on a GPU: buffers, overlap, graphs, threads, foreign streams."""

from itertools import pairwise

import numpy as np
import pytest
from helpers.threads import in_threads

import cupyfa
from cupyfa.call import execution
from cupyfa.runtime import transfer

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def usual(cuda):
    before = transfer.configure()
    yield
    transfer.configure(**vars(before))


def arrays(*shape, dtype=np.float16, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(3)]


def on_device(*host):
    import cupy

    return [cupy.asarray(x) for x in host]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("kernel", ["fa2", "mma_pipelined", "auto"])
def test_transfers_through_buffers_give_the_same_bits(kernel, layout):
    transfer.configure(chunk_bytes=1 << 18, piece_bytes=1 << 21)
    q, k, v = arrays(4, 300, 8, 64) if layout == "bshd" else arrays(4, 8, 300, 64)
    options = {"kernel": kernel, "layout": layout, "causal": True, "return_lse": True}
    for got, right in zip(
        cupyfa.attention(q, k, v, **options), cupyfa.attention(*on_device(q, k, v), **options)
    ):
        np.testing.assert_array_equal(got, right.get())


@pytest.mark.parametrize("kernel, back", [("fa2", "two_pass"), ("auto", "auto")])
def test_sequences_go_through_pieces_with_the_same_bits(kernel, back):
    transfer.configure(chunk_bytes=1 << 18, piece_bytes=1 << 20)
    lengths = [700, 0, 33, 1200, 64, 1, 410]
    offsets = np.cumsum([0, *lengths]).astype(np.int32)
    q, k, v = arrays(offsets[-1], 8, 64)
    options = {"kernel": kernel, "backward_kernel": back, "causal": True, "deterministic": True}
    made = []
    for given in ((q, k, v), on_device(q, k, v)):
        out, pullback = cupyfa.vjp(*(cupyfa.Packed(x, offsets) for x in given), **options)
        made.append((out, *pullback(out)))
    for got, right in zip(*made):
        np.testing.assert_array_equal(got, right.get())
    lists = [[x[a:b].swapaxes(0, 1) for a, b in pairwise(offsets)] for x in (q, k, v)]
    outs = cupyfa.attention(*lists, kernel=kernel, causal=True)
    np.testing.assert_array_equal(np.concatenate(outs, 1).swapaxes(0, 1), made[0][0])


def test_ragged_batches_and_decoding_are_repeated(monkeypatch):
    """Repeated calls use the same arrays, whose lengths may have changed."""
    import cupy

    slow, read = [], execution.read_call
    monkeypatch.setattr(execution, "read_call", lambda *call: slow.append(1) or read(*call))
    q, k, v, offsets = on_device(*arrays(60, 4, 64), np.array([0, 20, 60], np.int32))
    cache = cupyfa.KVCache(*cupy.zeros((2, 2, 4, 30, 64), np.float16), cupy.zeros(2, np.int32))
    new = [x[:2].reshape(2, 4, 1, 64) for x in (q, k, v)]
    for turn in range(8):
        offsets[1] = 10 + turn
        lengths = [0, 10 + turn, 60]
        packed = (cupyfa.Packed(x, offsets) for x in (q, k, v))
        out = cupyfa.attention(*packed, causal=True)
        decoded = cupyfa.attention(new[0], cache, append=(new[1], new[2]))
        cache.lengths += 1
        for a, b in pairwise(lengths):
            parts = (x[a:b].swapaxes(0, 1) for x in (q, k, v))
            alone = cupyfa.attention(*parts, causal=True).swapaxes(0, 1)
            np.testing.assert_allclose(out[a:b].get(), alone.get(), atol=4e-3)
        np.testing.assert_allclose(decoded.get()[:, :, 0], new[2].get()[:, :, 0], atol=4e-3)
    assert len(slow) <= 8 * 2 + 2 * 5  # dense calls, and calls whose results are in new memory


def of_shape(*shape, dtype=np.float16):
    return np.random.default_rng(1).standard_normal(shape, np.float32).astype(dtype)


@pytest.mark.parametrize("kernel", ["auto", pytest.param("mma_pipelined", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options",
    [
        {"bias": of_shape(1, 8, 300, 300)},
        {"bias": of_shape(4, 1, 300, 299), "mask": of_shape(4, 8, 300, 299) > -1},
        {"bias": of_shape(300, 299), "sink": of_shape(8), "causal": True},
        {"mask": of_shape(4, 1, 1, 300) > -1, "alibi_slopes": of_shape(4, 8, dtype=np.float32)},
        {"score_mod": "score - x[query % 2] * abs(position - key)", "captured": {"x": of_shape(2)}},
    ],
    ids=lambda options: " ".join(options),
)
def test_arrays_and_texts_go_through_pieces_with_the_same_bits(kernel, options):
    """Inputs and outputs are transferred in pieces, which need little device memory."""
    transfer.configure(chunk_bytes=1 << 18, piece_bytes=1 << 19, device_bytes=6 << 20)
    q, k, v = arrays(4, 8, 300, 64)
    k, v = (x[:, :4, : 299 if 299 in shapes_of(options) else 300] for x in (k, v))
    there = {name: on_device(x)[0] if hasattr(x, "nbytes") else x for name, x in options.items()}
    how, counts = {"kernel": kernel, "return_lse": True}, []
    on = cupyfa.Devices(progress=lambda done, total, what: counts.append(total))
    out, lse = cupyfa.attention(q, k, v, backend=on, **how, **options)
    assert counts[0] > 1
    right = cupyfa.attention(*on_device(q, k, v), **how, **there)
    for got, expected in zip((out, lse), right):
        np.testing.assert_array_equal(got, expected.get())
    every = out, q, k, v, out, lse
    got = cupyfa.backward(*every, deterministic=True, **options)
    expected = cupyfa.backward(*on_device(*every), deterministic=True, **there)
    for one, other in zip(got, expected):
        np.testing.assert_array_equal(one, other.get())


def shapes_of(options):
    return [n for x in options.values() if hasattr(x, "shape") for n in x.shape]


def test_pinned_arrays_need_no_buffers():
    host = arrays(4, 8, 300, 64)
    pinned = [cupyfa.empty_pinned(x.shape, x.dtype) for x in (*host, host[0])]
    for mine, x in zip(pinned, host):
        mine[...] = x
    transfer.release()
    assert transfer.held() == 0
    assert cupyfa.attention(*pinned[:3], out=pinned[3]) is pinned[3]
    assert transfer.held() == 0
    np.testing.assert_array_equal(pinned[3], cupyfa.attention(*on_device(*host)).get())


def test_registered_memory_is_pinned_too():
    import cupy

    x = arrays(4, 8, 300, 64)[0]
    cuda = cupyfa.runtime.choose_backend.backend_named("cuda")
    assert not cuda.is_pinned(x)
    cupy.cuda.runtime.hostRegister(x.ctypes.data, x.nbytes, 0)
    try:
        assert cuda.is_pinned(x) and cuda.is_pinned(x[:, ::-1])
    finally:
        cupy.cuda.runtime.hostUnregister(x.ctypes.data)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": (50, 20)},
        {"bias": of_shape(2, 2, 700, 700, dtype=np.float32)},
    ],
    ids=" ".join,
)
def test_a_problem_larger_than_the_memory_it_may_take(options):
    q, k, v = arrays(2, 2, 700, 64, dtype=np.float32)
    there = {name: on_device(x)[0] if hasattr(x, "nbytes") else x for name, x in options.items()}
    right = cupyfa.attention(*on_device(q, k, v), kernel="fa2", **there).get()
    transfer.configure(device_bytes=400_000 if "bias" in options else 200_000)
    got = cupyfa.attention(q, k, v, kernel="fa2", **options)
    np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-6)


def test_uploads_and_downloads_overlap(monkeypatch):
    """The GPU's timestamps show that downloads and uploads run at the same time.

    The overlap is measured up to 20 times, since copies may share an engine and other processes
    may delay them.
    """
    import cupy

    from cupyfa.runtime.cuda.device import _Lane

    q, k, v = (cupyfa.empty_pinned((8, 16, 2048, 128), np.float16) for _ in range(3))
    for x in (q, k, v):
        x[...] = 0
    out = cupyfa.empty_pinned(q.shape, q.dtype)
    cupyfa.attention(q, k, v, out=out)  # compiles
    copy, spans = _Lane.copy, {"up": [], "down": []}

    def timed(lane, to, source, size):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(lane._stream)
        copy(lane, to, source, size)
        end.record(lane._stream)
        is_down = 0 <= to - out.ctypes.data < out.nbytes
        spans["down" if is_down else "up"].append((begin, end))

    def share_beside():
        """Returns the fraction of download time during which uploads run."""
        spans["up"], spans["down"] = [], []
        start = cupy.cuda.Event()
        start.record()
        cupyfa.attention(q, k, v, out=out)
        cupy.cuda.Device().synchronize()
        up, down = (
            [tuple(cupy.cuda.get_elapsed_time(start, event) for event in span) for span in spans[x]]
            for x in ("up", "down")
        )
        assert len(down) > 4
        beside = sum(max(min(x[1], y[1]) - max(x[0], y[0]), 0) for x in up for y in down)
        return beside / sum(end - begin for begin, end in down)

    monkeypatch.setattr(_Lane, "copy", timed)
    assert any(share_beside() > 0.5 for _ in range(20))


@pytest.mark.alone
def test_a_graph_updates_a_block_mask():
    import cupy

    q, k, v = on_device(*arrays(1, 2, 300, 64))
    documents = [cupy.asarray(np.arange(300) // size) for size in (40, 100, 7)]
    document = documents[0].copy()
    text = "document[query] == document[key] and key <= position"
    blocks = cupyfa.block_mask(mask_mod=text, captured={"document": document}, M=300, N=300)
    out, grads = cupy.empty_like(q), tuple(map(cupy.empty_like, (q, k, v)))
    forward = cupyfa.compile(q, k, v, mask=blocks)
    made, lse = cupyfa.attention(q, k, v, mask=blocks, return_lse=True)
    backward = cupyfa.compile(q, q, k, v, made, lse, mask=blocks, deterministic=True)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        blocks.update({"document": document})
        forward(q, k, v, out=out)
        backward(q, q, k, v, made, lse, grads=grads)
        graph = stream.end_capture()
    for other in documents:
        document[...] = other
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        captured = {"document": other}
        expected = cupyfa.attention(q, k, v, mask=text, captured=captured)
        cupy.testing.assert_allclose(out.astype("f"), expected.astype("f"), atol=4e-3)
        of_mask = cupyfa.block_mask(mask_mod=text, captured=captured, M=300, N=300)
        found = cupyfa.backward(q, q, k, v, made, lse, mask=of_mask, deterministic=True)
        for one, other_one in zip(grads, found):
            cupy.testing.assert_array_equal(one, other_one)
        for rows, keys in ((128, 64), (64, 128)):
            on_host = cupyfa.block_mask(
                mask_mod=text, captured={"document": other.get()}, M=300, N=300, backend="simulator"
            )
            np.testing.assert_array_equal(of_mask.states(rows, keys), on_host.states(rows, keys))


@pytest.mark.alone
def test_a_graph_reads_seeds_each_time():
    import cupy

    q, k, v, dout = on_device(*arrays(2, 4, 100, 64), arrays(2, 4, 100, 64)[0])
    seed, offset = cupy.array([5]), cupy.array(7, np.uint32)
    how = {"dropout": cupyfa.Dropout(0.3, seed, offset)}
    out, lse = cupyfa.attention(q, k, v, return_lse=True, **how)
    grads = tuple(map(cupy.empty_like, (q, k, v)))
    forward = cupyfa.compile(q, k, v, **how)
    backward = cupyfa.compile(dout, q, k, v, out, lse, deterministic=True, **how)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        forward(q, k, v, seed, offset, out=out)
        backward(dout, q, k, v, out, lse, seed, offset, grads=grads)
        graph = stream.end_capture()
    for number in (5, 2**40 + 1):
        seed[0], offset[...] = number, number % 1000
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        how = {"dropout": cupyfa.Dropout(0.3, number, number % 1000)}
        cupy.testing.assert_array_equal(out, cupyfa.attention(q, k, v, **how))
        expected = cupyfa.backward(dout, q, k, v, out, lse, deterministic=True, **how)
        for one, other in zip(grads, expected):
            cupy.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kernel", ["mma_pipelined", "mma_split_kv", "fa2", "wgmma", "auto"])
def test_eight_threads_with_their_own_streams(kernel):
    import cupy

    problems = [on_device(*arrays(1, 4, 200, 64, seed=seed)) for seed in range(8)]
    try:
        bound = cupyfa.compile(*problems[0], kernel=kernel)
    except cupyfa.Unsupported as reason:
        pytest.skip(str(reason))
    right = [cupyfa.attention(*problem, kernel=kernel) for problem in problems]
    cupy.cuda.Device().synchronize()
    wrong = []

    def call(i):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            out = cupy.empty_like(right[i])
            for _ in range(50):
                out.fill(0)
                bound(*problems[i], out=out)
                stream.synchronize()
                if not (out == right[i]).all():
                    wrong.append(i)

    in_threads(call, range(8))
    assert not wrong


def test_eight_threads_with_numpy_arrays():
    problems = [arrays(2, 4, 300, 64, seed=seed) for seed in range(8)]
    right = [cupyfa.attention(*on_device(*problem)).get() for problem in problems]
    wrong = []

    def call(i):
        for _ in range(10):
            if not (cupyfa.attention(*problems[i]) == right[i]).all():
                wrong.append(i)

    in_threads(call, range(8))
    assert not wrong


def test_a_thread_for_each_device_with_numpy_arrays(two_gpus):
    import cupy

    devices = range(two_gpus.devices)
    transfer.configure(chunk_bytes=1 << 18, piece_bytes=1 << 20)
    problems = [arrays(4, 8, 300, 64, seed=device) for device in devices]
    right = [cupyfa.attention(*on_device(*problem)).get() for problem in problems]

    def call(device):
        with cupy.cuda.Device(device):
            return [cupyfa.attention(*problems[device]) for _ in range(10)]

    for results, one in zip(in_threads(call, devices), right):
        for result in results:
            np.testing.assert_array_equal(result, one)


@pytest.mark.parametrize(
    "shapes, options",
    [
        (((4, 8, 300, 64), (4, 8, 300, 64)), {}),
        (((1, 6, 1000, 64), (1, 3, 700, 64)), {"causal": True}),
        (((1, 1, 6000, 128), (1, 1, 6000, 128)), {"causal": True}),
        (((2, 300, 6, 64), (2, 300, 2, 64)), {"layout": "bshd", "window": (99, 20)}),
    ],
    ids=["heads", "grouped heads", "rows", "other axes"],
)
def test_all_devices_have_the_bits_of_one(two_gpus, shapes, options):
    transfer.configure(chunk_bytes=1 << 18, piece_bytes=1 << 20)
    q, k, v = (of_shape(*shape) for shape in (shapes[0], shapes[1], shapes[1]))
    made = []
    for where in ("auto", cupyfa.Devices("all"), cupyfa.Devices([1, 0])):
        how = {"deterministic": True, "return_lse": True, **options, "backend": where}
        (out, lse), pullback = cupyfa.vjp(q, k, v, **how)
        made.append((out, lse, *pullback(out)))
    for right, *others in zip(*made):
        for got in others:
            np.testing.assert_array_equal(got, right)


def test_arrays_on_a_device_have_no_devices():
    with pytest.raises(TypeError, match="the arrays are already on a device; leave backend out"):
        cupyfa.attention(*on_device(*arrays(1, 2, 40, 64)), backend=cupyfa.Devices("all"))


def test_a_producers_stream_is_waited_for():
    """The array's interface names the stream that still writes the array."""
    import cupy

    class Foreign:
        def __init__(self, array, stream):
            self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "stream": stream.ptr}
            self.shape, self.ndim, self.dtype = array.shape, array.ndim, array.dtype

    slow = cupy.RawKernel(
        'extern "C" __global__ void slow(float* x) {'
        " const long long start = clock64(); while (clock64() - start < 100000000) {}"
        " x[threadIdx.x] = 1; }",
        "slow",
    )
    x = cupy.zeros((1, 32), np.float32)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        slow((1,), (32,), (x,))
    theirs = Foreign(x, stream)
    out = cupyfa.attention(theirs, theirs, theirs, kernel="fa2")
    assert (out == 1).all()


def test_torch_tensors_are_used_by_their_addresses():
    torch = pytest.importorskip("torch", reason="torch, a peer to exchange arrays with")
    host = arrays(1, 2, 100, 64)
    right = cupyfa.attention(*on_device(*host))
    tensors = [torch.from_numpy(x).cuda() for x in host]
    assert cupyfa.runtime.choose_backend.backend_named("cuda").adopt_tensors(tensors) is not None
    assert (cupyfa.attention(*tensors) == right).all()
    turned = [x.swapaxes(1, 2).contiguous().swapaxes(1, 2) for x in tensors]
    assert (cupyfa.attention(*turned) == right).all()


def test_tensors_that_another_stream_still_writes_are_waited_for():
    torch = pytest.importorskip("torch", reason="torch, a peer to exchange arrays with")
    x = torch.zeros((1, 2, 64, 64), device="cuda", dtype=torch.float16)
    cupyfa.attention(x, x, x)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        x.fill_(1)
        out = cupyfa.attention(x, x, x)
    assert (out == 1).all()


@pytest.mark.parametrize("kernel", ["mma_split_kv", "fa2", "auto"])
def test_calls_in_several_streams_have_their_own_temporaries(kernel):
    import cupy

    problems = [on_device(*arrays(1, 4, 200, 64, seed=seed)) for seed in range(4)]
    right = [cupyfa.attention(*problem, kernel=kernel) for problem in problems]
    cupy.cuda.Device().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in problems]
    got = []
    for _ in range(20):
        for stream, problem in zip(streams, problems):
            with stream:
                got.append(cupyfa.attention(*problem, kernel=kernel))
    cupy.cuda.Device().synchronize()
    for i, result in enumerate(got):
        assert (result == right[i % len(right)]).all()


def test_arrays_of_another_device():
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("there is one device")
    host = arrays(1, 2, 100, 64)
    right = cupyfa.attention(*on_device(*host)).get()
    with cupy.cuda.Device(1):
        there = on_device(*host)
        bound = cupyfa.compile(*there)
    for call in (cupyfa.attention, bound):
        out = call(*there)
        assert out.device.id == 1
        np.testing.assert_array_equal(out.get(), right)
    with pytest.raises(ValueError, match="on devices 1, 0, 0"):
        cupyfa.attention(there[0], *on_device(*host[1:]))
