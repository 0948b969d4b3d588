"""Tools for kernel development: checks, benchmarks, tuning, analysis, reports, command line."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cupyfa.lab.analysis.diagnosis import doctor
    from cupyfa.lab.analysis.roofline_model import roofline
    from cupyfa.lab.bench.comparison import compare
    from cupyfa.lab.bench.results import Measurement
    from cupyfa.lab.bench.trial import accuracy
    from cupyfa.lab.bench.tuning import tune
    from cupyfa.lab.report.plots import draw_blocks
    from cupyfa.lab.verify.case import Case
    from cupyfa.lab.verify.checker import replay
    from cupyfa.numerics.tolerance import Expected

# Imported on first use, since importing every module would delay each command.
_MODULES = {
    "Case": "lab.verify.case",
    "Expected": "numerics.tolerance",
    "Measurement": "lab.bench.results",
    "accuracy": "lab.bench.trial",
    "compare": "lab.bench.comparison",
    "doctor": "lab.analysis.diagnosis",
    "draw_blocks": "lab.report.plots",
    "replay": "lab.verify.checker",
    "roofline": "lab.analysis.roofline_model",
    "tune": "lab.bench.tuning",
}

__all__ = [
    "Case",
    "Expected",
    "Measurement",
    "accuracy",
    "compare",
    "doctor",
    "draw_blocks",
    "replay",
    "roofline",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"cupyfa.{_MODULES[name]}"), name)
