#include "cli/commands/command.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include <new>
#include <sstream>

#include "cli/terminal/text.h"
#include "halftone/error.h"

namespace halftone::cli {
namespace {

constexpr const char* kAbout =
    "halftone: attention over low-precision KV caches.\n\n"
    "Measures what a KV-cache format costs on the activations of your model, packs caches, and times the "
    "library\n"
    "on this machine.";

constexpr const char* kFooter =
    "Start here:\n"
    "  halftone eval capture.safetensors --html report.html   which format is good enough for my model?\n"
    "  halftone recipe capture.safetensors --error 2%         which format for which layer?\n"
    "  halftone formats                                       what formats are there?\n"
    "  halftone doctor                                        what does this machine offer?\n"
    "  halftone <command> --help                              options and examples of a command\n\n"
    "Exit codes: 0 done, 1 failure (bad file, no space, unsupported), 2 wrong usage.\n"
    "Errors are one line on stderr. Progress shows only on a terminal. NO_COLOR turns colour off.";

/// Options as "--tokens N", with the default behind the name: "--page-size N=64".
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_option_opts(const CLI::Option* option) const override {
    if (option->get_type_size() == 0) return "";
    std::string type = option->get_type_name();
    if (type == "INT") type = "N";
    if (type == "FLOAT") type = "X";
    std::string text = type.empty() ? "" : " " + type;
    if (!option->get_default_str().empty()) text += "=" + option->get_default_str();
    return text;
  }
};

int report(Terminal& terminal, std::string_view sentence, int code) {
  print(terminal.err, "halftone: error: {}\n", sentence);
  return code;
}

std::string one_line(std::string text) {
  for (char& c : text) c = c == '\n' || c == '\r' ? ' ' : c;
  return text;
}

/// The subcommand whose help to point at.
std::string help_hint(const CLI::App& app) {
  const auto chosen = app.get_subcommands();
  return fmt::format("see `halftone {}--help`", chosen.empty() ? "" : chosen.front()->get_name() + " ");
}

/// For a command line in which no command was found.
std::string missing_command(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
  const std::vector<std::string> words = app.remaining();
  if (words.empty()) return fmt::format("no command is given, but one is needed: {}", fmt::join(names, ", "));
  return fmt::format("command is '{}', but must be one of {}", printable(words[0]), fmt::join(names, ", "));
}

int handle_parse_error(const CLI::App& app, const CLI::ParseError& error, Terminal& terminal) {
  if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success)) {  // --help or --version
    return app.exit(error, terminal.out, terminal.err);
  }
  std::string sentence = one_line(error.what());
  if (error.get_name() == "ValidationError") sentence.erase(sentence.find(": "), 1);  // "--batch is ..."
  if (app.get_subcommands().empty()) sentence = missing_command(app);
  while (sentence.ends_with('.') || sentence.ends_with(' ')) sentence.pop_back();
  return report(terminal, fmt::format("{}; {}.", sentence, help_hint(app)), kExitUsage);
}

}  // namespace

int run_command(int argc, const char* const* argv, Terminal terminal) {
  CLI::App app(kAbout, "halftone");
  app.footer(kFooter);
  app.set_version_flag("--version", std::string("halftone ") + HALFTONE_VERSION,
                       "Print the version and exit");
  app.require_subcommand(1);
  const auto formatter = std::make_shared<HelpFormatter>();
  formatter->column_width(30);
  app.formatter(formatter);
  const Command command(&app);
  add_eval(command, terminal);
  add_recipe(command, terminal);
  add_formats(command, terminal);
  add_quantize(command, terminal);
  add_dequantize(command, terminal);
  add_explain(command, terminal);
  add_bench(command, terminal);
  add_doctor(command, terminal);
  for (CLI::App* subcommand : app.get_subcommands({})) {
    for (CLI::Option* option : subcommand->get_options()) {
      if (option->get_type_size() > 0) Option(option)->check(not_empty());
    }
  }
  try {
    app.parse(argc, argv);
    terminal.out.flush();
    if (!terminal.out)
      return report(terminal, "standard output cannot be written: is its disk full?", kExitFailure);
    return kExitOk;
  } catch (const CLI::ParseError& error) {
    return handle_parse_error(app, error, terminal);
  } catch (const UsageError& error) {
    return report(terminal, one_line(error.what()), kExitUsage);
  } catch (const Error& error) {
    return report(terminal, one_line(error.what()), kExitFailure);
  } catch (const std::bad_alloc&) {
    return report(terminal, "memory is exhausted: use fewer tokens, layers or requests.", kExitFailure);
  } catch (const std::exception& error) {
    return report(terminal, one_line(error.what()), kExitFailure);
  }
}

}  // namespace halftone::cli
