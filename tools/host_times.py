"""Measures host times: round trips of NumPy arrays, calls, first calls and imports.

    python tools/host_times.py
    python tools/host_times.py --only calls --only import --format md

Alternatives are timed in interleaved rounds after a warm-up. The simulator skips everything that
needs a GPU, and its calls include the computation: it only shows that the script works.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import click
import numpy as np

import cupyfa
from cupyfa.lab.bench import peers, timing
from cupyfa.lab.commands.command_options import backend_option, dtype_choice, format_option
from cupyfa.lab.report import tables as report
from cupyfa.problem.dtypes import dtype_named
from cupyfa.runtime import environment
from cupyfa.runtime.choose_backend import backend_named

ROOT = Path(cupyfa.__file__).parents[1]
WARM_UP = 2  # rounds that compile kernels and allocate the pinned memory of later results
SMALL = (1, 2, 64, 64)  # a shape for which the kernel takes less time than its launch
SETS = 4  # number of sets of arrays that calls on changing arrays cycle through
ON_A_GPU = {"B": 8, "H": 16, "M": 4096, "d": 128, "calls": 200, "loops": 50, "processes": 5}
SIMULATED = {"B": 2, "H": 2, "M": 64, "d": 16, "calls": 3, "loops": 5, "processes": 2}

BY_HAND = "cupy.asarray, kernel, .get()"
BUS = "the bus alone, both ways at a time"
KERNEL = "the kernel alone"

Row = dict[str, Any]
Timer = Callable[[], float]


@dataclass(frozen=True)
class Setting:
    """The parameters of a measurement. torch: the module, or None if torch cannot use the GPU."""

    engine: Any
    torch: Any
    shape: tuple[int, ...]  # shape of the arrays in round trips
    dtype: str
    rounds: int
    calls: int
    loops: int
    processes: int

    @property
    def on_gpu(self) -> bool:
        return self.engine.name == "cuda"

    @property
    def options(self) -> dict[str, Any]:
        """The options of calls; empty on a GPU, where users rarely name the backend."""
        return {} if self.on_gpu else {"backend": self.engine}


def in_turn(timers: Mapping[str, Timer], rounds: int) -> dict[str, list[float]]:
    """Runs all timers in each round; returns each timer's results after the warm-up rounds."""
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            times[name].append(timer())
    return {name: taken[WARM_UP:] for name, taken in times.items()}


def row(group: str, what: str, unit: str, times: Sequence[float], **more: Any) -> Row:
    """Makes a table row. ``more`` overrides columns."""
    return {
        "group": group,
        "what": what,
        "unit": unit,
        "median": median(times),
        "best": min(times),
        "samples": len(times),
        "GB/s": None,
        "x": None,
        "%_of_bus": None,
        **more,
    }


# Round trips of NumPy arrays


def round_trips(at: Setting) -> list[Row]:
    """Measures milliseconds from arrays on the host to the result on the host.

    x is the speedup over hand-written CuPy code, and % of bus is the transfer time as a percentage
    of the whole round trip.
    """
    host = normal(at.shape, at.dtype, 3)
    timers = ways(at, host)
    at.engine.synchronize()
    times = in_turn(timers, at.rounds)
    moved = 4 * host[0].nbytes
    return [
        row(
            "round-trip", what, "ms", taken, **({} if what == KERNEL else rates(times, what, moved))
        )
        for what, taken in times.items()
    ]


def rates(times: Mapping[str, Sequence[float]], what: str, moved: int) -> Row:
    """Computes GB/s, and median ratios to hand-written code and to the bus if these were timed."""
    found = {"GB/s": moved / median(times[what]) / 1e6}
    if BY_HAND in times:
        found["x"] = timing.ratio(times[BY_HAND], times[what])
    if BUS in times:
        found["%_of_bus"] = 100 * timing.ratio(times[BUS], times[what])
    return found


def normal(shape: Sequence[int], dtype: str, count: int) -> list[np.ndarray]:
    """Makes random arrays. Their pages are mapped, unlike those of np.empty."""
    rng, of = np.random.default_rng(0), dtype_named(dtype).numpy
    return [rng.standard_normal(shape, np.float32).astype(of) for _ in range(count)]


def ways(at: Setting, host: list[np.ndarray]) -> dict[str, Timer]:
    """Returns timers for all alternatives, and for the bus and the kernel as lower bounds."""
    attend = partial(cupyfa.attention, **at.options)
    out = host[0].copy()  # a copy, because the pages of a new array are not mapped yet
    pinned = [cupyfa.empty_pinned(x.shape, at.dtype, backend=at.engine) for x in (*host, out)]
    for mine, x in zip(pinned, (*host, out)):
        mine[...] = x
    device = [at.engine.upload(x) for x in (*host, out)]
    prepared = cupyfa.compile(*device[:3], backend=at.engine)
    calls: dict[str, Callable[[], Any]] = {
        "cupyfa, NumPy arrays": partial(attend, *host),
        "cupyfa, NumPy arrays, out= in ordinary memory": partial(attend, *host, out=out),
        "cupyfa, all pinned": partial(attend, *pinned[:3], out=pinned[3]),
    }
    if at.on_gpu:
        calls = {BY_HAND: partial(by_hand, host), **calls}
        if at.torch is not None:
            calls |= ways_of_torch(at.torch, host)
        calls[BUS] = bus(pinned, device)
    kernel = partial(at.engine.time, partial(prepared, *device[:3], out=device[3]))
    return {what: partial(milliseconds, call) for what, call in calls.items()} | {KERNEL: kernel}


def milliseconds(call: Callable[[], Any]) -> float:
    """Times a call until its result is ready, without the time to free the result."""
    start = perf_counter()
    _result = call()
    return 1e3 * (perf_counter() - start)


def by_hand(host: Sequence[np.ndarray]) -> np.ndarray:
    """Computes attention with hand-written CuPy transfers; get() waits for the result."""
    import cupy

    return cupyfa.attention(*map(cupy.asarray, host)).get()


def bus(pinned: Sequence[np.ndarray], device: Sequence[Any]) -> Callable[[], None]:
    """Returns a function that makes the necessary copies: three in and one out, concurrently."""
    import cupy

    up, down = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    copy, kind = cupy.cuda.runtime.memcpyAsync, cupy.cuda.runtime.memcpyDefault

    def both_ways() -> None:
        there, here = device[3], pinned[3]
        copy(here.ctypes.data, there.data.ptr, here.nbytes, kind, down.ptr)
        for there, here in zip(device[:3], pinned[:3]):
            copy(there.data.ptr, here.ctypes.data, here.nbytes, kind, up.ptr)
        up.synchronize()
        down.synchronize()

    return both_ways


def ways_of_torch(torch: Any, host: Sequence[np.ndarray]) -> dict[str, Callable[[], Any]]:
    """Returns functions that make round trips with torch, from ordinary and from pinned memory."""
    attend = torch.nn.functional.scaled_dot_product_attention

    def ordinary() -> Any:
        return attend(*(tensor(torch, x).cuda() for x in host)).cpu()  # .numpy() makes no copy

    inputs = [tensor(torch, x).pin_memory() for x in host]
    # The result may have permuted strides. out must match them, or copy_ adds a copy on the GPU.
    out = ordinary().pin_memory()

    def pinned() -> None:
        out.copy_(attend(*(x.cuda(non_blocking=True) for x in inputs)), non_blocking=True)
        torch.cuda.synchronize()

    return {"torch from ordinary memory": ordinary, "torch from pinned memory": pinned}


def tensor(torch: Any, array: np.ndarray) -> Any:
    """Views a NumPy array as a tensor; passes bfloat16 as int16, since torch rejects ml_dtypes."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


# Calls


EMPTY = """
extern "C" __global__ void empty(const void*, const void*, const void*, void*, int) {}
"""


def host_times(at: Setting) -> list[Row]:
    """Measures the host's microseconds per call on small arrays in GPU memory.

    Loops are short and end with a synchronization, because a call would wait for a kernel if the
    device's launch queue were full.
    """
    sets = [[at.engine.upload(x) for x in normal(SMALL, "float16", 4)] for _ in range(SETS)]
    calls = small_calls(at, sets)
    timers = {what: partial(microseconds, at, call) for what, call in calls.items()}
    with at.torch.no_grad() if at.torch else nullcontext():
        times = in_turn(timers, at.loops)
    return [row("calls", what, "µs", taken) for what, taken in times.items()]


def small_calls(at: Setting, sets: Sequence[Sequence[Any]]) -> dict[str, Callable[[], Any]]:
    """Returns the calls with which cupyfa is compared, followed by calls of cupyfa."""
    q, k, v, out = sets[0]
    attend = partial(cupyfa.attention, **at.options)
    prepared, others = (cupyfa.compile(q, k, v, backend=at.engine) for _ in range(2))
    turns = cycle(sets)

    def call_others() -> None:
        *inputs, result = next(turns)
        others(*inputs, out=result)

    calls = others_calls(at, sets[0]) if at.on_gpu else {}
    calls["cupyfa, prepared, out=, the same arrays"] = partial(prepared, q, k, v, out=out)
    calls["cupyfa, prepared, out=, other arrays each time"] = call_others
    calls["cupyfa.attention"] = partial(attend, q, k, v)
    calls["cupyfa.attention, out="] = partial(attend, q, k, v, out=out)
    calls |= backward_calls(at, q, k, v, out)
    if at.torch is not None:
        tensors = [at.torch.from_dlpack(x) for x in (q, k, v)]
        calls["cupyfa.attention of torch tensors"] = partial(attend, *tensors)
        calls["cupy.from_dlpack of three torch tensors"] = partial(from_dlpack, tensors)
    return calls


def from_dlpack(tensors: Sequence[Any]) -> list[Any]:
    """Converts tensors to CuPy arrays, a cost that attention avoids by using their addresses."""
    import cupy

    return [cupy.from_dlpack(x) for x in tensors]


def backward_calls(at: Setting, q: Any, k: Any, v: Any, dout: Any) -> dict[str, Callable[[], Any]]:
    out, lse = cupyfa.attention(q, k, v, return_lse=True, **at.options)
    given, grads = (
        (dout, q, k, v, out, lse),
        tuple(at.engine.empty(x.shape, x.dtype) for x in (q, k, v)),
    )
    prepared = cupyfa.compile(*given, backend=at.engine)
    backward = partial(cupyfa.backward, *given, **at.options)
    _, pullback = cupyfa.vjp(q, k, v, **at.options)
    return {
        "cupyfa, prepared backward": partial(prepared, *given),
        "cupyfa, prepared backward, grads=": partial(prepared, *given, grads=grads),
        "cupyfa.backward": backward,
        "cupyfa.backward, grads=": partial(backward, grads=grads),
        "cupyfa.vjp": partial(cupyfa.vjp, q, k, v, **at.options),
        "its pullback": partial(pullback, dout),
    }


def others_calls(at: Setting, arrays: Sequence[Any]) -> dict[str, Callable[[], Any]]:
    """Returns the calls with which cupyfa is compared: a launch, an allocation and torch."""
    import cupy

    q, k, v, out = arrays
    empty = cupy.RawKernel(EMPTY, "empty")
    five = (q, k, v, out, np.int32(0))
    calls: dict[str, Callable[[], Any]] = {
        "an empty kernel of five arguments, cupy.RawKernel": partial(empty, (1,), (1,), five),
        "cupy.empty": partial(cupy.empty, q.shape, q.dtype),
    }
    if at.torch is not None:
        attend = at.torch.nn.functional.scaled_dot_product_attention
        tensors = [at.torch.from_dlpack(x) for x in (q, k, v)]
        calls["torch scaled_dot_product_attention"] = partial(attend, *tensors)
    return calls


def microseconds(at: Setting, call: Callable[[], Any]) -> float:
    """Returns the host's microseconds per call, averaged over a loop."""
    at.engine.synchronize()
    start = perf_counter()
    for _ in range(at.calls):
        call()
    seconds = perf_counter() - start
    at.engine.synchronize()
    return 1e6 * seconds / at.calls


# First calls and imports in new processes


# Import CuPy and create the CUDA context first: any GPU program has to, so it is timed separately.
FIRST = """
import sys, time
import numpy as np
x = np.ones(tuple(map(int, sys.argv[2:])), np.float16)
if sys.argv[1] == "cuda":
    start = time.perf_counter()
    import cupy
    after = time.perf_counter()
    cupy.zeros(1)
    cupy.cuda.Device().synchronize()
    print(after - start, time.perf_counter() - after)
start = time.perf_counter()
import cupyfa
cupyfa.attention(x, x, x, backend=sys.argv[1])
print(time.perf_counter() - start)
"""


def first_calls(at: Setting) -> list[Row]:
    """Measures the seconds to a new process's first result, with cold and then with warm caches.

    The device is initialized already, because this process uses it.
    """
    times: dict[str, list[float]] = {}
    for _ in range(at.processes):
        with tempfile.TemporaryDirectory() as folder:
            kept = ("CUPYFA_CACHE_DIR", "CUPY_CACHE_DIR", "CUDA_CACHE_PATH")
            caches = {name: f"{folder}/{name}" for name in kept}
            for state in ("cold", "warm"):
                *before, seconds = child(FIRST, at.engine.name, *SMALL, **caches)
                for what, taken in zip(("import cupy", "CUDA context"), before):
                    times.setdefault(what, []).append(taken)
                call = f"import cupyfa and first call, {state} caches"
                times.setdefault(call, []).append(seconds)
    return [row("first", what, "s", taken) for what, taken in times.items()]


IMPORT = """
import time
start = time.process_time()
import numpy
after = time.process_time()
import cupyfa
print(after - start, time.process_time() - after)
"""


def imports(at: Setting) -> list[Row]:
    """Measures CPU milliseconds of imports from bytecode, which an extra first process writes."""
    with tempfile.TemporaryDirectory() as folder:
        bytecode = {"PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
        _, *seconds = [child(IMPORT, **bytecode) for _ in range(1 + at.processes)]
    names = ("import numpy", "import cupyfa, after numpy")
    return [
        row("import", what, "ms of CPU time", [1e3 * x for x in taken])
        for what, taken in zip(names, zip(*seconds))
    ]


def child(code: str, *args: Any, **variables: str) -> list[float]:
    """Runs Python code in a new process; returns the numbers that it prints."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        raise click.ClickException(done.stderr)
    return [float(word) for word in done.stdout.split()]


GROUPS: dict[str, Callable[[Setting], list[Row]]] = {
    "round-trip": round_trips,
    "calls": host_times,
    "first": first_calls,
    "import": imports,
}


# Command line


def torch_on(engine: Any) -> tuple[Any, list[str]]:
    """Returns torch, or None if torch cannot use the GPU, and notes on skipped measurements."""
    if engine.name != "cuda":
        return None, ["no GPU is used: CuPy, torch, the bus and the CUDA context are skipped"]
    try:
        import torch
    except ImportError as error:
        return None, [f"torch cannot be imported ({error}): its measurements are skipped"]
    if not torch.cuda.is_available():
        return None, ["torch cannot use CUDA: its measurements are skipped"]
    return torch, []


def made_with(at: Setting) -> dict[str, str]:
    """Describes the device, versions and settings that the figures depend on."""
    batch, heads, M, d = at.shape
    return {
        **environment.describe(at.engine),
        **(peers.versions(["fa2"]) if at.torch else {}),
        "cores": str(len(os.sched_getaffinity(0))),
        "transfer": report.text(vars(cupyfa.transfer.configure())),
        "round trip": f"batch={batch} heads={heads} M={M} N={M} d={d} {at.dtype}",
        "calls": f"{SMALL} float16, {at.calls} in a loop",
    }


def told(about: Mapping[str, str], rows: Sequence[Row], form: str) -> str:
    """Renders one table per group without empty columns, or all rows as JSON or CSV."""
    if form == "json":
        return json.dumps({"environment": about, "rows": rows}, indent=2)
    if form == "csv":
        return report.render(rows, form)
    parts = [report.fields(about) if form == "table" else f"{report.text(about)}\n"]
    for group in dict.fromkeys(x["group"] for x in rows):
        mine = [x for x in rows if x["group"] == group]
        columns = [c for c in mine[0] if any(x[c] is not None for x in mine)]
        parts.append(report.render([{c: x[c] for c in columns} for x in mine], form) + "\n")
    return "\n".join(parts).rstrip("\n")


def count(name: str, *also: str, least: int = 1, say: str | None = None) -> Callable:
    """Makes a click option whose default is smaller in the simulator."""
    usual = f"[default: {ON_A_GPU[name]}; {SIMULATED[name]} in the simulator]"
    kind = click.IntRange(least)
    return click.option(*also, name, type=kind, help=f"{say or ''}  {usual}".strip())


@click.command()
@click.option("--only", multiple=True, type=click.Choice(list(GROUPS)), help="Groups to measure.")
@count("B", "-B", "--batch")
@count("H", "-H", "--heads")
@count("M", "-M", say="Queries, and as many keys.")
@count("d", "-d", say="Head dimension.")
@click.option("--dtype", type=dtype_choice, default="float16", show_default=True)
@click.option(
    "--rounds",
    type=click.IntRange(WARM_UP + 1),
    default=9,
    show_default=True,
    help=f"Of round trips; the first {WARM_UP} are not counted.",
)
@count("calls", "--calls", say="In a loop between two waits for the device.")
@count("loops", "--loops", least=WARM_UP + 1, say=f"The first {WARM_UP} are not counted.")
@count("processes", "--processes", say="For first calls and imports.")
@backend_option
@format_option
def main(
    only: tuple[str, ...],
    B: int | None,
    H: int | None,
    M: int | None,
    d: int | None,
    dtype: str,
    rounds: int,
    backend: str,
    form: str,
    **counts: int | None,
) -> None:
    """Measures host times: the median and the minimum of each measurement."""
    engine = backend_named(backend)
    usual = ON_A_GPU if engine.name == "cuda" else SIMULATED
    sizes = {"B": B, "H": H, "M": M, "d": d, **counts}
    chosen = {name: usual[name] if given is None else given for name, given in sizes.items()}
    shape = tuple(chosen.pop(name) for name in "BHMd")
    torch, notes = torch_on(engine)
    at = Setting(engine, torch, shape, dtype, rounds, **chosen)
    rows = [x for name in GROUPS if name in (only or GROUPS) for x in GROUPS[name](at)]
    about = made_with(at)
    if form == "csv":
        notes = [report.text(about), *notes]
    for note in notes:
        click.echo(f"note: {note}", err=True)
    click.echo(told(about, rows, form))


if __name__ == "__main__":
    main()
