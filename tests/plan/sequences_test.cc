// SequenceTable against plain lists: a cache that does what the changes say holds the tokens of every
// request, reference counts are exact, and no page leaks.
#include "halftone/sequences.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "tests/expect_error.h"

namespace halftone {
namespace {

using Ints = std::vector<std::int32_t>;
constexpr std::int32_t kPage = 4;
constexpr std::int32_t kMaxLen = 64;
constexpr std::int32_t kNothing = -7;

// Books, the memory of a cache that follows them, and the lists that it should hold.
class Cache {
 public:
  Cache(std::int32_t batch, std::int32_t num_pages)
      : books(batch, kMaxLen, kPage, num_pages), pages_(static_cast<std::size_t>(num_pages)) {
    resize_memory(batch);
    for (auto& page : pages_) page.fill(kNothing);
  }

  void append(const Ints& counts) {
    follow(books.reserve(counts));
    for (std::size_t i = 0; i < counts.size(); ++i) {
      for (std::int32_t n = 0; n < counts[i]; ++n) {
        const auto position = static_cast<std::int32_t>(lists[i].size());
        const std::int32_t page = table_[i][static_cast<std::size_t>(position / kPage)];
        pages_.at(static_cast<std::size_t>(page))[position % kPage] = next_;
        lists[i].push_back(next_++);
      }
    }
    books.advance(counts);
  }
  void truncate(const Ints& lengths, bool keep_pages) {
    books.truncate(lengths, keep_pages);
    for (std::size_t i = 0; i < lengths.size(); ++i) {
      lists[i].resize(static_cast<std::size_t>(lengths[i]));
      if (lengths[i] == 0) evicted[i] = 0;
    }
  }
  void free(std::int32_t request) {
    books.free(request);
    lists[static_cast<std::size_t>(request)].clear();
    evicted[static_cast<std::size_t>(request)] = 0;
  }
  void fork(std::int32_t src, const Ints& dst, std::int32_t length) {
    follow(books.fork(src, dst, length));
    Ints shared = lists[static_cast<std::size_t>(src)];
    if (length >= 0) shared.resize(static_cast<std::size_t>(length));
    for (const std::int32_t d : dst) {
      lists[static_cast<std::size_t>(d)] = shared;
      evicted[static_cast<std::size_t>(d)] = shared.empty() ? 0 : evicted[static_cast<std::size_t>(src)];
    }
  }
  void reorder(const Ints& index) {
    follow(books.reorder(index));
    const auto old = lists;
    const Ints gone = evicted;
    for (std::size_t i = 0; i < index.size(); ++i) {
      lists[i] = old[static_cast<std::size_t>(index[i])];
      evicted[i] = gone[static_cast<std::size_t>(index[i])];
    }
  }
  void evict_before(const Ints& positions) {
    follow(books.evict_before(positions));
    for (std::size_t i = 0; i < positions.size(); ++i) {
      evicted[i] = std::max(evicted[i], std::max(positions[i], 0) / kPage * kPage);
    }
  }
  void resize(std::int32_t batch) {
    books.resize(batch);
    resize_memory(batch);
  }
  void follow(const SequenceChanges& changes) {
    for (const auto& [from, to] : changes.copies) {
      pages_.at(static_cast<std::size_t>(to)) = pages_.at(static_cast<std::size_t>(from));
    }
    for (const auto& [request, column, page] : changes.entries) {
      table_.at(static_cast<std::size_t>(request)).at(static_cast<std::size_t>(column)) = page;
    }
    copied += changes.copies.size();
    entered += changes.entries.size();
  }

  /// What every request reads is its list, and every page has as many references as requests.
  void check() const {
    std::map<std::int32_t, std::int32_t> counted;
    ASSERT_EQ(static_cast<std::size_t>(books.batch()), lists.size());
    for (std::int32_t i = 0; i < books.batch(); ++i) {
      const auto r = static_cast<std::size_t>(i);
      ASSERT_EQ(static_cast<std::size_t>(books.length(i)), lists[r].size());
      ASSERT_EQ(books.evicted(i), evicted[r]);
      for (std::int32_t t = evicted[r]; t < books.length(i); ++t) {
        const std::int32_t page = table_[r][static_cast<std::size_t>(t / kPage)];
        ASSERT_EQ(page, books.pages(i)[static_cast<std::size_t>(t / kPage)]);
        ASSERT_EQ(pages_.at(static_cast<std::size_t>(page))[t % kPage], lists[r][static_cast<std::size_t>(t)])
            << "request " << i << " token " << t;
      }
      for (std::int32_t column = 0; column < std::ssize(books.pages(i)); ++column) {
        const std::int32_t page = books.pages(i)[static_cast<std::size_t>(column)];
        if (page != SequenceTable::kEvicted) ++counted[page];
        ASSERT_TRUE(column * kPage < books.length(i) || books.references(page) == 1)
            << "no token, yet shared";
      }
    }
    for (std::int32_t page = 0; page < books.num_pages(); ++page) {
      ASSERT_EQ(books.references(page), counted[page]) << "page " << page;
    }
    const auto used = std::ranges::count_if(counted, [](const auto& entry) { return entry.second > 0; });
    ASSERT_EQ(books.free_pages(), books.num_pages() - used);
  }

  SequenceTable books;
  std::vector<Ints> lists;
  Ints evicted;
  std::size_t copied = 0;
  std::size_t entered = 0;

 private:
  void resize_memory(std::int32_t batch) {
    const auto requests = static_cast<std::size_t>(batch);
    lists.resize(requests);
    evicted.resize(requests);
    table_.resize(requests, Ints(kMaxLen / kPage, kNothing));
  }

  std::vector<std::array<std::int32_t, kPage>> pages_;
  std::vector<Ints> table_;
  std::int32_t next_ = 0;  // a token that no other is
};

Ints rows_of(const SequenceTable& books) {
  Ints all;
  for (std::int32_t i = 0; i < books.batch(); ++i) {
    all.insert(all.end(), books.pages(i).begin(), books.pages(i).end());
    all.push_back(books.length(i));
  }
  for (std::int32_t page = 0; page < books.num_pages(); ++page) all.push_back(books.references(page));
  all.push_back(books.free_pages());
  return all;
}

// One operation with arguments that may be refused; refused ones leave the books as they were.
void random_step(Cache& cache, std::mt19937& random) {
  const auto below = [&](std::int32_t end) {
    return static_cast<std::int32_t>(random() % static_cast<unsigned>(end));
  };
  const std::int32_t batch = cache.books.batch();
  Ints each(static_cast<std::size_t>(batch));
  const Ints before = rows_of(cache.books);
  const bool must_fit = below(4) > 0;
  try {
    switch (below(9)) {
      case 0:
      case 1:
      case 2:
        for (auto& n : each) n = below(3) == 0 ? below(9) : below(2);
        return cache.append(each);
      case 3:
        for (std::size_t i = 0; i < each.size(); ++i) {
          each[i] = std::max(cache.books.length(static_cast<std::int32_t>(i)) - below(6), must_fit ? 0 : -1);
          if (must_fit && each[i] < cache.evicted[i]) each[i] = 0;
        }
        return cache.truncate(each, below(2) == 0);
      case 4: {
        const std::int32_t src = below(batch + (must_fit ? 0 : 1));
        Ints dst;
        for (std::int32_t i = 0; i < batch; ++i) {
          if (i != src && below(3) == 0) dst.push_back(i);
        }
        if (!must_fit && !dst.empty()) dst.push_back(dst.front());
        return cache.fork(src, dst, below(2) == 0 ? -1 : below(kMaxLen / 2));
      }
      case 5:
        for (auto& i : each) i = below(batch + (must_fit ? 0 : 1));
        return cache.reorder(each);
      case 6:
        for (std::size_t i = 0; i < each.size(); ++i) {
          each[i] = below(cache.books.length(static_cast<std::int32_t>(i)) + (must_fit ? 1 : 2)) - below(3);
        }
        return cache.evict_before(each);
      case 7:
        return cache.free(below(batch + (must_fit ? 0 : 1)));
      default:
        return below(4) == 0 ? cache.resize(1 + below(6)) : cache.follow(cache.books.reserve(each));
    }
  } catch (const Error&) {
    ASSERT_EQ(rows_of(cache.books), before);
  }
}

TEST(Sequences, AnyOperationsAgainstPlainLists) {
  std::size_t copied = 0;
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    Cache cache(1 + static_cast<std::int32_t>(seed % 6), 8 + static_cast<std::int32_t>(seed % 5) * 10);
    for (int step = 0; step < 200; ++step) {
      random_step(cache, random);
      ASSERT_NO_FATAL_FAILURE(cache.check()) << "seed " << seed << " step " << step;
    }
    copied += cache.copied;
    for (std::int32_t i = 0; i < cache.books.batch(); ++i) cache.free(i);
    ASSERT_EQ(cache.books.free_pages(), cache.books.num_pages()) << "seed " << seed;
  }
  EXPECT_GT(copied, 1000u);  // the walks do share pages and part again
}

TEST(Sequences, ACopyIsBooksOfItsOwn) {
  Cache cache(2, 8);
  cache.append({6, 3});
  cache.fork(0, {1}, -1);
  SequenceTable copy = cache.books;
  const Ints before = rows_of(cache.books);
  copy.free(0);
  (void)copy.reserve(Ints{5, 5});
  EXPECT_EQ(rows_of(cache.books), before);
}

TEST(Sequences, BooksOfDealtPages) {
  Cache cache(3, 20);
  cache.append({6, 3, 9});
  cache.fork(0, {1}, -1);
  cache.evict_before({4, 0, 8});
  std::vector<Ints> rows;
  Ints lengths;
  for (std::int32_t i = 0; i < 3; ++i) {
    rows.push_back(cache.books.pages(i));
    lengths.push_back(cache.books.length(i));
  }
  cache.books = SequenceTable(kMaxLen, kPage, 20, rows, lengths);
  cache.check();
  cache.append({9, 9, 9});
  cache.check();
  const auto made = [&](const std::vector<Ints>& changed, const Ints& tokens) {
    (void)SequenceTable(kMaxLen, kPage, 20, changed, tokens);
  };
  expect_error(ErrorCode::kOutOfRange, {"rows[1][1] is 20", "[0, 20)"}, [&] {
    made({{0}, {1, 20}}, {1, 1});
  });
  expect_error(ErrorCode::kOutOfRange, {"rows[0][1] is -1"}, [&] { made({{0, -1}}, {1}); });
  expect_error(ErrorCode::kOutOfRange, {"rows[0] has 17 pages", "16"}, [&] { made({Ints(17, 0)}, {1}); });
  expect_error(ErrorCode::kOutOfRange, {"request 0 would have 5 tokens", "hold 4"},
               [&] { made({{0}}, {5}); });
  expect_error(ErrorCode::kOutOfRange, {"would have 3 tokens", "first 4 were evicted"}, [&] {
    made({{-1, 0}}, {3});
  });
  expect_error(ErrorCode::kInvalidArgument, {"lengths has 2 entries", "1 requests"}, [&] {
    made({{0}}, {1, 1});
  });
}

TEST(Sequences, ForksShareAndPartAtTheirNextToken) {
  Cache cache(4, 20);
  cache.append({10, 0, 0, 0});
  const std::size_t entered = cache.entered;
  cache.fork(0, {1, 2, 3}, -1);
  EXPECT_EQ(cache.entered - entered, 3u * 3);
  EXPECT_EQ(cache.copied, 0u);
  EXPECT_EQ(cache.books.free_pages(), 17);
  EXPECT_EQ(cache.books.room(), 0);
  EXPECT_TRUE(cache.books.writes_shared());
  cache.append({1, 1, 1, 1});
  EXPECT_EQ(cache.copied, 3u);  // the last one keeps the page
  EXPECT_EQ(cache.books.free_pages(), 14);
  EXPECT_FALSE(cache.books.writes_shared());
  cache.check();
}

TEST(Sequences, ForksOfWholePagesCopyNothing) {
  Cache cache(2, 20);
  cache.append({8, 0});
  cache.fork(0, {1}, -1);
  EXPECT_FALSE(cache.books.writes_shared());
  cache.append({1, 1});
  EXPECT_EQ(cache.copied, 0u);
  cache.check();
}

TEST(Sequences, AReorderOfBeamsCopiesAtMostAPageOfEach) {
  std::mt19937 random(3);
  Cache cache(4, 60);
  cache.append({30, 0, 0, 0});
  cache.fork(0, {1, 2, 3}, -1);
  for (int step = 0; step < 30; ++step) {
    const std::size_t copied = cache.copied, entered = cache.entered;
    Ints index(4);
    for (auto& i : index) i = static_cast<std::int32_t>(random() % 4);
    cache.reorder(index);
    EXPECT_EQ(cache.copied, copied);
    EXPECT_LE(cache.entered - entered, 4u * kMaxLen / kPage);
    cache.append({1, 1, 1, 1});
    EXPECT_LE(cache.copied - copied, 4u);
    cache.check();
  }
}

TEST(Sequences, KeptPagesNeedNoReserve) {
  Cache cache(2, 20);
  cache.append({5, 5});
  cache.follow(cache.books.reserve(Ints{20, 20}));
  const std::int32_t room = cache.books.room();
  cache.append({3, 3});
  cache.truncate({6, 6}, true);
  EXPECT_EQ(cache.books.room(), room - 1);
  cache.truncate({6, 6}, false);
  EXPECT_EQ(cache.books.room(), 2);
  cache.check();
}

TEST(Sequences, ReservedPagesAreNotShared) {
  Cache cache(2, 20);
  cache.append({8, 0});
  cache.follow(cache.books.reserve(Ints{8, 0}));
  cache.fork(0, {1}, -1);
  EXPECT_EQ(cache.books.pages(1).size(), 2u);
  EXPECT_EQ(cache.books.pages(0).size(), 4u);
  cache.reorder({0, 0});  // request 0 stays what it is and keeps them
  EXPECT_EQ(cache.books.pages(0).size(), 4u);
  cache.check();
}

TEST(Sequences, Errors) {
  using enum ErrorCode;
  Cache cache(2, 6);
  cache.append({10, 3});
  cache.evict_before({5, 0});
  SequenceTable& books = cache.books;
  const Ints before = rows_of(books);
  const auto expect = [&](ErrorCode code, std::initializer_list<std::string_view> parts, auto&& call) {
    expect_error(code, parts, call);
    EXPECT_EQ(rows_of(books), before);
  };
  expect(kInvalidArgument, {"counts has 1 entries", "2 requests"}, [&] { (void)books.reserve(Ints{1}); });
  expect(kInvalidArgument, {"counts[1] is -1", "truncate()"}, [&] { (void)books.reserve(Ints{1, -1}); });
  expect(kOutOfRange, {"request 0 would have 65 tokens", "max_len is 64"}, [&] {
    (void)books.reserve(Ints{55, 0});
  });
  expect(kResourceExhausted, {"num_pages is 6, of which 3 are free", "4 more", "request 1 needs 5 in all"},
         [&] {
           (void)books.reserve(Ints{0, 15});
         });
  expect(kOutOfRange, {"counts[1] is 2", "hold 1 more"}, [&] { books.advance(Ints{0, 2}); });
  expect(kOutOfRange, {"request 1 would have 5 tokens", "hold 4"}, [&] { books.set_lengths(Ints{10, 5}); });
  for (const int length : {-1, 65}) {
    expect(kOutOfRange, {"request 0 would have " + std::to_string(length), "max_len is 64: use 0 to 64"},
           [&] {
             books.set_lengths(Ints{length, 3});
           });
  }
  expect(kOutOfRange, {"lengths[1] is 4", "has 3"}, [&] { books.truncate(Ints{10, 4}); });
  expect(kOutOfRange, {"lengths[0] is 3", "first 4 tokens"}, [&] { books.truncate(Ints{3, 3}); });
  expect(kOutOfRange, {"request is 2", "use 0 to 1"}, [&] { books.free(2); });
  expect(kOutOfRange, {"src is -1"}, [&] { (void)books.fork(-1, Ints{0}); });
  expect(kOutOfRange, {"dst[0] is 2"}, [&] { (void)books.fork(0, Ints{2}); });
  expect(kInvalidArgument, {"dst[0] is 1, which is src"}, [&] { (void)books.fork(1, Ints{1}); });
  expect(kInvalidArgument, {"dst names request 0 twice"}, [&] { (void)books.fork(1, Ints{0, 0}); });
  expect(kOutOfRange, {"length is 11", "has 10"}, [&] { (void)books.fork(0, Ints{1}, 11); });
  expect(kOutOfRange, {"length is 2", "evicted", "4 to 10"}, [&] { (void)books.fork(0, Ints{1}, 2); });
  expect(kOutOfRange, {"index[1] is 2"}, [&] { (void)books.reorder(Ints{0, 2}); });
  expect(kInvalidArgument, {"index has 3 entries"}, [&] { (void)books.reorder(Ints{0, 1, 1}); });
  expect(kOutOfRange, {"positions[1] is 4", "has 3"}, [&] { (void)books.evict_before(Ints{0, 4}); });
  expect(kInvalidArgument, {"batch is -1"}, [&] { books.resize(-1); });
  expect_error(kInvalidArgument, {"page_size is 0"}, [&] { (void)SequenceTable(1, 1, 0, 1); });
  expect_error(kInvalidArgument, {"num_pages is -1"}, [&] { (void)SequenceTable(1, 1, 16, -1); });
  expect_error(kOutOfRange, {"request is 0", "resize()"}, [&] { SequenceTable(0, 1, 16, 1).free(0); });
}

}  // namespace
}  // namespace halftone
