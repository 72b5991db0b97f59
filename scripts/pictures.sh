#!/usr/bin/env bash
# Makes the pictures of README.md: pictures.sh [HALFTONE]. docs/images/report.png is the page that
# `halftone eval --html` writes, seen by headless Chromium; docs/images/decode-h200.svg is the plot that
# `python -m halftone.compare --plot` draws, of two batches of the run recorded in bench/results/. HALFTONE is the
# command (build/release/bin/halftone).
set -euo pipefail
cd "$(dirname "$0")/.."

halftone="${1:-build/release/bin/halftone}"
browser="$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)"
if [[ -z "$browser" ]]; then
  echo "pictures.sh: there is no Chromium to look at the report with: apt-get install chromium" >&2
  exit 1
fi
mkdir -p docs/images build
"$halftone" eval data/llama-tiny-capture.safetensors --memory 80GB --html build/picture.html >/dev/null
"$browser" --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=1040,1070 \
  --screenshot=docs/images/report.png "file://$PWD/build/picture.html" 2>/dev/null
python3 - <<'PLOT'
import json
import pathlib
import runpy

recorded = json.loads(pathlib.Path("bench/results/h200-decode-compare.json").read_text())
recorded["cases"] = [case for case in recorded["cases"] if case["batch"] in (32, 512)]
plot = runpy.run_path("python/halftone/compare/report.py")["plot"]
pathlib.Path("docs/images/decode-h200.svg").write_text(plot(recorded))
PLOT
