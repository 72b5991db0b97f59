// Codecs: single values through every element type, and tokens through append, dequantize and the FBGEMM
// exchange with specs, slots and data from the bytes.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "format/codec.h"
#include "format/page.h"
#include "format/part.h"
#include "fuzz_input.h"
#include "halftone/cache.h"

namespace {

using namespace halftone;
using fuzz::require;

constexpr std::uint8_t kPoison = 0xa5;
constexpr int kPages = 3;

// --- Single values ---

/// No neighbour of `bits` is closer to x than `bits` is.
template <class Bits>
void check_nearest(float x, Bits bits, float (*widen)(Bits), float largest) {
  const float value = widen(bits);
  require(std::signbit(value) == std::signbit(x), "rounding keeps the sign");
  if (std::fabs(x) >= largest || !std::isfinite(value)) return;
  const double error = std::fabs(static_cast<double>(value) - x);
  for (const int step : {-1, 1}) {
    const float other = widen(static_cast<Bits>(bits + step));
    if (!std::isfinite(other) || std::signbit(other) != std::signbit(value)) continue;
    require(error <= std::fabs(static_cast<double>(other) - x), "rounding is to nearest");
  }
}

void check_float(float x) {
  const std::uint16_t half = codec::f16_from_f32(x), brain = codec::bf16_from_f32(x);
  const std::uint8_t e4m3 = codec::e4m3_from_f32(x);
  if (std::isnan(x)) {
    require(std::isnan(codec::f32_from_f16(half)) && std::isnan(codec::f32_from_bf16(brain)) &&
                std::isnan(codec::f32_from_e4m3(e4m3)),
            "NaN stays NaN");
    return;
  }
  check_nearest(x, half, codec::f32_from_f16, codec::kF16Max);
  check_nearest(x, brain, codec::f32_from_bf16, codec::kBf16Max);
  check_nearest(x, e4m3, codec::f32_from_e4m3, codec::kE4m3Max);
  require(std::fabs(codec::f32_from_e4m3(e4m3)) <= codec::kE4m3Max, "e4m3 saturates");
}

/// Widening a 16-bit or 8-bit float and rounding it again gives the same bits.
void check_bits(std::uint16_t bits) {
  if (!std::isnan(codec::f32_from_f16(bits))) {
    require(codec::f16_from_f32(codec::f32_from_f16(bits)) == bits, "f16 survives f32");
  }
  if (!std::isnan(codec::f32_from_bf16(bits))) {
    require(codec::bf16_from_f32(codec::f32_from_bf16(bits)) == bits, "bf16 survives f32");
  }
  const auto byte = static_cast<std::uint8_t>(bits);
  if (!std::isnan(codec::f32_from_e4m3(byte))) {
    require(codec::e4m3_from_f32(codec::f32_from_e4m3(byte)) == byte, "e4m3 survives f32");
  }
}

// --- Tokens ---

KvFormat format_from(fuzz::Input& in) {
  const auto names = named_formats();
  const std::uint8_t which = in.take<std::uint8_t>();
  if (which % 4 != 0) return names[which / 4 % names.size()].format;
  constexpr std::array<DType, 3> kTypes = {DType::kInt8, DType::kInt4, DType::kFloat8E4M3};
  constexpr std::array<int, 3> kGroups = {32, 64, 128};
  KvFormat f;
  f.dtype = in.pick(kTypes);
  f.granularity = static_cast<Granularity>(1 + in.take<std::uint8_t>() % 5);
  f.asymmetric = in.flag();
  f.group_size = f.granularity == Granularity::kGroup ? in.pick(kGroups) : 0;
  f.scale_dtype = f.static_scale() || in.flag() ? DType::kFloat32 : DType::kFloat16;
  return f;
}

KvCacheSpec spec_from(fuzz::Input& in) {
  constexpr std::array<int, 7> kHeadDims = {64, 80, 96, 128, 192, 256, 512};
  constexpr std::array<int, 5> kPageSizes = {16, 32, 64, 128, 256};
  KvCacheSpec spec;
  spec.k_format = format_from(in);
  spec.v_format = format_from(in);
  spec.kv_heads = in.range(1, 3);
  spec.head_dim = in.pick(kHeadDims);
  spec.v_head_dim = in.flag() ? in.pick(kHeadDims) : 0;
  spec.page_size = in.pick(kPageSizes);
  spec.rotate_k = in.flag();
  spec.rotate_v = in.flag();
  return spec;
}

/// Elements of f32, f16 or bf16, and their fp32 values.
struct Values {
  DType dtype;
  std::vector<std::uint8_t> bytes;
  std::vector<float> floats;

  Values(fuzz::Input& in, DType type, std::size_t count) : dtype(type), floats(count) {
    const std::uint8_t how = in.take<std::uint8_t>();  // raw bits, or a ramp of one magnitude
    const float magnitude = std::ldexp(1.0f, in.range(-130, 101));
    for (std::size_t i = 0; i < count; ++i) {
      if (how % 4 == 0 && !in.empty()) {
        floats[i] = dtype == DType::kFloat32 ? in.take<float>() : widen(in.take<std::uint16_t>());
      } else {
        const int step = static_cast<int>((i * 7919 + how) % 255) - 127;
        floats[i] = widen(narrow(magnitude * static_cast<float>(step) / 127.0f));
      }
    }
    bytes.resize(count * (dtype == DType::kFloat32 ? 4 : 2));
    for (std::size_t i = 0; i < count; ++i) {
      if (dtype == DType::kFloat32) {
        std::memcpy(bytes.data() + 4 * i, &floats[i], 4);
      } else {
        const std::uint16_t bits = narrow(floats[i]);
        std::memcpy(bytes.data() + 2 * i, &bits, 2);
        floats[i] = widen(bits);
      }
    }
  }

 private:
  std::uint16_t narrow(float x) const {
    return dtype == DType::kFloat16 ? codec::f16_from_f32(x) : codec::bf16_from_f32(x);
  }
  float widen(std::uint16_t bits) const {
    return dtype == DType::kFloat16 ? codec::f32_from_f16(bits) : codec::f32_from_bf16(bits);
  }
};

/// The pages of one cache, poisoned, with a gap between pages.
struct Pages {
  std::int64_t stride;
  std::vector<std::uint64_t> words;  // 16-byte aligned by operator new
  std::uint8_t* data;

  explicit Pages(const PageLayout& layout) : stride(layout.page_bytes + 32) {
    words.resize(static_cast<std::size_t>(stride) * kPages / 8);
    data = reinterpret_cast<std::uint8_t*>(words.data());
    std::memset(data, kPoison, words.size() * 8);
  }
  TensorView view(const PageLayout& layout) const {
    TensorView v = TensorView::contiguous(data, DType::kUInt8, {kPages, layout.page_bytes});
    v.strides[0] = stride;
    return v;
  }
};

struct Session {
  KvCacheSpec spec;
  PageLayout layout;
  int tokens = 0;
  std::vector<std::int64_t> slots;
  std::vector<float> k_scale, k_min, v_scale, v_min;
  std::vector<float> cos, sin;
  std::vector<std::int32_t> positions;
  RopePairing pairing = RopePairing::kNone;

  PagedKv cache(const Pages& pages) const {
    PagedKv c;
    c.spec = spec;
    c.pages = pages.view(layout);
    const auto scales = [](const KvFormat& f, const std::vector<float>& scale,
                           const std::vector<float>& min) {
      StaticScale s;
      if (!f.static_scale()) return s;
      const auto n = static_cast<std::int64_t>(scale.size());
      s.scale = TensorView::contiguous(scale.data(), DType::kFloat32, {n});
      if (f.asymmetric) s.min = TensorView::contiguous(min.data(), DType::kFloat32, {n});
      return s;
    };
    c.k_scale = scales(spec.k_format, k_scale, k_min);
    c.v_scale = scales(spec.v_format, v_scale, v_min);
    return c;
  }

  /// Appends tokens [first, first + count).
  void append_to(const Pages& pages, const Values& k, const Values& v, int first, int count) const {
    const std::int64_t n = count;
    const auto part = [&](const Values& x, std::int64_t dim) {
      const std::size_t at =
          x.bytes.size() / static_cast<std::size_t>(tokens) * static_cast<std::size_t>(first);
      return TensorView::contiguous(x.bytes.data() + at, x.dtype, {n, spec.kv_heads, dim});
    };
    AppendArgs args;
    args.k = part(k, spec.head_dim);
    args.v = part(v, spec.v_dim());
    args.slot_mapping = TensorView::contiguous(slots.data() + first, DType::kInt64, {n});
    args.rope.pairing = pairing;
    if (pairing != RopePairing::kNone) {
      const auto half = static_cast<std::int64_t>(cos.size()) / 4;
      args.rope.cos = TensorView::contiguous(cos.data(), DType::kFloat32, {4, half});
      args.rope.sin = TensorView::contiguous(sin.data(), DType::kFloat32, {4, half});
      args.rope.positions = TensorView::contiguous(positions.data() + first, DType::kInt32, {n});
    }
    append(cache(pages), args);
  }
};

Session session_from(fuzz::Input& in) {
  Session s;
  s.spec = spec_from(in);
  s.tokens = in.range(1, 5);
  for (int t = 0; t < s.tokens; ++t) {
    s.slots.push_back(in.rare() ? in.take<std::int64_t>() : in.range(-1, kPages * s.spec.page_size - 1));
  }
  const auto scale = [&] { return in.rare() ? in.take<float>() : std::ldexp(1.0f, in.range(-20, 20)); };
  const auto scales = [&](const KvFormat& f, std::vector<float>& values, bool positive) {
    if (!f.static_scale()) return;
    const int n = f.granularity == Granularity::kHead ? s.spec.kv_heads : 1;
    for (int i = 0; i < n; ++i) values.push_back(positive || in.flag() ? scale() : -scale());
  };
  scales(s.spec.k_format, s.k_scale, true);
  scales(s.spec.k_format, s.k_min, false);
  scales(s.spec.v_format, s.v_scale, true);
  scales(s.spec.v_format, s.v_min, false);
  if (in.flag()) {
    s.pairing = static_cast<RopePairing>(1 + in.take<std::uint8_t>() % 2);
    const int half = in.range(1, s.spec.head_dim / 2);
    for (int i = 0; i < 4 * half; ++i) {
      const float angle = static_cast<float>(i % half) * 0.37f + static_cast<float>(i / half);
      s.cos.push_back(std::cos(angle));
      s.sin.push_back(std::sin(angle));
    }
    if (in.rare()) s.cos[static_cast<std::size_t>(in.range(0, 4 * half - 1))] = in.take<float>();
    for (int t = 0; t < s.tokens; ++t)
      s.positions.push_back(in.rare() ? in.take<std::int32_t>() : in.range(0, 3));
  }
  return s;
}

/// Clears every byte that belongs to the live slots; what stays must still be poison.
void check_untouched(const Session& s, const Pages& pages) {
  std::vector<std::uint8_t> owned(pages.words.size() * 8, 0);
  for (const std::int64_t slot : s.slots) {
    if (slot < 0) continue;
    const int offset = static_cast<int>(slot % s.spec.page_size), token = offset % kTileTokens;
    for (int head = 0; head < s.spec.kv_heads; ++head) {
      const std::int64_t tile =
          slot / s.spec.page_size * pages.stride + page::tile_offset(s.layout, head, offset);
      for (const KvPart which : {KvPart::kK, KvPart::kV}) {
        const page::Part part = page::part_of(s.spec, s.layout, which);
        const int bytes = (dtype_bits(part.format.dtype) + 7) / 8;
        for (int d = 0; d < part.dim; ++d) {
          for (int b = 0; b < bytes; ++b) {
            owned[static_cast<std::size_t>(tile + part.data_offset + part.place(token, d).byte + b)] = 1;
          }
        }
        for (int g = 0; g < part.groups; ++g) {
          for (int b = 0; b < part.scale_bytes(); ++b) {
            owned[static_cast<std::size_t>(tile + part.scale_offset(token, g) + b)] = 1;
            if (part.format.asymmetric)
              owned[static_cast<std::size_t>(tile + part.min_offset(token, g) + b)] = 1;
          }
        }
      }
    }
  }
  for (std::size_t i = 0; i < owned.size(); ++i) {
    require(owned[i] == 1 || pages.data[i] == kPoison, "append writes only its tokens' bytes");
  }
}

/// How far a stored x may be from x, when the values that share its scale span [lo, hi].
double tolerance(const KvFormat& f, double x, double lo, double hi) {
  const double levels = codec::quantisation_levels(f.dtype, f.asymmetric);
  const double scale = (f.asymmetric ? hi - lo : std::max(std::fabs(lo), std::fabs(hi))) / levels;
  const double floor = f.scale_dtype == DType::kFloat16 ? codec::kMinF16Scale : codec::kMinF32Scale;
  const double stored = std::max(scale * (1 + 0x1p-10), floor);
  const double clipped = scale * levels * 0x1p-11;  // a scale that was rounded down
  const double moved = f.asymmetric ? std::fabs(lo) * 0x1p-11 + 0x1p-24 : 0;
  const double rounding = (std::fabs(x) + std::fabs(lo)) * 0x1p-20;
  const double step = f.dtype == DType::kFloat8E4M3 ? std::fabs(x) * 0x1p-4 + stored * 0x1p-9 : 0.5 * stored;
  return step + clipped + moved + rounding;
}

/// One token's values against what dequantize returned for it; [kv_heads, dim].
void check_values(const KvFormat& f, int heads, int dim, const float* x, const float* read) {
  for (int head = 0; head < heads; ++head) {
    for (int d = 0; d < dim; ++d) {
      const double value = x[head * dim + d], got = read[head * dim + d];
      require(std::isfinite(got), "finite input reads back finite");
      if (!f.quantised()) {
        const bool half = f.dtype == DType::kFloat16;
        const double stored = half ? std::clamp(value, -65504.0, 65504.0) : value;
        const double bound = std::fabs(stored) * (half ? 0x1p-11 : 0x1p-8) + (half ? 0x1p-25 : 0x1p-133);
        require(std::fabs(got - stored) <= bound, "16-bit formats round once");
        continue;
      }
      int first = 0, last = heads * dim;  // the values that share a scale
      if (f.granularity != Granularity::kToken) {
        const int width = f.granularity == Granularity::kGroup ? f.group_size : dim;
        first = head * dim + d / width * width;
        last = first + width;
      }
      const auto [lo, hi] = std::minmax_element(x + first, x + last);
      const double largest = std::max(std::fabs(*lo), std::fabs(*hi));
      if (f.scale_dtype == DType::kFloat16 && largest > 60000) continue;  // f16 scales and mins saturate
      require(std::fabs(got - value) <= tolerance(f, value, *lo, *hi),
              "dequantised values are within a step");
    }
  }
}

void check_readback(const Session& s, const Pages& pages, const Values& k, const Values& v, int token) {
  const std::int64_t slot = s.slots[static_cast<std::size_t>(token)];
  if (slot < 0) return;
  const std::int32_t page = static_cast<std::int32_t>(slot / s.spec.page_size);
  const std::int32_t length = static_cast<std::int32_t>(slot % s.spec.page_size) + 1;
  const std::int64_t heads = s.spec.kv_heads, dim = s.spec.head_dim, v_dim = s.spec.v_dim();
  PagedKv cache = s.cache(pages);
  cache.block_table = TensorView::contiguous(&page, DType::kInt32, {1, 1});
  cache.lengths = TensorView::contiguous(&length, DType::kInt32, {1});
  std::vector<float> k_read(static_cast<std::size_t>(length * heads * dim));
  std::vector<float> v_read(static_cast<std::size_t>(length * heads * v_dim));
  dequantize(cache, TensorView::contiguous(k_read.data(), DType::kFloat32, {length, heads, dim}),
             TensorView::contiguous(v_read.data(), DType::kFloat32, {length, heads, v_dim}));
  const auto row = [&](const std::vector<float>& x, std::int64_t t, std::int64_t d) {
    return x.data() + t * heads * d;
  };
  if (!s.spec.rotate_k && s.pairing == RopePairing::kNone && !s.spec.k_format.static_scale()) {
    check_values(s.spec.k_format, s.spec.kv_heads, s.spec.head_dim, row(k.floats, token, dim),
                 row(k_read, length - 1, dim));
  }
  if (!s.spec.rotate_v && !s.spec.v_format.static_scale()) {
    check_values(s.spec.v_format, s.spec.kv_heads, s.spec.v_dim(), row(v.floats, token, v_dim),
                 row(v_read, length - 1, v_dim));
  }
}

/// Rows that leave a cache enter another as the same bytes.
void check_exchange(const Session& s, const Pages& pages, KvPart which) {
  const page::Part part = page::part_of(s.spec, s.layout, which);
  const KvFormat& f = part.format;
  if (f.dtype != DType::kInt4 || !f.asymmetric || f.scale_dtype != DType::kFloat16 || part.rotated) return;
  if (f.granularity != Granularity::kTokenHead && f.granularity != Granularity::kGroup) return;
  std::vector<std::int64_t> live;
  for (const std::int64_t slot : s.slots) {
    if (slot >= 0) live.push_back(slot);
  }
  if (live.empty()) return;
  const auto n = static_cast<std::int64_t>(live.size());
  const std::int64_t row_bytes = 4 * part.groups + part.dim / 2;
  std::vector<std::uint16_t> rows(static_cast<std::size_t>(n * s.spec.kv_heads * row_bytes) / 2),
      again(rows.size());
  const TensorView slots = TensorView::contiguous(live.data(), DType::kInt64, {n});
  const auto view = [&](std::vector<std::uint16_t>& r) {
    return TensorView::contiguous(r.data(), DType::kUInt8, {n, s.spec.kv_heads, row_bytes});
  };
  export_fbgemm_int4(s.cache(pages), which, slots, view(rows));
  const Pages other(s.layout);
  import_fbgemm_int4(s.cache(other), which, view(rows), slots);
  export_fbgemm_int4(s.cache(other), which, slots, view(again));
  require(rows == again, "FBGEMM rows survive a cache");
}

void check_tokens(fuzz::Input& in) {
  Session s = session_from(in);
  if (!fuzz::accepted([&] { s.layout = page_layout(s.spec); })) return;
  constexpr std::array<DType, 3> kFloats = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  const DType dtype = in.pick(kFloats);
  const auto count = [&](int dim) { return static_cast<std::size_t>(s.tokens) * s.spec.kv_heads * dim; };
  const Values k(in, dtype, count(s.spec.head_dim)), v(in, dtype, count(s.spec.v_dim()));

  const Pages pages(s.layout);
  if (!fuzz::accepted([&] { s.append_to(pages, k, v, 0, s.tokens); })) {
    s.slots.assign(s.slots.size(), -1);
    check_untouched(s, pages);
    return;
  }
  check_untouched(s, pages);
  const Pages backwards(s.layout);
  for (int t = s.tokens - 1; t >= 0; --t) s.append_to(backwards, k, v, t, 1);
  require(pages.words == backwards.words, "a token's bytes depend on that token alone");
  for (int t = 0; t < s.tokens; ++t) check_readback(s, pages, k, v, t);
  check_exchange(s, pages, KvPart::kK);
  check_exchange(s, pages, KvPart::kV);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Input in(data, size);
  for (int i = 0; i < 4; ++i) {
    const auto bits = in.take<std::uint32_t>();
    check_float(codec::float_of(bits));
    check_bits(static_cast<std::uint16_t>(bits));
  }
  check_tokens(in);
  return 0;
}
