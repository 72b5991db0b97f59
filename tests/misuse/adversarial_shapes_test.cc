// Shapes: head dims, head ratios, batches, page sizes and groups at and beyond their limits.
#include "tests/misuse/adversarial.h"
#include "tests/on_runners.h"

namespace halftone::testing {
namespace {

using enum ErrorCode;

AttentionProblem small_problem() {
  AttentionProblem p;
  p.batch = 2;
  p.q_heads = 8;
  p.kv = KvCacheSpec::separate(parse_format("int8-head"), parse_format("int8-head"), 2, 128);
  p.max_kv_len = 100;
  return p;
}

KvCacheSpec small_spec() {
  AttentionProblem p = small_problem();
  return spec_of(p);
}

TEST(Shapes, UnsupportedHeadDimNamesTheNearest) {
  const std::pair<int, const char*> dims[] = {{1, "64"}, {7, "64"}, {59, "64"}, {257, "512"}, {513, "512"}};
  for (const auto& [dim, nearest] : dims) {
    for (const bool paged : {true, false}) {
      AttentionProblem p = small_problem();
      const auto place = [&](int head_dim, int v_head_dim) {
        if (paged) {
          p.kv = KvCacheSpec::separate({}, {}, 2, head_dim, v_head_dim);
        } else {
          p.kv = KvTensors{DType::kBFloat16, 2, head_dim, v_head_dim};
        }
      };
      const std::string value = std::to_string(dim);
      place(dim, 0);
      expect_error(kInvalidArgument, {"head_dim", value, nearest}, [&] { (void)plan(p); });
      place(128, dim);
      expect_error(kInvalidArgument, {"v_head_dim", value, nearest}, [&] { (void)plan(p); });
    }
    KvCacheSpec spec = small_spec();
    spec.head_dim = dim;
    expect_error(kInvalidArgument, {"head_dim", nearest}, [&] { (void)page_layout(spec); });
  }
}

TEST(Shapes, HeadDimZeroNegativeAndHuge) {
  for (const int dim : {0, -1, -128, std::numeric_limits<int>::max(), std::numeric_limits<int>::min()}) {
    AttentionProblem p = small_problem();
    spec_of(p).head_dim = dim;
    expect_error(kInvalidArgument, {"head_dim", std::to_string(dim)}, [&] { (void)plan(p); });
  }
}

TEST(Shapes, QueryHeadsNotAMultipleOfKvHeads) {
  for (const auto& [q_heads, kv_heads] :
       {std::pair{7, 2}, std::pair{1, 2}, std::pair{33, 8}, std::pair{8, 3}}) {
    AttentionProblem p = small_problem();
    p.q_heads = q_heads;
    spec_of(p).kv_heads = kv_heads;
    expect_error(kInvalidArgument, {"q_heads", std::to_string(q_heads), std::to_string(kv_heads)},
                 [&] { (void)plan(p); });
  }
  for (const int heads : {0, -1, std::numeric_limits<int>::max()}) {
    AttentionProblem p = small_problem();
    spec_of(p).kv_heads = heads;
    expect_error(kInvalidArgument, {"kv_heads", std::to_string(heads)}, [&] { (void)plan(p); });
    p = small_problem();
    p.q_heads = heads;
    expect_error(kInvalidArgument, {"q_heads", std::to_string(heads)}, [&] { (void)plan(p); });
  }
}

class ShapesOnRunners : public OnRunners {};
HALFTONE_ON_EVERY_RUNNER(ShapesOnRunners);

TEST_P(ShapesOnRunners, EveryGroupRatio) {
  for (const int group : {1, 3, 5, 7, 16, 33, 128}) {
    for (const int q_len : {1, 2, 9}) {
      AttentionCase row = find_case("group-" + std::to_string(group) + "-int8-head");
      for (Request& r : row.requests) r.q_len = q_len;
      const Problem p = make_problem(row);
      EXPECT_EQ(judge(p, run(p)), "") << "group " << group << ", q_len " << q_len;
    }
  }
}

Problem without_requests(bool paged) {
  AttentionCase row;
  if (!paged) row.plain = DType::kBFloat16;
  row.cu_q = true;
  row.out_dtype = DType::kFloat32;
  return make_problem(row);
}

TEST_P(ShapesOnRunners, BatchZeroIsANoOp) {
  for (const bool paged : {true, false}) {
    const Problem p = without_requests(paged);
    if (!serves(p)) continue;
    EXPECT_EQ(run(p).out.numel(), 0);
  }
}

TEST(Shapes, AttendOfBatchZeroIsANoOp) {
  for (const bool paged : {true, false}) {
    const Problem p = without_requests(paged);
    const Outputs outputs = make_outputs(p);
    attend(p.problem, arguments(p, outputs));
    EXPECT_EQ(outputs.out.numel(), 0);
    EXPECT_TRUE(outputs.out.guards_intact());
  }
}

/// Frameworks give empty tensors a null address.
TEST(Shapes, BatchZeroWithNullAddresses) {
  AttentionProblem problem = small_problem();
  problem.batch = 0;
  const Plan plan = halftone::plan(problem);
  const Tensor workspace(DType::kUInt8, {static_cast<std::int64_t>(plan.workspace_bytes())});
  const Tensor pages(DType::kUInt8, {1, page_layout(small_spec()).page_bytes});
  AttentionArgs args;
  args.q = TensorView::contiguous(nullptr, problem.q_dtype, {0, 8, 128});
  args.out = TensorView::contiguous(nullptr, problem.out_dtype, {0, 8, 128});
  args.lengths.kv_lengths = TensorView::contiguous(nullptr, DType::kInt32, {0});
  PagedKv& cache = cache_of(args);
  cache.spec = small_spec();
  cache.pages = pages.view();
  cache.block_table = TensorView::contiguous(nullptr, DType::kInt32, {0, 4});
  cache.lengths = TensorView::contiguous(nullptr, DType::kInt32, {0});
  schedule(plan, args.lengths, workspace.view());
  run(plan, args, workspace.view());
  // NumPy states strides of 0 then.
  for (TensorView* t : {&args.q, &args.out, &args.lengths.kv_lengths, &cache.block_table, &cache.lengths}) {
    t->strides = {};
  }
  schedule(plan, args.lengths, workspace.view());
  run(plan, args, workspace.view());
  EXPECT_TRUE(workspace.guards_intact());
}

TEST(Shapes, BatchOutOfRange) {
  for (const int batch : {-1, std::numeric_limits<int>::min()}) {
    AttentionProblem p = small_problem();
    p.batch = batch;
    expect_error(kInvalidArgument, {"batch", std::to_string(batch)}, [&] { (void)plan(p); });
  }
}

TEST(Shapes, UnsupportedPageSizes) {
  for (const int page : {-16, 0, 1, 8, 15, 17, 48, 100, 255, 257, 512, std::numeric_limits<int>::max()}) {
    KvCacheSpec spec = small_spec();
    spec.page_size = page;
    expect_error(kInvalidArgument, {"page_size", std::to_string(page), "16", "256"},
                 [&] { (void)page_layout(spec); });
    AttentionProblem p = small_problem();
    p.kv = spec;
    expect_error(kInvalidArgument, {"page_size", std::to_string(page)}, [&] { (void)plan(p); });
  }
}

TEST(Shapes, Int4WithAPartialGroup) {
  const std::pair<int, int> partial[] = {{80, 32}, {80, 64}, {96, 64}, {96, 128}, {64, 128}, {192, 128}};
  for (const auto& sizes : partial) {
    const int dim = sizes.first, group = sizes.second;
    for (const DType dtype : {DType::kInt4, DType::kInt8, DType::kFloat8E4M3}) {
      KvFormat format{.dtype = dtype, .granularity = Granularity::kGroup, .group_size = group};
      expect_error(kInvalidArgument, {"k_format", std::to_string(group), std::to_string(dim)},
                   [&] { check_format(format, dim, "k_format"); });
      KvCacheSpec spec = small_spec();
      spec.head_dim = dim;
      spec.v_format = format;
      expect_error(kInvalidArgument, {"v_format", std::to_string(group)}, [&] { (void)page_layout(spec); });
    }
  }
  for (const int group : {-32, 0, 1, 16, 33, 48, 256}) {
    const KvFormat format{.dtype = DType::kInt4, .granularity = Granularity::kGroup, .group_size = group};
    expect_error(kInvalidArgument, {"k_format", "group_size", std::to_string(group)},
                 [&] { check_format(format, 128, "k_format"); });
  }
}

TEST(Shapes, BoundsOutOfRange) {
  for (const int bound : {-1, std::numeric_limits<int>::min()}) {
    AttentionProblem p = small_problem();
    p.max_q_len = bound;
    expect_error(kInvalidArgument, {"max_q_len", std::to_string(bound)}, [&] { (void)plan(p); });
    p = small_problem();
    p.max_kv_len = bound;
    expect_error(kInvalidArgument, {"max_kv_len", std::to_string(bound)}, [&] { (void)plan(p); });
    p = small_problem();
    p.workers = bound;
    expect_error(kInvalidArgument, {"workers", std::to_string(bound)}, [&] { (void)plan(p); });
  }
  AttentionProblem p = small_problem();
  p.workers = 65537;
  expect_error(kInvalidArgument, {"workers", "65537", "65536"}, [&] { (void)plan(p); });
}

/// The largest bounds at once overflow nothing: a plan or a typed refusal.
TEST(Shapes, ExtremeBoundsPlanOrAreRefused) {
  constexpr int kMax = std::numeric_limits<int>::max();
  for (const int batch : {1, 100000, kMax}) {
    for (const int q_len : {1, 1 << 20, kMax}) {
      for (const int kv_len : {0, 1 << 30, kMax}) {
        for (const int workers : {0, 1, 65536}) {
          AttentionProblem p = small_problem();
          p.batch = batch;
          p.max_q_len = q_len;
          p.max_kv_len = kv_len;
          p.workers = workers;
          try {
            const Plan made = plan(p);
            EXPECT_GE(made.info().workspace_bytes, 0);
            EXPECT_GE(made.info().workspace_bytes, made.info().schedule_bytes);
            EXPECT_GE(made.info().max_units, 0);
          } catch (const Error& e) {
            EXPECT_TRUE(e.code() == kInvalidArgument || e.code() == kResourceExhausted) << e.what();
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace halftone::testing
