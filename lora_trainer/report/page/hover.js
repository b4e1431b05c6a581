"use strict";
// A read-out of the step under the pointer. The page says the same without it.
for (const plot of document.querySelectorAll(".plot")) {
  const lines = JSON.parse(plot.dataset.lines);
  const first = Number(plot.dataset.first), last = Number(plot.dataset.last);
  const cursor = plot.querySelector(".cursor");
  const output = plot.closest("figure").querySelector("output");
  const nearest = (points, step) => {
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < step) low = middle; else high = middle;
    }
    return step - points[low][0] < points[high][0] - step ? points[low] : points[high];
  };
  const show = (event) => {
    const box = plot.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const found = lines.filter(line => line.points.length).map(
      line => [line.name, nearest(line.points, first + share * (last - first))]);
    if (!found.length) return;
    const step = found[0][1][0];
    cursor.hidden = false;
    cursor.style.left = (last > first ? 100 * (step - first) / (last - first) : 0) + "%";
    output.textContent = "step " + step + ": " + found.map(([name, point]) =>
      found.length > 1 ? name + " " + point[1] : point[1]).join(", ");
  };
  plot.addEventListener("pointermove", show);
  plot.addEventListener("pointerdown", show);
  plot.addEventListener("pointerleave", () => { cursor.hidden = true; output.textContent = ""; });
}
