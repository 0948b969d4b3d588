"""Converts problems to plain mappings and back, for files of failures and results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cupyfa.cache_folder import records
from cupyfa.problem import optional_inputs
from cupyfa.problem.dtypes import INPUTS, dtype_named
from cupyfa.problem.lengths import Lengths, Rows, lengths_of, shown_lengths
from cupyfa.problem.options import OPTIONS, AttentionOptions
from cupyfa.problem.problem import MOST, SIZES, TEXTS, Problem

_SIZE, _TEXT = records.whole(0, MOST), records.text()
_NUMBER = records.any_of(records.flag, records.whole(-(2**63)), records.number(finite=False))
_SHAPE = records.list_of(_SIZE, optional_inputs.MOST_AXES)
_OPERAND = records.row_of(_TEXT, _TEXT, _SHAPE, records.optional(_NUMBER), records.flag, least=3)
# Validates all fields except options, which AttentionOptions validates.
_read_fields = records.record(
    {**dict.fromkeys(SIZES, _SIZE), "dtype": records.one_of(INPUTS)},
    {
        "shift": records.whole(-MOST, MOST),
        **dict.fromkeys(("is_softmax", "block_mask"), records.flag),
        "pages": _SIZE,
        **dict.fromkeys(("lengths", "cached"), records.optional(_TEXT)),
        "operands": records.list_of(_OPERAND),
    },
    only=True,
)


def record_of_problem(p: Problem) -> dict[str, Any]:
    """Returns the problem's fields as plain values, for ``problem_of_record``."""
    fields = {**vars(p), "dtype": p.dtype.name}
    del fields["options"], fields["rows"]
    fields["operands"] = tuple((x.name, x.dtype, x.shape, x.value, x.gradient) for x in p.operands)
    fields["lengths"] = p.lengths and shown_lengths(p.lengths)
    fields["pages"] = p.pages
    fields["cached"] = p.cached and str(p.cached)
    texts = {x: text.text for x in TEXTS if (text := getattr(p.options, x)) is not None}
    return {**fields, **vars(p.options), "scale": p.scale, **texts}


def problem_of_record(record: Mapping[str, Any]) -> Problem:
    """Restores a problem from its record; missing fields take their defaults.

    The record may come from a file: raises ValueError or TypeError if it is invalid.
    """
    options = {name: value for name, value in record.items() if name in OPTIONS}
    fields = _read_fields({name: x for name, x in record.items() if name not in OPTIONS})
    fields["dtype"] = dtype_named(fields["dtype"])
    fields["operands"] = tuple(optional_inputs.of_record(*x) for x in fields.get("operands", ()))
    lengths, cached = fields.pop("lengths", None), fields.pop("cached", None)
    rows = Rows(
        lengths_of(lengths) if lengths else None,
        fields.pop("pages", 0),
        Lengths.of(cached) if cached else None,
    )
    return Problem(**fields, rows=rows, options=AttentionOptions(**options))
