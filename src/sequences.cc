#include "halftone/sequences.h"

#include <algorithm>
#include <functional>
#include <string>
#include <unordered_map>
#include <utility>

#include "plan/fail.h"

namespace halftone {
namespace {

using planning::fail;
using planning::invalid;

}  // namespace

SequenceTable::SequenceTable(std::int32_t batch, std::int32_t max_len, std::int32_t page_size,
                             std::int32_t num_pages)
    : max_len_(max_len), page_size_(page_size), num_pages_(num_pages) {
  for (const auto& [value, name] :
       {std::pair{batch, "batch"}, std::pair{max_len, "max_len"}, std::pair{num_pages, "num_pages"}}) {
    if (value < 0) invalid("{} is {}, but must be 0 or more: give a count.", name, value);
  }
  if (page_size < 1) {
    invalid("page_size is {}, but must be 1 or more: use 16, 32, 64, 128 or 256.", page_size);
  }
  rows_.resize(static_cast<std::size_t>(batch));
}

SequenceTable::SequenceTable(std::int32_t max_len, std::int32_t page_size, std::int32_t num_pages,
                             const std::vector<std::vector<std::int32_t>>& rows,
                             std::span<const std::int32_t> lengths)
    : SequenceTable(static_cast<std::int32_t>(rows.size()), max_len, page_size, num_pages) {
  check_count(lengths.size(), "lengths");
  for (std::size_t i = 0; i < rows.size(); ++i) {
    Row& own = rows_[i];
    if (std::ssize(rows[i]) > pages_of(max_len)) {
      fail(ErrorCode::kOutOfRange,
           "rows[{}] has {} pages, but max_len {} needs at most {}: leave the rest out.", i, rows[i].size(),
           max_len, pages_of(max_len));
    }
    for (const std::int32_t page : rows[i]) {
      const bool evicted = page == kEvicted && std::ssize(own.pages) == own.evicted;
      if (!evicted && (page < 0 || page >= num_pages)) {
        fail(ErrorCode::kOutOfRange,
             "rows[{}][{}] is {}, but must be in [0, {}), or -1 at the front: give a page of the cache.", i,
             own.pages.size(), page, num_pages);
      }
      own.pages.push_back(page);
      own.evicted += evicted;
      if (evicted) continue;
      if (page >= std::ssize(references_)) references_.resize(static_cast<std::size_t>(page) + 1);
      retain(page);
    }
  }
  for (std::size_t page = 0; page < references_.size(); ++page) {  // rising, which is a heap
    if (references_[page] == 0) returned_.push_back(static_cast<std::int32_t>(page));
  }
  set_lengths(lengths);
}

std::int32_t SequenceTable::deal() {
  if (returned_.empty()) {
    references_.push_back(1);
    return static_cast<std::int32_t>(references_.size()) - 1;
  }
  std::ranges::pop_heap(returned_, std::greater{});
  const std::int32_t page = returned_.back();
  returned_.pop_back();
  references_[static_cast<std::size_t>(page)] = 1;
  return page;
}

void SequenceTable::retain(std::int32_t page) {
  if (page != kEvicted) ++references_[static_cast<std::size_t>(page)];
}

void SequenceTable::release(std::int32_t page) {
  if (page == kEvicted || --references_[static_cast<std::size_t>(page)] > 0) return;
  returned_.push_back(page);
  std::ranges::push_heap(returned_, std::greater{});
}

void SequenceTable::shrink(Row& row, std::size_t pages) {
  while (row.pages.size() > pages) {
    release(row.pages.back());
    row.pages.pop_back();
  }
  row.evicted = std::min(row.evicted, static_cast<std::int32_t>(row.pages.size()));
}

std::int32_t SequenceTable::room_of(const Row& row) const {
  auto column = static_cast<std::size_t>(row.length / page_size_);
  while (column < row.pages.size() && references(row.pages[column]) == 1) ++column;
  const std::int64_t end = std::min<std::int64_t>(static_cast<std::int64_t>(column) * page_size_, max_len_);
  return static_cast<std::int32_t>(std::max<std::int64_t>(end - row.length, 0));
}

std::int32_t SequenceTable::room() const {
  std::int32_t room = max_len_;
  for (const Row& row : rows_) room = std::min(room, room_of(row));
  return room;
}

bool SequenceTable::writes_shared() const {
  return std::ranges::any_of(rows_, [&](const Row& row) {
    const auto column = static_cast<std::size_t>(row.length / page_size_);
    return column < row.pages.size() && references(row.pages[column]) > 1;
  });
}

void SequenceTable::check_count(std::size_t given, const char* name) const {
  if (given != rows_.size()) {
    invalid("{} has {} entries, but the cache has {} requests: give one for each.", name, given,
            rows_.size());
  }
}

void SequenceTable::check_request(std::int32_t request, const char* name) const {
  if (request >= 0 && request < batch()) return;
  const std::string remedy = rows_.empty() ? "resize() it" : fmt::format("use 0 to {}", rows_.size() - 1);
  fail(ErrorCode::kOutOfRange, "{} is {}, but the cache has {} requests: {}.", name, request, rows_.size(),
       remedy);
}

std::vector<std::int32_t> SequenceTable::grown(std::span<const std::int32_t> counts) const {
  check_count(counts.size(), "counts");
  std::vector<std::int32_t> after(rows_.size());
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    if (counts[i] < 0) {
      invalid("counts[{}] is {}, but must be 0 or more: use truncate() to drop tokens.", i, counts[i]);
    }
    const std::int64_t length = std::int64_t{rows_[i].length} + counts[i];
    if (length > max_len_) {
      fail(ErrorCode::kOutOfRange,
           "request {} would have {} tokens, but max_len is {}: make the cache with a larger max_len.", i,
           length, max_len_);
    }
    after[i] = static_cast<std::int32_t>(length);
  }
  return after;
}

SequenceChanges SequenceTable::reserve(std::span<const std::int32_t> counts) {
  const std::vector<std::int32_t> after = grown(counts);
  // Columns of each request that need a page of its own. The last one that is left with a shared page keeps
  // it.
  struct Need {
    std::size_t request;
    std::int32_t column;
  };
  std::vector<Need> needs;
  std::unordered_map<std::int32_t, std::int32_t> given_up;
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    if (counts[i] == 0) continue;
    const Row& row = rows_[i];
    for (std::int32_t column = row.length / page_size_; column < pages_of(after[i]); ++column) {
      if (column < std::ssize(row.pages)) {
        const std::int32_t page = row.pages[static_cast<std::size_t>(column)];
        if (references(page) == 1 || references(page) - given_up[page] == 1) continue;
        ++given_up[page];
      }
      needs.push_back({i, column});
    }
  }
  if (std::ssize(needs) > free_pages()) {
    const std::size_t request = needs.front().request;
    fail(ErrorCode::kResourceExhausted,
         "num_pages is {}, of which {} are free, but {} more are needed (request {} needs {} in all): make "
         "the cache "
         "larger or free() a request.",
         num_pages_, free_pages(), needs.size(), request, pages_of(after[request]));
  }
  SequenceChanges changes;
  changes.entries.reserve(needs.size());
  for (const auto& [request, column] : needs) {
    Row& row = rows_[request];
    const std::int32_t page = deal();
    if (column == std::ssize(row.pages)) {
      row.pages.push_back(page);
    } else {
      std::int32_t& entry = row.pages[static_cast<std::size_t>(column)];
      if (std::int64_t{column} * page_size_ < row.length) changes.copies.push_back({entry, page});
      release(entry);
      entry = page;
    }
    changes.entries.push_back({static_cast<std::int32_t>(request), column, page});
  }
  return changes;
}

void SequenceTable::advance(std::span<const std::int32_t> counts) {
  const std::vector<std::int32_t> after = grown(counts);
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    if (const std::int32_t room = room_of(rows_[i]); counts[i] > room) {
      fail(ErrorCode::kOutOfRange,
           "counts[{}] is {}, but the pages that request {} has to itself hold {} more tokens: reserve() "
           "them before.",
           i, counts[i], i, room);
    }
  }
  set_lengths(after);
}

void SequenceTable::set_lengths(std::span<const std::int32_t> lengths) {
  check_count(lengths.size(), "lengths");
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    const Row& row = rows_[i];
    const std::int64_t held = std::ssize(row.pages) * std::int64_t{page_size_};
    if (lengths[i] < 0 || lengths[i] > max_len_) {
      fail(ErrorCode::kOutOfRange, "request {} would have {} tokens, but max_len is {}: use 0 to {}.", i,
           lengths[i], max_len_, max_len_);
    }
    if (lengths[i] > held) {
      fail(ErrorCode::kOutOfRange,
           "request {} would have {} tokens, but its pages hold {}: reserve() more before.", i, lengths[i],
           held);
    }
    if (lengths[i] < row.evicted * page_size_) {
      fail(ErrorCode::kOutOfRange,
           "request {} would have {} tokens, but its first {} were evicted: truncate() it.", i, lengths[i],
           row.evicted * page_size_);
    }
  }
  for (std::size_t i = 0; i < rows_.size(); ++i) rows_[i].length = lengths[i];
}

void SequenceTable::truncate(std::span<const std::int32_t> lengths, bool keep_pages) {
  check_count(lengths.size(), "lengths");
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    const Row& row = rows_[i];
    const std::int32_t evicted = row.evicted * page_size_;
    if (lengths[i] < 0 || lengths[i] > row.length) {
      fail(ErrorCode::kOutOfRange, "lengths[{}] is {}, but request {} has {} tokens: keep 0 to {}.", i,
           lengths[i], i, row.length, row.length);
    }
    if (lengths[i] != 0 && lengths[i] < evicted) {
      fail(ErrorCode::kOutOfRange,
           "lengths[{}] is {}, but the first {} tokens of request {} were evicted: keep {} to {}, or 0.", i,
           lengths[i], evicted, i, evicted, row.length);
    }
  }
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    Row& row = rows_[i];
    auto kept = static_cast<std::size_t>(pages_of(lengths[i]));
    if (keep_pages && (lengths[i] != 0 || row.evicted == 0)) {
      while (kept < row.pages.size() && references(row.pages[kept]) == 1) ++kept;
    }
    shrink(row, kept);
    row.length = lengths[i];
  }
}

void SequenceTable::free(std::int32_t request) {
  check_request(request, "request");
  Row& row = rows_[static_cast<std::size_t>(request)];
  shrink(row, 0);
  row.length = 0;
}

void SequenceTable::report(std::int32_t request, const Row& becomes, SequenceChanges& changes) const {
  const std::vector<std::int32_t>& old = pages(request);
  for (std::size_t column = 0; column < becomes.pages.size(); ++column) {
    if (column < old.size() && old[column] == becomes.pages[column]) continue;
    changes.entries.push_back({request, static_cast<std::int32_t>(column), becomes.pages[column]});
  }
}

SequenceTable::Row SequenceTable::first_tokens(const Row& source, std::int32_t length) const {
  Row row;
  row.pages.assign(source.pages.begin(), source.pages.begin() + pages_of(length));
  row.length = length;
  row.evicted = std::min(source.evicted, pages_of(length));
  return row;
}

SequenceChanges SequenceTable::fork(std::int32_t src, std::span<const std::int32_t> dst,
                                    std::int32_t length) {
  check_request(src, "src");
  const Row& source = row(src);
  for (std::size_t i = 0; i < dst.size(); ++i) {
    check_request(dst[i], fmt::format("dst[{}]", i).c_str());
    if (dst[i] == src)
      invalid("dst[{}] is {}, which is src, but must be another request: leave it out.", i, src);
  }
  std::vector<std::int32_t> sorted(dst.begin(), dst.end());
  std::ranges::sort(sorted);
  if (const auto twice = std::ranges::adjacent_find(sorted); twice != sorted.end()) {
    invalid("dst names request {} twice, but each becomes a fork once: leave one out.", *twice);
  }
  if (length < -1 || length > source.length) {
    fail(ErrorCode::kOutOfRange, "length is {}, but request {} has {} tokens: use 0 to {}, or all of them.",
         length, src, source.length, source.length);
  }
  if (length == -1) length = source.length;
  if (length != 0 && length < source.evicted * page_size_) {
    fail(ErrorCode::kOutOfRange,
         "length is {}, but the first {} tokens of request {} were evicted: use {} to {}.", length,
         source.evicted * page_size_, src, source.evicted * page_size_, source.length);
  }
  SequenceChanges changes;
  const Row shared = first_tokens(source, length);
  for (const std::int32_t request : dst) {
    report(request, shared, changes);
    for (const std::int32_t page : shared.pages) retain(page);
    Row& own = rows_[static_cast<std::size_t>(request)];
    shrink(own, 0);
    own = shared;
  }
  return changes;
}

SequenceChanges SequenceTable::reorder(std::span<const std::int32_t> index) {
  check_count(index.size(), "index");
  for (std::size_t i = 0; i < index.size(); ++i) check_request(index[i], fmt::format("index[{}]", i).c_str());
  SequenceChanges changes;
  std::vector<Row> rows(rows_.size());
  for (std::int32_t i = 0; i < batch(); ++i) {
    const std::int32_t from = index[static_cast<std::size_t>(i)];
    Row& made = rows[static_cast<std::size_t>(i)];
    made = from == i ? row(i) : first_tokens(row(from), row(from).length);
    for (const std::int32_t page : made.pages) retain(page);
    report(i, made, changes);
  }
  for (Row& row : rows_) shrink(row, 0);
  rows_ = std::move(rows);
  return changes;
}

SequenceChanges SequenceTable::evict_before(std::span<const std::int32_t> positions) {
  check_count(positions.size(), "positions");
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    if (positions[i] > rows_[i].length) {
      fail(ErrorCode::kOutOfRange, "positions[{}] is {}, but request {} has {} tokens: use at most {}.", i,
           positions[i], i, rows_[i].length, rows_[i].length);
    }
  }
  SequenceChanges changes;
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    Row& row = rows_[i];
    for (; (row.evicted + 1) * std::int64_t{page_size_} <= positions[i]; ++row.evicted) {
      std::int32_t& entry = row.pages[static_cast<std::size_t>(row.evicted)];
      release(std::exchange(entry, kEvicted));
      changes.entries.push_back({static_cast<std::int32_t>(i), row.evicted, kEvicted});
    }
  }
  return changes;
}

void SequenceTable::resize(std::int32_t batch) {
  if (batch < 0) invalid("batch is {}, but must be 0 or more: give a count.", batch);
  for (std::size_t i = static_cast<std::size_t>(batch); i < rows_.size(); ++i) shrink(rows_[i], 0);
  rows_.resize(static_cast<std::size_t>(batch));
}

}  // namespace halftone
