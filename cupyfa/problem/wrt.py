"""Parsing and checks of ``wrt``, the names of the arrays whose gradients a call returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from cupyfa.problem.dtypes import DTYPES
from cupyfa.problem.optional_inputs import DLSE, OWN_ARRAYS, ROW_MAX, Operand

WRT = "wrt"
_OTHERS = (DLSE, ROW_MAX)  # arrays that wrt must not name
QKV = ("q", "k", "v")  # in ``wrt``, these always mean the inputs, never captured arrays


def differentiated(found: Iterable[Operand], wrt: str | Sequence[str]) -> tuple[Operand, ...]:
    """Sets ``gradient`` to True on the operands named in ``wrt`` and to False on all others.

    ``wrt`` may also contain q, k and v, whose gradients kernels always compute. Raises ValueError
    for other names.
    """
    names, every = names_of(wrt), tuple(found)
    refuse_without_gradients(names, {x.name: x.dtype for x in every if x.is_array})
    return tuple(replace(x, gradient=x.name in names and x.name not in QKV) for x in every)


def names_of(wrt: str | Iterable[str]) -> tuple[str, ...]:
    """Returns the names in ``wrt``: one string such as "q,bias", or a sequence of names."""
    return tuple(x.strip() for x in wrt.split(",")) if isinstance(wrt, str) else tuple(wrt)


def refuse_without_gradients(
    names: Iterable[str], dtypes: Mapping[str, str], argument: str = WRT
) -> None:
    """Raises ValueError for names of arrays that have no gradient, and so no tangent.

    dtypes: maps arrays to dtypes. argument: the caller's argument with the names, for messages.
    """
    able = (*QKV, *(x for x in dtypes if dtypes[x] in DTYPES and x not in _OTHERS))
    unable = [str(x) for x in names if x not in able]
    what = "gradient" if argument == WRT else "tangent"
    for name in unable:
        if name in dtypes and name not in _OTHERS:
            raise ValueError(
                f"{argument} contains {name}, whose dtype is {dtypes[name]}; only floating-point "
                f"arrays have {what}s: remove {name} from {argument}"
            )
        if name in OWN_ARRAYS:
            raise ValueError(
                f"{argument} contains {name}, but {name} is not given; pass {name}=, or remove "
                f"{name} from {argument}"
            )
    if unable:
        raise ValueError(
            f"{argument} contains {', '.join(unable)}; in this call {argument} may contain "
            f"{', '.join(able)}. For the {what} of a captured number, pass a one-element array and "
            f"write {unable[0]}[0] in the expression"
        )


def names_of_gradients(found: Iterable[Operand]) -> str:
    """Returns the value of ``wrt`` that names all operands with gradients; may be empty."""
    return ",".join(x.name for x in found if x.gradient)
