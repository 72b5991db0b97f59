// The universal decode kernel against the double oracle: whatever the table of kernels lacks.
#include <cstring>

#include "format/head_dim.h"
#include "tests/cuda/adversarial_device.h"

namespace halftone::testing {
namespace {

constexpr DType kFloats[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

/// A problem that only the universal kernel serves: f32 Q and O.
AttentionCase universal_case(const char* k_format, const char* v_format = "") {
  AttentionCase row;
  row.k_format = k_format;
  row.v_format = v_format;
  row.q_dtype = row.out_dtype = DType::kFloat32;
  row.requests = {{1, 300}, {1, 17}, {1, 0}, {1, 1}};
  row.name = row.k_format + ":" + row.v_format;
  return row;
}

void expect_universal(const AttentionCase& row) {
  SCOPED_TRACE(row.name);
  const Problem p = make_problem(row);
  ASSERT_TRUE(is_universal(p));
  const Outputs outputs = run_on_device(p);
  EXPECT_EQ(judge_device(p, outputs), "");
  EXPECT_EQ(outputs.status.as<std::int32_t>()[0], 0);
}

bool fits(const KvFormat& format, int dim) {
  return format.granularity != Granularity::kGroup || dim % format.group_size == 0;
}

/// Every pair of named formats at every head_dim, V of K's head_dim and of another one; types of Q and O,
/// pages, rotations and masks in cycles.
TEST(Universal, AllPairsOfFormats) {
  int n = 0, pairs = 0;
  for (const NamedFormat& k : named_formats()) {
    for (const NamedFormat& v : named_formats()) {
      for (const int dim : kHeadDims) {
        const int other = kHeadDims[static_cast<std::size_t>(++n) % kHeadDims.size()];
        for (const int v_dim : {dim, other}) {
          if (!fits(k.format, dim) || !fits(v.format, v_dim) || HasFailure()) continue;
          AttentionCase row;
          row.name = format_name(k.format) + ":" + format_name(v.format) + " " + std::to_string(dim) + ", " +
                     std::to_string(v_dim);
          row.k_format = format_name(k.format);
          row.v_format = format_name(v.format);
          row.head_dim = dim;
          row.v_head_dim = v_dim;
          row.q_dtype = kFloats[n % 3];
          row.out_dtype = kFloats[n / 3 % 3];
          row.page_size = 16 << n % 5;
          row.rotate_k = n % 4 == 1;
          row.rotate_v = n % 5 == 2;
          row.mask.causal = n % 2 == 0;
          row.mask.window_left = n % 3 == 0 ? 20 : -1;
          row.requests = {{1, 37}, {2, 70}, {1, 16}};
          row.q_heads = n % 7 == 0 ? 10 : 4;
          row.kv_heads = 2;
          row.seed = static_cast<std::uint64_t>(n);
          const Problem p = make_problem(row);
          EXPECT_EQ(judge_device(p, run_on_device(p)), "") << row.name;
          pairs += is_universal(p) ? 1 : 0;
        }
      }
    }
  }
  EXPECT_GT(pairs, 1000);
}

/// General forms: stored scales in f32, symmetric and asymmetric codes, groups.
TEST(Universal, GeneralFormats) {
  int n = 0;
  for (const char* format :
       {"fp8-token-head-f32", "fp8-token-f32", "fp8-g32-f32", "fp8-g64", "int8-token-head-f32",
        "int8-token-asym-f32", "int8-g32-asym-f32", "int8-g128-f32", "int8-static-head-asym",
        "int4-token-head-f32", "int4-token-sym-f32", "int4-g32-f32", "int4-g64-sym-f32", "int4-static-head",
        "int4-static-head-sym", "int4-tensor-sym"}) {
    for (const int dim : kHeadDims) {
      if (!fits(parse_format(format), dim)) continue;
      AttentionCase row = universal_case(format);
      row.name += std::to_string(dim);
      row.head_dim = dim;
      row.data = ++n % 3 == 0 ? Data::kOutlierChannels : Data::kNormal;
      row.rotate_k = row.rotate_v = n % 4 == 0;
      expect_universal(row);
    }
  }
}

/// Everything that changes logits, for units of one to all rows, of requests that are cut and that are not.
TEST(Universal, MasksAndOptions) {
  const Mask masks[] = {{},
                        {.causal = true},
                        {.causal = true, .window_left = 100},
                        {.window_left = 16, .window_right = 16},
                        {.causal = true, .window_left = 0},
                        {.window_right = 3}};
  int n = 0;
  for (const Mask& mask : masks) {
    for (const auto& [q_heads, q_len] : {std::pair{1, 1}, {5, 1}, {8, 1}, {8, 2}, {16, 3}, {33, 5}}) {
      for (const SplitPolicy policy : {SplitPolicy::kReproducible, SplitPolicy::kBatchInvariant}) {
        AttentionCase row = universal_case(n % 2 == 0 ? "int8-g64" : "bf16", "int4-g64");
        row.name = "case " + std::to_string(n);
        row.requests = {{q_len, 9000}, {q_len, 40}, {0, 10}, {q_len, 129}, {q_len, 2}};
        row.q_heads = q_heads;
        row.kv_heads = 1;
        row.mask = mask;
        row.policy = policy;
        row.workers = n % 3 == 0 ? 0 : n % 3 == 1 ? 3 : 40;
        row.softcap = n % 4 == 1 ? 20.0F : 0.0F;
        row.alibi = n % 5 == 2;
        row.sinks = n % 3 == 1;
        row.scale = n % 7 == 3 ? 0.3F : 0.0F;
        row.lse = n % 8 != 5;
        row.cu_q = true;
        row.seed = 100 + static_cast<std::uint64_t>(n++);
        expect_universal(row);
      }
    }
  }
}

/// A unit cut into more parts than are merged at once, and one worker with more items than are listed.
TEST(Universal, AnyNumberOfWorkers) {
  for (const SplitPolicy policy :
       {SplitPolicy::kFast, SplitPolicy::kReproducible, SplitPolicy::kBatchInvariant}) {
    for (const int workers : {1, 2, 17, 133, 1000}) {
      AttentionCase row = universal_case("fp8-token-head-f32", "int8-g32");
      row.requests = {{1, 20000}, {1, 40}, {1, 5000}};
      for (int i = 0; i < 20; ++i) row.requests.push_back({1, 30 + i});
      row.workers = workers;
      row.policy = policy;
      row.name = std::to_string(workers) + " workers";
      expect_universal(row);
    }
  }
}

/// A live token that no row sees may hold anything: before the window, and behind the last query.
TEST(Universal, UnseenTokensMayHoldNan) {
  AttentionCase row = universal_case("fp16", "bf16");
  row.page_size = 16;
  row.requests = {{2, 60}, {1, 60}};
  row.mask = {.window_left = 20, .window_right = -1};  // the first query of request 0 sees keys from 38 on
  const Problem p = make_problem(row);
  const Outputs clean = run_on_device(p);
  const PageLayout layout = page_layout(p.cache->spec);
  for (const std::int64_t request : {0, 1}) {
    for (int token = 0; token < 38; ++token) {
      std::uint8_t* tile = p.cache->pages.bytes().data() + entry(p, request, token / 16) * layout.page_bytes;
      const int at = token % 16 * row.head_dim * 2;
      std::memset(tile + at, 0xFF, 4);
      std::memset(tile + layout.v_data_offset + at, 0xFF, 4);
    }
  }
  expect_same_bits(clean, run_on_device(p), "before the window");
}

/// Values and stored scales beyond the range of f16, which other kernels do not serve.
TEST(Universal, LargeScales) {
  AttentionCase row = universal_case("int8-token-head-f32");
  Problem p = make_problem(row);
  for (std::int64_t i = 0; i < p.v.numel(); ++i) p.v.set(i, p.v.get(i) * 1e20F);
  p.cache = refilled(p, {0xFF});
  EXPECT_EQ(judge_device(p, run_on_device(p)), "");
}

/// O at any element alignment and stride.
TEST(Universal, UnalignedOutput) {
  for (const DType type : kFloats) {
    AttentionCase row = universal_case("int8-head", "fp8");
    row.head_dim = 80;
    row.out_dtype = type;
    const Problem p = make_problem(row);
    const Outputs expected = run_on_device(p);
    DeviceRun device(p, plan_on_device(p));
    const std::int64_t width = 83, bytes = dtype_bits(type) / 8, tokens = p.total_q();
    const Tensor out(type, {1 + tokens * row.q_heads * width});
    Uploads uploads;
    const TensorView memory = uploads.add(out.view());
    TensorView& view = device.args.out;
    view.data = static_cast<std::uint8_t*>(memory.data) + bytes;
    view.strides[0] = row.q_heads * width, view.strides[1] = width;
    device.schedule();
    device.run();
    check_cuda(cudaDeviceSynchronize());
    download(memory, out);
    std::int64_t nans = 0;
    for (std::int64_t i = 0; i < out.numel(); ++i) nans += std::isnan(out.get(i)) ? 1 : 0;
    EXPECT_EQ(nans, out.numel() - expected.out.numel()) << "a gap was written";
    for (std::int64_t i = 0; i < expected.out.numel(); ++i) {
      ASSERT_EQ(out.get(1 + i / 80 * width + i % 80), expected.out.get(i)) << i;
    }
  }
}

/// Runs one after another on a stream, each before the last one has ended, with a settled cache.
TEST(Universal, ChainOfRuns) {
  const Problem p = make_problem(universal_case("int4-g32", "bf16"));
  const Outputs expected = run_on_device(p);
  DeviceRun device(p, plan_on_device(p));
  device.args.cache_settled = true;
  device.schedule();
  check_cuda(cudaDeviceSynchronize());
  for (int i = 0; i < 20; ++i) device.run();
  expect_same_bits(expected, device.outputs(), "chain");
}

}  // namespace
}  // namespace halftone::testing
