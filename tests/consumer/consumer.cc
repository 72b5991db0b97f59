// What a user writes first, against the installed headers and library: two tokens into an int8 cache, then
// one query over them. Keys of zero weigh both tokens alike, so the output is the mean of their values, 1
// and 3.
#include <halftone/halftone.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

namespace halftone {
bool all_structs_have_defaults();  // initialisers.cc
}

int main() {
  using namespace halftone;
  constexpr int kDim = 64;
  const KvFormat format = parse_format("int8-head");
  const KvCacheSpec spec{
      .k_format = format, .v_format = format, .kv_heads = 1, .head_dim = kDim, .page_size = 16};
  const std::int64_t page_bytes = page_layout(spec).page_bytes;
  const AlignedBuffer pages(page_bytes);
  std::int32_t table = 0, length = 0;
  const std::int32_t cu_seqlens[] = {0, 2};

  PagedKv cache;
  cache.spec = spec;
  cache.pages = pages.view({1, page_bytes});
  cache.block_table = TensorView::contiguous(&table, DType::kInt32, {1, 1});
  cache.lengths = TensorView::contiguous(&length, DType::kInt32, {1});

  const std::vector<float> k(2 * kDim, 0.0f), q(kDim, 1.0f);
  std::vector<float> v(2 * kDim, 1.0f), out(kDim);
  std::fill(v.begin() + kDim, v.end(), 3.0f);
  AppendArgs tokens;
  tokens.k = TensorView::contiguous(k.data(), DType::kFloat32, {2, 1, kDim});
  tokens.v = TensorView::contiguous(v.data(), DType::kFloat32, {2, 1, kDim});
  tokens.cu_seqlens = TensorView::contiguous(cu_seqlens, DType::kInt32, {2});
  append(cache, tokens);
  length = 2;

  AttentionProblem problem;
  problem.batch = 1;
  problem.q_heads = 1;
  problem.kv = spec;
  problem.max_kv_len = 16;
  problem.q_dtype = problem.out_dtype = DType::kFloat32;
  AttentionArgs args;
  args.q = TensorView::contiguous(q.data(), DType::kFloat32, {1, 1, kDim});
  args.out = TensorView::contiguous(out.data(), DType::kFloat32, {1, 1, kDim});
  args.kv = cache;
  attend(problem, args);

  const double bytes = bytes_per_token(spec);
  std::printf("%s: %g bytes per token, attention gives %g\n", format_name(format).c_str(), bytes, out[0]);
  const bool right = std::all_of(out.begin(), out.end(), [](float x) { return std::abs(x - 2.0f) < 2e-3f; });
  return all_structs_have_defaults() && right && bytes == 2 * (kDim + 2) ? 0 : 1;
}
