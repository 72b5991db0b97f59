// merge on the GPU agrees with the CPU: to the bit where no exponential is rounded, else to 1e-6.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "tests/cuda/device_problem.h"
#include "tests/expect_error.h"

namespace halftone::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::array kTypes = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

/// Parts of a merge and its outputs, which begin as NaN.
struct Merge {
  std::vector<Tensor> parts, part_lse;
  Tensor out, lse;

  std::vector<TensorView> part_views() const { return views(parts); }
  std::vector<TensorView> lse_views() const { return views(part_lse); }

 private:
  static std::vector<TensorView> views(const std::vector<Tensor>& tensors) {
    std::vector<TensorView> result;
    for (const Tensor& t : tensors) result.push_back(t.view());
    return result;
  }
};

/// `lse` draws the LSE of a (part, row and head).
template <class Lse>
Merge make_merge(Random& random, int count, const std::vector<std::int64_t>& shape, bool mixed, DType out,
                 Lse&& lse) {
  Merge m{{}, {}, Tensor(out, shape), Tensor(DType::kFloat32, {shape[0], shape[1]})};
  const std::int64_t pairs = shape[0] * shape[1];
  for (int i = 0; i < count; ++i) {
    std::vector<float> values(static_cast<std::size_t>(pairs * shape[2])),
        lses(static_cast<std::size_t>(pairs));
    for (float& x : values) x = random.normal();
    for (std::size_t j = 0; j < lses.size(); ++j) {
      lses[j] = lse(i, j);
      if (lses[j] != -kInfinity) continue;
      const auto at = values.begin() + static_cast<std::ptrdiff_t>(j) * shape[2];
      std::fill_n(at, shape[2], std::numeric_limits<float>::quiet_NaN());  // must not count
    }
    m.parts.push_back(Tensor::of(mixed ? random.pick(kTypes) : DType::kFloat32, shape, values));
    m.part_lse.push_back(Tensor::of(DType::kFloat32, {shape[0], shape[1]}, lses));
  }
  return m;
}

Outputs on_cpu(const Merge& m) {
  halftone::merge(m.part_views(), m.lse_views(), m.out.view(), m.lse.view());
  return {m.out.clone(), m.lse.clone(), {}};
}

std::vector<TensorView> upload_all(Uploads& uploads, const std::vector<TensorView>& views) {
  std::vector<TensorView> result;
  for (const TensorView& v : views) result.push_back(uploads.add(v));
  return result;
}

Outputs on_device(const Merge& m) {
  Uploads uploads;
  const std::vector<TensorView> parts = upload_all(uploads, m.part_views()),
                                lses = upload_all(uploads, m.lse_views());
  Outputs outputs{Tensor(m.out.dtype(), m.out.shape()), Tensor(DType::kFloat32, m.lse.shape()), {}};
  const TensorView out = uploads.add(outputs.out.view()), lse = uploads.add(outputs.lse.view());
  halftone::merge(parts, lses, out, lse);
  check_cuda(cudaDeviceSynchronize());
  EXPECT_TRUE(uploads.guards_intact());
  download(out, outputs.out);
  download(lse, outputs.lse);
  return outputs;
}

void expect_close(const Merge& m, const Outputs& expected, const Outputs& actual) {
  const double limit = 1e-6 * (1 + static_cast<double>(m.parts.size()) / 128);
  const std::int64_t dim = m.out.shape()[2];
  for (std::int64_t pair = 0; pair < expected.lse.numel(); ++pair) {
    const float a = expected.lse.get(pair), b = actual.lse.get(pair);
    if (std::isinf(a)) {
      ASSERT_EQ(a, b);
    } else {
      ASSERT_NEAR(a, b, limit * std::max(1.0F, std::abs(a))) << "LSE " << pair;
    }
    for (std::int64_t i = pair * dim; i < (pair + 1) * dim; ++i) {
      double largest = 0;  // of the values that count
      for (std::size_t part = 0; part < m.parts.size(); ++part) {
        if (m.part_lse[part].get(pair) == -kInfinity) continue;
        largest = std::max(largest, std::abs(double{m.parts[part].get(i)}));
      }
      const double x = expected.out.get(i);
      ASSERT_NEAR(x, actual.out.get(i),
                  limit * largest + 2 * reference::rounding_step(m.out.dtype(), std::abs(x)))
          << "element " << i;
    }
  }
}

TEST(DeviceMerge, AgreesWithTheCpu) {
  Random random(1);
  for (const int count : {1, 2, 3, 32, 33, 512}) {
    for (const std::int64_t dim : {1, 7, 64, 80, 128, 256, 2056}) {
      if (count > 33 && dim > 128) continue;
      for (const DType type : kTypes) {
        const Merge m = make_merge(random, count, {5, 3, dim}, dim % 3 != 0, type, [&](int, std::size_t) {
          return random.chance(0.2) ? -kInfinity : 20 * random.normal();
        });
        SCOPED_TRACE(std::to_string(count) + " parts of dim " + std::to_string(dim));
        expect_close(m, on_cpu(m), on_device(m));
      }
    }
  }
}

TEST(DeviceMerge, ManyRows) {
  Random random(2);
  const Merge m = make_merge(random, 4, {700, 9, 128}, true, DType::kBFloat16,
                             [&](int, std::size_t) { return 3 * random.normal(); });
  expect_close(m, on_cpu(m), on_device(m));
}

/// exp(0) is exact: every other operation is the CPU's.
TEST(DeviceMerge, SameBitsForEqualLse) {
  Random random(3);
  for (const int count : {1, 5, 64}) {
    const Merge m =
        make_merge(random, count, {4, 8, 128}, true, DType::kFloat32, [&](int part, std::size_t pair) {
          return part > 0 && random.chance(0.3) ? -kInfinity : static_cast<float>(pair) - 7.5F;
        });
    EXPECT_TRUE(same_bytes(on_cpu(m).out, on_device(m).out)) << count;
  }
}

TEST(DeviceMerge, EmptyPartsAndExtremeLse) {
  Random random(4);
  const Merge empty =
      make_merge(random, 3, {2, 3, 64}, true, DType::kFloat16, [](int, std::size_t) { return -kInfinity; });
  const Outputs zeros = on_device(empty);
  for (std::int64_t i = 0; i < zeros.out.numel(); ++i) ASSERT_EQ(zeros.out.get(i), 0.0F);
  for (std::int64_t i = 0; i < zeros.lse.numel(); ++i) ASSERT_EQ(zeros.lse.get(i), -kInfinity);
  const std::array<float, 4> extremes = {1e30F, -1e30F, -65504.0F, 200.0F};
  const Merge far =
      make_merge(random, 2, {4, 4, 64}, false, DType::kFloat32,
                 [&](int part, std::size_t pair) { return extremes[part == 0 ? pair / 4 : pair % 4]; });
  expect_close(far, on_cpu(far), on_device(far));
}

TEST(DeviceMerge, StridedOrUnalignedAndWithoutLse) {
  Random random(5);
  const Merge m = make_merge(random, 3, {6, 4, 64}, true, DType::kBFloat16,
                             [&](int, std::size_t) { return random.normal(); });
  const Outputs expected = on_cpu(m);
  for (const int offset : {0, 1, 8}) {
    const Tensor wide(DType::kBFloat16, {6, 4, 80});
    Uploads uploads;
    const TensorView base = uploads.add(wide.view());
    TensorView out = base;
    out.shape[2] = 64;
    out.data = static_cast<std::uint16_t*>(out.data) + offset;
    halftone::merge(upload_all(uploads, m.part_views()), upload_all(uploads, m.lse_views()), out, {});
    check_cuda(cudaDeviceSynchronize());
    download(base, wide);
    for (std::int64_t i = 0; i < wide.numel(); ++i) {
      const std::int64_t d = i % 80 - offset, at = i / 80 * 64 + d;
      if (d < 0 || d >= 64) {
        ASSERT_TRUE(std::isnan(wide.get(i))) << i;
      } else {
        const float x = expected.out.get(at);
        ASSERT_NEAR(wide.get(i), x, 1e-5 + 2 * reference::rounding_step(DType::kBFloat16, std::abs(x))) << i;
      }
    }
  }
}

TEST(DeviceMerge, NoRows) {
  Random random(6);
  const auto zero = [](int, std::size_t) { return 0.0F; };
  EXPECT_EQ(on_device(make_merge(random, 2, {0, 4, 64}, false, DType::kFloat32, zero)).out.numel(), 0);
}

TEST(DeviceMerge, AGraphReadsTheParts) {
  Random random(7);
  const Merge first = make_merge(random, 3, {4, 4, 128}, false, DType::kFloat32,
                                 [&](int, std::size_t) { return random.normal(); });
  const Merge second = make_merge(random, 3, {4, 4, 128}, false, DType::kFloat32,
                                  [&](int, std::size_t) { return random.normal(); });
  Uploads uploads;
  const std::vector<TensorView> parts = upload_all(uploads, first.part_views()),
                                lses = upload_all(uploads, first.lse_views());
  Outputs outputs{Tensor(DType::kFloat32, {4, 4, 128}), Tensor(DType::kFloat32, {4, 4}), {}};
  const TensorView out = uploads.add(outputs.out.view()), lse = uploads.add(outputs.lse.view());
  const CapturedGraph graph([&](cudaStream_t stream) { halftone::merge(parts, lses, out, lse, stream); });
  for (const Merge* m : {&first, &second}) {
    for (std::size_t i = 0; i < parts.size(); ++i) {
      for (const auto& [to, from] :
           {std::pair{&parts[i], &m->parts[i]}, std::pair{&lses[i], &m->part_lse[i]}}) {
        check_cuda(cudaMemcpyAsync(to->data, from->bytes().data(), from->bytes().size(),
                                   cudaMemcpyHostToDevice, graph.stream()));
      }
    }
    graph.replay();
    download(out, outputs.out);
    download(lse, outputs.lse);
    expect_close(*m, on_cpu(*m), outputs);
  }
}

TEST(DeviceMerge, Errors) {
  Random random(8);
  const Merge m =
      make_merge(random, 2, {2, 3, 64}, false, DType::kFloat32, [](int, std::size_t) { return 0.0F; });
  Uploads uploads;
  const std::vector<TensorView> parts = upload_all(uploads, m.part_views()),
                                lses = upload_all(uploads, m.lse_views());
  const TensorView out = uploads.add(m.out.view()), lse = uploads.add(m.lse.view());
  constexpr auto kInvalid = ErrorCode::kInvalidArgument;
  expect_error(kInvalid, {"out is on cpu", "cuda:0"},
               [&] { halftone::merge(parts, lses, m.out.view(), lse); });
  expect_error(kInvalid, {"lse is on cpu"}, [&] { halftone::merge(parts, lses, out, m.lse.view()); });
  expect_error(kInvalid, {"parts[1] is on cpu"}, [&] {
    halftone::merge({parts[0], m.parts[1].view()}, lses, out, lse);
  });
  expect_error(kInvalid, {"part_lse[0] is on cpu"}, [&] { halftone::merge(parts, m.lse_views(), out, lse); });
  expect_error(kInvalid, {"out overlaps parts[1]"}, [&] { halftone::merge(parts, lses, parts[1], lse); });
  expect_error(ErrorCode::kUnsupported, {"parts has 513 views", "512"}, [&] {
    halftone::merge(std::vector<TensorView>(513, parts[0]), std::vector<TensorView>(513, lses[0]), out, lse);
  });
}

}  // namespace
}  // namespace halftone::testing
