// Attention over latent caches without lists, by the block table, on the GPU: drafts, steps and pages, and
// bits.
#include <climits>
#include <cmath>

#include "format/status.h"
#include "tests/cuda/adversarial_device.h"
#include "tests/cuda/agreement.h"
#include "tests/cuda/latent_device.h"
#include "tests/cuda/repeated_problem.h"

namespace halftone::testing {
namespace {

/// Without lists, by the block table: several queries of a request in one unit and in many.
TEST(DeviceLatentAttention, DenseDraftsAgreeWithTheOracle) {
  int n = 0;
  for (const int heads : kAllHeads) {
    for (const char* format : kAllFormats) {
      for (const int q_len : {1, 2 + n % 7, 9 + n % 8}) {  // every length, whatever the format
        ++n;
        AttentionCase row = listed_case(heads, format);
        row.lists = {};
        row.mask.causal = n % 5 != 0;
        if (q_len > 8 && n % 2 == 0) row.mask.window_left = 70;
        row.requests = {{q_len, heads * q_len > 512 ? 90 : 300}, {1, 63}, {q_len, q_len}, {0, 9}};
        row.page_size = 32;
        row.name += ", " + std::to_string(q_len) + " queries";
        expect_agrees(row);
      }
    }
  }
}

/// Pages of bf16 of every size; requests that end anywhere in a step of 64 tokens, in a page or at its end;
/// several steps, cut or not, of either parity. What lies behind a request is NaN.
TEST(DeviceLatentAttention, DenseStepsAndPages) {
  int n = 0;
  for (const int heads : {33, 64, 96, 128, 160, 24, 32}) {
    for (const int page_size : {16, 32, 64, 128, 256}) {
      for (const bool together : {true, false}) {
        AttentionCase row = listed_case(heads, "bf16");
        row.lists = {};
        row.page_size = page_size;
        row.requests = {{1, 1},   {2, 15},  {1, 16},  {3, 63}, {1, 64},  {1, 65},
                        {0, 129}, {2, 127}, {1, 130}, {1, 0},  {1, 257}, {2, 449}};
        if (together) row.requests = {{1, 2500}, {1, 190}};
        row.mask.causal = n % 2 == 0;
        if (n % 3 == 1) row.mask.window_left = 90;
        row.sinks = n % 4 == 1;
        row.softcap = n % 5 == 2 ? 20.0F : 0.0F;
        row.out_dtype = n % 3 == 0 ? DType::kFloat32 : DType::kBFloat16;
        constexpr SplitPolicy kPolicies[] = {SplitPolicy::kFast, SplitPolicy::kReproducible,
                                             SplitPolicy::kBatchInvariant};
        row.policy = kPolicies[n / 2 % 3];
        row.workers = n % 2 == 1 ? 3 : 0;
        row.seed = 1200 + static_cast<std::uint64_t>(n++);
        row.name += ", pages of " + std::to_string(page_size) + ", " + std::to_string(n);
        for (const AttentionCase& each : under_all_bounds(row)) {
          SCOPED_TRACE(each.name);
          Problem p = make_problem(each);
          p.cache = refilled(p, {0xFF});
          const Outputs outputs = run_on_device(p);
          EXPECT_EQ(judge_device(p, outputs), "");
          EXPECT_EQ(status_of(outputs), 0);
        }
      }
    }
  }
}

/// Logits that grow from step to step, so that every step raises what the ones before are relative to.
TEST(DeviceLatentAttention, DenseLogitsThatGrow) {
  for (const int heads : {64, 128}) {
    for (const bool falls : {true, false}) {
      AttentionCase row = listed_case(heads, "bf16");
      row.lists = {};
      row.requests = {{2, 700}};
      Problem p = make_problem(row);
      for (std::int64_t t = 0; t < 700; ++t) {
        const float size = 0.003F * static_cast<float>(falls ? 700 - t : t);
        for (std::int64_t d = 0; d < 576; ++d) p.k.set(t * 576 + d, size * p.k.get(t * 576 + d) + size);
      }
      for (std::int64_t i = 0; i < p.q.numel(); ++i) p.q.set(i, std::abs(p.q.get(i)));
      p.cache = refilled(p, {0xFF});
      EXPECT_EQ(judge_device(p, run_on_device(p)), "") << row.name << (falls ? ", falling" : "");
    }
  }
}

/// The last pages of a request are missing: as if it were so much shorter.
TEST(DeviceLatentAttention, DensePagesThatAreMissing) {
  const auto check = [](const AttentionCase& row, std::int32_t bad) {
    const Problem p = make_problem(row);
    const Plan plan = plan_on_device(p);
    DeviceRun twin(p, plan);
    const std::int32_t lengths[] = {300, 256};
    check_cuda(cudaMemcpy(twin.args.lengths.kv_lengths.data, lengths, 8, cudaMemcpyHostToDevice));
    twin.schedule();
    twin.run();
    const Outputs expected = twin.outputs();
    const auto table = p.cache->block_table.as<std::int32_t>();
    const auto width = static_cast<std::size_t>(p.cache->block_table.shape()[1]);
    for (int column = 256 / row.page_size; column * row.page_size < 300; ++column) {
      table[width + static_cast<std::size_t>(column)] = bad;
    }
    const Outputs outputs = run_on_device(p, plan);
    EXPECT_EQ(status_of(outputs), kStatusBadPage) << row.name;
    // Units are cut elsewhere, and weights rounded to bf16, by up to 2^-9, relative to something else.
    expect_rows(expected, outputs, 0.0, row.name + ", pages of " + std::to_string(row.page_size), 2 * 0x1p-9);
  };
  for (const int heads : {32, 64, 128}) {
    for (const int page_size : {16, 32, 128}) {
      for (const std::int32_t bad : {-1, INT_MAX, 1 << 20}) {
        AttentionCase own = listed_case(heads, "bf16");
        own.lists = {};
        own.page_size = page_size;
        own.requests = {{1, 300}, {1, 300}};
        own.table_mode = BlockTableMode::kTrusted;
        for (const AttentionCase& row : under_all_bounds(own)) check(row, bad);
      }
    }
  }
}

/// 17 to 32 packed rows in units of 64, of which the rest is padding: drafts, masks and ends of requests
/// within a step. What lies behind a request is NaN.
TEST(DeviceLatentAttention, DensePagesOfFewRows) {
  int n = 0;
  for (const auto& [heads, q_len] : {std::pair{32, 1}, {16, 2}, {8, 3}}) {
    AttentionCase row = listed_case(heads, "bf16");
    row.lists = {};
    row.page_size = 16 << n;
    row.requests = {{q_len, 210}, {1, 64}, {q_len, q_len}, {1, 0}, {0, 9}, {q_len, 127}};
    row.mask.causal = n != 1;
    if (n < 2) row.mask.window_left = 90;
    row.sinks = n == 2;
    row.workers = n == 1 ? 3 : 0;
    row.name += ", " + std::to_string(q_len) + " queries";
    Problem p = make_problem(under_higher_bounds(row));
    p.cache = refilled(p, {0xFF});
    const Plan plan = plan_on_device(p);
    EXPECT_EQ(plan.info().config, "sm90-latent-64") << row.name;
    const Outputs outputs = run_on_device(p, plan);
    EXPECT_EQ(judge_device(p, outputs), "") << row.name;
    EXPECT_EQ(status_of(outputs), 0) << row.name;
    ++n;
  }
}

/// Pages that the window has passed may be gone, also those that share a step with its first tokens.
TEST(DeviceLatentAttention, DensePagesBeforeAWindow) {
  for (const int heads : {32, 64, 128}) {
    for (const int page_size : {16, 32}) {
      AttentionCase row = listed_case(heads, "bf16");
      row.lists = {};
      row.page_size = page_size;
      row.requests = {{1, 700}, {2, 333}, {1, 191}};
      row.mask.causal = true;
      row.mask.window_left = 90;
      const Problem p = make_problem(row);
      const Outputs expected = run_on_device(p);
      const auto table = p.cache->block_table.as<std::int32_t>();
      const auto width = static_cast<std::size_t>(p.cache->block_table.shape()[1]);
      for (std::size_t i = 0; i < row.requests.size(); ++i) {
        const auto [q_len, kv_len] = row.requests[i];
        for (int page = 0; (page + 1) * page_size <= kv_len - q_len - 90; ++page) {
          table[i * width + static_cast<std::size_t>(page)] = -1;
        }
      }
      const Outputs outputs = run_on_device(p);
      EXPECT_EQ(status_of(outputs), 0) << row.name;
      expect_same_bits(expected, outputs, row.name + ", pages of " + std::to_string(page_size));
    }
  }
}

/// A request's bits come from it alone, whichever steps its worker took before.
TEST(DeviceLatentAttention, DenseBatchInvariantBits) {
  for (const int heads : kAllHeads) {
    for (const char* format : kAllFormats) {
      for (const int keys : {150, 2000}) {
        AttentionCase row = listed_case(heads, format);
        row.lists = {};
        row.policy = SplitPolicy::kBatchInvariant;
        row.requests = {{1, 65}, {1, keys}, {2, 33}, {1, keys}, {1, 1}, {1, 190}};
        Problem p = make_problem(row);
        const Outputs expected = run_on_device(p);
        EXPECT_EQ(judge_device(p, expected), "") << row.name;
        for (const int workers : {1, 3, 5}) {
          p.problem.workers = workers;
          expect_same_bits(expected, run_on_device(p),
                           row.name + ", " + std::to_string(workers) + " workers");
        }
      }
    }
  }
}

/// What the workspace held where workers without items would have theirs is not taken for a place. Words that
/// are a NaN are the largest integers, beyond which tokens would be negative.
TEST(DeviceLatentAttention, DenseWorkersWithoutItems) {
  for (const int heads : kAllHeads) {
    for (const char* format : kAllFormats) {
      AttentionCase row = listed_case(heads, format);
      row.lists = {};
      row.requests = {{1, 20}, {1, 0}};
      const Problem p = make_problem(row);
      const Plan plan = plan_on_device(p);
      const DeviceRun device(p, plan);
      const TensorView& space = device.space();
      const std::vector<std::int32_t> words(static_cast<std::size_t>(space.numel() / 4), 0x7fffffff);
      check_cuda(cudaMemcpy(space.data, words.data(), words.size() * 4, cudaMemcpyHostToDevice));
      device.schedule();
      device.run();
      expect_same_bits(run_on_device(p, plan), device.outputs(), row.name);
    }
  }
}

/// A graph reads lengths and the block table anew when it is replayed.
TEST(DeviceLatentAttention, DenseGraphsFollowLengthsAndTables) {
  const auto check = [](const AttentionCase& row) {
    const Problem p = make_problem(row);
    const Plan plan = plan_on_device(p);
    DeviceRun device(p, plan);
    const CapturedGraph graph = captured_step(device);
    const auto lengths = p.cache->lengths.as<std::int32_t>();
    const auto table = p.cache->block_table.as<std::int32_t>();
    const auto width = static_cast<std::size_t>(p.cache->block_table.shape()[1]);
    Outputs before;
    for (const auto& [first, second] : {std::pair{450, 320}, {1, 289}, {0, 64}, {350, 0}, {350, 320}}) {
      lengths[0] = first, lengths[1] = second;
      std::swap(table[0], table[width + 1]);  // pages that both have in all steps in which they have any
      device.write(device.args.lengths.kv_lengths, p.cache->lengths);
      device.write(cache_of(device.args).block_table, p.cache->block_table);
      graph.replay();
      const std::string step = row.name + ", " + std::to_string(first) + " and " + std::to_string(second);
      const Outputs outputs = device.outputs();
      expect_same_bits(run_on_device(p, plan), outputs, step);
      EXPECT_EQ(status_of(outputs), 0) << step;
      if (before.out.present()) {
        EXPECT_FALSE(same_bytes(before.out, outputs.out)) << step;
      }
      before = device.outputs();
    }
  };
  for (const int heads : kAllHeads) {
    for (const char* format : kAllFormats) {
      AttentionCase own = listed_case(heads, format);
      own.lists = {};
      own.page_size = 32;
      own.requests = {{1, 450}, {1, 320}};
      for (const AttentionCase& row : under_all_bounds(own)) check(row);
    }
  }
}

}  // namespace
}  // namespace halftone::testing
