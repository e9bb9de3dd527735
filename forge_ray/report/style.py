"""The report's style sheet."""

CSS = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1c2430; --soft: #5b6675; --line: #dfe4ea; --panel: #f6f8fa;
  --one: #2563c9; --two: #c2410c; --mark: 37 99 201; --good: #15803d; --bad: #b42318; }
@media (prefers-color-scheme: dark) { :root { --page: #12161c; --ink: #e4e9f0; --soft: #98a4b3; --line: #2b333d; --panel: #1a2028;
  --one: #7aa7f7; --two: #f59e5b; --mark: 90 140 240; --good: #4ade80; --bad: #f87171; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 840px; margin: 0 auto; padding: 40px 24px 80px; }
h1 { font-size: 26px; margin: 0 0 6px; letter-spacing: -0.01em; }
h2 { font-size: 18px; margin: 44px 0 12px; }
h3 { font-size: 15px; margin: 0 0 2px; }
.lead { font-size: 18px; margin: 0; }
.note, .meta, .empty, small { color: var(--soft); }
.note, .meta { font-size: 13px; margin: 8px 0 0; }
svg { width: 100%; height: auto; display: block; overflow: visible; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
svg .grid { stroke: var(--line); }
svg .curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .point { stroke: var(--page); stroke-width: 2; }
.legend { display: flex; gap: 20px; font-size: 13px; margin: 6px 0 0; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 50%; margin-right: 7px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 7px 12px 7px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 500; white-space: nowrap; width: 1%; padding-right: 28px; }
thead th { color: var(--soft); font-size: 13px; width: auto; }
td { overflow-wrap: anywhere; }
.rate { position: relative; }
.bar { position: absolute; left: 0; bottom: 3px; height: 3px; border-radius: 2px; background: var(--one); max-width: calc(100% - 12px); }
.total th, .total td { font-weight: 600; border-bottom: 0; }
article { background: var(--panel); border: 1px solid var(--line); border-radius: 10px; padding: 16px 18px; margin: 14px 0; }
.badge { font-size: 12px; font-weight: 600; padding: 1px 9px; border-radius: 99px; border: 1px solid; margin-left: 6px;
  white-space: nowrap; }
.badge.pass { color: var(--good); } .badge.fail { color: var(--bad); }
details { margin-top: 12px; }
summary { cursor: pointer; font-weight: 600; font-size: 13px; }
summary small { font-weight: 400; margin-left: 6px; }
pre { margin: 6px 0 0; padding: 10px 12px; background: var(--page); border: 1px solid var(--line); border-radius: 6px;
  font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
mark { color: inherit; background: rgb(var(--mark) / calc(var(--p, 100%) * 0.38)); border-radius: 2px; }
.known { color: var(--soft); }
"""
