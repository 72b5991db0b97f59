// What a process does to the library's threads: fork() loses them, and a limit refuses them.
#include <omp.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <optional>
#include <system_error>
#include <thread>

#include "cpu/threads.h"
#include "tests/misuse/adversarial.h"

namespace halftone::testing {
namespace {

/// Every call that may open a parallel region, with enough work to open it.
struct Calls {
  Outputs attended;
  reference::Dequantised values;
  StaticScaleValues scales;
  Tensor pages, merged;
};

Problem problem_for_threads() {
  AttentionCase row;
  row.requests = {{1, 700}, {3, 130}, {1, 0}, {20, 300}};
  row.k_format = "int8-tensor";
  row.v_format = "int4-g32";
  row.rotate_k = row.sinks = true;
  row.out_dtype = DType::kFloat32;
  row.workers = 6;
  return make_problem(row);
}

Calls call_everything(const Problem& p) {
  Calls calls;
  calls.attended = run_problem(p);
  calls.values = dequantised(*p.cache);
  calls.scales = calibrate(p.k.view(), p.cache->spec.k_format, true);
  calls.pages = std::move(refilled(p, {0xFF})->pages);
  calls.merged = Tensor(DType::kFloat32, calls.attended.out.shape());
  halftone::merge({calls.attended.out.view(), calls.attended.out.view()},
                  {calls.attended.lse.view(), calls.attended.lse.view()}, calls.merged.view(), {});
  return calls;
}

bool same_bits(const Calls& a, const Calls& b) {
  return same_bytes(a.attended.out, b.attended.out) && same_bytes(a.attended.lse, b.attended.lse) &&
         same_bytes(a.values.k, b.values.k) && same_bytes(a.values.v, b.values.v) &&
         a.scales.scale == b.scales.scale && same_bytes(a.pages, b.pages) && same_bytes(a.merged, b.merged);
}

/// Whether `good` holds in a forked child. One that hangs is ended and does not.
bool holds_in_child(const std::function<bool()>& good) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    bool held = false;
    try {
      held = good();
    } catch (const std::exception&) {
    }
    std::_Exit(held ? 0 : 1);  // no destructor of the parent's runs here
  }
  int status = -1;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST(Fork, SameBitsAfterCallsOnManyThreads) {
  omp_set_num_threads(4);
  const Problem p = problem_for_threads();
  const Calls expected = call_everything(p);
  ASSERT_EQ(cpu::region_threads(4), 4);
  EXPECT_TRUE(holds_in_child([&] { return same_bits(expected, call_everything(p)); }));
  EXPECT_TRUE(holds_in_child([&] { return cpu::region_threads(4) == 1; }));
  EXPECT_TRUE(holds_in_child([&] {  // and its children's children
    return holds_in_child([&] { return same_bits(expected, call_everything(p)); });
  }));
  EXPECT_EQ(cpu::region_threads(4), 4);  // the parent's threads are still there
  EXPECT_TRUE(same_bits(expected, call_everything(p)));
}

/// A child's own threads, and a child of a thread that never made a call.
TEST(Fork, FromAndIntoOtherThreads) {
  if (reference::kThreadSanitizer)
    GTEST_SKIP() << "its OpenMP tool (archer) crashes in a child of a thread without a region";
  omp_set_num_threads(4);
  const Problem p = problem_for_threads();
  const Calls expected = call_everything(p);
  EXPECT_TRUE(holds_in_child([&] {
    bool same = false;
    std::thread([&] { same = same_bits(expected, call_everything(p)); }).join();
    return same;
  }));
  bool held = false;
  std::thread([&] { held = holds_in_child([&] { return same_bits(expected, call_everything(p)); }); }).join();
  EXPECT_TRUE(held);
}

/// Each limit is met by a process of its own that has not called anything yet.
class ThreadsDeathTest : public ::testing::Test {
 protected:
  ThreadsDeathTest() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

[[noreturn]] void leave(bool good) { std::_Exit(good ? 0 : 1); }

const auto kGood = ::testing::ExitedWithCode(0);

TEST_F(ThreadsDeathTest, AForkBeforeTheFirstRegionKeepsItsThreads) {
  EXPECT_EXIT(leave(holds_in_child([] {
                omp_set_num_threads(4);
                return cpu::region_threads(4) == 4 && cpu::region_threads(3) == 3;
              })),
              kGood, "");
}

bool threads_start() {
  try {
    std::thread([] {}).join();
    return true;
  } catch (const std::system_error&) {
    return false;
  }
}

/// The system refuses this process more than `others` threads beside those that it has. Root is never
/// refused, so root becomes a user without processes; others have processes that nobody here counted.
void allow_threads(rlim_t others) {
  threads_start();  // ThreadSanitizer's own thread comes with the first one
  rlimit limit{};
  getrlimit(RLIMIT_NPROC, &limit);
  const auto live = std::distance(std::filesystem::directory_iterator("/proc/self/task"),
                                  std::filesystem::directory_iterator());
  limit.rlim_cur = geteuid() == 0 ? static_cast<rlim_t>(live) + others : 1;
  const uid_t nobody_else = 20000 + static_cast<uid_t>(getpid()) % 40000;  // tests may run side by side
  if (setrlimit(RLIMIT_NPROC, &limit) != 0) leave(false);
  if (geteuid() == 0 && setuid(nobody_else) != 0) leave(false);
}

void allow_all_threads() {
  rlimit limit{};
  getrlimit(RLIMIT_NPROC, &limit);
  limit.rlim_cur = limit.rlim_max;
  if (setrlimit(RLIMIT_NPROC, &limit) != 0) leave(false);
}

#define SKIP_UNLESS_LIMITED()                                      \
  if (!holds_in_child([] {                                         \
        allow_threads(0);                                          \
        return !threads_start();                                   \
      })) {                                                        \
    GTEST_SKIP() << "this system does not limit a user's threads"; \
  }

TEST_F(ThreadsDeathTest, RunsOnOneThreadWhereNoneCanStart) {
  SKIP_UNLESS_LIMITED();
  const auto limited = [] {
    omp_set_num_threads(8);
    allow_threads(0);
    const Problem p = problem_for_threads();
    const Calls alone = call_everything(p);
    if (threads_start() || cpu::region_threads(8) != 1) leave(false);
    allow_all_threads();
    bool same = false;
    std::thread([&] {  // its first region: it asks at once
      omp_set_num_threads(8);
      same = cpu::region_threads(8) == 8 && same_bits(alone, call_everything(p));
    })
        .join();
    leave(same);
  };
  EXPECT_EXIT(limited(), kGood, "");
}

TEST_F(ThreadsDeathTest, RunsOnAsManyAsCanStart) {
  SKIP_UNLESS_LIMITED();
  if (geteuid() != 0) GTEST_SKIP() << "only root can become a user whose processes are known";
  const auto limited = [] {
    omp_set_num_threads(8);
    allow_threads(3);
    if (cpu::region_threads(8) != 4 || cpu::region_threads(3) != 3) leave(false);
    const Problem p = problem_for_threads();
    const Calls few = call_everything(p);
    const auto wait = [] { std::this_thread::sleep_for(std::chrono::milliseconds(1100)); };
    wait();
    if (cpu::region_threads(8) != 4) leave(false);  // those that it has already are not counted twice
    allow_all_threads();
    wait();
    leave(cpu::region_threads(8) == 8 && same_bits(few, call_everything(p)));
  };
  EXPECT_EXIT(limited(), kGood, "");
}

/// Calling threads that come one by one, each with threads of its own, until the system has no more.
TEST_F(ThreadsDeathTest, CallingThreadsShareWhatCanStart) {
  SKIP_UNLESS_LIMITED();
  if (geteuid() != 0) GTEST_SKIP() << "only root can become a user whose processes are known";
  const auto limited = [] {
    allow_threads(10);
    constexpr int kCallers = 5;
    std::atomic<int> arrived = 0, team_threads = 0;
    std::vector<std::thread> callers;
    for (int i = 0; i < kCallers; ++i) {
      callers.emplace_back([&] {
        ++arrived;
        while (arrived < kCallers) std::this_thread::yield();
        omp_set_num_threads(4);
        team_threads += cpu::region_threads(4) - 1;
        ++arrived;
        while (arrived < 2 * kCallers) std::this_thread::yield();  // nobody's threads end before
      });
    }
    for (std::thread& caller : callers) caller.join();
    leave(team_threads == 10 - kCallers);
  };
  EXPECT_EXIT(limited(), kGood, "");
}

}  // namespace
}  // namespace halftone::testing
