"""Merges attention results over parts of the keys with helper kernels, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import gcd, prod
from typing import Any

import numpy as np

from cupyfa.errors import described
from cupyfa.ladder.kernel import Kernel, Launch, cdiv
from cupyfa.numerics import merge_bounds, tolerance
from cupyfa.planner.plan import BOX_ALIGNMENT, TENSOR, Argument, Plan, PlannedLaunch
from cupyfa.problem.dtypes import DTYPES, DType
from cupyfa.problem.options import read_flag
from cupyfa.problem.problem import Problem, four_axes, rows_of, sizes_of
from cupyfa.runtime import workspace
from cupyfa.runtime.arrays import address_of, columns_contiguous, require_one_device, target
from cupyfa.runtime.backend import Backend
from cupyfa.runtime.choose_backend import adopt, writable_view
from cupyfa.runtime.launcher import find_launcher

Arrays = dict[str, Any]  # arrays by the names that launches use
Pullback = Callable[..., list[tuple[Any, Any]]]

_THREADS, _WARP = 128, 32
# A launch has at most 4 KB of arguments, enough for this many parts (half as many with gradients).
MOST_PARTS = 60
MERGE = Launch(
    "merge_parts",
    args="O lse sums.data totals.data M heads rows dv count follows is_last parts",
    grid=lambda p, c: c.count,
    threads=lambda p, c: _THREADS,
    file="merge/merge_parts.cu",
)
GRADIENTS = Launch(
    "merge_parts_gradients",
    args="O lse dO dlse M heads rows dv count parts gradients",
    grid=lambda p, c: c.count,
    threads=lambda p, c: _THREADS,
    file="merge/merge_parts_gradients.cu",
)


def merge(
    parts: Sequence[tuple[Any, Any]],
    *,
    out: Any = None,
    layout: str = "bhsd",
    backend: str | Backend = "auto",
    check: bool = False,
) -> tuple[Any, Any]:
    """Merges attention results over disjoint sets of keys into the result over all keys.

    parts: a list of any number of pairs (out, lse), as ``attention(return_lse=True)`` returns them
        for the same queries and different keys: out [..., heads, M, dv] of one dtype, float16,
        bfloat16, float32 or float64, and lse [..., heads, M] of float32 (float64 for float64). They
        may have any strides. With ``layout="bshd"`` out is [..., M, heads, dv], which is also the
        layout of results for ``Packed`` arrays.
    out: an array that receives the merged output.
    backend: as for ``attention``.
    check: also compare the results with the reference.

    With w_i = exp(lse_i - lse), out = sum of w_i · out_i, and lse = log of the sum of exp(lse_i).
    Parts are summed in order, in float32 (float64 for float64), and rounded once, so the bits of
    the results depend only on the parts and their order. A row with lse = -infinity contributes
    nothing; if its lse is -infinity in all parts, out = 0 and lse = -infinity. An lse of NaN or
    +infinity makes its row NaN. Only one part may include the ``sink``.

    Returns (out, lse) with the shapes and dtypes of a part, and as the same type of array. On
    arrays in GPU memory the call does not wait and may be captured in a CUDA graph.

    Raises TypeError if ``parts`` is not a list of pairs or if dtypes or array types differ, and
    ValueError if shapes differ or if ``out`` has a wrong shape or dtype or overlaps a part.

    Flash-Decoding: Dao et al., 2023. Ring Attention: Liu et al., 2023, arXiv:2310.01889.
    """
    check = read_flag("check", check)
    return _Parts(parts, layout, backend).merged(out, check)


def merge_results(backend: Backend, parts: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Merges results of ``attention`` like ``merge``, without checks.

    parts: pairs (out, lse), [batch, heads, M, dv] and [batch, heads, M], of equal shapes and dtypes
        in the memory of the backend, as its kernels write them.
    """
    with backend.working_on(parts[0][0]):
        out, lse = (backend.empty(x.shape, x.dtype) for x in parts[0])
        arrays: Arrays = {}
        for i, (x, rows) in enumerate(parts):
            arrays |= {f"out{i}": x, f"lse{i}": rows[..., None]}
        arrays |= {"O": out, "lse": lse[..., None]}
        _merge(backend, len(parts), arrays, [*arrays.values()])
    return out, lse


def merge_vjp(
    parts: Sequence[tuple[Any, Any]],
    *,
    layout: str = "bhsd",
    backend: str | Backend = "auto",
    check: bool = False,
) -> tuple[tuple[Any, Any], Pullback]:
    """Computes ``merge``, and returns a function that computes its gradients.

    Returns (out, lse) and ``pullback``; ``pullback(dout, dlse=None)`` takes the gradients of out
    and lse, with the same shapes and dtypes, and returns one pair (dout_i, dlse_i) per part, with
    the part's shapes and dtypes:

        dout_i = w_i · dout        dlse_i = w_i · (sum over columns of dout · (out_i - out) + dlse)

    The gradients of a row with lse_i = -infinity are 0. The pullbacks of ``vjp(…,
    return_lse=True)`` propagate them to q, k and v. The pullback keeps references to the parts, out
    and lse, and may be called several times; it reads their contents when it is called. Raises the
    errors of ``merge``.
    """
    given, check = _Parts(parts, layout, backend), read_flag("check", check)
    out, lse = given.merged(None, check)
    return (out, lse), partial(_pullback, given, out, lse, check)


def _pullback(
    given: _Parts, out: Any, lse: Any, check: bool, dout: Any, dlse: Any = None
) -> list[tuple[Any, Any]]:
    return given.gradients(out, lse, dout, dlse, check)


class _Parts:
    """The validated parts of a ``merge`` call."""

    def __init__(self, parts: Any, layout: str, backend: str | Backend) -> None:
        named = _named(parts)
        self._backend, arrays = adopt(backend, **named)
        self._given = dict(zip(named, arrays))
        self._layout = layout
        self.outs, self.lses = arrays[::2], arrays[1::2]
        names = [f"{name}{i}" for i in range(len(parts)) for name in ("out", "lse")]
        self._parts: Arrays = dict(zip(names, arrays))
        first = self.outs[0]
        sizes_of("parts[0][0]", first, layout)  # raises for too few axes or an unknown layout
        self.dtype = _dtype_of(first)
        self._shape, self._rows = tuple(first.shape), rows_of(first, layout)
        for i, (x, rows) in enumerate(zip(self.outs, self.lses)):
            self._check_output(f"parts[{i}][0]", x, "parts[0][0]")
            self._check_rows(f"parts[{i}][1]", rows)
        require_one_device(self._backend, self._given)
        self._is_moved = not self._backend.owns(first)

    def merged(self, out: Any, check: bool) -> tuple[Any, Any]:
        """Computes lse and the merged out; writes out to the caller's array if one is passed."""
        backend = self._backend
        with backend.working_on(self.outs[0]):
            mine, into = None, None
            if out is not None:
                mine = self._seen("out", out)
                into = target(
                    *(backend, "out", mine, self._shape, self.dtype.numpy, self._given),
                    lambda x: four_axes(x, self._layout),
                )
            in_place = into is not None and not self._is_moved
            made = into if in_place else backend.empty(self._shape, self.dtype.numpy)
            lse = backend.empty(self._rows, self.dtype.sums)
            arrays = self._there(self._parts)
            arrays |= {"O": self._view("O", made), "lse": self._view("lse", lse)}
            _merge(backend, len(self.outs), arrays, (*self._parts.values(), made, lse))
            result, lse = self._back(made), self._back(lse)
            if mine is not None and not in_place:
                mine[...] = result
        if check:
            self._require_merged(result, lse)
        return (result if out is None else out), lse

    def gradients(
        self, out: Any, lse: Any, dout: Any, dlse: Any, check: bool
    ) -> list[tuple[Any, Any]]:
        """Computes each part's dout and dlse from the gradients of the merged out and lse."""
        backend = self._backend
        dout = self._seen("dout", dout)
        self._check_output("dout", dout, "out")
        given = {"O": out, "lse": lse, "dO": dout}
        if dlse is not None:
            given["dlse"] = dlse = self._seen("dlse", dlse)
            self._check_rows("dlse", dlse)
        require_one_device(backend, {"the parts": self.outs[0], **given})
        with backend.working_on(self.outs[0]):
            made: Arrays = {}
            for i, x in enumerate(self.lses):
                made[f"dout{i}"] = backend.empty(self._shape, self.dtype.numpy)
                made[f"dlse{i}"] = backend.empty(self._rows, x.dtype)
            arrays = self._there({**self._parts, **given})
            arrays |= {name: self._view(name, x) for name, x in made.items()}
            own = (*self._parts.values(), *given.values(), *made.values())
            _differentiate(backend, len(self.outs), arrays, own)
            found = [*map(self._back, made.values())]
            results = [*zip(found[::2], found[1::2])]
        if check:
            self._require_gradients(given, results)
        return results

    def _view(self, name: str, array: Any) -> Any:
        """Views an array with the kernel's axes: [batch, heads, M, dv], or [batch, heads, M, 1]."""
        if "lse" in name:
            return four_axes(array[..., None], "bhsd")
        return four_axes(array, self._layout)

    def _there(self, given: Arrays) -> Arrays:
        """Moves arrays to the backend's memory and views them with the kernel's axes.

        Copies arrays that kernels cannot read.
        """
        upload = self._backend.upload
        return {
            name: _readable(self._view(name, upload(x) if self._is_moved else x))
            for name, x in given.items()
        }

    def _back(self, array: Any) -> Any:
        return self._backend.download(array) if self._is_moved else array

    def _seen(self, name: str, given: Any) -> Any:
        """Views an array as the parts' array type. Raises TypeError where that is impossible."""
        mine = writable_view(self._backend, name, given)
        if type(mine) is not type(self.outs[0]):
            kind = "NumPy" if isinstance(self.outs[0], np.ndarray) else "CuPy"
            raise TypeError(
                f"{name} is {described(given)}, but parts[0] contains {kind} arrays; pass a {kind} "
                "array"
            )
        return mine

    def _check_output(self, name: str, array: Any, like: str) -> None:
        if tuple(array.shape) != self._shape:
            raise ValueError(
                f"{name} has shape {tuple(array.shape)}; it must be {self._shape}, like {like}"
            )
        if array.dtype != self.dtype.numpy:
            raise TypeError(
                f"{name} is {array.dtype}; it must be {self.dtype.name}, like {like}: convert it"
            )

    def _check_rows(self, name: str, array: Any) -> None:
        if tuple(array.shape) != self._rows:
            raise ValueError(
                f"{name} has shape {tuple(array.shape)}; for outputs of shape {self._shape} with "
                f'layout="{self._layout}" it must be {self._rows}, [..., heads, M]'
            )
        if array.dtype != self.dtype.sums:
            raise TypeError(
                f"{name} is {array.dtype}; for {self.dtype.name} outputs it must be "
                f"{self.dtype.sums}, the dtype that attention returns: convert it"
            )

    def _on_host(self, name: str, *arrays: Any) -> np.ndarray:
        """Stacks arrays on the host as [arrays, batch, heads, M, dv], without dv for lse."""
        seen = np.stack([self._view(name, self._backend.download(x)) for x in arrays])
        return seen[..., 0] if "lse" in name else seen

    def _require_merged(self, out: Any, lse: Any) -> None:
        parts = self._on_host("out", *self.outs), self._on_host("lse", *self.lses)
        right = merge_bounds.expected_merge(*parts, dtype=self.dtype.name)
        found = {"out": self._on_host("out", out)[0], "lse": self._on_host("lse", lse)[0]}
        tolerance.require(tolerance.compare(found, right), f"merge of {self._problem()}")

    def _require_gradients(self, given: Arrays, results: Sequence[tuple[Any, Any]]) -> None:
        parts = self._on_host("out", *self.outs), self._on_host("lse", *self.lses)
        on_host = {name: self._on_host(name, x)[0] for name, x in given.items()}
        dlse = on_host.get("dlse", np.zeros_like(on_host["lse"]))
        merged = on_host["O"], on_host["lse"], on_host["dO"], dlse
        right = merge_bounds.expected_gradients(*parts, *merged, dtype=self.dtype.name)
        douts, dlses = zip(*results)
        found = {"dout": self._on_host("dout", *douts), "dlse": self._on_host("dlse", *dlses)}
        tolerance.require(tolerance.compare(found, right), f"merge_vjp of {self._problem()}")

    def _problem(self) -> Problem:
        return _problem(len(self.outs), self._view("out", self.outs[0]))


# Arguments


def _named(parts: Any) -> Arrays:
    """Checks the pairs, and returns their arrays by names such as "parts[0][1]"."""
    if not isinstance(parts, list | tuple):
        raise TypeError(f"parts is {described(parts)}; pass a list of pairs (out, lse)")
    if not parts:
        raise ValueError("parts is empty; pass at least one pair (out, lse)")
    named: Arrays = {}
    for i, pair in enumerate(parts):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise TypeError(
                f"parts[{i}] is {described(pair)}; pass a pair (out, lse), such as "
                "attention(…, return_lse=True) returns"
            )
        named |= {f"parts[{i}][{j}]": x for j, x in enumerate(pair)}
    return named


def _dtype_of(array: Any) -> DType:
    name = str(array.dtype)
    if name not in DTYPES:
        raise TypeError(
            f"parts[0][0] has dtype {name}, which is not supported; use one of {', '.join(DTYPES)}"
        )
    return DTYPES[name]


def _readable(array: Any) -> Any:
    """Returns an array that kernels can read; copies it if needed."""
    is_aligned = not isinstance(array, np.ndarray) or array.flags.aligned
    return array if is_aligned and columns_contiguous(array) else array.copy()


# Launches


def _problem(count: int, out: Any) -> Problem:
    """Describes merging as attention: the parts act as keys, and their lse as scores."""
    batch, heads, M, dv = out.shape
    return Problem(batch, heads, heads, M, count, 0, dv, _dtype_of(out))


def _merge(backend: Backend, count: int, arrays: Arrays, given: Sequence[Any]) -> None:
    """Computes arrays["O"] and arrays["lse"] from ``count`` parts.

    given: the arrays that are not temporary.
    """
    constants = _constants(arrays)
    carries = count > MOST_PARTS
    if carries:
        *of_rows, dv = arrays["O"].shape
        rows, sums = prod(of_rows), arrays["lse"].dtype
        arrays["sums"] = backend.empty((rows, dv), sums)
        arrays["totals"] = backend.empty((rows, constants["lanes"], 2), sums)
    written = "O", "lse", "sums", "totals"
    _launch(backend, count, {**constants, "carries": carries}, arrays, given, written, _merging)


def _differentiate(backend: Backend, count: int, arrays: Arrays, given: Sequence[Any]) -> None:
    """Computes arrays["dout0"], arrays["dlse0"], … ``given`` are the non-temporary arrays."""
    constants = {**_constants(arrays), "has_dlse": "dlse" in arrays}
    written = [f"d{name}{i}" for i in range(count) for name in ("out", "lse")]
    _launch(backend, count, constants, arrays, given, written, _differentiating)


def _launch(
    backend: Backend,
    count: int,
    constants: Mapping[str, int],
    arrays: Arrays,
    given: Sequence[Any],
    written: Sequence[str],
    steps: Callable[[Problem, Mapping[str, int]], Iterator[PlannedLaunch]],
) -> None:
    """Launches steps in the current stream without waiting for them."""

    def make_plan() -> Plan:
        p = _problem(count, arrays["O"])
        made = tuple(steps(p, constants))
        kernel = Kernel("merge", "merges attentions over parts of the keys", (made[0].launch,))
        outputs = {x: (arrays[x].shape, arrays[x].dtype) for x in written if x in arrays}
        return Plan(kernel, p, {}, made, {}, outputs)

    launcher = find_launcher(backend, (steps, *constants.items()), arrays, make_plan)
    launcher(tuple(map(backend.address, arrays.values())), backend.stream)
    if backend.stream and backend.is_capturing:  # keep temporary arrays alive for the graph
        own = set(map(backend.address, given))
        copies = [x for x in arrays.values() if backend.address(x) not in own]
        workspace.of_graphs.extend(copies)


def _constants(arrays: Arrays) -> dict[str, int]:
    """Returns the constants that divide a row among threads; see parts.cuh."""
    row = arrays["O"].shape[-1] * arrays["O"].itemsize
    lanes = min(_WARP, _power_of_two(cdiv(row, BOX_ALIGNMENT)))
    vector = _vector([x for name, x in arrays.items() if "lse" not in name])
    return {"vector": vector, "lanes": lanes, "threads": _THREADS, "packed": False}


def _vector(arrays: Sequence[Any]) -> int:
    """Returns the number of columns that one aligned access can read or write in all arrays.

    All arrays have as many columns, of the same size.
    """
    steps = [step for x in arrays for n, step in zip(x.shape[:-1], x.strides) if n > 1]
    itemsize, columns = arrays[0].itemsize, arrays[0].shape[-1]
    width = gcd(BOX_ALIGNMENT, columns * itemsize, *map(address_of, arrays), *steps)
    return max(width // itemsize, 1)


def _power_of_two(least: int) -> int:
    return 1 << (max(least, 1) - 1).bit_length()


def _merging(p: Problem, constants: Mapping[str, int]) -> Iterator[PlannedLaunch]:
    room = min(_power_of_two(p.N), MOST_PARTS)
    for first in range(0, p.N, MOST_PARTS):
        count = min(p.N - first, MOST_PARTS)
        carried = [
            Argument(x, "data") if constants["carries"] else Argument(x, value=np.uint64(0))
            for x in ("sums", "totals")
        ]
        flags = {"follows": first > 0, "is_last": first + count == p.N}
        yield PlannedLaunch.of_helper(
            *(MERGE, p.dtype, _blocks(p, constants), {**constants, "room": room}),
            *(Argument("O"), Argument("lse"), *carried, *_sizes(p, count)),
            *(Argument(name, value=np.int32(x)) for name, x in flags.items()),
            _parts("parts", ("out", "lse"), first, count, room),
        )


def _differentiating(p: Problem, constants: Mapping[str, int]) -> Iterator[PlannedLaunch]:
    most = MOST_PARTS // 2
    room = min(_power_of_two(p.N), most)
    for first in range(0, p.N, most):
        count = min(p.N - first, most)
        has_dlse = constants["has_dlse"]
        yield PlannedLaunch.of_helper(
            *(GRADIENTS, p.dtype, _blocks(p, constants), {**constants, "room": room}),
            *(Argument("O"), Argument("lse"), Argument("dO")),
            Argument("dlse") if has_dlse else Argument("dlse", value=np.zeros((), TENSOR)),
            *_sizes(p, count),
            _parts("parts", ("out", "lse"), first, count, room),
            _parts("gradients", ("dout", "dlse"), first, count, room),
        )


def _blocks(p: Problem, constants: Mapping[str, int]) -> int:
    return cdiv(p.batch * p.heads * p.M, constants["threads"] // constants["lanes"])


def _sizes(p: Problem, count: int) -> Iterator[Argument]:
    rows = np.int64(p.batch * p.heads * p.M)
    sizes = {"M": np.int32(p.M), "heads": np.int32(p.heads), "rows": rows}
    sizes |= {"dv": np.int32(p.dv), "count": np.int32(count)}
    return (Argument(name, value=x) for name, x in sizes.items())


def _parts(name: str, of: tuple[str, str], first: int, count: int, room: int) -> Argument:
    """Creates the struct Parts of parts.cuh for ``count`` parts, beginning with part ``first``."""
    names = [f"{x}{i}" for i in range(first, first + count) for x in of]
    unused = [(f"unused{i}", TENSOR) for i in range(len(of) * (room - count))]
    kind = np.dtype([*((x, TENSOR) for x in names), *unused])
    places = tuple((x, TENSOR.itemsize * i) for i, x in enumerate(names))
    return Argument(name, value=np.zeros((), kind), arrays=places)
