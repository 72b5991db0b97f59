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

/// The latent of a token, by a whole warp. Lanes beyond the row have its last chunk again, which changes no
/// extent.
template <DType kType, bool kAsymmetric, bool kEarly>
__device__ __forceinline__ void append_latent(const AppendParams& p, std::int64_t token,
                                              const RecordPlace& to, const uint4 (&raw)[kPieces]) {
  using Codes = ChunkCodes<codec::Codec<kType, kAsymmetric>, kType, false>;
  const AppendPart& latent = p.parts[0];
  const page::Part& part = latent.part;
  const int lane = threadIdx.x % 32, chunks = part.dim / kChunk;
  float x[kPieces][kChunk];
  codec::Range range[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    to_floats<kEarly>(latent, raw[i], token, min(i * 32 + lane, chunks - 1), x[i]);
    range[i] = extent_of<!kAsymmetric>(p, x[i]);
  }
  const bool whole = part.groups == 1;  // one scale for all
  if constexpr (Codes::kBits != 16) {
    const auto add = [](codec::Range& r, float lo, float hi) {
      if (kAsymmetric) r.lo = fminf(r.lo, lo);
      r.hi = fmaxf(r.hi, hi);
    };
    if (whole) {
#pragma unroll
      for (int i = 1; i < kPieces; ++i) add(range[0], range[i].lo, range[i].hi);
#pragma unroll
      for (int i = 1; i < kPieces; ++i) range[i] = range[0];
    }
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      if (i >= latent.group_log2) break;
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        add(range[j], kAsymmetric ? __shfl_xor_sync(~0u, range[j].lo, 1 << i) : 0.0f,
            __shfl_xor_sync(~0u, range[j].hi, 1 << i));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int chunk = i * 32 + lane;
    if (chunk >= chunks) continue;
    codec::Params params;
    if constexpr (Codes::kBits != 16) {
      params = record_params<kType, kAsymmetric>(part.format.scale_dtype, range[i]);
      const int group = chunk >> latent.group_log2;
      if (whole ? chunk == 0 : chunk == group << latent.group_log2) {
        store_params<kAsymmetric>(part, params, to.scales + group * part.param_group);
      }
    }
    Codes codes;
    codes.encode(params, x[i]);
    store_codes(codes, to.codes + chunk * Codes::kBits);
  }
}

/// A warp has a token. `kEarly`: all of the input loads early.
template <DType kType, bool kAsymmetric, bool kEarly>
__global__ void __launch_bounds__(128) append_records(const __grid_constant__ AppendParams p) {
  begin_append(p);
  const int lane = threadIdx.x % 32, chunks = p.parts[0].part.dim / kChunk;
  const std::int64_t token = std::int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;
  if (token >= p.tokens) return;
  uint4 latent[kPieces], rotary{};
  if constexpr (kEarly) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      latent[i] = load_early(p.parts[0], token, min(i * 32 + lane, chunks - 1));
    }
    if (lane < p.parts[1].part.dim / kChunk) rotary = load_early(p.parts[1], token, lane);
  }
  if (p.cu_seqlens != nullptr && token < p.batch) {  // in a decode step a request has its token's number
    if (lane == 0) prefetch_to_l2(p.lengths + token);
    if (lane * kTableLine < p.table_width && p.table_width <= 32 * kTableLine) {
      prefetch_to_l2(p.block_table + token * p.table_stride + lane * kTableLine);
    }
  }
  const RecordPlace to(p, slot_of<warp_request_of>(p, token));
  if (to.codes == nullptr) return;
  append_latent<kType, kAsymmetric, kEarly>(p, token, to, latent);
  append_rotary<kEarly>(p, token, lane >> kRotarySegment == 0 ? to.codes : nullptr, rotary);
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
  const bool early = loads_early(params.parts[0]) && loads_early(params.parts[1]);
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
