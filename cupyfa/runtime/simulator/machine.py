"""Compiles the source of a kernel for the CPU and runs it, each CUDA thread as a fiber.

There are two kinds of shared objects: the runtime (``runtime.cpp`` with ``asynchronous.h``), and
one per kernel, compiled from ``simulator.h`` and the kernel's source with instrumented memory
accesses. The cache directory holds both, under names that hash all inputs of the build.
"""

import _thread
import ctypes
import errno
import importlib.util
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from cupyfa import cache_folder
from cupyfa.errors import CompileError, CompilerNotFound, SimulatorFault, warn
from cupyfa.planner import includes
from cupyfa.runtime.backend import Region
from cupyfa.runtime.simulator import dynamic_shared, lines

_HERE = Path(__file__).resolve().parent
_RUNTIME_FILES = (_HERE / "runtime.cpp", _HERE / "asynchronous.h")
_TWINS = _HERE / "include"
_REPORT_BYTES = 2048
ENTRY = "simulator entry point"  # file name of the generated code in compiler messages
_NO_ROOM = re.compile("No space left on device|File size limit exceeded|Disk quota exceeded")
_LONGEST = 600  # time limit of a compiler in seconds
_PATIENCE = 0.5  # seconds between polls for the end of a call or process
_MAX_FRAME_BYTES = 200_000  # per function; a fiber's stack has 260 KB

# DWARF 4 is the last version of debug information that every addr2line reads correctly.
_BASE_FLAGS = ["-std=c++17", "-O2", "-g1", "-gdwarf-4", "-fPIC", "-fvisibility=hidden"]
_KERNEL_FLAGS = [
    # For small problems most of the time is spent on compiling, for which -O1 is faster. Large
    # problems run 10 % slower than with -O2.
    "-O1",
    "-fno-exceptions",
    "-fno-math-errno",
    # CUDA's compiler allows type punning, and an access through a null pointer must be a fault.
    "-fno-strict-aliasing",
    "-fno-delete-null-pointer-checks",
    "-fno-omit-frame-pointer",
    "-fsanitize=thread",
]
# Tracking local variables, which -g1 discards, would take a quarter of the compile time.
_GCC_BASE_FLAGS = ["-fno-var-tracking"]
_GCC_FLAGS = [
    *_GCC_BASE_FLAGS,
    # These passes take a tenth of the compile time and make kernels no faster.
    "-fno-dce",
    "-fno-dse",
    "-fno-move-loop-invariants",
    f"-Werror=frame-larger-than={_MAX_FRAME_BYTES}",
    "-fsanitize=bounds-strict,integer-divide-by-zero,alignment",
    # The runtime checks memcpy and memset only if they are called as functions.
    "-fno-builtin-memcpy",
    "-fno-builtin-memset",
    "--param=tsan-instrument-func-entry-exit=0",
]
_CLANG_FLAGS = [
    f"-Wframe-larger-than={_MAX_FRAME_BYTES}",
    "-Werror=frame-larger-than",
    "-fno-sanitize=undefined",  # zig enables this sanitizer with -O0
    "-fsanitize=array-bounds,integer-divide-by-zero,alignment",
    "-fno-sanitize-trap=all",
    "-fno-vectorize",  # a vectorised access may cover elements that the kernel skips
    "-fno-slp-vectorize",
    *("-mllvm", "-tsan-instrument-func-entry-exit=0"),
    *("-mllvm", "-tsan-instrument-read-before-write=1"),
]
# Fills local variables without a value with a pattern, so that results that use them are wrong.
# Otherwise they often contain zeros.
_FILL = "-ftrivial-auto-var-init=pattern"


@dataclass(frozen=True)
class CompiledKernel:
    entry: str
    path: Path
    folders: Sequence[Path]  # include folders
    argument_bytes: tuple[int, ...]
    text: str = field(repr=False)  # the source, to whose lines messages refer
    runtime: ctypes.CDLL = field(repr=False)
    code: ctypes.CDLL = field(repr=False)


# Launching


def starter(
    kernel: CompiledKernel,
    sizes: Sequence[int],
    regions: Sequence[Region],
    grid: tuple[int, int, int],
    threads: int | tuple[int, int, int],
    shared_bytes: int,
    schedule: int | None = None,
    workers: int | None = None,
    *,
    early: bool = False,
    waits_first: bool = False,
    one_waits: bool = False,
) -> Callable[[Any, int, int], None]:
    """Returns a function that runs a kernel on a grid and waits for all blocks.

    ``sizes`` are the argument sizes in bytes; the returned function takes a table of argument
    addresses. ``regions`` describe the global memory that the kernel may access. ``schedule`` seeds
    a pseudo-random order of threads; None runs them in the order of their indices. ``workers`` OS
    threads share the blocks; the default is one per core.

    An ``early`` launch may begin before the previous one has ended. The simulator then checks that
    threads wait for the previous launch before they access ``awaited`` regions and, with
    ``waits_first``, before they let the next launch begin. At least one thread of each block must
    wait; with ``one_waits`` one thread of the launch is enough. No thread may write to a ``kept``
    region.

    Raises ValueError if ``sizes`` do not match the kernel's parameters. The returned function
    raises SimulatorFault.
    """
    block = threads if isinstance(threads, tuple) else (int(threads), 1, 1)
    if tuple(sizes) != kernel.argument_bytes:
        raise ValueError(
            f"{kernel.entry} has parameters of {kernel.argument_bytes} bytes, but its Launch "
            f"passes arguments of {tuple(sizes)} bytes; list one argument of the right type per "
            "parameter in args="
        )
    number = ctypes.c_size_t
    request = _Request()
    request.entry = ctypes.cast(kernel.code.simulator_call, ctypes.c_void_p)
    if locate := getattr(kernel.code, "simulator_locate", None):  # has `extern __shared__` arrays
        request.locate = ctypes.cast(locate, ctypes.c_void_p)
    request.argument_bytes = (number * max(len(sizes), 1))(*sizes)
    request.argument_count = len(sizes)
    request.grid[:] = grid
    request.block[:] = block
    request.shared_bytes = shared_bytes
    request.workers = workers or len(os.sched_getaffinity(0))
    request.shuffled = schedule is not None
    request.seed = int(schedule or 0) % 2**64
    request.region_count = len(regions)
    request.early, request.waits_first, request.one_waits = early, waits_first, one_waits
    named = (
        _Region(x.name.encode(), 0, x.bytes, x.itemsize, x.constant, early and x.awaited, x.kept)
        for x in regions
    )
    fixed = (_Region * len(regions))(*named)
    places = [(x.argument, x.offset, x.low) for x in regions]

    def start(stream: Any, pointers: int, extra: int) -> None:
        here = (_Region * len(places)).from_buffer_copy(fixed)
        table = (number * len(sizes)).from_address(pointers)
        for region, (argument, offset, low) in zip(here, places):
            region.address = number.from_address(table[argument] + offset).value + low
        mine = _Request.from_buffer_copy(request)
        mine.arguments, mine.regions, report = pointers, here, _Report()
        failed = _interruptible(
            partial(kernel.runtime.cupyfa_launch, ctypes.byref(mine), ctypes.byref(report)),
            stop=lambda: setattr(mine, "stopped", 1),
        )
        if failed:
            raise _fault(kernel, report)

    start.keep = fixed, request  # type: ignore[attr-defined]  # the copies point to this memory
    return start


def _interruptible(call: Callable[[], int], stop: Callable[[], Any]) -> int:
    """Calls a C function so that a signal handler, such as that of Ctrl-C, can stop it.

    Python runs signal handlers in its main thread, between bytecodes. The main thread therefore
    waits here while another thread makes the call. If a signal handler raises, the main thread
    stops the call and waits for its end, because the call uses the caller's memory. A kernel
    without memory accesses cannot be stopped.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    results: list[int | None] = []
    begun, done = threading.Lock(), threading.Lock()  # atomic even if a signal arrives
    done.acquire()

    def work() -> None:
        result = None
        if begun.acquire(blocking=False):
            try:
                result = call()
            finally:
                results.append(result)
                done.release()

    try:
        _thread.start_new_thread(work, ())  # a signal may arrive here
        while not done.acquire(timeout=_PATIENCE):  # signals may reach another thread
            continue
    finally:
        if not begun.acquire(blocking=False):
            while not results:
                stop()
                done.acquire(timeout=_PATIENCE)
    (result,) = results
    assert result is not None
    return result


class _Region(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_size_t),
        ("bytes", ctypes.c_size_t),
        *((name, ctypes.c_int) for name in ("itemsize", "constant", "awaited", "kept")),
    )


class _Request(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("locate", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("argument_bytes", ctypes.POINTER(ctypes.c_size_t)),
        ("argument_count", ctypes.c_size_t),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_size_t),
        ("regions", ctypes.POINTER(_Region)),
        ("region_count", ctypes.c_size_t),
        ("workers", ctypes.c_int),
        ("shuffled", ctypes.c_int),
        ("stopped", ctypes.c_int),
        ("early", ctypes.c_int),
        ("waits_first", ctypes.c_int),
        ("one_waits", ctypes.c_int),
        ("seed", ctypes.c_uint64),
    )


class _Report(ctypes.Structure):
    _fields_ = (
        ("text", ctypes.c_char * _REPORT_BYTES),
        ("place", ctypes.c_char * _REPORT_BYTES),
        ("block", ctypes.c_uint * 3),
        ("thread", ctypes.c_uint * 3),
    )


# Faults

# Placeholders for folders in an object file: the compiler's working folder, which messages omit;
# the simulator's headers; and all other include folders. Checkouts with equal sources share an
# object file, so it cannot contain the paths of one checkout.
_UNPLACED, _PLACED_TWINS, _PLACED = "/@", "/@twins", "/@include"
_PLACE = re.compile(r"\{([0-9a-f]+);([^}]*):(-?\d+)\}")
_DIVIDES = "divides an integer by zero"  # must match runtime.cpp
_EXPRESSIONS = re.compile(r"\b(score_mod|mask_mod)\(")  # functions generated from user expressions


def _fault(kernel: CompiledKernel, report: _Report) -> SimulatorFault:
    what = report.text.decode(errors="replace")
    place = report.place.decode(errors="replace")
    x, y, z = report.block
    i, j, k = report.thread
    what = _PLACE.sub(lambda found: _line(kernel, [found]) or "an unknown line", what)
    places = list(_PLACE.finditer(place))
    line = _line(kernel, places)
    if what == _DIVIDES:
        what += _in_option(kernel, places)
    if not lines.can_read():
        what = f"{what} ({lines.REMEDY})"
    return SimulatorFault(kernel.entry, (x, y, z), (i, j, k), what, line)


def _in_option(kernel: CompiledKernel, places: Sequence[re.Match[str]]) -> str:
    """Returns the option whose expression contains a location, as " in score_mod", or "".

    Expressions are printed at the start of the source, before the first ``#line``.
    """
    addresses = [int(place[1], 16) for place in places]
    found = lines.frames(kernel.path, [x for x in addresses if x])
    own = re.compile(re.escape(f"{_UNPLACED}/{kernel.entry}.cu:") + r"(\d+)$")
    for number in (int(x[1]) for x in map(own.match, found) if x):
        before = "\n".join(kernel.text.splitlines()[:number])
        if "\n#line " not in before and (options := _EXPRESSIONS.findall(before)):
            return f" in {options[-1]}"
    return ""


def _line(kernel: CompiledKernel, places: Sequence[re.Match[str]]) -> str:
    """Returns the innermost source line of a location outside the simulator's headers.

    If that line is in a header, the line of the .cu file that calls the header is appended.
    """
    addresses = [int(place[1], 16) for place in places]
    frames = lines.frames(kernel.path, [x for x in addresses if x])
    inside = (_PLACED_TWINS, f"{_UNPLACED}/{ENTRY}")
    shown = [_own_name(kernel, x) for x in frames if not x.startswith(inside)]
    if not shown:
        return _own_name(kernel, f"{places[0][2]}:{places[0][3]}") if places[0][2] else ""
    line, callers = shown[0], [x for x in shown if ".cu:" in x]
    caller = callers[-1 if line in callers else 0] if callers else shown[-1]
    return line if caller == line else f"{line} (called from {caller})"


def _own_name(kernel: CompiledKernel, line: str) -> str:
    """Replaces the placeholder in a ``file:line`` of an object file with the kernel's folder."""
    if not line.startswith(f"{_PLACED}/"):
        return line.removeprefix(f"{_UNPLACED}/")
    name = line.removeprefix(f"{_PLACED}/")
    file = name.rpartition(":")[0]
    return next((f"{x / name}" for x in kernel.folders if (x / file).is_file()), name)


# Building

_memo: dict[tuple[str, ...], CompiledKernel] = {}
_runtime_memo: dict[str, ctypes.CDLL] = {}
_lock = threading.Lock()
_key_locks: dict[tuple[str, ...], threading.Lock] = {}


def build(
    text: str, include_dirs: Sequence[Path], entry: str, *, inlines: bool = True
) -> CompiledKernel:
    """Compiles a kernel's source, or finds the object in the cache, and loads it.

    ``entry`` names the kernel function. Without ``inlines`` the compiler need not inline
    ``__forceinline__`` functions. This compiles faster, but accesses that pass a struct by value
    from memory are then not checked.

    Raises CompileError with the compiler's output, and CompilerNotFound without a compiler.
    """
    if sys.platform != "linux":
        raise CompilerNotFound(
            f"the simulator runs only on Linux, not on {sys.platform}; use a container or the GPU"
        )
    folders = [_TWINS, *(Path(folder).resolve() for folder in include_dirs)]
    source = ("" if inlines else _CALLS) + _source(text, entry)
    headers = includes.digest(includes.reached(source, folders))
    digest = includes.hashed(_runtime_key(), _PLACED, source, headers, *_kernel_flags())
    key = (digest, *map(str, folders))
    with _key_locks.setdefault(key, threading.Lock()):
        if key not in _memo:
            _memo[key] = _build(source, entry, digest, folders)
        return _memo[key]


_CALLS = "#define SIMULATOR_CALLS_FUNCTIONS\n"  # see simulator.h


def _source(text: str, entry: str) -> str:
    placed = dynamic_shared.placed(text)
    return (
        "#include <simulator.h>\n"
        f'#line 1 "{entry}.cu"\n{placed}\n'
        f'#line 1 "{ENTRY}"\n'
        f'extern "C" decltype({entry}) {entry};\n'  # an error unless the kernel is extern "C"
        'extern "C" __attribute__((visibility("default")))\n'
        f"void simulator_call(void** arguments) {{ simulator::call(&{entry}, arguments); }}\n"
        'extern "C" __attribute__((visibility("default")))\n'
        "simulator::ArgumentSizes simulator_argument_sizes;\n"
        "simulator::ArgumentSizes simulator_argument_sizes =\n"
        f"    simulator::argument_sizes(&{entry});\n"
        f"{dynamic_shared.LOCATOR if placed != text else ''}"
    )


class _ArgumentSizes(ctypes.Structure):
    _fields_ = (("count", ctypes.c_size_t), ("bytes", ctypes.c_size_t * 64))


def _build(source: str, entry: str, digest: str, folders: Sequence[Path]) -> CompiledKernel:
    try:
        runtime_path, runtime = _runtime()
    except CompileError as error:  # the cause is not the kernel
        raise _useless("cannot compile the simulator", str(error)) from None

    def make(path: Path) -> None:
        # Relative file names in the source must not change; see _line.
        names = {folder: _PLACED for folder in folders} | {_TWINS: _PLACED_TWINS}
        names[path.parent] = _UNPLACED
        # If several prefixes match, compilers apply the last option.
        ordered = sorted(names, key=lambda folder: len(folder.parts))
        flags = [*_kernel_flags(), *(f"-ffile-prefix-map={x}={names[x]}" for x in ordered)]
        flags += [f"-I{folder}" for folder in folders]
        objects = [_compiled(path.with_name("kernel.cpp"), source, flags)]
        if source.endswith(dynamic_shared.LOCATOR):
            text = dynamic_shared.memory(source)
            objects.append(_compiled(path.with_name("memory.cpp"), text, _BASE_FLAGS))
        # Linked without the sanitizer's library, because the runtime defines its functions.
        _link(path, [*objects, runtime_path.resolve()], ["-Wl,-z,defs", "-Wl,-Bsymbolic", "-lm"])

    name = re.sub(r"[^A-Za-z0-9_]", "_", entry)[:64]
    path, loaded = _load_or_make(f"{name}-{digest[:32]}.so", make)
    sizes = _ArgumentSizes.in_dll(loaded, "simulator_argument_sizes")
    _, _, text = source.partition(f'#line 1 "{entry}.cu"\n')
    size = tuple(sizes.bytes[: sizes.count])
    return CompiledKernel(entry, path, folders[1:], size, text, runtime, loaded)


def _compiled(file: Path, text: str, flags: Sequence[str]) -> Path:
    file.write_text(text, encoding="utf-8")
    made = file.with_suffix(".o")
    _run([*compiler(), *flags, "-c", str(file), "-o", str(made)], folder=file.parent)
    return made


def _link(path: Path, objects: Sequence[Path], options: Sequence[str]) -> None:
    # Without this option, zig spends most of a minute building an unused C++ library.
    library = ["-nostdlib++"] if "clang" in compiler_version() else []
    command = [*compiler(), "-O2", "-shared", *library, *map(str, objects), *options]
    _run([*command, "-o", str(path)], folder=path.parent)


def _runtime() -> tuple[Path, ctypes.CDLL]:
    """Loads the runtime once per process, because two copies would not share their threads."""
    name = f"cupyfa-runtime-{_runtime_key()[:32]}.so"

    def make(path: Path) -> None:
        flags = [*_runtime_flags(), f"-I{_HERE}"]
        compiled = _compiled(path.with_name("main.cpp"), '#include "runtime.cpp"', flags)
        # Kernels find the runtime by its soname, once it is loaded.
        _link(path, [compiled], [f"-Wl,-soname,{name}", "-pthread", "-ldl"])

    with _lock:
        if name not in _runtime_memo:
            _runtime_memo[name] = _load_or_make(name, make)[1]
        return _whole_or_made(name, make), _runtime_memo[name]


def _runtime_flags() -> list[str]:
    flags = [*_BASE_FLAGS, "-fno-exceptions", "-fno-omit-frame-pointer"]
    return flags + ([] if "clang" in compiler_version() else _GCC_BASE_FLAGS)


def _kernel_flags() -> list[str]:
    version = compiler_version()
    is_clang = "clang" in version
    flags = [*_BASE_FLAGS, *_KERNEL_FLAGS, *(_CLANG_FLAGS if is_clang else _GCC_FLAGS)]
    found = re.search(r"clang version (\d+)|\) (\d+)", version)
    major = int(found[1] or found[2]) if found else 0
    if major >= (16 if is_clang else 12):
        flags.append(_FILL)
    if is_clang and major >= 16:
        # Older versions treat the last array of a struct as a flexible array.
        flags.append("-fstrict-flex-arrays=3")
    return flags + given_flags()


def given_flags() -> list[str]:
    """Returns the flags in CUPYFA_COMPILER_FLAGS. Raises ValueError if they cannot be parsed."""
    given = os.environ.get("CUPYFA_COMPILER_FLAGS", "")
    try:
        return shlex.split(given)
    except ValueError as error:
        raise ValueError(
            f"CUPYFA_COMPILER_FLAGS is {given!r}, which cannot be parsed as a list of flags: "
            f"{error}; write it as for a shell, or unset it"
        ) from None


# The compiler

# Matches the output of --version. GCC's output starts with the name of the called program, such as
# g++-14 or x86_64-linux-gnu-g++.
_SUPPORTED = re.compile(r"clang version|\+\+\S* \(.*\n.*Free Software Foundation")


def compiler() -> list[str]:
    """Returns the command of the C++ compiler. Raises CompilerNotFound if there is none.

    ``CUPYFA_COMPILER`` names a program, or ``zig`` for the ziglang wheel. The default is ``CXX`` if
    that is g++ or clang++, else the first of ``c++``, ``g++`` and ``clang++`` on the PATH, else the
    wheel.
    """
    chosen = os.environ.get("CUPYFA_COMPILER")
    if chosen and chosen != "zig":
        found = shutil.which(chosen)
        if found is None:
            raise CompilerNotFound(
                f"CUPYFA_COMPILER is {chosen!r}, which is not a program on the PATH; set it to a "
                "C++ compiler, or to 'zig' for the ziglang wheel, or unset it"
            )
        return [os.path.abspath(found)]  # the compiler runs in other folders
    if not chosen:
        command, ignored = _usual_compiler()
        if command:
            return command
        if ignored:
            _warn_of_ignored(ignored)
        for name in ("c++", "g++", "clang++"):
            if found := shutil.which(name):
                return [found]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "c++", *_zig_target()]
    raise CompilerNotFound(
        "the simulator needs a C++ compiler and found neither c++, g++ nor clang++ on the PATH,"
        " nor the ziglang wheel; install g++ or clang++, or pip install ziglang"
    )


def _zig_target() -> list[str]:
    """Returns the option that makes zig use its bundled headers for the system's glibc version.

    Without this option zig asks the ``cc`` on the PATH for the system's include folders, and fails
    if one of them cannot be opened.
    """
    name, version = _libc()
    return ["-target", f"native-linux-gnu.{version}"] if name == "glibc" else []


def _usual_compiler() -> tuple[list[str], str]:
    """Returns the command in ``CXX``, or the reason why it is ignored; both empty if unset."""
    given = os.environ.get("CXX", "")
    try:
        program, *flags = shlex.split(given) or [""]
        if found := shutil.which(program):
            command = [os.path.abspath(found), *flags]
            if _SUPPORTED.search(_version_of(tuple(command))):
                return command, ""
        why = "is neither g++ nor clang++" if found else "is not a program on the PATH"
    except (ValueError, CompilerNotFound) as error:
        why = f"cannot be used: {str(error).partition(';')[0]}"
    return [], f"CXX={given!r} is ignored: it {why}" if given.strip() else ""


@cache
def _warn_of_ignored(what: str) -> None:
    warn(f"{what}; set CXX to g++ or clang++, or unset CXX")


def compiler_choice() -> str:
    """Describes the compiler: its version, its command and the variable in which it was set."""
    if os.environ.get("CUPYFA_COMPILER"):
        by = "named by CUPYFA_COMPILER"
    else:
        command, ignored = _usual_compiler()
        other = ignored or "CUPYFA_COMPILER or CXX names another"
        by = "named by CXX" if command else f"found first; {other}"
    return f"{compiler_version().splitlines()[0]}: {shlex.join(compiler())} ({by})"


_libc = cache(platform.libc_ver)  # cached, because it reads the interpreter's file


def compiler_version() -> str:
    """Returns the output of the C++ compiler for --version."""
    return _version_of(tuple(compiler()))


@cache
def _version_of(command: tuple[str, ...]) -> str:
    try:
        version = _run([*command, "--version"])
    except CompileError as error:
        raise _useless("does not report its version", str(error), command) from None
    if not version.strip():
        raise _useless("does not report its version", "no output", command)
    return version


def _useless(what: str, said: str, command: Sequence[str] = ()) -> CompilerNotFound:
    first = next((line.strip() for line in said.splitlines() if line.strip()), "no reason given")
    return CompilerNotFound(
        f"{' '.join(command or compiler())} {what} ({first}); set CUPYFA_COMPILER to a C++ "
        "compiler, or to 'zig' for the ziglang wheel, or unset it"
    )


def _runtime_key() -> str:
    system = [*compiler(), compiler_version(), platform.machine(), *_libc()]
    return includes.hashed(*system, *_runtime_flags(), *(x.read_bytes() for x in _RUNTIME_FILES))


def _run(command: Sequence[str], folder: Path | None = None) -> str:
    # Another thread starts the process: in this thread a signal could interrupt Popen after the
    # process was started, which would then never be ended.
    with ThreadPoolExecutor(1) as threads:
        started = threads.submit(
            subprocess.Popen,
            command,
            cwd=folder,
            env=_environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # a process group, so that children can be killed too
        )
        try:
            said, told = started.result().communicate(timeout=_LONGEST)
        except BaseException as error:
            if not started.exception():
                _end(started.result())
            if isinstance(error, OSError):  # not a program, or built for another architecture
                why = f"{command[0]} cannot be started: {error.strerror}"
            elif isinstance(error, subprocess.TimeoutExpired):
                why = f"{command[0]} was killed after {_LONGEST} s"
            else:
                raise
            raise CompileError(why) from None
    if started.result().returncode != 0:
        message = told + said or f"{shlex.join(command)} failed without a message"
        if _NO_ROOM.search(message):
            where = f"{cache_folder.folder()} or {tempfile.gettempdir()}"
            raise OSError(
                errno.ENOSPC, f"the C++ compiler ran out of disk space in {where}; free some space"
            )
        raise CompileError(message)
    return said + told


def _end(process: subprocess.Popen[str]) -> None:
    for order in (signal.SIGTERM, signal.SIGKILL):  # SIGTERM lets the compiler remove its files
        with suppress(ProcessLookupError):
            os.killpg(process.pid, order)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE)
    for pipe in filter(None, (process.stdout, process.stderr)):
        pipe.close()


def _environment(folder: Path | None) -> dict[str, str]:
    """Returns the environment for a compiler, with a cache folder for zig if the user has none.

    Temporary files go to ``folder``, which the caller deletes, because a killed linker leaves its
    temporary files behind.
    """
    environment = dict(os.environ, LC_ALL="C", **({"TMPDIR": str(folder)} if folder else {}))
    base = cache_folder.user_cache()
    if base is None or not cache_folder.can_write(base / "zig"):
        for name in ("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"):
            environment.setdefault(name, str(cache_folder.folder() / "zig"))
    return environment


# The cache

_Make = Callable[[Path], None]  # builds an object file at a path, in an empty folder


def load_library(source: Path, folders: Sequence[str | Path], version: str) -> ctypes.CDLL:
    """Compiles a C++ file for the CPU, or finds it in the cache, and loads the shared object.

    folders: include folders. version: that of the headers in them. Raises CompileError and
    CompilerNotFound.
    """
    flags = ["-std=c++17", "-O2", "-fPIC", "-fno-exceptions", *(f"-I{x}" for x in folders)]
    system = [*compiler(), compiler_version(), platform.machine(), *_libc()]
    digest = includes.hashed(*system, *flags, version, source.read_bytes())

    def make(path: Path) -> None:
        text = source.read_text(encoding="utf-8")
        _link(path, [_compiled(path.with_name("main.cpp"), text, flags)], [])

    return _load_or_make(f"cupyfa-{source.stem}-{digest[:32]}.so", make)[1]


def _load_or_make(name: str, make: _Make) -> tuple[Path, ctypes.CDLL]:
    """Loads an object from the cache; builds it if it is missing, damaged or cannot be loaded."""
    path = _whole_or_made(name, make)
    try:
        return path, ctypes.CDLL(str(path))
    except OSError:  # the file is intact, but incompatible with the updated system
        path.unlink(missing_ok=True)
        return path, ctypes.CDLL(str(_whole_or_made(name, make)))


def _whole_or_made(name: str, make: _Make) -> Path:
    folder = cache_folder.folder()
    path = folder / name
    if cache_folder.compiled(path):
        return cache_folder.place_of(path)
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
        made = Path(scratch).resolve() / name
        make(made)
        if not made.is_file():
            raise _useless("wrote no object file", "and reported no error")
        cache_folder.keep_compiled(path, made.read_bytes())
    return cache_folder.place_of(path)
