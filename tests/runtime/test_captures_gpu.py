"""Calls while torch or CuPy captures their stream into a CUDA graph, in the strictest mode."""

import gc
from contextlib import contextmanager

import numpy as np
import pytest

import cupyfa
from cupyfa.errors import Unsupported
from cupyfa.planner.source import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.usefixtures("cuda")]
CAUSAL = {"causal": True}
GRADIENTS = {**CAUSAL, "deterministic": True}
FUNCTIONS = (
    *("attention", "attention out=", "attention lse", "prepared", "prepared out="),
    *("backward", "backward grads=", "prepared backward", "vjp", "ragged", "padded"),
    *("decode", "decode out=", "decode and append", "prefix", "merge", "softmax"),
)


def numbers(x):
    return np.asarray(x.float().cpu() if hasattr(x, "cpu") else x.get()).astype("f4")


def calls(new, whole):
    """Returns each function as a call without arguments, and a random array that it reads.

    new: makes a bfloat16 array of a shape. whole: makes an int32 array of integers.
    """
    q, k, v, dout, into = (new(2, 4, 200, 64) for _ in range(5))
    grads = tuple(new(2, 4, 200, 64) for _ in range(3))
    packed, starts, lengths = new(200, 4, 64), whole([0, 120, 200]), whole([150, 100])
    token, new_k, new_v, its_out = (new(2, 4, 1, 64) for _ in range(4))
    shared = new(1, 4, 70, 64)
    cache = cupyfa.KVCache(k, v, lengths)
    longer = cupyfa.KVCache(k, v, lengths, prefix=(shared, shared))
    out, lse = cupyfa.attention(q, k, v, return_lse=True, **CAUSAL)
    attend = cupyfa.compile(q, k, v, **CAUSAL)
    differentiate = cupyfa.compile(dout, q, k, v, out, lse, **GRADIENTS)

    def vjp():
        result, pullback = cupyfa.vjp(q, k, v, **GRADIENTS)
        return result, *pullback(dout)

    of_both = dout, q, k, v, out, lse
    made = {
        "attention": lambda: cupyfa.attention(q, k, v, **CAUSAL),
        "attention out=": lambda: cupyfa.attention(q, k, v, out=into, **CAUSAL),
        "attention lse": lambda: cupyfa.attention(q, k, v, return_lse=True, **CAUSAL),
        "prepared": lambda: attend(q, k, v),
        "prepared out=": lambda: attend(q, k, v, out=into),
        "backward": lambda: cupyfa.backward(*of_both, **GRADIENTS),
        "backward grads=": lambda: cupyfa.backward(*of_both, grads=grads, **GRADIENTS),
        "prepared backward": lambda: differentiate(*of_both),
        "vjp": vjp,
        "ragged": lambda: cupyfa.attention(*[cupyfa.Packed(packed, starts)] * 3),
        "padded": lambda: cupyfa.attention(q, cupyfa.Padded(k, lengths), cupyfa.Padded(v, lengths)),
        "decode": lambda: cupyfa.attention(token, cache),
        "decode out=": lambda: cupyfa.attention(token, cache, out=its_out),
        "decode and append": lambda: cupyfa.attention(token, cache, append=(new_k, new_v)),
        "prefix": lambda: cupyfa.attention(token, longer),
        "merge": lambda: cupyfa.merge([cupyfa.attention(q, k, v, return_lse=True)] * 2),
        "softmax": lambda: cupyfa.softmax(q),
    }
    read = {"backward": dout, "ragged": packed}
    of_tokens = ("decode", "prefix")

    def source(name):
        known = token if name.startswith(of_tokens) else q
        return next((x for start, x in read.items() if start in name), known)

    return {name: (call, source(name)) for name, call in made.items()}


def listed(results):
    return list(results) if isinstance(results, tuple | list) else [results]


def require_replay(launch, synchronize, results, call, source):
    """Checks that a launched graph reads the current contents of its source."""
    source *= 0.5
    synchronize()
    launch()
    synchronize()
    found = list(map(numbers, listed(results)))
    for one, other in zip(found, map(numbers, listed(call())), strict=True):
        np.testing.assert_array_equal(one, other)


@contextmanager
def current(torch, stream):
    import cupy

    with torch.cuda.stream(stream), cupy.cuda.Stream.from_external(stream):
        yield


@pytest.mark.parametrize("before", ["never", "in another stream", "in this stream"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_torch_captures_a_call(name, before):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    call, source = calls(
        lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16),
        lambda x: torch.tensor(x, device="cuda", dtype=torch.int32),
    )[name]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    if before == "never":
        from cupyfa.runtime.choose_backend import backend_named

        backend_named("cuda").trim()  # leaves no free memory in CuPy's pool
    else:
        call(), call()
    if before == "in this stream":
        with current(torch, stream):
            call(), call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream), current(torch, stream):
        results = call()
    require_replay(graph.replay, torch.cuda.synchronize, results, call, source)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_cupy_captures_a_call_in_the_mode_of_torch(name):
    import cupy

    rng = np.random.default_rng(0)
    call, source = calls(
        lambda *shape: cupy.asarray(rng.standard_normal(shape).astype("f2")),
        lambda x: cupy.asarray(x, np.int32),
    )[name]
    cupy.cuda.Device().synchronize()
    gc.collect()  # freeing a graph or a function of JAX would invalidate the capture
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        try:
            results = call()
        finally:
            graph = stream.end_capture()
    require_replay(graph.launch, cupy.cuda.Device().synchronize, results, call, source)


def test_a_captured_call_in_a_stream_of_cupy_joins_that_of_torch():
    import cupy

    torch = pytest.importorskip("torch")
    q, k, v = torch.randn(3, 2, 4, 200, 64, device="cuda", dtype=torch.float16)
    call = lambda: torch.from_dlpack(cupyfa.attention(q, k, v))  # noqa: E731
    call()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream), cupy.cuda.Stream(non_blocking=True):
        results = call()
    require_replay(graph.replay, torch.cuda.synchronize, results, call, q)


def test_the_program_of_the_page_captures_a_call():
    torch = pytest.importorskip("torch")
    page = (ROOT / "docs" / "howto" / "frameworks.md").read_text(encoding="utf-8")
    names = {}
    exec(page.split("<!-- captured.py -->\n```python\n")[1].split("```")[0], names)
    q, k, v = names["q"], names["k"], names["v"]
    call = lambda: torch.from_dlpack(cupyfa.attention(q, k, v, causal=True))  # noqa: E731
    require_replay(names["graph"].replay, torch.cuda.synchronize, names["out"], call, q)


def test_the_legacy_stream_during_a_capture_of_torch_is_refused():
    """The call raises before it invalidates the capture."""
    torch = pytest.importorskip("torch")
    q, k, v = torch.randn(3, 2, 4, 200, 64, device="cuda", dtype=torch.float16)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        with pytest.raises(Unsupported, match="from_external"):
            cupyfa.attention(q, k, v)
        with current(torch, stream):
            results = cupyfa.attention(q, k, v)
    again = lambda: cupyfa.attention(q, k, v)  # noqa: E731
    require_replay(graph.replay, torch.cuda.synchronize, results, again, q)


@pytest.mark.parametrize("what", ["NumPy arrays", "a check"])
def test_copies_to_the_host_during_a_capture_are_refused(what):
    """The call raises before it invalidates the capture."""
    import cupy

    host = np.random.default_rng(0).standard_normal((3, 2, 4, 200, 64)).astype("f2")
    there = cupy.asarray(host)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        with pytest.raises(Unsupported, match="CUDA graph is being captured"):
            if what == "a check":
                cupyfa.attention(*there, check=True)
            else:
                cupyfa.attention(*host, backend="cuda")
        cupyfa.attention(*there)
        stream.end_capture()
