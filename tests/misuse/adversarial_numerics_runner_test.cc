// Numerics on every backend: NaN where it must not spread, extreme logits and scales, zero and outlier
// groups.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string_view>
#include <tuple>

#include "format/status.h"
#include "testing/cuda/limits.h"
#include "tests/device_rows.h"
#include "tests/misuse/adversarial.h"
#include "tests/on_runners.h"

namespace halftone::testing {
namespace {

/// Pages of 32 tokens and O in fp32; pages of 16 and O in f16.
std::vector<AttentionCase> both_kinds(const std::string& format) {
  AttentionCase row = table_case(format, DType::kFloat32);
  row.requests = {{1, 70}, {3, 33}, {1, 129}};
  row.page_size = 32;
  return {row, table_case(format, DType::kFloat16)};
}

class NumericsOnRunners : public OnRunners {
 protected:
  bool on_cpu() const { return runner().device().type == DeviceType::kCpu; }
};
HALFTONE_ON_EVERY_RUNNER(NumericsOnRunners);

void expect_finite(const Outputs& outputs, const std::string& what) {
  for (const float x : outputs.out.to_floats()) ASSERT_TRUE(std::isfinite(x)) << what;
}

/// Unused pages, slots, scales and mins: zeros, NaN, infinities of each format, noise. Same bits. A GPU takes
/// rows with its universal kernel and with those of its table.
TEST_P(NumericsOnRunners, DeadBytesNeverMatter) {
  int ran = 0, universal = 0;
  for (const AttentionCase& listed : attention_cases()) {
    const bool dims = listed.head_dim == 128 || listed.head_dim == 80;
    const bool wanted = on_cpu() ? dims && listed.name.starts_with("format-")
                                 : listed.requests.size() > 1 && (dims || listed.name.starts_with("mixed-"));
    if (!wanted || listed.plain || listed.lists.top_k != 0 || listed.step.appends)
      continue;  // not one cache of all tokens
    const std::vector<AttentionCase> rows =
        on_cpu() ? std::vector{listed} : std::vector{for_device(listed), for_table(listed)};
    for (const AttentionCase& row : rows) {
      Problem p = make_problem(row);
      const Plan plan = runner().plan(p);
      universal += plan.info().config == kUniversalConfig ? 1 : 0;
      ++ran;
      p.cache = refilled(p, {0x00});
      const Outputs clean = runner().run(p, plan);
      const std::initializer_list<std::uint8_t> patterns[] = {
          {0xFF},       {0x7F, 0x7F}, {0x00, 0x7C},
          {0x80, 0x7F}, {0x80, 0xFF}, {0x12, 0xFC, 0xC0, 0x7F, 0x81, 0x55, 0x7E}};
      for (const auto& pattern : patterns) {
        p.cache = refilled(p, pattern);
        expect_same_bits(clean, runner().run(p, plan), row.name);
      }
    }
  }
  EXPECT_GT(ran - universal, on_cpu() ? 10 : 50);
  EXPECT_GE(universal, on_cpu() ? 0 : 50);
}

/// A NaN scale or 16-bit value of one live token reaches the rows that see it and no other.
TEST_P(NumericsOnRunners, NanInALivePageReachesOnlyItsRequest) {
  for (const std::string& format : formats_of_runners()) {
    for (AttentionCase row : both_kinds(format)) {
      row.requests = {{1, 70}, {3, 33}, {1, 129}};
      const Problem p = make_problem(row);
      const PageLayout layout = page_layout(p.cache->spec);
      const bool sixteen = !p.cache->spec.k_format.quantised();
      if (!sixteen && layout.k_param_bytes == 0) continue;
      const Outputs clean = run(p);
      // Token 0 of request 1, KV head 0: the first bytes of the tile's K rows, or of its K scales.
      std::uint8_t* tile = p.cache->pages.bytes().data() + entry(p, 1, 0) * layout.page_bytes;
      const std::size_t size = p.cache->spec.k_format.scale_dtype == DType::kFloat32 && !sixteen ? 4 : 2;
      std::memset(tile + (sixteen ? 0 : layout.k_param_offset), 0xFF, size);
      const Outputs outputs = run(p);
      EXPECT_EQ(row_bytes(clean.out, 0, 1), row_bytes(outputs.out, 0, 1)) << format;
      EXPECT_EQ(row_bytes(clean.out, 4, 5), row_bytes(outputs.out, 4, 5)) << format;
      EXPECT_TRUE(std::isnan(outputs.out.get(row.q_heads * row.head_dim))) << format;
      EXPECT_FALSE(std::isnan(outputs.out.get((row.q_heads + 4) * row.head_dim)))
          << format << ", other KV head";
      if (on_cpu()) {
        EXPECT_EQ(judge(p, outputs), "") << format;
      }
    }
  }
}

TEST_P(NumericsOnRunners, AllLogitsEqual) {
  for (const std::string& format : formats_of_runners()) {
    for (AttentionCase row : both_kinds(format)) {
      row.data = Data::kConstant;
      const Problem p = make_problem(row);
      const Outputs outputs = run(p);
      expect_finite(outputs, format);
      EXPECT_EQ(judge(p, outputs), "") << format;
    }
  }
}

TEST_P(NumericsOnRunners, ZeroGroupsGiveZeros) {
  for (const std::string& format : formats_of_runners()) {
    for (AttentionCase row : both_kinds(format)) {
      row.data = Data::kZero;
      const Problem p = make_problem(row);
      const reference::Dequantised d = dequantised(*p.cache);
      for (const float x : d.k.as<float>()) ASSERT_EQ(x, 0.0F) << format;
      for (const float x : d.v.as<float>()) ASSERT_EQ(x, 0.0F) << format;
      const Outputs outputs = run(p);
      for (const float x : outputs.out.to_floats()) ASSERT_EQ(x, 0.0F) << format;
      EXPECT_EQ(judge(p, outputs), "") << format;
    }
  }
}

/// Some groups zero, others not: every third group of 32, and all but one value of each 65 groups' ends.
TEST_P(NumericsOnRunners, ZeroGroupsAmongOthers) {
  for (const std::string& format : formats_of_runners()) {
    for (const AttentionCase& row : both_kinds(format)) {
      for (const bool sparse : {false, true}) {
        Problem p = make_problem(row);
        for (std::int64_t i = 0; i < p.k.numel(); i += sparse && i % 32 == 31 ? 65 : 1) {
          if (!sparse && i / 32 % 3 != 0) continue;
          p.k.set(i, 0);
          p.v.set(i, 0);
        }
        p.cache->calibrate(p.k, p.v);
        p.cache = refilled(p, {0xFF});
        const reference::Dequantised d = dequantised(*p.cache);
        for (const float x : d.k.as<float>()) ASSERT_TRUE(std::isfinite(x)) << format;
        const Outputs outputs = run(p);
        expect_finite(outputs, format);
        EXPECT_EQ(judge(p, outputs), "") << format;
      }
    }
  }
}

TEST_P(NumericsOnRunners, OneOutlier) {
  for (const std::string& format : formats_of_runners()) {
    for (const AttentionCase& row : both_kinds(format)) {
      for (const float outlier : {1e4F, -1e4F}) {
        Problem p = make_problem(row);
        p.k.set(1234, outlier);
        p.v.set(4321, outlier);
        p.cache->calibrate(p.k, p.v);
        p.cache = refilled(p, {0xFF});
        const Outputs outputs = run(p);
        expect_finite(outputs, format);
        // Logits of 1e3: one rounding more in fp32 than the yardstick's is allowed where the CPU's rows are
        // short.
        const bool short_on_cpu = on_cpu() && row.out_dtype == DType::kFloat16;
        EXPECT_EQ(short_on_cpu ? halftone::testing::judge(p, make_reference(p), outputs, 0x1p-22)
                               : judge(p, outputs),
                  "")
            << format << ", outlier " << outlier;
      }
    }
  }
}

/// Logits far apart (about +-3000) and huge: a saturated softmax, never NaN.
TEST_P(NumericsOnRunners, SaturatedSoftmax) {
  for (const float scale : {10.0F, 1e4F, 1e30F}) {
    if (scale > 1e4F && !on_cpu()) continue;  // only the CPU promises as much
    for (const SplitPolicy policy : {SplitPolicy::kReproducible, SplitPolicy::kBatchInvariant}) {
      for (AttentionCase row : both_kinds("bf16")) {
        for (const int workers : {0, 9}) {
          row.scale = scale;
          row.policy = policy;
          row.workers = workers;
          const Problem p = make_problem(row);
          const Outputs outputs = run(p);
          expect_finite(outputs, "scale " + std::to_string(scale));
          if (scale < 100 && on_cpu()) {
            EXPECT_EQ(judge(p, outputs), "");
          }
        }
      }
    }
  }
}

TEST_P(NumericsOnRunners, RowsMaskedOutByTheWindow) {
  for (const char* format : {"bf16", "int8-head", "int4-row"}) {
    for (AttentionCase row : both_kinds(format)) {
      row.requests = {{30, 10}, {1, 100}};
      row.mask = {.window_left = 4,
                  .window_right = 4};  // queries 0 to 15 of request 0 stand before every key
      const Problem p = make_problem(row);
      const Outputs outputs = run(p);
      EXPECT_EQ(judge(p, outputs), "") << format;
      expect_empty_rows(p, outputs, 0, 16);
    }
  }
}

TEST_P(NumericsOnRunners, ExtremeWindows) {
  for (const int window : {0, 1, 1 << 30, std::numeric_limits<int>::max()}) {
    for (const bool causal : {false, true}) {
      for (AttentionCase row : both_kinds("int8-head")) {
        row.requests = {{1, 100}, {7, 5}, {3, 300}};
        row.cu_q = true;
        row.mask = {.causal = causal, .window_left = window, .window_right = window};
        const Problem p = make_problem(row);
        const Outputs outputs = run(p);
        EXPECT_EQ(judge(p, outputs), "") << "window " << window;
        EXPECT_EQ(outputs.status.as<std::int32_t>()[0], 0) << "window " << window;
      }
    }
  }
}

/// Same shapes, plan and schedule, another static scale: the new result.
TEST_P(NumericsOnRunners, NewStaticScaleGivesTheNewResult) {
  for (AttentionCase row : both_kinds("int8-tensor")) {
    if (row.out_dtype == DType::kFloat16) row.out_dtype = DType::kBFloat16;  // twice the value must fit
    const Problem p = make_problem(row);
    const PlacedRun calls(runner(), p);
    calls.schedule();
    calls.run();
    const Outputs before = calls.outputs();
    expect_same_bits(run(p), before, "first scale");
    p.cache->v_scale.set(0, p.cache->v_scale.get(0) * 2);
    calls.write(cache_of(calls.args).v_scale.scale, p.cache->v_scale);
    calls.run();
    const Outputs after = calls.outputs();
    for (std::int64_t i = 0; i < before.out.numel(); ++i) ASSERT_EQ(after.out.get(i), 2 * before.out.get(i));
    EXPECT_EQ(judge(p, after), "");
    p.cache->k_scale.set(0, p.cache->k_scale.get(0) * 0.5F);
    calls.write(cache_of(calls.args).k_scale.scale, p.cache->k_scale);
    calls.run();
    EXPECT_EQ(judge(p, calls.outputs()), "");
  }
}

/// Static scales that are none are refused by name, or reported, by attention and by append.
TEST_P(NumericsOnRunners, BadStaticScales) {
  for (const char* format : {"int8-static-head", "fp8", "fp8-static-head", "int4-static-head-sym",
                             "int8-tensor", "int8-tensor-asym"}) {
    for (const int q_len : {1, 4, 12}) {
      AttentionCase row = table_case(format, DType::kFloat16);
      row.requests = uniform_requests(2, q_len, 70);
      const Problem p = make_problem(row);
      const PlacedRun calls(runner(), p);
      calls.schedule();
      const PagedKv& cache = cache_of(calls.args);
      const Tensor cu = Tensor::of({3}, std::vector<std::int32_t>{0, 1, 1});
      AppendArgs host;
      host.k = p.k.view(), host.v = p.v.view();
      host.k.shape[0] = host.v.shape[0] = 1;
      host.cu_seqlens = cu.view();
      const std::unique_ptr<Place> place = runner().place();
      AppendArgs args = place->add(host);
      args.status = calls.args.status;
      calls.write(cache.lengths, Tensor::of({2}, std::vector<std::int32_t>{0, 0}));
      const auto expect_found = [&](std::string_view bad) {
        for (const bool appends : {false, true}) {
          SCOPED_TRACE(::testing::Message() << format << ", " << q_len << " queries, " << appends);
          const auto call = [&] { appends ? append(cache, args) : calls.run(); };
          if (!bad.empty() && runner().checks_values()) {
            expect_error(ErrorCode::kInvalidArgument, {bad}, call);
            continue;
          }
          calls.write(args.status, Tensor::of({1}, std::vector<std::int32_t>{0}));
          call();
          EXPECT_EQ(calls.outputs().status.as<std::int32_t>()[0], bad.empty() ? 0 : kStatusBadScale);
        }
      };
      for (const auto& [name, host_scale, scale] :
           {std::tuple{"k_scale", &p.cache->k_scale, &cache.k_scale.scale},
            std::tuple{"v_scale", &p.cache->v_scale, &cache.v_scale.scale}}) {
        const Tensor good = host_scale->clone();
        for (const float bad : {kNan, kInf, 0.0F, -1.0F, 1e-40F}) {
          const Tensor values = good.clone();
          values.set(values.numel() - 1, bad);
          calls.write(*scale, values);
          expect_found(name);
        }
        calls.write(*scale, good);
      }
      expect_found("");
    }
  }
}

/// Logits of exactly +-65504, alone and mixed.
TEST_P(NumericsOnRunners, ExtremeLogits) {
  for (const int pattern : {0, 1, 2}) {
    AttentionCase row = table_case("fp16", DType::kFloat16);
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
    EXPECT_EQ(judge(p, run(p)), "") << "pattern " << pattern;
  }
}

/// Any number of workers, fewer and more than there are tiles.
TEST_P(NumericsOnRunners, AnyNumberOfSplits) {
  for (const int workers : {1, 2, 3, 17, 133, 1000}) {
    for (const SplitPolicy policy : {SplitPolicy::kReproducible, SplitPolicy::kBatchInvariant}) {
      AttentionCase row = table_case("int4-g32", DType::kFloat16);
      row.requests = {{1, 9000}, {1, 40}};
      row.workers = workers;
      row.policy = policy;
      const Problem p = make_problem(row);
      EXPECT_EQ(judge(p, run(p)), "") << workers << " workers";
    }
  }
}

/// V up to kMaxScaledV where its scales are stored, and far beyond where they are static, for few and for
/// many rows: P times a stored scale is f16.
TEST_P(NumericsOnRunners, LargeScalesOfV) {
  for (const char* format : {"int8-head", "fp8-token-head", "int4-row"}) {
    for (const int q_len : {1, 2, 4, 6, 8}) {
      AttentionCase row = table_case(format, DType::kFloat16);
      row.q_heads = 8, row.kv_heads = 1, row.head_dim = 128;
      row.out_dtype = DType::kBFloat16;
      row.requests = {{q_len, 300}, {q_len, 1000}};
      Problem p = make_problem(row);
      float largest = 0.0F;
      for (const float x : p.v.to_floats()) largest = std::max(largest, std::abs(x));
      const float wanted = p.cache->spec.v_format.dynamic_scale() ? kMaxScaledV : 5e5F;
      for (std::int64_t i = 0; i < p.v.numel(); ++i) p.v.set(i, p.v.get(i) * (wanted / largest));
      p.cache = refilled(p, {0xFF});
      const Outputs outputs = run(p);
      expect_finite(outputs, format);
      EXPECT_EQ(judge(p, outputs), "") << format << ", " << q_len << " queries";
    }
  }
}

/// A key with half of the probability, and 20,000 that share the other half: P times a stored scale of V is
/// far below one in f16, and must not be lost.
TEST_P(NumericsOnRunners, ManySmallProbabilities) {
  constexpr int kKeys = reference::kSanitized ? 2000 : 20000;
  for (const char* format :
       {"fp8-token-head", "int8-token", "int8-g64", "int4-g32", "int4-row", "fp8", "fp16"}) {
    for (const int q_len : {1, 2, 6}) {
      AttentionCase row = table_case(format, DType::kBFloat16);
      row.q_heads = 8, row.kv_heads = 1;
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
      const Outputs outputs = run(p);
      const Reference truth = make_reference(p);
      for (std::int64_t i = 0; i < outputs.out.numel(); ++i) {
        const double want = truth.out[static_cast<std::size_t>(i)];
        ASSERT_NEAR(outputs.out.get(i), want, 0.01 * want) << format << ", " << q_len << " queries";
      }
    }
  }
}

}  // namespace
}  // namespace halftone::testing
