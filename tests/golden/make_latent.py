#!/usr/bin/env python3
"""Golden bytes of the latent (MLA) token records, made from docs/formats.md alone.

Nothing here calls halftone. A page is written record by record: the codes of the latent, its scales as they are, and the
bf16 values of the rotary dims. The file carries the inputs, too: tests/golden/latent_golden_test.cc appends them and compares
every byte.

    make_latent.py           writes latent.bin beside this file
    make_latent.py --check   exits 1 if latent.bin differs from what this script makes
"""

import pathlib
import struct
import sys

import numpy as np
from make_golden import CANARY, DTYPES, PAIRINGS, Format, Generator, apply_rope, make_input, quantise_tokens, to_bf16

LATENT = pathlib.Path(__file__).with_name("latent.bin")
MAGIC = b"HTLATN02"
TOKENS, NUM_PAGES = 12, 2

FP8_G128_F32 = Format("e4m3", "group", False, 128, "f32")
FP8_G64 = Format("e4m3", "group", False, 64)
FP8_G64_E8M0 = Format("e4m3", "group", False, 64, "e8m0")
INT8_G64 = Format("int8", "group", False, 64)
INT4_G64 = Format("int4", "group", True, 64)
INT8_HEAD = Format("int8", "token-head")
INT4_G32 = Format("int4", "group", True, 32)
BF16 = Format("bf16")

# Name, format, dims of the latent, rotary dims, page size, pairing, input, bytes of a record. Of e8m0 the scales lie behind
# the records, 8 bytes a token, and all dims are V.
CASES = [
    ("fp8-g128-f32", FP8_G128_F32, 512, 64, 64, "none", "f32", 656),
    ("fp8-g128-f32-interleaved", FP8_G128_F32, 512, 64, 16, "interleaved", "bf16", 656),
    ("fp8-g128-f32-half", FP8_G128_F32, 512, 64, 32, "half", "f16", 656),
    ("fp8-g64-256", FP8_G64, 256, 32, 16, "none", "f32", 336),
    ("int8-head", INT8_HEAD, 512, 64, 16, "half", "f32", 656),
    ("int4-g32", INT4_G32, 512, 64, 16, "interleaved", "f32", 448),
    ("bf16", BF16, 512, 64, 16, "none", "bf16", 1152),
    ("fp8-g64-e8m0", FP8_G64_E8M0, 448, 64, 64, "none", "f32", 576),
    ("fp8-g64-e8m0-interleaved", FP8_G64_E8M0, 448, 64, 16, "interleaved", "bf16", 576),
    ("fp8-g64-e8m0-half", FP8_G64_E8M0, 192, 64, 32, "half", "f16", 320),
    ("int8-g64", INT8_G64, 512, 64, 64, "interleaved", "bf16", 656),
    ("int4-g64", INT4_G64, 512, 64, 16, "none", "f32", 416),
]


def padded(data):
    """Up to a multiple of 16 bytes, with bytes that append leaves alone."""
    return data + bytes([CANARY]) * (-len(data) % 16)


def latent_codes(fmt, codes):
    """The codes of one token next to each other: two bytes, a byte or a nibble each, the even dim low."""
    if fmt.dtype == "bf16":
        return codes.astype("<u2").tobytes()
    if fmt.dtype == "int4":
        return (codes[0::2] | codes[1::2] << 4).astype(np.uint8).tobytes()
    return codes.astype(np.uint8).tobytes()


def record(fmt, codes, params, rope):
    """One token: codes, scales, mins if asymmetric, rotary dims."""
    data = padded(latent_codes(fmt, codes))
    if fmt.scale == "e8m0":
        params = []
    param_type = "<f2" if fmt.scale == "f16" else "<f4"
    for plane in range(2 if fmt.asymmetric else 1):
        data += np.array([p[plane] for p in params], param_type).tobytes()
    return padded(padded(data) + to_bf16(rope).astype("<u2").tobytes())


def apart(params):
    """The scales of a token that lie behind the records of its page: exponents of powers of two, biased by 127."""
    exponents = [int(np.frexp(scale)[1]) - 1 for scale, _, _ in params]
    return bytes(e + 127 for e in exponents) + bytes([CANARY]) * (-len(exponents) % 8)


def make_case(index, case):
    name, fmt, latent, rope, page_size, pairing, input_dtype, record_bytes = case
    gen = Generator(2000 + index)
    k = make_input(gen, TOKENS, 1, latent + rope, input_dtype)
    cos, sin = gen.array((11, rope // 2), 24, 23), gen.array((11, rope // 2), 24, 23)
    positions = [(7 * t + 3) % 11 for t in range(TOKENS)]
    slots = [(5 * t + 2) % (NUM_PAGES * 16) + (page_size - 16) for t in range(TOKENS)]
    slots[9] = -1
    tail = k[..., latent:].copy()
    if pairing != "none":
        tail = apply_rope(pairing, tail, cos[positions], sin[positions], rope // 2)
    codes, params = quantise_tokens(fmt, k[..., :latent], None)

    scales_apart = fmt.scale == "e8m0"
    used = page_size * (record_bytes + (8 if scales_apart else 0))
    pages = np.full((NUM_PAGES, -(-used // record_bytes) * record_bytes), CANARY, np.uint8)
    for t, slot in enumerate(slots):
        if slot >= 0:
            page, place = divmod(slot, page_size)
            data = record(fmt, codes[t, 0], params[t][0], tail[t, 0])
            assert len(data) == record_bytes, (name, len(data))
            pages[page, place * record_bytes:(place + 1) * record_bytes] = np.frombuffer(data, np.uint8)
            if scales_apart:
                begin = page_size * record_bytes + 8 * place
                pages[page, begin:begin + 8] = np.frombuffer(apart(params[t][0]), np.uint8)
    header = [TOKENS, NUM_PAGES, latent, rope, page_size, PAIRINGS[pairing], DTYPES[input_dtype],
              *fmt.header(), int(scales_apart), pages.size]
    inputs = b"".join(x.astype("<f4").tobytes() for x in (k, cos, sin))
    return (struct.pack("<32s", name.encode()) + struct.pack(f"<{len(header)}i", *header) + inputs
            + np.array(positions, "<i4").tobytes() + np.array(slots, "<i8").tobytes() + pages.tobytes())


def make():
    np.seterr(all="raise", under="ignore")
    return MAGIC + struct.pack("<i", len(CASES)) + b"".join(make_case(i, c) for i, c in enumerate(CASES))


def main():
    data = make()
    if sys.argv[1:] == ["--check"]:
        if LATENT.read_bytes() != data:
            sys.exit(f"{LATENT} differs from what {pathlib.Path(__file__).name} makes")
        print(f"{LATENT.name}: {len(CASES)} cases, {len(data)} bytes, as made")
    elif not sys.argv[1:]:
        LATENT.write_bytes(data)
        print(f"wrote {LATENT}: {len(CASES)} cases, {len(data)} bytes")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
