"""Fixtures: every test of a kernel runs on each backend that is there."""

import fcntl
import gc
import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest
from helpers.device_code import launch, launch_on_device

import cupyfa
from cupyfa import DeviceError
from cupyfa.lab.bench.sweeps import usual_dtype
from cupyfa.ladder import backward
from cupyfa.ladder.kernel import Kernel
from cupyfa.planner import tuned
from cupyfa.runtime.choose_backend import backend_named

# Tests compile many kernels and run each for a short time. The compiler's checks of alignment and
# array bounds take 18 to 47 % of a compilation, so only tests with ``every_check`` have them.
os.environ.setdefault("CUPYFA_COMPILER_FLAGS", "-O0 -fno-sanitize=alignment,bounds")
# A shell has its background jobs ignore Ctrl-C, and those hand that on to the programs they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# pytest-xdist starts a process per core, each with its own BLAS: one thread is enough for each.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def devices_in_turn(process, count):
    """All devices as CUDA_VISIBLE_DEVICES has them, beginning with another one in each process."""
    first = int(process.removeprefix("gw")) % count
    return ",".join(map(str, (*range(first, count), *range(first))))


# Processes of pytest-xdist share the devices out, for most tests use the first one. That
# has to be said before anything asks CUDA, and not by the process that starts them.
devices = len([*Path("/proc/driver/nvidia/gpus").glob("*")])
if devices > 1 and (process := os.environ.get("PYTEST_XDIST_WORKER")):
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", devices_in_turn(process, devices))

# Folders and files of the tests that take the longest on a GPU.
_LONG = {
    *("pages", "tools"),
    *("test_checking.py", "test_reruns.py", "test_sanitizer.py", "test_smoke.py", "test_tuning.py"),
}
_SAMPLED = 4  # of slow runs without a new value of a parameter, one in so many is kept
_MOST_KEPT = 1 << 28  # bytes of device memory that a test may leave in CuPy's pool


_RUNGS = {kernel.name: kernel for kernel in cupyfa.kernels()}


def family(value):
    """What a value of a parameter is known by: records and launches by their names.

    Tensor-core kernels of one operation, unit and dtype are known by these.
    """
    kernel = _RUNGS.get(value, value) if isinstance(value, str) else value
    if isinstance(kernel, Kernel) and (unit := kernel.name.split("_")[0]) in ("mma", "wgmma"):
        return kernel.operation, unit, usual_dtype(kernel)
    return getattr(kernel, "name", None) or getattr(kernel, "entry", None) or repr(kernel)


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also run what sampled(n) skips")


def pytest_configure(config):
    """Idle processes of pytest-xdist take tests from others, unless --dist names another way."""
    if config.getoption("dist", "no") == "load":
        config.option.dist = "worksteal"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks runs as slow, leaves out what cannot run or is not sampled, and sorts the rest.

    gpu: left out without a device, unless ``-m`` names the mark; then they skip with the reason.

    each_choice: a run is slow if all its parameter values occur in earlier runs. The mark may name
    the parameters to compare. Tensor-core kernels of one family are one value.
    few(n): all runs of a test except the first n are slow.
    sampled(n): a slow run is kept if it has a new parameter value; about one in n others is kept,
    without the mark one in _SAMPLED. The mark may name the parameters, too, and families count
    as above.
    """
    seen, runs = set(), Counter()
    for item in items:
        if item.get_closest_marker("gpu") or item.get_closest_marker("slow"):
            continue
        mark = item.get_closest_marker("each_choice")
        if mark and not brings_new(item, seen, mark.args):
            item.add_marker("slow")
        if mark := item.get_closest_marker("few"):
            runs[item.function] += 1
            if runs[item.function] > mark.args[0]:
                item.add_marker("slow")

    left_out = set() if config.getoption("all") else sampled_out(items)
    if "gpu" not in config.getoption("markexpr") and has_no_device():
        left_out |= {x for x in items if x.get_closest_marker("gpu") or "cuda" in x.fixturenames}
    config.hook.pytest_deselected(items=[*left_out])
    items[:] = [item for item in items if item not in left_out]
    result = yield  # pytest deselects what -m excludes, and groups tests by their fixtures
    of_gpu = [item for item in items if item.get_closest_marker("gpu")]
    others = [item for item in items if not item.get_closest_marker("gpu")]
    # The longest tests come first: pytest-xdist does not move the last tests of a process.
    others.sort(key=lambda item: item.path.name != "test_every_rung.py")
    items[:] = [*others, *spread(of_gpu)]
    return result


def brings_new(item, seen, names):
    """Whether a run has a parameter value that is not in ``seen``; adds its values to ``seen``."""
    values = item.callspec.params
    choices = {(item.function, x, family(values[x])) for x in names or values}
    is_new = not choices <= seen
    seen |= choices
    return is_new


def has_no_device():
    """Whether CuPy is missing or sees no device."""
    try:
        from cupyfa.runtime.cuda import device
    except ImportError:
        return True
    return device.unavailable() is not None


def sampled_out(items):
    """The slow runs that are left out unless all are asked for."""
    tests = [x for x in items if hasattr(x, "callspec") and not x.get_closest_marker("gpu")]
    is_slow = {item: bool(item.get_closest_marker("slow")) for item in tests}
    sampled = {item.function for item in tests if is_slow[item]}
    seen, left_out = set(), set()
    for item in sorted((x for x in tests if x.function in sampled), key=is_slow.get):
        mark = item.get_closest_marker("sampled")
        n, *names = mark.args if mark else (_SAMPLED,)
        is_needed = brings_new(item, seen, names) or not is_slow[item]
        # Every n-th run would always skip the same values where n divides a number of parameters.
        if not is_needed and random.Random(item.nodeid).randrange(n):
            left_out.add(item)
    return left_out


def pytest_collection_finish():
    """Excludes the collected tests from garbage collections, which they would slow down."""
    gc.collect()
    gc.freeze()


def spread(items):
    """An order of the tests in which each process of pytest-xdist gets a similar mixture.

    It gives each process a contiguous part. Tests that take the longest come first.
    """
    items = sorted(items, key=lambda item: _LONG.isdisjoint(item.path.parts))
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return [item for first in range(processes) for item in items[first::processes]]


@pytest.fixture(scope="session", autouse=True)
def nothing_tuned():
    """Plans in tests ignore what was tuned on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuned, "on", lambda device: ())
        yield


@pytest.fixture(scope="session", autouse=True)
def two_heads_are_many():
    """The last block of a key head finishes dQ in small problems too, unless they have one head."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backward, "FEWEST_FINISHING", 2)
        yield


@pytest.fixture(scope="session")
def cuda():
    """The CUDA backend; skips with the reason where there is no device."""
    try:
        return backend_named("cuda")
    except DeviceError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def two_gpus(cuda):
    """The CUDA backend; skips where fewer than two devices of a model are visible."""
    if cuda.devices < 2:
        seen = ", ".join(cuda.models)
        pytest.skip(f"needs two GPUs of one model, and these are visible: {seen}")
    return cuda


@pytest.fixture
def hopper(cuda):
    """The same of a device of sm_90, whose tensor cores helpers.parts emulates."""
    if cuda.limits.arch != "90":
        pytest.skip(f"{cuda.limits.device} is not of sm_90")
    return cuda


def free_device_memory():
    """Returns CuPy's unused memory to the device for other processes."""
    import cupy

    gc.collect()
    cupyfa.transfer.release()
    cupy.get_default_memory_pool().free_all_blocks()


@pytest.fixture(autouse=True)
def little_device_memory_is_kept(request):
    """Limits the memory that CuPy's pool keeps after a test on the GPU."""
    yield
    if request.node.get_closest_marker("gpu"):
        import cupy

        if cupy.get_default_memory_pool().total_bytes() > _MOST_KEPT:
            free_device_memory()


@pytest.fixture
def every_check(monkeypatch):
    """Compiles kernels with all checks of the simulator, as for users."""
    monkeypatch.setenv("CUPYFA_COMPILER_FLAGS", "-O0")


@pytest.fixture
def much_memory(tmp_path_factory):
    """Tests of many gigabytes run one at a time, of all processes, and free their memory."""
    with open(tmp_path_factory.getbasetemp().parent / "much_memory", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        free_device_memory()


@pytest.fixture(scope="session", params=["simulator", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request):
    """Each backend in turn."""
    if request.param == "cuda":
        return request.getfixturevalue("cuda")
    return backend_named(request.param)


@pytest.fixture
def run_code(backend):
    """Runs a piece of device code as a kernel of one block, on each backend."""
    return launch if backend.name == "simulator" else launch_on_device


@pytest.fixture
def no_device(monkeypatch):
    """A machine without a CUDA device, whatever this one has."""
    from cupyfa.runtime import choose_backend
    from cupyfa.runtime.cuda import device as cuda

    monkeypatch.setattr(cuda, "unavailable", lambda: "no CUDA device is visible")
    for choice in (choose_backend._cuda, choose_backend._automatic):
        choice.cache_clear()
    yield
    for choice in (choose_backend._cuda, choose_backend._automatic):
        choice.cache_clear()
