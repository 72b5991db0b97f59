#include "testing/step.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <variant>

namespace halftone::testing {
namespace {

Tensor random_tokens(Random& random, DType dtype, std::int64_t tokens, int heads, int dim) {
  std::vector<float> values(static_cast<std::size_t>(tokens * heads * dim));
  fill(random, Data::kNormal, values, heads, dim);
  return Tensor::of(dtype, {tokens, heads, dim}, values);
}

void set_lengths(const Cache& cache, const AttentionCase& row, bool with_step) {
  for (std::size_t i = 0; i < row.requests.size(); ++i) {
    const Request& r = row.requests[i];
    cache.lengths.as<std::int32_t>()[i] = r.kv_len - (with_step ? 0 : r.q_len);
  }
}

/// A table of angles for every position that a token has, and the positions of the new tokens.
void fill_rope(Problem& p) {
  const auto& spec = std::get<KvCacheSpec>(p.problem.kv);
  const int dims = p.row.step.rope_dims;
  const int half = (dims > 0 ? dims : spec.rotary_dims() / 2) / 2;
  int rows = 1;  // not as many as the bounds allow, which may be millions
  for (const Request& r : p.row.requests) rows = std::max(rows, r.kv_len);
  p.cos = Tensor(DType::kFloat32, {rows, half});
  p.sin = Tensor(DType::kFloat32, {rows, half});
  for (int row = 0; row < rows; ++row) {
    for (int i = 0; i < half; ++i) {
      const double angle = row * std::pow(10000.0, -static_cast<double>(i) / half);
      p.cos.set(row * half + i, static_cast<float>(std::cos(angle)));
      p.sin.set(row * half + i, static_cast<float>(std::sin(angle)));
    }
  }
  std::vector<std::int32_t> positions;
  for (const Request& r : p.row.requests) {
    for (int i = 0; i < r.q_len; ++i) positions.push_back(r.kv_len - r.q_len + i);
  }
  p.positions = Tensor::of({static_cast<std::int64_t>(positions.size())}, positions);
}

/// The slots of the last tokens of each request, of which every fifth is skipped.
void fill_slots(Problem& p) {
  const std::vector<std::int64_t> all = p.cache->slots();
  std::vector<std::int64_t> slots;
  std::size_t end = 0;
  for (const Request& r : p.row.requests) {
    end += static_cast<std::size_t>(r.kv_len);
    for (int i = r.q_len; i > 0; --i) {
      slots.push_back(slots.size() % 5 == 2 ? -1 : all[end - static_cast<std::size_t>(i)]);
    }
  }
  p.new_slots = Tensor::of({static_cast<std::int64_t>(slots.size())}, slots);
}

}  // namespace

AttentionCase appending(AttentionCase row, const CaseStep& step) {
  row.step = step;
  row.step.appends = true;
  for (Request& r : row.requests) r.kv_len = std::max(r.kv_len, r.q_len);
  row.name += "-appends";
  return row;
}

void fill_step(Problem& p, Random& random) {
  if (!p.row.step.appends) return;
  const auto& spec = std::get<KvCacheSpec>(p.problem.kv);
  const DType dtype = p.row.step.dtype;
  p.new_k = random_tokens(random, dtype, p.total_q(), spec.kv_heads, spec.head_dim);
  if (!spec.is_latent()) p.new_v = random_tokens(random, dtype, p.total_q(), spec.kv_heads, spec.v_dim());
  if (p.row.step.rope != RopePairing::kNone) fill_rope(p);
  if (p.row.step.slots) fill_slots(p);
  set_lengths(*p.cache, p.row, false);
}

NewTokens new_tokens(const Problem& p) {
  if (!p.row.step.appends) return {};
  return {.k = p.new_k.view(),
          .v = p.new_v.view(),
          .slot_mapping = p.new_slots.view(),
          .rope = {p.row.step.rope, p.cos.view(), p.sin.view(), p.positions.view()}};
}

AppendArgs append_args(const Problem& p, const Tensor& cu_seqlens, const Tensor& status) {
  const NewTokens tokens = new_tokens(p);
  return {.k = tokens.k,
          .v = tokens.v,
          .slot_mapping = tokens.slot_mapping,
          .cu_seqlens = p.row.step.slots ? TensorView{} : cu_seqlens.view(),
          .rope = tokens.rope,
          .status = status.view()};
}

Tensor cumulative_queries(const AttentionCase& row) {
  std::vector<std::int32_t> cu = {0};
  for (const Request& r : row.requests) cu.push_back(cu.back() + r.q_len);
  return Tensor::of({static_cast<std::int64_t>(cu.size())}, cu);
}

Cache stepped_cache(const Problem& p) {
  Cache cache = p.cache->clone();
  set_lengths(cache, p.row, false);  // also after a run() that has advanced them
  append(cache.view(), append_args(p, cumulative_queries(p.row)));
  set_lengths(cache, p.row, true);
  return cache;
}

void add_step_rows(std::vector<AttentionCase>& rows) {
  constexpr std::array kFormats = {"bf16",       "fp8",           "fp8-static-head", "int8-head",
                                   "int8-token", "int4-row",      "int4-g32",        "int8-tensor",
                                   "fp16",       "int8-g32-asym", "fp8-token-head",  "int4-g64-f32"};
  constexpr std::array kDims = {128, 64, 256, 80, 512};
  constexpr std::array kTypes = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
  constexpr std::array kPolicies = {SplitPolicy::kReproducible, SplitPolicy::kFast,
                                    SplitPolicy::kBatchInvariant};
  constexpr std::array kRopes = {RopePairing::kNone, RopePairing::kHalf, RopePairing::kInterleaved};
  int n = 0;
  for (const char* format : kFormats) {
    for (int queries = 1 + n % 4; queries <= 17; queries += 4) {  // up to more than a decode kernel takes
      ++n;
      const auto i = static_cast<std::size_t>(n);
      AttentionCase row;
      row.name = "step-" + std::string(format) + "-q" + std::to_string(queries);
      row.requests = {{queries, queries}, {queries, 63 + queries}, {queries, 200}, {queries, 1025}};
      if (n % 3 == 0) row.requests = {{queries, 64}, {0, 30}, {1, 1}, {1, 129}, {queries, 257}};
      if (n % 7 == 0) row.requests = {{1, 100}, {90, 300}, {queries, queries}};
      row.k_format = format;
      row.v_format = n % 4 == 1 ? kFormats[i * 5 % kFormats.size()] : format;
      row.head_dim = kDims[i % kDims.size()];
      const bool groups =
          row.k_format.find("-g") != std::string::npos || row.v_format.find("-g") != std::string::npos;
      if (groups && row.head_dim == 80) row.head_dim = 128;
      row.page_size = n % 2 == 0 ? 64 : 16;
      row.mask.causal = n % 5 != 4;
      row.mask.window_left = n % 6 == 5 ? 40 : -1;
      row.q_heads = n % 3 == 1 ? 32 : 8;
      row.kv_heads = n % 3 == 1 ? 8 : 2;
      row.q_dtype = kTypes[i / 2 % 2];
      row.out_dtype = row.q_dtype;
      row.policy = kPolicies[i % kPolicies.size()];
      row.rotate_k = n % 4 == 2;
      row.rotate_v = n % 8 == 3;
      row.sinks = n % 9 == 4;
      row.table_mode = n % 5 == 1 ? BlockTableMode::kClamped : BlockTableMode::kTrusted;
      row.seed = 7000 + i;
      rows.push_back(appending(
          row,
          {.dtype = kTypes[i % kTypes.size()], .rope = kRopes[i / 2 % kRopes.size()], .slots = n % 4 == 3}));
    }
  }
  for (const char* format : {"bf16", "fp8-g128-f32", "int8-head"}) {
    AttentionCase row;
    row = latent_case(row, format);
    row.name = "step-latent-" + std::string(format);
    row.requests = {{1, 1}, {2, 70}, {1, 129}};
    row.q_heads = 16;
    row.mask.causal = true;
    row.scale = 0.072F;
    row.seed = 7900;
    rows.push_back(appending(row, {.rope = RopePairing::kInterleaved}));
  }
}

}  // namespace halftone::testing
