#include "cli/terminal/table.h"

#include <algorithm>
#include <ostream>

#include "cli/terminal/text.h"

namespace halftone::cli {
namespace {

std::string padded(const std::string& cell, std::size_t width, Table::Align align) {
  const std::size_t have = display_width(cell);
  const std::string fill(width > have ? width - have : 0, ' ');
  return align == Table::Align::kLeft ? cell + fill : fill + cell;
}

std::string trimmed(std::string line) {
  line.erase(line.find_last_not_of(' ') + 1);
  return line;
}

}  // namespace

void Table::column(const std::string& heading, Align align) {
  const std::size_t newline = heading.find('\n');
  Column column{"", heading, align};
  if (newline != std::string::npos) {
    column.upper = heading.substr(0, newline);
    column.lower = heading.substr(newline + 1);
  }
  columns_.push_back(std::move(column));
}

void Table::row(std::vector<std::string> cells) {
  cells.resize(columns_.size());
  rows_.push_back({std::move(cells), false});
}

void Table::emphasise() { rows_.back().bold = true; }

void Table::print(Terminal& terminal) const {
  std::vector<std::size_t> widths;
  bool two_lines = false;
  for (std::size_t c = 0; c < columns_.size(); ++c) {
    std::size_t width = std::max(display_width(columns_[c].upper), display_width(columns_[c].lower));
    for (const Row& row : rows_) width = std::max(width, display_width(row.cells[c]));
    widths.push_back(width);
    two_lines |= !columns_[c].upper.empty();
  }
  const auto line = [&](auto&& cell) {
    std::string text;
    for (std::size_t c = 0; c < columns_.size(); ++c) {
      if (c > 0) text += "  ";
      text += padded(cell(c), widths[c], columns_[c].align);
    }
    return trimmed(std::move(text));
  };
  if (two_lines) terminal.out << terminal.dim(line([&](std::size_t c) { return columns_[c].upper; })) << '\n';
  terminal.out << terminal.dim(line([&](std::size_t c) { return columns_[c].lower; })) << '\n';
  for (const Row& row : rows_) {
    const std::string text = line([&](std::size_t c) { return row.cells[c]; });
    terminal.out << (row.bold ? terminal.bold(text) : text) << '\n';
  }
}

}  // namespace halftone::cli
