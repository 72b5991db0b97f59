// The style sheet of the eval report: follows the reader's light or dark theme and prints well.
#pragma once

namespace halftone::cli {

inline constexpr const char* kReportStyle = R"css(
:root { color-scheme: light dark;
  --bg: #fbfbf9; --panel: #ffffff; --ink: #1c1e21; --soft: #5d646d; --faint: #e3e4e0; --edge: #c9ccc8;
  --f16: #6b7280; --fp8: #b7791f; --int8: #2563ab; --int4: #b0325f; --good: #1c7a4a; --accent: #0f6b5c; --mark: #e6f3ee; }
@media (prefers-color-scheme: dark) { :root {
  --bg: #15171a; --panel: #1d2024; --ink: #e7e8e6; --soft: #a2a9b2; --faint: #2c3036; --edge: #474d55;
  --f16: #a6adb8; --fp8: #e2b155; --int8: #71aef0; --int4: #f07aa2; --good: #5cc492; --accent: #5ec6b2; --mark: #1c3530; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink); font: 15px/1.55 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1020px; margin: 0 auto; padding: 36px 24px 60px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 18px; margin: 40px 0 4px; }
h3 { font-size: 14px; margin: 18px 0 2px; font-weight: 600; }
p { margin: 6px 0 10px; max-width: 78ch; } .sub, .soft { color: var(--soft); }
.sub { margin-bottom: 22px; } code { font: 13px ui-monospace, "DejaVu Sans Mono", monospace; }
.answer { background: var(--mark); border-left: 4px solid var(--accent); border-radius: 6px; padding: 14px 18px; margin: 0 0 16px; }
.answer p { margin: 0; font-size: 17px; line-height: 1.45; max-width: none; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(126px, 1fr)); gap: 12px; }
.tile, figure { background: var(--panel); border: 1px solid var(--faint); border-radius: 8px; }
.tile { padding: 12px 14px; } .tile b { display: block; font-size: 19px; line-height: 1.3; font-variant-numeric: tabular-nums; }
.tile span { display: block; color: var(--soft); font-size: 13px; line-height: 1.35; }
figure { margin: 10px 0 14px; padding: 12px 14px; overflow-x: auto; } figcaption { color: var(--soft); font-size: 13.5px; max-width: 88ch; }
svg { width: 100%; height: auto; display: block; font-family: inherit; }
ul { margin: 6px 0; padding-left: 20px; max-width: 80ch; } li { margin: 4px 0; }
.scroll { overflow-x: auto; background: var(--panel); border: 1px solid var(--faint); border-radius: 8px; margin: 10px 0; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 8px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--faint); }
th { font-weight: 600; color: var(--soft); font-size: 12.5px; vertical-align: bottom; line-height: 1.3; }
th:first-child, td:first-child { text-align: left; }
table.about td { text-align: left; white-space: normal; vertical-align: top; } table.about td:first-child { color: var(--soft); } tr:last-child td { border-bottom: 0; }
tr.chosen td { background: var(--mark); font-weight: 600; } .within { color: var(--good); } td.mark { text-align: left; color: var(--accent); }
.swatch { display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin-right: 7px; border: 2px solid; }
.swatch.f16 { color: var(--f16); } .swatch.fp8 { color: var(--fp8); } .swatch.int8 { color: var(--int8); } .swatch.int4 { color: var(--int4); }
.swatch.full { background: currentColor; } details summary { cursor: pointer; color: var(--soft); margin: 8px 0; }
footer { margin-top: 44px; border-top: 1px solid var(--faint); padding-top: 12px; color: var(--soft); font-size: 13px; }
text { fill: var(--ink); font-size: 12px; } .tick, .note { fill: var(--soft); font-size: 11.5px; } .label { fill: var(--soft); font-size: 12.5px; }
.name { fill: var(--soft); paint-order: stroke; stroke: var(--panel); stroke-width: 3px; stroke-linejoin: round; } .name.strong { fill: var(--ink); font-weight: 600; } .name.chosen { fill: var(--accent); font-weight: 700; }
.cell { font-size: 11px; fill: #222; } .cell.light { fill: #fff; }
.grid { stroke: var(--faint); } .axis, .separator { stroke: var(--edge); } .separator { stroke-dasharray: 2 3; }
.leader { stroke: var(--edge); stroke-width: 0.8; } .pareto { fill: none; stroke: var(--accent); stroke-width: 1.6; opacity: 0.75; }
.limit { stroke: var(--int4); stroke-dasharray: 6 4; stroke-width: 1.3; } .reference { stroke: var(--soft); stroke-dasharray: 2 4; }
.dot { stroke-width: 2.2; } .dot.f16 { fill: var(--f16); stroke: var(--f16); } .dot.fp8 { fill: var(--fp8); stroke: var(--fp8); }
.dot.int8 { fill: var(--int8); stroke: var(--int8); } .dot.int4 { fill: var(--int4); stroke: var(--int4); } .dot.ring { fill: var(--panel); }
.bar.f16 { fill: var(--f16); } .bar.fp8 { fill: var(--fp8); } .bar.int8 { fill: var(--int8); } .bar.int4 { fill: var(--int4); } .bar.top { opacity: 0.6; }
.mixture { fill: var(--accent); stroke: var(--panel); stroke-width: 1.5; }
.halo { fill: none; stroke: var(--accent); stroke-width: 2; opacity: 0.8; }
.channels { fill: var(--int8); opacity: 0.55; } .rotated { fill: none; stroke: var(--int4); stroke-width: 1.1; }
@media (max-width: 640px) { main { padding: 20px 10px 40px; } figure { padding: 8px 4px; } svg text.name, svg text.tick, svg text.note { font-size: 14px; } }
@media print { body { background: #fff; } main { max-width: none; padding: 0; } figure, .scroll, .tile { break-inside: avoid; } }
)css";

}  // namespace halftone::cli
