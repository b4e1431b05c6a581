// Lines over steps, drawn by uPlot in the page's colors.

import uPlot from "./vendor/uplot/uplot.js";
import { html, shown, useEffect, useMemo, useRef, useState } from "./ui.js";

const COLORS = ["--a", "--b", "--c", "--d", "--e", "--f"];
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const dark = window.matchMedia("(prefers-color-scheme: dark)");

// `series`: [{label, points: [[step, value], ...], tone, dots}]; null values leave gaps.
export function Chart({ label, series, log = false, height = 260 }) {
  const place = useRef(null);
  const [isDark, setDark] = useState(dark.matches);
  useEffect(() => {
    const turned = () => setDark(dark.matches);
    dark.addEventListener("change", turned);
    return () => dark.removeEventListener("change", turned);
  }, []);
  const data = useMemo(() => {
    const steps = [...new Set(series.flatMap((each) => each.points.map(([step]) => step)))].sort((a, b) => a - b);
    const columns = series.map((each) => {
      const known = new Map(each.points);
      // A step that only another line has is no gap of this one: undefined, not null. A logarithm has no place for 0.
      return steps.map((step) => (!known.has(step) ? undefined : log && !(known.get(step) > 0) ? null : known.get(step)));
    });
    return [steps, ...columns];
  }, [series, log]);
  const shape = JSON.stringify([series.map((each) => [each.label, each.tone, each.dots, each.points.length < 2]), log, height, isDark]);
  const chart = useRef(null);
  useEffect(() => {
    const axis = { stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line") } };
    const options = {
      width: place.current.clientWidth || 300,
      height,
      scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
      axes: [
        { ...axis, values: (_, ticks) => ticks.map((each) => (Number.isInteger(each) ? shown(each, 6) : "")) },
        { ...axis, size: 62, values: (_, ticks) => ticks.map((each) => (each === null ? "" : shown(each))) },
      ],
      series: [
        { label: "step", value: (_, step) => (step === null ? "–" : shown(step, 6)) },
        ...series.map((each, at) => ({
          label: each.label,
          stroke: color(COLORS[(each.tone ?? at) % COLORS.length]),
          width: each.faint ? 1 : 2,
          alpha: each.faint ? 0.35 : 1,
          points: { show: Boolean(each.dots) || each.points.length < 2 },
          value: (_, value) => shown(value, 4),
        })),
      ],
    };
    chart.current = new uPlot(options, data, place.current);
    const watcher = new ResizeObserver(() => {
      if (place.current.clientWidth) chart.current.setSize({ width: place.current.clientWidth, height });
    });
    watcher.observe(place.current);
    return () => {
      watcher.disconnect();
      chart.current.destroy();
      chart.current = null;
    };
  }, [shape]);
  useEffect(() => chart.current?.setData(data), [data]);
  const words = series.map((each) => `${each.label}: ${each.points.length} values, last ${shown(each.points.at(-1)?.[1])}`);
  return html`<div class="chart" role="img" aria-label=${`${label}. ${words.join("; ")}`} ref=${place}></div>`;
}

// Exponential moving average, corrected at its start as Adam's are: weight 0 changes nothing.
export function smooth(points, weight) {
  let [sum, count] = [0, 0];
  return points.map(([step, value]) => {
    if (value === null) return [step, null];
    sum = weight * sum + (1 - weight) * value;
    count += 1;
    return [step, sum / (1 - weight ** count)];
  });
}
