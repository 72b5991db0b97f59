// Prompts over caches that run() stages: in 16 bits in the workspace, where prefill's kernels read them.
#include <cmath>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "format/status.h"
#include "tests/attention/prefill_cases.h"
#include "tests/attention/select.h"
#include "tests/cuda/bounds_checks.h"
#include "tests/cuda/prefill_options.h"
#include "tests/cuda/prefill_plans.h"

namespace halftone::testing {
namespace {

/// For tests of one head_dim: 128, or the one that a smaller build has.
int built_dim() {
  for (const int head_dim : {128, 64, 256}) {
    if (is_built(head_dim)) return head_dim;
  }
  return 512;
}

constexpr int kDims = static_cast<int>(std::size(kPrefillDims));

class DeviceStaged : public ::testing::Test {
 protected:
  /// Whether the problem's prompts are staged: not in a build of other head_dims.
  bool has_staged(const Problem& p) {
    const bool has = staged_of(p).keys > 0;
    EXPECT_EQ(has, is_built(p.row.head_dim)) << p.row.name;
    served_ += has ? 1 : 0;
    return has;
  }
  void expect_agrees(const AttentionCase& row) {
    SCOPED_TRACE(row.name);
    const Problem p = make_problem(row);
    if (!has_staged(p)) return;
    const Outputs outputs = run_on_device(p);
    EXPECT_EQ(judge_device(p, outputs), "");
    EXPECT_EQ(status_of(outputs), 0);
  }
  void TearDown() override { EXPECT_GT(served_, 0) << "no kernel of prefill is in this build"; }

 private:
  int served_ = 0;
};

TEST_F(DeviceStaged, FormatsOfEveryKind) {
  int n = 0;
  for (const char* format :
       {"fp8", "fp8-static-head", "fp8-token", "fp8-g32", "int8-tensor", "int8-tensor-asym", "int8-head",
        "int8-static-head-asym", "int8-token-asym", "int8-g64", "int4-g32", "int4-row", "int4-g64-sym",
        "int4-static-head-sym", "fp16"}) {
    for (const int head_dim : kPrefillDims) {
      if (!has_whole_groups(format, head_dim)) continue;
      const bool f16 = format != std::string("fp16") && n++ % 2 == 0;  // pages in f16 are read as they are
      AttentionCase row = staged_case(format, format, head_dim, mixed_requests(), kPrefillTypes[f16 ? 1 : 0]);
      row.rotate_k = head_dim == 128;  // else some are read as they are
      expect_agrees(row);
    }
  }
}

/// K and V in different formats, pairs among them that decode has no kernel for; stored rotated or not.
TEST_F(DeviceStaged, MixedFormatsAndRotations) {
  int n = 0;
  for (const auto& [k, v] : {std::pair{"bf16", "int4-g32"},
                             {"int8-head", "int4-g32"},
                             {"int8-token-asym-f32", "fp16"},
                             {"fp8-token-head-f32", "int8-tensor-asym"},
                             {"bf16", "fp16"},
                             {"int4-row", "int4-row"},
                             {"fp16", "fp8"}}) {
    for (const bool rotate_v : {false, true}) {
      for (const bool rotate_k : {true, false}) {
        AttentionCase row =
            staged_case(k, v, kPrefillDims[n % kDims], mixed_requests(), kPrefillTypes[n / 2 % 2]);
        ++n;
        if (!has_whole_groups(k, row.head_dim) || !has_whole_groups(v, row.head_dim)) row.head_dim = 192;
        row.rotate_k = rotate_k, row.rotate_v = rotate_v;
        row.name += rotate_k ? ", K rotated" : "";
        row.name += rotate_v ? ", V rotated" : "";
        expect_agrees(row);
      }
    }
  }
}

/// V that f16 might not hold: in bf16, or with scales in f32; values as large as those types have, too.
TEST_F(DeviceStaged, ValuesInBf16) {
  int n = 0;
  using Pair = std::pair<std::string, std::string>;
  for (const auto& [k, v] : {Pair{"int8-head", "bf16"},
                             {"bf16", "int8-token-head-f32"},
                             {"int4-g32", "int8-g64-asym-f32"},
                             {"fp8-token-head-f32", "fp8-token-head-f32"},
                             {"bf16", "bf16"}}) {
    for (const int head_dim : kPrefillDims) {
      if (!has_whole_groups(k, head_dim) || !has_whole_groups(v, head_dim)) continue;
      const bool pages = k == "bf16" && v == "bf16";  // which beside Q in bf16 are read as they are
      AttentionCase row =
          staged_case(k, v, head_dim, mixed_requests(), kPrefillTypes[pages || n % 2 ? 1 : 0]);
      row.rotate_v = n % 3 == 0;
      row.mask.window_left = n % 4 == 1 ? 40 : -1;
      row.name += row.rotate_v ? ", V rotated" : "";
      ++n;
      SCOPED_TRACE(row.name);
      Problem p = make_problem(row);
      if (!has_staged(p)) continue;
      for (const float magnitude : {1.0F, row.out_dtype == DType::kFloat16 ? 1e-3F : 1e28F}) {
        for (std::int64_t i = 0; i < p.v.numel(); ++i) p.v.set(i, p.v.get(i) * magnitude);
        p.cache = refilled(p, {0xFF});
        const Outputs outputs = run_on_device(p);
        EXPECT_EQ(judge_device(p, outputs), "") << "V times " << magnitude;
        EXPECT_EQ(status_of(outputs), 0);
      }
    }
  }
}

/// K of 192 dims beside V of 128; pages of 16 bits whose O of 512 dims must be rotated back.
TEST_F(DeviceStaged, DimsThatOneTypeOfKernelHas) {
  int n = 0;
  using Pair = std::pair<std::string, std::string>;
  for (const auto& [k, v] : {Pair{"int8-head", "int8-head"},
                             {"int4-g32", "int4-g32"},
                             {"fp8", "fp8"},
                             {"int8-token-asym", "bf16"},
                             {"bf16", "int8-token-head-f32"},
                             {"bf16", "bf16"},
                             {"fp16", "fp16"}}) {
    const bool values = k == v && dtype_bits(parse_format(k).dtype) == 16;
    const int head_dim = values ? 512 : 192;
    const DType q_dtype = values ? parse_format(k).dtype : kPrefillTypes[n % 2];
    AttentionCase row = staged_case(k, v, head_dim, mixed_requests(), q_dtype);
    row.v_head_dim = values ? 0 : 128;
    row.rotate_k = ++n % 3 == 0;
    row.rotate_v = values || n % 2 == 0;
    row.policy = n % 4 == 1 ? SplitPolicy::kBatchInvariant : SplitPolicy::kFast;
    expect_agrees(row);
  }
}

TEST_F(DeviceStaged, EveryOption) {
  constexpr std::pair<const char*, const char*> kFormats[] = {
      {"int8-head", "int8-head"}, {"int4-g32", "int4-g32"}, {"fp8", "fp8"}, {"int8-head", "bf16"}};
  int n = 0;
  for (const DType q_dtype : kPrefillTypes) {
    for (const Option& option : options()) {
      const auto& [k, v] = kFormats[n % std::size(kFormats)];
      AttentionCase row = staged_case(k, v, kPrefillDims[n % kDims], mixed_requests(), q_dtype);
      ++n;
      if (!has_whole_groups(row.k_format, row.head_dim)) row.head_dim = 192;
      row.rotate_k = row.head_dim == 128;  // else some are read as they are
      option.set(row);
      row.name += std::string(", ") + option.name;
      expect_agrees(row);
    }
  }
}

/// Query heads per KV head: boxes of whole queries or single rows, one pass or two.
TEST_F(DeviceStaged, Groups) {
  for (const int group : {1, 3, 4, 5, 16, 65}) {
    const int longest = 170 / group + 3;
    AttentionCase row =
        staged_case("int8-head", "int4-g32", built_dim(),
                    {{longest, 150}, {1, 100}, {longest / 2, 260}, {2, 0}, {0, 9}, {longest - 1, 20}});
    row.q_heads = row.kv_heads * group;
    row.alibi = group % 2 == 1;
    row.sinks = group % 3 == 0;
    row.name += ", group " + std::to_string(group);
    expect_agrees(row);
  }
}

TEST_F(DeviceStaged, PagesOfEverySize) {
  for (const int page_size : {16, 32, 128, 256}) {
    AttentionCase row = staged_case("int8-token-asym", "int4-g32", built_dim(), mixed_requests());
    row.page_size = page_size;
    row.table_mode = page_size == 32 ? BlockTableMode::kClamped : BlockTableMode::kTrusted;
    row.name += ", pages of " + std::to_string(page_size);
    expect_agrees(row);
  }
}

/// Scales of every head differ, as do what ALiBi and sinks do to it: nothing may come from another head.
AttentionCase many_heads(const std::string& k_format, const std::string& v_format, int group) {
  AttentionCase row =
      staged_case(k_format, v_format, built_dim(), {{200, 230}, {90, 300}, {70, 60}, {1, 170}});
  row.kv_heads = 4;
  row.q_heads = 4 * group;
  row.alibi = row.sinks = true;
  row.data = Data::kOutlierChannels;
  return row;
}

/// Bounds that leave room for so many heads at a time and not for twice as many; few of the rows are written.
Problem in_rounds(const AttentionCase& row, int heads) {
  Problem p = make_problem(row);
  const std::int64_t key_bytes = 4 * row.head_dim + 4, batch = p.problem.batch;
  p.problem.max_kv_len = static_cast<int>((std::int64_t{1} << 29) / (2 * heads * key_bytes) / batch + 1);
  return p;
}

/// A few heads at a time: right, and with batch_invariant the bits of all heads at once.
TEST_F(DeviceStaged, Rounds) {
  for (const auto& [heads, group] : {std::pair{1, 5}, {2, 2}}) {
    AttentionCase row = many_heads("int8-static-head", "int8-static-head", group);
    row.policy = SplitPolicy::kBatchInvariant;
    const Problem once = make_problem(row);
    if (!has_staged(once)) continue;
    EXPECT_EQ(staged_of(once).rounds, 1);
    const Problem p = in_rounds(row, heads);
    EXPECT_EQ(staged_of(p).rounds, 4 / heads);
    const Outputs outputs = run_on_device(p);
    EXPECT_EQ(judge_device(p, outputs), "");
    EXPECT_EQ(status_of(outputs), 0);
    expect_same_bits(run_on_device(once), outputs, std::to_string(heads) + " heads at a time");
  }
}

/// A bound of all keys makes the rounds fewer; balanced over the workers, cut units among them.
TEST_F(DeviceStaged, ABoundOfAllKeysSavesRounds) {
  AttentionCase row = many_heads("int8-static-head-asym", "int4-static-head-sym", 4);
  row.requests = {{100, 2500}};
  Problem p = in_rounds(row, 2);
  if (!has_staged(p)) return;
  EXPECT_EQ(judge_device(p, run_on_device(p)), "");
  p.problem.max_total_kv = 2500;
  EXPECT_EQ(staged_of(p).rounds, 1);
  EXPECT_EQ(judge_device(p, run_on_device(p)), "");
}

/// Static scales that are none set the status, whichever round their head has.
TEST_F(DeviceStaged, BadScalesOfEveryRound) {
  AttentionCase row = many_heads("int8-static-head-asym", "fp16", 2);
  row.requests.pop_back();
  const auto prompts = [&] {
    Problem p = in_rounds(row, 2);
    p.problem.min_q_len = 70;  // one pass
    return p;
  };
  const Problem p = prompts();
  if (!has_staged(p)) return;
  const Plan plan = plan_on_device(p);
  ASSERT_EQ(plan.info().passes.size(), 1U);
  ASSERT_EQ(staged_of(p).rounds, 2);
  for (const int head : {-1, 1, 3}) {
    Problem bad = prompts();
    if (head >= 0) bad.cache->k_scale.set(head, kNan);
    EXPECT_EQ(status_of(run_on_device(bad, plan)), head < 0 ? 0 : kStatusBadScale) << "head " << head;
  }
}

/// The bits of plain tensors in f16 that hold the same values: nothing else is different where K needs no
/// scales and those of V are stored.
TEST_F(DeviceStaged, BitsOfPlainTensors) {
  int n = 0;
  for (const auto& [k, v] :
       {std::pair{"int8-head", "int8-head"}, {"int4-g32", "int4-g32"}, {"int4-row", "int4-row"}}) {
    for (const int head_dim : kPrefillDims) {
      // At head_dim 96 the tiles of staged keys are smaller.
      if (!has_whole_groups(k, head_dim) || head_dim == 96) continue;
      AttentionCase row =
          staged_case(k, v, head_dim, {{100, 130}, {81, 200}, {0, 20}, {65, 30}, {40, 0}}, DType::kFloat16);
      row.policy = SplitPolicy::kBatchInvariant;
      row.rotate_k = ++n % 2 == 0, row.rotate_v = n % 3 == 0;
      row.mask.window_left = n % 4 == 0 ? 50 : -1;
      const Problem p = make_problem(row);
      if (!has_staged(p)) continue;
      const Problem twin = plain_without(p, 0, 0, 0);
      expect_same_bits(run_on_device(twin), run_on_device(p), row.name);
    }
  }
}

/// Prompts alone, without a mask: to leave out keys is the same as not to have them. Of 128 dims K and V in
/// different formats, since alike ones may be read as they are.
AttentionCase unmasked(const std::string& format, int head_dim) {
  AttentionCase row = staged_case(format, head_dim == 128 ? "int4-g64" : format, head_dim,
                                  {{70, 100}, {33, 90}, {150, 333}, {40, 0}}, DType::kFloat16);
  row.mask = {};
  row.q_heads = 8;
  return row;
}

/// Entries that name no page: their tokens are left out, in both modes of the table.
TEST_F(DeviceStaged, BadPagesAreLeftOut) {
  for (const auto& [format, head_dim] : {std::pair{"int8-head", 64}, {"int4-g32", 128}, {"fp8-token", 256}}) {
    for (const int page_size : {16, 64}) {
      for (const auto& [bad, column] : {std::pair{-1, 0}, {INT32_MIN, 2}, {INT32_MAX, 332 / page_size}}) {
        AttentionCase row = unmasked(format, head_dim);
        row.page_size = page_size;
        if (has_staged(make_problem(row))) expect_bad_page_is_left_out(row, column, bad);
      }
    }
  }
}

/// Lengths beyond the table, and a table without columns and without an address.
TEST_F(DeviceStaged, TablesThatAreTooNarrow) {
  for (const int columns : {0, 1, 3}) {
    AttentionCase row = unmasked("int8-head", built_dim());
    row.requests = {{150, 333}};
    const Problem p = make_problem(row);
    if (has_staged(p)) expect_narrow_table_is_left_out(p, columns);
  }
}

/// More keys than max_total_kv: those beyond are left out and written nowhere, in one round and in several.
TEST_F(DeviceStaged, MoreKeysThanTheBoundOfAll) {
  for (const auto& [format, head_dim] : {std::pair{"int8-head", 64}, {"int4-g32", 128}, {"fp8-token", 256}}) {
    for (const std::int64_t most : {1, 15, 50, 99, 100, 101, 190, 195, 300, 522}) {
      Problem p = make_problem(unmasked(format, head_dim));
      if (!has_staged(p)) continue;
      SCOPED_TRACE(p.row.name + ", " + std::to_string(most) + " keys");
      p.problem.max_total_kv = most;
      const Outputs outputs = run_on_device(p);
      EXPECT_EQ(status_of(outputs), kStatusBadKeys);
      AttentionCase row = p.row;
      row.plain = DType::kFloat16;
      row.k_format = row.v_format = "fp16";
      const std::vector<std::int64_t> first = first_tokens(row);
      for (std::size_t r = 0; r < row.requests.size(); ++r) {
        const std::int64_t left = std::clamp<std::int64_t>(most - first[r], 0, row.requests[r].kv_len);
        row.requests[r].kv_len = static_cast<int>(left);
      }
      Problem twin = make_problem(row);
      const reference::Dequantised d = dequantised(*p.cache);
      const std::vector<std::int64_t> shape = {most, row.kv_heads, row.head_dim};
      twin.q = p.q.clone();
      twin.k = Tensor::of(DType::kFloat16, shape, floats_of_rows(d.k, 0, most));
      twin.v = Tensor::of(DType::kFloat16, shape, floats_of_rows(d.v, 0, most));
      EXPECT_EQ(judge_device(twin, outputs), "");
    }
    Problem exact = make_problem(unmasked(format, head_dim));
    exact.problem.max_total_kv = 523;
    if (has_staged(exact)) {
      EXPECT_EQ(status_of(run_on_device(exact)), 0);
    }
  }
}

/// The bound of the prompts' keys, beside single queries whose keys are many more: one round of what are
/// several without it, with the same bits. Keys of a prompt beyond it are left out.
TEST_F(DeviceStaged, ABoundOfPromptsLeavesOutSingleQueries) {
  AttentionCase row = many_heads("int8-static-head", "int8-static-head", 2);
  row.requests = {{1, 500}, {70, 100}, {1, 2000}, {0, 40}, {33, 90}, {1, 0}};
  row.policy = SplitPolicy::kBatchInvariant;
  Problem p = in_rounds(row, 1);
  if (!has_staged(p)) return;
  EXPECT_EQ(staged_of(p).rounds, 4);
  const Outputs expected = run_on_device(p);
  p.problem.max_prompt_kv = 190;
  EXPECT_EQ(staged_of(p).rounds, 1);
  EXPECT_EQ(staged_of(p).keys, 190);
  const Outputs outputs = run_on_device(p);
  EXPECT_EQ(judge_device(p, outputs), "");
  EXPECT_EQ(status_of(outputs), 0);
  expect_same_bits(expected, outputs, "190 keys of prompts");
  p.problem.max_prompt_kv = 189;
  const Outputs fewer = run_on_device(p);
  EXPECT_EQ(status_of(fewer), kStatusBadKeys);
  for (const std::size_t r : {0, 1, 2, 5}) {  // all but the last prompt have all of their keys
    EXPECT_EQ(request_bytes(p, fewer.out, r), request_bytes(p, expected.out, r)) << "request " << r;
  }
}

/// Each request alone, under the bounds of all and under its own, and all with fewer staged keys.
void expect_bits_of_each_request(const Problem& p) {
  const Outputs all = run_on_device(p);
  EXPECT_EQ(judge_device(p, all), "");
  for (std::size_t r = 0; r < p.row.requests.size(); ++r) {
    if (p.row.requests[r].q_len == 0) continue;
    for (const bool own_bounds : {false, true}) {
      const Problem alone = select(p, {r}, own_bounds);
      const Outputs outputs = run_on_device(alone);
      EXPECT_EQ(request_bytes(alone, outputs.out, 0), request_bytes(p, all.out, r)) << "request " << r;
      EXPECT_EQ(request_bytes(alone, outputs.lse, 0), request_bytes(p, all.lse, r)) << "request " << r;
    }
  }
  Problem bounded = select(p, {0, 1, 2, 3, 4, 5, 6}, false);
  bounded.problem.max_total_kv = 3000;
  bounded.problem.max_prompt_kv = 2533;
  bounded.problem.workers = 3;
  expect_same_bits(all, run_on_device(bounded), "fewer staged keys, on three workers");
}

/// The same bits alone, in company, under other bounds, on other workers: single queries by a kernel of
/// decode or, of a pair that it lacks, by the universal one.
TEST_F(DeviceStaged, BatchInvariantBits) {
  for (const char* v : {"int8-head", "fp16"}) {
    AttentionCase row = staged_case("int8-head", v, built_dim(),
                                    {{120, 300}, {1, 90}, {90, 2000}, {20, 33}, {0, 50}, {200, 150}, {7, 0}});
    row.policy = SplitPolicy::kBatchInvariant;
    row.rotate_k = true;
    const Problem p = make_problem(row);
    if (!has_staged(p)) continue;
    EXPECT_EQ(plan_on_device(p).info().passes.size(), 2U);
    expect_bits_of_each_request(p);
  }
}

/// Captured once, replayed with other lengths and another table, over rows of the step before: eager's bits.
TEST_F(DeviceStaged, GraphReplayWithOtherLengthsAndTables) {
  using Lengths = std::vector<std::int32_t>;
  struct Step {
    Lengths queries, keys;
    std::size_t moved;  // request r has the pages of request r + moved
  };
  const std::vector<Step> steps = {{{300, 300, 300, 300}, {700, 700, 300, 700}, 0},
                                   {{0, 0, 300, 0}, {700, 700, 300, 700}, 1},
                                   {{100, 1, 0, 64}, {100, 650, 300, 0}, 2},
                                   {{0, 0, 0, 0}, {1, 1, 1, 1}, 0},
                                   {{1, 1, 1, 1}, {0, 0, 0, 0}, 3},
                                   {{192, 193, 65, 1}, {192, 193, 65, 699}, 1},
                                   {{300, 300, 300, 300}, {700, 700, 300, 700}, 0}};
  for (const SplitPolicy policy : {SplitPolicy::kReproducible, SplitPolicy::kBatchInvariant}) {
    AttentionCase row =
        staged_case("int8-head", "int4-g32", built_dim(), {{300, 700}, {300, 700}, {300, 700}, {300, 700}});
    row.policy = policy;
    row.page_size = 16;
    const Problem p = make_problem(row);
    if (!has_staged(p)) continue;
    const DeviceRun device(p, plan_on_device(p));
    const TensorView table = std::get<PagedKv>(device.args.kv).block_table;
    const auto columns = static_cast<std::size_t>(p.cache->block_table.shape()[1]);
    const auto set = [&](const Step& step) {
      Lengths sums = {0};
      for (const std::int32_t n : step.queries) sums.push_back(sums.back() + n);
      device.write(device.args.lengths.cu_q, Tensor::of({5}, sums));
      device.write(device.args.lengths.kv_lengths, Tensor::of({4}, step.keys));
      const Tensor moved = p.cache->block_table.clone();
      for (std::size_t r = 0; r < 4; ++r) {
        const auto from =
            p.cache->block_table.as<std::int32_t>().subspan((r + step.moved) % 4 * columns, columns);
        std::copy(from.begin(), from.end(),
                  moved.as<std::int32_t>().begin() + static_cast<std::ptrdiff_t>(r * columns));
      }
      device.write(table, moved);
      device.clear();
      check_cuda(cudaDeviceSynchronize());
    };
    expect_replays(device, steps, 2, set);
    EXPECT_EQ(status_of(device.outputs()), 0);
  }
}

}  // namespace
}  // namespace halftone::testing
