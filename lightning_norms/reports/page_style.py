"""How the page of a diagnosis looks: one column on a phone, light or dark as the reader's system is."""

STYLE = """
:root { color-scheme: light dark;
  --back: #ffffff; --card: #f5f6f8; --ink: #1b1e23; --soft: #535b66; --edge: #d3d7dd; --link: #0a58ad;
  --good: #146c3a; --bad: #b3261e; --open: #7a5200;
  --s1: #0067a5; --s2: #c04a00; --s3: #00795a; --s4: #a0307a; --s5: #7a5c00;
  --s6: #2f86c5; --s7: #6a6f77; --s8: #8c1c13; }
@media (prefers-color-scheme: dark) { :root {
  --back: #14171b; --card: #1d2126; --ink: #e8eaed; --soft: #aab2bd; --edge: #3a4149; --link: #8ab8f2;
  --good: #6fd39a; --bad: #ff9a90; --open: #e8bd62;
  --s1: #5ab4f0; --s2: #ff8c4a; --s3: #3ccfa4; --s4: #e58ac8; --s5: #e3c04b;
  --s6: #a9d8ff; --s7: #b5bac2; --s8: #ff8077; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 16px; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .2em 0 .4em; }
h2 { font-size: 1.2rem; margin: 2em 0 .5em; border-bottom: 1px solid var(--edge); padding-bottom: .2em; }
h3 { font-size: 1rem; margin: 0 0 .4em; }
p, li, dd { overflow-wrap: anywhere; max-width: 46em; }
ol, ul { padding-left: 1.3em; }
li { margin: .35em 0; }
.kicker, figcaption, .soft { color: var(--soft); font-size: .875rem; font-weight: 400; }
.verdict { border-left: 6px solid var(--open); background: var(--card); padding: 14px 16px; border-radius: 4px; }
.verdict.good { border-color: var(--good); } .verdict.bad { border-color: var(--bad); }
.good b, b.good { color: var(--good); } .bad b, b.bad { color: var(--bad); } b.open { color: var(--open); }
td b { white-space: nowrap; }
.lead { font-size: 1.05rem; margin: 0; }
dl.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(135px, 1fr)); gap: 10px; margin: 16px 0 0; }
dl.numbers div { background: var(--card); border-radius: 4px; padding: 8px 12px; }
dl.numbers dt { color: var(--soft); font-size: .8125rem; line-height: 1.3; }
dl.numbers dd { margin: 0; font-size: 1.2rem; font-variant-numeric: tabular-nums; }
pre { background: var(--card); border: 1px solid var(--edge); border-radius: 4px; padding: 12px; overflow-x: auto;
  font-size: .875rem; line-height: 1.4; }
.wide { overflow-x: auto; border: 1px solid var(--edge); border-radius: 4px; }
.wide:focus-visible { outline: 2px solid var(--link); }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: 7px 10px; border-bottom: 1px solid var(--edge); }
tbody tr:last-child > * { border-bottom: 0; }
thead th { color: var(--soft); font-weight: 600; white-space: nowrap; }
tbody th { font-weight: 600; }
tbody .text { min-width: 13em; overflow-wrap: break-word; } thead .text { white-space: normal; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 16px; }
figure { margin: 0 0 16px; background: var(--card); border-radius: 4px; padding: 12px; min-width: 0; }
figure.large { max-width: 640px; }
.plot { display: block; width: 100%; height: auto; margin-bottom: 6px; }
.plot text { fill: var(--ink); font: 11px system-ui, sans-serif; font-variant-numeric: tabular-nums; }
.plot text.onplot { paint-order: stroke; stroke: var(--card); stroke-width: 3px; }
.grid { stroke: var(--edge); stroke-width: .6; } .axis { stroke: var(--soft); stroke-width: 1; }
.reference { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 1 3; }
.line { fill: none; vector-effect: non-scaling-stroke; stroke-width: 1.6;
  stroke-linejoin: round; stroke-linecap: round; }
.thick { stroke-width: 2.3; } .dashed { stroke-dasharray: 5 4; } .again { opacity: .5; stroke-width: 1; }
.sample { vertical-align: baseline; }
ul.legend { list-style: none; padding: 0; margin: 6px 0; display: flex; flex-wrap: wrap; gap: 2px 16px;
  font-size: .875rem; }
ul.legend li { margin: 0; } div.legend { font-size: .875rem; }
.swatch { display: inline-block; width: 12px; height: 12px; border: 1px solid var(--soft); }
.zero { fill: hotpink; background: hotpink; } .infinite { fill: red; background: red; }
.missing { fill: lightgrey; background: lightgrey; }
@media (max-width: 560px) {
  thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  tbody tr { display: block; padding: 7px 10px; border-bottom: 1px solid var(--edge); }
  tbody tr:last-child { border-bottom: 0; }
  tbody th, tbody td, tbody .number, tbody .text { display: block; padding: 1px 0; border: 0; text-align: left;
    min-width: 0; white-space: normal; }
  td:empty { display: none; }
  td::before { content: attr(data-label) ": "; color: var(--soft); font-weight: 400; }
  td[data-label=""]::before { content: none; } }
summary { cursor: pointer; color: var(--link); }
""" + "".join(
    f".s{i} {{ stroke: var(--{name}); }} .plot text.t{i} {{ fill: var(--{name}); font-weight: 700; }}\n"
    for i, name in enumerate(("ink", "s1", "s2", "s3", "s4", "s5", "s6", "s7", "s8"))
)
