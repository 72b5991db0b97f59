// What `halftone bench` measures: cases, rows of figures, and the timing on the CPU (cli/bench/gpu.h has the
// GPU's).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/options/problem.h"

namespace halftone::cli {

enum class Suite { kDecode, kPrefill, kAppend, kLayer };

/// "decode", "prefill", "append" or "layer". Cases over latent caches are recorded as "mla", see kind_text().
Suite parse_suite(std::string_view text);
std::string_view suite_text(Suite suite);

/// How a layer of suite kLayer gets the new tokens of its step.
enum class LayerAppend { kNone, kSeparate, kFused };  // not at all, by append(), by run()
std::string_view layer_append_text(LayerAppend append);

/// Requests of one length.
struct RequestGroup {
  int context = 0;
  int count = 0;
  int q_len = 0;  ///< queries of each; 0: as many as the case's others
  friend bool operator==(const RequestGroup&, const RequestGroup&) = default;
};

struct BenchCase {
  Suite suite = Suite::kDecode;
  ProblemShape shape;               ///< context and q_len: the longest request's, batch: all requests
  std::vector<RequestGroup> mixed;  ///< requests of different lengths; empty: all as long as the context
  int chain = 1;                    ///< CUDA: layers with caches of their own in one graph
  LayerAppend append = LayerAppend::kNone;
  bool gemm = false;           ///< CUDA, suite kLayer: a GEMM writes Q before each layer
  bool early = false;          ///< with it: a layer reads its cache while the GEMM is at work
  bool with_schedule = false;  ///< schedule() is part of the timed call
  std::string table;           ///< the named table that the case is from, or empty
};

/// Channels of the GEMM before a layer: of all query heads.
inline int gemm_width(const ProblemShape& shape) { return shape.q_heads * shape.head_dim; }
/// What layers add to GEMMs that take `gemm_us` alone. Throws Unsupported where that is not above 0: the two
/// times were measured one after the other, and such a layer is shorter than what lies between them.
double beyond_gemm(double both_us, double gemm_us);

/// What a case over a latent cache does: "sparse_decode", "dense_decode", "sparse_prefill", "dense_prefill"
/// or "append".
std::string_view kind_text(const BenchCase& setup);

/// Keys, and queries, of each request [batch].
std::vector<std::int64_t> kv_lengths(const BenchCase& setup);
std::vector<std::int64_t> q_lengths(const BenchCase& setup);

struct BenchRow {
  BenchCase setup;
  std::string unsupported;  ///< why the case was not run; the figures are then 0
  double us = 0;            ///< median of one call; of a chain: per layer; behind a GEMM: what the layer adds
  double gemm_us = 0;       ///< of the GEMM alone, as `us`
  std::int64_t bytes = 0;   ///< least traffic of one call: Floor::bytes(), or what append reads and writes
  double gbs = 0;           ///< bytes / us
  double ceiling_gbs = 0;   ///< what plain reading (append on CUDA: copying) reaches; prefill: none
  std::string ceiling;      ///< CUDA: how the ceiling was reached
  double gather_us = 0;  ///< sparse decode on CUDA: of a kernel that only reads the listed records, as `us`;
                         ///< the ceiling is its rate
  double gflops = 0;     ///< attention only
  double mhz = 0;        ///< CUDA, prefill and latent caches: clock of the SMs during such calls
  std::string kernel;    ///< attention: that of the longest requests
  std::string arithmetic;  ///< CUDA: of the products
  int repeats = 0;
  int copies = 0;     ///< distinct caches that the calls go through in turn
  bool cold = false;  ///< every call reads a cache that no cache level holds
};

/// How much of the ceiling a row has reached, which it has: of the gather, which reads no Q and writes no O,
/// by time.
double share_of_ceiling(const BenchRow& row);

/// Tokens that an append case brings, 16-bit K and V of them, and what append() reads and writes for them.
struct AppendTraffic {
  std::int64_t tokens = 0;
  std::int64_t in_bytes = 0;
  std::int64_t bytes = 0;
};
AppendTraffic append_traffic(const BenchCase& setup);

/// Reads much more memory than the caches hold, on all OpenMP threads; GB/s (10^9), best of several passes.
double measure_read_bandwidth();

/// Runs one case on the CPU; `repeats` 0 means for half a second, at least 5 times.
BenchRow run_case(const BenchCase& setup, int repeats);

}  // namespace halftone::cli
