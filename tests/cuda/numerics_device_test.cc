// Numbers and memory that attention on the GPU must survive.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string_view>

#include "format/status.h"
#include "tests/cuda/adversarial_device.h"

namespace halftone::testing {
namespace {

using enum ErrorCode;

void expect_finite(const Outputs& outputs, const std::string& what) {
  for (const float x : outputs.out.to_floats()) ASSERT_TRUE(std::isfinite(x)) << what;
}

/// Unused pages, slots, scales and mins: zeros, NaN, infinities of each format, noise. Same bits.
TEST(DeviceNumerics, DeadBytesNeverMatter) {
  int ran = 0, universal = 0;
  for (const AttentionCase& listed : attention_cases()) {
    const bool wanted = listed.name.find("mixed-") == 0 || listed.head_dim == 128 || listed.head_dim == 80;
    if (!listed.paged || !wanted || listed.requests.size() < 2) continue;
    for (const AttentionCase& row : {for_device(listed), for_table(listed)}) {
      Problem p = make_problem(row);
      universal += is_universal(p) ? 1 : 0;
      ++ran;
      p.cache = refilled(p, {0x00});
      const Plan plan = plan_on_device(p);
      const Outputs clean = run_on_device(p, plan);
      const std::initializer_list<std::uint8_t> patterns[] = {
          {0xFF}, {0x00, 0x7C}, {0x80, 0x7F}, {0x12, 0xFC, 0xC0, 0x7F, 0x81, 0x55, 0x7E}};
      for (const auto& pattern : patterns) {
        p.cache = refilled(p, pattern);
        expect_same_bits(clean, run_on_device(p, plan), row.name);
      }
    }
  }
  EXPECT_GT(ran - universal, 50);
  EXPECT_GT(universal, 50);
}

/// A NaN scale or 16-bit value of one live token reaches the rows that see it and no other.
TEST(DeviceNumerics, NanInALivePageReachesOnlyItsRequest) {
  for (const std::string& format : typical_formats()) {
    AttentionCase row = decode_case(format);
    row.requests = {{1, 70}, {3, 33}, {1, 129}};
    const Problem p = make_problem(row);
    const PageLayout layout = page_layout(p.problem.kv);
    const bool sixteen = !p.problem.kv.k_format.quantised();
    if (!sixteen && layout.k_param_bytes == 0) continue;
    const Outputs clean = run_on_device(p);
    // Token 0 of request 1, KV head 0: the first bytes of the tile's K rows, or of its K scales.
    std::uint8_t* tile = p.cache->pages.bytes().data() + entry(p, 1, 0) * layout.page_bytes;
    std::memset(tile + (sixteen ? 0 : layout.k_param_offset), 0xFF, sixteen ? 2 : 4);
    const Outputs outputs = run_on_device(p);
    EXPECT_EQ(row_bytes(clean.out, 0, 1), row_bytes(outputs.out, 0, 1)) << format;
    EXPECT_EQ(row_bytes(clean.out, 4, 5), row_bytes(outputs.out, 4, 5)) << format;
    EXPECT_TRUE(std::isnan(outputs.out.get(row.q_heads * row.head_dim))) << format;
    EXPECT_FALSE(std::isnan(outputs.out.get((row.q_heads + 4) * row.head_dim)))
        << format << ", other KV head";
  }
}

/// Constant and zero tensors, zero groups among others, one outlier: within tolerance, never NaN.
TEST(DeviceNumerics, DegenerateGroups) {
  for (const std::string& format : typical_formats()) {
    for (const Data data : {Data::kConstant, Data::kZero}) {
      AttentionCase row = decode_case(format);
      row.data = data;
      const Problem p = make_problem(row);
      const Outputs outputs = run_on_device(p);
      expect_finite(outputs, format);
      EXPECT_EQ(judge_device(p, outputs), "") << format;
      if (data != Data::kZero) continue;
      for (const float x : outputs.out.to_floats()) ASSERT_EQ(x, 0.0F) << format;
    }
    for (const float outlier : {0.0F, 1e4F, -1e4F}) {
      Problem p = make_problem(decode_case(format));
      if (outlier == 0) {
        for (std::int64_t i = 0; i < p.k.numel(); i += i % 32 == 31 ? 65 : 1) p.k.set(i, 0), p.v.set(i, 0);
      } else {
        p.k.set(1234, outlier), p.v.set(4321, outlier);
      }
      p.cache->calibrate(p.k, p.v);
      p.cache = refilled(p, {0xFF});
      const Outputs outputs = run_on_device(p);
      expect_finite(outputs, format);
      EXPECT_EQ(judge_device(p, outputs), "") << format << ", outlier " << outlier;
    }
  }
}

/// Logits of exactly +-65504, alone and mixed, and a saturated softmax.
TEST(DeviceNumerics, ExtremeLogits) {
  for (const int pattern : {0, 1, 2}) {
    AttentionCase row = decode_case("fp16");
    row.requests = {{2, 200}};
    row.q_dtype = DType::kFloat16;
    row.scale = 1;
    Problem p = make_problem(row);
    for (std::int64_t i = 0; i < p.q.numel(); ++i) p.q.set(i, i % row.head_dim == 0 ? 65504.0F : 0.0F);
    for (std::int64_t i = 0; i < p.k.numel(); ++i) {
      const std::int64_t token = i / row.head_dim / row.kv_heads;
      const float sign = pattern == 0 || (pattern == 2 && token % 2 == 0) ? 1.0F : -1.0F;
      p.k.set(i, i % row.head_dim == 0 ? sign : 0.0F);
    }
    p.cache = refilled(p, {0xFF});
    EXPECT_EQ(judge_device(p, run_on_device(p)), "") << "pattern " << pattern;
  }
  for (const float scale : {10.0F, 1e4F}) {
    AttentionCase row = decode_case("bf16");
    row.scale = scale;
    expect_finite(run_on_device(make_problem(row)), "scale");
  }
}

TEST(DeviceNumerics, RowsMaskedOutByTheWindow) {
  for (const char* format : {"bf16", "int8-head", "int4-row"}) {
    AttentionCase row = decode_case(format);
    row.requests = {{30, 10}, {1, 100}};
    row.mask = {.window_left = 4, .window_right = 4};  // queries 0 to 15 of request 0 stand before every key
    const Problem p = make_problem(row);
    const Outputs outputs = run_on_device(p);
    EXPECT_EQ(judge_device(p, outputs), "") << format;
    expect_empty_rows(p, outputs, 0, 16);
  }
}

/// Any number of workers, fewer and more than there are tiles.
TEST(DeviceNumerics, AnyNumberOfSplits) {
  for (const int workers : {1, 2, 3, 17, 133, 1000}) {
    for (const SplitPolicy policy : {SplitPolicy::kReproducible, SplitPolicy::kBatchInvariant}) {
      AttentionCase row = decode_case("int4-g32");
      row.requests = {{1, 9000}, {1, 40}};
      row.workers = workers;
      row.policy = policy;
      const Problem p = make_problem(row);
      EXPECT_EQ(judge_device(p, run_on_device(p)), "") << workers << " workers";
    }
  }
}

/// V up to kMaxScaledV where its scales are stored, and far beyond where they are static, for few and for
/// many rows: P times a stored scale is f16.
TEST(DeviceNumerics, LargeScalesOfV) {
  for (const char* format : {"int8-head", "fp8-token-head", "int4-row"}) {
    for (const int q_len : {1, 2, 4, 6, 8}) {
      AttentionCase row = decode_case(format);
      row.q_heads = 8, row.kv_heads = 1, row.head_dim = 128;
      row.out_dtype = DType::kBFloat16;
      row.requests = {{q_len, 300}, {q_len, 1000}};
      Problem p = make_problem(row);
      float largest = 0.0F;
      for (const float x : p.v.to_floats()) largest = std::max(largest, std::abs(x));
      const float wanted = p.problem.kv.v_format.dynamic_scale() ? kMaxScaledV : 5e5F;
      for (std::int64_t i = 0; i < p.v.numel(); ++i) p.v.set(i, p.v.get(i) * (wanted / largest));
      p.cache = refilled(p, {0xFF});
      const Outputs outputs = run_on_device(p);
      expect_finite(outputs, format);
      EXPECT_EQ(judge_device(p, outputs), "") << format << ", " << q_len << " queries";
    }
  }
}

/// Same shapes, plan and schedule, another static scale: the new result.
TEST(DeviceNumerics, NewStaticScaleGivesTheNewResult) {
  AttentionCase row = decode_case("int8-tensor");
  row.out_dtype = DType::kBFloat16;  // as wide a range as fp32: twice the value is twice the output
  const Problem p = make_problem(row);
  const DeviceRun device(p, plan_on_device(p));
  device.schedule();
  device.run();
  const Outputs before = device.outputs();
  p.cache->v_scale.set(0, p.cache->v_scale.get(0) * 2);
  copy_to_device(device.args.cache.v_scale.scale, p.cache->v_scale);
  device.run();
  const Outputs after = device.outputs();
  for (std::int64_t i = 0; i < before.out.numel(); ++i) ASSERT_EQ(after.out.get(i), 2 * before.out.get(i));
  EXPECT_EQ(judge_device(p, after), "");
}

/// A workspace's bytes before do not matter; one byte less than stated is refused.
TEST(DeviceTensors, Workspace) {
  for (const SplitPolicy policy :
       {SplitPolicy::kFast, SplitPolicy::kReproducible, SplitPolicy::kBatchInvariant}) {
    AttentionCase row = decode_case("int4-g32");
    row.policy = policy;
    row.requests = {{1, 30000}, {2, 300}, {1, 0}};
    const Problem p = make_problem(row);
    const Plan plan = plan_on_device(p);
    const Outputs expected = run_on_device(p, plan);
    for (const int fill : {0x00, 0x7F, 0x3C}) {
      const DeviceRun device(p, plan, fill);
      device.schedule();
      device.run();
      expect_same_bits(expected, device.outputs(), "workspace of " + std::to_string(fill));
    }
    const DeviceRun device(p, plan);
    TensorView space = device.space();
    space.shape[0] -= 1;
    expect_error(kResourceExhausted, {"workspace"}, [&] { schedule(plan, device.args.lengths, space); });
    device.schedule();
    expect_error(kResourceExhausted, {"workspace"}, [&] { run(plan, device.args, space); });
    EXPECT_TRUE(untouched(device.outputs().out));
  }
}

/// Q at any element alignment and stride, O at multiples of 8 bytes: the same bits, gaps left alone.
TEST(DeviceTensors, StridedAndUnalignedViews) {
  for (const int dim : {80, 128}) {
    AttentionCase row = decode_case("int8-head");
    row.head_dim = dim;
    const Problem p = make_problem(row);
    const Plan plan = plan_on_device(p);
    const Outputs expected = run_on_device(p, plan);
    for (const std::int64_t gap : {0, 3, 8}) {
      for (const std::int64_t shift : {0, 1, 4}) {  // elements
        DeviceRun device(p, plan);
        const std::int64_t tokens = p.total_q(), q_row = dim + gap, o_row = dim + gap / 4 * 4;
        const Tensor q(row.q_dtype, {shift + tokens * row.q_heads * q_row});
        const Tensor out(row.out_dtype, {shift / 4 * 4 + tokens * row.q_heads * o_row});
        for (std::int64_t i = 0; i < p.q.numel(); ++i) q.set(shift + i / dim * q_row + i % dim, p.q.get(i));
        Uploads uploads;
        const auto place = [&](TensorView& view, const Tensor& memory, std::int64_t first,
                               std::int64_t width) {
          view.data = static_cast<std::uint8_t*>(uploads.add(memory.view()).data) + 2 * first;
          view.strides[0] = row.q_heads * width, view.strides[1] = width;
        };
        place(device.args.q, q, shift, q_row);
        place(device.args.out, out, shift / 4 * 4, o_row);
        device.schedule();
        device.run();
        check_cuda(cudaDeviceSynchronize());
        check_cuda(cudaMemcpy(out.bytes().data(),
                              static_cast<std::uint8_t*>(device.args.out.data) - 2 * (shift / 4 * 4),
                              out.bytes().size(), cudaMemcpyDeviceToHost));
        std::int64_t nans = 0;
        for (std::int64_t i = 0; i < out.numel(); ++i) nans += std::isnan(out.get(i)) ? 1 : 0;
        EXPECT_EQ(nans, out.numel() - expected.out.numel()) << "a gap was written";
        for (std::int64_t i = 0; i < expected.out.numel(); ++i) {
          ASSERT_EQ(out.get(shift / 4 * 4 + i / dim * o_row + i % dim), expected.out.get(i))
              << "gap " << gap << ", shift " << shift << ", element " << i;
        }
      }
    }
    DeviceRun device(p, plan);
    device.schedule();
    device.args.out.data = static_cast<std::uint8_t*>(device.args.out.data) + 4;
    expect_error(kInvalidArgument, {"out starts 4 bytes past"}, [&] { device.run(); });
  }
}

/// Tensors of the host are refused by name before anything is launched.
TEST(DeviceTensors, HostTensorsAreRefused) {
  const Problem p = make_problem(decode_case("int8-head"));
  const DeviceRun device(p, plan_on_device(p));
  device.schedule();
  AttentionArgs args = device.args;
  args.q = p.q.view();
  expect_error(kInvalidArgument, {"q", "cpu", "cuda:0"},
               [&] { run(plan_on_device(p), args, device.space()); });
  args = device.args;
  args.cache.block_table = p.cache->block_table.view();
  expect_error(kInvalidArgument, {"block_table", "cpu", "cuda:0"},
               [&] { run(plan_on_device(p), args, device.space()); });
  EXPECT_TRUE(untouched(device.outputs().out));
  device.run();
  EXPECT_EQ(judge_device(p, device.outputs()), "");
}

}  // namespace
}  // namespace halftone::testing
