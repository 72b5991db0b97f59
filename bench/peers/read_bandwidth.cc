// Participant of compare_cpu.py: reads memory far larger than the caches on all threads and does nothing
// else. Arguments: the shape (worker.h), bytes=N and streams=1|2|4|8, the places of its share that a thread
// reads in turn.
#include <omp.h>

#include <array>

#include "bench/peers/worker.h"

namespace {

using Vector = std::uint64_t __attribute__((vector_size(64)));

template <int kStreams>
std::uint64_t read_share(const Vector* data, std::size_t count) {
  const std::size_t length = count / kStreams;
  std::array<Vector, kStreams> even{}, odd{};
  for (std::size_t i = 0; i + 1 < length; i += 2) {
    for (std::size_t s = 0; s < kStreams; ++s) {
      even[s] += data[s * length + i];
      odd[s] += data[s * length + i + 1];
    }
  }
  std::uint64_t sum = 0;
  for (std::size_t s = 0; s < kStreams; ++s) {
    for (int lane = 0; lane < 8; ++lane) sum += even[s][lane] + odd[s][lane];
  }
  return sum;
}

std::uint64_t read_all(const peers::Buffer& buffer, std::int64_t streams) {
  std::uint64_t sum = 0;
#pragma omp parallel reduction(+ : sum)
  {
    const std::size_t count =
        buffer.bytes() / sizeof(Vector) / static_cast<std::size_t>(omp_get_num_threads());
    const auto* share = reinterpret_cast<const Vector*>(buffer.data()) +
                        count * static_cast<std::size_t>(omp_get_thread_num());
    sum += streams == 1   ? read_share<1>(share, count)
           : streams == 2 ? read_share<2>(share, count)
           : streams == 4 ? read_share<4>(share, count)
                          : read_share<8>(share, count);
  }
  return sum;
}

}  // namespace

int main(int argc, char** argv) {
  return peers::participant(argc, argv, [](const peers::Arguments& arguments) {
    const peers::Shape shape(arguments);
    const std::int64_t streams = arguments.integer("streams");
    const peers::Buffer buffer(static_cast<std::size_t>(arguments.integer("bytes")));
    omp_set_num_threads(shape.threads);
#pragma omp parallel for
    for (std::size_t i = 0; i < buffer.bytes(); i += 8) {
      *reinterpret_cast<std::uint64_t*>(buffer.data() + i) = 1;
    }
    std::cout << "{\"bytes\": " << buffer.bytes() << "}" << std::endl;
    volatile std::uint64_t sink = 0;
    peers::serve(
        1, [&](std::int64_t) { sink = sink + read_all(buffer, streams); },
        [] { return std::vector<float>{}; });
  });
}
