"""Soak test: makes many calls of all kinds from several threads.

Compares each result with the first result of the same call, and the final with the initial memory
use. With --faults it provokes faults instead; after each fault, calls must still work or raise an
error that explains why they cannot.

    python tools/soak.py --calls 100000 --threads 8
    python tools/soak.py --faults

Runs on all visible GPUs, or in the simulator. CUDA graphs are not tested, because no thread may
allocate while another thread captures a graph.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

import cupyfa
from cupyfa.ladder.lookup import record_named
from cupyfa.runtime.choose_backend import backend_named

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers import own_kernel

SWITCH_INTERVAL = 2e-4  # seconds between thread switches; at the default 5 ms few calls overlap
MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's mallopt
LARGE = 1 << 17  # bytes; free() returns larger blocks to the system, so they do not look like leaks
ROUNDS = 10  # each round starts new threads; leaks are measured from the end of the second round
# Growth in bytes up to which no leak is reported. CuPy's pool keeps memory for every stream used.
LEEWAY = {"host": 48 << 20, "pool": 1 << 30, "device": 64 << 20, "in use": 16 << 20}
MOST_WRONG = 10
ROOT = Path(cupyfa.__file__).parents[1]


@dataclass(frozen=True)
class Call:
    """A call that returns the same bits, or raises the same error, each time.

    run: receives a dictionary in which each thread keeps its output arrays.
    """

    name: str
    run: Callable[[dict], Any]
    device: int | None = None  # the device to make current; None in the simulator
    on_host: bool = True
    prepared: Any = None  # the Prepared that `run` calls, if any


def calls(engine: Any) -> list[Call]:
    """Returns all kinds of calls, on NumPy arrays and on CuPy arrays of each device."""
    if engine.name == "simulator":
        return [*_kinds(engine, lambda x: x, None, True)]
    import cupy

    found = []
    for device in range(cupy.cuda.runtime.getDeviceCount()):
        with cupy.cuda.Device(device):
            found += _kinds(engine, lambda x: x, device, True)
            found += _kinds(engine, cupy.asarray, device, False)
    return found


def _kinds(engine: Any, put: Callable, device: int | None, on_host: bool) -> Iterator[Call]:
    simulated = engine.name == "simulator"
    heads, M, d, keys = (2, 24, 16, 60) if simulated else (8, 300, 64, 4000)
    forward = {"backend": engine} | ({"kernel": "fa2"} if simulated else {})
    backward = {"backend": engine} | ({"kernel": "rows"} if simulated else {"deterministic": True})
    attend = cupyfa.attention
    for dtype in ("float32",) if simulated else ("float16", "float32"):
        rng = np.random.default_rng(0)

        def new(*shape: int, rng: Any = rng, dtype: str = dtype) -> Any:
            return put(rng.standard_normal(shape, np.float32).astype(dtype))

        q, k, v, dout = (new(2, heads, M, d) for _ in range(4))
        one, few = new(2, heads, 1, d), [new(2, heads // 2, keys, d) for _ in range(2)]
        turned = [x.swapaxes(1, 2) for x in (q, k, v)]
        o, lse = attend(q, k, v, causal=True, return_lse=True, **forward)
        prepared = cupyfa.compile(q, k, v, causal=True, **forward)
        pinned = cupyfa.empty_pinned(q.shape, dtype, backend=engine) if on_host else q.copy()
        pinned[...] = q

        def out(kept: dict, name: str, like: Any = q) -> Any:
            made = kept.get(name)
            if made is None:
                made = kept[name] = like.copy()
            made.fill(7)
            return made

        def again(kept: dict, name: str, prepared: Any = prepared, x: tuple = (q, k, v)) -> Any:
            made = out(kept, name, x[0])
            for _ in range(3):
                prepared(*x, out=made)
            return made

        def gradients(kept: dict, name: str, x: tuple = (dout, q, k, v, o, lse)) -> Any:
            into = tuple(out(kept, f"{name} {i}", x[1]) for i in range(3))
            return cupyfa.backward(*x, causal=True, grads=into, **backward)

        def refused(kept: dict, x: tuple = (q, k, v)) -> None:
            try:
                attend(*x, out=x[0], **forward)
            except ValueError:
                return
            raise AssertionError("attention accepted an out that overlaps an input")

        x, kinds = (q, k, v), {}
        kinds["attention"] = lambda kept, x=x: attend(*x, **forward)
        kinds["with lse"] = lambda kept, x=x: attend(*x, causal=True, return_lse=True, **forward)
        kinds["of a layout"] = lambda kept, x=turned: attend(*x, layout="bshd", **forward)
        kinds["in place"] = lambda kept, x=x: attend(*x, out=out(kept, "out", x[0]), **forward)
        kinds["pinned"] = lambda kept, p=pinned, x=x: attend(p, *x[1:], **forward)
        kinds["decoding"] = lambda kept, x=(one, *few): attend(*x, **forward)
        kinds["prepared"] = lambda kept, x=x, prepared=prepared: prepared(*x)
        kinds["prepared, in place"] = lambda kept, again=again: again(kept, "again")
        kinds["gradients"] = lambda kept, gradients=gradients: gradients(kept, "gradients")
        kinds["refused"] = lambda kept, refused=refused: refused(kept)
        for name, run in kinds.items():
            where = "NumPy" if on_host else "CuPy"
            kept = prepared if name.startswith("prepared") else None
            yield Call(f"{name}, {where} {dtype}, device {device}", run, device, on_host, kept)
        if on_host:
            yield Call("buffers given back", lambda kept: cupyfa.transfer.release(), device)


# Threads


class Soak:
    """Runs calls in threads and collects descriptions of wrong results."""

    def __init__(self, engine: Any, seed: int) -> None:
        self.engine, self.seed = engine, seed
        self.calls = calls(engine)
        self.right = [self.first(call) for call in self.calls]
        self.done, self.wrong, self.lock = 0, list[str](), threading.Lock()
        self.shared: dict[int | None, Any] = {}  # one stream per device, shared by all threads
        for call in self.calls:
            self.shared.setdefault(call.device, self.stream(call.device))

    def stream(self, device: int | None) -> Any:
        if device is None:
            return None
        import cupy

        with cupy.cuda.Device(device):
            return cupy.cuda.Stream(non_blocking=True)

    def first(self, call: Call) -> tuple:
        """Returns a call's reference result, computed while no other calls run."""
        with self.on(call.device):
            made = tuple(x.copy() for x in _all_of(call.run({})))
            self.engine.synchronize()
            return made

    def again(self, i: int, kept: dict, stream: Any = None) -> str | None:
        """Makes a call; returns a description of wrong results, or None if they are right."""
        with self.on(self.calls[i].device, stream):
            made = _all_of(self.calls[i].run(kept))
            for at, (x, right) in enumerate(zip(made, self.right[i], strict=True)):
                if not bool((x == right).all()):
                    return f"{int((x != right).sum())} of {x.size} elements of result {at} differ"
        return None

    @contextmanager
    def on(self, device: int | None, stream: Any = None) -> Iterator[None]:
        with ExitStack() as stack:
            if device is not None:
                import cupy

                stack.enter_context(cupy.cuda.Device(device))
                if stream is not None:
                    stack.enter_context(stream)
            yield

    def run(self, total: int, threads: int, patience: float) -> None:
        """Makes `total` calls; prints all stacks and exits if none ends for `patience` seconds."""
        numbers = itertools.count(1)
        workers = [
            threading.Thread(target=self.work, args=(numbers, total, i), daemon=True)
            for i in range(threads)
        ]
        faulthandler.dump_traceback_later(patience, exit=True)
        for worker in workers:
            worker.start()
        before = self.done
        while any(worker.is_alive() for worker in workers):
            time.sleep(0.05)
            if self.done != before:
                before = self.done
                faulthandler.dump_traceback_later(patience, exit=True)
        faulthandler.cancel_dump_traceback_later()

    def work(self, numbers: Iterator[int], total: int, thread: int) -> None:
        rng = random.Random(f"{self.seed} {self.done} {thread}")
        kept: dict[Any, dict] = {}
        streams = {
            device: [None, self.stream(device), self.stream(device), shared]
            for device, shared in self.shared.items()
        }
        while next(numbers) <= total and len(self.wrong) < MOST_WRONG:
            i = rng.randrange(len(self.calls))
            if self.calls[i].name.startswith("buffers") and rng.randrange(20):
                i = 0  # release buffers rarely, because allocating new ones is slow
            call = self.calls[i]
            at = rng.randrange(4)
            try:
                wrong = self.again(i, kept.setdefault(i, {}), streams[call.device][at])
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
            if wrong:
                self.wrong.append(f"{wrong} ({call.name}, thread {thread}, stream {at})")
            with self.lock:
                self.done += 1


def _all_of(result: Any) -> tuple:
    if result is None:
        return ()
    return result if isinstance(result, tuple) else (result,)


# Memory


def memory(engine: Any, prepared: Iterable[Any]) -> dict[str, int]:
    """Measures the bytes in use on the host and on each device while no call runs.

    Counts pinned memory and CuPy's pool, frees both, then counts all other memory. Prepared calls
    first free their scratch memory, which grows with the number of streams that they ran in.
    """
    for call in prepared:
        call.forget()
    gc.collect()
    found = {"pinned": cupyfa.transfer.held()}
    cupyfa.transfer.release()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)  # glibc keeps up to 64 MB of freed memory per thread
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found["host"] = pages * os.sysconf("SC_PAGE_SIZE")
    if engine.name != "simulator":
        import cupy

        for device in range(cupy.cuda.runtime.getDeviceCount()):
            with cupy.cuda.Device(device):
                engine.synchronize()
                pool = cupy.get_default_memory_pool()
                found[f"pool {device}"] = pool.total_bytes()
                engine.trim()
                free, total = cupy.cuda.runtime.memGetInfo()
                found[f"device {device}"] = total - free
                found[f"in use {device}"] = pool.used_bytes()
    return found


def grown(before: dict[str, int], after: dict[str, int], shared: bool) -> list[str]:
    """Describes the kinds of memory that have grown by more than LEEWAY."""
    devices = sum(name.startswith("pool ") for name in before) or 1
    most = LEEWAY | {"pinned": devices * cupyfa.transfer.configure().most_held}
    if shared:
        most["device"] = sys.maxsize
    return [
        f"{name}: {before[name]:,} bytes before, {after[name]:,} after"
        for name in before
        if after[name] > before[name] + most[name.rstrip("0123456789 ")]
    ]


# Faults


def interrupted(engine: Any, seed: int, times: int) -> str:
    """Interrupts calls with Ctrl-C; must run in the main thread."""
    soak, rng, armed = Soak(engine, seed), random.Random(seed), threading.Event()

    def handle(*_: Any) -> None:
        if armed.is_set():
            armed.clear()
            raise KeyboardInterrupt

    usual = signal.signal(signal.SIGINT, handle)
    came = 0
    try:
        for i in range(times):
            faulthandler.dump_traceback_later(60, exit=True)
            at = i % len(soak.calls)
            timer = threading.Timer(rng.uniform(0, 0.02), os.kill, (os.getpid(), signal.SIGINT))
            timer.daemon = True
            try:
                armed.set()
                timer.start()
                while armed.is_set():
                    soak.again(at, {})
            except KeyboardInterrupt:
                came += 1
            timer.join()
            wrong = soak.again(at, {})
            assert wrong is None, f"{soak.calls[at].name}, after Ctrl-C: {wrong}"
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGINT, usual)
    assert came > 0.8 * times  # Python ignores interrupts inside destructors
    soak.run(4 * len(soak.calls), 4, 60)
    assert not soak.wrong, soak.wrong
    return f"{came} interrupts by Ctrl-C in {len(soak.calls)} kinds of calls: all are right after"


def out_of_memory(engine: Any, seed: int) -> str:
    """Limits CuPy's pool while threads call; calls must be right or raise OutOfMemory."""
    if engine.name == "simulator":
        return "out of memory: skipped, because the simulator uses host memory"
    import cupy

    soak, pool = Soak(engine, seed), cupy.get_default_memory_pool()
    engine.trim()
    x = cupy.ones((8, 300, 64), np.float32)
    pool.set_limit(size=pool.used_bytes() + (1 << 19))
    told = ""
    try:
        try:
            cupyfa.attention(x, x, x)
        except cupyfa.DeviceError as error:
            told = str(error)
        soak.run(2000, 8, 60)
    finally:
        pool.set_limit(size=0)
    # Both cupyfa and CuPy have an error with a name that starts with OutOfMemory.
    others = [x for x in soak.wrong if not x.startswith("OutOfMemory")]
    assert told.startswith("out of memory") and soak.wrong and not others, (told, soak.wrong)
    soak.wrong.clear()
    soak.run(4 * len(soak.calls), 8, 60)
    assert not soak.wrong, soak.wrong
    return f"out of memory: reported as {told!r}; all calls are right after"


BEGIN = "if (row >= M) return;"
FAR = "O.data[1ll << 44] = scalar(1.f);"  # writes to an unmapped address


def trapped(engine: Any) -> str:
    """Runs a kernel that writes far out of bounds while threads make calls."""
    with tempfile.TemporaryDirectory() as folder:
        script = own_kernel.write(Path(folder), cu=(BEGIN, f"{FAR}\n  {BEGIN}"))
        done = _child("trap", engine, script, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


def _trap(engine: Any, script: str) -> str:
    """Does the work of ``trapped`` in a child process, which may lose the device."""
    mine = record_named(f"{script}:mine")
    x = np.ones((2, 4, 3), np.float32)
    soak = Soak(engine, 0)
    cupyfa.compile(x, x, x, kernel=mine, backend=engine)
    fault = cupyfa.SimulatorFault if engine.name == "simulator" else cupyfa.DeviceError
    said = []

    def trap() -> None:
        try:
            cupyfa.attention(x, x, x, kernel=mine, backend=engine)
        except fault as error:
            said.append(str(error))

    thread = threading.Thread(target=trap)
    thread.start()
    soak.run(60 if engine.name == "simulator" else 20_000, 4, 60)
    thread.join()
    assert len(said) == 1, said
    if engine.name == "simulator":
        assert not soak.wrong, soak.wrong
        return f"a kernel that traps: {said[0]!r}; all other calls are right"
    # cupyfa raises DeviceLost, and CuPy raises errors that start with CUDA.
    others = [x for x in soak.wrong if not x.startswith(("DeviceLost", "CUDA"))]
    told = [*said, *(x for x in soak.wrong if x.startswith("DeviceLost"))]
    assert soak.wrong and not others, soak.wrong
    assert all("restart the process" in x for x in told), told
    return f"a kernel that traps: {said[0]!r}, and every later call says so"


def killed(engine: Any, seed: int, times: int = 3) -> str:
    """Kills processes while they compile kernels and write to the caches."""
    rng, sums = random.Random(seed), set()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        where = {"CUPYFA_CACHE_DIR": f"{folder}/ours", "CUPY_CACHE_DIR": f"{folder}/cupys"}
        start = time.monotonic()
        sums.add(_child("call", engine, env=where, timeout=300).stdout)
        usual = time.monotonic() - start
        for _ in range(times):
            where = {name: f"{place}-again" for name, place in where.items()}
            for _ in range(2):
                process = _started("call", engine, env=where)
                time.sleep(usual * rng.uniform(0.3, 1.0))
                process.kill()
                process.wait()
            done = _child("call", engine, env=where, timeout=300)
            assert done.returncode == 0, done.stderr
            sums.add(done.stdout)
    assert len(sums) == 1, sums
    return f"{2 * times} processes were killed with cold caches: later processes were right"


def _call(engine: Any) -> str:
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 40, 16), np.float32)
    out = cupyfa.attention(q, k, v, kernel="fa2", backend=engine, check=True)
    return repr(float(out.sum()))


def _started(what: str, engine: Any, *args: Any, env: Any = None) -> subprocess.Popen:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, __file__, "--backend", engine.name, "--child", what, *map(str, args)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path, **(env or {})},
        start_new_session=True,
        **pipes,
    )


def _child(what: str, engine: Any, *args: Any, timeout: float, env: Any = None) -> Any:
    process = _started(what, engine, *args, env=env)
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


FAULTS: dict[str, Callable[[Any, int, int], str]] = {
    "out_of_memory": lambda engine, seed, _: out_of_memory(engine, seed),
    "trapped": lambda engine, _, __: trapped(engine),
    "killed": lambda engine, seed, _: killed(engine, seed),
    "interrupted": lambda engine, seed, times: interrupted(engine, seed, times),
}


@click.command()
@click.option(
    "--calls",
    "total",
    type=click.IntRange(1),
    default=100_000,
    show_default=True,
    help="Number of calls.",
)
@click.option("--threads", type=click.IntRange(1), default=8, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--backend", default="auto", show_default=True)
@click.option("--patience", default=60.0, show_default=True, help="Seconds without a result.")
@click.option("--shared", is_flag=True, help="Other processes use the devices' memory too.")
@click.option("--faults", is_flag=True, help="Provoke faults instead.")
@click.option(
    "--only", multiple=True, type=click.Choice(list(FAULTS)), help="Provoke only these faults."
)
@click.option("--interrupts", default=300, show_default=True, help="Number of Ctrl-C interrupts.")
@click.option("--child", hidden=True)
@click.argument("args", nargs=-1)
def main(
    total: int,
    threads: int,
    seed: int,
    backend: str,
    patience: float,
    shared: bool,
    faults: bool,
    only: tuple[str, ...],
    interrupts: int,
    child: str | None,
    args: tuple[str, ...],
) -> None:
    """Makes calls from threads and checks each result; exits with 1 on wrong results or leaks."""
    faulthandler.enable()
    engine = backend_named(backend)
    if child:
        click.echo({"trap": _trap, "call": _call}[child](engine, *args))
        return
    if faults:
        for name in only or FAULTS:
            click.echo(FAULTS[name](engine, seed, interrupts))
        return
    sys.setswitchinterval(SWITCH_INTERVAL)
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(MMAP_THRESHOLD, LARGE)
    soak = Soak(engine, seed)
    kinds = f"{len(soak.calls)} kinds of calls from {threads} threads"
    click.echo(f"{kinds} on {engine.limits.device}, seed {seed}")
    start, taken = time.monotonic(), []
    for i in range(ROUNDS):
        soak.run(total * (i + 1) // ROUNDS - total * i // ROUNDS, threads, patience)
        taken.append(memory(engine, filter(None, (call.prepared for call in soak.calls))))
        held = ", ".join(f"{name} {x / 1e6:.1f}" for name, x in taken[-1].items())
        click.echo(f"{soak.done:,} calls, {time.monotonic() - start:.1f} s; MB: {held}")
        if soak.wrong:
            break
    first, last = taken[min(1, len(taken) - 1)], taken[-1]
    problems = [*soak.wrong, *(f"a leak of {x}" for x in grown(first, last, shared))]
    click.echo("\n".join(problems) or "all results are right, and nothing has leaked")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
