#include "cli/cuda/device.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "cli/cuda/clock_kernel.h"
#include "cli/cuda/code_kernel.h"
#include "cli/cuda/read_kernels.h"
#include "cli/figures/metrics.h"
#include "halftone/error.h"

namespace halftone::cli::cuda {
namespace {

constexpr std::int64_t kFlushBytes = std::int64_t{256} << 20;  // several times the L2 of any Hopper GPU

cudaStream_t stream_of(Stream stream) { return static_cast<cudaStream_t>(stream); }

/// A pair of events around one call.
class Span {
 public:
  Span() {
    check(cudaEventCreate(&begin_), "cudaEventCreate");
    check(cudaEventCreate(&end_), "cudaEventCreate");
  }
  ~Span() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

  void time(Stream stream, const std::function<void(Stream)>& call) const {
    check(cudaEventRecord(begin_, stream_of(stream)), "cudaEventRecord");
    call(stream);
    check(cudaEventRecord(end_, stream_of(stream)), "cudaEventRecord");
  }
  double us() const {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
    return 1e3 * static_cast<double>(milliseconds);
  }

 private:
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

}  // namespace

void check(int status, std::string_view call) {
  if (status == cudaSuccess) return;
  const auto error = static_cast<cudaError_t>(status);
  cudaGetLastError();  // an allocation that failed must not fail the next launch
  if (error == cudaErrorMemoryAllocation) {
    throw Error(ErrorCode::kResourceExhausted,
                fmt::format("{} found no device memory: use less --batch, --context or --chain.", call));
  }
  throw Error(ErrorCode::kDeviceError,
              fmt::format("{} failed with {} ({}): check the device with `halftone doctor`.", call,
                          cudaGetErrorName(error), cudaGetErrorString(error)));
}

DeviceBuffer::DeviceBuffer(std::int64_t bytes) : bytes_(bytes) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1))), "cudaMalloc");
  data_ = static_cast<std::uint8_t*>(memory);
}

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

DeviceBuffer::~DeviceBuffer() { cudaFree(data_); }

DeviceTensor::DeviceTensor(const reference::Tensor& host, Device device) {
  if (!host.present()) return;
  memory = DeviceBuffer(static_cast<std::int64_t>(host.bytes().size()));
  check(cudaMemcpy(memory.data(), host.bytes().data(), host.bytes().size(), cudaMemcpyHostToDevice),
        "cudaMemcpy");
  view = host.view();
  view.data = memory.data();
  view.device = device;
}

void fill_with(std::uint8_t* data, std::int64_t bytes, std::span<const std::uint8_t> pattern) {
  std::int64_t filled = std::min<std::int64_t>(bytes, static_cast<std::int64_t>(pattern.size()));
  check(cudaMemcpy(data, pattern.data(), static_cast<std::size_t>(filled), cudaMemcpyHostToDevice),
        "cudaMemcpy");
  while (filled < bytes) {  // doubling: a handful of copies, the last of them large
    const std::int64_t more = std::min(filled, bytes - filled);
    check(cudaMemcpy(data + filled, data, static_cast<std::size_t>(more), cudaMemcpyDeviceToDevice),
          "cudaMemcpy");
    filled += more;
  }
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

Graph::Graph(Stream stream, const std::function<void(Stream)>& record) {
  cudaGraph_t graph = nullptr;
  check(cudaStreamBeginCapture(stream_of(stream), cudaStreamCaptureModeThreadLocal),
        "cudaStreamBeginCapture");
  record(stream);
  check(cudaStreamEndCapture(stream_of(stream), &graph), "cudaStreamEndCapture");
  cudaGraphExec_t executable = nullptr;
  const cudaError_t status = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  check(status, "cudaGraphInstantiate");
  executable_ = executable;
}

Graph::~Graph() { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(executable_)); }

void Graph::launch(Stream stream) const {
  check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(executable_), stream_of(stream)), "cudaGraphLaunch");
}

Timer::Timer(bool cold_code) : cold_code_(cold_code), flush_(kFlushBytes), sink_(16) {
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  stream_ = stream;
  check(cudaMemset(flush_.data(), 0, static_cast<std::size_t>(flush_.bytes())), "cudaMemset");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

Timer::~Timer() { cudaStreamDestroy(stream_of(stream_)); }

void Timer::flush() {
  if (cold_code_) check(launch_other_code(sink_.data(), stream_), "other instructions");
  check(launch_flush(flush_.data(), flush_.bytes(), sink_.data(), stream_), "the flush of L2");
}

double Timer::median_us(int repeats, const std::function<void(Stream)>& call, int warm_ups) {
  for (int i = 0; i < warm_ups; ++i) call(stream_);
  std::vector<Span> spans(static_cast<std::size_t>(repeats));
  for (const Span& span : spans) {
    flush();  // the GPU works on it while the host enqueues the call
    span.time(stream_, call);
  }
  synchronize();
  std::vector<double> times;
  for (const Span& span : spans) times.push_back(span.us());
  return median(std::move(times));
}

Timer::Settled Timer::settled(int repeats, const std::function<void(Stream)>& call) {
  call(stream_);
  const Span first;
  first.time(stream_, call);
  synchronize();
  const double calls = 1e3 * kSettle / std::max(first.us(), 1.0);
  return with_clocks(static_cast<int>(calls), repeats, call);
}

Timer::Settled Timer::with_clocks(int before, int repeats, const std::function<void(Stream)>& call) {
  const DeviceBuffer memory(std::int64_t{2} * repeats * kMaxMarks *
                            static_cast<std::int64_t>(sizeof(ClockMark)));
  check(cudaMemset(memory.data(), 0, static_cast<std::size_t>(memory.bytes())), "cudaMemset");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  for (int i = 0; i < before; ++i) call(stream_);
  auto* mark = reinterpret_cast<ClockMark*>(memory.data());
  const auto place_marks = [&] {
    check(launch_clock_marks(mark, stream_), "a kernel that reads clocks");
    mark += kMaxMarks;
  };
  std::vector<Span> spans(static_cast<std::size_t>(repeats));
  for (const Span& span : spans) {
    flush();
    place_marks();
    span.time(stream_, call);
    place_marks();
  }
  synchronize();
  std::vector<ClockMark> marks(static_cast<std::size_t>(2 * repeats * kMaxMarks));
  check(cudaMemcpy(marks.data(), memory.data(), static_cast<std::size_t>(memory.bytes()),
                   cudaMemcpyDeviceToHost),
        "cudaMemcpy");
  std::vector<double> times;
  double cycles = 0, nanoseconds = 0;
  for (std::size_t r = 0; r < spans.size(); ++r) {
    times.push_back(spans[r].us());
    for (std::size_t sm = 2 * r * kMaxMarks; sm < (2 * r + 1) * kMaxMarks; ++sm) {
      const ClockMark &before = marks[sm], &after = marks[sm + kMaxMarks];
      if (before.nanoseconds == 0 || after.nanoseconds == 0) continue;
      cycles += static_cast<double>(after.cycles - before.cycles);
      nanoseconds += static_cast<double>(after.nanoseconds - before.nanoseconds);
    }
  }
  return {median(std::move(times)), nanoseconds > 0 ? 1e3 * cycles / nanoseconds : 0.0};
}

void Timer::keep_busy(double milliseconds) {
  constexpr double kReadRate = 4e9;  // bytes per millisecond
  const double reads = milliseconds * kReadRate / static_cast<double>(kFlushBytes);
  for (int i = 0; i < static_cast<int>(reads); ++i) flush();
}

void Timer::synchronize() const { check(cudaStreamSynchronize(stream_of(stream_)), "cudaStreamSynchronize"); }

}  // namespace halftone::cli::cuda
