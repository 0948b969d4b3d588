"""The table of functions: its description in the pages, and requirements of its rows."""

import re
from pathlib import Path

import numpy as np
import pytest

import cupyfa.score.expressions as ex
from cupyfa.score.functions import DIFFERENTIABLE, FUNCTIONS

ROOT = Path(__file__).parents[2]


def test_the_page_lists_every_function():
    page = (ROOT / "docs" / "scores.md").read_text(encoding="utf-8")
    table = page.split("| function | value |\n| --- | --- |\n")[1].split("\n\n")[0]
    rows = (f"| `{x.name}({', '.join(x.arguments)})` | {x.meaning} |" for x in FUNCTIONS.values())
    assert table.splitlines() == [*rows]


def test_the_reference_lists_every_function():
    page = (ROOT / "docs" / "reference" / "masks.rst").read_text(encoding="utf-8")
    listed = page.split("those of ``cupyfa.score.expressions``: ")[1].split(".")[0]
    assert re.split(r",\s+|\s+and\s+", listed) == sorted(FUNCTIONS)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=lambda function: function.name)
def test_every_name_of_a_function_is_an_attribute_of_expressions(function):
    for name in (function.name, *function.other_names):
        assert getattr(ex, name) is ex.TRACEABLE[function.name]
    assert ex.TRACEABLE[function.name].__name__ == function.name


def test_other_names_are_no_attributes():
    for name in ("score", "q_idx", "kv_idx", "sinus"):
        assert not hasattr(ex, name)


@pytest.mark.parametrize("function", DIFFERENTIABLE.values(), ids=lambda function: function.name)
def test_a_differentiable_function_has_errors_and_is_relative_near_0_where_it_says_so(function):
    assert function.error is not None and function.slope_error is not None
    x = np.array([-1e-9, 1e-9])
    with np.errstate(all="ignore"):
        ratio = function.value(x) / x
    assert np.allclose(ratio, ratio[0]) == function.small_near_0
