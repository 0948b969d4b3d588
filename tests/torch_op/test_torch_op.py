"""Attention of torch tensors as an operator, compared with attention written in torch."""

import math
import subprocess
import sys

import pytest

import cupyfa
from cupyfa import Packed, Unsupported

torch = pytest.importorskip("torch")

from cupyfa import torch_op  # noqa: E402  # after the check for torch
from cupyfa.torch_op import attention  # noqa: E402

B, H, KV, M, N, D, DV = 2, 4, 2, 9, 13, 8, 6
SIM = {"backend": "simulator"}
OP = torch.ops.cupyfa.attention.default
SHAPES = {"bias": (H, M, N), "alibi_slopes": (H,), "sink": (B, H)}
CASES = {
    "plain": {},
    "top-left": {"causal": "top-left"},
    "window": {"causal": True, "window": (3, None), "scale": 0.3},
    "softcap": {"softcap": 2.0, "window": None, "causal": False, "scale": 1},
    "expressions": {"score_mod": "score * 0.5", "mask": "key <= position", "offset": 2},
    "bias": {"bias": True, "causal": True},
    "slopes and sink": {"alibi_slopes": True, "sink": True},
}


def drawn(*shape, dtype=torch.float64, device="cpu"):
    made = torch.Generator().manual_seed(sum(shape))
    values = torch.randn(shape, generator=made, dtype=torch.float64)
    return values.to(device, dtype).requires_grad_()


def inputs(device="cpu", **given):
    """Returns q, k, v and options, in which True stands for an array of SHAPES."""
    qkv = [drawn(B, *x, device=device) for x in ((H, M, D), (KV, N, D), (KV, N, DV))]
    arrays = {x: drawn(*SHAPES[x], device=device) for x in given if x in SHAPES}
    return qkv, {**given, **arrays}


def written_in_torch(q, k, v, *, causal=False, window=None, scale=None, softcap=None, **more):
    scores = q @ k.repeat_interleave(H // KV, 1).mT * (scale or 1 / math.sqrt(D))
    offset = 0 if causal == "top-left" else more.get("offset", N - M)
    position = torch.arange(M, device=q.device)[:, None] + offset
    distance = torch.arange(N, device=q.device) - position
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores * 0.5 if "score_mod" in more else scores
    scores = scores + more.get("bias", 0)
    slopes = more.get("alibi_slopes", q.new_zeros(H))
    scores = scores - slopes[:, None, None] * distance.abs()
    if causal or "mask" in more:
        scores = scores.masked_fill(distance > 0, -math.inf)
    if window:
        scores = scores.masked_fill(distance < -window[0], -math.inf)
    sink = more.get("sink", q.new_full((B, H), -math.inf))
    lse = torch.cat([scores, sink[..., None, None].expand(B, H, M, 1)], -1).logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v.repeat_interleave(H // KV, 1), lse


def results(function, device="cpu", **given):
    """Returns out, lse and the gradients of a sum that weights each element of both differently."""
    qkv, options = inputs(device, **given)
    out, lse = function(*qkv, **options)
    weights = [drawn(*x.shape, device=device).detach() for x in (out, lse)]
    wanted = (out * weights[0]).sum() + (lse * weights[1]).sum()
    arrays = (*qkv, *(options[x] for x in SHAPES if x in options))
    return out, lse, *torch.autograd.grad(wanted, arrays)


def close(found, wanted):
    assert len(found) == len(wanted)
    for x, y in zip(found, wanted):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def ours(*qkv, **options):
    return attention(*qkv, return_lse=True, **options)


def compiled(function=ours, **how):
    torch.compiler.reset()  # torch compiles a function at most eight times
    return torch.compile(function, fullgraph=True, **how)


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients(case):
    wanted = results(written_in_torch, **CASES[case])
    close(results(lambda *x, **how: ours(*x, **how, **SIM), **CASES[case]), wanted)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_torch_compile_passes_over_it(backend, case):
    call = compiled(lambda *x, **how: ours(*x, **how, **SIM), backend=backend)
    close(results(call, **CASES[case]), results(written_in_torch, **CASES[case]))


def test_it_is_one_node_of_the_graph():
    nodes = []

    def keep(graph, inputs):
        nodes.extend(x.target for x in graph.graph.nodes if x.op == "call_function")
        return graph

    (q, k, v), _ = inputs()
    compiled(attention, backend=keep)(q, k, v, causal=True, window=(3, None), **SIM)
    assert nodes.count(OP) == 1
    assert not [x for x in nodes if x is not OP and "getitem" not in str(x)]


def test_one_graph_is_for_all_lengths_and_each_scale_gets_its_own():
    call = compiled(attention, backend="eager", dynamic=True)
    for n, scale in ((5, 0.5), (7, 0.5), (11, 0.25)):
        q, k, v = (drawn(1, 2, n, D) for _ in range(3))
        found = call(q, k, v, scale=scale, **SIM)
        assert torch.equal(found, attention(q, k, v, scale=scale, **SIM))


def test_gradcheck():
    arrays = [drawn(1, 2, 3, 4) for _ in range(3)]
    call = lambda *x: attention(*x, causal=True, return_lse=True, **SIM)  # noqa: E731
    assert torch.autograd.gradcheck(call, arrays, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape, layout",
    [((9, 8), "bhsd"), ((2, 9, 8), "bhsd"), ((2, 0, 9, 8), "bhsd"), ((2, 9, 2, 8), "bshd")],
)
def test_torch_finds_no_fault_of_the_operator(shape, layout, dtype):
    """Compares shapes, strides and dtypes of fake tensors with those of results, for example."""
    arrays = [drawn(*shape, dtype=dtype) for _ in range(3)]
    torch.library.opcheck(OP, (*arrays, None, None, None), {"layout": layout, **SIM})


def test_strides_parameters_and_gradients_of_lse_alone():
    q, k, v = (torch.nn.Parameter(drawn(B, M, H, D)) for _ in range(3))
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    out, lse = ours(*turned, **SIM)
    assert torch.equal(out, attention(q, k, v, layout="bshd", **SIM).transpose(1, 2))
    assert torch.autograd.grad(lse.sum(), v, retain_graph=True)[0].count_nonzero() == 0
    (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        dq.sum().backward()


def test_only_gradients_that_are_asked_for_are_computed(monkeypatch):
    asked, backward = [], torch_op.api.backward

    def seen(**given):
        asked.append((given["wrt"], "dlse" in given))
        return backward(**given)

    monkeypatch.setattr(torch_op.api, "backward", seen)
    (q, k, v), options = inputs(bias=True)
    attention(q.detach(), k, v.detach(), **options, **SIM).sum().backward()
    assert asked == [("k,bias", False)]
    assert q.grad is v.grad is None and k.grad.shape == k.shape


@pytest.mark.parametrize(
    "wrong, message",
    [
        (
            {"dropout": 0.5},
            "dropout is of type float, .* call cupyfa.attention, outside of torch.compile",
        ),
        ({"captured": {}}, "captured is of type dict"),
        ({"mask": torch.ones(M, N)}, "mask is of type Tensor"),
        ({"score_mod": lambda score: score}, "score_mod is of type function"),
        ({"window": 3}, "window is of type int"),
        ({"bias": [1.0]}, "bias is of type list"),
        ({"q": Packed(drawn(4, 2, 8), torch.tensor([0, 4]))}, "q is of type Packed"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_other_arguments_are_refused(wrong, message):
    (q, k, v), _ = inputs()
    with pytest.raises(TypeError, match=message):
        attention(**{"q": q, "k": k, "v": v, **wrong}, **SIM)


@pytest.mark.parametrize("call", [attention, compiled(attention, backend="eager")], ids=str)
def test_errors_are_those_of_attention(call):
    (q, k, v), _ = inputs()
    with pytest.raises(ValueError, match="softcap is -1.0; use a finite number above 0"):
        call(q, k, v, softcap=-1.0, **SIM)


def test_the_library_does_not_import_torch():
    code = "import sys, cupyfa, cupyfa.lab.bench.peers; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_on_a_gpu(case):
    wanted = results(written_in_torch, "cuda", **CASES[case])
    close(results(ours, "cuda", **CASES[case]), wanted)
    close(results(compiled(), "cuda", **CASES[case]), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_bits_on_a_gpu_are_those_of_attention(dtype):
    q, k, v = (drawn(2, 4, 200, 64, dtype=dtype, device="cuda").detach() for _ in range(3))
    wanted = torch.from_dlpack(cupyfa.attention(q, k, v, causal=True, check=True))
    for call in (attention, compiled(attention)):
        assert torch.equal(call(q, k, v, causal=True), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("is_default", [True, False])
def test_work_is_queued_in_the_current_stream_of_torch(monkeypatch, is_default):
    """Neither the host waits for a stream that is busy, nor does the device work in another one."""
    seen, device = [], torch_op.backend_named("cuda")
    for name in ("attention", "backward"):
        function = getattr(torch_op.api, name)

        def noted(*, function=function, **given):
            seen.append(device.stream)
            return function(**given)

        monkeypatch.setattr(torch_op.api, name, noted)
    x = torch.zeros(3, 2, 4, 200, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    attention(*x).sum().backward()  # compiles
    values = torch.randn(x.shape, device="cuda").half()
    torch.cuda.synchronize()
    before = device.stream
    stream = torch.cuda.default_stream() if is_default else torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)
        with torch.no_grad():
            x.copy_(values)
        out = attention(*x)
        (grad,) = torch.autograd.grad(out.sum(), x)
        is_busy = not stream.query()
    torch.cuda.synchronize()
    assert is_busy and seen[2:] == [stream.cuda_stream] * 2 and device.stream == before
    assert torch.equal(out, attention(*x)) and grad.isfinite().all() and grad.count_nonzero()


@pytest.mark.gpu
def test_a_cuda_graph_of_torch_is_refused():
    q, k, v = torch.randn(3, 2, 4, 200, 64, device="cuda", dtype=torch.float16)
    attention(q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(Unsupported, match="capture cupyfa.attention"):
        attention(q, k, v)


@pytest.mark.gpu
def test_graphs_of_reduce_overhead_leave_it_out():
    q, k, v = (drawn(2, 4, 200, 64, device="cuda") for _ in range(3))
    function = lambda q, k, v: attention(q * 2, k + 1, v, causal=True) * 3  # noqa: E731
    call = compiled(function, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        found = call(q, k, v)
        torch.testing.assert_close(found, function(q, k, v), rtol=0, atol=0)
        (dq,) = torch.autograd.grad(found.sum(), q)
        (wanted,) = torch.autograd.grad(function(q, k, v).sum(), q)
        torch.testing.assert_close(dq, wanted)


@pytest.mark.gpu
def test_tensors_of_another_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    q, k, v = (drawn(2, 4, 200, 64, device="cuda:1", dtype=torch.float32) for _ in range(3))
    out = attention(q, k, v)
    (dq,) = torch.autograd.grad(out.sum(), q)
    there = (x.detach().to("cuda:0") for x in (q, k, v))
    assert out.device == dq.device == q.device and torch.cuda.current_device() == 0
    assert torch.equal(out.to("cuda:0"), attention(*there))
