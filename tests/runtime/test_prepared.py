"""Prepared and repeated calls on a simulated device, and the launches that reach a fake driver."""

import ctypes
import sys
import threading
import time
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import combinations
from operator import attrgetter, is_
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from helpers.far_device import FarDevice
from helpers.foreign import Foreign
from helpers.problems import FORWARD, name, planned
from helpers.threads import in_threads

import cupyfa
from cupyfa import Problem, Simulator, Unsupported
from cupyfa.lab.bench.sweeps import usual_dtype
from cupyfa.ladder import LADDER
from cupyfa.ladder.kernel import Matmul
from cupyfa.planner import choose_kernel as planning, source as sources
from cupyfa.runtime import choose_backend, launcher, prepared as binding, workspace
from cupyfa.runtime.kernel_arguments import arguments
from cupyfa.runtime.launcher import Launcher


class Near(np.ndarray):
    """An array in device memory, with its address where CuPy's arrays store it."""

    where = 0  # device number

    def __array_finalize__(self, like):
        self.where = getattr(like, "where", 0)

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)


class NearDevice(Simulator):
    """A device that launches kernels by addresses, as a GPU does."""

    failures = (ZeroDivisionError,)
    writes_in_place = True

    def __init__(self):
        super().__init__(workers=1)
        self.made, self.stream, self.is_capturing, self.short = [], 7, False, 0
        self.device, self.working = 0, 0

    stream = is_capturing = device = None  # replace the base class's properties

    @contextmanager
    def working_on(self, array):
        before, self.device = self.device, getattr(array, "where", self.device)
        self.working += 1
        yield
        self.device = before
        self.working -= 1

    def owns(self, array):
        return isinstance(array, Near)

    def form(self, array):
        return array.shape, array.strides, array.dtype, array.where

    def empty(self, shape, dtype):
        assert self.working or not self.is_capturing, "an allocation makes the capture invalid"
        self.made.append(tuple(shape))
        made = np.empty(shape, dtype).view(Near)
        made.where = self.device
        return made


class Counted(Launcher):
    """A launcher that counts launches by addresses and checks their device."""

    def __call__(self, addresses, stream):
        assert self._backend.device == self._device
        self.count()
        super().__call__(addresses, stream)

    def count(self):
        if isinstance(self._backend, NearDevice):
            self._backend.short += 1

    def fixed(self, addresses, stream):
        launch, memory = super().fixed(addresses, stream)

        def counted():
            self.count()
            launch()

        return counted, memory


@pytest.fixture
def near(monkeypatch):
    device = NearDevice()
    monkeypatch.setitem(choose_backend._owners, Near, device)
    monkeypatch.setattr(binding, "Launcher", Counted)
    return device


def arrays(*shape, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype).view(Near) for _ in range(3)]


def right(q, k, v, **options):
    host = (np.array(x) for x in (q, k, v))
    return cupyfa.attention(*host, backend="simulator", kernel="fa2", **options)


def compiled(near, *like, **options):
    return cupyfa.compile(*like, backend=near, kernel="fa2", **options)


@pytest.mark.few(2)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_a_prepared_call_equals_attention(near, layout, return_lse):
    options = {"layout": layout, "return_lse": return_lse, "causal": True}
    bound = compiled(near, *arrays(2, 3, 3, 16), **options)
    plan = bound.plan
    assert repr(bound) == f"<prepared {plan.kernel.name} on {near.name}: {plan.problem}>"
    for seed in (1, 2):
        q, k, v = arrays(2, 3, 3, 16, seed=seed)
        got, expected = bound(q, k, v), right(q, k, v, **options)
        for a, b in zip(got, expected) if return_lse else [(got, expected)]:
            assert isinstance(a, Near)
            np.testing.assert_array_equal(a, b)
    assert near.short == 2


def test_compile_takes_shapes_and_a_dtype(near):
    bound = compiled(near, (2, 3, 20, 16), (2, 3, 30, 16), (2, 3, 30, 16), dtype="float32")
    q, (k, v, _) = arrays(2, 3, 20, 16)[0], arrays(2, 3, 30, 16)
    np.testing.assert_array_equal(bound(q, k, v), right(q, k, v))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x: x[:, :, :10], r"q is float32 \(2, 3, 10, 16\).* for .*\(2, 3, 20, 16\)"),
        (lambda x: x.astype(np.float64), "q is float64.* compiled for float32"),
        (lambda x: x[:, :, ::-1], "q is .*strides .*-64.* compiled for"),
        (lambda x: np.array(x), "in host memory"),
    ],
    ids=["shape", "dtype", "strides", "kind"],
)
def test_arrays_that_do_not_match_are_refused(near, change, message):
    q, k, v = arrays(2, 3, 20, 16)
    bound = compiled(near, q, k, v)
    with pytest.raises((ValueError, TypeError), match=message):
        bound(change(q), k, v)
    assert near.short == 0


def on(device, arrays):
    for x in arrays:
        x.where = device
    return arrays


def test_calls_run_on_the_device_of_their_arrays(near):
    """Another device is current."""
    here, there = arrays(2, 3, 20, 16), on(1, arrays(2, 3, 20, 16, seed=1))
    bound = compiled(near, *there)
    for call in (bound, partial(cupyfa.attention, backend=near, kernel="fa2")):
        out = call(*there)
        assert out.where == 1
        np.testing.assert_array_equal(out, right(*there))
        given = np.empty_like(out)
        assert call(*there, out=given) is call(*there, out=given) is given
        np.testing.assert_array_equal(given, out)
    with pytest.raises(ValueError, match="compiled for .* on device 1"):
        bound(*here)
    out, pullback = cupyfa.vjp(*there, backend=near, kernel="fa2", backward_kernel="rows")
    assert {x.where for x in pullback(out)} == {1}
    assert near.device == 0


@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "out", "lse", "grads"])
def test_arrays_of_several_devices_are_refused(near, name):
    q, k, v = arrays(2, 3, 20, 16)
    out, lse = cupyfa.attention(q, k, v, backend=near, kernel="fa2", return_lse=True)
    given = {"dout": out, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    given["grads"] = tuple(arrays(2, 3, 20, 16))
    if name == "grads":
        on(1, given["grads"][1:2])
    else:
        (given[name],) = on(1, [given[name].copy()])
    with pytest.raises(ValueError, match="are on devices .*1.*copy all arrays to one"):
        cupyfa.backward(**given, backend=near, kernel="rows")


def test_an_out_on_another_device_is_refused(near):
    x = arrays(2, 3, 20, 16)
    out = on(1, [np.empty_like(x[0])])[0]
    for call in (compiled(near, *x), partial(cupyfa.attention, backend=near, kernel="fa2")):
        with pytest.raises(ValueError, match="the inputs and out are on devices 0, 1; copy all"):
            call(*x, out=out)
    with pytest.raises(ValueError, match="devices 0, 1"):
        cupyfa.softmax(x[0], backend=near, out=out)


def test_out_is_written_in_place_or_checked(near):
    q, k, v = arrays(2, 3, 20, 16)
    bound, expected = compiled(near, q, k, v), right(q, k, v)
    out = near.empty(q.shape, q.dtype)
    near.made.clear()
    assert bound(q, k, v, out=out) is out
    assert bound(q, k, v, out=out) is out
    np.testing.assert_array_equal(out, expected)
    assert near.short == 2 and len(near.made) == 1  # allocates lse for this stream
    wide = near.empty((2, 3, 40, 16), q.dtype)[:, :, ::2]
    assert bound(q, k, v, out=wide) is wide
    np.testing.assert_array_equal(wide, expected)
    with pytest.raises(ValueError, match="out overlaps the input Q"):
        bound(q, k, v, out=q)
    with pytest.raises(ValueError, match="out is float32"):
        bound(q, k, v, out=near.empty((2, 3, 21, 16), q.dtype))


def test_only_the_arrays_of_the_last_call_are_reused(near):
    q, k, v = arrays(2, 3, 20, 16)
    bound, out = compiled(near, q, k, v), near.empty(q.shape, q.dtype)
    for _ in range(3):
        q += 1
        assert bound(q, k, v, out=out) is out
        np.testing.assert_array_equal(out, right(q, k, v))
    for other in [(k, k, v), (q, v, v), (q, k, k), (q, k, v)]:
        np.testing.assert_array_equal(bound(*other, out=out), right(*other))
    near.stream = 9
    near.made.clear()
    np.testing.assert_array_equal(bound(q, k, v, out=out), right(q, k, v))
    assert near.made == [(2, 3, 20)]  # allocates lse for this stream
    new = bound(q, k, v)
    assert new is not out
    np.testing.assert_array_equal(new, out)


@pytest.mark.parametrize("kernel", ["wgmma", "mma_pipelined"])
def test_addresses_unaligned_for_tensor_maps(near, kernel):
    def moved(x):
        memory = np.zeros(x.nbytes + 32, np.uint8)
        start = -memory.ctypes.data % 16 + 2
        there = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape).view(Near)
        there[...] = x
        return there

    q, k, v = arrays(1, 2, 40, 64, dtype=np.float16)
    bound = cupyfa.compile(q, k, v, backend=near, kernel=kernel)
    np.testing.assert_array_equal(bound(*map(moved, (q, k, v))), bound(q, k, v))


def forward(near, q, k, v, **options):
    """Returns the host's results of attention as arrays in device memory."""
    o, lse = right(q, k, v, return_lse=True, **options)
    return [near_copy(near, x) for x in (o, lse)]


def near_copy(near, array):
    made = near.empty(array.shape, array.dtype)
    made[...] = array
    return made


def right_gradients(kernel, *arrays, **options):
    host = (np.array(x) for x in arrays)
    return cupyfa.backward(*host, backend="simulator", kernel=kernel, **options)


@pytest.mark.few(1)
@pytest.mark.parametrize("kernel", ["rows", "two_pass", "baseline_backward"])
def test_prepared_gradients_are_those_of_backward(near, kernel):
    kernel = kernel if kernel in LADDER["backward"] else next(iter(LADDER["backward"]))
    q, k, v = arrays(2, 3, 20, 16)
    given = [arrays(2, 3, 20, 16, seed=1)[0], q, k, v, *forward(near, q, k, v)]
    wanted = right_gradients(kernel, *given)
    prepared = cupyfa.compile(*given, backend=near, kernel=kernel)
    names = ("dout", "q", "k", "v", "out", "lse")
    for got in (
        prepared(*given),
        prepared(*given[:4], out=given[4], lse=given[5]),
        prepared(**dict(zip(names, given))),
        cupyfa.backward(*given, backend=near, kernel=kernel),
        cupyfa.backward(*given, backend=near, kernel=kernel),
        cupyfa.vjp(q, k, v, backend=near, kernel="fa2", backward_kernel=kernel)[1](given[0]),
    ):
        assert all(isinstance(x, Near) for x in got)
        for mine, its in zip(got, wanted):
            np.testing.assert_allclose(mine, its, rtol=1e-6, atol=1e-6)
    assert near.short == 7  # all calls above, and the forward pass of vjp
    grads = [near.empty(x.shape, x.dtype) for x in (q, k, v)]
    for _ in range(4):  # the last iterations replay a recording
        for x in grads:
            x[...] = 7
        assert all(map(is_, prepared(*given, grads=grads), grads))
        for mine, its in zip(grads, wanted):
            np.testing.assert_allclose(mine, its, rtol=1e-6, atol=1e-6)
    other = near_copy(near, given[0] * 2)
    twice = prepared(other, *given[1:], grads=grads)
    np.testing.assert_allclose(twice[2], 2 * wanted[2], rtol=1e-6, atol=1e-6)


def test_compiled_gradients_take_shapes_and_a_dtype(near):
    x, lse = (2, 3, 20, 16), (2, 3, 20)
    prepared = cupyfa.compile(*(x, x, x, x, x, lse), dtype="float16", backend=near, kernel="rows")
    q, k, v = arrays(*x, dtype=np.float16)
    o, sums = forward(near, q, k, v)
    dq, dk, dv = prepared(o, q, k, v, o, sums)
    assert dq.shape == dk.shape == dv.shape == x and dq.dtype == np.float16


def test_grads_that_overlap_one_another_are_refused(near):
    q, k, v = arrays(2, 3, 20, 16)
    given = [q.copy(), q, k, v, *forward(near, q, k, v)]
    both = near.empty((2, 2, 3, 20, 16), q.dtype)
    grads = both[0], both.reshape(-1)[960:2880].reshape(q.shape), None
    for call in (
        cupyfa.compile(*given, backend=near, kernel="rows"),
        partial(cupyfa.backward, backend=near, kernel="rows"),
    ):
        with pytest.raises(ValueError, match="dq of grads and dk of grads share memory"):
            call(*given, grads=grads)


@pytest.mark.parametrize("there", [Simulator, FarDevice])
def test_results_are_written_to_arrays_of_other_libraries(there):
    backend = there()
    q, k, v = (np.array(x) for x in arrays(1, 2, 20, 16))
    out, lse = cupyfa.attention(q, k, v, backend=backend, kernel="fa2", return_lse=True)
    mine = Foreign(np.full_like(q, 7))
    inputs = map(Foreign, (q, k, v))
    assert cupyfa.attention(*inputs, backend=backend, kernel="fa2", out=mine) is mine
    np.testing.assert_array_equal(mine.array, out)
    wanted = right_gradients("rows", out, q, k, v, out, lse)
    grads = [Foreign(np.full_like(x, 7)) for x in (q, k)]
    got = cupyfa.backward(
        *(out, q, k, v, out, lse), backend=backend, kernel="rows", grads=(*grads, None)
    )
    assert got[0] is grads[0] and got[1] is grads[1] and isinstance(got[2], np.ndarray)
    for x, its in zip((grads[0].array, grads[1].array, got[2]), wanted):
        np.testing.assert_array_equal(x, its)
    with pytest.raises(TypeError, match="out is .*; pass a NumPy or CuPy array"):
        cupyfa.attention(q, k, v, backend=backend, kernel="fa2", out=[1, 2])


class CpuTensor(Foreign):
    """A CPU tensor like torch's: DLPack without versions, which NumPy imports read-only."""

    def __init__(self, array, requires_grad=False):
        super().__init__(array)
        self.requires_grad = requires_grad

    def __dlpack__(self, stream=None):
        if self.requires_grad:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        return self.array.__dlpack__()

    def __array__(self, dtype=None, copy=None):
        return self.array


def test_results_are_written_to_tensors_like_those_of_torch():
    q, k, v = (np.array(x) for x in arrays(1, 2, 20, 16))
    call = {"backend": "simulator", "kernel": "fa2"}
    wanted = cupyfa.attention(q, k, v, **call)
    prepared = cupyfa.compile(q, k, v, **call)
    for inputs in ((q, k, v), tuple(map(CpuTensor, (q, k, v)))):
        out = CpuTensor(np.full_like(q, 7))
        assert cupyfa.attention(*inputs, out=out, check=True, **call) is out
        np.testing.assert_array_equal(out.array, wanted)
        out.array[...] = 7
        for _ in range(2):
            assert prepared(*inputs, out=out) is out
            np.testing.assert_array_equal(out.array, wanted)
    for out, error, words in (
        (CpuTensor(q.copy(), requires_grad=True), TypeError, r"out, .*use tensor\.detach\(\)"),
        (CpuTensor(q[:, :1].copy()), ValueError, r"out is float32 \(1, 1, 20, 16\), but the"),
        (CpuTensor(q.astype("f8")), ValueError, "out is float64 .* pass an array of that dtype"),
        (CpuTensor(q), ValueError, "out overlaps the input Q"),
    ):
        with pytest.raises(error, match=words):
            cupyfa.attention(q, k, v, out=out, **call)


def test_repeated_arrays_are_not_checked_again(near, monkeypatch):
    q, k, v = arrays(2, 3, 20, 16)
    forms, form = [], near.form
    monkeypatch.setattr(near, "form", lambda x: forms.append(x) or form(x))
    monkeypatch.setitem(choose_backend._owners, Near, near)
    monkeypatch.setattr(choose_backend, "_automatic", lambda: near)

    def call(*x, **options):
        forms.clear()
        got = cupyfa.attention(*x, kernel="fa2", **options)
        np.testing.assert_array_equal(got, right(*x, **options))
        return len(forms)

    assert [call(q, k, v) > 0 for _ in range(4)] == [True, True, False, False]
    for _ in range(4):
        q += 1
        assert call(q, k, v) == 0
    assert call(q, k, v, causal=True) and call(k, q, v) and call(q, k, k)
    with pytest.raises(ValueError, match="causal is 0"):
        cupyfa.attention(q, k, v, kernel="fa2", causal=0)
    for x in (q, k, v):
        x.shape = (3, 2, 20, 16)
    assert call(q, k, v)
    near.refresh()
    assert call(q, k, v)


def test_a_wide_array_for_the_output_leaves_other_calls_alone(near, monkeypatch):
    monkeypatch.setattr(choose_backend, "_automatic", lambda: near)
    q, k, v = arrays(2, 3, 20, 16, dtype=np.float16)
    wide = near.empty(q.shape, np.float32)
    for out, dtype in (("float32", "f4"), (wide, "f4"), (None, "f2")):
        for _ in range(5):
            assert cupyfa.attention(q, k, v, kernel="fa2", out=out).dtype == dtype


def test_results_are_reused_only_if_nobody_holds_them(near, monkeypatch):
    monkeypatch.setattr(choose_backend, "_automatic", lambda: near)
    q, k, v = arrays(2, 3, 20, 16)
    o, lse = forward(near, q, k, v)
    for call in (
        partial(cupyfa.attention, q, k, v, kernel="fa2"),
        partial(cupyfa.attention, q, k, v, kernel="fa2", backend=near),
        partial(compiled(near, q, k, v), q, k, v),
        partial(cupyfa.backward, o, q, k, v, o, lse, kernel="rows"),
    ):

        def first(call=call):
            got = call()
            return got if isinstance(got, Near) else got[0]

        for _ in range(4):
            got = first()
        near.made.clear()
        for _ in range(4):
            expected = np.array(got)
            got = first()
            np.testing.assert_array_equal(got, expected)
        assert near.made == []
        for held in (lambda x: x, lambda x: x[0, 1:], weakref.ref):
            kept = [held(first()) for _ in range(8)]
            assert len({id(x) for x in kept}) == 8 or held is weakref.ref
            shared = [np.may_share_memory(x, y) for x, y in combinations(kept, 2)]
            assert held is weakref.ref or not any(shared)
        first().shape = (3, 2, 20, 16)
        assert {first().shape for _ in range(3)} == {q.shape}


def test_results_of_a_forward_pass_come_again_after_its_gradients(near, monkeypatch):
    monkeypatch.setattr(choose_backend, "_automatic", lambda: near)
    q, k, v = arrays(2, 3, 20, 16)
    dout = arrays(2, 3, 20, 16, seed=1)[0]

    def step():
        out, pullback = cupyfa.vjp(q, k, v, kernel="fa2", backward_kernel="rows")
        return out.copy(), *pullback(dout)

    wanted = step()
    for _ in range(8):
        near.made.clear()
        for mine, its in zip(step(), wanted):
            np.testing.assert_array_equal(mine, its)
    assert near.made == []


def test_a_graph_has_its_own_results(near):
    q, k, v = arrays(2, 3, 20, 16)
    bound = compiled(near, q, k, v)
    before = {bound(q, k, v).ctypes.data for _ in range(5)}
    near.is_capturing = True
    near.made.clear()
    captured = bound(q, k, v)
    assert near.made and captured.ctypes.data not in before


CAPTURED = ["attention", "lse", "gradients", "vjp", "softmax"]


def of_captures(backend):
    """Returns the functions named in CAPTURED as calls without arguments."""
    q, k, v = arrays(2, 3, 20, 16)
    how = {"backend": backend, "kernel": "fa2"}
    out, lse = cupyfa.attention(q, k, v, return_lse=True, **how)
    of_pass = {"backend": backend, "kernel": "two_pass"}
    return {
        "attention": lambda: cupyfa.attention(q, k, v, **how),
        "lse": lambda: cupyfa.attention(q, k, v, return_lse=True, **how),
        "gradients": lambda: cupyfa.backward(q, q, k, v, out, lse, **of_pass),
        "vjp": lambda: cupyfa.vjp(q, k, v, backward_kernel="two_pass", **how)[1](q),
        "softmax": lambda: cupyfa.softmax(q, backend=backend),
    }


@pytest.mark.parametrize("name", CAPTURED)
def test_a_capture_takes_memory_only_where_that_is_allowed(near, name):
    """Covers a first call, a repeated call, and the first call in another stream."""
    call = of_captures(near)[name]
    for near.stream in (7, 8):
        for _ in range(2):
            near.is_capturing = True
            near.made.clear()
            call()
            assert near.made
            near.is_capturing = False
            call()


@pytest.fixture
def plans(monkeypatch):
    """Collects the plans that are made; first clears the simulator's cached calls."""
    choose_backend.backend_named("simulator").calls.clear()
    made, plan = [], planning.plan
    monkeypatch.setattr(planning, "plan", lambda *a, **k: made.append(a) or plan(*a, **k))
    return made


def test_attention_plans_once(near, plans):
    q, k, v = arrays(2, 3, 20, 16)
    for seed in range(3):
        cupyfa.attention(*arrays(2, 3, 20, 16, seed=seed), backend=near, kernel="fa2")
    assert len(plans) == 1 and near.short == 3
    for options in (
        {"causal": True},
        {"scale": 0.3},
        {"tiles": {"Br": 16, "Bc": 8}},
        {"window": (3, 0)},
    ):
        got = cupyfa.attention(q, k, v, backend=near, kernel="fa2", **options)
        np.testing.assert_array_equal(got, right(q, k, v, **options))
    assert len(plans) == 9  # including the simulator's plans
    near.refresh()
    cupyfa.attention(q, k, v, backend=near, kernel="fa2")
    assert len(plans) == 10


def test_gradients_plan_once(near, plans, tmp_path, monkeypatch):
    x = arrays(2, 3, 20, 16)
    o, lse = cupyfa.attention(*x, return_lse=True, backend="simulator", kernel="fa2")
    plans.clear()
    options = {"backend": near, "kernel": "two_pass"}
    texts, text = [], sources.text
    monkeypatch.setattr(sources, "text", lambda launch: texts.append(launch) or text(launch))
    for factor in (1, 2):
        dq, *_ = cupyfa.backward(factor * o, *x, o, lse, **options)
        host = (np.array(array) for array in (factor * o, *x, o, lse))
        wanted, *_ = cupyfa.backward(*host, **options | {"backend": Simulator()})
        np.testing.assert_array_equal(dq, wanted)
    launches = len(LADDER["backward"]["two_pass"].steps(Problem.of(*x)))
    assert len(plans) == 3 and len(texts) == 3 * launches  # including the simulators' plans
    for change in ({"causal": True}, {"kernel": "columns"}, {"tiles": {"Br": 16, "Bc": 16}}):
        cupyfa.backward(o, *x, o, lse, **options | change)
    assert len(plans) == 6
    with pytest.raises(Unsupported, match="arbitrary order"):
        cupyfa.backward(o, *x, o, lse, backend=near, kernel="columns", deterministic=True)
    there = on(1, [o, *x, o, lse])
    cupyfa.backward(*there, **options)
    assert len(plans) == 7
    mine = replace(LADDER["backward"]["two_pass"], folder=str(tmp_path))
    for _ in range(2):  # plans of kernels in files are not cached, since a file may change
        with pytest.raises(FileNotFoundError):
            cupyfa.backward(o, *x, o, lse, backend=near, kernel=mine)
    assert len(plans) == 9


def test_kernel_names_may_be_string_subclasses(near):
    """Temporary names are freed, so a later one may reuse the address of an earlier one."""
    x = arrays(2, 3, 20, 16)
    o, lse = cupyfa.attention(*x, return_lse=True, backend="simulator", kernel="fa2")
    cupyfa.backward(o, *x, o, lse, backend=near, kernel=np.str_("two_pass"))
    cupyfa.attention(*x, backend=near, kernel=np.str_("fa2"))
    assert all("two_pass" in key or "fa2" in key for key in near.calls.prepared)


def test_wrong_options_equal_to_valid_ones_are_refused(near):
    q, k, v = arrays(2, 3, 20, 16)
    cupyfa.attention(q, k, v, backend=near, causal=True, scale=1.0)
    with pytest.raises(ValueError, match="causal is 1"):
        cupyfa.attention(q, k, v, backend=near, causal=1, scale=1.0)
    with pytest.raises(TypeError, match="scale is True"):
        cupyfa.attention(q, k, v, backend=near, causal=True, scale=True)
    with pytest.raises((TypeError, ValueError), match="causal"):
        cupyfa.attention(q, k, v, backend=near, causal=[True])


def test_host_arrays_of_any_strides_share_a_prepared_call(plans):
    q = np.zeros((2, 3, 20, 16), np.float32)
    simulator = Simulator()
    for x in (q, q, q[:, ::-1]):
        cupyfa.attention(x, x, x, backend=simulator, kernel="fa2")
    assert len(plans) == 2  # the simulator distinguishes strides of its own arrays


def test_a_graph_has_its_own_temporaries(near, monkeypatch):
    """The graph may be launched in another stream while calls continue in the captured stream."""
    places, x = [], arrays(2, 3, 20, 16)

    def launch(addresses, stream):
        places.append(addresses)

    launch.fixed = lambda addresses, stream: (partial(launch, addresses, stream), None)
    monkeypatch.setattr(binding, "Launcher", lambda *_: launch)
    bound, out = compiled(near, *x), near.empty(x[0].shape, x[0].dtype)
    seen = []
    graph, eager = [(7, True)] * 2, [(7, False)] * 3
    for near.stream, near.is_capturing in [*eager, *graph, (8, False), (8, True), *eager]:
        places.clear()
        bound(*x, out=out)
        seen.append(places[0][-1])
    first, *again, in_graph, too, beside, in_another = seen[:7]
    assert {*again, *seen[7:]} == {first} and too == in_graph
    assert len({first, in_graph, beside, in_another}) == 4


def test_a_prepared_call_keeps_temporaries_of_few_streams(near):
    x = arrays(2, 3, 20, 16)
    bound = compiled(near, *x)
    wanted = right(*x)
    for near.stream in range(1, 3 * workspace.MOST):
        np.testing.assert_array_equal(bound(*x), wanted)
        assert len(bound._workspace.by_stream) <= workspace.MOST
    bound.forget()
    assert not bound._workspace.by_stream
    np.testing.assert_array_equal(bound(*x), wanted)


def test_calls_of_attention_share_memory_for_temporaries(near):
    first, second = arrays(2, 3, 20, 16), arrays(1, 2, 50, 16)
    expected = [right(*x) for x in (first, second)]
    seen = set()
    for stream in (7, 7, 9):
        near.stream = stream
        near.made.clear()
        for problem, wanted in zip((first, second), expected):
            got = cupyfa.attention(*problem, backend=near, kernel="fa2")
            np.testing.assert_array_equal(got, wanted)
        assert near.made.count((workspace.SHARED,)) == (1 if (0, stream) not in seen else 0)
        seen.add((0, stream))
    near.made.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspace, "SHARED", 100)
        near.spaces.clear()
        np.testing.assert_array_equal(
            cupyfa.attention(*first, backend=near, kernel="fa2"), expected[0]
        )
    assert near.spaces == {}


def test_temporaries_between_launches_are_not_shared_with_other_calls(near, monkeypatch):
    """Other threads may launch in the same stream between the launches of a call."""
    places = []

    def launcher(_, plan, arrays):
        starts = [place for place, x in enumerate(arrays) if x in plan.scratch or x == "lse"]
        sizes = [arrays[x].nbytes for x in arrays if x in plan.scratch or x == "lse"]

        def launch(addresses, stream):
            spans = [(addresses[i], addresses[i] + size) for i, size in zip(starts, sizes)]
            places.append((plan.kernel.name, spans))

        launch.fixed = lambda addresses, stream: (partial(launch, addresses, stream), None)
        return launch

    monkeypatch.setattr(binding, "Launcher", launcher)
    rng = np.random.default_rng(0)
    shapes = (1, 2, 20, 32), *[(1, 2, 300, 32)] * 2
    q, k, v = (rng.standard_normal(x).astype(np.float16).view(Near) for x in shapes)
    for kernel in ("mma_split_kv", "fa2", "mma_pipelined", "mma_split_kv"):
        cupyfa.attention(q, k, v, backend=near, kernel=kernel)
    (_, several), *single, (_, again) = places
    assert several == again and len(several) == 4
    assert all(a[1] <= b[0] or b[1] <= a[0] for a, b in combinations(several, 2))
    assert single[0][1][0][0] == single[1][1][0][0]
    for _, spans in single:
        assert all(end <= low or start >= high for start, end in spans for low, high in several)


def test_threads_share_a_prepared_call(near):
    bound = compiled(near, *arrays(2, 3, 20, 16))
    problems = [arrays(2, 3, 20, 16, seed=seed) for seed in range(6)]
    results = in_threads(lambda problem: [bound(*problem) for _ in range(3)][-1], problems)
    for result, problem in zip(results, problems):
        np.testing.assert_array_equal(result, right(*problem))


@pytest.fixture
def driver(monkeypatch):
    """Replaces CUDA's driver with a stub that records launches; arrays lie in host memory."""
    from cupyfa.runtime.cuda import device as cuda

    launched = []

    def launch(function, gx, gy, gz, x, y, z, shared, stream, pointers, extra):
        launched.append((function, (gx, gy, gz), x, shared, stream, pointers))

    def launch_early(by_reference, function, pointers, extra):
        config, function, pointers = by_reference._obj, function.value, pointers.value
        (attribute,) = config.attributes[: config.attribute_count]
        assert (attribute.id, attribute.value[1]) == (6, 1)
        sizes = (*config.grid, *config.block, config.shared_bytes)
        cuda.driver.launchKernel(function, *sizes, config.stream, pointers, extra)
        launch_early.functions.append(function)

    launch_early.functions = []
    monkeypatch.setattr(cuda, "_launch_kernel_ex", lambda: launch_early)
    runtime = SimpleNamespace(getDevice=lambda: 0, setDevice=lambda device: None)
    monkeypatch.setattr(cuda, "runtime", runtime)
    monkeypatch.setattr(cuda, "driver", SimpleNamespace(launchKernel=launch))
    monkeypatch.setattr(cuda.Cuda, "working_on", lambda *_: nullcontext())
    return launched


def on_device(shape, dtype):
    import cupy

    size = max(int(np.prod(shape)), 1) * dtype.itemsize
    memory = np.zeros(size + 512, np.uint8)
    start = memory.ctypes.data + -memory.ctypes.data % 512
    owned = cupy.cuda.UnownedMemory(start, size, memory, 0)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(owned, 0))


def arrays_of(plan):
    """Returns a CuPy array for each array of a plan's launches."""
    p = plan.problem
    q, k, v = (on_device(p.shape(f"batch heads {x} d"), p.dtype.numpy) for x in "MNN")
    others = {**plan.outputs, **plan.scratch}
    return {"Q": q, "K": k, "V": v} | {x: on_device(*about) for x, about in others.items()}


class Driven:
    """A Cuda engine without a device."""

    def __new__(cls):
        from cupyfa.runtime.cuda.device import Cuda

        class Engine(Cuda):
            def compile_launch(self, launch):
                return SimpleNamespace(kernel=SimpleNamespace(ptr=hash(launch.entry) & 0xFFFF))

            def __init__(self):
                super().__init__()
                self.products = []

            def matmul(self, a, b, out, scale, *, tf32=False):
                self.products.append([(x.data.ptr, x.shape, x.strides) for x in (a, b, out)])

            def tensor_map(self, mapped):
                return np.frombuffer(repr(mapped).encode().ljust(256)[:256], "V256").reshape(())

        return Engine()


IN_ROUNDS = replace(LADDER["backward"]["baseline_backward"], round_heads=lambda p, c: 1)


@pytest.mark.parametrize("kernel", [*FORWARD.values(), IN_ROUNDS], ids=name)
def test_the_driver_gets_the_arguments_that_a_launch_would_have(driver, kernel):
    engine = Driven()
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "M": 70, "N": 45, "d": 32}
    if "gqa" not in kernel.features:
        sizes["kv_heads"] = 4
    plan = planned(kernel, Simulator(), sizes, usual_dtype(kernel))

    def seen(step, arrays):
        return {x: array[step.slices.get(x, ())] for x, array in arrays.items()}

    first, second = ({x: on_device(*about) for x, about in plan.arrays.items()} for _ in range(2))
    launcher = Launcher(engine, plan, first)
    for arrays in (first, second, first):
        driver.clear()
        addresses = tuple(x.data.ptr for x in arrays.values())
        launcher(addresses, 42)
        assert len(driver) == len(plan.launches)
        products = [step for step in plan.steps if isinstance(step, Matmul)]
        for step, product in zip(products, engine.products[-len(products) :]):
            for x, (address, shape, strides) in zip((step.a, step.b, step.out), product):
                array = seen(step, arrays)[x.removesuffix(".T")]
                array = array.swapaxes(-1, -2) if x.endswith(".T") else array
                assert (address, shape, strides) == (array.data.ptr, array.shape, array.strides)
        for step, (_, grid, threads, shared, stream, pointers) in zip(plan.launches, driver):
            assert (grid, threads, shared) == (step.grid, step.threads, step.shared_bytes)
            assert stream == 42
            values = arguments(engine, step, seen(step, arrays))
            table = (ctypes.c_uint64 * len(values)).from_address(pointers)
            for value, address in zip(values, table):
                size = np.asarray(value).nbytes
                assert ctypes.string_at(address, size) == np.asarray(value).tobytes()


@pytest.mark.parametrize("awaits_all", [False, True])
def test_launches_begin_early_after_another_or_if_they_wait_for_all(driver, awaits_all):
    from cupyfa.runtime.cuda import device as cuda

    kernel = FORWARD["mma_split_kv"]
    how = {"begins_early": True, "awaits_all": awaits_all, "unawaited": ""}
    kernel = replace(kernel, launches=[replace(x, **how) for x in kernel.launches])
    plan = planned(kernel, Simulator(), {"heads": 2, "M": 1, "N": 300, "d": 32}, "float16")
    arrays = arrays_of(plan)
    for steps in (plan.steps, plan.steps[1:]):
        cuda._launch_kernel_ex().functions.clear()
        driver.clear()
        addresses = tuple(x.data.ptr for x in arrays.values())
        Launcher(Driven(), replace(plan, steps=steps), arrays)(addresses, 42)
        functions = [function for function, *_ in driver]
        assert len(functions) == len(steps)
        assert cuda._launch_kernel_ex().functions == functions[not awaits_all :]
        assert {stream for *_, stream, _ in driver} == {42}
    before_hopper = replace(Simulator().limits, arch="89")
    assert not any(
        x.begins_early for x in planning.plan(kernel, plan.problem, before_hopper).launches
    )


def test_threads_take_turns_to_begin_a_launch_early(driver, monkeypatch):
    """The arguments of such a launch are shared, even if it is the only one of its plan."""
    from cupyfa.runtime.cuda import device as cuda

    lock, was_locked = launcher._together[0], []
    launch = cuda._launch_kernel_ex()

    def launch_early(*given):
        was_locked.append(lock.locked())
        return launch(*given)

    monkeypatch.setattr(cuda, "_launch_kernel_ex", lambda: launch_early)
    sizes = {"heads": 2, "M": 1, "N": 300, "d": 32}
    plan = planned(FORWARD["mma_split_kv"], Simulator(), sizes, "float16")
    arrays = arrays_of(plan)
    alone = Launcher(Driven(), replace(plan, steps=plan.steps[:1]), arrays)
    addresses = tuple(x.data.ptr for x in arrays.values())
    alone(addresses, 42)
    start, _ = alone.fixed(addresses, 42)
    start()
    assert was_locked == [True, True]


@pytest.mark.parametrize(
    "change, kept",
    [({}, {"row_sums"}), ({"begins_early": False}, set()), ({"grid": (0, 1, 1)}, set())],
    ids=str,
)
def test_arrays_are_kept_for_a_launch_that_begins_early_and_reads_them(change, kept):
    two_pass = LADDER["backward"]["wgmma_two_pass"]
    plan = planned(two_pass, Simulator(), {"M": 64, "d": 64}, "float16")
    *others, last = plan.steps
    steps = launcher._in_order(replace(plan, steps=(*others, replace(last, **change))))
    before = steps[len(others) - 1]
    assert before.keeps == kept


def test_device_results_are_reused_only_if_nobody_holds_them(driver, monkeypatch):
    import cupy

    from cupyfa.runtime.cuda import device as cuda

    def allocate(size):
        x = on_device((size,), np.dtype("u1"))
        return x.data

    monkeypatch.setattr(cuda, "get_current_stream", lambda device=0: SimpleNamespace(ptr=0))
    engine, (q, k, v) = Driven(), (on_device((1, 1, 5, 8), np.dtype("f4")) for _ in range(3))
    monkeypatch.setattr(type(engine), "limits", Simulator().limits)
    monkeypatch.setattr(type(engine), "working_on", lambda *_: nullcontext())
    monkeypatch.setitem(choose_backend._owners, cupy.ndarray, engine)
    with cupy.cuda.using_allocator(allocate):
        prepared = cupyfa.compile(q, k, v, backend=engine, kernel="fa2")
        usual = {prepared(q, k, v).data.ptr for _ in range(6)}
        assert {prepared(q, k, v).data.ptr for _ in range(6)} <= usual
        for held in (attrgetter("data"), attrgetter("data.mem"), lambda x: x.reshape(-1)):
            kept = [(held(x), x.data.ptr) for x in (prepared(q, k, v) for _ in range(8))]
            assert len({address for _, address in kept}) == 8
    with cupy.cuda.using_allocator(lambda size: allocate(size)):
        assert prepared(q, k, v).data.ptr not in usual


def test_each_thread_has_its_own_arguments(driver):
    engine = Driven()
    plan = planned(FORWARD["fa2"], Simulator(), {"M": 5, "N": 5, "d": 8}, "float32")
    arrays = {x: on_device((1, 1, 5, 8), np.dtype("f4")) for x in ("Q", "K", "V", "O")}
    arrays["lse"] = on_device((1, 1, 5), np.dtype("f4"))
    launcher = Launcher(engine, plan, arrays)
    call = [x.data.ptr for x in arrays.values()]
    launcher(call, 0)
    thread = threading.Thread(target=launcher, args=(call, 0))
    thread.start()
    thread.join()
    launcher(call, 0)
    assert driver[0][-1] == driver[2][-1] != driver[1][-1]


def test_launches_of_a_call_are_not_interleaved_with_other_threads(driver, monkeypatch):
    """Two threads in one stream share temporaries that the second launch reads."""
    from cupyfa.runtime.cuda import device as cuda

    engine = Driven()
    sizes = {"heads": 2, "M": 1, "N": 300, "d": 32}
    plan = planned(FORWARD["mma_split_kv"], Simulator(), sizes, "float16")
    assert len(plan.launches) > 1
    arrays = arrays_of(plan)
    launched = []

    def launch(function, *_):
        launched.append((threading.get_ident(), function))
        time.sleep(0.001)  # like the driver, lets other threads run

    monkeypatch.setattr(cuda, "driver", SimpleNamespace(launchKernel=launch))
    launchers = [Launcher(engine, plan, arrays) for _ in range(2)]
    addresses = [x.data.ptr for x in arrays.values()]
    start = threading.Barrier(2)

    def call(launcher):
        start.wait()
        for _ in range(20):
            launcher(addresses, 0)

    in_threads(call, launchers)
    count = len(plan.launches)
    assert len(launched) == 2 * 20 * count
    for at in range(0, len(launched), count):
        assert len({thread for thread, _ in launched[at : at + count]}) == 1


class Tensor:
    """The part of torch's tensor interface that the library reads."""

    is_cuda, layout, requires_grad = True, "strided", False

    def __init__(self, array, **changes):
        self.array, self.shape = array, array.shape
        self.dtype = f"torch.{array.dtype}"
        vars(self).update(changes)

    def data_ptr(self):
        return self.array.data.ptr

    def stride(self):
        return tuple(x // self.array.dtype.itemsize for x in self.array.strides)

    def is_neg(self):
        return False

    def get_device(self):
        return 0


@pytest.fixture
def torch(driver, monkeypatch):
    from cupyfa.runtime.cuda import device as cuda

    names = ("float16", "bfloat16", "float32", "float64")
    stream = SimpleNamespace(cuda_stream=5)
    module = SimpleNamespace(Tensor=Tensor, strided="strided", cuda=SimpleNamespace())
    module.cuda.current_stream = lambda device: stream
    for each in names:
        setattr(module, each, f"torch.{each}")
    monkeypatch.setitem(sys.modules, "torch", module)
    monkeypatch.setattr(cuda, "get_current_stream", lambda device=0: SimpleNamespace(ptr=5))
    monkeypatch.setattr(cuda, "_dtypes_of", cuda._dtypes_of.__wrapped__)
    return module


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_torch_tensors_are_used_in_place(torch, dtype):
    numpy = np.dtype(getattr(ml_dtypes, dtype, dtype))
    arrays = [on_device((2, 5, 6, 8), numpy) for _ in range(3)]
    arrays[1] = arrays[1][:, ::2, 1:, ::2]
    engine, seen = choose_backend.adopt(Driven(), **dict(zip("qkv", map(Tensor, arrays))))
    assert engine.name == "cuda"
    for view, array in zip(seen, arrays):
        for fact in ("shape", "strides", "dtype", "data.ptr", "data.device_id"):
            assert attrgetter(fact)(view) == attrgetter(fact)(array)


@pytest.mark.parametrize(
    "change",
    [
        {"requires_grad": True},
        {"layout": "sparse"},
        {"dtype": "torch.int8"},
        {"get_device": lambda: 1},
        {"data_ptr": lambda: 0},
        {"is_neg": lambda: True},
        {"stride": lambda: 1 // 0},
    ],
    ids=lambda x: next(iter(x)),
)
def test_unusual_torch_tensors_go_through_dlpack(torch, change):
    usual = Tensor(on_device((2, 5), np.dtype("f4")))
    assert Driven().adopt_tensors([usual]) is not None
    assert Driven().adopt_tensors([usual, Tensor(usual.array, **change)]) is None


def test_torch_tensors_of_another_stream_go_through_dlpack(torch):
    usual = Tensor(on_device((2, 5), np.dtype("f4")))
    torch.cuda.current_stream = lambda device: SimpleNamespace(cuda_stream=0)
    assert Driven().adopt_tensors([usual]) is None


def test_empty_pinned_takes_dtypes_and_shapes():
    x = cupyfa.empty_pinned((3, 4), "bfloat16", backend="simulator")
    assert x.shape == (3, 4) and x.dtype == ml_dtypes.bfloat16
    assert cupyfa.empty_pinned(5, np.float16, backend="simulator").shape == (5,)
    assert cupyfa.empty_pinned((0, 5), backend="simulator").dtype == np.float32
