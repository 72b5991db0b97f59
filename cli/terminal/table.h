// Aligned text tables.
#pragma once

#include <string>
#include <vector>

#include "cli/terminal/terminal.h"

namespace halftone::cli {

class Table {
 public:
  enum class Align { kLeft, kRight };

  /// A column; `heading` may have two lines separated by '\n'.
  void column(const std::string& heading, Align align = Align::kRight);
  void row(std::vector<std::string> cells);
  /// Emphasises the last row.
  void emphasise();
  void print(Terminal& terminal) const;

 private:
  struct Column {
    std::string upper, lower;
    Align align;
  };
  struct Row {
    std::vector<std::string> cells;
    bool bold = false;
  };
  std::vector<Column> columns_;
  std::vector<Row> rows_;
};

}  // namespace halftone::cli
