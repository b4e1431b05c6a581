"use strict";
// Draws Optuna's own figures, in the page's colors.
for (const place of document.querySelectorAll(".optuna")) {
  const figure = JSON.parse(place.dataset.figure);
  const color = getComputedStyle(place).color;
  const layout = Object.assign({}, figure.layout, {
    title: undefined, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color, size: 12 }, modebar: { bgcolor: "rgba(0,0,0,0)" },
    margin: { t: 30, r: 20, b: 60, l: 70 }, autosize: true,
  });
  for (const name of Object.keys(layout))
    if (/^[xy]axis/.test(name)) layout[name] = Object.assign({ automargin: true, gridcolor: "rgba(128,128,128,0.25)" }, layout[name]);
  Plotly.newPlot(place, figure.data, layout, { responsive: true, displaylogo: false });
}
