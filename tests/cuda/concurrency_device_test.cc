// Streams, threads, graphs and devices: what calls share and what they must not.
#include <array>
#include <atomic>
#include <barrier>
#include <thread>

#include "tests/cuda/adversarial_device.h"

namespace halftone::testing {
namespace {

class OwnStream {
 public:
  OwnStream() { check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~OwnStream() { cudaStreamDestroy(stream_); }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

/// Problem i of eight, each with its own formats, shape and policy.
Problem problem_of(int i) {
  static constexpr std::array kFormats = {"bf16",       "int4-g32", "fp8",  "int8-head",
                                          "int8-token", "int4-row", "fp16", "int8-g64"};
  static constexpr std::array kPolicies = {SplitPolicy::kReproducible, SplitPolicy::kBatchInvariant,
                                           SplitPolicy::kFast};
  const auto n = static_cast<std::size_t>(i);
  AttentionCase row = decode_case(kFormats[n]);
  row.requests = {{1, 5000 + 700 * i}, {1 + i % 3, 33 + i}, {1, 129}, {1, 0}, {1, 2000}};
  row.policy = kPolicies[n % 3];
  row.page_size = i % 2 == 0 ? 16 : 64;
  row.mask.causal = i % 2 == 1;
  row.seed = 50 + n;
  return make_problem(row);
}

/// The first calls of the process, from 16 threads at once.
TEST(DeviceConcurrency, FirstCallsFromSixteenThreads) {
  const Problem p = make_problem(decode_case("int8-head"));
  std::array<std::string, 16> verdicts;
  std::barrier start(16);
  std::vector<std::thread> threads;
  for (std::string& verdict : verdicts) {
    threads.emplace_back([&] {
      start.arrive_and_wait();
      try {
        verdict = judge_device(p, run_on_device(p));
      } catch (const std::exception& e) {
        verdict = e.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& verdict : verdicts) EXPECT_EQ(verdict, "");
}

/// Eight streams with a cache, a schedule and a workspace each, their calls interleaved.
TEST(DeviceConcurrency, EightStreams) {
  constexpr int kStreams = 8;
  std::vector<Problem> problems;
  std::vector<Outputs> expected;
  std::vector<std::unique_ptr<DeviceRun>> runs;
  std::vector<std::unique_ptr<OwnStream>> streams;
  for (int i = 0; i < kStreams; ++i) {
    problems.push_back(problem_of(i));
    const Plan plan = plan_on_device(problems.back());
    expected.push_back(run_on_device(problems.back(), plan));
    runs.push_back(std::make_unique<DeviceRun>(problems.back(), plan));
    streams.push_back(std::make_unique<OwnStream>());
  }
  for (int round = 0; round < 30; ++round) {
    for (std::size_t i = 0; i < kStreams; ++i) {
      runs[i]->clear(*streams[i]);
      runs[i]->schedule(*streams[i]);
    }
    for (int layer = 0; layer < 3; ++layer) {
      for (std::size_t i = 0; i < kStreams; ++i) runs[i]->run(*streams[i]);
    }
    for (std::size_t i = 0; i < kStreams; ++i) {
      expect_same_bits(expected[i], runs[i]->outputs(),
                       "stream " + std::to_string(i) + ", round " + std::to_string(round));
    }
    if (HasFailure()) return;
  }
}

/// A thousand runs while another stream keeps the memory busy.
TEST(DeviceConcurrency, ThousandRepeatsUnderMemoryPressure) {
  const Problem p = problem_of(1);
  const Plan plan = plan_on_device(p);
  const Outputs expected = run_on_device(p, plan);
  const DeviceRun device(p, plan);
  const OwnStream own, other;
  const DeviceMemory a(std::size_t{256} << 20), b(std::size_t{256} << 20);
  const Tensor out(p.row.out_dtype, expected.out.shape());
  int wrong = 0;
  for (int repeat = 0; repeat < 1000; ++repeat) {
    check_cuda(cudaMemcpyAsync(a.data(), b.data(), a.size(), cudaMemcpyDeviceToDevice, other));
    device.clear(own);
    device.schedule(own);
    device.run(own);
    check_cuda(cudaMemcpyAsync(out.bytes().data(), device.args.out.data, out.bytes().size(),
                               cudaMemcpyDeviceToHost, own));
    check_cuda(cudaStreamSynchronize(own));
    wrong += same_bytes(expected.out, out) ? 0 : 1;
  }
  EXPECT_EQ(wrong, 0);
  expect_same_bits(expected, device.outputs(), "last");
}

/// Captured at length 1 under every policy and replayed at 128K: eager's bits.
TEST(DeviceConcurrency, GraphsFollowTheLengths) {
  for (const SplitPolicy policy : {SplitPolicy::kReproducible, SplitPolicy::kBatchInvariant}) {
    for (const char* format : {"fp8", "int8-head"}) {
      AttentionCase row = decode_case(format);
      row.requests = {{1, 131072}, {1, 4096}, {1, 100}};
      row.page_size = 64;
      row.policy = policy;
      const Problem p = make_problem(row, Fill::kTiled);
      const Plan plan = plan_on_device(p);
      const DeviceRun device(p, plan);
      const auto set_lengths = [&](std::array<std::int32_t, 3> lengths) {
        check_cuda(cudaMemcpy(device.args.lengths.kv_lengths.data, lengths.data(), sizeof(lengths),
                              cudaMemcpyHostToDevice));
        std::copy(lengths.begin(), lengths.end(), p.cache->lengths.as<std::int32_t>().begin());
        device.clear();
        check_cuda(cudaDeviceSynchronize());
      };
      set_lengths({1, 1, 1});
      const CapturedGraph graph = captured_step(device);
      for (const std::array<std::int32_t, 3> lengths :
           {std::array{1, 1, 1}, std::array{131072, 4096, 100}, std::array{1, 0, 77}}) {
        set_lengths(lengths);
        graph.replay();
        expect_same_bits(run_on_device(p, plan), device.outputs(), format);
      }
    }
  }
}

/// Every call works whatever the current device is, and leaves it as it was.
TEST(DeviceConcurrency, CurrentDeviceStays) {
  const Problem p = problem_of(3);
  const Outputs expected = run_on_device(p);
  const DeviceRun device(p, plan_on_device(p));
  Uploads uploads;
  const reference::Dequantised rows = dequantised(*p.cache);
  const TensorView k = uploads.add(rows.k.view()), v = uploads.add(rows.v.view());
  const std::vector<std::int64_t> slots(static_cast<std::size_t>(rows.k.shape()[0]), -1);
  const Tensor slot_mapping = Tensor::of({rows.k.shape()[0]}, slots);
  AppendArgs tokens;
  tokens.k = k, tokens.v = v;
  tokens.slot_mapping = uploads.add(slot_mapping.view());
  tokens.status = device.args.status;
  const TensorView merged = uploads.add(make_outputs(p).out.view());
  int devices = 0;
  check_cuda(cudaGetDeviceCount(&devices));
  for (int current = 0; current < devices; ++current) {
    check_cuda(cudaSetDevice(current));
    const auto expect_current = [&](const char* call) {
      int now = -1;
      check_cuda(cudaGetDevice(&now));
      EXPECT_EQ(now, current) << "after " << call;
    };
    (void)plan_on_device(p);
    expect_current("plan");
    device.schedule();
    expect_current("schedule");
    device.run();
    expect_current("run");
    append(cache_of(device.args), tokens);
    expect_current("append");
    dequantize(cache_of(device.args), k, v);
    expect_current("dequantize");
    halftone::merge({device.args.out, device.args.out}, {device.args.lse, device.args.lse}, merged, {});
    expect_current("merge");
    TensorView short_space = device.space();
    short_space.shape[0] = 1;
    EXPECT_THROW(run(plan_on_device(p), device.args, short_space), Error);
    expect_current("a refused run");
    check_cuda(cudaSetDevice(0));
    expect_same_bits(expected, device.outputs(), "device " + std::to_string(current));
  }
  RecordProperty("devices", devices);
}

}  // namespace
}  // namespace halftone::testing
