// AlignedBuffer: sizes, views, and memory that pages and workspaces accept as it is.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "halftone/attention.h"
#include "halftone/memory.h"
#include "reference/sanitizer.h"
#include "tests/expect_error.h"

namespace halftone::testing {
namespace {

using enum ErrorCode;

TEST(AlignedBuffer, IsAlignedAndZero) {
  for (const std::int64_t bytes : {0, 1, 255, 4097}) {
    const AlignedBuffer buffer(bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % AlignedBuffer::kAlignment, 0U);
    EXPECT_EQ(buffer.size(), bytes);
    EXPECT_TRUE(std::all_of(buffer.data(), buffer.data() + bytes, [](std::uint8_t b) { return b == 0; }));
    const TensorView all = buffer.view();
    EXPECT_TRUE(all.present());
    EXPECT_EQ(all.dtype, DType::kUInt8);
    EXPECT_EQ(all.numel(), bytes);
  }
}

TEST(AlignedBuffer, ViewsItsBeginning) {
  const AlignedBuffer buffer(96);
  const TensorView pages = buffer.view({2, 48});
  EXPECT_EQ(pages.data, buffer.data());
  EXPECT_EQ(pages.strides[0], 48);
  EXPECT_NO_THROW((void)buffer.view({1, 48}));
  EXPECT_NO_THROW((void)buffer.view({0, 480}));
  expect_error(kOutOfRange, {"shape takes 144 bytes", "has 96"}, [&] { (void)buffer.view({3, 48}); });
  expect_error(kOutOfRange, {"shape", "96"}, [&] { (void)buffer.view({INT64_MAX, 3}); });
  expect_error(kInvalidArgument, {"extent -1"}, [&] { (void)buffer.view({-1, -48}); });
}

TEST(AlignedBuffer, RefusesImpossibleSizes) {
  expect_error(kInvalidArgument, {"bytes is -1", "0 or more"}, [] { AlignedBuffer(-1); });
  if (reference::kSanitized) GTEST_SKIP() << "sanitizers end a process that asks for so much memory";
  expect_error(kResourceExhausted, {"bytes is", "host memory"}, [] { AlignedBuffer(INT64_MAX - 4096); });
}

TEST(AlignedBuffer, MovesItsMemory) {
  AlignedBuffer from(64);
  const std::uint8_t* const place = from.data();
  const AlignedBuffer to = std::move(from);
  EXPECT_EQ(to.data(), place);
}

TEST(AlignedBuffer, ServesAsWorkspaceAndPages) {
  const KvCacheSpec spec{.k_format = parse_format("int8-head"), .kv_heads = 1, .head_dim = 64};
  const AlignedBuffer pages(page_layout(spec).page_bytes);
  std::vector<std::int32_t> table = {0}, lengths = {1};
  const PagedKv cache{.spec = spec,
                      .pages = pages.view({1, page_layout(spec).page_bytes}),
                      .block_table = TensorView::contiguous(table.data(), DType::kInt32, {1, 1}),
                      .lengths = TensorView::contiguous(lengths.data(), DType::kInt32, {1})};
  const Plan planned = plan({.batch = 1,
                             .q_heads = 1,
                             .kv = spec,
                             .max_kv_len = 64,
                             .q_dtype = DType::kFloat32,
                             .out_dtype = DType::kFloat32});
  const AlignedBuffer workspace(planned.info().workspace_bytes);
  std::vector<float> q(64, 1.0f), out(64, 1.0f);
  schedule(planned, {.kv_lengths = cache.lengths}, workspace.view());
  run(planned,
      {.q = TensorView::contiguous(q.data(), DType::kFloat32, {1, 1, 64}),
       .kv = cache,
       .out = TensorView::contiguous(out.data(), DType::kFloat32, {1, 1, 64})},
      workspace.view());
  EXPECT_EQ(out, std::vector<float>(64, 0.0f));  // zeroed pages hold zeros
}

}  // namespace
}  // namespace halftone::testing
