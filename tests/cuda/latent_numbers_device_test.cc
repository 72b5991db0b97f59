// Numbers that f16 does not hold, in scales, values and queries of latent caches, on the GPU.
#include <cmath>
#include <cstring>
#include <string>

#include "format/codec.h"
#include "tests/cuda/agreement.h"
#include "tests/cuda/latent_device.h"

namespace halftone::testing {
namespace {

/// Whether every 64 dims of each row are as close to the oracle as `bound` of the first of them, a part of
/// their norm.
template <class Bound>
void expect_close(const Problem& p, const Outputs& outputs, const Bound& bound, const std::string& name) {
  const Reference truth = make_reference(p);
  for (std::int64_t first = 0; first < outputs.out.numel(); first += 64) {
    double error = 0, norm = 0;
    for (std::int64_t i = first; i < first + 64; ++i) {
      const double exact = truth.out[static_cast<std::size_t>(i)];
      error += std::pow(double{outputs.out.get(i)} - exact, 2), norm += exact * exact;
    }
    const int dims = static_cast<int>(first % 512);
    ASSERT_LE(std::sqrt(error), bound(dims) * std::sqrt(norm)) << name << ", dims from " << dims << " on";
  }
}

/// Whether a row goes to the kernels for few heads, whatever its own.
bool is_for_few_heads(const AttentionCase& row) {
  return cuda_runner().plan(attention_problem(row)).info().row_block <= 32;
}
bool is_copied(const AttentionCase& row) {
  const AttentionProblem p = attention_problem(row);
  return copies_lists(p, cuda_runner().plan(p).info());
}

/// Of outputs over copies, whose K, V and P are bf16, off by up to 2^-9 each, of few keys that count: other
/// kernels have P and scales in f16. But bf16 has the range of f32, and copies take scales of any size.
constexpr double kCopiedError = 0x1p-7;

/// e8m0 scales far apart, from group to group and from token to token, as foreign caches may have them. Many
/// heads have a power of two for all groups of a token, and rope parts in f16 with them.
TEST(DeviceLatentNumbers, ScalesFarApart) {
  struct Sizes {
    int two, five, rest;  // log2 of scales of groups 2, 5 and the others, at most
    bool few;             // for few heads only
  };
  const auto check = [](const AttentionCase& row, const Sizes& sizes) {
    const Problem p = make_problem(row);
    const PageLayout layout = page_layout(case_spec(row));
    const auto pages = p.cache->pages.bytes();
    Random random(17);
    for (std::int64_t page = 0; page < p.cache->pages.shape()[0]; ++page) {
      for (int token = 0; token < row.page_size; ++token) {
        for (int group = 0; group < 7; ++group) {  // those of different tokens differ by 2^12
          const int most = group == 2 ? sizes.two : group == 5 ? sizes.five : sizes.rest;
          pages[static_cast<std::size_t>(page * layout.page_bytes + layout.k_param_offset + token * 8 +
                                         group)] =
              static_cast<std::uint8_t>(127 + most + random.integer(-12, 0));
        }
      }
    }
    if (sizes.two > 0) {  // V alone has values so large
      for (std::int64_t i = 0; i < p.q.numel(); ++i) {
        if (i % 512 / 64 == 2) p.q.set(i, 0.0F);
      }
    }
    // P of the rotary dims is bf16, or these dims are f16.
    expect_close(
        p, run_on_device(p), [](int dims) { return dims == 448 ? 6e-3 : 2e-3; },
        row.name + ", 2^" + std::to_string(sizes.two));
  };
  for (const int heads : kAllHeads) {
    for (const Sizes& sizes : {Sizes{-87, -27, -9, true}, {-13, -11, -9, false}, {12, 0, -4, false}}) {
      AttentionCase own = listed_case(heads, "fp8-g64-e8m0");
      own.page_size = 16;
      for (const AttentionCase& row : under_all_bounds(own)) {
        if (!sizes.few || is_for_few_heads(row)) check(row, sizes);
      }
    }
  }
}

/// The same of f32 scales that are no powers of two, beside scales of 0. Many heads round them to f16, those
/// of a token together.
TEST(DeviceLatentNumbers, F32ScalesFarApart) {
  struct Sizes {
    int one, three, rest;  // log2 of scales of groups 1, 3 and the others, at most
    bool few;              // for few heads only
  };
  const auto check = [](const AttentionCase& row, const Sizes& sizes) {
    const Problem p = make_problem(row);
    const PageLayout layout = page_layout(case_spec(row));
    const auto pages = p.cache->pages.bytes();
    Random random(19);
    for (std::int64_t token = 0; token < p.cache->pages.shape()[0] * row.page_size; ++token) {
      const auto record = static_cast<std::size_t>(token / row.page_size * layout.page_bytes +
                                                   token % row.page_size * layout.row_bytes);
      const bool zeros = random.chance(1.0 / 16);  // all of them
      const auto lost = static_cast<int>(random.integer(-12, 0));
      for (std::size_t group = 0; group < 4; ++group) {
        const int most = (group == 1 ? sizes.one : group == 3 ? sizes.three : sizes.rest) + lost;
        const auto mantissa = static_cast<float>(1 + random.uniform());
        const float scale = zeros || random.chance(1.0 / 16)
                                ? 0.0F
                                : std::ldexp(mantissa, most - 1 + static_cast<int>(random.integer(-2, 0)));
        std::memcpy(pages.data() + record + 512 + 4 * group, &scale, sizeof scale);
      }
    }
    if (sizes.one > 0) {  // V alone has values so large
      for (std::int64_t i = 0; i < p.q.numel(); ++i) {
        if (i % 576 / 128 == 1) p.q.set(i, 0.0F);
      }
    }
    const double bound = is_copied(row) ? kCopiedError : 2e-3;
    expect_close(
        p, run_on_device(p), [=](int) { return bound; }, row.name + ", 2^" + std::to_string(sizes.one));
  };
  for (const int heads : kAllHeads) {
    for (const Sizes& sizes : {Sizes{-87, -27, -9, true}, {-13, -11, -9, false}, {9, -7, -7, false}}) {
      AttentionCase own = listed_case(heads);
      own.page_size = 16;
      for (const AttentionCase& row : under_all_bounds(own)) {
        if (!sizes.few || is_copied(row) || is_for_few_heads(row)) check(row, sizes);
      }
    }
  }
}

/// f16 scales and mins up to the largest ones, and tiny ones, in V: Q has zeros where K has them.
TEST(DeviceLatentNumbers, IntegersOfAnySize) {
  const auto check = [](const AttentionCase& row, float extreme) {
    const Problem p = make_problem(row);
    const KvCacheSpec spec = case_spec(row);
    const PageLayout layout = page_layout(spec);
    const auto pages = p.cache->pages.bytes();
    const bool four_bits = spec.k_format.dtype == DType::kInt4;
    const std::size_t scales = four_bits ? 256 : 512;  // of a record; mins follow
    const auto put = [&](std::size_t at, float x) {
      const std::uint16_t bits = codec::f16_from_f32(x);
      std::memcpy(pages.data() + at, &bits, sizeof bits);
    };
    Random random(23);
    for (std::int64_t token = 0; token < p.cache->pages.shape()[0] * row.page_size; ++token) {
      const auto record = static_cast<std::size_t>(token / row.page_size * layout.page_bytes +
                                                   token % row.page_size * layout.row_bytes);
      for (const std::size_t group : {1U, 6U}) {
        const bool all = group == 1;  // else a few tokens
        const float size = all || random.integer(0, 9) == 0 ? extreme : 1.0F;
        const std::size_t at = record + scales + 2 * group;
        put(at, size * static_cast<float>(random.integer(1, 64)) / 64.0F);
        if (four_bits) put(at + 16, random.integer(0, 1) == 0 ? size : -size);
      }
    }
    for (std::int64_t i = 0; i < p.q.numel(); ++i) {
      const std::int64_t group = i % 576 / 64;
      if (group == 1 || group == 6) p.q.set(i, 0.0F);
    }
    const double bound = is_copied(row) ? kCopiedError : 4e-3;
    expect_close(
        p, run_on_device(p), [=](int) { return bound; }, row.name + ", " + std::to_string(extreme));
  };
  for (const int heads : kAllHeads) {
    for (const char* format : {"int8-g64", "int4-g64"}) {
      for (const float extreme : {61000.0F, 0x1p-22F}) {
        AttentionCase own = listed_case(heads, format);
        own.page_size = 16;
        for (const AttentionCase& row : under_all_bounds(own)) check(row, extreme);
      }
    }
  }
}

/// Elements beyond the range of f16 among others, in rows that bring a power of two back; and a block of a
/// pair, or of 64 rows, that has none of an item's rows.
TEST(DeviceLatentNumbers, LargeQueries) {
  for (const int heads : kAllHeads) {
    for (const bool listed : {true, false}) {
      AttentionCase own = listed_case(heads);
      if (!listed) {
        own.lists = {};
        own.mask.causal = true;
        own.requests = {{3, 200}, {1, 70}, {3, 90}, {2, 64}};
        own.workers = 2;
      }
      own.scale = 0x1p-11f / std::sqrt(576.0f);
      for (const AttentionCase& row : under_all_bounds(own)) {
        const Problem p = make_problem(row);
        for (std::int64_t i = 0; i < p.q.numel(); ++i) p.q.set(i, p.q.get(i) * 2048.0f);
        p.q.set(576 * (heads / 2) + 100, 40000.0f);
        p.q.set(576 * (heads - 1) + 500, -65536.0f);
        EXPECT_EQ(judge_device(p, run_on_device(p)), "") << row.name << (listed ? ", lists" : ", dense");
      }
    }
  }
}

}  // namespace
}  // namespace halftone::testing
