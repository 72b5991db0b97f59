// What lies on the device is bounded there by what the caller gave, and reported in the status word.
#include "format/status.h"
#include "tests/cuda/bounds_checks.h"

namespace halftone::testing {
namespace {

using enum ErrorCode;

/// cu_q counts more queries than q, out and lse have rows: those that exist are right, nothing else is
/// written.
TEST(DeviceBounds, MoreQueriesThanRows) {
  for (const std::string& format : formats_of_runners()) {
    for (AttentionCase row : few_and_many_rows(format)) {
      row.requests = {{3, 70}, {2, 33}, {4, 129}};
      row.cu_q = true;
      const Problem p = make_problem(row);
      const Plan plan = plan_on_device(p);
      const Outputs expected = run_on_device(p, plan);
      EXPECT_EQ(status_of(expected), 0) << format;
      for (const std::int64_t rows : {1, 4, 6, 8}) expect_bounded_queries(p, plan, expected, rows);
    }
  }
}

/// Without cu_q the host knows how many queries there are.
TEST(DeviceBounds, RowsThatDoNotMatchMaxQLenAreRefused) {
  AttentionCase row = decode_case("int8-head");
  row.requests = uniform_requests(4, 4, 50);
  const Problem p = make_problem(row);
  for (const std::int64_t rows : {4, 15}) {
    DeviceRun device(p, plan_on_device(p));
    device.args.q.shape[0] = device.args.out.shape[0] = device.args.lse.shape[0] = rows;
    device.schedule();
    expect_error(kInvalidArgument, {"q.shape[0] is", "max_q_len 4", "cu_q"}, [&] { device.run(); });
    EXPECT_TRUE(untouched(device.outputs().out));
  }
}

/// A page of more than 2 GiB: the last KV head reads its own bytes.
TEST(DeviceBounds, HeadsBeyond2GiBOfAPage) {
  constexpr int kHeads = 16500;
  AttentionProblem problem;
  problem.device = {DeviceType::kCuda, 0};
  problem.batch = 1;
  problem.q_heads = kHeads;
  const auto spec = KvCacheSpec::separate(parse_format("bf16"), parse_format("bf16"), kHeads, 128, 0, 256);
  problem.kv = spec;
  problem.max_kv_len = 256;
  const PageLayout layout = page_layout(spec);
  ASSERT_GT(layout.head_bytes * (kHeads - 1), std::int64_t{INT32_MAX});

  AttentionCase row;  // the same with one head
  row.requests = {{1, 256}};
  row.q_heads = row.kv_heads = 1;
  row.page_size = 256;
  row.k_format = "bf16";
  const Problem one = make_problem(row);
  const Outputs expected = run_on_device(one);
  const std::uint8_t* head = one.cache->pages.bytes().data() + entry(one, 0, 0) * layout.head_bytes;

  const Device device = problem.device;
  constexpr std::size_t kRow = 256;  // bytes
  DeviceMemory pages(static_cast<std::size_t>(layout.page_bytes)), table(4), length(4);
  DeviceMemory q(kHeads * kRow), out(kHeads * kRow);
  check_cuda(cudaMemset(pages.data(), 0, pages.size()));
  check_cuda(cudaMemset(table.data(), 0, 4));
  check_cuda(cudaMemset(q.data(), 0, q.size()));
  const std::int32_t keys = 256;
  check_cuda(cudaMemcpy(length.data(), &keys, 4, cudaMemcpyHostToDevice));
  const int heads[] = {0, kHeads / 2, kHeads - 1};
  for (const int at : heads) {
    check_cuda(cudaMemcpy(pages.data() + at * layout.head_bytes, head,
                          static_cast<std::size_t>(layout.head_bytes), cudaMemcpyHostToDevice));
    check_cuda(cudaMemcpy(q.data() + at * kRow, one.q.bytes().data(), kRow, cudaMemcpyHostToDevice));
  }
  AttentionArgs args;
  PagedKv& cache = cache_of(args);
  cache.spec = spec;
  cache.pages = TensorView::contiguous(pages.data(), DType::kUInt8, {1, layout.page_bytes}, device);
  cache.block_table = TensorView::contiguous(table.data(), DType::kInt32, {1, 1}, device);
  args.lengths.kv_lengths = TensorView::contiguous(length.data(), DType::kInt32, {1}, device);
  args.q = TensorView::contiguous(q.data(), DType::kBFloat16, {1, kHeads, 128}, device);
  args.out = TensorView::contiguous(out.data(), DType::kBFloat16, {1, kHeads, 128}, device);
  const Plan plan = halftone::plan(problem);
  DeviceMemory workspace(plan.workspace_bytes());
  const TensorView space = TensorView::contiguous(workspace.data(), DType::kUInt8,
                                                  {static_cast<std::int64_t>(workspace.size())}, device);
  schedule(plan, args.lengths, space);
  run(plan, args, space);
  std::vector<std::uint8_t> row_out(kRow);
  for (const int at : heads) {
    check_cuda(cudaMemcpy(row_out.data(), out.data() + at * kRow, kRow, cudaMemcpyDeviceToHost));
    EXPECT_EQ(row_out, row_bytes(expected.out, 0, 1)) << "head " << at;
  }
  EXPECT_TRUE(pages.guards_intact() && out.guards_intact() && workspace.guards_intact());
}

}  // namespace
}  // namespace halftone::testing
