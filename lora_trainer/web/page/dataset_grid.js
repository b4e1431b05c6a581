// The images as a grid: thumbnails with their crops and findings, to be opened and selected by mouse and keys.

import { VirtualGrid } from "./virtual.js";
import { html, useRef } from "./ui.js";
import { imageUrl } from "./dataset_rows.js";

const NARROW = 520;
export const THUMBNAIL = 320;

const cell = (width) => (width < NARROW ? { width: 140, height: 214 } : { width: 168, height: 244 });

export function ImageGrid({ path, rows, isCropped, selected, select, opened, onOpen }) {
  const anchor = useRef(0);
  const count = rows.document.total;
  const toggle = (index, row) => {
    anchor.current = index;
    const next = new Set(selected);
    if (!next.delete(row.name)) next.add(row.name);
    select(next);
  };
  const reach = async (index) => {
    const [first, last] = [Math.min(anchor.current, index), Math.max(anchor.current, index)];
    select(new Set([...selected, ...(await rows.names(first, last + 1))]));
  };
  const press = (event) => {
    const index = event.target.closest("[data-index]")?.dataset.index;
    if (index === undefined) return;
    if (event.key === " " && event.shiftKey) {
      event.preventDefault();
      event.stopPropagation();
      reach(Number(index));
    } else if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "a") {
      event.preventDefault();
      rows.names().then((names) => select(new Set(names)));
    } else if (event.key === "Escape" && selected.size) {
      select(new Set());
    }
  };
  const render = (index) => {
    const row = rows.rowAt(index);
    if (!row) return html`<div class="tile loading"><span class="frame-box"></span><span class="note">…</span></div>`;
    const click = (event) => {
      if (event.shiftKey) reach(index);
      else if (event.ctrlKey || event.metaKey) toggle(index, row);
      else {
        anchor.current = index;
        onOpen({ index, name: row.name, isByKey: event.detail === 0 });
      }
    };
    const isSelected = selected.has(row.name);
    return html`<div class=${`tile${isSelected ? " selected" : ""}${opened?.name === row.name ? " opened" : ""}`}>
      <button type="button" class="tile-open" aria-label=${`${row.name}: ${row.caption || "no caption"}`} onClick=${click}>
        <span class="frame-box"><${Framed} path=${path} row=${row} width=${THUMBNAIL} isCropped=${isCropped} isLazy /></span>
        <span class="tile-name">${row.name.split("/").pop()}</span>
        <span class=${row.caption ? "tile-caption" : "tile-caption none"}>${row.caption || "no caption"}</span></button>
      <input type="checkbox" class="tile-pick" aria-label=${`Select ${row.name}`} checked=${isSelected} onClick=${(event) => (event.shiftKey ? reach(index) : toggle(index, row))} />
      <${Badges} row=${row} /></div>`;
  };
  return html`<div class="image-grid" onKeyDownCapture=${press}><${VirtualGrid} label="Images" count=${count} cell=${cell} gap=${10} render=${render} keyOf=${(index) => rows.rowAt(index)?.name ?? index} onRange=${rows.need} /></div>`;
}

function Badges({ row }) {
  const worst = ["error", "warning", "note"].find((each) => row.findings.some((found) => found.severity === each && !found.is_old));
  const words = row.findings.filter((each) => !each.is_old).map((each) => each.code.replaceAll("_", " "));
  const badges = [];
  if (worst) badges.push(html`<span class=${`badge ${worst}`} title=${words.join(", ")} role="img" aria-label=${`${words.length} ${words.length === 1 ? "finding" : "findings"}: ${words.join(", ")}`}>${words.length === 1 ? words[0] : `${words.length} findings`}</span>`);
  if (row.repeats !== 1) badges.push(html`<span class="badge">× ${row.repeats}</span>`);
  if (row.has_mask) badges.push(html`<span class="badge">mask</span>`);
  if (row.is_reg) badges.push(html`<span class="badge">regularization</span>`);
  return badges.length ? html`<span class="badges">${badges}</span>` : null;
}

// An image in its own shape; what training cuts away is dimmed, and so is what its mask leaves out where it is `masked`:
// the version of the list, so that a mask that was changed is loaded again.
export function Framed({ path, row, width, isCropped, isLazy = false, masked = null }) {
  const shape = row.width && row.height ? row.width / row.height : 1;
  const [left, top, across, down] = row.crop ?? [0, 0, 1, 1];
  const isCut = isCropped && row.crop && (across < 0.999 || down < 0.999);
  const percent = (value) => `${(100 * value).toFixed(3)}%`;
  return html`<span class=${shape >= 1 ? "frame wide" : "frame tall"} style=${{ aspectRatio: String(shape), "--shape": shape }}>
    ${row.width ? html`<img src=${imageUrl(path, row, width)} alt="" loading=${isLazy ? "lazy" : undefined} decoding="async" draggable=${false} />` : html`<span class="broken">cannot be read</span>`}
    ${masked !== null && html`<img class="mask-of" src=${`${imageUrl(path, { name: row.name }, width)}&what=mask&content=${masked}`} alt="" />`}
    ${isCut && html`<i class="crop" style=${{ left: percent(left), top: percent(top), width: percent(across), height: percent(down) }}></i>`}</span>`;
}
