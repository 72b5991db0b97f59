// What runs where: what each backend says of a few problems, its kernels, and the formats they are made for.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string_view>
#include <vector>

#include "cli/terminal/terminal.h"
#include "plan/backend.h"

namespace halftone::cli {

struct NamedBackend {
  std::string_view name;
  const planning::Backend* backend;
  bool built() const { return backend != nullptr; }
};

/// Every backend that a build can have.
std::vector<NamedBackend> all_backends();

/// `cases`: the kernel that a backend's planner chooses, null where it refuses. `kernels`: its table.
/// `formats`: for each named format of K and V alike, the packed rows of its largest unit by head_dim; 0
/// where only the universal kernel serves it, null where head_dim cannot have the format. `pairs`: by format
/// of K, the other formats of V that have kernels of their own at head_dim 128. The last two are there for
/// backends with a universal kernel, without which every kernel serves every format.
nlohmann::ordered_json kernel_matrix(const std::vector<NamedBackend>& backends);

/// The same for people.
void print_kernel_matrix(Terminal& terminal, const std::vector<NamedBackend>& backends);

}  // namespace halftone::cli
