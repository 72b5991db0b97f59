// Many host threads: shared plans and caches, own workspaces and outputs. Runs under ThreadSanitizer as well.
#include <omp.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <thread>

#include "plan/validate.h"
#include "plan/workspace_use.h"
#include "tests/expect_error.h"
#include "tests/misuse/adversarial.h"

namespace halftone::testing {
namespace {

AttentionCase shared_case(const std::string& format) {
  AttentionCase row;
  row.requests = {{1, 170}, {3, 33}, {1, 0}, {1, 300}};
  row.k_format = format;
  row.sinks = true;
  row.workers = 4;
  return row;
}

/// Starts `count` threads at once and joins them.
void at_once(int count, const std::function<void(int)>& body) {
  std::barrier start(count);
  std::vector<std::thread> threads;
  for (int t = 0; t < count; ++t) {
    threads.emplace_back([&, t] {
      start.arrive_and_wait();
      body(t);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(Concurrency, EightThreadsWithOwnWorkspaces) {
  for (const char* format : {"bf16", "int8-head", "int4-g32", "fp8-static-head"}) {
    for (const SplitPolicy policy : {SplitPolicy::kReproducible, SplitPolicy::kBatchInvariant}) {
      AttentionCase row = shared_case(format);
      row.policy = policy;
      const Problem p = make_problem(row);
      const Outputs expected = run_problem(p);
      const Plan plan = halftone::plan(p.problem);
      std::atomic<int> wrong = 0;
      at_once(8, [&](int) {
        for (int repeat = 0; repeat < (reference::kSanitized ? 2 : 20); ++repeat) {
          const Tensor workspace(DType::kUInt8, {static_cast<std::int64_t>(plan.workspace_bytes())});
          const Outputs outputs = make_outputs(p);
          const AttentionArgs args = arguments(p, outputs);
          schedule(plan, args.lengths, workspace.view());
          run(plan, args, workspace.view());
          if (!same_bytes(outputs.out, expected.out) || !same_bytes(outputs.lse, expected.lse)) ++wrong;
          if (!workspace.guards_intact() || !outputs.out.guards_intact()) ++wrong;
        }
      });
      EXPECT_EQ(wrong, 0) << format;
    }
  }
}

/// Two calls in one workspace would mix their partial results: each one is right or refused, and what is
/// refused writes nothing.
TEST(Concurrency, OneWorkspaceServesOneCallAtATime) {
  AttentionCase row = shared_case("int8-head");
  row.requests = {{1, 3000}, {2, 2500}};
  const Problem p = make_problem(row);
  const Outputs expected = run_problem(p);
  const Plan plan = halftone::plan(p.problem);
  const Tensor workspace(DType::kUInt8, {static_cast<std::int64_t>(plan.workspace_bytes())});
  const Outputs first = make_outputs(p);
  schedule(plan, arguments(p, first).lengths, workspace.view());
  std::atomic<int> wrong = 0, refused = 0;
  for (int round = 0; round < 100 && refused == 0; ++round) {
    at_once(4, [&](int t) {
      for (int repeat = 0; repeat < (reference::kSanitized ? 3 : 20); ++repeat) {
        const Outputs outputs = make_outputs(p);
        const AttentionArgs args = arguments(p, outputs);
        try {
          if (t == 3) schedule(plan, args.lengths, workspace.view());
          run(plan, args, workspace.view());
          if (!same_bytes(outputs.out, expected.out) || !same_bytes(outputs.lse, expected.lse)) ++wrong;
        } catch (const Error& error) {
          ++refused;
          if (std::string(error.what()).find("workspace is in use by another call") == std::string::npos)
            ++wrong;
          if (!untouched(outputs.out)) ++wrong;
        }
      }
    });
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(refused, 0);

  AttentionArgs bad = arguments(p, first);  // a call that fails lets go of it
  bad.q = {};
  expect_error(ErrorCode::kInvalidArgument, {"q is absent"}, [&] { run(plan, bad, workspace.view()); });
  run(plan, arguments(p, first), workspace.view());
  EXPECT_TRUE(same_bytes(first.out, expected.out));
}

/// A process forked during a call has the mark of a call that nobody will end, and its workspace to itself.
TEST(Concurrency, AForkedProcessHasItsOwnCopyOfAWorkspace) {
  const Problem p = make_problem(shared_case("int8-head"));
  const Plan plan = halftone::plan(p.problem);
  const Tensor workspace(DType::kUInt8, {static_cast<std::int64_t>(plan.workspace_bytes())});
  const SequenceLengths lengths = p.lengths();
  const planning::WorkspaceUse use(planning::require_plan(plan), workspace.view());
  expect_error(ErrorCode::kInvalidArgument, {"workspace is in use by another call", "a workspace of its own"},
               [&] { schedule(plan, lengths, workspace.view()); });
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      schedule(plan, lengths, workspace.view());
      ::_exit(0);
    } catch (...) {
      ::_exit(1);
    }
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

/// One schedule, many layers at once: run() writes only its outputs and the partials of its own workspace.
TEST(Concurrency, FastPolicyStaysWithinTolerance) {
  AttentionCase row = shared_case("int8-g64");
  row.policy = SplitPolicy::kFast;
  const Problem p = make_problem(row);
  const Reference reference = make_reference(p);
  std::vector<Outputs> results(8);
  at_once(8, [&](int t) { results[static_cast<std::size_t>(t)] = run_problem(p); });
  for (const Outputs& outputs : results) EXPECT_EQ(judge(p, reference, outputs), "");
}

/// Tokens of one tile appended by different threads: neighbours share no byte.
TEST(Concurrency, AppendToNeighbouringSlots) {
  for (const std::string& format : typical_formats()) {
    AttentionCase row = shared_case(format);
    row.requests = {{1, 32}};
    row.page_size = 32;
    const Problem p = make_problem(row);
    Cache cache = p.cache->clone();
    cache.pages.fill_bytes(0xFF);
    const std::vector<std::int64_t> slots = p.cache->slots();
    const std::int64_t k_row = row.kv_heads * row.head_dim;
    at_once(8, [&](int t) {
      for (std::int64_t token = t; token < 32; token += 8) {
        const Tensor k = Tensor::of(
            DType::kFloat32, {1, row.kv_heads, row.head_dim},
            std::span<const float>(p.k.as<float>()).subspan(static_cast<std::size_t>(token * k_row)));
        const Tensor v = Tensor::of(
            DType::kFloat32, {1, row.kv_heads, row.head_dim},
            std::span<const float>(p.v.as<float>()).subspan(static_cast<std::size_t>(token * k_row)));
        const Tensor slot =
            Tensor::of({1}, std::span<const std::int64_t>(slots).subspan(static_cast<std::size_t>(token)));
        AppendArgs args;
        args.k = k.view();
        args.v = v.view();
        args.slot_mapping = slot.view();
        append(cache.view(), args);
      }
    });
    EXPECT_TRUE(same_bytes(cache.pages, p.cache->pages)) << format;
  }
}

/// Attention reads a cache while other threads append behind its live tokens.
TEST(Concurrency, AppendWhileReading) {
  AttentionCase row = shared_case("int4-g32");
  row.requests = {{1, 40}};
  row.page_size = 16;
  const Problem p = make_problem(row);
  Random random(1);
  // Room for 40 more tokens on pages of their own: attention reads whole tiles, so the writer keeps to
  // others.
  Cache cache(p.cache->spec, std::vector<int>{96}, random);
  cache.append(std::vector<int>{40}, p.k, p.v);
  Problem reader = make_problem(row);
  *reader.cache = cache.clone();
  const Outputs expected = run_problem(reader);
  reader.cache->lengths.as<std::int32_t>()[0] = 40;
  const std::int32_t page = cache.block_table.as<std::int32_t>()[4];
  std::atomic<int> wrong = 0;
  at_once(4, [&](int t) {
    for (int repeat = 0; repeat < (reference::kSanitized ? 3 : 30); ++repeat) {
      if (t == 0) {
        const Tensor slot = Tensor::of({1}, std::vector<std::int64_t>{page * std::int64_t{16} + repeat % 16});
        AppendArgs args;
        args.k = p.k.view();
        args.v = p.v.view();
        args.k.shape[0] = args.v.shape[0] = 1;
        args.slot_mapping = slot.view();
        append(reader.cache->view(), args);
        continue;
      }
      const Outputs outputs = run_problem(reader);
      if (!same_bytes(outputs.out, expected.out)) ++wrong;
    }
  });
  EXPECT_EQ(wrong, 0);
}

/// Calls from inside a caller's own parallel region.
TEST(Concurrency, InsideAParallelRegion) {
  const Problem p = make_problem(shared_case("int8-head"));
  const Outputs expected = run_problem(p);
  std::atomic<int> wrong = 0;
#pragma omp parallel for num_threads(4)
  for (int i = 0; i < 8; ++i) {
    try {
      const Outputs outputs = run_problem(p);
      if (!same_bytes(outputs.out, expected.out)) ++wrong;
    } catch (const std::exception&) {
      ++wrong;
    }
  }
  EXPECT_EQ(wrong, 0);
}

TEST(Concurrency, ThousandRepeatsUnderMemoryPressure) {
  AttentionCase row = shared_case("int8-head");
  row.head_dim = 64;
  const Problem p = make_problem(row);
  const Outputs expected = run_problem(p);
  std::atomic<bool> stop = false;
  std::thread pressure([&] {
    Random random(3);
    std::vector<std::vector<std::uint8_t>> blocks(32);
    while (!stop) {
      auto& block = blocks[static_cast<std::size_t>(random.integer(0, 31))];
      block = std::vector<std::uint8_t>(static_cast<std::size_t>(random.integer(1, 1 << 20)), 0xFF);
    }
  });
  int wrong = 0;
  for (int repeat = 0; repeat < (reference::kSanitized ? 50 : 1000); ++repeat) {
    const Outputs outputs = run_problem(p);
    wrong += !same_bytes(outputs.out, expected.out) || !same_bytes(outputs.lse, expected.lse);
  }
  stop = true;
  pressure.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace halftone::testing
