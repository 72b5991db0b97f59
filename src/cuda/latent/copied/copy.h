// Listed tokens of codes as tokens of bf16 in the workspace, each where its place in the lists says: for few
// queries, whose kernels then do not convert.
#pragma once

#include "cuda/attention/latent_records.h"
#include "cuda/attention/params.h"

namespace halftone::cuda {

/// What is written of a place: 512 latent dims and 64 rotary ones in bf16, and which record it is, in a list
/// over these.
inline constexpr int kCopiedRecordBytes = 1152;
inline constexpr int kCopiedBytes = kCopiedRecordBytes + int{sizeof(std::int32_t)};

struct CopyListedParams {
  CacheView cache;
  ListView list;
  const std::int32_t* counts;  // [queries]: places that count
  std::int64_t q_tokens;       // queries that have lists
  std::int32_t queries, top_k;
  std::uint8_t* records;  // [queries, top_k, kCopiedRecordBytes]: of places that do not count as it was
  std::int32_t* places;   // [queries, top_k]: the record; -1 for a token that is skipped
  std::int32_t* status;   // [1] or null
};

/// Of kFp8, kInt8 or kInt4. cudaError_t as int.
int launch_copy_listed(LatentCodes codes, const CopyListedParams& params, void* stream);

}  // namespace halftone::cuda
