// The figures of `halftone bench` as JSON and as a table.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "cli/bench/cpu.h"
#include "cli/terminal/terminal.h"

namespace halftone::cli {

/// `head`: provenance() with the device that was measured. A row that was not run has null figures and
/// "unsupported".
nlohmann::ordered_json bench_json(nlohmann::ordered_json head, const std::vector<BenchRow>& rows);

/// `engine`: "CUDA on NVIDIA H200", for the line above the table.
void print_bench(Terminal& terminal, const std::string& engine, const std::vector<BenchRow>& rows);

}  // namespace halftone::cli
