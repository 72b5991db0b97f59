// What the C++ participants of compare_cpu.py share: the shape, the input files, memory and the command loop.
//
// A participant gets the shape as `name=value` arguments, prints one line of JSON when its caches are filled
// and then answers each line on standard input with one line of JSON until end of file:
//   run N        one untimed and N timed decode steps, each on the next layer: {"us": [...]}
//   write FILE   the output of layer 0 as f32 [batch, q_heads, head_dim]
// All participants read the same q, k and v of one request from <data>/{q,k,v}.f32 and store them once per
// request and layer, so that every call reads memory of its own.
#pragma once

#include <sys/mman.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <map>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace peers {

/// `name=value` arguments.
class Arguments {
 public:
  Arguments(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
      const std::string text = argv[i];
      const auto equals = text.find('=');
      if (equals == std::string::npos) throw std::invalid_argument(text + " is not of the form name=value");
      values_[text.substr(0, equals)] = text.substr(equals + 1);
    }
  }
  std::string text(const std::string& name) const {
    const auto found = values_.find(name);
    if (found == values_.end()) throw std::invalid_argument(name + "=... is missing");
    return found->second;
  }
  std::int64_t integer(const std::string& name) const { return std::stoll(text(name)); }

 private:
  std::map<std::string, std::string> values_;
};

/// One decode step: a query per request against `context` cached tokens, for `layers` caches in turn.
struct Shape {
  explicit Shape(const Arguments& a)
      : batch(a.integer("batch")),
        context(a.integer("context")),
        q_heads(a.integer("q_heads")),
        kv_heads(a.integer("kv_heads")),
        head_dim(a.integer("head_dim")),
        layers(a.integer("layers")),
        threads(static_cast<int>(a.integer("threads"))) {}
  std::int64_t batch, context, q_heads, kv_heads, head_dim, layers;
  int threads;

  std::int64_t request_values() const { return context * kv_heads * head_dim; }
  std::int64_t output_values() const { return batch * q_heads * head_dim; }
};

/// q f32 [q_heads, head_dim]; k, v f32 [context, kv_heads, head_dim] of one request.
inline std::vector<float> read_floats(const std::string& path, std::int64_t count) {
  std::vector<float> values(static_cast<std::size_t>(count));
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(values.data()), static_cast<std::streamsize>(values.size() * 4));
  if (!file) throw std::runtime_error(path + " does not hold " + std::to_string(count) + " floats");
  return values;
}

inline void write_floats(const std::string& path, std::span<const float> values) {
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size() * 4));
  if (!file.flush()) throw std::runtime_error("cannot write " + path);
}

/// Zeroed pages of the system, 2 MB ones where it grants them; untouched ones use no memory.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes) : bytes_(bytes) {
    data_ = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) throw std::bad_alloc();
    ::madvise(data_, bytes, MADV_HUGEPAGE);  // a refusal only costs speed
  }
  ~Buffer() { ::munmap(data_, bytes_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  std::uint8_t* data() const { return static_cast<std::uint8_t*>(data_); }
  std::size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Answers commands until end of file. `step(layer)` computes one decode step; `output()` is what it left.
template <class Step, class Output>
void serve(std::int64_t layers, const Step& step, const Output& output) {
  using Clock = std::chrono::steady_clock;
  std::int64_t layer = 0;
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    std::string command, path;
    words >> command;
    if (command == "run") {
      int count = 0;
      words >> count;
      step(layer++ % layers);  // wakes the threads
      std::ostringstream times;
      for (int i = 0; i < count; ++i) {
        const auto start = Clock::now();
        step(layer++ % layers);
        times << (i ? ", " : "") << std::chrono::duration<double, std::micro>(Clock::now() - start).count();
      }
      std::cout << "{\"us\": [" << times.str() << "]}" << std::endl;
    } else if (command == "write" && words >> path) {
      step(0);
      write_floats(path, output());
      std::cout << "{}" << std::endl;
    } else {
      throw std::invalid_argument("unknown command: " + line);
    }
  }
}

/// main() of a participant: one sentence on standard error and exit status 1 when `body` throws.
template <class Body>
int participant(int argc, char** argv, const Body& body) {
  try {
    body(Arguments(argc, argv));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", argv[0], error.what());
    return 1;
  }
}

}  // namespace peers
