// What tests of bounds expect of every attention kernel.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "format/status.h"
#include "tests/cuda/adversarial_device.h"
#include "tests/cuda/plain_twin.h"

namespace halftone::testing {

/// The schedule counts all queries of the problem, but q, its lists, out and lse have `rows`: these are
/// right, the status says so, and nothing is read or written behind them. `expected`: with all rows.
inline void expect_bounded_queries(const Problem& p, const Plan& plan, const Outputs& expected,
                                   std::int64_t rows) {
  SCOPED_TRACE(p.row.name + ", " + std::to_string(rows) + " rows");
  DeviceRun device(p, plan);
  Uploads uploads;
  TensorView q = p.q.view();
  q.shape[0] = rows;
  device.args.q = uploads.add(q);  // no larger than its view
  if (p.problem.is_listed()) {
    TensorView indices = p.indices.view();
    indices.shape[0] = rows;
    device.args.indices = uploads.add(indices);
  }
  device.args.out.shape[0] = device.args.lse.shape[0] = rows;
  device.schedule();
  device.run();
  const Outputs outputs = device.outputs();
  EXPECT_EQ(status_of(outputs), kStatusBadQueries);
  for (const auto& [got, want] : {std::pair{&outputs.out, &expected.out}, {&outputs.lse, &expected.lse}}) {
    EXPECT_EQ(row_bytes(*got, 0, rows), row_bytes(*want, 0, rows));
    for (const std::uint8_t byte : row_bytes(*got, rows, got->shape()[0])) ASSERT_EQ(byte, 0xFF);
  }
}

/// Entry `column` of the table of request 2, which has 333 tokens and no mask, names no page: its tokens are
/// left out, in both modes of the table.
inline void expect_bad_page_is_left_out(AttentionCase row, int column, std::int32_t bad) {
  SCOPED_TRACE(row.name + ", page " + std::to_string(column) + " of " + std::to_string(row.page_size));
  row.table_mode = BlockTableMode::kTrusted;
  const Problem p = make_problem(row);
  const std::int64_t begin = std::int64_t{column} * row.page_size;
  const Problem twin = plain_without(p, 2, begin, std::min<std::int64_t>(333, begin + row.page_size));
  entry(p, 2, column) = bad;
  const Outputs outputs = run_on_device(p);
  EXPECT_EQ(status_of(outputs), kStatusBadPage);
  EXPECT_EQ(judge_device(twin, outputs), "");
  row.table_mode = BlockTableMode::kClamped;
  const Problem clamped = make_problem(row);
  entry(clamped, 2, column) = bad;
  expect_same_bits(outputs, run_on_device(clamped), "clamped");
}

/// A step of three layers, captured after `set(steps[captured])`, gives eager's bits whatever set(step)
/// changes on the device.
template <class Steps, class Set>
void expect_replays(const DeviceRun& device, const Steps& steps, std::size_t captured, const Set& set) {
  set(steps[captured]);
  const CapturedGraph graph([&](cudaStream_t stream) {
    device.schedule(stream);
    for (int layer = 0; layer < 3; ++layer) device.run(stream);
  });
  for (std::size_t i = 0; i < steps.size(); ++i) {
    set(steps[i]);
    device.schedule();
    device.run();
    const Outputs expected = device.outputs();
    set(steps[i]);
    graph.replay();
    const Outputs replayed = device.outputs();
    expect_same_bits(expected, replayed, "step " + std::to_string(i));
    EXPECT_EQ(status_of(replayed), status_of(expected));
  }
}

/// A table of so few columns, 0: without an address, too, of a problem of one request in pages of 64 tokens:
/// the keys beyond are left out, and the status says so.
inline void expect_narrow_table_is_left_out(const Problem& p, int columns) {
  const Request& request = p.row.requests[0];
  DeviceRun device(p, plan_on_device(p));
  TensorView& table = std::get<PagedKv>(device.args.kv).block_table;
  table.shape[1] = columns;
  if (columns == 0) table.data = nullptr;
  device.schedule();
  device.run();
  const Outputs outputs = device.outputs();
  EXPECT_EQ(status_of(outputs), kStatusBadPage) << columns;
  if (columns == 0) {
    expect_empty_rows(p, outputs, 0, request.q_len);
  } else {
    EXPECT_EQ(judge_device(plain_without(p, 0, 64 * columns, request.kv_len), outputs), "") << columns;
  }
}

/// Three requests over tensors: first keys that lie before these, behind them or anywhere are left out, and
/// nothing else is read or written.
inline void expect_wild_first_keys_are_left_out(const Problem& p) {
  const Plan plan = plan_on_device(p);
  for (const std::vector<std::int32_t>& cu_kv : {std::vector<std::int32_t>{-50, 50, 140, 260},
                                                 {300, 400, 490, 890},
                                                 {0, INT32_MAX, 190, 310},
                                                 {0, 100, 50, 170},
                                                 {0, 800, 50, 750},
                                                 {INT32_MIN, INT32_MAX, INT32_MIN, INT32_MAX},
                                                 {1 << 30, (1 << 30) + 100, (1 << 30) + 190, 1 << 30}}) {
    DeviceRun device(p, plan);
    device.write(device.args.lengths.cu_kv, Tensor::of({4}, cu_kv));
    device.schedule();
    device.run();
    const Outputs outputs = device.outputs();  // checks the guards
    EXPECT_EQ(status_of(outputs) & ~kStatusBadKeys, 0) << p.row.name;
    for (const float x : outputs.out.to_floats())
      ASSERT_TRUE(std::isfinite(x)) << p.row.name << ", " << cu_kv[0];
  }
}

}  // namespace halftone::testing
