// Append to a latent cache: a warp has a token, or four of many, and loads their rows before it knows their
// slots. Every step is the one that src/cpu/append.cc takes.

#include "cuda/append/many_records.h"
#include "cuda/append/params.h"
#include "cuda/append/record.h"
#include "cuda/device/launch.h"
#include "format/codec.h"

namespace halftone::cuda {
namespace {

constexpr int kTableLine = 32;  // entries of the block table that L2 reads at once

/// A warp has a token. `kEarly`: all of the input loads early.
template <DType kType, bool kAsymmetric, bool kEarly>
__global__ void __launch_bounds__(128) append_records(const __grid_constant__ AppendParams p) {
  begin_append(p);
  const int lane = threadIdx.x % 32;
  const std::int64_t token = std::int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;
  if (token >= p.tokens) return;
  RawRecord raw;
  if constexpr (kEarly) raw.load(p, token, lane);
  if (p.cu_seqlens != nullptr && token < p.batch) {  // in a decode step a request has its token's number
    if (lane == 0) prefetch_to_l2(p.lengths + token);
    if (lane * kTableLine < p.table_width && p.table_width <= 32 * kTableLine) {
      prefetch_to_l2(p.block_table + token * p.table_stride + lane * kTableLine);
    }
  }
  const RecordPlace to(p, slot_of<warp_request_of>(p, token));
  if (to.codes == nullptr) return;
  append_record<kType, kAsymmetric, AnyRecord<kEarly>>(p, token, to, raw);
}

/// A warp has kManyTokens, whose input loads early.
template <DType kType, bool kAsymmetric>
__global__ void __launch_bounds__(128, kAsymmetric ? 6 : 7)
    append_many_records(const __grid_constant__ AppendParams p) {
  begin_append(p);
  const std::int64_t first = (std::int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32) * kManyTokens;
  if (first >= p.tokens) return;
  ManyRecords<kType, kAsymmetric>(p, first).run();
}

}  // namespace

int launch_append_records(const AppendParams& params, void* stream) {
  constexpr std::int64_t kFew = 2048;  // tokens whose warps are all under way at once
  if (params.tokens == 0) return cudaSuccess;
  const bool early = loads_early(params);
  const bool few = params.tokens <= kFew || !early;
  const void* kernel = codec::with_codec(
      params.parts[0].part.format, [&]<DType kType, bool kAsymmetric>(codec::Codec<kType, kAsymmetric>) {
        return reinterpret_cast<const void*>(!few    ? &append_many_records<kType, kAsymmetric>
                                             : early ? &append_records<kType, kAsymmetric, true>
                                                     : &append_records<kType, kAsymmetric, false>);
      });
  const int threads = params.tokens <= kFew ? 32 : 128, tokens = threads / 32 * (few ? 1 : kManyTokens);
  const void* arguments[] = {&params};
  return launch_early(kernel, dim3(static_cast<unsigned>((params.tokens + tokens - 1) / tokens)),
                      dim3(static_cast<unsigned>(threads)), arguments, stream);
}

}  // namespace halftone::cuda
