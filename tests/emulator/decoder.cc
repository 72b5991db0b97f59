#include "tests/emulator/decoder.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <map>
#include <optional>
#include <stdexcept>

#include "tests/emulator/registers.h"
#include "tests/emulator/statement.h"

namespace halftone::emulator {
namespace {

using Text = std::string_view;

Text trimmed(Text s) {
  while (!s.empty() && std::isspace(static_cast<unsigned char>(s.front()))) s.remove_prefix(1);
  while (!s.empty() && std::isspace(static_cast<unsigned char>(s.back()))) s.remove_suffix(1);
  return s;
}

bool is_name(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '$' || c == '%' || c == '.';
}

std::vector<Text> split(Text s, char separator) {
  std::vector<Text> parts;
  for (std::size_t at = 0; at <= s.size();) {
    const std::size_t end = std::min(s.find(separator, at), s.size());
    parts.push_back(trimmed(s.substr(at, end - at)));
    at = end + 1;
  }
  return parts;
}

/// Operands between commas and bars, vectors flattened; what brackets hold stays together.
OperandTexts operands_of(Text s) {
  OperandTexts found;
  int depth = 0;
  std::size_t begin = 0;
  const auto take = [&](std::size_t end) {
    const Text operand = trimmed(s.substr(begin, end - begin));
    if (!operand.empty()) found.push_back(operand);
    begin = end + 1;
  };
  for (std::size_t i = 0; i < s.size(); ++i) {
    if (s[i] == '[') ++depth;
    if (s[i] == ']') --depth;
    if (depth == 0 && (s[i] == ',' || s[i] == '{' || s[i] == '}' || s[i] == '|')) take(i);
  }
  take(s.size());
  return found;
}

std::int64_t integer_of(Text s) {
  const bool negative = !s.empty() && s.front() == '-';
  if (negative) s.remove_prefix(1);
  int base = 10;
  if (s.starts_with("0x") || s.starts_with("0X")) s.remove_prefix(2), base = 16;
  std::uint64_t x = 0;
  const auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), x, base);
  const Text rest(end, static_cast<std::size_t>(s.data() + s.size() - end));
  if (error != std::errc() || !(rest.empty() || rest == "U")) {
    throw std::runtime_error("not a number: " + std::string(s));
  }
  return static_cast<std::int64_t>(negative ? 0 - x : x);
}

/// Bits of a constant: 0f3F800000, 0d..., a decimal fraction, or an integer.
std::uint64_t bits_of(Text s) {
  if (s.starts_with("0f") || s.starts_with("0F") || s.starts_with("0d") || s.starts_with("0D")) {
    std::uint64_t x = 0;
    std::from_chars(s.data() + 2, s.data() + s.size(), x, 16);
    return x;
  }
  if (s.find('.') != Text::npos) return 0;  // the fraction of createpolicy
  return static_cast<std::uint64_t>(integer_of(s));
}

int bits_of_type(Text type) {
  if (type == "pred") return 1;
  std::size_t digits = 0;
  while (digits < type.size() && !std::isdigit(static_cast<unsigned char>(type[digits]))) ++digits;
  int bits = 0;
  std::from_chars(type.data() + digits, type.data() + type.size(), bits);
  return bits;
}

class Decoder : public Operands {
 public:
  Decoder(Program& program, std::uint32_t line) : program_(program), registers_(program), line_(line) {}

  void decode() {
    const Text text = program_.text;
    header(text);
    body(text);
    for (const auto& [instruction, name, scopes] : branches_) {
      program_.code[instruction].target = label(name, scopes);
    }
    registers_.place(leaders_);
  }

  // --- Operands ---

  void write(Text name) override {
    if (name != "_" && name.front() != '%' && !declared(name)) {
      throw std::runtime_error("written, but no register: " + std::string(name));
    }
    add(name, true, "");
  }
  void update(Text name) override { add(name, false, ""); }
  void read(Text name, Text type) override { add(name, false, type); }

  void address(Text text) override {
    text = trimmed(text.substr(1, text.size() - 2));
    const std::size_t plus = text.find('+');
    const Text base = trimmed(text.substr(0, plus));
    if (plus != Text::npos) current_->immediate = integer_of(trimmed(text.substr(plus + 1)));
    add(base, false, "b64");
  }

  std::int64_t integer(Text text) const override { return integer_of(text); }

 private:
  void add(Text name, bool written, Text type) {
    if (name == "_") {
      current_->operands.push_back(kNone);
      current_->wide.push_back(0);
      return;
    }
    current_->operands.push_back(0);
    current_->wide.push_back(0);
    const auto [id, wide] = find(name, type);
    current_->wide.back() = wide ? 1 : 0;
    registers_.use(id, static_cast<std::uint32_t>(program_.code.size() - 1),
                   static_cast<int>(current_->operands.size()) - 1, written && !current_->guarded);
  }

  struct Found {
    int id;
    bool wide;
  };
  bool declared(Text name) const {
    return std::ranges::any_of(scopes_, [&](int scope) {
      return registers_of_.contains(std::to_string(scope) + ":" + std::string(name));
    });
  }
  Found find(Text name, Text type) {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      const auto known = registers_of_.find(std::to_string(*scope) + ":" + std::string(name));
      if (known != registers_of_.end()) return known->second;
    }
    if (name.front() == '%') {
      static const std::map<Text, Preset::Source> kSpecial = {
          {"%tid", Preset::kThread},    {"%ntid", Preset::kThreads},         {"%ctaid", Preset::kBlock},
          {"%nctaid", Preset::kBlocks}, {"%cluster_ctarank", Preset::kRank}, {"%laneid", Preset::kLane}};
      const std::size_t dot = std::min(name.find('.'), name.size());
      if (const auto special = kSpecial.find(name.substr(0, dot)); special != kSpecial.end()) {
        return preset(special->second,
                      dot == name.size() ? 0 : static_cast<std::uint64_t>(name[dot + 1] - 'x'), false);
      }
      std::size_t digits = name.size();
      while (std::isdigit(static_cast<unsigned char>(name[digits - 1]))) --digits;
      const auto known = classes_.find(name.substr(0, digits));
      if (known == classes_.end() || digits == name.size()) {
        throw std::runtime_error("unknown register " + std::string(name));
      }
      const bool wide = known->second == 64;
      const Found found = {registers_.add(known->second), wide};
      registers_of_["0:" + std::string(name)] = found;
      return found;
    }
    if (std::isdigit(static_cast<unsigned char>(name.front())) || name.front() == '-') {
      const bool wide = bits_of_type(type) == 64;
      const std::uint64_t bits = bits_of(name);
      return preset(Preset::kConstant, wide ? bits : bits & 0xffffffffu, wide);
    }
    if (const auto param = params_.find(name); param != params_.end()) {
      return preset(Preset::kParams, param->second, true);
    }
    if (const auto shared = shared_.find(name); shared != shared_.end()) {
      return preset(Preset::kConstant, shared->second, bits_of_type(type) == 64);
    }
    if (const auto dynamic = program_.dynamic_shared.find(std::string(name));
        dynamic != program_.dynamic_shared.end()) {
      const std::uint32_t align = dynamic->second;  // it begins behind the static arrays
      program_.static_shared = (program_.static_shared + align - 1) / align * align;
      return preset(Preset::kConstant, program_.static_shared, bits_of_type(type) == 64);
    }
    throw std::runtime_error("unknown name " + std::string(name));
  }
  Found preset(Preset::Source source, std::uint64_t value, bool wide) {
    return {registers_.preset(source, value, wide), wide};
  }

  // --- The text ---

  void header(Text text) {
    std::size_t at = text.find('(');
    const std::size_t end = text.find(')', at);
    std::uint32_t offset = 0;
    for (const Text param : split(text.substr(at + 1, end - at - 1), ',')) {
      if (param.empty()) continue;
      std::uint32_t bytes = 0, align = 0, count = 1;
      Text name;
      for (const Text word : split(param, ' ')) {
        if (word.starts_with(".b") || word.starts_with(".u") || word.starts_with(".f") ||
            word.starts_with(".s")) {
          bytes = static_cast<std::uint32_t>(bits_of_type(word.substr(1))) / 8;
        } else if (word == ".align" || word == ".param" || word.empty()) {
          continue;
        } else if (std::isdigit(static_cast<unsigned char>(word.front()))) {
          align = static_cast<std::uint32_t>(integer_of(word));
        } else {
          name = word;
        }
      }
      if (const std::size_t bracket = name.find('['); bracket != Text::npos) {
        count = static_cast<std::uint32_t>(integer_of(name.substr(bracket + 1, name.size() - bracket - 2)));
        name = name.substr(0, bracket);
      }
      align = std::max(align, bytes);
      offset = (offset + align - 1) / align * align;
      params_[std::string(name)] = offset;
      offset += bytes * count;
      program_.params.push_back({params_.at(std::string(name)), bytes * count});
    }
  }

  void body(Text text) {
    std::size_t i = text.find('{', text.find(')')) + 1;
    std::size_t counted = 0;
    scopes_ = {0};
    while (i < text.size()) {
      if (std::isspace(static_cast<unsigned char>(text[i]))) {
        ++i;
      } else if (text.substr(i).starts_with("//")) {
        i = std::min(text.find('\n', i), text.size());
      } else if (text[i] == '{') {
        scopes_.push_back(++last_scope_), ++i;
      } else if (text[i] == '}') {
        scopes_.pop_back(), ++i;
        if (scopes_.empty()) break;
      } else {
        std::size_t end = i;
        while (end < text.size() && is_name(text[end])) ++end;
        if (end < text.size() && text[end] == ':' && text[end + 1] != ':') {
          labels_[std::to_string(scopes_.back()) + ":" + std::string(text.substr(i, end - i))] = here();
          leaders_.push_back(here());
          i = end + 1;
          continue;
        }
        end = text.find(';', i);
        line_ += static_cast<std::uint32_t>(std::count(text.begin() + static_cast<std::ptrdiff_t>(counted),
                                                       text.begin() + static_cast<std::ptrdiff_t>(i), '\n'));
        counted = i;
        statement(text.substr(i, end - i));
        i = end + 1;
      }
    }
    leaders_.push_back(here());
  }

  std::uint32_t here() const { return static_cast<std::uint32_t>(program_.code.size()); }

  std::uint32_t label(const std::string& name, const std::vector<int>& scopes) const {
    for (auto scope = scopes.rbegin(); scope != scopes.rend(); ++scope) {
      const auto known = labels_.find(std::to_string(*scope) + ":" + name);
      if (known != labels_.end()) return known->second;
    }
    throw std::runtime_error("no label " + name);
  }

  void directive(Text s) {
    const std::vector<Text> words = split(s, ' ');
    if (s.starts_with(".reg")) {
      const std::size_t type = s.find('.', 1);
      std::size_t end = type;
      while (end < s.size() && !std::isspace(static_cast<unsigned char>(s[end]))) ++end;
      const int bits = bits_of_type(s.substr(type + 1, end - type - 1));
      for (Text name : split(s.substr(end), ',')) {
        if (const std::size_t count = name.find('<'); count != Text::npos) {
          classes_[std::string(name.substr(0, count))] = bits;
        } else {
          registers_of_[std::to_string(scopes_.back()) + ":" + std::string(name)] = {registers_.add(bits),
                                                                                     bits == 64};
        }
      }
    } else if (s.starts_with(".shared")) {
      // .shared [.align N] .type name or name[count]
      const std::size_t bracket = std::min(s.find('['), s.size()), name = s.find_last_of(" \t", bracket) + 1;
      const std::size_t type = s.rfind('.', name), align_at = s.find(".align");
      const auto bytes =
          static_cast<std::uint32_t>(bits_of_type(trimmed(s.substr(type + 1, name - type - 1)))) / 8;
      const auto align = align_at == Text::npos
                             ? bytes
                             : static_cast<std::uint32_t>(integer_of(split(s.substr(align_at), ' ')[1]));
      const auto count =
          bracket == s.size() ? 1 : integer_of(s.substr(bracket + 1, s.find(']') - bracket - 1));
      std::uint32_t& offset = program_.static_shared;
      offset = (offset + align - 1) / align * align;
      shared_[std::string(s.substr(name, bracket - name))] = offset;
      offset += bytes * static_cast<std::uint32_t>(count);
    } else if (!s.starts_with(".pragma")) {
      throw std::runtime_error("unknown directive: " + std::string(s));
    }
  }

  void statement(Text s) {
    if (s.front() == '.') return directive(s);
    program_.code.emplace_back();
    current_ = &program_.code.back();
    Instruction& to = *current_;
    to.text = s;
    to.line = line_;
    Statement parsed;
    parsed.text = s;
    if (s.front() == '@') {
      to.guarded = true;
      to.inverted = s[1] == '!';
      s.remove_prefix(to.inverted ? 2 : 1);
      const std::size_t end = s.find_first_of(" \t");
      const int id = find(s.substr(0, end), "pred").id;
      registers_.use(id, here() - 1, kGuardOperand, false);
      s = trimmed(s.substr(end));
    }
    const std::size_t end = std::min(s.find_first_of(" \t"), s.size());
    parsed.opcode = s.substr(0, end);
    parsed.parts = split(parsed.opcode, '.');
    parsed.operands = operands_of(s.substr(end));
    if (parsed.opcode.starts_with("bra")) {
      to.kind = Kind::kBranch;
      branches_.push_back({here() - 1, std::string(parsed.operands[0]), scopes_});
      leaders_.push_back(here());
      return;
    }
    if (parsed.opcode == "ret" || parsed.opcode == "exit") {
      to.kind = Kind::kExit;
      leaders_.push_back(here());
      return;
    }
    try {
      if (decoded(parsed, to)) return;
    } catch (const std::out_of_range&) {  // it has fewer operands than the instruction of that name
    }
    throw std::runtime_error(program_.path + ":" + std::to_string(line_) + ": the emulator does not know " +
                             std::string(parsed.text));
  }

  bool decoded(const Statement& parsed, Instruction& to) {
    for (const auto decode_some : {decode_arithmetic, decode_floats, decode_conversion, decode_memory,
                                   decode_warp, decode_matrix, decode_wgmma, decode_copy}) {
      if (decode_some(parsed, *this, to)) return true;
    }
    return false;
  }

  Program& program_;
  Registers registers_;
  std::uint32_t line_;
  Instruction* current_ = nullptr;
  std::map<std::string, int, std::less<>> classes_;  // bits of %r, %rd, ...
  std::unordered_map<std::string, Found> registers_of_;
  std::map<std::string, std::uint32_t, std::less<>> params_, shared_;
  std::unordered_map<std::string, std::uint32_t> labels_;
  std::vector<int> scopes_;
  int last_scope_ = 0;
  struct Branch {
    std::size_t instruction;
    std::string label;
    std::vector<int> scopes;
  };
  std::vector<Branch> branches_;
  std::vector<std::uint32_t> leaders_;  // first instructions of blocks
};

}  // namespace

void decode(Program& program, std::uint32_t first_line) { Decoder(program, first_line).decode(); }

}  // namespace halftone::emulator
