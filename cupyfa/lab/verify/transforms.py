"""Derives problems with other sizes, arrays or lengths, for random cases and for shrinking."""

from __future__ import annotations

import ast
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cupyfa.problem import shape_language
from cupyfa.problem.lengths import DENSE, Rows, lengths_of
from cupyfa.problem.optional_inputs import (
    DESCALES,
    DLSE,
    LENGTHS,
    MAPS,
    OPTIONAL_INPUTS,
    OWN_ARRAYS,
    PADDED,
    ROW_MAX,
    SEED,
    SEEDS,
    Operand,
)
from cupyfa.problem.options import OPTIONS
from cupyfa.problem.problem import TEXTS, Problem
from cupyfa.problem.resizing import SIZE_OF_PLACE, indices_of, resized
from cupyfa.problem.shape_language import AXES, forms_of_lengths
from cupyfa.problem.wrt import differentiated
from cupyfa.score.expressions import Expression


def resize(p: Problem, **sizes: int) -> Problem:
    """Returns the problem with other sizes, and with arrays resized to match.

    A ragged batch keeps its first sequences and rows, up to the new sizes.
    """
    if size := p.page_size:
        return resize(p.in_pages(None), **sizes).in_pages(size)
    if names := [x.name[0] for x in p.operands if x.name in DESCALES]:
        return add_descales(resize(add_descales(p, ()), **sizes), names)
    if p.lengths is not None:
        batch = sizes.pop("batch", None)
        q, k = (x.first(batch) for x in p.lengths)
        q, k = q.cut(sizes.pop("M", q.total)), k.cut(sizes.pop("N", k.total))
        return make_ragged(p, (q, k), **sizes)
    if not p.operands:
        return replace(p, **sizes)  # type: ignore[arg-type]
    after = tuple(sizes.get(x, getattr(p, x)) for x in AXES)
    made = resized(p.operands, p.expressions, p.of_scores, after)  # type: ignore[arg-type]
    return replace(p, operands=made, **sizes)  # type: ignore[arg-type]


def differentiate(p: Problem, names: Sequence[str]) -> Problem:
    """Returns the problem with gradients of the named arrays in addition to dQ, dK and dV."""
    return replace(p, operands=differentiated(p.operands, names))


def pad(p: Problem, sides: Collection[str]) -> Problem:
    """Returns the problem with a length per batch element, for queries ("q"), keys ("k") or both.

    On a side that is not in ``sides``, all rows are used.
    """
    if p.pages:
        raise ValueError(
            "padded cannot be combined with page_size, since paged keys already have lengths; "
            "omit padded"
        )
    _refuse_others("padded", sides, "qk")
    lengths = (Operand(x, "int32", (p.batch,)) for x in PADDED if x[-1] in sides)
    return _replace_operands(p, PADDED, lengths)


def add_descales(p: Problem, names: Collection[str]) -> Problem:
    """Returns the problem with descales of the named inputs, a subset of "q", "k" and "v"."""
    _refuse_others("descales", names, "qkv")
    shape = p.batch, p.kv_heads
    descales = (Operand(x, "float32", shape) for x in DESCALES if x[0] in names)
    return _replace_operands(p, DESCALES, descales)


def _replace_operands(p: Problem, names: Collection[str], new: Iterable[Operand]) -> Problem:
    return replace(p, operands=(*(x for x in p.operands if x.name not in names), *new))


def _refuse_others(what: str, names: Collection[str], known: str) -> None:
    """Raises ValueError for names that are not letters of ``known``."""
    if unknown := ", ".join(x for x in names if x not in known):
        raise ValueError(f"{what} contains {unknown}; use only {', '.join(known)}")


def make_ragged(p: Problem, lengths: Any, **heads: int) -> Problem:
    """Returns the problem as a ragged batch of these lengths; ``heads`` sets numbers of heads."""
    q, k = packed = lengths_of(lengths)
    after = len(q.rows), heads.get("heads", p.heads), q.total, k.total
    others = [x for x in p.operands if x.name not in LENGTHS]
    made = resized(others, p.expressions, p.of_scores, after)
    own = [x for x in made if x.name in OWN_ARRAYS]
    names = {x.name for x in made}
    given: dict[str, Any] = {DLSE: DLSE in names, shape_language.RETURN_MAX: ROW_MAX in names}
    given |= forms_of_lengths(packed)
    own += shape_language.operands(given, after, p.dtype.name)
    rest = [x for x in made if x.name not in (*OWN_ARRAYS, DLSE, ROW_MAX)]
    sizes: dict[str, Any] = {"batch": 1, "M": q.total, "N": k.total, **heads}
    return replace(p, **sizes, operands=(*own, *rest), rows=Rows(packed))


def make_dense(p: Problem) -> Problem:
    """Turns a ragged batch into a dense problem with a single sequence of all its rows."""
    others = [x for x in p.operands if x.name not in LENGTHS]
    made = resized(others, p.expressions, p.of_scores, (1, p.heads, p.M, p.N))
    return replace(p, operands=made, rows=DENSE)


def replace_arrays(p: Problem, arrays: Mapping[str, Any]) -> Problem:
    """Returns the problem with arrays of these forms, and limits its sizes to what the forms allow.

    A form may have a fixed size: if an expression indexes an f32[4] with key, N becomes at most 4.
    """
    if size := arrays.get(shape_language.PAGE_SIZE) or p.page_size:
        others = {name: x for name, x in arrays.items() if name != shape_language.PAGE_SIZE}
        return replace_arrays(p.in_pages(None), others).in_pages(size)
    while True:
        forms = {**arrays, **forms_of_lengths(p.lengths)}
        given = shape_language.operands(forms, p.of_scores, p.dtype.name)
        given += tuple(x for x in p.operands if x.name in SEEDS)
        p = replace(p, operands=given)
        most = _largest_sizes(given, p.expressions)
        now = dict(zip(AXES, p.of_scores))
        fewer = {x: most[x] for x in AXES if most.get(x, math.inf) < now[x]}
        if not fewer:
            return p
        if "heads" in fewer:
            group = max(min(p.group, fewer["heads"]), 1)
            fewer["kv_heads"] = min(p.kv_heads, fewer["heads"] // group)
            fewer["heads"] = group * fewer["kv_heads"]
        p = resize(p, **fewer)


def modify(p: Problem, options: Mapping[str, Any], arrays: Mapping[str, Any]) -> Problem:
    """Returns a copy of the problem with these options.

    Any new expression or array replaces all existing ones. Lengths among the arrays make the batch
    ragged; a page_size makes the keys paged.
    """
    arrays = dict(arrays)
    size = arrays.pop(shape_language.PAGE_SIZE, None) or p.page_size
    if size:
        return modify(p.in_pages(None), options, arrays).in_pages(size)
    packed = arrays.pop(shape_language.LENGTHS_OF, None)
    seeds = shape_language.seeds_in_memory(options)
    options = {**options, **dict.fromkeys(seeds, 0)}
    arrays = {**arrays, **(seeds if options.get("dropout", p.options.dropout) else {})}
    if not arrays and not any(name in options for name in TEXTS):
        found = p.with_options(**options)
        return found if packed is None else make_ragged(found, packed)
    in_blocks = arrays.pop(shape_language.BLOCK_MASK, None)
    forms = {**arrays, **forms_of_lengths(p.lengths)}
    given = shape_language.operands(forms, p.of_scores, p.dtype.name)
    changed = {**dict.fromkeys(TEXTS), **options}
    found = replace(p, options=replace(p.options, **changed), operands=given)
    return (found if packed is None else make_ragged(found, packed)).in_blocks(in_blocks)


def leave_out(p: Problem, name: str) -> Problem:
    """Drops an option or array from the problem, along with arrays that nothing else reads."""
    options = p.options
    if name in OPTIONS and name != SEED:  # dropout needs the seed
        options = replace(options, **{name: OPTIONS[name].default})
    texts = [x for x in (options.score_mod, options.mask_mod) if x is not None]
    unread = {name, *MAPS, *(() if options.dropout else SEEDS)}
    read = {*OPTIONAL_INPUTS, *(x for text in texts for x in text.captured)} - unread
    kept = tuple(x for x in p.operands if x.name in read)
    found = replace(p, options=replace(options, offset=None), operands=kept)
    needed = found.is_masked or found.reads_position
    return found.with_options(offset=options.offset) if needed else found


def _largest_sizes(found: Iterable[Operand], texts: Iterable[Expression]) -> dict[str, int]:
    """Returns, by name, the largest sizes for which indices stay inside every array."""
    most: dict[str, int] = {}
    for x in found:
        for axis, n in enumerate(x.shape):
            for text in texts:
                for index in indices_of(text, x.name, axis):
                    if isinstance(index, ast.Name) and index.id in SIZE_OF_PLACE:
                        size = SIZE_OF_PLACE[index.id]
                        most[size] = min(n, most.get(size, n))
    return most
