"""Planning: values that the records compute, and problems that they reject."""

import ast
import itertools
from dataclasses import replace

import numpy as np
import pytest
from helpers.cli import table
from helpers.problems import able

import cupyfa
from cupyfa import Kernel, Launch, Limits, Problem, TileChoice, Unsupported
from cupyfa.lab.analysis.resources import limits_of
from cupyfa.lab.bench.sweeps import usual_dtype
from cupyfa.ladder import LADDER
from cupyfa.planner import choose_kernel as planning
from cupyfa.planner.evaluate import with_numbers

H100 = Limits("an H100", shared_bytes=232448, arch="90")
TURING = Limits("a T4", shared_bytes=65536, arch="75")
FORWARD = LADDER["forward"]


def plan(name, limits=H100, tiles=None, **sizes):
    return planning.plan(FORWARD[name], Problem.of_sizes(**sizes), limits, **(tiles or {}))


def test_fa2_by_hand():
    p = plan("fa2", tiles={"Br": 32, "Bc": 32}, batch=2, heads=3, M=70, N=45, d=64)
    (launch,) = p.launches
    assert p.constants == {"Br": 32, "Bc": 32}
    assert launch.grid == (3 * 3 * 2, 1, 1)
    assert launch.threads == 32
    assert launch.shared_bytes == 4 * (4 * 32 * 64 + 32 * 32)  # 4 Bc d + Bc Bc floats
    assert p.scratch == {}
    assert p.outputs["O"][0] == (2, 3, 70, 64)
    assert p.outputs["lse"][0] == (2, 3, 70)


def test_minimal_by_hand():
    (launch,) = plan("minimal", batch=2, heads=3, M=70, d=64).launches
    assert launch.grid == (6, 1, 1)
    assert launch.shared_bytes == 4 * (3 * 32 * 64 + 32 * 32)  # 3 Bc d + Bc Br floats


def test_v3_needs_the_same_shared_memory_for_every_head_dimension():
    sizes = {plan("v3", M=64, d=d).launches[0].shared_bytes for d in (1, 64, 1000, 5000)}
    assert len(sizes) == 1
    assert plan("v3", M=64, d=64).launches[0].threads == 128


def test_tiles_shrink_until_shared_memory_fits():
    small, large = (plan("fa2", M=64, d=d).constants for d in (64, 1024))
    assert small["Br"] * small["Bc"] > large["Br"] * large["Bc"]
    assert plan("fa2", limits=TURING, M=64, d=256).launches[0].shared_bytes <= 65536


@pytest.mark.parametrize(
    "name, d",
    [
        (k.name, d)
        for k in FORWARD.values()
        for d in (1, 3, 64, 256, 1024)
        if d <= (k.largest_d or d)
    ],
)
def test_every_rung_plans_every_head_dimension_within_the_limits(name, d):
    for launch in plan(name, M=100, d=d, dtype=usual_dtype(FORWARD[name])).launches:
        assert launch.shared_bytes <= H100.shared_bytes
        assert launch.threads <= H100.threads
        assert all(1 <= size < 2**31 for size in launch.grid)


def test_fixed_tiles_that_do_not_fit_are_refused_with_the_numbers():
    with pytest.raises(Unsupported) as refused:
        plan("fa2", tiles={"Br": 32, "Bc": 32}, M=64, d=1024)
    message = str(refused.value)
    assert f"{4 * (4 * 32 * 1024 + 32 * 32):,}" in message
    assert "232,448" in message
    assert "Br=32, Bc=32, d=1024" in message
    assert "leave Br, Bc to the plan" in message


def test_tiles_depend_on_the_head_dimension():
    kernel = replace(
        FORWARD["fa2"],
        tiles=TileChoice(
            FORWARD["fa2"].choice.usual,
            up_to={64: ({"Br": 16, "Bc": 8},), 96: ({"Br": 8, "Bc": 8},)},
        ),
    )
    for d, dv, Br in ((64, 64, 16), (65, 64, 8), (64, 96, 8), (97, 8, 128)):
        problem = Problem.of_sizes(M=9, d=d, dv=dv)
        assert planning.plan(kernel, problem, H100).constants["Br"] == Br
    with pytest.raises(ValueError, match="tiles for up_to, short, .*; got"):
        replace(kernel, tiles=TileChoice(kernel.choice.usual, up_to={64: ({"Br": 16},)}))


@pytest.mark.parametrize("Br, Bc, sizes", table("planner/few_blocks.txt"))
def test_few_blocks_use_smaller_tiles(Br, Bc, sizes):
    (sizes,) = map(ast.literal_eval, sizes)
    problem = Problem.of_sizes(heads=16, dtype="float16", **{"batch": 1, **sizes})
    here = replace(H100, multiprocessors=144)
    chosen = planning.plan(FORWARD["mma_pipelined"], problem, here).constants
    assert (chosen["Br"], chosen["Bc"]) == (int(Br), int(Bc))
    smaller = replace(H100, multiprocessors=1)
    there = planning.plan(FORWARD["mma_pipelined"], problem, smaller).constants
    assert there["stages"] == 1 or there["Br"] == 128 or problem.M == 1


def test_features_that_a_kernel_lacks_are_refused():
    launch = Launch("plain", args="Q.data", grid=lambda p, c: 1, threads=lambda p, c: 32)
    plain = Kernel(name="plain", adds="", launches=(launch,), arch="80")
    sizes = {"M": 8, "d": 8, "heads": 4}
    problem = Problem.of_sizes(**sizes)
    assert "lse" not in planning.plan(plain, problem, H100).outputs
    for change, lacking in (
        ({"causal": "top-left"}, "does not support causal"),
        ({"kv_heads": 2}, "does not support gqa"),
        ({"dv": 4}, "does not support dv"),
        (
            {"dtype": "float16", "out_dtype": "float32"},
            r"does not support out_dtype \(results in float32\)",
        ),
    ):
        with pytest.raises(Unsupported, match=lacking):
            planning.plan(plain, Problem.of_sizes(**{**sizes, **change}), H100)
    with pytest.raises(Unsupported, match="requires sm_80 for float32, but a T4 is sm_75"):
        planning.plan(plain, problem, TURING)


# Problems that need a feature that some kernels of the ladder lack.
NEEDS = {
    "window": lambda **sizes: Problem.of_sizes(window=(2, None), **sizes),
    "places": lambda **sizes: Problem.of_sizes(bias="1hmn", **sizes),
    "dropout": lambda **sizes: Problem.of_sizes(dropout=0.5, dropout_seed=1, **sizes),
    "sink": lambda **sizes: Problem.of_sizes(sink="h", **sizes),
    "lengths": lambda **sizes: Problem.of_sizes(lengths_k=True, **sizes),
    "ragged": lambda M, **sizes: Problem.of_sizes(lengths="5,6", **sizes),
    "row_max": lambda **sizes: Problem.of_sizes(**sizes).with_row_max(),
}


@pytest.mark.parametrize("feature", NEEDS)
def test_kernels_without_a_feature_name_those_with(feature):
    kernels = (*FORWARD.values(), *LADDER["backward"].values())
    for kernel in kernels[: len(FORWARD)] if feature == "row_max" else kernels:
        if feature in kernel.features:
            continue
        problem = NEEDS[feature](M=16, d=8, dtype=usual_dtype(kernel))
        message = (
            f"^{kernel.name} cannot compute .*: it does not support {feature}.*; kernels that can: "
        )
        with pytest.raises(Unsupported, match=message) as error:
            planning.plan(kernel, problem, H100)
        able = str(error.value).partition("kernels that can: ")[2].split(", ")
        assert all(feature in cupyfa.kernel(name).features for name in able)


A100 = Limits("an A100", shared_bytes=166912, arch="80")
DEVICES = {"120": limits_of("120"), "90": H100, "80": A100, "75": TURING}
ROWS = {"batch": 4, "heads": 16, "N": 1024, "d": 128}
# Sizes of gradients for which "auto" selects the baseline, in several rounds, each of which stores
# S, P, dS and dP of some heads.
STORED = {"batch": 2, "heads": 16, "M": 1024, "N": 1024, "d": 256, "dtype": "float64"}
F16, F64 = {"dtype": "float16"}, {"dtype": "float64"}


def short(length, **sizes):
    """Returns sizes of many heads of a few rows and as many keys."""
    return {"batch": 4096, "heads": 4, "M": length, "N": length, **sizes}


def stored(length, **sizes):
    """Returns sizes of 65,536 float64 rows whose products are large in forward, too."""
    return {**STORED, "batch": 4096 // length, "M": length, "N": length, **sizes}


def tokens(length, **sizes):
    """Returns sizes of 16,384 float16 tokens with 16 heads."""
    usual = {"batch": 16384 // length, "heads": 16, "M": length, "N": length, "d": 128}
    return {**usual, **F16, **sizes}


# The kernel that "auto" selects for these sizes on an architecture; M and d are 64 by default.
CHOSEN = [
    ("fa2_coalesced", "90", {"d": 128}),
    ("fa2_coalesced", "90", {"d": 300, **F64}),
    ("mma_f64", "90", {"d": 1, **F64}),
    ("mma_f64", "90", {"d": 256, **F64}),
    ("wgmma_persistent", "90", {"d": 0, **F16}),
    ("wgmma_persistent", "90", {"d": 256, **F16}),
    ("wgmma_persistent", "90", {"d": 32, "dtype": "bfloat16"}),
    ("mma_pipelined", "120", {"M": 4096, "d": 128, **F16}),
    ("wgmma_slices", "90", {"d": 257, **F16}),
    ("wgmma_slices", "90", {"d": 1024, "dtype": "bfloat16"}),
    ("wgmma_latent", "90", {"M": 4, "N": 1024, "heads": 128, "kv_heads": 1, "d": 512, **F16}),
    ("wgmma_slices", "90", {"M": 4, "N": 1024, "heads": 256, "kv_heads": 1, "d": 512, **F16}),
    ("wgmma_slices", "90", {"M": 4, "N": 1024, "heads": 128, "kv_heads": 1, "d": 640, **F16}),
    # With many heads, even a few float32 rows use tensor cores.
    ("fa2_split_kv", "90", {**ROWS, "M": 16}),
    ("wgmma_fp16x2", "90", {**ROWS, "M": 32}),
    ("wgmma_fp16x2", "90", {**ROWS, "M": 64, "N": 8192}),
    ("fa2_split_kv", "90", {**ROWS, "M": 64, "N": 8192, "heads": 4}),
    ("wgmma_fp16x2", "90", {**ROWS, "M": 512, "heads": 1}),
    # Many queries per key head use tensor cores too.
    ("wgmma_fp16x2", "90", {"M": 257, "precision": "float32"}),
    ("wgmma_fp16x2", "90", {"M": 257}),
    ("fa2_coalesced", "90", {"M": 256}),
    ("wgmma_fp16x2", "90", {"M": 65, "heads": 8, "kv_heads": 2}),
    ("baseline", "90", {"M": 4096, "d": 257}),
    ("fa2_coalesced", "90", {"M": 300, "d": 257}),
    ("mma_fp16x2", "80", {"M": 257}),
    ("fa2_coalesced", "75", {"M": 300}),
    # The `precision` option allows rounding to a lower precision than that of the inputs.
    ("fa2_coalesced", "90", {"precision": "float32"}),
    ("mma_tf32", "90", {"d": 256, "precision": "tf32"}),
    ("mma_pipelined", "75", {"precision": "float16"}),
    ("mma_slices", "90", {"d": 257, "precision": "float16"}),
    # cuBLAS pays off for long rows, if its calls have enough tiles.
    ("mma_f64", "90", stored(512)),
    ("baseline", "90", stored(1024)),
    ("baseline", "90", stored(1024, kv_heads=1)),
    ("mma_f64", "90", stored(1024, kv_heads=4)),
    ("baseline", "90", stored(2048, kv_heads=4)),
    ("baseline", "90", stored(4096, d=192)),
    ("mma_f64", "90", stored(4096, causal=True)),
    ("mma_f64", "90", stored(16384, batch=1, heads=1)),
    ("baseline", "90", stored(512, batch=1, heads=8, kv_heads=2, d=512, causal=True)),
    ("baseline", "90", stored(2048, batch=1, heads=8, d=512, window=(255, 0))),
    ("baseline_backward", "90", STORED),
    ("baseline_backward", "90", {**STORED, "M": 4096, "N": 4096}),
    ("baseline_backward", "90", {**STORED, "M": 8192, "N": 8192}),
    ("mma_f64_columns", "90", {**STORED, "heads": 1, "M": 1000, "N": 200_000}),
    # Rounds may have some of the query heads of a key head.
    ("baseline_backward", "90", {**STORED, "kv_heads": 1, "M": 2048, "N": 2048}),
    ("mma_f64_columns", "90", {**STORED, "d": 128}),
    ("mma_f64_columns", "90", {**STORED, "causal": True}),
    ("mma_f64_columns", "90", {**STORED, "mask": "bhmn"}),
    ("mma_f64_columns", "90", {**STORED, "M": 400, "N": 400}),
    ("baseline_backward", "90", {**STORED, "dtype": "float32", "d": 512}),
    # A baseline computes masked scores, too, which pays off if the others are slow.
    ("baseline_backward", "90", {**STORED, "dtype": "float32", "d": 512, "causal": True}),
    ("rows", "90", {**STORED, "dtype": "float32", "d": 512, "causal": True, "window": (64, 0)}),
    ("mma_slices_backward", "80", {"d": 257, **F16}),
    ("mma_slices_backward", "80", {"d": 4096, "dtype": "bfloat16"}),
    ("mma_columns", "80", {"d": 256, **F16}),
    # Two passes at the same time, with few blocks; without sums of dQ, with few keys.
    ("wgmma_two_pass", "90", tokens(2048, batch=1, heads=4)),
    ("wgmma_columns", "90", tokens(2048, batch=1, heads=8)),
    ("wgmma_two_pass", "90", tokens(2048, batch=1, heads=8, causal=True)),
    ("wgmma_columns", "90", tokens(2048, batch=1, causal=True)),
    ("wgmma_two_pass", "90", tokens(1024, batch=1, d=64, causal=True)),
    ("wgmma_two_pass", "90", tokens(256)),
    ("wgmma_columns", "90", tokens(256, d=72)),
    ("wgmma_two_pass", "90", tokens(256, d=96)),
    # For short heads, keeping dS between two passes takes less time than adding to dQ in memory.
    ("wgmma_two_pass", "90", tokens(1024, causal=True)),
    ("wgmma_columns", "90", tokens(2048, causal=True)),
    ("wgmma_two_pass", "90", tokens(768, kv_heads=4)),
    ("wgmma_columns", "90", tokens(768)),
    ("wgmma_columns", "90", tokens(1024, kv_heads=4)),
    *(("wgmma_columns", "90", tokens(768, batch=x, kv_heads=4)) for x in (3, 7)),  # not kept
    ("wgmma_two_pass", "90", tokens(2048, kv_heads=4, causal=True)),
    ("wgmma_columns", "90", tokens(4096, kv_heads=4, causal=True)),
    ("wgmma_two_pass", "90", tokens(768, batch=2, kv_heads=4, causal=True)),
    ("wgmma_two_pass", "90", tokens(1024, batch=2, kv_heads=4, causal=True)),
    ("wgmma_columns", "90", tokens(1024, batch=1, heads=20, kv_heads=5, causal=True)),  # not kept
    ("wgmma_columns", "90", tokens(8192, batch=1, kv_heads=2, window=(127, 0))),
    ("rows", "80", {"d": 257}),
    # Many short heads.
    ("fa2_coalesced", "90", short(42)),
    ("fa2_coalesced", "90", short(64, d=32)),
    ("wgmma_fp16x2", "90", short(65)),
    ("wgmma_fp16x2", "90", short(42, d=128)),
    ("baseline_backward", "90", short(39)),
    ("baseline_backward", "90", short(42, d=32)),
    ("baseline_backward", "90", short(42, kv_heads=2)),
    ("baseline_backward", "90", short(65)),
    ("mma_fp16x2_two_pass", "90", short(42)),
    ("wgmma_fp16x2_two_pass", "90", short(96)),
    ("mma_fp16x2_two_pass", "80", short(96)),
    ("rows", "90", short(128, batch=4)),
]


def test_mma_tma_fits_the_least_shared_memory_of_devices_with_tma():
    limits = limits_of("120")
    for d, dv in itertools.product((1, 64, 72, 192, 256), repeat=2):
        (launch,) = plan("mma_tma", limits, M=300, d=d, dv=dv, **F16).launches
        assert launch.shared_bytes <= 99 * 1024 and launch.threads <= 256
    refusal = "it requires sm_90 for float16, but this is sm_89; kernels that can: .*mma_pipelined"
    with pytest.raises(Unsupported, match=refusal):
        plan("mma_tma", limits_of("89"), M=300, d=64, **F16)


@pytest.mark.parametrize("kernel, arch, sizes", CHOSEN, ids=str)
def test_auto_takes_the_fastest_kernel_that_rounds_as_little_as_asked(kernel, arch, sizes):
    problem = Problem.of_sizes(**{"M": 64, "d": 64, **sizes})
    operation = cupyfa.kernel(kernel).operation
    chosen = planning.select("auto", operation, problem, DEVICES[arch])
    assert chosen.name == kernel
    rounded = planning.plan(chosen, problem, DEVICES[arch]).rounding
    assert rounded == (problem.precision if problem.precision != "float32" else None)


@pytest.mark.parametrize(
    "sizes, chosen, words",
    [
        ({"dtype": "float64", "d": 512}, "baseline", {}),
        (
            {"dtype": "float64", "d": 512, "causal": True},
            "baseline",
            {"mma_f64": "up to 256"},
        ),
        (
            {"dtype": "float32", "heads": 4, "M": 64, "N": 128},
            "fa2_coalesced",
            {
                "baseline": "its launches take longer than so few scores",
                **dict.fromkeys(("mma_fp16x2", "wgmma_fp16x2"), "other sizes suit it better"),
            },
        ),
        ({"dtype": "float32", "d": 512, "M": 9999}, "baseline", {"mma_fp16x2": "up to 256"}),
        (
            {"dtype": "float32", "d": 512, "batch": 1, "heads": 1, "N": 10**6},
            "fa2_coalesced",
            {"baseline": "scratch would"},
        ),
        (
            {"dtype": "float64", "d": 256, "N": 300},
            "mma_f64",
            {"baseline": "the softmax of a row takes longer than products with few keys"},
        ),
        (
            {"dtype": "float64", "d": 256, "M": 128, "N": 2048},
            "mma_f64",
            {"baseline": "its products have too few tiles"},
        ),
        (
            {"dtype": "float64", "d": 256, "causal": True},
            "mma_f64",
            {"baseline": "it computes masked scores too"},
        ),
        ({"dtype": "float32"}, "wgmma_fp16x2", {}),
        ({"dtype": "float16"}, "wgmma_persistent", {}),
    ],
)
def test_auto_says_which_faster_kernels_it_did_not_take(sizes, chosen, words):
    problem = Problem.of_sizes(**{"batch": 4, "heads": 16, "M": 1024, "d": 64, **sizes})
    kernel = planning.select("auto", "forward", problem, H100)
    found = planning.passed_over(kernel, problem, H100)
    assert kernel.name == chosen
    missing = {name: why for name, why in words.items() if why not in found.get(name, "")}
    assert not missing, str(found)
    assert words or not found


def test_auto_says_why_a_kernel_yields_to_another():
    def found(**sizes):
        problem = Problem.of_sizes(**tokens(256, **sizes))
        chosen = planning.select("auto", "backward", problem, H100)
        return chosen.name, planning.passed_over(chosen, problem, H100).get("wgmma_columns", "")

    name, why = found()
    assert name == "wgmma_two_pass" and "few keys" in why
    name, why = found(batch=1)
    assert name == "wgmma_two_pass" and "too few for the device" in why
    assert found(d=64) == ("wgmma_columns", "")


def test_auto_takes_persistent_blocks_if_no_other_kernel_can():
    def chosen(**how):
        problem = Problem.of_sizes(M=1024, d=64, dtype="float16", heads=64, **how)
        return planning.select("auto", "forward", problem, H100, persistent=False).name

    assert chosen() == "wgmma_overlap"
    assert chosen(precision="float8_e4m3") == "wgmma_fp8"


def test_blocks_of_wgmma_fp8_are_persistent_for_e4m3_inputs_up_to_128_columns():
    def blocks(M=1024, **sizes):
        two = replace(H100, multiprocessors=2)
        return plan("wgmma_fp8", two, {"Br": 128}, M=M, **sizes).launches[-1].grid[0]

    assert blocks(dtype="float8_e4m3fn", d=128) == 2
    assert blocks(dtype="float8_e4m3fn", d=128, dv=256) == 8
    assert blocks(dtype="float8_e4m3fn", d=128, M=8192) == 64
    assert blocks(dtype="float8_e4m3fn", d=128, M=8192, causal=True) == 2
    assert blocks(dtype="bfloat16", precision="float8_e4m3", d=128) == 8


def test_auto_uses_the_nearest_measured_head_dimension():
    def chosen(d):
        return planning.select("auto", "forward", Problem.of_sizes(M=64, d=d), H100).name

    assert chosen(1) == chosen(64) and chosen(1000) == chosen(1024) and chosen(140) == chosen(128)


@pytest.mark.parametrize(
    "operation, precision, arch",
    [
        *itertools.product(("forward", "backward"), (None,), ("75", "80", "90", "120")),
        *itertools.product(("forward",), ("float16",), ("75", "80", "90", "120")),
        *itertools.product(("forward",), ("tf32",), ("80", "90", "120")),
    ],
)
def test_auto_makes_at_most_three_plans_of_a_call(monkeypatch, operation, precision, arch):
    """Counts the plans made to choose a kernel, and the call's own plan."""
    made = []
    first_fit = planning._first_fit
    monkeypatch.setattr(
        planning, "_first_fit", lambda *args: made.append(args[0].name) or first_fit(*args)
    )
    limits = limits_of(arch)
    for dtype, d, M, heads in itertools.product(
        ("float32",) if precision else ("float16", "float32"),
        (1, 64, 200) if precision == "tf32" else (1, 64, 200, 512),
        (1, 2048),
        (1, 32),
    ):
        problem = Problem.of_sizes(
            M=M, N=4096, d=d, heads=heads, dtype=dtype, precision=precision, causal=True
        )
        made.clear()
        kernel = planning.select("auto", operation, problem, limits)
        planning.plan(kernel, problem, limits)
        assert 1 <= len(made) <= 3, (problem, made)


def test_the_public_plan_is_every_number_of_a_launch():
    p = cupyfa.plan(
        kernel="fa2", limits=H100, batch=2, heads=4, kv_heads=2, M=70, N=45, d=64, tiles={"Br": 16}
    )
    assert p.constants["Br"] == 16
    assert p.launches[0].grid == (5 * 4 * 2, 1, 1)
    assert (p.problem.group, p.problem.causal_offset) == (2, 0)


def test_largest_d_is_the_last_that_can_be_planned():
    largest = planning.largest_d(FORWARD["v1"], "float32", H100)
    assert planning.can(FORWARD["v1"], Problem.of_sizes(M=1, d=largest), H100)
    assert not planning.can(FORWARD["v1"], Problem.of_sizes(M=1, d=largest + 1), H100)
    assert planning.largest_d(FORWARD["v3"], "float32", H100) is None
    assert planning.largest_d(FORWARD["v3"], "float64", H100) == 0


def test_one_given_constant_takes_the_first_tile_that_keeps_the_rules():
    assert plan("minimal", tiles={"Bc": 16}, M=10, d=8).constants == {"Br": 16, "Bc": 16}
    assert plan("v3", tiles={"Br": 16}, M=10, d=8).constants["Wr"] == 16
    assert plan("fa2", tiles={"Br": np.int64(16)}, M=10, d=8).constants["Br"] == 16
    with pytest.raises(ValueError, match="Br=64, Bc=.* violate a constraint of minimal: Br <= Bc"):
        plan("minimal", tiles={"Br": 64}, M=10, d=8)


NUMBERS = (
    {"softcap": 30.0, "dropout": 0.1, "dropout_seed": 1, "captured": {"x": 2.0, "n": 3}},
    {"softcap": 0.5, "dropout": 0.7, "dropout_seed": 2**63, "captured": {"x": -1.5, "n": 0}},
)


@pytest.mark.parametrize("d", [64, 200])
def test_other_numbers_of_texts_change_their_struct_alone(d):
    texts = {"score_mod": "score * x", "mask_mod": "key % 5 != n", "bias": "1hmn", "causal": True}
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "M": 300, "N": 500, "d": d}
    tried = 0
    for kernel in able("dropout"):
        given = {**sizes, **texts, "dtype": usual_dtype(kernel)}
        one, other = (Problem.of_sizes(**given, **x) for x in NUMBERS)
        try:
            found, expected = (planning.plan(kernel, x, H100) for x in (one, other))
        except Unsupported:
            continue
        assert repr(found) != repr(expected)
        assert repr(with_numbers(found, expected.problem)) == repr(expected)
        tried += 1
    assert tried > 20


def test_calls_with_other_numbers_are_not_planned_again(backend, monkeypatch):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 2, 20, 8))
    how = {"kernel": "fa2", "backend": backend, "score_mod": "score * x"}
    numbers = [
        {"softcap": c, "dropout": cupyfa.Dropout(p, s), "captured": {"x": x}}
        for c, p, s, x in ((30.0, 0.1, 1, 2.0), (0.5, 0.7, 2**63, -1.5))
    ]
    expected = [cupyfa.compile(q, k, v, **how, **x)(q, k, v) for x in numbers]
    cupyfa.attention(q, k, v, **how, **{**numbers[0], "softcap": 7.0})
    monkeypatch.setattr(planning, "plan", None)
    for given, out in zip(numbers, expected):
        np.testing.assert_array_equal(cupyfa.attention(q, k, v, **how, **given), out)
    with pytest.raises(ValueError, match="softcap is -1"):
        cupyfa.attention(q, k, v, **how, **{**numbers[0], "softcap": -1})
    with pytest.raises(TypeError, match="is not callable"):  # an integer x requires a new plan
        cupyfa.attention(q, k, v, **how, **{**numbers[0], "captured": {"x": 3}})
