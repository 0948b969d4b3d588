"""Compares two benchmarks: kernels are faster, slower, the same within the noise, or unclear.

The noise of a ratio has two sources and is at least one percent. Within a run, the noise is
estimated from the spread of the rounds, and from the medians of blocks of consecutive rounds, which
vary more if the device drifts. Between runs, kernels with unchanged code reveal how much the device
has changed. For n such kernels, the noise is the root mean square of their changes, widened by
Student's t for n degrees of freedom.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import exp, hypot, log, sqrt
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from cupyfa.lab.bench import timing
from cupyfa.lab.bench.results import Measurement, Results
from cupyfa.numerics.shown import Rows, ShownRow

FLOOR = 0.01  # minimum noise between two runs of the same code
TELLING = 0.1  # SAME requires that a difference larger than this would have been detected
_CERTAIN = 2  # number of standard errors beyond which a difference is certain
_UNKNOWN = 0.05  # standard error assumed for a single timed call
_FEW = 5  # with fewer timed calls, their spread underestimates the noise
_BLOCKS = 10  # maximum number of blocks of consecutive rounds
_IRRELEVANT = ("time", "command", "python", "system")  # facts whose differences are not reported
# Facts about an environment that do not affect the speed of compiled code.
_OF_THE_HOST = ("cupyfa", "numpy", "cupy", "compiler")
# Student's t for 1, 2, … degrees of freedom, exceeded with a probability of 2.5 % on each side.
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
NOT_ON_A_GPU = "not measured on a GPU"
UNCHANGED = "unchanged code"


@dataclass(frozen=True, repr=False)
class Comparison(ShownRow):
    """One kernel on one problem, measured before and after.

    ``factor`` is the speedup, ``uncertainty`` its standard error. ``verdict`` is SAME, FASTER,
    SLOWER, UNCLEAR if the noise could hide ten percent, or the reason why there is no comparison.
    """

    before: Measurement | None
    after: Measurement | None
    verdict: str
    factor: float | None = None
    uncertainty: float | None = None

    @property
    def measurement(self) -> Measurement:
        """The later measurement, or the only measurement if the other is missing."""
        found = self.after or self.before
        assert found is not None, "a comparison has at least one side"
        return found

    @property
    def change(self) -> str:
        """The change in speed, in words."""
        if self.factor is None or self.uncertainty is None:
            return ""
        factor, error = self.factor, self.uncertainty
        if self.verdict == "SLOWER":
            factor, error = 1 / factor, error / factor**2
        word = f" {self.verdict.lower()}" if self.verdict in ("FASTER", "SLOWER") else ""
        return f"{factor:.2f} ± {error:.2f} ×{word}"

    @property
    def certain_slowdown(self) -> float:
        """The slowdown beyond the noise, as a fraction; 0 if there is none."""
        if self.verdict == UNCHANGED or self.factor is None or self.uncertainty is None:
            return 0.0
        noise = _CERTAIN * self.uncertainty / self.factor
        return max(0.0, exp(-log(self.factor) - noise) - 1)

    def row(self) -> dict[str, Any]:
        """Returns the comparison as a table row."""
        return {
            **dict(takewhile(lambda column: column[0] != "ms", self.measurement.row().items())),
            "ms_before": self.before.time if self.before else None,
            "ms_after": self.after.time if self.after else None,
            "verdict": self.verdict,
            "change": self.change,
            "factor": self.factor,
            "uncertainty": self.uncertainty,
        }


def compare(
    before: str | Path | Results | Sequence[Measurement],
    after: str | Path | Results | Sequence[Measurement],
) -> list[Comparison]:
    """Compares two benchmarks: files of ``bench --save``, their content, or rows.

    Rows with the same kernel, problem and constants are paired, in order if there are several, and
    compared by their medians. FASTER and SLOWER require a difference of more than two standard
    errors; a smaller difference is SAME if two standard errors are at most ten percent, else
    UNCLEAR. Rows with the same compiled source, device and versions are "unchanged code" whatever
    their times; the changes of their times add to the standard errors of all other rows. Simulator
    times are not compared. Unpaired rows come last.

    Raises OSError if a file cannot be read, and ValueError if it is not a results file.
    """
    old, new = _loaded(before), _loaded(after)
    olds, news = _keyed(old.rows), _keyed(new.rows)
    pairs = [(olds[key], news[key]) for key in olds if key in news]
    here = [name for name in _different(old, new) if name not in _OF_THE_HOST]
    unchanged = [bool(a.code) and a.code == b.code and not here for a, b in pairs]
    drift = _drift([pair for pair, is_same in zip(pairs, unchanged) if is_same])
    if "simulator" in {x.environment.get("backend") for x in (old, new)}:
        both = [Comparison(a, b, _untimed(a, b) or NOT_ON_A_GPU) for a, b in pairs]
    else:
        both = [_compared(a, b, drift, same) for (a, b), same in zip(pairs, unchanged)]
    gone = [Comparison(olds[key], None, "only before") for key in olds if key not in news]
    added = [Comparison(None, news[x], "only after") for x in news if x not in olds]
    return Rows([*both, *gone, *added])


def differences(before: Results, after: Results) -> list[str]:
    """Lists the relevant differences between the environments of two benchmarks."""
    a, b = before.environment, after.environment
    return [
        f"{name}: {a.get(name, 'none')} before, {b.get(name, 'none')} after"
        for name in _different(before, after)
    ]


def _different(before: Results, after: Results) -> list[str]:
    a, b = before.environment, after.environment
    names = dict.fromkeys([*a, *b])
    return [x for x in names if x not in _IRRELEVANT and a.get(x) != b.get(x)]


def _loaded(source: str | Path | Results | Sequence[Measurement]) -> Results:
    if isinstance(source, str | Path):
        return Results.load(source)
    return source if isinstance(source, Results) else Results({}, source)


def _keyed(rows: Sequence[Measurement]) -> dict[tuple[Any, ...], Measurement]:
    """Indexes rows by kernel, operation, problem, constants and a count of earlier duplicates."""
    found: dict[tuple[Any, ...], Measurement] = {}
    counts: Counter[tuple[Any, ...]] = Counter()
    for row in rows:
        key = row.kernel, row.operation, row.problem, tuple(sorted(row.constants.items()))
        found[*key, counts[key]] = row
        counts[key] += 1
    return found


def _untimed(old: Measurement, new: Measurement) -> str:
    """Returns the verdict on two rows if one was not timed; "" if both were timed."""
    if old.time and new.time:
        return ""
    if new.passed is False:
        return "WRONG"
    if new.time:
        return "not timed before"
    return "not timed after" if old.time else "not timed either time"


def _compared(old: Measurement, new: Measurement, drift: float, is_unchanged: bool) -> Comparison:
    if not old.time or not new.time:
        return Comparison(old, new, _untimed(old, new))
    factor = old.time / new.time
    noise = hypot(_within(old, new), drift)
    if is_unchanged:
        return Comparison(old, new, UNCHANGED, factor, noise * factor)
    if abs(log(factor)) > _CERTAIN * noise:
        verdict = "FASTER" if factor > 1 else "SLOWER"
    else:
        verdict = "SAME" if _CERTAIN * noise <= TELLING else "UNCLEAR"
    return Comparison(old, new, verdict, factor, noise * factor)


def _drift(unchanged: Sequence[tuple[Measurement, Measurement]]) -> float:
    """Estimates the standard error that device drift between runs adds to every ratio.

    The estimate is the part of the change in the times of unchanged code that noise within the
    runs does not explain. It is widened, because few kernels give a poor estimate.
    """
    timed = [(a, b) for a, b in unchanged if a.time and b.time]
    if not timed:
        return 0.0
    excess = fmean(log((a.time or 1) / (b.time or 1)) ** 2 - _within(a, b) ** 2 for a, b in timed)
    student = _STUDENT[min(len(timed), len(_STUDENT)) - 1]
    return sqrt(max(0.0, excess)) * student / _CERTAIN


def _within(old: Measurement, new: Measurement) -> float:
    """Returns the relative standard error of a ratio of medians, from noise within the runs."""
    return hypot(_error(old), _error(new), FLOOR)


def _error(row: Measurement) -> float:
    """Returns the relative standard error of a row's median."""
    times = row.milliseconds
    error = timing.standard_error(times)
    if len(times) < _FEW:
        return max(error, _UNKNOWN / len(times))
    size = max(_FEW, -(-len(times) // _BLOCKS))
    blocks = [median(times[i : i + size]) for i in range(0, len(times) - size + 1, size)]
    if len(blocks) < _FEW or not row.time:
        return error
    return max(error, stdev(blocks) / row.time / sqrt(len(blocks)))
