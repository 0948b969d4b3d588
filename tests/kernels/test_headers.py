"""Headers receive sizes as template parameters; only .cu files read the host's constants."""

import re

import pytest
from helpers.problems import arch_of

import cupyfa
from cupyfa.lab.analysis.resources import limits_of, problem_to_compile
from cupyfa.planner import choose_kernel as planning
from cupyfa.planner.source import INCLUDE, KERNELS, WITH
from cupyfa.problem.options import AttentionOptions

# Host constants that a header may read, besides the types scalar, operand and real.
MAY_READ = {
    "row_max.cuh": {"has_row_max"},
    "finish_rows.cuh": {"has_row_max"},
    "score_context.cuh": {
        "has_score_mod",
        "has_mask_mod",
        "has_sink",
        "has_dropout",
        "has_row_max",
        "has_key_tiles",
    },
    "score_mod.cuh": {
        "has_key_tiles",
        "has_row_tiles",
        "reads_places",
        "unit_slope",
        "has_sink",
        "has_row_max",
        "packed",
        "caps_tiles",
        "approximates_softcap",
        "has_dropout",
    },
    "dropout.cuh": {"unit_slope"},
    "transposed_softmax.cuh": {"reads_places", "unit_slope", "caps_tiles", "has_dropout"},
    "tangent_rows.cuh": {"moves_q", "moves_k", "unit_slope", "caps_tiles"},
    "tangent_epilogue.cuh": {"moves_q", "moves_k", "moves_v"},
    "gradient_of_lse.cuh": {"has_dlse"},
    "extent.cuh": {"causal", "windowed", "has_mask_mod", "ragged"},
    "batch.cuh": {"ragged", "packed", "windowed", "page_size"},
    "tile_index.cuh": {"packed"},
    "tile_mask.cuh": {"windowed"},
    "sees_distance.cuh": {"causal", "windowed"},
    "row_range.cuh": {"causal", "windowed"},
    "tile_pair.cuh": {"has_row_tiles", "causal", "windowed"},
    "key_boxes.cuh": {"page_size"},
    "key_head.cuh": {"page_size"},
    "seen_keys.cuh": {"windowed"},
    "tensor.cuh": {"packed"},
    "pages.cuh": {"page_size"},
    "kv_dtype.cuh": {"has_e4m3", "page_size"},
    "descales.cuh": {"has_q_descale", "has_k_descale", "has_v_descale"},
    "longest_first.cuh": {"causal", "packed"},
    "kept_tiles.cuh": {"causal"},
    "gradients.cuh": {"has_mask_mod"},
    "tile_of_block.cuh": {"packed", "shares_groups"},
    "ragged_order.cuh": {"causal"},
    "ragged_schedule.cuh": {"causal", "threads"},
    "row_tile_number.cuh": {"packed"},
    "place_of_sums.cuh": {"ragged", "packed"},
    "sum_tile.cuh": {"packed"},
    "score.cuh": {
        "has_key_tiles",
        "has_score_mod",
        "unit_slope",
        "positive_scale",
        "of_products",
        "caps_tiles",
    },
    "dropped_weights.cuh": {"has_dropout"},
    "row_state.cuh": {"has_sink", "has_dropout", "has_score_mod", "of_products"},
    "nonfinite.cuh": {"has_sink", "of_products"},
    "static_schedule.cuh": {"causal", "dv", "has_key_tiles"},
    "schedule.cuh": {"causal", "ragged", "packed"},
    "pack_weights.cuh": {"has_dropout"},
    "split_output.cuh": {"has_mask_mod", "has_sink"},
    "split_softmax.cuh": {"has_score_mod"},
    "split_gradients.cuh": {"has_score_mod", "caps_tiles", "has_dropout", "unit_slope"},
    "store_split_dK_dV.cuh": {"has_score_mod"},
    "cancellation.cuh": {"ragged", "has_sink", "has_dropout"},
    "row_tile_iterator.cuh": {"has_row_tiles"},
    "row_tile_loads.cuh": {"has_row_tiles"},
}
NOT_CODE = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*', re.MULTILINE)
# DECLARED matches a declaration of a name, OF_ANOTHER the prefix of a member of another scope.
DECLARED = (
    r"\b(?:int|bool|unsigned|long|float|auto|class|typename)[\s*&]+{0}\b"
    r"|(?<=[\w>])& {0}\b|\(&{0}\)|,\s*{0}\s*(?:;|=(?!=))"
)
OF_ANOTHER = r"(?:\.|->|::)\s*$"
HEADERS = sorted([*INCLUDE.rglob("*.cuh"), *WITH.rglob("*.cuh"), *KERNELS.glob("*/parts/**/*.cuh")])


def constants_of_the_host():
    for kernel in cupyfa.kernels():
        for d in (64, 256):
            dtype, limits = kernel.dtypes[0], limits_of(arch_of(kernel))
            problem = problem_to_compile(kernel.operation, dtype, d, None, AttentionOptions())
            if planning.can(kernel, problem, limits):
                for launch in planning.plan(kernel, problem, limits).launches:
                    yield from getattr(launch, "constants", ())


HOST = frozenset(constants_of_the_host())


def definitions(text):
    """Yields the functions, structs and constants of a header one by one."""
    depth = start = 0
    for i, char in enumerate(text):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if depth == 0 and char in ";}":
            yield text[start : i + 1]
            start = i + 1


def read_from_outside(code):
    """Yields the host constants that a definition uses without declaring them."""
    for found in re.finditer(rf"\b(?:{'|'.join(sorted(HOST))})\b", code):
        of_another = re.search(OF_ANOTHER, code[: found.start()])
        if not of_another and not re.search(DECLARED.format(found[0]), code):
            yield found[0]


def read_by(text):
    return {
        name for code in definitions(NOT_CODE.sub("", text)) for name in read_from_outside(code)
    }


@pytest.mark.parametrize("path", HEADERS, ids=lambda path: path.name)
def test_a_header_reads_no_constant_of_the_host(path):
    assert read_by(path.read_text()) <= MAY_READ.get(path.name, set())


@pytest.mark.parametrize(
    "text, names",
    [
        ("template <int d> int width_of() { return d; }", set()),
        ("int rows() { return Br; }  // Bc", {"Br"}),
        ("template <int Br> struct Own { int rows[Br]; };\nint rows() { return Br; }", {"Br"}),
        ("int rows(const Tile& tile) { return tile.Br + Tile::Bc; }", set()),
        ("int half() { int all = 2, stages = all; return f(stages, threads); }", {"threads"}),
    ],
)
def test_a_constant_of_the_host_is_found(text, names):
    assert {"d", "dv", "Br", "Bc", "stages", "threads", "shared_bytes", "causal"} <= HOST
    assert read_by(text) == names
