"""Trains a small transformer without torch: NumPy or CuPy arrays, attention by cupyfa.

`cupyfa.vjp` computes attention and its gradients. Everything else (embeddings, RMS norm, linear
maps, GELU, cross-entropy, Adam) is a few lines of array code with hand-written gradients. Like
`cupyfa.vjp`, a function whose name ends in `_vjp` returns its value and a pullback, which maps the
gradient of the value to the gradients of the arguments.

    python examples/train_transformer.py                     # learns to sort, in the simulator
    python examples/train_transformer.py --task repeat       # packed documents, a learned bias
    python examples/train_transformer.py --backend cuda --task text --plot loss.svg

With --save it writes the weights to a file, from which examples/generate.py generates tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import cupyfa

Arrays = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """The sizes of a model: vocabulary, longest sequence, columns, heads, key heads, blocks.

    If distances > 0, relative position biases replace position embeddings, as in T5 (Raffel et al.,
    2019, arXiv:1910.10683). Each query-key distance below it has a learned bias, and all larger
    distances share the last one.
    """

    vocabulary: int
    length: int
    width: int
    heads: int
    kv_heads: int
    blocks: int
    attention: str = "float32"  # dtype of q, k and v
    backend: str = "auto"
    distances: int = 0

    @property
    def d(self) -> int:
        return self.width // self.heads


def parameters(model: Model, dtype: str = "float32", seed: int = 0) -> dict[str, np.ndarray]:
    """Draws initial weights, smaller for layers that add to the residual stream of many blocks."""
    random = np.random.default_rng(seed)
    width, columns = model.width, (model.heads + 2 * model.kv_heads) * model.d

    def normal(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
        return (random.standard_normal((rows, columns)) * scale / math.sqrt(rows)).astype(dtype)

    made = {
        "tokens": normal(model.vocabulary, width, math.sqrt(model.vocabulary) / 2),
        "norm": np.ones(width, dtype),
        "logits": normal(width, model.vocabulary),
    }
    if not model.distances:
        made["positions"] = normal(model.length, width, math.sqrt(model.length) / 2)
    shrunk = 1 / math.sqrt(2 * model.blocks)
    for i in range(model.blocks):
        made |= {
            f"{i}.norm_attention": np.ones(width, dtype),
            f"{i}.qkv": normal(width, columns),
            f"{i}.out": normal(width, width, shrunk),
            f"{i}.norm_mlp": np.ones(width, dtype),
            f"{i}.up": normal(width, 4 * width),
            f"{i}.down": normal(4 * width, width, shrunk),
        }
        if model.distances:
            made[f"{i}.bias"] = np.zeros((model.heads, model.distances), dtype)
    return made


def loss_and_gradients(
    model: Model, weights: Arrays, tokens: Any, targets: Any, documents: Any = None
) -> tuple[float, Arrays]:
    """Computes the mean cross-entropy of next-token prediction and its gradients.

    tokens, targets and documents are integers [batch, M]; targets of -1 are ignored. documents
    holds each token's document index. Tokens attend only to their own document.
    """
    loss, pullback = loss_vjp(model, weights, tokens, targets, documents)
    return loss, pullback()


def loss_vjp(
    model: Model, weights: Arrays, tokens: Any, targets: Any, documents: Any = None
) -> tuple[float, Callable[[], Arrays]]:
    """Returns the loss, and a function that computes the gradients of all weights."""
    x, embedding = embedding_vjp(weights["tokens"], weights.get("positions"), tokens)
    blocks = []
    for i in range(model.blocks):
        x, block = block_vjp(model, weights, i, x, documents)
        blocks.append(block)
    x, norm = rms_norm_vjp(x, weights["norm"])
    logits, linear = linear_vjp(x, weights["logits"])
    loss, cross_entropy = cross_entropy_vjp(logits, targets)

    def pullback() -> Arrays:
        grads: Arrays = {}
        dx, grads["logits"] = linear(cross_entropy())
        dx, grads["norm"] = norm(dx)
        for block in reversed(blocks):
            dx, its = block(dx)
            grads |= its
        return grads | embedding(dx)

    return loss, pullback


def block_vjp(
    model: Model, weights: Arrays, i: int, x: Any, documents: Any
) -> tuple[Any, Callable]:
    """Computes x + attention(norm(x)), then x + mlp(norm(x))."""

    def weight(name: str) -> Any:
        return weights[f"{i}.{name}"]

    y, norm_attention = rms_norm_vjp(x, weight("norm_attention"))
    bias = weights.get(f"{i}.bias")
    y, attention = attention_vjp(model, y, weight("qkv"), weight("out"), bias, documents)
    x = x + y
    y, norm_mlp = rms_norm_vjp(x, weight("norm_mlp"))
    y, up = linear_vjp(y, weight("up"))
    y, gelu = gelu_vjp(y)
    y, down = linear_vjp(y, weight("down"))

    def pullback(dx: Any) -> tuple[Any, Arrays]:
        grads: Arrays = {}
        dy, grads["down"] = down(dx)
        dy, grads["up"] = up(gelu(dy))
        dy, grads["norm_mlp"] = norm_mlp(dy)
        dx = dx + dy
        dy, its = attention(dx)
        grads |= its
        dy, grads["norm_attention"] = norm_attention(dy)
        return dx + dy, {f"{i}.{name}": grad for name, grad in grads.items()}

    return x + y, pullback


def attention_vjp(
    model: Model, x: Any, qkv: Any, out: Any, bias: Any, documents: Any
) -> tuple[Any, Callable]:
    """Computes causal self-attention: q, k and v are columns of x @ qkv; `out` mixes the heads.

    bias [heads, distances] is added to the scores by distance and is differentiated, too. documents
    [batch, M] hides keys of other documents. Both are expressions that kernels evaluate per score,
    so that no [M, M] array is stored.
    """
    batch, M, _ = x.shape
    y, project = linear_vjp(x, qkv)
    # With layout "bshd", [batch, M, heads, d], q, k and v are views of y without a transposition.
    y = y.reshape(batch, M, -1, model.d)
    ends = model.heads, model.heads + model.kv_heads
    parts = (y[:, :, : ends[0]], y[:, :, ends[0] : ends[1]], y[:, :, ends[1] :])
    q, k, v = (part.astype(model.attention, copy=False) for part in parts)
    how: Arrays = {"causal": True, "layout": "bshd", "backend": model.backend, "captured": {}}
    if bias is not None:
        last = bias.shape[1] - 1
        how["score_mod"] = "score + bias_of[head, min(max(query - key, 0), last)]"
        how["captured"] |= {"bias_of": bias, "last": last}
        how["wrt"] = ("q", "k", "v", "bias_of")
    if documents is not None:
        how["mask"] = "document[batch, query] == document[batch, key]"
        how["captured"] |= {"document": documents}
    o, attend = cupyfa.vjp(q, k, v, **how)
    o = o.reshape(batch, M, -1).astype(x.dtype, copy=False)
    y, mix = linear_vjp(o, out)

    def pullback(dy: Any) -> tuple[Any, Arrays]:
        grads: Arrays = {}
        do, grads["out"] = mix(dy)
        do = do.reshape(batch, M, model.heads, model.d).astype(model.attention, copy=False)
        dq, dk, dv, *of_bias = attend(do)
        dqkv = module_of(x).concatenate((dq, dk, dv), axis=2).astype(x.dtype, copy=False)
        dx, grads["qkv"] = project(dqkv.reshape(batch, M, -1))
        return dx, grads | dict(zip(["bias"], of_bias))

    return y, pullback


def linear_vjp(x: Any, w: Any) -> tuple[Any, Callable]:
    """Computes x @ w."""

    def pullback(dy: Any) -> tuple[Any, Any]:
        rows = x.reshape(-1, x.shape[-1])
        return dy @ w.T, rows.T @ dy.reshape(-1, dy.shape[-1])

    return x @ w, pullback


def rms_norm_vjp(x: Any, gain: Any) -> tuple[Any, Callable]:
    """Divides x by its root mean square along the last axis, and multiplies it by gain."""
    root = ((x * x).mean(-1, keepdims=True) + 1e-5) ** 0.5
    normed = x / root

    def pullback(dy: Any) -> tuple[Any, Any]:
        dn = dy * gain
        dx = (dn - normed * (dn * normed).mean(-1, keepdims=True)) / root
        return dx, (dy * normed).sum(tuple(range(dy.ndim - 1)))

    return normed * gain, pullback


def gelu_vjp(x: Any) -> tuple[Any, Callable]:
    """Computes GELU in its tanh approximation (Hendrycks and Gimpel, 2016, arXiv:1606.08415)."""
    a = math.sqrt(2 / math.pi)
    t = module_of(x).tanh(a * (x + 0.044715 * x**3))

    def pullback(dy: Any) -> Any:
        slope = a * (1 + 3 * 0.044715 * x**2)
        return dy * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope)

    return 0.5 * x * (1 + t), pullback


def embedding_vjp(tokens: Any, positions: Any, which: Any) -> tuple[Any, Callable]:
    """Looks up token embeddings, and adds position embeddings unless `positions` is None."""
    M = which.shape[1]

    def pullback(dx: Any) -> Arrays:
        xp = module_of(dx)
        one_hot = (which.reshape(-1, 1) == xp.arange(len(tokens))).astype(dx.dtype)
        grads = {"tokens": one_hot.T @ dx.reshape(-1, dx.shape[-1])}
        if positions is not None:
            grads["positions"] = xp.zeros_like(positions)
            grads["positions"][:M] = dx.sum(0)
        return grads

    return tokens[which] + (0 if positions is None else positions[:M]), pullback


def cross_entropy_vjp(logits: Any, targets: Any) -> tuple[float, Callable]:
    """Computes the mean of -log softmax(logits)[target] over all targets that are not -1."""
    xp = module_of(logits)
    shifted = logits - logits.max(-1, keepdims=True)
    log_softmax = shifted - xp.log(xp.exp(shifted).sum(-1, keepdims=True))
    hit = (targets[..., None] == xp.arange(logits.shape[-1])).astype(logits.dtype)
    counted = hit.sum()

    def pullback() -> Any:
        return (xp.exp(log_softmax) * hit.sum(-1, keepdims=True) - hit) / counted

    return float(-(log_softmax * hit).sum() / counted), pullback


class Adam:
    """The Adam optimizer (Kingma and Ba, 2014, arXiv:1412.6980)."""

    def __init__(self, weights: Arrays, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        self.betas, self.steps = betas, 0
        self.means = {name: 0 * weight for name, weight in weights.items()}
        self.squares = {name: 0 * weight for name, weight in weights.items()}

    def step(self, weights: Arrays, grads: Arrays, rate: float) -> None:
        """Updates the weights in place."""
        self.steps += 1
        beta, gamma = self.betas
        for name, grad in grads.items():
            mean, square = self.means[name], self.squares[name]
            mean += (1 - beta) * (grad - mean)
            square += (1 - gamma) * (grad * grad - square)
            root = (square / (1 - gamma**self.steps)) ** 0.5 + 1e-8
            weights[name] -= rate / (1 - beta**self.steps) * mean / root


def sorting(batch: int, count: int, kinds: int, seed: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yields batches of `count` random tokens out of `kinds`, followed by the same tokens sorted.

    Only the sorted half has targets. Tokens and targets are [batch, 2 count - 1].
    """
    random = np.random.default_rng(seed)
    while True:
        unsorted = random.integers(0, kinds, (batch, count))
        whole = np.concatenate([unsorted, np.sort(unsorted, axis=1)], axis=1)
        targets = whole[:, 1:].copy()
        targets[:, : count - 1] = -1
        yield whole[:, :-1], targets


def repeating(
    batch: int, length: int, kinds: int, every: int, seed: int = 0
) -> Iterator[tuple[Any, Any, Any]]:
    """Yields batches of rows that are packed with documents of different lengths.

    A document repeats `every` random tokens out of `kinds`, so that all later tokens are
    predictable. Tokens, targets and document indices are [batch, length].
    """
    random = np.random.default_rng(seed)
    place = np.arange(length)
    while True:
        starts = random.random((batch, length)) < 1 / (4 * every)
        starts[:, 0] = True
        documents = starts.cumsum(axis=1)
        within = place - np.maximum.accumulate(np.where(starts, place, 0), axis=1)
        tokens = random.integers(0, kinds, (batch, length))
        first = place - within + within % every  # index of the token that this one repeats
        tokens = np.take_along_axis(tokens, first, axis=1)
        targets = np.full_like(tokens, -1)
        known = within[:, 1:] >= every
        targets[:, :-1][known] = tokens[:, 1:][known]
        yield tokens, targets, documents


def reading(text: np.ndarray, batch: int, length: int, seed: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yields batches of text excerpts and of the same excerpts shifted by one character."""
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(text) - length, batch)
        both = text[starts[:, None] + np.arange(length + 1)]
        yield both[:, :-1], both[:, 1:]


def without_attention(tokens: np.ndarray, targets: np.ndarray) -> float:
    """Returns the lowest loss of any model without attention, which sees only the last token.

    It is the conditional entropy of the targets, given the last token and, if useful, its position.
    """
    rows, places = np.nonzero(targets >= 0)
    if tokens.shape[1] > 1:
        given = places * (tokens.max() + 1) + tokens[rows, places]
    else:  # text excerpts start anywhere, so positions carry no information
        given = tokens[rows, places]
    _, given = np.unique(given, return_inverse=True)
    counts = np.zeros((given.max() + 1, targets.max() + 1))
    np.add.at(counts, (given, targets[rows, places]), 1)
    shares = counts / counts.sum(1, keepdims=True)
    logs = np.log(shares, where=shares > 0, out=np.zeros_like(shares))
    return float(-(counts * logs).sum() / counts.sum())


def module_of(array: Any) -> Any:
    """Returns the module of an array, numpy or cupy."""
    if isinstance(array, np.ndarray):
        return np
    import cupy

    return cupy


def train(
    model: Model,
    batches: Iterator[tuple[Any, ...]],
    steps: int,
    *,
    rate: float = 3e-3,
    seed: int = 0,
    on_device: bool = False,
    trained: Arrays | None = None,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> list[float]:
    """Trains a model and returns the loss of each step.

    The learning rate has a linear warm-up and a cosine decay. If ``trained`` is given, the final
    weights are stored in it as NumPy arrays.
    """
    weights: Arrays = parameters(model, seed=seed)
    if on_device:
        import cupy

        weights = {name: cupy.asarray(weight) for name, weight in weights.items()}
    xp = module_of(weights["norm"])
    adam, losses = Adam(weights), []
    warmup = max(steps // 20, 1)
    for step in range(steps):
        loss, grads = loss_and_gradients(model, weights, *map(xp.asarray, next(batches)))
        falling = 0.55 + 0.45 * math.cos(math.pi * step / steps)
        adam.step(weights, grads, rate * min((step + 1) / warmup, falling))
        losses.append(loss)
        report(step + 1, loss)
    if trained is not None:
        trained |= {name: x if xp is np else x.get() for name, x in weights.items()}
    return losses


def save(path: str, model: Model, weights: Arrays, **about: Any) -> None:
    """Writes weights, the model's sizes and further metadata to an .npz file."""
    np.savez(path, about=np.array(json.dumps({"model": asdict(model), **about})), **weights)


def load(path: str, backend: str) -> tuple[Model, Arrays, dict[str, Any]]:
    """Reads a model, its weights and metadata from a file that `save` has written."""
    with np.load(path) as file:
        arrays = dict(file)
    about = json.loads(str(arrays.pop("about")))
    return Model(**{**about.pop("model"), "backend": backend}), arrays, about


def characters() -> tuple[np.ndarray, str]:
    """Returns the text of the project's documentation as integers, and its alphabet."""
    root = Path(__file__).resolve().parent.parent
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    kinds, numbers = np.unique(list(text), return_inverse=True)
    return numbers, "".join(kinds)


def draw(losses: list[float], levels: dict[str, float], path: str, title: str) -> None:
    """Plots the losses, and the losses of simpler models as levels, the highest first."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4))
    axes = figure.add_subplot()
    axes.plot(range(1, len(losses) + 1), losses, color="#0072b2", linewidth=1.5)
    for (name, level), side in zip(levels.items(), ("bottom", "top")):
        axes.axhline(level, color="#424a53", linestyle="--", linewidth=1)
        place = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points"}
        label = f"{level:.2f} {name}"  # drawn to the right of the plot, above or below its line
        axes.annotate(label, (1, level), (6, 0), verticalalignment=side, **place)
    axes.set(xlim=(0, len(losses)), ylim=(0, None), xlabel="step")
    axes.set_title(f"{title}; {losses[-1]:.2f} at the end", loc="left", fontsize=10)
    axes.grid(color="#d8dee4", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    metadata = {"Title": title, **({"Date": None} if path.endswith(".svg") else {})}
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "loss"}):  # small, reproducible SVGs
        figure.savefig(path, bbox_inches="tight", pad_inches=0.15, metadata=metadata)


EVERY = 4  # period of the documents in the task "repeat", in tokens

# Default sizes. In the simulator a step takes about a tenth of a second.
SIZES = {
    ("sort", "simulator"): dict(
        steps=300, batch=16, length=8, kinds=8, width=32, heads=2, kv_heads=1, blocks=1, rate=1e-2
    ),
    ("sort", "cuda"): dict(
        steps=1000, batch=64, length=64, kinds=64, width=256, heads=4, kv_heads=2, blocks=2,
        rate=2e-3,
    ),
    ("repeat", "simulator"): dict(
        steps=100, batch=4, length=32, kinds=8, width=32, heads=2, kv_heads=1, blocks=1, rate=1e-2,
        distances=8,
    ),
    ("repeat", "cuda"): dict(
        steps=500, batch=32, length=512, kinds=64, width=128, heads=4, kv_heads=2, blocks=1,
        rate=5e-3, distances=16,
    ),
    ("text", "simulator"): dict(
        steps=300, batch=8, length=32, width=32, heads=2, kv_heads=1, blocks=1, rate=1e-2
    ),
    ("text", "cuda"): dict(
        steps=2000, batch=64, length=256, width=384, heads=6, kv_heads=2, blocks=2, rate=1e-3
    ),
}  # fmt: skip


def main() -> None:
    options = arguments()
    backend = options.backend
    if backend == "auto":
        backend = "cuda" if has_gpu() else "simulator"
    elif backend == "cuda" and not has_gpu():
        sys.exit("--backend cuda: there is no GPU; omit the option, or run `cupyfa doctor`")
    if options.plot and not os.access(Path(options.plot).resolve().parent, os.W_OK):
        sys.exit(f"--plot {options.plot}: its folder cannot be written to; choose another")
    if options.save and not os.access(Path(options.save).resolve().parent, os.W_OK):
        sys.exit(f"--save {options.save}: its folder cannot be written to; choose another")
    size = SIZES[options.task, backend]
    size |= {name: value for name, value in vars(options).items() if value is not None}
    for many, few in (("width", "heads"), ("heads", "kv_heads")):
        if size[many] % size[few]:
            sys.exit(f"{many}={size[many]} is not a multiple of {few}={size[few]}; give a multiple")
    alphabet = None
    if options.task == "sort":
        vocabulary, length = size["kinds"], 2 * size["length"] - 1
        batches = sorting(size["batch"], size["length"], vocabulary, size["seed"])
        blind = without_attention(*next(sorting(20_000, size["length"], vocabulary)))
    elif options.task == "repeat":
        vocabulary, length = size["kinds"], size["length"]
        batches = repeating(size["batch"], length, vocabulary, EVERY, size["seed"])
        blind = without_attention(*next(repeating(20_000, length, vocabulary, EVERY))[:2])
    else:
        text, alphabet = characters()
        vocabulary = len(alphabet)
        length, batches = size["length"], reading(text, size["batch"], size["length"], size["seed"])
        blind = without_attention(text[:-1, None], text[1:, None])
    model = Model(
        vocabulary=vocabulary,
        length=length,
        width=size["width"],
        heads=size["heads"],
        kv_heads=size["kv_heads"],
        blocks=size["blocks"],
        attention=size["attention"],
        backend=backend,
        distances=size.get("distances", 0),
    )
    levels = {"guessing": math.log(vocabulary), "without attention, at best": blind}
    print(f"{options.task}, batch {size['batch']}: {model}")
    print(", ".join(f"{name}: {level:.3f}" for name, level in levels.items()), flush=True)
    start = time.perf_counter()

    def report(step: int, loss: float) -> None:
        if step == 1 or step % max(size["steps"] // 15, 1) == 0:
            print(
                f"step {step:5}  loss {loss:.3f}  {time.perf_counter() - start:.1f} s", flush=True
            )

    trained: Arrays = {}
    losses = train(
        model,
        batches,
        size["steps"],
        rate=size["rate"],
        seed=size["seed"],
        on_device=backend == "cuda",
        trained=trained,
        report=report,
    )
    if options.save:
        save(options.save, model, trained, task=options.task, alphabet=alphabet)
    if options.plot:
        where = "in the simulator" if backend == "simulator" else "on a GPU"
        title = f"loss of the task {options.task!r}, {where}: M = {length}, d = {model.d}"
        draw(losses, levels, options.plot, title)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small transformer with cupyfa's gradients.",
        epilog="Default sizes are small in the simulator and larger on a GPU.",
    )
    parser.add_argument("--task", choices=("sort", "repeat", "text"), default="sort",
                        help="sort tokens, repeat those of packed documents, or learn the text of "
                        "the project's pages")  # fmt: skip
    parser.add_argument("--backend", choices=("auto", "cuda", "simulator"), default="auto")
    parser.add_argument("--attention", choices=("float16", "float32"), default="float32",
                        help="the dtype of q, k and v")  # fmt: skip
    for name, what in {
        "steps": "training steps",
        "batch": "sequences in a step",
        "length": "tokens to sort, or tokens or characters in a sequence",
        "kinds": "kinds of tokens",
        "width": "columns of the model",
        "heads": "query heads",
        "kv-heads": "key heads; a divisor of heads",
        "blocks": "blocks of attention and MLP",
    }.items():
        parser.add_argument(f"--{name}", type=count, help=what)
    parser.add_argument("--rate", type=float, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", metavar="FILE", type=picture,
                        help="draw the losses to an .svg or .png file")  # fmt: skip
    parser.add_argument("--save", metavar="FILE.npz", type=weights_file,
                        help="write the weights to a file, for generate.py")  # fmt: skip
    return parser.parse_args()


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def picture(text: str) -> str:
    if not text.endswith((".svg", ".png")):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the name of a picture; it must end with .svg or .png"
        )
    return text


def weights_file(text: str) -> str:
    if not text.endswith(".npz"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a weights file; it must end with .npz")
    return text


def has_gpu() -> bool:
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount() > 0
    except Exception:
        return False


if __name__ == "__main__":
    main()
