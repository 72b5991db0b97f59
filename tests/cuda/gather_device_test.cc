// The gather that `halftone bench` holds sparse decode against: it reads every word of the listed records,
// and no other memory.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "cli/cuda/device.h"
#include "cli/cuda/read_kernels.h"

namespace halftone::cli::cuda {
namespace {

constexpr int kPages = 5, kPageSize = 16;
constexpr std::int32_t kNone = -1;

/// Pages of kSinkMark in which the listed tokens are zeros.
class Pages {
 public:
  Pages(const Gather& layout, std::vector<std::int32_t> slots)
      : layout_(layout),
        slots_(std::move(slots)),
        host_(static_cast<std::size_t>(kPages * layout.page_bytes)),
        pages_(kPages * layout.page_bytes),
        list_(static_cast<std::int64_t>(slots_.size() * sizeof(std::int32_t))) {
    const std::uint32_t poison = kSinkMark;
    for (std::size_t i = 0; i < host_.size(); i += 16) std::memcpy(host_.data() + i, &poison, sizeof(poison));
    for (const std::int32_t slot : slots_) {
      if (slot < 0) continue;
      std::fill_n(host_.begin() + record_at(slot), layout.record_bytes, 0);
      std::fill_n(host_.begin() + apart_at(slot), layout.apart_bytes, 0);
    }
    cudaMemcpy(pages_.data(), host_.data(), host_.size(), cudaMemcpyHostToDevice);
    cudaMemcpy(list_.data(), slots_.data(), static_cast<std::size_t>(list_.bytes()), cudaMemcpyHostToDevice);
  }

  std::int64_t record_at(std::int32_t slot) const {
    return slot / kPageSize * layout_.page_bytes + slot % kPageSize * layout_.record_bytes;
  }
  std::int64_t apart_at(std::int32_t slot) const {
    return slot / kPageSize * layout_.page_bytes + kPageSize * layout_.record_bytes +
           slot % kPageSize * layout_.apart_bytes;
  }
  void set(std::int64_t byte, std::uint32_t value) const {
    cudaMemcpy(pages_.data() + byte, &value, sizeof(value), cudaMemcpyHostToDevice);
  }
  GatherList list() const {
    return {pages_.data(), reinterpret_cast<const std::int32_t*>(list_.data()),
            static_cast<std::int64_t>(slots_.size())};
  }

 private:
  Gather layout_;
  std::vector<std::int32_t> slots_;
  std::vector<std::uint8_t> host_;
  DeviceBuffer pages_, list_;
};

/// What a gather leaves in a sink of zeros.
std::uint32_t sink_after(int kernel, const Gather& gather) {
  const DeviceBuffer sink(16);
  cudaMemset(sink.data(), 0, 16);
  EXPECT_EQ(launch_gather(kernel, gather, sink.data(), nullptr), cudaSuccess);
  std::uint32_t word = 0;
  EXPECT_EQ(cudaMemcpy(&word, sink.data(), sizeof(word), cudaMemcpyDeviceToHost), cudaSuccess);
  return word;
}

Gather layout_of(int record_bytes, int apart_bytes) {
  Gather layout;
  layout.page_size = kPageSize;
  layout.record_bytes = record_bytes;
  layout.apart_bytes = apart_bytes;
  layout.page_bytes = (kPageSize + (apart_bytes > 0 ? 1 : 0)) * record_bytes;
  return layout;
}

TEST(Gather, ReadsTheWordsOfListedRecordsOnly) {
  for (const auto& [record_bytes, apart_bytes] : {std::pair{416, 0}, {656, 0}, {576, 8}, {1152, 0}}) {
    Gather gather = layout_of(record_bytes, apart_bytes);
    const Pages first(gather, {3, kNone, 79, 16, kNone, kNone, 0, 3, 64, 37, 15});
    const Pages second(gather, {kNone, 78, 1});
    gather.first = first.list();
    gather.second = second.list();
    for (int kernel = 0; kernel < gather_kernel_count(); ++kernel) {
      SCOPED_TRACE(testing::Message() << record_bytes << " bytes, " << gather_kernel_name(kernel));
      EXPECT_EQ(sink_after(kernel, gather), 0U);
      const auto expect_read = [&](const Pages& pages, std::int64_t byte) {
        pages.set(byte, kSinkMark);
        EXPECT_EQ(sink_after(kernel, gather), kSinkMark) << byte;
        pages.set(byte, 0);
      };
      expect_read(first, first.record_at(79));
      expect_read(first, first.record_at(16) + record_bytes / 2 / 16 * 16);
      expect_read(first, first.record_at(15) + record_bytes - 4);
      expect_read(second, second.record_at(78) + 16);
      expect_read(second, second.record_at(1) + record_bytes - 16);
      if (apart_bytes == 0) continue;
      expect_read(first, first.apart_at(37));
      expect_read(second, second.apart_at(78) + 4);
    }
  }
}

TEST(Gather, LongListsInSeveralRounds) {
  Gather gather = layout_of(656, 0);
  std::vector<std::int32_t> slots(50000, kNone);
  slots.back() = 21;
  const Pages pages(gather, slots), none(gather, {});
  gather.first = pages.list();
  gather.second = none.list();
  for (int kernel = 0; kernel < gather_kernel_count(); ++kernel) {
    SCOPED_TRACE(gather_kernel_name(kernel));
    EXPECT_EQ(sink_after(kernel, gather), 0U);
    pages.set(pages.record_at(21) + 640, kSinkMark);
    EXPECT_EQ(sink_after(kernel, gather), kSinkMark);
    pages.set(pages.record_at(21) + 640, 0);
  }
}

TEST(Gather, RefusesRecordsThatNoKernelHas) {
  EXPECT_NE(launch_gather(0, layout_of(kMaxRecordBytes + 16, 0), nullptr, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace halftone::cli::cuda
