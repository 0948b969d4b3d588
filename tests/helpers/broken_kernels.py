"""softmax_safe with faults that appear at some sizes: pairs of a text and its replacement."""

from cupyfa.planner import source as sources

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
# It sleeps, so that other tests have the CPU.
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
    """Writes the kernel with a fault, and its record, to a folder; returns "script.py:name"."""
    text = (sources.KERNELS / "softmax" / "softmax_safe.cu").read_text()
    for right, wrong in fault:
        assert right in text, "the fault must change something"
        text = text.replace(right, wrong)
    (folder / "mine.cu").write_text(text)
    (folder / "script.py").write_text(SCRIPT)
    return f"{folder / 'script.py'}:mine"
