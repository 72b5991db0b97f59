// The parser of the command line as the subcommands use it: handles, as cheap as a pointer and valid as long
// as the parser. CLI11 is behind them, because it takes seconds to compile and to analyse wherever it is
// included.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace halftone::cli {

/// Returns what is wrong with the text of a value, as the end of a sentence that the option's name begins, or
/// "".
using Check = std::function<std::string(const std::string& text)>;

class Option {
 public:
  explicit Option(CLI::Option* option) : option_(option) {}
  const Option* operator->() const { return this; }

  Option type_name(const std::string& name) const;  ///< of its values, in the help
  Option required(bool required = true) const;
  Option capture_default_str() const;  ///< the help shows the variable's value
  Option delimiter(char delimiter) const;
  Option check(Check check) const;
  Option excludes(Option other) const;

  // After parsing.
  std::size_t count() const;
  std::vector<std::string> results() const;

 private:
  CLI::Option* option_;
};

/// The command or one of its subcommands.
class Command {
 public:
  explicit Command(CLI::App* command) : command_(command) {}
  const Command* operator->() const { return this; }

  Command add_subcommand(const std::string& name, const std::string& text) const;
  void footer(const std::string& text) const;
  void callback(std::function<void()> run) const;

  /// `value` must live as long as the parser. A Value is a std::string, an int, a std::int64_t, a double or
  /// a vector of int.
  template <class Value>
  Option add_option(const std::string& names, Value& value, const std::string& text) const;
  Option add_flag(const std::string& name, bool& value, const std::string& text) const;
  Option get_option(const std::string& name) const;

 private:
  CLI::App* command_;
};

/// `text` as the parser reads it; false also when it says more than the number.
bool read_number(const std::string& text, std::int64_t& number);
bool read_number(const std::string& text, double& number);

}  // namespace halftone::cli
