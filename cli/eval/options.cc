#include "cli/eval/options.h"

#include <omp.h>

#include "cli/options/validators.h"

namespace halftone::cli {

void add_capture_options(Command command, EvalLine& line, const std::string& formats_help) {
  EvalOptions& options = line.options;
  command.add_option("file", line.file, "Capture: q, k and v of one or more layers (.safetensors)")
      ->type_name("")
      ->required();
  command.add_option("-f,--formats", line.formats, formats_help)->type_name("FORMATS");
  command.add_option("--tokens", options.tokens, "Use the first tokens only")->check(between(1, 1 << 30));
  command.add_option("--max-queries", options.max_queries, "Judge the last queries only")
      ->check(between(1, 1 << 30))
      ->capture_default_str();
  command.add_option("--layout", line.layout, "Axes of the tensors: thd or htd")
      ->type_name("AXES")
      ->capture_default_str();
  command
      .add_option("--scale", options.scale, "Logit scale (default: as the file says, else 1/sqrt(head_dim))")
      ->check(positive());
  command
      .add_option("--softcap", options.softcap, "Logit softcap, as in Gemma 2 (default: as the file says)")
      ->check(positive());
  command
      .add_option("--window", options.window,
                  "Sliding window: keys to the left of a query (default: as the file says)")
      ->check(between(0, 1 << 30));
  command.add_option("--threads", line.threads, "CPU threads (default: OMP_NUM_THREADS or all)")
      ->check(between(1, 1024));
}

void finish_capture_options(EvalLine& line) {
  line.options.order = parse_axis_order(line.layout);
  if (!line.formats.empty()) line.options.formats = parse_choices(line.formats, "--formats");
  if (line.threads > 0) omp_set_num_threads(line.threads);
}

}  // namespace halftone::cli
