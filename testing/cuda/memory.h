// Memory of the GPU for tests, with guard regions around it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <list>
#include <stdexcept>
#include <vector>

#include "testing/runner.h"

namespace halftone::testing {

inline void check_cuda(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

/// Device memory with guard regions of bytes 0xA5 around it.
class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t size) : size_(size) {
    check_cuda(cudaMalloc(&base_, size + 2 * kGuard));
    check_cuda(cudaMemset(base_, kByte, size + 2 * kGuard));
  }
  ~DeviceMemory() { cudaFree(base_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  std::uint8_t* data() const { return static_cast<std::uint8_t*>(base_) + kGuard; }
  std::size_t size() const { return size_; }
  bool guards_intact() const {
    std::vector<std::uint8_t> edge(kGuard);
    for (const std::uint8_t* at : {data() - kGuard, data() + size_}) {
      check_cuda(cudaMemcpy(edge.data(), at, kGuard, cudaMemcpyDeviceToHost));
      for (const std::uint8_t byte : edge) {
        if (byte != kByte) return false;
      }
    }
    return true;
  }

 private:
  static constexpr std::size_t kGuard = 512;
  static constexpr std::uint8_t kByte = 0xa5;
  void* base_ = nullptr;
  std::size_t size_;
};

inline void download(const TensorView& device, const Tensor& host) {
  if (device.present()) {
    check_cuda(cudaMemcpy(host.bytes().data(), device.data, host.bytes().size(), cudaMemcpyDeviceToHost));
  }
}

/// Copies of host tensors on device 0.
class Uploads final : public Place {
 public:
  using Place::add;
  TensorView add(const TensorView& host) override {
    if (!host.present()) return host;
    std::int64_t elements = 1;
    for (int i = 0; i < host.rank; ++i) elements += (host.shape[i] - 1) * host.strides[i];
    if (host.numel() == 0) elements = 0;
    const std::size_t bytes = static_cast<std::size_t>(elements) * dtype_bits(host.dtype) / 8;
    memory_.emplace_back(bytes);
    check_cuda(cudaMemcpy(memory_.back().data(), host.data, bytes, cudaMemcpyHostToDevice));
    TensorView device = host;
    device.data = memory_.back().data();
    device.device = {DeviceType::kCuda, 0};
    return device;
  }
  void* reserve(std::size_t bytes) override {
    try {
      memory_.emplace_back(bytes);
    } catch (const std::runtime_error&) {
      (void)cudaGetLastError();
      return nullptr;
    }
    return memory_.back().data();
  }
  void write(const TensorView& placed, const Tensor& host) const override {
    check_cuda(cudaMemcpy(placed.data, host.bytes().data(), host.bytes().size(), cudaMemcpyHostToDevice));
    check_cuda(cudaDeviceSynchronize());  // streams that do not wait for the default one may use it now
  }
  void finish() const override {
    check_cuda(cudaDeviceSynchronize());
    if (!guards_intact()) throw std::logic_error("guard region written");
  }
  void read(const TensorView& placed, const Tensor& host) const override { download(placed, host); }
  bool guards_intact() const {
    for (const DeviceMemory& m : memory_) {
      if (!m.guards_intact()) return false;
    }
    return true;
  }

 private:
  std::list<DeviceMemory> memory_;
};

}  // namespace halftone::testing
