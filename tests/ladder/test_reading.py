"""Lines to read: a kernel with its headers, and the step from rung to rung."""

import difflib
import re
from fnmatch import fnmatch
from itertools import chain, product

import cupyfa
from cupyfa import Launch
from cupyfa.ladder import LADDER
from cupyfa.planner import includes
from cupyfa.planner.source import INCLUDE, KERNELS

# Lines that a reader of a step can skip: phase marks for `cupyfa timeline`, and include lines (the
# included headers are counted separately).
UNREAD = re.compile(r"^ *(?:const )?timeline::.*;\n|^#include <.*\n", re.MULTILINE)
# Maximum number of lines to read for a kernel, its file and its headers: (forward, derivatives), by
# the instructions of its products. HELPER_LIMIT is for launches without products.
LIMITS = {"wgmma": (1752, 1738), "mma": (1354, 1709), "threads": (668, 750)}
HELPER_LIMIT = 781
DERIVATIVES = "backward", "tangent"
PLAIN_LINES = 274  # lines of the headers that every kernel includes


def own_files(rung):
    """Returns the files of this rung alone, as folder/name."""
    entries = [x.entry for x in rung.launches if isinstance(x, Launch)]
    names = dict.fromkeys(x for x in entries if x.startswith(rung.name))
    return [f"{rung.operation}/{name}" for name in names]


def steps():
    """Yields (earlier file, file) pairs: the same part of a rung's predecessor and of the rung."""
    for rung in cupyfa.kernels():
        for before in (LADDER[rung.operation][name] for name in rung.after):
            for old, new in product(own_files(before), own_files(rung)):
                same_part = re.findall(r"[^_/]+$", old) == re.findall(r"[^_/]+$", new)
                if same_part or len(own_files(before)) == len(own_files(rung)) == 1:
                    yield old, new


# Steps of the ladder: the second file is read as a change of the first.
STEPS = tuple(steps())
# Steps above the limit: changed lines, lines of newly used headers, and the reason.
LONGER_STEPS = {
    ("forward/mma_async", "forward/mma_tma"): (
        65,
        158,
        "copies by TMA: its boxes, mbarriers, and a ring of stages between them",
    ),
    ("forward/mma_async", "forward/mma_pipelined"): (
        115,
        219,
        "tiles of 16-bit operands and of float32, one buffer or two, heads that share K and V",
    ),
    ("forward/mma_pipelined", "forward/mma_split_kv"): (
        142,
        149,
        "splits of the keys and what they leave; warps with the same rows",
    ),
    ("forward/mma_pipelined", "forward/mma_tf32"): (
        114,
        24,
        "fragments of 32-bit operands, which are rounded as they are loaded",
    ),
    ("forward/wgmma_overlap", "forward/wgmma_persistent"): (
        101,
        115,
        "a schedule of row tiles, with another order for heads of few tiles, and another one for "
        "elements of different lengths",
    ),
    ("backward/wgmma_columns", "backward/wgmma_two_pass_columns"): (
        191,
        0,
        "all of dQ is left out, and with it blocks that go from tile to tile, V in registers and "
        "quarters that masks hide, for which the second pass has no use",
    ),
}
# Rungs that start a family, and why they are read as a whole rather than as a change.
FAMILIES = {
    "minimal": "the first in one kernel: S and P are never in global memory",
    "v3": "the first with WMMA; tiles along d change every loop",
    "fa2_split_kv": "few queries: threads share a row, in another way for each product",
    "mma_split_q": "the first with mma.sync: S, P and O are fragments in registers",
    "mma_fp16x2": "the first with parts of operands: their products, softmax, and what they lack",
    "mma_f64": "the first with products of doubles: its fragments, swizzle and exponential",
    "mma_slices": "any head dimension: slices of d and of keys change every loop",
    "wgmma": "the first with wgmma: a warp loads, warpgroups multiply",
    "wgmma_fp16x2": "parts of operands with wgmma: each tile has sums of its own",
    "wgmma_fp8": "operands of 8 bits: scales of tiles, P in e4m3 by halves, V transposed",
    "wgmma_slices": "any head dimension with wgmma: slices of d and of keys change every loop",
    "wgmma_latent": "all of O in registers: warpgroups hand over P instead of sharing rows out",
    "columns": "the first of gradients in one kernel: P is recomputed from lse",
    "mma_fp16x2_two_pass": "the first gradients of parts: their scales, and what they lack",
    "wgmma_fp16x2_two_pass": "gradients of parts with wgmma: each tile has sums of its own",
    "mma_columns": "the first gradients with mma.sync: warps share out each of five products",
    "wgmma_columns": "the first gradients with wgmma and TMA: transposed scores stay in registers",
    "mma_f64_columns": "the first gradients with products of doubles, whose scores warps share",
    "mma_tangent": "the first tangents with mma.sync: the product rule for fragments of a warp",
    "wgmma_tangent": "the first tangents with wgmma: three products in place of each of two",
    "mma_f64_tangent": "the first tangents with products of doubles: two warps share their rows",
    "mma_slices_backward": "gradients of any head dimension, in three launches through memory",
}
# Kernel families above these limits: number of lines, which may only decrease, and the reason.
LONGER = {
    "forward/*_fp16x2": (1874, "products of parts, loaded ahead; sections of keys; small values"),
    "forward/mma_split_kv": (
        1546,
        "splits of the keys, what they leave; warps with the same rows",
    ),
    "forward/wgmma_fp8": (1947, "scales of tiles; softmax in halves; e4m3 inputs"),
    "backward/wgmma_columns*": (
        2274,
        "all five products; V in registers; a queue of tiles",
    ),
}


def path_of(name):
    return KERNELS / f"{name}.cu"


def headers(name):
    """Maps paths of headers to their texts, for all direct and indirect includes of a .cu file."""
    reached = includes.reached(path_of(name).read_text(), [INCLUDE, KERNELS])
    return {path: content.decode() for path, content in reached.items()}


def lines_to_read(name):
    return sum(text.count("\n") for text in (path_of(name).read_text(), *headers(name).values()))


def limit(name):
    """Returns the maximum number of lines to read for one kernel."""
    included = {path.stem for path in headers(name)}
    if "wgmma" in included:
        kind = "wgmma"
    elif included & {"mma", "mma_f64", "wmma", "store"} or path_of(name).stem.startswith("mma"):
        kind = "mma"
    elif "/steps/" in name:
        return HELPER_LIMIT
    else:
        kind = "threads"
    return LIMITS[kind][name.startswith(DERIVATIVES)]


FILES = (path.relative_to(KERNELS) for path in KERNELS.rglob("*.cu"))
NAMES = sorted(path.with_suffix("").as_posix() for path in FILES)


def test_lines_to_read_for_one_kernel():
    too_long = {}
    for name in NAMES:
        most = next((x for family, (x, _) in LONGER.items() if fnmatch(name, family)), limit(name))
        if (count := lines_to_read(name)) > most:
            too_long[name] = f"{count} lines to read, more than {most}"
    assert not too_long


def test_the_headers_that_every_kernel_includes_are_short():
    reached = includes.reached("#include <attention/score.cuh>", [INCLUDE])
    assert sum(content.count(b"\n") for content in reached.values()) <= PLAIN_LINES


def changed_lines(before, name):
    """Counts the changed lines of the .cu file, and the lines of headers that ``before`` lacks.

    The number of changed lines is the larger of lines added and lines removed.
    """
    old, new = (UNREAD.sub("", path_of(x).read_text()).splitlines() for x in (before, name))
    changes = [x[0] for x in difflib.unified_diff(old, new, n=0) if x[:3] not in ("---", "+++")]
    first_used = [text for path, text in headers(name).items() if path not in headers(before)]
    first_lines = sum(UNREAD.sub("", text).count("\n") for text in first_used)
    return max(changes.count("+"), changes.count("-")), first_lines


def test_steps_of_the_ladder_are_short():
    too_long = {}
    for step in STEPS:
        found, most = changed_lines(*step), LONGER_STEPS.get(step, (100, 80, ""))[:2]
        if any(count > bound for count, bound in zip(found, most)):
            too_long[step] = f"changed lines, lines of new headers: {found}, more than {most}"
    assert not too_long


def test_every_rung_is_a_step_or_begins_a_family():
    begin = {x.name for rungs in LADDER.values() for x in [*rungs.values()][1:] if not x.after}
    assert begin == FAMILIES.keys()


def test_steps_are_of_kernels_that_exist_and_few_are_longer():
    assert set(chain(*STEPS)) <= set(NAMES)
    assert len(LONGER_STEPS) <= 6 and set(LONGER_STEPS) <= set(STEPS)


def test_few_families_are_above_the_limits():
    assert len(LONGER) <= 5
    for family, (most, _) in LONGER.items():
        assert most > max(limit(name) for name in NAMES if fnmatch(name, family))
