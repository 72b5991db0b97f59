#include "cli/bench/gpu.h"

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "cli/cuda/device.h"
#include "cli/cuda/lists.h"
#include "cli/cuda/projections.h"
#include "cli/cuda/read_kernels.h"
#include "cli/cuda/tensors.h"
#include "cli/host/host.h"
#include "cli/terminal/text.h"
#include "halftone/error.h"
#include "reference/random.h"

namespace halftone::cli::cuda {
namespace {

using reference::Tensor;

/// A run that writes nothing, or NaN, must not pass for a fast one.
void require_written(const DeviceBuffer& out) {
  std::vector<std::uint16_t> host(static_cast<std::size_t>(out.bytes() / 2));
  check(cudaMemcpy(host.data(), out.data(), static_cast<std::size_t>(out.bytes()), cudaMemcpyDeviceToHost),
        "cudaMemcpy");
  const auto bad = std::ranges::count_if(host, [](std::uint16_t x) { return (x & 0x7f80U) == 0x7f80U; });
  if (bad == 0) return;
  throw Error(ErrorCode::kInternal,
              fmt::format("{} of {} outputs are not finite or were not written: run `make test-gpu`.", bad,
                          host.size()));
}

/// No call may have met bad values.
void require_clean(const DeviceTensor& status) {
  std::int32_t flags = 0;
  check(cudaMemcpy(&flags, status.memory.data(), sizeof(flags), cudaMemcpyDeviceToHost), "cudaMemcpy");
  if (flags == 0) return;
  throw Error(ErrorCode::kInternal,
              fmt::format("append set the status word to {}: run `make test-gpu`.", flags));
}

DeviceTensor zero_status(Device device) {
  Tensor status(DType::kInt32, {1});
  status.fill_bytes(0);
  return {status, device};
}

/// The new tokens of a step, which end where the context does, in each of its layers.
struct StepTokens {
  const ProblemShape& shape;
  Device device;
  DeviceBuffer k, v;  ///< layer after layer
  DeviceTensor before, cu_seqlens, status;

  StepTokens(const BenchCase& setup, const std::vector<std::int64_t>& contexts, Device on)
      : shape(setup.shape), device(on), status(zero_status(on)) {
    const std::int64_t tokens = setup.chain * std::int64_t{shape.batch} * shape.q_len;
    const int v_dim = cache_spec(shape).v_dim();
    k = device_activations(shape.dtype, tokens, shape.kv_heads, shape.head_dim, 5);
    v = device_activations(shape.dtype, tokens, shape.kv_heads, v_dim, 6);
    std::vector<std::int32_t> lengths, sums = {0};
    for (const std::int64_t context : contexts) {
      lengths.push_back(static_cast<std::int32_t>(context - shape.q_len));
      sums.push_back(sums.back() + shape.q_len);
    }
    before = DeviceTensor(Tensor::of({shape.batch}, lengths), device);
    cu_seqlens = DeviceTensor(Tensor::of({shape.batch + 1}, sums), device);
  }

  NewTokens layer(int index) const {
    const KvCacheSpec spec = cache_spec(shape);
    const std::int64_t tokens = std::int64_t{shape.batch} * shape.q_len;
    const auto part = [&](const DeviceBuffer& all, int dim) {
      return TensorView::contiguous(all.data() + index * tokens * spec.kv_heads * dim * 2, shape.dtype,
                                    {tokens, spec.kv_heads, dim}, device);
    };
    NewTokens made;
    made.k = part(k, spec.head_dim);
    if (!spec.is_latent()) made.v = part(v, spec.v_dim());
    return made;
  }

  void append_to(PagedKv cache, const NewTokens& tokens, bool settled, Stream stream) const {
    cache.lengths = before.view;
    halftone::append(cache,
                     {.k = tokens.k,
                      .v = tokens.v,
                      .cu_seqlens = cu_seqlens.view,
                      .status = status.view,
                      .cache_settled = settled},
                     stream);
  }
};

/// The rate of the fastest of several kernels, and which one that is.
struct Ceiling {
  double gbs = 0;
  double us = 0;  ///< of a layer
  std::string name;
};

/// Of `count` kernels that read `bytes` of each layer in the microseconds that `us_of` measures with so many
/// calls. Where reads are long, a few calls show which kernels are in question, and only these are measured
/// in full.
Ceiling fastest(int count, const char* (*name)(int), std::int64_t bytes, int layers, int repeats,
                const std::function<double(int kernel, int calls)>& us_of) {
  constexpr int kTrials = 5;
  constexpr std::size_t kFinalists = 3;
  constexpr std::int64_t kLong = std::int64_t{1} << 30;
  std::vector<std::pair<double, int>> order;
  for (int kernel = 0; kernel < count; ++kernel) {
    order.emplace_back(layers * bytes > kLong ? us_of(kernel, kTrials) : 0.0, kernel);
  }
  std::ranges::sort(order);
  if (layers * bytes > kLong) order.resize(std::min(order.size(), kFinalists));
  Ceiling best;
  for (const auto& [trial_us, kernel] : order) {
    const double us = us_of(kernel, repeats);
    if (best.us == 0 || us < best.us) best = {static_cast<double>(bytes) / us / 1e3, us, name(kernel)};
  }
  return best;
}

struct Bench final : GpuBench {
  struct Current {
    explicit Current(int index) { check(cudaSetDevice(index), "cudaSetDevice"); }
  };

  Device device;
  int repeats;
  Current current;
  Timer timer;
  DeviceBuffer sink;
  std::map<std::pair<std::int64_t, int>, Ceiling> reads;  ///< by bytes of a layer and layers
  std::map<std::int64_t, Ceiling> copies;

  Bench(int index, int requested, bool cold_code)
      : device{DeviceType::kCuda, index},
        repeats(requested > 0 ? requested : Timer::kMinRepeats),
        current(index),
        timer(cold_code),
        sink(16) {}

  /// What `time` says of a call, or of a chain of layers that is replayed as one graph.
  template <class Time>
  auto over_layers(int layers, const std::function<void(int, Stream)>& call, const Time& time) {
    if (layers == 1) return time([&](Stream s) { call(0, s); });
    const Graph graph(timer.stream(), [&](Stream s) {
      for (int i = 0; i < layers; ++i) call(i, s);
    });
    return time([&](Stream s) { graph.launch(s); });
  }
  /// Median of a call, or per layer of a chain.
  double time_layers(int layers, int calls, const std::function<void(int, Stream)>& call) {
    return over_layers(layers, call, [&](const auto& f) { return timer.median_us(calls, f); }) / layers;
  }
  double clock_layers(int layers, const std::function<void(int, Stream)>& call) {
    return over_layers(layers, call, [&](const auto& f) { return timer.clock(repeats, f); });
  }
  Timer::Settled time_settled(int layers, const std::function<void(int, Stream)>& call) {
    Timer::Settled times =
        over_layers(layers, call, [&](const auto& f) { return timer.settled(repeats, f); });
    times.us /= layers;
    return times;
  }

  const Ceiling& read_ceiling(const std::uint8_t* data, std::int64_t bytes, std::int64_t layer_stride,
                              int layers);
  Ceiling gather_ceiling(const DeviceCache& cache, const DeviceLists& lists, int layers);
  const Ceiling& copy_ceiling(std::int64_t bytes);
  BenchRow attention(const BenchCase& setup);
  BenchRow append(const BenchCase& setup);
  BenchRow run(const BenchCase& setup) override;
  nlohmann::ordered_json describe() override;
};

const Ceiling& Bench::read_ceiling(const std::uint8_t* data, std::int64_t bytes, std::int64_t layer_stride,
                                   int layers) {
  Ceiling& best = reads[{bytes, layers}];
  if (best.gbs > 0) return best;
  best = fastest(read_kernel_count(), read_kernel_name, bytes, layers, repeats, [&](int kernel, int calls) {
    return time_layers(layers, calls, [&](int layer, Stream stream) {
      check(launch_read(kernel, data + layer * layer_stride, bytes, sink.data(), stream), "a read kernel");
    });
  });
  return best;
}

Ceiling Bench::gather_ceiling(const DeviceCache& cache, const DeviceLists& lists, int layers) {
  const Gather first = gather_of(cache, lists, 0);
  const std::int64_t bytes =
      (first.first.places + first.second.places) * (first.record_bytes + first.apart_bytes);
  return fastest(
      gather_kernel_count(), gather_kernel_name, bytes, layers, repeats, [&](int kernel, int calls) {
        return time_layers(layers, calls, [&](int layer, Stream stream) {
          check(launch_gather(kernel, gather_of(cache, lists, layer), sink.data(), stream), "a gather");
        });
      });
}

const Ceiling& Bench::copy_ceiling(std::int64_t bytes) {
  Ceiling& ceiling = copies[bytes];
  if (ceiling.gbs > 0) return ceiling;
  const std::int64_t half = std::max<std::int64_t>(bytes / 2, 1);
  const DeviceBuffer from(half), to(half);
  check(cudaMemset(from.data(), 1, static_cast<std::size_t>(half)), "cudaMemset");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  const double us = timer.median_us(repeats, [&](Stream stream) {
    check(cudaMemcpyAsync(to.data(), from.data(), static_cast<std::size_t>(half), cudaMemcpyDeviceToDevice,
                          static_cast<cudaStream_t>(stream)),
          "cudaMemcpyAsync");
  });
  ceiling = {static_cast<double>(bytes) / us / 1e3, us,
             "cudaMemcpyAsync that reads and writes as many bytes"};
  return ceiling;
}

BenchRow Bench::attention(const BenchCase& setup) {
  const ProblemShape& shape = setup.shape;
  AttentionProblem problem = to_problem(shape);
  problem.device = device;
  const bool separate = setup.append == LayerAppend::kSeparate, fused = setup.append == LayerAppend::kFused;
  problem.appends = fused;
  const std::vector<std::int64_t> tokens = kv_lengths(setup);
  const std::vector<std::int64_t> q_tokens = q_lengths(setup);
  state_shortest(problem, q_tokens);
  if (setup.suite == Suite::kPrefill && !problem.is_listed()) state_totals(problem, q_tokens, tokens);
  const Plan plan = halftone::plan(problem);
  const Floor floor = floor_of(problem, q_tokens, tokens);
  BenchRow row;
  row.setup = setup;
  row.bytes = floor.bytes();
  if (separate || fused) row.bytes += append_traffic(setup).bytes;
  row.kernel = plan.info().config;
  row.arithmetic = row.kernel.find("universal") == std::string::npos ? "16-bit" : "32-bit";
  // A layer's bytes are read for the ceiling too, Q and O included: the spare bytes stand for the last ones.
  const bool prefill = setup.suite == Suite::kPrefill;
  const auto* const plain = std::get_if<KvTensors>(&problem.kv);
  const DeviceTensors tensors =
      plain != nullptr ? make_tensors(*plain, tokens, setup.chain, device) : DeviceTensors();
  const DeviceCache cache =
      plain == nullptr ? make_cache(cache_spec(shape), tokens, setup.chain, floor.io_bytes + 256, device)
                       : DeviceCache();
  const std::int64_t queries = std::accumulate(q_tokens.begin(), q_tokens.end(), std::int64_t{0});
  const DeviceTensor cu_q = device_sums(q_tokens, device);
  const DeviceLists lists =
      shape.top_k > 0 ? make_lists(shape, q_tokens, tokens, setup.chain, cache, device) : DeviceLists();
  const std::int64_t out_bytes = queries * shape.q_heads * problem.v_dim() * 2;
  const std::int64_t q_bytes = queries * shape.q_heads * shape.head_dim * 2;
  const DeviceBuffer q =
      device_activations(shape.dtype, setup.chain * queries, shape.q_heads, shape.head_dim, 4);
  if (setup.gemm) {  // which writes it
    check(cudaMemset(q.data(), 0xff, static_cast<std::size_t>(q.bytes())), "cudaMemset");
  }
  const DeviceBuffer out(setup.chain * out_bytes);
  check(cudaMemset(out.data(), 0xff, static_cast<std::size_t>(out.bytes())), "cudaMemset");
  const DeviceBuffer space(static_cast<std::int64_t>(plan.workspace_bytes()));
  const TensorView workspace = TensorView::contiguous(space.data(), DType::kUInt8, {space.bytes()}, device);
  std::optional<StepTokens> step;
  if (separate || fused) step.emplace(setup, tokens, device);
  std::optional<Projections> projections;
  if (setup.gemm) projections.emplace(gemm_width(shape), static_cast<int>(queries), setup.chain);
  std::vector<AttentionArgs> layers(static_cast<std::size_t>(setup.chain));
  for (int i = 0; i < setup.chain; ++i) {
    AttentionArgs& args = layers[static_cast<std::size_t>(i)];
    if (plain != nullptr) {
      args.kv = tensors.layer(i);
      args.lengths.cu_kv = tensors.cu_kv.view;
    } else {
      args.kv = cache.layer(i);
      if (shape.top_k > 0) {
        lists.give(args, i);
      } else {
        args.lengths.kv_lengths = cache.lengths.view;
      }
    }
    if (!setup.mixed.empty()) args.lengths.cu_q = cu_q.view;
    args.cache_settled = setup.gemm ? setup.early : i > 0;
    args.new_tokens_late = separate;
    if (fused) {
      args.append = step->layer(i);
      args.status = step->status.view;
      args.lengths.kv_lengths = step->before.view;
    }
    args.q = TensorView::contiguous(q.data() + i * q_bytes, shape.dtype,
                                    {queries, shape.q_heads, shape.head_dim}, device);
    args.out = TensorView::contiguous(out.data() + i * out_bytes, shape.dtype,
                                      {queries, shape.q_heads, problem.v_dim()}, device);
  }
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  const SequenceLengths& lengths = layers.front().lengths;
  schedule(plan, lengths, workspace, timer.stream());
  const auto call = [&](int layer, Stream stream) {
    if (setup.with_schedule && layer == 0) schedule(plan, lengths, workspace, stream);
    const AttentionArgs& args = layers[static_cast<std::size_t>(layer)];
    if (projections) projections->enqueue(layer, args.q.data, stream);
    if (separate) step->append_to(std::get<PagedKv>(args.kv), step->layer(layer), args.cache_settled, stream);
    halftone::run(plan, args, workspace, stream);
  };
  if (prefill) {
    const Timer::Settled times = time_settled(setup.chain, call);
    row.us = times.us;
    row.mhz = times.mhz;
  } else {
    row.us = time_layers(setup.chain, repeats, call);
    if (projections) {
      row.gemm_us = time_layers(setup.chain, repeats, [&](int layer, Stream stream) {
        projections->enqueue(layer, layers[static_cast<std::size_t>(layer)].q.data, stream);
      });
    }
    if (shape.rope_dim != 0) row.mhz = clock_layers(setup.chain, call);
  }
  require_written(out);
  if (step) require_clean(step->status);
  if (projections) row.us = beyond_gemm(row.us, row.gemm_us);
  row.gflops = floor.flops / row.us / 1e3;
  if (prefill) return row;
  const Ceiling ceiling = shape.top_k > 0
                              ? gather_ceiling(cache, lists, setup.chain)
                              : read_ceiling(cache.pages.data(), row.bytes,
                                             cache.num_pages * cache.layout.page_bytes, setup.chain);
  row.ceiling_gbs = ceiling.gbs;
  row.ceiling = ceiling.name;
  if (shape.top_k > 0) row.gather_us = ceiling.us;
  return row;
}

/// Appends q_len tokens to every request. As on the CPU, only the pages of these tokens exist; the first
/// token stands where a context of this length ends in its page.
BenchRow Bench::append(const BenchCase& setup) {
  const ProblemShape& shape = setup.shape;
  const KvCacheSpec spec = cache_spec(shape);
  const AppendTraffic traffic = append_traffic(setup);
  const std::int64_t tokens = traffic.tokens;
  BenchRow row;
  row.setup = setup;
  row.bytes = traffic.bytes;
  const std::int64_t offset = (shape.context - shape.q_len) % spec.page_size;
  const DeviceCache cache =
      make_cache(spec, std::vector<std::int64_t>(static_cast<std::size_t>(shape.batch), offset + shape.q_len),
                 1, traffic.in_bytes, device);
  const DeviceBuffer k = device_activations(shape.dtype, tokens, spec.kv_heads, spec.head_dim, 5);
  const DeviceBuffer v = device_activations(shape.dtype, tokens, spec.kv_heads, spec.v_dim(), 6);
  const std::int64_t request_pages = cache.num_pages / shape.batch;
  const std::vector<std::int64_t> order = permutation<std::int64_t>(cache.num_pages);
  Tensor slots(DType::kInt64, {tokens});
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int64_t position = offset + t % shape.q_len;
    const std::int64_t page = t / shape.q_len * request_pages + position / spec.page_size;
    slots.as<std::int64_t>()[static_cast<std::size_t>(t)] =
        order[static_cast<std::size_t>(page)] * spec.page_size + position % spec.page_size;
  }
  const DeviceTensor device_slots(slots, device), status = zero_status(device);
  AppendArgs args;
  args.k = TensorView::contiguous(k.data(), shape.dtype, {tokens, spec.kv_heads, spec.head_dim}, device);
  if (!spec.is_latent()) {
    args.v = TensorView::contiguous(v.data(), shape.dtype, {tokens, spec.kv_heads, spec.v_dim()}, device);
  }
  args.slot_mapping = device_slots.view;
  args.status = status.view;
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  const auto call = [&](int /*layer*/, Stream stream) { halftone::append(cache.first, args, stream); };
  row.us = time_layers(1, repeats, call);
  if (spec.is_latent()) row.mhz = clock_layers(1, call);
  require_clean(status);
  const Ceiling& ceiling = copy_ceiling(row.bytes);
  row.ceiling_gbs = ceiling.gbs;
  row.ceiling = ceiling.name;
  return row;
}

BenchRow Bench::run(const BenchCase& setup) {
  BenchRow row = setup.suite == Suite::kAppend ? append(setup) : attention(setup);
  row.gbs = static_cast<double>(row.bytes) / row.us / 1e3;
  row.repeats = repeats;
  row.copies = setup.chain;
  row.cold = true;
  return row;
}

nlohmann::ordered_json Bench::describe() {
  const int index = device.index;
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
  std::array<char, 32> bus{};
  check(cudaDeviceGetPCIBusId(bus.data(), static_cast<int>(bus.size()), index), "cudaDeviceGetPCIBusId");
  int driver = 0, runtime = 0;
  check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  const double empty = timer.median_us(
      Timer::kMinRepeats, [](Stream stream) { check(launch_nothing(stream), "an empty kernel"); });
  timer.keep_busy(30);
  const GpuClocks clocks = gpu_clocks(bus.data());
  timer.synchronize();
  const auto version = [](int v) { return fmt::format("{}.{}", v / 1000, v % 1000 / 10); };
  return {{"type", "cuda"},
          {"name", properties.name},
          {"compute_capability", fmt::format("{}.{}", properties.major, properties.minor)},
          {"multiprocessors", properties.multiProcessorCount},
          {"memory_bytes", properties.totalGlobalMem},
          {"l2_bytes", properties.l2CacheSize},
          {"driver", clocks.driver},
          {"driver_cuda", version(driver)},
          {"runtime_cuda", version(runtime)},
          {"sm_clock_mhz", clocks.sm},
          {"sm_clock_max_mhz", clocks.sm_max},
          {"memory_clock_mhz", clocks.memory},
          {"memory_clock_max_mhz", clocks.memory_max},
          {"flush_bytes", timer.flush_bytes()},
          {"cold_code", timer.cold_code()},
          {"empty_kernel_us", empty}};
}

}  // namespace
}  // namespace halftone::cli::cuda

namespace halftone::cli {

std::unique_ptr<GpuBench> gpu_bench(int device, int repeats, bool cold_code) {
  return std::make_unique<cuda::Bench>(device, repeats, cold_code);
}

}  // namespace halftone::cli
