// plan(): what it decides, how large the workspace is, and the algebra of partial results.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "halftone/attention.h"
#include "plan/merge.h"
#include "plan/plan.h"
#include "plan/validate.h"
#include "tests/expect_error.h"
#include "tests/plan/decode_problem.h"

namespace halftone {
namespace {

using enum ErrorCode;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

TEST(Plan, AnEmptyPlanSaysSo) {
  const Plan empty;
  expect_error(kInvalidArgument, {"plan is empty", "halftone::plan()"}, [&] { empty.problem(); });
  expect_error(kInvalidArgument, {"plan is empty"}, [&] { empty.info(); });
  expect_error(kInvalidArgument, {"plan is empty"}, [&] { empty.workspace_bytes(); });
  expect_error(kInvalidArgument, {"plan is empty"}, [&] { empty.describe(); });
  expect_error(kInvalidArgument, {"plan is empty"}, [&] { schedule(empty, {}, {}); });
  expect_error(kInvalidArgument, {"plan is empty"}, [&] { run(empty, {}, {}); });
}

TEST(Plan, AnyGroupRatio) {
  for (const int group : {1, 3, 5, 7, 16, 33, 128, 1000}) {
    AttentionProblem p = decode_problem();
    p.q_heads = p.kv_heads() * group;
    EXPECT_EQ(plan(p).info().group, group);
  }
}

TEST(Plan, ChoosesTheRowByPackedRows) {
  const auto config = [](int group, int q_len) {
    AttentionProblem p = decode_problem();
    p.q_heads = p.kv_heads() * group;
    p.max_q_len = q_len;
    return plan(p).info().config;
  };
  EXPECT_EQ(config(4, 1), "cpu-decode");
  EXPECT_EQ(config(16, 1), "cpu-decode");
  EXPECT_EQ(config(17, 1), "cpu-speculative");
  EXPECT_EQ(config(8, 8), "cpu-speculative");
  EXPECT_EQ(config(5, 13), "cpu-chunk");
  EXPECT_EQ(config(128, 8), "cpu-chunk");
  EXPECT_EQ(config(5, 205), "cpu-prefill");
  AttentionProblem p = decode_problem();
  p.max_q_len = 3;
  EXPECT_EQ(plan(p).info().reason,
            "12 packed rows per request and KV head (max_q_len 3 x 4 query heads), at most 16");
}

TEST(Plan, DependsOnBoundsOnly) {
  const PlanInfo a = plan(decode_problem()).info();
  EXPECT_EQ(a.workers, 16);
  EXPECT_EQ(a.max_units, 4 * 8);
  EXPECT_EQ(a.split_tokens, 0);
  EXPECT_EQ(a.max_partials, 2 * 15);
  EXPECT_EQ(a.workspace_bytes % 256, 0);
  EXPECT_GT(a.workspace_bytes, a.schedule_bytes + a.max_partials * a.row_block * (128 + 2) * 4 - 1);
  AttentionProblem p = decode_problem();
  p.policy = SplitPolicy::kBatchInvariant;
  const PlanInfo b = plan(p).info();
  EXPECT_GT(b.split_tokens, 0);
  EXPECT_EQ(b.split_tokens % b.kv_tile, 0);
  p.workers = 0;
  EXPECT_GE(plan(p).info().workers, 1);
}

TEST(Plan, EqualProblemsShareSchedulesAndOthersDoNot) {
  const auto id = [](const AttentionProblem& p) { return plan(p).impl()->id; };
  const AttentionProblem p = decode_problem();
  EXPECT_EQ(id(p), id(decode_problem()));
  const std::vector<std::function<void(AttentionProblem&)>> changes = {
      [](auto& x) { x.batch = 5; },
      [](auto& x) { x.q_heads = 16; },
      [](auto& x) { spec_of(x).k_format = parse_format("int8-g32"); },
      [](auto& x) { spec_of(x).v_format = parse_format("int4-g32"); },
      [](auto& x) { spec_of(x).v_head_dim = 64; },
      [](auto& x) { spec_of(x).page_size = 32; },
      [](auto& x) { spec_of(x).rotate_k = true; },
      [](auto& x) { spec_of(x).rotate_v = true; },
      [](auto& x) {
        x.kv = KvTensors{DType::kBFloat16, 8, 128};
      },
      [](auto& x) {
        x.kv = KvTensors{DType::kFloat32, 8, 128};
      },
      [](auto& x) {
        x.kv = KvTensors{DType::kFloat32, 8, 128, 64};
      },
      [](auto& x) { x.max_q_len = 2; },
      [](auto& x) { x.max_q_len = x.min_q_len = 2; },
      [](auto& x) { x.max_kv_len = 8193; },
      [](auto& x) { x.max_total_kv = 32768; },
      [](auto& x) { x.max_prompt_kv = 32768; },
      [](auto& x) { x.mask.causal = true; },
      [](auto& x) { x.mask.window_left = 7; },
      [](auto& x) { x.mask.window_right = 7; },
      [](auto& x) { x.scale = 0.5F; },
      [](auto& x) { x.softcap = 30; },
      [](auto& x) { x.alibi = true; },
      [](auto& x) { x.sinks = true; },
      [](auto& x) { x.lse = true; },
      [](auto& x) { x.policy = SplitPolicy::kFast; },
      [](auto& x) { x.arithmetic = Arithmetic::kHalfInt8; },
      [](auto& x) { x.arithmetic = Arithmetic::kFullInt8; },
      [](auto& x) { x.arithmetic = Arithmetic::kFp8; },
      [](auto& x) { x.workers = 17; },
      [](auto& x) { x.q_dtype = DType::kFloat16; },
      [](auto& x) { x.out_dtype = DType::kFloat32; },
  };
  std::vector<std::uint64_t> ids = {id(p)};
  for (const auto& change : changes) {
    AttentionProblem other = p;
    change(other);
    ids.push_back(id(other));
  }
  std::sort(ids.begin(), ids.end());
  EXPECT_EQ(std::unique(ids.begin(), ids.end()), ids.end());
}

TEST(Plan, SixteenThreadsPlanAtOnce) {
  std::vector<std::thread> threads;
  std::vector<std::uint64_t> ids(16);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    threads.emplace_back([&ids, i] { ids[i] = plan(decode_problem()).impl()->id; });
  }
  for (std::thread& t : threads) t.join();
  for (const std::uint64_t id : ids) EXPECT_EQ(id, ids[0]);
}

TEST(Plan, DescribesItself) {
  AttentionProblem p = decode_problem();
  p.mask = {true, 4096, -1};
  p.softcap = 30;
  p.alibi = p.sinks = p.lse = true;
  const std::string text = plan(p).describe();
  for (const char* part : {"cpu-decode", "batch 4", "32 query heads over 8 KV heads",
                           "K int8-head, V int8-head", "causal, window left 4096", "softcap 30", "ALiBi",
                           "sinks", "LSE f32", "reproducible", "partial results", "arithmetic 16-bit"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " is not in\n" << text;
  }
}

TEST(Plan, ExplainsAScheduleForGivenLengths) {
  AttentionProblem p = decode_problem();
  p.batch = 3;
  spec_of(p).kv_heads = 1;
  p.workers = 4;
  std::vector<std::int32_t> lengths = {640, 0, 128};
  SequenceLengths view;
  view.kv_lengths = TensorView::contiguous(lengths.data(), DType::kInt32, {3});
  const std::string text = planning::explain(plan(p), view);
  // 10 + 1 + 2 tiles of 64 keys over 4 workers: 3, 3, 3 and 4. A column is 10 keys; a cut within it falls to
  // the earlier worker.
  for (const std::string& part :
       {std::string("3 units, 13 KV tiles over 4 of 4 workers"), std::string("768 keys, 4 partial results"),
        "|" + std::string(20, '0') + std::string(19, '1') + std::string(19, '2') + std::string(6, '3') + "\n",
        std::string("(no keys: zeros)"), "|" + std::string(13, '3') + "\n"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " is not in\n" << text;
  }
  lengths[1] = 9000;
  expect_error(kOutOfRange, {"kv_lengths[1] is 9000", "max_kv_len is 8192"},
               [&] { planning::explain(plan(p), view); });
}

TEST(Workspace, OneCodePathSizesAndCarves) {
  for (const auto& [policy, max_q_len] : {std::pair{SplitPolicy::kReproducible, 1},
                                          {SplitPolicy::kBatchInvariant, 1},
                                          {SplitPolicy::kReproducible, 1000}}) {
    AttentionProblem p = decode_problem();
    p.policy = policy;
    p.max_q_len = max_q_len;
    const Plan made = plan(p);
    const auto& impl = *made.impl();
    EXPECT_EQ(impl.passes().size(), max_q_len > 1 ? 2U : 1U);
    std::vector<std::byte> memory(made.workspace_bytes() + 256);
    std::byte* base = memory.data() + 256 - reinterpret_cast<std::uintptr_t>(memory.data()) % 256;
    const planning::Workspace w = planning::carve_workspace(impl, base);
    EXPECT_EQ(w.bytes, impl.info.workspace_bytes);
    EXPECT_EQ(w.schedule_bytes, impl.info.schedule_bytes);
    std::int64_t rows = 0;
    std::vector<const void*> parts;
    std::vector<std::int64_t> sizes;
    for (std::size_t i = 0; i < impl.passes().size(); ++i) {
      const planning::Schedule& s = w.passes[i].schedule;
      for (const void* part : {static_cast<const void*>(s.header), static_cast<const void*>(s.first_step),
                               static_cast<const void*>(s.starts)}) {
        parts.push_back(part);
      }
      for (const std::int64_t size : {std::int64_t{sizeof(planning::ScheduleHeader)}, std::int64_t{8 * 5},
                                      17 * std::int64_t{sizeof(planning::WorkerStart)}}) {
        sizes.push_back(size);
      }
      rows = std::max(rows, impl.info.passes[i].max_partials * impl.info.passes[i].row_block);
      EXPECT_EQ(s.cu_q, w.passes[0].schedule.cu_q);
      EXPECT_EQ(s.kv_lengths, w.passes[0].schedule.kv_lengths);
      EXPECT_EQ(w.passes[i].partial_out, w.passes[0].partial_out);
    }
    const planning::PassWorkspace& first = w.passes[0];
    for (const void* part :
         {static_cast<const void*>(first.schedule.cu_q), static_cast<const void*>(first.schedule.kv_lengths),
          static_cast<const void*>(first.partial_out), static_cast<const void*>(first.partial_state),
          static_cast<const void*>(base + w.bytes)}) {
      parts.push_back(part);
    }
    for (const std::int64_t size : {std::int64_t{4 * 5}, std::int64_t{4 * 4}, rows * 128 * 4, rows * 2 * 4}) {
      sizes.push_back(size);
    }
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      const auto* begin = static_cast<const std::byte*>(parts[i]);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(begin) % 256, 0U);
      EXPECT_LE(begin + sizes[i], parts[i + 1]) << "part " << i << " runs into the next one";
    }
  }
}

TEST(Merge, TheEmptyStateIsNeutralAndNanStays) {
  using namespace planning;
  const RowState a{3.0F, 2.0F};
  for (const MergedState& m : {merge_states(a, empty_state()), merge_states(empty_state(), a)}) {
    EXPECT_EQ(m.state.max, a.max);
    EXPECT_EQ(m.state.sum, a.sum);
    EXPECT_EQ(m.weight_a + m.weight_b, 1.0F);
  }
  const MergedState none = merge_states(empty_state(), empty_state());
  EXPECT_TRUE(is_empty(none.state));
  EXPECT_EQ(none.state.sum, 0.0F);
  EXPECT_EQ(finish_state(empty_state()).scale, 0.0F);
  EXPECT_EQ(finish_state(empty_state()).lse, -kInf);
  EXPECT_EQ(finish_state(empty_state(), 5.0F).lse, -kInf);
  for (const MergedState& m :
       {merge_states({kNan, kNan}, a), merge_states(a, {kNan, kNan}),
        merge_states({kNan, kNan}, empty_state()), merge_states(empty_state(), {kNan, kNan})}) {
    EXPECT_TRUE(std::isnan(m.state.max) || std::isnan(m.state.sum));
  }
}

// Any cut of random logits, merged, is the softmax of all of them.
TEST(Merge, IsTheSoftmaxOfAllLogits) {
  using namespace planning;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    std::mt19937_64 random(seed);
    const float spread = seed % 2 == 0 ? 1.0F : 30000.0F;
    std::normal_distribution<float> normal;
    RowState state = empty_state();
    float out = 0;
    double max = -std::numeric_limits<double>::infinity(), sum = 0, truth = 0;
    std::vector<std::pair<float, float>> keys(1 + random() % 40);
    for (auto& [logit, value] : keys) {
      logit = spread * normal(random);
      value = normal(random);
      max = std::max<double>(max, logit);
    }
    const float sink = spread * normal(random);
    const bool with_sink = seed % 3 == 0;
    if (with_sink) max = std::max<double>(max, sink);
    for (const auto& [logit, value] : keys) {
      const MergedState m = merge_states(state, {logit, 1.0F});
      out = m.weight_a * out + m.weight_b * value;
      state = m.state;
      sum += std::exp(logit - max);
      truth += std::exp(logit - max) * static_cast<double>(value);
    }
    if (with_sink) sum += std::exp(sink - max);
    const FinishedState f = with_sink ? finish_state(state, sink) : finish_state(state);
    EXPECT_NEAR(out * f.scale, truth / sum, 1e-5);
    EXPECT_NEAR(f.lse, max + std::log(sum), 1e-6 * std::max(1.0, std::abs(max)));
  }
}

}  // namespace
}  // namespace halftone
