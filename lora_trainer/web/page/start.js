// What happens now: runs, tasks, the machine and the queue; the last verdicts; and the first step where nothing was trained.

import { get, post } from "./api.js";
import { OUTCOMES, leftOf, placeOf, useRows } from "./rows.js";
import { TaskState } from "./task.js";
import {
  Bar, Button, Problems, Progress, Result, Status, bytes, duration, html, moment, shown, useAction, useCallback, useDocument, useEffect,
  useLive, useState, whole,
} from "./ui.js";

const NEWEST = 24;
const KEPT_LOSSES = 120;

export function Start() {
  const [rows, count, problems] = useRows(`/runs?limit=${NEWEST}`);
  const [live, , liveProblems] = useRows("/runs?is_live=true");
  const tasks = useTasks();
  const example = useAction();
  if (!rows || !live) return html`<h1>Start</h1><${Problems} problems=${[...problems, ...liveProblems].slice(0, 1)} />`;
  const running = [...live.values()].filter((row) => row.is_live).sort((a, b) => b.started - a.started);
  const ended = [...rows.values()].filter((row) => !row.is_live).sort((a, b) => (b.ended ?? 0) - (a.ended ?? 0));
  const judged = ended.filter((row) => row.outcome || row.scores.lora !== null).slice(0, 4);
  const isNew = !count && !running.length;
  return html`
    <div class="head"><h1>Start</h1>
      ${!isNew && html`<div class="right"><${Button} kind="small" busy=${example.busy} onClick=${() => example.act(trainExample)}>Train the built-in example<//><a class="button" href="#/runs">All runs</a><a class="button main" href="#/new">New run</a></div>`}</div>
    <${Problems} problems=${problems} /><${Result} action=${example} />
    <div class="columns">
      <div class="stack">
        ${isNew && html`<${FirstStep} />`}
        ${running.map((row) => html`<${RunNow} key=${row.id} row=${row} />`)}
        ${!isNew && !running.length && html`<section class="card idle"><p><b>Nothing trains now.</b> <span class="note">${ended[0] ? `${ended[0].name} ended ${moment(ended[0].ended)}.` : ""}</span></p>
          <a class="button" href="#/new">New run</a></section>`}
        ${tasks.map((task) => html`<section key=${task.id} class="card" aria-label=${task.title}><${TaskState} task=${task} /></section>`)}
        ${judged.length > 0 && html`<section class="card"><div class="head"><h2>Last verdicts</h2></div>
          <ul class="plain">${judged.map((row) => html`<li key=${row.id}><a class="run" href=${placeOf(row)}>
            ${row.preview ? html`<img src=${`${row.preview}?width=128`} alt="" loading="lazy" />` : html`<span class="blank"></span>`}
            <span><span class="name cut">${row.name}</span><span class="note cut">${[row.family, moment(row.ended)].filter(Boolean).join(" · ")}</span></span>
            <span class="side"><${Status} status=${row.outcome ?? row.status} words=${OUTCOMES[row.outcome]} /></span></a></li>`)}</ul></section>`}
      </div>
      <div class="stack">
        <${Machine} />
        <${Waiting} />
      </div>
    </div>`;
}

// What `lora-trainer demo` trains.
const trainExample = async () => {
  const run = await post("/runs", { presets: ["12gb"], command: "produce" });
  location.hash = `#/run/${encodeURIComponent(run.id)}`;
};

function FirstStep() {
  const action = useAction();
  const start = () => action.act(trainExample);
  return html`<section class="card first">
    <h2>Nothing was trained yet</h2>
    <p>See a whole run first. The built-in example trains a small model on 24 images of a mascot, in minutes, without a GPU and without a download.
      You watch the dataset's check, the loss and the samples, and read at the end whether the LoRA may be used.</p>
    <div class="row"><${Button} kind="main" busy=${action.busy} onClick=${start}>${action.busy ? "Starting …" : "Train the built-in example"}<//>
      <a class="button" href="#/new">New run with my images</a></div>
    <${Result} action=${action} /></section>`;
}

// The tasks that run.
function useTasks() {
  const [rows, set] = useState([]);
  const load = useCallback(async () => set((await get("/tasks")).tasks.filter((each) => each.status === "running")), []);
  useEffect(() => void load().catch(() => {}), [load]);
  useLive((message) => {
    if (message.reconnected) load().catch(() => {});
    if (!message.task) return;
    set((before) => [...(message.task.status === "running" ? [message.task] : []), ...before.filter((each) => each.id !== message.task.id)]);
  });
  return [...rows].sort((a, b) => Number(b.id) - Number(a.id));
}

function RunNow({ row }) {
  const path = `/runs/${encodeURIComponent(row.id)}`;
  const [run] = useDocument(path, [row.status, row.phase]);
  const [metrics] = useDocument(row.status === "starting" ? null : `${path}/metrics?points=${KEPT_LOSSES}`, [row.status]);
  const [newest, add] = useState([]);
  const action = useAction();
  useLive((message) => message.run === row.id && message.metrics && add((before) => [...before, ...message.metrics].slice(-KEPT_LOSSES)));
  const times = newest.slice(-20).map((each) => each.seconds).filter((each) => each > 0).sort((a, b) => a - b);
  const left = leftOf(row, times[Math.floor(times.length / 2)] ?? run?.progress?.seconds_per_step);
  const losses = [...(metrics?.loss ?? []), ...newest.map((each) => each.loss)].filter((each) => Number.isFinite(each)).slice(-KEPT_LOSSES);
  const facts = [
    ["step", row.total ? `${whole(row.step)} of ${whole(row.total)}` : "–"],
    ["loss", shown(newest.at(-1)?.loss ?? row.loss)],
    ["val_loss", shown(row.val_loss)],
    ["ETA", left === null ? "–" : duration(left)],
  ];
  return html`<section class="card now" aria-label=${`${row.name} trains`}>
    ${row.preview ? html`<a href=${`#/run/${encodeURIComponent(row.id)}`}><img src=${`${row.preview}?width=256`} alt=${`newest sample of ${row.name}`} /></a>` : html`<span class="blank">no sample yet</span>`}
    <div>
      <div class="head"><h2><a href=${`#/run/${encodeURIComponent(row.id)}`}>${row.name}</a></h2><${Status} status=${row.status} isLive=${true} words=${row.phase} />
        <div class="right"><${Button} kind="small danger" busy=${action.busy} aria-label=${`Stop ${row.name}`}
          onClick=${() => action.act(async () => (await post(`${path}/stop`)).message)}>Stop<//></div></div>
      <${Progress} step=${row.step} total=${row.total} label=${`progress of ${row.name}`} />
      <dl class="facts">${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
      <${Spark} values=${losses} />
      <${Result} action=${action} />
    </div></section>`;
}

// A line of the last losses, without axes: whether it falls.
function Spark({ values }) {
  if (values.length < 3) return null;
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const points = values.map((value, at) => `${((100 * at) / (values.length - 1)).toFixed(2)},${(29 - (28 * (value - low)) / (high - low || 1)).toFixed(2)}`);
  return html`<svg class="spark" viewBox="0 0 100 30" preserveAspectRatio="none" role="img" aria-label=${`Loss of the last ${values.length} values: ${shown(low)} to ${shown(high)}`}><polyline points=${points.join(" ")} /></svg>`;
}

function Machine() {
  const [first] = useDocument("/machine");
  const [newest, set] = useState(null);
  useLive((message) => message.machine && set(message.machine));
  const machine = newest ?? first;
  if (!machine) return null;
  const { cpu, memory, disk } = machine;
  return html`<section class="card" aria-label="This computer"><h2>This computer</h2>
    ${machine.gpus.map((gpu) => html`<div class="gauge" key=${gpu.index}><b>GPU ${machine.gpus.length > 1 ? gpu.index : ""} <span class="note">${gpu.name}</span></b>
      ${gpu.memory_total && html`<${Bar} label="GPU load" share=${gpu.utilization} words=${`load ${whole(100 * gpu.utilization)} %, ${whole(gpu.celsius)} °C${gpu.watts ? `, ${whole(gpu.watts)} W` : ""}`} />
      <${Bar} label="GPU memory" share=${gpu.memory_used / gpu.memory_total} isScarce words=${`memory ${bytes(gpu.memory_used)} of ${bytes(gpu.memory_total)}`} />`}
      ${gpu.throttled && html`<p class="note">${gpu.throttled}</p>`}</div>`)}
    ${!machine.gpus.length && html`<p class="about gauge">No NVIDIA GPU was found.</p>`}
    <div class="gauge"><b>CPU</b><${Bar} label="CPU load" share=${cpu.used} words=${`load ${whole(100 * cpu.used)} %, ${whole(cpu.count)} ${cpu.count === 1 ? "core" : "cores"}`} /></div>
    <div class="gauge"><b>System memory</b><${Bar} label="System memory" share=${1 - memory.free / memory.total} isScarce words=${`${bytes(memory.free)} free of ${bytes(memory.total)}`} /></div>
    <div class="gauge"><b>Disk <span class="note">${disk.folder}</span></b><${Bar} label="Disk" share=${1 - disk.free / disk.total} isScarce words=${`${bytes(disk.free)} free of ${bytes(disk.total)}`} /></div>
  </section>`;
}

function Waiting() {
  const [first, load] = useDocument("/queue");
  const [newest, set] = useState(null);
  useLive((message) => {
    if (message.reconnected) load().then(() => set(null));
    if (message.queue) set(message.queue);
  });
  const queue = newest ?? first;
  if (!queue?.jobs.length) return null;
  const waiting = queue.jobs.filter((job) => job.status === "waiting");
  return html`<section class="card"><div class="head"><h2>Queue</h2><div class="right"><a class="button small" href="#/queue">Open</a></div></div>
    <p class="about">${whole(waiting.length)} ${waiting.length === 1 ? "job waits" : "jobs wait"}, ${whole(queue.workers.length)} ${queue.workers.length === 1 ? "worker" : "workers"}${waiting.length && !queue.workers.length ? ": start one to train them" : ""}</p>
    <ul class="legend">${waiting.slice(0, 6).map((job) => html`<li key=${job.name}><span class="cut">${job.name}</span><b>priority ${whole(job.priority)}</b></li>`)}
      ${waiting.length > 6 && html`<li class="note">and ${whole(waiting.length - 6)} more</li>`}</ul></section>`;
}
