// The schedule that the device builds is the host's, field by field.
#include <algorithm>
#include <memory>
#include <optional>

#include "cuda/schedule/params.h"
#include "tests/cuda/device_problem.h"
#include "tests/plan/schedule_play.h"

namespace halftone::testing {
namespace {

using namespace schedule_play;
using cuda::DeviceItem;

constexpr std::uint64_t kPlanId = 7;  // of schedule_play::Built

template <class T>
std::vector<T> download_all(const T* device, std::int64_t count) {
  std::vector<T> host(static_cast<std::size_t>(count));
  check_cuda(cudaMemcpy(host.data(), device, host.size() * sizeof(T), cudaMemcpyDeviceToHost));
  return host;
}

template <class T>
const T* upload_all(DeviceMemory& memory, const std::vector<T>& host) {
  check_cuda(cudaMemcpy(memory.data(), host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return reinterpret_cast<const T*>(memory.data());
}

WorkspaceParams sizes_of(const std::vector<const Built*>& hosts) {
  return hosts.size() == 1 ? schedules_only({(*hosts[0])->params})
                           : schedules_only({(*hosts[0])->params, (*hosts[1])->params});
}

/// First tokens of requests in plain K and V.
std::vector<std::int32_t> first_keys(const std::vector<schedule_play::Request>& requests) {
  std::vector<std::int32_t> cu_kv{0};
  for (const schedule_play::Request& r : requests) cu_kv.push_back(cu_kv.back() + r.kv_len);
  return cu_kv;
}

/// How the lengths are given. Without cu_q every request has max_q_len queries. `staged`: the last pass
/// places staged keys.
struct Given {
  bool cu_q = true, cu_kv = false, staged = false;
};

/// The schedules of one or two passes and their lists of items, built on the device over bytes 0xFF.
class DeviceBuilt {
 public:
  /// For the parameters of `hosts`.
  DeviceBuilt(const std::vector<const Built*>& hosts, const std::vector<schedule_play::Request>& requests,
              Given given)
      : sizes_(sizes_of(hosts)), cu_q_((requests.size() + 1) * 4), kv_lengths_((requests.size() + 1) * 4) {
    sizes_.plain = given.cu_kv;
    sizes_.passes[hosts.size() - 1].staged.keys = given.staged ? 1 : 0;
    schedule_.emplace(static_cast<std::size_t>(carve_workspace(sizes_, nullptr).bytes));
    std::vector<std::int32_t> cu_q{0}, kv_lengths;
    for (const schedule_play::Request& r : requests) {
      cu_q.push_back(cu_q.back() + r.q_len);
      kv_lengths.push_back(r.kv_len);
    }
    check_cuda(cudaMemset(schedule_->data(), 0xff, schedule_->size()));
    const Workspace workspace = carve_workspace(sizes_, reinterpret_cast<std::byte*>(schedule_->data()));
    for (const Built* host : hosts) {
      const PassMemory& own = *memory_.emplace_back(std::make_unique<PassMemory>(*host));
      p_.passes[p_.count] = {workspace.passes[static_cast<std::size_t>(p_.count)].schedule,
                             {reinterpret_cast<DeviceItem*>(own.items.data()),
                              reinterpret_cast<std::int32_t*>(own.counts.data())},
                             reinterpret_cast<std::int32_t*>(own.arrivals.data()),
                             reinterpret_cast<std::int32_t*>(own.taken.data())};
      ++p_.count;
    }
    if (given.cu_q) p_.cu_q = upload_all(cu_q_, cu_q);
    (given.cu_kv ? p_.cu_kv : p_.kv_lengths) =
        upload_all(kv_lengths_, given.cu_kv ? first_keys(requests) : kv_lengths);
    p_.plan_id = kPlanId;
    check_cuda(static_cast<cudaError_t>(cuda::launch_schedule(p_, nullptr)));
    check_cuda(cudaDeviceSynchronize());
  }
  const cuda::PassBuildParams& pass(std::size_t index) const { return p_.passes[index]; }
  bool guards_intact() const {
    return schedule_->guards_intact() && cu_q_.guards_intact() && kv_lengths_.guards_intact() &&
           std::all_of(memory_.begin(), memory_.end(), [](const auto& own) {
             return own->items.guards_intact() && own->counts.guards_intact() &&
                    own->arrivals.guards_intact() && own->taken.guards_intact();
           });
  }

 private:
  struct PassMemory {
    explicit PassMemory(const Built& host)
        : items(static_cast<std::size_t>(host->params.workers) * cuda::kListedItems * sizeof(DeviceItem)),
          counts(static_cast<std::size_t>(host->params.workers) * 4),
          arrivals(static_cast<std::size_t>(host.max_slots()) * cuda::kArrivalCounters * 4),
          taken(8) {
      check_cuda(cudaMemset(taken.data(), 0xff, taken.size()));
      check_cuda(cudaMemset(arrivals.data(), 0xff, arrivals.size()));
    }
    DeviceMemory items, counts, arrivals, taken;
  };
  WorkspaceParams sizes_;
  std::optional<DeviceMemory> schedule_;
  DeviceMemory cu_q_, kv_lengths_;  // or cu_kv
  std::vector<std::unique_ptr<PassMemory>> memory_;
  cuda::ScheduleBuildParams p_{};
};

auto fields(const ScheduleHeader& h) {
  return std::tuple(h.magic, h.plan_id, h.total_steps, h.share, h.extra, h.active, h.unit_cost, h.partials,
                    h.total_q, h.total_kv, h.units);
}
/// What a queue has beyond that.
auto queue_fields(const ScheduleHeader& h) { return std::tuple(fields(h), h.cut_units, h.cut_parts); }
auto fields(const WorkerStart& s) {
  return std::tuple(s.position, s.request, s.kv_head, s.block, s.offset, s.before, s.steps, s.first, s.last,
                    s.slot);
}
auto fields(const DeviceItem& i) {
  const WorkItem& w = i.work;
  return std::tuple(w.request, w.kv_head, w.row_begin, w.row_end, w.kv_begin, w.kv_end, w.partial, w.fold,
                    w.finish, i.first_query, i.queries, i.keys, i.first_slot, i.parts, i.arrivals);
}

void expect_same_items(const Built& host, const cuda::PassBuildParams& device) {
  const std::int64_t workers = host->params.workers;
  const std::vector<std::int32_t> counts = download_all(device.list.counts, workers);
  const std::vector<DeviceItem> items = download_all(device.list.items, workers * cuda::kListedItems);
  for (std::int32_t w = 0; w < workers; ++w) {
    cuda::ItemCursor cursor(*host, w);
    std::int32_t count = 0;
    for (DeviceItem item; count <= cuda::kListedItems && cursor.next(item); ++count) {
      if (count == cuda::kListedItems) continue;
      ASSERT_EQ(fields(items[static_cast<std::size_t>(w * cuda::kListedItems + count)]), fields(item))
          << "item " << count << " of worker " << w;
    }
    ASSERT_EQ(counts[static_cast<std::size_t>(w)], count) << "worker " << w;
  }
}

void expect_same_pass(const Built& host, const cuda::PassBuildParams& device) {
  const planning::Schedule& built = device.schedule;
  const ScheduleHeader header = download_all(built.header, 1)[0];
  ASSERT_EQ(fields(header), fields(*host->header));
  const std::int64_t batch = host->params.batch;
  const std::vector<std::int64_t> first_step = download_all(built.first_step, batch + 1);
  const std::vector<std::int32_t> cu_q = download_all(built.cu_q, batch + 1),
                                  kv_lengths = download_all(built.kv_lengths, batch);
  for (std::int64_t r = 0; r <= batch; ++r) {
    const auto i = static_cast<std::size_t>(r);
    ASSERT_EQ(first_step[i], host->first_step[r]) << "request " << r;
    ASSERT_EQ(cu_q[i], host->cu_q[r]) << "request " << r;
    if (r == batch) continue;
    ASSERT_EQ(kv_lengths[i], host->kv_lengths[r]) << "request " << r;
  }
  ASSERT_EQ(built.staged == nullptr, host->staged == nullptr);
  if (host->staged != nullptr) {
    const std::vector<std::int32_t> staged = download_all(built.staged, batch),
                                    cu_kv = download_all(built.cu_kv, batch);
    for (std::int64_t r = 0; r < batch; ++r) {
      ASSERT_EQ(staged[static_cast<std::size_t>(r)], host->staged[r]) << "request " << r;
      ASSERT_EQ(cu_kv[static_cast<std::size_t>(r)], host->cu_kv[r]) << "request " << r;
    }
  }
  for (const std::int32_t n :
       download_all(device.arrivals, std::int64_t{host->header->partials} * cuda::kArrivalCounters)) {
    ASSERT_EQ(n, 0);
  }
  if (host->params.queue_tokens > 0) {
    ASSERT_EQ(queue_fields(header), queue_fields(*host->header));
    ASSERT_EQ(download_all(device.taken, 2), (std::vector<std::int32_t>{0, 0}));
    return;
  }
  const std::vector<WorkerStart> starts = download_all(built.starts, header.active + 1);
  for (std::int32_t w = 0; w <= header.active; ++w)
    ASSERT_EQ(fields(starts[static_cast<std::size_t>(w)]), fields(host->starts[w])) << "worker " << w;
  expect_same_items(host, device);
}

void expect_same_schedule(const ScheduleParams& params, const std::vector<schedule_play::Request>& requests,
                          std::int32_t slack, Given given = {}) {
  const Built host(params, requests, slack, given.staged);
  const DeviceBuilt device({&host}, requests, given);
  ASSERT_TRUE(device.guards_intact());
  expect_same_pass(host, device.pass(0));
  if (::testing::Test::HasFatalFailure() || !given.cu_kv) return;
  const std::vector<std::int32_t> cu_kv = first_keys(requests);
  const std::vector<std::int32_t> copied =
      download_all(device.pass(0).schedule.cu_kv, host->params.batch + 1);
  ASSERT_TRUE(std::equal(copied.begin(), copied.end(), cu_kv.begin())) << "cu_kv";
}

/// Both passes of a plan, in one launch; kernels of few rows have smaller units.
void expect_same_passes(const ScheduleParams& params, std::int32_t rows,
                        const std::vector<schedule_play::Request>& requests, std::int32_t slack) {
  auto [few, many] = divided(params, rows);
  few.row_block = std::min(few.row_block, 16);
  const Built first(few, requests, slack), second(many, requests, slack);
  const DeviceBuilt device({&first, &second}, requests, {});
  ASSERT_TRUE(device.guards_intact());
  expect_same_pass(first, device.pass(0));
  expect_same_pass(second, device.pass(1));
}

/// Both kinds of splits, with and without the cost of a unit, windows, empty requests.
TEST(DeviceSchedule, RandomRaggedBatches) {
  int absolute = 0, with_cost = 0;
  for (std::uint64_t seed = 0; seed < 600; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const RandomCase c = schedule_play::random_case(seed);
    absolute += c.params.absolute ? 1 : 0;
    with_cost += c.params.unit_cost > 0 ? 1 : 0;
    expect_same_schedule(c.params, c.requests, c.slack);
    if (HasFatalFailure()) return;
  }
  EXPECT_GT(absolute, 200);
  EXPECT_GT(with_cost, 100);
}

/// More requests than the kernel has threads.
TEST(DeviceSchedule, LargeBatches) {
  for (const int batch : {1023, 1024, 1025, 5000, 100000}) {
    for (const bool absolute : {false, true}) {
      for (const std::int32_t unit_cost : {0, 7}) {
        if (absolute && unit_cost > 0) continue;
        SCOPED_TRACE(std::to_string(batch) + (absolute ? ", absolute" : ", tiles"));
        Random random(static_cast<std::uint64_t>(batch));
        std::vector<schedule_play::Request> requests(static_cast<std::size_t>(batch));
        for (schedule_play::Request& r : requests) {
          r.q_len = static_cast<std::int32_t>(random.integer(0, 3));
          r.kv_len = static_cast<std::int32_t>(random.integer(0, 400));
        }
        ScheduleParams params = make_params(2, 8, 16, absolute ? 8 : 6, 132, absolute);
        params.unit_cost = unit_cost;
        params.window_right = batch % 2 == 0 ? 0 : -1;
        expect_same_schedule(params, requests, 0);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(DeviceSchedule, TwoPasses) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const RandomCase c = schedule_play::random_case(seed);
    for (const std::int32_t rows : {c.params.group, 4 * c.params.group}) {
      expect_same_passes(c.params, rows, c.requests, c.slack);
      if (HasFatalFailure()) return;
    }
  }
  for (const int batch : {1024, 1025, 3000}) {
    Random random(static_cast<std::uint64_t>(batch));
    std::vector<schedule_play::Request> requests(static_cast<std::size_t>(batch));
    for (schedule_play::Request& r : requests) {
      r.q_len = static_cast<std::int32_t>(random.chance(0.1) ? random.integer(2, 300) : random.integer(0, 1));
      r.kv_len = static_cast<std::int32_t>(random.integer(0, 1000));
    }
    for (const std::int32_t unit_cost : {0, 7}) {
      ScheduleParams params = make_params(2, 8, 64, 7, 132, false);
      params.unit_cost = unit_cost;
      expect_same_passes(params, 8, requests, 0);
      if (HasFatalFailure()) return;
    }
  }
}

/// Equal requests: units stay whole or are cut alike, and cu_q may be absent.
TEST(DeviceSchedule, EqualRequests) {
  for (const int batch : {1, 3, 32, 131, 132, 133, 500, 512, 2048}) {
    for (const std::int32_t unit_cost : {0, 4}) {
      for (const bool with_cu_q : {false, true}) {
        SCOPED_TRACE("batch " + std::to_string(batch));
        ScheduleParams params = make_params(1, 8, 16, 7, 132, false);
        params.unit_cost = unit_cost;
        const std::vector<schedule_play::Request> requests(static_cast<std::size_t>(batch), {2, 8192});
        expect_same_schedule(params, requests, 0, {.cu_q = with_cu_q});
        if (HasFatalFailure()) return;
      }
    }
  }
}

/// Queues over pages, over plain K and V and over staged ones, with and without cuts.
TEST(DeviceSchedule, QueuesOfRandomRaggedBatches) {
  int cut = 0, absolute = 0;
  for (std::uint64_t seed = 0; seed < 600; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomCase c = schedule_play::random_case(seed);
    c.params.unit_cost = 0;
    c.params.queue_tokens = seed % 3 == 0 ? 1 : 2000;
    c.params.queue_heads = static_cast<std::int32_t>(1 + seed % 7 / 3);
    if (seed % 2 == 0) c.params.step_log2 = 4;
    if (seed % 4 != 0) c.params.absolute = false;
    c.params.staged_tokens = seed % 5 == 0 ? 16 : 1;
    const Built host(c.params, c.requests, c.slack);
    cut += host->header->cut_units > 0 ? 1 : 0;
    absolute += c.params.absolute ? 1 : 0;
    for (const Given given : {Given{}, Given{.cu_kv = true}, Given{.staged = true}}) {
      expect_same_schedule(c.params, c.requests, c.slack, given);
      if (HasFatalFailure()) return;
    }
  }
  EXPECT_GT(cut, 10);
  EXPECT_GT(absolute, 50);
}

/// More requests than the kernel has threads; equal ones, of which the last are cut.
TEST(DeviceSchedule, QueuesOfLargeAndEqualBatches) {
  for (const int batch : {1, 3, 131, 133, 1023, 1024, 1025, 5000, 100000}) {
    for (const bool equal : {false, true}) {
      for (const bool plain : {false, true}) {
        SCOPED_TRACE(std::to_string(batch) + (equal ? ", equal" : ", ragged") + (plain ? ", plain" : ""));
        Random random(static_cast<std::uint64_t>(batch));
        std::vector<schedule_play::Request> requests(static_cast<std::size_t>(batch));
        for (schedule_play::Request& r : requests) {
          r.q_len = equal ? 5 : static_cast<std::int32_t>(random.integer(0, 300));
          r.kv_len = equal ? 4000 : static_cast<std::int32_t>(random.integer(0, 400));
        }
        ScheduleParams params = make_params(2, 4, 192, 7, 132, false);
        params.queue_tokens = 10000;
        params.window_right = equal ? -1 : 0;
        expect_same_schedule(params, requests, 0, {.cu_q = !equal, .cu_kv = plain, .staged = !plain});
        if (HasFatalFailure()) return;
      }
    }
  }
}

/// Units that a causal mask leaves nearly alike, of which the last ones are cut.
TEST(DeviceSchedule, ALastChunk) {
  ScheduleParams params = make_params(10, 1, 192, 7, 16, false);
  params.queue_tokens = 100'000;
  params.window_right = 0;
  const std::vector<schedule_play::Request> requests{{768, 32768}};
  EXPECT_GT(Built(params, requests)->header->cut_units, 0);
  expect_same_schedule(params, requests, 0, {});
}

/// A line for short requests beside a queue for the others, in one launch.
TEST(DeviceSchedule, ALineAndAQueue) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const RandomCase c = schedule_play::random_case(seed);
    auto [few, many] = divided(c.params, 4 * c.params.group);
    many.queue_tokens = 3000;
    many.unit_cost = 0;
    const bool staged = seed % 2 == 0;
    const Built line(few, c.requests, c.slack), queue(many, c.requests, c.slack, staged);
    const DeviceBuilt device({&line, &queue}, c.requests, {.staged = staged});
    ASSERT_TRUE(device.guards_intact());
    expect_same_pass(line, device.pass(0));
    expect_same_pass(queue, device.pass(1));
    if (HasFatalFailure()) return;
  }
}

/// Totals beyond 2^31.
TEST(DeviceSchedule, HugeLengths) {
  for (const std::int32_t unit_cost : {0, 40}) {
    ScheduleParams params = make_params(8, 8, 128, 10, 257, false);
    params.unit_cost = unit_cost;
    std::vector<schedule_play::Request> requests(3000, {1, kMaxTokens});
    requests[17] = {1, 1};
    expect_same_schedule(params, requests, 0);
    params.unit_cost = 0;
    params.queue_tokens = 3000;
    expect_same_schedule(params, requests, 0, {.staged = true});
  }
}

}  // namespace
}  // namespace halftone::testing
