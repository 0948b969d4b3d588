"""Display of results: a one-line repr, and HTML tables in notebooks."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

Result = TypeVar("Result")
_MOST = 50  # maximum number of table rows in a notebook, and of lines in a repr
_MOST_CHARACTERS = 300  # maximum number of characters in a repr
_SHORT = reprlib.Repr()
_SHORT.maxstring, _SHORT.maxother, _SHORT.maxdict, _SHORT.maxlist = 60, 100, 6, 3


class Shown:
    """Base class of dataclasses with ``repr=False``; prints non-default fields in one line."""

    def __repr__(self) -> str:
        fields = [x for x in dataclasses.fields(self) if x.repr]  # type: ignore[arg-type]
        values = {x.name: getattr(self, x.name) for x in fields if not _is_default(self, x)}
        text = ", ".join(f"{name}={_short(value)}" for name, value in values.items())
        if len(text) > _MOST_CHARACTERS:
            text = f"{text[: _MOST_CHARACTERS - 2]} …"
        return f"{type(self).__name__}({text})"


class ShownRow(Shown):
    """Base class of results that notebooks show as a table row."""

    def row(self) -> dict[str, Any]:
        """Returns the table row, as column names and values."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return html_table([self.row()])


class Rows(list[Result]):
    """A list of results that notebooks show as a table; each result has a ``row`` method."""

    def __repr__(self) -> str:
        shown = [repr(x) for x in self[:_MOST]]
        more = [f"… and {len(self) - _MOST} more"] if len(self) > _MOST else []
        return f"[{(',' + chr(10) + ' ').join([*shown, *more])}]"

    def _repr_html_(self) -> str:
        return html_table([x.row() for x in self])  # type: ignore[attr-defined]


def html_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats the first rows as an HTML table, without columns that are empty in all rows."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    texts = [{name: _cell(row.get(name)) for name in columns} for row in rows[:_MOST]]
    columns = [name for name in columns if any(row[name] for row in texts)]
    head = _line("th", (name.replace("_", " ") for name in columns))
    body = "".join(_line("td", (row[name] for name in columns)) for row in texts)
    more = f"<p>and {len(rows) - _MOST} more rows</p>" if len(rows) > _MOST else ""
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>{more}"


def _line(tag: str, cells: Iterable[str]) -> str:
    from html import escape

    return f"<tr>{''.join(f'<{tag}>{escape(x)}</{tag}>' for x in cells)}</tr>"


def _cell(value: Any) -> str:
    if value is None or value == "":
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return " ".join(f"{name}={_cell(x)}" for name, x in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(_cell, value))
    return str(value)


def _short(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"array of {value.dtype} {value.shape}"
    if isinstance(value, np.generic):
        return str(value)
    if isinstance(value, float):
        return f"{value:.4g}"
    return repr(value) if isinstance(value, Shown) else _SHORT.repr(value)


def _is_default(owner: Any, field: dataclasses.Field[Any]) -> bool:
    value, default, factory = getattr(owner, field.name), field.default, field.default_factory
    if factory is not dataclasses.MISSING:
        default = factory()
    same = type(value) is type(default) and not isinstance(value, np.ndarray)
    return same and bool(value == default)
