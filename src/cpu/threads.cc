#include "cpu/threads.h"

#include <omp.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace halftone::cpu {
namespace {

using Clock = std::chrono::steady_clock;

std::atomic<bool> regions_have_threads = false;
std::atomic<bool> threads_were_lost = false;  ///< in a fork: set by the child's only thread

/// Set while the library is loaded: no call has begun, so that none can race with a fork.
const bool kWatchesForks = pthread_atfork(nullptr, nullptr, [] {
                             if (regions_have_threads) threads_were_lost = true;
                           }) == 0;

/// Waits until the system counts a joined thread no more, which is a little later than join() returns.
void wait_until_gone(pid_t thread) {
  while (syscall(SYS_tgkill, getpid(), thread, 0) == 0) std::this_thread::yield();
}

/// How many of `count` threads the system starts. All of them live at once, as those of a region do.
int startable(int count) {
  std::atomic<bool> done = false;
  std::vector<pid_t> ids(static_cast<std::size_t>(count));
  std::vector<std::thread> threads;
  threads.reserve(ids.size());
  try {
    for (pid_t& id : ids) {
      threads.emplace_back([&done, &id] {
        id = static_cast<pid_t>(syscall(SYS_gettid));
        done.wait(false);
      });
    }
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): a limit of processes or of memory
  }
  done = true;
  done.notify_all();
  for (std::thread& thread : threads) thread.join();
  for (std::size_t i = 0; i < threads.size(); ++i) wait_until_gone(ids[i]);
  return static_cast<int>(threads.size());
}

/// What is known of the regions of one calling thread: the run-time keeps threads for each.
struct Regions {
  int asked = 1;
  int got = 1;
  int last = 1;                                        ///< threads of its last region, which live on
  Clock::time_point retry = Clock::time_point::max();  ///< when to ask again after having got fewer
};

/// Asks the system for the threads of a region of `wanted` and has the run-time start them. One calling
/// thread at a time: two would take what only one was promised.
void prove(int wanted, Regions& regions) {
  static std::mutex mutex;
  regions_have_threads = true;  // before the lock, which a child forked meanwhile could never take
  const std::lock_guard lock(mutex);
  const int got = kWatchesForks ? std::max(startable(wanted - 1) + 1, regions.last) : 1;
  int team = 1;
#pragma omp parallel num_threads(got) if (got > 1)
#pragma omp master
  team = omp_get_num_threads();
  regions.asked = wanted;
  regions.got = team;
  regions.retry = team < wanted ? Clock::now() + std::chrono::seconds(1) : Clock::time_point::max();
}

}  // namespace

int region_threads(std::int64_t useful) {
  if (threads_were_lost) return 1;
  const int wanted = static_cast<int>(
      std::min<std::int64_t>(useful, std::min(omp_get_max_threads(), omp_get_thread_limit())));
  if (wanted <= 1 || omp_get_active_level() >= omp_get_max_active_levels()) return 1;
  thread_local Regions regions;
  if (wanted > regions.asked || (wanted > regions.got && Clock::now() >= regions.retry)) {
    prove(wanted, regions);
  }
  return regions.last = std::min(wanted, regions.got);
}

}  // namespace halftone::cpu
