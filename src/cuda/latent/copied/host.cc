#include "cuda/latent/copied/host.h"

#include <algorithm>
#include <array>
#include <bit>

#include "cuda/device/call.h"
#include "cuda/latent/copied/copy.h"
#include "plan/listed.h"

namespace halftone::cuda {
namespace {

constexpr std::array kCodes{LatentCodes::kFp8, LatentCodes::kInt8, LatentCodes::kInt4};

/// How tokens of the cache are stored, of those that can be copied; the end of kCodes: not so.
auto codes_of(const AttentionProblem& problem) {
  const auto& spec = std::get<KvCacheSpec>(problem.kv);
  return std::ranges::find_if(kCodes,
                              [&](LatentCodes codes) { return serves(codes, spec, DType::kBFloat16); });
}

std::int64_t places(const AttentionProblem& problem) {
  return planning::scheduled_bounds(problem).batch * problem.listed.top_k;
}

}  // namespace

bool copies_lists(const AttentionProblem& problem, int largest) {
  if (!problem.is_listed() || problem.listed.extra_top_k != 0) return false;
  if (problem.policy == SplitPolicy::kBatchInvariant || problem.q_dtype != DType::kBFloat16) return false;
  const int rows = problem.q_heads / problem.kv_heads();  // of a query
  if (rows % 64 != 0 || largest <= (rows > 64 ? 16 : 32)) return false;
  return places(problem) <= (rows > 64 ? 16384 : 8192) && codes_of(problem) != kCodes.end();
}

void copy_lists(const Plan::Impl& plan, std::byte* staged, AttentionParams& params, Stream stream) {
  const AttentionProblem& problem = plan.problem;
  const std::int64_t count = places(problem);
  CopyListedParams p{};
  p.cache = params.cache;
  p.list = params.listed.list;
  p.counts = params.listed.counts;
  p.q_tokens = params.q_tokens;
  p.queries = static_cast<std::int32_t>(planning::scheduled_bounds(problem).batch);
  p.top_k = problem.listed.top_k;
  p.records = reinterpret_cast<std::uint8_t*>(staged);
  p.places = reinterpret_cast<std::int32_t*>(staged + count * kCopiedRecordBytes);
  p.status = params.status;
  const DeviceScope scope(problem.device.index);
  check(launch_copy_listed(*codes_of(problem), p, stream), "run");
  constexpr int kPageTokens = 64;
  params.cache.pages = p.records;
  params.cache.page_log2 = std::countr_zero(unsigned{kPageTokens});
  params.cache.page_stride = kPageTokens * kCopiedRecordBytes;
  params.cache.num_pages = static_cast<std::int32_t>((count + kPageTokens - 1) / kPageTokens);
  params.cache.row_bytes = kCopiedRecordBytes;
  params.listed.list = {p.places, p.top_k};
  params.cache_settled = false;
}

}  // namespace halftone::cuda
