// The schedules that the device builds beside the host's, field by field.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>

#include "cuda/schedule/params.h"
#include "plan/listed.h"
#include "tests/cuda/device_problem.h"
#include "tests/plan/schedule_play.h"

namespace halftone::testing {

using namespace schedule_play;
using cuda::DeviceItem;

inline constexpr std::uint64_t kPlanId = 7;  // of schedule_play::Built

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

inline WorkspaceParams sizes_of(const std::vector<const Built*>& hosts) {
  return hosts.size() == 1 ? schedules_only({(*hosts[0])->params})
                           : schedules_only({(*hosts[0])->params, (*hosts[1])->params});
}

/// First tokens of requests in plain K and V.
inline std::vector<std::int32_t> first_keys(const std::vector<schedule_play::Request>& requests) {
  std::vector<std::int32_t> cu_kv{0};
  for (const schedule_play::Request& r : requests) cu_kv.push_back(cu_kv.back() + r.kv_len);
  return cu_kv;
}

/// Lists of keys of as many queries as the schedule has requests, of which the first `live` are there.
/// Without counts each list has all its places, and queries behind the end of the counts have none.
struct Lists {
  std::int32_t top_k = 0, extra_top_k = 0, live = 0;
  std::vector<std::int32_t> counts{}, extra_counts{};

  std::int32_t first(std::int32_t query) const { return count(counts, top_k, query); }
  /// The schedule's request.
  schedule_play::Request request(std::int32_t query) const {
    if (query >= live) return {0, 0};
    return {1, planning::listed_length(first(query), count(extra_counts, extra_top_k, query))};
  }

 private:
  std::int32_t count(const std::vector<std::int32_t>& of, std::int32_t most, std::int32_t query) const {
    if (query >= live) return 0;
    if (of.empty()) return most;
    const auto i = static_cast<std::size_t>(query);
    return i < of.size() ? std::clamp(of[i], 0, most) : 0;
  }
};

/// How the lengths are given. Without cu_q every request has max_q_len queries. `staged`: the last pass
/// places staged keys.
struct Given {
  bool cu_q = true, cu_kv = false, staged = false;
  const Lists* lists = nullptr;  // instead of lengths
  std::optional<bool> small{};   // what the kernel for small batches is expected to take
};

/// The schedules of one or two passes and their lists of items, built on the device over bytes 0xFF.
class DeviceBuilt {
 public:
  /// For the parameters of `hosts`.
  DeviceBuilt(const std::vector<const Built*>& hosts, const std::vector<schedule_play::Request>& requests,
              Given given)
      : sizes_(sizes_of(hosts)),
        cu_q_((requests.size() + 1) * 4),
        kv_lengths_((requests.size() + 1) * 4),
        extra_((requests.size() + 1) * 4) {
    sizes_.plain = given.cu_kv;
    sizes_.lists = given.lists != nullptr;
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
    if (given.lists != nullptr) {
      set_lists(*given.lists);
    } else {
      if (given.cu_q) p_.cu_q = upload_all(cu_q_, cu_q);
      (given.cu_kv ? p_.cu_kv : p_.kv_lengths) =
          upload_all(kv_lengths_, given.cu_kv ? first_keys(requests) : kv_lengths);
    }
    p_.plan_id = kPlanId;
    check_cuda(static_cast<cudaError_t>(cuda::launch_schedule(p_, nullptr)));
    check_cuda(cudaDeviceSynchronize());
  }
  const cuda::PassBuildParams& pass(std::size_t index) const { return p_.passes[index]; }
  const cuda::ScheduleBuildParams& params() const { return p_; }
  bool guards_intact() const {
    return schedule_->guards_intact() && cu_q_.guards_intact() && kv_lengths_.guards_intact() &&
           extra_.guards_intact() && std::all_of(memory_.begin(), memory_.end(), [](const auto& own) {
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
  /// All queries are of one request.
  void set_lists(const Lists& lists) {
    p_.requests = 1;
    p_.cu_q = upload_all(cu_q_, std::vector<std::int32_t>{0, lists.live});
    p_.top_k = lists.top_k, p_.extra_top_k = lists.extra_top_k;
    p_.counted = static_cast<std::int32_t>(lists.counts.size());
    p_.extra_counted = static_cast<std::int32_t>(lists.extra_counts.size());
    if (p_.counted > 0) p_.counts = upload_all(kv_lengths_, lists.counts);
    if (p_.extra_counted > 0) p_.extra_counts = upload_all(extra_, lists.extra_counts);
  }

  WorkspaceParams sizes_;
  std::optional<DeviceMemory> schedule_;
  DeviceMemory cu_q_, kv_lengths_, extra_;  // or cu_kv; counts and extra counts
  std::vector<std::unique_ptr<PassMemory>> memory_;
  cuda::ScheduleBuildParams p_{};
};

inline auto fields(const ScheduleHeader& h) {
  return std::tuple(h.magic, h.plan_id, h.total_steps, h.share, h.extra, h.active, h.unit_cost, h.partials,
                    h.total_q, h.total_kv, h.units);
}
/// What a queue has beyond that.
inline auto queue_fields(const ScheduleHeader& h) { return std::tuple(fields(h), h.cut_units, h.cut_parts); }
inline auto fields(const WorkerStart& s) {
  return std::tuple(s.position, s.request, s.kv_head, s.block, s.offset, s.before, s.steps, s.first, s.last,
                    s.slot);
}
inline auto fields(const DeviceItem& i) {
  const WorkItem& w = i.work;
  return std::tuple(w.request, w.kv_head, w.row_begin, w.row_end, w.kv_begin, w.kv_end, w.partial, w.fold,
                    w.finish, i.first_query, i.queries, i.keys, i.first_slot, i.parts, i.arrivals);
}

inline void expect_same_items(const Built& host, const cuda::PassBuildParams& device) {
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

inline void expect_same_pass(const Built& host, const cuda::PassBuildParams& device) {
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

inline void expect_same_schedule(const ScheduleParams& params,
                                 const std::vector<schedule_play::Request>& requests, std::int32_t slack,
                                 Given given = {}) {
  const Built host(params, requests, slack, given.staged);
  const DeviceBuilt device({&host}, requests, given);
  const bool is_small = cuda::is_small_batch(device.params());
  ASSERT_EQ(is_small, given.small.value_or(is_small));
  ASSERT_TRUE(device.guards_intact());
  expect_same_pass(host, device.pass(0));
  if (::testing::Test::HasFatalFailure()) return;
  if (given.lists != nullptr) {
    const std::vector<std::int32_t> first =
        download_all(device.pass(0).schedule.first_list, host->params.batch);
    for (std::int32_t r = 0; r < host->params.batch; ++r)
      ASSERT_EQ(first[static_cast<std::size_t>(r)], given.lists->first(r)) << "query " << r;
  }
  if (!given.cu_kv) return;
  const std::vector<std::int32_t> cu_kv = first_keys(requests);
  const std::vector<std::int32_t> copied =
      download_all(device.pass(0).schedule.cu_kv, host->params.batch + 1);
  ASSERT_TRUE(std::equal(copied.begin(), copied.end(), cu_kv.begin())) << "cu_kv";
}

/// Both passes of a plan, in one launch; kernels of few rows have smaller units.
inline void expect_same_passes(const ScheduleParams& params, std::int32_t rows,
                               const std::vector<schedule_play::Request>& requests, std::int32_t slack,
                               std::optional<bool> small = {}) {
  auto [few, many] = divided(params, rows);
  few.row_block = std::min(few.row_block, 16);
  const Built first(few, requests, slack), second(many, requests, slack);
  const DeviceBuilt device({&first, &second}, requests, {});
  const bool is_small = cuda::is_small_batch(device.params());
  ASSERT_EQ(is_small, small.value_or(is_small));
  ASSERT_TRUE(device.guards_intact());
  expect_same_pass(first, device.pass(0));
  expect_same_pass(second, device.pass(1));
}

}  // namespace halftone::testing
