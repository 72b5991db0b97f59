// The books of a cache that deals its own pages, for halftone/_pool.py. Lists of numbers cross as the bytes
// of int32 arrays: one object instead of one for each number.
#include <tvm/ffi/tvm_ffi.h>

#include <cstring>
#include <string>
#include <vector>

#include "convert.h"
#include "halftone/sequences.h"
#include "objects.h"

namespace halftone::python {
namespace {

using ffi::Bytes;
using Ints = std::vector<std::int32_t>;
using Sequences = Ref<SequencesObj>;

Ints to_ints(const Bytes& bytes) {
  Ints ints(bytes.size() / sizeof(std::int32_t));
  if (!ints.empty()) std::memcpy(ints.data(), bytes.data(), ints.size() * sizeof(std::int32_t));
  return ints;
}

Bytes to_bytes(const Ints& ints) {
  return Bytes(std::string(reinterpret_cast<const char*>(ints.data()), ints.size() * sizeof(std::int32_t)));
}

/// The number of copies, then (from, to) of each, then (request, column, page) of each entry.
Bytes to_bytes(const SequenceChanges& changes) {
  Ints ints{static_cast<std::int32_t>(changes.copies.size())};
  ints.reserve(1 + 2 * changes.copies.size() + 3 * changes.entries.size());
  for (const auto& [from, to] : changes.copies) ints.insert(ints.end(), {from, to});
  for (const auto& [request, column, page] : changes.entries) {
    ints.insert(ints.end(), {request, column, page});
  }
  return to_bytes(ints);
}

Sequences make(int batch, int max_len, int page_size, int num_pages) {
  return guarded([&] {
    return Sequences(ffi::make_object<SequencesObj>(SequenceTable(batch, max_len, page_size, num_pages)));
  });
}

/// `rows` has the pages of all requests, `sizes` how many are whose.
Sequences restore(int max_len, int page_size, int num_pages, const Bytes& rows, const Bytes& sizes,
                  const Bytes& lengths) {
  return guarded([&] {
    const Ints flat = to_ints(rows);
    std::vector<Ints> each;
    auto at = flat.begin();
    for (const std::int32_t size : to_ints(sizes)) {
      if (size < 0 || size > flat.end() - at) {
        throw Error(ErrorCode::kInvalidArgument,
                    "sizes do not add up to the pages given, but must: pass what _pages() gave.");
      }
      each.emplace_back(at, at + size);
      at += size;
    }
    return Sequences(
        ffi::make_object<SequencesObj>(SequenceTable(max_len, page_size, num_pages, each, to_ints(lengths))));
  });
}

Sequences copy(const Sequences& books) {
  return guarded([&] { return Sequences(ffi::make_object<SequencesObj>(books->table)); });
}

Bytes lengths(const Sequences& books) {
  return guarded([&] {
    Ints all;
    for (std::int32_t i = 0; i < books->table.batch(); ++i) all.push_back(books->table.length(i));
    return to_bytes(all);
  });
}

Bytes pages(const Sequences& books, int request) {
  return guarded([&] {
    if (request < 0 || request >= books->table.batch()) {
      throw Error(ErrorCode::kOutOfRange, "request is beyond the cache: use one of it.");
    }
    return to_bytes(books->table.pages(request));
  });
}

int references(const Sequences& books, int page) { return books->table.references(page); }
int free_pages(const Sequences& books) { return books->table.free_pages(); }
int room(const Sequences& books) { return books->table.room(); }
bool writes_shared(const Sequences& books) { return books->table.writes_shared(); }

Bytes reserve(const Sequences& books, const Bytes& counts) {
  return guarded([&] { return to_bytes(books->table.reserve(to_ints(counts))); });
}

void advance(const Sequences& books, const Bytes& counts) {
  guarded([&] { books->table.advance(to_ints(counts)); });
}

void set_lengths(const Sequences& books, const Bytes& lengths) {
  guarded([&] { books->table.set_lengths(to_ints(lengths)); });
}

void truncate(const Sequences& books, const Bytes& lengths, bool keep_pages) {
  guarded([&] { books->table.truncate(to_ints(lengths), keep_pages); });
}

void free_request(const Sequences& books, int request) {
  guarded([&] { books->table.free(request); });
}

Bytes fork(const Sequences& books, int src, const Bytes& dst, int length) {
  return guarded([&] { return to_bytes(books->table.fork(src, to_ints(dst), length)); });
}

Bytes reorder(const Sequences& books, const Bytes& index) {
  return guarded([&] { return to_bytes(books->table.reorder(to_ints(index))); });
}

Bytes evict_before(const Sequences& books, const Bytes& positions) {
  return guarded([&] { return to_bytes(books->table.evict_before(to_ints(positions))); });
}

void resize(const Sequences& books, int batch) {
  guarded([&] { books->table.resize(batch); });
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sequences, make);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sequences_restore, restore);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sequences_copy, copy);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sequences_lengths, lengths);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sequences_pages, pages);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sequences_references, references);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sequences_free_pages, free_pages);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sequences_room, room);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sequences_writes_shared, writes_shared);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sequences_reserve, reserve);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sequences_advance, advance);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sequences_set_lengths, set_lengths);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sequences_truncate, truncate);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sequences_free, free_request);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sequences_fork, fork);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sequences_reorder, reorder);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sequences_evict_before, evict_before);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(sequences_resize, resize);

}  // namespace halftone::python
