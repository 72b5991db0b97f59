// The example of README.md, kept compiling and right.
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <string>

#include "halftone/attention.h"

namespace {

// example begins
using namespace halftone;

// One decode step: 2 requests, 8 query heads over 2 KV heads, an int4 cache of 64-token pages.
std::vector<float> decode_step(const std::vector<float>& q, const std::vector<float>& k,
                               const std::vector<float>& v) {
  const KvFormat format = parse_format("int4-g32");
  const KvCacheSpec spec{
      .k_format = format, .v_format = format, .kv_heads = 2, .head_dim = 128, .page_size = 64};
  std::vector<std::uint8_t> pages(2 * page_layout(spec).page_bytes + 16);
  auto* aligned = pages.data() + (16 - reinterpret_cast<std::uintptr_t>(pages.data()) % 16) % 16;
  std::vector<std::int32_t> table = {0, 1}, lengths = {0, 0}, cu = {0, 1, 2};

  PagedKv cache;
  cache.spec = spec;
  cache.pages = TensorView::contiguous(aligned, DType::kUInt8, {2, page_layout(spec).page_bytes});
  cache.block_table = TensorView::contiguous(table.data(), DType::kInt32, {2, 1});
  cache.lengths = TensorView::contiguous(lengths.data(), DType::kInt32, {2});

  AppendArgs tokens;  // one new token for each request, quantised into its page
  tokens.k = TensorView::contiguous(k.data(), DType::kFloat32, {2, 2, 128});
  tokens.v = TensorView::contiguous(v.data(), DType::kFloat32, {2, 2, 128});
  tokens.cu_seqlens = TensorView::contiguous(cu.data(), DType::kInt32, {3});
  append(cache, tokens);
  lengths = {1, 1};

  AttentionProblem problem;
  problem.batch = 2;
  problem.q_heads = 8;
  problem.kv = spec;
  problem.max_kv_len = 64;
  problem.q_dtype = problem.out_dtype = DType::kFloat32;
  problem.mask.causal = true;
  std::vector<float> out(2 * 8 * 128);
  AttentionArgs args;
  args.q = TensorView::contiguous(q.data(), DType::kFloat32, {2, 8, 128});
  args.out = TensorView::contiguous(out.data(), DType::kFloat32, {2, 8, 128});
  args.kv = cache;
  attend(problem, args);  // or plan() once, schedule() per step, run() per layer
  return out;
}
// example ends

TEST(ReadmeExample, AttendsToTheAppendedToken) {
  const std::vector<float> q(2 * 8 * 128, 0.1f), k(2 * 2 * 128, 0.5f);
  std::vector<float> v(2 * 2 * 128);
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i % 16);
  const std::vector<float> out = decode_step(q, k, v);
  for (std::size_t i = 0; i < out.size(); ++i) EXPECT_NEAR(out[i], static_cast<float>(i % 16), 0.02f) << i;
}

TEST(ReadmeExample, StandsInTheReadme) {
  const auto read = [](const std::string& path) {
    std::ifstream file(path);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const std::string path = __FILE__;
  const std::string source = read(path);
  const std::size_t begin = source.find("// example begins\n") + 18, end = source.find("// example ends");
  const std::string readme = read(path.substr(0, path.rfind("tests/")) + "README.md");
  EXPECT_NE(readme.find(source.substr(begin, end - begin)), std::string::npos);
}

}  // namespace
