"""Fixtures and the selection of tests. Tests of kernels run on each available backend."""

import fcntl
import gc
import os
import random
import signal
import subprocess
import sys
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
# array bounds take 18 to 47 % of a compilation, so only tests with ``every_check`` enable them.
os.environ.setdefault("CUPYFA_COMPILER_FLAGS", "-O0 -fno-sanitize=alignment,bounds")
# A shell makes background jobs ignore Ctrl-C, and their child processes inherit this setting.
signal.signal(signal.SIGINT, signal.default_int_handler)
# pytest-xdist starts a process per core, so one BLAS thread per process is enough.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# The processes share a GPU, of which JAX would take three quarters for itself.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def devices_in_turn(process, count):
    """Lists all devices for CUDA_VISIBLE_DEVICES; each process starts at a different device."""
    first = int(process.removeprefix("gw")) % count
    return ",".join(map(str, (*range(first, count), *range(first))))


# Most tests use the first visible device, so processes of pytest-xdist order the devices
# differently. Each process has to set the variable itself, before CUDA is initialized.
devices = len([*Path("/dev").glob("nvidia[0-9]*")])
if devices > 1 and (process := os.environ.get("PYTEST_XDIST_WORKER")):
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", devices_in_turn(process, devices))

# Folders and files of the tests that take the most time on a GPU.
_LONG = {
    *("pages", "tools"),
    *("test_checking.py", "test_reruns.py", "test_sanitizer.py", "test_smoke.py", "test_tuning.py"),
}
_SAMPLED = 4  # of the slow runs without a new parameter value, one in this many is kept
_MOST_KEPT = 1 << 28  # bytes of device memory that a test may leave in CuPy's pool


_RUNGS = {kernel.name: kernel for kernel in cupyfa.kernels()}


def family(value):
    """Returns a key for a parameter value: the name of a record or launch, or the value's repr.

    Tensor-core kernels with the same operation, unit and dtype share a key.
    """
    kernel = _RUNGS.get(value, value) if isinstance(value, str) else value
    if isinstance(kernel, Kernel) and (unit := kernel.name.split("_")[0]) in ("mma", "wgmma"):
        return kernel.operation, unit, usual_dtype(kernel)
    return getattr(kernel, "name", None) or getattr(kernel, "entry", None) or repr(kernel)


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also run what sampled(n) skips")


def pytest_configure(config):
    """Replaces --dist load with worksteal, which moves tests to idle processes of pytest-xdist."""
    if config.getoption("dist", "no") == "load":
        config.option.dist = "worksteal"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks tests as slow, deselects tests that cannot run or are not sampled, and sorts the tests.

    gpu: deselected without a device. If ``-m`` names the mark, such tests skip with the reason.

    each_choice: a run is slow if all its parameter values occur in earlier runs. The mark may name
    the parameters to compare. Tensor-core kernels of one ``family`` count as one value.
    few(n): all runs of a test except the first n are slow.
    sampled(n): a slow run is kept if it has a new parameter value. Of the other slow runs about one
    in n is kept, or one in _SAMPLED without the mark. Values are compared as for each_choice.
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
    result = yield  # pytest deselects tests by -m, and groups tests by fixtures
    of_gpu = [item for item in items if item.get_closest_marker("gpu")]
    others = [item for item in items if not item.get_closest_marker("gpu")]
    # The longest tests run first, since pytest-xdist does not move the last tests of a process.
    others.sort(key=lambda item: item.path.name != "test_every_rung.py")
    items[:] = [*others, *spread(of_gpu)]
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Runs a test marked ``alone`` in its own process if pytest-xdist runs others before it.

    Earlier tests may leave threads running, for example those of JAX. A call of CUDA from such a
    thread invalidates a capture in global mode and puts JAX's stream into an error state.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ or not pyfuncitem.get_closest_marker("alone"):
        return None
    config, command = pyfuncitem.config, [sys.executable, "-m", "pytest", pyfuncitem.nodeid]
    command += [y for x in config.option.plugins if x.startswith("no:") for y in ("-p", x)]
    of_xdist = ("PYTEST_XDIST", "PYTEST_CURRENT_TEST")
    environment = {x: y for x, y in os.environ.items() if not x.startswith(of_xdist)}
    how = {"capture_output": True, "text": True, "timeout": 300, "check": False}
    done = subprocess.run(command, cwd=config.rootpath, env=environment, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    if " passed" not in done.stdout:
        pytest.skip(f"skipped in its own process:\n{done.stdout}")
    return True


def brings_new(item, seen, names):
    """Returns whether a run has a parameter value that is not in ``seen``; adds its values."""
    values = item.callspec.params
    choices = {(item.function, x, family(values[x])) for x in names or values}
    is_new = not choices <= seen
    seen |= choices
    return is_new


def has_no_device():
    """Returns whether CuPy is missing or finds no device."""
    try:
        from cupyfa.runtime.cuda import device
    except ImportError:
        return True
    return device.unavailable() is not None


def sampled_out(items):
    """Returns the slow runs to deselect unless --all is given."""
    tests = [x for x in items if hasattr(x, "callspec") and not x.get_closest_marker("gpu")]
    is_slow = {item: bool(item.get_closest_marker("slow")) for item in tests}
    sampled = {item.function for item in tests if is_slow[item]}
    seen, left_out = set(), set()
    for item in sorted((x for x in tests if x.function in sampled), key=is_slow.get):
        mark = item.get_closest_marker("sampled")
        n, *names = mark.args if mark else (_SAMPLED,)
        is_needed = brings_new(item, seen, names) or not is_slow[item]
        # Every n-th run would always skip the same values if n divides the number of values.
        if not is_needed and random.Random(item.nodeid).randrange(n):
            left_out.add(item)
    return left_out


def pytest_collection_finish():
    """Excludes the collected tests from garbage collections, which they would slow down."""
    gc.collect()
    gc.freeze()


def spread(items):
    """Orders tests so that each process of pytest-xdist runs a similar mix, longest tests first.

    Each process gets a contiguous part of the list.
    """
    items = sorted(items, key=lambda item: _LONG.isdisjoint(item.path.parts))
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return [item for first in range(processes) for item in items[first::processes]]


@pytest.fixture(scope="session", autouse=True)
def plans_of_tests():
    """Makes plans ignore tile sizes that were tuned on this machine, and lets the last block of a
    key head finish dQ even if there are only four heads.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuned, "on", lambda device: ())
        patch.setattr(backward, "FEWEST_FINISHING", 4)
        yield


@pytest.fixture(scope="session")
def cuda():
    """Returns the CUDA backend; skips with the reason if there is no device."""
    try:
        return backend_named("cuda")
    except DeviceError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def two_gpus(cuda):
    """Returns the CUDA backend; skips if fewer than two GPUs of the same model are visible."""
    if cuda.devices < 2:
        seen = ", ".join(cuda.models)
        pytest.skip(f"needs two GPUs of one model, and these are visible: {seen}")
    return cuda


@pytest.fixture
def hopper(cuda):
    """Returns the CUDA backend of an sm_90 device, whose tensor cores helpers.parts emulates."""
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
    """Compiles kernels with all checks of the simulator, as users do."""
    monkeypatch.setenv("CUPYFA_COMPILER_FLAGS", "-O0")


@pytest.fixture
def much_memory(tmp_path_factory):
    """Runs memory-hungry tests one at a time across all processes, and frees their memory."""
    with open(tmp_path_factory.getbasetemp().parent / "much_memory", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        free_device_memory()


@pytest.fixture(scope="session", params=["simulator", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request):
    """Runs a test on each backend; the argument is the backend."""
    if request.param == "cuda":
        return request.getfixturevalue("cuda")
    return backend_named(request.param)


@pytest.fixture
def run_code(backend):
    """Returns a function that runs device code as a kernel of one block on the backend."""
    return launch if backend.name == "simulator" else launch_on_device


@pytest.fixture
def no_device(monkeypatch):
    """Makes this machine appear to have no CUDA device."""
    from cupyfa.runtime import choose_backend
    from cupyfa.runtime.cuda import device as cuda

    monkeypatch.setattr(cuda, "unavailable", lambda: "no CUDA device is visible")
    for choice in (choose_backend._cuda, choose_backend._automatic):
        choice.cache_clear()
    yield
    for choice in (choose_backend._cuda, choose_backend._automatic):
        choice.cache_clear()
