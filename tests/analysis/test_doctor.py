"""The doctor: each thing is looked at by itself, faults are recognised, and have a remedy."""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.cli import MAIN

import cupyfa
from cupyfa import store
from cupyfa.analysis import doctor as diagnosis
from cupyfa.analysis.doctor import FAULT, MISSING, OK, Finding, Probe, runs_on
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
ERROR = "CUDARuntimeError: cudaError"


def look(thing, *answer):
    """What one probe makes of an answer, or of things as they are here."""
    return next(probe for probe in diagnosis.PROBES if probe.thing == thing).look(*answer)


def by_thing(findings):
    return {finding.thing: finding for finding in findings}


@pytest.fixture
def no_gpu(monkeypatch, tmp_path):
    """A machine without a GPU, whatever this one has."""
    monkeypatch.setattr(environment, "PROC", tmp_path / "no driver")
    monkeypatch.setattr(diagnosis, "_has_gpu", lambda: False)
    monkeypatch.setattr(diagnosis, "_libcudas", lambda: [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)


def cli(*args, env=None, code=0):
    """``doctor`` in a process of its own."""
    package = str(Path(cupyfa.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "cupyfa", "doctor", *args],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": package, **(env or {})},
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done


def test_everything_is_looked_at_and_what_is_not_well_has_a_remedy():
    seen = []
    findings = cupyfa.doctor(progress=lambda done, total, what: seen.append(what))
    assert seen == THINGS
    # A machine may have several GPUs.
    things = dict.fromkeys("GPU" if x.thing.startswith("GPU") else x.thing for x in findings)
    assert list(things) == THINGS
    for finding in findings:
        assert finding.state in (OK, MISSING, FAULT)
        assert "\n" not in finding.found + finding.remedy
        assert finding.state == OK or finding.remedy, finding
        assert finding.state != OK or not finding.hinders
    found = by_thing(findings)
    assert {found[x].state for x in ("Python", "NumPy", "ml_dtypes", "kernels")} == {OK}
    assert "simulator" in runs_on(findings), found["simulator"]


def test_json_holds_the_same_for_programs():
    rows = json.loads(cli("--json").stdout)
    assert list(rows[0]) == ["thing", "state", "found", "remedy", "hinders"]
    assert [row["thing"] for row in rows if not row["thing"].startswith("GPU")] == [
        thing for thing in THINGS if thing != "GPU"
    ]


def test_for_people_every_remedy_stands_whole_on_a_line_of_its_own():
    done = cli(env={"COLUMNS": "40"})
    for row in json.loads(cli("--json").stdout):
        assert row["thing"] in done.stdout
        assert not row["remedy"] or row["remedy"] in map(str.strip, done.stdout.splitlines())
    assert "note: cupyfa can run on: " in done.stderr


# A look that fails


def probes(monkeypatch, *made):
    monkeypatch.setattr(diagnosis, "PROBES", made)


@pytest.fixture
def asking(monkeypatch, tmp_path):
    """Makes the question of a function's body, asked in another process."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def question(name, body):
        (tmp_path / f"{name}.py").write_text(f"import os, time\ndef f():\n    {body}\n")
        return f"{name}:f"

    return question


def told(answer, error):
    """A look that says what it was given."""
    return Finding("x", FAULT if error else OK, error or str(answer), "mend")


def test_a_look_that_raises_is_a_fault_and_the_others_go_on(monkeypatch):
    def broken():
        raise KeyError("nonsense")

    well = Finding("y", OK, "well")
    probes(monkeypatch, Probe("x", broken, ("cuda",)), Probe("y", lambda: well))
    assert cupyfa.doctor() == [Finding("x", FAULT, "KeyError: 'nonsense'", "", ("cuda",)), well]


def test_what_hangs_is_ended_and_the_others_go_on(monkeypatch, asking):
    hangs = asking("hangs", "time.sleep(600)")
    answers = asking("answers", "return [1, 2]")
    probes(
        monkeypatch,
        Probe("x", told, ("simulator",), hangs, seconds=0.5),
        Probe("y", told, (), answers),
    )
    start = time.perf_counter()
    x, y = cupyfa.doctor()
    assert time.perf_counter() - start < 20
    assert "no answer within" in x.found
    assert (x.state, x.hinders) == (FAULT, ("simulator",)) and y.found == "[1, 2]"


def test_what_crashes_raises_or_exits_is_told(monkeypatch, asking):
    probes(
        monkeypatch,
        Probe("crash", told, (), asking("crash", "os.abort()")),
        Probe("raise", told, (), asking("raises", "raise OSError('no such luck')")),
        Probe("exit", told, (), asking("exits", "os._exit(7)")),
        Probe("talk", told, (), asking("talks", "os.write(1, b'noise'); return 5")),
        Probe("lost", told, (), "no_such_module:f"),
    )
    crash, raised, left, talk, lost = [finding.found for finding in cupyfa.doctor()]
    assert crash == "the process was ended by SIGABRT"
    assert raised == "OSError: no such luck"
    assert "without a word" in left and talk == "5" and "no_such_module" in lost


# What hinders what


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
    made = [Finding("x", FAULT, "?", "mend") for _ in hinders] + [Finding("y", MISSING, "", "get")]
    findings = [Probe("x", lambda x=x: x, y) for x, y in zip(made, [*hinders, ()])]
    probes(monkeypatch, *findings)
    done = CliRunner().invoke(MAIN, ["doctor"], prog_name="cupyfa")
    assert done.exit_code == (0 if places else 3)
    assert f"can run on: {', '.join(places) or 'nothing'}" in done.stderr


def test_without_a_gpu_and_without_a_compiler_nothing_runs():
    env = {"CUPYFA_COMPILER": "no-such-compiler", "CUDA_VISIBLE_DEVICES": ""}
    found = {row["thing"]: row for row in json.loads(cli("--json", env=env, code=3).stdout)}
    assert found["simulator"]["state"] == FAULT
    assert found["simulator"]["remedy"] == "unset CUPYFA_COMPILER"


# Things as they may be


def test_an_empty_path_leaves_tools_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDA_PATH", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(diagnosis, "_CUDA_HOME", tmp_path / "cuda")
    for tool in diagnosis._TOOLS:
        finding = look(tool)
        assert finding.state == MISSING and finding.remedy.split()[0] in ("conda", "sudo")


def test_a_tool_beside_the_path_is_found(monkeypatch, tmp_path):
    tool = tmp_path / "bin" / "ncu"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    finding = look("ncu")
    assert finding.state == MISSING and finding.remedy == f"export PATH={tool.parent}:$PATH"
    monkeypatch.setenv("PATH", str(tool.parent))
    assert look("ncu") == Finding("ncu", OK, str(tool))


def test_profiling_that_is_for_root_alone_is_told(monkeypatch, tmp_path):
    (tmp_path / "params").write_text("RmProfilingAdminOnly: 1\n")
    (tmp_path / "ncu").write_text("#!/bin/sh\n")
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setattr(environment, "PROC", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert look("ncu").state == MISSING and "sudo" in look("ncu").remedy
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert look("ncu").state == OK


@pytest.mark.parametrize("thing, name", [("cache", "CUPYFA"), ("CuPy's cache", "CUPY")])
def test_a_cache_that_cannot_be_written_is_a_fault(monkeypatch, tmp_path, thing, name):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(f"{name}_CACHE_DIR", str(tmp_path / "file"))
    finding = look(thing)
    assert finding.state == FAULT and finding.remedy.startswith(f"export {name}_CACHE_DIR=")
    monkeypatch.setenv(f"{name}_CACHE_DIR", str(tmp_path / "folder"))
    assert look(thing).state == OK
    monkeypatch.setattr(diagnosis, "_LITTLE_SPACE", 2**80)
    assert look(thing).state == FAULT and look(thing).remedy.startswith("cupyfa cache clear")


def test_a_read_only_cache_is_a_fault(monkeypatch, tmp_path):
    def read_only(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setenv("CUPYFA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    assert look("cache").state == FAULT


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    monkeypatch.setattr(store, "chosen_folder", lambda: None)
    assert look("cache").state == FAULT


def test_lost_kernels_are_a_fault(monkeypatch, tmp_path):
    monkeypatch.setattr(diagnosis.sources, "KERNELS", tmp_path)
    assert look("kernels").state == FAULT and str(tmp_path) in look("kernels").found


def test_dtypes_that_do_not_go_with_numpy_are_a_fault(monkeypatch):
    class Broken:
        bfloat16 = "V2"

    monkeypatch.setattr(diagnosis, "ml_dtypes", Broken)
    monkeypatch.setattr(diagnosis, "PROBES", [Probe("ml_dtypes", diagnosis._ml_dtypes, ("cuda",))])
    (finding,) = cupyfa.doctor()
    assert finding.state == FAULT and finding.hinders


# CuPy


@pytest.fixture
def wheels(monkeypatch):
    """Says which wheels have CuPy in them."""

    def say(*names):
        monkeypatch.setattr(diagnosis, "packages_distributions", lambda: {"cupy": list(names)})

    return say


@pytest.fixture
def cupy_raises(monkeypatch):
    """Makes CuPy's import fail."""

    def say(error):
        def fail(name):
            raise error

        monkeypatch.setattr(diagnosis.importlib, "import_module", fail)

    return say


def test_a_broken_cupy_leaves_the_rest_to_be_looked_at(monkeypatch):
    for name in [x for x in sys.modules if x.split(".")[0] in ("cupy", "cupy_backends")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "cupyfa.runtime.cuda.device", raising=False)
    monkeypatch.setitem(sys.modules, "cupy", None)
    findings = by_thing(cupyfa.doctor())
    assert findings["CuPy"].state != OK and "cupy" in findings["CuPy"].found
    for thing in ("driver", "GPU", "NVRTC", "cuBLAS"):
        assert findings[thing].found == "not looked at without CuPy"
        assert findings[thing].remedy == findings["CuPy"].remedy
    assert runs_on(list(findings.values())) == ["simulator"]


def test_two_cupys_are_a_fault_with_what_removes_them(wheels):
    wheels("cupy-cuda13x", "cupy-cuda12x")
    finding = look("CuPy")
    assert finding.state == FAULT
    assert finding.remedy == (
        "pip uninstall -y cupy-cuda12x cupy-cuda13x && pip install cupy-cuda12x"
    )


def test_no_cupy_is_missing(wheels, cupy_raises):
    wheels()
    cupy_raises(ModuleNotFoundError("No module named 'cupy'"))
    assert look("CuPy").state == MISSING and look("CuPy").remedy == "pip install cupy-cuda12x"


def test_cupys_own_words_are_cut_to_what_they_say(wheels, cupy_raises):
    wheels("cupy-cuda13x")
    banner = (
        "\n====\nFailed to import CuPy.\n\nOriginal error:\n  ImportError: libfoo.so.1: gone\n==\n"
    )
    cupy_raises(ImportError(banner))
    finding = look("CuPy")
    assert finding.found == "ImportError: libfoo.so.1: gone"
    assert finding.remedy == "pip install --force-reinstall cupy-cuda13x"


def test_a_cupy_cache_that_cannot_be_written_is_told_though_another_is_used(tmp_path):
    (tmp_path / "file").write_text("")
    env = {"CUPY_CACHE_DIR": str(tmp_path / "file" / "cache")}
    found = {row["thing"]: row for row in json.loads(cli("--json", env=env).stdout)}
    assert found["CuPy"]["state"] == OK and found["CuPy's cache"]["state"] == FAULT
    assert found["CuPy's cache"]["remedy"].startswith("export CUPY_CACHE_DIR=")


# The driver and the GPU


def test_a_machine_without_a_gpu_is_no_fault(no_gpu):
    driver = look("driver", {"driver": 0, "runtime": 12090}, None)
    gpu = look("GPU", None, f"{ERROR}InsufficientDriver: CUDA driver version is insufficient")[0]
    assert driver.state == gpu.state == MISSING and "simulator" in driver.remedy


def test_a_gpu_without_a_driver_is_a_fault(no_gpu, monkeypatch):
    monkeypatch.setattr(diagnosis, "_has_gpu", lambda: True)
    assert look("driver", {"driver": 0, "runtime": 12090}, None).state == FAULT


@pytest.mark.parametrize(
    "version",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  575.57.08  Sat\nGCC version: 13.3.0",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build",
    ],
)
@pytest.mark.parametrize("path, remedy", [("/stubs", "unset LD_LIBRARY_PATH"), ("", "ldconfig")])
def test_a_driver_whose_library_does_not_work(no_gpu, monkeypatch, tmp_path, path, remedy, version):
    (tmp_path / "version").write_text(version)
    monkeypatch.setattr(environment, "PROC", tmp_path)
    monkeypatch.setattr(diagnosis, "_libcudas", lambda: [Path("/stubs/libcuda.so.1")])
    monkeypatch.setattr(diagnosis, "_IN_DOCKER", tmp_path / "no")
    monkeypatch.setenv("LD_LIBRARY_PATH", path)
    finding = look("driver", {"driver": 0, "runtime": 12090}, None)
    assert finding.state == FAULT and "575.57.08" in finding.found and remedy in finding.remedy
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    monkeypatch.setattr(diagnosis, "_IN_DOCKER", tmp_path)
    assert "--gpus all" in look("driver", {"driver": 0, "runtime": 12090}, None).remedy


def test_a_driver_older_than_cupys_cuda(no_gpu):
    well = look("driver", {"driver": 12040, "runtime": 12090}, None)
    assert well.state == OK and "12.4" in well.found
    older = look("driver", {"driver": 12040, "runtime": 13000}, None)
    assert older.state == FAULT and "12.4" in older.found and "13.0" in older.found
    assert older.remedy == "pip uninstall -y cupy-cuda13x && pip install cupy-cuda12x"
    oldest = look("driver", {"driver": 11040, "runtime": 12090}, None)
    assert oldest.state == FAULT and "pip" not in oldest.remedy


def test_two_libcudas_are_told(no_gpu, monkeypatch):
    two = [Path("/compat/libcuda.so.580"), Path("/usr/lib/libcuda.so.575")]
    monkeypatch.setattr(diagnosis, "_libcudas", lambda: two)
    found = look("driver", {"driver": 12090, "runtime": 12090}, None).found
    assert "2 libcudas: /compat/libcuda.so.580, /usr/lib/libcuda.so.575" in found


def test_libcudas_are_looked_for_where_the_linker_does(monkeypatch, tmp_path):
    for name in ("a", "b", "linked"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "libcuda.so.1").write_text("one")
    (tmp_path / "b" / "libcuda.so.1").write_text("two")
    (tmp_path / "linked" / "libcuda.so.1").symlink_to(tmp_path / "a" / "libcuda.so.1")
    folders = [tmp_path / name for name in ("a", "linked", "b", "none")]
    monkeypatch.setenv("LD_LIBRARY_PATH", ":".join(map(str, folders)))
    assert diagnosis._libcudas()[:2] == [tmp_path / x / "libcuda.so.1" for x in "ab"]


@pytest.mark.parametrize(
    "error, remedy",
    [
        ("StubLibrary: CUDA driver is a stub library", "unset LD_LIBRARY_PATH"),
        ("CompatNotSupportedOnDevice: forward compatibility", "unset LD_LIBRARY_PATH"),
        ("SystemDriverMismatch: system has unsupported display driver", "sudo reboot"),
        ("SystemNotReady: system not yet initialized", "fabricmanager"),
        ("InitializationError: initialization error", "modprobe"),
        ("Unknown: unknown error", "modprobe"),
        ("DevicesUnavailable: busy", "nvidia-smi"),
        ("NoDevice: no CUDA-capable device is detected", "nvidia-smi"),
        ("SomethingNew: never seen", "nvidia-smi"),
    ],
)
def test_what_cuda_says_is_recognised(no_gpu, error, remedy):
    (finding,) = look("GPU", None, f"{ERROR}{error}")
    assert finding.state == FAULT and remedy in finding.remedy


def test_hidden_devices_are_recognised(no_gpu, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (finding,) = look("GPU", None, f"{ERROR}NoDevice: no CUDA-capable device is detected")
    assert finding.remedy == "unset CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    "change, state, word",
    [
        ({}, OK, "232,448 bytes"),
        ({"arch": "61"}, FAULT, "too old"),
        ({"arch": "120"}, OK, "sm_120"),
        ({"free": 2**20}, FAULT, "0.0 GiB of 81.0 GiB free"),
        ({"error": "CompileException: x(1): error: cannot open source file"}, FAULT, "cannot open"),
        ({"error": "OSError: [Errno 28] No space left on device"}, FAULT, "full"),
    ],
)
def test_each_gpu_has_a_line(change, state, word):
    first, second = look("GPU", [DEVICE, {**DEVICE, **change}], None)
    assert (first.thing, first.state, second.thing, second.state) == ("GPU 0", OK, "GPU 1", state)
    assert word in second.found and (state == OK or second.remedy)


@pytest.mark.parametrize(
    "error, remedy",
    [
        ('CompileException: t.cu(1): error: cannot open source file "cuda_fp16.h"', "cuda-runtime"),
        ("RuntimeError: CuPy failed to load libnvrtc.so.12: OSError: gone", "cuda-nvrtc"),
        ("NVRTCError: nvrtc: error: failed to open libnvrtc-builtins.so.12.9", "cuda-nvrtc"),
        ("x: nvrtc: error: invalid value for --gpu-architecture (-arch)", "cuda-nvrtc"),
    ],
)
def test_what_nvrtc_says_is_recognised(monkeypatch, error, remedy):
    for wheel, suffix in (("cupy-cuda12x", "-cu12"), ("cupy-cuda13x", "")):
        monkeypatch.setattr(diagnosis, "version_of", {wheel: "14"}.get)
        finding = look("NVRTC", None, error)
        assert finding.state == FAULT and finding.remedy.endswith(f"nvidia-{remedy}{suffix}")


def test_the_simulators_faults_are_recognised(monkeypatch):
    monkeypatch.delenv("CUPYFA_COMPILER", raising=False)
    assert look("simulator", "g++ 12", None).state == OK
    missing = look("simulator", None, "CompilerNotFound: found neither c++ nor g++")
    assert missing.state == MISSING and missing.remedy == "pip install ziglang"
    for error, remedy in (
        ("OSError: x.so: failed to map segment from shared object", "export CUPYFA_CACHE_DIR="),
        ("OSError: [Errno 28] No space left on device", "cupyfa cache clear"),
        ("CompileError: internal compiler error", "ziglang"),
    ):
        finding = look("simulator", None, error)
        assert finding.state == FAULT and remedy in finding.remedy


def test_optional_packages_hinder_nothing(monkeypatch):
    def lost(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("cupyfa.runtime.environment.version", lost)
    for thing in ("torch", "jax", "nvidia-cudnn-frontend"):
        assert look(thing).state == MISSING and look(thing).remedy.startswith("pip install")


@pytest.mark.gpu
def test_a_working_gpu_is_well(cuda):
    found = by_thing(cupyfa.doctor())
    assert {found[x].state for x in ("CuPy", "driver", "GPU 0", "NVRTC")} == {OK}, found
    assert "cuda" in runs_on(list(found.values()))
