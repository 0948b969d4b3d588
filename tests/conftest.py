"""Fixtures: every test of a kernel runs on every backend; those of the GPU skip without one."""

import os
import signal

import pytest

from cupyfa import DeviceError
from cupyfa.planner import tuned
from cupyfa.runtime.select import backend_named

# Tests compile much, and run little of it.
os.environ.setdefault("CUPYFA_COMPILER_FLAGS", "-O0")
# A shell has its background jobs ignore Ctrl-C, and those hand that on to the programs they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def called(value):
    """What a value of a parameter is known by: records and launches by their names."""
    return getattr(value, "name", None) or getattr(value, "entry", None) or repr(value)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of a test marked ``each_choice``, runs that bring no new value of a parameter are slow.

    The mark may name the parameters that count.
    """
    seen = set()
    for item in items:
        mark = item.get_closest_marker("each_choice")
        if mark and not item.get_closest_marker("gpu"):
            values = item.callspec.params
            choices = {(item.function, x, called(values[x])) for x in mark.args or values}
            if choices <= seen:
                item.add_marker("slow")
            seen |= choices


@pytest.fixture(scope="session", autouse=True)
def nothing_tuned():
    """Plans in tests do not go by what was tuned on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuned, "on", lambda device: ())
        yield


@pytest.fixture(scope="session")
def cuda():
    """The CUDA backend; skips with the reason where there is no device."""
    try:
        return backend_named("cuda")
    except DeviceError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session", params=["simulator", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request):
    """Each backend in turn."""
    if request.param == "cuda":
        return request.getfixturevalue("cuda")
    return backend_named(request.param)


def pytest_terminal_summary(terminalreporter):
    """A table of what NVRTC told of each kernel, of the architecture that spills the most."""
    worst = {}
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "resources":
                entry, dtype, spilled, registers = value
                row = worst.setdefault(entry, {})
                row[dtype] = max(row.get(dtype, (0, 0)), (spilled, registers))
    if not worst:
        return
    dtypes = sorted({dtype for row in worst.values() for dtype in row})
    terminalreporter.section("registers of a thread, + bytes that it spills")
    terminalreporter.write_line("".join(f"{cell:>15}" for cell in ("", *dtypes)))
    for entry in sorted(worst):
        row = {dtype: f"{r} + {s}" if s else f"{r}" for dtype, (s, r) in worst[entry].items()}
        cells = "".join(f"{row.get(dtype, ''):>15}" for dtype in dtypes)
        terminalreporter.write_line(f"{entry:15}{cells}")


@pytest.fixture
def no_device(monkeypatch):
    """A machine without a CUDA device, whatever this one has."""
    from cupyfa.runtime import select
    from cupyfa.runtime.cuda import device as cuda

    monkeypatch.setattr(cuda, "unavailable", lambda: "no CUDA device is visible")
    for choice in (select._cuda, select._automatic):
        choice.cache_clear()
    yield
    for choice in (select._cuda, select._automatic):
        choice.cache_clear()
