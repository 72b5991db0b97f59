// Arithmetic of 8 bits on the GPU against the double oracle of its codes: formats whose codes are K's own and
// such as become codes, every option, any number of rows, rounds, and what lies in the workspace before.
// ctest: 4 parts
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "format/status.h"
#include "testing/case_options.h"
#include "tests/attention/select.h"
#include "tests/cuda/coded_device.h"
#include "tests/cuda/plain_twin.h"
#include "tests/cuda/prefill_options.h"

namespace halftone::testing {
namespace {

/// Which dims have a kernel, of those that are in this build.
TEST_P(DeviceCoded, Dims) {
  const auto is_built = [](int head_dim) {
    return std::ranges::any_of(cuda::kPrefillTable, [head_dim](const cuda::PrefillConfig& c) {
      return c.head_dim == head_dim && cuda::is_built(c);
    });
  };
  const auto expect_served = [&](int head_dim, int value_dims, bool served) {
    AttentionCase row =
        coded_case(own_format(), value_format(), {head_dim, value_dims}, DType::kBFloat16, {{70, 90}});
    if (!is_built(head_dim)) return;
    EXPECT_EQ(serves(make_problem(row)), served) << head_dim << " and " << value_dims;
  };
  for (const CodedDims dims : kCodedDims) {
    expect_served(dims.k, dims.v, fp8() || dims.k != 64);
    expect_served(dims.k, dims.k == 128 ? 64 : dims.k == 512 ? 256 : 512, false);
  }
  for (const int head_dim : {80, 96}) expect_served(head_dim, head_dim, false);
  if (!is_built(512)) return;
  for (const char* v : {value_format(), "int4-g32"}) {
    AttentionCase rotated = coded_case(own_format(), v, {512, 512}, DType::kBFloat16, {{70, 90}});
    rotated.rotate_v = true;
    EXPECT_EQ(serves(make_problem(rotated)), !fp8()) << "no warpgroup has all of O to rotate it: V " << v;
  }
}

TEST_P(DeviceCoded, Formats) {
  int n = 0;
  for (const char* k : {"int8-head", "int8-tensor", "int8-token", "int8-static-head", "int8-token-head-f32",
                        "int8-g64", "int8-g128", "int8-token-head-asym", "int8-tensor-asym", "int4-g32",
                        "int4-row", "fp8", "fp8-token-head", "bf16", "fp16"}) {
    for (const char* v : {"int8-head", "int4-g32", "fp8", "fp16", "int8-static-head-asym", "fp8-static-head",
                          "bf16", "int8-token-head-f32", "fp8-g128-f32"}) {
      for (const CodedDims dims : kCodedDims) {
        if (!fits(k, dims.k) || !fits(v, dims.v)) continue;
        AttentionCase row = coded_case(k, v, dims, kPrefillTypes[n++ % 2], mixed_requests());
        row.rotate_k = n % 5 < 2;
        row.rotate_v = n % 3 == 0;
        row.data = n % 4 == 0 ? Data::kOutlierChannels : Data::kNormal;
        expect_agrees(row);
      }
    }
  }
}

TEST_P(DeviceCoded, EveryOption) {
  const std::pair<const char*, const char*> formats[] = {
      {own_format(), value_format()}, {"int4-g32", "fp8"}, {"fp8", "fp8-static-head"}};
  int n = 0;
  for (const Option& option : options()) {
    for (const auto& [k, v] : formats) {
      for (const CodedDims dims : kCodedDims) {
        AttentionCase row = coded_case(k, v, dims, kPrefillTypes[n++ % 2], mixed_requests());
        row.rotate_k = n % 3 == 1;
        option.set(row);
        row.name += std::string(", ") + option.name;
        expect_agrees(row);
      }
    }
  }
}

/// Q of rotated K is rotated before it becomes codes, in blocks of the largest power of two that divides its
/// dims.
TEST_P(DeviceCoded, RotatedKeys) {
  for (const CodedDims dims : kCodedDims) {
    for (const char* k : {own_format(), "int4-g32"}) {
      AttentionCase row = coded_case(k, value_format(), dims, DType::kBFloat16, {{70, 90}, {20, 130}});
      row.rotate_k = true;
      row.data = Data::kOutlierChannels;
      expect_agrees(row);
    }
  }
}

/// Query heads per KV head, in boxes of whole queries or row by row; pages of every size.
TEST_P(DeviceCoded, GroupsAndPages) {
  int n = 0;
  for (const int group : {1, 3, 4, 5, 16, 65}) {
    for (const CodedDims dims : kCodedDims) {
      AttentionCase row =
          coded_case(own_format(), fp8() && group % 2 == 1 ? "fp8" : "int4-g32", dims, kPrefillTypes[n++ % 2],
                     {{170 / group + 3, 150}, {1, 100}, {2, 0}, {0, 9}, {85 / group, 260}});
      row.q_heads = row.kv_heads * group;
      row.page_size = 16 << n % 5;
      row.table_mode = n % 2 == 0 ? BlockTableMode::kClamped : BlockTableMode::kTrusted;
      row.alibi = group % 2 == 1;
      row.sinks = group % 3 == 0;
      row.name += ", group " + std::to_string(group) + ", pages of " + std::to_string(row.page_size);
      expect_agrees(row);
    }
  }
}

/// A few rows have no other kernel; under every policy.
TEST_P(DeviceCoded, AnyNumberOfRows) {
  for (const SplitPolicy policy :
       {SplitPolicy::kFast, SplitPolicy::kReproducible, SplitPolicy::kBatchInvariant}) {
    for (const int queries : {1, 2, 7, 33}) {
      for (const CodedDims dims : kCodedDims) {
        const std::string v = value_formats()[queries % value_formats().size()];
        AttentionCase row = coded_case("int8-token", v, dims, DType::kBFloat16, {{queries, 2500}, {1, 40}});
        row.policy = policy;
        row.name += ", " + std::to_string(queries) + " queries";
        expect_agrees(row);
      }
    }
  }
}

/// A few heads at a time: with batch_invariant the bits of all heads at once.
TEST_P(DeviceCoded, Rounds) {
  for (const std::string k : {"int8-static-head", "int4-g32", "fp8-static-head"}) {
    for (const std::string v : {"int8-static-head", "fp8-static-head"}) {
      for (const int heads : {1, 2}) {
        const AttentionCase row = rounds_case(coded_case(k, v, {128, 128}, DType::kBFloat16, {}), heads);
        if (!serves(make_problem(row))) continue;
        const bool k_in_pages = fp8() && k == "fp8-static-head";
        const std::int64_t key_bytes =
            k_in_pages ? row.head_dim : std::int64_t{fp8() ? 2 : 3} * row.head_dim + 4;
        expect_rounds(row, heads, key_bytes);
      }
    }
  }
}

/// What the workspace holds before, and pages behind live bytes, are never part of a result.
TEST_P(DeviceCoded, PoisonedMemory) {
  int n = 0;
  for (const char* k : {"int8-head", "int8-tensor", "int4-g32", "bf16", "fp8"}) {
    for (const CodedDims dims : kCodedDims) {
      const std::string v = value_formats()[n++ % value_formats().size()];
      Problem p = make_problem(coded_case(k, v, dims, DType::kBFloat16, mixed_requests()));
      if (!serves(p)) continue;
      const Plan plan = plan_on_device(p);
      const Outputs expected = run_on_device(p, plan);
      for (const int fill : {0x00, 0x7F, 0x7C, 0x3C}) {
        p.cache = refilled(p, {static_cast<std::uint8_t>(fill)});
        const DeviceRun device(p, plan, fill);
        device.schedule();
        device.run();
        expect_same_bits(expected, device.outputs(), p.row.name + ", bytes " + std::to_string(fill));
      }
    }
  }
}

/// Powers of two of a request and head leave its codes of V as they are, and multiply its rows exactly,
/// however far others' are: nothing of other requests and heads counts, nor keys that a window has passed.
TEST_P(DeviceCoded, ValuesOfManySizes) {
  using Pair = std::pair<const char*, const char*>;
  for (const auto& [k, v] : {Pair{"int8-head", "bf16"},
                             {"int4-g32", "int8-head"},
                             {"int8-tensor", "int4-g32-f32"},
                             {"fp8-g64", "fp8-token-head"}}) {
    for (const CodedDims dims : kCodedDims) {
      AttentionCase row =
          coded_case(k, v, dims, DType::kBFloat16, {{40, 900}, {70, 100}, {1, 300}, {33, 33}, {50, 700}});
      row.mask.window_left = 130;
      Problem p = make_problem(row);
      if (!serves(p)) continue;
      SCOPED_TRACE(row.name);
      const Outputs expected = run_on_device(p);
      EXPECT_EQ(judge_device(p, expected), "");
      const auto log2_of = [](std::size_t request, int head) {
        return 2 * static_cast<int>(request) + 3 * head;
      };
      const std::vector<std::int64_t> first = first_tokens(row);
      const std::int64_t width = row.kv_heads * dims.v;
      for (std::size_t r = 0; r < row.requests.size(); ++r) {
        const Request& request = row.requests[r];
        const int passed = request.kv_len - request.q_len - row.mask.window_left;
        for (std::int64_t i = 0; i < request.kv_len * width; ++i) {
          const int log2 = i / width < passed ? 13 : log2_of(r, static_cast<int>(i % width / dims.v));
          const std::int64_t at = first[r] * width + i;
          p.v.set(at, std::ldexp(p.v.get(at), log2));
        }
      }
      p.cache = refilled(p, {0xFF});
      const Outputs outputs = run_on_device(p);
      std::int64_t at = 0;
      for (std::size_t r = 0; r < row.requests.size(); ++r) {
        for (std::int64_t i = 0; i < row.requests[r].q_len * row.q_heads * dims.v; ++i, ++at) {
          const int head = static_cast<int>(i / dims.v % row.q_heads) * row.kv_heads / row.q_heads;
          ASSERT_EQ(outputs.out.get(at), std::ldexp(expected.out.get(at), log2_of(r, head)))
              << "request " << r << ", KV head " << head;
        }
      }
    }
  }
}

/// Entries that name no page: their tokens are left out.
TEST_P(DeviceCoded, BadPagesAreLeftOut) {
  for (const CodedDims dims : kCodedDims) {
    int n = 0;
    for (const auto& [k, column] :
         {std::pair{own_format(), 0}, {own_format(), 2}, {own_format(), 5}, {"bf16", 2}, {"int4-g32", 3}}) {
      const std::string v = value_formats()[n++ % value_formats().size()];
      AttentionCase row = coded_case(k, v, dims, DType::kFloat16, {{70, 100}, {150, 333}, {40, 0}});
      row.mask = {};
      SCOPED_TRACE(row.name + ", page " + std::to_string(column));
      const Problem p = make_problem(row);
      if (!serves(p)) continue;
      const Problem twin = plain_without(p, 1, 64 * column, std::min(333, 64 * column + 64));
      entry(p, 1, column) = -1;
      const Outputs outputs = run_on_device(p);
      EXPECT_EQ(outputs.status.as<std::int32_t>()[0], kStatusBadPage);
      // The twin's K is what f16 holds of K: its codes may differ by one.
      EXPECT_EQ(
          judge(twin, make_reference(twin, false), outputs, fp8() ? 0x1p-5 : 0x1p-9, fp8() ? 0x1p-4 : 0x1p-6),
          "");
    }
  }
}

/// More keys than max_total_kv: those beyond are read nowhere, and rows that a causal mask keeps from them
/// have the bits of a run with room for all.
TEST_P(DeviceCoded, CausalKeysBeyondTheBoundOfAll) {
  constexpr int kStart = 16;  // tokens of a request begin at a multiple of it, in some workspaces
  for (const CodedDims dims : kCodedDims) {
    AttentionCase row =
        coded_case(own_format(), value_format(), dims, DType::kBFloat16, {{70, 100}, {200, 300}, {90, 90}});
    Problem p = make_problem(row);
    if (!serves(p)) continue;
    const Outputs expected = run_on_device(p);
    const std::vector<std::int64_t> first = first_tokens(row);
    for (const std::int64_t most : {17, 101, 133, 262, 415}) {
      SCOPED_TRACE(row.name + ", " + std::to_string(most) + " keys");
      p.problem.max_total_kv = most;
      const Outputs outputs = run_on_device(p);
      EXPECT_EQ(status_of(outputs), kStatusBadKeys);
      std::int64_t query = 0;
      for (std::size_t r = 0; r < row.requests.size(); ++r) {
        const Request& request = row.requests[r];
        for (int q = 0; q < request.q_len; ++q, ++query) {
          const std::int64_t last = first[r] + request.kv_len - request.q_len + q;
          if (last + kStart * static_cast<std::int64_t>(r) >= most) continue;
          const std::int64_t width = std::int64_t{row.q_heads} * dims.v;
          for (std::int64_t i = query * width; i < (query + 1) * width; ++i) {
            ASSERT_EQ(outputs.out.get(i), expected.out.get(i)) << "query " << q << " of request " << r;
          }
        }
      }
    }
  }
}

/// The same bits alone, in company and on other workers.
TEST_P(DeviceCoded, BatchInvariantBits) {
  for (const CodedDims dims : kCodedDims) {
    const std::string v = value_formats()[dims.k == 256 ? 0 : value_formats().size() - 1];
    AttentionCase row = coded_case(own_format(), v, dims, DType::kBFloat16,
                                   {{120, 300}, {1, 90}, {90, 2000}, {0, 50}, {200, 150}, {7, 0}});
    row.policy = SplitPolicy::kBatchInvariant;
    const Problem p = make_problem(row);
    if (!serves(p)) continue;
    const Outputs all = run_on_device(p);
    EXPECT_EQ(judge_device(p, all), "");
    for (const std::size_t r : {0U, 1U, 2U, 4U}) {
      const Problem alone = select(p, {r}, true);
      const Outputs outputs = run_on_device(alone);
      EXPECT_EQ(request_bytes(alone, outputs.out, 0), request_bytes(p, all.out, r)) << "request " << r;
      EXPECT_EQ(request_bytes(alone, outputs.lse, 0), request_bytes(p, all.lse, r)) << "request " << r;
    }
    Problem few = select(p, {0, 1, 2, 3, 4, 5}, false);
    few.problem.workers = 3;
    expect_same_bits(all, run_on_device(few), "on three workers");
  }
}

INSTANTIATE_TEST_SUITE_P(, DeviceCoded, ::testing::Values("half_int8", "fp8"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace halftone::testing
