// The shared case table: one description of a problem serves the tests, the benchmarks and the command.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "halftone/attention.h"
#include "reference/cache.h"
#include "reference/oracle.h"
#include "reference/random.h"
#include "reference/tensor.h"

namespace halftone::testing {

using reference::Cache;
using reference::Data;
using reference::Random;
using reference::Tensor;

struct Request {
  int q_len = 1;
  int kv_len = 0;
};

/// How the keys of a query's list are drawn from the tokens of its request.
enum class Listing : std::uint8_t {
  kMixed,       ///< at random, a third of the places -1
  kAll,         ///< every token once, in random order, then -1: top_k may exceed what the cache has
  kPageBorder,  ///< first and last tokens of pages
  kRepeated,    ///< few tokens, again and again
  kDescending,
  kNothing,      ///< every place -1
  kSomeNothing,  ///< like kAll, but a quarter of the queries lists nothing
};

/// Lists of keys of a row; `top_k` 0: none.
struct CaseLists {
  int top_k = 0;
  Listing order = Listing::kMixed;
  bool counts = false;            ///< random counts; places behind them hold slots that no cache has
  int extra_top_k = 0;            ///< of a second list, over a cache of its own
  std::string extra_format = "";  ///< empty: k_format
  int extra_page_size = 64;
  int extra_tokens = 150;  ///< of that cache
};

/// What a row's run() appends: the last q_len tokens of each request.
struct CaseStep {
  bool appends = false;
  DType dtype = DType::kBFloat16;  ///< of their K and V
  RopePairing rope = RopePairing::kNone;
  bool slots = false;  ///< a slot mapping that skips some of them
  int rope_dims = 0;   ///< that are rotated; 0: half of those that may be
};

/// One row of the table.
struct AttentionCase {
  std::string name;
  std::vector<Request> requests;
  int q_heads = 8;
  int kv_heads = 2;
  int head_dim = 128;
  int v_head_dim = 0;             ///< 0: head_dim
  std::string k_format = "bf16";  ///< for parse_format
  std::string v_format = "";      ///< empty: k_format
  int rope_dim = 0;               ///< not 0: a latent cache of k_format; kv_heads, head_dim and v_head_dim
                                  ///< are then those of the spec
  CaseLists lists;
  CaseStep step;  ///< no request of one that appends has fewer keys than queries
  bool rotate_k = false;
  bool rotate_v = false;
  bool offset_k = false;
  bool scale_k = false;
  int page_size = 64;
  std::optional<DType> plain;  ///< of plain K and V tensors; absent: K and V lie in pages
  DType q_dtype = DType::kBFloat16;
  DType out_dtype = DType::kBFloat16;
  Mask mask;
  float scale = 0;
  float softcap = 0;
  bool alibi = false;
  bool sinks = false;
  bool lse = true;
  SplitPolicy policy = SplitPolicy::kReproducible;
  std::string arithmetic = "16-bit";  ///< for parse_arithmetic
  int workers = 0;
  BlockTableMode table_mode = BlockTableMode::kTrusted;
  Data data = Data::kNormal;  ///< of K; V and Q are normal except where K is constant or zero
  int slack = 0;              ///< added to max_q_len and max_kv_len
  int key_slack = 0;          ///< added to max_kv_len alone
  bool cu_q = false;          ///< give cu_q even where all q_len are equal
  std::uint64_t seed = 1;
};

/// The row over a latent cache, as KvCacheSpec::latent() has it.
AttentionCase latent_case(AttentionCase row, std::string_view format, int latent_dim = 512,
                          int rope_dim = 64);

/// `batch` equal requests.
std::vector<Request> uniform_requests(int batch, int q_len, int kv_len);

/// The row, its last tokens appended by run().
AttentionCase appending(AttentionCase row, const CaseStep& step = {});

/// The same row with other formats and a name that says so.
AttentionCase with_format(const AttentionCase& row, std::string_view k_format,
                          std::string_view v_format = {});

/// Correctness: a covering selection of formats, head dims, page sizes, masks, options, dtypes, group ratios
/// and lengths around tile, page and split boundaries. Small: the whole list takes seconds.
std::vector<AttentionCase> attention_cases();

/// Speed: decode shapes (T = 8192, D = 128; 8/1 heads at batch 32 to 512, 32/8 heads at batch 1 to 64), long
/// contexts and prefill. The format is bf16: use with_format.
std::vector<AttentionCase> benchmark_cases();

/// A row of either list; throws std::out_of_range naming the closest rows.
AttentionCase find_case(std::string_view name);

/// A random row for differential fuzzing: any combination that the library accepts, small lengths.
AttentionCase random_case(std::uint64_t seed);

/// What the library is asked to plan for: shapes, options and bounds of the row.
AttentionProblem attention_problem(const AttentionCase& row);

/// The spec of the row's cache, or that of the second list's.
KvCacheSpec case_spec(const AttentionCase& row);
KvCacheSpec extra_spec(const AttentionCase& row);

/// How make_problem fills a cache.
enum class Fill : std::uint8_t {
  kAppend,  ///< every token is generated and appended
  kTiled,   ///< a few pages are appended, the others are copies of their bytes: fast for benchmarks
};

/// Everything that a run needs, owned.
struct Problem {
  AttentionCase row;
  AttentionProblem problem;
  Tensor q;                      ///< [total_q, q_heads, head_dim]
  Tensor k, v;                   ///< what was appended (f32), or the plain tensors; absent with Fill::kTiled
  std::unique_ptr<Cache> cache;  ///< null for plain K and V
  Tensor cu_q, cu_kv, alibi_slopes, sinks;
  std::unique_ptr<Cache> extra;  ///< of the second list; one request
  Tensor indices, counts, extra_indices, extra_counts;
  /// Of a step: its tokens, with other values than the cache has in their places. The cache's lengths are
  /// those before it.
  Tensor new_k, new_v, new_slots, cos, sin, positions;

  std::int64_t total_q() const { return q.shape()[0]; }
  SequenceLengths lengths() const;
  bool guards_intact() const;
};
Problem make_problem(const AttentionCase& row, Fill fill = Fill::kAppend);

/// A copy of the cache after append() of the step's tokens, which its lengths count.
Cache stepped_cache(const Problem& p);

/// Prefilled with bytes 0xFF (NaN) to prove that every element is written; status starts at zero.
struct Outputs {
  Tensor out;     ///< [total_q, q_heads, v_dim]
  Tensor lse;     ///< [total_q, q_heads] or absent
  Tensor status;  ///< int32 [1]
};
Outputs make_outputs(const Problem& problem);
AttentionArgs arguments(const Problem& problem, const Outputs& outputs);

/// plan + schedule + run on a workspace of exactly the stated size, filled with 0xFF; `change` edits the
/// problem before planning. Throws std::logic_error if a guard region of an input, an output or the workspace
/// was written.
Outputs run_problem(const Problem& problem, const std::function<void(AttentionProblem&)>& change = {});

/// Truth and yardstick on the dequantised cache (or on the plain tensors), in arithmetic below 16 bits on
/// what that makes of them (docs/arithmetic.md); `on_cpu`: where CPU and GPU differ, what the CPU makes of V
/// and P.
struct Reference {
  std::vector<double> out, lse;
  std::vector<float> plain_out, plain_lse;
  /// A weight of 8 bits (full_int8) is one step off where a logit's last bits decide: on the CPU the weights
  /// of each row, [rows], for which this may be so, elsewhere of any. On a GPU fp8 rounds weights to E4M3: by
  /// up to 2^-4 of each, which add up as independent errors do, or by 2^-15 of the largest. Weights in bf16
  /// (half_int8 on the CPU) are off by half a step of the largest |v|, like those of CUDA's prompts.
  std::vector<double> row_slack;
  double out_slack = 0;
};
Reference make_reference(const Problem& problem, bool on_cpu = true);

/// The tolerance rule of oracle.h for output and LSE: empty when kept, else a sentence.
/// `lse_slack` widens the LSE's limit, relative to max(1, |LSE|); `out_slack` the output's, absolutely.
std::string judge(const Problem& problem, const Reference& reference, const Outputs& outputs,
                  double lse_slack = 0, double out_slack = 0);

}  // namespace halftone::testing
