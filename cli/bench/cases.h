// Which cases `halftone bench` runs: lists of requests as text, and the named tables.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cli/bench/cpu.h"

namespace halftone::cli {

/// Latents of 512 + 64 dims that CUDA has kernels for, as --formats takes them.
inline constexpr std::string_view kLatentFormats = "fp8-g128-f32,bf16,int8-g64,int4-g64,fp8-g64-e8m0";

/// "131072x1,4096x31": groups of CONTEXTxCOUNT, or of QUERIES/CONTEXTxCOUNT. Throws UsageError naming
/// `option`.
std::vector<RequestGroup> parse_requests(std::string_view text, std::string_view option);
std::string requests_text(const std::vector<RequestGroup>& groups);

/// Sets the batch, the context, the queries and, for more than one group, `mixed`. Groups that state no
/// queries have `q_len` of them (0: as many as the longest context).
void set_requests(BenchCase& setup, std::vector<RequestGroup> groups, int q_len);

/// Cases that share their formats and shapes; the expansion takes every combination.
struct Sweep {
  std::string_view table;  ///< its name on the command line
  Suite suite;
  std::string_view formats;  ///< as --formats takes them
  struct Heads {
    int q, kv;
  };
  std::vector<Heads> heads;
  std::vector<int> head_dims;
  std::vector<int> page_sizes;
  int q_len;                               ///< 0: as long as the context
  std::vector<std::string_view> requests;  ///< one batch each, as --contexts-mix takes it
  int chain = 1;
  bool with_schedule = false;
  std::vector<SplitPolicy> policies{};  ///< empty: that of the command line
  bool plain = false;                   ///< tensors, which are bf16: its other formats are left out
  bool causal = true;
  Arithmetic arithmetic = Arithmetic::k16Bit;
  int rope_dim = 0;  ///< see ProblemShape
  int top_k = 0, extra_top_k = 0;
  int v_head_dim = 0;  ///< 0: head_dim
  bool gemm = false;   ///< see BenchCase
};

/// A case of suite kLayer in each of its ways to append (behind a GEMM late and early), any other one as it
/// is.
std::vector<BenchCase> with_appends(const BenchCase& setup);

/// The tables of the project's own figures. A table is all sweeps of one name.
const std::vector<Sweep>& bench_sweeps();
/// "headline, speculative, ...".
std::string table_names();

/// The cases of comma-separated `tables` ("all": every table). `formats` replaces the tables' own unless it
/// is empty. Throws UsageError for unknown names.
std::vector<BenchCase> table_cases(std::string_view tables, std::string_view formats, SplitPolicy policy);

}  // namespace halftone::cli
