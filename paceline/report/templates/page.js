// Draws each chart when it comes into view, and again when the reader switches light and dark.
const page = JSON.parse(document.getElementById("page-data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const drawn = new Set();

function draw(node) {
  const { spec, data } = page.charts[node.dataset.chart];
  const datasets = { ...spec.datasets, [data]: page.datasets[data] };
  vegaEmbed(node, { ...spec, datasets }, {
    mode: "vega-lite",
    renderer: "svg",
    config: page.themes[dark.matches ? "dark" : "light"],
    actions: { export: true, source: false, compiled: false, editor: false },
    downloadFileName: node.dataset.chart,
  });
}

const seen = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (isIntersecting && !drawn.has(target)) {
      drawn.add(target);
      draw(target);
    }
  }
}, { rootMargin: "300px" });

document.querySelectorAll(".chart").forEach((node) => seen.observe(node));
dark.addEventListener("change", () => drawn.forEach(draw));
