"""The doctor: each probe, probes that hang or crash, and the command."""

import json
import sys
import tempfile
import time
from types import SimpleNamespace

import pytest
from helpers.cli import MODULE, cli as in_this_process, process

import cupyfa
from cupyfa import cache_folder
from cupyfa.lab.analysis import diagnosis
from cupyfa.lab.analysis.diagnosis import FAULT, MISSING, OK, Finding, Probe, runs_on
from cupyfa.runtime import environment

THINGS = [probe.thing for probe in diagnosis.PROBES]
DEVICE = {
    "name": "NVIDIA H100 80GB HBM3",
    "arch": "90",
    "shared_bytes": 232448,
    "free": 80 * 2**30,
    "total": 81 * 2**30,
    "error": None,
}
NO_DRIVER = "CUDARuntimeError: cudaErrorInsufficientDriver: CUDA driver version is insufficient"


def look(thing, *answer):
    """Runs one probe; `answer`, if passed, replaces this machine's answer to the probe."""
    return next(probe for probe in diagnosis.PROBES if probe.thing == thing).look(*answer)


def by_thing(findings):
    return {finding.thing: finding for finding in findings}


@pytest.fixture
def no_driver(monkeypatch, tmp_path):
    """Makes this machine appear to have no NVIDIA driver."""
    monkeypatch.setattr(environment, "PROC", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def cli(*args, env=None, code=0):
    """Runs ``cupyfa doctor`` in a new process."""
    done = process(["doctor", *args], begin=MODULE, env=env)
    assert done.returncode == code, done.stderr
    return done


@pytest.mark.slow
def test_every_probe_has_a_finding():
    seen = []
    findings = cupyfa.lab.doctor(progress=lambda done, total, what: seen.append(what))
    assert seen == THINGS
    # All GPUs of the machine count as one probe.
    things = dict.fromkeys("GPU" if x.thing.startswith("GPU") else x.thing for x in findings)
    assert list(things) == THINGS
    for finding in findings:
        assert finding.state in (OK, MISSING, FAULT)
        assert finding.found and "\n" not in finding.found
        assert finding.state != OK or not finding.hinders
    found = by_thing(findings)
    assert {found[x].state for x in ("Python", "numpy", "ml_dtypes")} == {OK}
    assert "simulator" in runs_on(findings), found["simulator"]


@pytest.mark.slow
def test_the_formats():
    rows = json.loads(cli("--format", "json").stdout)
    assert list(rows[0]) == ["thing", "state", "found", "hinders"]
    assert [row["thing"] for row in rows if not row["thing"].startswith("GPU")] == [
        thing for thing in THINGS if thing != "GPU"
    ]
    shown = cli(env={"COLUMNS": "80"})
    assert all(row["thing"] in shown.stdout for row in rows)
    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert "note: cupyfa can run on: " in shown.stderr


def probes(monkeypatch, *made):
    monkeypatch.setattr(diagnosis, "PROBES", made)


@pytest.fixture
def asking(monkeypatch, tmp_path):
    """Returns a function that writes a module with a function f and returns "module:f"."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def question(name, body):
        (tmp_path / f"{name}.py").write_text(f"import os, time\ndef f():\n    {body}\n")
        return f"{name}:f"

    return question


def echo(answer, error):
    return Finding("x", FAULT if error else OK, error or str(answer))


def test_a_probe_that_raises_is_a_fault_and_the_others_run(monkeypatch):
    def broken():
        raise KeyError("nonsense")

    good = Finding("y", OK, "good")
    probes(monkeypatch, Probe("x", broken, ("cuda",)), Probe("y", lambda: good))
    assert cupyfa.lab.doctor() == [Finding("x", FAULT, "KeyError: 'nonsense'", ("cuda",)), good]


def test_a_process_that_hangs_is_killed_and_the_others_run(monkeypatch, asking):
    hangs = asking("hangs", "time.sleep(600)")
    answers = asking("answers", "return [1, 2]")
    probes(
        monkeypatch,
        Probe("x", echo, ("simulator",), hangs, seconds=0.5),
        Probe("y", echo, (), answers),
    )
    start = time.perf_counter()
    x, y = cupyfa.lab.doctor()
    assert time.perf_counter() - start < 20
    assert "no answer within" in x.found
    assert (x.state, x.hinders) == (FAULT, ("simulator",)) and y.found == "[1, 2]"


def test_a_process_that_crashes_raises_or_exits_is_reported(monkeypatch, asking):
    probes(
        monkeypatch,
        Probe("crash", echo, (), asking("crash", "os.abort()")),
        Probe("raise", echo, (), asking("raises", "raise OSError('no such luck')")),
        Probe("exit", echo, (), asking("exits", "os._exit(7)")),
        Probe("talk", echo, (), asking("talks", "os.write(1, b'noise'); return 5")),
        Probe("lost", echo, (), "no_such_module:f"),
    )
    crash, raised, left, talk, lost = [finding.found for finding in cupyfa.lab.doctor()]
    assert crash == "the process was ended by SIGABRT"
    assert raised == "OSError: no such luck"
    assert "without a message" in left and talk == "5" and "no_such_module" in lost


@pytest.mark.parametrize(
    "hinders, places",
    [
        ([], ["cuda", "simulator"]),
        ([("cuda",)], ["simulator"]),
        ([("simulator",)], ["cuda"]),
        ([("cuda",), ("simulator",)], []),
        ([("cuda", "simulator")], []),
    ],
)
def test_the_exit_code_says_whether_anything_can_run(monkeypatch, hinders, places):
    made = [Finding("x", FAULT, "?") for _ in hinders] + [Finding("y", MISSING, "")]
    findings = [Probe("x", lambda x=x: x, y) for x, y in zip(made, [*hinders, ()])]
    probes(monkeypatch, *findings)
    done = in_this_process("doctor", code=0 if places else 3)
    assert f"can run on: {', '.join(places) or 'nothing'}" in done.stderr


@pytest.mark.parametrize("thing, name", [("cache", "CUPYFA"), ("CuPy's cache", "CUPY")])
def test_a_cache_that_cannot_be_written_is_a_fault(monkeypatch, tmp_path, thing, name):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(f"{name}_CACHE_DIR", str(tmp_path / "file"))
    finding = look(thing)
    assert finding.state == FAULT
    assert finding.found.endswith(f"; set {name}_CACHE_DIR to a writable folder of your own")
    monkeypatch.setenv(f"{name}_CACHE_DIR", str(tmp_path / "folder"))
    assert look(thing).state == OK and "GiB free" in look(thing).found


def test_a_cache_that_is_read_only_or_has_no_place_is_a_fault(monkeypatch, tmp_path):
    def read_only(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setenv("CUPYFA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    assert look("cache").state == FAULT
    monkeypatch.setattr(cache_folder, "chosen_folder", lambda: None)  # a user without a home folder
    assert look("cache").state == FAULT


def test_missing_packages_do_not_prevent_running(monkeypatch):
    monkeypatch.setattr(diagnosis, "version_of", lambda name: None)
    assert look("ml_dtypes") == Finding("ml_dtypes", MISSING, "not installed")


@pytest.fixture
def wheels(monkeypatch):
    """Returns a function that sets which wheels of CuPy appear to be installed."""

    def say(*names):
        monkeypatch.setattr(diagnosis, "packages_distributions", lambda: {"cupy": list(names)})

    return say


@pytest.mark.slow
def test_the_other_probes_run_if_cupy_is_broken(monkeypatch):
    for name in [x for x in sys.modules if x.split(".")[0] in ("cupy", "cupy_backends")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "cupyfa.runtime.cuda.device", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", None)
    findings = by_thing(cupyfa.lab.doctor())
    assert findings["CuPy"].state == FAULT and "cupy" in findings["CuPy"].found
    for thing in ("driver", "GPU", "NVRTC", "cuBLAS"):
        assert findings[thing].found == "not examined without CuPy"
    assert runs_on(list(findings.values())) == ["simulator"]


def test_no_cupy_is_missing_and_two_are_a_fault(wheels):
    wheels()
    assert look("CuPy") == Finding("CuPy", MISSING, "not installed")
    wheels("cupy-cuda13x", "cupy-cuda12x")
    assert look("CuPy").state == FAULT
    assert "keep one of cupy-cuda12x, cupy-cuda13x" in look("CuPy").found


def test_cupys_import_message_is_reduced_to_the_error(monkeypatch, wheels):
    def fail(name):
        raise ImportError(
            "\n====\nFailed to import CuPy.\n\nOriginal error:\n  ImportError: libfoo.so.1: gone\n"
        )

    wheels("cupy-cuda13x")
    monkeypatch.setattr(diagnosis.importlib, "import_module", fail)
    probes(monkeypatch, Probe("CuPy", diagnosis._cupy, ("cuda",)))
    (finding,) = cupyfa.lab.doctor()
    assert finding.state == FAULT and finding.found.endswith("ImportError: libfoo.so.1: gone")


@pytest.mark.slow
def test_a_cupy_cache_that_cannot_be_written_is_reported_though_another_is_used(tmp_path):
    (tmp_path / "file").write_text("")
    env = {"CUPY_CACHE_DIR": str(tmp_path / "file" / "cache")}
    found = {row["thing"]: row for row in json.loads(cli("--format", "json", env=env).stdout)}
    assert found["CuPy"]["state"] == OK and found["CuPy's cache"]["state"] == FAULT


def test_a_machine_without_a_gpu_is_no_fault(no_driver, monkeypatch):
    driver = look("driver", {"driver": 0, "runtime": 12090}, None)
    (gpu,) = look("GPU", None, NO_DRIVER)
    assert driver.state == gpu.state == MISSING
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert look("GPU", None, NO_DRIVER)[0].found.endswith("(CUDA_VISIBLE_DEVICES is '7')")


@pytest.mark.parametrize(
    "version",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  575.57.08  Sat\nGCC version: 13.3.0",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build",
    ],
)
def test_a_driver_whose_library_does_not_work(no_driver, tmp_path, version):
    (tmp_path / "version").write_text(version)
    finding = look("driver", {"driver": 0, "runtime": 12090}, None)
    assert finding.state == FAULT and "575.57.08" in finding.found
    assert look("GPU", None, NO_DRIVER)[0].state == FAULT


def test_a_driver_older_than_cupys_cuda(no_driver):
    current = look("driver", {"driver": 12040, "runtime": 12090}, None)
    assert current.state == OK and "12.4" in current.found
    older = look("driver", {"driver": 12040, "runtime": 13000}, None)
    assert older.state == FAULT and "12.4" in older.found and "13.0" in older.found


@pytest.mark.parametrize(
    "change, state, word",
    [
        ({}, OK, "232,448 bytes of shared memory a block; compiles and runs a kernel"),
        ({"arch": "61"}, FAULT, "needs sm_75 or newer"),
        ({"arch": "120"}, OK, "sm_120"),
        ({"error": "CompileException: x(1): error: cannot open source file"}, FAULT, "cannot open"),
    ],
)
def test_each_gpu_has_a_line(change, state, word):
    first, second = look("GPU", [DEVICE, {**DEVICE, **change}], None)
    assert (first.thing, first.state, second.thing, second.state) == ("GPU 0", OK, "GPU 1", state)
    assert word in second.found


def test_libraries_that_fail():
    error = "RuntimeError: CuPy failed to load libnvrtc.so.12: OSError: gone"
    assert look("NVRTC", None, error) == Finding("NVRTC", FAULT, error)
    assert look("cuBLAS", None, "OSError: gone").state == MISSING
    assert look("simulator", "g++ 12", None).state == OK
    missing = look("simulator", None, "CompilerNotFound: found neither c++ nor g++")
    assert missing.state == MISSING
    assert look("simulator", None, "CompileError: internal compiler error").state == FAULT


@pytest.mark.gpu
def test_a_working_gpu_is_ok(cuda):
    found = by_thing(cupyfa.lab.doctor())
    assert {found[x].state for x in ("CuPy", "driver", "GPU 0", "NVRTC")} == {OK}, found
    assert "cuda" in runs_on(list(found.values()))


def test_every_command_calls_a_missing_driver_what_doctor_calls_it(monkeypatch):
    device = pytest.importorskip("cupyfa.runtime.cuda.device")

    def count():
        raise ValueError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")

    without = SimpleNamespace(
        getDeviceCount=count, CUDARuntimeError=ValueError, driverGetVersion=lambda: 0
    )
    monkeypatch.setattr(device, "runtime", without)
    monkeypatch.setattr(environment, "kernel_driver", lambda: None)
    assert device.unavailable() == "no CUDA device (no NVIDIA driver)"
    without.driverGetVersion = lambda: 12090
    assert "driver version is insufficient" in device.unavailable()
