#include "testing/cases.h"

#include <algorithm>
#include <array>
#include <stdexcept>

#include "testing/case_options.h"
#include "testing/channel_cases.h"
#include "testing/flashmla_cases.h"
#include "testing/latent_cases.h"
#include "testing/step.h"

namespace halftone::testing {
namespace {

const std::vector<std::vector<Request>>& request_sets() {
  static const std::vector<std::vector<Request>> sets = {
      {{1, 1}, {1, 15}, {1, 16}, {1, 17}, {1, 63}, {1, 64}, {1, 65}, {1, 200}},
      {{1, 37}, {5, 64}, {0, 10}, {3, 0}, {17, 130}, {1, 1}},
      {{70, 70}, {33, 100}},
      {{20, 7}, {1, 128}, {2, 2}, {4, 300}},
      {{1, 600}, {1, 1025}},
      {{1, 127}, {1, 128}, {1, 129}, {2, 255}, {2, 256}, {2, 257}},
  };
  return sets;
}

constexpr std::array<std::array<int, 2>, 6> kHeads = {{{8, 2}, {4, 4}, {6, 2}, {4, 1}, {5, 5}, {16, 2}}};

/// Row `n`, every option in a cycle of its own length.
AttentionCase cycled_row(int n) {
  const auto i = static_cast<std::size_t>(n);
  AttentionCase row;
  row.page_size = kPages[i % kPages.size()];
  row.mask = kMasks[i % kMasks.size()];
  row.q_dtype = kFloats[i % 3];
  row.out_dtype = kFloats[i / 3 % 3];
  row.requests = request_sets()[i * 5 % request_sets().size()];
  row.q_heads = kHeads[i / 5 % kHeads.size()][0];
  row.kv_heads = kHeads[i / 5 % kHeads.size()][1];
  row.policy = kPolicies[i / 4 % 3];
  row.workers = n % 5 == 0 ? 7 : 0;
  row.softcap = n % 4 == 1 ? 20.0F : 0.0F;
  row.alibi = n % 5 == 2;
  row.sinks = n % 3 == 1;
  row.rotate_k = n % 5 >= 3;
  row.rotate_v = n % 7 >= 5;
  row.data = n % 4 == 2 ? Data::kOutlierChannels : n % 4 == 3 ? Data::kSinkToken : Data::kNormal;
  row.cu_q = n % 2 == 0;
  return row;
}

AttentionCase format_row(const std::string& format, int dim, int n) {
  const auto i = static_cast<std::size_t>(n);
  AttentionCase row = cycled_row(n);
  row.k_format = format;
  row.head_dim = dim;
  const std::string& other = format_texts()[i * 7 % format_texts().size()];
  row.v_head_dim = n % 4 == 0 ? kDims[i * 5 % kDims.size()] : 0;
  const int v_dim = row.v_head_dim == 0 ? dim : row.v_head_dim;
  row.v_format = n % 3 == 0 && fits(other, v_dim) ? other : format;
  if (!fits(row.v_format, v_dim)) row.v_head_dim = 0;
  row.requests = request_sets()[i / 2 % request_sets().size()];
  row.q_heads = kHeads[i / 3 % kHeads.size()][0];
  row.kv_heads = kHeads[i / 3 % kHeads.size()][1];
  row.workers = n % 5 == 0 ? 7 : n % 5 == 1 ? 1 : 0;
  row.scale = n % 6 == 3 ? 0.2F : 0.0F;
  row.lse = n % 8 != 5;
  row.slack = n % 3 == 0 ? 77 : 0;
  row.table_mode = n % 4 == 3 ? BlockTableMode::kClamped : BlockTableMode::kTrusted;
  row.seed = i;
  row.name = "format-" + format + "-d" + std::to_string(dim);
  return row;
}

/// Walks through formats and head dims.
void add_format_rows(std::vector<AttentionCase>& rows) {
  int n = 0;
  for (const std::string& format : format_texts()) {
    for (const int dim : kDims) {
      if (fits(format, dim)) rows.push_back(format_row(format, dim, ++n));
    }
  }
  for (const std::string& format : format_texts()) rows.push_back(format_row(format, kWideDim, ++n));
}

void add_mixed_rows(std::vector<AttentionCase>& rows) {
  int n = 0;
  for (const FormatPair& pair : kMixedPairs) {
    for (const int dim : kMixedDims) {
      ++n;
      const auto i = static_cast<std::size_t>(n);
      AttentionCase row = cycled_row(n);
      row.k_format = pair.k;
      row.v_format = pair.v;
      row.head_dim = dim;
      row.q_dtype = kFloats[1 + i / 2 % 2];
      row.out_dtype = kFloats[1 + i / 3 % 2];
      row.softcap = n % 7 == 1 ? 20.0F : 0.0F;
      row.rotate_k = n % 4 == 0 || n % 7 == 2;
      row.rotate_v = n % 4 == 3 || n % 7 == 2;
      row.seed = 4000 + i;
      row.name = "mixed-" + row.k_format + "-" + row.v_format + "-d" + std::to_string(dim);
      rows.push_back(row);
    }
  }
}

AttentionCase plain_row(DType dtype, int dim, int n) {
  const auto i = static_cast<std::size_t>(n);
  AttentionCase row;
  row.plain = dtype;
  row.k_format = dtype == DType::kFloat16 ? "fp16" : "bf16";
  row.head_dim = dim;
  row.v_head_dim = n % 3 == 0 ? kDims[i * 5 % kDims.size()] : 0;
  row.mask = kMasks[i * 2 % kMasks.size()];
  row.q_dtype = kFloats[i / 2 % 3];
  row.out_dtype = kFloats[i % 3];
  row.requests = request_sets()[i % request_sets().size()];
  row.q_heads = kHeads[i % kHeads.size()][0];
  row.kv_heads = kHeads[i % kHeads.size()][1];
  row.policy = kPolicies[i % 3];
  row.softcap = n % 4 == 2 ? 15.0F : 0.0F;
  row.alibi = n % 4 == 3;
  row.sinks = n % 3 == 2;
  row.seed = 1000 + i;
  row.name = "plain-" + std::string(dtype_name(dtype)) + "-d" + std::to_string(dim);
  return row;
}

void add_plain_rows(std::vector<AttentionCase>& rows) {
  int n = 0;
  for (const DType dtype : kFloats) {
    for (const int dim : kDims) rows.push_back(plain_row(dtype, dim, ++n));
  }
  for (const DType dtype : kFloats) rows.push_back(plain_row(dtype, kWideDim, ++n));
}

void add_shape_rows(std::vector<AttentionCase>& rows) {
  for (const int group : {1, 3, 5, 7, 16, 33, 128}) {
    for (const char* format : {"bf16", "int8-head", "int4-g32"}) {
      AttentionCase row;
      row.name = "group-" + std::to_string(group) + "-" + format;
      row.requests = {{1, 100}, {3, 50}, {2, 260}};
      row.kv_heads = group > 16 ? 1 : 2;
      row.q_heads = group * row.kv_heads;
      row.k_format = format;
      row.mask.causal = true;
      row.out_dtype = DType::kFloat32;
      row.seed = 2000 + static_cast<std::uint64_t>(group);
      rows.push_back(row);
    }
  }
  for (const int boundary : {16, 64, 128, 256, 512, 1024, 2048, 4096}) {
    AttentionCase row;
    row.name = "boundary-" + std::to_string(boundary);
    row.requests = {{1, boundary - 1}, {1, boundary}, {1, boundary + 1}};
    row.q_heads = 4;
    row.kv_heads = 1;
    row.head_dim = 64;
    row.k_format = "int8-head";
    row.out_dtype = DType::kFloat32;
    row.policy = kPolicies[static_cast<std::size_t>(boundary / 64) % 3];
    row.workers = 5;
    row.seed = 3000 + static_cast<std::uint64_t>(boundary);
    rows.push_back(row);
  }
  AttentionCase prefill;
  prefill.name = "prefill-300-of-700";
  prefill.requests = {{300, 700}, {256, 256}};
  prefill.k_format = "int8-g32";
  prefill.mask.causal = true;
  prefill.out_dtype = DType::kFloat32;
  rows.push_back(prefill);

  AttentionCase tail;
  tail.name = "long-9001";
  tail.requests = {{1, 9001}, {2, 3}};
  tail.k_format = "int4-g32";
  tail.workers = 17;
  tail.out_dtype = DType::kFloat32;
  rows.push_back(tail);
}

/// Arithmetic below 16 bits: K that it takes as stored and K that it quantises, rotated and not.
void add_arithmetic_rows(std::vector<AttentionCase>& rows, const std::string& arithmetic, int& n) {
  const int last = arithmetic == "half_int8" ? 128 : 0;  // others: one head_dim per format
  for (const std::string& format : format_texts()) {
    for (const int dim : {kDims[rows.size() % kDims.size()], last}) {
      if (dim == 0 || !fits(format, dim)) continue;
      ++n;
      const auto i = static_cast<std::size_t>(n);
      AttentionCase row = cycled_row(n);
      row.arithmetic = arithmetic;
      row.k_format = format;
      row.v_format = fits(format_texts()[i * 5 % format_texts().size()], dim)
                         ? format_texts()[i * 5 % format_texts().size()]
                         : format;
      row.head_dim = dim;
      row.seed = 5000 + i;
      row.name = "arithmetic-";
      row.name.append(arithmetic).append("-").append(format).append("-d").append(std::to_string(dim));
      row.name.append("-").append(std::to_string(n));
      if (n % 4 == 0) row.plain = kFloats[i / 4 % 3];
      if (row.plain) row.name += "-plain", row.rotate_k = row.rotate_v = false;
      rows.push_back(row);
    }
  }
}

std::size_t common_prefix(std::string_view a, std::string_view b) {
  return static_cast<std::size_t>(
      std::mismatch(a.begin(), a.begin() + std::min(a.size(), b.size()), b.begin()).first - a.begin());
}

}  // namespace

const std::vector<std::string>& format_texts() {
  static const std::vector<std::string> texts = {"bf16",
                                                 "fp16",
                                                 "fp8",
                                                 "fp8-static-head",
                                                 "fp8-token-head",
                                                 "int8-tensor",
                                                 "int8-token",
                                                 "int8-head",
                                                 "int8-g32",
                                                 "int8-g64",
                                                 "int8-g128",
                                                 "int4-g32",
                                                 "int4-g64",
                                                 "int4-g128",
                                                 "int4-row",
                                                 "fp8-token",
                                                 "fp8-g32",
                                                 "fp8-g128-f32",
                                                 "fp8-token-head-f32",
                                                 "int8-tensor-asym",
                                                 "int8-static-head",
                                                 "int8-static-head-asym",
                                                 "int8-token-asym-f32",
                                                 "int8-token-head-asym",
                                                 "int8-g32-asym",
                                                 "int8-g64-f32",
                                                 "int4-tensor",
                                                 "int4-static-head-sym",
                                                 "int4-token",
                                                 "int4-token-sym-f32",
                                                 "int4-token-head-sym",
                                                 "int4-g64-f32",
                                                 "int4-g32-sym"};
  return texts;
}

bool fits(const std::string& format, int dim) {
  const int group = parse_format(format).group_size;
  return group == 0 || dim % group == 0;
}

AttentionCase latent_case(AttentionCase row, std::string_view format, int latent_dim, int rope_dim) {
  const KvCacheSpec spec = KvCacheSpec::latent(parse_format(format), latent_dim, rope_dim);
  row.k_format = format;
  row.v_format.clear();
  row.kv_heads = 1;
  row.head_dim = spec.head_dim;
  row.v_head_dim = spec.v_head_dim;
  row.rope_dim = spec.rope_dim;
  row.rotate_k = row.rotate_v = false;
  return row;
}

std::vector<Request> uniform_requests(int batch, int q_len, int kv_len) {
  return std::vector<Request>(static_cast<std::size_t>(batch), Request{q_len, kv_len});
}

AttentionCase with_format(const AttentionCase& row, std::string_view k_format, std::string_view v_format) {
  AttentionCase result = row;
  result.k_format = k_format;
  result.v_format = v_format;
  result.name += "-" + std::string(k_format);
  if (!v_format.empty() && v_format != k_format) result.name += "-" + std::string(v_format);
  return result;
}

std::vector<AttentionCase> attention_cases() {
  std::vector<AttentionCase> rows;
  add_format_rows(rows);
  add_mixed_rows(rows);
  add_plain_rows(rows);
  add_shape_rows(rows);
  int number = 0;
  for (const char* arithmetic : {"half_int8", "full_int8", "fp8"})
    add_arithmetic_rows(rows, arithmetic, number);
  add_latent_rows(rows);
  add_step_rows(rows);
  add_channel_rows(rows);
  add_flashmla_rows(rows);
  return rows;
}

AttentionCase find_case(std::string_view name) {
  std::string closest;
  std::size_t best = 0;
  for (const auto& list : {benchmark_cases(), attention_cases()}) {
    for (const AttentionCase& row : list) {
      if (row.name == name) return row;
      const std::size_t common = common_prefix(row.name, name);
      if (common < best || (common == best && !closest.empty())) continue;
      best = common;
      closest = row.name;
    }
  }
  throw std::out_of_range("no case is called \"" + std::string(name) + "\": the closest is \"" + closest +
                          "\"");
}

}  // namespace halftone::testing
