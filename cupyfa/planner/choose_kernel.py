"""Selection of a kernel and its constants for a problem and a device."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, product
from math import exp, fsum, log, prod, sqrt
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from cupyfa.errors import Unsupported, described, nearest
from cupyfa.ladder import LADDER
from cupyfa.ladder.kernel import Kernel, Matmul
from cupyfa.ladder.operations import OPERATIONS
from cupyfa.planner import cuda_source
from cupyfa.planner.evaluate import plan_of
from cupyfa.planner.plan import Limits, Plan, Tuned, nearest_d
from cupyfa.problem.optional_inputs import DLSE
from cupyfa.problem.problem import Problem
from cupyfa.score.expressions import Expression

_ALIKE = 0.98  # speeds with a larger ratio count as equal, because measurements are noisy
# "auto" selects a baseline only if it needs at most _MOST_SCRATCH bytes; forward also only if heads
# have more than _SMALL rows, keys or columns. A share of a measured speed below _LEAST_SHARE is a
# guess, and the kernel is not selected.
_MOST_SCRATCH, _SMALL, _LEAST_SHARE = 1 << 30, 64, 1 / 64


def select(
    kernel: str | Kernel,
    operation: str,
    problem: Problem,
    limits: Limits,
    *,
    deterministic: bool = False,
    persistent: bool = True,
) -> Kernel:
    """Returns a kernel's record; ``kernel`` is a name, a record, or "auto".

    With ``deterministic``, raises Unsupported if results may differ from run to run. Without
    ``persistent``, "auto" takes a kernel with persistent blocks only if no other can compute it.
    """
    ladder = LADDER[operation]
    if deterministic:
        ladder = {name: x for name, x in ladder.items() if not x.unordered}
    if isinstance(kernel, str) and kernel == "auto":
        others = [x for x in ladder.values() if persistent or not x.persistent]
        suffice = persistent or any(can(x, problem, limits) for x in others)
        return _fastest(others if suffice else list(ladder.values()), problem, limits)
    record = _given(kernel, operation)
    if deterministic and record.unordered:
        able = [name for name, x in ladder.items() if can(x, problem, limits)]
        raise Unsupported(
            f"{record.name} sums {', '.join(record.unordered)} in arbitrary order, so its results "
            f"differ from run to run; deterministic kernels: {', '.join(able) or 'none'}",
            "the kernel is not deterministic",
        )
    return record


def _given(kernel: str | Kernel, operation: str) -> Kernel:
    if isinstance(kernel, Kernel):
        if kernel.operation != operation:
            raise ValueError(f"kernel {kernel.name} computes {kernel.operation}, not {operation}")
        return kernel
    if not isinstance(kernel, str):
        raise TypeError(f"kernel is {described(kernel)}; pass a kernel's name, a Kernel or 'auto'")
    known = LADDER[operation]
    if ".py:" in kernel:
        raise ValueError(
            f"kernel is the name of a script's record, {kernel!r}; pass the record, "
            f"kernel=cupyfa.kernel({kernel!r})"
        )
    if kernel not in known:
        other = next((x for x in LADDER if kernel in LADDER[x]), None)
        names = f"; the {operation} kernels are {', '.join(known)}, or 'auto'"
        if other == "backward":
            names += f"; for gradients, vjp has backward_kernel={kernel!r}"
        if other == "tangent":
            names += f"; for directional derivatives, jvp has kernel={kernel!r}"
        unknown = f"is unknown{nearest(kernel, known) or names}"
        raise ValueError(f"kernel {kernel!r} {f'computes {other}{names}' if other else unknown}")
    return known[kernel]


def check_named(kernel: str | Kernel, operation: str, given: Mapping[str, int]) -> None:
    """Raises TypeError or ValueError for an unknown kernel or constants that it does not have."""
    if kernel != "auto":
        _check_given(_given(kernel, operation), given)


def plan(kernel: Kernel, problem: Problem, limits: Limits, **given: int) -> Plan:
    """Makes the plan of a kernel for a problem on a device; the caller may fix constants.

    Plans zero columns as one column of zeros. Raises ValueError for constants that the kernel does
    not have or that violate its rules, and Unsupported if the kernel or device does not support the
    problem.
    """
    _check_arrays(kernel)
    problem.check_offset()
    problem = _with_columns(kernel, problem.without_maps())
    try:
        return _first_fit(kernel, problem, limits, given)
    except Unsupported as refused:
        remedy = _remedy(kernel, problem, limits, given)
        raise Unsupported(f"{refused}; {remedy}", refused.reason) from None


def with_maps(made: Plan, limits: Limits, expressions: Iterable[Expression]) -> Plan:
    """Adds tile maps to a plan, so that its launches skip tiles that the expressions mask."""
    if not (found := cuda_source.maps(made, expressions)):
        return made
    problem = replace(made.problem, operands=(*made.problem.operands, *found))
    return plan_of(made.kernel, problem, limits, made.constants)


def can(kernel: Kernel, problem: Problem, limits: Limits) -> bool:
    """Returns whether the kernel supports the problem on the device, for some choice of tiles."""
    return _refusal(kernel, problem, limits) is None


def _refusal(kernel: Kernel, problem: Problem, limits: Limits) -> str | None:
    try:
        _first_fit(kernel, _with_columns(kernel, problem), limits, {})
    except Unsupported as refused:
        return refused.reason
    return None


def candidates(kernel: Kernel, problem: Problem, limits: Limits) -> list[Plan]:
    """Returns the plans to measure: the default plan, then all others, most similar first.

    Raises Unsupported if the kernel does not support the problem.
    """
    own = plan(kernel, problem, replace(limits, tuned=()))
    tiles = kernel.tiles_for(own.problem, limits.arch, limits.multiprocessors)
    combined = (dict(zip(kernel.candidates, x)) for x in product(*kernel.candidates.values()))
    others = []
    for constants in combined if kernel.candidates else map(dict, tiles):
        with suppress(Unsupported, ValueError):
            if constants != own.constants:
                others.append(_made(kernel, own.problem.without_maps(), limits, constants))

    def difference(other: Plan) -> float:
        return sum(abs(log(other.constants[x] / own.constants[x])) for x in own.constants)

    return [own, *sorted(others, key=difference)]


def largest_d(kernel: Kernel, dtype: str, limits: Limits) -> int | None:
    """Returns the largest head dimension that fits the device: 0 if none fits, None if all fit."""

    def too_large(d: int) -> bool:
        return not can(kernel, Problem.of_sizes(M=1, d=d, dtype=dtype), limits)

    unbounded = limits.shared_bytes + 1  # even one row of 1-byte elements would not fit
    return bisect_left(range(1, unbounded), True, key=too_large) if too_large(unbounded) else None


def passed_over(chosen: Kernel, problem: Problem, limits: Limits) -> dict[str, str]:
    """Maps kernels that were measured faster than ``chosen`` to the reason "auto" skips them."""
    problem = _accurate(problem)
    suiting = _suiting(LADDER[chosen.operation].values(), problem)
    able = [k for k in suiting if not _other_device(k, problem.dtype.name, limits)]
    speeds = _speeds(able, problem, limits)

    def reason(kernel: Kernel) -> str | None:
        if lack := _lack(kernel, problem, limits):
            return lack
        if kernel.made_for is None or _is_made_for(kernel, problem, limits):
            return (
                _drawback(kernel, problem, limits)
                or _why_slower(kernel, chosen, problem, limits)
                or _why_below(kernel, problem, limits)
            )
        return "other sizes suit it better"

    of_chosen = _reached([chosen], problem, limits).get(chosen.name, 0)
    faster = [k for k in able if speeds.get(k.name, 0) > of_chosen and k is not chosen]
    reasons = {k.name: reason(k) for k in faster}
    return {name: why for name, why in reasons.items() if why}


def folder_of(kernel: Kernel) -> str | None:
    """Returns the folder of a user's kernel; None for kernels of the ladder."""
    return None if kernel.folder is None else str(Path(kernel.folder).resolve())


def _fastest(kernels: Sequence[Kernel], problem: Problem, limits: Limits) -> Kernel:
    """Returns the kernel that "auto" selects.

    Prefers a kernel made for such problems, then the fastest measured kernel, then the best
    unmeasured one. Only kernels whose records allow the problem are planned, to save time.
    """
    problem = _accurate(problem)
    general = [k for k in _suiting(kernels, problem) if k.made_for is None]
    chosen = (
        next((k for k in reversed(kernels) if _is_made_for(k, problem, limits)), None)
        or _fastest_measured(general, problem, limits)
        or _best_unmeasured(general, problem, limits)
    )
    if chosen is not None:
        return chosen
    others = [k.name for k in general if can(k, problem, limits)]
    none = _no_other(kernels[0], problem, limits) if kernels else "no kernel supports it"
    remedy = f"choose one that supports it: {', '.join(others)}" if others else none
    if not others and problem.arithmetic != problem.dtype.name:
        another = ", or choose another precision" if problem.dtype.name == "float32" else ""
        remedy += f"; leave precision={problem.precision!r} out{another}"
    raise Unsupported(
        f"'auto' has no measured kernel to choose for {problem} on {limits.device}; {remedy}"
    )


def _is_made_for(kernel: Kernel, problem: Problem, limits: Limits) -> bool:
    made_for = kernel.made_for
    if made_for is None or not {problem.arithmetic, problem.precision} & set(kernel.tflops):
        return False
    if _lack(kernel, problem, limits):
        return False

    def suits(p: Problem, constants: Mapping[str, int]) -> bool:
        c = SimpleNamespace(**constants, multiprocessors=limits.multiprocessors, arch=limits.arch)
        return bool(kernel.evaluated("made_for", made_for, p, c))

    if not suits(*_likely(kernel, problem, limits)):
        return False  # if the plan used smaller tiles, there would be even more blocks
    try:
        its = plan(kernel, problem, limits)
    except Unsupported:
        return False
    return suits(its.problem, its.constants)


def _likely(kernel: Kernel, problem: Problem, limits: Limits) -> tuple[Problem, Mapping[str, int]]:
    """Returns the problem and the constants that a plan of the kernel tries first."""
    p = kernel.resolved(_with_columns(kernel, problem))
    tiles = kernel.tiles_for(p, limits.arch, limits.multiprocessors)
    return p, next(chain(_tuned_for(kernel, p, limits), tiles))


def _fastest_measured(general: Sequence[Kernel], problem: Problem, limits: Limits) -> Kernel | None:
    """Returns the fastest measured kernel for the problem, or None.

    Among kernels whose speeds differ by less than noise, returns the last one in the ladder.

    Speeds measured on this device take precedence. Speeds measured on an H100 are scaled by the
    mean speed ratio of kernels that were measured on both devices.
    """
    speeds = _reached(general, problem, limits)
    left = [k for k in general if k.name in speeds and not _lack(k, problem, limits)]
    while left:
        top = max(left, key=lambda k: speeds[k.name])
        last = [k for k in left if speeds[k.name] >= _ALIKE * speeds[top.name]][-1]
        refused = [
            k for k in {top.name: top, last.name: last}.values() if _drawback(k, problem, limits)
        ]
        if not refused:
            return _or_faster(last, left, problem, limits)
        left = [k for k in left if k not in refused]
    return None


def _or_faster(
    kernel: Kernel, others: Sequence[Kernel], problem: Problem, limits: Limits
) -> Kernel:
    """Returns the kernel to which this one yields for the problem, if any of the others, or it."""
    for other in others:
        if _why_slower(kernel, other, problem, limits) and can(other, problem, limits):
            return other
    return kernel


def _why_slower(kernel: Kernel, other: Kernel, problem: Problem, limits: Limits) -> str | None:
    """Returns why a kernel yields to another one for the problem; None if it does not."""
    formula = kernel.yields_to.get(other.name)
    if formula is None:
        return None
    p, constants = _likely(kernel, problem, limits)
    c = SimpleNamespace(**constants, multiprocessors=limits.multiprocessors)
    why: str | None = kernel.evaluated("yields_to", formula, p, c)
    return why


def _reached(kernels: Sequence[Kernel], problem: Problem, limits: Limits) -> dict[str, float]:
    """Maps measured kernels to the speeds that they reach for the problem."""
    measured = {k.name: k for k in kernels}
    return {
        name: speed * prod(_shares(measured[name], problem, limits).values())
        for name, speed in _speeds(kernels, problem, limits).items()
    }


def _why_below(kernel: Kernel, problem: Problem, limits: Limits) -> str | None:
    """Returns why a kernel runs slower than measured for the problem; None if it does not."""
    shares = _shares(kernel, problem, limits)
    why = min(shares, key=lambda x: shares[x], default=None)
    return why if why is not None and shares[why] < 1 else None


def _speeds(kernels: Sequence[Kernel], problem: Problem, limits: Limits) -> dict[str, float]:
    """Maps measured kernels to their measured speeds at the nearest head dimension."""
    recorded = {k.name: k.tflops.get(problem.arithmetic) for k in kernels}
    measured = {name: speeds for name, speeds in recorded.items() if speeds is not None}
    here = {name: _measured_here(name, problem, limits) for name in measured}
    both = [x / _nearest(measured[name], d) for name in here for d, x in here[name].items()]
    scale = exp(fsum(map(log, both)) / len(both)) if both else 1.0  # geometric mean
    return {
        name: _nearest({d: scale * x for d, x in found.items()} | here[name], problem.d)
        for name, found in measured.items()
    }


def _shares(kernel: Kernel, problem: Problem, limits: Limits) -> dict[str, float]:
    """Returns the shares of its measured speed that a kernel reaches for the problem, by reason."""
    if not kernel.shares:
        return {}
    p, constants = _likely(kernel, problem, limits)
    c = SimpleNamespace(**constants, multiprocessors=limits.multiprocessors)
    return {why: kernel.evaluated("shares", x, p, c) for why, x in kernel.shares.items()}


def _drawback(kernel: Kernel, problem: Problem, limits: Limits) -> str | None:
    """Returns why a measured kernel would run slower than measured or need too much memory.

    Returns None if neither applies. A baseline computes and stores all scores, even masked ones.
    """
    is_baseline = any(isinstance(x, Matmul) for x in kernel.launches)
    if is_baseline and problem.has_mask:
        return "it computes masked scores too"
    is_small = max(problem.M, problem.N, problem.d, problem.dv) <= _SMALL
    if is_baseline and is_small and kernel.operation == "forward":
        return "cuBLAS is slow for such small products"
    if prod(_shares(kernel, problem, limits).values()) < _LEAST_SHARE:
        return _why_below(kernel, problem, limits)
    try:
        made = _first_fit(kernel, _with_columns(kernel, problem.without_maps()), limits, {})
    except Unsupported as refused:
        return refused.reason
    if is_baseline and made.scratch_bytes > _MOST_SCRATCH:
        return f"its scratch would be {made.scratch_bytes:,} bytes, more than {_MOST_SCRATCH:,}"
    return None


def _best_unmeasured(general: Sequence[Kernel], problem: Problem, limits: Limits) -> Kernel | None:
    """Selects a kernel for a problem that no measured kernel supports.

    If a precision is requested, selects the kernel that is fastest for inputs stored in it, or the
    last one in the ladder. For a dtype without measurements, selects the last deterministic kernel.
    """

    def speed(kernel: Kernel) -> float:
        """Returns TFLOP/s for inputs stored in the requested precision; 0 if not measured."""
        speeds = kernel.tflops.get(problem.precision or "")
        return _nearest(speeds, problem.d) if speeds else 0.0

    rounded = problem.arithmetic != problem.dtype.name
    last_first = [k for k in reversed(general) if not _lack(k, problem, limits)]
    if rounded and any(k.tflops for k in general):
        last_first.sort(key=speed, reverse=True)
    elif any(problem.arithmetic in k.tflops for k in general):
        return None
    else:
        last_first.sort(key=lambda k: bool(k.unordered))
    return next((k for k in last_first if can(k, problem, limits)), None)


def _measured_here(name: str, problem: Problem, limits: Limits) -> dict[int, float]:
    """Maps d to a ladder kernel's TFLOP/s on this device, for dv = d or the problem's dv."""
    mine = [t for t in limits.tuned if (t.kernel, t.folder) == (name, None)]
    here = {t.d: t.tflops for t in mine if t.dtype == problem.arithmetic and t.d == t.dv}
    return here | {t.d: t.tflops for t in mine if _is_for(t, problem)}


def _nearest(speeds: Mapping[int, float], d: int) -> float:
    """Returns the speed at the nearest measured head dimension.

    Below the smallest measured d, the speed is the geometric mean of the speed there and a speed
    proportional to d, because matrix products shrink with d but the softmax does not.
    """
    near = nearest_d(speeds, d)
    share = max(d, 1) / max(near, 1) if near == min(speeds) else 1.0
    return speeds[near] * sqrt(min(share, 1.0))


def _remedy(kernel: Kernel, problem: Problem, limits: Limits, given: Mapping[str, int]) -> str:
    if given and can(kernel, problem, limits):
        return f"leave {', '.join(given)} to the plan"
    if kernel.reference:
        return "no other kernel computes what its reference does"
    problem = _accurate(problem)
    others = (k for k in LADDER[kernel.operation].values() if k is not kernel)
    able = [k.name for k in _suiting(others, problem) if can(k, problem, limits)]
    return f"kernels that can: {', '.join(able)}" if able else _no_other(kernel, problem, limits)


def _no_other(kernel: Kernel, problem: Problem, limits: Limits) -> str:
    """Returns the remedy if no other kernel of the same operation supports the problem."""
    if problem.dtype.result:
        return _converted(kernel, problem, limits)
    if kernel.operation == "backward" or not (problem.wrt or DLSE in problem.modifiers.features):
        why = _reasons(kernel, problem, limits)
        return f"no other kernel can either{f': {why}' * bool(why)}"
    able = [x.name for x in LADDER["backward"].values() if can(x, problem, limits)]
    known = f"; kernels that can: {', '.join(able)}" if able else ", and none of them can either"
    return f"only backward kernels compute gradients{known}"


def _reasons(kernel: Kernel, problem: Problem, limits: Limits) -> str:
    """Returns why other kernels for this dtype and precision do not support the problem."""
    own, precision = problem.dtype.name, problem.precision
    found: dict[str, list[str]] = {}
    for x in LADDER[kernel.operation].values():
        is_other = x is not kernel and x.takes(own)
        takes_it = is_other and (not precision or precision in x.precisions_of(own))
        if takes_it and (why := _refusal(x, problem, limits)) is not None:
            found.setdefault(why, []).append(x.name)
    return "; ".join(f"{why} ({', '.join(names)})" for why, names in found.items())


def _converted(kernel: Kernel, problem: Problem, limits: Limits) -> str:
    """Returns the remedy for inputs of a dtype that few kernels support."""
    own = problem.dtype.name
    others = [x for x in LADDER[kernel.operation].values() if x.takes(own) and x is not kernel]
    why = [f"{x.name} supports {own}, but {y}" for x in others if (y := _lack(x, problem, limits))]
    return f"{'; '.join(why) or 'no other kernel can'}; convert q, k and v to float16 or bfloat16"


def _suiting(kernels: Iterable[Kernel], problem: Problem) -> list[Kernel]:
    return [k for k in kernels if k.suits(problem.dtype.name, problem.precision)]


def _accurate(problem: Problem) -> Problem:
    """Requests precision "float32" for float32 inputs if the caller requests no precision."""
    if problem.dtype.name != "float32" or problem.precision or not problem.d:
        return problem
    return problem.with_options(precision="float32")


def _with_columns(kernel: Kernel, problem: Problem) -> Problem:
    """Replaces d = 0 and dv = 0 by 1, except for softmax, which has neither d nor dv."""
    if any(
        "d" in x.axes_for(problem).split() for x in OPERATIONS[kernel.operation].inputs.values()
    ):
        return replace(problem, d=max(problem.d, 1), dv=max(problem.dv, 1))
    return problem


def _first_fit(kernel: Kernel, problem: Problem, limits: Limits, given: Mapping[str, int]) -> Plan:
    """Returns the plan with tuned constants, or otherwise with the first tile that fits."""
    if reason := _lack(kernel, problem, limits):
        raise Unsupported(f"{kernel.name} cannot compute {problem}: {reason}", reason)
    problem = kernel.resolved(problem)
    _check_given(kernel, given)
    given = {name: int(value) for name, value in given.items()}
    for constants in _tuned_for(kernel, problem, limits):
        with suppress(Exception):  # the kernel may have changed since it was tuned
            return _made(kernel, problem, limits, {**constants, **given})
    refused: list[Exception] = []  # ``pop`` drops this frame's reference to the error
    for tile in kernel.tiles_for(problem, limits.arch, limits.multiprocessors):
        try:
            return _made(kernel, problem, limits, {**tile, **given})
        except Unsupported as error:
            refused = [error]
        except ValueError as error:
            refused = refused or [error]
    assert refused, "a kernel has at least one tile"
    raise refused.pop()


def _made(kernel: Kernel, problem: Problem, limits: Limits, constants: Mapping[str, int]) -> Plan:
    made = plan_of(kernel, problem, limits, constants)
    return with_maps(made, limits, problem.modifiers.mask) if problem.block_mask else made


def _tuned_for(kernel: Kernel, problem: Problem, limits: Limits) -> Iterator[Mapping[str, int]]:
    for tuned in limits.tuned:
        if tuned.kernel == kernel.name and _is_for(tuned, problem):
            constants = dict(tuned.constants)
            if constants.keys() == set(kernel.choice.names) and tuned.folder == folder_of(kernel):
                yield constants


def _is_for(tuned: Tuned, problem: Problem) -> bool:
    return (tuned.dtype, tuned.d, tuned.dv) == (problem.arithmetic, problem.d, problem.dv)


_MEANING = {
    "places": "places (masks, and scores that depend on arrays or positions)",
    "e4m3": "keys and values in e4m3",
    "out_dtype": "out_dtype (results in float32)",
    "row_max": "row_max (the largest score of each row)",
    "zero_tangents": "tangents of None (pass arrays of zeros)",
    "directions": "several directions (call jvp for each)",
    "wrt": "wrt (derivatives with respect to arrays that change scores)",
}


def _lack(kernel: Kernel, problem: Problem, limits: Limits) -> str | None:
    """Returns why the kernel cannot support the problem, whatever its constants; else None."""
    problem = _with_columns(kernel, problem)
    needed = [
        *dict.fromkeys((*problem.options.features, *problem.modifiers.features)),
        *(["gqa"] if problem.heads != problem.kv_heads else []),
        *(["dv"] if problem.d != problem.dv else []),
    ]
    lacking = [name for name in needed if name not in kernel.features]
    if "additive" in kernel.features and "score" in lacking:
        is_able = all(x.is_additive for x in problem.modifiers.score)
        instead = [] if is_able else ["expressions that do more than add to the score"]
        lacking = [*(name for name in lacking if name != "score"), *instead]
    own = problem.dtype.name
    can_do = kernel.precisions_of(own)
    if not kernel.takes(own):
        return f"it supports only {', '.join(kernel.dtypes)}"
    if problem.precision and problem.precision not in can_do:
        return f"it computes {own} in {' or '.join(can_do or (own,))}"
    if problem.pages and own not in kernel.dtypes:  # rounding launches do not read pages
        return f"it does not support {own} in a paged cache"
    if problem.wrt and problem.is_ragged and kernel.operation != "tangent":
        return f"wrt={', '.join(problem.wrt)} cannot be used with {problem.ragged_by}"
    if lacking:
        return f"it does not support {', '.join(_MEANING.get(x, x) for x in lacking)}"
    if other := _other_device(kernel, own, limits):
        return other
    if kernel.largest_d is not None and max(problem.d, problem.dv) > kernel.largest_d:
        return f"it supports head dimensions up to {kernel.largest_d}"
    if kernel.largest_dv is not None and problem.dv > kernel.largest_dv:
        return f"it supports head dimensions of v up to {kernel.largest_dv}"
    return limits.no_matmul if any(isinstance(x, Matmul) for x in kernel.launches) else None


def _other_device(kernel: Kernel, dtype: str, limits: Limits) -> str | None:
    """Returns why the device's architecture cannot run the kernel; None if it can."""
    arch = kernel.dtype_arch.get(dtype, kernel.arch)
    here = "this" if limits.device == f"sm_{limits.arch}" else limits.device
    if kernel.target and limits.arch not in (None, kernel.target.removesuffix("a")):
        return f"it runs only on sm_{kernel.target}, but {here} is sm_{limits.arch}"
    if not kernel.target and limits.arch is not None and int(limits.arch) < int(arch):
        return f"it requires sm_{arch} for {dtype}, but {here} is sm_{limits.arch}"
    return None


def _check_arrays(kernel: Kernel) -> None:
    """Raises ValueError if array names of a record are unknown or used twice."""
    if kernel.operation not in OPERATIONS:
        known = ", ".join(OPERATIONS)
        raise ValueError(
            f"{kernel.name} has an unknown operation, {kernel.operation!r}; use one of {known}"
        )
    base, own = OPERATIONS[kernel.operation], {**kernel.inputs, **kernel.outputs}
    given = {**base.inputs, **base.outputs, **own}
    if taken := given.keys() & kernel.scratch.keys():
        raise ValueError(
            f"{kernel.name}: the scratch array {', '.join(sorted(taken))} has the name of an input "
            "or output; rename the scratch array"
        )
    products = [step for step in kernel.launches if isinstance(step, Matmul)]
    named = {name for x in products for name in x.names}
    if unknown := named - given.keys() - kernel.scratch.keys():
        raise ValueError(
            f"{kernel.name}: a Matmul uses unknown arrays {', '.join(sorted(unknown))}; the arrays "
            f"are {', '.join([*given, *kernel.scratch])}"
        )


def _check_given(kernel: Kernel, given: Mapping[str, int]) -> None:
    known = kernel.choice.names
    for name, value in given.items():
        if name not in known:
            raise ValueError(
                f"{kernel.name} has no tile size {name!r}{nearest(name, known)}; its tile sizes "
                f"are {', '.join(known) or 'none'}"
            )
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r} must be a positive integer")
