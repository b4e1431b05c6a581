// One LoRA file: what is in it, where it is loaded exactly, the tools, and images with it.

import { post, remove } from "./api.js";
import { ToolDialog, ToolTasks } from "./lora_tools.js";
import { OUTCOMES } from "./rows.js";
import { SampleBox } from "./sample_box.js";
import { TaskState, useTask } from "./task.js";
import { Button, Dialog, Problems, Result, Status, bytes, html, moment, shown, useAction, useDocument, useEffect, useLive, useState, whole } from "./ui.js";

const TONES = { whole: "good", "in part": "warn", not: "bad", unknown: "" };
const WORDS = { whole: "yes", "in part": "in part", not: "no", unknown: "not known" };

export function LoraFile({ id, onMerge }) {
  const [lora, load, problems] = useDocument(`/loras/${encodeURIComponent(id)}`);
  const [asks, ask] = useState(null);
  useLive((message) => message.reconnected && load());
  if (!lora) return html`<p><a href="#/library">Library</a></p><${Problems} problems=${problems} />`;
  const isWhole = !lora.is_damaged;
  const url = `/api/loras/${id}/file`;
  return html`
    <div class="head"><div class="grow"><a href="#/library">Library</a><h1>${lora.name}</h1></div>
      <div class="right"><a class="button main" href=${url} download>Download</a>
        ${isWhole && html`<${Button} onClick=${() => ask("convert")}>Convert<//>
          <${Button} disabled=${lora.kind !== "LoRA"} onClick=${() => ask("resize")}>Resize<//>
          <${Button} disabled=${lora.kind !== "LoRA"} onClick=${onMerge}>Merge with …<//>`}
        ${lora.can_delete && html`<${Button} kind="danger" onClick=${() => ask("delete")}>Delete<//>`}</div></div>
    <${ToolTasks} key=${id} lora=${id} />
    ${lora.is_damaged && html`<${Problems} title="This file is damaged" problems=${[{ message: lora.problem, fix: "Copy or download it again." }]} />`}
    <div class="columns">
      <div class="stack">${isWhole && html`<${SampleBox} lora=${lora} />`}<${Inspection} lora=${lora} /></div>
      <div class="stack"><${Facts} lora=${lora} /><${Header} header=${lora.header} /></div>
    </div>
    ${["convert", "resize"].includes(asks) && html`<${ToolDialog} tool=${asks} rows=${[lora]} onClose=${() => ask(null)} onStarted=${() => { ask(null); window.scrollTo(0, 0); }} />`}
    ${asks === "delete" && html`<${Delete} lora=${lora} onClose=${() => ask(null)} />`}`;
}

function Delete({ lora, onClose }) {
  const action = useAction();
  return html`<${Dialog} title=${`Delete ${lora.name}?`} onClose=${onClose}>
    <p>It is moved to the trash, which is the folder .ui/trash among the runs.</p>
    <div class="row"><${Button} kind="danger" busy=${action.busy} onClick=${() => action.act(async () => { await remove(`/loras/${lora.id}`); location.hash = "#/library"; })}>Delete<//><${Button} onClick=${onClose}>Keep<//></div>
    <${Result} action=${action} /><//>`;
}

function Facts({ lora }) {
  const ranks = lora.ranks && lora.ranks[0] !== lora.ranks[1] ? `${whole(lora.ranks[0])} to ${whole(lora.ranks[1])}` : whole(lora.rank);
  const rows = [
    ["kind", lora.kind],
    ["family", lora.family ?? "not known by its header"],
    ["format", lora.format],
    ["rank", lora.rank === null ? null : ranks],
    ["alpha", lora.alpha === null ? null : shown(lora.alpha)],
    ["layers", lora.modules ? whole(lora.modules) : null],
    ["type", lora.dtype],
    ["trigger word", lora.trigger],
    ["base model", lora.base],
    ["made of", lora.made_of],
    ["trained steps", lora.steps === null ? null : whole(lora.steps)],
    ["size", bytes(lora.size)],
    ["written", moment(lora.changed)],
  ].filter(([, value]) => value);
  return html`<section class="card first">
    ${lora.preview && html`<img class="portrait" src=${`${lora.preview}?width=768`} alt=${`an image with ${lora.name}`} />`}
    <h2>Facts</h2>
    ${lora.outcome && html`<p><${Status} status=${lora.outcome} words=${OUTCOMES[lora.outcome]} /></p>`}
    <dl class="pairs">${rows.map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}
      ${lora.run && html`<dt>run</dt><dd><a href=${`#/verdict/${encodeURIComponent(lora.run)}`}>Verdict of ${lora.run_name}</a></dd>`}
      ${lora.other_format && html`<dt>other format</dt><dd><a href=${`#/library/${lora.other_format}`}>${lora.format === "diffusers" ? "kohya" : "diffusers"}</a></dd>`}</dl>
    <p class="note">${lora.path}</p></section>`;
}

function Header({ header }) {
  const rows = Object.entries(header).sort(([a], [b]) => a.localeCompare(b));
  if (!rows.length) return null;
  return html`<section class="card third"><details><summary>Header <span class="note">${whole(rows.length)} entries</span></summary>
    <dl class="pairs header">${rows.map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl></details></section>`;
}

// The command reads all tensors, so it is a task; its result is kept as long as the file stays as it is.
function Inspection({ lora }) {
  const [task, load] = useTask({ kind: "lora-inspect", about: { lora: lora.id, stamp: lora.stamp } });
  const action = useAction();
  useEffect(() => void action.act(async () => { await post(`/loras/${lora.id}/inspect`); await load(); }), [lora.id, lora.stamp]);
  const found = task?.document;
  return html`<section class="card second"><h2>Where it is loaded</h2>
    <${Result} action=${action} />
    ${!found && html`<${TaskState} task=${task} onChange=${load} />`}
    ${found && html`<div class="table" tabindex="0" role="region" aria-label="Programs that load it"><table><thead><tr><th>program</th><th>all of it</th><th>why</th></tr></thead>
      <tbody>${found.clients.map((each) => html`<tr><td>${each.name}</td><td><span class=${`status ${TONES[each.reads] ?? ""}`}>${WORDS[each.reads] ?? each.reads}</span></td><td>${each.why}</td></tr>`)}</tbody></table></div>
      <${Problems} problems=${found.findings.filter((each) => each.severity === "error")} />
      ${found.findings.filter((each) => each.severity !== "error").map((each) => html`<p class="note">${each.message} ${each.fix}</p>`)}
      ${Object.values(found.hashes).map((each) => html`<p class="note">${each.recorded === each.found ? "The checksum in its header is right." : "The checksum in its header is wrong: the file was changed after it was written."}</p>`)}
      <h3>Where it learned</h3><p class="about">The size of the updates by block.</p>
      ${Object.entries(found.components).map(([name, part]) => html`<${Blocks} name=${name} part=${part} />`)}`}</section>`;
}

function Blocks({ name, part }) {
  const rows = Object.entries(part.blocks);
  const most = Math.max(...rows.map(([, norm]) => norm ?? 0), 1e-12);
  return html`<p class="part-name"><b>${name}</b> <span class="note">${whole(part.modules)} layers, ${shown(part.norm)} in all</span></p>
    <ul class="bars">${rows.map(([block, norm]) => html`<li><span>${block}</span><span class="meter-of" role="img" aria-label=${`${block}: ${shown(norm)}`}><i style=${{ width: `${(100 * (norm ?? 0)) / most}%` }}></i></span><b>${shown(norm)}</b></li>`)}</ul>`;
}
