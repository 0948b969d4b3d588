"""The roofline: formulas, devices, bounds, the command and the picture."""

import itertools
import re
from dataclasses import replace

import pytest
from helpers.cli import cli, refused, strict
from helpers.pictures import assert_readable

import cupyfa
from cupyfa import Problem
from cupyfa.lab.analysis import roofline_model as roofs, roofline_plot as plotting
from cupyfa.lab.bench.peaks import DEVICES, EXP2_PER_CLOCK, known_as, named
from cupyfa.lab.bench.results import Measurement, Results
from cupyfa.ladder import LADDER
from cupyfa.planner.source import ROOT

# FLOP per clock and multiprocessor: tensor cores with float16 inputs and float32 accumulators, and
# CUDA cores in float32.
PER_CLOCK = {
    "75": (1024, 128),
    "80": (2048, 128),
    "86": (1024, 256),
    "89": (1024, 256),
    "90": (4096, 256),
    "100": (8192, 256),
    "120": (512, 256),
}


def rows(*kernels, device="a100", **sizes):
    sizes = sizes if "precision" in sizes else {"dtype": "float16", **sizes}
    return roofs.roofline(kernels, device=device, **sizes)


def row(kernel, **options):
    (found,) = rows(kernel, **options)
    return found


@pytest.mark.parametrize("name", DEVICES)
def test_peaks_follow_from_the_units_of_a_device(name):
    device = DEVICES[name]
    tensor, plain = PER_CLOCK[device.arch]
    clocks = device.multiprocessors * device.clock / 1e3
    halved = 2 if device.name.startswith("GeForce") and device.arch != "120" else 1
    assert device.tensor["float16"] == pytest.approx(clocks * tensor / halved, rel=0.02)
    # CUDA cores may run at a higher clock than tensor cores.
    assert 0.98 < device.plain["float32"] / (clocks * plain) < 1.1
    assert device.source and device.bandwidth > 0
    assert device.exponentials == EXP2_PER_CLOCK * clocks


def test_devices_by_names():
    assert known_as("NVIDIA H100 80GB HBM3") is DEVICES["h100"]
    assert known_as("NVIDIA GeForce RTX 4060") is DEVICES["rtx4060"]
    assert known_as("NVIDIA GeForce RTX 4060 Ti") is None
    with pytest.raises(ValueError, match="'h9' is unknown; use one of t4, a100, .*, or 'this' for"):
        named("h9")


@pytest.mark.parametrize("N, d", [*itertools.product((512, 1024, 4096, 16384), (64, 128))])
def test_intensities_are_those_of_the_formulas(N, d):
    naive, tiled = rows("naive", "tiled", batch=1, heads=1, M=N, d=d, dtype="float16")
    assert (naive.flops, tiled.flops) == (4 * N * N * d,) * 2
    assert naive.bytes == 8 * N * N + 8 * N * d
    assert tiled.bytes == 8 * N * d
    assert naive.intensity == pytest.approx(N * d / (2 * (N + d)))
    assert tiled.intensity == pytest.approx(N / 2)
    assert (naive.bound, tiled.bound) == ("memory", "compute")
    assert naive.tflops == pytest.approx(naive.intensity * 1.555)
    assert tiled.tflops == pytest.approx(312)


def test_gradients_of_arrays_are_moved_too():
    how = {"backward": True, "dtype": "float32", "bias": "1hmn", "heads": 2, "M": 64, "d": 16}
    computed = [rows("naive", "tiled", "two_pass", **how, **more) for more in ({"wrt": "bias"}, {})]
    assert [x.bytes - y.bytes for x, y in zip(*computed)][:2] == 2 * [2 * 64 * 64 * 4]
    naive, tiled, two_pass = computed[0]
    assert two_pass.bytes >= tiled.bytes and naive.bytes > tiled.bytes


def test_bounds_by_hand():
    assert row("tiled").balance == pytest.approx(312e12 / 1555e9)
    assert round(row("tiled").balance) == 201
    assert row("tiled", M=400).bound == "memory"
    assert row("tiled", M=404).bound == "compute"
    # In decoding, a single query reads all keys.
    decode = row("tiled", heads=32, kv_heads=8, M=1, N=8192, d=128, dtype="bfloat16")
    assert decode.intensity == pytest.approx(4, rel=0.01)  # 4 query heads share the keys
    assert decode.bound == "memory"
    # A causal mask halves the FLOP, but not the bytes.
    full, masked = (row("naive", M=4096, causal=causal) for causal in (False, True))
    assert masked.flops / full.flops == pytest.approx(0.5, abs=0.001)
    assert masked.bytes == full.bytes
    # Gradients require five matrix products, the forward pass two.
    forward, backward = row("tiled"), row("tiled", backward=True)
    assert backward.flops == 2.5 * forward.flops
    naive, tiled = rows("naive", "tiled", batch=1, heads=1, M=1024, backward=True)
    assert naive.bytes == tiled.bytes + 10 * 2 * 1024**2
    assert tiled.bytes == 8 * 1024 * 64 * 2 + 1024 * 4  # eight float16 arrays, and lse in float32


def test_exponentials_bound_small_heads():
    """A score needs one exponential and 4 d FLOP; per clock, an SM computes 16 or 4096 of them."""
    assert row("tiled", device="h100", d=32).bound == "exponentials"
    assert row("tiled", device="h100", d=128).bound == "compute"
    small = row("tiled", device="h100", d=32)
    assert small.tflops == pytest.approx(989.4 / 2, rel=0.001)
    assert small.time == pytest.approx(small.exponentials / (16 * 132 * 1.83e9) * 1e3)
    assert "exponentials" not in row("tiled", dtype="float64").times


def test_rungs_with_and_without_tensor_cores():
    of_all = rows(*LADDER["forward"], device="h100")
    tensor = {x.computation for x in of_all if x.on_tensor_cores}
    expected = {x for x in LADDER["forward"] if x.startswith(("baseline", "v3", "mma", "wgmma"))}
    assert tensor == expected - {
        "mma_tf32",
        "mma_fp16x2",
        "mma_f64",
        "wgmma_fp16x2",
    }  # these kernels do not support float16
    peaks = {x.computation: x.peak for x in of_all}
    assert (peaks["fa2"], peaks["wgmma"]) == (66.9, 989.4)
    assert row("mma_tf32", dtype="float32", device="h100").peak == 494.7
    assert row("mma_f64", dtype="float64", device="h100").peak == 66.9
    for name in ("mma_fp16x2", "wgmma_fp16x2"):
        assert row(name, dtype="float32", device="h100").peak == 989.4 / 3
    # The bound for float32 assumes split operands, unless CUDA cores are as fast.
    assert row("tiled", dtype="float32", device="h100").peak == 989.4 / 3
    assert row("tiled", dtype="float32", device="rtx4090").peak == 82.6
    assert row("tiled", dtype="float64", device="h100").peak == 66.9
    assert row("baseline", dtype="float32", device="h100").peak == 66.9
    assert row("v3", dtype="float32", device="h100").peak == 989.4


def test_float8_is_multiplied_twice_as_fast_where_there_are_such_tensor_cores():
    rounded = row("tiled", device="h100", d=128, dtype="float16", precision="float8_e4m3")
    assert rounded.peak == 2 * row("tiled", device="h100", d=128, dtype="float16").peak
    assert row("wgmma_fp8", device="h100", d=128).peak == rounded.peak
    assert DEVICES["a100"].peak("float8_e4m3", tensor=True) == DEVICES["a100"].plain["float32"]


def test_kernels_that_a_device_cannot_run_are_refused():
    names = {x.computation for x in rows(device="a100")}
    assert {"naive", "tiled", "fa2", "mma_pipelined"} <= names
    assert not any(name.startswith("wgmma") for name in names)
    tiled, wgmma = rows("tiled", "wgmma")
    assert tiled.tflops and wgmma.tflops is None
    assert "wgmma cannot compute" in wgmma.row()["note"]
    with pytest.raises(cupyfa.Unsupported, match="wgmma cannot compute"):
        row("wgmma")


def test_kernels_move_each_array_of_each_launch_once():
    naive, tiled, baseline, fa2 = rows("naive", "tiled", "baseline", "fa2")
    lse = 4 * 4 * 16 * 2048
    assert fa2.bytes == tiled.bytes + lse
    assert baseline.bytes == naive.bytes + lse  # both write and read S and P
    for found in rows(device="h100", causal=True, backward=True):
        assert (
            found.bytes >= roofs.tiled_bytes("backward", found.problem)
            or found.computation == "naive"
        )
        assert found.bound and found.tflops <= found.peak


def test_the_public_function():
    (found,) = cupyfa.lab.roofline("tiled", device="h100", M=1024)
    assert found.problem == Problem.of_sizes(batch=4, heads=16, M=1024, d=64, dtype="float32")


def test_the_device_of_this_machine_is_measured(monkeypatch):
    monkeypatch.setattr(roofs, "gpu", cupyfa.Simulator)
    monkeypatch.setattr(roofs, "measured_device", lambda engine: DEVICES["t4"])
    for device, found in (("auto", "t4"), ("this", "t4"), ("a100", "a100")):
        assert row("fa2", device=device, M=20, d=8).device is DEVICES[found]


@pytest.mark.gpu
def test_the_rates_of_this_device(cuda):
    device = roofs.measured_device(cuda)
    assert device.tensor["float16"] > 2 * device.plain["float32"] > 1
    assert device.bandwidth > 100 and device.clock > 0.5
    (found,) = roofs.roofline("tiled", device="this")
    assert found.device.name == cuda.limits.device


def test_the_command_prints_the_table():
    args = ("-B", 1, "-H", 1, "-p", "M=1024,4096", "-p", "d=64,128", "--device", "a100")
    args = (*args, "--dtype", "float16")
    found = strict(cli("roofline", "naive", "tiled", *args, "--format", "json").stdout)
    assert [round(x["FLOP/B"], 1) for x in found] == [30.1, 512, 56.9, 512, 31.5, 2048, 62.1, 2048]
    assert {round(x["balance"]) for x in found} == {201}
    shown = cli("roofline", "naive", "tiled", *args).stdout
    assert "NVIDIA A100 40GB" in shown and "balance=201" in shown and "data sheet" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "N=" not in shown and " N " not in shown  # N equals M, which varies
    shown = cli("roofline", "-d", 64, "--device", "h100").stdout.splitlines()
    assert " M=2048 N=2048 d=64 dtype=float32" in shown[0]
    assert " ms " in shown[3] and max(map(len, shown)) <= 80


def test_the_dtype_is_one_that_the_kernels_can_do():
    for arguments in (["mma_tf32"], ["tiled", "--precision", "tf32"]):
        (found,) = strict(
            cli("roofline", *arguments, "--device", "h100", "--format", "json").stdout
        )
        assert found["dtype"] == "float32"


def test_the_device_of_a_machine_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(roofs, "gpu", lambda: None)
    assert "this machine has no GPU" in refused("roofline", "--device", "this", code=3)


def test_the_page_lists_the_devices():
    page = (ROOT / "docs" / "roofline.md").read_text(encoding="utf-8")
    for name, device in DEVICES.items():
        tensor, plain = device.tensor["float16"], device.plain["float32"]
        balance = round(1e3 * tensor / device.bandwidth)
        rates = f"{tensor:g} TFLOP/s | {plain:g} TFLOP/s | {device.bandwidth:g} | {balance}"
        assert f"| `{name}` | {rates} |" in page


def timed(found, tflops):
    ms = found.flops / tflops / 1e9
    return Measurement(found.computation, found.operation, found.problem, {}, [ms])


def test_measured_kernels_have_a_share_of_the_attainable_rate():
    found = row("fa2", device="h100")
    assert found.percent is None
    measured = replace(found, measured=timed(found, 33.45))
    assert measured.percent == pytest.approx(50)
    assert measured.row()["measured_TFLOP/s"] == pytest.approx(33.45)


PICTURES = {
    "every rung": lambda: rows(device="h100", d=128),
    "rungs of four precisions": lambda: rows(device="h100", dtype="float32"),
    "gradients": lambda: rows(device="h100", backward=True),
    "one": lambda: rows("fa2", device="h100"),
    "lengths": lambda: rows("naive", "tiled", M=[1024, 4096, 16384], d=[64, 128]),
    "exponentials": lambda: rows("tiled", device="h100", d=[16, 32, 64, 128, 256]),
    "one query": lambda: rows("naive", "tiled", "mma_split_kv", M=1, N=8192),
    "the measured ladder": lambda: roofs.measured_roofs(LADDER_OF_H200, M=2048),
    "its lengths": lambda: roofs.measured_roofs(LADDER_OF_H200),
}
LADDER_OF_H200 = Results.load(ROOT / "docs" / "ladder.json")


@pytest.mark.parametrize("name", PICTURES)
def test_no_text_of_a_picture_hides_another_or_a_point(name):
    found = PICTURES[name]()
    texts = assert_readable(plotting._figure(found))
    assert "FLOP per byte" in texts


@pytest.mark.parametrize("device", [x for x in DEVICES if "float32" in DEVICES[x].plain])
@pytest.mark.parametrize("backward", [False, True])
def test_no_mark_lies_above_its_roof(device, backward):
    """Markers must use unrounded figures; with two digits, some markers would exceed the roof."""
    for dtype in ("float16", "float32"):
        found = [x for x in rows(device=device, dtype=dtype, backward=backward) if x.tflops]
        axes = plotting._figure(found).axes[0]
        drawn = {tuple(xy) for x in axes.lines if x.get_marker() != "None" for xy in x.get_xydata()}
        assert {(x.intensity, x.tflops) for x in found} <= drawn
        highest = max(x.peak for x in found)
        assert all(
            y <= min(highest, x * found[0].device.bandwidth / 1e3) * (1 + 1e-9) for x, y in drawn
        )


@pytest.mark.parametrize("name", ["rungs of four precisions", "every rung", "gradients"])
def test_labels_do_not_lie_on_roofs(name):
    figure = plotting._figure(PICTURES[name]())
    axes = figure.axes[0]
    levels = {
        x.get_ydata()[0] for x in axes.lines if len({*x.get_ydata()}) == 1 < len(x.get_xdata())
    }
    heights = [axes.transData.transform((1, y))[1] for y in levels if y >= 1]
    inside = [x for x in axes.texts if x.get_position()[0] < 1 and "GB/s" not in x.get_text()]
    assert inside and heights
    for label in inside:
        box = type(label).__mro__[1].get_window_extent(label, figure.canvas.get_renderer())
        assert not any(box.y0 < y < box.y1 for y in heights), label.get_text()


def names_of(found):
    return [name for names in plotting._series(found).values() for name in names]


def test_a_picture_names_every_computation_once(tmp_path):
    found = rows(device="h100")
    assert sorted(names_of(found)) == sorted(x.computation for x in found)
    shown = " ".join(label.get_text() for label in plotting._figure(found).axes[0].texts)
    assert all(x.computation in shown.replace("\n", " ").replace(",", "").split() for x in found)
    plotting.draw_roofs(found, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert "<title>TFLOP/s on NVIDIA H100 SXM: batch=4 " in text
    assert "<desc>naive 100 at 31 FLOP per byte; " in text
    with pytest.raises(ValueError, match="nothing to plot"):
        plotting.draw_roofs([row("tiled", M=0)], tmp_path / "a.svg")


def test_a_measured_kernel_is_a_full_mark_at_its_speed_and_others_are_empty():
    found = row("fa2", device="h100")
    measured = replace(found, measured=timed(found, 33.4))
    for drawn, height, full in ((measured, 33.4, True), (found, found.tflops, False)):
        ((_, points),) = plotting._series([drawn])
        assert points == ((found.intensity, pytest.approx(height), full),)
        axes = plotting._figure([drawn]).axes[0]
        (mark,) = [x for x in axes.lines if x.get_marker() == "s" and len(x.get_xdata())]
        assert mark.get_xydata().tolist() == [[found.intensity, pytest.approx(height)]]
        assert (mark.get_markerfacecolor() != "white") == full


def test_measurements_of_a_file_are_shown_under_the_roof_of_their_device():
    found = roofs.measured_roofs(LADDER_OF_H200, M=2048)
    assert all(x.device is DEVICES["h200"] for x in found)
    names = ["naive", "tiled", *dict.fromkeys(x.kernel for x in LADDER_OF_H200.rows)]
    assert [x.computation for x in found] == names
    by_name = {x.computation: x for x in found}
    assert by_name["naive"].measured is None
    fa2 = by_name["fa2"]
    assert fa2.measured.tflops == pytest.approx(5.93, rel=0.01)
    assert fa2.percent == pytest.approx(100 * 5.93 / 66.9, rel=0.01)
    assert (fa2.bytes, fa2.bound) == (row("fa2", device="h200").bytes, "compute")


def test_a_device_without_a_data_sheet_has_measured_roofs_where_it_is(monkeypatch):
    unknown = replace(LADDER_OF_H200, environment={"device": cupyfa.Simulator().limits.device})
    with pytest.raises(ValueError, match="rates of device .* are unknown; choose a device: t4, "):
        roofs.measured_roofs(unknown)
    monkeypatch.setattr(roofs, "gpu", cupyfa.Simulator)
    monkeypatch.setattr(roofs, "measured_device", lambda backend: DEVICES["h100"])
    assert roofs.measured_roofs(unknown)[0].device is DEVICES["h100"]


def test_times_of_the_simulator_are_shown_under_no_roof():
    simulated = replace(LADDER_OF_H200, environment={"backend": "simulator"})
    for device in ("auto", "h100"):
        with pytest.raises(ValueError, match="a roofline needs times of a GPU"):
            roofs.measured_roofs(simulated, device=device)


def test_the_arguments_select_measurements():
    def command(*args):
        done = cli("roofline", "--from", ROOT / "docs" / "ladder.json", "--format", "json", *args)
        return [(x["computation"], x["M"]) for x in strict(done.stdout)]

    assert command("v1", "naive", "-p", "M=256,512") == [
        *(("naive", 256), ("naive", 512)),
        *(("v1", 256), ("v1", 512)),
    ]
    assert command("auto", "-M", 4096) == [("wgmma_persistent", 4096)]
    assert command("tiled", "-M", 4096) == [("tiled", 4096)]
    peer = replace(LADDER_OF_H200.rows[0], kernel="a library")
    (found,) = roofs.measured_roofs(replace(LADDER_OF_H200, rows=[peer]))[2:]
    assert (found.computation, found.intensity) == ("a library", pytest.approx(128))
    file = ROOT / "docs" / "ladder.json"
    idle = refused("roofline", "--from", file, "--backward", code=2)
    assert "--from reads the operation from a file, so --backward has no effect" in idle
    nothing = refused("roofline", "--from", file, "-d", 63, code=2)
    assert "no measurement matches these kernels and sizes; measured problems: batch=4 " in nothing


def test_arrays_select_measurements():
    of = {"batch": 1, "heads": 2, "M": 8, "d": 4, "sink": "h"}
    problems = [Problem.of_sizes(**of, bias=x, wrt="bias") for x in ("1hmn", "11mn")]
    results = Results(
        {"device": "NVIDIA H200"}, [Measurement("two_pass", "backward", p) for p in problems]
    )

    def found(**arrays):
        rows = roofs.measured_roofs(results, ["two_pass"], device="h200", **arrays)
        return [x.problem for x in rows]

    assert found(bias="1hmn", sink="h") == problems[:1] and found(wrt="q,bias") == problems
    assert found(bias=["1hmn", "11mn"], block_mask=False) == problems
    for other in ({"bias": "f16[1hmn]"}, {"wrt": "sink"}, {"mask": True}):
        with pytest.raises(ValueError, match="no measurement matches these"):
            found(**other)


def test_the_picture_of_the_page_shows_the_measured_ladder(tmp_path):
    plotting.draw_roofs(roofs.measured_roofs(LADDER_OF_H200, M=2048), tmp_path / "a.svg")
    drawn, kept = (
        re.search("<desc>.*</desc>", x.read_text())[0]
        for x in (tmp_path / "a.svg", ROOT / "docs" / "roofline.svg")
    )
    assert drawn == kept
