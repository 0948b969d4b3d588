"""What the library offers: few names, few keywords, and a line for names that there were."""

import importlib
import inspect

import numpy as np
import pytest

import cupyfa

Q = np.zeros((1, 2, 4, 8), np.float32)
OF_ATTENTION = (
    *("attention", "vjp", "backward", "compile", "plan", "softmax", "merge", "merge_vjp"),
    *("block_mask", "dropout_mask"),
)
# What a former argument is called now.
FORMER = {
    "mask_mod": 'mask="key <= query"',
    "out_dtype": 'out="float32"',
    "dropout_seed": "Dropout(rate, seed, offset)",
    "dropout_offset": "Dropout(rate, seed, offset)",
    "options": "**options",
    "own": "kernel.bind(",
    "return_own": "kernel.bind(",
    "devices": 'backend=Devices("all")',
    "progress": "backend=Devices(progress=",
    "lengths_q": "Padded(q, lengths_q)",
    "lengths_k": "Padded(k, lengths_k)",
    "cu_seqlens_q": "Packed(q, cu_seqlens_q)",
    "cu_seqlens_k": "Packed(k, cu_seqlens_k)",
    "seqused_q": "Packed(q, offsets, used=",
    "seqused_k": "Padded(k, lengths)",
    "q_descale": "Scaled(q, q_descale)",
    "k_descale": "Scaled(k, k_descale)",
    "v_descale": "Scaled(v, v_descale)",
    "rotary": "KVCache(…, rotary=",
    "prefix": "KVCache(…, prefix=",
    "interleaved": "Rotary(cos, sin, interleaved=True)",
    "splits": 'tiles={"splits": n}',
}


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
    for function in (cupyfa.vjp, cupyfa.backward, cupyfa.compile):
        assert len(keywords(function) - of_attention) <= 4


@pytest.mark.parametrize(("name", "now"), FORMER.items())
def test_a_former_argument_is_refused_with_what_to_write(name, now):
    with pytest.raises(TypeError, match=f"has no argument {name!r}; ") as error:
        cupyfa.attention(Q, Q, Q, **{name: None})
    assert now in str(error.value)


@pytest.mark.parametrize("name", cupyfa._FORMER)
def test_a_former_name_says_what_took_its_place(name):
    with pytest.raises(TypeError, match=f"cupyfa.{name} was replaced; write ."):
        getattr(cupyfa, name)
    assert name not in dir(cupyfa)


@pytest.mark.parametrize("name", importlib.import_module("cupyfa.lab").__all__)
def test_the_workshop_has_its_functions(name):
    assert callable(getattr(cupyfa.lab, name))
