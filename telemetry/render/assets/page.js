"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const steps = document.getElementById("steps");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  // Shared by all pictures; a picture's own layout overrides it.
  function withTheme(layout) {
    const style = getComputedStyle(document.documentElement);
    const line = style.getPropertyValue("--line").trim();
    const themed = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 12, color: style.getPropertyValue("--text").trim() },
      margin: { l: 60, r: 24, t: 30, b: 48 }, hovermode: "closest", showlegend: true,
      modebar: { bgcolor: "rgba(0,0,0,0)", color: line, activecolor: style.getPropertyValue("--dim").trim() },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, ...layout,
    };
    for (const axis of Object.keys(themed).filter((name) => /^[xy]axis/.test(name))) {
      themed[axis] = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true, ...themed[axis] };
    }
    return themed;
  }

  function draw(element) {
    const { data, layout } = figures[element.dataset.figure];
    const options = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["lasso2d", "select2d"] };
    // Plotly modifies its arguments.
    Plotly.react(element, structuredClone(data), withTheme(structuredClone(layout)), options).then(() => {
      if (element.dataset.drawn) return;
      element.dataset.drawn = "yes";
      element.on("plotly_click", (event) => {
        const anchor = event.points[0].customdata;
        if (typeof anchor === "string" && /^(step|request)-\d+$/.test(anchor)) location.hash = anchor;
      });
    });
  }

  const charts = [...document.querySelectorAll(".chart")];
  // Most pictures are far below, or of steps that are never opened. Each is drawn when it comes near the viewport, one
  // at a time, so that the page stays scrollable.
  const waiting = [];
  function drawNext() {
    draw(waiting.shift());
    if (waiting.length) setTimeout(drawNext);
  }
  const watcher = new IntersectionObserver((entries) => {
    const near = entries.filter((each) => each.isIntersecting).map((each) => each.target);
    near.forEach((each) => watcher.unobserve(each));
    if (waiting.push(...near) === near.length && near.length) setTimeout(drawNext);
  }, { rootMargin: "300px" });

  function show(anchor) {
    for (const step of document.querySelectorAll(".step")) step.classList.toggle("is-shown", step.id === anchor);
    steps.value = anchor;
  }

  function follow() {
    const target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    if (!target) return;
    if (target.classList.contains("step")) show(target.id);
    if (target instanceof HTMLDetailsElement) target.open = true;
    target.scrollIntoView();
  }

  function sortBy(header) {
    const body = header.closest("table").tBodies[0];
    const sign = header.dataset.order === "down" ? 1 : -1;
    const text = (row) => row.cells[header.cellIndex].textContent;
    // Every column has one unit, except that seconds below a tenth are shown in ms.
    const number = (row) => parseFloat(text(row).replace(/,/g, "")) * (/ ms$/.test(text(row)) ? 0.001 : 1);
    const by = (one, other) => {
      const [a, b] = [number(one), number(other)];
      if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b) || sign * text(one).localeCompare(text(other));
      return sign * (a - b);
    };
    for (const each of header.parentElement.cells) delete each.dataset.order;
    header.dataset.order = sign < 0 ? "down" : "up";
    body.append(...[...body.rows].sort(by));
  }

  for (const header of document.querySelectorAll("th")) header.addEventListener("click", () => sortBy(header));
  if (steps) {
    show(steps.value);
    steps.addEventListener("change", () => { location.hash = steps.value; });
  }
  charts.forEach((chart) => watcher.observe(chart));
  window.addEventListener("hashchange", follow);
  window.addEventListener("beforeprint", () => charts.forEach(draw));
  dark.addEventListener("change", () => charts.filter((chart) => chart.dataset.drawn).forEach(draw));
  follow();
})();
