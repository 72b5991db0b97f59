// Attention over latent caches that appends, on the GPU: the bytes of append(), the bits of append() and then
// run(), whichever kernel writes the tokens.
#include <algorithm>
#include <array>
#include <climits>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "format/status.h"
#include "testing/latent_cases.h"
#include "tests/append_steps.h"
#include "tests/cuda/adversarial_device.h"
#include "tests/cuda/agreement.h"
#include "tests/cuda/latent_device.h"

namespace halftone::testing {
namespace {

struct Shape {
  int heads, queries;
};

/// For each number of packed rows that kernels are for, shapes that have so many, by one query and by
/// several; then those whose rows are several units.
constexpr std::array<std::array<Shape, 4>, 6> kShapes{{
    {{{8, 1}, {4, 2}, {2, 4}, {8, 1}}},
    {{{16, 1}, {8, 2}, {4, 4}, {1, 16}}},
    {{{32, 1}, {16, 2}, {8, 4}, {2, 16}}},
    {{{64, 1}, {32, 2}, {16, 4}, {4, 16}}},
    {{{128, 1}, {64, 2}, {32, 4}, {8, 16}}},
    {{{128, 2}, {64, 4}, {16, 16}, {64, 16}}},
}};

/// What rows vary in cycles of their own lengths.
AttentionCase varied(int n, const char* format, const Shape& shape) {
  const auto i = static_cast<std::size_t>(n);
  AttentionCase row = listed_case(shape.heads, format);
  row.lists = {};
  row.name += ", " + std::to_string(shape.queries) + " queries, " + std::to_string(n);
  row.page_size = n % 4 == 1 ? 32 : n % 2 == 0 ? 16 : 64;
  row.mask.causal = n % 5 != 4;
  row.mask.window_left = n % 7 == 3 ? 70 : n % 7 == 5 ? 2 : -1;
  row.policy = kPoliciesOfSteps[i / 2 % kPoliciesOfSteps.size()];
  row.workers = n % 3 == 1 ? 3 : 0;
  row.sinks = n % 6 == 2;
  if (n % 7 == 4 && row.k_format != "bf16") row.q_dtype = DType::kFloat16;
  if (n % 3 == 0) row.out_dtype = row.q_dtype;
  row.table_mode = n % 4 == 1 ? BlockTableMode::kClamped : BlockTableMode::kTrusted;
  row.seed = 2000 + i;
  return row;
}

/// Tokens at both sides of the ends of pages and of the steps of 64 tokens that kernels take, some that are
/// all that their request has; a request without queries, and one of a pass of its own beside many.
std::vector<Request> ragged_requests(int queries) {
  const int q = queries;
  return {{q, q}, {q, 64}, {1, 1}, {q, q + 15}, {0, 30}, {1, 257}, {q, 130}, {q, 64 + q / 2}};
}

/// What appended tokens vary: their type, RoPE, with angles that fill a chunk or do not, and skips.
AttentionCase appending_varied(AttentionCase row, int n) {
  constexpr std::array kRopeDims = {0, 64, 20};
  const auto i = static_cast<std::size_t>(n);
  return appending(std::move(row), {.dtype = n % 4 == 2 ? DType::kFloat16 : DType::kBFloat16,
                                    .rope = kRopesOfSteps[i % kRopesOfSteps.size()],
                                    .slots = n % 5 == 3,
                                    .rope_dims = kRopeDims[i / 3 % kRopeDims.size()]});
}

/// The row over the cache that the step leaves: limits are relative to what that holds.
Problem after_step(const AttentionCase& row) {
  Problem p = make_problem(row);
  p.cache = std::make_unique<Cache>(stepped_cache(p));
  reference::Dequantised values = dequantised(*p.cache);
  p.k = std::move(values.k), p.v = std::move(values.v);
  p.row.step = {};
  p.problem.appends = false;
  return p;
}

/// The row's problem with NaN where its new tokens go: what a kernel reads of them without having written it
/// shows. Skipped tokens stay keys.
Problem poisoned(const AttentionCase& row) {
  Problem p = make_problem(row);
  if (row.step.slots) return p;
  const KvCacheSpec& spec = p.cache->spec;
  const PageLayout layout = page_layout(spec);
  const std::vector<std::int64_t> slots = stepped_cache(p).slots();
  std::size_t end = 0;
  for (const Request& r : row.requests) {
    end += static_cast<std::size_t>(r.kv_len);
    for (std::size_t at = end - static_cast<std::size_t>(r.q_len); at < end; ++at) {
      const std::int64_t page = slots[at] / spec.page_size, within = slots[at] % spec.page_size;
      std::memset(p.cache->pages.bytes().data() + page * layout.page_bytes + within * layout.row_bytes, 0xff,
                  static_cast<std::size_t>(layout.row_bytes));
    }
  }
  return p;
}

/// The row in one call and in two; `judged`: against the oracle, too.
void expect_same(const AttentionCase& row, bool advance = true, bool judged = false) {
  SCOPED_TRACE(row.name);
  const After one = expect_same_step(cuda_runner(), poisoned(row), advance);
  EXPECT_EQ(status_of(one.outputs), 0);
  EXPECT_TRUE(same_bytes(stepped_cache(poisoned(row)).pages, one.pages));  // append() on the CPU
  if (judged) {
    EXPECT_EQ(judge_device(after_step(row), one.outputs), "");
  }
}

/// The status of a step that is the same in one call and in two.
std::int32_t step_status(Problem p) {
  return status_of(expect_same_step(cuda_runner(), std::move(p)).outputs);
}

/// Every kernel with every format, by rows against the oracle, too.
TEST(DeviceLatentAppend, EveryKernelWritesTheBytesOfAppend) {
  int n = 0;
  for (std::size_t format = 0; format < std::size(kAllFormats); ++format) {
    std::set<std::string> met;
    for (std::size_t rows = 0; rows < kShapes.size(); ++rows) {
      for (const std::size_t at : {std::size_t{0}, 1 + (format + rows) % 3}) {
        const Shape& shape = kShapes[rows][at];
        AttentionCase own = varied(++n, kAllFormats[format], shape);
        own.requests = ragged_requests(shape.queries);
        if (n % 4 == 3)
          std::erase_if(own.requests, [&](const Request& r) { return r.q_len != shape.queries; });
        if (shape.heads == 32) own.policy = SplitPolicy::kBatchInvariant;  // bf16: else 64 rows
        for (const AttentionCase& row : under_all_bounds(appending_varied(own, n))) {
          for (const std::string& kernel : kernels_of(plan_on_device(make_problem(row)))) met.insert(kernel);
          expect_same(row, n % 3 != 0, true);
        }
      }
    }
    for (const char* kernel :
         {"sm90-latent-8", "sm90-latent-16", "sm90-latent-32", "sm90-latent-64", "sm90-latent-128"}) {
      EXPECT_TRUE(met.contains(kernel)) << kAllFormats[format] << ", " << kernel;
    }
  }
}

/// The same for each shape by each policy, longer requests, which are cut, among the others.
TEST(DeviceLatentAppend, EveryShapeAndPolicy) {
  int n = 100;
  for (const char* format : kAllFormats) {
    for (const auto& shapes : kShapes) {
      for (const Shape& shape : shapes) {
        for (const SplitPolicy policy : kPoliciesOfSteps) {
          AttentionCase own = varied(++n, format, shape);
          own.requests = ragged_requests(shape.queries);
          own.requests.push_back({shape.queries, 1500});
          own.policy = policy;
          for (const AttentionCase& row : under_all_bounds(appending_varied(own, n))) {
            expect_same(row, n % 3 != 0);
            if (::testing::Test::HasFailure()) return;
          }
        }
      }
    }
  }
}

/// Units of several heads and queries that fill neither rows nor boxes of queries.
TEST(DeviceLatentAppend, RowsThatFillNoUnit) {
  int n = 700;
  for (const char* format : kAllFormats) {
    for (const Shape& shape : {Shape{1, 1}, Shape{3, 1}, Shape{13, 1}, Shape{24, 1}, Shape{33, 1},
                               Shape{96, 1}, Shape{160, 1}, Shape{5, 3}, Shape{7, 5}, Shape{24, 7}}) {
      AttentionCase own = varied(++n, format, shape);
      own.requests = ragged_requests(shape.queries);
      for (const AttentionCase& row : under_all_bounds(appending_varied(own, n))) expect_same(row);
    }
  }
}

/// Many requests of fewer keys than a step has, one after another by the same worker, some of them empty
/// before: what one leaves in shared memory is not taken for what the next brings.
TEST(DeviceLatentAppend, ManyShortRequestsForAWorker) {
  int n = 0;
  for (const char* format : kAllFormats) {
    for (const int heads : kAllHeads) {
      AttentionCase row = varied(++n, format, {heads, 1});
      row.workers = 2;
      row.policy = kPoliciesOfSteps[static_cast<std::size_t>(n) % 2];
      row.requests.clear();
      for (int i = 0; i < 24; ++i) {
        const int keys = i % 3 == 0 ? 1 : 1 + (i * 11 + n) % 63;
        row.requests.push_back({1, keys});
      }
      expect_same(appending_varied(row, n));
    }
  }
}

/// A batch of first tokens: no request has a key before, and no page but the one that it gets.
TEST(DeviceLatentAppend, FirstTokensOfManyRequests) {
  int n = 0;
  for (const char* format : kAllFormats) {
    for (const int heads : kAllHeads) {
      AttentionCase row = varied(++n, format, {heads, 1});
      row.mask.window_left = -1;
      row.requests = uniform_requests(9, 1, 1);
      expect_same(appending(row), true, true);
    }
  }
}

/// How the rows of K lie.
struct Layout {
  int more, shift;  // elements behind a row, before the first one
  DType dtype;
};

/// The step's K in such a layout, NaN between its rows.
TensorView laid_out(const Problem& p, const Layout& layout, Uploads& uploads) {
  const std::int64_t dim = p.row.head_dim, stride = dim + layout.more, tokens = p.total_q();
  const Tensor wide(layout.dtype, {layout.shift + tokens * stride});
  const std::size_t bytes = dtype_bits(layout.dtype) / 8;
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::memcpy(wide.bytes().data() + static_cast<std::size_t>(layout.shift + t * stride) * bytes,
                p.new_k.bytes().data() + static_cast<std::size_t>(t * dim) * bytes,
                static_cast<std::size_t>(dim) * bytes);
  }
  TensorView k = uploads.add(wide.view());
  k = TensorView::contiguous(static_cast<std::uint8_t*>(k.data) + layout.shift * bytes, layout.dtype,
                             {tokens, 1, dim}, k.device);
  k.strides[0] = stride;
  return k;
}

/// K as a part of a wider projection, whose rows are aligned or are not, or begin between two of 16 bytes,
/// and in f32: those that attention's kernels do not take go by append's own, with the same result.
TEST(DeviceLatentAppend, RowsOfKAnywhere) {
  constexpr std::array kFew = {Shape{16, 1}, Shape{64, 1}, Shape{64, 2}};
  std::size_t n = 0;
  for (const char* format : kAllFormats) {
    for (const Layout& layout :
         {Layout{64, 0, DType::kBFloat16}, Layout{3, 0, DType::kBFloat16}, Layout{4, 0, DType::kFloat16},
          Layout{8, 8, DType::kFloat16}, Layout{8, 1, DType::kBFloat16}, Layout{0, 0, DType::kFloat32},
          Layout{2, 1, DType::kFloat32}}) {
      const Shape& shape = kFew[n % kFew.size()];
      AttentionCase row = varied(static_cast<int>(++n), format, shape);
      row.requests = {{shape.queries, 64}, {1, 1}, {shape.queries, 130}};
      row = appending(under_higher_bounds(row), {.dtype = layout.dtype});
      SCOPED_TRACE(row.name + ", K of " + std::string(dtype_name(layout.dtype)) + ", " +
                   std::to_string(layout.more) + " more");
      Problem p = make_problem(row);
      Uploads uploads;
      const TensorView k = laid_out(p, layout, uploads);
      expect_same_step(cuda_runner(), std::move(p), true, [&](AttentionArgs& a) { a.append.k = k; });
      EXPECT_TRUE(uploads.guards_intact());
    }
  }
}

/// Pages that the table does not name, of new tokens and of older ones before them, and a table that ends
/// before them: the other tokens are written, and the status is that of append() and run().
TEST(DeviceLatentAppend, PagesThatAreMissing) {
  int n = 0;
  for (const char* format : kAllFormats) {
    for (const Shape& shape : {Shape{8, 1}, Shape{16, 4}, Shape{64, 2}}) {
      for (const int column : {n / 2 % 2, 7 + n % 2}) {  // older tokens, and, of 7 and 8, new ones
        AttentionCase row = varied(++n, format, shape);
        row.mask.window_left = -1;
        row.page_size = 16;
        row.requests = {{1, 70}, {shape.queries, 128 + (shape.queries + 1) / 2}, {shape.queries, 40}};
        row = appending(row);
        SCOPED_TRACE(row.name + ", page " + std::to_string(column));
        Problem p = make_problem(row);
        const Tensor& table = p.cache->block_table;
        const std::int64_t width = table.shape()[1];
        constexpr std::array kBad = {-1, INT_MAX, INT_MIN, 1 << 20};
        table.as<std::int32_t>()[static_cast<std::size_t>(width + column)] =
            kBad[static_cast<std::size_t>(n) % kBad.size()];
        EXPECT_EQ(step_status(std::move(p)), kStatusBadPage);
      }
      AttentionCase row = appending(varied(++n, format, shape));
      row.mask.window_left = -1;
      row.page_size = 16;
      row.requests = {{shape.queries, 128 + (shape.queries + 1) / 2}, {1, 40}, {shape.queries, 128}};
      SCOPED_TRACE(row.name + ", narrow");
      Problem p = make_problem(row);
      const Tensor narrow(DType::kInt32, {3, 8});
      const std::int64_t width = p.cache->block_table.shape()[1];
      for (std::int64_t i = 0; i < 24; ++i) {
        narrow.as<std::int32_t>()[static_cast<std::size_t>(i)] =
            p.cache->block_table.as<std::int32_t>()[static_cast<std::size_t>(i / 8 * width + i % 8)];
      }
      p.cache->block_table = narrow.clone();
      EXPECT_EQ(step_status(std::move(p)), kStatusBadPage);
    }
  }
}

/// Pages that the window has passed may be gone, also those of its first step.
TEST(DeviceLatentAppend, PagesBeforeAWindow) {
  int n = 0;
  for (const char* format : kAllFormats) {
    for (const Shape& shape : {Shape{16, 1}, Shape{64, 1}, Shape{32, 4}}) {
      AttentionCase row = varied(++n, format, shape);
      row.page_size = 16;
      row.mask = {.causal = true, .window_left = 40};
      row.requests = {{shape.queries, 190}, {1, 65}, {shape.queries, 129}};
      row = appending(under_higher_bounds(row));
      SCOPED_TRACE(row.name);
      Problem p = make_problem(row);
      const Tensor& table = p.cache->block_table;
      const auto width = static_cast<std::size_t>(table.shape()[1]);
      for (std::size_t i = 0; i < row.requests.size(); ++i) {
        const auto [q_len, kv_len] = row.requests[i];
        for (int page = 0; (page + 1) * 16 <= kv_len - q_len - 40; ++page) {
          table.as<std::int32_t>()[i * width + static_cast<std::size_t>(page)] = -1;
        }
      }
      EXPECT_EQ(step_status(std::move(p)), 0);
    }
  }
}

/// Values that append() reports, in the latent, in the rotary dims, in one token of many.
TEST(DeviceLatentAppend, ValuesThatAreNotFiniteAreReported) {
  constexpr float kValues[] = {std::numeric_limits<float>::infinity(),
                               -std::numeric_limits<float>::infinity(),
                               std::numeric_limits<float>::quiet_NaN(), 0x1p120F};
  int n = 0;
  for (const char* format : kAllFormats) {
    for (const Shape& shape : {Shape{8, 1}, Shape{64, 1}, Shape{32, 4}}) {
      AttentionCase row = varied(++n, format, shape);
      row.requests = {{shape.queries, 30}, {shape.queries, 70}, {1, 129}};
      row = appending(under_higher_bounds(row));
      const std::array dims = {0, 300, row.head_dim - 1};
      const int dim = dims[static_cast<std::size_t>(n / 4) % dims.size()];
      SCOPED_TRACE(row.name + ", dim " + std::to_string(dim));
      Problem p = make_problem(row);
      p.new_k.set(std::int64_t{shape.queries} * row.head_dim + dim, kValues[n % 4]);
      EXPECT_EQ(step_status(std::move(p)) & kStatusNonFinite, kStatusNonFinite);
    }
  }
}

/// Tables of angles without rows: every position is beyond them, and nobody reads them.
TEST(DeviceLatentAppend, TablesWithoutRows) {
  for (const char* format : kAllFormats) {
    for (const int heads : kAllHeads) {
      for (const RopePairing pairing : {RopePairing::kHalf, RopePairing::kInterleaved}) {
        AttentionCase own = listed_case(heads, format);
        own.lists = {};
        own.requests = {{1, 70}, {1, 1}};
        const AttentionCase row = appending(own, {.rope = pairing, .rope_dims = 64});
        SCOPED_TRACE(row.name);
        Problem p = make_problem(row);
        for (Tensor* table : {&p.cos, &p.sin}) *table = Tensor(DType::kFloat32, {0, table->shape()[1]});
        EXPECT_EQ(step_status(std::move(p)), kStatusBadPage);
      }
    }
  }
}

/// The schedule counts more tokens than K and q have rows: those that exist are written.
TEST(DeviceLatentAppend, MoreTokensThanRows) {
  constexpr std::array<std::int64_t, 3> kRows = {1, 4, 8};
  std::size_t n = 0;
  for (const char* format : kAllFormats) {
    for (const int heads : kAllHeads) {
      AttentionCase own = listed_case(heads, format);
      own.lists = {};
      own.mask.causal = true;
      own.requests = {{3, 70}, {2, 33}, {4, 129}};
      own.cu_q = true;
      const AttentionCase row = appending(own);
      const std::int64_t rows = kRows[n++ % kRows.size()];
      SCOPED_TRACE(row.name + ", " + std::to_string(rows) + " rows");
      Problem p = make_problem(row);
      for (Tensor* x : {&p.q, &p.new_k}) {
        std::vector<std::int64_t> shape = x->shape();
        shape[0] = rows;
        Tensor part(x->dtype(), shape);
        std::copy_n(x->bytes().begin(), part.bytes().size(), part.bytes().begin());
        *x = std::move(part);
      }
      EXPECT_EQ(step_status(std::move(p)), kStatusBadQueries);
    }
  }
}

/// Pages beyond 4 GiB of a pool.
TEST(DeviceLatentAppend, PoolsBeyond4GiB) {
  constexpr std::int64_t kBytes = std::int64_t{5} << 30;
  std::size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total));
  if (free < kBytes + (std::size_t{1} << 30)) GTEST_SKIP() << "needs 6 GiB of free memory";
  const DeviceMemory memory(kBytes);
  int n = 0;
  for (const char* format : kAllFormats) {
    for (const Shape& shape : {Shape{8, 1}, Shape{64, 1}, Shape{32, 4}}) {
      AttentionCase row = varied(++n, format, shape);
      row.requests = {{shape.queries, 130}, {shape.queries, shape.queries}, {1, 64}};
      row = appending(under_higher_bounds(row));
      SCOPED_TRACE(row.name);
      const Problem p = make_problem(row);
      const After expected = in_one_call(cuda_runner(), p, true);
      const std::int64_t page_bytes = page_layout(case_spec(row)).page_bytes, pages = kBytes / page_bytes;
      const std::int64_t count = p.cache->pages.shape()[0], first = pages - count;
      std::uint8_t* const own = memory.data() + first * page_bytes;
      const auto bytes = p.cache->pages.bytes();
      check_cuda(cudaMemcpy(own, bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
      for (std::int32_t& page : p.cache->block_table.as<std::int32_t>()) {
        if (page >= 0 && page < count) page += static_cast<std::int32_t>(first);
      }
      const After far = in_one_call(cuda_runner(), p, true, [&](AttentionArgs& a) {
        cache_of(a).pages.data = memory.data();
        cache_of(a).pages.shape[0] = pages;
      });
      expect_same_bits(expected.outputs, far.outputs, row.name);
      EXPECT_EQ(status_of(far.outputs), 0);
      check_cuda(cudaMemcpy(bytes.data(), own, bytes.size(), cudaMemcpyDeviceToHost));
      EXPECT_TRUE(same_bytes(expected.pages, p.cache->pages));
    }
  }
}

/// One schedule, layers that share their lengths: two passes, and as many as one.
TEST(DeviceLatentAppend, StepsOfAnEngine) {
  for (const auto& [format, heads] : {std::pair{"fp8-g128-f32", 16}, {"int8-g64", 64}, {"bf16", 64}}) {
    AttentionCase row = listed_case(heads, format);
    row.lists = {};
    expect_steps_of_an_engine(cuda_runner(), row, 3);
  }
}

TEST(DeviceLatentAppend, RandomSteps) {
  for (std::uint64_t seed = 70000; seed < 70150; ++seed) {
    AttentionCase row = random_latent_case(seed);
    row.lists = {};
    const int n = static_cast<int>(seed % 997);
    for (const AttentionCase& each : under_all_bounds(appending_varied(row, n)))
      expect_same(each, n % 3 != 0);
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace halftone::testing
