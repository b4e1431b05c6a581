// The checklist of this machine and of runs, what the machine does now, and the versions for a bug report.

import { post } from "./api.js";
import { useRows } from "./rows.js";
import { TaskState } from "./task.js";
import { Button, Copy, Field, Problems, Progress, Result, bytes, duration, html, moment, shown, useAction, useDocument, useLive, useState, whole } from "./ui.js";

const PARTS = { before: "this machine", during: "while it trains", after: "after the run" };

export function Doctor({ id }) {
  const [runs] = useDocument("/runs?limit=1000");
  const [checks, load, problems] = useDocument(id === null ? "/doctor" : `/doctor?run=${encodeURIComponent(id)}`);
  const action = useAction();
  useLive((message) => {
    if (message.reconnected || (message.task?.kind === "doctor" && message.task.about.run === id)) load();
  });
  const { last, newest } = checks && checks.run === id ? checks : {};
  const isRunning = last?.status === "running";
  const start = () => action.act(async () => { await post("/doctor", { run: id }); await load(); });
  const known = runs?.runs ?? [];
  return html`
    <div class="head"><h1>Doctor</h1><span class="lead">Measures this machine and your runs, and names the fix for what is wrong.</span></div>
    <div class="columns">
      <div class="stack">
        <section class="card"><div class="row doctor-what">
          <${Field} label="What to check">${(field) => html`<select id=${field} value=${id ?? ""} onChange=${(event) => { action.clear(); location.hash = event.target.value ? `#/doctor/${encodeURIComponent(event.target.value)}` : "#/doctor"; }}>
            <option value="">This machine</option>
            <optgroup label="A run">${known.map((run) => html`<option value=${run.id}>${run.id} (${run.is_live ? "training" : run.status})</option>`)}
              ${id !== null && !known.some((run) => run.id === id) && html`<option value=${id}>${id}</option>`}</optgroup></select>`}<//>
          <${Button} kind="main" busy=${action.busy || isRunning} onClick=${start}>${isRunning ? "Checking …" : id === null ? "Check this machine" : "Check this run"}<//></div>
          <p class="about">${id === null ? "Python and packages, the GPU and its driver, results of each precision, attention, disks, limits, variables. It takes some seconds and changes nothing." : "How it trains or how it ended, its files and scores, and this machine. A run that trains is not disturbed."}</p>
          <${Result} action=${action} /><${Problems} problems=${checks?.run === id ? [] : problems} />
          ${last && last.id !== newest?.id && html`<${TaskState} task=${last} onChange=${load} />`}</section>
        ${newest ? html`<${Checklist} check=${newest} />` : checks?.run === id && !isRunning && html`<div class="card empty"><p>${id === null ? "This machine" : id} was not checked yet.</p></div>`}
      </div>
      <div class="stack"><${MachineNow} /></div>
    </div>`;
}

function Checklist({ check }) {
  const [rows] = useRows("/runs?is_live=true");
  const training = [...(rows?.values() ?? [])].filter((row) => row.is_live).length;
  const { lines, errors, warnings } = check.document;
  const of = (level) => lines.filter((line) => line.level === level);
  const isOfRun = check.about.run !== null;
  const tone = errors ? "bad" : warnings ? "warn" : "good";
  const count = (number, word) => `${whole(number)} ${word}${number === 1 ? "" : "s"}`;
  const headline = errors ? `${count(errors, "problem")}${warnings ? ` and ${count(warnings, "warning")}` : ""}` : warnings ? `No problems, ${count(warnings, "warning")}` : "All is as wanted";
  return html`<section class=${`card verdict ${tone}`} aria-label="Result">
      <h2 class="headline">${headline}</h2>
      <p class="note">Checked ${moment(check.started)}${check.ended ? `, in ${duration(check.ended - check.started)}` : ""}</p>
      ${errors + warnings === 0 && html`<p>All ${whole(lines.length)} lines are fine.</p>`}
      ${training > 0 && lines.some((line) => line.fix?.startsWith("close other programs")) && html`<p>${whole(training)} ${training === 1 ? "run trains" : "runs train"} now: part of what is in use is ${training === 1 ? "its" : "theirs"}.</p>`}</section>
    ${errors > 0 && html`<section class="card"><h2>Problems</h2>${of("error").map((line) => html`<${Line} line=${line} isOfRun=${isOfRun} tone="bad" />`)}</section>`}
    ${warnings > 0 && html`<section class="card"><h2>Warnings</h2>${of("warning").map((line) => html`<${Line} line=${line} isOfRun=${isOfRun} tone="warn" />`)}</section>`}
    ${of("ok").length > 0 && html`<section class="card"><details><summary>${count(of("ok").length, "line")} ${of("ok").length === 1 ? "is" : "are"} fine</summary>
      <dl class="fine">${of("ok").map((line) => html`<div><dt>${line.name}</dt><dd>${line.found}</dd></div>`)}</dl></details></section>`}`;
}

function Line({ line, isOfRun, tone }) {
  return html`<div class="finding"><h3><span class=${`status ${tone}`}>${line.name}</span> ${isOfRun && html`<span class="note">${PARTS[line.part] ?? line.part}</span>`}</h3>
    <p>${line.found}${line.wanted && html` <span class="note">wanted: ${line.wanted}</span>`}</p>
    ${line.fix && html`<p class="fix"><b>Fix:</b> <${Fix} text=${line.fix} commands=${line.commands} /></p>`}</div>`;
}

// A fix with its commands to copy.
function Fix({ text, commands }) {
  const parts = [];
  let rest = text;
  for (const command of commands) {
    const at = rest.indexOf(command);
    parts.push(rest.slice(0, at), html`<span class="command"><code>${command}</code><${Copy} text=${command} /></span>`);
    rest = rest.slice(at + command.length);
  }
  return [...parts, rest];
}

function MachineNow() {
  const [first, , problems] = useDocument("/machine");
  const [live, set] = useState(null);
  useLive((message) => message.machine && set(message.machine));
  if (!first) return html`<${Problems} problems=${problems} />`;
  const { gpus, cpu, memory, disk } = live ?? first;
  const { versions } = first;
  const used = memory.total - memory.free;
  const gpuNames = gpus.map((gpu) => `${gpu.name}, ${bytes(gpu.memory_total)}`);
  const report = [...Object.entries(versions).map(([name, version]) => `${name} ${version}`), `GPUs: ${gpuNames.join("; ") || "none by NVML"}`, `CPUs: ${cpu.count}`, `memory: ${bytes(memory.total)}`].join("\n");
  return html`
    <section class="card"><h2>Now</h2>
      ${gpus.map((gpu) => html`<div class="gpu"><h3>GPU ${gpu.index}: ${gpu.name}</h3>
        ${gpu.memory_total === undefined
          ? html`<p class="note">The driver does not answer.</p>`
          : html`<${Bar} name="memory" of=${`GPU ${gpu.index}`} value=${gpu.memory_used} most=${gpu.memory_total} text=${`${bytes(gpu.memory_used)} of ${bytes(gpu.memory_total)}`} />
            <${Bar} name="utilization" of=${`GPU ${gpu.index}`} value=${gpu.utilization} most=${1} text=${share(gpu.utilization)} />
            <${Bar} name="temperature" of=${`GPU ${gpu.index}`} value=${gpu.celsius} most=${100} text=${`${whole(gpu.celsius)} °C`} />
            ${gpu.watts !== null && html`<${Bar} name="power" of=${`GPU ${gpu.index}`} value=${gpu.watts} most=${gpu.watts_limit ?? gpu.watts} text=${gpu.watts_limit ? `${whole(gpu.watts)} of ${whole(gpu.watts_limit)} W` : `${whole(gpu.watts)} W`} />`}
            ${gpu.throttled && html`<div class="problems">${gpu.throttled}</div>`}`}</div>`)}
      ${!gpus.length && html`<p class="about">No NVIDIA GPU is seen. An AMD GPU is checked, but not followed here.</p>`}
      <${Bar} name="CPUs" of="this machine" value=${cpu.used} most=${1} text=${`${share(cpu.used)} of ${whole(cpu.count)}`} />
      <${Bar} name="memory" of="this machine" value=${used} most=${memory.total} text=${`${bytes(used)} of ${bytes(memory.total)}`} />
      <${Bar} name="disk" of="this machine" value=${disk.total - disk.free} most=${disk.total} text=${`${bytes(disk.free)} free`} />
      <p class="note">The disk of ${disk.folder}</p></section>
    <section class="card"><div class="head"><h2>Versions</h2><div class="right"><${Copy} text=${report} label="Copy for a bug report" /></div></div>
      <ul class="legend">${Object.entries(versions).map(([name, version]) => html`<li>${name}<b>${version}</b></li>`)}</ul></section>`;
}

const share = (value) => `${shown(Math.round(100 * value))} %`;

function Bar({ name, of, value, most, text }) {
  return html`<div class="bar-of"><span>${name}</span><b>${text}</b><${Progress} step=${value} total=${most} label=${`${name} of ${of}`} /></div>`;
}
