"""The table of optional inputs, and values derived from its rows."""

import inspect

import pytest

import cupyfa
from cupyfa import Problem
from cupyfa.ladder.kernel import FEATURES
from cupyfa.problem.optional_inputs import (
    KEYWORDS,
    OPTIONAL_INPUTS,
    OWN_ARRAYS,
    RESERVED,
    SOFTCAP,
    Operand,
    check_input,
    operand,
    written,
)
from cupyfa.problem.shape_language import FORMS, FormKeywords

SIZES = {"batch": 3, "heads": 4, "kv_heads": 2, "M": 5, "N": 6}
CHECKED = [name for name, x in OPTIONAL_INPUTS.items() if x.shape_rule]


def test_every_form_is_a_keyword():
    assert FormKeywords.__annotations__.keys() >= FORMS
    assert {*OWN_ARRAYS} <= inspect.signature(cupyfa.attention).parameters.keys()
    assert all(OPTIONAL_INPUTS[x].in_parts for x in KEYWORDS)
    assert {x.feature for x in OPTIONAL_INPUTS.values() if x.feature} <= {*FEATURES}


@pytest.mark.parametrize("name", RESERVED)
def test_no_captured_array_has_the_name_of_an_argument(name):
    with pytest.raises(ValueError, match=f"captured contains '{name}', a name that is reserved"):
        operand(name, 1.0)


@pytest.mark.parametrize("name", CHECKED)
def test_wrong_shapes_and_dtypes_are_refused_with_the_rule(name):
    record = OPTIONAL_INPUTS[name]
    sizes = SIZES | {"one": 1, name: SIZES["batch"] + 1}
    shape = tuple(sizes[x] for x in record.axes)
    dtype = {"float": "float16", "int": "int64"}.get(record.dtype, record.dtype)
    check_input(Operand(name, dtype, shape), SIZES)
    if record.broadcast == "axes":
        check_input(Operand(name, dtype, (1, *shape[1:-1], 1)), SIZES)
    if record.broadcast == "lead":
        check_input(Operand(name, dtype, shape[1:]), SIZES)
    told = written(name)
    with pytest.raises(ValueError, match=rf"^{told} has shape \(7, .*; it must be [^{{]*$"):
        check_input(Operand(name, dtype, (7, *shape)), SIZES)
    wrong = "float64" if record.dtype == "int" else "uint8"
    with pytest.raises(TypeError, match=f"^{told} is {wrong}; it must be .*: convert it$"):
        check_input(Operand(name, wrong, shape), SIZES)


def test_the_softcap_comes_before_all_other_steps():
    arrays = dict.fromkeys(OWN_ARRAYS, True)
    p = Problem.of_sizes(**SIZES, d=8, softcap=3.0, score_mod="score + 1", **arrays)
    steps = [x.option for x in (*p.modifiers.score, *p.modifiers.mask)]
    assert steps[0] == SOFTCAP
    assert {*steps} >= {x for x in OWN_ARRAYS if OPTIONAL_INPUTS[x].in_expressions}
