"""Renders a problem's options and arrays as command-line options."""

from __future__ import annotations

from collections.abc import Iterable

from cupyfa.problem.optional_inputs import DESCALES, DLSE, OWN_ARRAYS, PADDED, SEEDS, Operand
from cupyfa.problem.problem import Problem
from cupyfa.problem.shape_language import RETURN_MAX, shown
from cupyfa.problem.wrt import WRT


def words_of_problem(p: Problem) -> list[str]:
    """Returns the command-line options that reproduce a problem's options and arrays."""
    q, k = p.lengths or (None, None)
    lengths = {"lengths": q} if q == k else {"lengths-q": q, "lengths-k": k}
    is_padded = not p.pages and p.cached is None  # pages and caches imply lengths
    named = {
        "padded": [x.name[-1] for x in p.operands if x.name in PADDED and is_padded],
        "descales": [x.name[0] for x in p.operands if x.name in DESCALES],
    }
    others = (x for x in p.without_maps().shown_operands if x.name not in (*PADDED, *DESCALES))
    return [
        *(f"--{name}={x}" for name, x in lengths.items() if x),
        *p.options.command_line([x.name for x in p.operands if x.name in SEEDS]),
        *_words_of_arrays(p, others),
        *(f"--{name}={','.join(x)}" for name, x in named.items() if x),
        *["--block-mask"] * p.block_mask,
        *[f"--page-size={p.page_size}"] * bool(p.pages),
    ]


def _words_of_arrays(p: Problem, arrays: Iterable[Operand]) -> list[str]:
    own = (*OWN_ARRAYS, WRT, DLSE, RETURN_MAX, *SEEDS)
    return [
        f"--{name.replace('_', '-')}" + f"={text}" * bool(text)
        if name in own
        else f"--captured={name}={text}"
        for name, text in shown(arrays).items()
    ]
