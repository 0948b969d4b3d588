"""The arrays whose gradients are asked for, by their names: what ``wrt`` may give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from cupyfa.problem.dtypes import DTYPES
from cupyfa.problem.optional_inputs import DLSE, OWN_ARRAYS, ROW_MAX, Operand

WRT = "wrt"
_OTHERS = (DLSE, ROW_MAX)  # arrays of a call without gradients
QKV = ("q", "k", "v")  # which wrt names too, and not captured arrays of these names


def differentiated(found: Iterable[Operand], wrt: str | Sequence[str]) -> tuple[Operand, ...]:
    """The operands of which those that ``wrt`` names have gradients, and no others.

    It may name q, k and v, too, whose gradients kernels compute in any case. Raises ValueError for
    other names.
    """
    names, every = names_of(wrt), tuple(found)
    refuse_without_gradients(names, {x.name: x.dtype for x in every if x.is_array})
    return tuple(replace(x, gradient=x.name in names and x.name not in QKV) for x in every)


def names_of(wrt: str | Iterable[str]) -> tuple[str, ...]:
    """The names that ``wrt`` gives, as "q,bias" or each by itself."""
    return tuple(x.strip() for x in wrt.split(",")) if isinstance(wrt, str) else tuple(wrt)


def refuse_without_gradients(names: Iterable[str], dtypes: Mapping[str, str]) -> None:
    """Raises ValueError for names of ``wrt`` that are no arrays of floats; dtypes: of a call's."""
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
