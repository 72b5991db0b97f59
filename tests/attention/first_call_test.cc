// Sixteen threads make the process's first call at once. The only test of its executable, for a first call
// happens once.
#include <barrier>
#include <thread>

#include "tests/misuse/adversarial.h"

namespace halftone::testing {
namespace {

TEST(FirstCall, SixteenThreadsAtOnce) {
  constexpr int kThreads = 16;
  AttentionCase row;
  row.requests = {{1, 100}, {2, 37}};
  row.head_dim = 64;
  row.k_format = "int8-tensor";
  row.v_format = "int4-g32";
  row.rotate_k = row.rotate_v = true;
  row.sinks = true;
  row.workers = 3;
  std::barrier start(kThreads);
  std::vector<Outputs> results(kThreads);
  std::vector<std::string> errors(kThreads);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      start.arrive_and_wait();
      try {
        const Problem p = make_problem(row);  // parse_format, calibrate and append are first calls, too
        results[t] = run_problem(p);
      } catch (const std::exception& e) {
        errors[t] = e.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const Problem p = make_problem(row);
  const Outputs later = run_problem(p);
  EXPECT_EQ(judge(p, make_reference(p), later), "");
  for (std::size_t t = 0; t < kThreads; ++t) {
    ASSERT_EQ(errors[t], "");
    expect_same_bits(later, results[t], "thread " + std::to_string(t));
  }
}

}  // namespace
}  // namespace halftone::testing
