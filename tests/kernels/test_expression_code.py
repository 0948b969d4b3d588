"""User expressions as C++: values and slopes in the simulator, and compilation by NVRTC."""

import time

import numpy as np
import pytest
from helpers.device_code import INCLUDE, source

from cupyfa import Problem
from cupyfa.lab.analysis.resources import compile_launch, limits_of
from cupyfa.lab.bench.sweeps import usual_dtype
from cupyfa.ladder.lookup import record_named
from cupyfa.planner import choose_kernel
from cupyfa.score.expressions import TRACEABLE, Captured, Expression, cpp_name
from cupyfa.score.functions import FUNCTIONS

TEXTS = [
    "score * abs(position - key) / -3 - slope[head] * (2 - query) * (key - query)",
    "cap * tanh(score / cap) + 0.1 * exp2(score) - -score",
    "where(score > 1 or not score < -1, score * exp(score), min(score, 0.25) + max(1, 3 * score))",
    "score if doc[query] == doc[key] and 0 <= position - key < 3 else 2 * score - 1e3",
    "(query - 5) // 3 * score + (query - key) % -3 + (key + 7) // 4 + (key - 3) % 8 + key // query",
    "sigmoid(score) * softplus(-2 * score) + log1p(expm1(score) + 1) + erf(score) * score",
    "score * erfc(score - 1)",
    "sin(20 * score) + cos(score) * sin(1000 * key) + floor(score) + abs(score) ** 2",
    "sqrt(abs(score)) * rsqrt(1 + score ** 2) + log(2 + score ** 2) / queries",
    "-(table[head, key] + key) * score + table[query // 2, abs(key - 3)] * -query",
    "score + ((query * 100000 * keys + key) * 65536) % 1021 + (query + 1) ** 2 - doc[key] * batch",
    "where(see[key], where(key < 3, key, keys - key), -1) + min(key, query) * max(2, key)",
    "score + where(see[query] & ~(see[key] | False) & (score != 2) & (key >= 1), 1, 3.5)",
]
SCALARS = {"position": 6, "head": 1, "batch": 2, "queries": 7, "keys": 9, "cap": 1.5}
ARRAYS = {
    "slope": np.array([0.5, 0.25], np.float32),
    "doc": np.array([0, 0, 1, 1, 2, 2, 2]),
    "table": np.arange(28, dtype=np.float16).reshape(4, 7) / 8,
    "see": np.array([1, 0, 1, 1, 0, 0, 1], bool),
}
KINDS = {name: Captured(name, "float", x.ndim) for name, x in ARRAYS.items()} | {
    "doc": Captured("doc", "int", 1),
    "see": Captured("see", "bool", 1),
    "cap": Captured("cap", "float", 0),
}
TYPES = {"slope": "float", "doc": "long long", "table": "__half", "see": "bool"}
SCORES, KEYS, ROWS = np.linspace(-1.97, 2.5, 11), 7, 2  # no score is at a kink of an expression


def head_of(texts, real, bounded=lambda *place: False):
    """Returns the source that a planner prepends to a kernel, with one function per expression."""
    lines = [
        f"using real = {real};",
        "#include <cuda_fp16.h>",
        "constexpr bool has_score_mod = true, has_mask_mod = false, has_sink = false;",
        "constexpr bool has_dropout = false, has_row_max = false, has_key_tiles = false;",
        "#include <attention/expression.cuh>",
    ]
    lines += [
        "struct Mods {",
        *(f"  Array<{TYPES[x]}, {ARRAYS[x].ndim}> {cpp_name(x)};" for x in ARRAYS),
    ]
    lines += [f"  real {cpp_name('cap')};", "};"]
    for i, text in enumerate(texts):
        lines += [
            "template <class T>",
            f"__device__ __forceinline__ T modified_{i}(T score, const Mods& mods, Index batch,",
            "    Index head, Index query, Index key, Index position, int queries, int keys) {",
            *(f"  const auto {cpp_name(x)} = mods.{cpp_name(x)};" for x in ARRAYS),
            f"  const auto {cpp_name('cap')} = Real(mods.{cpp_name('cap')});",
            f"  return {Expression.of('score_mod', text).cpp(bounded, KINDS)};",
            "}",
        ]
    return "\n".join(lines)


def body_of(texts, threads=11):
    """Returns code that stores values and slopes of all expressions, with one score per thread."""
    calls = "".join(
        f"  at[{i}] = modified_{i}(score, mods, Index(2), Index(1), query, key, position, M, N);\n"
        for i in range(len(texts))
    )
    return f"""
Mods mods = {{}};
mods.slope_ = {{B, {{1}}, {{2}}}};
mods.doc_ = {{reinterpret_cast<const long long*>(C), {{1}}, {{7}}}};
mods.table_ = {{D, {{7, 1}}, {{4, 7}}}};
mods.see_ = {{reinterpret_cast<const bool*>(E), {{1}}, {{7}}}};
mods.cap_ = 1.5;
const int M = 7, N = 9;
for (int pair = 0; pair < {ROWS * KEYS}; ++pair) {{
  const Index query(1, pair / {KEYS} * 3), key(2, pair % {KEYS} - 2), position = query + (N - M);
  Dual<1> score(F[threadIdx.x]), at[{len(texts)}];
  score.slope[0] = 1;
{calls}
  for (int i = 0; i < {len(texts)}; ++i) {{
    A[((i * {ROWS * KEYS} + pair) * {threads} + threadIdx.x) * 2] = at[i].value;
    A[((i * {ROWS * KEYS} + pair) * {threads} + threadIdx.x) * 2 + 1] = at[i].slope[0];
  }}
}}
"""


def in_python(text, score, query, key):
    """Evaluates an expression in Python for one pair."""
    names = {**TRACEABLE, **ARRAYS, **SCALARS, "abs": abs, "min": min, "max": max}
    names |= {"score": score, "query": query, "key": key, "position": query + 2}
    names["doc"] = ARRAYS["doc"].tolist()
    names["table"] = ARRAYS["table"].astype(float)
    return float(eval(text, {"__builtins__": {}}, names))


def wanted(text):
    """Yields values, and slopes by central differences, for all pairs and scores."""
    step = 1e-5
    for query in (1, 4):
        for key in range(KEYS):
            for x in SCORES:
                high, low = (in_python(text, x + y, query, key) for y in (step, -step))
                yield in_python(text, x, query, key), (high - low) / (2 * step)


ONES = np.ones(2, "f4"), np.ones(7, np.uint64), np.ones(28, np.float16), np.ones(7, np.uint8)
DTYPE = {"float": np.float32, "double": np.float64}


def evaluated(run, texts, scores, real, arrays=ONES):
    """Returns a kernel's values and slopes, each [expression, pair, score]."""
    A = np.zeros((len(texts), ROWS * KEYS, len(scores), 2), DTYPE[real])
    body, head = body_of(texts, len(scores)), head_of(texts, real)
    run(body, A, *arrays, np.array(scores, DTYPE[real]), head=head, threads=len(scores))
    return A[..., 0], A[..., 1]


@pytest.mark.parametrize("real, close", [("float", 2e-5), ("double", 1e-12)])
def test_values_and_slopes_are_those_of_python(run_code, real, close):
    arrays = (ARRAYS["slope"], ARRAYS["doc"].view(np.uint64), ARRAYS["table"])
    arrays += (ARRAYS["see"].view(np.uint8),)
    for text, *found in zip(TEXTS, *evaluated(run_code, TEXTS, SCORES, real, arrays)):
        values, slopes = np.array(list(wanted(text))).T
        np.testing.assert_allclose(found[0].ravel(), values, close, close, err_msg=text)
        np.testing.assert_allclose(found[1].ravel(), slopes, 1e-4, 1e-4, err_msg=text)


# Scores of 0, NaN and infinity, and scores at which exponentials overflow. At a score of 1, the
# branch that ``where`` does not select has an infinite slope.
CORNERS = [0.0, 1.0, 88.0, 3e38, np.inf, np.nan, -1.0, -88.0, -3e38, -np.inf, -0.0]
AT_CORNERS = [
    *(f"{name}(score)" for name in ("exp", "exp2", "tanh", "sigmoid", "softplus", "floor", "erf")),
    "erfc(score)",
    *(f"{name}(abs(score))" for name in ("sqrt", "rsqrt", "log", "log1p", "expm1")),
    *("max(score, 1)", "max(1, score)", "min(score, 1)", "min(1, score)", "score / 3"),
    *("where(score > 1, sqrt(score - 1), 2)", "sin(score) * 0", "abs(score)"),
]
SLOPES = {
    "tanh(score)": [1, 1 - np.tanh(1) ** 2, 0, 0, 0, np.nan, 1 - np.tanh(1) ** 2, 0, 0, 0, 1],
    "max(score, 1)": [0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0],
    "where(score > 1, sqrt(score - 1), 2)": [0, 0, 87**-0.5 / 2, 0, 0, 0, 0, 0, 0, 0, 0],
    "abs(score)": [0, 1, 1, 1, 1, 0, -1, -1, -1, -1, 0],
}


@pytest.mark.parametrize("real, close", [("float", 2e-5), ("double", 1e-12)])
def test_corners_are_those_of_numpy(run_code, real, close):
    scores = np.array(CORNERS, DTYPE[real])
    for text, *found in zip(AT_CORNERS, *evaluated(run_code, AT_CORNERS, scores, real)):
        values, slopes = (x[0] for x in found)
        with np.errstate(all="ignore"):
            want = eval(text, {**TRACEABLE, "score": scores.astype(float)}).astype(DTYPE[real])
        np.testing.assert_allclose(values, want, close, 1e-37, err_msg=text)
        wanted_slopes = SLOPES.get(text, slopes)
        np.testing.assert_allclose(slopes, wanted_slopes, 1e-5, 2e-6, err_msg=text)


# NEAR_0 holds expressions to evaluate at small scores, FAR expressions with small slopes at large
# scores.
NEAR_0 = [
    *(f"{x.name}(score)" for x in FUNCTIONS.values() if x.small_near_0),
    *(
        "exp(score)",
        "erfc(score)",
        "sigmoid(score)",
        "softplus(score)",
        "sqrt(abs(score))",
        "cap * tanh(score / cap)",
    ),
]
STEPS = np.logspace(-7, 0, 22)
SMALL = np.concatenate([STEPS, -0.99 * STEPS])
FAR = ["exp(score)", "sigmoid(score)", "softplus(score)", "tanh(score)", "sigmoid(-score)"]
SLOPES_OF = {  # exact derivatives, by formulas that avoid cancellation
    "tanh(score)": lambda x: 1 / np.cosh(x) ** 2,
    "cap * tanh(score / cap)": lambda x: 1 / np.cosh(x / 1.5) ** 2,
    "sin(score)": np.cos,
    "cos(score)": lambda x: -np.sin(x),
    "erf(score)": lambda x: 2 / np.sqrt(np.pi) * np.exp(-x * x),
    "erfc(score)": lambda x: -2 / np.sqrt(np.pi) * np.exp(-x * x),
    "log1p(score)": lambda x: 1 / (1 + x),
    "expm1(score)": np.exp,
    "exp(score)": np.exp,
    "sigmoid(score)": lambda x: 0.25 / np.cosh(x / 2) ** 2,
    "sigmoid(-score)": lambda x: -0.25 / np.cosh(x / 2) ** 2,
    "softplus(score)": lambda x: np.exp(x) / (1 + np.exp(x)),
    "sqrt(abs(score))": lambda x: np.sign(x) * 0.5 / np.sqrt(np.abs(x)),
}


@pytest.mark.parametrize("texts, scores", [([*NEAR_0, "cos(score)"], SMALL), (FAR, 40 * SMALL)])
@pytest.mark.parametrize("real, close", [("float", 2e-6), ("double", 2e-14)])
def test_errors_are_relative_to_small_results(run_code, texts, scores, real, close):
    """Compares values at small scores only, and slopes at small and at large scores."""
    at = scores.astype(DTYPE[real]).astype(float)
    for text, *found in zip(texts, *evaluated(run_code, texts, scores, real)):
        values, slopes = (x[0] for x in found)
        if texts is not FAR and text in NEAR_0:
            want = eval(text, {**TRACEABLE, "score": at, "cap": 1.5})
            np.testing.assert_allclose(values, want, close, 0, err_msg=text)
        reach = close * (1 + np.abs(at))
        assert (np.abs(slopes / SLOPES_OF[text](at) - 1) <= reach).all(), text


@pytest.mark.parametrize("arch, real", [("75", "float"), ("90a", "float"), ("90a", "double")])
def test_nvrtc_compiles_every_text(arch, real):
    compiler = pytest.importorskip("cupyfa.runtime.cuda.compiler", reason="there is no NVRTC")
    scores = np.zeros(1, DTYPE[real])
    head = head_of(TEXTS, real, bounded=lambda *place: True)
    text = source(body_of(TEXTS), scores, *ONES, scores, head=head)
    binary, log = compiler.compile_text(text, "test.cu", arch, INCLUDE)
    assert binary.startswith(b"\x7fELF")
    assert "warning" not in log


def balanced(term, count):
    """Returns the sum of `count` terms as a balanced tree of parentheses."""
    if count == 1:
        return term
    return f"({balanced(term, count // 2)} + {balanced(term, count - count // 2)})"


SIX_AXES = "t[min(head, 5), batch, min(query, 5), min(key + 7, 5), abs(position) % 9, min(key, 8)]"
# Expressions of the maximum size, and with the maximum number of derivatives.
LARGEST = {
    "functions": ({}, f"score + {balanced('log1p(score)', 230)}"),
    "128 bits": ({"u": "u64[N]"}, f"score + {balanced('u[key] // (u[query] + 1) % 7', 110)}"),
    "readings": ({"t": "f32[9,9,9,9,9,9]"}, f"score + {balanced(SIX_AXES, 40)}"),
    "derivatives": ({"t": "f32[9,9,9,9,9,9]"}, f"score + {balanced(SIX_AXES, 25)}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["wgmma_persistent", "wgmma_columns", "mma_f64"])
@pytest.mark.parametrize("captured, text", LARGEST.values(), ids=LARGEST)
def test_the_largest_texts_compile(kernel, captured, text):
    """Limits compilation to a minute.

    Half of these cases took over ten minutes when expressions were inlined repeatedly.
    """
    pytest.importorskip("cupyfa.runtime.cuda.compiler", reason="there is no NVRTC")
    kernel = record_named(kernel)
    is_gradient = kernel.operation == "backward" and text == LARGEST["derivatives"][1]
    how = {"captured": captured} | ({"wrt": "t"} if is_gradient else {})
    sizes = {"M": 4096, "N": 4096, "d": 64, "dtype": usual_dtype(kernel)}
    p = Problem.of_sizes(**sizes, score_mod=text, **how)
    begin = time.process_time()
    for program in choose_kernel.plan(kernel, p, limits_of("90a")).programs:
        assert compile_launch(program, "90a").cubin
    assert time.process_time() - begin < 60


@pytest.mark.parametrize("sizes", [{"N": 0}, {"M": 0}, {"batch": 0}])
def test_gradients_of_an_expression_without_pairs_compile(sizes):
    """The planner drops the expression then, and NVRTC refuses arrays of size 0."""
    pytest.importorskip("cupyfa.runtime.cuda.compiler", reason="NVRTC is not installed")
    of = {"M": 5, "d": 8, "dtype": "float32", "score_mod": "score + slope[head]", "wrt": "slope"}
    problem = Problem.of_sizes(**of | sizes, captured={"slope": "f32[1]"})
    plan = choose_kernel.plan(record_named("two_pass"), problem, limits_of("90"))
    assert "expression_gradients" in [x.entry for x in plan.launches]
    for program in plan.programs:
        assert compile_launch(program, "90").cubin
