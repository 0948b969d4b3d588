"""wide.py: compiles wgmma_slices (kernels/ of this tree) with given constants, checks and times them, persistent or not, beside mma_slices and torch."""
import sys, os, json, ctypes, time
from multiprocessing import get_context
from statistics import median
os.environ.setdefault("CUPY_CACHE_DIR", "/tmp/cupycache")
HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
INC = ROOT + "/kernels/include"
START = time.time()
LN = {"f": ("cuda_fp16.h", "__half"), "b": ("cuda_bf16.h", "__nv_bfloat16")}
cdiv = lambda a, b: -(-a // b)
def shared_bytes(file, c):
    if file == "mma_slices":
        return 2 * (c["Br"] * c["span"] + c["stages"] * (c["Br"] + c["Bc"]) * c["Bd"]) + 4 * c["Br"] * (c["span"] // c["Bc"] + c["Bc"] // c["Wc"])
    parked = 2 * c["Br"] * (c["Bc"] if c["span"] > c["Bc"] else 16)
    return cdiv(2 * c["stages"] * (c["Br"] + c["Bc"]) * 64 + parked + 16 * c["stages"], 1024) * 1024
def width(dv): return cdiv(dv, cdiv(dv, 256) * 16) * 16
def value_rows(c):
    boxes = cdiv(width(c["d"]), 64)
    return next(x for x in (128, 64, 32, 16) if c["Bc"] % x == 0 and x * boxes <= c["Br"] + c["Bc"])
def threads(file, c): return 32 * c["Br"] * c["Bc"] // (c["Wr"] * c["Wc"]) if file == "mma_slices" else 128 + 2 * c["Br"]
def text(file, dt, c):
    h, t = LN[dt]
    c = {k: v for k, v in c.items() if not k.startswith("_")}
    if file != "mma_slices": c["Wr"] = 16
    c = {**c, "dv": c["d"], "packed": 1, "threads": threads(file, c), "shared_bytes": shared_bytes(file, c)}
    s = f"#include <{h}>\nusing scalar={t}; using operand={t}; using real=float;\n"
    s += "".join(f"constexpr {'bool' if isinstance(v, bool) else 'int'} {k}={str(v).lower()};\n" for k, v in c.items())
    return s + f'#line 1 "{file}"\n' + open(f"{ROOT}/kernels/forward/{file}.cu").read()
def module(job):
    import cupy
    file, dt, c = job
    arch = () if file == "mma_slices" else ("-arch=sm_90a",)
    m = cupy.RawModule(code=text(file, dt, c), options=(*arch, "-std=c++17", "-I" + INC, "--ptxas-options=-v"))
    return m.get_function(file)
def compile_one(job):
    try: module(job)
    except Exception as e: return f"{job}: {str(e)[:600]}"
_cu = None
def tmap(t, rows):
    """t [B,H,S,d] torch 16-bit -> 128 bytes"""
    global _cu
    import numpy as np, torch
    if _cu is None: _cu = ctypes.CDLL("libcuda.so.1")
    raw = (ctypes.c_uint64 * 24)(); a = ctypes.addressof(raw); off = (-a) % 64
    B, H, S, d = t.shape
    dims = (ctypes.c_uint64 * 4)(d, S, H, B)
    st = (ctypes.c_uint64 * 3)(t.stride(2) * 2, t.stride(1) * 2, t.stride(0) * 2)
    box = (ctypes.c_uint32 * 4)(64, rows, 1, 1); es = (ctypes.c_uint32 * 4)(1, 1, 1, 1)
    dt = 6 if t.dtype == torch.float16 else 9
    r = _cu.cuTensorMapEncodeTiled(ctypes.c_void_p(a + off), dt, 4, ctypes.c_void_p(t.data_ptr()), dims, st, box, es, 0, 3, 2, 0)
    assert r == 0, r
    return np.frombuffer(ctypes.string_at(a + off, 128), dtype="V128")[0]
W = lambda Bc, span, stages, label, Br=128, **more: ("wgmma_slices", dict(Br=Br, Bc=Bc, span=span, stages=stages, **more), label)
MMA = ("mma_slices", dict(Br=128, Bc=256, Wr=64, Wc=64, Bd=32, span=512, stages=4), "mma_slices")
TWO, ONE, SMALL = W(256, 512, 3, "256/512/3"), W(256, 256, 4, "256/256/4"), W(128, 256, 6, "128/256/6")
TWO_P, ONE_P = W(256, 512, 3, "256/512/3 stay", _stay=1), W(256, 256, 4, "256/256/4 stay", _stay=1)
ONE_3 = W(256, 256, 3, "256/256/3")
DEFAULT = [
    (32, 8, 256, 1024, False, "b", [MMA, TWO, ONE, ONE_3, TWO_P, ONE_P, SMALL]),
    (32, 8, 1024, 1024, False, "b", [MMA, TWO, ONE, TWO_P, ONE_P, SMALL]),
    (8, 8, 2048, 512, False, "b", [MMA, TWO, ONE, TWO_P, SMALL]),
    (8, 8, 2048, 320, False, "b", [MMA, TWO, ONE, TWO_P, SMALL]),
    (8, 8, 2048, 320, True, "b", [MMA, TWO, ONE, SMALL]),
    (32, 8, 1024, 1024, False, "f", [TWO]),
]
def main(jobs, budget=0.5, reps=9):
    flat = {}
    for B, H, M, d, causal, dt, vs in jobs:
        for f, c, l in vs:
            j = (f, dt, {**{k: v for k, v in c.items() if k[0] != "_"}, "d": d, "causal": causal, "windowed": False}); flat[repr(j)] = j
    with get_context("spawn").Pool(16) as pool:
        bad = [x for x in pool.map(compile_one, list(flat.values()), chunksize=1) if x]
    print(f"{len(flat)} compiled {time.time()-START:.0f} s; bad: {bad}", flush=True)
    import cupy, torch, numpy as np
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    TD = np.dtype([("p", "u8"), ("s", "i8", 3)])
    out = []
    for B, H, M, d, causal, dt, vs in jobs:
        torch.manual_seed(0)
        ty = torch.float16 if dt == "f" else torch.bfloat16
        q, k, v = (torch.randn(B, H, M, d, device="cuda", dtype=ty) for _ in "qkv")
        o = torch.empty_like(q); lse = torch.empty(B, H, M, device="cuda")
        sums = torch.empty(B * H * cdiv(M, 128) * 128 * cdiv(d, 256) * max(256, width(d)), device="cuda")
        def tens(t): return np.array((t.data_ptr(), [*(list(t.stride())[:3])]), TD)[()]
        def reference(b, h):  # by heads, in float32
            s = (q[b, h].float() @ k[b, h].float().mT) * d ** -.5
            if causal: s = s.masked_fill(torch.ones(M, M, device="cuda", dtype=torch.bool).triu(1), float("-inf"))
            return s.softmax(-1) @ v[b, h].float(), s.logsumexp(-1)
        some = [(0, 0), (B - 1, H - 1), (B // 2, 1)]
        torch.backends.cuda.matmul.allow_tf32 = False
        refs = [reference(*x) for x in some]
        lanes, names, all_o = [], [], None
        for f, c, label in vs:
            cc = {**{k: v for k, v in c.items() if k[0] != "_"}, "d": d, "causal": causal, "windowed": False}
            try: fn = module((f, dt, cc))
            except Exception as e: continue
            sb = shared_bytes(f, cc); fn.max_dynamic_shared_size_bytes = sb
            Br, Bc = c["Br"], c["Bc"]
            tiles = cdiv(M, Br) * H * B
            args = (*(tens(x) for x in (q, k, v, o)), np.array((lse.data_ptr(), [lse.stride(0), lse.stride(1), 1]), TD)[()], np.uint64(sums.data_ptr()),
                    np.int32(M), np.int32(M), np.int32(H), np.int32(1), np.int32(0), np.int32(0), np.float32(d ** -.5))
            if f != "mma_slices": args = (tmap(q, Br), tmap(k, Bc), tmap(v, value_rows(cc)), *args, np.int32(B))
            grid, nt = min(tiles, sms) if c.get("_stay") else tiles, threads(f, cc)
            def launch(fn=fn, args=args, grid=grid, nt=nt, sb=sb):
                with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream): fn((grid,), (nt,), args, shared_mem=sb)
            o.fill_(float("nan")); lse.fill_(float("nan")); launch(); torch.cuda.synchronize()
            e1 = max(((o[b, h].float() - r).pow(2).mean() / r.pow(2).mean()).sqrt().item() for (b, h), (r, _) in zip(some, refs))
            e2 = max((lse[b, h] - l).abs().max().item() for (b, h), (_, l) in zip(some, refs))
            if not (e1 < (2e-3 if dt == "f" else 1.2e-2)) or not e2 < 2e-3: print(f"WRONG {label} d={d} M={M} c={causal} rel {e1:.2e} lse {e2:.2e}", flush=True)
            if all_o is None: all_o = o.clone()
            elif not (o.float() - all_o.float()).abs().max().item() < 0.05: print(f"WRONG somewhere: {label} d={d} M={M}", flush=True)
            first = o.clone(); launch(); torch.cuda.synchronize()
            if not torch.equal(first, o): print("NOT REPEATABLE", label, d, M, causal, flush=True)
            lanes.append(launch); names.append(f"{label} r{fn.num_regs} l{fn.local_size_bytes} e{e1:.1e}")
        times = [[] for _ in lanes]
        end = time.time() + budget; n = 0
        while n < 3 or (time.time() < end and n < reps):
            for i, f in enumerate(lanes):
                flush.zero_()
                a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda._sleep(400000); a.record(); f(); b.record(); b.synchronize(); times[i].append(a.elapsed_time(b))
            n += 1
        flops = 4 * B * H * M * M * d * (0.5 if causal else 1)
        t = [median(x) for x in times]
        print(f"d={d}{'c' if causal else ' '} {dt} {B}x{H} M={M:<6}" + " | ".join(f"{nm} {flops/x/1e9:.0f} ({x:.3f} ms)" for nm, x in zip(names, t)), flush=True)
        out.append(dict(d=d, M=M, B=B, H=H, causal=causal, dt=dt, names=names, ms=t))
    json.dump(out, open(os.environ.get("OUT", "/tmp") + "/wide.json", "w"))
    print(f"{time.time()-START:.0f} s")
if __name__ == "__main__": main(DEFAULT)
