"""The public interface: few names, few keywords, and errors for former names."""

import importlib
import inspect

import pytest

import cupyfa

OF_ATTENTION = (
    *("attention", "vjp", "backward", "compile", "plan", "softmax", "merge", "merge_vjp"),
    *("block_mask", "dropout_mask", "jvp", "hvp"),
)


def keywords(function):
    parameters = inspect.signature(function).parameters.values()
    return {x.name for x in parameters if x.kind is x.KEYWORD_ONLY}


def test_the_library_has_few_names():
    assert len(cupyfa.__all__) <= 40 and len(OF_ATTENTION) <= 12
    for name in cupyfa.__all__:
        assert getattr(cupyfa, name) is not None


def test_functions_have_few_keywords():
    of_attention = keywords(cupyfa.attention)
    assert len(of_attention) <= 22
    for function in (cupyfa.vjp, cupyfa.backward, cupyfa.compile, cupyfa.jvp, cupyfa.hvp):
        assert len(keywords(function) - of_attention) <= 4


@pytest.mark.parametrize("name", cupyfa._FORMER)
def test_a_former_name_says_what_took_its_place(name):
    with pytest.raises(TypeError, match=f"cupyfa.{name} was removed; use ."):
        getattr(cupyfa, name)
    assert name not in dir(cupyfa)


@pytest.mark.parametrize("name", importlib.import_module("cupyfa.lab").__all__)
def test_the_workshop_has_its_functions(name):
    assert callable(getattr(cupyfa.lab, name))
