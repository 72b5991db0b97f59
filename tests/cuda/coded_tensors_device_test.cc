// K of plain tensors as codes on the GPU, and V in fp8, against the double oracle: every option, types of Q
// and of K and V that differ, a few heads at a time, rows beyond those of the requests.
//
// ctest: 2 parts
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "tests/attention/select.h"
#include "tests/cuda/adversarial_device.h"
#include "tests/cuda/agreement.h"
#include "tests/cuda/bounds_checks.h"
#include "tests/cuda/coded_dims.h"
#include "tests/cuda/prefill_options.h"
#include "tests/cuda/prefill_plans.h"

namespace halftone::testing {
namespace {

class DeviceCodedTensors : public ::testing::TestWithParam<const char*> {
 protected:
  static bool fp8() { return std::string_view(GetParam()) == "fp8"; }
  bool serves(const Problem& p) {
    const bool has = cuda_runner().serves(p);
    served_ += has ? 1 : 0;
    return has;
  }
  void TearDown() override { EXPECT_GT(served_, 0) << "no kernel of " << GetParam() << " is in this build"; }
  static AttentionCase coded_case(CodedDims dims, DType q_dtype, DType kv_dtype,
                                  const std::vector<Request>& requests) {
    AttentionCase row = prefill_case(q_dtype, dims.k, true, requests);
    row.v_head_dim = dims.v;
    row.q_heads = 4;
    row.plain = kv_dtype;
    row.arithmetic = GetParam();
    row.name += ", K and V " + std::string(dtype_name(kv_dtype));
    return row;
  }

 private:
  int served_ = 0;
};

TEST_P(DeviceCodedTensors, EveryOption) {
  int n = 0;
  for (const Option& option : options()) {
    for (const CodedDims dims : kCodedDims) {
      for (const DType kv_dtype : kPrefillTypes) {
        AttentionCase row = coded_case(dims, kPrefillTypes[n++ / 4 % 2], kv_dtype, mixed_requests());
        row.q_heads = row.kv_heads * (1 + n % 5);
        option.set(row);
        row.name += std::string(", ") + option.name;
        const Problem p = make_problem(row);
        if (serves(p)) expect_agrees(row);
      }
    }
  }
}

/// A few heads at a time: with batch_invariant the bits of all heads at once.
TEST_P(DeviceCodedTensors, Rounds) {
  for (const CodedDims dims : kCodedDims) {
    for (const int heads : {1, 2}) {
      const AttentionCase row = rounds_case(coded_case(dims, DType::kBFloat16, DType::kBFloat16, {}), heads);
      if (serves(make_problem(row))) expect_rounds(row, heads, fp8() ? dims.k + dims.v + 5 : dims.k + 4);
    }
  }
}

/// A row of K with an infinity or a NaN has no scale: its key makes every row that sees it NaN, and no other.
/// V that f16 does not hold is one of bf16, or has a unit that does.
TEST_P(DeviceCodedTensors, InfinitiesAndLargeValues) {
  for (const CodedDims dims : kCodedDims) {
    AttentionCase row = coded_case(dims, DType::kBFloat16, DType::kBFloat16, {{60, 200}, {70, 90}});
    Problem p = make_problem(row);
    if (!serves(p)) continue;
    const std::int64_t width = std::int64_t{row.kv_heads} * dims.k;
    for (std::int64_t i = 0; i < p.v.numel(); i += 7) p.v.set(i, 0x1p60F * p.v.get(i));
    const Outputs finite = run_on_device(p);
    EXPECT_EQ(judge_device(p, finite), "") << row.name;
    constexpr std::int64_t kBad = 180;  // of the first request, in KV head 0
    p.k.set(kBad * width + 5, std::numeric_limits<float>::infinity());
    const Outputs outputs = run_on_device(p);
    for (std::int64_t i = 0; i < outputs.out.numel(); ++i) {
      const std::int64_t head = i / dims.v % row.q_heads, query = i / dims.v / row.q_heads;
      const bool sees = query < 60 && query + 140 >= kBad && head < row.q_heads / row.kv_heads;
      if (sees) {
        ASSERT_TRUE(std::isnan(outputs.out.get(i))) << row.name << ", query " << query;
      } else {
        ASSERT_EQ(outputs.out.get(i), finite.out.get(i)) << row.name << ", query " << query;
      }
    }
  }
}

/// The workspace and what lies behind the last request are never part of a result.
TEST_P(DeviceCodedTensors, PoisonedMemory) {
  for (const CodedDims dims : kCodedDims) {
    for (const DType kv_dtype : kPrefillTypes) {
      std::vector<Request> requests = mixed_requests();
      requests.push_back({0, 100});
      Problem p = make_problem(coded_case(dims, DType::kFloat16, kv_dtype, requests));
      if (!serves(p)) continue;
      const Plan plan = plan_on_device(p);
      const Outputs expected = run_on_device(p, plan);
      const std::vector<std::int64_t> first = first_tokens(p.row);
      poison_rows(p.k, first[requests.size() - 1], first.back());
      poison_rows(p.v, first[requests.size() - 1], first.back());
      for (const int fill : {0x00, 0x7F, 0x7C, 0xFF}) {
        const DeviceRun device(p, plan, fill);
        device.schedule();
        device.run();
        expect_same_bits(expected, device.outputs(), p.row.name + ", bytes " + std::to_string(fill));
      }
    }
  }
}

/// An infinity in V is NaN for rows that see it, and for none of other heads and requests.
TEST_P(DeviceCodedTensors, InfinitiesInValues) {
  for (const CodedDims dims : kCodedDims) {
    const AttentionCase row =
        coded_case(dims, DType::kBFloat16, DType::kBFloat16, {{60, 200}, {70, 90}, {40, 700}});
    Problem p = make_problem(row);
    if (!serves(p)) continue;
    const Outputs finite = run_on_device(p);
    EXPECT_EQ(judge_device(p, finite), "") << row.name;
    constexpr std::int64_t kBad = 180, kDim = 7;  // of the first request, in KV head 0
    p.v.set(kBad * row.kv_heads * dims.v + kDim, -std::numeric_limits<float>::infinity());
    const Outputs outputs = run_on_device(p);
    for (std::int64_t i = 0; i < outputs.out.numel(); ++i) {
      const std::int64_t query = i / (row.q_heads * dims.v), head = i / dims.v % row.q_heads;
      const bool own = query < 60 && head < row.q_heads / row.kv_heads && i % dims.v == kDim;
      if (own && query + 140 >= kBad) {
        ASSERT_FALSE(std::isfinite(outputs.out.get(i))) << row.name << ", query " << query;
      } else if (!own) {
        ASSERT_EQ(outputs.out.get(i), finite.out.get(i)) << row.name << ", query " << query;
      }
    }
  }
}

/// Requests of every length: none, whole tiles and runs, one more; V of one request thousands of times as
/// large as that of the next. The bits of a request alone, which begins elsewhere.
TEST_P(DeviceCodedTensors, RequestsHaveUnitsOfTheirOwn) {
  for (const CodedDims dims : kCodedDims) {
    const std::vector<Request> requests = {{0, 0},    {3, 1},  {20, 16}, {1, 256},  {5, 0},
                                           {30, 257}, {2, 17}, {9, 512}, {17, 513}, {0, 33},
                                           {40, 40},  {4, 64}, {3, 65},  {2, 128},  {6, 129}};
    AttentionCase row = coded_case(dims, DType::kBFloat16, DType::kBFloat16, requests);
    row.policy = SplitPolicy::kBatchInvariant;
    Problem p = make_problem(row);
    if (!serves(p)) continue;
    const std::int64_t width = std::int64_t{row.kv_heads} * dims.v;
    std::int64_t key = 0;
    for (std::size_t r = 0; r < requests.size(); ++r) {
      for (std::int64_t i = key * width; i < (key + requests[r].kv_len) * width; ++i) {
        p.v.set(i, std::ldexp(p.v.get(i), static_cast<int>(r) % 3 * 12 - 12));
      }
      key += requests[r].kv_len;
    }
    const Outputs outputs = run_on_device(p);
    EXPECT_EQ(judge_device(p, outputs), "") << row.name;
    for (std::size_t r = 0; r < requests.size(); ++r) {
      if (requests[r].q_len == 0) continue;
      const Problem alone = select(p, {r}, true);
      const Outputs own = run_on_device(alone);
      EXPECT_EQ(judge_device(alone, own), "") << row.name << ", " << requests[r].kv_len << " keys";
      EXPECT_EQ(request_bytes(alone, own.out, 0), request_bytes(p, outputs.out, r)) << "request " << r;
    }
  }
}

/// V is staged in runs of 32, 64 or 128 tokens, each by its own largest value at first: values of a request
/// are largest in its first tokens, in its last or between.
TEST_P(DeviceCodedTensors, RunsOfOtherOctavesAreSettled) {
  for (const CodedDims dims : kCodedDims) {
    for (const DType kv_dtype : kPrefillTypes) {
      const AttentionCase row =
          coded_case(dims, DType::kBFloat16, kv_dtype, {{60, 700}, {40, 300}, {7, 1000}});
      Problem p = make_problem(row);
      if (!serves(p)) continue;
      const std::int64_t width = std::int64_t{row.kv_heads} * dims.v;
      std::int64_t at = 0;
      for (std::size_t r = 0; r < row.requests.size(); ++r) {
        const int keys = row.requests[r].kv_len;
        for (std::int64_t i = 0; i < keys * width; ++i, ++at) {
          const auto token = static_cast<int>(i / width);
          const int away = r == 0 ? token : r == 1 ? keys - 1 - token : std::abs(token - keys / 2);
          p.v.set(at, std::ldexp(p.v.get(at), 3 - std::min(away / 40, 6)));
        }
      }
      EXPECT_EQ(judge_device(p, run_on_device(p)), "") << row.name;
    }
  }
}

/// More requests than a block has threads, few keys each, and V of every third a hundred times as large.
TEST_P(DeviceCodedTensors, RunsOfManyRequests) {
  std::vector<Request> requests;
  for (int r = 0; r < 300; ++r) requests.push_back({r % 2, r * 7 % 41});
  for (const int head_dim : {128, 512}) {
    Problem p = make_problem(coded_case({head_dim, head_dim}, DType::kBFloat16, DType::kBFloat16, requests));
    if (!serves(p)) continue;
    const std::int64_t width = std::int64_t{p.row.kv_heads} * head_dim;
    std::int64_t at = 0;
    for (std::size_t r = 0; r < requests.size(); ++r) {
      for (std::int64_t i = 0; i < requests[r].kv_len * width; ++i, ++at) {
        if (r % 3 == 0) p.v.set(at, 128.0F * p.v.get(at));
      }
    }
    EXPECT_EQ(judge_device(p, run_on_device(p)), "") << p.row.name;
  }
}

/// cu_kv that falls, or begins before the tensors or behind them.
TEST_P(DeviceCodedTensors, WildFirstKeys) {
  for (const CodedDims dims : kCodedDims) {
    AttentionCase row = coded_case(dims, DType::kBFloat16, DType::kFloat16, {{70, 100}, {33, 90}, {40, 700}});
    row.mask = {};
    const Problem p = make_problem(row);
    if (serves(p)) expect_wild_first_keys_are_left_out(p);
  }
}

/// One key of 131,072 weighs 2^14 times as much as each other one, a ninth of all, wherever it lies: neither
/// it nor the many small weights beside it are lost. E4M3 holds no smaller ones, and its sums of one sign
/// lose up to 3.3%.
TEST_P(DeviceCodedTensors, NeedleIn128KTokens) {
  constexpr int kKeys = 131'072, kRows = 40;
  for (const CodedDims dims : kCodedDims) {
    AttentionCase row = coded_case(dims, DType::kBFloat16, DType::kBFloat16, {{kRows, kKeys}});
    row.q_heads = row.kv_heads = 1;
    row.mask = {};
    row.scale = std::log(2.0);
    const Problem p = make_problem(row);
    if (!serves(p)) continue;
    const auto value = [](int d) { return 1 + static_cast<float>(d % 8) / 8; };
    for (int d = 0; d < dims.k; ++d) {
      for (int i = 0; i < kRows; ++i) p.q.set(i * dims.k + d, d == 0 ? 1.0F : 0.0F);
      for (int t = 0; t < kKeys; ++t) p.k.set(t * dims.k + d, 0.0F);
    }
    for (int i = 0; i < kKeys * dims.v; ++i) p.v.set(i, value(i % dims.v));
    for (const int needle : {3, 77'777, kKeys - 1}) {
      const auto place = [&](float logit, const auto& of) {
        p.k.set(std::int64_t{needle} * dims.k, logit);
        for (int d = 0; d < dims.v; ++d) p.v.set(std::int64_t{needle} * dims.v + d, of(d));
      };
      place(14, [](int) { return -4.0F; });
      const Outputs outputs = run_on_device(p);
      place(0, value);
      const double all = 16'384 + kKeys - 1, weight = 16'384 / all;
      for (int i = 0; i < kRows; ++i) {
        EXPECT_NEAR(outputs.lse.get(i), std::log(all), 2e-4)
            << "head_dim " << dims.name() << ", key " << needle;
        for (int d = 0; d < dims.v; ++d) {
          const double expected = weight * -4 + (1 - weight) * value(d);
          ASSERT_NEAR(outputs.out.get(i * dims.v + d), expected, fp8() ? 0.06 : 0.01)
              << "head_dim " << dims.name() << ", key " << needle << ", row " << i << ", dim " << d;
        }
      }
    }
  }
}

/// None of other dims and types: the message says what there is.
TEST_P(DeviceCodedTensors, OthersAreRefused) {
  AttentionCase row = coded_case({128, 128}, DType::kBFloat16, DType::kBFloat16, {{60, 200}});
  EXPECT_TRUE(serves(make_problem(row)));
  const auto refuses = [](const AttentionCase& refused, const char* word) {
    expect_error(ErrorCode::kUnsupported,
                 {"arithmetic is " + refused.arithmetic, word, "use 16-bit, or the CPU"},
                 [&] { (void)plan_on_device(make_problem(refused)); });
  };
  row.head_dim = row.v_head_dim = 96;
  refuses(row, "head_dim 96");
  row.head_dim = row.v_head_dim = 128;
  row.plain = DType::kFloat32;
  refuses(row, "tensors in f32");
}

INSTANTIATE_TEST_SUITE_P(, DeviceCodedTensors, ::testing::Values("half_int8", "fp8"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace halftone::testing
