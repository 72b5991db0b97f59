// What lies on the device is bounded there by what the caller gave, and reported in the status word.
#include <cmath>
#include <cstring>

#include "format/status.h"
#include "tests/cuda/bounds_checks.h"

namespace halftone::testing {
namespace {

using enum ErrorCode;

/// Few rows per KV head, and so many that a warpgroup takes them.
std::vector<AttentionCase> few_and_many_rows(const std::string& format) {
  std::vector<AttentionCase> rows(2, decode_case(format));
  rows[1].q_heads = 32;
  rows[1].out_dtype = DType::kBFloat16;
  return rows;
}

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

/// Lengths beyond the block table's width: tokens there do not exist, whoever's pages lie behind the row.
TEST(DeviceBounds, LengthsBeyondTheTable) {
  for (const std::string& format : formats_of_runners()) {
    for (AttentionCase row : few_and_many_rows(format)) {
      for (const BlockTableMode mode : {BlockTableMode::kTrusted, BlockTableMode::kClamped}) {
        row.requests = {{1, 70}, {1, 33}, {1, 0}, {1, 129}};
        row.table_mode = mode;
        const Problem p = make_problem(row);
        const Plan plan = plan_on_device(p);
        DeviceRun device(p, plan);
        cache_of(device.args).block_table.shape[1] = 3;  // of 16 tokens
        device.schedule();
        device.run();
        const Outputs outputs = device.outputs();
        EXPECT_EQ(status_of(outputs), kStatusBadPage) << format;

        DeviceRun twin(p, plan);
        const std::vector<std::int32_t> lengths = {48, 33, 0, 48};
        check_cuda(cudaMemcpy(twin.args.lengths.kv_lengths.data, lengths.data(), 16, cudaMemcpyHostToDevice));
        twin.schedule();
        twin.run();
        const Outputs expected = twin.outputs();
        for (std::int64_t i = 0; i < expected.out.numel(); ++i) {
          ASSERT_NEAR(outputs.out.get(i), expected.out.get(i), 1e-2F) << format << ", element " << i;
        }
        for (std::int64_t i = 0; i < expected.lse.numel(); ++i) {
          const float want = expected.lse.get(i), have = outputs.lse.get(i);
          ASSERT_TRUE(want == have || std::abs(want - have) < 1e-3F) << format << ", LSE " << i;
        }
      }
    }
  }
}

/// In trusted mode too, a page that does not exist is not read.
TEST(DeviceBounds, TrustedEntriesOutsideThePool) {
  for (const std::string& format : formats_of_runners()) {
    for (const std::int32_t bad : {-1, INT32_MIN, INT32_MAX}) {
      AttentionCase row = decode_case(format);
      const Problem p = make_problem(row);
      entry(p, 2, 1) = bad;
      const Outputs outputs = run_on_device(p);
      EXPECT_EQ(status_of(outputs), kStatusBadPage) << format;
      row.table_mode = BlockTableMode::kClamped;
      const Problem clamped = make_problem(row);
      entry(clamped, 2, 1) = bad;
      expect_same_bits(run_on_device(clamped), outputs, format);
    }
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

/// A key with half of the probability, and 20,000 that share the other half: P times a stored scale of V is
/// far below one in f16, and must not be lost.
TEST(DeviceBounds, ManySmallProbabilities) {
  constexpr int kKeys = 20000;
  for (const char* format :
       {"fp8-token-head", "int8-token", "int8-g64", "int4-g32", "int4-row", "fp8", "fp16"}) {
    for (const int q_len : {1, 2, 6}) {
      AttentionCase row = decode_case(format);
      row.q_heads = 8, row.kv_heads = 1;
      row.out_dtype = DType::kBFloat16;
      row.requests = {{q_len, kKeys}};
      Problem p = make_problem(row);
      Random random(3);
      for (std::int64_t i = 0; i < p.q.numel(); ++i) p.q.set(i, i % 128 == 0 ? 1.0F : 0.0F);
      const float sink = std::log(static_cast<float>(kKeys)) * std::sqrt(128.0F);
      for (std::int64_t i = 0; i < p.k.numel(); ++i) p.k.set(i, i == 0 ? sink : 0.0F);
      for (std::int64_t t = 0; t < kKeys; ++t) {
        const double size = t == 0 ? 0.0 : 0.02 + 0.04 * random.uniform();
        for (std::int64_t d = 0; d < 128; ++d) {
          p.v.set(t * 128 + d, static_cast<float>(size * (0.5 + 0.5 * random.uniform())));
        }
      }
      p.cache->calibrate(p.k, p.v);
      p.cache = refilled(p, {0xFF});
      const Outputs outputs = run_on_device(p);
      const Reference truth = make_reference(p);
      for (std::int64_t i = 0; i < outputs.out.numel(); ++i) {
        const double want = truth.out[static_cast<std::size_t>(i)];
        ASSERT_NEAR(outputs.out.get(i), want, 0.01 * want) << format << ", " << q_len << " queries";
      }
    }
  }
}

/// append says which values of V attention could not use with stored f16 scales.
TEST(DeviceBounds, AppendReportsLargeV) {
  for (const char* format : {"int4-g32", "int4-row", "int8-g64", "fp8-token-head", "int8-head", "bf16"}) {
    for (const int tokens : {1, 300}) {
      for (const float size : {2000.0F, 1e5F}) {
        AttentionCase row = decode_case(format);
        row.requests = {{1, tokens}};
        Problem p = make_problem(row);
        for (std::int64_t i = 0; i < p.v.numel(); ++i) p.v.set(i, i % 2 == 0 ? size : -size);
        p.cache->calibrate(p.k, p.v);
        for (std::int32_t& n : p.cache->lengths.as<std::int32_t>()) n = 0;
        const Tensor cu = Tensor::of({2}, std::vector<std::int32_t>{0, tokens});
        const Tensor status = Tensor::of({1}, std::vector<std::int32_t>{0});
        AppendArgs host;
        host.k = p.k.view(), host.v = p.v.view();
        host.cu_seqlens = cu.view(), host.status = status.view();
        Uploads uploads;
        const AppendArgs args = uploads.add(host);
        append(uploads.add(p.cache->view()), args);
        download(args.status, status);
        const bool large = size > kMaxScaledV && p.cache->spec.v_format.dynamic_scale();
        EXPECT_EQ(status.as<std::int32_t>()[0], large ? kStatusLargeV : 0) << format << ", " << tokens;
      }
    }
  }
}

/// Static scales lie on the device: append and run report those that are none.
TEST(DeviceBounds, BadStaticScalesAreReported) {
  for (const char* format : {"int8-static-head", "fp8", "int4-static-head-sym"}) {
    for (const int q_len : {1, 4, 12}) {
      AttentionCase row = decode_case(format);
      row.requests = uniform_requests(2, q_len, 70);
      const Problem p = make_problem(row);
      const DeviceRun device(p, plan_on_device(p));
      device.schedule();
      const Tensor cu = Tensor::of({3}, std::vector<std::int32_t>{0, 1, 1});
      AppendArgs host;
      host.k = p.k.view(), host.v = p.v.view();
      host.k.shape[0] = host.v.shape[0] = 1;
      host.cu_seqlens = cu.view();
      Uploads uploads;
      AppendArgs args = uploads.add(host);
      args.status = device.args.status;
      check_cuda(cudaMemset(cache_of(device.args).lengths.data, 0, 8));
      const auto expect_status = [&](std::int32_t expected, const std::string& what) {
        for (const bool appends : {false, true}) {
          check_cuda(cudaMemset(args.status.data, 0, 4));
          if (appends) {
            append(cache_of(device.args), args);
          } else {
            device.run();
          }
          EXPECT_EQ(status_of(device.outputs()), expected) << format << ", " << what << ", " << appends;
        }
      };
      const std::pair<const Tensor*, const TensorView*> scales[] = {
          {&p.cache->k_scale, &cache_of(device.args).k_scale.scale},
          {&p.cache->v_scale, &cache_of(device.args).v_scale.scale}};
      for (const auto& [good, on_device] : scales) {
        ASSERT_TRUE(good->present()) << format;
        for (const float bad : {kNan, kInf, 0.0F, -1.0F, 1e-40F}) {
          const Tensor values = good->clone();
          values.set(values.numel() - 1, bad);
          copy_to_device(*on_device, values);
          expect_status(kStatusBadScale, std::to_string(bad));
        }
        copy_to_device(*on_device, *good);
      }
      expect_status(0, "good");
    }
  }
}

}  // namespace
}  // namespace halftone::testing
