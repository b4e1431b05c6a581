// All runs, newest first: what trains now, and the verdicts of what has.

import { Problems, Progress, Status, html, moment, score, shown, useDocument, useLive, useState, whole } from "./ui.js";

const AT_ONCE = 60;

export function Start() {
  const [document, load, problems] = useDocument("/runs?limit=1000");
  const [changed, change] = useState({ rows: {}, removed: new Set() });
  const [text, search] = useState("");
  const [most, show] = useState(AT_ONCE);
  useLive((message) => {
    if (message.reconnected) load();
    if (!message.runs) return;
    change((before) => {
      const removed = new Set([...before.removed, ...message.removed]);
      const rows = { ...before.rows };
      for (const row of message.runs) {
        rows[row.id] = row;
        removed.delete(row.id);
      }
      return { rows, removed };
    });
  });
  if (!document) return html`<h1>Runs</h1><${Problems} problems=${problems} />`;
  const rows = new Map(document.runs.map((row) => [row.id, row]));
  for (const [id, row] of Object.entries(changed.rows)) rows.set(id, row);
  for (const id of changed.removed) rows.delete(id);
  const sorted = [...rows.values()].sort((a, b) => (b.started ?? 0) - (a.started ?? 0));
  const live = sorted.filter((row) => row.is_live);
  const wanted = text.trim().toLowerCase();
  const found = sorted.filter((row) => !row.is_live && `${row.name} ${row.family} ${row.status}`.toLowerCase().includes(wanted));
  return html`
    <div class="head"><h1>Runs</h1><span class="lead">${whole(rows.size)} in all</span>
      <div class="right"><a class="button main" href="#/new">New run</a></div></div>
    ${!rows.size && html`<div class="card empty">
      <h2>Nothing was trained yet</h2>
      <p>Start with your images, or with the built-in example, which takes a few minutes and needs no GPU.</p>
      <a class="button main" href="#/new">New run</a></div>`}
    ${live.length > 0 && html`<section><h2>Training now</h2><ul class="runs">${live.map((row) => html`<li key=${row.id}><${Row} row=${row} /></li>`)}</ul></section>`}
    ${rows.size > live.length && html`<section>
      <div class="head"><h2>Ended</h2><div class="right"><input type="search" aria-label="Search runs" placeholder="Search" value=${text} onInput=${(event) => { search(event.target.value); show(AT_ONCE); }} /></div></div>
      <ul class="runs">${found.slice(0, most).map((row) => html`<li key=${row.id}><${Row} row=${row} /></li>`)}</ul>
      ${!found.length && html`<p class="lead">No run has this in its name, family or status.</p>`}
      ${found.length > most && html`<p><button class="button" onClick=${() => show(most + 5 * AT_ONCE)}>Show more (${whole(found.length - most)})</button></p>`}
    </section>`}`;
}

function Row({ row }) {
  const isOver = !row.is_live && row.scores.lora !== null;
  const place = `#/${isOver ? "verdict" : "run"}/${encodeURIComponent(row.id)}`;
  const words = [row.family, row.is_live ? row.phase : moment(row.started), row.val_loss !== null && `val_loss ${shown(row.val_loss)}`];
  return html`<a class="card run" href=${place}>
    ${row.preview ? html`<img src=${`${row.preview}?width=128`} alt="" loading="lazy" />` : html`<span class="blank"></span>`}
    <span>
      <span class="name">${row.name}</span>
      <span class="note"> ${words.filter(Boolean).join(" · ")}</span>
      ${row.is_live && row.total && html`<${Progress} step=${row.step} total=${row.total} label=${`progress of ${row.name}`} />`}
      ${row.reason && html`<span class="note"><br />${row.reason}</span>`}
    </span>
    <span class="side"><${Status} status=${row.outcome ?? row.status} isLive=${row.is_live} />
      <span class="note">${row.scores.lora !== null ? `LoRA score ${score(row.scores.lora)}` : row.total ? `step ${whole(row.step)} of ${whole(row.total)}` : ""}</span></span>
  </a>`;
}
