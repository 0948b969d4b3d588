"""Bounds of attention that is merged from attentions to parts of the keys."""

import numpy as np

from cupyfa.numerics import merging
from cupyfa.numerics.tolerance import Expected


@np.errstate(invalid="ignore")
def merged(parts, whole, dtype):
    """The expected "O" and "lse" of all keys, from those of each part and of the whole.

    Outputs of parts move the result by their weights; lse of parts, each by at most b, move weights
    by a factor of exp(2 b), and the result by that of its distance from the parts.
    """
    outs, lses = ([x[name] for x in parts] for name in ("O", "lse"))
    b = np.max([x.bound for x in lses], axis=0)
    growth = np.exp(2 * b)[..., None]
    counts = [~np.isneginf(x.value) for x in lses]
    weights = [
        np.where(of, np.exp(x.value - whole["lse"].value), 0.0)[..., None]
        for of, x in zip(counts, lses)
    ]
    of_outs = sum(w * x.bound for w, x in zip(weights, outs))
    apart = sum(w * abs(x.value - whole["O"].value) for w, x in zip(weights, outs))
    largest = np.stack([abs(x.value) + x.bound for x in outs])
    own = merging.expected_merge(largest, np.stack([x.value for x in lses]), dtype=dtype)
    bounds = {
        "O": own["out"].bound + growth * of_outs + (growth - 1) * apart,
        "lse": own["lse"].bound + b,
    }
    return {name: Expected(whole[name].value, x) for name, x in bounds.items()}
