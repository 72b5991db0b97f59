#include "cli/options/command_line.h"

#include <CLI/CLI.hpp>

#include <utility>

namespace halftone::cli {

Option Option::type_name(const std::string& name) const { return Option(option_->type_name(name)); }

Option Option::required(bool required) const { return Option(option_->required(required)); }

Option Option::capture_default_str() const { return Option(option_->capture_default_str()); }

Option Option::delimiter(char delimiter) const { return Option(option_->delimiter(delimiter)); }

// The help shows only the option's own words: the check has none.
Option Option::check(Check check) const {
  return Option(option_->check(CLI::Validator(std::move(check), "")));
}

Option Option::excludes(Option other) const { return Option(option_->excludes(other.option_)); }

std::size_t Option::count() const { return option_->count(); }

std::vector<std::string> Option::results() const { return option_->results(); }

Command Command::add_subcommand(const std::string& name, const std::string& text) const {
  return Command(command_->add_subcommand(name, text));
}

void Command::footer(const std::string& text) const { command_->footer(text); }

void Command::callback(std::function<void()> run) const { command_->callback(std::move(run)); }

template <class Value>
Option Command::add_option(const std::string& names, Value& value, const std::string& text) const {
  return Option(command_->add_option(names, value, text));
}
template Option Command::add_option(const std::string&, std::string&, const std::string&) const;
template Option Command::add_option(const std::string&, int&, const std::string&) const;
template Option Command::add_option(const std::string&, std::int64_t&, const std::string&) const;
template Option Command::add_option(const std::string&, double&, const std::string&) const;
template Option Command::add_option(const std::string&, std::vector<int>&, const std::string&) const;

Option Command::add_flag(const std::string& name, bool& value, const std::string& text) const {
  return Option(command_->add_flag(name, value, text));
}

Option Command::get_option(const std::string& name) const { return Option(command_->get_option(name)); }

bool read_number(const std::string& text, std::int64_t& number) {
  return CLI::detail::lexical_cast(text, number);
}

bool read_number(const std::string& text, double& number) { return CLI::detail::lexical_cast(text, number); }

}  // namespace halftone::cli
