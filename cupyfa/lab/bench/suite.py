"""The suite: attention problems of published models, compared with other libraries.

Sweeps over powers of two miss what models have: groups of seven query heads, head dimensions of
72 and 192, 197 tokens, windows, sinks. Each row of suite.csv is one such problem.
"""

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from cupyfa.errors import Unsupported, nearest
from cupyfa.lab.bench import peers, sweeps
from cupyfa.lab.bench.benchmark import Method, Task, measure_tasks
from cupyfa.lab.bench.results import Measurement
from cupyfa.lab.bench.watch import Watch
from cupyfa.lab.verify.case import Case
from cupyfa.numerics.shown import Rows, Shown, ShownRow
from cupyfa.problem.lengths import shown_lengths
from cupyfa.problem.optional_inputs import BIAS, SINK
from cupyfa.problem.problem import Problem
from cupyfa.runtime.environment import Progress, no_progress

PHASES = ("forward", "backward", "prefill", "decode")
_DTYPE = "bfloat16"  # of workloads whose sizes do not name another one


@dataclass(frozen=True, repr=False)
class Workload(Shown):
    """One attention problem of a model.

    phase: one of PHASES; "forward" and "backward" are a training step, or a model without a cache.
    use: what the problem is part of. source: the publication of the model's sizes.
    """

    model: str
    phase: str
    use: str
    problem: Problem
    source: str

    @property
    def name(self) -> str:
        return f"{self.model} {self.phase}"

    @property
    def operation(self) -> str:
        return "backward" if self.phase == "backward" else "forward"

    @property
    def is_latent(self) -> bool:
        """Whether V is the first columns of K: only latent attention caches fewer values."""
        return self.problem.cached is not None and self.problem.dv < self.problem.d

    @property
    def shape(self) -> str:
        """The sizes and options in short, for example "2×8192 32/8 d=128 causal"."""
        p = self.problem
        return " ".join([_rows(p), *_heads(p), *_options(p)])


def _rows(p: Problem) -> str:
    """Describes batch, queries and keys: "2×8192", "1×2048×16384", "32 of 4096" keys, or lengths.

    Several new tokens of a sequence are put before its keys: "4 on 32 of 4096".
    """
    known = p.rows.known_lengths
    if known is None:
        return "×".join(map(str, (p.batch, p.M, p.N) if p.N != p.M else (p.batch, p.M)))
    if p.cached is None or len({*p.cached.rows}) > 1:
        return shown_lengths(known, short=True)
    new = f"{p.M} on " if p.M > 1 else ""
    return f"{new}{p.batch} of {p.N}"


def _heads(p: Problem) -> list[str]:
    heads = f"{p.heads}/{p.kv_heads}" if p.heads != p.kv_heads else f"{p.heads}"
    return [heads, f"d={p.d}/{p.dv}" if p.d != p.dv else f"d={p.d}"]


def _options(p: Problem) -> Iterator[str]:
    if p.causal and not p.cached:
        yield "causal"
    if p.window[0] is not None:
        yield f"window={p.window[0] + 1}"
    if p.options.softcap:
        yield f"softcap={p.options.softcap:g}"
    yield from (x.name for x in p.operands if x.name in (BIAS, SINK))
    if p.pages:
        yield f"pages={p.page_size}"
    if p.dtype.name != _DTYPE:
        yield p.dtype.name


@cache
def workloads() -> tuple[Workload, ...]:
    """Returns all workloads of the suite."""
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8") as table:
        return tuple(_workload(**row) for row in csv.DictReader(table))


def _workload(model: str, phase: str, use: str, sizes: str, source: str) -> Workload:
    """Returns a row's workload; ``sizes`` are separated by blanks, in the notation of sweeps."""
    given = {"dtype": [_DTYPE], **dict(map(sweeps.parsed, sizes.split()))}
    operation = "backward" if phase == "backward" else "forward"
    (problem,) = sweeps.problems(operation, given)
    return Workload(model, phase, use, problem, source)


def selected(words: Sequence[str]) -> list[Workload]:
    """Returns the workloads whose model and phase contain one of ``words``, or all without words.

    Several words in one string, as "llama decode", must all occur. Raises ValueError for a string
    that selects nothing.
    """
    for text in words:
        if not any(_matches(x, text) for x in workloads()):
            known = dict.fromkeys(x.model for x in workloads())
            alike = nearest(text.lower(), [word.lower() for x in known for word in x.split()])
            raise ValueError(
                f"no row of the suite contains {text!r}{alike}; models are {', '.join(known)}, "
                f"phases {', '.join(PHASES)}"
            )
    return [x for x in workloads() if not words or any(_matches(x, text) for text in words)]


def _matches(workload: Workload, text: str) -> bool:
    return all(word in workload.name.lower() for word in text.lower().split())


@dataclass(frozen=True, repr=False)
class Standing(ShownRow):
    """A measured workload and how it compares with the fastest peer.

    measurement: of the kernel that "auto" selects; its factors are the speedups over the peers.
    read_rate: GB/s at which the device reads memory, None if unknown.
    """

    workload: Workload
    measurement: Measurement
    read_rate: float | None = None

    @property
    def peer(self) -> str | None:
        """The fastest peer, or None if no peer was measured."""
        known = {name: x for name, x in self.measurement.factors.items() if x is not None}
        return min(known, key=lambda name: known[name], default=None)

    @property
    def ratio(self) -> float | None:
        """The time of the fastest peer divided by the kernel's time, by rounds."""
        return None if self.peer is None else self.measurement.factors[self.peer]

    @property
    def bandwidth(self) -> float | None:
        """GB/s as in ``Measurement``; a column of latent keys that is also one of V counts once."""
        p, rate = self.workload.problem, self.measurement.bandwidth
        return rate and rate * (p.d / (p.d + p.dv) if self.workload.is_latent else 1.0)

    @property
    def is_memory_bound(self) -> bool:
        """Whether the kernel is closer to the peak of memory than to that of matrix products.

        Decoding counts as memory-bound. Without peaks, everything else counts as compute-bound.
        """
        row = self.measurement
        if self.workload.problem.cached:
            return True
        if not (row.peak and self.read_rate and row.tflops and self.bandwidth):
            return False
        return self.bandwidth / self.read_rate > row.tflops / row.peak

    def row(self) -> dict[str, Any]:
        """Returns the table row: the workload, and the figures of ``Measurement.row``."""
        measured, own = self.measurement.row(), self.workload
        return {
            **{name: getattr(own, name) for name in ("model", "phase", "use", "shape")},
            **own.problem.row(),
            **{x: measured[x] for x in ("kernel", "ms", "spread_%", "launches", "TFLOP/s")},
            "GB/s": self.bandwidth,
            "bound": "memory" if self.is_memory_bound else "compute",
            "peer": self.peer,
            "ratio": self.ratio,
            "ratios": dict(self.measurement.factors),
            **{x: measured[x] for x in ("checked_%", "note")},
        }


def installed_peers() -> list[str]:
    """Returns the names of peers whose package is installed."""
    return [name for name in peers.NAMES if peers.versions([name])]


def measure(
    chosen: Sequence[Workload],
    how: Method,
    against: Sequence[str],
    *,
    progress: Progress = no_progress,
    so_far: Callable[[list[Measurement]], None] | None = None,
    watch: Watch | None = None,
    **inputs: Any,
) -> list[Measurement]:
    """Checks and times the kernels that "auto" selects for workloads, and peers, as ``bench`` does.

    against: names of peers. inputs: seed, values and layout of ``Case``. ``progress``, ``so_far``
    and ``watch`` are those of ``bench``.

    Returns a row for each kernel and peer. The note of a row without a time, or without a peer, has
    the reason. Raises Unsupported in the simulator.
    """
    if how.backend.name == "simulator":
        raise Unsupported(
            "the problems of the suite are too large for the simulator; measure them on a GPU, or "
            "measure a kernel without --suite"
        )
    tasks = [_task(x, against, inputs) for x in chosen]
    how = replace(how, alone=True)
    rows, _ = measure_tasks(tasks, how, watch or Watch(), progress, so_far)
    return rows


def _task(x: Workload, against: Sequence[str], inputs: Mapping[str, Any]) -> Task:
    """Returns the task of a workload.

    "math" stores all scores, so it is a peer only where other peers are few: for float32 and
    float64.
    """
    others = [name for name in against if name != "math" or x.problem.itemsize > 2]
    case = Case(x.operation, x.problem, **inputs)
    return Task(case, ["auto"], others, is_latent=x.is_latent, notes_peers=True)


def standings(
    chosen: Sequence[Workload], rows: Iterable[Measurement], read_rate: float | None = None
) -> list[Standing]:
    """Returns the standing of each workload that ``rows``, from ``measure``, contain."""
    own = zip(chosen, of_kernels(rows))
    return Rows(Standing(x, row, read_rate) for x, row in own)


def of_kernels(rows: Iterable[Measurement]) -> list[Measurement]:
    """Returns the rows of kernels, without those of peers: one for each measured workload."""
    others = set(map(peers.label, peers.NAMES))
    return [row for row in rows if row.kernel not in others]


def mean_ratio(found: Sequence[Standing]) -> float | None:
    """Returns the geometric mean of the ratios, or None if no peer was measured."""
    ratios = [x.ratio for x in found if x.ratio]
    return geometric_mean(ratios) if ratios else None
