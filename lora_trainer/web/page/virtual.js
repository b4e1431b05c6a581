// Rows and grids of any length: only what is near the screen is in the document, and all of it is reached by keys.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./ui.js";

const BEYOND = 4; // rows kept above and below the screen
const CONTROLS = "a[href], button, input, select, textarea, summary";
const TYPED_IN = "textarea, select, input:not([type='checkbox'], [type='radio'])";

// `cell`: {width, height} in pixels, or a function of the grid's width that gives it. As many columns as fit are made;
// they share the width, so `width` is the least. `render(index, isActive)` gives the content of a cell, `keyOf(index)` a
// key that moves with the item. `onRange(first, end)` is told what is in the document, to fetch it.
//
// One cell can be reached by Tab; arrow keys, Page up and down, Home and End (with Ctrl: of the whole grid) move between
// cells. Enter clicks the first link or button of a cell, space its check box. Browsers draw no element over 17,000,000
// pixels: 100,000 rows of 170.
export function VirtualGrid(props) {
  return props.count > 0 ? html`<${Grid} ...${props} />` : null;
}

// The same in one column. `height` may be a function of the width.
export function VirtualRows({ height, ...props }) {
  const cell = (width) => ({ width: Math.max(1, width), height: typeof height === "function" ? height(width) : height });
  return html`<${VirtualGrid} ...${props} cell=${cell} />`;
}

function Grid({ count, cell, render, label, gap = 12, keyOf = (index) => index, onRange }) {
  const place = useRef(null);
  const [near, setNear] = useState({ width: 0, first: 0, end: 0 });
  const [wanted, setActive] = useState(0);
  const takesFocus = useRef(false);
  const { width: least, height } = typeof cell === "function" ? cell(near.width) : cell;
  const columns = Math.max(1, Math.floor((near.width + gap) / (least + gap)));
  const [rows, stride, active] = [Math.ceil(count / columns), height + gap, Math.min(wanted, count - 1)];
  const newest = useRef(null);
  newest.current = () => {
    if (!place.current) return;
    const { top, width } = place.current.getBoundingClientRect();
    const first = Math.max(0, Math.floor(-top / stride) - BEYOND);
    const end = Math.max(0, Math.ceil((window.innerHeight - top) / stride) + BEYOND);
    setNear((before) => (before.width === width && before.first === first && before.end === end ? before : { width, first, end }));
  };
  useLayoutEffect(() => {
    let frame = 0;
    const look = () => {
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        newest.current();
      });
    };
    const watcher = new ResizeObserver(look); // of the page too: what is above may grow
    for (const each of [place.current, document.body]) watcher.observe(each);
    document.addEventListener("scroll", look, { capture: true, passive: true });
    window.addEventListener("resize", look);
    return () => {
      cancelAnimationFrame(frame);
      watcher.disconnect();
      document.removeEventListener("scroll", look, { capture: true });
      window.removeEventListener("resize", look);
    };
  }, []);
  useLayoutEffect(() => newest.current(), [stride, columns, count]);
  const [first, end] = [Math.min(near.first, rows), Math.min(near.end, rows)];
  const [from, to] = [first * columns, Math.min(count, end * columns)];
  useEffect(() => onRange?.(from, to), [from, to]);
  useLayoutEffect(() => {
    // One stop of the Tab key, not one for each control of each cell.
    for (const found of place.current.querySelectorAll("[role='gridcell']")) {
      for (const control of found.querySelectorAll(CONTROLS)) control.tabIndex = found.tabIndex;
    }
    if (!takesFocus.current) return;
    takesFocus.current = false;
    const found = place.current.querySelector(`[data-index="${active}"]`);
    found?.scrollIntoView({ block: "nearest" });
    found?.focus({ preventScroll: true });
  });
  const press = (event) => {
    if (event.altKey || event.metaKey || event.target.matches(TYPED_IN)) return;
    const found = event.target.closest("[data-index]");
    if ((event.key === "Enter" || event.key === " ") && event.target === found) {
      const control = found.querySelector(event.key === " " ? "input[type='checkbox']" : "a[href], button") ?? found.querySelector(CONTROLS);
      event.preventDefault();
      control?.click();
      return;
    }
    const next = placeAfter(event, { active, count, columns, rows: Math.max(1, Math.floor((window.innerHeight - 100) / stride)) });
    if (next === null) return;
    event.preventDefault();
    takesFocus.current = true;
    setActive(Math.min(count - 1, Math.max(0, next)));
    if (next === active) place.current.querySelector(`[data-index="${active}"]`)?.focus();
  };
  const hasFocus = Boolean(place.current?.contains(document.activeElement)) || takesFocus.current;
  const shown = Array.from({ length: Math.max(0, end - first) }, (_, at) => first + at);
  const kept = Math.floor(active / columns); // also where it is far from the screen: focus must not be lost
  if (hasFocus && !shown.includes(kept)) shown.push(kept);
  const row = (at) =>
    html`<div role="row" key=${`row ${at}`} aria-rowindex=${at + 1} style=${{ transform: `translateY(${at * stride}px)`, height: `${height}px`, gap: `${gap}px`, gridTemplateColumns: `repeat(${columns}, minmax(0, 1fr))` }}>
      ${Array.from({ length: Math.min(columns, count - at * columns) }, (_, column) => {
        const index = at * columns + column;
        return html`<div role="gridcell" key=${keyOf(index)} data-index=${index} aria-colindex=${column + 1} tabindex=${index === active ? 0 : -1}>${render(index, index === active)}</div>`;
      })}</div>`;
  return html`<div class="virtual" ref=${place} role="grid" aria-label=${label} aria-rowcount=${rows} aria-colcount=${columns}
    style=${{ height: `${Math.max(0, rows * stride - gap)}px` }} onKeyDown=${press}
    onFocusCapture=${(event) => {
      const index = event.target.closest("[data-index]")?.dataset.index;
      if (index !== undefined && Number(index) !== active) setActive(Number(index));
    }}>${shown.map(row)}</div>`;
}

// The cell that a key leads to; null for other keys.
function placeAfter(event, { active, count, columns, rows }) {
  const isWhole = event.ctrlKey || columns === 1;
  const start = active - (active % columns);
  switch (event.key) {
    case "ArrowRight":
      return columns > 1 ? active + 1 : null;
    case "ArrowLeft":
      return columns > 1 ? active - 1 : null;
    case "ArrowDown":
      return active + columns < count ? active + columns : start + columns < count ? count - 1 : active;
    case "ArrowUp":
      return active >= columns ? active - columns : active;
    case "PageDown":
      return Math.min(count - 1, active + rows * columns);
    case "PageUp":
      return active >= rows * columns ? active - rows * columns : active % columns;
    case "Home":
      return isWhole ? 0 : start;
    case "End":
      return isWhole ? count - 1 : start + columns - 1;
    default:
      return null;
  }
}
