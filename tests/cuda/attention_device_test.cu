// Decode attention on the GPU against the double oracle: the shared case table and random problems.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <string>

#include "halftone/error.h"
#include "tests/cuda/device_problem.h"

namespace halftone::testing {
namespace {

/// Runs the problem if the backend has a kernel for it; false if not.
bool agrees(const AttentionCase& row) {
  const Problem p = make_problem(row);
  Plan plan;
  try {
    plan = plan_on_device(p);
  } catch (const Error& e) {
    if (e.code() == ErrorCode::kUnsupported) return false;
    throw;
  }
  const Outputs outputs = run_on_device(p, plan);
  EXPECT_EQ(judge_device(p, outputs), "") << row.name;
  EXPECT_EQ(outputs.status.as<std::int32_t>()[0], 0) << row.name;
  return true;
}

bool is_mixed(const AttentionCase& row) { return !row.v_format.empty() && row.v_format != row.k_format; }

TEST(DeviceAttention, CaseTable) {
  int ran = 0;
  for (const AttentionCase& row : attention_cases()) ran += agrees(for_device(row)) ? 1 : 0;
  RecordProperty("cases", ran);
  EXPECT_GE(ran, 150);
}

/// Every pair of formats of the case table, in units of 8 and of 16 rows, rotated and not.
TEST(DeviceAttention, MixedFormats) {
  for (const AttentionCase& listed : attention_cases()) {
    if (listed.name.find("mixed-") != 0) continue;
    for (const int q_heads : {8, 16}) {
      for (const bool rotated : {false, true}) {
        AttentionCase row = listed;
        row.requests = {{1, 700}, {1, 77}, {1, 16}, {1, 1}};
        row.q_heads = q_heads;
        row.kv_heads = 1;
        row.rotate_k = row.rotate_v = rotated;
        row.slack = 0;
        EXPECT_TRUE(agrees(row)) << row.name << ", " << q_heads << " heads";
      }
    }
  }
}

/// Units of 24 to 64 rows, in which four warps divide a piece of 64 tokens: every format, lengths around the
/// ends of tiles and pieces, and everything that changes logits.
TEST(DeviceAttention, ManyRows) {
  struct Variant {
    const char* name;
    Mask mask;
    float softcap;
    bool alibi, rotated;
    DType q_dtype;
  };
  const Variant variants[] = {
      {"plain", {}, 0, false, false, DType::kBFloat16},
      {"causal", {.causal = true}, 0, false, false, DType::kFloat16},
      {"window", {.causal = true, .window_left = 100, .window_right = -1}, 0, false, false, DType::kBFloat16},
      {"biased", {.causal = true}, 20, true, false, DType::kBFloat16},
      {"rotated", {.causal = true}, 0, false, true, DType::kFloat16},
  };
  int seed = 5000;
  for (const char* format : {"bf16", "fp16", "fp8", "fp8-token", "int8-tensor", "int8-head", "int8-token",
                             "int4-token", "int4-row", "int4-g32", "int4-g64"}) {
    for (const auto& [q_heads, q_len] : {std::pair{8, 3}, {16, 2}, {16, 3}, {11, 5}, {32, 2}}) {
      for (const Variant& variant : variants) {
        AttentionCase row;
        row.name = std::string(format) + ", " + std::to_string(q_heads) + " x " + std::to_string(q_len) +
                   " rows, " + variant.name;
        for (const int keys : {5, 16, 63, 64, 65, 130, 191, 257, 700}) {
          row.requests.push_back({q_len, keys});
        }
        row.q_heads = q_heads;
        row.kv_heads = 1;
        row.k_format = format;
        row.page_size = 16 << seed % 4;
        row.mask = variant.mask;
        row.softcap = variant.softcap;
        row.alibi = variant.alibi;
        row.rotate_k = row.rotate_v = variant.rotated;
        row.q_dtype = variant.q_dtype;
        row.out_dtype = DType::kFloat16;
        row.workers = seed % 3 * 7;
        row.seed = static_cast<std::uint64_t>(seed++);
        EXPECT_TRUE(agrees(row)) << row.name;
      }
    }
  }
}

TEST(DeviceAttention, RandomProblems) {
  const char* wanted = std::getenv("HALFTONE_FUZZ_CASES");
  const char* first = std::getenv("HALFTONE_FUZZ_SEED");
  const std::uint64_t count = wanted ? std::strtoull(wanted, nullptr, 10) : 2000;
  const std::uint64_t begin = first ? std::strtoull(first, nullptr, 10) : 0;
  std::uint64_t ran = 0, mixed = 0;
  for (std::uint64_t seed = begin; seed < begin + count && !HasFailure(); ++seed) {
    SCOPED_TRACE("repeat with HALFTONE_FUZZ_SEED=" + std::to_string(seed) + " HALFTONE_FUZZ_CASES=1");
    const AttentionCase row = for_device(random_case(seed));
    if (!agrees(row)) continue;
    ++ran;
    mixed += is_mixed(row) ? 1 : 0;
  }
  RecordProperty("mixed", static_cast<int>(mixed));
  EXPECT_GE(ran * 10, count * 7);  // the rest: formats and shapes that the backend refuses
  if (count >= 1000) {
    EXPECT_GE(mixed * 10, count);
  }
}

TEST(DeviceAttention, ExtremeWindows) {
  for (const int window : {0, 1, 1 << 30, std::numeric_limits<int>::max()}) {
    for (const bool causal : {false, true}) {
      AttentionCase row;
      row.k_format = "int8-head";
      row.requests = {{1, 100}, {7, 5}, {3, 300}};
      row.cu_q = true;
      row.mask = {.causal = causal, .window_left = window, .window_right = window};
      EXPECT_TRUE(agrees(for_device(row))) << "window " << window;
    }
  }
}

/// Items of a worker that come in short and in long pieces, in any order, with odd numbers of short ones, and
/// a window that begins inside of a tile's page.
TEST(DeviceAttention, ShortAndLongItems) {
  for (const char* format : {"int4-g32", "int4-token", "int8-head", "fp8"}) {
    for (const int head_dim : {64, 128}) {
      for (const int workers : {1, 2, 3}) {
        for (const int window : {-1, 6000}) {
          AttentionCase row;
          row.k_format = format;
          row.head_dim = head_dim;
          row.q_heads = 4;
          row.kv_heads = 1;
          row.workers = workers;
          row.mask = {.causal = true, .window_left = window};
          row.cu_q = true;
          for (const int keys : {40, 5000, 16, 4096, 4095, 33, 9001, 0, 300, 20000, 7})
            row.requests.push_back({1, keys});
          EXPECT_TRUE(agrees(for_device(row))) << format << " " << head_dim << " " << workers;
        }
      }
    }
  }
}

/// The same bits from repeated launches, on whatever SMs the blocks land.
TEST(DeviceAttention, RepeatsBits) {
  for (const char* name :
       {"format-int4-g32-d128", "format-int8-head-d128", "format-fp8-d128", "format-bf16-d128"}) {
    for (const int q_len : {1, 12}) {
      AttentionCase row = for_device(find_case(name));
      row.requests = {{q_len, 5000}, {q_len, 33}, {q_len, 12000}};
      const Problem p = make_problem(row, Fill::kTiled);
      const Plan plan = plan_on_device(p);
      const Outputs first = run_on_device(p, plan);
      for (int i = 0; i < 5; ++i) EXPECT_TRUE(same_bytes(first.out, run_on_device(p, plan).out)) << name;
    }
  }
}

/// A request's bits do not depend on its neighbours.
TEST(DeviceAttention, BatchInvariant) {
  for (const char* format : {"int4-g32", "int8-head", "fp8", "bf16"}) {
    AttentionCase row;
    row.k_format = format;
    row.policy = SplitPolicy::kBatchInvariant;
    row.requests = {{1, 9000}};
    const Problem alone = make_problem(row, Fill::kTiled);
    const Outputs expected = run_on_device(alone, plan_on_device(alone));
    row.requests = {{1, 9000}, {3, 4100}, {1, 7}, {1, 20000}};
    row.cu_q = true;
    Problem batch = make_problem(row, Fill::kTiled);
    // The first request sees the same queries and the same pages as before.
    const auto q = alone.q.bytes();
    std::copy(q.begin(), q.end(), batch.q.bytes().begin());
    const KvCacheSpec& spec = alone.cache->spec;
    const std::size_t page_bytes = static_cast<std::size_t>(page_layout(spec).page_bytes);
    const auto from = alone.cache->block_table.as<std::int32_t>(),
               to = batch.cache->block_table.as<std::int32_t>();
    for (int i = 0; i * spec.page_size < 9000; ++i) {
      std::copy_n(alone.cache->pages.bytes().data() + from[i] * page_bytes, page_bytes,
                  batch.cache->pages.bytes().data() + to[i] * page_bytes);
    }
    const std::pair<const Tensor*, const Tensor*> scales[] = {{&alone.cache->k_scale, &batch.cache->k_scale},
                                                              {&alone.cache->v_scale, &batch.cache->v_scale}};
    for (const auto& [source, target] : scales) {
      if (!source->present()) continue;
      std::copy(source->bytes().begin(), source->bytes().end(), target->bytes().begin());
    }
    const Outputs actual = run_on_device(batch, plan_on_device(batch));
    const auto a = expected.out.bytes(), b = actual.out.bytes();
    EXPECT_TRUE(std::equal(a.begin(), a.end(), b.begin())) << format;
  }
}

/// Captured at length 1, replayed at full length: eager's bits.
TEST(DeviceAttention, GraphReplayAtOtherLengths) {
  AttentionCase row = for_device(find_case("format-int4-g32-d128"));
  row.requests = {{1, 131072}, {1, 4096}, {1, 100}};
  const Problem p = make_problem(row, Fill::kTiled);
  const Plan plan = plan_on_device(p);
  const Outputs expected = run_on_device(p, plan);

  const DeviceRun device(p, plan);
  const std::vector<std::int32_t> ones(3, 1);
  void* lengths = device.args.lengths.kv_lengths.data;
  check_cuda(cudaMemcpy(lengths, ones.data(), 12, cudaMemcpyHostToDevice));
  const CapturedGraph graph(
      [&](cudaStream_t stream) {
        device.schedule(stream);
        device.run(stream);
      },
      cudaStreamDefault);
  graph.replay();
  const std::vector<std::int32_t> full = {131072, 4096, 100};
  check_cuda(cudaMemcpy(lengths, full.data(), 12, cudaMemcpyHostToDevice));
  graph.replay();
  const Outputs outputs = device.outputs();
  EXPECT_TRUE(same_bytes(expected.out, outputs.out));
  EXPECT_TRUE(same_bytes(expected.lse, outputs.lse));
}

}  // namespace
}  // namespace halftone::testing
