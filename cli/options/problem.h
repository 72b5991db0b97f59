// Attention problems as the command line describes them: shared by `explain` and `bench`.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cli/options/command_line.h"
#include "cli/options/format_choice.h"
#include "halftone/attention.h"

namespace halftone::cli {

/// --policy and --arithmetic, whose values the functions below read. What they set must live as long as the
/// parser.
void add_policy_option(Command command, std::string& value);
void add_arithmetic_option(Command command, std::string& value);

/// "fast", "reproducible" or "batch_invariant"; throws UsageError.
SplitPolicy parse_policy(std::string_view text);
std::string_view policy_text(SplitPolicy policy);
/// The value of --arithmetic; throws UsageError.
Arithmetic parse_arithmetic_option(std::string_view text);

struct ProblemShape {
  FormatChoice format;
  int batch = 8;
  int context = 8192;  ///< keys of a request
  int q_len = 1;       ///< queries of a request, its last tokens
  int q_heads = 32;
  int kv_heads = 8;
  int head_dim = 128;
  int v_dim = 0;  ///< 0: head_dim
  int page_size = 64;
  SplitPolicy policy = SplitPolicy::kReproducible;
  Arithmetic arithmetic = Arithmetic::k16Bit;
  int window = -1;
  int workers = 0;
  bool causal = true;
  DType dtype = DType::kBFloat16;  ///< of Q, O and new tokens, and of K and V that are tensors
  bool plain = false;              ///< K and V are tensors, not pages of a cache
  int rope_dim = 0;  ///< not 0: a latent cache, whose V is head_dim less so many dims unless v_dim is given
  int top_k = 0;     ///< not 0: each query attends to so many random keys of its request, from a list
  int extra_top_k = 0;  ///< and to so many of a second cache like the first one, from a second list
};

KvCacheSpec cache_spec(const ProblemShape& shape);

/// O as Q, no LSE.
AttentionProblem to_problem(const ProblemShape& shape);

/// States how many queries the shortest of the requests that have any has.
void state_shortest(AttentionProblem& problem, const std::vector<std::int64_t>& q_lengths);

/// States how many keys the requests have together, and those of more than one query, as whoever forms a
/// batch knows.
void state_totals(AttentionProblem& problem, const std::vector<std::int64_t>& q_lengths,
                  const std::vector<std::int64_t>& kv_lengths);

/// int32 [total_q, top_k]: for each query random ones of its request's slots.
std::vector<std::int32_t> random_lists(int top_k, const std::vector<std::int64_t>& q_lengths,
                                       const std::vector<std::vector<std::int32_t>>& slots,
                                       std::uint64_t seed);
inline constexpr std::uint64_t kFirstLists = 5, kSecondLists = 7;  // seeds

/// Gives the shape a latent cache as --latent means it. Throws UsageError, naming `option`, where its format
/// is none of a latent.
void make_latent(ProblemShape& shape, std::string_view option);

/// Refuses --top-k and --extra-top-k without what they need. Throws UsageError.
void check_lists(const ProblemShape& shape, bool latent);

/// Where scales are e8m0, V is all of a latent cache's K: its latent then has rope_dim less.
void fit_latent(ProblemShape& shape);

/// The least that attention must do, whatever the kernel.
struct Floor {
  std::int64_t cache_bytes = 0;  ///< K, V and their scales of every visible key, once
  std::int64_t io_bytes = 0;     ///< Q read, O written
  double flops = 0;              ///< 2 x multiply-adds of both products, masked keys not counted

  std::int64_t bytes() const { return cache_bytes + io_bytes; }
};
/// For requests of given lengths (one entry each).
Floor floor_of(const AttentionProblem& problem, const std::vector<std::int64_t>& q_lengths,
               const std::vector<std::int64_t>& kv_lengths);

}  // namespace halftone::cli
