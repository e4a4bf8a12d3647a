/** Charts by plotly, from its installed package. The page's data are also in a table: a chart is a picture of it. */

import { h } from "./h.mjs";

const COLOURS = ["--one", "--two", "--three", "--four", "--five", "--six"];
const CONFIG = { displayModeBar: false, responsive: true };
const MISSING = "Charts need plotly on the server: pip install 'forebay[report]'";

let loading = null;

/**
 * A chart. `traces` are plotly's, with `colour` (0 to 5) in place of colours; `said` describes it for screen readers;
 * `onclick` gets the `customdata` of the point that was clicked.
 */
export function chart(title, said, traces, layout, onclick) {
  const ref = (node) => draw(node, traces, layout, onclick);
  return h("figure", { key: title },
    h("figcaption", null, title),
    h("div", { class: "chart", role: "img", "aria-label": said, owned: true, ref }));
}

async function draw(node, traces, layout, onclick) {
  const colours = COLOURS.map((name) => property(name));
  const wanted = JSON.stringify([traces, layout, colours, property("--back")]);
  node.onpoint = onclick;
  if (node.wanted === wanted) return;
  node.wanted = wanted;
  try {
    await (loading ??= load());
  } catch {
    node.textContent = MISSING;
    return;
  }
  if (node.wanted !== wanted || !node.isConnected) return;
  await window.Plotly.react(node, traces.map((trace) => coloured(trace, colours)), themed(layout), CONFIG);
  if (node.dataset.drawn) return;
  node.dataset.drawn = "true";
  node.on("plotly_click", ({ points }) => node.onpoint?.(points[0].customdata));
}

function load() {
  return new Promise((resolve, reject) => {
    const script = Object.assign(document.createElement("script"), { src: "/ui/plotly.min.js" });
    Object.assign(script, { onload: resolve, onerror: reject });
    document.head.append(script);
  });
}

const property = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function coloured({ colour, ...trace }, colours) {
  const color = colours[colour % colours.length];
  const fill = trace.fill ? { fillcolor: `${color}33` } : {};
  return { ...trace, ...fill, line: { color, ...trace.line }, marker: { color, ...trace.marker } };
}

function themed(layout) {
  const axis = { gridcolor: property("--line"), zerolinecolor: property("--line"), automargin: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest", showlegend: true,
    font: { color: property("--text"), size: 12 }, margin: { l: 48, r: 12, t: 8, b: 36 },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom" },
    ...layout,
    xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, rangemode: "tozero", ...layout.yaxis },
  };
}
