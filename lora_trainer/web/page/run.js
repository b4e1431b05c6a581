// One run: how far it is, its curves, samples, log and settings, and what it may be asked for.

import { post, remove } from "./api.js";
import { Chart, smooth } from "./chart.js";
import { OUTCOMES, leftOf } from "./rows.js";
import { startLike } from "./run_like.js";
import { SettingField, belongsTo } from "./settings_form.js";
import {
  Button, Dialog, Field, FileList, Problems, Progress, Result, Status, bytes, duration, html, moment, shown, useAction, useDocument,
  useEffect, useLive, useMemo, useState, whole,
} from "./ui.js";

const path = (id, rest = "") => `/runs/${encodeURIComponent(id)}${rest}`;
const TABS = ["Curves", "Samples", "Log", "Events", "Settings", "Files"];
const KEPT_ROWS = 2000; // that came while the page is open
const NO_NEWS = { metrics: [], count: 0, validation: [], events: 0 };
const FETCHED_AGAIN_AFTER = 500; // of them: the server thins the whole so that spikes stay

// `rest`: runs to compare it with.
export function Run({ id, rest }) {
  const [run, load, problems] = useDocument(path(id));
  const [tab, open] = useState("Curves");
  const [row, setRow] = useState(null);
  const [news, addNews] = useState(NO_NEWS);
  const [again, reload] = useState(0);
  useLive((message) => {
    const mine = message.runs?.find((each) => each.id === id);
    if (mine) {
      // A new phase changes what the run may be asked for; its step does not.
      if (!row || mine.status !== run?.status || mine.is_live !== run?.is_live || mine.phase !== row.phase) load();
      setRow(mine);
    }
    if (message.reconnected || (message.run === id && message.is_incomplete)) {
      load();
      addNews(NO_NEWS);
      reload((number) => number + 1);
    } else if (message.run === id) {
      addNews((before) => ({
        metrics: [...before.metrics, ...(message.metrics ?? [])].slice(-KEPT_ROWS),
        count: before.count + (message.metrics?.length ?? 0),
        validation: [...before.validation, ...(message.validation ?? [])].slice(-KEPT_ROWS),
        events: before.events + (message.events?.length ?? 0),
      }));
    }
    if (message.removed?.includes(id)) load();
  });
  if (!run) return html`<h1>${id}</h1><${Problems} problems=${problems} />`;
  const progress = { ...run.progress, ...(row && { step: row.step, total: row.total, phase: row.phase, val_loss: row.val_loss }) };
  const newest = news.metrics.at(-1) ?? {};
  const times = news.metrics.slice(-20).map((each) => each.seconds).filter((each) => each > 0).sort((a, b) => a - b);
  const seconds = times[Math.floor(times.length / 2)] ?? progress.seconds_per_step;
  const left = leftOf({ ...progress, is_live: run.is_live }, seconds);
  const facts = [
    ["step", progress.total ? `${whole(progress.step)} of ${whole(progress.total)}` : whole(progress.step)],
    ["loss", shown(newest.loss ?? progress.loss)],
    ["val_loss", shown(progress.val_loss)],
    ["lr", shown(newest.lr ?? progress.lr)],
    ["speed", seconds ? (seconds < 1 ? `${shown(1 / seconds)} it/s` : `${shown(seconds)} s/it`) : "–"],
    ["ETA", left === null ? "–" : duration(left)],
  ];
  const scores = run.scores ?? {};
  const phase = run.is_live ? (row?.phase ?? progress.phase) : null;
  const tabs = run.has_record === false ? ["Log"] : TABS; // it has written nothing else
  const shownTab = tabs.includes(tab) ? tab : tabs[0];
  return html`
    <div class="head"><h1>${run.name}</h1><${Status} status=${run.is_live ? run.status : (run.outcome ?? run.status)} isLive=${run.is_live} />
      <${Actions} run=${run} id=${id} phase=${phase} events=${news.events} onChange=${load} /></div>
    <${Problems} problems=${problems} />
    ${run.start_error && html`<${Problems} title="It was not resumed" problems=${[{ message: run.start_error, fix: "" }]} />`}
    ${run.reason && html`<p class="lead">${run.reason}</p>`}
    ${(run.has_record !== false || run.is_live) && html`<section class="card" aria-label="Progress">
      <p class="note">${[run.is_live && progress.phase, run.model?.family, `started ${moment(run.started)}`].filter(Boolean).join(" · ")}</p>
      ${phase === "validating" && progress.step >= progress.total ? html`<${Checking} id=${id} />` : html`<${Progress} step=${progress.step ?? 0} total=${progress.total} label="training progress" />`}
      <dl class="facts">${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}
        ${scores.lora !== null && scores.lora !== undefined && html`<div><dt>verdict</dt><dd><a href=${`#/verdict/${encodeURIComponent(id)}`}>${OUTCOMES[run.outcome] ?? "open it"}</a></dd></div>`}
      </dl>
    </section>`}
    <div class="tabs" role="tablist" aria-label="Parts of the run" onKeyDown=${(event) => {
      const at = tabs.indexOf(shownTab);
      const places = { ArrowRight: (at + 1) % tabs.length, ArrowLeft: (at + tabs.length - 1) % tabs.length, Home: 0, End: tabs.length - 1 };
      const next = tabs[places[event.key]];
      if (!next) return;
      event.preventDefault();
      open(next);
      document.getElementById(`tab-${next}`).focus();
    }}>
      ${tabs.map((name) => html`<button type="button" role="tab" id=${`tab-${name}`} aria-controls="tab-content" aria-selected=${shownTab === name} tabindex=${shownTab === name ? 0 : -1} onClick=${() => open(name)}>${name}</button>`)}
    </div>
    <div role="tabpanel" id="tab-content" aria-labelledby=${`tab-${shownTab}`} class="stack">
      ${shownTab === "Curves" && (run.status === "starting" ? html`<div class="card empty">The run begins.</div>` : html`<${Curves} id=${id} others=${rest} news=${news} again=${again} />`)}
      ${shownTab === "Samples" && html`<${Samples} id=${id} again=${`${row?.preview} ${run.status}`} />`}
      ${shownTab === "Log" && html`<${Log} id=${id} isLive=${run.is_live} />`}
      ${shownTab === "Events" && html`<${Events} id=${id} news=${news.events} />`}
      ${shownTab === "Settings" && html`<${Settings} id=${id} again=${run.status} />`}
      ${shownTab === "Files" && html`<${Files} id=${id} folder=${run.folder} again=${run.status} />`}
    </div>`;
}

// After the last step there is no number that grows: the newest line of the log tells what is done.
function Checking({ id }) {
  const [again, tick] = useState(0);
  const [log] = useDocument(path(id, "/log?tail=500"), [again]);
  useEffect(() => {
    const timer = setInterval(() => tick((number) => number + 1), 5000);
    return () => clearInterval(timer);
  }, []);
  const line = log?.text.trim().split("\n").at(-1);
  return html`<progress class="progress" aria-label="checks the LoRA"></progress>
    <p class="about">checks the LoRA: takes a few minutes</p>${line && html`<p class="note cut">${line}</p>`}`;
}

function Actions({ run, id, phase, events, onChange }) {
  const action = useAction();
  // What was said is old news once the run has gone on.
  useEffect(action.clear, [run.status, run.is_live, phase]);
  useEffect(() => action.message === DONE && action.clear(), [events]);
  const [asks, ask] = useState(null);
  const may = new Set(run.may);
  const isScored = !run.is_live && typeof run.scores?.lora === "number";
  const isTrained = run.status === "done" && run.progress?.total && run.progress.step >= run.progress.total;
  const resume = isTrained ? "Train further" : "Resume";
  const request = (body) =>
    action.act(async () => {
      await post(path(id, "/requests"), body);
      return DONE;
    });
  return html`<div class="right">
      ${may.has("sample") && html`<${Button} onClick=${() => request({ do: "sample" })} busy=${action.busy}>Generate samples now<//>`}
      ${may.has("prompts") && html`<${Button} onClick=${() => ask("prompts")}>Change prompts<//>`}
      ${may.has("save") && html`<${Button} onClick=${() => request({ do: "save" })} busy=${action.busy}>Save now<//>`}
      ${may.has("stop") && html`<${Button} kind="danger" busy=${action.busy} onClick=${() => action.act(async () => { const { message } = await post(path(id, "/stop")); onChange(); return message; })}>Stop<//>`}
      ${isScored && html`<a class="button main" href=${`#/verdict/${encodeURIComponent(id)}`}>Verdict</a>`}
      ${!run.is_live && run.lora_url && html`<a class="button" href=${run.lora_url} download>Download LoRA</a>`}
      ${may.has("resume") && html`<${Button} kind=${isScored || isTrained ? "" : "main"} onClick=${() => ask("resume")}>${resume}<//>`}
      ${!run.is_live && run.has_request && html`<${Button} kind=${run.has_record === false ? "main" : ""} busy=${action.busy} onClick=${() => action.act(() => startLike(run, id))}>${run.has_record === false ? "Try again with these settings" : "Start another like this"}<//>`}
      ${may.has("delete") && html`<${Button} kind="danger" onClick=${() => ask("delete")}>Delete<//>`}
    </div>
    ${(action.problems.length > 0 || action.message) && html`<div class="grow"><${Result} action=${action} /></div>`}
    ${asks === "prompts" && html`<${Prompts} run=${run} id=${id} onClose=${() => ask(null)} onSent=${() => { ask(null); action.act(async () => DONE); }} />`}
    ${asks === "resume" && html`<${Resume} id=${id} isTrained=${isTrained} onClose=${() => ask(null)} onDone=${onChange} />`}
    ${asks === "delete" && html`<${Delete} run=${run} id=${id} onClose=${() => ask(null)} />`}`;
}

const DONE = "It is done after the step that is computed now; Events will show it.";

function Delete({ run, id, onClose }) {
  const action = useAction();
  return html`<${Dialog} title=${`Delete ${run.name}?`} onClose=${onClose}>
    <p>Its folder is moved to the trash, which is the folder .ui/trash among the runs.</p>
    <div class="row"><${Button} kind="danger" busy=${action.busy} onClick=${() => action.act(async () => { await remove(path(id)); location.hash = "#/runs"; })}>Delete<//>
    <${Button} onClick=${onClose}>Keep<//></div><${Result} action=${action} /><//>`;
}

// Filled with those of now: of the newest samples, as they may have been changed, else of the settings.
function Prompts({ run, id, onClose, onSent }) {
  const [typed, set] = useState(null);
  const [made] = useDocument(path(id, "/samples"));
  const images = (made?.samples ?? []).filter((each) => each.step !== null);
  const newest = Math.max(...images.map((each) => each.step));
  const drawn = [...new Set(images.filter((each) => each.step === newest).map((each) => each.prompt))];
  const text = typed ?? (drawn.length ? drawn : (run.config?.sample?.prompts ?? [])).join("\n");
  const action = useAction();
  const prompts = text.split("\n").map((line) => line.trim()).filter(Boolean);
  return html`<${Dialog} title="Change the prompts of samples" onClose=${onClose}>
    <${Field} label="Prompts, one on each line" about="At most 16. They hold until the run ends or is stopped.">
      ${(id) => html`<textarea id=${id} value=${text} onInput=${(event) => set(event.target.value)}></textarea>`}
    <//>
    <div class="row"><${Button} kind="main" busy=${action.busy} disabled=${!prompts.length} onClick=${() => action.act(async () => { await post(path(id, "/requests"), { do: "prompts", prompts }); onSent(); })}>Use these<//>
    <${Button} onClick=${onClose}>Cancel<//></div><${Result} action=${action} /><//>`;
}

// The settings that may change, each with the field of the schema: choices, switches and limits.
const AT_ONCE = 12;

function Resume({ id, isTrained, onClose, onDone }) {
  const [own, , ownProblems] = useDocument(path(id, "/settings"));
  const [schema, , schemaProblems] = useDocument("/settings");
  const [changed, change] = useState({});
  const [text, search] = useState("");
  const action = useAction();
  const rows = useMemo(() => {
    const now = new Map((own?.settings ?? []).map((row) => [row.name, row]));
    const all = (schema?.sections ?? []).flatMap((section) => section.settings);
    return all.filter((row) => now.has(row.name) && !REFUSED.has(row.on_resume) && !HIDDEN.has(row.name)).map((setting) => ({ setting, now: now.get(setting.name) }));
  }, [own, schema]);
  const words = text.trim().toLowerCase().split(/\s+/).filter(Boolean);
  const fits = ({ setting }) => words.length > 0 && words.every((word) => `${setting.name} ${setting.description}`.toLowerCase().includes(word));
  const isChanged = ({ setting }) => setting.name in changed;
  const found = rows.filter((row) => !isChanged(row) && fits(row));
  const visible = [...rows.filter(isChanged), ...found.slice(0, AT_ONCE)];
  const set = (name, value) => {
    action.clear(); // what was refused was another value
    change((before) => {
      const { [name]: _, ...others } = before;
      return value === undefined ? others : { ...others, [name]: value };
    });
  };
  const resume = () =>
    action.act(async () => {
      await post(path(id, "/resume"), { settings: changed });
      onDone();
      onClose();
    });
  const elsewhere = action.problems.filter((each) => !visible.some(({ setting }) => belongsTo(each, setting.name)));
  const problems = [...ownProblems, ...schemaProblems];
  return html`<${Dialog} title=${isTrained ? "Train further" : "Resume"} onClose=${onClose}>
    <p class="lead">Training continues from the newest checkpoint.${isTrained ? " All steps are trained: set a higher train.max_steps." : ""}${own && schema ? ` ${whole(rows.length)} settings may change.` : ""}</p>
    <${Problems} title=${problems.length ? "The settings were not loaded; the run can be resumed as it is" : undefined} problems=${problems.slice(0, 1)} />
    ${own && schema && html`<${Field} label="Find a setting to change" about="By name or description, for example max_steps or checkpoint">${(field) => html`<input id=${field} type="search" value=${text} onInput=${(event) => search(event.target.value)} />`}<//>
    ${words.length > 0 && !found.length && html`<p class="about">No other setting that may change has this in its name or description.</p>`}
    ${visible.map(({ setting, now }) => html`<${SettingField} key=${setting.name} setting=${setting} now=${{ value: now.value, origin: now.origin }} chosen=${changed[setting.name]} isChosen=${setting.name in changed}
      problems=${action.problems.filter((each) => belongsTo(each, setting.name))} onChange=${(value) => set(setting.name, value)} />`)}
    ${found.length > AT_ONCE && html`<p class="about">${whole(found.length - AT_ONCE)} more fit: type more of the name.</p>`}`}
    <div class="row"><${Button} kind="main" busy=${action.busy} onClick=${resume}>Resume<//><${Button} onClick=${onClose}>Cancel<//></div>
    <${Result} action=${{ ...action, problems: elsewhere }} /><//>`;
}

const REFUSED = new Set(["fixed", "fixed in effect"]);
const HIDDEN = new Set(["run.name", "run.output", "run.on_finish", "run.on_failure"]);

const pointsOf = (metrics, name) => metrics.steps.map((step, at) => [step, metrics[name][at]]);

function Curves({ id, others: first, news, again }) {
  const [others, compare] = useState(first);
  const [weight, setWeight] = useState(0.9);
  const [log, setLog] = useState(false);
  const [metrics, problems] = useMetrics(id, news.count, again);
  const [list] = useDocument("/runs?limit=200");
  const [compared] = useDocument(others.length ? `/compare?runs=${others.map(encodeURIComponent).join(",")}&points=1000` : null, [others.join()]);
  const own = useMemo(() => metrics && withNews(metrics.document, news, metrics.count), [metrics, news]);
  const series = useMemo(() => {
    if (!own) return null;
    const loss = pointsOf(own, "loss");
    const runs = others.length && compared ? compared.runs.filter((each) => others.includes(each.id)) : [];
    return {
      loss: [
        ...(weight > 0 ? [{ label: "each step", points: loss, tone: 0, faint: true }] : []),
        { label: "loss", points: smooth(loss, weight), tone: 0 },
        ...runs.map((each, at) => ({ label: each.name, points: smooth(pointsOf(each.metrics, "loss"), weight), tone: at + 1 })),
      ],
      val: [
        { label: "val_loss", points: own.validation.map((row) => [row.step, row.loss]), tone: 0, dots: true },
        ...runs.map((each, at) => ({ label: each.name, points: each.metrics.validation.map((row) => [row.step, row.loss]), tone: at + 1, dots: true })),
      ],
      lr: [{ label: "lr", points: pointsOf(own, "lr"), tone: 0 }],
      seconds: [{ label: "seconds", points: pointsOf(own, "seconds"), tone: 1 }],
      memory: [{ label: "GiB", points: pointsOf(own, "memory_gib"), tone: 3 }],
      grad: [{ label: "grad_norm", points: pointsOf(own, "grad_norm"), tone: 2 }],
    };
  }, [own, others, compared, weight]);
  if (!series) return html`<${Problems} problems=${problems} />`;
  if (!own.steps.length && !own.validation.length) return html`<div class="card empty">No step was trained yet.</div>`;
  const has = (name) => series[name].some((each) => each.points.some(([, value]) => value !== null));
  const known = (list?.runs ?? []).filter((each) => each.id !== id && each.has_record !== false);
  return html`
    <section class="card">
      <div class="head"><h2>Loss</h2><div class="right row">
        <label class="row">Smoothing <input type="range" min="0" max="0.99" step="0.01" value=${weight} onInput=${(event) => setWeight(Number(event.target.value))} /></label>
        <label class="row"><input type="checkbox" checked=${log} onChange=${(event) => setLog(event.target.checked)} /> log scale</label>
        <select aria-label="Compare with another run" value="" onChange=${(event) => { if (event.target.value) compare([...new Set([...others, event.target.value])].slice(-5)); event.target.value = ""; }}>
          <option value="">Compare with …</option>${known.map((each) => html`<option value=${each.id}>${each.name}</option>`)}
        </select>
        ${others.length > 0 && html`<${Button} kind="small" onClick=${() => compare([])}>Only this run<//>`}
      </div></div>
      <${Chart} label="Loss over steps" series=${series.loss} log=${log} height=${300} />
    </section>
    ${has("val") && html`<section class="card"><h2>Validation loss</h2><${Chart} label="Validation loss over steps" series=${series.val} log=${log} /></section>`}
    <div class="columns even">
      ${[["lr", "Learning rate"], ["grad", "Gradient norm"], ["seconds", "Seconds of a step"], ["memory", "Memory, GiB"]]
        .filter(([name]) => has(name))
        .map(([name, title]) => html`<section class="card" key=${name}><h2>${title}</h2><${Chart} label=${`${title} over steps`} series=${series[name]} height=${190} /></section>`)}
    </div>`;
}

// The columns of the run, and how many rows had come when they were asked for; again when many have come since.
function useMetrics(id, count, again) {
  const [state, set] = useState(null);
  const stretch = Math.floor(count / FETCHED_AGAIN_AFTER);
  const [document, , problems] = useDocument(path(id, "/metrics?points=2000"), [again, stretch]);
  const asked = useMemo(() => count, [again, stretch]);
  useEffect(() => document && set({ document, count: asked }), [document]);
  return [state, problems];
}

// The fetched columns with the rows that came since. A step that is repeated, as after a rollback, replaces later ones.
function withNews(metrics, news, since) {
  const names = ["loss", "lr", "grad_norm", "seconds", "memory_gib"];
  const all = { steps: [...metrics.steps], validation: [...metrics.validation] };
  for (const name of names) all[name] = [...metrics[name]];
  for (const row of news.count > since ? news.metrics.slice(since - news.count) : []) {
    while (all.steps.length && all.steps.at(-1) >= row.step) for (const column of ["steps", ...names]) all[column].pop();
    all.steps.push(row.step);
    for (const name of names) all[name].push(row[name] ?? null);
  }
  for (const row of news.validation) all.validation = [...all.validation.filter((each) => each.step < row.step), row];
  return all;
}

function Samples({ id, again }) {
  const [document, , problems] = useDocument(path(id, "/samples"), [again]);
  const [at, move] = useState(null);
  if (!document) return html`<${Problems} problems=${problems} />`;
  const images = document.samples;
  if (!images.length) return html`<div class="card empty">No image was generated yet. “Generate samples now” makes some.</div>`;
  // Before the first sample with the LoRA there are those of the base model alone.
  const isMain = images.every((each) => each.is_base) ? () => true : (each) => !each.is_base;
  const steps = [...new Set(images.filter(isMain).map((each) => each.step))];
  const place = Math.min(at ?? steps.length - 1, steps.length - 1);
  const name = (step) => (step === null ? "at the end" : `step ${whole(step)}`);
  const now = images.filter((each) => isMain(each) && each.step === steps[place]);
  const base = (image) =>
    image.is_base
      ? undefined
      : (images.find((each) => each.is_base && each.prompt === image.prompt && each.seed === image.seed && each.step === image.step) ??
        images.find((each) => each.is_base && each.prompt === image.prompt && each.seed === image.seed));
  return html`<section class="card">
    <${Field} label=${`Samples ${name(steps[place])}`} about="Move the slider to see how they changed while the LoRA was trained.">
      ${(field) => html`<input id=${field} type="range" min="0" max=${Math.max(0, steps.length - 1)} step="1" value=${place} aria-valuetext=${name(steps[place])} onInput=${(event) => move(Number(event.target.value))} />`}<//>
    <div class="images">${now.map((image) => html`<figure key=${`${image.prompt} ${image.seed} ${image.strength}`}>
      <div class="pair">${base(image) && html`<a href=${base(image).url} target="_blank" rel="noopener"><img src=${`${base(image).url}?width=512`} alt=${`base model: ${image.prompt}`} /></a>`}
        <a href=${image.url} target="_blank" rel="noopener"><img src=${`${image.url}?width=512`} alt=${`${image.is_base ? "base model" : "with the LoRA"}: ${image.prompt}`} /></a></div>
      <figcaption>${image.is_base ? "base model: " : base(image) ? "left: base model, right: with the LoRA: " : ""}${image.prompt}${image.seed !== null ? `, seed ${image.seed}` : ""}${image.strength !== null && image.strength !== 1 ? `, strength ${shown(image.strength)}` : ""}</figcaption>
    </figure>`)}</div></section>`;
}

function Log({ id, isLive }) {
  const [again, tick] = useState(0);
  const [document, , problems] = useDocument(path(id, "/log?tail=60000"), [again]);
  useEffect(() => {
    if (!isLive) return undefined;
    const timer = setInterval(() => tick((number) => number + 1), 3000);
    return () => clearInterval(timer);
  }, [isLive]);
  if (!document) return html`<${Problems} problems=${problems} />`;
  if (!document.file) return html`<div class="card empty">This run was started in a terminal, which shows its log.</div>`;
  return html`<section class="card"><pre tabindex="0" aria-label="Log">${document.text}</pre><p class="note">${document.file}, ${bytes(document.size)}</p></section>`;
}

function Events({ id, news }) {
  const [document, , problems] = useDocument(path(id, "/events"), [news]);
  if (!document) return html`<${Problems} problems=${problems} />`;
  if (!document.events.length) return html`<div class="card empty">Nothing happened beside the steps.</div>`;
  return html`<section class="card table"><table>
    <thead><tr><th class="number">step</th><th>kind</th><th>what happened</th></tr></thead>
    <tbody>${[...document.events].reverse().slice(0, 500).map((each) => html`<tr><td class="number">${whole(each.step)}</td><td>${each.kind}</td><td>${each.message}</td></tr>`)}</tbody></table></section>`;
}

function Settings({ id, again }) {
  const [document, , problems] = useDocument(path(id, "/settings"), [again]);
  const [all, showAll] = useState(false);
  if (!document) return html`<${Problems} problems=${problems} />`;
  const rows = document.settings.filter((row) => all || row.is_chosen);
  return html`<section class="card table"><label class="row"><input type="checkbox" checked=${all} onChange=${(event) => showAll(event.target.checked)} /> all settings, defaults too</label><table>
    <thead><tr><th>setting</th><th>value</th><th>from</th></tr></thead>
    <tbody>${rows.map((row) => html`<tr><td>${row.name}<br /><span class="about">${row.description}</span></td><td>${row.shown}</td><td>${row.origin}</td></tr>`)}</tbody></table></section>`;
}

function Files({ id, folder, again }) {
  const [document, , problems] = useDocument(path(id, "/verdict"), [again]);
  return html`<section class="card"><p class="note">${folder}</p><${Problems} problems=${problems} />
    ${document && (document.files.length ? html`<${FileList} files=${document.files} />` : html`<p class="lead">No file was exported yet.</p>`)}</section>`;
}
