"""Comparison of two benchmarks: faster, slower, or the same within the noise."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import exp, hypot, log
from pathlib import Path
from typing import Any

from cupyfa.bench import timing
from cupyfa.bench.results import Measurement, Results

FLOOR = 0.01  # the least difference between two runs of the same code
_CERTAIN = 2  # standard errors
_UNKNOWN = 0.05  # the standard error of a single time
_FEW = 5  # times: their spread underestimates the noise
_IRRELEVANT = ("time", "command", "python", "system")  # differences that are not reported


@dataclass(frozen=True)
class Comparison:
    """One kernel on one problem, measured before and after.

    ``factor`` is the speedup, ``uncertainty`` its standard error. ``verdict`` is SAME, FASTER,
    SLOWER, or the reason that there is none.
    """

    before: Measurement | None
    after: Measurement | None
    verdict: str
    factor: float | None = None
    uncertainty: float | None = None

    @property
    def measurement(self) -> Measurement:
        """The later of the two, or the only one."""
        found = self.after or self.before
        assert found is not None, "a comparison has at least one side"
        return found

    @property
    def change(self) -> str:
        """The factor in words."""
        if self.factor is None or self.uncertainty is None:
            return ""
        factor, error = self.factor, self.uncertainty
        if self.verdict == "SLOWER":
            factor, error = 1 / factor, error / factor**2
        word = "" if self.verdict == "SAME" else f" {self.verdict.lower()}"
        return f"{factor:.2f} ± {error:.2f} ×{word}"

    @property
    def certain_slowdown(self) -> float:
        """The fraction by which it is slower beyond the noise; 0 if it may not be slower."""
        if self.factor is None or self.uncertainty is None:
            return 0.0
        noise = _CERTAIN * self.uncertainty / self.factor
        return max(0.0, exp(-log(self.factor) - noise) - 1)

    def row(self) -> dict[str, Any]:
        """One row of a table."""
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

    Rows of the same kernel, problem and constants are compared by their medians, in order if there
    are several. They are the SAME if they differ by less than two standard errors, which follow
    from the spread of the rounds and are at least one percent. Rows of only one side come last.

    Raises OSError if a file cannot be read, ValueError if it holds something else.
    """
    olds, news = _keyed(before), _keyed(after)
    both = [_compared(olds[key], news[key]) for key in olds if key in news]
    gone = [Comparison(olds[key], None, "only before") for key in olds if key not in news]
    return both + gone + [Comparison(None, news[x], "only after") for x in news if x not in olds]


def differences(before: Results, after: Results) -> list[str]:
    """Relevant differences between the environments of two benchmarks."""
    a, b = before.environment, after.environment
    return [
        f"{name}: {a.get(name, 'none')} before, {b.get(name, 'none')} after"
        for name in dict.fromkeys([*a, *b])
        if name not in _IRRELEVANT and a.get(name) != b.get(name)
    ]


def _keyed(
    source: str | Path | Results | Sequence[Measurement],
) -> dict[tuple[Any, ...], Measurement]:
    """The rows by kernel, operation, problem and constants, and by their number among equals."""
    loaded = Results.load(source) if isinstance(source, str | Path) else source
    found: dict[tuple[Any, ...], Measurement] = {}
    places: Counter[tuple[Any, ...]] = Counter()
    for row in loaded.rows if isinstance(loaded, Results) else loaded:
        key = row.kernel, row.operation, row.problem, tuple(sorted(row.constants.items()))
        found[(*key, places[key])] = row
        places[key] += 1
    return found


def _compared(old: Measurement, new: Measurement) -> Comparison:
    if not old.time or not new.time:
        untimed = "before" if new.time else "after" if old.time else "either time"
        return Comparison(old, new, "WRONG" if new.passed is False else f"not timed {untimed}")
    factor = old.time / new.time
    noise = hypot(_error(old), _error(new), FLOOR)
    changed = "FASTER" if factor > 1 else "SLOWER"
    verdict = changed if abs(log(factor)) > _CERTAIN * noise else "SAME"
    return Comparison(old, new, verdict, factor, noise * factor)


def _error(row: Measurement) -> float:
    """The relative standard error of the median."""
    count = len(row.milliseconds)
    error = timing.standard_error(row.milliseconds)
    return max(error, _UNKNOWN / count) if count < _FEW else error
