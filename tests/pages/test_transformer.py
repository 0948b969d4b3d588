"""The training example of a transformer: gradients and learning."""

import math
import runpy
import sys

import numpy as np
import pytest

from cupyfa.planner.source import ROOT

EXAMPLE = ROOT / "examples" / "train_transformer.py"
EPSILON = 1e-5


def sizes(example, **more):
    given = {"vocabulary": 5, "length": 9, "width": 8, "heads": 2, "kv_heads": 1, "blocks": 2}
    return example.Model(**{**given, "attention": "float64", "backend": "simulator", **more})


def random_case(example, model, seed=0, batch=2, M=7):
    random = np.random.default_rng(seed)
    weights = example.parameters(model, "float64", seed)
    weights = {name: x + 0.1 * random.standard_normal(x.shape) for name, x in weights.items()}
    tokens, targets = random.integers(0, model.vocabulary, (2, batch, M))
    targets[:, :2] = -1
    return weights, tokens, targets


@pytest.mark.few(1)
@pytest.mark.parametrize("kv_heads, distances", [(1, 4), (2, 0), (1, 0)])
def test_gradients_are_finite_differences(example, kv_heads, distances):
    """Checks every array along a random direction; with distances, batches contain documents."""
    model = sizes(example, kv_heads=kv_heads, distances=distances)
    weights, *batch = random_case(example, model)
    if distances:
        batch.append(np.repeat([[0, 1, 2], [0, 0, 1]], [2, 3, 2], axis=1))
    loss, grads = example.loss_and_gradients(model, weights, *batch)
    assert loss == pytest.approx(reference_loss(model, weights, *batch), rel=1e-12)
    assert grads.keys() == weights.keys()
    assert ("0.bias" in grads) != ("positions" in grads)
    random = np.random.default_rng(1)
    for name, weight in weights.items():
        way = random.standard_normal(weight.shape)

        def at(step, name=name, weight=weight, way=way):
            moved = {**weights, name: weight + step * way}
            return example.loss_vjp(model, moved, *batch)[0]

        slope = (at(EPSILON) - at(-EPSILON)) / (2 * EPSILON)
        assert (grads[name] * way).sum() == pytest.approx(slope, rel=1e-6, abs=1e-9), name


def reference_loss(model, weights, tokens, targets, documents=None):
    batch, M = tokens.shape
    seen = np.tril(np.ones((batch, 1, M, M), bool))
    if documents is not None:
        seen &= documents[:, None, :, None] == documents[:, None, None, :]
    distance = np.maximum(np.arange(M)[:, None] - np.arange(M), 0)

    def norm(x, gain):
        return x / ((x * x).mean(-1)[..., None] + 1e-5) ** 0.5 * gain

    x = weights["tokens"][tokens]
    if "positions" in weights:
        x = x + weights["positions"][:M]
    for i in range(model.blocks):
        y = norm(x, weights[f"{i}.norm_attention"]) @ weights[f"{i}.qkv"]
        y = y.reshape(batch, M, -1, model.d).swapaxes(1, 2)
        key_heads = [model.heads + h * model.kv_heads // model.heads for h in range(model.heads)]
        value_heads = [h + model.kv_heads for h in key_heads]
        k, v = (y[:, which] for which in (key_heads, value_heads))
        q = y[:, : model.heads]
        score = q @ k.swapaxes(2, 3) / math.sqrt(model.d)
        if model.distances:
            bias = weights[f"{i}.bias"]
            score = score + bias[:, np.minimum(distance, model.distances - 1)]
        weight = np.exp(score) * seen
        o = weight @ v / weight.sum(-1)[..., None]
        x = x + o.swapaxes(1, 2).reshape(batch, M, -1) @ weights[f"{i}.out"]
        y = norm(x, weights[f"{i}.norm_mlp"]) @ weights[f"{i}.up"]
        y = 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + y @ weights[f"{i}.down"]
    logits = norm(x, weights["norm"]) @ weights["logits"]
    log_sums = np.log(np.exp(logits).sum(-1))
    rows, places = np.nonzero(targets >= 0)
    return (log_sums[rows, places] - logits[rows, places, targets[rows, places]]).mean()


@pytest.mark.slow
def test_it_learns_to_sort(example):
    """The loss falls below 0.55; without attention the minimum is 0.94."""
    count, kinds = 6, 6
    blind = example.without_attention(*next(example.sorting(20_000, count, kinds)))
    assert blind == pytest.approx(0.94, abs=0.02)
    model = sizes(example, vocabulary=kinds, length=2 * count - 1, width=24, blocks=1)
    model = example.Model(**{**vars(model), "attention": "float32"})
    losses = example.train(model, example.sorting(8, count, kinds), 100, rate=1e-2)
    assert losses[0] > math.log(kinds) - 0.5
    assert np.mean(losses[-10:]) < 0.55 < blind


@pytest.mark.slow
def test_it_learns_to_repeat_documents(example):
    """A learned bias suffices: each query needs the key three tokens before it."""
    model = sizes(example, vocabulary=4, length=16, width=16, blocks=1, distances=6)
    model = example.Model(**{**vars(model), "attention": "float32"})
    losses = example.train(model, example.repeating(4, 16, 4, 4), 60, rate=3e-2)
    assert losses[0] > math.log(4) - 0.3
    assert np.mean(losses[-5:]) < 0.5


def test_repeating_examples(example):
    tokens, targets, documents = next(example.repeating(50, 40, 9, 4))
    starts = np.diff(documents, axis=1, prepend=0)
    assert set(np.unique(starts)) == {0, 1} and (starts[:, 0] == 1).all()
    known = targets[:, :-1] >= 0
    assert (targets[:, :-1][known] == tokens[:, 1:][known]).all() and (targets[:, -1] == -1).all()
    row, place = np.nonzero(known)
    assert (targets[row, place] == tokens[row, place - 3]).all()
    assert (documents[row, place + 1] == documents[row, place - 3]).all()
    last = documents[:, 4:] == documents[:, :-4]
    assert (known[:, 3:] == last).all() and 0.3 < last.mean() < 0.9


def test_sorting_examples(example):
    tokens, targets = next(example.sorting(4, 5, 9))
    assert tokens.shape == targets.shape == (4, 9)
    assert (targets[:, :4] == -1).all()
    assert (targets[:, 4:] == np.sort(tokens[:, :5], axis=1)).all()
    assert (tokens[:, 5:] == targets[:, 4:-1]).all()


def test_text_is_read_from_random_positions(example):
    text, alphabet = example.characters()
    kinds = len(alphabet)
    tokens, targets = next(example.reading(text, 3, 20))
    assert (tokens[:, 1:] == targets[:, :-1]).all()
    assert tokens.min() >= 0 and tokens.max() < kinds
    blind = example.without_attention(text[:-1, None], text[1:, None])
    assert 2 < blind < 3 < math.log(kinds)


def test_the_program(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    small = "--steps 2 --batch 2 --length 3 --kinds 3 --width 8 --backend simulator --seed 1"
    plot = tmp_path / "loss.svg"
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *small.split(), "--plot", str(plot)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("guessing: 1.099, without attention, at best: ")
    assert [line.split()[:2] for line in lines[2:]] == [["step", "1"], ["step", "2"]]
    assert plot.read_bytes().startswith(b"<?xml")


def test_no_text_of_the_picture_hides_another(example, monkeypatch):
    pictures = pytest.importorskip("helpers.pictures")
    found = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig",
        lambda figure, *_, **__: found.extend(pictures.assert_readable(figure)),
    )
    example.draw([2.5, 1.05, 1.0], {"guessing": 1.1, "at best": 1.08}, "a.svg", "loss")
    assert {"1.10 guessing", "1.08 at best", "loss; 1.00 at the end"} <= {*found}


def test_the_program_refuses_wrong_options_at_once(example, monkeypatch):
    monkeypatch.setattr(example, "has_gpu", lambda: False)
    for wrong, said in (
        ("--backend cuda", "there is no GPU"),
        ("--plot /nowhere/x.svg --backend simulator", "/nowhere/x.svg: its folder cannot be"),
    ):
        monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *wrong.split()])
        with pytest.raises(SystemExit, match=said):
            example.main()


@pytest.mark.gpu
def test_it_learns_to_repeat_documents_on_a_gpu(cuda, example):
    model = sizes(
        example, vocabulary=16, length=64, width=64, heads=4, kv_heads=2, blocks=1,
        attention="float16", backend="cuda", distances=8,
    )  # fmt: skip
    losses = example.train(model, example.repeating(16, 64, 16, 4), 300, rate=5e-3, on_device=True)
    assert np.mean(losses[-10:]) < 1.0 < math.log(16) < losses[0] + 0.5


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["float32", "float16"])
def test_it_learns_on_a_gpu(cuda, example, attention):
    model = sizes(
        example, vocabulary=16, length=31, width=128, heads=4, kv_heads=2, blocks=2,
        attention=attention, backend="cuda",
    )  # fmt: skip
    losses = example.train(model, example.sorting(64, 16, 16), 300, rate=3e-3, on_device=True)
    assert np.mean(losses[-10:]) < 0.5 * example.without_attention(
        *next(example.sorting(20_000, 16, 16))
    )
