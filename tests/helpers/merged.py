"""Error bounds of causal attention, computed at once or merged over ranges of keys."""

import numpy as np

from cupyfa.ladder.operations import OPERATIONS
from cupyfa.numerics import merge_bounds
from cupyfa.numerics.tolerance import Expected
from cupyfa.problem import optional_inputs
from cupyfa.problem.problem import Problem, can_give


@np.errstate(invalid="ignore")
def merged(parts, whole, dtype):
    """Returns the merged "O" and "lse" with bounds, from the bounds of the parts and of the whole.

    A part's error in O reaches the result multiplied by the part's weight. Errors of at most b in
    each lse scale weights by up to exp(2 b), which moves the result by up to exp(2 b) - 1 times
    its distance from the parts.
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
    own = merge_bounds.expected_merge(largest, np.stack([x.value for x in lses]), dtype=dtype)
    bounds = {
        "O": own["out"].bound + growth * of_outs + (growth - 1) * apart,
        "lse": own["lse"].bound + b,
    }
    return {name: Expected(whole[name].value, x) for name, x in bounds.items()}


def of_parts(arrays, p, rows, keys, fan_in=None):
    """Returns "O" and "lse" with bounds for some rows, merged over ranges of keys.

    arrays: Q, K and V of the problem p, by name. fan_in: number of results merged at a time, which
    are then kept in float32. By default all results are merged at once, in the output's dtype.
    """

    def attention(own, of):
        index = np.s_[:, :, own.start : own.stop]
        part = of.part(p.batch, p.kv_heads, rows, own)
        inputs = {x: arrays[x][index] for x in "KV"}
        inputs["Q"] = arrays["Q"][:, :, rows.start : rows.stop]
        return OPERATIONS["forward"].reference(inputs, part, (None,))[None]

    of_part = p
    if fan_in is not None and can_give("float32", p.dtype):
        of_part = p.with_options(out_dtype="float32")
    parts = [(x, attention(x, of_part)) for x in keys]
    # Ranges of keys that no row attends to are not computed.
    parts = [x for x in parts if not np.isneginf(x[1]["lse"].value).all()] or parts[:1]
    if len(parts) == 1:
        return attention(parts[0][0], p)
    while len(parts) > 1:
        step = fan_in or len(parts)
        groups = [parts[n : n + step] for n in range(0, len(parts), step)]
        dtype = (p if len(groups) == 1 else of_part).out_dtype.name
        parts = []
        for group in groups:
            every = range(min(x.start for x, _ in group), max(x.stop for x, _ in group))
            whole = attention(every, of_part)
            parts.append((every, merged([x for _, x in group], whole, dtype)))
    return parts[0][1]


def expected_causal(q, k, v, **options):
    """Returns O and lse, with bounds, of q [heads, M, d], k and v [kv_heads, keys, columns]."""
    q, k, v = q[None], k[None], v[None]
    read = {x: options.pop(x) for x in optional_inputs.OWN_ARRAYS if x in options}
    operands = tuple(optional_inputs.of_value(*x) for x in read.items())
    p = Problem.of(q, k, v, causal=True, operands=operands, **options)
    arrays = {"Q": q, "K": k, "V": v, **{f"mods.{name}": x for name, x in read.items()}}
    return OPERATIONS["forward"].reference(arrays, p, [None])[None]
