// The operations on caches misused: every tensor of append, dequantize, calibrate, the FBGEMM rows and merge
// at a misaligned address, with a wrong dtype, rank or device, over another tensor, and through views with
// gaps.
#include <algorithm>
#include <cstring>

#include "tests/append/cache_support.h"
#include "tests/misuse/adversarial.h"

namespace halftone::testing {
namespace {

using enum ErrorCode;

constexpr int kTokens = 6, kHeads = 2, kDim = 64;

/// One healthy call; `tensors` are its arguments by name, `outputs` says which of them it writes.
struct Operation {
  std::string name;
  struct Argument {
    std::string name;
    TensorView view;
    bool output = false;
  };
  std::vector<Argument> arguments;
  std::function<void(const std::vector<TensorView>&)> call;
  std::vector<Tensor> owners;

  TensorView own(Tensor t) {
    owners.push_back(std::move(t));
    return owners.back().view();
  }
  std::vector<TensorView> views() const {
    std::vector<TensorView> result;
    for (const Argument& a : arguments) result.push_back(a.view);
    return result;
  }
};

/// Bytes that are a usable number as any dtype: 0.747 as a float, so that a tensor laid over them holds valid
/// values.
Tensor filled(DType dtype, std::vector<std::int64_t> shape) {
  Tensor t(dtype, std::move(shape));
  t.fill_bytes(0x3F);
  return t;
}

Tensor floats(std::vector<std::int64_t> shape, float low = 0.5F) {
  Tensor t(DType::kFloat32, std::move(shape));
  for (std::int64_t i = 0; i < t.numel(); ++i) t.set(i, low + static_cast<float>(i % 7) * 0.125F);
  return t;
}

Operation append_operation(bool by_slots) {
  Operation op;
  op.name = by_slots ? "append by slots" : "append by lengths";
  const KvCacheSpec spec{
      parse_format("int8-tensor"), parse_format("int8-static-head-asym"), kHeads, kDim, 0, 16};
  op.arguments = {
      {"cache.pages", op.own(filled(DType::kUInt8, {4, page_layout(spec).page_bytes})), true},
      {"k", op.own(floats({kTokens, kHeads, kDim}))},
      {"v", op.own(floats({kTokens, kHeads, kDim}))},
      {"cache.k_scale.scale", op.own(floats({1}))},
      {"cache.v_scale.scale", op.own(floats({kHeads}))},
      {"cache.v_scale.min", op.own(floats({kHeads}))},
      {"rope.cos", op.own(floats({9, kDim / 2}))},
      {"rope.sin", op.own(floats({9, kDim / 2}))},
      {"rope.positions", op.own(Tensor::of({kTokens}, std::vector<std::int32_t>{0, 1, 2, 3, 4, 8}))},
      {"status", op.own(filled(DType::kInt32, {1})), true},
  };
  if (by_slots) {
    const std::vector<std::int64_t> slots = {0, 1, -1, 17, 33, 63};
    op.arguments.push_back({"slot_mapping", op.own(Tensor::of({kTokens}, slots))});
  } else {
    op.arguments.push_back({"cu_seqlens", op.own(Tensor::of({3}, std::vector<std::int32_t>{0, 4, 6}))});
    op.arguments.push_back({"cache.lengths", op.own(Tensor::of({2}, std::vector<std::int32_t>{0, 3}))});
    op.arguments.push_back(
        {"cache.block_table", op.own(Tensor::of({2, 2}, std::vector<std::int32_t>{3, 0, 1, 2}))});
  }
  op.call = [spec, by_slots](const std::vector<TensorView>& t) {
    PagedKv cache;
    cache.spec = spec;
    cache.pages = t[0];
    cache.k_scale = {t[3], {}};
    cache.v_scale = {t[4], t[5]};
    AppendArgs args;
    args.k = t[1];
    args.v = t[2];
    args.rope = {RopePairing::kHalf, t[6], t[7], t[8]};
    args.status = t[9];
    (by_slots ? args.slot_mapping : args.cu_seqlens) = t[10];
    if (!by_slots) {
      cache.lengths = t[11];
      cache.block_table = t[12];
    }
    append(cache, args);
  };
  return op;
}

Operation dequantize_operation() {
  Operation op;
  op.name = "dequantize";
  const KvCacheSpec spec{parse_format("int8-tensor"), parse_format("int4-g32"), kHeads, kDim, 0, 16};
  op.arguments = {
      {"cache.pages", op.own(filled(DType::kUInt8, {4, page_layout(spec).page_bytes}))},
      {"cache.block_table", op.own(Tensor::of({2, 2}, std::vector<std::int32_t>{3, 0, 1, 2}))},
      {"cache.lengths", op.own(Tensor::of({2}, std::vector<std::int32_t>{4, 2}))},
      {"cache.k_scale.scale", op.own(floats({1}))},
      {"k_out", op.own(filled(DType::kFloat32, {kTokens, kHeads, kDim})), true},
      {"v_out", op.own(filled(DType::kFloat32, {kTokens, kHeads, kDim})), true},
  };
  op.call = [spec](const std::vector<TensorView>& t) {
    PagedKv cache;
    cache.spec = spec;
    cache.pages = t[0];
    cache.block_table = t[1];
    cache.lengths = t[2];
    cache.k_scale = {t[3], {}};
    dequantize(cache, t[4], t[5]);
  };
  return op;
}

Operation fbgemm_operation(bool import) {
  Operation op;
  op.name = import ? "import_fbgemm_int4" : "export_fbgemm_int4";
  const KvCacheSpec spec{parse_format("int4-row"), parse_format("int4-row"), kHeads, kDim, 0, 16};
  op.arguments = {
      {"cache.pages", op.own(filled(DType::kUInt8, {2, page_layout(spec).page_bytes})), import},
      {"rows", op.own(filled(DType::kUInt8, {3, kHeads, 4 + kDim / 2})), !import},
      {"slots", op.own(Tensor::of({3}, std::vector<std::int64_t>{31, 0, 7}))},
  };
  op.call = [spec, import](const std::vector<TensorView>& t) {
    PagedKv cache;
    cache.spec = spec;
    cache.pages = t[0];
    if (import) {
      import_fbgemm_int4(cache, KvPart::kV, t[1], t[2]);
    } else {
      export_fbgemm_int4(cache, KvPart::kV, t[2], t[1]);
    }
  };
  return op;
}

Operation calibrate_operation() {
  Operation op;
  op.name = "calibrate";
  op.arguments = {{"x", op.own(floats({kTokens, kHeads, kDim}))}};
  op.call = [](const std::vector<TensorView>& t) { (void)calibrate(t[0], parse_format("fp8-static-head")); };
  return op;
}

Operation merge_operation() {
  Operation op;
  op.name = "merge";
  op.arguments = {
      {"parts[0]", op.own(floats({kTokens, kHeads, kDim}))},
      {"parts[1]", op.own(floats({kTokens, kHeads, kDim}))},
      {"part_lse[0]", op.own(floats({kTokens, kHeads}))},
      {"part_lse[1]", op.own(floats({kTokens, kHeads}))},
      {"out", op.own(filled(DType::kFloat32, {kTokens, kHeads, kDim})), true},
      {"lse", op.own(filled(DType::kFloat32, {kTokens, kHeads})), true},
  };
  op.call = [](const std::vector<TensorView>& t) { halftone::merge({t[0], t[1]}, {t[2], t[3]}, t[4], t[5]); };
  return op;
}

std::vector<Operation> operations() {
  std::vector<Operation> all;
  all.push_back(append_operation(true));
  all.push_back(append_operation(false));
  all.push_back(dequantize_operation());
  all.push_back(fbgemm_operation(true));
  all.push_back(fbgemm_operation(false));
  all.push_back(calibrate_operation());
  all.push_back(merge_operation());
  return all;
}

/// The call with `views` must fail with InvalidArgument and every word, and leave every byte as it was.
void expect_refused(const Operation& op, const std::vector<TensorView>& views,
                    std::initializer_list<std::string_view> words) {
  SCOPED_TRACE(op.name);
  std::vector<Tensor> before;
  for (const Tensor& t : op.owners) before.push_back(t.clone());
  expect_error(kInvalidArgument, words, [&] { op.call(views); });
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_TRUE(same_bytes(before[i], op.owners[i])) << op.arguments[i].name << " was written";
    EXPECT_TRUE(op.owners[i].guards_intact());
  }
}

void shift(TensorView& view, std::int64_t bytes) {
  view.data = static_cast<std::uint8_t*>(view.data) + bytes;
}

TEST(CacheOperations, TheHealthyCallsWork) {
  for (const Operation& op : operations()) {
    EXPECT_NO_THROW(op.call(op.views())) << op.name;
    for (const Tensor& t : op.owners) EXPECT_TRUE(t.guards_intact()) << op.name;
  }
}

TEST(CacheOperations, MisalignedTensors) {
  for (const Operation& op : operations()) {
    for (std::size_t i = 0; i < op.arguments.size(); ++i) {
      const std::string& name = op.arguments[i].name;
      for (const int bytes : {1, 2, 8}) {
        std::vector<TensorView> views = op.views();
        const int needed = name == "cache.pages" ? 16 : dtype_bits(views[i].dtype) / 8;
        if (bytes % needed == 0) continue;
        shift(views[i], bytes);
        expect_refused(op, views, {name, std::to_string(bytes % needed) + " bytes past"});
      }
    }
  }
}

TEST(CacheOperations, WrongDtypeRankShapeAndDevice) {
  for (const Operation& op : operations()) {
    for (std::size_t i = 0; i < op.arguments.size(); ++i) {
      const std::string& name = op.arguments[i].name;
      const auto refused = [&](std::initializer_list<std::string_view> words, auto change) {
        std::vector<TensorView> views = op.views();
        change(views[i]);
        expect_refused(op, views, words);
      };
      for (const DType wrong : {DType::kFloat8E4M3, DType::kInt4, static_cast<DType>(200)}) {
        refused({name}, [&](TensorView& t) { t.dtype = wrong; });
      }
      for (const int rank : {-1, 4, 6, 1000000}) {
        refused({name, "rank", std::to_string(rank)}, [&](TensorView& t) { t.rank = rank; });
      }
      refused({name}, [](TensorView& t) { t.shape[0] = -5; });
      refused({name}, [](TensorView& t) { t.shape[0] = std::int64_t{1} << 62; });
      if (name == "cache.pages" || name == "parts[0]") continue;  // they say which device it is to be
      refused({name, "cuda:1"}, [](TensorView& t) { t.device = {DeviceType::kCuda, 1}; });
    }
  }
}

TEST(CacheOperations, MissingTensors) {
  for (const Operation& op : operations()) {
    for (std::size_t i = 0; i < op.arguments.size(); ++i) {
      const std::string& name = op.arguments[i].name;
      if (name == "status" || name == "lse" || name == "k_out" || name == "v_out") continue;  // optional
      std::vector<TensorView> views = op.views();
      views[i] = {};
      const bool either = name == "slot_mapping" || name == "cu_seqlens";
      expect_refused(op, views, {name, either ? "both absent" : "absent"});
    }
  }
}

/// Every output over every other tensor.
TEST(CacheOperations, OutputAliasingAnotherTensor) {
  for (const Operation& op : operations()) {
    for (std::size_t o = 0; o < op.arguments.size(); ++o) {
      if (!op.arguments[o].output) continue;
      for (std::size_t i = 0; i < op.arguments.size(); ++i) {
        if (i == o) continue;
        // The smaller of the two moves into the larger one, whose bytes stay valid for both dtypes.
        std::vector<TensorView> views = op.views();
        const auto size = [](const TensorView& t) { return t.numel() * dtype_bits(t.dtype) / 8; };
        const bool input_moves = size(views[i]) <= size(views[o]);
        views[input_moves ? i : o].data = views[input_moves ? o : i].data;
        SCOPED_TRACE(op.arguments[o].name + " over " + op.arguments[i].name);
        expect_refused(op, views, {"overlaps"});
      }
    }
  }
}

/// An output that overlaps itself, and last dims that are not contiguous.
TEST(CacheOperations, BadStrides) {
  for (const Operation& op : operations()) {
    for (std::size_t i = 0; i < op.arguments.size(); ++i) {
      std::vector<TensorView> views = op.views();
      if (views[i].shape[static_cast<std::size_t>(views[i].rank - 1)] > 1) {
        views[i].strides[static_cast<std::size_t>(views[i].rank - 1)] = 2;
        expect_refused(op, views, {op.arguments[i].name, "stride", "2"});
      }
      views = op.views();
      if (!op.arguments[i].output || views[i].shape[0] < 2) continue;
      views[i].strides[0] = 0;
      expect_refused(op, views, {op.arguments[i].name, "stride", "0"});
    }
  }
}

/// A copy of `t` with a gap of `gap` elements behind every row of the last dim.
std::pair<Tensor, TensorView> gapped(const Tensor& t, std::int64_t gap) {
  const std::int64_t n = t.shape()[0], h = t.shape()[1], d = t.shape()[2];
  Tensor memory(t.dtype(), {n, h, d + gap});
  TensorView view = memory.view();
  view.shape[2] = d;
  const auto width = static_cast<std::size_t>(dtype_bits(t.dtype()) / 8);
  const auto row = static_cast<std::size_t>(d) * width, step = static_cast<std::size_t>(d + gap) * width;
  for (std::size_t r = 0; r < static_cast<std::size_t>(n * h); ++r) {
    std::memcpy(memory.bytes().data() + r * step, t.bytes().data() + r * row, row);
  }
  return {std::move(memory), view};
}

TEST(CacheOperations, ViewsWithGapsGiveTheSameBits) {
  Random random(51);
  const Tensor x = random_values(random, 20, kHeads, kDim);
  const auto [memory, view] = gapped(x, 5);
  for (const bool rotate : {false, true}) {
    for (const char* format : {"fp8", "fp8-static-head", "int8-tensor-asym"}) {
      const StaticScaleValues dense = calibrate(x.view(), parse_format(format), rotate);
      const StaticScaleValues sparse = calibrate(view, parse_format(format), rotate);
      EXPECT_EQ(dense.scale, sparse.scale) << format;
      EXPECT_EQ(dense.min, sparse.min) << format;
    }
  }

  const KvCacheSpec spec{parse_format("int4-row"), parse_format("int4-row"), kHeads, kDim, 0, 16};
  Cache cache(spec, std::vector<int>{20}, random);
  cache.append(std::vector<int>{20}, x, x);
  const Tensor slots = Tensor::of({20}, cache.slots());
  const Tensor rows(DType::kUInt8, {20, kHeads, 4 + kDim / 2});
  export_fbgemm_int4(cache.view(), KvPart::kK, slots.view(), rows.view());
  const Tensor blank(DType::kUInt8, {20, kHeads, 4 + kDim / 2});
  const auto [wide, wide_view] = gapped(blank, 3);
  export_fbgemm_int4(cache.view(), KvPart::kK, slots.view(), wide_view);
  const auto [expected, unused] = gapped(rows, 3);
  EXPECT_TRUE(same_bytes(expected, wide)) << "other bytes, or a gap was written";
  Cache again = cache.clone();
  for (const KvPart part : {KvPart::kK, KvPart::kV}) {
    import_fbgemm_int4(again.view(), part, wide_view, slots.view());
  }
  EXPECT_TRUE(same_bytes(cache.pages, again.pages));
}

TEST(CacheOperations, RowsOfEveryHeadDimCrossAsTheSameBytes) {
  Random random(53);
  for (const int dim : kHeadDims) {
    for (const char* name : {"int4-row", "int4-g32", "int4-g64", "int4-g128"}) {
      const KvFormat format = parse_format(name);
      if (format.group_size != 0 && dim % format.group_size != 0) continue;
      const int groups = format.group_size == 0 ? 1 : dim / format.group_size;
      const KvCacheSpec spec{format, format, kHeads, dim, 0, 16};
      Cache cache(spec, std::vector<int>{20}, random);
      cache.append(std::vector<int>{20}, random_values(random, 20, kHeads, dim),
                   random_values(random, 20, kHeads, dim));
      const Tensor slots = Tensor::of({20}, cache.slots());
      Cache other = cache.clone();
      std::ranges::fill(other.pages.bytes(), std::uint8_t{0xa5});
      for (const KvPart part : {KvPart::kK, KvPart::kV}) {
        const Tensor rows(DType::kUInt8, {20, kHeads, 4 * groups + dim / 2}),
            back(DType::kUInt8, rows.shape());
        export_fbgemm_int4(cache.view(), part, slots.view(), rows.view());
        import_fbgemm_int4(other.view(), part, rows.view(), slots.view());
        export_fbgemm_int4(other.view(), part, slots.view(), back.view());
        EXPECT_TRUE(same_bytes(rows, back)) << name << ", head_dim " << dim;
      }
    }
  }
}

/// One token for each of very many requests, which share pages: the bytes of the same tokens by slots.
TEST(CacheOperations, AppendToBatchesBeyondSixteenBits) {
  for (const int batch : {65536, 100000}) {
    const KvCacheSpec spec{parse_format("int8-head"), parse_format("int4-g32"), 1, kDim, 0, 16};
    const std::int64_t pages = (batch + 15) / 16;
    Random random(static_cast<std::uint64_t>(batch));
    const Tensor k = random_values(random, batch, 1, kDim), v = random_values(random, batch, 1, kDim);
    const Tensor table(DType::kInt32, {batch, 1}), lengths(DType::kInt32, {batch}),
        cu(DType::kInt32, {batch + 1}), slots(DType::kInt64, {batch});
    for (int i = 0; i < batch; ++i) {
      const auto at = static_cast<std::size_t>(i);
      table.as<std::int32_t>()[at] = static_cast<std::int32_t>(pages - 1 - i / 16);
      lengths.as<std::int32_t>()[at] = i % 16;
      cu.as<std::int32_t>()[at] = i;
      slots.as<std::int64_t>()[at] = (pages - 1 - i / 16) * 16 + i % 16;
    }
    cu.as<std::int32_t>()[static_cast<std::size_t>(batch)] = batch;
    const Tensor by_length(DType::kUInt8, {pages, page_layout(spec).page_bytes}), by_slot = by_length.clone();
    PagedKv cache;
    cache.spec = spec;
    cache.pages = by_length.view();
    cache.block_table = table.view();
    cache.lengths = lengths.view();
    AppendArgs args;
    args.k = k.view();
    args.v = v.view();
    args.cu_seqlens = cu.view();
    append(cache, args);
    cache.pages = by_slot.view();
    args.cu_seqlens = {};
    args.slot_mapping = slots.view();
    append(cache, args);
    EXPECT_TRUE(same_bytes(by_length, by_slot)) << batch;
    EXPECT_TRUE(by_length.guards_intact() && by_slot.guards_intact());
  }
}

TEST(CacheOperations, PagesSharedByTwoSequencesReadAlike) {
  Random random(53);
  const KvCacheSpec spec{parse_format("int8-token"), parse_format("int4-g64"), kHeads, kDim, 0, 16};
  Cache cache(spec, std::vector<int>{40, 40}, random);
  const Tensor x = random_values(random, 80, kHeads, kDim);
  cache.append(std::vector<int>{40, 40}, x, x);
  const auto columns = static_cast<std::size_t>(cache.block_table.shape()[1]);
  for (std::size_t c = 0; c < 2; ++c) {
    cache.block_table.as<std::int32_t>()[columns + c] = cache.block_table.as<std::int32_t>()[c];
  }
  const reference::Dequantised d = dequantised(cache);
  EXPECT_EQ(row_bytes(d.k, 0, 32), row_bytes(d.k, 40, 72));
  EXPECT_EQ(row_bytes(d.v, 0, 32), row_bytes(d.v, 40, 72));
  EXPECT_NE(row_bytes(d.k, 32, 40), row_bytes(d.k, 72, 80));
}

TEST(CacheOperations, NoRequestsAndNoTokens) {
  const KvCacheSpec spec{parse_format("int4-row"), parse_format("int4-row"), kHeads, kDim, 0, 16};
  const Tensor pages(DType::kUInt8, {1, page_layout(spec).page_bytes}), before = pages.clone();
  const Tensor cu = Tensor::of({1}, std::vector<std::int32_t>{0});
  PagedKv cache;
  cache.spec = spec;
  cache.pages = pages.view();
  cache.block_table = TensorView::contiguous(nullptr, DType::kInt32, {0, 3});
  cache.lengths = TensorView::contiguous(nullptr, DType::kInt32, {0});
  const TensorView none = TensorView::contiguous(nullptr, DType::kFloat32, {0, kHeads, kDim});
  AppendArgs args;
  args.k = args.v = none;
  args.cu_seqlens = cu.view();
  append(cache, args);
  dequantize(cache, none, none);
  const TensorView no_rows = TensorView::contiguous(nullptr, DType::kUInt8, {0, kHeads, 4 + kDim / 2});
  const TensorView no_slots = TensorView::contiguous(nullptr, DType::kInt64, {0});
  import_fbgemm_int4(cache, KvPart::kK, no_rows, no_slots);
  export_fbgemm_int4(cache, KvPart::kK, no_slots, no_rows);
  const TensorView no_lse = TensorView::contiguous(nullptr, DType::kFloat32, {0, kHeads});
  halftone::merge({none, none}, {no_lse, no_lse}, none, no_lse);
  EXPECT_TRUE(same_bytes(before, pages));
}

}  // namespace
}  // namespace halftone::testing
