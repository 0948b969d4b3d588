"""Commands in hostile environments: closed streams, odd terminals, no home, full disks, damaged
caches, compilers that fail or hang, signals. Each exits with the right code and leaves no files.
"""

import gc
import hashlib
import itertools
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from helpers import device_code, own_kernel
from helpers.cli import (
    CLI,
    MAIN,
    PACKAGE,
    SIMULATOR,
    SMALL,
    cli,
    files,
    line_of,
    process,
    says,
    still_works,
    table,
)
from helpers.private_cache import with_runtime
from helpers.processes import left_running

import cupyfa
from cupyfa import Problem, cache_folder
from cupyfa.errors import CompileError, DeviceLost
from cupyfa.lab.bench import benchmark
from cupyfa.lab.bench.results import Results
from cupyfa.lab.commands import signals
from cupyfa.lab.verify import grids
from cupyfa.lab.verify.case import Case
from cupyfa.planner import source as sources
from cupyfa.problem.problem import MOST
from cupyfa.runtime.choose_backend import backend_named
from cupyfa.runtime.simulator import machine

pytestmark = pytest.mark.slow  # every test starts processes or compiles
RUN = ("run", "fa2", *SIMULATOR, *SMALL)


def forget_kernels(patch):
    """Resets the simulator to the state of a process that has not loaded any kernel."""
    patch.setattr(machine, "_memo", {})
    patch.setattr(machine, "_key_locks", {})
    backend_named("simulator").refresh()


@pytest.fixture
def fresh(monkeypatch):
    forget_kernels(monkeypatch)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Makes a cache with the kernel of ``still_works`` and the runtime, for tests to copy."""
    folder = with_runtime(tmp_path_factory.mktemp("built"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUPYFA_CACHE_DIR", str(folder))
        forget_kernels(patch)
        still_works()
    return folder


@pytest.fixture(scope="module")
def warm(built, tmp_path_factory):
    return shutil.copytree(built, tmp_path_factory.mktemp("cache"), dirs_exist_ok=True)


@pytest.fixture
def own_folders(monkeypatch, tmp_path, warm):
    """Selects the warm cache and a private temporary directory."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("CUPYFA_CACHE_DIR", str(warm))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))


def passed(done):
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr
    assert done.stdout.splitlines()[-1].strip() == "PASS"


def redirected(redirections):
    """Returns the start of a command line that runs cupyfa with redirected streams."""
    return ["bash", "-c", f'exec "$@" {redirections}', "bash", *CLI]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "closed, args, code",
    [
        ("<&-", RUN, 0),
        (">&-", RUN, 0),
        ("2>&-", RUN, 0),
        (">&- 2>&- <&-", RUN, 0),
        ("2>&-", ("run", "nope"), 2),
        (">&- 2>&- <&-", ("run", "nope"), 2),
    ],
)
def test_closed_streams(warm, closed, args, code):
    done = process(args, begin=redirected(closed), env={"CUPYFA_CACHE_DIR": warm})
    assert (done.returncode, done.stderr) == (code, "")
    readable = code == 0 and not closed.startswith(">&-")
    assert done.stdout.endswith("PASS\n") if readable else not done.stdout


def test_a_closed_pipe_ends_the_command_without_a_message(warm):
    env = {**os.environ, "CUPYFA_CACHE_DIR": str(warm)}
    command = subprocess.Popen(
        [*CLI, *RUN], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    command.stdout.close()
    with command:
        assert command.stderr.read() == ""
    assert command.returncode == 128 + signal.SIGPIPE


def test_a_full_disk_as_stdout(warm):
    done = process(RUN, begin=redirected(">/dev/full"), env={"CUPYFA_CACHE_DIR": warm})
    assert done.returncode == 3
    assert line_of(done.stderr) == "the output: No space left on device"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "env",
    [
        {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        {"LC_ALL": "nowhere.UTF-8"},
        {"TERM": "dumb"},
        {"TERM": None, "COLUMNS": "x"},
        {"COLUMNS": "0", "LINES": "-1"},
    ],
    ids=str,
)
def test_odd_terminals(warm, env):
    passed(process(RUN, env={"CUPYFA_CACHE_DIR": warm, **env}))
    listed = process(["list", *SIMULATOR], env=env)
    assert (listed.returncode, "Traceback" in listed.stderr) == (0, False)
    assert "fa2_coalesced" in listed.stdout


@pytest.mark.each_choice
@pytest.mark.parametrize("columns", [1, 20, 40])
@pytest.mark.parametrize(
    "args",
    [RUN, ("list", *SIMULATOR), ("compile", "fa2", "--arch", "90", "--dtype", "float32")],
    ids=lambda args: args[0],
)
def test_a_narrow_terminal_shows_everything(own_folders, monkeypatch, columns, args):
    monkeypatch.setenv("COLUMNS", "200")
    wide = cli(*args, code=0).stdout.split()
    monkeypatch.setenv("COLUMNS", str(columns))
    narrow = cli(*args, code=0).stdout
    assert "…" not in narrow
    lost = {word for word in wide if word.isalpha()} - set(narrow.split())
    assert not lost


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "env",
    [
        {"HOME": None},
        {"HOME": "/proc"},
        {"HOME": "/etc/passwd"},
        {"HOME": "/no/where", "TMPDIR": "/no/where"},
        {"CUPYFA_CACHE_DIR": "/proc/x"},
        {"CUPYFA_CACHE_DIR": "/etc/passwd"},
        {"XDG_CACHE_HOME": "/proc"},
    ],
    ids=str,
)
def test_unwritable_folders(warm, env):
    """NVRTC is tested first, since CuPy needs its own cache directory."""
    compiled = process(["compile", "fa2", "--arch", "90", "--dtype", "float32"], env=env)
    assert (compiled.returncode, compiled.stderr) == (0, "")
    done = process(RUN, env={"CUPYFA_CACHE_DIR": warm, **env})
    passed(done)
    assert done.stderr.count("so nothing is stored; set") == ("CUPYFA_CACHE_DIR" in env)


def test_a_deleted_working_directory(warm, tmp_path):
    gone = tmp_path / "gone"
    for args, code in ((RUN, 0), (("run", "script.py:mine"), 2), (("compile", "nope"), 2)):
        gone.mkdir()
        done = process(
            args, env={"CUPYFA_CACHE_DIR": warm}, cwd=gone, preexec_fn=lambda: shutil.rmtree(gone)
        )
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr


def objects(folder):
    return sorted(folder.glob("fa2-*.so"))


def cut(path):
    path.write_bytes(path.read_bytes()[:1000])


def sealed_text(path):
    path.write_bytes(b"hello" + hashlib.sha256(b"hello").digest())


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "spoil",
    [
        cut,
        sealed_text,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(os.urandom(5000)),
        lambda path: path.unlink(),
        lambda path: shutil.rmtree(path.parent),
    ],
    ids=["cut", "sealed text", "empty", "random bytes", "gone", "all gone"],
)
def test_a_damaged_object_is_rebuilt(tmp_path, monkeypatch, built, fresh, spoil):
    folder = tmp_path / "cache"
    shutil.copytree(built, folder)
    monkeypatch.setenv("CUPYFA_CACHE_DIR", str(folder))
    (spoiled,) = objects(folder)
    spoil(spoiled)
    still_works()
    assert objects(folder) == [spoiled]
    assert cache_folder.unsealed(spoiled)
    assert not list(folder.glob("build-*"))


@pytest.mark.parametrize("kind", ["peaks", "tuning"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1]",
        b"5",
        b"\xff\xfe",
        b'{"x": null}',
        b'{"x": {"kernel": "fa2", "folder": null, "dtype": "float32", "d": 3, "dv": 3, '
        b'"constants": {"Br": -1, "Bc": "x"}, "tflops": NaN}}',
        b'{"x": {"kernel": ["fa2"], "folder": 3, "dtype": {}, "d": 3, "dv": 3, '
        b'"constants": {"Br": 1000000, "Bc": 7}, "tflops": 1}, "copy": [1], "float32": "fast"}',
    ],
    ids=["empty", "cut", "list", "number", "bytes", "null", "nonsense", "more nonsense"],
)
def test_damaged_json_files_are_ignored(tmp_path, monkeypatch, warm, kind, content):
    folder = tmp_path / "cache"
    shutil.copytree(warm, folder)
    monkeypatch.setenv("CUPYFA_CACHE_DIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = cache_folder.facts_file(kind, "the simulator")
    file.parent.mkdir()
    file.write_bytes(content)
    engine = cupyfa.Simulator()
    engine.refresh()
    try:
        cli(*RUN, code=0)
        one = ("-B", 1, "-H", 1, "-M", 5, "-N", 4, "-d", 3, "--budget", 0)
        cli("tune", "fa2", *SIMULATOR, *one, code=0)
        cli("bench", "fa2", "--alone", *SIMULATOR, *one, code=0)
    finally:
        monkeypatch.undo()
        engine.refresh()


def full(*_, **__):
    raise OSError(28, "No space left on device")


GOOD = ("bench", "fa2", "--alone", "--budget", "0", *SIMULATOR, *SMALL)


@pytest.fixture
def results(own_folders, tmp_path):
    """Saves results to a file; otherwise its folder contains only the temporary directory."""
    path = tmp_path / "results.json"
    cli(*GOOD, "--save", path, code=0)
    return path


@pytest.mark.parametrize(
    "args, name, call",
    [
        *(((*GOOD, "--save"), "results.json", call) for call in ("replace", "chmod", "fdopen")),
        (("ladder", "--from", "results.json", "--save"), "copy.json", "replace"),
        (("ladder", "--from", "results.json", "--plot"), "picture.svg", "replace"),
    ],
)
def test_a_full_disk_leaves_the_old_file_whole(results, monkeypatch, tmp_path, args, name, call):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    target = tmp_path / name
    target.write_text("old")
    monkeypatch.setattr(cache_folder.os, call, full)
    done = cli(*args, target, code=3)
    assert line_of(done.stderr) == f"{target}: No space left on device"
    says(done.stdout, "^the simulator: batch=1" if args[0] == "ladder" else "kernel +fa2")
    monkeypatch.undo()
    assert target.read_text() == "old"
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", name, "temporary"}


@pytest.mark.parametrize("args", [GOOD, ("ladder", "--from", "results.json")])
def test_results_are_saved_if_the_table_cannot_be_printed(results, warm, tmp_path, args):
    saves = (*args, "--save", "copy.json")
    env = {"CUPYFA_CACHE_DIR": warm}
    done = process(saves, begin=redirected(">/dev/full"), env=env, cwd=tmp_path)
    assert line_of(done.stderr) == "the output: No space left on device"
    assert (tmp_path / "copy.json").exists()


@pytest.mark.parametrize("call", ["mkdir", "replace"])
def test_a_check_continues_if_failures_cannot_be_written(own_folders, monkeypatch, tmp_path, call):
    record = own_kernel.write(tmp_path, cu=("score *= scale;", "score *= 2 * scale;"))
    cases = [Case("forward", Problem.of_sizes(M=M, d=8)) for M in (5, 9)]
    monkeypatch.setattr(grids, "cases", lambda *_, **__: cases)
    folder = tmp_path / "failures"
    how = ("--grid", "smoke", "--jobs", "0", "--failures")
    check = ("check", f"{record}:mine", *SIMULATOR, *how)
    cli(*check, tmp_path / "first", code=1)  # compiles while there is room
    monkeypatch.setattr(cache_folder.os, call, full)
    done = cli(*check, folder, code=1)
    says(done.stderr, f"^note: {folder} cannot be written to", "No space left", "command")
    says(done.stdout, "0 of 2 runs right")
    monkeypatch.undo()
    assert not list(folder.glob("*"))


def limited():
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))


def test_a_file_size_limit_leaves_the_old_results_whole(warm, tmp_path):
    target = tmp_path / "results.json"
    target.write_text("old")
    env = {"CUPYFA_CACHE_DIR": warm}
    done = process([*GOOD, "--save", target], env=env, preexec_fn=limited)
    assert done.returncode == 3, done.stderr
    says(line_of(done.stderr), "File too large")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["results.json"]


def test_a_file_size_limit_in_the_cache(tmp_path):
    env = {"CUPYFA_CACHE_DIR": tmp_path / "cache", "TMPDIR": tmp_path}
    done = process(RUN, env=env, preexec_fn=limited)
    assert done.returncode == 3, done.stderr
    says(line_of(done.stderr), "the C\\+\\+ compiler ran out of disk space in", "free some space")
    assert list(tmp_path.rglob("*")) == [tmp_path / "cache"]


def test_a_saved_file_keeps_its_mode(own_folders, tmp_path):
    target, plain = tmp_path / "file", tmp_path / "plain"
    cache_folder.write_whole(target, b"new")
    plain.write_bytes(b"")
    assert target.stat().st_mode == plain.stat().st_mode
    target.chmod(0o640)
    cache_folder.write_whole(target, b"newer")
    assert target.stat().st_mode & 0o777 == 0o640


def test_links_are_followed_when_writing(own_folders, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "results.json", tmp_path / "link.json"
    link.symlink_to("elsewhere/results.json")
    for content in (b"new", b"newer"):
        cache_folder.write_whole(link, content)
        assert (link.is_symlink(), target.read_bytes()) == (True, content)
    assert os.listdir(target.parent) == ["results.json"]


def test_results_go_through_a_process_substitution(warm):
    args = (*GOOD, "--save", "/dev/fd/3")
    done = process(args, begin=redirected("3> >(cat >&2)"), env={"CUPYFA_CACHE_DIR": warm})
    assert done.returncode == 0
    assert '"kernel": "fa2"' in done.stderr


def test_an_open_file_is_appended_to(warm, tmp_path):
    log = tmp_path / "log"
    log.write_text("what was there\n")
    args = (*GOOD, "--save", "/dev/fd/3")
    done = process(args, begin=redirected(f"3>> {log}"), env={"CUPYFA_CACHE_DIR": warm})
    assert done.returncode == 0
    assert log.read_text().startswith("what was there\n{")


def compiler(folder, script):
    """Writes a shell script to use as CUPYFA_COMPILER."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


TELLS = 'if [ "$1" = --version ]; then echo "cc 1.0"; exit; fi\n'
COMPILERS = [
    (None, ["CUPYFA_COMPILER is '.*compiler', which is not a program", "set it to a C"]),
    ("\x7fELF", ["does not report its version|cannot be started"]),
    *(
        (script.replace("TELLS ", TELLS), words)
        for script, words in table("lab/commands/bad_compilers.txt", 1)
    ),
]


@pytest.mark.parametrize("script, words", COMPILERS)
def test_invalid_compilers(own_folders, fresh, monkeypatch, tmp_path, script, words):
    path = compiler(tmp_path, script) if script else tmp_path / "compiler"
    with monkeypatch.context() as patch:
        patch.setenv("CUPYFA_COMPILER", str(path))
        patch.setenv("CUPYFA_CACHE_DIR", str(tmp_path / "cache"))
        patch.setattr(machine, "_runtime_memo", {})
        patch.setattr(machine, "_LONGEST", 0.3)
        patch.setattr(machine, "_PATIENCE", 0.2)
        done = cli(*RUN, code=3)
        says(line_of(done.stderr), *words)
        assert not files()
    assert not left_running(str(path))
    still_works()


def test_temporary_files_of_a_compiler_are_removed(tmp_path):
    """The compiler leaves a file, as a killed linker would; all folders are relative paths."""
    (tmp_path / "temporary").mkdir()
    makes = f'touch "$TMPDIR/left.o" && echo made >> {tmp_path}/log'
    usual = shlex.join(machine.compiler())
    compiler(tmp_path, f'[ "$1" = --version ] || {{ {makes}; }}; exec {usual} "$@"')
    env = {"CUPYFA_COMPILER": "./compiler", "CUPYFA_CACHE_DIR": "cache", "TMPDIR": "temporary"}
    env |= {"CUPYFA_COMPILER_FLAGS": "-O0", "PYTHONPATH": str(sources.ROOT)}
    subprocess.run([*CLI, *RUN], cwd=tmp_path, env={**os.environ, **env}, check=True)
    assert len((tmp_path / "log").read_text().split()) == 4  # compile and link, twice
    assert not list(tmp_path.rglob("left.o"))


def test_a_machine_without_a_compiler(own_folders, fresh, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        for name in ("CUPYFA_COMPILER", "CXX"):
            patch.delenv(name, raising=False)
        patch.setitem(sys.modules, "ziglang", None)
        says(line_of(cli(*RUN, code=3).stderr), "needs a C", "install g", "pip install ziglang")
    still_works()


# Endless loops that all threads run: one reads memory, one waits at barriers, one does neither.
ENDLESS = {
    "reading": "while (*(volatile const real*)V.data < 1e30f) {}",
    "waiting": "while (V.row(0, 0, 0)[0] < 1e30f) __syncthreads();",
    "spinning": 'while (true) __asm__ volatile("");',
}
BODY = "if (row >= M) return;"


@pytest.fixture
def place(tmp_path, warm):
    """Returns environment variables for a process with private directories."""
    (tmp_path / "temporary").mkdir()
    shutil.copytree(warm, tmp_path / "cache", ignore=shutil.ignore_patterns("mine-*"))
    return {
        "TMPDIR": tmp_path / "temporary",
        "CUPYFA_CACHE_DIR": tmp_path / "cache",
        "CUPY_CACHE_DIR": tmp_path / "cupy",
        "PYTHONPATH": PACKAGE,
    }


def interrupted(args, place, begun, number, *, program=CLI, wait=0.2, speaks=False, again=None):
    """Starts a command, sends it a signal once it has begun, and checks how it ends.

    Sends the signal again ``again`` seconds later, unless ``again`` is None. Returns stderr.
    """
    cache, temporary = place["CUPYFA_CACHE_DIR"], place["TMPDIR"]
    env = {**os.environ, **{name: str(value) for name, value in place.items()}}
    # Under nohup SIGHUP is ignored, which the command would inherit.
    usual = signal.signal(number, signal.SIG_DFL)
    command = [*program, *map(str, args)]
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, env=env, **pipes) as running:
        signal.signal(number, usual)
        for _ in range(600):
            assert running.poll() is None, running.stderr.read()
            if begun():
                break
            time.sleep(0.05)
        time.sleep(wait)
        running.send_signal(number)
        if again is not None:
            time.sleep(again)
            running.send_signal(number)
        try:
            stdout, stderr = running.communicate(timeout=10)
        finally:
            running.kill()
    assert running.returncode == (130 if number == signal.SIGINT else 128 + number), stderr
    assert stdout == ""
    assert "Traceback" not in stderr
    assert speaks or not [x for x in stderr.splitlines() if x and not x.startswith("note: ")], (
        stderr
    )
    assert not left_running(str(temporary))
    assert not os.listdir(temporary)
    assert not [x for x in cache.rglob("*") if x.name.startswith((".", "build-"))]
    return stderr


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "loop, number",
    [
        *((loop, signal.SIGINT) for loop in ENDLESS),
        ("reading", signal.SIGTERM),
        ("reading", signal.SIGHUP),
    ],
)
def test_an_endless_kernel_is_interrupted(tmp_path, place, loop, number):
    script = own_kernel.write(tmp_path, cu=(BODY, f"{ENDLESS[loop]}\n  {BODY}"))
    cache = place["CUPYFA_CACHE_DIR"]
    interrupted(
        ("run", f"{script}:mine", *SIMULATOR, *SMALL),
        place,
        lambda: list(cache.glob("mine-*.so")),
        number,
    )


def threads():
    return len(os.listdir("/proc/self/task"))


def test_an_interrupted_call_leaves_no_threads(own_folders, tmp_path):
    script = own_kernel.write(tmp_path, cu=(BODY, f"{ENDLESS['reading']}\n  {BODY}"))
    endless = cupyfa.ladder.lookup.record_named(f"{script}:mine")
    still_works()
    before = threads()
    for _ in range(3):
        alarm = threading.Timer(1, signal.raise_signal, [signal.SIGINT])
        alarm.start()
        with pytest.raises(KeyboardInterrupt):
            cupyfa.attention(*INPUTS, kernel=endless, backend="simulator")
        alarm.join()
        ended = time.monotonic() + 2  # the system may still list a thread that has just ended
        while threads() > before and time.monotonic() < ended:
            time.sleep(0.01)
        assert threads() <= before
        still_works()


@pytest.mark.each_choice("number")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "args", [RUN, ("check", "fa2", *SIMULATOR, "--jobs", "2")], ids=["run", "check"]
)
def test_an_interrupt_ends_the_compiler_too(tmp_path, place, args, number):
    program = compiler(tmp_path, f"{TELLS}touch {tmp_path}/begun; sleep 60; sleep 60")
    place |= {"CUPYFA_COMPILER": program, "CUPYFA_CACHE_DIR": tmp_path / "empty"}
    interrupted(args, place, (tmp_path / "begun").exists, number, speaks=args is not RUN)


def test_an_endless_script_is_interrupted(tmp_path, place):
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\nPath(__file__).with_name('begun').touch()\nwhile True: pass\n"
    )
    interrupted(("run", f"{script}:mine"), place, (tmp_path / "begun").exists, signal.SIGINT)


# Imports a script with all its modules, creates a file to report this, and runs the script's main.
WHEN_IMPORTED = """
import pathlib, runpy, sys
main = runpy.run_path(sys.argv[1])["main"]
pathlib.Path(sys.argv[2]).touch()
main(sys.argv[3:])
"""
# Runs a script's main; creates a file just before a check runs its cases.
WHEN_CHECKING = """
import pathlib, runpy, sys
from cupyfa.lab.verify import checker as checking
run = checking._run
def begin(*args):
    pathlib.Path(sys.argv[2]).touch()
    run(*args)
checking._run = begin
runpy.run_path(sys.argv[1])["main"](sys.argv[3:])
"""
LONG = ("-B", "1", "-H", "4", "-M", "700", "-N", "700", "-d", "64")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "args",
    [
        ("compile", "--all"),
        ("run", "v1", *SIMULATOR, *LONG),
        ("bench", "v1", "--alone", *SIMULATOR, *LONG),
        ("tune", "v1", *SIMULATOR, *LONG),
        ("ladder", *SIMULATOR, *LONG),
        ("check", "--all", *SIMULATOR, "--jobs", "2"),
        ("check", "v1", *SIMULATOR, "--jobs", "0"),
    ],
    ids=" ".join,
)
def test_long_commands_are_interrupted(tmp_path, place, args):
    imported = tmp_path / "imported"
    speaks = args[0] == "check"  # check prints the results so far
    program = [sys.executable, "-c", WHEN_IMPORTED, CLI[-1], str(imported)]
    interrupted(args, place, imported.exists, signal.SIGINT, program=program, wait=1, speaks=speaks)


@pytest.mark.parametrize("again", [0, 0.002])
def test_a_repeated_signal_leaves_time_to_print_the_results(tmp_path, place, again):
    """``timeout`` sends its signal to the command, and again to all processes of its group."""
    at_work = tmp_path / "at work"
    program = [sys.executable, "-c", WHEN_CHECKING, CLI[-1], str(at_work)]
    said = interrupted(
        ("check", "fa2", "--grid", "fuzz", "--samples", 999, *SIMULATOR, "--jobs", 2),
        *(place, at_work.exists, signal.SIGTERM),
        **{"program": program, "wait": 1, "speaks": True, "again": again},
    )
    assert "runs right" in said


class Ended(BaseException):
    """Simulates a process that ends at once, without time to save."""


@pytest.mark.parametrize("ends", [KeyboardInterrupt, lambda: SystemExit(143), MemoryError, Ended])
@pytest.mark.parametrize("command", ["bench", "ladder"])
def test_results_are_in_the_file_after_each_problem(
    own_folders, monkeypatch, tmp_path, command, ends
):
    """The file is already complete when something ends the measurement."""
    file, lengths = tmp_path / "results.json", []
    measured = benchmark._Measuring.measured

    def watched(self, entries, earlier):
        lengths.append(len({x.problem.M for x in Results.load(file).rows}) if lengths else 0)
        if len(lengths) == 3:
            raise ends()
        return measured(self, entries[:1], earlier)

    monkeypatch.setattr(benchmark._Measuring, "measured", watched)
    monkeypatch.setattr("cupyfa.lab.commands.ladder.LENGTHS", (5, 6, 7))
    how = {
        "bench": ("bench", "fa2", "--alone", "-p", "M=5,6,7"),
        "ladder": ("ladder", "--plot", tmp_path / "x.svg", "-M", 7),
    }
    sizes = ("-B", 1, "-H", 1, "-d", 3, "--budget", 0, "--save", file)
    args = (*how[command], *sizes, *SIMULATOR)
    with suppress(Ended):
        CliRunner().invoke(MAIN, list(map(str, args)), prog_name="cupyfa")
    assert lengths == [0, 1, 2]
    assert len({x.problem.M for x in Results.load(file).rows}) == 2
    assert not list(tmp_path.glob(".results*"))


@pytest.mark.parametrize("linked", [False, True])
def test_results_are_written_once_into_a_pipe(own_folders, tmp_path, linked):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    sizes = ("-B", 1, "-H", 1, "-N", 4, "-d", 3, "--budget", 0, "-p", "M=5,6")
    save = ("--save", link if linked else pipe)
    cli("bench", "fa2", "--alone", *sizes, *SIMULATOR, *save, code=0)
    with os.fdopen(reader) as stream:
        assert len(json.loads(stream.read())["rows"]) == 2
    assert pipe.is_fifo() and link.is_symlink()


# Receives one signal, which ends the command, and another while the process exits.
AGAIN_AT_EXIT = """
import atexit, signal
from cupyfa.lab.commands.signals import ended_by_signals
atexit.register(signal.raise_signal, signal.SIGTERM)
with ended_by_signals():
    signal.raise_signal(signal.SIGTERM)
"""


def test_a_signal_while_the_process_exits_does_not_change_its_status(place):
    command = [sys.executable, "-c", AGAIN_AT_EXIT]
    environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
    ended = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr


ONCE = bytes([signal.SIGTERM])


@pytest.mark.parametrize(("heard", "ends"), [([2 * ONCE, b""], False), ([ONCE, ONCE], True)])
def test_simultaneous_signals_count_as_one(monkeypatch, heard, ends):
    """Signals are sometimes read late, since the listening thread may be delayed by seconds."""
    said, clock, ended = list(heard), itertools.count(step=2), []

    def read(_, most):
        now = said.pop(0)
        if now[most:]:
            said.insert(0, now[most:])
        return now[:most]

    system = SimpleNamespace(read=read, close=lambda _: None, _exit=ended.append)
    monkeypatch.setattr(signals, "os", system)
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(signals, "select", SimpleNamespace(select=lambda *_: ([0], [], [])))
    monkeypatch.setattr(signals, "_patience", 100)
    signals._insist(0)
    assert ended == ([128 + signal.SIGTERM] if ends else [])


INPUTS = np.random.default_rng(0).standard_normal((3, 20, 8), np.float32)


def failures(folder):
    """Yields calls that fail in the compiler, in the kernel, and in the check of results."""
    texts = {
        "syntax": ("real score = 0;", "real score = ;"),
        "fault": ("row)[i] = scalar", "row)[i + 1] = scalar"),
        "wrong": ("score *= scale;", "score *= 2 * scale;"),
    }
    for name, change in texts.items():
        (folder / name).mkdir()
        own_kernel.write(folder / name, cu=change)
        record = cupyfa.ladder.lookup.record_named(f"{folder / name}/script.py:mine")
        yield lambda record=record: cupyfa.attention(
            *INPUTS, kernel=record, backend="simulator", check=True
        )


def test_failed_calls_leak_no_memory_threads_or_files(own_folders, tmp_path):
    calls = list(failures(tmp_path))

    def fail():
        for call in calls:
            with pytest.raises((CompileError, cupyfa.SimulatorFault, cupyfa.WrongResult)):
                call()

    def state():
        gc.collect()
        return threading.active_count(), len(os.listdir("/proc/self/fd")), files()

    fail()
    before = state()
    tracemalloc.start()
    try:
        fail()
        growth = []
        for _ in range(3):  # a leak grows each time, while caches do not
            gc.collect()
            first = tracemalloc.get_traced_memory()[0]
            for _ in range(5):
                fail()
            gc.collect()
            growth.append(tracemalloc.get_traced_memory()[0] - first)
        assert min(growth) < 50_000, growth
    finally:
        tracemalloc.stop()
    assert state() == before
    still_works()


def test_a_machine_without_a_device(warm):
    env = {"CUDA_VISIBLE_DEVICES": "", "CUPYFA_CACHE_DIR": warm}
    for args in (("run", "fa2"), ("list",), ("bench", "fa2"), ("tune", "fa2"), ("check", "fa2")):
        done = process([*args, "--backend", "cuda"], env=env)
        assert (done.returncode, done.stdout) == (3, "")
        says(line_of(done.stderr), "no CUDA device", "use backend 'simulator', or 'auto'")
    done = process(["run", "fa2", *SMALL], env=env)
    passed(done)
    assert len(done.stderr.splitlines()) == 1
    says(done.stderr, "^note: no CUDA device", "running in the simulator")


class DriverError(RuntimeError):
    """Stands in for CUDADriverError, which cannot be created without a driver."""

    def __init__(self, status):
        super().__init__(f"CUDA_ERROR number {status}")
        self.status = status


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Prepares a launch with a stub for its loaded kernel, on a machine without a device."""
    from cupyfa.runtime.cuda import compiler, device as cuda

    monkeypatch.setenv("CUPYFA_CACHE_DIR", str(tmp_path))

    def prepare(kernel):
        monkeypatch.setattr(compiler, "Kernel", kernel)
        monkeypatch.setattr(compiler, "compile_text", lambda *_, **__: (b"binary", ""))
        monkeypatch.setattr(cuda.driver, "CUDADriverError", DriverError)
        here = SimpleNamespace(id=0, compute_capability="90")
        monkeypatch.setattr(cuda.cupy.cuda, "Device", lambda: here)
        return cuda.Cuda().compile_launch(cupyfa.plan(M=4, d=3, backend="simulator").launches[0])

    return prepare


def test_a_kernel_that_the_driver_does_not_find(compiled):
    def missing(binary, entry):
        raise DriverError(500)

    with pytest.raises(ValueError) as raised:
        compiled(missing)
    says(str(raised.value), r"fa2_coalesced\.cu has no kernel fa2_coalesced", "write there")


def test_more_registers_than_a_block_has_by_what_the_driver_tells(compiled):
    attributes = {"NUM_REGS": 200, "MAX_THREADS_PER_BLOCK": 16}
    with pytest.raises(cupyfa.Unsupported) as raised:
        compiled(lambda binary, entry: SimpleNamespace(attribute=attributes.get))
    says(str(raised.value), "uses 200 registers", "at most 16 threads fit", "smaller tiles")


def test_cuda_errors_are_one_line(monkeypatch):
    from cupy.cuda.memory import OutOfMemoryError
    from cupy_backends.cuda.api import runtime

    from cupyfa.runtime.cuda import device as cuda

    def lost():
        raise runtime.CUDARuntimeError(700)

    working = cuda._Working(nullcontext())
    monkeypatch.setattr(cuda.driver, "CUDADriverError", DriverError)
    for error in (runtime.CUDARuntimeError(700), DriverError(700)):
        for synchronize in (lost, lambda: None):
            monkeypatch.setattr(cuda.runtime, "deviceSynchronize", synchronize)
            with pytest.raises(cupyfa.DeviceError) as raised, working:
                raise error
            message = str(raised.value)
            assert message.startswith(f"the device failed: {error}")
            assert "\n" not in message
            assert ("restart the process" in message) == (synchronize is lost)
            assert isinstance(raised.value, DeviceLost) == (synchronize is lost)
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(cupyfa.DeviceError) as raised,
        working,
    ):
        patch.setattr(cuda, "runtime", SimpleNamespace(memGetInfo=lambda: (10**9, 8 * 10**9)))
        raise OutOfMemoryError(10**12, 10**6)
    says(str(raised.value), "out of memory: .*1,000,000,000,000 bytes", "1,000,000,000 of 8,000,")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("error", [KeyError("typestr"), RuntimeError("boom"), BufferError("no")])
def test_arrays_without_a_usable_interface(monkeypatch, error):
    def adopt(self, array):
        raise error

    class Elsewhere(cupyfa.Simulator):
        name = "elsewhere"

    monkeypatch.setattr(Elsewhere, "adopt", adopt, raising=False)
    with pytest.raises(TypeError) as raised:
        cupyfa.attention(Foreign(), Foreign(), Foreign(), backend=Elsewhere())
    says(str(raised.value), "q, a Foreign, cannot be viewed as an array", "pass it as")


CUDA = ("--backend", "cuda", *SMALL)
FAR = "O.data[1ll << 44] = scalar(1.f);"  # beyond any device's memory


def works_on(cuda):
    x = np.ones((4, 3), np.float32)
    np.testing.assert_allclose(cupyfa.attention(x, x, x, backend=cuda, check=True), x, rtol=1e-6)


@pytest.mark.gpu
def test_a_kernel_that_traps_is_reported_as_a_lost_device(cuda, tmp_path):
    script = own_kernel.write(tmp_path, cu=(BODY, f"{FAR}\n  {BODY}"))
    done = process(["run", f"{script}:mine", *CUDA])
    assert (done.returncode, done.stdout) == (3, ""), done.stderr
    says(line_of(done.stderr), "the device failed: cudaErrorIllegalAddress", "CUDA context is lost")
    says(line_of(done.stderr), "restart the process", "cupyfa check")
    works_on(cuda)


AFTER_A_TRAP = """
import sys
import numpy as np
import cupyfa
from cupyfa.ladder.lookup import record_named

mine = record_named(sys.argv[1])
x = np.ones((4, 3), np.float32)
out = np.full((4, 3), 7, np.float32)
for kernel in (mine, "fa2"):
    try:
        cupyfa.attention(x, x, x, kernel=kernel, backend="cuda", out=out)
    except cupyfa.DeviceError as error:
        print(error)
assert (out == 7).all()
"""


@pytest.mark.gpu
def test_every_call_after_a_trap_reports_a_lost_device(cuda, tmp_path):
    script = own_kernel.write(tmp_path, cu=(BODY, f"{FAR}\n  {BODY}"))
    done = process([f"{script}:mine"], begin=[sys.executable, "-c", AFTER_A_TRAP])
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    for line in (first, second):
        says(line, "device failed: .*llegal", "context is lost", "restart the process")


@pytest.mark.gpu
def test_a_check_survives_a_kernel_that_traps(cuda, tmp_path):
    script = own_kernel.write(tmp_path, cu=(BODY, f"{FAR}\n  {BODY}"))
    few = ("--grid", "edges", "--samples", "40", "--backend", "cuda", "--jobs", "1")
    done = process(["check", f"{script}:mine", "fa2", *few], cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    says(" ".join(done.stdout.split()), "device lost", r"fa2 (\d+) \1 ")  # all runs of fa2 pass


@pytest.mark.gpu
@pytest.mark.parametrize(
    "cu, py, code, words",
    [
        (
            (BODY, f"{device_code.code('registers')}  {BODY}"),
            (": 64,\n        ),", ": 1024,\n        ),"),
            3,
            (r"mine uses \d+ registers per thread", "1024 threads", "smaller tiles"),
        ),
        (("void mine", "void yours"), None, 2, (r"mine\.cu has no kernel mine", "write there")),
    ],
    ids=["registers", "name"],
)
def test_kernels_that_the_driver_refuses(cuda, tmp_path, cu, py, code, words):
    script = own_kernel.write(tmp_path, cu=cu, py=py)
    says(line_of(cli("run", f"{script}:mine", *CUDA, code=code).stderr), *words)
    works_on(cuda)


@pytest.mark.gpu
def test_more_memory_than_the_device_has(cuda):
    import cupy

    wide = cupy.broadcast_to(cupy.zeros((), np.float32), (100, MOST, 256))
    few = cupy.zeros((1, 4, 256), np.float32)
    gc.collect()
    used = cupy.get_default_memory_pool().used_bytes()
    with pytest.raises(cupyfa.DeviceError) as raised:
        cupyfa.attention(wide, few, few, kernel="minimal")
    message = str(raised.value)
    del raised
    assert "\n" not in message
    says(message, "out of memory: .*allocating [0-9,]+ bytes", "bytes free", "smaller sizes")
    gc.collect()
    assert cupy.get_default_memory_pool().used_bytes() == used
    works_on(cuda)


class Foreign:
    """Another library's array on the GPU, with an interface chosen by the test."""

    def __init__(self, **interface):
        good = {"shape": (4, 3), "typestr": "<f4", "version": 3, "data": (4096, False)}
        self.__cuda_array_interface__ = {
            name: x for name, x in {**good, **interface}.items() if x is not None
        }


@pytest.mark.gpu
@pytest.mark.parametrize(
    "interface", [{"data": None}, {"shape": None}, {"typestr": None}, {"typestr": "what"}], ids=str
)
def test_broken_interfaces_of_arrays_on_the_gpu(cuda, interface):
    broken = Foreign(**interface)
    with pytest.raises(TypeError) as raised:
        cupyfa.attention(broken, broken, broken)
    says(str(raised.value), "q, a Foreign, cannot be viewed as an array", "pass it as")
    works_on(cuda)


@pytest.mark.gpu
def test_invalid_outs_on_the_gpu(cuda):
    import cupy

    x = cupy.zeros((4, 3), np.float32)
    for out, error, words in (
        (cupy.broadcast_to(x[0], (4, 3)).copy()[:, :2], ValueError, "result is float32"),
        (cupy.broadcast_to(x[0], (4, 3)), ValueError, "share memory"),
        (x, ValueError, "out overlaps the input Q"),
        (np.zeros((4, 3), np.float32), TypeError, "pass a CuPy array"),
        (x.astype(np.float16), ValueError, "out is float16"),
    ):
        with pytest.raises(error, match=words):
            cupyfa.attention(x, x + 1, x + 1, out=out)
    works_on(cuda)


@pytest.mark.gpu
def test_a_gpu_run_without_a_writable_home(cuda):
    passed(process(["run", "fa2", *CUDA], env={"HOME": "/proc", "CUPYFA_CACHE_DIR": None}))


@pytest.mark.gpu
def test_an_endless_kernel_on_the_gpu_is_interrupted(cuda, tmp_path, place):
    text = "while (clock64() != 1) {}"
    script = own_kernel.write(tmp_path, cu=(BODY, f"{text}\n  {BODY}"))
    start = time.monotonic()
    long = ("run", f"{script}:mine", *CUDA)
    interrupted(long, place, lambda: time.monotonic() > start + 6, signal.SIGINT)
    works_on(cuda)


@pytest.mark.parametrize("begins", [False, True])
def test_ctrl_c_at_the_start_of_a_launch_waits_for_it(monkeypatch, begins):
    """A launch that continued would write to freed arrays."""
    ended = []

    def call():
        time.sleep(0.1)
        ended.append(True)
        return 0

    def interrupted(*work, start=machine._thread.start_new_thread):
        if begins:
            start(*work)
            time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr(machine._thread, "start_new_thread", interrupted)
    with pytest.raises(KeyboardInterrupt):
        machine._interruptible(call, stop=lambda: None)
    assert ended == [True] * begins
