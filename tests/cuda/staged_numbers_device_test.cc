// Numbers that f16 does not hold, in Q, K and V of staged caches, and logits that leave the range of P: of
// every kernel of prefill.
#include <cmath>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "format/status.h"
#include "plan/plan.h"
#include "plan/validate.h"
#include "tests/attention/prefill_cases.h"
#include "tests/attention/select.h"
#include "tests/cuda/adversarial_device.h"
#include "tests/cuda/plain_twin.h"
#include "tests/cuda/staged_case.h"

namespace halftone::testing {
namespace {

/// Runs problems and counts those that prefill's kernels served, so that no test passes for want of one.
class DeviceStagedNumbers : public ::testing::Test {
 protected:
  bool has_prefill(const Problem& p) {
    const bool has =
        cuda_runner().serves(p) && plan_on_device(p).info().passes.back().config.starts_with("sm90-prefill");
    served_ += has ? 1 : 0;
    return has;
  }
  void TearDown() override { EXPECT_GT(served_, 0) << "no kernel of prefill is in this build"; }

 private:
  int served_ = 0;
};

/// Of tests that take long: other head_dims differ from these by numbers alone.
constexpr int kFewDims[] = {64, 96, 128, 256, 512};

/// Whether half-INT8 has a kernel for the head_dim.
constexpr bool has_codes(int head_dim) { return head_dim >= 128; }

/// Appends what K and V hold now.
void refill(Problem& p) {
  p.cache->calibrate(p.k, p.v);
  p.cache = refilled(p, {0xFF});
}

void scale_rows(const Tensor& x, std::int64_t row, const std::function<float(std::int64_t)>& factor) {
  for (std::int64_t i = 0; i < x.numel(); ++i) x.set(i, x.get(i) * factor(i / row));
}

/// Within 2^-9 of a logit and what follows from it: limits that do not grow with the values.
std::string judge_narrowly(const Problem& p, const Outputs& outputs) {
  double largest = 0;
  for (const float v : p.v.to_floats()) largest = std::max(largest, std::abs(static_cast<double>(v)));
  return judge(p, make_reference(p, false), outputs, 0x1p-9, largest * 0x1p-8);
}

/// K and Q from 1e-29 to 1e29 within a tile and a warp: each row has a scale of its own. A query sees keys of
/// its own magnitude, and zeros at the seams.
TEST_F(DeviceStagedNumbers, RowsOfEveryMagnitude) {
  constexpr int kStretch = 24, kSeen = 8;  // tokens of a magnitude, and of a window
  for (const DType q_dtype : kPrefillTypes) {
    const bool f16 = q_dtype == DType::kFloat16;
    const std::vector<float> wide = {1e-6F, 1e6F, 1e29F, 1.0F, 1e-20F},
                             narrow = {1e-2F, 1e3F, 30.0F, 1.0F, 0.1F};
    const std::vector<float>& magnitudes = f16 ? narrow : wide;
    for (const char* format : {"bf16", "int8-token-head-f32", "fp8-token-head-f32", "int8-g32-asym-f32"}) {
      for (const int head_dim : kPrefillDims) {
        if (!has_whole_groups(format, head_dim)) continue;
        for (const bool half_int8 : {false, true}) {
          if (half_int8 && !has_codes(head_dim)) continue;
          AttentionCase row = staged_case(format, "int8-head", head_dim, {{230, 230}, {200, 200}}, q_dtype);
          row.mask.window_left = kSeen - 1;
          row.arithmetic = half_int8 ? "half_int8" : "16-bit";
          SCOPED_TRACE(row.name + ", " + row.arithmetic);
          Problem p = make_problem(row);
          if (!has_prefill(p)) continue;
          const auto magnitude = [&](std::int64_t token) {
            const std::int64_t own = token < 230 ? token : token - 230;
            return std::pair{magnitudes[static_cast<std::size_t>(own / kStretch) % magnitudes.size()],
                             own % kStretch > kStretch - kSeen};
          };
          scale_rows(p.q, row.q_heads * head_dim,
                     [&](std::int64_t token) { return 1 / magnitude(token).first; });
          scale_rows(p.k, row.kv_heads * head_dim, [&](std::int64_t token) {
            const auto [size, seam] = magnitude(token);
            return seam ? 0.0F : size;
          });
          refill(p);
          EXPECT_EQ(judge_narrowly(p, run_on_device(p)), "");
        }
      }
    }
  }
}

/// Q of 1e-6 and of 1e5 in turn, and of zeros, over keys of 1e-5.
TEST_F(DeviceStagedNumbers, QueriesOfEveryMagnitude) {
  for (const char* format : {"bf16", "int8-token-head-f32"}) {
    for (const int head_dim : kPrefillDims) {
      if (!has_whole_groups("int4-g32", head_dim)) continue;
      for (const bool half_int8 : {false, true}) {
        if (half_int8 && !has_codes(head_dim)) continue;
        AttentionCase row = staged_case(format, "int4-g32", head_dim, {{100, 300}, {70, 161}});
        row.arithmetic = half_int8 ? "half_int8" : "16-bit";
        SCOPED_TRACE(row.name + ", " + row.arithmetic);
        Problem p = make_problem(row);
        if (!has_prefill(p)) continue;
        scale_rows(p.q, head_dim, [](std::int64_t i) {
          return i % 3 == 0 ? 1e-6F : i % 3 == 1 ? 1e5F : 0.0F;
        });
        scale_rows(p.k, head_dim, [](std::int64_t) { return 1e-5F; });
        refill(p);
        EXPECT_EQ(judge_narrowly(p, run_on_device(p)), "");
      }
    }
  }
}

/// V of static scales far beyond f16, whole units and cut ones, and far from 0 in small steps.
TEST_F(DeviceStagedNumbers, ValuesOfEveryMagnitude) {
  for (const std::vector<Request>& requests : {std::vector<Request>{{200, 260}, {81, 81}}, {{100, 1500}}}) {
    for (const char* format : {"int8-tensor", "int8-static-head", "fp8-static-head", "int8-static-head-asym",
                               "int4-static-head-sym"}) {
      for (const int head_dim : kFewDims) {
        for (const bool half_int8 : {false, true}) {
          for (const bool rotated : {false, true}) {
            if ((requests.size() == 1 || head_dim != 128) && rotated == half_int8) continue;  // to save time
            if (half_int8 && !has_codes(head_dim)) continue;
            AttentionCase row = staged_case("int8-head", format, head_dim, requests);
            row.arithmetic = half_int8 ? "half_int8" : "16-bit";
            row.rotate_v = rotated;
            if (rotated) row.out_dtype = DType::kFloat32;
            const std::string name = row.name + ", " + row.arithmetic + (rotated ? ", rotated" : "");
            const auto expect_agrees = [&](const char* what, const std::function<float(float)>& value) {
              SCOPED_TRACE(name + ", " + what);
              Problem p = make_problem(row);
              if (!has_prefill(p)) return;
              for (std::int64_t i = 0; i < p.v.numel(); ++i) p.v.set(i, value(p.v.get(i)));
              refill(p);
              EXPECT_EQ(judge_narrowly(p, run_on_device(p)), "");
            };
            expect_agrees("1e20", [](float v) { return v * 1e20F; });
            expect_agrees("1e-20", [](float v) { return v * 1e-20F; });
            expect_agrees("a far min", [](float v) { return 1000.0F + v * 1e-4F; });
          }
        }
      }
    }
  }
}

/// Sets the logits of K and Q by dim 0 alone: key t of a request has level(t), with the sign of the query.
void set_logits(Problem& p, const std::function<float(std::int64_t)>& level) {
  const AttentionCase& row = p.row;
  const std::int64_t width = row.kv_heads * row.head_dim;
  const std::vector<std::int64_t> first = first_tokens(row);
  const float root = std::sqrt(static_cast<float>(row.head_dim));
  for (std::int64_t i = 0; i < p.q.numel(); ++i) {
    const float sign = i / (row.q_heads * row.head_dim) % 3 == 0 ? -1.0F : 1.0F;
    p.q.set(i, i % row.head_dim == 0 ? sign : 0.0F);
  }
  for (std::size_t r = 0; r < row.requests.size(); ++r) {
    for (std::int64_t i = first[r] * width; i < first[r + 1] * width; ++i) {
      const float x = root * level(i / width - first[r]);
      // What every operand holds: 8 bits.
      p.k.set(i, i % row.head_dim == 0 ? reference::round_to(DType::kBFloat16, x) : 0.0F);
    }
  }
  if (!row.plain) refill(p);
}

/// Every kernel: given K in both types, staged K and codes.
std::vector<AttentionCase> every_kernel(const std::vector<Request>& requests) {
  std::vector<AttentionCase> rows;
  for (const int head_dim : kFewDims) {
    for (const DType q_dtype : kPrefillTypes) {
      rows.push_back(prefill_case(q_dtype, head_dim, true, requests));
      rows.push_back(prefill_case(q_dtype, head_dim, false, requests));
      rows.push_back(staged_case("int8-token-head-f32", "int8-head", head_dim, requests, q_dtype));
      if (!has_codes(head_dim)) continue;
      rows.push_back(rows.back());
      rows.back().arithmetic = "half_int8";
      rows.back().name += ", half_int8";
    }
  }
  return rows;
}

/// Logits that jump by hundreds, up and down, at places that are no ends of tiles.
TEST_F(DeviceStagedNumbers, LogitsThatJump) {
  for (AttentionCase row : every_kernel({{170, 900}, {64, 300}, {90, 90}})) {
    for (const bool causal : {false, true}) {
      row.mask.causal = causal;
      for (const int length : {1, 23, 170}) {
        SCOPED_TRACE(row.name + (causal ? ", causal" : "") + ", steps of " + std::to_string(length));
        Problem p = make_problem(row);
        if (!has_prefill(p)) continue;
        set_logits(p, [&](std::int64_t t) { return static_cast<float>(t / length * 37 % 11 - 5) * 60.0F; });
        EXPECT_EQ(judge_narrowly(p, run_on_device(p)), "");
      }
    }
  }
}

/// Pages are missing at the end: rows meet their first key in a later tile, however low its logit is.
TEST_F(DeviceStagedNumbers, TheFirstKeyOfALaterTile) {
  for (AttentionCase row : every_kernel({{70, 100}, {170, 450}})) {
    if (row.plain) continue;
    row.mask = {};
    for (const float level : {0.0F, 400.0F, -400.0F}) {
      SCOPED_TRACE(row.name + ", logits of " + std::to_string(level));
      Problem p = make_problem(row);
      if (!has_prefill(p)) continue;
      set_logits(p, [&](std::int64_t t) { return level + static_cast<float>(t % 5); });
      const Problem twin = plain_without(p, 1, 192, 450);
      for (int column = 3; column < 8; ++column) entry(p, 1, column) = -1;
      const Outputs outputs = run_on_device(p);
      EXPECT_EQ(outputs.status.as<std::int32_t>()[0], kStatusBadPage);
      EXPECT_EQ(judge_narrowly(twin, outputs), "");
    }
  }
}

/// Windows that leave some rows of a warp without a key until later tiles.
TEST_F(DeviceStagedNumbers, WindowsAndJumps) {
  for (AttentionCase row : every_kernel({{170, 230}, {60, 400}, {200, 40}})) {
    int n = 0;
    for (const Mask& mask : {Mask{.causal = true, .window_left = 0}, Mask{.causal = true, .window_left = 90},
                             Mask{.window_left = 200, .window_right = 3}}) {
      row.mask = mask;
      SCOPED_TRACE(row.name + ", mask " + std::to_string(n++));
      Problem p = make_problem(row);
      if (!has_prefill(p)) continue;
      set_logits(p, [](std::int64_t t) { return static_cast<float>(t / 17 * 7 % 5 - 2) * 150.0F; });
      EXPECT_EQ(judge_narrowly(p, run_on_device(p)), "");
    }
  }
}

/// Queries of the next request, which come along with the last rows of a unit, change none of its bits: not
/// even if they alone need other offsets, or are not numbers.
TEST_F(DeviceStagedNumbers, NeighboursThatRideAlong) {
  for (AttentionCase row : every_kernel({{90, 700}, {100, 300}})) {
    row.policy = SplitPolicy::kBatchInvariant;
    SCOPED_TRACE(row.name);
    Problem p = make_problem(row);
    if (!has_prefill(p)) continue;
    const Problem alone = select(p, {0}, true);
    const Outputs expected = run_on_device(alone);
    EXPECT_EQ(judge_narrowly(alone, expected), "");
    const std::int64_t width = row.q_heads * row.head_dim;
    for (const float factor : {100.0F, INFINITY}) {
      for (std::int64_t i = 90 * width; i < p.q.numel(); ++i) p.q.set(i, p.q.get(i) * factor);
      const Outputs outputs = run_on_device(p);
      EXPECT_EQ(request_bytes(alone, expected.out, 0), request_bytes(p, outputs.out, 0)) << factor;
      EXPECT_EQ(request_bytes(alone, expected.lse, 0), request_bytes(p, outputs.lse, 0)) << factor;
    }
  }
}

}  // namespace
}  // namespace halftone::testing
