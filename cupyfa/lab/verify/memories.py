"""Calls whose arrays are in two memories: q, k, v on a GPU, score-modifying arrays on the host."""

from typing import Any

import numpy as np

from cupyfa import api
from cupyfa.ladder.operations import Arrays
from cupyfa.planner.plan import Plan
from cupyfa.problem.optional_inputs import DESCALES, OWN_ARRAYS, PADDED, PAGE_TABLE, SCALES, SEEDS
from cupyfa.problem.structured_arrays import wrap
from cupyfa.runtime.backend import Backend

# Problems with these inputs are excluded: attention() does not accept them as arrays, or they are
# also passed as options.
_OTHERS = {*SEEDS, PAGE_TABLE, *SCALES}


def may_be_mixed(plan: Plan) -> bool:
    """Returns whether a call on the plan's problem accepts arrays in two memories."""
    p, read = plan.problem, {x.name for x in plan.problem.modifiers.arrays}
    is_plain = plan.kernel.is_plain and plan.kernel.operation == "forward"
    is_dense = not (p.pages or p.block_mask or p.sequences is not None)
    return is_plain and is_dense and bool(read) and not read & _OTHERS


def mixed_results(backend: Backend, plan: Plan, inputs: Arrays) -> dict[str, np.ndarray]:
    """Runs a prepared call with q, k, v on the backend and all other arrays in NumPy."""
    p = plan.problem
    q, k, v = (backend.upload(np.ascontiguousarray(inputs[name])) for name in "QKV")
    own = {x for text in (*p.modifiers.score, *p.modifiers.mask) for x in text.captured}
    found: dict[str, Any] = {x.name: inputs[x.input] for x in p.modifiers.arrays}
    named = {name: found.pop(name) for name in OWN_ARRAYS if name in found}
    arrays = wrap(q, k, v, found)
    captured = {x: y for x, y in found.items() if x not in (*PADDED, *DESCALES)} | {
        x: y for x, y in p.modifiers.numbers.items() if x in own and x != "softcap"
    }
    given = named | ({"captured": captured} if captured else {})
    how: dict[str, Any] = {"kernel": plan.kernel, "backend": backend, "return_lse": True}
    how |= {**p.options.keywords(), "out": p.options.out_dtype, "tiles": dict(plan.constants)}
    if "mask" in given and "mask" in how:
        how["mask"] = given["mask"], how["mask"]
    prepared = api.compile(*arrays, **{**given, **how})
    out, lse = prepared(*arrays, **given)
    results = {"O": backend.download(out), "lse": backend.download(lse)}
    return {name: results[name] for name in plan.outputs}
