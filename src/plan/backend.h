// What a backend offers. The front door and the planner know backends by this table only; src/backends.cc
// lists those that this build has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "halftone/attention.h"
#include "plan/kernel.h"

namespace halftone::planning {

/// Keys of all requests together at the bounds of a problem without lists.
constexpr std::int64_t most_keys(const AttentionProblem& p) {
  return p.max_total_kv != 0 ? p.max_total_kv : std::int64_t{p.batch} * p.max_kv_len;
}

/// What is staged of a key and KV head; with lists, of each of their places.
struct StagedKey {
  int bytes = 0;
  int read_bytes = 0;     ///< what the kernel reads of it, staged or not; here and below without lists
  int request_bytes = 0;  ///< of every request and KV head besides, and of one request more
  int tokens = 1;         ///< keys of a request begin at multiples of so many, a power of two
};

/// Arguments are already validated (plan/validate.h). Functions throw halftone::Error.
struct Backend {
  std::span<const Kernel> kernels;
  /// Whether a request gets the same bits from whichever row of `kernels`.
  bool rows_share_bits;
  /// Which compiled kernel serves the problem in units of `kernel`, for the backend's own use; -1: none.
  int (*variant)(const AttentionProblem& problem, const Kernel& kernel);
  /// For a problem that no row serves: throws Unsupported naming the field and what the backend has.
  void (*refuse)(const AttentionProblem& problem);
  /// Workers of a plan that leaves their number open. Throws Unsupported if the device does not work.
  int (*workers)(Device device);
  /// What run() writes into the workspace before this kernel reads K and V there; no bytes: it reads them
  /// where they are. Null: no kernel needs that.
  StagedKey (*staged_key)(const AttentionProblem& problem, const Kernel& kernel);
  /// Whether this kernel also writes the new tokens of the requests that it serves
  /// (AttentionProblem::appends). Null: none does, and run() appends before the first pass.
  bool (*fuses_append)(const AttentionProblem& problem, const Kernel& kernel);
  /// Bytes that the backend keeps in a workspace beside the schedule and the partial results.
  std::int64_t (*extra_bytes)(int workers, std::int64_t partials);
  /// Bytes that a worker of this kernel, as variant() has it, works with while run() lasts. Null: no kernel
  /// does.
  std::int64_t (*scratch_bytes)(const Kernel& kernel, int variant);

  void (*schedule)(const Plan::Impl& plan, const SequenceLengths& lengths, std::byte* workspace,
                   Stream stream);
  void (*run)(const Plan::Impl& plan, const AttentionArgs& args, std::byte* workspace, Stream stream);
  void (*merge)(const std::vector<TensorView>& parts, const std::vector<TensorView>& part_lse,
                const TensorView& out, const TensorView& lse, Stream stream);
  void (*append)(const PagedKv& cache, const AppendArgs& args, Stream stream);
  void (*dequantize)(const PagedKv& cache, const TensorView& k_out, const TensorView& v_out, Stream stream);
};

/// The backend of a device type; null if this build has none.
const Backend* find_backend(DeviceType type);

/// The backend of a device. Throws Unsupported, naming `call`, if this build has none.
const Backend& backend_for(std::string_view call, Device device);

}  // namespace halftone::planning
