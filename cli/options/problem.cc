#include "cli/options/problem.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <variant>

#include "cli/terminal/terminal.h"
#include "cli/terminal/text.h"
#include "halftone/error.h"
#include "plan/plan.h"
#include "reference/random.h"

namespace halftone::cli {
namespace {

constexpr int kLatentDim = 512, kRopeDim = 64;  // of --latent

}  // namespace

void add_policy_option(Command command, std::string& value) {
  command.add_option("--policy", value, "fast, reproducible or batch_invariant")
      ->type_name("NAME")
      ->capture_default_str();
}

void add_arithmetic_option(Command command, std::string& value) {
  command.add_option("--arithmetic", value, "16-bit, half_int8, full_int8 or fp8")
      ->type_name("NAME")
      ->capture_default_str();
}

SplitPolicy parse_policy(std::string_view text) {
  for (const SplitPolicy policy :
       {SplitPolicy::kFast, SplitPolicy::kReproducible, SplitPolicy::kBatchInvariant}) {
    if (policy_text(policy) == text) return policy;
  }
  throw UsageError(
      fmt::format("--policy is '{}', but must be fast, reproducible or batch_invariant: use reproducible.",
                  printable(text)));
}

std::string_view policy_text(SplitPolicy policy) { return planning::policy_name(policy); }

Arithmetic parse_arithmetic_option(std::string_view text) {
  try {
    return parse_arithmetic(text);
  } catch (const Error& error) {
    throw UsageError(fmt::format("--{}", printable(error.what(), 400)));  // the text and the remedy
  }
}

KvCacheSpec cache_spec(const ProblemShape& shape) {
  KvCacheSpec spec = shape.format.spec(shape.kv_heads, shape.head_dim, shape.v_dim, shape.page_size);
  spec.rope_dim = shape.rope_dim;
  if (spec.is_latent() && shape.v_dim == 0) spec.v_head_dim = shape.head_dim - shape.rope_dim;
  return spec;
}

void make_latent(ProblemShape& shape, std::string_view option) {
  check_latent_format(shape.format, option);
  shape.kv_heads = 1;
  shape.head_dim = kLatentDim + kRopeDim;
  shape.rope_dim = kRopeDim;
  fit_latent(shape);
}

void check_lists(const ProblemShape& shape, bool latent) {
  if (shape.top_k > 0 && !latent) {
    throw UsageError(
        fmt::format("--top-k is {}, but lists are taken over latent caches: add --latent, or leave it out.",
                    shape.top_k));
  }
  if (shape.extra_top_k > 0 && shape.top_k == 0) {
    throw UsageError(fmt::format("--extra-top-k is {}, but a second list needs a first one: add --top-k.",
                                 shape.extra_top_k));
  }
}

void fit_latent(ProblemShape& shape) {
  if (shape.rope_dim == 0 || shape.format.k.scale_dtype != DType::kFloat8E8M0) return;
  shape.v_dim = shape.head_dim -= shape.rope_dim;
}

std::vector<std::int32_t> random_lists(int top_k, const std::vector<std::int64_t>& q_lengths,
                                       const std::vector<std::vector<std::int32_t>>& slots,
                                       std::uint64_t seed) {
  reference::Random random(seed);
  const std::int64_t queries = std::accumulate(q_lengths.begin(), q_lengths.end(), std::int64_t{0});
  std::vector<std::int32_t> lists;
  lists.reserve(static_cast<std::size_t>(queries * top_k));
  for (std::size_t r = 0; r < slots.size(); ++r) {
    for (std::int64_t i = 0; i < q_lengths[r] * top_k; ++i) lists.push_back(random.pick(slots[r]));
  }
  return lists;
}

AttentionProblem to_problem(const ProblemShape& shape) {
  AttentionProblem problem;
  problem.batch = shape.batch;
  problem.q_heads = shape.q_heads;
  problem.q_dtype = problem.out_dtype = shape.dtype;
  if (shape.plain) {
    problem.kv = KvTensors{shape.dtype, shape.kv_heads, shape.head_dim, shape.v_dim};
  } else {
    problem.kv = cache_spec(shape);
  }
  problem.max_q_len = shape.q_len;
  problem.max_kv_len = shape.context;
  problem.mask.causal = shape.causal && shape.top_k == 0;
  problem.listed.top_k = shape.top_k;
  if (shape.extra_top_k > 0) {
    problem.listed.extra_top_k = shape.extra_top_k;
    problem.listed.extra = cache_spec(shape);
  }
  problem.mask.window_left = shape.window;
  problem.policy = shape.policy;
  problem.arithmetic = shape.arithmetic;
  problem.workers = shape.workers;
  return problem;
}

void state_shortest(AttentionProblem& problem, const std::vector<std::int64_t>& q_lengths) {
  std::int64_t shortest = std::max(problem.max_q_len, 1);
  for (const std::int64_t n : q_lengths) {
    if (n > 0) shortest = std::min(shortest, n);
  }
  problem.min_q_len = static_cast<int>(shortest);
}

void state_totals(AttentionProblem& problem, const std::vector<std::int64_t>& q_lengths,
                  const std::vector<std::int64_t>& kv_lengths) {
  problem.max_total_kv = problem.max_prompt_kv = 0;
  for (std::size_t r = 0; r < kv_lengths.size(); ++r) {
    problem.max_total_kv += kv_lengths[r];
    if (q_lengths[r] > 1) problem.max_prompt_kv += kv_lengths[r];
  }
}

Floor floor_of(const AttentionProblem& problem, const std::vector<std::int64_t>& q_lengths,
               const std::vector<std::int64_t>& kv_lengths) {
  Floor floor;
  const std::int64_t dims = problem.head_dim() + problem.v_dim();
  const auto* const spec = std::get_if<KvCacheSpec>(&problem.kv);
  const double per_token =
      spec != nullptr ? bytes_per_token(*spec) : static_cast<double>(2 * dims * problem.kv_heads());
  for (std::size_t r = 0; r < q_lengths.size(); ++r) {
    const std::int64_t q = q_lengths[r], kv = kv_lengths[r];
    if (q == 0) continue;
    floor.io_bytes += q * problem.q_heads * dims * 2;
    if (problem.is_listed()) {  // every query reads its own keys
      const std::int64_t listed = q * (problem.listed.top_k + problem.listed.extra_top_k);
      floor.io_bytes += listed * 4;
      floor.cache_bytes += std::llround(static_cast<double>(listed) * per_token);
      floor.flops += 2.0 * static_cast<double>(listed) * problem.q_heads * static_cast<double>(dims);
      continue;
    }
    std::int64_t seen = kv;  // keys that some query sees
    double pairs = 0;        // (query, key) pairs
    if (problem.mask.window_left >= 0) seen = std::min<std::int64_t>(kv, problem.mask.window_left + q);
    for (std::int64_t i = 0; i < q; ++i) {
      const std::int64_t position = i + kv - q, end = problem.mask.causal ? position + 1 : kv;
      std::int64_t begin = 0;
      if (problem.mask.window_left >= 0) begin = std::max(begin, position - problem.mask.window_left);
      pairs += static_cast<double>(std::max<std::int64_t>(0, end - begin));
    }
    floor.cache_bytes += std::llround(static_cast<double>(seen) * per_token);
    floor.flops += 2.0 * pairs * problem.q_heads * static_cast<double>(dims);
  }
  return floor;
}

}  // namespace halftone::cli
