// What append writes, byte for byte, against vectors made by tests/golden/make_golden.py from the documented
// layout.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "halftone/cache.h"
#include "reference/tensor.h"
#include "tests/golden/golden_file.h"

namespace halftone {
namespace {

using reference::Tensor;

constexpr std::uint8_t kCanary = 0xA5;

// The generator of make_golden.py: values that are exact in their dtype on every machine.
class Generator {
 public:
  explicit Generator(std::uint64_t seed) : state_(seed) {}
  double value(int bits, int shift) {
    state_ = 6364136223846793005u * state_ + 1442695040888963407u;
    const auto top = static_cast<std::int64_t>(state_ >> (64 - bits));
    return std::ldexp(static_cast<double>(top - (std::int64_t{1} << (bits - 1))), -shift);
  }

 private:
  std::uint64_t state_;
};

struct Case {
  std::string name;
  int seed = 0, tokens = 0, num_pages = 0, half = 0;
  KvCacheSpec spec;
  RopePairing pairing = RopePairing::kNone;
  DType input = DType::kFloat32;
  std::vector<float> statics;
  std::vector<std::uint8_t> pages;
};

Case read_case(golden::Reader& r) {
  Case c;
  c.name = r.take<char>(32).data();
  c.seed = r.integer();
  c.tokens = r.integer();
  c.num_pages = r.integer();
  c.spec.kv_heads = r.integer();
  c.spec.head_dim = r.integer();
  c.spec.v_head_dim = r.integer();
  c.spec.page_size = r.integer();
  c.spec.rotate_k = r.integer() != 0;
  c.spec.rotate_v = r.integer() != 0;
  c.pairing = static_cast<RopePairing>(r.integer());
  c.half = r.integer();
  c.input = static_cast<DType>(r.integer());
  c.spec.offset_k = r.integer() != 0;
  c.spec.scale_k = r.integer() != 0;
  c.spec.k_format = golden::read_format(r);
  c.spec.v_format = golden::read_format(r);
  const int statics = r.integer(), bytes = r.integer();
  c.statics = r.take<float>(static_cast<std::size_t>(statics));
  c.pages = r.take<std::uint8_t>(static_cast<std::size_t>(bytes));
  return c;
}

std::vector<Case> read_cases() { return golden::read_cases<Case>("golden.bin", "HTGOLD02", read_case); }

// make_input() of make_golden.py.
Tensor make_input(Generator& gen, const Case& c, int dim) {
  const bool f32 = c.input == DType::kFloat32;
  const int heads = c.spec.kv_heads;
  std::vector<float> x(static_cast<std::size_t>(c.tokens * heads * dim));
  for (float& value : x) value = static_cast<float>(f32 ? gen.value(24, 21) : gen.value(7, 4));
  std::size_t i = 0;
  for (int t = 0; t < c.tokens; ++t) {
    for (int h = 0; h < heads; ++h) {
      for (int d = 0; d < dim; ++d, ++i) {
        if (d % 37 == 5) x[i] *= 8;
        if (t == 1) x[i] = 0;
        if (t == 2) x[i] = 0.3125f;
        if (t == 3 && d == 7) x[i] = c.input == DType::kBFloat16 ? 9984.0f : 10000.0f;
        if (t == 4) x[i] *= f32 ? 0x1p-20f : 0x1p-10f;
        if (t == 5 && f32) x[i] *= 0x1p16f;
        if (t == 6 && h == 0 && f32) x[i] = 0;
      }
    }
  }
  return Tensor::of(c.input, {c.tokens, heads, dim}, x);
}

Tensor make_table(Generator& gen, int half) {
  std::vector<float> values(static_cast<std::size_t>(11 * std::max(half, 1)));
  for (float& value : values) value = static_cast<float>(gen.value(24, 23));
  return Tensor::of(DType::kFloat32, {11, std::max(half, 1)}, values);
}

// f32 [kv_heads, head_dim] of K's channels.
Tensor make_channels(Generator& gen, const KvCacheSpec& spec, int shift, float (*finish)(double)) {
  std::vector<float> values(static_cast<std::size_t>(spec.kv_heads * spec.head_dim));
  for (float& value : values) value = finish(gen.value(24, shift));
  return Tensor::of(DType::kFloat32, {spec.kv_heads, spec.head_dim}, values);
}

// Moves a part's static scales, and mins if asymmetric, from the front of `statics` into tensors.
struct StaticTensors {
  Tensor scale, min;
};
StaticTensors take_statics(const KvFormat& format, int kv_heads, const std::vector<float>& statics,
                           std::size_t& at) {
  StaticTensors t;
  if (!format.static_scale()) return t;
  const std::size_t count =
      format.granularity == Granularity::kTensor ? 1 : static_cast<std::size_t>(kv_heads);
  const auto next = [&] {
    const std::span<const float> values(statics.data() + at, count);
    at += count;
    return Tensor::of(DType::kFloat32, {static_cast<std::int64_t>(count)}, values);
  };
  t.scale = next();
  if (format.asymmetric) t.min = next();
  return t;
}

void check_case(const Case& c) {
  const PageLayout layout = page_layout(c.spec);
  ASSERT_EQ(static_cast<std::size_t>(c.num_pages * layout.page_bytes), c.pages.size());
  Generator gen(static_cast<std::uint64_t>(c.seed));
  const Tensor k = make_input(gen, c, c.spec.head_dim), v = make_input(gen, c, c.spec.v_dim());
  const Tensor cos = make_table(gen, c.half), sin = make_table(gen, c.half);
  Tensor offset, scale;
  if (c.spec.offset_k) {
    offset = make_channels(gen, c.spec, 20, [](double x) { return static_cast<float>(x); });
  }
  if (c.spec.scale_k) {
    scale = make_channels(gen, c.spec, 22, [](double x) { return static_cast<float>(std::abs(x) + 0.0625); });
  }
  std::vector<std::int32_t> positions;
  std::vector<std::int64_t> slots;
  for (int t = 0; t < c.tokens; ++t) {
    positions.push_back((7 * t + 3) % 11);
    slots.push_back(t == 9 ? -1 : (5 * t + 2) % (c.num_pages * 16) + (c.spec.page_size - 16));
  }
  const Tensor position_tensor = Tensor::of({c.tokens}, positions),
               slot_tensor = Tensor::of({c.tokens}, slots);
  const Tensor pages(DType::kUInt8, {c.num_pages, layout.page_bytes});
  pages.fill_bytes(kCanary);

  std::size_t at = 0;
  const StaticTensors k_static = take_statics(c.spec.k_format, c.spec.kv_heads, c.statics, at);
  const StaticTensors v_static = take_statics(c.spec.v_format, c.spec.kv_heads, c.statics, at);
  PagedKv cache;
  cache.spec = c.spec;
  cache.pages = pages.view();
  cache.k_scale = {k_static.scale.view(), k_static.min.view()};
  cache.v_scale = {v_static.scale.view(), v_static.min.view()};
  cache.k_channels = {offset.view(), scale.view()};
  AppendArgs args;
  args.k = k.view();
  args.v = v.view();
  args.slot_mapping = slot_tensor.view();
  if (c.pairing != RopePairing::kNone) {
    args.rope = {c.pairing, cos.view(), sin.view(), position_tensor.view()};
  }
  append(cache, args);

  std::size_t wrong = 0;
  for (std::size_t i = 0; i < c.pages.size(); ++i) {
    if (pages.bytes()[i] == c.pages[i]) continue;
    if (wrong++ < 3) {
      ADD_FAILURE() << c.name << ": byte " << i << " is " << int{pages.bytes()[i]} << ", golden "
                    << int{c.pages[i]};
    }
  }
  EXPECT_EQ(wrong, 0u) << c.name;
}

TEST(GoldenTest, AppendWritesTheGoldenBytes) {
  const std::vector<Case> cases = read_cases();
  ASSERT_GE(cases.size(), 23u);
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    check_case(c);
  }
}

}  // namespace
}  // namespace halftone
