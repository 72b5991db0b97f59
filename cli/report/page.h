// Pieces of HTML that the sections of the page share.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cli/report/extras.h"

namespace halftone::cli {

/// A figure with what it is; both are escaped.
std::string tile(const std::string& value, const std::string& what);

/// A mark in the colour of K's format, hollow when it is rotated.
std::string swatch(const FormatChoice& choice);

/// The beginning of a table; headings are HTML.
std::string table_head(const std::vector<std::string>& headings);

/// `html` is not escaped.
std::string cell(const std::string& html, std::string_view css = "");

/// What a recipe says, layer by layer; see recipe_section.cc.
std::string recipe_section(const RecipeReport& recipe, const ReportExtras& extras);

}  // namespace halftone::cli
