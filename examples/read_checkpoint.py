"""Reads the tensors of a hyper-ckpt checkpoint with json, struct and numpy alone: docs/format.md as code.

>>> from read_checkpoint import read_checkpoint
>>> weights = read_checkpoint("run/step-100")["model/layers.0.weight"]
"""

import json
import struct

import numpy as np

# Where numpy has no such type, an unsigned integer of the same size carries the bits.
CARRIERS = {
    "bool": "?", "uint8": "u1", "int8": "i1", "uint16": "<u2", "int16": "<i2", "uint32": "<u4", "int32": "<i4",
    "uint64": "<u8", "int64": "<i8", "float16": "<f2", "bfloat16": "<u2", "float32": "<f4", "float64": "<f8",
    "complex64": "<c8", "complex128": "<c16",
}  # fmt: skip


def chunks(manifest, tensor):
    """(offsets, sizes, file number, start) of every stored chunk of a tensor."""
    if "grid" in tensor:
        cuts, files = manifest["grids"][tensor["grid"]]
        files = manifest["file_lists"][files]
        ends = [[*cut[1:], length] for cut, length in zip(cuts, tensor["shape"], strict=True)]
        cells = list(np.ndindex(*map(len, cuts)))
        offsets = [[cut[i] for cut, i in zip(cuts, cell, strict=True)] for cell in cells]
        sizes = [
            [end[i] - o for end, i, o in zip(ends, *pair, strict=True)] for pair in zip(cells, offsets, strict=True)
        ]
    else:
        offsets, sizes, files = (tensor.get(key, []) for key in ("offsets", "sizes", "files"))
    start = tensor.get("start", 0)
    starts = [start] * len(files) if isinstance(start, int) else start
    return zip(offsets, sizes, files, starts, strict=True)


def read_tensor(folder, manifest, name):
    """One whole tensor as an array of carriers."""
    tensor = manifest["tensors"][name]
    out = np.zeros(tensor["shape"], CARRIERS.get(tensor["dtype"], "u1"))
    for offsets, sizes, file, start in chunks(manifest, tensor):
        with open(f"{folder}/{manifest['files'][file][0]}", "rb") as f:
            (header_bytes,) = struct.unpack("<Q", f.read(8))
            f.seek(8 + header_bytes + start)
            data = np.fromfile(f, out.dtype, int(np.prod(sizes)))
        out[(*(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True)), ...)] = data.reshape(sizes)
    return out


def read_checkpoint(folder):
    """Every tensor by name."""
    with open(f"{folder}/manifest.json", encoding="utf-8") as f:
        manifest = json.load(f)
    return {name: read_tensor(folder, manifest, name) for name in manifest["tensors"]}
