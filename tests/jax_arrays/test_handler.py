"""The handler of XLA's custom calls runs kernels of the simulator, called as XLA would call it."""

import ctypes
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import cupyfa
from cupyfa import Simulator
from cupyfa.call.call import Call
from cupyfa.planner import choose_kernel as planning
from cupyfa.problem.options import AttentionOptions
from cupyfa.runtime.choose_backend import backend_named
from cupyfa.runtime.simulator.machine import load_library

jax = pytest.importorskip("jax")

from cupyfa.jax import custom_calls  # noqa: E402  # after the check for JAX
from cupyfa.jax.array_forms import ShapedCall, as_key  # noqa: E402

DEVICE, STREAM, CONTEXT = 3, 7, 1234  # of frame.cpp, and of the simulated driver
COMMAND_BUFFERS = 1  # XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE
SHAPES = {"batch": 2, "heads": 4, "kv_heads": 2, "M": 40, "N": 70}


class Config(ctypes.Structure):
    """The driver's struct CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


POINTER = ctypes.c_void_p
GET, SET = (ctypes.CFUNCTYPE(ctypes.c_int, x) for x in (ctypes.POINTER(POINTER), POINTER))
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Config), *(POINTER,) * 3)
REPLACE = ctypes.CFUNCTYPE(ctypes.c_int, POINTER, POINTER)


class Driver:
    """A driver whose kernels are launches of the simulator, by the number of each launch."""

    def __init__(self, handler):
        self.launches, self.context, self.failing, self.configs = [], 0, 0, []
        self.prepare = lambda number, device: None
        functions = GET(self.get), SET(self.set), LAUNCH(self.launch), REPLACE(self.replace)
        self.kept = functions, custom_calls._Prepare(self.prepare_on)
        self.table = (POINTER * 4)(*(ctypes.cast(x, POINTER).value for x in functions))
        handler.cupyfa_begin(self.table, self.kept[1])

    def get(self, into):
        into[0] = self.context
        return 0

    def set(self, context):
        self.context = context
        return 0

    def launch(self, config, function, table, _):
        if self.failing:
            return self.failing
        step, start = self.launches[function - 1]
        seen = config[0]
        assert tuple(seen.grid) == step.grid and tuple(seen.block) == (step.threads, 1, 1)
        assert seen.shared_bytes == step.shared_bytes and seen.stream == STREAM
        assert seen.attribute_count == step.begins_early
        start(None, table, 0)
        self.configs.append(step.entry)
        return 0

    def replace(self, tensor_map, address):
        assert tensor_map % 64 == 0
        ctypes.c_uint64.from_address(tensor_map).value = address  # as in the simulator's tma.cuh
        return 0

    def prepare_on(self, number, device, message, size):
        try:
            self.prepare(number, device)
        except ValueError as error:
            ctypes.memmove(message, f"{error}\0".encode(), len(str(error)) + 1)
            return False
        return True


@pytest.fixture(scope="module")
def frame():
    folder = [jax.ffi.include_dir()]
    return load_library(Path(__file__).with_name("frame.cpp"), folder, jax.__version__)


@pytest.fixture
def handler():
    return custom_calls.load_handler()


@pytest.fixture
def driver(handler):
    return Driver(handler)


def call(frame, handler, number, inputs, results):
    buffers = [*inputs, *results]
    pointers = (POINTER * len(buffers))(*(x.ctypes.data for x in buffers))
    message = ctypes.create_string_buffer(1024)
    counts = len(inputs), len(buffers)
    how = handler.cupyfa_call, ctypes.c_int64(number), pointers, *counts, message
    failed = frame.call_handler(*how, ctypes.c_size_t(1024))
    return message.value.decode() if failed & 0xFF else ""


def laid_out(operation, arrays, kernel, asked, names=(), **more):
    """Plans a call in the simulator, as for XLA; returns the plan and its program's parts."""
    options = AttentionOptions.of(None, asked)
    made = Call(operation, kernel, "simulator", options=options, inputs=names, **more)
    forms = tuple((x.shape, x.dtype) for x in arrays)
    shaped, backend = ShapedCall(as_key(made), forms), backend_named("simulator")
    record = planning.select(kernel, operation, shaped.problem, backend.limits)
    plan = planning.plan(record, shaped.problem, backend.limits)
    return backend, custom_calls.lay_out(backend, shaped, plan)


def run_program(frame, handler, driver, number, backend, made, arrays):
    launcher, places = made.launcher(backend)
    driver.launches = [(x.step, x.start) for x in launcher.launches]
    handles = count(1)  # ctypes passes 0 as None
    words = custom_calls.encode(
        backend, launcher.launches, places, CONTEXT, lambda x: next(handles)
    )
    program = (ctypes.c_int64 * len(words))(*words)
    driver.kept += (program,)
    handler.cupyfa_add(ctypes.c_int64(number), DEVICE, program)
    padded = [
        np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)]) for x, more in zip(arrays, made.padding)
    ]
    results = [np.zeros(shape, dtype) for shape, dtype in made.buffers]
    assert call(frame, handler, number, padded, results) == ""
    return [x[..., : y.shape[-1]] for x, y in zip(results, made.shaped.results)]


def draw(dtype, d):
    random, s = np.random.default_rng(0), SHAPES
    q = random.standard_normal((s["batch"], s["heads"], s["M"], d)).astype(dtype)
    k, v = random.standard_normal((2, s["batch"], s["kv_heads"], s["N"], d)).astype(dtype)
    return q, k, v


@pytest.mark.parametrize(
    ("kernel", "dtype", "d"),
    [
        ("fa2", "float32", 16),
        ("mma_tma", "float16", 64),
        pytest.param("mma_tma", "float16", 60, id="padded columns"),
    ],
)
def test_results_are_those_of_attention(frame, handler, driver, kernel, dtype, d):
    arrays = draw(dtype, d)
    backend, made = laid_out("forward", arrays, kernel, {"causal": "bottom-right"}, return_lse=True)
    out, lse = run_program(frame, handler, driver, hash((kernel, d)) >> 1, backend, made, arrays)
    how = {"kernel": kernel, "causal": True, "return_lse": True, "backend": "simulator"}
    expected = cupyfa.attention(*arrays, **how)
    assert_array_equal(out, expected[0])
    assert_array_equal(lse, expected[1])
    assert driver.context == CONTEXT
    if d == 60:
        assert any(made.padding)


def test_gradients_take_several_launches_and_scratch(frame, handler, driver):
    q, k, v = draw("float32", 16)
    bias = np.random.default_rng(1).standard_normal((1, 4, 40, 70)).astype(np.float32)
    out, lse = cupyfa.attention(q, k, v, bias=bias, return_lse=True, backend="simulator")
    arrays = np.ones_like(out), q, k, v, out, lse, bias
    wrt = "q", "k", "v", "bias"
    backend, made = laid_out("backward", arrays, "two_pass", {}, ("mods.bias",), wrt=wrt)
    found = run_program(frame, handler, driver, 5, backend, made, arrays)
    how = {"bias": bias, "wrt": wrt, "kernel": "two_pass", "backend": "simulator"}
    for mine, theirs in zip(found, cupyfa.backward(*arrays[:6], **how), strict=True):
        assert_array_equal(mine, theirs)
    assert len(driver.configs) > 1


def test_equal_plans_have_equal_numbers():
    """So that XLA finds compiled programs of other processes, and none of another plan."""

    def number(**asked):
        backend, made = laid_out("forward", draw("float32", 16), "fa2", asked, return_lse=True)
        launcher, places = made.launcher(backend)
        return custom_calls._number(launcher.launches, places)

    numbers = [number(), number(causal="bottom-right"), number(scale=0.5), number(softcap=2.0)]
    assert len({*numbers}) == len(numbers) and all(0 <= x < 2**63 for x in numbers)
    assert number() == numbers[0]


def test_a_plan_is_for_all_devices_of_a_model(monkeypatch):
    class Device(NamedTuple):
        local_hardware_id: int

    class Two(Simulator):
        models = "H100", "A100", "H100"

    monkeypatch.setattr(jax, "local_devices", lambda backend: [Device(2), Device(1), Device(0)])
    assert custom_calls._devices_like(Two()) == [2, 0]


def test_the_handler_can_be_recorded(frame, handler):
    assert frame.traits_of(handler.cupyfa_call) == COMMAND_BUFFERS


def test_xla_takes_the_handler(handler):
    """Its own checks, at registration; on a CPU there is no stream."""
    name, capsule = "handler_of_a_test", jax.ffi.pycapsule(handler.cupyfa_call)
    jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    result = [jax.ShapeDtypeStruct((3,), np.float32)]
    with pytest.raises(jax.errors.JaxRuntimeError, match="XLA FFI GPU context is not available"):
        jax.ffi.ffi_call(name, result)(np.ones(3, np.float32), plan=np.int64(2**62))


def test_a_plan_is_prepared_once_on_a_device(frame, handler, driver):
    program, asked = (ctypes.c_int64 * 2)(0, CONTEXT), []

    def prepare(number, device):
        asked.append((number, device))
        handler.cupyfa_add(ctypes.c_int64(number), device, program)

    driver.prepare = prepare
    assert call(frame, handler, 77, [], []) == call(frame, handler, 77, [], []) == ""
    assert asked == [(77, DEVICE)]


def test_errors_reach_xla(frame, handler, driver):
    def prepare(number, device):
        raise ValueError("no room")

    driver.prepare = prepare
    assert call(frame, handler, 78, [], []) == "no room"
    arrays = draw("float32", 16)
    backend, made = laid_out("forward", arrays, "fa2", {}, return_lse=True)
    run_program(frame, handler, driver, 79, backend, made, arrays)
    driver.failing = 719
    results = [np.zeros(shape, dtype) for shape, dtype in made.buffers]
    assert call(frame, handler, 79, arrays, results).endswith("CUresult 0719")
