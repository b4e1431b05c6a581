// The tools for LoRA files: small forms, and what became of the commands that they start.

import { get, post } from "./api.js";
import { PathField } from "./settings_form.js";
import { TaskState, forget } from "./task.js";
import { Button, Dialog, Field, Result, bytes, html, shown, typedNumber, useAction, useDocument, useEffect, useLive, useState, whole } from "./ui.js";

const TITLES = { convert: "Convert", resize: "Resize", merge: "Merge", average: "Average", extract: "Extract a LoRA from a model" };
const MOST_SHOWN = 4;
const A_DAY = 86400; // seconds
const WORST = 8; // layers

const stem = (name) => name.replace(/(\.diffusers)?\.safetensors$/, "").replace(/[^\p{L}\p{N} .,()+=_-]/gu, "").replace(/^[^\p{L}\p{N}_]+/u, "").slice(0, 80) || "lora";

function nameFor(tool, rows, to, rank) {
  const names = rows.map((row) => stem(row.name));
  if (tool === "convert") return `${names[0]}${to === "diffusers" ? ".diffusers" : to === "comfyui" ? ".comfyui" : to === "lora" ? `-lora-${rank}` : "-kohya"}`;
  if (tool === "resize") return `${names[0]}-${rank}`;
  if (tool === "extract") return "extracted";
  return names.join(tool === "merge" ? "+" : "=").slice(0, 100);
}

// `rows`: the files. What is typed is sent as it is: the server says all that is wrong at once.
export function ToolDialog({ tool, rows, onClose, onStarted }) {
  const isPlain = rows.every((row) => row.kind === "LoRA");
  const [to, setTo] = useState(tool === "convert" ? (!isPlain ? "lora" : rows[0].format === "kohya" ? "diffusers" : "kohya") : "");
  const start = tool === "resize" ? String(Math.max(1, Math.floor((rows[0].rank ?? 16) / 2))) : tool === "extract" ? "32" : String(rows[0]?.rank ?? 32);
  const [rank, setRank] = useState(start);
  const [limits, limit] = useState(false);
  const [norm, setNorm] = useState("");
  const [weights, setWeights] = useState(rows.map(() => "1"));
  const [dtype, setDtype] = useState("");
  const [model, setModel] = useState("");
  const [base, setBase] = useState("");
  const [tuned, setTuned] = useState("");
  const [kind, setKind] = useState("lora");
  const [typed, setName] = useState(null);
  const action = useAction();
  const combines = tool === "merge" || tool === "average";
  const hasRank = tool === "resize" || tool === "extract" || (tool === "convert" && to === "lora") || (combines && limits);
  const name = typed ?? nameFor(tool, rows, to, rank);
  const number = (text) => (text.trim() === "" || Number.isNaN(typedNumber(text)) ? 0 : typedNumber(text));
  const start_ = () =>
    action.act(async () => {
      const body = { tool, name, loras: rows.map((row) => row.id), to: to || null, dtype: dtype || null };
      if (hasRank) body.rank = Math.trunc(number(rank));
      if (tool === "resize" && norm.trim()) body.frobenius = number(norm);
      if (combines) body.weights = weights.map(number);
      if (tool === "convert" && ["lora", "comfyui"].includes(to) && model.trim()) body.model = model.trim();
      if (tool === "extract") Object.assign(body, { base: base.trim() || null, tuned: tuned.trim() || null, type: kind });
      onStarted(await post("/loras/tools", body));
    });
  const problemsOf = (word) => action.problems.filter((each) => each.message.startsWith(word));
  return html`<${Dialog} title=${TITLES[tool]} onClose=${onClose}>
    ${rows.length > 0 && !combines && html`<p class="note">${rows[0].name}, ${rows[0].kind}, rank ${whole(rows[0].rank)}, ${bytes(rows[0].size)}</p>`}
    ${tool === "convert" && html`<${Field} label="Format" about=${ABOUT[to]}>${(id) => html`<select id=${id} value=${to} onChange=${(event) => setTo(event.target.value)}>
      <option value="kohya">kohya</option><option value="diffusers">diffusers</option><option value="lora">plain LoRA of a lower rank</option><option value="comfyui">DoRA for ComfyUI</option></select>`}<//>`}
    ${combines && html`<fieldset class="weights"><legend>Weights</legend>${rows.map((row, at) => html`<${Weight} key=${row.id} name=${row.name} text=${weights[at]} onChange=${(text) => setWeights(weights.map((each, place) => (place === at ? text : each)))} />`)}</fieldset>
      <p class="about">${tool === "merge" ? "The weighted sum of all updates. A weight under 0 takes an update away." : "The mean of the updates; the weights are divided by their sum."}</p>
      <label class="row"><input type="checkbox" checked=${limits} onChange=${(event) => limit(event.target.checked)} /> Limit the rank: smaller, but not exact</label>
      ${!limits && html`<p class="about">Exact: the ranks add up to ${whole(rows.reduce((sum, row) => sum + (row.rank ?? 0), 0))}.</p>`}`}
    ${tool === "extract" && html`<p class="about">A LoRA of what was changed in a model by its training.</p>
      <${PathField} label="Base model" about="Before its training" value=${base} kinds=${["model folder", "model"]} onChange=${setBase} />
      <${PathField} label="Tuned model" about="After it" value=${tuned} kinds=${["model folder", "model"]} onChange=${setTuned} />
      <${Field} label="Kind">${(id) => html`<select id=${id} value=${kind} onChange=${(event) => setKind(event.target.value)}><option value="lora">LoRA</option><option value="dora">DoRA</option><option value="lokr">LoKr</option></select>`}<//>`}
    ${hasRank && html`<${Field} label="Rank" about="The highest of a layer. Each layer gets the best LoRA of this rank (SVD); the error is shown afterwards." problems=${problemsOf("rank is")}>${(id) => html`<input id=${id} inputmode="numeric" value=${rank} onInput=${(event) => setRank(event.target.value)} />`}<//>`}
    ${tool === "resize" && html`<${Field} label="Share of each update to keep" about="Optional, such as 0.95: layers that keep it with fewer ranks get fewer" problems=${problemsOf("frobenius")}>${(id) => html`<input id=${id} inputmode="decimal" value=${norm} onInput=${(event) => setNorm(event.target.value)} />`}<//>`}
    ${tool === "convert" && ["lora", "comfyui"].includes(to) && html`<${PathField} label="Base model" about=${to === "lora" ? "Needed for DoRA and OFT, which change a weight that they do not hold" : "The one that the DoRA was trained on"} value=${model} kinds=${["model folder", "model"]} onChange=${setModel} />`}
    ${to !== "comfyui" && html`<${Field} label="Type of the weights">${(id) => html`<select id=${id} value=${dtype} onChange=${(event) => setDtype(event.target.value)}><option value="">${tool === "extract" ? "fp16" : "unchanged"}</option><option>fp16</option><option>bf16</option><option>fp32</option></select>`}<//>`}
    <${Field} label="Name in the library" problems=${problemsOf("There is a LoRA")}>${(id) => html`<input id=${id} value=${name} spellcheck=${false} onInput=${(event) => setName(event.target.value)} />`}<//>
    <${Result} action=${{ ...action, problems: action.problems.filter((each) => !["rank is", "frobenius", "There is a LoRA"].some((word) => each.message.startsWith(word))) }} />
    <div class="row"><${Button} kind="main" busy=${action.busy} onClick=${start_}>${TITLES[tool].split(" ")[0]}<//><${Button} onClick=${onClose}>Cancel<//></div><//>`;
}

const ABOUT = {
  kohya: "Exact. For ComfyUI, A1111, Forge and sd-scripts.",
  diffusers: "Exact. For diffusers' load_lora_weights.",
  lora: "By SVD: of any kind, for programs that read plain LoRAs alone. The error is shown afterwards.",
  comfyui: "ComfyUI computes a DoRA differently: this one is for ComfyUI alone.",
};

function Weight({ name, text, onChange }) {
  const value = typedNumber(text);
  return html`<div class="weight"><span>${name}</span>
    <input type="range" min="-1" max="2" step="0.05" value=${Number.isNaN(value) ? 0 : value} aria-label=${`Weight of ${name}`} onInput=${(event) => onChange(event.target.value)} />
    <input size="5" inputmode="decimal" value=${text} aria-label=${`Weight of ${name} as a number`} onInput=${(event) => onChange(event.target.value)} /></div>`;
}

// The newest tasks of the tools: those that run, and the results of a day; of one file those about it. Another file that is
// opened meanwhile ends the news: what had ended before a page was left is shown once.
const told = new Map(); // ids of ended tasks, and the page that showed them
export function ToolTasks({ lora }) {
  const [found, load] = useDocument("/tasks?kind=lora-tool");
  const page = lora ?? "list";
  const shows = (task) => !lora || task.about.loras.includes(lora) || task.about.lora === lora;
  useLive((message) => (message.reconnected || message.task?.kind === "lora-tool") && load());
  useEffect(() => {
    for (const task of found?.tasks ?? []) if (task.status !== "running" && shows(task)) told.set(task.id, told.get(task.id) ?? page);
  }, [found, page]);
  useEffect(() => () => told.forEach((where, id) => where === page && told.set(id, "gone")), [page]);
  const recent = (found?.tasks ?? [])
    .filter((task) => task.status === "running" || Date.now() / 1000 - task.ended < A_DAY)
    .filter((task) => shows(task) && (task.status === "running" || (told.get(task.id) ?? page) === page))
    .slice(0, MOST_SHOWN);
  return recent.map((task) => html`<section class="card tool" key=${task.id}>
    <${TaskState} task=${task} onChange=${load} />
    ${task.status === "done" && html`<${ToolResult} task=${task} />`}
    ${task.status !== "running" && html`<${Button} kind="small dismiss" aria-label=${`Dismiss ${task.title}`} onClick=${() => forget(task).then(load, load)}>Dismiss<//>`}</section>`);
}

function ToolResult({ task }) {
  const [document, set] = useState(null);
  useEffect(() => void get(`/tasks/${task.id}`).then((found) => set(found.document), () => {}), [task.id]);
  const worst = [...(document?.layers ?? [])].sort((a, b) => b.error - a.error).slice(0, WORST);
  const percent = (share) => `${shown(100 * share, 3)} %`;
  return html`<p class="done">${task.about.output} is in the library. <a href=${`#/library/${task.about.lora}`}>Open it</a></p>
    <p>${task.last_line}</p>
    ${document?.notes?.map((note) => html`<p class="note">${note}</p>`)}
    ${worst.length > 0 && worst[0].error > 0 && html`<details><summary>Layers with the largest errors</summary><div class="table" tabindex="0" role="region" aria-label="Layers with the largest errors"><table>
      <thead><tr><th>layer</th><th class="number">rank</th><th class="number">kept</th><th class="number">error</th></tr></thead>
      <tbody>${worst.map((each) => html`<tr><td class="long">${each.name}</td><td class="number">${whole(each.rank_before)} → ${whole(each.rank)}</td><td class="number">${percent(each.kept)}</td><td class="number">${percent(each.error)}</td></tr>`)}</tbody></table></div></details>`}`;
}
