#include "tests/emulator/program.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <stdexcept>

#include "tests/emulator/decoder.h"

namespace halftone::emulator {
namespace {

namespace fs = std::filesystem;

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  if (!in) throw std::runtime_error("cannot read " + path);
  std::string text(static_cast<std::size_t>(in.tellg()), '\0');
  in.seekg(0);
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  return text;
}

/// Behind the brace that closes the one at or after `from`.
std::size_t behind_body(std::string_view text, std::size_t from) {
  int depth = 0;
  for (std::size_t i = text.find('{', from); i < text.size(); ++i) {
    if (text[i] == '{') ++depth;
    if (text[i] == '}' && --depth == 0) return i + 1;
  }
  throw std::runtime_error("a kernel of PTX has no end");
}

/// ".extern .shared .align N .b8 name[];": N by name.
std::unordered_map<std::string, std::uint32_t> dynamic_arrays(const std::string& text) {
  std::unordered_map<std::string, std::uint32_t> found;
  constexpr std::string_view kBegin = ".extern .shared .align ";
  for (std::size_t at = text.find(kBegin); at != std::string::npos; at = text.find(kBegin, at + 1)) {
    const std::size_t end = text.find('[', at), name = text.rfind(' ', end) + 1;
    found[text.substr(name, end - name)] =
        static_cast<std::uint32_t>(std::stoul(text.substr(at + kBegin.size())));
  }
  return found;
}

}  // namespace

Library::Library(const std::string& folder) {
  constexpr std::string_view kEntry = ".entry ";
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.path().extension() != ".ptx") continue;
    const std::string path = entry.path().string(), text = read_file(path);
    for (std::size_t at = text.find(kEntry); at != std::string::npos; at = text.find(kEntry, at + 1)) {
      const std::size_t name = at + kEntry.size(), end = text.find('(', name);
      places_[text.substr(name, end - name)] = {path, at, behind_body(text, end)};
    }
  }
  if (places_.empty()) throw std::runtime_error("no kernel of PTX in " + folder);
}

const Program& Library::kernel(const std::string& name) {
  const auto known = programs_.find(name);
  if (known != programs_.end()) return *known->second;
  const auto place = places_.find(name);
  if (place == places_.end()) throw std::runtime_error("no kernel of PTX is called " + name);
  const auto& [path, begin, end] = place->second;
  const std::string text = read_file(path);
  auto program = std::make_unique<Program>();
  program->name = name;
  program->path = path;
  program->text = text.substr(begin, end - begin);
  program->dynamic_shared = dynamic_arrays(text);
  decode(*program, static_cast<std::uint32_t>(
                       std::count(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(begin), '\n')) +
                       1);
  return *programs_.emplace(name, std::move(program)).first->second;
}

}  // namespace halftone::emulator
