"""Reference and error bounds for merging attention over n parts of the keys, and its gradients.

A merged row is a softmax whose scores are the lse of the parts and whose values are the outputs of
the parts. There are few parts, so the bounds cover the worst case rather than a random walk. eps is
the spacing at 1 of the accumulation type, m the largest lse, P_i = exp(lse_i - lse), and
x_i = lse_i - m.

**Merging.** The difference x_i is rounded, and its exponential has an error of two units in the
last place:

    e_i = eps * (|x_i| + 2)          relative error of each weight
    e   = sum(P_i * e_i)             relative error of the sum of weights

    |out - reference| <=  sum(P_i * |out_i| * (e_i + e + eps * (n + 1)))  +  floor
    |lse - reference| <=  e + eps * (n + 2 * log(n) + |lse|)
    floor = tiny * (n + 2 + sum(|out_i|))

n additions of weights and n additions of outputs round by half an eps each. The bounds leave room
for errors of the reference, and for sums that one launch passes to the next. `floor` allows
flushing subnormal numbers to zero. Results are rounded like other outputs and gradients. A part
with lse = -inf contributes nothing; if this applies to all parts, out is exactly 0 and lse is -inf.

**Gradients.** out and lse are inputs and count as exact. D_i = sum(dout * (out_i - out)) + dlse:

    p_i = exp(eps * (|lse_i - lse| + 2)) - 1                               error of P_i, relative
    h_i = eps * (sqrt(dv + 3) * sum(|dout| * |out_i - out|) + |dlse|)      error of D_i

    |dout_i - reference| <=  P_i * |dout| * (p_i + eps)  +  tiny * (|dout| + 1)
    |dlse_i - reference| <=  P_i * (p_i * |D_i| + (1 + p_i) * (h_i + eps * |D_i|))
                             + tiny * (dv + 2 + |D_i|)

Where an infinite number has a weight below `tiny`, any result passes, because a kernel may flush
the weight to 0.
"""

import numpy as np

from cupyfa.numerics.tolerance import Arithmetic, Array, Expected, add_rounding_of_results, finite


@np.errstate(all="ignore")
def expected_merge(outs: Array, lses: Array, *, dtype: str) -> dict[str, Expected]:
    """Merges outs [n, ..., dv] and lses [n, ...] into "out" [..., dv] and "lse" [...]."""
    kernel = Arithmetic(dtype)
    eps, n = float(kernel.accumulator.eps), len(lses)
    out, lse = outs.astype(np.float64), lses.astype(np.float64)
    counts = ~np.isneginf(lse)
    largest = np.where(counts.any(0), lse.max(0), 0.0)
    weights = np.where(counts, np.exp(lse - largest), 0.0)
    total = weights.sum(0)
    P = np.where(counts, weights / total, 0.0)
    values = np.where(counts[..., None], out, 0.0)
    merged = (P[..., None] * values).sum(0)
    of_all = np.where(counts.any(0), largest + np.log(total), -np.inf)

    e = np.where(counts, eps * (np.abs(finite(lse - largest)) + 2), 0.0)
    size = np.abs(finite(values))
    common = (finite(P) * e).sum(0)
    relative = finite(P) * (e + common + eps * (n + 1))
    bound = (relative[..., None] * size).sum(0) + kernel.tiny * (n + 2 + size.sum(0))
    vanished = ((kernel.tiny > P) & counts)[..., None] & ~np.isfinite(values)
    bound[vanished.any(0)] = np.inf
    add_rounding_of_results(merged, bound, kernel, dtype)
    lse_bound = common + eps * (n + 2 * np.log(n) + np.abs(finite(of_all)))
    bound[~counts.any(0)] = 0.0
    return {"out": Expected(merged, bound), "lse": Expected(of_all, lse_bound)}


@np.errstate(all="ignore")
def expected_gradients(
    outs: Array, lses: Array, out: Array, lse: Array, dout: Array, dlse: Array, *, dtype: str
) -> dict[str, Expected]:
    """Computes the gradients of the parts: "dout" [n, ..., dv] and "dlse" [n, ...].

    out [..., dv] and lse [...] are the merged results, dout and dlse their gradients.
    """
    kernel = Arithmetic(dtype)
    eps, tiny, dv = float(kernel.accumulator.eps), kernel.tiny, out.shape[-1]
    outs, lses, out, lse, dout, dlse = (
        x.astype(np.float64) for x in (outs, lses, out, lse, dout, dlse)
    )
    counts = ~np.isneginf(lses)
    P = np.where(counts, np.exp(lses - lse), 0.0)
    apart = outs - out
    D = (dout * apart).sum(-1) + dlse
    of_out = np.where(counts[..., None], P[..., None] * dout, 0.0)
    of_lse = np.where(counts, P * D, 0.0)

    p = np.expm1(eps * (np.abs(finite(lses - lse)) + 2))
    size = np.abs(finite(D))
    h = eps * (np.sqrt(dv + 3) * np.abs(finite(dout * apart)).sum(-1) + np.abs(finite(dlse)))
    gradient = np.abs(finite(dout))
    weight = finite(P)
    bound = (weight * (p + eps))[..., None] * gradient + tiny * (gradient + 1)
    lse_bound = weight * (p * size + (1 + p) * (h + eps * size)) + tiny * (dv + 2 + size)
    vanished = (tiny > P) & counts
    bound[vanished[..., None] & ~np.isfinite(dout)] = np.inf
    lse_bound[vanished & ~np.isfinite(D)] = np.inf
    add_rounding_of_results(of_out, bound, kernel, dtype)
    add_rounding_of_results(of_lse, lse_bound, kernel, kernel.accumulator.dtype.name)
    bound[~counts], lse_bound[~counts] = 0.0, 0.0
    return {"dout": Expected(of_out, bound), "dlse": Expected(of_lse, lse_bound)}
