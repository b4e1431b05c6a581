// All runs: found by words, ordered, chosen to be compared. The list holds thousands, see virtual.js.

import { placeOf, rankOf, useRows } from "./rows.js";
import { Problems, Progress, Status, html, moment, shown, useMemo, useState, whole } from "./ui.js";
import { VirtualRows } from "./virtual.js";

const MOST_COMPARED = 6;
const number = (value, otherwise) => value ?? otherwise;
const ORDERS = {
  newest: ["newest first", (a, b) => Number(b.is_live) - Number(a.is_live) || number(b.started, 0) - number(a.started, 0)],
  name: ["by name", (a, b) => a.name.localeCompare(b.name, undefined, { numeric: true })],
  verdict: ["best verdict", (a, b) => rankOf(b) - rankOf(a)],
  val_loss: ["lowest val_loss", (a, b) => number(a.val_loss, Infinity) - number(b.val_loss, Infinity)],
};
const STATES = {
  all: ["every status", () => true],
  live: ["running", (row) => row.is_live],
  passed: ["passed", (row) => row.outcome === "passed"],
  refused: ["refused or undecided", (row) => ["refused", "unresolved"].includes(row.outcome ?? row.status)],
  broken: ["failed, stopped, interrupted", (row) => !row.is_live && ["failed", "stopped", "running"].includes(row.status)],
};
// What was typed stays while the page is open: who looks at a run comes back.
const kept = { text: "", order: "newest", state: "all" };

export function Runs() {
  const [rows, , problems] = useRows("/runs?limit=1000", true);
  const [text, setText] = useState(kept.text);
  const [order, setOrder] = useState(kept.order);
  const [state, setState] = useState(kept.state);
  const [chosen, choose] = useState([]);
  Object.assign(kept, { text, order, state });
  const found = useMemo(() => {
    const words = text.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (row) => {
      const all = `${row.name} ${row.id} ${row.family ?? ""} ${row.outcome ?? ""} ${row.status} ${row.reason ?? ""}`.toLowerCase();
      return STATES[state][1](row) && words.every((word) => all.includes(word));
    };
    return [...(rows?.values() ?? [])].filter(fits).sort(ORDERS[order][1]);
  }, [rows, text, order, state]);
  if (!rows) return html`<h1>Runs</h1><${Problems} problems=${problems} />`;
  const marked = chosen.filter((id) => rows.has(id));
  const mark = (id) => choose(marked.includes(id) ? marked.filter((each) => each !== id) : [...marked, id].slice(-MOST_COMPARED));
  return html`
    <div class="head"><h1>Runs</h1><span class="lead" role="status">${found.length === rows.size ? `${whole(rows.size)} in all` : `${whole(found.length)} of ${whole(rows.size)}`}</span>
      <div class="right"><a class="button main" href="#/new">New run</a></div></div>
    <${Problems} problems=${problems} />
    ${!rows.size && html`<div class="card empty"><h2>Nothing was trained yet</h2><a class="button" href="#/">Begin with the built-in example</a></div>`}
    ${rows.size > 0 && html`<div class="row filters">
      <input class="grow" type="search" aria-label="Search runs" placeholder="Search name, family, status" value=${text} onInput=${(event) => setText(event.target.value)} />
      <${Choice} label="Status" options=${STATES} value=${state} onChange=${setState} />
      <${Choice} label="Order" options=${ORDERS} value=${order} onChange=${setOrder} />
      ${marked.length > 0 && html`<a class="button" aria-disabled=${marked.length < 2} href=${marked.length > 1 ? `#/run/${marked.map(encodeURIComponent).join("/")}` : undefined}>Compare ${whole(marked.length)}</a>
        <button type="button" class="button" onClick=${() => choose([])}>Choose none</button>`}
    </div>`}
    ${rows.size > 0 && !found.length && html`<p class="lead">No run fits. Search for less, or show every status.</p>`}
    <${VirtualRows} label="Runs" count=${found.length} height=${(width) => (width < 560 ? 106 : 78)} gap=${8} keyOf=${(at) => found[at].id}
      render=${(at) => html`<${Row} row=${found[at]} isMarked=${marked.includes(found[at].id)} onMark=${mark} />`} />`;
}

function Choice({ label, options, value, onChange }) {
  return html`<select aria-label=${label} value=${value} onChange=${(event) => onChange(event.target.value)}>
    ${Object.entries(options).map(([name, [words]]) => html`<option value=${name}>${words}</option>`)}</select>`;
}

function Row({ row, isMarked, onMark }) {
  const words = [row.is_live ? row.phase : moment(row.started), row.family, row.val_loss !== null && `val_loss ${shown(row.val_loss)}`, row.reason];
  return html`<div class="card run listed">
    <input type="checkbox" aria-label=${`Compare ${row.name}`} checked=${isMarked} onChange=${() => onMark(row.id)} />
    ${row.preview ? html`<img src=${`${row.preview}?width=128`} alt="" loading="lazy" />` : html`<span class="blank"></span>`}
    <span><a class="name cut" href=${placeOf(row)}>${row.name}</a>
      <span class="note cut">${words.filter(Boolean).join(" · ")}</span>
      ${row.is_live && html`<${Progress} step=${row.step} total=${row.total} label=${`progress of ${row.name}`} />`}</span>
    <span class="side"><${Status} status=${row.outcome ?? row.status} isLive=${row.is_live} />
      <span class="note">${row.total && !row.outcome ? `step ${whole(row.step)} of ${whole(row.total)}` : ""}</span></span>
  </div>`;
}
