// A new run: base model, data, presets, every setting; and its plan, before anything is trained.

import { get, post } from "./api.js";
import { fewMasks } from "./dataset_rows.js";
import { PathField, SettingsForm, belongsTo, textOf } from "./settings_form.js";
import { Button, Dialog, Field, Problems, Result, bytes, duration, html, shown, useAction, useDocument, useEffect, useMemo, useRef, useState, whole } from "./ui.js";
import { takeLike } from "./run_like.js";

const PLAN_AFTER_MS = 150;

export function NewRun({ id }) {
  const [schema, reloadSchema, loadProblems] = useDocument("/settings");
  const [machine] = useDocument("/machine");
  const like = useMemo(() => (id === null ? takeLike() : {}), []); // the settings of another run
  const [model, setModel] = useState(like.model ?? "");
  const [data, setData] = useState(like.data ?? [id ?? ""]); // of the address: images that another page names
  const [tier, setTier] = useState(like.tier ?? "auto");
  const [goal, setGoal] = useState(like.goal ?? "balanced");
  const [more, setMore] = useState(like.more ?? "");
  const [settings, setSettings] = useState(like.settings ?? {});
  const [name, setName] = useState(like.name ?? "");
  const [enforce, setEnforce] = useState(like.enforce ?? true);
  const [opened, open] = useState(null);
  const [isMasked, setMasked] = useState(null); // null: by default only where every image has a mask
  const action = useAction();
  const presets = [tier, goal, more].filter(Boolean);
  const sources = data.map((each) => each.trim()).filter(Boolean);
  const [masks, masksOf] = useMasks();
  useEffect(() => {
    const timer = setTimeout(() => masksOf(sources), PLAN_AFTER_MS);
    return () => clearTimeout(timer);
  }, [data.join("\n")]);
  // Masks beside the images count where the source names them.
  const masked = (counts) => sources.map((path) => counts[path]).filter((each) => each?.masks > 0);
  const usesMasks = (counts) => masked(counts).length > 0 && (isMasked ?? masked(counts).every((each) => each.masks >= each.images));
  const askedWith = (counts) => {
    const withMasks = usesMasks(counts);
    const tables = sources.map((path) => (counts[path]?.masks ? { path, masks: path } : { path }));
    const own = { model: model.trim() || null, presets };
    return withMasks ? { ...own, data: [], settings: { ...settings, "data.sources": tables } } : { ...own, data: sources, settings };
  };
  const asked = askedWith(masks);
  const maskCount = masked(masks).reduce((sum, each) => sum + each.masks, 0);
  const without = masked(masks).reduce((sum, each) => sum + Math.max(0, each.images - each.masks), 0);
  const [plan, problems, isBusy] = usePlan(asked);
  useEffect(action.clear, [JSON.stringify(asked)]); // what was refused was something else
  const change = (setting, value) =>
    setSettings((before) => {
      const { [setting]: _, ...others } = before;
      return value === undefined ? others : { ...others, [setting]: value };
    });
  const start = (when) =>
    action.act(async () => {
      const found = await post("/runs", { ...askedWith(await masksOf(sources, true)), name: name.trim() || null, command: enforce ? "produce" : "train", when });
      location.hash = when === "queue" ? "#/queue" : `#/run/${encodeURIComponent(found.id)}`;
    });
  if (!schema) return html`<h1>New run</h1><${Problems} problems=${loadProblems} />`;
  const tiers = schema.presets.filter((each) => each.kind === "tiers");
  const goals = schema.presets.filter((each) => each.kind === "goals");
  const others = schema.presets.filter((each) => each.kind === "bases");
  const all = [...problems, ...action.problems];
  const fields = new Set(schema.sections.flatMap((section) => section.settings.map((row) => row.name)));
  const general = problems.filter((each) => ![...fields].some((field) => belongsTo(each, field)));
  // torch may know a GPU that the machine's list does not have, such as one of AMD.
  const hasGpu = machine?.gpus.length > 0 || Boolean(plan?.gpu_gib);
  const isAlone = Boolean(machine) && !hasGpu;
  const about = [...goals, ...tiers].filter((each) => presets.includes(each.name)).map((each) => each.description);
  return html`
    <div class="head"><h1>New run</h1>
      <div class="right"><${Button} onClick=${() => open("import")}>Import a config<//></div></div>
    <div class="columns">
      <div class="stack">
        <section class="card">
          <h2>Base model and images</h2>
          <${PathField} label="Base model" about="A diffusers folder, one .safetensors file, or a hub id such as owner/name. Empty: the built-in miniature model."
            value=${model} kinds=${["model folder", "model"]} problems=${all.filter((each) => belongsTo(each, "model.path"))} onChange=${setModel} />
          ${data.map((source, at) => html`<${PathField} key=${at} label=${data.length > 1 ? `Images ${at + 1}` : "Images"} about=${at ? "" : "A folder of images with captions, or a .tar, .parquet, .jsonl, .csv or kohya's .toml file. Empty: the built-in dataset."}
            value=${source} kinds=${["folder", "data"]} problems=${at ? [] : all.filter((each) => belongsTo(each, "data.sources"))} onChange=${(value) => setData(data.map((each, number) => (number === at ? value : each)))} />`)}
          ${maskCount > 0 && html`<label class="row"><input type="checkbox" checked=${usesMasks(masks)} onChange=${(event) => setMasked(event.target.checked)} /> ${maskCount === 1 ? "Use the mask of 1 image: only what is painted counts" : `Use the masks of ${whole(maskCount)} images: only what is painted counts`}</label>
            <p class="about">${without > 0 && fewMasks(maskCount, without)}</p>`}
          <div class="row"><${Button} kind="small" onClick=${() => setData([...data, ""])}>Add another dataset<//>
            ${data.length > 1 && html`<${Button} kind="small" onClick=${() => setData(data.slice(0, -1))}>Remove the last<//>`}</div>
          <p></p>
          <${Field} label="Name" about="Empty: that of the dataset">${(id) => html`<input id=${id} value=${name} spellcheck=${false} onInput=${(event) => setName(event.target.value)} />`}<//>
        </section>
        <section class="card">
          <h2>Presets</h2>
          <${Choices} label="GPU memory" name="tier" options=${[["auto", isAlone ? "no GPU here: CPU" : "this GPU"], ...tiers.map((each) => [each.name, `${each.gb} GB`]), ["", "none"]]} value=${tier} onChange=${setTier} />
          <${Choices} label="Goal" name="goal" options=${[...goals.map((each) => [each.name, each.name]), ["", "none"]]} value=${goal} onChange=${setGoal} />
          ${tier === "auto" && isAlone && html`<p class="about">Trains on the CPU, with the settings of 12gb and no limit of memory. Choose a size to plan for a GPU of another computer.</p>`}
          ${about.map((each) => html`<p class="about">${each}</p>`)}
          ${(others.length > 0 || schema.saved.length > 0) && html`<${Field} label="For a base model, or saved by you">
            ${(id) => html`<select id=${id} value=${more} onChange=${(event) => setMore(event.target.value)}><option value="">none</option>
              ${others.map((each) => html`<option value=${each.name}>${each.name}: ${each.description}</option>`)}
              ${schema.saved.map((each) => html`<option value=${each.name}>${each.name}: saved by you</option>`)}</select>`}<//>`}
          <p></p>
          <label class="row"><input type="checkbox" checked=${enforce} onChange=${(event) => setEnforce(event.target.checked)} /> Refuse a dataset or a LoRA that scores below the minimum</label>
        </section>
        <section class="card last"><h2>Settings</h2>
          <${SettingsForm} sections=${schema.sections} now=${plan?.settings} chosen=${settings} problems=${all} onChange=${change} />
        </section>
      </div>
      <div class="stack sticky">
        <section class="card begin" aria-label="Start">
          <div class="row"><${Button} kind="main" busy=${action.busy} onClick=${() => start("now")}>${action.busy ? "Checking …" : "Start run"}<//>
            <${Button} busy=${action.busy} onClick=${() => start("queue")}>Add to queue<//>
            ${plan && html`<span class=${`note grow ${isBusy ? "old" : ""}`}>${[problems.length ? "the plan has problems" : plan.fits ? `GPU memory ${shown(plan.peak_gib)} GiB` : "does not fit", plan.steps !== null && `${whole(plan.steps)} steps`].filter(Boolean).join(", ")}</span>`}</div>
          <${Result} action=${action} />
        </section>
        <section class="card" aria-label="Plan" aria-busy=${isBusy}>
          <h2>Plan</h2>
          <${Problems} problems=${general.length ? general : problems.length ? problems : []} />
          ${plan ? html`<${Plan} plan=${plan} isOld=${isBusy || problems.length > 0} machine=${isAlone ? machine : null} />` : !problems.length && html`<p class="lead">Computing …</p>`}
        </section>
        ${plan && html`<section class="card"><h2>Changed from the presets</h2>
          ${plan.differences.length
            ? html`<ul class="legend changed">${plan.differences.map((each) => html`<li><span>${each.name}</span><b>${shortOf(each.name, each.value) || "(empty)"}</b> <span class="note">instead of ${shortOf(each.name, each.preset) || "(empty)"}</span></li>`)}</ul>
              <p><${Button} kind="small" onClick=${() => open("save")}>Save as preset<//> <${Button} kind="small" onClick=${() => setSettings({})}>Take all back<//></p>`
            : html`<p class="about">Nothing.</p>`}
          ${plan.notes.map((each) => html`<p class="note">${each}</p>`)}</section>`}
      </div>
    </div>
    ${opened === "import" && html`<${Import} onClose=${() => open(null)} onTake=${(found) => { setSettings((before) => ({ ...before, ...found.settings })); if (found.model) setModel(found.model); if (found.data.length) setData(found.data); open(null); }} />`}
    ${opened === "save" && html`<${SavePreset} settings=${settings} onClose=${() => open(null)} onSaved=${(saved) => { setMore(saved); setSettings({}); reloadSchema(); open(null); }} />`}`;
}

// Sources as their paths, and what else they name in a word; other values as text.
const shortOf = (name, value) =>
  name === "data.sources" && Array.isArray(value)
    ? value.map((each) => {
        const { path, ...more } = typeof each === "string" ? { path: each } : each;
        const named = Object.entries(more).filter(([key, own]) => textOf(own) && own !== false && !(key === "loss_weight" && own === 1)).map(([key, own]) => (key === "masks" || key === "captions_file" || key === "control_images" ? key.replaceAll("_", " ") : `${key.replaceAll("_", " ")} ${textOf(own)}`));
        return named.length ? `${path} (${named.join(", ")})` : path;
      }).join(", ")
    : textOf(value);

// How many images and masks beside them each source has by its path, as far as it is known; and what asks for more.
function useMasks() {
  const [known, set] = useState({});
  const newest = useRef(known);
  const masksOf = async (paths, isAnew = false) => {
    for (const path of paths.filter((each) => isAnew || !(each in newest.current))) {
      const found = await get(`/datasets/source?path=${encodeURIComponent(path)}`).catch(() => ({ masks: 0, images: 0 }));
      newest.current = { ...newest.current, [path]: found };
    }
    set(newest.current);
    return newest.current;
  };
  return [known, masksOf];
}

// The plan of what is typed now: the earlier one stays until the next is there.
function usePlan(asked) {
  const [state, set] = useState({ plan: null, problems: [], busy: true });
  const newest = useRef(0);
  const key = JSON.stringify(asked);
  useEffect(() => {
    const number = ++newest.current;
    set((before) => ({ ...before, busy: true }));
    const timer = setTimeout(async () => {
      let next;
      try {
        next = { plan: await post("/plan", JSON.parse(key)), problems: [] };
      } catch (error) {
        if (!error.problems) console.error(error);
        next = { problems: error.problems ?? [{ message: `This page made a mistake: ${error.message}.`, fix: "Load it again." }] };
      }
      if (number === newest.current) set((before) => ({ ...before, ...next, busy: false }));
    }, PLAN_AFTER_MS);
    return () => clearTimeout(timer);
  }, [key]);
  return [state.plan, state.problems, state.busy];
}

function Choices({ label, name, options, value, onChange }) {
  return html`<fieldset class="choices"><legend>${label}</legend>
    ${options.map(([option, words]) => html`<label class="choice"><input type="radio" name=${name} value=${option} checked=${value === option} onChange=${() => onChange(option)} /><span>${words}</span></label>`)}
  </fieldset>`;
}

const PARTS = [["weights_gib", "base model"], ["adapter_gib", "LoRA"], ["optimizer_gib", "optimizer"], ["activations_gib", "activations"], ["overhead_gib", "CUDA and rest"]];

// `machine`: that of the server where it has no GPU.
function Plan({ plan, isOld, machine }) {
  const parts = PARTS.map(([key, words]) => [words, plan[key]]);
  const sum = parts.reduce((all, [, gib]) => all + gib, 0);
  const most = Math.max(plan.limit_gib ?? 0, sum) * 1.02 || 1;
  const least = plan.seconds_at_least;
  return html`<div class=${isOld ? "old" : ""}>
    <p><span class="about">GPU memory at the peak</span><br /><b>${shown(plan.peak_gib)} GiB</b>${plan.limit_gib ? ` of ${shown(plan.limit_gib)} GiB: ${plan.fits ? "fits" : "does not fit"}` : ", without a limit"}</p>
    <div class="meter" role="img" aria-label=${`GPU memory: ${parts.map(([words, gib]) => `${words} ${shown(gib)} GiB`).join(", ")}`}>
      ${parts.map(([, gib], at) => html`<span class=${`tone${at}`} style=${{ width: `${(100 * gib) / most}%` }}></span>`)}
      ${plan.limit_gib && html`<i style=${{ left: `${(100 * plan.limit_gib) / most}%` }}></i>`}
    </div>
    <ul class="legend">${parts.map(([words, gib], at) => html`<li><span class=${`dot tone${at}`}></span>${words}<b>${shown(gib)} GiB</b></li>`)}</ul>
    ${machine && html`<p class="note">This computer has no GPU: the run uses its system memory, of which ${bytes(machine.memory.free)} are free.</p>`}
    <${Problems} problems=${plan.shortages.map((each) => ({ message: each, fix: "" }))} />
    <table>
      <tr><th scope="row">model</th><td>${plan.model ?? plan.family}, ${plan.resolution} px</td></tr>
      <tr><th scope="row">steps</th><td>${plan.steps === null ? "depends on the images" : whole(plan.steps)}</td></tr>
      <tr><th scope="row">micro-batch</th><td>${plan.micro_batch_size}, gradient accumulation ${plan.gradient_accumulation_steps} <span class="note">${plan.reasons.micro_batch_size ?? ""}</span></td></tr>
      <tr><th scope="row">checkpointed</th><td>${plan.gradient_checkpointing} of ${plan.blocks} blocks <span class="note">${plan.reasons.gradient_checkpointing ?? ""}</span></td></tr>
      <tr><th scope="row">weights</th><td>${plan.weight_dtype}${plan.blocks_to_swap ? `, ${plan.blocks_to_swap} blocks swapped` : ""}</td></tr>
      <tr><th scope="row">disk</th><td>${shown(plan.disk_gib)} GiB</td></tr>
    </table>
    <h3>${machine ? "At least this long on a GPU" : "At least this long"}</h3>
    <ul class="legend">${Object.entries(least ?? plan.seconds_per_step_at_least).map(([gpu, seconds]) => html`<li>${gpu}<b>${duration(seconds)}${least ? "" : " a step"}</b></li>`)}</ul>
    ${machine && html`<p class="note">The CPU of this computer takes longer; how long is shown when the first steps are trained.</p>`}
    ${plan.advice.map((each) => html`<p class="about">${each}</p>`)}
  </div>`;
}

function Import({ onClose, onTake }) {
  const [text, set] = useState("");
  const [found, setFound] = useState(null);
  const action = useAction();
  const read = () => action.act(async () => setFound(await post("/import", { text })));
  return html`<${Dialog} title="Import another trainer's config" onClose=${onClose}>
    <${Field} label="Paste it here" about="kohya's TOML or GUI JSON, OneTrainer, ai-toolkit, SimpleTuner, musubi-tuner, or a command line of diffusers or kohya">
      ${(id) => html`<textarea id=${id} spellcheck=${false} value=${text} onInput=${(event) => { set(event.target.value); setFound(null); }}></textarea>`}<//>
    <div class="row"><${Button} kind=${found ? "" : "main"} busy=${action.busy || !text.trim()} onClick=${read}>Read<//>
      ${found && html`<${Button} kind="main" onClick=${() => onTake(taken(found))}>Use these settings<//>`}<${Button} onClick=${onClose}>Cancel<//></div>
    <${Result} action=${action} />
    ${found && html`<p class="lead">Read as ${found.format}: ${Object.entries(found.counts).map(([verdict, count]) => `${whole(count)} ${verdict}`).join(", ")}.</p>
      <div class="table"><table>
      <thead><tr><th>theirs</th><th>here</th><th>why</th></tr></thead>
      <tbody>${found.keys.map((row) => html`<tr><td>${row.key} = ${textOf(row.value)}</td>
        <td>${Object.entries(row.settings ?? {}).map(([name, value]) => html`<div>${name} = ${textOf(value)}</div>`)}</td><td><b>${row.verdict}</b> ${row.why}</td></tr>`)}</tbody></table></div>`}
  <//>`;
}

// Settings of an imported config; model and data have fields of their own.
function taken(found) {
  const { "model.path": model, "data.sources": sources, ...settings } = found.settings;
  for (const refused of ["run.name", "run.output", "run.on_finish", "run.on_failure"]) delete settings[refused];
  const arePaths = (sources ?? []).every((each) => Object.keys(each).join() === "path");
  if (!arePaths) settings["data.sources"] = sources;
  return { settings, model: model ?? null, data: arePaths ? (sources ?? []).map((each) => each.path) : [] };
}

function SavePreset({ settings, onClose, onSaved }) {
  const [name, set] = useState("");
  const action = useAction();
  const save = () =>
    action.act(async () => {
      await post("/presets", { name: name.trim(), settings });
      onSaved(name.trim());
    });
  return html`<${Dialog} title="Save as preset" onClose=${onClose}>
    <${Field} label="Name" about="Letters, digits, spaces, points and hyphens">${(id) => html`<input id=${id} value=${name} onInput=${(event) => set(event.target.value)} />`}<//>
    <div class="row"><${Button} kind="main" busy=${action.busy || !name.trim()} onClick=${save}>Save<//><${Button} onClick=${onClose}>Cancel<//></div>
    <${Result} action=${action} /><//>`;
}
