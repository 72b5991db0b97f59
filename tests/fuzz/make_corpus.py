#!/usr/bin/env python3
"""Writes the committed corpora: tests/fuzz/corpus/NAME/ for NAME_fuzz. Run it after changing how a fuzzer reads its bytes.

The encoders mirror, field by field, the order in which the .cc files consume their input (fuzz_input.h).
"""

import json
import pathlib
import struct

CORPUS = pathlib.Path(__file__).parent / "corpus"

DIMS = [64, 80, 96, 128, 192, 256, 512]
PAGES = [16, 32, 64, 128, 256]
NAMES = ("bf16 fp16 fp8 fp8-static-head fp8-token-head int8-tensor int8-token int8-head int8-g32 int8-g64 int8-g128 "
         "int4-g32 int4-g64 int4-g128 int4-row").split()
BF16, F32, F16 = 0, 1, 2  # kFloats of schedule_fuzz.cc
FAST, REPRODUCIBLE, BATCH_INVARIANT = 0, 1, 2


class Writer:
    """The inverse of fuzz::Input."""

    def __init__(self):
        self.bytes = b""

    def u8(self, value):
        self.bytes += struct.pack("<B", value)

    def range(self, value, low):
        self.bytes += struct.pack("<H", value - low)

    def integer(self, value, low):
        """A value that may be any 32-bit number: a byte says whether it is (0xff)."""
        if value >= low and value - low < 1 << 15:
            self.u8(0)
            self.range(value, low)
        else:
            self.u8(0xFF)
            self.bytes += struct.pack("<i", value)


def schedule(batch=1, kv_heads=2, group=4, head_dim=128, v_dim=0, page=64, k="int8-head", v="int4-g32", paged=True,
             max_q=1, max_kv=300, causal=False, left=None, right=None, policy=REPRODUCIBLE, workers=7, cu_q=False,
             steps=(((1, 300),),)):
    """`steps`: for each step (q_len, kv_len) of every request; None stands for the bound."""
    w = Writer()
    w.integer(batch, 0)
    w.integer(kv_heads, 1)
    w.integer(group, 1)
    w.u8(0)
    w.u8(DIMS.index(head_dim))
    w.u8(1 if v_dim else 0)
    if v_dim:
        w.u8(DIMS.index(v_dim))
    w.u8(0)
    w.u8(PAGES.index(page))
    w.u8(NAMES.index(k))
    w.u8(NAMES.index(v))
    w.u8(1 if paged else 0)
    if not paged:
        w.u8(BF16)
    for dtype in (F32, BF16):  # Q and O
        w.u8(dtype)
    for bound, small in ((max_q, 8), (max_kv, 300)):
        w.u8(1 if bound > small else 0)
        w.integer(bound, 0)
    w.u8(1 if causal else 0)
    for window in (left, right):
        w.u8(0 if window is None else 1)
        if window is not None:
            w.integer(window, -1)
    w.u8(0)
    w.u8(0)
    w.u8(policy)
    w.integer(workers, 0)
    for step in steps:
        w.u8(1 if cu_q else 0)
        for q_len, kv_len in step:
            for length in ([q_len] if cu_q else []) + [kv_len]:
                if length == 0:
                    w.u8(0)
                elif length is None:
                    w.u8(32)
                else:
                    w.u8(200)
                    w.range(length, 0)
    return w.bytes


def codec(k="int8-head", v="int4-g32", heads=2, dim=128, v_dim=0, page=64, rotate=(0, 0), slots=(0, 17, 63),
          rope=None, dtype=0, raw=b"", values=(1.0, float("nan"), 65504.0, 1e-40)):
    """`rope`: half the rotary dim. `raw`: bit patterns for the data; without them, ramps of magnitude 1."""
    w = Writer()
    w.bytes += struct.pack("<4f", *values)
    for name in (k, v):
        w.u8(NAMES.index(name) * 4 + 1)
    w.range(heads, 1)
    w.u8(DIMS.index(dim))
    w.u8(1 if v_dim else 0)
    if v_dim:
        w.u8(DIMS.index(v_dim))
    w.u8(PAGES.index(page))
    for r in rotate:
        w.u8(r)
    w.range(len(slots), 1)
    for slot in slots:
        w.u8(0)
        w.range(slot, -1)
    for name in (k, v):  # static scales of 2^-6
        for _ in range({"fp8": 1, "int8-tensor": 1, "fp8-static-head": heads}.get(name, 0)):
            w.u8(0)
            w.range(-6, -20)
    w.u8(0 if rope is None else 1)
    if rope is not None:
        w.u8(0)
        w.range(rope, 1)
        w.u8(0)
        for _ in slots:
            w.u8(0)
            w.range(1, 0)
    w.u8(dtype)
    for part in (raw, b""):
        w.u8(0 if part else 1)
        w.range(0, -130)
        w.bytes += part
    return w.bytes


def safetensors(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(dtype, shape, begin, end):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


TARGETS = {
    "format": {
        "named": b"int4-g32",
        "general": b"int8-token-head-asym-f32",
        "static-head": b"fp8-static-head-sym",
        "typo": b"int8-haed",
        "unsupported": b"fp8-token-asym",
        "built-group": bytes([5, 5, 1, 0, 1, 0, 1, 0]),
        "built-bad-dtype": bytes([9, 7, 1, 1, 255, 255, 255, 127, 11, 1, 59, 0, 0, 0]),
    },
    "safetensors": {
        "two-tensors": safetensors({"__metadata__": {"format": "pt"}, "layers.0.q": tensor("BF16", [2, 3], 0, 12),
                                    "layers.0.k": tensor("F32", [1], 12, 16)}, bytes(range(16))),
        "empty": safetensors({}),
        "empty-tensor": safetensors({"a": tensor("U8", [0, 7], 0, 0), "b": tensor("I64", [], 0, 8)}, bytes(8)),
        "padded": safetensors(b"{}      "),
        "seven-bytes": b"\xff" * 7,
        "length-max": safetensors({}, length=2**64 - 1),
        "length-beyond-file": safetensors({}, length=100),
        "overlap": safetensors({"a": tensor("U8", [3], 0, 3), "b": tensor("U8", [3], 2, 5)}, bytes(5)),
        "hole": safetensors({"a": tensor("U8", [1], 0, 1), "b": tensor("U8", [1], 2, 3)}, bytes(3)),
        "reversed": safetensors({"a": tensor("U8", [1], 1, 0)}, bytes(1)),
        "shape-wraps": safetensors({"a": tensor("U8", [2**62, 4, 2**62], 0, 0)}),
        "duplicate-key": safetensors(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
                                     b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', bytes(1)),
        "deep": safetensors(b'{"a":' * 200 + b"1" + b"}" * 200),
        "bad-utf8": safetensors(b'{"\xc3\x28":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}', bytes(1)),
    },
    "schedule": {
        "decode": schedule(batch=3, max_kv=300, steps=([(1, 300), (1, 17), (1, 0)], [(1, 1), (1, None), (1, 64)])),
        "no-request": schedule(batch=0, steps=([],)),
        "more-workers-than-steps": schedule(batch=1, max_kv=16, workers=200, steps=([(1, 16)],)),
        "prefill-causal": schedule(batch=2, max_q=130, max_kv=700, causal=True, cu_q=True,
                                   steps=([(130, 130), (77, 700)], [(0, 5), (130, 3)])),
        "prompts-beside-single-tokens": schedule(batch=5, max_q=100, max_kv=900, causal=True, cu_q=True,
                                                 steps=([(1, 700), (100, 100), (4, 33), (5, 900), (0, 9)],
                                                        [(1, 300), (1, 0), (1, 17), (0, 0), (1, 900)])),
        "window": schedule(batch=2, max_q=200, max_kv=900, left=33, right=5, cu_q=True,
                           steps=([(200, 900), (3, 34)],)),
        "batch-invariant": schedule(batch=2, max_kv=9000, policy=BATCH_INVARIANT, workers=11,
                                    steps=([(1, 9000), (1, 1025)],)),
        "batch-invariant-speculative": schedule(batch=2, max_q=5, max_kv=5000, policy=BATCH_INVARIANT, causal=True,
                                                cu_q=True, steps=([(5, 4097), (4, 1024)],)),
        "plain": schedule(batch=3, paged=False, max_q=9, max_kv=400, causal=True, cu_q=True,
                          steps=([(9, 9), (0, 0), (4, 400)],)),
        "odd-group": schedule(batch=1, kv_heads=3, group=35, head_dim=192, max_kv=1500, workers=19, policy=FAST,
                              steps=([(1, None)],)),
        "kv-beyond-bound": schedule(batch=1, max_kv=100)[:-3] + b"\xff" + struct.pack("<i", 101),
        "bounds-at-the-limit": schedule(batch=2, max_q=2**28, max_kv=2**30, steps=([(None, None)] * 2,)),
    },
    "codec": {
        "int8-int4": codec(),
        "fp8-static": codec(k="fp8", v="fp8-static-head", dim=64, slots=(5,)),
        "fp8-token-head": codec(k="fp8-token-head", v="fp8-token-head", dim=128, v_dim=64, page=32, slots=(40, 2)),
        "int8-token": codec(k="int8-token", v="int8-token", heads=3, dim=80, v_dim=192, page=16),
        "int4-row-rotated": codec(k="int4-row", v="int4-row", rotate=(1, 1), page=256, slots=(255, 256, 511, -1)),
        "int4-exchange": codec(k="int4-row", v="int4-g64", dim=256, slots=(1, 2)),
        "rope": codec(k="bf16", v="fp16", dim=96, v_dim=64, rope=48, dtype=2),
        "exchange-wide": codec(k="int4-g32", v="int4-row", dim=512, slots=(1, 2)),
        "wide-rotated": codec(k="int4-row", v="int8-token", dim=512, rotate=(1, 1), slots=(70, 3)),
        "same-slot-twice": codec(slots=(9, 9)),
        "non-finite": codec(heads=1, dim=64, v_dim=64, v="fp16", slots=(3,), raw=struct.pack("<3I", 0x7F800000, 1, 0)),
        "denormals": codec(k="int8-g32", v="int8-g128", heads=1, slots=(3,), raw=struct.pack("<4I", 1, 0x80000001, 7, 0x7FFFFF)),
        "outlier": codec(k="int8-g64", v="int4-g128", heads=1, slots=(3,), raw=struct.pack("<4f", 1e4, -1e-3, 1e30, 65504)),
    },
}


def main():
    for target, files in TARGETS.items():
        folder = CORPUS / target
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
        for stale in set(p.name for p in folder.iterdir()) - set(files):
            (folder / stale).unlink()


if __name__ == "__main__":
    main()
