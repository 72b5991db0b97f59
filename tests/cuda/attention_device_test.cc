// Decode attention on the GPU against the double oracle: the shared case table.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "tests/cuda/adversarial_device.h"
#include "tests/cuda/agreement.h"

namespace halftone::testing {
namespace {

/// The case table in parts, every eighth row each, since the whole of it takes minutes.
class DeviceCaseTable : public ::testing::TestWithParam<int> {
 public:
  static constexpr int kParts = 8;
};

TEST_P(DeviceCaseTable, AgreesWithTheOracle) {
  RowCounts counts;
  const std::vector<AttentionCase> rows = attention_cases();
  for (std::size_t i = static_cast<std::size_t>(GetParam()); i < rows.size(); i += kParts) {
    counts.run(rows[i]);
  }
  RecordProperty("table", counts.table);
  RecordProperty("universal", counts.universal);
  EXPECT_GE(counts.table * kParts, 150);
  EXPECT_GE(counts.universal * kParts, 100);
  EXPECT_GE(counts.latent * kParts, 250);
}

TEST(DeviceAttention, TheCaseTableHasPlainTensors) {
  int served = 0;
  for (const AttentionCase& row : attention_cases()) {
    served += row.plain && cuda_runner().serves(make_problem(row)) ? 1 : 0;
  }
  EXPECT_GE(served, 10);
}

INSTANTIATE_TEST_SUITE_P(Parts, DeviceCaseTable, ::testing::Range(0, DeviceCaseTable::kParts));

/// Every pair of formats of the case table, in units of 8 and of 16 rows, rotated and not.
TEST(DeviceAttention, MixedFormats) {
  for (const AttentionCase& listed : attention_cases()) {
    if (listed.name.find("mixed-") != 0) continue;
    for (const int q_heads : {8, 16}) {
      for (const bool rotated : {false, true}) {
        AttentionCase row = listed;
        row.requests = {{1, 700}, {1, 77}, {1, 16}, {1, 1}};
        row.q_heads = q_heads;
        row.kv_heads = 1;
        row.rotate_k = row.rotate_v = rotated;
        row.slack = 0;
        expect_agrees(row);
      }
    }
  }
}

/// Units of 24 to 64 rows, in which four warps divide a piece of 64 tokens: every format, lengths around the
/// ends of tiles and pieces, and everything that changes logits.
TEST(DeviceAttention, ManyRows) {
  struct Variant {
    const char* name;
    Mask mask;
    float softcap;
    bool alibi, rotated;
    DType q_dtype;
    bool channels = false;
  };
  const Variant variants[] = {
      {"plain", {}, 0, false, false, DType::kBFloat16},
      {"causal", {.causal = true}, 0, false, false, DType::kFloat16},
      {"window", {.causal = true, .window_left = 100, .window_right = -1}, 0, false, false, DType::kBFloat16},
      {"biased", {.causal = true}, 20, true, false, DType::kBFloat16},
      {"rotated", {.causal = true}, 0, false, true, DType::kFloat16},
      {"channels", {.causal = true}, 0, false, false, DType::kBFloat16, true},
  };
  int seed = 5000;
  for (const char* format : {"bf16", "fp16", "fp8", "fp8-token", "int8-tensor", "int8-head", "int8-token",
                             "int4-token", "int4-row", "int4-g32", "int4-g64"}) {
    for (const auto& [q_heads, q_len] : {std::pair{8, 3}, {16, 2}, {16, 3}, {11, 5}, {32, 2}}) {
      for (const Variant& variant : variants) {
        if (variant.channels && !parse_format(format).quantised()) continue;
        AttentionCase row;
        row.name = std::string(format) + ", " + std::to_string(q_heads) + " x " + std::to_string(q_len) +
                   " rows, " + variant.name;
        for (const int keys : {5, 16, 63, 64, 65, 130, 191, 257, 700}) {
          row.requests.push_back({q_len, keys});
        }
        row.q_heads = q_heads;
        row.kv_heads = 1;
        row.k_format = format;
        row.page_size = 16 << seed % 4;
        row.mask = variant.mask;
        row.softcap = variant.softcap;
        row.alibi = variant.alibi;
        row.rotate_k = row.rotate_v = variant.rotated;
        row.offset_k = row.scale_k = variant.channels;
        row.q_dtype = variant.q_dtype;
        row.out_dtype = DType::kFloat16;
        row.workers = seed % 3 * 7;
        row.seed = static_cast<std::uint64_t>(seed++);
        expect_agrees(row);
      }
    }
  }
}

/// The bits of a row come from it alone: what it is changes no other row of its unit, of any number of rows.
TEST(DeviceAttention, RowsOfAUnitAreIndependent) {
  int seed = 5500;
  for (const char* format : {"bf16", "fp8", "int8-head", "int8-token", "int4-row", "int4-g32"}) {
    for (const auto& [q_heads, q_len] : {std::pair{8, 1}, {16, 1}, {8, 3}, {16, 2}, {16, 3}, {32, 2}}) {
      AttentionCase row;
      row.name = std::string(format) + ", " + std::to_string(q_heads * q_len) + " rows";
      row.requests = {{q_len, 700}, {q_len, 77}};
      row.q_heads = q_heads;
      row.kv_heads = 1;
      row.k_format = format;
      row.key_slack = 1 << 20;  // no units of 8
      row.q_dtype = seed % 2 == 0 ? DType::kBFloat16 : DType::kFloat16;
      row.out_dtype = DType::kFloat16;
      row.seed = static_cast<std::uint64_t>(seed++);
      SCOPED_TRACE(row.name);
      Problem p = make_problem(row);
      const Plan plan = plan_on_device(p);
      const Outputs before = run_on_device(p, plan);
      EXPECT_EQ(judge_device(p, before), "");
      const std::int64_t dim = row.head_dim, changed = q_heads * q_len - 3;
      for (const float size : {30.0F, 0.0F}) {
        for (std::int64_t i = changed * dim; i < (changed + 1) * dim; ++i)
          p.q.set(i, size * (0.1F + p.q.get(i)));
        const Outputs after = run_on_device(p, plan);
        for (std::int64_t i = 0; i < after.out.numel(); ++i) {
          if (i / dim == changed) continue;
          ASSERT_EQ(after.out.get(i), before.out.get(i)) << "row " << i / dim;
        }
        for (std::int64_t i = 0; i < after.lse.numel(); ++i) {
          if (i == changed) continue;
          ASSERT_EQ(after.lse.get(i), before.lse.get(i)) << "row " << i;
        }
      }
    }
  }
}

/// Several units of 32 rows, of formats and dims that have them, and of 16 where those do not.
TEST(DeviceAttention, UnitsOf32Rows) {
  int seed = 5700;
  for (const auto& [format, head_dim] : {std::pair{"fp8", 64},
                                         {"fp8-token", 96},
                                         {"fp8", 192},
                                         {"fp8-token", 256},
                                         {"int8-g32", 128},
                                         {"int8-g64", 128},
                                         {"int8-head", 256},
                                         {"int4-g32", 64}}) {
    for (const bool plain : {true, false}) {
      AttentionCase row;
      row.name = std::string(format) + ", head_dim " + std::to_string(head_dim);
      row.requests = {{3, 300}, {3, 77}, {2, 64}, {1, 1}};
      row.q_heads = 32;
      row.kv_heads = 1;
      row.head_dim = head_dim;
      row.k_format = format;
      row.mask.causal = true;
      if (!plain) row.mask.window_left = 50, row.softcap = 20, row.alibi = true;
      row.seed = static_cast<std::uint64_t>(seed++);
      expect_agrees(row);
    }
  }
}

/// Tiles that are not whole lines of L2, of one format and of two, in pages of one tile and of several.
TEST(DeviceAttention, TilesBesideLines) {
  struct Kind {
    const char *k, *v;
    int head_dim;
  };
  int seed = 5800;
  for (const Kind& kind : {Kind{"fp8-token", "fp8-token", 64},
                           {"int8-g32", "int8-g32", 96},
                           {"int8-head", "int8-head", 128},
                           {"int8-head", "int4-g32", 128},
                           {"bf16", "int8-head", 128},
                           {"int8-head", "int8-head", 192},
                           {"int8-head", "int8-head", 256},
                           {"fp8-token-head", "fp8-token-head", 256},
                           {"int8-head", "int8-head", 512}}) {
    for (const int page_size : {16, 32, 64}) {
      for (const int q_heads : {8, 16}) {
        AttentionCase row;
        row.name = std::string(kind.k) + ":" + kind.v + ", head_dim " + std::to_string(kind.head_dim) +
                   ", pages of " + std::to_string(page_size) + ", " + std::to_string(q_heads) + " rows";
        row.requests = {{1, 700}, {1, 77}, {1, 16}, {1, 1}};
        row.q_heads = q_heads;
        row.kv_heads = 1;
        if (q_heads > 8) row.key_slack = 1 << 20;  // no units of 8
        row.head_dim = kind.head_dim;
        row.k_format = kind.k;
        row.v_format = kind.v;
        row.page_size = page_size;
        row.workers = seed % 3 * 7;
        row.seed = static_cast<std::uint64_t>(seed++);
        expect_agrees(row);
      }
    }
  }
}

/// Rows of Q that are zero, tiny and large beside others, and tokens of K that f16 does not hold.
TEST(DeviceAttention, ManyRowsOfAnySize) {
  int seed = 5600;
  for (const char* format : {"fp8", "int8-head", "int4-row", "int4-g32", "int4-g64"}) {
    for (const bool rotated : {false, true}) {
      AttentionCase row;
      row.name = std::string(format) + (rotated ? ", rotated" : "");
      row.requests = {{3, 300}, {3, 70}};
      row.q_heads = 16;
      row.kv_heads = 1;
      row.k_format = format;
      row.key_slack = 1 << 20;  // no units of 8
      row.mask.causal = true;
      row.rotate_k = rotated;
      row.seed = static_cast<std::uint64_t>(seed++);
      SCOPED_TRACE(row.name);
      const bool large = row.k_format.starts_with("int4") && !rotated;
      Problem p = make_problem(row);
      for (std::int64_t i = 0; i < p.q.numel(); ++i) {
        constexpr float kSizes[] = {1.0F, 0.0F, 1e-30F, 1e-3F, 30.0F};
        p.q.set(i, kSizes[i / 128 % 5] * (large ? 1e-4F : 1.0F) * p.q.get(i));
      }
      for (std::int64_t i = 0; large && i < p.k.numel(); ++i) {
        if (i / 128 % 3 == 0) p.k.set(i, 3e4F * std::abs(p.k.get(i)));
      }
      p.cache = refilled(p, {0xFF});
      const Outputs outputs = run_on_device(p);
      EXPECT_EQ(judge_device(p, outputs), "");
      EXPECT_EQ(status_of(outputs), 0);
    }
  }
}

/// Items of a worker that come in short and in long pieces, in any order, with odd numbers of short ones, and
/// a window that begins inside of a tile's page.
TEST(DeviceAttention, ShortAndLongItems) {
  for (const char* format : {"int4-g32", "int4-token", "int8-head", "fp8"}) {
    for (const int head_dim : {64, 128}) {
      for (const int workers : {1, 2, 3}) {
        for (const int window : {-1, 6000}) {
          AttentionCase row;
          row.k_format = format;
          row.head_dim = head_dim;
          row.q_heads = 4;
          row.kv_heads = 1;
          row.workers = workers;
          row.mask = {.causal = true, .window_left = window};
          row.cu_q = true;
          for (const int keys : {40, 5000, 16, 4096, 4095, 33, 9001, 0, 300, 20000, 7})
            row.requests.push_back({1, keys});
          row.name = std::string(format) + ", " + std::to_string(head_dim) + ", " + std::to_string(workers);
          expect_agrees(for_table(row));
        }
      }
    }
  }
}

/// Captured at length 1, replayed at full length: eager's bits.
TEST(DeviceAttention, GraphReplayAtOtherLengths) {
  for (const char* name : {"format-int4-g32-d128", "format-int4-g64-f32-d128"}) {
    SCOPED_TRACE(name);
    AttentionCase row = for_table(find_case(name));
    row.requests = {{1, 131072}, {1, 4096}, {1, 100}};
    const Problem p = make_problem(row, Fill::kTiled);
    const Plan plan = plan_on_device(p);
    const Outputs expected = run_on_device(p, plan);

    const DeviceRun device(p, plan);
    const std::vector<std::int32_t> ones(3, 1);
    void* lengths = device.args.lengths.kv_lengths.data;
    check_cuda(cudaMemcpy(lengths, ones.data(), 12, cudaMemcpyHostToDevice));
    const CapturedGraph graph(
        [&](cudaStream_t stream) {
          device.schedule(stream);
          device.run(stream);
        },
        cudaStreamDefault);
    graph.replay();
    const std::vector<std::int32_t> full = {131072, 4096, 100};
    check_cuda(cudaMemcpy(lengths, full.data(), 12, cudaMemcpyHostToDevice));
    graph.replay();
    const Outputs outputs = device.outputs();
    EXPECT_TRUE(same_bytes(expected.out, outputs.out));
    EXPECT_TRUE(same_bytes(expected.lse, outputs.lse));
  }
}

}  // namespace
}  // namespace halftone::testing
