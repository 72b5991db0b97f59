// The PTX instructions that the kernels use, one function each.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace halftone::cuda {

__device__ inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

/// Read anew wherever it is asked for: a value that is kept across the roles of a kernel costs every role a
/// register.
__device__ inline int thread_index() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

/// Read where it is asked for, like the thread's.
__device__ inline std::uint32_t block_index() {
  std::uint32_t x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}

__device__ inline void barrier_init(std::uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

/// Makes initialised barriers and ordinary shared stores visible to the bulk-copy engine.
__device__ inline void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// Orders this thread's ordinary accesses to global memory and bulk copies.
__device__ inline void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

__device__ inline void barrier_expect_bytes(std::uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

/// The same, if `wanted`, without a branch.
__device__ inline void barrier_expect_bytes_if(bool wanted, std::uint32_t barrier, int bytes) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %2, 0;\n"
      " @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n}" ::"r"(barrier),
      "r"(bytes), "r"(static_cast<int>(wanted))
      : "memory");
}

__device__ inline void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n .reg .pred done;\n"
      "wait:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      " @!done bra wait;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ inline void barrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// True once the phase of this parity has completed; does not wait.
__device__ inline bool barrier_passed(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

/// The hardware barriers of a block. 0 is that of all threads.
enum Barrier : int {
  kComputeReady = 1,  // the compute warps wait for the first load warp's setup, and for each other's
  kFinishReady,       // the finish warps wait for the first load warp's
  kLoadReady,         // both load warps wait for that of the compute warps
  kCompute,           // among the compute warps
  kStates,            // the finish warps wait for the states of an item
  kTeam,              // among the warps of team 0, and the next ones of the other teams
};

/// Barrier kId, of `kThreads` threads of which those that arrive do not wait. Waiting takes no issue slots,
/// unlike that for an mbarrier.
template <int kId, int kThreads>
__device__ inline void hardware_barrier_arrive() {
  asm volatile("bar.arrive %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}
template <int kId, int kThreads>
__device__ inline void hardware_barrier_wait() {
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

/// The same, of a barrier whose number is known at run time only.
template <int kThreads>
__device__ inline void hardware_barrier_wait(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

/// Adds 1 and returns what was there. What this thread saw before is visible to whoever sees the sum, and
/// what others stored before their additions is visible to this thread afterwards.
__device__ inline int count_arrival(int* counter) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

/// count_arrival() of a counter that has other parts, too: adds `x`.
__device__ inline int add_arrivals(int* counter, int x) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(x)
               : "memory");
  return before;
}

/// Their counter; what those that it counts stored before is visible afterwards.
__device__ inline int read_arrivals(const int* counter) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(counter) : "memory");
  return x;
}

/// Adds to four floats, or without `add` replaces them, and does not wait for it.
__device__ inline void add_or_set(float4* to, const float4& x, bool add) {
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %5, 0;\n\t"
      "@p red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n\t"
      "@!p st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};\n\t}" ::"l"(to),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(static_cast<int>(add))
      : "memory");
}
/// atomicOr() without the instructions that first join those of a warp: for what hardly ever happens.
__device__ inline void set_bits(int* word, int bits) {
  asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;" ::"l"(word), "r"(bits) : "memory");
}

__device__ inline void prefetch_to_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

/// The same of `bytes` bytes; these and the address are multiples of 16.
__device__ inline void prefetch_bytes_to_l2(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

/// Programmatic dependent launch: the next kernel of the stream may start; it waits before it touches memory.
__device__ inline void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }

/// Until all that the previous kernel of the stream wrote is visible.
__device__ inline void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

/// Registers per thread of the calling warpgroup, from here on (multiples of 8).
template <int kRegisters>
__device__ inline void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// Copies `bytes` (a multiple of 16) from global to shared memory; the barrier counts them.
__device__ inline void bulk_load(std::uint32_t shared, const void* global, int bytes, std::uint32_t barrier,
                                 std::uint64_t cache_hint) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
      "[%3], %4;" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "l"(cache_hint)
      : "memory");
}

__device__ inline void bulk_load(std::uint32_t shared, const void* global, int bytes, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}

/// Copies 16 bytes from global to shared memory beside the thread's work; `bytes` < 16 leaves zeros behind
/// them.
__device__ inline void copy_async(std::uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}
/// The same of 8 bytes.
__device__ inline void copy_async_8(std::uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}
/// Until the thread's copies have arrived.
__device__ inline void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/// Arrives at a barrier when the thread's copies so far have.
__device__ inline void copy_async_arrive(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

/// L2 policy for data that is read once.
__device__ inline std::uint64_t evict_first_policy() {
  std::uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// d += a b, a 16x16 (row), b 16x8 (col), f32 accumulation. Fragment layouts: PTX ISA, "mma.m16n8k16".
__device__ inline void mma_f16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                               std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// d += a b, a 16x8, b 8x8.
__device__ inline void mma_f16_k8(float (&d)[4], const std::uint32_t (&a)[2], std::uint32_t b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
}

/// Rows 0 to 7 of the 16x16 by 16x8 product: a is zero below them.
__device__ inline void mma_f16_upper(float (&d)[2], std::uint32_t a0, std::uint32_t a2, std::uint32_t b0,
                                     std::uint32_t b1) {
  asm("{\n .reg .f32 x, y;\n"
      " mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,x,y}, {%2,%3,%4,%3}, {%5,%6}, "
      "{%0,%1,%7,%7};\n}"
      : "+f"(d[0]), "+f"(d[1])
      : "r"(a0), "r"(0u), "r"(a2), "r"(b0), "r"(b1), "f"(0.0f));
}

__device__ inline void mma_bf16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// d += a b of 8-bit integers, a 16x32 (row), b 32x8 (col).
__device__ inline void mma_s8(std::int32_t (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                              std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// The same of e4m3 and sums in fp32.
__device__ inline void mma_e4m3(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Four 8x8 matrices of 16-bit elements, transposed: lane l has the address of row l % 8 of matrix l / 8.
__device__ inline void load_transposed(std::uint32_t (&x)[4], std::uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(shared)
               : "memory");
}

__device__ inline void load_transposed(std::uint32_t (&x)[2], std::uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(x[0]), "=r"(x[1])
               : "r"(shared)
               : "memory");
}

/// Stores four or two 8x8 matrices of 16-bit elements held as fragments: lane l has the address of row l % 8
/// of matrix l / 8, 16 bytes.
__device__ inline void store_matrices(std::uint32_t shared, std::uint32_t x0, std::uint32_t x1,
                                      std::uint32_t x2, std::uint32_t x3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(shared), "r"(x0),
               "r"(x1), "r"(x2), "r"(x3)
               : "memory");
}
__device__ inline void store_matrices(std::uint32_t shared, std::uint32_t x0, std::uint32_t x1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1,%2};" ::"r"(shared), "r"(x0), "r"(x1)
               : "memory");
}

/// Transposes an 8x8 matrix of 16-bit elements held as a fragment.
__device__ inline std::uint32_t transpose8x8(std::uint32_t x) {
  std::uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

/// Lane t of each four lanes has row t of a 4 x 4 matrix; it gets column t.
__device__ inline void transpose_quad(std::uint32_t (&w)[4], int lane) {
  const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
  for (int e = 0; e < 4; e += 2) {
    const std::uint32_t got = __shfl_xor_sync(~0u, odd ? w[e] : w[e + 1], 1);
    (odd ? w[e] : w[e + 1]) = got;
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const std::uint32_t got = __shfl_xor_sync(~0u, upper ? w[e] : w[e + 2], 2);
    (upper ? w[e] : w[e + 2]) = got;
  }
}

__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// 2^exponent, from -126 to 127.
__device__ inline float power_of_two(int exponent) {
  return __uint_as_float(static_cast<std::uint32_t>(exponent + 127) << 23);
}

/// Two e4m3 codes (the low, or the `high` 16 bits of `codes`) to f16x2, exact.
__device__ inline std::uint32_t e4m3x2_to_f16x2(std::uint32_t codes, bool high = false) {
  std::uint32_t y;
  if (high) {
    asm("{\n .reg .b16 a, b;\n mov.b32 {a, b}, %1;\n cvt.rn.f16x2.e4m3x2 %0, b;\n}" : "=r"(y) : "r"(codes));
  } else {
    asm("{\n .reg .b16 a, b;\n mov.b32 {a, b}, %1;\n cvt.rn.f16x2.e4m3x2 %0, a;\n}" : "=r"(y) : "r"(codes));
  }
  return y;
}

__device__ inline std::uint32_t pack_f16x2(float low, float high) {
  std::uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

__device__ inline std::uint32_t pack_bf16x2(float low, float high) {
  std::uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

/// Four codes of e4m3, the first one in the low byte; what exceeds 448 becomes that.
__device__ inline std::uint32_t pack_e4m3x4(float a, float b, float c, float d) {
  std::uint32_t y;
  asm("{\n .reg .b16 low, high;\n cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      " cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n mov.b32 %0, {low, high};\n}"
      : "=r"(y)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return y;
}

__device__ inline float2 unpack_f16x2(std::uint32_t x) {
  float2 y;
  asm("{\n .reg .b16 a, b;\n mov.b32 {a, b}, %2;\n cvt.f32.f16 %0, a;\n cvt.f32.f16 %1, b;\n}"
      : "=f"(y.x), "=f"(y.y)
      : "r"(x));
  return y;
}

__device__ inline std::uint32_t add_f16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t y;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

__device__ inline std::uint32_t mul_f16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t y;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

__device__ inline std::uint32_t mul_bf16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t y;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

__device__ inline std::uint32_t fma_f16x2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t y;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}

}  // namespace halftone::cuda
