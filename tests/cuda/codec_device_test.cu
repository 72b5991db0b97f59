// The codecs give the same bits on the device as on the host.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "format/codec.h"
#include "format/hadamard.h"
#include "format/head_dim.h"
#include "format/rope.h"
#include "reference/random.h"

namespace halftone {
namespace {

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t count) : count_(count) { check(cudaMalloc(&data_, count * sizeof(T))); }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) {
    check(cudaMemcpy(data_, host.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  T* get() const { return data_; }
  std::vector<T> to_host() const {
    std::vector<T> host(count_);
    check(cudaMemcpy(host.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  static void check(cudaError_t e) {
    if (e != cudaSuccess) throw std::runtime_error(cudaGetErrorString(e));
  }
  std::size_t count_;
  T* data_ = nullptr;
};

struct Mismatch {
  unsigned long long f16, bf16, e4m3;
};

__global__ void compare_all_inputs(Mismatch* wrong) {
  const std::uint64_t stride = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < (std::uint64_t{1} << 32);
       i += stride) {
    const float x = codec::float_of(static_cast<std::uint32_t>(i));
    if (codec::f16_from_f32(x) != codec::f16_by_definition(x)) atomicAdd(&wrong->f16, 1ull);
    if (codec::bf16_from_f32(x) != codec::bf16_by_definition(x)) atomicAdd(&wrong->bf16, 1ull);
    if (codec::e4m3_from_f32(x) != codec::e4m3_by_definition(x)) atomicAdd(&wrong->e4m3, 1ull);
  }
}

TEST(CodecDeviceTest, ConversionInstructionsEqualTheDefinitionOnAllInputs) {
  const DeviceArray<Mismatch> wrong(std::vector<Mismatch>{{0, 0, 0}});
  compare_all_inputs<<<1024, 256>>>(wrong.get());
  ASSERT_EQ(cudaGetLastError(), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const Mismatch m = wrong.to_host()[0];
  EXPECT_EQ(m.f16, 0u);
  EXPECT_EQ(m.bf16, 0u);
  EXPECT_EQ(m.e4m3, 0u);
}

/// Inverses of every scale there may be, and quotients of every extent.
__global__ void compare_divisions(unsigned long long* wrong) {
  const std::uint64_t stride = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < 0x7f800000u; i += stride) {
    const float x = codec::float_of(static_cast<std::uint32_t>(i));
    bool equal = !codec::is_static_scale(x, 0.0f) || codec::inverse_of(x) == codec::ht_div(1.0f, x);
    for (const float levels : {127.0f, 7.0f, 448.0f, 255.0f, 15.0f}) {
      equal &= codec::round_scale(DType::kFloat32, codec::over_levels(x, levels)) ==
               codec::round_scale(DType::kFloat32, codec::ht_div(x, levels));
    }
    if (!equal) atomicAdd(wrong, 1ull);
  }
}

TEST(CodecDeviceTest, ScalesAndInversesNeedNoDivision) {
  const DeviceArray<unsigned long long> wrong(std::vector<unsigned long long>{0});
  compare_divisions<<<1024, 256>>>(wrong.get());
  ASSERT_EQ(cudaGetLastError(), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(wrong.to_host()[0], 0u);
}

constexpr int kGroupSize = 32;

struct GroupResult {
  codec::Params params;
  std::uint16_t codes[kGroupSize];
  float decoded[kGroupSize];
};

template <class Codec>
HT_HOST_DEVICE GroupResult run_group(const KvFormat& format, const float* x) {
  GroupResult r;
  codec::Range range;
  for (int i = 0; i < kGroupSize; ++i) range.include(x[i]);
  r.params = codec::params_of(format, range);
  for (int i = 0; i < kGroupSize; ++i) {
    const typename Codec::Code code = Codec::encode(r.params, x[i]);
    r.codes[i] = code;
    r.decoded[i] = Codec::decode(r.params, code);
  }
  return r;
}

template <class Codec>
__global__ void run_groups(KvFormat format, const float* x, int groups, GroupResult* results) {
  const int g = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (g < groups) results[g] = run_group<Codec>(format, x + g * kGroupSize);
}

std::vector<float> group_values(int groups) {
  reference::Random random(5);
  std::vector<float> x(static_cast<std::size_t>(groups) * kGroupSize);
  for (int g = 0; g < groups; ++g) {
    const float magnitude = std::ldexp(1.0f, static_cast<int>(random.integer(-40, 40)));
    const float offset = random.chance(0.3) ? magnitude * 3 : 0.0f;
    for (int i = 0; i < kGroupSize; ++i) {
      x[static_cast<std::size_t>(g * kGroupSize + i)] =
          g % 97 == 0 ? offset : random.normal() * magnitude + offset;
    }
  }
  return x;
}

TEST(CodecDeviceTest, GroupsHaveTheSameParamsCodesAndValues) {
  constexpr int kGroups = 20000;
  const std::vector<float> x = group_values(kGroups);
  const DeviceArray<float> device_x(x);
  for (const DType dtype : {DType::kFloat8E4M3, DType::kInt8, DType::kInt4}) {
    for (const bool asymmetric : {false, true}) {
      for (const DType scale : {DType::kFloat16, DType::kFloat32}) {
        if (asymmetric && dtype == DType::kFloat8E4M3) continue;
        const KvFormat format{dtype, Granularity::kTokenHead, asymmetric, 0, scale};
        const DeviceArray<GroupResult> results(kGroups);
        std::vector<GroupResult> expected(kGroups);
        codec::with_codec(format, [&](auto codec) {
          using Codec = decltype(codec);
          run_groups<Codec><<<(kGroups + 127) / 128, 128>>>(format, device_x.get(), kGroups, results.get());
          for (std::size_t g = 0; g < kGroups; ++g)
            expected[g] = run_group<Codec>(format, x.data() + g * kGroupSize);
        });
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        const std::vector<GroupResult> actual = results.to_host();
        for (std::size_t g = 0; g < kGroups; ++g) {
          ASSERT_EQ(std::memcmp(&actual[g], &expected[g], sizeof(GroupResult)), 0)
              << format_name(format) << " group " << g;
        }
      }
    }
  }
}

__global__ void transform(RopePairing pairing, float* x, const float* cos, const float* sin, int dim,
                          int rows) {
  const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (row >= rows) return;
  rope::rotate(pairing, x + row * dim, cos, sin, dim / 2);
  hadamard::rotate(x + row * dim, dim);
}

TEST(CodecDeviceTest, RopeAndHadamardHaveTheSameBits) {
  constexpr int kRows = 512;
  reference::Random random(6);
  for (const int dim : kHeadDims) {
    for (const RopePairing pairing : {RopePairing::kNone, RopePairing::kHalf, RopePairing::kInterleaved}) {
      std::vector<float> x(static_cast<std::size_t>(kRows * dim)), cos(static_cast<std::size_t>(dim / 2)),
          sin(cos.size());
      for (float& v : x) v = random.normal() * 7;
      for (float& v : cos) v = random.normal();
      for (float& v : sin) v = random.normal();
      const DeviceArray<float> device_x(x), device_cos(cos), device_sin(sin);
      transform<<<kRows / 64, 64>>>(pairing, device_x.get(), device_cos.get(), device_sin.get(), dim, kRows);
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      for (int row = 0; row < kRows; ++row) {
        rope::rotate(pairing, x.data() + row * dim, cos.data(), sin.data(), dim / 2);
        hadamard::rotate(x.data() + row * dim, dim);
      }
      ASSERT_EQ(std::memcmp(device_x.to_host().data(), x.data(), x.size() * sizeof(float)), 0) << dim;
    }
  }
}

}  // namespace
}  // namespace halftone
