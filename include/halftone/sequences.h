// Which request has which pages of a paged cache: reference counts, copy-on-write, a free list. Bookkeeping
// on the host; no byte of a cache is touched, and no device is needed.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "halftone/types.h"

namespace halftone {

/// What a cache must do to follow its SequenceTable: first the copies, then the entries. No page is both a
/// source and a destination.
struct SequenceChanges {
  struct Copy {
    std::int32_t from = 0;  ///< a page, of which every layer copies all bytes
    std::int32_t to = 0;
  };
  struct Entry {
    std::int32_t request = 0;  ///< row of the block table
    std::int32_t column = 0;
    std::int32_t page = 0;  ///< SequenceTable::kEvicted: no page any more
  };
  std::vector<Copy> copies;
  std::vector<Entry> entries;
};

/// The host's books of a paged cache (PagedAttention, arXiv:2309.06180). A page may belong to several
/// requests, at the same column of each: all read it and none writes it, for reserve() gives a request that
/// is about to write a copy of its own. docs/sequences.md explains it with a picture.
///
/// Pages are dealt lowest number first. A failure (halftone::Error) leaves the books as they were. A value:
/// copies are independent books of the same pages. Entries of the block table past a request's length are
/// never read, so that none is reported when it loses its page.
class HALFTONE_API SequenceTable {
 public:
  static constexpr std::int32_t kEvicted = -1;  ///< an entry whose page evict_before() took back

  /// Throws InvalidArgument for a negative count and for a page_size below 1.
  SequenceTable(std::int32_t batch, std::int32_t max_len, std::int32_t page_size, std::int32_t num_pages);

  /// Books of pages that are dealt already: rows[i] are the pages of request i, kEvicted at the front, and
  /// lengths[i] its tokens. Throws InvalidArgument or OutOfRange
  /// for pages and lengths beyond the bounds.
  SequenceTable(std::int32_t max_len, std::int32_t page_size, std::int32_t num_pages,
                const std::vector<std::vector<std::int32_t>>& rows, std::span<const std::int32_t> lengths);

  std::int32_t batch() const { return static_cast<std::int32_t>(rows_.size()); }
  std::int32_t max_len() const { return max_len_; }
  std::int32_t page_size() const { return page_size_; }
  std::int32_t num_pages() const { return num_pages_; }
  std::int32_t free_pages() const {
    return num_pages_ - static_cast<std::int32_t>(references_.size() - returned_.size());
  }
  /// Requests that have the page.
  std::int32_t references(std::int32_t page) const {
    const auto index = static_cast<std::size_t>(page);
    return index < references_.size() ? references_[index] : 0;
  }
  std::int32_t length(std::int32_t request) const { return row(request).length; }
  /// Tokens at the front of a request whose pages were taken back.
  std::int32_t evicted(std::int32_t request) const { return row(request).evicted * page_size_; }
  /// The request's row of the block table, as far as it has pages.
  const std::vector<std::int32_t>& pages(std::int32_t request) const { return row(request).pages; }
  /// Tokens that every request may get without another reserve(): they fall into pages of its own.
  std::int32_t room() const;
  /// Whether the next token of some request falls into a page that it shares.
  bool writes_shared() const;

  /// Gives request i pages of its own for counts[i] more tokens: new ones, and copies of those that it shares
  /// and would write. Throws InvalidArgument, OutOfRange (beyond max_len) or ResourceExhausted (too few free
  /// pages).
  SequenceChanges reserve(std::span<const std::int32_t> counts);
  /// counts[i] tokens were written to request i. Throws OutOfRange beyond max_len or its room().
  void advance(std::span<const std::int32_t> counts);
  /// Says how many tokens each request has where only the device knew. Throws OutOfRange beyond its pages.
  void set_lengths(std::span<const std::int32_t> lengths);

  /// Drops the tokens from lengths[i] on, and the pages that then hold none; with `keep_pages` those that are
  /// the request's own stay, for tokens to come. Throws OutOfRange for more tokens than there are or fewer
  /// than were evicted (0 is allowed).
  void truncate(std::span<const std::int32_t> lengths, bool keep_pages = false);
  /// Drops all tokens and pages of a request.
  void free(std::int32_t request);
  /// Each request of `dst` becomes the first `length` tokens of `src` (-1: all), whose pages they then share.
  /// What it had before is dropped. Throws OutOfRange or InvalidArgument (src or a request twice in dst).
  SequenceChanges fork(std::int32_t src, std::span<const std::int32_t> dst, std::int32_t length = -1);
  /// Request i becomes what request index[i] was, for all i at once. Throws InvalidArgument or OutOfRange.
  SequenceChanges reorder(std::span<const std::int32_t> index);
  /// Takes back the pages of request i that lie wholly before positions[i] (0 and less: none). Their tokens
  /// count on, but no query may read them any more: those of query position p with a window_left of w are
  /// read from p - w on, so that length - w is right for all queries to come. Throws OutOfRange beyond the
  /// request's length.
  SequenceChanges evict_before(std::span<const std::int32_t> positions);
  /// New requests come empty at the end; those beyond `batch` are dropped. Throws InvalidArgument if
  /// negative.
  void resize(std::int32_t batch);

 private:
  struct Row {
    std::vector<std::int32_t> pages;
    std::int32_t length = 0;
    std::int32_t evicted = 0;  // pages
  };

  const Row& row(std::int32_t request) const { return rows_[static_cast<std::size_t>(request)]; }
  std::int32_t pages_of(std::int32_t tokens) const {
    return static_cast<std::int32_t>((std::int64_t{tokens} + page_size_ - 1) / page_size_);
  }
  std::int32_t deal();
  void retain(std::int32_t page);
  void release(std::int32_t page);
  void shrink(Row& row, std::size_t pages);
  void report(std::int32_t request, const Row& becomes, SequenceChanges& changes) const;
  Row first_tokens(const Row& source, std::int32_t length) const;
  std::int32_t room_of(const Row& row) const;
  void check_count(std::size_t given, const char* name) const;
  void check_request(std::int32_t request, const char* name) const;
  std::vector<std::int32_t> grown(std::span<const std::int32_t> counts) const;

  std::int32_t max_len_ = 0;
  std::int32_t page_size_ = 0;
  std::int32_t num_pages_ = 0;
  std::vector<Row> rows_;
  std::vector<std::int32_t> references_;  // of the pages dealt so far, 0 for those that came back
  std::vector<std::int32_t> returned_;    // a heap with the lowest on top
};

}  // namespace halftone
