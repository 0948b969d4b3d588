"""The generation example: a loop without a cache generates the same tokens."""

import runpy
import sys
from importlib import import_module

import numpy as np
import pytest

from cupyfa.planner.source import ROOT

EXAMPLE = ROOT / "examples" / "generate.py"
REQUESTS = [(5, 9, 0), (1, 20, 0), (18, 1, 0), (16, 17, 1), (2, 3, 1), (9, 8, 2), (20, 14, 9)]


def model_of(example, distances, blocks=2):
    """Returns a float64 model and random weights with an unambiguous most likely token."""
    model = example.Model(
        *(7, 40, 16, 4, 2, blocks), attention="float64", backend="simulator", distances=distances
    )
    training = import_module("train_transformer")
    weights = training.parameters(model, "float64", seed=1)
    random = np.random.default_rng(2)
    return model, {name: x + 0.3 * random.standard_normal(x.shape) for name, x in weights.items()}


def without_a_cache(example, model, weights, tokens, new):
    """Generates each token from all earlier tokens with dense attention."""
    tokens = list(tokens)
    for _ in range(new):
        n = len(tokens)
        behind = np.arange(n)[:, None] - np.arange(n)

        def attend(block, q, k, v, behind=behind):
            k, v = (x.repeat(model.heads // model.kv_heads, axis=1) for x in (k, v))
            scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(model.d)
            if model.distances:
                bias = weights[f"{block}.bias"]
                scores = scores + bias[:, np.clip(behind, 0, model.distances - 1)]
            weight = np.exp(np.where(behind >= 0, scores, -np.inf))
            return np.einsum("hij,jhd->ihd", weight / weight.sum(-1, keepdims=True), v)

        places = np.arange(n)
        logits = example.logits_of(model, weights, np.array(tokens), places, attend)
        tokens.append(int(logits[-1].argmax()))
    return tokens


def requests(example, model):
    random = np.random.default_rng(3)
    return [
        example.Request(random.integers(0, model.vocabulary, n).tolist(), new, step)
        for n, new, step in REQUESTS
    ]


@pytest.mark.parametrize("distances, pages", [(0, 12), (6, 3)])
def test_tokens_are_those_of_a_loop_without_a_cache(example, distances, pages):
    """Runs with enough pages, and with so few that requests wait or are preempted."""
    model, weights = model_of(example, distances)
    server = example.Server(model, weights, slots=3, pages=pages)
    given = requests(example, model)
    wanted = [without_a_cache(example, model, weights, x.tokens, x.new) for x in given]
    for x in given:
        server.submit(x)
    finished, most = [], 0
    while server.waiting or server.running:
        finished += server.step()
        most = max(most, len(server.running))
        used = [int(x) for x in -(-server.pages.lengths // 16)]
        held = [p for slot, n in enumerate(used) for p in server.pages.table[slot, :n].tolist()]
        assert sorted([*held, *server.pages.free]) == list(range(3, 3 + pages))
    assert [x.tokens for x in given] == wanted
    assert len(finished) == len(given) and finished != given  # requests finish in another order
    assert (most, server.preempted > 0) == ((3, False) if pages == 12 else (2, True))
    assert server.decoded + server.preempted == sum(x.new - 1 for x in given)


def test_a_request_that_there_is_no_room_for_is_refused(example):
    model, weights = model_of(example, 6, blocks=1)
    server = example.Server(model, weights, slots=1, pages=2)
    for tokens, new in (([], 3), ([1] * 20, 13)):
        with pytest.raises(
            ValueError, match=f"has {len(tokens)} prompt tokens and {new} new tokens; .*32"
        ):
            server.submit(example.Request(tokens, new))


@pytest.mark.few(1)
@pytest.mark.parametrize("task, more", [("repeat", ""), ("text", "--length 24"), ("sort", "")])
def test_the_programs(tmp_path, monkeypatch, capsys, task, more):
    """Trains, saves weights to a file and generates; every task provides prompts."""
    file = tmp_path / "weights.npz"
    small = f"--task {task} --steps 1 --batch 2 --width 8 --backend simulator {more}"
    monkeypatch.setattr(sys, "path", [str(EXAMPLE.parent), *sys.path])
    for program, arguments in (
        ("train_transformer.py", f"{small} --save {file}"),
        ("generate.py", f"{file} --requests 3 --slots 2 --new 4 --prompt 6 --backend simulator"),
    ):
        monkeypatch.setattr(sys, "argv", [program, *arguments.split()])
        runpy.run_path(str(EXAMPLE.parent / program), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()[-4:]
    assert [x.split()[0] for x in lines[:3]] == ["step"] * 3 and all(" | " in x for x in lines[:3])
    assert lines[3].startswith("prefill ") and "; decode " in lines[3]


def test_a_file_without_weights_is_refused(example, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["generate.py", str(tmp_path / "none.npz")])
    with pytest.raises(SystemExit, match=r"cannot read weights from .*none.npz: .*--save"):
        example.main()


@pytest.mark.gpu
def test_tokens_on_a_gpu_are_those_of_the_simulator(cuda, example):
    import cupy

    model, weights = model_of(example, 6)
    there = {name: cupy.asarray(x) for name, x in weights.items()}
    results = []
    for backend, its in (("simulator", weights), ("cuda", there)):
        model = example.Model(**{**vars(model), "backend": backend})
        server, given = example.Server(model, its, slots=3, pages=5), requests(example, model)
        for x in given:
            server.submit(x)
        server.run()
        results.append([x.tokens for x in given])
    assert results[0] == results[1]
