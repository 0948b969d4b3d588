"""Evaluation of a record's formulas, which turns launches and arrays into plain integers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import count
from math import isfinite, prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np

from cupyfa.errors import Unsupported
from cupyfa.ladder.kernel import MOST_BOX_ROWS, Constant, Kernel, Launch, Matmul
from cupyfa.ladder.operations import Input
from cupyfa.planner import cuda_source
from cupyfa.planner.head_rounds import HeadRound, RoundSizes, head_rounds
from cupyfa.planner.plan import (
    FIRST_AXES,
    TENSOR,
    Argument,
    Limits,
    Plan,
    PlannedLaunch,
    PlannedMatmul,
    Slices,
    rounding_of,
)
from cupyfa.planner.source import KERNELS
from cupyfa.problem.dtypes import DTYPES
from cupyfa.problem.optional_inputs import MAPS, STARTS
from cupyfa.problem.problem import MOST_ELEMENTS, Problem

_LARGEST_GRID = (2**31 - 1, 65535, 65535)
# NumPy dtype of struct Sizes in batch.cuh.
SIZES = np.dtype([(name, "i4") for name in ("M", "N", "causal_offset", "window_offset")])
# NumPy void dtypes of the size of an array argument: a struct Tensor, a pointer or a TensorMap.
_BYTES = {"": "V32", "data": "V8", "map": "V128"}
_MOST_ROUNDS = 65536  # every launch of every round is planned separately


def plan_of(kernel: Kernel, problem: Problem, limits: Limits, constants: Mapping[str, int]) -> Plan:
    """Makes the plan with exactly these constants.

    Raises ValueError for constants that violate a rule and for formulas with invalid results, and
    Unsupported for launches that are too large for the device.
    """
    c = SimpleNamespace(**constants, d=problem.d, dv=problem.dv)
    for rule, holds in kernel.rules.items():
        if not kernel.evaluated(f"rule {rule!r}", holds, c):
            raise ValueError(
                f"constants {_listed(constants)} violate a constraint of {kernel.name}: {rule}; "
                "choose other constants, or omit them to let the planner choose"
            )
    return _Planner(kernel, problem, limits, constants).plan()


def with_numbers(plan: Plan, problem: Problem) -> Plan:
    """Adapts a plan to a problem that differs only in captured numbers, softcap or dropout.

    Only struct Mods holds these numbers; no formula of the ladder depends on them.
    """
    value = cuda_source.value(problem)[0]

    def changed(step: PlannedLaunch | PlannedMatmul) -> PlannedLaunch | PlannedMatmul:
        if isinstance(step, Matmul):
            return step
        made = (replace(x, value=value) if x.name == "mods" else x for x in step.arguments)
        return replace(step, arguments=tuple(made))

    return replace(plan, problem=problem, steps=tuple(map(changed, plan.steps)))


def source_path(kernel: Kernel, launch: Launch) -> Path:
    """Returns the path of a launch's file: relative to kernels/, or absolute in a user's folder.

    If a user's folder holds at least one file of the kernel, missing files come from the project.
    """
    file = Path(launch.file or f"{launch.entry}.cu")
    ours = _project_file(file if launch.file else Path(kernel.operation, file))
    if kernel.folder is None:
        return ours
    folder = Path(kernel.folder).resolve()
    others = (x.file or f"{x.entry}.cu" for x in kernel.launches if isinstance(x, Launch))
    if (folder / file).is_file() or not any((folder / x).is_file() for x in others):
        return folder / file
    return ours if (KERNELS / ours).is_file() else folder / file


def _project_file(file: Path) -> Path:
    """Returns a file's path in kernels/; files of helper launches are in the folder ``steps``."""
    step = file.parent / "steps" / file.name
    return step if (KERNELS / step).is_file() else file


class _Planner:
    def __init__(
        self, kernel: Kernel, problem: Problem, limits: Limits, constants: Mapping[str, int]
    ) -> None:
        self.kernel, self.problem, self.limits, self.constants = kernel, problem, limits, constants
        self.modifiers = problem.modifiers  # looked up once, because each launch reads it often
        self.c = SimpleNamespace(**constants)
        self.floats = kernel.floats_of(problem, constants)
        self.operation = kernel.computes()
        # tf32 is stored as float32.
        products = rounding_of(kernel, problem) or kernel.parts
        self.operand = DTYPES.get(products or "", problem.dtype)
        self.kinds = {
            "scalar": problem.dtype.numpy,
            "real": problem.dtype.sums,
            "operand": self.operand.numpy,
            "byte": np.dtype(np.uint8),
            "int": np.dtype(np.int32),
        }
        # Kernels without the feature "lse" do not output it.
        has_lse = "lse" in kernel.features
        self.outputs = {
            name: (x.shape(problem), x.dtype(problem))
            for name, x in self.operation.outputs_of(problem).items()
            if name != "lse" or has_lse
        }

    def plan(self) -> Plan:
        steps = self.kernel.evaluated("when", self.kernel.steps, self.problem)
        steps = tuple(x for x in steps if isinstance(x, Matmul) or self.needs(x))
        return Plan(
            kernel=self.kernel,
            problem=self.problem,
            constants=self.constants,
            steps=tuple(self.planned(steps)),
            scratch=dict(self.scratch(steps)),
            outputs=self.outputs,
            floats=self.floats,
        )

    def needs(self, launch: Launch) -> bool:
        what, c = f"needed of {launch.entry}", self.on_device()
        return bool(self.kernel.evaluated(what, launch.needed, self.problem, c))

    def on_device(self, **more: int) -> SimpleNamespace:
        """Returns the namespace for formulas that may depend on the device."""
        more["multiprocessors"] = self.limits.multiprocessors
        return SimpleNamespace(**self.constants, **more)

    def planned(self, steps: Sequence[Launch | Matmul]) -> list[PlannedLaunch | PlannedMatmul]:
        """Returns all steps in order, with those of every round."""
        repeated = [x for x in steps if x.in_rounds]
        if not repeated:
            return list(map(self.step, steps))
        first = steps.index(repeated[0])
        others = [self.step(x) for x in steps if not x.in_rounds]
        return [*others[:first], *self.in_rounds(repeated), *others[first:]]

    def step(self, step: Launch | Matmul, number: int = 0) -> PlannedLaunch | PlannedMatmul:
        if isinstance(step, Matmul):
            return PlannedMatmul(**vars(step))
        return self.launch(step, number)

    def in_rounds(
        self, steps: Sequence[Launch | Matmul]
    ) -> Iterator[PlannedLaunch | PlannedMatmul]:
        """Yields the steps of each round."""
        if self.kernel.round_heads is not None:
            yield from self.in_head_rounds(steps)
            return
        rounds = self.whole("rounds", self.kernel.rounds, self.on_device(), least=1)
        self.check_rounds(rounds)
        for number in range(rounds):
            yield from (self.step(x, number) for x in steps)

    def in_head_rounds(
        self, steps: Sequence[Launch | Matmul]
    ) -> Iterator[PlannedLaunch | PlannedMatmul]:
        """Yields the steps of each round over heads, planned once for equal sub-problems."""
        if len(self.head_rounds) == 1:
            yield from map(self.step, steps)
            return
        self.check_rounds(len(self.head_rounds))
        planned = {}
        for each in self.head_rounds:
            planner = self.of_round(each)
            form = planner.problem, each.continues
            if form not in planned:
                planned[form] = [planner.step(x, int(each.continues)) for x in steps]
            for step, made in zip(steps, planned[form]):
                yield replace(made, slices=self.slices(step, each))

    @cached_property
    def head_rounds(self) -> list[HeadRound]:
        formula = self.kernel.round_heads
        assert formula is not None
        formulas = {
            "round_heads": formula,
            "round_group": self.kernel.round_group,
            "round_rows": self.kernel.round_rows,
        }
        c = self.on_device()
        most = RoundSizes(*(self.whole(x, y, c, least=1) for x, y in formulas.items()))
        return head_rounds(self.problem, most)

    def of_round(self, heads: HeadRound) -> Self:
        """Returns the planner for the sub-problem of a round's heads."""
        p, (batch, kv_heads, group, _) = self.problem, heads.sizes
        part = p.part(batch, kv_heads, heads.rows, range(p.N), group)
        return type(self)(self.kernel, part, self.limits, self.constants)

    def slices(self, step: Launch | Matmul, heads: HeadRound) -> Slices:
        """Returns the index of a round's heads in each array of a step."""
        return {
            name: (heads.at_start if name in self.scratch_of_rounds else heads).slices(axes)
            for name in _arrays_in(step)
            if (axes := self.axes.get(name)) is not None
        }

    @cached_property
    def axes(self) -> dict[str, str]:
        """The axes of all arrays but of scratch whose size is a formula."""
        p, scratch = self.problem, self.kernel.scratch
        known = {**self.operation.inputs_of(p), **self.operation.outputs_of(p)}
        axes = {name: x.axes_for(p) for name, x in known.items()}
        return axes | {name: x for name, (x, _) in scratch.items() if isinstance(x, str)}

    @cached_property
    def scratch_of_rounds(self) -> set[str]:
        """Names of the scratch arrays that hold the heads of one round."""
        if self.kernel.round_heads is None:
            return set()
        steps = self.kernel.steps(self.problem)
        others = {name for x in steps if not x.in_rounds for name in _arrays_in(x)}
        return self.kernel.scratch.keys() - others

    def check_rounds(self, rounds: int) -> None:
        if rounds > _MOST_ROUNDS:
            raise self.unsupported(
                f"the kernel would be launched in {rounds:,} rounds; the limit is {_MOST_ROUNDS:,}"
            )

    def launch(self, launch: Launch, number: int) -> PlannedLaunch:
        kernel, p, c, entry = self.kernel, self.problem, self.c, launch.entry
        of_grid = self.on_device(round=number)
        blocks = self.kernel.evaluated(f"grid of {entry}", launch.grid, p, of_grid)
        counts = tuple(blocks) if isinstance(blocks, Sequence) else (blocks,)
        threads = self.kernel.evaluated(f"threads of {entry}", launch.threads, p, c)
        shared_bytes = self.kernel.evaluated(f"shared of {entry}", launch.shared, p, c)
        self.check_formulas(launch, counts, threads, shared_bytes)
        x, y, z, *_ = (*counts, 1, 1)
        self.check_limits((x, y, z), threads, shared_bytes)
        own = {
            name: self.constant(f"{name} of {entry}", formula)
            for name, formula in launch.constants.items()
        }
        return PlannedLaunch(
            launch=launch,
            path=source_path(kernel, launch),
            dtype=p.dtype,
            operand=self.operand,
            result=p.out_dtype,
            constants={
                **self.constants,
                **own,
                "d": p.d,
                "dv": p.dv,
                **p.options.constants,
                **self.modifiers.constants,
                "of_products": cuda_source.of_products(p),
                **self.softcap(),
                "ragged": self.is_ragged(launch),
                "page_size": p.page_size,
                "packed": self.is_packed(launch),
                # Backward kernels need no sink, because lse includes it.
                **({"has_sink": False} if kernel.operation == "backward" else {}),
                **self.maps(launch),
                "threads": threads,
                "shared_bytes": shared_bytes,
            },
            grid=(x, y, z),
            threads=threads,
            shared_bytes=shared_bytes,
            boxes={
                name: self.whole(f"rows of a box of {name}", rows, c, least=1, most=MOST_BOX_ROWS)
                for name, rows in launch.boxes.items()
            },
            box_heads={
                name: heads
                for name, formula in launch.box_heads.items()
                if (heads := self.whole(f"heads of a box of {name}", formula, c, least=1)) > 1
            },
            mods=cuda_source.header(
                p,
                taped="gradients" in launch.args.split(),
                moved="tangents" in launch.args.split(),
                copies=bool(own.get("bias_bytes")),
            ),
            arguments=self.arguments(launch, of_grid),
            target=kernel.target,
            begins_early=self.limits.may_begin_early(launch),
            unawaited=self.unawaited(launch, of_grid),
        )

    def unawaited(self, launch: Launch, c: SimpleNamespace) -> frozenset[str]:
        """Returns the names of arrays that a launch reads without waiting."""
        names, what = launch.unawaited, f"unawaited of {launch.entry}"
        if callable(names):
            names = self.kernel.evaluated(what, names, self.problem, c)
        if not isinstance(names, str) or not launch.reads(names):
            raise ValueError(
                f"{self.kernel.name}: the record's {what} is {names!r}; it must be one string of "
                "names of arrays in args, or mods.NAME for an array of an option"
            )
        return frozenset(names.split())

    def softcap(self) -> dict[str, bool]:
        """Returns constants: whether to softcap whole tiles, and whether to approximate tanh."""
        caps = self.modifiers.has_softcap and self.problem.dtype.sums == np.float32
        is_narrow = self.problem.dtype.itemsize < 4
        roughly = caps and is_narrow and self.problem.options.has_usual_softcap
        roughly = roughly and all(x.is_additive for x in self.modifiers.score[1:])
        return {"caps_tiles": caps, "approximates_softcap": roughly}

    def maps(self, launch: Launch) -> dict[str, bool]:
        """Returns one constant per tile map of a block mask: whether the launch reads the map."""
        given = self.modifiers.constants
        return {
            f"has_{name}": given[f"has_{name}"]
            and name in launch.walks
            and bool(
                self.kernel.evaluated(f"walks {name}", launch.walks[name], self.problem, self.c)
            )
            for name in MAPS
        }

    def arguments(self, launch: Launch, c: SimpleNamespace) -> tuple[Argument, ...]:
        """Returns a launch's arguments; absent optional inputs are passed as zeros."""
        inputs = self.operation.inputs
        arrays = [*inputs, *self.outputs, *self.kernel.scratch]
        real, values = self.problem.dtype.sums.type, _values(self.problem)
        values |= {name: real(x) for name, x in self.floats.items()}
        for name, formula in launch.numbers.items():
            values[name] = np.int32(self.whole(name, formula, c, least=-(2**31), most=2**31 - 1))
        absent = inputs.keys() - self.operation.inputs_of(self.problem)
        is_packed = self.is_packed(launch)
        made = []
        for name, form in launch.arrays:
            if name not in arrays and (form or name not in values):
                by_feature = name in self.operation.outputs
                raise ValueError(
                    f"{launch.entry}: argument {name!r} is unknown; arrays are "
                    f"{', '.join(arrays)}; numbers and structs are {', '.join(values)}"
                    + f"; to output {name}, add {name!r} to features= of the record"
                    * by_feature
                )
            value = None if name in arrays else values[name]
            made.append(
                Argument(name, form, np.zeros((), _BYTES[form]), ())
                if name in absent
                else Argument(
                    *(name, form, value, self.strides(name, form)),
                    self.starts(name) if is_packed and not form else self.inside(name),
                )
            )
        return tuple(made)

    def is_ragged(self, launch: Launch) -> bool:
        """Returns whether a launch reads batch lengths; other launches process all rows."""
        named = (*launch.args.split(), *launch.constants)
        return self.problem.is_ragged and bool({"sizes", "ragged"} & set(named))

    def is_packed(self, launch: Launch) -> bool:
        """Returns whether a launch reads the offsets of packed sequences."""
        return self.modifiers.is_packed and self.is_ragged(launch)

    def starts(self, name: str) -> tuple[tuple[str, int], ...]:
        """Returns the offsets array that replaces a Tensor's batch stride in a packed batch."""
        known = {**self.operation.inputs, **self.operation.outputs_of(self.problem)}
        axes = known[name].axes if name in known else self.kernel.scratch.get(name, ("",))[0]
        if name in ("mods", "tangents") or not isinstance(axes, str):
            return self.inside(name)
        found = [start for axis, start in zip("MN", STARTS) if axis in axes.split()]
        return tuple((f"mods.{x}", TENSOR.fields["batch"][1]) for x in found)  # type: ignore[index]

    def inside(self, name: str) -> tuple[tuple[str, int], ...]:
        """Returns names and offsets of the arrays inside a struct argument."""
        structs = {
            "mods": cuda_source.value,
            "gradients": cuda_source.gradients,
            "tangents": cuda_source.tangents,
        }
        return structs[name](self.problem)[1] if name in structs else ()

    def strides(self, name: str, form: str) -> tuple[int | None, ...]:
        """Returns the array axes whose strides a Tensor holds for batch, head and row."""
        if form or name not in {**self.kernel.inputs, **self.kernel.outputs}:
            return FIRST_AXES
        of = {**self.operation.inputs, **{x: Input(*y) for x, y in self.kernel.outputs.items()}}
        axes = of[name].axes_for(self.problem).split()
        by_name = {"batch": 0, "heads": 1, "kv_heads": 1}
        others = count(2)
        places = [by_name[axis] if axis in by_name else next(others) for axis in axes]
        if "-" in axes:
            places = list(range(4 - len(axes), 4))
        fits = len(axes) <= 4 and len(set(places)) == len(places) and max(places) < 4
        if not fits or (3 in places and places[-1] != 3):
            raise ValueError(
                f"{self.kernel.name}: {name} has the axes {' '.join(axes)}, but a Tensor has the "
                f"axes batch, heads, rows and columns; pass a pointer: {name}.data"
            )
        return tuple(places.index(x) if x in places else None for x in range(3))

    def scratch(
        self, steps: Sequence[Launch | Matmul]
    ) -> Iterator[tuple[str, tuple[tuple[int, ...], np.dtype]]]:
        """Yields name, shape and dtype of each scratch array that the steps use."""
        named = {name for x in steps for name in _arrays_in(x)}
        for name, (axes, kind) in self.kernel.scratch.items():
            if name not in named:
                continue
            planner = self
            if name in self.scratch_of_rounds:
                planner = self.of_round(self.head_rounds[0])  # no other round has more heads
            if isinstance(axes, str):
                shape = planner.problem.shape(axes)
            else:
                shape = (planner.whole(f"scratch {name}", axes, self.on_device(), least=0),)
            if prod(shape) >= MOST_ELEMENTS:
                raise self.unsupported(
                    f"the scratch array {name} would have {prod(shape):,} elements; the limit is "
                    "2**59"
                )
            yield name, (shape, self.kinds[kind])

    def unsupported(self, reason: str) -> Unsupported:
        return Unsupported(f"{self.kernel.name} cannot compute {self.problem}: {reason}", reason)

    def whole(
        self,
        what: str,
        formula: Callable[..., Any],
        c: SimpleNamespace,
        *,
        least: int,
        most: float = float("inf"),
    ) -> int:
        """Evaluates a record's formula. Raises ValueError for non-integers and invalid numbers."""
        number = self.kernel.evaluated(what, formula, self.problem, c)
        if not (isinstance(number, int | np.integer) and least <= number <= most):
            to = f" to {most}" if isfinite(most) else ""
            raise ValueError(
                f"{self.kernel.name}: the record's formula for {what} returned {number!r} for "
                f"{self.problem}; it must return a whole number from {least}{to}"
            )
        return int(number)

    def constant(self, what: str, formula: Constant) -> int | float:
        """Evaluates a constant of a kernel's source: a bool, an int, or a rounded float32."""
        value = self.kernel.evaluated(what, formula, self.problem, self.on_device())
        if isinstance(value, bool | np.bool_):
            return bool(value)
        if isinstance(value, int | np.integer) and -(2**31) <= value < 2**31:
            return int(value)
        if isinstance(value, float | np.floating):
            with np.errstate(over="ignore"):
                single = float(np.float32(value))
            if isfinite(single):
                return single
        raise ValueError(
            f"{self.kernel.name}: the record's constant {what} is {value!r} for {self.problem}; "
            "it must be a bool, a 32-bit integer or a finite float"
        )

    def check_formulas(
        self, launch: Launch, grid: tuple[int, ...], threads: int, shared_bytes: int
    ) -> None:
        numbers = (*grid, threads, shared_bytes)
        whole = all(isinstance(number, int | np.integer) and number >= 0 for number in numbers)
        empty = 0 in self.problem.shape("batch heads M")
        if not whole or threads < 1 or not 1 <= len(grid) <= 3 or (0 in grid and not empty):
            raise ValueError(
                f"{self.kernel.name}: the record's formulas for {launch.entry} returned "
                f"grid={grid}, threads={threads!r}, shared={shared_bytes!r} for {self.problem}; "
                "they must return whole numbers, a grid of one to three numbers, and at least "
                "one block and thread"
            )

    def check_limits(self, grid: tuple[int, int, int], threads: int, shared_bytes: int) -> None:
        limits, (x, y, z) = self.limits, grid
        constants = {**self.constants, "d": self.problem.d, "dv": self.problem.dv}
        needs = f"{self.kernel.name} with {_listed(constants)} needs"
        if threads > limits.threads:
            raise Unsupported(
                f"{needs} {threads:,} threads per block; {limits.device} allows {limits.threads:,}",
                "too many threads per block",
            )
        if any(size > most for size, most in zip(grid, _LARGEST_GRID)):
            raise Unsupported(
                f"{needs} a grid of {x:,} x {y:,} x {z:,} blocks; "
                "CUDA allows 2,147,483,647 x 65,535 x 65,535",
                "too many blocks",
            )
        if shared_bytes > limits.shared_bytes:
            raise Unsupported(
                f"{needs} {shared_bytes:,} bytes of shared memory per block; "
                f"{limits.device} has {limits.shared_bytes:,}",
                "too little shared memory",
            )


_INTEGERS = ("M", "N", "heads", "kv_heads", "batch", "group", "causal_offset", "window_offset")


def _arrays_in(step: Launch | Matmul) -> set[str]:
    """Returns the names of a step's arrays, and of a launch's other arguments."""
    if isinstance(step, Matmul):
        return set(step.names)
    return {name for name, _ in step.arrays}


def _values(p: Problem) -> dict[str, Any]:
    integers = {name: getattr(p, name) for name in _INTEGERS}
    ends = p.reach or (integers["causal_offset"], integers["window_offset"])
    return {
        **{name: np.int32(value) for name, value in integers.items()},
        "scale": p.dtype.sums.type(p.scale),
        "sizes": np.array((p.M, p.N, *ends), SIZES),
        "mods": cuda_source.value(p)[0],
        "gradients": cuda_source.gradients(p)[0],
        "tangents": cuda_source.tangents(p)[0],
    }


def _listed(constants: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in constants.items())
