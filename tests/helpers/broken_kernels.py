"""Kernels with faults, defined by (right, wrong) pairs of code; some fail only at certain sizes."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cupyfa.ladder.kernel import Kernel, Launch
from cupyfa.ladder.lookup import record_named
from cupyfa.planner import evaluate, source as sources
from cupyfa.planner.evaluate import source_path
from cupyfa.runtime.choose_backend import backend_named

SCRIPT = """\
from dataclasses import replace
from pathlib import Path

from cupyfa.ladder import LADDER

right = LADDER["softmax"]["softmax_safe"]
mine = replace(right, launches=(replace(right.launches[0], file="mine.cu"),),
               folder=Path(__file__).parent)
"""
BEGIN = "  OnlineSoftmax softmax;\n"
END = "  if (threadIdx.x == 0) *lse.row(batch, head, row) = softmax.lse();\n"
WEIGHT = "scalar(softmax.p("
SHARED = "  __shared__ int first;\n"
FIRST_TO_COME = """\
  if (threadIdx.x == 0) first = -1;
  __syncthreads();
  atomicCAS(&first, -1, int(threadIdx.x));
  __syncthreads();
  const real order = 1 + real(1e-7) * (first % 4);
"""

LAST_COLUMN_DROPPED = (
    ("extent.kv_end(row)", "extent.kv_end(row) - (extent.N % 16 == 3)"),
    ("extent.sees(row, col)", "col < extent.N - (extent.N % 16 == 3)"),
)
BEHIND_THE_LAST_ROW = "blockIdx.x == gridDim.x - 1 && threadIdx.x == 0"
WRITES_OUTSIDE = (
    (END, f"{END}  if (sizes.M % 8 == 5 && {BEHIND_THE_LAST_ROW}) out[extent.N] = scalar(1);\n"),
)
DOES_NOT_COMPILE = ((BEGIN, BEGIN.replace("Online", "Offline")),)
# The endless loop sleeps, which leaves the CPU to other tests.
HANG = """\
  extern int sleep(unsigned) __asm__("usleep");
  while (extent.N % 4 == 3) sleep(1000), *const_cast<const volatile scalar*>(scores);
"""
HANGS = ((BEGIN, BEGIN + HANG),)
DIES = ((BEGIN, f"{BEGIN}  if (extent.N % 4 == 3) __builtin_trap();\n"),)
RACING = """\
  if (sizes.M % 8 == 5) first = threadIdx.x;
  if (sizes.M % 8 == 5 && first < 0) return;
"""
RACE = ((BEGIN, BEGIN + SHARED + RACING),)
DEPENDS_ON_THE_ORDER = (
    (BEGIN, BEGIN + SHARED + FIRST_TO_COME),
    (WEIGHT, WEIGHT.replace("(", "(order * ", 1)),
)


def write(folder, fault=()):
    """Writes softmax_safe with a fault, and its record, to a folder; returns "script.py:name"."""
    text = (sources.KERNELS / "softmax" / "softmax_safe.cu").read_text()
    for right, wrong in fault:
        assert right in text, "the fault must change something"
        text = text.replace(right, wrong)
    (folder / "mine.cu").write_text(text)
    (folder / "script.py").write_text(SCRIPT)
    return f"{folder / 'script.py'}:mine"


@dataclass(frozen=True)
class Fault:
    """A fault from tests/lab/verify/faults.txt, whose first lines explain the fields."""

    kernel: str
    file: str
    what: str
    right: str
    wrong: str
    shows: str
    line: str | None
    sample: int = 0

    def __str__(self) -> str:
        return f"{self.kernel}-{self.what}"

    @property
    def is_of_calls(self) -> bool:
        """Whether calls launch the file in addition to their kernel, so that no record lists it."""
        return self.file == "forward/steps/append_keys.cu" or self.file.startswith("blocks/")


# With this fault, the exact sums in a captured array's gradient use one scale for all elements.
SHARED_SCALE = Fault(
    *("two_pass", "backward/parts/exact_sums.cuh", "all elements share a scale"),
    *("return exponents[element];", "return exponents[0];", "", None),
)


def faults() -> list[Fault]:
    text = (sources.ROOT / "tests/lab/verify/faults.txt").read_text(encoding="utf-8")
    _, *blocks = text.split("\n\n")
    return [_fault(block.splitlines()) for block in blocks]


def _fault(lines: list[str]) -> Fault:
    head, *rest = lines
    where, what = head.split(": ", 1)
    marked = {mark: [x[1:] for x in rest if x[0] == mark] for mark in "-+"}
    right, wrong = ("\n".join(marked[mark]) for mark in "-+")
    named = dict(x.split(": ", 1) for x in rest if x[0] not in marked)
    line, sample = named.get("line"), int(named.get("sample", 0))
    return Fault(*where.split(), what, right, wrong, named["shows"], line, sample)


def _path(fault: Fault) -> Path:
    """Finds the file of a fault; looks for a header in with/ before include/."""
    folders = sources.KERNELS, sources.WITH, sources.INCLUDE
    return next(x / fault.file for x in folders if (x / fault.file).is_file())


def _text(fault: Fault) -> str:
    text = _path(fault).read_text()
    assert text.count(fault.right) == 1, f"{fault.file} has not once: {fault.right}"
    return text.replace(fault.right, fault.wrong)


def put_in_place(folder: Path, fault: Fault, monkeypatch: Any) -> Kernel:
    """Makes calls use a copy of all kernel files in which the fault is inserted.

    This serves faults in files that no record lists. Returns the record of the kernel to call.
    """
    root, path, text = folder / "kernels", _path(fault), _text(fault)
    shutil.copytree(sources.KERNELS, root)
    (root / path.relative_to(sources.KERNELS)).write_text(text)
    for module in (sources, evaluate):
        monkeypatch.setattr(module, "KERNELS", root)
    monkeypatch.setattr(sources, "INCLUDE", root / "include")
    monkeypatch.setattr(sources, "WITH", root / "with")
    monkeypatch.setattr(backend_named("simulator").calls, "launchers", {})
    return record_named(fault.kernel)


def broken(folder: Path, fault: Fault) -> Kernel:
    """Copies the fault's kernel to a folder, inserts the fault, and returns the copy's record."""
    path = _path(fault)
    record = record_named(fault.kernel)
    for launch in record.launches:
        if isinstance(launch, Launch):
            source = source_path(record, launch)
            (folder / source.name).write_text((sources.KERNELS / source).read_text())
    if path.is_relative_to(sources.WITH):  # all launches then include headers from the folder
        shutil.copytree(sources.WITH, folder, dirs_exist_ok=True)
    to = folder / (path.name if path.suffix == ".cu" else fault.file)
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(_text(fault))
    launches = [replace(x, file=None) if isinstance(x, Launch) else x for x in record.launches]
    return replace(record, launches=tuple(launches), folder=folder)


def changed(folder: Path, kernel: str, right: str, wrong: str, file: str | None = None) -> Kernel:
    """Returns a kernel with code replaced in its .cu file, or in the header ``file``."""
    file = file or f"{record_named(kernel).operation}/{kernel}.cu"
    return broken(folder, Fault(kernel, file, "", right, wrong, "", None))
