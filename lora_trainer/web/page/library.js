// The library: LoRA files of the runs, of the tools and of folders, to find, combine and open.

import { post, remove } from "./api.js";
import { LoraFile } from "./lora_file.js";
import { ToolDialog, ToolTasks } from "./lora_tools.js";
import { OUTCOMES, rankOf } from "./rows.js";
import { PathField } from "./settings_form.js";
import { Button, Dialog, Problems, Result, Status, bytes, html, moment, useAction, useDocument, useEffect, useLive, useState, whole } from "./ui.js";

// The style of these pages alone; they are shown when it is there.
await new Promise((done) => {
  const link = document.createElement("link");
  Object.assign(link, { rel: "stylesheet", href: "library.css", onload: done, onerror: done });
  document.head.append(link);
});

const AT_ONCE = 60;
const SORTS = {
  newest: ["newest first", (a, b) => b.changed - a.changed],
  name: ["name", (a, b) => a.name.localeCompare(b.name, undefined, { numeric: true })],
  verdict: ["best verdict", (a, b) => rankOf(b) - rankOf(a) || b.changed - a.changed],
  rank: ["rank", (a, b) => (b.rank ?? 0) - (a.rank ?? 0) || b.changed - a.changed],
  size: ["size", (a, b) => b.size - a.size],
};
const START = { text: "", family: "", kind: "", from: "", sort: "newest", chosen: [] };
let kept = START; // the list as it was left for a file

export function Library({ id }) {
  return id === null ? html`<${List} />` : html`<${LoraFile} id=${id} onMerge=${() => { kept = { ...START, chosen: [id] }; location.hash = "#/library"; }} />`;
}

function List() {
  const [document, load, problems] = useDocument("/loras");
  const [now, setNow] = useState(kept);
  const [most, show] = useState(AT_ONCE);
  const [asks, ask] = useState(null);
  const change = (some) => { kept = { ...now, ...some }; setNow(kept); };
  useLive((message) => {
    const isTool = message.task && ["lora-tool", "sample"].includes(message.task.kind) && message.task.status !== "running";
    if (message.reconnected || isTool || message.runs?.some((row) => !row.is_live) || message.removed?.length) load();
  });
  useEffect(() => {
    if (document?.pending) load(); // the server reads on
  }, [document]);
  if (!document) return html`<h1>Library</h1><${Problems} problems=${problems} />`;
  const files = document.loras;
  const byId = new Map(files.map((row) => [row.id, row]));
  const chosen = now.chosen.map((id) => byId.get(id)).filter(Boolean);
  const wanted = now.text.trim().toLowerCase();
  const fits = (row) =>
    (!wanted || `${stemOf(row.name)} ${row.title ?? ""} ${row.trigger ?? ""} ${row.run_name ?? ""} ${row.made_of ?? ""} ${row.base ?? ""}`.toLowerCase().includes(wanted)) &&
    (!now.family || (row.family ?? "unknown") === now.family) &&
    (!now.kind || (row.is_damaged ? "damaged" : row.kind) === now.kind) &&
    (!now.from || row.from === now.from) &&
    // A run writes each LoRA in two formats; one card stands for both.
    (row.format !== "diffusers" || !byId.has(row.other_format));
  const found = files.filter(fits).sort(SORTS[now.sort][1]);
  const names = new Map(); // how many cards have it
  for (const row of found) names.set(stemOf(row.name), (names.get(stemOf(row.name)) ?? 0) + 1);
  const values = (of) => [...new Set(files.map(of).filter(Boolean))].sort();
  const select = (label, name, all, options) => html`<select aria-label=${label} value=${now[name]} onChange=${(event) => { change({ [name]: event.target.value }); show(AT_ONCE); }}>
    <option value="">${all}</option>${options.map((each) => html`<option value=${each}>${each}</option>`)}</select>`;
  return html`
    <div class="head"><h1>Library</h1><span class="lead">${counted(found.length, "LoRA")}${document.pending ? `, ${counted(document.pending, "file")} to be read` : ""}</span>
      <div class="right"><${Button} onClick=${() => ask("extract")}>Extract from a model<//><${Button} onClick=${() => ask("folders")}>Folders<//></div></div>
    <${ToolTasks} lora=${null} />
    ${files.length > 0 && html`<div class="filters">
      <input type="search" aria-label="Search LoRAs" placeholder="Name, trigger word, base model" value=${now.text} onInput=${(event) => { change({ text: event.target.value }); show(AT_ONCE); }} />
      ${select("Family", "family", "all families", values((row) => (row.is_damaged ? null : (row.family ?? "unknown"))))}
      ${select("Kind", "kind", "all kinds", values((row) => (row.is_damaged ? "damaged" : row.kind)))}
      ${select("Where", "from", "everywhere", ["run", "library", "folder"].filter((each) => files.some((row) => row.from === each)))}
      <select aria-label="Sort" value=${now.sort} onChange=${(event) => change({ sort: event.target.value })}>${Object.entries(SORTS).map(([name, [words]]) => html`<option value=${name}>${words}</option>`)}</select>
    </div>`}
    ${!files.length && html`<div class="card empty"><h2>No LoRA is here yet</h2><p>Train one, or list a folder with files of any program.</p>
      <div class="row middle"><a class="button main" href="#/new">New run</a><${Button} onClick=${() => ask("folders")}>Add a folder<//></div></div>`}
    ${files.length > 0 && !found.length && html`<p class="lead">No LoRA fits these filters. <${Button} kind="small" onClick=${() => change({ ...START, chosen: now.chosen })}>Show all<//></p>`}
    <ul class="shelf">${found.slice(0, most).map((row) => html`<li key=${row.id}><${Card} row=${row} isChosen=${now.chosen.includes(row.id)} isTwin=${row.from !== "run" && names.get(stemOf(row.name)) > 1}
      onChoose=${(is) => change({ chosen: is ? [...now.chosen, row.id] : now.chosen.filter((each) => each !== row.id) })} /></li>`)}</ul>
    ${found.length > most && html`<p><${Button} onClick=${() => show(most + 5 * AT_ONCE)}>Show more (${whole(found.length - most)})<//></p>`}
    ${chosen.length > 0 && html`<div class="chosen" role="region" aria-label="Selected LoRAs">
      <span><b>${whole(chosen.length)} selected</b><span class="note"> ${chosen.length === 1 ? "Select others to combine them." : chosen.map((row) => stemOf(row.name)).join(", ")}</span></span>
      <div class="row">
        <${Button} kind="main" disabled=${chosen.length < 2} onClick=${() => ask("merge")}>Merge<//>
        <${Button} disabled=${chosen.length < 2} onClick=${() => ask("average")}>Average<//>
        <${Button} onClick=${() => change({ chosen: [] })}>Clear<//></div></div>`}
    ${asks === "folders" && html`<${Folders} document=${document} onChange=${load} onClose=${() => ask(null)} />`}
    ${["merge", "average", "extract"].includes(asks) && html`<${ToolDialog} tool=${asks} rows=${asks === "extract" ? [] : chosen} onClose=${() => ask(null)} onStarted=${() => { ask(null); change({ chosen: [] }); window.scrollTo(0, 0); }} />`}`;
}

const counted = (number, what) => `${whole(number)} ${what}${number === 1 ? "" : "s"}`;

const stemOf = (name) => name.replace(/(\.diffusers)?\.safetensors$/, "");

function Card({ row, isChosen, isTwin, onChoose }) {
  const name = stemOf(row.name);
  const facts = row.is_damaged ? [] : [row.family ?? "unknown family", row.kind, row.rank !== null && `rank ${whole(row.rank)}`];
  return html`<article class=${isChosen ? "lora is-chosen" : "lora"}>
    <a class="cover" href=${`#/library/${row.id}`} aria-label=${`Open ${name}`} tabindex="-1">
      ${row.preview ? html`<img src=${`${row.preview}?width=384`} alt="" loading="lazy" />` : html`<span class="blank" aria-hidden="true">${row.is_damaged ? "!" : [...name][0]}</span>`}</a>
    <label class="pick"><input type="checkbox" checked=${isChosen} disabled=${row.is_damaged || row.is_pending} aria-label=${`Select ${name}`} onChange=${(event) => onChoose(event.target.checked)} /></label>
    <div class="about-lora">
      <a class="name" href=${`#/library/${row.id}`}>${name}</a>
      ${row.is_damaged
        ? html`<span class="status bad">damaged</span> <span class="note">${row.problem}</span>`
        : row.is_pending
          ? html`<span class="note">${bytes(row.size)}, being read</span>`
          : html`${row.outcome && html`<${Status} status=${row.outcome} words=${OUTCOMES[row.outcome]} />`}
            ${isTwin && html`<span class="note long">${row.name}</span>`}
            <span class="note">${facts.filter(Boolean).join(" · ")}</span>
            ${row.trigger && html`<span class="note">trigger word: ${row.trigger}</span>`}
            <span class="note">${row.step !== null ? `step ${whole(row.step)} of ${row.run_name}` : row.from === "library" ? `from a tool, ${bytes(row.size)}` : moment(row.changed)}</span>`}
    </div></article>`;
}

function Folders({ document, onChange, onClose }) {
  const [path, set] = useState("");
  const action = useAction();
  const add = () => action.act(async () => { await post("/loras/folders", { path: path.trim() }); set(""); await onChange(); });
  return html`<${Dialog} title="Folders with LoRA files" onClose=${onClose}>
    <p class="about">Files of the runs and of the tools are always listed. Add folders of other programs, such as ComfyUI's models/loras; nothing is written there.</p>
    <ul class="legend">${document.folders.map((each) => html`<li><span>${each.path}${each.is_there ? "" : " (not there now)"}</span><b>${counted(each.count, "file")}</b>
      <${Button} kind="small" aria-label=${`Remove ${each.path}`} busy=${action.busy} onClick=${() => action.act(async () => { await remove(`/loras/folders?path=${encodeURIComponent(each.path)}`); await onChange(); })}>Remove<//></li>`)}</ul>
    <${PathField} label="Folder" value=${path} kinds=${["folder"]} onChange=${set} />
    <${Result} action=${action} />
    <div class="row"><${Button} kind="main" busy=${action.busy} disabled=${!path.trim()} onClick=${add}>Add<//><${Button} onClick=${onClose}>Close<//></div><//>`;
}
