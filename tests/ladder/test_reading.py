"""How much a reader has to read: a kernel with its headers, and the step from rung to rung."""

import difflib
import re
from itertools import chain, product

import cupyfa
from cupyfa import Launch
from cupyfa.ladder import LADDER
from cupyfa.planner import includes
from cupyfa.planner.source import INCLUDE, KERNELS

# The headers that every kernel shares count once for all of them, and have a limit of their own.
SHARED = tuple(
    f"attention/{x}.cuh"
    for x in ("score", "extent", "score_context", "bias_tile", "tile_map", "ragged", "pages")
)
SHARED_LINES = 763
# So do those that every header with a barrier or a product includes for `cupyfa timeline`; lines in
# which they are used do nothing that a reader has to follow.
MARKS = ("include/timeline.cuh", "tile/timeline_kinds.cuh")
MARKS_LINES = 58
MARK = re.compile(r"^ *(?:const )?timeline::.*;\n|^#include <timeline.cuh>\n", re.MULTILINE)


def own_files(rung):
    """The files that only this rung has: folder and name."""
    entries = [x.entry for x in rung.launches if isinstance(x, Launch)]
    names = dict.fromkeys(x for x in entries if x.startswith(rung.name))
    return [f"{rung.operation}/{name}" for name in names]


def steps():
    """Files of a rung, each after that of the same part of a rung that it is declared after."""
    for rung in cupyfa.kernels():
        for before in (LADDER[rung.operation][name] for name in rung.after):
            for old, new in product(own_files(before), own_files(rung)):
                same_part = re.findall(r"[^_/]+$", old) == re.findall(r"[^_/]+$", new)
                if same_part or len(own_files(before)) == len(own_files(rung)) == 1:
                    yield old, new


# Steps of the ladder: the second file is read as the first one and a change.
STEPS = tuple(steps())
# Steps that are longer than others: changed lines, lines of headers not used before, and why.
LONGER_STEPS = {
    ("forward/mma_async", "forward/mma_pipelined"): (
        117,
        231,
        "tiles of 16-bit operands and of float32, one buffer or two, heads that share K and V",
    ),
    ("forward/mma_pipelined", "forward/mma_split_kv"): (
        155,
        524,
        "splits of the keys and what they leave; keys in pages, and in e4m3 with scales; warps "
        "with the same rows",
    ),
    ("forward/mma_pipelined", "forward/mma_tf32"): (
        115,
        24,
        "fragments of 32-bit operands, which are rounded as they are loaded",
    ),
    ("forward/wgmma_overlap", "forward/wgmma_fp8"): (
        205,
        239,
        "e4m3 operands with scales of tiles; P is rounded to e4m3 in registers, of wide tiles by "
        "halves; e4m3 inputs, whose rows are repaired with their descales",
    ),
    ("forward/wgmma_overlap", "forward/wgmma_persistent"): (
        102,
        149,
        "a schedule of row tiles, with another order for heads of few tiles, and another one for "
        "elements of different lengths",
    ),
    ("backward/wgmma_columns", "backward/wgmma_two_pass_columns"): (
        194,
        80,
        "all of dQ is left out, and with it blocks that go from tile to tile, V in registers and "
        "quarters that masks hide, for which the second pass has no use",
    ),
}
# Rungs that begin a family, and why they are read as a whole and not as a change of another file.
FAMILIES = {
    "minimal": "the first in one kernel: S and P are never in global memory",
    "v3": "the first with WMMA; tiles along d change every loop",
    "fa2_split_kv": "few queries: threads share a row, in another way for each product",
    "mma_split_q": "the first with mma.sync: S, P and O are fragments in registers",
    "mma_fp16x2": "the first with parts of operands: their products, softmax, and what they lack",
    "mma_f64": "the first with products of doubles: its fragments, swizzle and exponential",
    "mma_slices": "any head dimension: slices of d and of keys change every loop",
    "wgmma": "the first with wgmma and TMA: a warp loads, warpgroups multiply",
    "wgmma_fp16x2": "parts of operands with wgmma: each tile has sums of its own",
    "wgmma_slices": "any head dimension with wgmma: slices of d and of keys change every loop",
    "columns": "the first of gradients in one kernel: P is recomputed from lse",
    "mma_fp16x2_two_pass": "the first gradients of parts: their scales, and what they lack",
    "wgmma_fp16x2_two_pass": "gradients of parts with wgmma: each tile has sums of its own",
    "mma_columns": "the first gradients with mma.sync: warps share out each of five products",
    "wgmma_columns": "the first gradients with wgmma and TMA: transposed scores stay in registers",
    "mma_f64_columns": "the first gradients with products of doubles, whose scores warps share",
    "mma_slices_backward": "gradients of any head dimension, in three launches through memory",
}
# Kernels above the limit of their family: the lines of each, which may only fall, and why.
REPAIR = "the softmax of fragments and the repair of rows, which all on tensor cores share"
COPIES = REPAIR + "; asynchronous copies of rows, aligned or not"
SLICES = COPIES + "; slices of d, dv and keys pass through one ring"
HOPPER = "TMA, mbarriers and wgmma; " + REPAIR
GRADIENTS = "products of tiles in both orders, sums in memory and the repair of gradients"
ONE_TILE_OR_MORE = "blocks with one tile or several; V in registers; quarters that masks hide"
PARTS = "products of parts, whose fragments are loaded ahead; sums of gradients"
TEXTS = "all that texts compute with"
LONGER = {
    "backward/mma_columns": (1105, GRADIENTS),
    "backward/mma_f64_columns": (
        1269,
        GRADIENTS + "; the same of doubles, whose scores warps share",
    ),
    "backward/mma_fp16x2_two_pass_columns": (1190, f"{COPIES}; {PARTS}"),
    "backward/mma_fp16x2_two_pass_columns_wide": (1290, f"{COPIES}; {PARTS}, shared by warps"),
    "backward/mma_fp16x2_two_pass_rows": (1010, f"{COPIES}; {PARTS}"),
    "backward/mma_slices_backward_scores": (947, GRADIENTS),
    "backward/mma_two_pass_columns": (1027, GRADIENTS),
    "backward/mma_two_pass_rows": (946, GRADIENTS),
    "backward/steps/wgmma_bias_gradient": (
        *(1233, f"{HOPPER}; copies of the bias, the repair of sums"),
    ),
    "backward/wgmma_columns": (1778, f"{HOPPER}; {GRADIENTS}; {ONE_TILE_OR_MORE}"),
    "backward/wgmma_columns_wide": (1592, f"{HOPPER}; {GRADIENTS}"),
    "backward/wgmma_fp16x2_two_pass_columns": (1749, f"{HOPPER}; {GRADIENTS}; {PARTS}"),
    "backward/wgmma_fp16x2_two_pass_columns_wide": (1807, f"{HOPPER}; {GRADIENTS}; {PARTS}"),
    "backward/wgmma_fp16x2_two_pass_rows": (1255, f"{HOPPER}; {PARTS}"),
    "backward/wgmma_fp16x2_two_pass_rows_wide": (1335, f"{HOPPER}; {PARTS}"),
    "backward/wgmma_two_pass_columns": (1298, f"{HOPPER}; {GRADIENTS}"),
    "backward/wgmma_two_pass_columns_wide": (1295, f"{HOPPER}; {GRADIENTS}"),
    "backward/steps/expression_gradients": (1250, TEXTS),
    "forward/mma_async": (745, COPIES),
    "forward/mma_f64": (931, COPIES + "; fragments and an exponential of doubles"),
    "forward/mma_f64_wide": (1005, COPIES + "; the same of doubles, whose scores warps share"),
    "forward/mma_fp16x2": (
        1209,
        COPIES + "; products of parts, loaded ahead; sections of keys; small values",
    ),
    "forward/mma_pipelined": (959, COPIES),
    "forward/mma_slices": (995, SLICES),
    "forward/steps/merge_splits": (621, REPAIR),
    "forward/mma_split_kv": (
        1554,
        COPIES + ", in pages too; products of e4m3; results of splits and of warps",
    ),
    "forward/mma_split_q": (681, REPAIR),
    "forward/mma_swizzled": (697, REPAIR),
    "forward/mma_tf32": (905, COPIES + "; products of tf32"),
    "forward/wgmma": (1092, HOPPER),
    "forward/wgmma_fp16x2": (
        1598,
        HOPPER + "; a schedule; parts of operands; sections of keys; small values",
    ),
    "forward/wgmma_fp8": (1535, HOPPER + "; scales of tiles; softmax in halves; e4m3 inputs"),
    "forward/wgmma_overlap": (1158, HOPPER + "; ping-pong order"),
    "forward/wgmma_persistent": (1363, HOPPER + "; a schedule"),
    "forward/wgmma_slices": (1321, HOPPER + "; slices of d, dv and keys"),
}


def path_of(name):
    return KERNELS / f"{name}.cu"


def headers(name):
    """The headers that a kernel includes, directly or not, without those all kernels share."""
    reached = includes.reached(path_of(name).read_text(), [INCLUDE, KERNELS])
    return {
        path: content.decode()
        for path, content in reached.items()
        if not path.as_posix().endswith((*SHARED, *MARKS))
    }


def lines(text):
    return MARK.sub("", text).count("\n")


def limit(name):
    """The most lines that a reader of one kernel is asked to read."""
    folder, *_, kernel = name.split("/")
    is_gradient = folder == "backward"
    if kernel.startswith("wgmma") or kernel == "finish_dQ":
        return 1100 if is_gradient else 900
    if kernel.startswith("mma"):
        return 900 if is_gradient else 600
    return 264 if kernel == "fa2" else 600


FILES = (path.relative_to(KERNELS) for path in KERNELS.rglob("*.cu"))
NAMES = sorted(path.with_suffix("").as_posix() for path in FILES)


def test_lines_to_read_for_one_kernel():
    too_long = {}
    for name in NAMES:
        files = [path_of(name).read_text(), *headers(name).values()]
        most, _ = LONGER.get(name, (limit(name), ""))
        if (count := sum(map(lines, files))) > most:
            too_long[name] = f"{count} lines to read, more than {most}"
    assert not too_long


def changed_lines(before, name):
    """Changed lines of the .cu file, and all lines of headers that ``before`` did not use.

    A changed line counts once: the larger one of the lines added and the lines removed.
    """
    old, new = (MARK.sub("", path_of(x).read_text()).splitlines() for x in (before, name))
    changes = [x[0] for x in difflib.unified_diff(old, new, n=0) if x[:3] not in ("---", "+++")]
    first_used = [text for path, text in headers(name).items() if path not in headers(before)]
    return max(changes.count("+"), changes.count("-")), sum(map(lines, first_used))


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


def test_the_headers_that_all_kernels_share():
    found = [INCLUDE / name for name in SHARED if (INCLUDE / name).exists()]
    assert sum(lines(path.read_text()) for path in found) <= SHARED_LINES
    ours = [path for path in INCLUDE.rglob("*.cuh") if path.as_posix().endswith(MARKS)]
    assert len(ours) == len(MARKS)
    assert sum(path.read_text().count("\n") for path in ours) <= MARKS_LINES


def test_steps_are_of_kernels_that_exist_and_few_are_longer():
    assert set(chain(*STEPS)) <= set(NAMES)
    assert len(LONGER_STEPS) <= 6 and set(LONGER_STEPS) <= set(STEPS)


def test_kernels_that_have_more_lines_to_read_exist_and_are_above_the_limit():
    assert all(most > limit(name) for name, (most, _) in LONGER.items())
    assert set(LONGER) <= set(NAMES)
