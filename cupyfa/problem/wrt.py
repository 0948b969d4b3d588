"""Reads ``wrt``, the names of the arrays whose gradients a call returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from cupyfa.problem.dtypes import DTYPES
from cupyfa.problem.optional_inputs import DLSE, OWN_ARRAYS, ROW_MAX, Operand

WRT = "wrt"
_OTHERS = (DLSE, ROW_MAX)  # arrays of a call that have no gradients
QKV = ("q", "k", "v")  # in wrt these mean q, k and v, never captured arrays of these names


def differentiated(found: Iterable[Operand], wrt: str | Sequence[str]) -> tuple[Operand, ...]:
    """Marks exactly the operands that ``wrt`` names as having gradients.

    ``wrt`` may also name q, k and v, whose gradients kernels always compute. Raises ValueError for
    other names.
    """
    names, every = names_of(wrt), tuple(found)
    refuse_without_gradients(names, {x.name: x.dtype for x in every if x.is_array})
    return tuple(replace(x, gradient=x.name in names and x.name not in QKV) for x in every)


def names_of(wrt: str | Iterable[str]) -> tuple[str, ...]:
    """The names in ``wrt``: one string such as "q,bias", or a sequence of names."""
    return tuple(x.strip() for x in wrt.split(",")) if isinstance(wrt, str) else tuple(wrt)


def refuse_without_gradients(names: Iterable[str], dtypes: Mapping[str, str]) -> None:
    """Raises ValueError for names that are not arrays of floats in `dtypes`, those of a call."""
    able = (*QKV, *(x for x in dtypes if dtypes[x] in DTYPES and x not in _OTHERS))
    unable = [str(x) for x in names if x not in able]
    for name in unable:
        if name in dtypes and name not in _OTHERS:
            raise ValueError(
                f"wrt names {name}, whose dtype is {dtypes[name]}; only arrays of floats have "
                "gradients, so leave it out"
            )
        if name in OWN_ARRAYS:
            raise ValueError(
                f"wrt names {name}, and no {name} is given; give {name}=, or leave it out of wrt"
            )
    if unable:
        raise ValueError(
            f"wrt names {', '.join(unable)}; of these arrays it can name {', '.join(able)}; a "
            "number that texts read has a gradient as an array of one element, "
            f"{unable[0]}[0] in the text"
        )


def names_of_gradients(found: Iterable[Operand]) -> str:
    """The value of ``wrt`` that gives the gradients of these operands; empty if there are none."""
    return ",".join(x.name for x in found if x.gradient)
