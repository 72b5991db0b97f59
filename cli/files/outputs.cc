#include "cli/files/outputs.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <filesystem>
#include <system_error>

#include "cli/files/atomic_file.h"
#include "cli/terminal/text.h"

namespace halftone::cli {
namespace {

/// Where `path` leads: links followed, also one to a file that is not there yet, and the folder's own name.
std::filesystem::path destination(std::filesystem::path path) {
  std::error_code none;
  for (int links = 0; links < 40 && std::filesystem::is_symlink(path, none); ++links) {
    path = path.parent_path() / std::filesystem::read_symlink(path, none);  // an absolute target replaces all
  }
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  return std::filesystem::weakly_canonical(folder, none) / path.filename();
}

bool same_file(const std::string& a, const std::string& b) {
  struct stat first {
  }, second{};
  const bool first_exists = ::stat(a.c_str(), &first) == 0, second_exists = ::stat(b.c_str(), &second) == 0;
  if (first_exists != second_exists) return false;
  if (!first_exists) return destination(a) == destination(b);
  // A device or FIFO is written, not replaced: /dev/null may be named twice.
  return S_ISREG(first.st_mode) && first.st_dev == second.st_dev && first.st_ino == second.st_ino;
}

}  // namespace

void check_outputs(const NamedFile& input, const std::vector<NamedFile>& outputs) {
  std::vector<NamedFile> taken = {input};
  for (const NamedFile& output : outputs) {
    if (output.path.empty() || output.path == "-") continue;
    for (const NamedFile& other : taken) {
      if (!same_file(output.path, other.path)) continue;
      throw UsageError(fmt::format("{} is '{}', but would overwrite {} '{}': name another file.",
                                   output.option, printable(output.path), other.option,
                                   printable(other.path)));
    }
    taken.push_back(output);
  }
}

void write_output(Terminal& terminal, const std::string& path, std::string_view text) {
  if (path == "-") {
    terminal.out << text;
  } else {
    write_text(path, text);
  }
}

}  // namespace halftone::cli
