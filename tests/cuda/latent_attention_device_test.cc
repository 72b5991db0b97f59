// Attention over latent caches and lists on the GPU beyond the case table: the shapes of serving, memory,
// graphs and bits.
#include <algorithm>
#include <climits>
#include <cstring>
#include <utility>

#include "format/status.h"
#include "tests/cuda/adversarial_device.h"
#include "tests/cuda/agreement.h"
#include "tests/cuda/bounds_checks.h"
#include "tests/cuda/latent_device.h"
#include "tests/cuda/repeated_problem.h"

namespace halftone::testing {
namespace {

/// Heads, lengths of lists, batches and pages as they are served: short lists, and what repeats them.
TEST(DeviceLatentAttention, ShapesOfServing) {
  constexpr std::pair<int, int> kShapes[] = {{1, 256}, {2, 32}, {74, 32}, {128, 32}, {128, 1}};
  int shape = 0;
  for (const int heads : kAllHeads) {
    for (const char* format : kFormats) {
      for (const int page_size : {16, 32, 64, 128, 256}) {
        const auto& [batch, times] = kShapes[static_cast<std::size_t>((shape + shape / 5) % 5)];
        ++shape;
        AttentionCase own = listed_case(heads, format);
        own.page_size = page_size;
        for (const AttentionCase& row : under_all_bounds(own)) {
          SCOPED_TRACE(row.name + ", pages of " + std::to_string(page_size));
          const Problem p = make_problem(row);
          ASSERT_EQ(judge_device(p, run_on_device(p)), "");
          const Reference exact = make_reference(p, false);
          const Problem many = repeated_lists(p, batch, times);
          const Plan plan = plan_on_device(many);
          expect_repeated(p, exact, many, plan.info(), run_on_device(many, plan),
                          std::to_string(batch) + " queries, lists of " + std::to_string(64 * times));
        }
      }
    }
  }
}

/// Long lists of different slots, a third of the places empty, with counts; prompts with lists; and a second
/// list over a second cache with pages of its own, one softmax over both, in parts of 32 rows from 33 heads
/// on.
TEST(DeviceLatentAttention, ListsAgreeWithTheOracle) {
  for (const int heads : kAllHeads) {
    for (const char* format : kFormats) {
      AttentionCase row = listed_case(heads, format);
      row.requests = {{1, 3000}, {heads <= 16 ? 20 : 2, 100}};
      row.lists = {.top_k = heads <= 32 ? 2048 : 700, .counts = true};
      row.out_dtype = DType::kBFloat16;
      row.sinks = heads == 16 || heads == 128;
      expect_agrees(row);
      row.name += ", two lists";
      row.requests[0].kv_len = 300;
      row.lists = {.top_k = 200, .counts = true, .extra_top_k = 130, .extra_page_size = 16};
      row.out_dtype = DType::kFloat32;
      expect_agrees(row);
    }
  }
}

/// The longest lists that there are, of queries alone and beside others.
TEST(DeviceLatentAttention, ListsOf65536Places) {
  constexpr int kTimes = 1024;
  for (const int heads : {8, 64, 128}) {
    for (const char* format : kFormats) {
      const AttentionCase row = listed_case(heads, format);
      const Problem p = make_problem(row);
      const Reference exact = make_reference(p, false);
      for (const int batch : {1, 3}) {
        const Problem many = repeated(p, batch, kTimes);
        ASSERT_EQ(many.problem.listed.top_k, 65536);
        const Plan plan = plan_on_device(many);
        expect_repeated(p, exact, many, plan.info(), run_on_device(many, plan),
                        row.name + ", " + std::to_string(batch) + " queries");
      }
    }
  }
}

/// Lists, a second list, all keys; whatever changes logits and rows.
TEST(DeviceLatentAttention, FormatsAgreeWithTheOracle) {
  for (const char* format : kAllFormats) {
    int n = 0;
    for (const int heads : {1, 13, 16, 48, 64, 128}) {
      for (const bool listed : {true, false}) {
        AttentionCase row = listed_case(heads, format);
        row.page_size = 16 << n % 5;
        // Kernels for many heads take f16 of fp8-g128-f32 alone.
        row.q_dtype = n % 6 == 2 && format != std::string("bf16") ? DType::kFloat16 : DType::kBFloat16;
        row.out_dtype = n % 5 < 2 ? DType::kFloat32 : row.q_dtype;
        row.sinks = n % 4 >= 2;
        row.softcap = n % 5 == 2 ? 20.0F : 0.0F;
        row.requests = {{1, 700}, {heads <= 16 ? 9 : 2, 100}, {1, 31}};
        row.lists = {.top_k = listed ? 500 : 0, .counts = n % 4 >= 2};
        if (listed && n % 4 == 0) row.lists.extra_top_k = 130, row.lists.extra_page_size = 16;
        row.mask.causal = !listed;
        if (!listed && n % 4 == 3) row.mask.window_left = 70;
        row.seed = 900 + static_cast<std::uint64_t>(n++);
        row.name += listed ? ", listed" : ", dense";
        expect_agrees(row);
      }
    }
  }
}

/// Lists over codes that are copied first: slots again and again and -1 between them, counts, and rows of
/// lists that lie apart. Whatever the workspace held before is no matter.
TEST(DeviceLatentAttention, CopiedListsAgreeWithTheOracle) {
  constexpr Listing kOrders[] = {Listing::kMixed, Listing::kRepeated, Listing::kSomeNothing};
  int n = 0;
  for (const char* format : {"fp8-g128-f32", "int8-g64", "int4-g64"}) {
    for (const int heads : {64, 64, 128, 128, 192}) {
      AttentionCase row = listed_case(heads, format);
      row.requests = {{4, 300}, {2, 70}, {1, 5}, {1, 1}};
      row.page_size = n % 2 == 0 ? 16 : 256;
      row.lists = {.top_k = 33 + 95 * (n % 4), .order = kOrders[n / 5 % 3], .counts = n % 4 != 3};
      row.out_dtype = n % 3 == 0 ? DType::kBFloat16 : DType::kFloat32;
      row.sinks = n % 5 == 1;
      row.seed = 1500 + static_cast<std::uint64_t>(n++);
      SCOPED_TRACE(row.name + ", pages of " + std::to_string(row.page_size));
      const Problem p = make_problem(row);
      const Plan plan = plan_on_device(p);
      ASSERT_TRUE(copies_lists(plan.problem(), plan.info()));
      const std::int64_t top_k = row.lists.top_k;
      const Tensor apart(DType::kInt32, {p.total_q(), top_k + 5});
      const auto from = p.indices.as<std::int32_t>(), to = apart.as<std::int32_t>();
      std::ranges::fill(to, INT_MAX);
      for (std::int64_t query = 0; query < p.total_q(); ++query)
        std::copy_n(from.begin() + query * top_k, top_k, to.begin() + query * (top_k + 5));
      TensorView lists = apart.view();
      lists.shape[1] = top_k;
      const DeviceRun together(p, plan, 0xFF);  // NaN, and places below 0
      DeviceRun strided(p, plan, 0x00);         // the first record everywhere
      Uploads uploads;
      strided.args.indices = uploads.add(lists);
      for (const DeviceRun* device : {&together, static_cast<const DeviceRun*>(&strided)}) {
        device->schedule();
        device->run();
      }
      const Outputs outputs = together.outputs();
      EXPECT_EQ(judge_device(p, outputs), "");
      EXPECT_EQ(status_of(outputs), 0);
      expect_same_bits(outputs, strided.outputs(), row.name + ", strided");
    }
  }
}

/// What no list names and no token has, such as the byte beside e8m0 scales and a page's end, is no matter.
TEST(DeviceLatentAttention, DeadBytesAreNotRead) {
  const auto check = [](const AttentionCase& row) {
    Problem p = make_problem(row);
    const Outputs expected = run_on_device(p);
    EXPECT_EQ(judge_device(p, expected), "") << row.name;
    const KvCacheSpec spec = case_spec(row);
    const PageLayout layout = page_layout(spec);
    const auto pages = p.cache->pages.bytes();
    const auto bytes = static_cast<std::size_t>(layout.page_bytes);
    const bool apart = spec.k_format.scale_dtype == DType::kFloat8E8M0;
    std::vector<std::uint8_t> poisoned(pages.size(), 0xff);
    const auto keep = [&](std::size_t at, std::size_t count) {
      std::copy_n(pages.begin() + static_cast<std::ptrdiff_t>(at), count,
                  poisoned.begin() + static_cast<std::ptrdiff_t>(at));
    };
    for (const std::int32_t slot : p.indices.as<std::int32_t>()) {
      if (slot < 0) continue;
      const auto place = static_cast<std::size_t>(slot % row.page_size);
      const std::size_t page = static_cast<std::size_t>(slot / row.page_size) * bytes;
      const auto record = static_cast<std::size_t>(layout.row_bytes);
      keep(page + place * record, record);
      if (apart) keep(page + static_cast<std::size_t>(layout.k_param_offset) + place * 8, 7);
    }
    std::copy(poisoned.begin(), poisoned.end(), pages.begin());
    const Outputs actual = run_on_device(p);
    expect_same_bits(expected, actual, row.name);
    EXPECT_EQ(status_of(actual), 0) << row.name;
  };
  for (const int heads : kAllHeads) {
    for (const char* format : kAllFormats) {
      AttentionCase own = listed_case(heads, format);
      own.page_size = 64;
      for (const AttentionCase& row : under_all_bounds(own)) check(row);
    }
  }
}

/// Slots that the cache lacks are skipped like -1, and the status says so. The pool ends where its allocation
/// does: reading on would fault.
TEST(DeviceLatentAttention, SlotsOutsideTheCacheAreNotRead) {
  constexpr std::size_t kBlock = 32U << 20;  // the driver maps memory in pieces that divide it
  const auto check = [](const AttentionCase& row) {
    const Problem p = make_problem(row);
    const auto slots = static_cast<std::int32_t>(p.cache->pages.shape()[0] * row.page_size);
    const std::int32_t bad[] = {INT_MAX, INT_MIN, slots, slots + 15, -2, INT_MAX - 63, slots - 1};
    const auto list = p.indices.as<std::int32_t>();
    for (std::size_t i = 0; i < std::size(bad) - 1; ++i) list[3 + 7 * i] = list[64 + 9 * i] = -1;
    list[3 + 7 * 6] = list[64 + 9 * 6] = slots - 1;  // the last token, whose bytes are the last ones
    const auto record = static_cast<std::size_t>(page_layout(case_spec(row)).row_bytes);
    std::memset(p.cache->pages.bytes().data() + p.cache->pages.bytes().size() - record, 0, record);
    const Plan plan = plan_on_device(p);
    const Outputs expected = run_on_device(p, plan);
    EXPECT_EQ(status_of(expected), 0) << row.name;
    for (std::size_t i = 0; i < std::size(bad); ++i) list[3 + 7 * i] = list[64 + 9 * i] = bad[i];
    void* block = nullptr;
    check_cuda(cudaMalloc(&block, kBlock));
    const auto bytes = p.cache->pages.bytes();
    auto* const pool = static_cast<std::uint8_t*>(block) + kBlock - bytes.size();
    check_cuda(cudaMemcpy(pool, bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
    const Outputs actual = run_over(p, plan, pool, p.cache->pages.shape()[0]);
    EXPECT_EQ(status_of(actual), kStatusBadPage) << row.name;
    expect_same_bits(expected, actual, row.name);
    check_cuda(cudaFree(block));
  };
  for (const int heads : kAllHeads) {
    for (const char* format : kAllFormats) {
      AttentionCase own = listed_case(heads, format);
      own.page_size = 16;
      own.requests = uniform_requests(2, 1, 160);
      for (const AttentionCase& row : under_all_bounds(own)) check(row);
    }
  }
}

/// Nothing listed, or nothing counted: zeros and an LSE of minus infinity.
TEST(DeviceLatentAttention, QueriesThatListNothing) {
  for (const int heads : kAllHeads) {
    for (const char* format : kAllFormats) {
      for (const AttentionCase& row : under_all_bounds(listed_case(heads, format))) {
        Problem p = make_problem(row);
        const auto list = p.indices.as<std::int32_t>();
        std::fill(list.begin(), list.begin() + 64, -1);
        Outputs outputs = run_on_device(p);
        expect_empty_rows(p, outputs, 0, 1);
        EXPECT_EQ(status_of(outputs), 0);
        std::fill(list.begin(), list.begin() + 64, INT_MAX);
        p.counts = Tensor::of({2}, std::vector<std::int32_t>{0, 64});
        const Outputs counted = run_on_device(p);
        EXPECT_EQ(status_of(counted), 0);
        expect_same_bits(outputs, counted, p.row.name);
      }
    }
  }
}

/// The schedule counts more queries than q and the lists have rows: those that exist are right, and no list
/// is read behind them.
TEST(DeviceLatentAttention, MoreQueriesThanRows) {
  for (const int heads : kAllHeads) {
    for (const SplitPolicy policy : {SplitPolicy::kBatchInvariant, SplitPolicy::kReproducible}) {
      AttentionCase own = listed_case(heads);
      own.requests = {{3, 70}, {2, 33}, {4, 129}};
      own.cu_q = true;
      own.policy = policy;
      for (const AttentionCase& row : under_all_bounds(own)) {
        const Problem p = make_problem(row);
        const Plan plan = plan_on_device(p);
        const Outputs expected = run_on_device(p, plan);
        for (const std::int64_t rows : {1, 4, 8}) expect_bounded_queries(p, plan, expected, rows);
      }
    }
  }
}

/// Slots of the second list that its cache lacks: as those of the first.
TEST(DeviceLatentAttention, SlotsOutsideTheSecondCacheAreNotRead) {
  const auto check = [](const AttentionCase& row) {
    const Problem p = make_problem(row);
    const auto slots = static_cast<std::int32_t>(p.extra->pages.shape()[0] * row.lists.extra_page_size);
    const std::int32_t bad[] = {INT_MAX, INT_MIN, slots, slots + 15, -2, INT_MAX - 63};
    const auto list = p.extra_indices.as<std::int32_t>();
    for (std::size_t i = 0; i < std::size(bad); ++i) list[3 + 6 * i] = list[40 + 5 * i] = -1;
    const Plan plan = plan_on_device(p);
    const Outputs expected = run_on_device(p, plan);
    EXPECT_EQ(status_of(expected), 0) << row.name;
    EXPECT_EQ(judge_device(p, expected), "") << row.name;
    for (std::size_t i = 0; i < std::size(bad); ++i) list[3 + 6 * i] = list[40 + 5 * i] = bad[i];
    const Outputs actual = run_on_device(p, plan);
    EXPECT_EQ(status_of(actual), kStatusBadPage) << row.name;
    expect_same_bits(expected, actual, row.name);
  };
  for (const int heads : kAllHeads) {
    for (const char* format : kAllFormats) {
      AttentionCase own = listed_case(heads, format);
      own.lists.extra_top_k = 40;
      own.lists.extra_page_size = 16;
      for (const AttentionCase& row : under_all_bounds(own)) check(row);
    }
  }
}

/// A graph reads lists and counts anew when it is replayed.
TEST(DeviceLatentAttention, GraphsFollowListsAndCounts) {
  constexpr int kTopK = 700;  // few enough for copies
  const auto check = [](const AttentionCase& row) {
    const Problem p = make_problem(row);
    const Plan plan = plan_on_device(p);
    DeviceRun device(p, plan);
    const CapturedGraph graph = captured_step(device);
    for (const std::int32_t count : {kTopK, 0, 233}) {
      Random random(static_cast<std::uint64_t>(count) + 5);
      const auto draw = [&](const Tensor& indices, const Cache& cache) {
        const std::vector<std::int64_t> slots = cache.slots();
        for (std::int32_t& slot : indices.as<std::int32_t>())
          slot = random.chance(0.2) ? -1 : static_cast<std::int32_t>(random.pick(slots));
      };
      draw(p.indices, *p.cache);
      if (p.extra != nullptr) draw(p.extra_indices, *p.extra);
      p.counts.as<std::int32_t>()[0] = count;
      p.counts.as<std::int32_t>()[1] = kTopK - count;
      device.write(device.args.indices, p.indices);
      if (p.extra != nullptr) device.write(device.args.extra_indices, p.extra_indices);
      device.write(device.args.lengths.counts, p.counts);
      graph.replay();
      expect_same_bits(run_on_device(p, plan), device.outputs(), row.name + ", " + std::to_string(count));
    }
  };
  int n = 0;
  for (const int heads : kAllHeads) {
    for (const char* format : kAllFormats) {
      AttentionCase own = listed_case(heads, format);
      own.lists = {.top_k = kTopK, .counts = true};
      if (++n % 2 == 0) own.lists.extra_top_k = 70;
      for (const AttentionCase& row : under_all_bounds(own)) check(row);
    }
  }
}

/// A query's bits come from its list alone: not from its neighbours, their number or how many workers there
/// are.
TEST(DeviceLatentAttention, BatchInvariantBitsAloneAndInCompany) {
  for (const int heads : kAllHeads) {
    for (const char* format : kAllFormats) {
      AttentionCase row = listed_case(heads, format);
      row.policy = SplitPolicy::kBatchInvariant;
      const Problem p = repeated(make_problem(row), 2, 50);
      const Outputs alone = run_on_device(p);
      for (const int workers : {0, 5, 32}) {
        Problem many = repeated(p, 74, 1);
        many.problem.workers = workers;
        const Outputs company = run_on_device(many);
        for (std::int64_t i = 0; i < 74; ++i) {
          ASSERT_EQ(row_bytes(company.out, i, i + 1), row_bytes(alone.out, i % 2, i % 2 + 1)) << row.name;
          ASSERT_EQ(row_bytes(company.lse, i, i + 1), row_bytes(alone.lse, i % 2, i % 2 + 1)) << row.name;
        }
      }
    }
  }
}

/// Neither what a workspace held before nor an earlier launch on the same schedule changes a bit.
TEST(DeviceLatentAttention, WorkspacesAndLaunchesInARow) {
  for (const int heads : kAllHeads) {
    for (const auto& [batch, times] : {std::pair{1, 40}, {3, 40}, {20, 3}, {74, 40}}) {  // 20, 3: copied
      const Problem p = repeated(make_problem(listed_case(heads)), batch, times);
      const Plan plan = plan_on_device(p);
      const DeviceRun poisoned(p, plan, 0xFF), zeros(p, plan, 0x00);
      for (const DeviceRun* device : {&poisoned, &zeros}) {
        device->schedule();
        device->run();
      }
      const Outputs first = poisoned.outputs();
      expect_same_bits(first, zeros.outputs(), p.row.name + ", zeros");
      poisoned.clear();
      for (int i = 0; i < 20; ++i) poisoned.run();
      expect_same_bits(first, poisoned.outputs(), p.row.name + ", again");
    }
  }
}

/// Pages beyond 4 GiB of a pool, by list and by block table.
TEST(DeviceLatentAttention, PoolsBeyond4GiB) {
  constexpr std::int64_t kBytes = std::int64_t{5} << 30;
  std::size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total));
  if (free < kBytes + (std::size_t{1} << 30)) GTEST_SKIP() << "needs 6 GiB of free memory";
  DeviceMemory memory(kBytes);
  const auto check = [&](const AttentionCase& row) {
    const Problem p = make_problem(row);
    const Plan plan = plan_on_device(p);
    const Outputs expected = run_on_device(p, plan);
    const std::int64_t page_bytes = page_layout(case_spec(row)).page_bytes, pages = kBytes / page_bytes;
    const auto bytes = p.cache->pages.bytes();
    const std::int64_t first = pages - p.cache->pages.shape()[0];
    ASSERT_GT(first * page_bytes, std::int64_t{UINT_MAX});
    check_cuda(
        cudaMemcpy(memory.data() + first * page_bytes, bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
    for (std::int32_t& page : p.cache->block_table.as<std::int32_t>())
      page += static_cast<std::int32_t>(first);
    if (p.indices.present()) {
      for (std::int32_t& slot : p.indices.as<std::int32_t>())
        if (slot >= 0) slot += static_cast<std::int32_t>(first * row.page_size);
    }
    const Outputs actual = run_over(p, plan, memory.data(), pages);
    EXPECT_EQ(status_of(actual), 0);
    expect_same_bits(expected, actual, row.name + (p.indices.present() ? ", listed" : ", dense"));
  };
  for (const int heads : kAllHeads) {
    for (const char* format : kAllFormats) {
      for (const bool listed : {true, false}) {
        AttentionCase own = listed_case(heads, format);
        if (!listed) own.lists = {};
        for (const AttentionCase& row : under_all_bounds(own)) check(row);
      }
    }
  }
}

/// Parts of cut units are merged by whoever is there: no worker needs another one to run beside it.
TEST(DeviceLatentAttention, MoreWorkersThanRunAtATime) {
  for (const int heads : {8, 64, 128}) {
    for (const char* format : kFormats) {
      const Problem few = make_problem(listed_case(heads, format));
      const Reference exact = make_reference(few, false);
      for (const auto& [batch, times] : {std::pair{1, 512}, {1, 64}, {16, 8}, {128, 512}}) {
        Problem many = repeated(few, batch, times);
        many.problem.workers = 1000;
        const Plan plan = plan_on_device(many);
        const std::string what = many.row.name + ", " + std::to_string(batch) + " queries, 1000 workers";
        const Outputs first = run_on_device(many, plan);
        expect_repeated(few, exact, many, plan.info(), first, what);
        expect_same_bits(first, run_on_device(many, plan), what + ", again");
      }
    }
  }
}

}  // namespace
}  // namespace halftone::testing
