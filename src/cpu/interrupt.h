// Ending a long call early, between its items.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace halftone::cpu {

/// While it lives, calls of this thread ask `check` now and then, on this thread, whether to end: true ends
/// them. Python's calls have one, so that Ctrl-C ends them.
class Interruptible {
 public:
  using Check = bool (*)() noexcept;
  using Clock = std::chrono::steady_clock;

  /// The period is well below a second and yet long: Python's check waits for the interpreter's lock, a few
  /// ms if other threads compute in Python.
  explicit Interruptible(Check check, Clock::duration period = std::chrono::milliseconds(100))
      : check_(check), period_(period), outer_(current()) {
    current() = this;
  }
  ~Interruptible() { current() = outer_; }
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

  bool check() const { return check_(); }
  Clock::duration period() const { return period_; }

  /// This thread's; null: none.
  static const Interruptible*& current() {
    thread_local constinit const Interruptible* innermost = nullptr;
    return innermost;
  }

 private:
  Check check_;
  Clock::duration period_;
  const Interruptible* outer_;
};

/// Thrown by a call that ended early. What it was to write is then unspecified, but lengths have not
/// advanced.
struct Interrupted {};

/// One call and its threads: of these only the calling one finds an Interruptible, and asks.
class Interruption {
 public:
  Interruption() {
    if (const Interruptible* asked = Interruptible::current()) next_ = Clock::now() + asked->period();
  }

  /// Between long items, on any thread: true if the call is to end.
  bool poll() {
    if (stopped()) return true;
    const Interruptible* asked = Interruptible::current();
    if (asked == nullptr || Clock::now() < next_) return false;
    const bool stop = asked->check();
    next_ = Clock::now() + asked->period();
    if (stop) stop_.store(true, std::memory_order_relaxed);
    return stop;
  }

  /// The same between short items, most of which do not look at the clock.
  bool poll(std::int64_t item) { return item % kShortItems == 0 ? poll() : stopped(); }

  bool stopped() const { return stop_.load(std::memory_order_relaxed); }

  /// At the end of a region: throws Interrupted if it ended early.
  void check() const {
    if (stopped()) throw Interrupted();  // NOLINT(bugprone-std-exception-baseclass): it is no error
  }

 private:
  using Clock = Interruptible::Clock;
  static constexpr std::int64_t kShortItems = 64;

  std::atomic<bool> stop_ = false;
  Clock::time_point next_;  ///< the calling thread's
};

}  // namespace halftone::cpu
