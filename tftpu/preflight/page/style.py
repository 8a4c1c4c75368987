"""The style of a page: colours for light and dark, and for screens of any width.

Text has a contrast of at least 4.5 to 1 with what is behind it, and areas of 3 to 1.
"""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --card: #f6f8fa; --text: #1f2328; --soft: #59636e; --line: #d1d9e0;
  --blue: #0969da; --grey: #818b98; --dark: #59636e; --orange: #bc4c00; --violet: #8250df;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0d1117; --card: #151b23; --text: #e6edf3; --soft: #9198a1; --line: #3d444d;
    --blue: #4493f8; --grey: #6e7681; --dark: #b1bac4; --orange: #f0883e; --violet: #ab7df8;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 74rem; padding: 1.2rem 1rem 3rem; background: var(--page);
  color: var(--text); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif;
}
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .2rem; }
h2 {
  font-size: 1.35rem; margin: 2.6rem 0 .6rem; padding-top: .8rem;
  border-top: 1px solid var(--line);
}
h3 { font-size: 1.05rem; margin: 1.8rem 0 .4rem; }
p { margin: .4rem 0; max-width: 48rem; }
a { color: var(--blue); }
.soft, footer { color: var(--soft); font-size: .875rem; }
footer { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: .6rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .45rem; text-align: right; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; border-bottom: 1px solid var(--line); }
td { border-bottom: 1px solid var(--line); }
.left { text-align: left; }
dl {
  display: grid; grid-template-columns: repeat(auto-fill, minmax(8rem, 1fr)); gap: .6rem;
  margin: .8rem 0;
}
dl div {
  background: var(--card); border: 1px solid var(--line); border-radius: 6px;
  padding: .45rem .7rem;
}
dt { color: var(--soft); font-size: .8rem; }
dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
dd small { display: block; font-weight: 400; color: var(--soft); }
ul { padding-left: 1.2rem; max-width: 48rem; }
li { margin: .3rem 0; overflow-wrap: anywhere; }
.bad { border-left: 4px solid var(--orange); padding-left: .7rem; overflow-wrap: anywhere; }
details { margin: .5rem 0; }
summary { cursor: pointer; color: var(--blue); font-size: .875rem; }
.key {
  list-style: none; padding: 0; margin: .3rem 0; font-size: .875rem;
  display: flex; flex-wrap: wrap; gap: .2rem 1.1rem;
}
.key li { margin: 0; }
.key svg {
  width: .8rem; height: .8rem; display: inline; margin-right: .35rem; vertical-align: -1px;
}
svg { display: block; width: 100%; height: auto; }
.narrow { display: none; }
@media (max-width: 760px) {
  .wider { display: none; }
  .narrow { display: block; max-width: 480px; }
}
svg text {
  font: 12.5px system-ui, -apple-system, "Segoe UI", sans-serif; fill: var(--text);
  font-variant-numeric: tabular-nums;
}
svg .tick, svg .figure { fill: var(--soft); }
svg .note { font-weight: 600; }
.grid { stroke: var(--line); stroke-opacity: .7; }
.axis { stroke: var(--soft); }
.base { fill: var(--grey); } .code { fill: var(--dark); }
.live { fill: var(--blue); }
.loop { fill: var(--violet); fill-opacity: .13; } .loops { fill: var(--violet); }
.limit { stroke: var(--orange); stroke-width: 2; stroke-dasharray: 6 4; }
.peak { fill: var(--orange); stroke: var(--page); stroke-width: 1.5; }
.sense { fill: transparent; } .sense:hover { fill: var(--text); fill-opacity: .18; }
.roof { fill: none; stroke: var(--orange); stroke-width: 2; }
.point { fill: var(--blue); fill-opacity: .55; stroke: var(--blue); }
.time { fill: var(--blue); } .waited { fill: var(--orange); } .hidden { fill: var(--grey); }
""".strip()
