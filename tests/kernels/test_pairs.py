"""Every value of an option paired with every value of each other option."""

import itertools
import random
from dataclasses import replace
from functools import cache

import pytest
from helpers.problems import LIKE_OTHERS, PAIRED, able

from cupyfa import Problem
from cupyfa.arrays import block_mask
from cupyfa.lab import Case
from cupyfa.lab.verify import transforms
from cupyfa.planner import choose_kernel as planning
from cupyfa.problem.optional_inputs import DLSE, Operand
from cupyfa.runtime import guard
from cupyfa.runtime.choose_backend import backend_named

KERNELS = able("places")
OPTIONS = {
    "bias": [None, "1hmn", "f16[b1mn]", "bf16[bh1n]", "f64[11m1]"],
    "score_mod": [
        {},
        {"score_mod": "score + x[head, abs(key - query) // 4]", "captured": {"x": "f16[heads,40]"}},
        {"score_mod": "a * tanh(score / a) - abs(position - key) / 50", "captured": {"a": 4.0}},
        {"score_mod": "score - 9 if n[query] > 1 else max(score, -2)", "captured": {"n": "i64[M]"}},
    ],
    "mask": [None, "11mn", "bh1n"],
    "mask_mod": [
        {},
        {"mask_mod": "doc[query] == doc[key] or key < 2", "captured": {"doc": "u8[M|N]"}},
        {"mask_mod": "seen[batch, key] and position > -9", "captured": {"seen": "bool[batch,N]"}},
    ],
    "causal": [None, "bottom-right", "top-left"],
    "window": [None, (9, 3), (20, None)],
    "scale": [None, -0.4, 0.0],
    "alibi_slopes": [None, "h", "f16[bh]"],
    "sink": [None, "h", "f16[bh]"],
    "softcap": [None, 2.0],
    "dropout": [{}, {"dropout": 0.3, "dropout_seed": 2**40 + 7, "dropout_offset": 5}],
    "block mask": [False, True],
    "dlse": [False, True],
    "wrt": [False, True],
}
PROBLEMS = {
    "heads": [(2, 2), (4, 2)],
    "lengths": [(35, 50), (41, 21), (3, 50)],
    "d": [(9, 9), (64, 64), (33, 17)],
    "layout": ["bhsd", "bshd", "reversed", "unaligned"],
    "dtype": ["float32", "float16", "bfloat16", "float64"],
}
AXES = OPTIONS | PROBLEMS
FEWER = {"bias": range(4), "score_mod": range(3)}  # indices of the values tested by default
# Kernels whose options are also paired with layouts, dtypes and sizes. Each of these kernels passes
# scores to the options in a different way.
DISTINCT = (*PAIRED, "mma_pipelined", "mma_split_kv", "wgmma_persistent", "columns")


def axes_of(kernel, fewer):
    """Returns the indices of the AXES values that a kernel supports."""
    found = {name: range(len(values)) for name, values in AXES.items()}
    found["dtype"] = tuple(i for i in found["dtype"] if kernel.takes(AXES["dtype"][i]))
    if kernel.operation != "backward":
        found |= dict.fromkeys(("dlse", "wrt"), range(1))
    return tuple((found | dict(fewer)).items())


def pairs(chosen, names):
    return set(itertools.combinations(sorted((x, chosen[x]) for x in names), 2))


@cache
def covering(kinds, names, before=None):
    """Returns a small set of choices that contains every pair of values of the named axes.

    Pairs in ``covering(*before)`` are omitted.
    """
    axes, pick, left, chosen = dict(kinds), random.Random(0), set(), []
    for a, b in itertools.combinations(sorted(names), 2):
        left |= {((a, x), (b, y)) for x in axes[a] for y in axes[b]}
    for one in covering(*before) if before else ():
        left -= pairs(one, names)
    while left:
        tried = [one for _ in range(3) if has_mask(one := built(axes, left, pick))]
        if tried:
            chosen.append(max(tried, key=lambda one: len(pairs(one, names) & left)))
            left -= pairs(chosen[-1], names)
    return chosen


def built(axes, left, pick):
    """Builds a choice from an uncovered pair and the values that cover the most other pairs."""
    one = dict(pick.choice(sorted(left)))

    def gain(name, value):
        new = name, value
        return sum((min(new, x), max(new, x)) in left for x in one.items()), pick.random()

    for name in pick.sample(sorted(axes.keys() - one), len(axes) - len(one)):
        one[name] = max(axes[name], key=lambda value: gain(name, value))
    return one


def has_mask(chosen):
    """Returns whether a choice with a block mask has a mask to build it from."""
    return not chosen["block mask"] or chosen["mask"] or chosen["mask_mod"]


def of_options(kernel):
    """Returns arguments of ``covering`` for a kernel's options, with values in FEWER."""
    return axes_of(kernel, FEWER), tuple(OPTIONS)


def of_all(kernel):
    """Returns choices that cover all pairs of options, or of all axes for kernels in DISTINCT.

    For kernels in PAIRED, pairs that test_options_in_every_family covers are omitted. Tests run
    about a fifth of these choices, but only an eighth for kernels in LIKE_OTHERS.
    """
    names = AXES if kernel.name in DISTINCT else OPTIONS
    before = of_options(kernel) if kernel.name in PAIRED else None
    return covering(axes_of(kernel, ()), tuple(names), before)


def parameters(kernels, choices, marks):
    """Returns test parameters (kernel, choice); the n-th choice gets marks(kernel, n)."""
    return [
        pytest.param(kernel, at, id=f"{kernel.name}-{i}", marks=marks(kernel, i))
        for kernel in kernels
        for i, at in enumerate(choices(kernel))
    ]


def slow_but_one_in_three(kernel, i):
    """Marks two of three choices as slow, and exempts all from sampling, which could lose pairs."""
    return [pytest.mark.sampled(1), *[pytest.mark.slow] * (i % 3 > 0)]


def one_in_a_few(kernel, i):
    alike = LIKE_OTHERS - {*DISTINCT}
    return [pytest.mark.slow, pytest.mark.sampled(8 if kernel.name in alike else 5, "kernel")]


def case_of(kernel, at):
    value = {name: AXES[name][i] for name, i in at.items()}
    texts = value["score_mod"], value["mask_mod"], value["dropout"]
    given = {x: y for text in texts for x, y in text.items()}
    given["captured"] = {x: y for text in texts for x, y in text.get("captured", {}).items()}
    for name in ("bias", "mask", "causal", "window", "scale", "alibi_slopes", "sink", "softcap"):
        given |= {name: value[name]} if value[name] is not None else {}
    (M, N), (d, dv), (heads, kv_heads) = value["lengths"], value["d"], value["heads"]
    sizes = {"batch": 2, "heads": heads, "kv_heads": kv_heads, "M": M, "N": N, "d": d}
    sizes |= {"dv": dv} if "dv" in kernel.features else {}
    p = Problem.of_sizes(**sizes, dtype=value["dtype"], **given).in_blocks(value["block mask"])
    if value["dlse"]:
        lse = Operand(DLSE, str(p.dtype.sums), (2, heads, M))
        p = replace(p, operands=(*p.operands, lse))
    if value["wrt"]:
        p = transforms.differentiate(p, [x.name for x in p.operands if x.is_differentiable])
    return Case(kernel.operation, p, 5, layout=value["layout"])


def check(backend, kernel, at):
    """Runs a case between guard zones; raises on a wrong result or a stray write."""
    case = case_of(kernel, at)
    plan = planning.plan(kernel, case.problem, backend.limits)
    guard.checked(backend, plan, block_mask.readable(backend, plan, case.inputs()), {})


PAIRED_KERNELS = [kernel for kernel in KERNELS if kernel.name in PAIRED]
OF_OPTIONS = parameters(PAIRED_KERNELS, lambda x: covering(*of_options(x)), slow_but_one_in_three)


@pytest.mark.parametrize("kernel, at", OF_OPTIONS)
def test_options_in_every_family(backend, kernel, at):
    check(backend, kernel, at)


@pytest.mark.parametrize("kernel, at", parameters(KERNELS, of_all, one_in_a_few))
def test_every_kernel(kernel, at):
    check(backend_named("simulator"), kernel, at)
