// Device memory, graphs and timing for the benchmarks. Plain C++: no CUDA header is needed to include this.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string_view>

#include "halftone/types.h"
#include "reference/tensor.h"

namespace halftone::cli::cuda {

/// Throws Error(kDeviceError), or kResourceExhausted when memory was asked for and is not there.
void check(int status, std::string_view call);

/// Memory on the current device; freed at the end.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(std::int64_t bytes);
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  ~DeviceBuffer();

  std::uint8_t* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  std::uint8_t* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

/// The bytes of a host tensor on the device, with a view of the same shape. Absent stays absent.
struct DeviceTensor {
  DeviceTensor() = default;
  DeviceTensor(const reference::Tensor& host, Device device);
  DeviceBuffer memory;
  TensorView view;
};

/// Fills `bytes` at `data` with repetitions of `pattern`, at the speed of device memory.
void fill_with(std::uint8_t* data, std::int64_t bytes, std::span<const std::uint8_t> pattern);

/// Work of one stream, recorded once and replayed with one launch.
class Graph {
 public:
  Graph(Stream stream, const std::function<void(Stream)>& record);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch(Stream stream) const;

 private:
  void* executable_ = nullptr;
};

/// Times calls on a stream of its own, each after a read of `flush_bytes()` that leaves nothing else in L2,
/// and, with `cold_code`, after other instructions than theirs, so that these come from memory, too.
class Timer {
 public:
  static constexpr int kMinRepeats = 25;

  explicit Timer(bool cold_code = false);
  ~Timer();
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  /// Median microseconds between two events around one call, after calls that are not counted. `call` only
  /// enqueues.
  double median_us(int repeats, const std::function<void(Stream)>& call, int warm_ups = 3);

  /// The same for calls that arithmetic bounds, after `kSettle` milliseconds of them, in which clocks settle
  /// at what the power of the device allows; and the mean clock of the SMs in the timed calls.
  static constexpr double kSettle = 40;
  struct Settled {
    double us = 0;
    double mhz = 0;
  };
  Settled settled(int repeats, const std::function<void(Stream)>& call);

  /// The clock alone, MHz, of calls as median_us() times them.
  double clock(int repeats, const std::function<void(Stream)>& call) {
    return with_clocks(0, repeats, call).mhz;
  }

  /// Enqueues flushing reads for about `milliseconds`.
  void keep_busy(double milliseconds);
  void synchronize() const;
  Stream stream() const { return stream_; }
  std::int64_t flush_bytes() const { return flush_.bytes(); }
  bool cold_code() const { return cold_code_; }

 private:
  /// After `before` calls that are not counted.
  Settled with_clocks(int before, int repeats, const std::function<void(Stream)>& call);
  void flush();
  bool cold_code_;
  Stream stream_ = nullptr;
  DeviceBuffer flush_;
  DeviceBuffer sink_;
};

}  // namespace halftone::cli::cuda
