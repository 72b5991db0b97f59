// Arithmetic of 8 bits on the GPU against the double oracle of its codes: formats whose codes are K's own and
// such as become codes, every option, any number of rows, rounds, and what lies in the workspace before.
// ctest: 4 parts
#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "cuda/prefill/estimate.h"
#include "format/status.h"
#include "plan/plan.h"
#include "plan/validate.h"
#include "tests/attention/prefill_cases.h"
#include "tests/attention/select.h"
#include "tests/cuda/adversarial_device.h"
#include "tests/cuda/plain_twin.h"
#include "tests/cuda/prefill_options.h"
#include "tests/cuda/prefill_plans.h"

namespace halftone::testing {
namespace {

constexpr int kDims[] = {128, 256};

/// Runs rows and counts those that had a kernel, so that no test passes for want of one.
class DeviceCoded : public ::testing::TestWithParam<const char*> {
 protected:
  bool fp8() const { return std::string_view(GetParam()) == "fp8"; }
  /// Whose codes of K are taken as they are, and V that each arithmetic has.
  const char* own_format() const { return fp8() ? "fp8-token-head" : "int8-head"; }
  const char* value_format() const { return fp8() ? "fp8-static-head" : "int8-head"; }
  /// And V that becomes codes of E4M3.
  std::vector<std::string> value_formats() const {
    std::vector<std::string> formats = {value_format()};
    if (fp8()) formats.insert(formats.end(), {"int4-g32", "bf16"});
    return formats;
  }
  bool serves(const Problem& p) {
    const bool has = cuda_runner().serves(p);
    served_ += has ? 1 : 0;
    return has;
  }
  /// By every kernel that serves the row.
  void expect_agrees(const AttentionCase& row) {
    const Problem p = make_problem(row);
    if (!serves(p)) return;
    expect_agrees(p);
    const auto& spec = std::get<KvCacheSpec>(p.problem.kv);
    if (!fp8() || !cuda::has_codes(spec, DType::kFloat8E4M3) || !cuda::has_value_codes(spec)) return;
    for (const AttentionCase& shape : shapes_of(row)) {
      if (shape.name != row.name) expect_agrees(make_problem(shape));
    }
  }
  void expect_agrees(const Problem& p) {
    SCOPED_TRACE(p.row.name);
    const Outputs outputs = run_on_device(p);
    EXPECT_EQ(judge_device(p, outputs), "");
    EXPECT_EQ(status_of(outputs), 0);
  }
  /// Causal, four query heads over two KV heads.
  AttentionCase coded_case(const std::string& k_format, const std::string& v_format, int head_dim,
                           DType q_dtype, const std::vector<Request>& requests) const {
    AttentionCase row = prefill_case(q_dtype, head_dim, false, requests);
    row.q_heads = 4;
    row.k_format = k_format;
    row.v_format = v_format;
    row.arithmetic = GetParam();
    row.name = "K " + k_format + ", V " + v_format + ", head_dim " + std::to_string(head_dim) + ", Q " +
               std::string(dtype_name(q_dtype));
    return row;
  }
  /// Makes V of one sign, so that no part of a sum can be missing unseen.
  static void lift_values(Problem& p, float sign = 1.0F) {
    for (std::int64_t i = 0; i < p.v.numel(); ++i) p.v.set(i, sign * (0.3F + std::abs(p.v.get(i))));
    p.cache = refilled(p, {0xFF});
  }
  /// Of such a V, or a constant one: no output is off by more than `most` of itself. Returns by how much of
  /// it they are too small, on average.
  static double expect_whole(const Reference& reference, const Outputs& outputs, double most) {
    const std::vector<float> out = outputs.out.to_floats();
    double lost = 0, worst = 0;
    for (std::size_t i = 0; i < out.size(); ++i) {
      const double off = 1 - static_cast<double>(out[i]) / reference.out[i];
      lost += off;
      worst = std::max(worst, std::abs(off));
    }
    EXPECT_LT(worst, most);
    EXPECT_FALSE(std::isnan(lost));
    return lost / static_cast<double>(out.size());
  }
  /// Whether the plan of such a case reads V in its pages, and turns it over in the kernel.
  bool turns_values(int head_dim, SplitPolicy policy) const {
    return fp8() && head_dim == 128 && policy == SplitPolicy::kFast;
  }
  void TearDown() override {
    const Problem p = make_problem(for_table(decode_case("int8-head")));
    if (is_universal(p)) GTEST_SKIP() << "a build of head_dim 64";
    EXPECT_GT(served_, 0) << "no kernel of " << GetParam() << " is in this build";
  }

 private:
  int served_ = 0;
};

TEST_P(DeviceCoded, Formats) {
  int n = 0;
  for (const char* k : {"int8-head", "int8-tensor", "int8-token", "int8-static-head", "int8-token-head-f32",
                        "int8-g64", "int8-g128", "int8-token-head-asym", "int8-tensor-asym", "int4-g32",
                        "int4-row", "fp8", "fp8-token-head", "bf16", "fp16"}) {
    for (const char* v : {"int8-head", "int4-g32", "fp8", "fp16", "int8-static-head-asym", "fp8-static-head",
                          "bf16", "int8-token-head-f32", "fp8-g128-f32"}) {
      for (const int head_dim : kDims) {
        AttentionCase row = coded_case(k, v, head_dim, kPrefillTypes[n++ % 2], mixed_requests());
        row.rotate_k = n % 5 < 2;
        row.rotate_v = n % 3 == 0;
        row.data = n % 4 == 0 ? Data::kOutlierChannels : Data::kNormal;
        expect_agrees(row);
      }
    }
  }
}

TEST_P(DeviceCoded, EveryOption) {
  const std::pair<const char*, const char*> formats[] = {
      {own_format(), value_format()}, {"int4-g32", "fp8"}, {"fp8", "fp8-static-head"}};
  int n = 0;
  for (const Option& option : options()) {
    for (const auto& [k, v] : formats) {
      for (const int head_dim : kDims) {
        AttentionCase row = coded_case(k, v, head_dim, kPrefillTypes[n++ % 2], mixed_requests());
        row.rotate_k = n % 3 == 1;
        option.set(row);
        row.name += std::string(", ") + option.name;
        expect_agrees(row);
      }
    }
  }
}

/// Query heads per KV head, in boxes of whole queries or row by row; pages of every size.
TEST_P(DeviceCoded, GroupsAndPages) {
  int n = 0;
  for (const int group : {1, 3, 4, 5, 16, 65}) {
    for (const int head_dim : kDims) {
      AttentionCase row = coded_case(own_format(), fp8() && group % 2 == 1 ? "fp8" : "int4-g32", head_dim,
                                     kPrefillTypes[n++ % 2],
                                     {{170 / group + 3, 150}, {1, 100}, {2, 0}, {0, 9}, {85 / group, 260}});
      row.q_heads = row.kv_heads * group;
      row.page_size = 16 << n % 5;
      row.table_mode = n % 2 == 0 ? BlockTableMode::kClamped : BlockTableMode::kTrusted;
      row.alibi = group % 2 == 1;
      row.sinks = group % 3 == 0;
      row.name += ", group " + std::to_string(group) + ", pages of " + std::to_string(row.page_size);
      expect_agrees(row);
    }
  }
}

/// A few rows have no other kernel; under every policy.
TEST_P(DeviceCoded, AnyNumberOfRows) {
  for (const SplitPolicy policy :
       {SplitPolicy::kFast, SplitPolicy::kReproducible, SplitPolicy::kBatchInvariant}) {
    for (const int queries : {1, 2, 7, 33}) {
      for (const int head_dim : kDims) {
        const std::string v = value_formats()[queries % value_formats().size()];
        AttentionCase row =
            coded_case("int8-token", v, head_dim, DType::kBFloat16, {{queries, 2500}, {1, 40}});
        row.policy = policy;
        row.name += ", " + std::to_string(queries) + " queries";
        expect_agrees(row);
      }
    }
  }
}

/// A few heads at a time: with batch_invariant the bits of all heads at once.
TEST_P(DeviceCoded, Rounds) {
  for (const std::string k : {"int8-static-head", "int4-g32", "fp8-static-head"}) {
    for (const std::string v : {"int8-static-head", "fp8-static-head"}) {
      for (const int heads : {1, 2}) {
        const AttentionCase row = rounds_case(coded_case(k, v, 128, DType::kBFloat16, {}), heads);
        if (!serves(make_problem(row))) continue;
        const bool k_in_pages = fp8() && k == "fp8-static-head";
        const std::int64_t key_bytes =
            k_in_pages ? row.head_dim : std::int64_t{fp8() ? 2 : 3} * row.head_dim + 4;
        expect_rounds(row, heads, key_bytes);
      }
    }
  }
}

/// What the workspace holds before, and pages behind live bytes, are never part of a result.
TEST_P(DeviceCoded, PoisonedMemory) {
  int n = 0;
  for (const char* k : {"int8-head", "int8-tensor", "int4-g32", "bf16", "fp8"}) {
    for (const int head_dim : kDims) {
      const std::string v = value_formats()[n++ % value_formats().size()];
      Problem p = make_problem(coded_case(k, v, head_dim, DType::kBFloat16, mixed_requests()));
      if (!serves(p)) continue;
      const Plan plan = plan_on_device(p);
      const Outputs expected = run_on_device(p, plan);
      for (const int fill : {0x00, 0x7F, 0x7C, 0x3C}) {
        p.cache = refilled(p, {static_cast<std::uint8_t>(fill)});
        const DeviceRun device(p, plan, fill);
        device.schedule();
        device.run();
        expect_same_bits(expected, device.outputs(), p.row.name + ", bytes " + std::to_string(fill));
      }
    }
  }
}

/// Powers of two of a request and head leave its codes of V as they are, and multiply its rows exactly,
/// however far others' are: nothing of other requests and heads counts, nor keys that a window has passed.
TEST_P(DeviceCoded, ValuesOfManySizes) {
  using Pair = std::pair<const char*, const char*>;
  for (const auto& [k, v] : {Pair{"int8-head", "bf16"},
                             {"int4-g32", "int8-head"},
                             {"int8-tensor", "int4-g32-f32"},
                             {"fp8-g64", "fp8-token-head"}}) {
    for (const int head_dim : kDims) {
      AttentionCase row =
          coded_case(k, v, head_dim, DType::kBFloat16, {{40, 900}, {70, 100}, {1, 300}, {33, 33}, {50, 700}});
      row.mask.window_left = 130;
      Problem p = make_problem(row);
      if (!serves(p)) continue;
      SCOPED_TRACE(row.name);
      const Outputs expected = run_on_device(p);
      EXPECT_EQ(judge_device(p, expected), "");
      const auto log2_of = [](std::size_t request, int head) {
        return 2 * static_cast<int>(request) + 3 * head;
      };
      const std::vector<std::int64_t> first = first_tokens(row);
      const std::int64_t width = std::int64_t{row.kv_heads} * head_dim;
      for (std::size_t r = 0; r < row.requests.size(); ++r) {
        const Request& request = row.requests[r];
        const int passed = request.kv_len - request.q_len - row.mask.window_left;
        for (std::int64_t i = 0; i < request.kv_len * width; ++i) {
          const int log2 = i / width < passed ? 13 : log2_of(r, static_cast<int>(i % width / head_dim));
          const std::int64_t at = first[r] * width + i;
          p.v.set(at, std::ldexp(p.v.get(at), log2));
        }
      }
      p.cache = refilled(p, {0xFF});
      const Outputs outputs = run_on_device(p);
      std::int64_t at = 0;
      for (std::size_t r = 0; r < row.requests.size(); ++r) {
        for (std::int64_t i = 0; i < row.requests[r].q_len * row.q_heads * head_dim; ++i, ++at) {
          const int head = static_cast<int>(i / head_dim % row.q_heads) * row.kv_heads / row.q_heads;
          ASSERT_EQ(outputs.out.get(at), std::ldexp(expected.out.get(at), log2_of(r, head)))
              << "request " << r << ", KV head " << head;
        }
      }
    }
  }
}

/// Entries that name no page: their tokens are left out.
TEST_P(DeviceCoded, BadPagesAreLeftOut) {
  for (const int head_dim : kDims) {
    int n = 0;
    for (const auto& [k, column] :
         {std::pair{own_format(), 0}, {own_format(), 2}, {own_format(), 5}, {"bf16", 2}, {"int4-g32", 3}}) {
      const std::string v = value_formats()[n++ % value_formats().size()];
      AttentionCase row = coded_case(k, v, head_dim, DType::kFloat16, {{70, 100}, {150, 333}, {40, 0}});
      row.mask = {};
      SCOPED_TRACE(row.name + ", page " + std::to_string(column));
      const Problem p = make_problem(row);
      if (!serves(p)) continue;
      const Problem twin = plain_without(p, 1, 64 * column, std::min(333, 64 * column + 64));
      entry(p, 1, column) = -1;
      const Outputs outputs = run_on_device(p);
      EXPECT_EQ(outputs.status.as<std::int32_t>()[0], kStatusBadPage);
      // The twin's K is what f16 holds of K: its codes may differ by one.
      EXPECT_EQ(
          judge(twin, make_reference(twin, false), outputs, fp8() ? 0x1p-5 : 0x1p-9, fp8() ? 0x1p-4 : 0x1p-6),
          "");
    }
  }
}

/// More keys than max_total_kv: those beyond are read nowhere, and rows that a causal mask keeps from them
/// have the bits of a run with room for all.
TEST_P(DeviceCoded, CausalKeysBeyondTheBoundOfAll) {
  constexpr int kStart = 16;  // tokens of a request begin at a multiple of it, in some workspaces
  for (const int head_dim : kDims) {
    AttentionCase row = coded_case(own_format(), value_format(), head_dim, DType::kBFloat16,
                                   {{70, 100}, {200, 300}, {90, 90}});
    Problem p = make_problem(row);
    if (!serves(p)) continue;
    const Outputs expected = run_on_device(p);
    const std::vector<std::int64_t> first = first_tokens(row);
    for (const std::int64_t most : {17, 101, 133, 262, 415}) {
      SCOPED_TRACE(row.name + ", " + std::to_string(most) + " keys");
      p.problem.max_total_kv = most;
      const Outputs outputs = run_on_device(p);
      EXPECT_EQ(status_of(outputs), kStatusBadKeys);
      std::int64_t query = 0;
      for (std::size_t r = 0; r < row.requests.size(); ++r) {
        const Request& request = row.requests[r];
        for (int q = 0; q < request.q_len; ++q, ++query) {
          const std::int64_t last = first[r] + request.kv_len - request.q_len + q;
          if (last + kStart * static_cast<std::int64_t>(r) >= most) continue;
          for (std::int64_t i = query * row.q_heads * head_dim; i < (query + 1) * row.q_heads * head_dim;
               ++i) {
            ASSERT_EQ(outputs.out.get(i), expected.out.get(i)) << "query " << q << " of request " << r;
          }
        }
      }
    }
  }
}

/// The same bits alone, in company and on other workers.
TEST_P(DeviceCoded, BatchInvariantBits) {
  for (const int head_dim : kDims) {
    const std::string v = value_formats()[head_dim == 256 ? 0 : value_formats().size() - 1];
    AttentionCase row = coded_case(own_format(), v, head_dim, DType::kBFloat16,
                                   {{120, 300}, {1, 90}, {90, 2000}, {0, 50}, {200, 150}, {7, 0}});
    row.policy = SplitPolicy::kBatchInvariant;
    const Problem p = make_problem(row);
    if (!serves(p)) continue;
    const Outputs all = run_on_device(p);
    EXPECT_EQ(judge_device(p, all), "");
    for (const std::size_t r : {0U, 1U, 2U, 4U}) {
      const Problem alone = select(p, {r}, true);
      const Outputs outputs = run_on_device(alone);
      EXPECT_EQ(request_bytes(alone, outputs.out, 0), request_bytes(p, all.out, r)) << "request " << r;
      EXPECT_EQ(request_bytes(alone, outputs.lse, 0), request_bytes(p, all.lse, r)) << "request " << r;
    }
    Problem few = select(p, {0, 1, 2, 3, 4, 5}, false);
    few.problem.workers = 3;
    expect_same_bits(all, run_on_device(few), "on three workers");
  }
}

/// Sums of E4M3 products keep some 13 bits: what a tile adds to O would be lost, or rounded towards 0 each
/// time, once O is a few thousand times as large.
TEST_P(DeviceCoded, LongContextsKeepTheirSums) {
  for (const int head_dim : kDims) {
    if (head_dim != 128 && !fp8()) continue;
    const int keys = head_dim == 128 ? 100'000 : 30'000;
    AttentionCase row = coded_case("fp8", "fp8", head_dim, DType::kBFloat16, {{40, keys}});
    row.q_heads = row.kv_heads = 1;
    row.data = Data::kConstant;
    Problem p = make_problem(row);
    if (!serves(p)) continue;
    const Reference reference = make_reference(p, false);
    for (const int workers : {0, 1}) {  // one cuts nothing
      p.problem.workers = workers;
      expect_whole(reference, run_on_device(p), 0.005);
    }
  }
}

/// What sums of E4M3 products lose is towards 0: it adds up where all values of V have one sign, and only
/// there.
TEST_P(DeviceCoded, SumsOfOneSign) {
  for (const int head_dim : kDims) {
    for (const SplitPolicy policy : {SplitPolicy::kFast, SplitPolicy::kBatchInvariant}) {
      AttentionCase row = coded_case("fp8", "fp8", head_dim, DType::kBFloat16, {{40, 12'000}});
      row.q_heads = row.kv_heads = 1;
      row.workers = 1;  // cuts nothing
      row.policy = policy;
      for (const float sign : {1.0F, -1.0F}) {
        Problem p = make_problem(row);
        if (!serves(p)) continue;
        lift_values(p, sign);
        const bool turns = turns_values(head_dim, policy);
        const double lost = expect_whole(make_reference(p, false), run_on_device(p), turns ? 0.026 : 0.035);
        EXPECT_LT(lost, turns ? 0.018 : 0.028) << "head_dim " << head_dim;
        EXPECT_GT(lost, -0.002) << "head_dim " << head_dim;
      }
    }
  }
}

/// The keys that come first, which are the last ones, weigh most, as a recent past does: what they add to O
/// must not make it lose the rest.
TEST_P(DeviceCoded, SumsOfARecentPast) {
  for (const int head_dim : kDims) {
    for (const double slope : {1.0 / 1024, 1.0 / 256}) {  // base 2, of a key
      AttentionCase row = coded_case("fp8", "fp8", head_dim, DType::kBFloat16, {{40, 12'000}});
      row.q_heads = row.kv_heads = 1;
      row.workers = 1;
      row.alibi = true;
      Problem p = make_problem(row);
      if (!serves(p)) continue;
      lift_values(p);
      p.alibi_slopes.set(0, static_cast<float>(slope / 1.442695));
      const double lost = expect_whole(make_reference(p, false), run_on_device(p), 0.045);
      EXPECT_LT(lost, 0.036) << "head_dim " << head_dim << ", slope " << slope;
    }
  }
}

/// A worker that has several items keeps the sums of each apart, in the same places after each other,
/// whatever was there before. Requests without sums of earlier tiles lie between, and some whose first tile
/// moves.
TEST_P(DeviceCoded, SumsOfOneItemAfterTheOther) {
  for (const int head_dim : kDims) {
    AttentionCase row = coded_case(own_format(), value_format(), head_dim, DType::kBFloat16,
                                   {{200, 3400}, {9, 500}, {70, 2500}, {40, 1536}, {30, 1024}});
    Problem p = make_problem(row);
    if (!serves(p)) continue;
    lift_values(p);
    SCOPED_TRACE(row.name);
    const Reference reference = make_reference(p, false);
    for (const SplitPolicy policy : {SplitPolicy::kFast, SplitPolicy::kBatchInvariant}) {
      p.problem.workers = 2;
      p.problem.policy = policy;
      const Plan plan = plan_on_device(p);
      if (turns_values(head_dim, policy)) {
        EXPECT_EQ(plan.info().row_block, 128);
      }
      DeviceRun device(p, plan, 0x7F);
      device.schedule();
      device.run();
      const Outputs outputs = device.outputs();
      EXPECT_EQ(judge_device(p, outputs), "") << row.name;
      expect_whole(reference, outputs, 0.04);
      device.run();
      expect_same_bits(outputs, device.outputs(), row.name + ", once more");
      if (policy != SplitPolicy::kBatchInvariant) continue;  // else no unit is cut
      p.problem.workers = 0;
      expect_same_bits(outputs, run_on_device(p), row.name + ", a worker for each");
    }
  }
}

/// Keys are walked from the last to the first: logits that rise that way, by powers of two that E4M3 holds,
/// that a float holds and that none does, tile after tile, beside rows whose logits fall. O of E4M3 moves on
/// twice or more, the second time with offsets that are a little larger, or much.
TEST_P(DeviceCoded, LogitsThatRise) {
  for (const int head_dim : kDims) {
    for (const float step : {0.5F, 4.0F, 30.0F, 140.0F}) {  // base 2, of 96 keys
      AttentionCase row =
          coded_case("fp8", value_format(), head_dim, DType::kBFloat16, {{70, 3300}, {5, 300}});
      row.q_heads = row.kv_heads = 1;
      Problem p = make_problem(row);
      if (!serves(p)) continue;
      const auto dims = static_cast<float>(head_dim);
      const float log2 = dims / std::sqrt(dims) * 1.442695F;  // of a logit, where all dims are 1
      const std::int64_t tokens = p.k.shape()[0];
      for (std::int64_t i = 0; i < p.k.numel(); ++i) {
        const std::int64_t left = tokens - i / head_dim;
        p.k.set(i, static_cast<float>(left) / 96.0F * step / log2);
      }
      for (std::int64_t i = 0; i < p.q.numel(); ++i) p.q.set(i, i / head_dim % 3 == 0 ? -1.0F : 1.0F);
      lift_values(p);
      SCOPED_TRACE(row.name + ", steps of " + std::to_string(step));
      const Reference reference = make_reference(p, false);
      for (const SplitPolicy policy : {SplitPolicy::kReproducible, SplitPolicy::kFast,
                                       SplitPolicy::kBatchInvariant}) {  // the last cuts none
        p.problem.policy = policy;
        const Outputs outputs = run_on_device(p);
        EXPECT_EQ(judge_device(p, outputs), "");
        expect_whole(reference, outputs, 0.07);  // a row may be of one key, whose P is rounded
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, DeviceCoded, ::testing::Values("half_int8", "fp8"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace halftone::testing
