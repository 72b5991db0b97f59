#!/usr/bin/env python3
"""Golden byte vectors of the native KV-cache page, made from the documented layout alone.

Nothing here calls halftone: the quantisation rules are those of docs/formats.md in numpy's float32 and float64, and
the page is built by listing, lane by lane, the string of values that a tensor-core lane consumes, then cutting the
strings into chunks. tests/golden_test.cc appends the same inputs and compares every byte.

    make_golden.py           writes golden.bin beside this file
    make_golden.py --check   exits 1 if golden.bin differs from what this script makes
"""

import pathlib
import struct
import sys

import numpy as np

F32 = np.float32
GOLDEN = pathlib.Path(__file__).with_name("golden.bin")
MAGIC = b"HTGOLD02"
TILE = 16
CANARY = 0xA5

# The values of the C++ enumerations, which the file carries.
DTYPES = {"f32": 0, "f16": 1, "bf16": 2, "e4m3": 3, "int8": 4, "int4": 5, "e8m0": 9}
GRANULARITIES = {"none": 0, "tensor": 1, "head": 2, "token": 3, "token-head": 4, "group": 5}
PAIRINGS = {"none": 0, "half": 1, "interleaved": 2}
BITS = {"f16": 16, "bf16": 16, "e4m3": 8, "int8": 8, "int4": 4}


class Format:
    def __init__(self, dtype, granularity="none", asymmetric=False, group=0, scale="f16"):
        self.dtype, self.granularity, self.asymmetric = dtype, granularity, asymmetric
        self.group, self.scale = group, scale

    def dynamic(self):
        return self.granularity in ("token", "token-head", "group")

    def groups(self, dim):
        """Scales stored per token and head."""
        return 0 if not self.dynamic() else dim // self.group if self.group else 1

    def header(self):
        return [DTYPES[self.dtype], GRANULARITIES[self.granularity], int(self.asymmetric), self.group, DTYPES[self.scale]]


BF16 = Format("bf16")
FP16 = Format("f16")
FP8 = Format("e4m3", "tensor", scale="f32")
FP8_HEAD = Format("e4m3", "head", scale="f32")
FP8_TOKEN_HEAD = Format("e4m3", "token-head")
FP8_TOKEN_F32 = Format("e4m3", "token", scale="f32")
INT8_TENSOR = Format("int8", "tensor", scale="f32")
INT8_TENSOR_ASYM = Format("int8", "tensor", True, scale="f32")
INT8_TOKEN = Format("int8", "token")
INT8_HEAD = Format("int8", "token-head")
INT8_G64_ASYM_F32 = Format("int8", "group", True, 64, "f32")
INT4_ROW = Format("int4", "token-head", True)
INT4_G32 = Format("int4", "group", True, 32)
INT4_G64_SYM_F32 = Format("int4", "group", False, 64, "f32")
INT4_TOKEN = Format("int4", "token", True)


class Case:
    def __init__(self, name, k, v, dim, v_dim=None, heads=2, page_size=16, rotate=(False, False), rope="none",
                 half=0, input_dtype="f32", channels=(False, False)):
        self.name, self.k, self.v, self.dim, self.v_dim = name, k, v, dim, v_dim or dim
        self.heads, self.page_size, self.rotate = heads, page_size, rotate
        self.rope, self.half, self.input_dtype = rope, half, input_dtype
        self.channels = channels  # offset and scale of K's


CASES = [
    Case("bf16", BF16, BF16, 128, heads=1),
    Case("bf16-rope-half", BF16, BF16, 64, rope="half", half=32, input_dtype="bf16"),
    Case("fp16", FP16, FP16, 80, v_dim=96, heads=1, rope="interleaved", half=20, input_dtype="f16"),
    Case("fp8", FP8, FP8, 128, heads=1, page_size=32),
    Case("fp8-head", FP8_HEAD, FP8_HEAD, 256, v_dim=192, heads=1),
    Case("fp8-token-head", FP8_TOKEN_HEAD, FP8_TOKEN_HEAD, 64),
    Case("fp8-token-head-rotated", FP8_TOKEN_HEAD, FP8_TOKEN_HEAD, 128, rotate=(True, True)),
    Case("int8-head", INT8_HEAD, INT8_HEAD, 128),
    Case("int8-head-rope-rotated", INT8_HEAD, INT8_HEAD, 128, rotate=(True, False), rope="half", half=64,
         input_dtype="bf16"),
    Case("int8-head-80", INT8_HEAD, INT8_HEAD, 80, rotate=(True, True)),
    Case("int8-tensor", INT8_TENSOR, INT8_TENSOR_ASYM, 80, v_dim=64),
    Case("int8-token", INT8_TOKEN, INT8_TOKEN, 96, v_dim=128, heads=3),
    Case("int4-row", INT4_ROW, INT4_ROW, 128),
    Case("int4-row-80", INT4_ROW, INT4_ROW, 80),
    Case("int4-g32", INT4_G32, INT4_G32, 128, page_size=32),
    Case("int4-g32-rope-rotated", INT4_G32, INT4_G32, 64, rotate=(True, True), rope="interleaved", half=16,
         input_dtype="f16"),
    Case("int8-g64-asym-f32", INT8_G64_ASYM_F32, INT8_G64_ASYM_F32, 128),
    Case("int4-g64-sym-f32-fp8-token-f32", INT4_G64_SYM_F32, FP8_TOKEN_F32, 192, v_dim=256, heads=1),
    Case("int8-head-int4-token", INT8_HEAD, INT4_TOKEN, 64, v_dim=96, heads=3),
    Case("int4-row-offset-scale", INT4_ROW, INT4_ROW, 128, channels=(True, True)),
    Case("int8-tensor-scale-rotated", INT8_TENSOR, INT8_HEAD, 96, rotate=(True, False), channels=(False, True)),
    Case("int8-token-offset", INT8_TOKEN, INT8_TOKEN, 80, heads=3, channels=(True, False)),
    Case("int4-g32-rope-channels-rotated", INT4_G32, INT4_G32, 64, rotate=(True, True), rope="half", half=32,
         input_dtype="bf16", channels=(True, True)),
    Case("int8-head-int4-g32-512", INT8_HEAD, INT4_G32, 512, heads=1, rotate=(True, False), rope="half", half=256,
         input_dtype="bf16"),
    Case("int4-row-fp8-token-512", INT4_ROW, FP8_TOKEN_F32, 512, rotate=(False, True)),
]


# --- Inputs: exact in fp32, made by integers, so that C++ repeats them ---------------------------------------------

class Generator:
    """x -> 6364136223846793005 x + 1442695040888963407 mod 2^64; the top bits are the output."""

    def __init__(self, seed):
        self.state = seed

    def signed(self, bits):
        self.state = (6364136223846793005 * self.state + 1442695040888963407) % 2**64
        return (self.state >> (64 - bits)) - 2 ** (bits - 1)

    def array(self, shape, bits, shift):
        flat = [self.signed(bits) * 2.0**-shift for _ in range(int(np.prod(shape)))]
        return np.array(flat, F32).reshape(shape)


def make_input(gen, tokens, heads, dim, dtype):
    """f32 inputs have 24 significant bits, others 7, all exact in their dtype."""
    x = gen.array((tokens, heads, dim), 24, 21) if dtype == "f32" else gen.array((tokens, heads, dim), 7, 4)
    x[:, :, 5::37] *= F32(8)  # outlier channels
    x[1] = 0
    x[2] = F32(0.3125)
    x[3, :, 7] = F32(10000) if dtype != "bf16" else F32(9984)
    x[4] *= F32(2.0**-20 if dtype == "f32" else 2.0**-10)
    if dtype == "f32":
        x[5] *= F32(2.0**16)
        x[6, 0] = 0  # one head without extent beside live ones
    return x


# --- Number formats, from their definitions ------------------------------------------------------------------------

def to_bf16(x):
    """Bit patterns: 8 significant bits, ties to even, saturated at the largest finite value."""
    mantissa, exponent = np.frexp(np.asarray(x, np.float64))
    exponent = np.maximum(exponent, -125)  # subnormals share the smallest exponent
    mantissa = np.asarray(x, np.float64) / np.exp2(exponent.astype(np.float64))
    rounded = np.rint(mantissa * 256) / 256 * np.exp2(exponent.astype(np.float64))
    largest = (2 - 2.0**-7) * 2.0**127
    rounded = np.clip(rounded, -largest, largest).astype(F32)
    return (rounded.view(np.uint32) >> 16).astype(np.uint16)


def to_f16(x):
    return np.clip(np.asarray(x, F32), F32(-65504), F32(65504)).astype(np.float16).view(np.uint16)


E4M3 = np.array([(m / 8 * 2.0**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)) for e in range(16) for m in range(8)][:127])


def to_e4m3(x):
    """The nearest of the 127 magnitudes, ties to the even code."""
    magnitude = np.minimum(np.abs(np.asarray(x, np.float64)), 448.0)
    above = np.searchsorted(E4M3, magnitude).clip(1, 126)
    low, high = E4M3[above - 1], E4M3[above]
    middle = (low + high) / 2
    up = (magnitude > middle) | ((magnitude == middle) & (above % 2 == 0))
    return (np.where(up, above, above - 1) | (np.signbit(x).astype(np.int64) << 7)).astype(np.uint8)


LEVELS = {("int8", False): 127, ("int4", False): 7, ("e4m3", False): 448, ("int8", True): 255, ("int4", True): 15}


def group_params(fmt, values):
    """(scale, min, 1/scale) of one group, scale and min rounded to their dtype first."""
    extent = F32(values.max() - values.min()) if fmt.asymmetric else F32(np.abs(values).max())
    scale = F32(extent / F32(LEVELS[fmt.dtype, fmt.asymmetric]))
    low = F32(values.min()) if fmt.asymmetric else F32(0)
    if fmt.scale == "f16":
        scale = F32(np.float16(min(max(scale, F32(2.0**-14)), F32(65504))))
        low = F32(np.float16(np.clip(low, F32(-65504), F32(65504))))
    elif fmt.scale == "e8m0":  # the smallest power of two that clips nothing
        mantissa, exponent = np.frexp(max(scale, F32(2.0**-100)))
        scale = F32(2.0 ** (int(exponent) - (1 if mantissa == 0.5 else 0)))
    else:
        scale = F32(min(max(scale, F32(2.0**-100)), F32(2.0**119)))
    return scale, low + F32(0), F32(1) / scale if extent > 0 else F32(0)


def codes_of(fmt, values, params):
    scale, low, inverse = params
    if fmt.dtype == "e4m3":
        return to_e4m3(values * inverse)
    top = LEVELS[fmt.dtype, fmt.asymmetric]
    if fmt.asymmetric:
        return np.clip(np.rint((values - low) * inverse), 0, top).astype(np.uint8)
    codes = np.clip(np.rint(values * inverse), -top, top).astype(np.int64)
    return (codes + 8 if fmt.dtype == "int4" else codes % 256).astype(np.uint8)


# --- Transforms ----------------------------------------------------------------------------------------------------

def apply_rope(pairing, x, cos, sin, half):
    """x [tokens, heads, dim]; cos, sin [tokens, half]."""
    first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if pairing == "interleaved" else (
        slice(0, half), slice(half, 2 * half))
    a, b, c, s = x[..., first].copy(), x[..., second].copy(), cos[:, None, :], sin[:, None, :]
    x[..., first] = a * c - b * s
    x[..., second] = b * c + a * s
    return x


def hadamard(x):
    """Blocks of the largest power of two dividing the last dimension; butterflies of distance 1, 2, 4, ..."""
    dim = x.shape[-1]
    block = dim & -dim
    y = x.reshape(x.shape[:-1] + (dim // block, block)).copy()
    h = 1
    while h < block:
        z = y.reshape(y.shape[:-1] + (block // (2 * h), 2, h))
        y = np.stack([z[..., 0, :] + z[..., 1, :], z[..., 0, :] - z[..., 1, :]], axis=-2).reshape(y.shape)
        h *= 2
    return (y * F32(1 / np.sqrt(np.float64(block)))).reshape(x.shape)


# --- The page ------------------------------------------------------------------------------------------------------

def dim_blocks(dim, owners):
    """For each owner, its dims per block of 32 (a last block may have 16): consecutive, shared out in order."""
    shares = []
    for start in range(0, dim, 32):
        own = min(32, dim - start) // owners
        shares.append([[start + o * own + i for i in range(own)] for o in range(owners)])
    return shares


def k_strings(bits, dim):
    """Strings (token, t): a list of bytes, each a list of (token, dim) from the low end up."""
    per_byte = 8 // bits
    strings = []
    for token in range(TILE):
        for t in range(4):
            elements = [(token, d) for block in dim_blocks(dim, 4) for d in block[t]]
            strings.append([elements[i:i + per_byte] for i in range(0, len(elements), per_byte)])
    return strings


def v_strings(dtype, dim):
    """Strings (g, t) over tokens 2t, 2t+1, 2t+8, 2t+9."""
    strings = []
    for g in range(8):
        for t in range(4):
            data = []
            for block in dim_blocks(dim, 8):
                dims = block[g]
                pairs = [(2 * t + 8 * p, 2 * t + 8 * p + 1) for p in range(2)]
                if dtype == "int4" and len(dims) == 2:
                    data += [[(token, d) for d in dims] for pair in pairs for token in pair]
                elif dtype == "int4":
                    for a, b in pairs:
                        data += [[(token, dims[i]), (token, dims[i + 1])] for token in (a, b) for i in (0, 2)]
                else:
                    for j in range(0, len(dims), 2):
                        x, y = dims[j], dims[j + 1]
                        for a, b in pairs:
                            word = [(a, x), (a, y), (b, x), (b, y)] if dtype == "int8" else [
                                (a, x), (b, x), (a, y), (b, y)]
                            data += [[element] for element in word]
            strings.append(data)
    return strings


def interleave(strings):
    """Cuts strings into chunks of 16 bytes, then 8, 4, 2, 1 for the rest; chunk c of all strings is contiguous."""
    out, position, left = [], 0, len(strings[0])
    for chunk in (16, 8, 4, 2, 1):
        while left >= chunk:
            for s in strings:
                out += s[position:position + chunk]
            position, left = position + chunk, left - chunk
            if chunk < 16:
                break
    assert left == 0
    return out


def data_order(part, dtype, dim):
    """The data part of a tile as bytes, each a list of (token, dim) from the low bits up."""
    return interleave(k_strings(BITS[dtype], dim) if part == "k" else v_strings(dtype, dim))


class TilePart:
    """K or V of a tile: codes, scales and mins that are present, and the bytes they become."""

    def __init__(self, part, fmt, dim):
        self.part, self.fmt, self.dim = part, fmt, dim
        self.order = None if BITS[fmt.dtype] == 16 else data_order(part, fmt.dtype, dim)
        self.data_bytes = TILE * dim * BITS[fmt.dtype] // 8
        self.param_type = np.dtype("<f2" if fmt.scale == "f16" else "<f4")
        self.planes = 0 if not fmt.dynamic() else 2 if fmt.asymmetric else 1
        self.param_bytes = TILE * fmt.groups(dim) * self.param_type.itemsize * self.planes

    def write(self, data, params, token, codes, group_params_list):
        """Writes one token into the byte arrays `data` and `params`."""
        if self.order is None:
            data[token * self.dim * 2:(token + 1) * self.dim * 2] = codes.astype("<u2").view(np.uint8)
        else:
            bits = BITS[self.fmt.dtype]
            for i, elements in enumerate(self.order):
                if elements[0][0] == token:
                    assert all(t == token for t, _ in elements)
                    data[i] = sum(int(codes[d]) << (bits * n) for n, (_, d) in enumerate(elements))
        groups = self.fmt.groups(self.dim)
        for plane in range(self.planes):
            for g in range(groups):
                index = token * groups + g if self.part == "k" else g * TILE + token
                start = (plane * TILE * groups + index) * self.param_type.itemsize
                value = np.array([group_params_list[g][plane]], self.param_type)
                params[start:start + self.param_type.itemsize] = value.view(np.uint8)


def quantise_tokens(fmt, x, static):
    """For x [tokens, heads, dim]: codes of that shape, and per token and head the list of group params."""
    tokens, heads, dim = x.shape
    codes = np.zeros(x.shape, np.uint16)
    params = [[[] for _ in range(heads)] for _ in range(tokens)]
    for t in range(tokens):
        for h in range(heads):
            if fmt.dtype in ("bf16", "f16"):
                codes[t, h] = to_bf16(x[t, h]) if fmt.dtype == "bf16" else to_f16(x[t, h])
                continue
            width = fmt.group or dim
            for g in range(dim // width):
                values = x[t, h, g * width:(g + 1) * width]
                if static is not None:
                    scale, low = static[min(h, len(static) - 1)]
                    p = (scale, low, F32(1) / scale)
                else:
                    p = group_params(fmt, x[t] if fmt.granularity == "token" else values)
                codes[t, h, g * width:(g + 1) * width] = codes_of(fmt, values, p)
                params[t][h].append(p)
    return codes, params


def static_values(fmt, heads):
    """Chosen so that some values clip."""
    if fmt.granularity not in ("tensor", "head"):
        return None
    count = 1 if fmt.granularity == "tensor" else heads
    scale = {"e4m3": 0.0371, "int8": 0.0913, "int4": 1.37}[fmt.dtype]
    return [(F32(scale * (h + 1)), F32(-11.3 - h if fmt.asymmetric else 0)) for h in range(count)]


def make_case(index, case):
    num_pages, tokens = 2, 24
    gen = Generator(1000 + index)
    k = make_input(gen, tokens, case.heads, case.dim, case.input_dtype)
    v = make_input(gen, tokens, case.heads, case.v_dim, case.input_dtype)
    positions = [(7 * t + 3) % 11 for t in range(tokens)]
    cos = gen.array((11, max(case.half, 1)), 24, 23)
    sin = gen.array((11, max(case.half, 1)), 24, 23)
    slots = [(5 * t + 2) % (num_pages * 16) + (case.page_size - 16) for t in range(tokens)]
    slots[9] = -1

    if case.rope != "none":
        k = apply_rope(case.rope, k, cos[positions], sin[positions], case.half)
    offset = gen.array((case.heads, case.dim), 24, 20) if case.channels[0] else None
    scale = np.abs(gen.array((case.heads, case.dim), 24, 22)) + F32(2.0**-4) if case.channels[1] else None
    k = k - offset if case.channels[0] else k
    k = k * (F32(1) / scale) if case.channels[1] else k
    k = hadamard(k) if case.rotate[0] else k
    v = hadamard(v) if case.rotate[1] else v

    parts = [TilePart("k", case.k, case.dim), TilePart("v", case.v, case.v_dim)]
    tile_bytes = sum(p.data_bytes + p.param_bytes for p in parts)
    head_bytes = tile_bytes * (case.page_size // TILE)
    pages = np.full((num_pages, case.heads * head_bytes), CANARY, np.uint8)
    data_offsets = [0, parts[0].data_bytes]
    param_start = parts[0].data_bytes + parts[1].data_bytes
    param_offsets = [param_start, param_start + parts[0].param_bytes]
    statics = []
    for i, x in enumerate((k, v)):
        part = parts[i]
        static = static_values(part.fmt, case.heads)
        statics += [s for s, _ in static or []] + [m for _, m in static or [] if part.fmt.asymmetric]
        codes, params = quantise_tokens(part.fmt, x, static)
        for t, slot in enumerate(slots):
            if slot < 0:
                continue
            page, offset = divmod(slot, case.page_size)
            for h in range(case.heads):
                tile = pages[page, h * head_bytes + offset // TILE * tile_bytes:][:tile_bytes]
                part.write(tile[data_offsets[i]:data_offsets[i] + part.data_bytes],
                           tile[param_offsets[i]:param_offsets[i] + part.param_bytes],
                           offset % TILE, codes[t, h], params[t][h])

    header = [1000 + index, tokens, num_pages, case.heads, case.dim, case.v_dim, case.page_size, int(case.rotate[0]),
              int(case.rotate[1]), PAIRINGS[case.rope], case.half, DTYPES[case.input_dtype],
              int(case.channels[0]), int(case.channels[1])]
    header += case.k.header() + case.v.header() + [len(statics), pages.size]
    name = case.name.encode()
    return (struct.pack("<32s", name) + struct.pack(f"<{len(header)}i", *header)
            + np.array(statics, "<f4").tobytes() + pages.tobytes())


def make():
    np.seterr(all="raise", under="ignore", over="raise")
    return MAGIC + struct.pack("<i", len(CASES)) + b"".join(make_case(i, c) for i, c in enumerate(CASES))


def main():
    data = make()
    if sys.argv[1:] == ["--check"]:
        if GOLDEN.read_bytes() != data:
            sys.exit(f"{GOLDEN} differs from what {pathlib.Path(__file__).name} makes")
        print(f"{GOLDEN.name}: {len(CASES)} cases, {len(data)} bytes, as made")
    elif not sys.argv[1:]:
        GOLDEN.write_bytes(data)
        print(f"wrote {GOLDEN}: {len(CASES)} cases, {len(data)} bytes")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
