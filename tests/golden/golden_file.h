// The committed golden files, as the scripts beside them write them: a magic, the number of cases, the cases.
#pragma once

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "halftone/format.h"

namespace halftone::golden {

/// Little-endian values, one after the other.
class Reader {
 public:
  explicit Reader(const std::string& name) : name_(name) {
    std::ifstream file(std::string(HALFTONE_SOURCE_DIR) + "/tests/golden/" + name, std::ios::binary);
    data_.assign(std::istreambuf_iterator<char>(file), {});
  }
  template <class T>
  std::vector<T> take(std::int64_t count) {
    const std::size_t bytes = static_cast<std::size_t>(count) * sizeof(T);
    if (data_.size() - at_ < bytes) throw std::runtime_error(name_ + " is truncated");
    std::vector<T> values(static_cast<std::size_t>(count));
    if (count > 0) std::memcpy(values.data(), data_.data() + at_, bytes);
    at_ += bytes;
    return values;
  }
  int integer() { return take<std::int32_t>(1)[0]; }
  bool at_end() const { return at_ == data_.size(); }

 private:
  std::string name_;
  std::vector<char> data_;
  std::size_t at_ = 0;
};

inline KvFormat read_format(Reader& r) {
  KvFormat f;
  f.dtype = static_cast<DType>(r.integer());
  f.granularity = static_cast<Granularity>(r.integer());
  f.asymmetric = r.integer() != 0;
  f.group_size = r.integer();
  f.scale_dtype = static_cast<DType>(r.integer());
  return f;
}

template <class Case>
std::vector<Case> read_cases(const std::string& name, const std::string& magic, Case (*read_case)(Reader&)) {
  Reader r(name);
  const std::vector<char> found = r.take<char>(static_cast<std::int64_t>(magic.size()));
  if (std::string(found.begin(), found.end()) != magic) throw std::runtime_error(name + ": bad magic");
  std::vector<Case> cases(static_cast<std::size_t>(r.integer()));
  for (Case& c : cases) c = read_case(r);
  if (!r.at_end()) throw std::runtime_error(name + " has trailing bytes");
  return cases;
}

}  // namespace halftone::golden
