// Numerics: NaN and infinity where they must not matter and where they must, extreme logits, zero and outlier
// groups.
#include <cstring>

#include "tests/misuse/adversarial.h"

namespace halftone::testing {
namespace {

using enum ErrorCode;

AttentionCase small(const std::string& format) {
  AttentionCase row;
  row.requests = {{1, 70}, {3, 33}, {1, 129}};
  row.k_format = format;
  row.page_size = 32;
  row.out_dtype = DType::kFloat32;
  return row;
}

Problem plain_problem(DType dtype, bool causal) {
  AttentionCase row;
  row.plain = dtype;
  row.out_dtype = DType::kFloat32;
  row.requests = {{1, 40}, {50, 90}, {2, 20}};
  row.mask.causal = causal;
  return make_problem(row);
}

/// A NaN key reaches the rows that see it; a NaN value reaches one dim of them; a NaN query one row.
TEST(Numerics, NanInALiveRowReachesOnlyItsDependants) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const bool causal : {false, true}) {
      Problem p = plain_problem(dtype, causal);
      const std::int64_t width = p.row.kv_heads * p.row.head_dim;
      p.k.set((40 + 60) * width + 5, kNan);                   // request 1, key 60, KV head 0
      p.v.set((40 + 70) * width + p.row.head_dim + 9, kNan);  // request 1, key 70, KV head 1
      p.q.set((1 + 10) * p.row.q_heads * p.row.head_dim + 7 * p.row.head_dim, kNan);
      const Outputs outputs = run_problem(p);
      EXPECT_EQ(judge(p, make_reference(p), outputs), "") << dtype_name(dtype);
      EXPECT_TRUE(std::isfinite(outputs.out.get(0)));
      const std::int64_t last = (50 * p.row.q_heads) * p.row.head_dim;  // query 49 of request 1, head 0
      EXPECT_TRUE(std::isnan(outputs.out.get(last)));
      const std::int64_t second_head = last + 4 * p.row.head_dim;
      EXPECT_TRUE(std::isnan(outputs.out.get(second_head + 9)));
      EXPECT_FALSE(std::isnan(outputs.out.get(second_head + 8)));
    }
  }
}

/// Scales of V in live pages that no append() makes: some negative, some a thousand times the others. Tokens
/// whose scales differ that much in one chunk, or whose weights are below 0, need other sums than the rest.
TEST(Numerics, OddScalesOfVInLivePages) {
  for (const std::string& format :
       {std::string("int8-g32"), std::string("int4-g32"), std::string("int8-token"),
        std::string("int8-token-asym-f32"), std::string("int4-g64-sym"), std::string("int8-g64-asym")}) {
    for (const DType out : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      for (const float factor : {-1.0F, 1024.0F, -1024.0F, -kNan}) {
        AttentionCase row = small(format);
        row.out_dtype = out;
        row.requests = {{1, 300}, {3, 33}, {2, 129}};
        const Problem p = make_problem(row);
        const PageLayout layout = page_layout(p.cache->spec);
        const bool f32 = p.cache->spec.v_format.scale_dtype == DType::kFloat32;
        const std::int64_t scales =
            layout.v_param_bytes / (f32 ? 4 : 2) / (p.cache->spec.v_format.asymmetric ? 2 : 1);
        const std::int64_t tiles =
            static_cast<std::int64_t>(p.cache->pages.bytes().size()) / layout.tile_bytes;
        for (std::int64_t i = 0; i < tiles * scales; i += factor == factor ? 7 : 977) {
          std::uint8_t* at = p.cache->pages.bytes().data() + i / scales * layout.tile_bytes +
                             layout.v_param_offset + i % scales * (f32 ? 4 : 2);
          if (f32) {
            float x;
            std::memcpy(&x, at, 4);
            x = factor != factor ? factor : x * factor;
            std::memcpy(at, &x, 4);
          } else {  // 2^10 is ten steps of the exponent
            std::uint16_t x;
            std::memcpy(&x, at, 2);
            if (factor != factor) x = 0xFFFF;
            if (factor < 0) x = static_cast<std::uint16_t>(x ^ 0x8000);
            if (std::abs(factor) > 1 && (x & 0x7c00) < 0x4000) x = static_cast<std::uint16_t>(x + (10 << 10));
            std::memcpy(at, &x, 2);
          }
        }
        EXPECT_EQ(judge(p, make_reference(p), run_problem(p)), "") << format << ", factor " << factor;
      }
    }
  }
}

/// Infinities and huge values that a mask hides change no bit.
TEST(Numerics, MaskedKeysChangeNoBit) {
  for (const float poison : {kNan, kInf, -kInf, 3e38F, -3e38F}) {
    for (const Mask mask :
         {Mask{.causal = true, .window_left = 5}, Mask{.window_left = 3, .window_right = 2}}) {
      AttentionCase row;
      row.plain = row.q_dtype = row.out_dtype = DType::kFloat32;
      row.requests = {{1, 100}};
      row.mask = mask;
      const Problem p = make_problem(row);
      const Outputs clean = run_problem(p);
      const std::int64_t width = row.kv_heads * row.head_dim;
      for (std::int64_t e = 0; e < (99 - mask.window_left) * width; ++e) {
        p.k.set(e, poison);
        p.v.set(e, poison);
      }
      expect_same_bits(clean, run_problem(p), "window");
    }
  }
  // Causal prefill: the keys after a query are hidden from it, whatever they are.
  for (const float poison : {kNan, kInf, -kInf, 3e38F}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      AttentionCase row;
      row.plain = dtype;
      row.requests = {{64, 64}};
      row.mask.causal = true;
      const Problem p = make_problem(row);
      const Outputs clean = run_problem(p);
      const std::int64_t width = row.kv_heads * row.head_dim;
      for (std::int64_t e = 40 * width; e < 64 * width; ++e) {
        p.k.set(e, poison);
        p.v.set(e, poison);
      }
      const Outputs outputs = run_problem(p);
      EXPECT_EQ(row_bytes(clean.out, 0, 40), row_bytes(outputs.out, 0, 40)) << poison;
      EXPECT_EQ(row_bytes(clean.lse, 0, 40), row_bytes(outputs.lse, 0, 40)) << poison;
    }
  }
}

/// Logits of exactly +-65504, alone and mixed.
TEST(Numerics, LogitsOfFp16Extremes) {
  for (const int pattern : {0, 1, 2}) {
    AttentionCase row;
    row.plain = row.q_dtype = row.out_dtype = DType::kFloat32;
    row.requests = {{2, 200}};
    row.scale = 1;
    const Problem p = make_problem(row);
    for (float& x : p.q.as<float>()) x = 0;
    for (float& x : p.k.as<float>()) x = 0;
    for (std::int64_t i = 0; i < 2 * row.q_heads; ++i) p.q.set(i * row.head_dim, 65504);
    for (std::int64_t t = 0; t < 200; ++t) {
      for (int h = 0; h < row.kv_heads; ++h) {
        const float sign = pattern == 0 ? 1.0F : pattern == 1 ? -1.0F : t % 2 == 0 ? 1.0F : -1.0F;
        p.k.set((t * row.kv_heads + h) * row.head_dim, sign);
      }
    }
    EXPECT_EQ(judge(p, make_reference(p), run_problem(p)), "") << "pattern " << pattern;
  }
}

/// Values that only fp32 or bf16 can hold, and scales near the ends of f16.
TEST(Numerics, ExtremeMagnitudes) {
  for (const std::string& format : typical_formats()) {
    for (const float magnitude : {1e-30F, 1e-6F, 1e3F}) {
      Problem p = make_problem(small(format));
      for (std::int64_t i = 0; i < p.v.numel(); ++i) p.v.set(i, p.v.get(i) * magnitude);
      p.cache->calibrate(p.k, p.v);
      p.cache = refilled(p, {0xFF});
      const Outputs outputs = run_problem(p);
      for (const float x : outputs.out.as<float>())
        ASSERT_TRUE(std::isfinite(x)) << format << " " << magnitude;
      EXPECT_EQ(judge(p, make_reference(p), outputs), "") << format << ", magnitude " << magnitude;
    }
  }
}

/// In every typical format; AppendChecks has the limits, and the status where values cannot be looked at.
TEST(Numerics, NonFiniteInputToAppendIsRefused) {
  for (const std::string& format : typical_formats()) {
    for (const float bad : {kNan, kInf, -kInf}) {
      for (const bool in_k : {true, false}) {
        const Problem p = make_problem(small(format));
        const Tensor before = p.cache->pages.clone();
        std::vector<int> counts;
        for (std::int32_t& n : p.cache->lengths.as<std::int32_t>()) {
          counts.push_back(n);
          n = 0;
        }
        (in_k ? p.k : p.v).set(777, bad);
        expect_error(kInvalidArgument, {in_k ? "k[" : "v["}, [&] { p.cache->append(counts, p.k, p.v); });
        EXPECT_TRUE(same_bytes(before, p.cache->pages)) << format;
      }
    }
  }
}

TEST(Numerics, BadStaticScalesAndMinsAreRefused) {
  for (const char* format : {"int8-tensor", "fp8-static-head", "int4-static-head-sym", "int8-tensor-asym"}) {
    for (const float bad : {0.0F, -1.0F, kNan, kInf}) {
      const Problem p = make_problem(small(format));
      p.cache->k_scale.set(0, bad);
      expect_error(kInvalidArgument, {"k_scale"}, [&] { (void)dequantised(*p.cache); });
    }
  }
  const Problem p = make_problem(small("int8-tensor-asym"));
  const Prepared ready(p);
  p.cache->k_min.set(0, kNan);
  ready.refuses(kInvalidArgument, {"k_scale.min"}, [](AttentionArgs&) {});
}

TEST(Numerics, BadScaleAndSoftcapAreRefused) {
  const Problem p = make_problem(small("bf16"));
  for (const float bad : {-1.0F, kNan, kInf, -kInf}) {
    AttentionProblem a = p.problem;
    a.scale = bad;
    expect_error(kInvalidArgument, {"scale"}, [&] { (void)plan(a); });
    a = p.problem;
    a.softcap = bad;
    expect_error(kInvalidArgument, {"softcap"}, [&] { (void)plan(a); });
  }
  for (const int bad : {-2, std::numeric_limits<int>::min()}) {
    AttentionProblem a = p.problem;
    a.mask.window_left = bad;
    expect_error(kInvalidArgument, {"window_left", std::to_string(bad)}, [&] { (void)plan(a); });
    a = p.problem;
    a.mask.window_right = bad;
    expect_error(kInvalidArgument, {"window_right", std::to_string(bad)}, [&] { (void)plan(a); });
  }
}

/// Sinks at the ends of their type, and a softcap near 0.
TEST(Numerics, ExtremeOptions) {
  for (const float sink : {-1e30F, -100.0F, 0.0F, 100.0F, 1e30F}) {
    AttentionCase row = small("int8-head");
    row.sinks = true;
    row.workers = 5;
    const Problem p = make_problem(row);
    for (float& x : p.sinks.as<float>()) x = sink;
    EXPECT_EQ(judge(p, make_reference(p), run_problem(p)), "") << "sink " << sink;
  }
  AttentionCase row = small("int8-head");
  row.softcap = 1e-3F;
  const Problem p = make_problem(row);
  EXPECT_EQ(judge(p, make_reference(p), run_problem(p)), "") << "tiny softcap";
}

}  // namespace
}  // namespace halftone::testing
