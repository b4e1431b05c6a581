// The queue: jobs in order, the workers that train them, and a folder of datasets to add.

import { post } from "./api.js";
import { OUTCOMES, useRows } from "./rows.js";
import { PathField } from "./settings_form.js";
import { Button, Dialog, Field, Problems, Progress, Result, Status, duration, html, shown, typedNumber, useAction, useDocument, useLive, useState, whole } from "./ui.js";

// The style of this page alone; it is shown when it is there.
await new Promise((done) => {
  const link = document.createElement("link");
  Object.assign(link, { rel: "stylesheet", href: "queue.css", onload: done, onerror: done });
  document.head.append(link);
});

const AT_ONCE = 200;

export function Queue() {
  const [document, load, problems] = useDocument("/queue");
  const [live, setLive] = useState(null);
  const [machine] = useDocument("/machine");
  const [runs] = useRows("/runs?is_live=true");
  const [asks, ask] = useState(null); // {title, words, yes}
  const [steps, setSteps] = useState({});
  const [isAdding, add] = useState(false);
  const [most, show] = useState(AT_ONCE);
  const [workers, setWorkers] = useState("1");
  const [gpus, setGpus] = useState("");
  const action = useAction();
  useLive((message) => {
    if (message.reconnected) load().then(() => setLive(null));
    if (message.queue) setLive(message.queue);
    if (message.runs) setSteps((before) => ({ ...before, ...Object.fromEntries(message.runs.map((row) => [row.id, row])) }));
  });
  const queue = live ?? document;
  if (!queue) return html`<h1>Queue</h1><${Problems} problems=${problems} />`;
  const change = (work) => action.act(async () => { const found = await work(); setLive(found); return found.messages?.join(" "); });
  const of = (job, what, body) => change(() => post(`/queue/${encodeURIComponent(job.name)}/${what}`, body));
  const waiting = queue.jobs.filter((job) => job.status === "waiting").length;
  const hasGpu = !machine || machine.gpus.length > 0;
  const training = [...(runs?.values() ?? [])].filter((row) => row.is_live).length;
  const cancel = (job) => (job.status === "running"
    ? ask({ title: `Cancel ${job.name}?`, words: "It trains now: its run is stopped.", yes: "Cancel the job", work: () => of(job, "cancel") })
    : of(job, "cancel"));
  const stop = () => change(() => post("/queue/stop"));
  const askToStop = () => (queue.jobs.some((job) => job.status === "running") ? ask({ title: "Stop all workers?", words: "Jobs train now: their runs are stopped, too.", yes: "Stop them", work: stop }) : stop());
  const start = () => change(() => post("/queue/work", { workers: Math.max(1, typedNumber(workers) || 1), gpus: gpus.split(/[\s,;]+/).filter(Boolean).map(Number) }));
  return html`
    <div class="head"><h1>Queue</h1><span class="lead">${whole(waiting)} waiting, ${whole(queue.workers.length)} ${queue.workers.length === 1 ? "worker" : "workers"}${queue.together > 1 ? `, ${queue.together} LoRAs together on one base model` : ""}</span>
      <div class="right"><${Button} kind="main" onClick=${() => add(true)}>Add datasets<//></div></div>
    <section class="card"><h2>Workers</h2>
      <p class="about">Each worker trains one job after the other, and ends when none waits. They continue when the server ends.</p>
      ${queue.workers.length > 0 && html`<ul class="legend">${queue.workers.map((each) => html`<li>${each.name}<b>process ${each.pid}${each.gpu ? `, GPU ${each.gpu}` : ""}</b></li>`)}</ul>`}
      <div class="row">
        <label class="row">Workers <input inputmode="numeric" size="4" value=${workers} onInput=${(event) => setWorkers(event.target.value)} /></label>
        ${hasGpu ? html`<label class="row">GPUs <input size="10" placeholder="0, 1" value=${gpus} onInput=${(event) => setGpus(event.target.value)} /></label>` : html`<span class="note">no GPU here: CPU</span>`}
        <${Button} busy=${action.busy} disabled=${!waiting} onClick=${start}>Start workers<//>
        ${queue.workers.length > 0 && html`<${Button} kind="danger" busy=${action.busy} onClick=${askToStop}>Stop all<//>`}
      </div>
      ${waiting > 0 && training > 0 && html`<p class="note">${whole(training)} ${training === 1 ? "run trains" : "runs train"} now: a worker shares the ${hasGpu ? "GPU" : "CPU"} with it, and both are slower.</p>`}
      <${Result} action=${action} /></section>
    ${queue.jobs.length
      ? html`<section class="card table jobs"><table>
        <thead><tr><th>job</th><th>status</th><th>progress</th><th>verdict</th><th>priority</th><th>change</th></tr></thead>
        <tbody>${queue.jobs.slice(0, most).map((job) => html`<${Job} key=${job.name} job=${{ ...job, ...pick(steps[job.id]) }} of=${of} onCancel=${cancel} busy=${action.busy} />`)}</tbody></table>
        ${queue.jobs.length > most && html`<p><${Button} onClick=${() => show(most + AT_ONCE)}>Show more (${whole(queue.jobs.length - most)})<//></p>`}</section>`
      : html`<div class="card empty"><h2>No job waits</h2><p>Add a folder of dataset folders: each becomes a LoRA, one after the other.</p></div>`}
    ${asks && html`<${Dialog} title=${asks.title} onClose=${() => ask(null)}><p>${asks.words}</p>
      <div class="row"><${Button} kind="danger" onClick=${() => { ask(null); asks.work(); }}>${asks.yes}<//><${Button} onClick=${() => ask(null)}>Let it train<//></div><//>`}
    ${isAdding && html`<${AddJobs} together=${queue.together} onClose=${() => add(false)} onAdded=${(found) => { setLive(found); add(false); }} />`}`;
}

const pick = (row) => (row?.is_live ? { step: row.step, total: row.total, phase: row.phase } : {});

function Job({ job, of, onCancel, busy }) {
  const isRunning = job.status === "running";
  const canCancel = isRunning || job.status === "waiting";
  return html`<tr>
    <td>${job.step || !canCancel || isRunning ? html`<a href=${`#/run/${encodeURIComponent(job.id)}`}>${job.name}</a>` : job.name}<br /><span class="note place">${job.data}</span></td>
    <td><${Status} status=${job.status} /> ${job.reason && html`<span class="note">${job.reason}</span>`}</td>
    <td>${job.total ? html`<${Progress} step=${job.step} total=${job.total} label=${`progress of ${job.name}`} /><span class="note">${isRunning && job.phase ? `${job.phase}, ` : ""}step ${whole(job.step)} of ${whole(job.total)}</span>` : isRunning ? (job.phase ?? "starting") : ""}</td>
    <td data-label="verdict">${job.outcome && html`<${Status} status=${job.outcome} words=${OUTCOMES[job.outcome]} />`}</td>
    <td data-label="priority"><div class="row"><${Button} kind="small" aria-label=${`Raise the priority of ${job.name}`} disabled=${busy || job.status !== "waiting"} onClick=${() => of(job, "priority", { priority: job.priority + 1 })}>↑<//>
      ${whole(job.priority)}<${Button} kind="small" aria-label=${`Lower the priority of ${job.name}`} disabled=${busy || job.status !== "waiting"} onClick=${() => of(job, "priority", { priority: job.priority - 1 })}>↓<//></div></td>
    <td>${canCancel ? html`<${Button} kind="small danger" busy=${busy} onClick=${() => onCancel(job)} aria-label=${`Cancel ${job.name}`}>Cancel<//>` : job.status !== "done" && html`<${Button} kind="small" busy=${busy} onClick=${() => of(job, "retry")} aria-label=${`Retry ${job.name}`}>Retry<//>`}</td></tr>`;
}

function AddJobs({ together, onClose, onAdded }) {
  const [schema] = useDocument("/settings");
  const [root, setRoot] = useState("");
  const [model, setModel] = useState("");
  const [preset, setPreset] = useState("auto");
  const [goal, setGoal] = useState("balanced");
  const [priority, setPriority] = useState("0");
  const [count, setCount] = useState(String(together));
  const [listed, list] = useState(null);
  const action = useAction();
  const request = (isDry) => ({
    root: root.trim(), model: model.trim() || null, presets: [preset, goal].filter(Boolean), priority: typedNumber(priority) || 0, together: Math.max(1, typedNumber(count) || 1), dry_run: isDry,
  });
  const edit = (set) => (value) => { set(value); list(null); };
  const of = (kind) => (schema?.presets ?? []).filter((each) => each.kind === kind).map((each) => each.name);
  const wrong = (listed ?? []).filter((job) => job.problems.length).length;
  return html`<${Dialog} title="Add datasets to the queue" onClose=${onClose}>
    <${PathField} label="Folder of datasets" about="Each folder in it is one job and one LoRA" value=${root} kinds=${["folder"]} onChange=${edit(setRoot)} />
    <${PathField} label="Base model" about="Empty: the built-in miniature model" value=${model} kinds=${["model folder", "model"]} onChange=${edit(setModel)} />
    <div class="columns even">
      <${Field} label="GPU memory">${(id) => html`<select id=${id} value=${preset} onChange=${(event) => edit(setPreset)(event.target.value)}><option value="auto">this GPU</option>${of("tiers").map((each) => html`<option>${each}</option>`)}</select>`}<//>
      <${Field} label="Goal">${(id) => html`<select id=${id} value=${goal} onChange=${(event) => edit(setGoal)(event.target.value)}>${of("goals").map((each) => html`<option>${each}</option>`)}</select>`}<//>
      <${Field} label="Priority" about="Higher begins first">${(id) => html`<input id=${id} inputmode="numeric" value=${priority} onInput=${(event) => edit(setPriority)(event.target.value)} />`}<//>
      <${Field} label="LoRAs together" about="So many train at once on one base model">${(id) => html`<input id=${id} inputmode="numeric" value=${count} onInput=${(event) => edit(setCount)(event.target.value)} />`}<//>
    </div>
    ${listed && html`<div class="table"><p>${whole(listed.length)} jobs${wrong ? `, ${whole(wrong)} of them with problems; nothing is added until they are solved` : ""}</p><table><tbody>${listed.map((job) => html`<tr><td>${job.name}</td><td>${job.problems.length ? html`<${Problems} problems=${job.problems} />` : "ready"}</td></tr>`)}</tbody></table></div>`}
    <div class="row">
      ${listed && !wrong
        ? html`<${Button} kind="main" busy=${action.busy} onClick=${() => action.act(async () => onAdded(await post("/queue", request(false))))}>Add ${whole(listed.length)} jobs<//>`
        : html`<${Button} kind="main" busy=${action.busy} disabled=${!root.trim()} onClick=${() => action.act(async () => list((await post("/queue", request(true))).jobs))}>${action.busy ? "Checking …" : "Check"}<//>`}
      <${Button} onClick=${onClose}>Cancel<//></div>
    <${Result} action=${action} /><//>`;
}
