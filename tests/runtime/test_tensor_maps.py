"""The host side of TMA kernels: tensor maps, aligned rows, sm_90a."""

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import boxed_kernel
from helpers.device_code import code
from helpers.problems import inputs_of, planned

import cupyfa
from cupyfa import DeviceError, Kernel, Launch, Limits, Problem, Unsupported
from cupyfa.errors import DeviceLost
from cupyfa.lab import Case
from cupyfa.lab.analysis import resources as compiling
from cupyfa.lab.analysis.resources import compilations, compiled_row
from cupyfa.lab.bench import timing, trial
from cupyfa.ladder import LADDER
from cupyfa.planner import choose_kernel as planning
from cupyfa.runtime import guard
from cupyfa.runtime.arrays import readable_inputs
from cupyfa.runtime.backend import Mapped
from cupyfa.runtime.choose_backend import backend_named
from cupyfa.runtime.kernel_arguments import arguments, describe_map
from cupyfa.runtime.launcher import Launcher, _Arguments, replay

SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "M": 37, "N": 21, "d": 40, "dv": 72}
ODD = {"heads": 2, "M": 19, "N": 11, "d": 33, "dv": 9}


@pytest.fixture
def kernel(tmp_path):
    return boxed_kernel.write(tmp_path)


@pytest.fixture
def simulator():
    return backend_named("simulator")


def q_k_v(problem, seed=0, layout="bhsd"):
    return Case("forward", problem, seed, layout=layout).inputs()


def launch(**changes):
    formulas = {"grid": lambda p, c: 1, "threads": lambda p, c: 128}
    return Launch(
        "own", **{"args": "Q.map K", "boxes": {"Q": lambda p, c: 64}, **formulas} | changes
    )


def test_arrays_are_passed_in_three_ways():
    assert launch().arrays == (("Q", "map"), ("K", ""))


def test_a_grid_knows_the_multiprocessors(kernel):
    problem = Problem.of_sizes(**SIZES, dtype="float16")
    for count, blocks in ((1, 1), (7, 7), (500, 3 * 4 * 2)):
        limits = replace(compiling.limits_of("90"), multiprocessors=count)
        (step,) = planning.plan(kernel, problem, limits).launches
        assert step.grid == (blocks, 1, 1)
        assert "multiprocessors" not in step.constants


def test_sm_90a_kernels_run_only_on_sm_90(kernel):
    problem = Problem.of_sizes(**SIZES, dtype="float16")
    assert kernel.target == "90a"
    for arch in ("90", "90a"):
        assert planning.plan(kernel, problem, compiling.limits_of(arch)).launches[0].target == "90a"
    assert planning.can(kernel, problem, backend_named("simulator").limits)
    for device in ("89", "100", "120"):
        limits = Limits("a device", 2**16, arch=device)
        words = f"it runs only on sm_90a, but a device is sm_{device}; kernels that can: "
        with pytest.raises(Unsupported, match=words) as refused:
            planning.plan(kernel, problem, limits)
        assert "\n" not in str(refused.value)


def test_auto_takes_sm_90a_kernels_only_on_sm_90(kernel, monkeypatch):
    fast = replace(kernel, tflops={"float16": {64: 1e4}})
    monkeypatch.setitem(LADDER["forward"], fast.name, fast)
    problem = Problem.of_sizes(M=64, d=64, dtype="float16")
    chosen = {
        arch: planning.select("auto", "forward", problem, compiling.limits_of(arch))
        for arch in ("80", "90", "100")
    }
    assert chosen["90"] is fast
    assert fast not in (chosen["80"], chosen["100"])


def test_sm_90a_kernels_are_compiled_for_sm_90a(kernel):
    pytest.importorskip("cupyfa.runtime.cuda.device", reason="CuPy and its NVRTC are not installed")
    arches, dtypes = ["80", "90", "90a", "100"], ["bfloat16", "bfloat16"]
    ((plan, arch),) = compiling.plans([kernel], arches, dtypes, 40)
    compiled = compiling.compile_launch(plan.launches[0], arch)
    assert (arch, compiled.arch) == ("90", "90a")
    assert compiled.warnings == ()
    assert ".target sm_90a" in compiling.ptx(plan.launches[0], arch)


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """Replaces NVRTC and the driver's modules; records what is compiled and loaded."""
    module = pytest.importorskip("cupyfa.runtime.cuda.compiler", reason="CuPy is not installed")
    from cupyfa.runtime.cuda import device

    monkeypatch.setenv("CUPYFA_CACHE_DIR", str(tmp_path / "cache"))
    made = SimpleNamespace(compiled=[], kernels=[])

    class Loaded:
        def __init__(self, binary, entry):
            self.binary, self.entry = binary, entry
            self.attributes = {"MAX_THREADS_PER_BLOCK": 1024, "NUM_REGS": 30}
            self.attributes["MAX_DYNAMIC_SHARED_SIZE_BYTES"] = 49152
            self.attribute, self.set_attribute = self.attributes.get, self.attributes.__setitem__
            made.kernels.append(self)

    def compile_text(text, name, arch, folders, **options):
        made.compiled.append((arch, options["to_ptx"]))
        return b"binary of " + text.encode(), ""

    monkeypatch.setattr(module, "Kernel", Loaded)
    monkeypatch.setattr(module, "compile_text", compile_text)
    here = SimpleNamespace(id=0, compute_capability="90")
    monkeypatch.setattr(device.cupy.cuda, "Device", lambda: here)
    return made


def cuda():
    from cupyfa.runtime.cuda.device import Cuda

    return Cuda()


def step_of(record):
    problem = Problem.of_sizes(M=64, d=64, dtype="float16")
    return planning.plan(record, problem, compiling.limits_of("90")).launches[0]


def test_kernels_are_compiled_for_the_device_or_for_their_own_architecture(kernel, compiler):
    for record in (kernel, LADDER["forward"]["fa2"]):
        cuda().compile_launch(step_of(record))
    assert compiler.compiled == [("90a", False), ("90", False)]


def test_a_device_newer_than_nvrtc_gets_ptx():
    from cupyfa.runtime.cuda.compiler import _target

    newest, to_ptx = _target("990")
    assert to_ptx and _target(newest) == (newest, False)


def test_a_second_process_finds_the_binary_unless_it_is_damaged(compiler, tmp_path):
    step = step_of(LADDER["forward"]["fa2"])
    for _ in range(2):
        cuda().compile_launch(step)
    assert len(compiler.compiled) == 1 and len(compiler.kernels) == 2
    first, second = compiler.kernels
    assert first.binary == second.binary and first.entry == second.entry == "fa2"
    (file,) = (tmp_path / "cache").glob("*.cubin")
    whole = file.read_bytes()
    for content in (whole[:-1], b"", whole[:40], b"x" + whole[1:]):
        file.write_bytes(content)
        cuda().compile_launch(step)
        assert compiler.kernels[-1].binary == first.binary and file.read_bytes() == whole
    assert len(compiler.compiled) == 5
    cuda().compile_launch(step_of(LADDER["forward"]["v2"]))
    assert len(list((tmp_path / "cache").glob("*.cubin"))) == 2


def test_a_prepared_kernel_is_for_its_entry_and_its_shared_memory(compiler, tmp_path):
    (tmp_path / "two.cu").write_text("")
    step = step_of(LADDER["forward"]["fa2"])
    step, backend = replace(step, path=tmp_path / "two.cu", shared_bytes=0), cuda()
    first, second = (replace(step, launch=replace(step.launch, entry=x)) for x in ("one", "two"))
    compiled = map(backend.compile_launch, (first, second, first))
    assert [x.entry for x in compiled] == ["one", "two", "one"]
    assert len(compiler.kernels) == 2
    for size, granted in ((1000, 49152), (80_000, 80_000), (60_000, 80_000)):
        made = backend.compile_launch(replace(first, shared_bytes=size))
        assert made.attribute("MAX_DYNAMIC_SHARED_SIZE_BYTES") == granted


def test_an_interrupted_call_leaves_no_stale_address():
    launched, stops = [], []

    class Memory(list):
        def __setitem__(self, at, value):
            if at == 1 and stops:
                raise stops.pop()
            super().__setitem__(at, value)

    memory = Memory([0, 0, 0])
    step = object.__new__(_Arguments)
    step._memory, step._slots, step._maps = memory, [(i, (i, 0)) for i in range(3)], []
    step.start, step.pointers = lambda *_: launched.append(list(memory)), 0
    launcher = object.__new__(Launcher)
    launcher._mine, launcher._is_alone = SimpleNamespace(steps=[step], addresses=None), True
    launcher((1, 2, 3), 0)
    stops.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        launcher((4, 5, 6), 0)
    launcher((1, 2, 3), 0)
    assert launched == [[1, 2, 3], [1, 2, 3]]


# ptxas serializes these wgmma products, because the code writes registers between them.
SLOW = code("slow")


def test_warnings_of_serialized_products_are_shown(tmp_path):
    pytest.importorskip("cupyfa.runtime.cuda.device", reason="CuPy and its NVRTC are not installed")
    (tmp_path / "own.cu").write_text(f"#include <tile/tensor.cuh>\n{SLOW}")
    step = launch(args="Q lse.data", boxes={})
    features = {"dtypes": ("float16",), "features": ("lse",)}
    own = Kernel("own", "", (step,), arch="90a", folder=tmp_path, **features)
    ((plan, arch),) = compiling.plans([own], ["90"], ["float16"], 64)
    warnings = compiling.compile_launch(plan.launches[0], arch).warnings
    assert any("wgmma.mma_async instructions are serialized" in x for x in warnings)
    assert len(set(warnings)) == len(warnings)
    row = compiled_row(plan, compiling.compile_launch(plan.launches[0], arch))
    table = compilations([row], "table")
    assert f"own, float16, sm_90a: {'; '.join(warnings)}" in table.splitlines()
    assert "serialized" in compilations([row], "json")


def mapped_arguments(engine, plan, arrays):
    return arguments(engine, plan.launches[0], arrays)[:4]


def test_bytes_of_the_simulators_tensor_map(kernel, simulator):
    plan = planned(kernel, simulator, SIZES, "bfloat16")
    arrays = timing.arrays_of(simulator, plan, inputs_of(plan, layout="bshd"), {})
    maps = mapped_arguments(simulator, plan, arrays)
    sizes = ((40, 37, 4, 2, 16), (40, 21, 2, 2, 8), (72, 21, 2, 2, 8), (72, 37, 4, 2, 16))
    for made, name, (columns, rows, heads, batch, box_rows) in zip(maps, "QKVO", sizes):
        by_batch, by_head, by_row, _ = arrays[name].strides
        expected = np.zeros(16, np.int64)
        expected[:4] = (arrays[name].ctypes.data, by_row, by_head, by_batch)
        expected[4:8].view(np.int32)[:7] = (columns, rows, heads, batch, box_rows, 1, 2)
        assert bytes(made) == expected.tobytes()
        assert made.ctypes.data % 64 == 0 and made.nbytes == 128


def test_a_box_of_several_heads_exchanges_rows_and_heads(simulator):
    sizes = {"batch": 2, "heads": 32, "kv_heads": 2, "M": 5, "N": 70, "d": 40}
    plan = planned(LADDER["forward"]["wgmma_slices"], simulator, sizes, "float16")
    arrays = timing.arrays_of(simulator, plan, inputs_of(plan, layout="bshd"), {})
    by_batch, by_head, by_row, _ = arrays["Q"].strides
    found = describe_map(simulator, plan.launches[0], "Q", arrays["Q"])
    assert found.sizes == (40, 32, 5, 2) and found.strides == (by_head, by_row, by_batch)
    assert found.box == (16, 8)
    assert describe_map(simulator, plan.launches[0], "K", arrays["K"]).box == (256, 1)


def test_axes_of_size_1_get_valid_strides(kernel, simulator):
    plan = planned(kernel, simulator, {"M": 1, "N": 0, "d": 40}, "float16")
    strange = np.lib.stride_tricks.as_strided
    arrays = timing.arrays_of(simulator, plan, inputs_of(plan), {})
    arrays["Q"] = strange(arrays["Q"], strides=(-7, 0, 3, 2))
    for made in mapped_arguments(simulator, plan, arrays):
        numbers = np.frombuffer(bytes(made), np.int64)
        assert numbers[1:4].tolist() == [80, 80, 80]
        assert numbers[4:8].view(np.int32)[:4].tolist() == [40, 1, 1, 1]


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda x: x.astype(np.float32), "float32 .*float16 or bfloat16"),
        (lambda x: x[..., 0], "TMA requires .batch, heads, rows, columns."),
        (lambda x: x[..., 1:], "multiples of 16 bytes"),
        (lambda x: x[:, :, ::-1], "requires positive strides"),
    ],
    ids=["float32", "no columns", "an odd address", "backwards"],
)
def test_arrays_without_a_valid_tensor_map_are_refused(kernel, simulator, spoil, message):
    plan = planned(kernel, simulator, {"M": 9, "d": 40}, "float16")
    arrays = timing.arrays_of(simulator, plan, inputs_of(plan), {})
    with pytest.raises(ValueError, match=f"by_boxes: Q.map is of .*{message}"):
        mapped_arguments(simulator, plan, {**arrays, "Q": spoil(arrays["Q"])})


ENCODE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p),
    *(ctypes.c_void_p,) * 4,
    *(ctypes.c_int,) * 4,
)


@pytest.fixture
def device(monkeypatch):
    """Returns the module of the CUDA backend, which encodes tensor maps anew."""
    device = pytest.importorskip("cupyfa.runtime.cuda.device", reason="CuPy is not installed")
    monkeypatch.setattr(device.runtime, "deviceSynchronize", lambda: None)
    device._encoded.cache_clear()
    yield device
    device._encoded.cache_clear()


def test_arguments_of_cuTensorMapEncodeTiled(device, monkeypatch):
    asked = []

    def numbers(address, kind, count):
        return list((kind * count).from_address(address))

    @ENCODE
    def encode(out, dtype, rank, address, sizes, strides, box, steps, *modes):
        small, large = ctypes.c_uint32, ctypes.c_uint64
        asked.append((dtype, rank, address, numbers(sizes, large, 4), numbers(strides, large, 3)))
        asked.append((numbers(box, small, 4), numbers(steps, small, 4), modes))
        asked.append(out % 64)
        ctypes.memset(out, 7, 128)
        return 1 if dtype == 9 else 0

    monkeypatch.setattr(device, "_encode_tiled", lambda: encode)
    mapped = Mapped(0x7000, "float16", (40, 37, 4, 2), (80, 2**33, 2**35), (16, 1))
    made = device.Cuda().tensor_map(mapped)
    assert asked == [
        (6, 4, 0x7000, [40, 37, 4, 2], [80, 2**33, 2**35]),
        ([64, 16, 1, 1], [1, 1, 1, 1], (0, 3, 3, 0)),
        0,
    ]
    assert bytes(made) == b"\7" * 128
    assert device.Cuda().tensor_map(mapped) is made  # the driver is called once
    with pytest.raises(
        DeviceError, match=r"EncodeTiled failed for Mapped\(address=28672, .* CUresult 1"
    ):
        device.Cuda().tensor_map(mapped._replace(dtype="bfloat16"))


def test_a_tensor_map_that_cannot_be_encoded_tells_that_the_device_is_lost(device, monkeypatch):
    """The driver rejects all further maps if a kernel of another thread has trapped."""

    def lost():
        raise device.runtime.CUDARuntimeError(700)

    monkeypatch.setattr(device, "_encode_tiled", lambda: lambda *arguments: 700)
    mapped = Mapped(0x7000, "float16", (40, 37, 4, 2), (80, 2**33, 2**35), (16, 1))
    with pytest.raises(DeviceError, match="CUresult 700$"):
        device.Cuda().tensor_map(mapped)
    monkeypatch.setattr(device.runtime, "deviceSynchronize", lost)
    with pytest.raises(DeviceLost, match="CUresult 700; .* restart the process"):
        device.Cuda().tensor_map(mapped)


def test_aligned_inputs_and_those_of_kernels_without_boxes_are_not_copied(kernel, simulator):
    fa2 = LADDER["forward"]["fa2"]
    for record, sizes, layout in (
        (kernel, SIZES, "bhsd"),
        (kernel, SIZES, "bshd"),
        (fa2, ODD, "bhsd"),
    ):
        plan = planned(record, simulator, sizes, "float16")
        inputs = inputs_of(plan, layout=layout)
        readable = readable_inputs(plan, inputs)
        assert all(readable[name] is inputs[name] for name in inputs)


def views(q, k, v):
    """Returns the arrays with strides that tensor maps reject: reversed, unaligned, broadcast."""
    room = np.empty((*k.shape[:-1], k.shape[-1] + 3), k.dtype)
    room[..., 1:-2] = k
    return {
        "Q": q[:, :, ::-1].copy()[:, :, ::-1],
        "K": room[..., 1:-2],
        "V": np.broadcast_to(v[:, :1], v.shape),
    }


@pytest.mark.parametrize("make", [lambda *x: dict(zip("QKV", x)), views], ids=["as is", "views"])
@pytest.mark.parametrize("sizes", [SIZES, ODD, {"M": 40, "N": 24, "d": 64}])
def test_rows_become_aligned(kernel, simulator, sizes, make):
    plan = planned(kernel, simulator, sizes, "bfloat16")
    inputs = make(*q_k_v(plan.problem).values())
    for name, array in readable_inputs(plan, inputs).items():
        assert array.ctypes.data % 16 == 0
        walked = [x for x, size in zip(array.strides, array.shape[:3]) if size > 1]
        assert all(stride > 0 and stride % 16 == 0 for stride in walked)
        assert (array.view(np.uint16) == inputs[name].view(np.uint16)).all()


def skip_unless_it_runs(kernel, backend):
    if not planning.can(kernel, Problem.of_sizes(M=1, d=8, dtype="float16"), backend.limits):
        pytest.skip(f"{backend.limits.device} is not of sm_90")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tma_tiles_are_copied_unchanged(kernel, backend, dtype):
    """With one key, every row of O equals V.

    O matches V bit for bit only if the TMA load and the TMA store copied all elements unchanged.
    """
    skip_unless_it_runs(kernel, backend)
    plan = planned(kernel, backend, {**SIZES, "N": 1}, dtype)
    inputs = inputs_of(plan)
    O = guard.checked(backend, plan, inputs, {})["O"]  # noqa: E741
    V = np.broadcast_to(inputs["V"].repeat(plan.problem.group, axis=1), O.shape)
    assert (O.view(np.uint16) == V.view(np.uint16)).all()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    "sizes", [SIZES, ODD, {"M": 1, "N": 1, "d": 1}, {"M": 5, "N": 0, "d": 8}, {"M": 0, "d": 12}]
)
def test_a_kernel_with_tensor_maps_is_right(kernel, backend, sizes, layout):
    skip_unless_it_runs(kernel, backend)
    for dtype in kernel.dtypes:
        plan = planned(kernel, backend, sizes, dtype)
        inputs = readable_inputs(plan, inputs_of(plan, layout=layout))
        guard.checked(backend, plan, inputs, {})


@pytest.mark.parametrize("check", [False, True], ids=["run", "check"])
@pytest.mark.parametrize("sizes", [SIZES, ODD], ids=["even", "odd"])
def test_a_call_takes_arrays_of_any_alignment(kernel, backend, sizes, check):
    skip_unless_it_runs(kernel, backend)
    problem = Problem.of_sizes(**sizes, dtype="float16")
    arrays = views(*q_k_v(problem).values())
    arrays = dict(zip("qkv", arrays.values()))
    for inputs in [arrays] if backend.name == "simulator" else [arrays, on_device(arrays)]:
        expected = cupyfa.attention(**inputs, kernel="fa2", backend=backend)
        room = np.zeros_like(inputs["q"], shape=(*expected.shape[:-1], expected.shape[-1] + 1))
        out = room[..., 1:]
        done = cupyfa.attention(**inputs, kernel=kernel, backend=backend, out=out, check=check)
        assert done is out
        assert abs(out.astype(np.float32) - expected.astype(np.float32)).max() < 2e-3
        assert not room[..., 0].any()


def on_device(arrays):
    return {name: timing._placed(backend_named("cuda"), array) for name, array in arrays.items()}


def test_trials_and_benchmarks_align_arrays_too(kernel, simulator):
    plan = planned(kernel, simulator, ODD, "float16")
    assert trial.trial(simulator, plan, inputs_of(plan)).passed
    rows = cupyfa.bench([kernel], backend=simulator, budget=0, **ODD, dtype="float16")
    assert {row.kernel for row in rows} >= {"by_boxes"} and all(row.passed for row in rows)


@pytest.mark.gpu
def test_tensor_maps_in_a_graph_are_reused(kernel, cuda):
    skip_unless_it_runs(kernel, cuda)
    plan = planned(kernel, cuda, ODD, "float16")
    arrays = timing.arrays_of(cuda, plan, readable_inputs(plan, inputs_of(plan)), {})

    def call():
        replay(cuda, plan, arrays)()

    call()
    first = cuda.download(arrays["O"])
    for again in (call, cuda.capture(call)):
        arrays["O"].fill(np.nan)
        again()
        cuda.synchronize()
        assert (cuda.download(arrays["O"]) == first).all()
