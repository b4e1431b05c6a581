// Images with a LoRA: prompts, strengths and a base model; the sheets that were generated, and each image in full size.

import { get, post, remove } from "./api.js";
import { PathField } from "./settings_form.js";
import { TaskState } from "./task.js";
import { Button, Dialog, Field, Result, html, moment, shown, typedNumber, useAction, useDocument, useEffect, useLive, useState, whole } from "./ui.js";

const OTHER = "other";
const EVERY = 2000; // milliseconds between looks for new images

const list = (text) => text.split(/[;\s]+|,(?=\s)/).filter(Boolean);
const strengthWords = (strength) => (strength === null ? "without" : `strength ${shown(strength)}`);

export function SampleBox({ lora }) {
  const [bases, , problems] = useDocument(`/loras/${lora.id}/bases`);
  const [sheets, load] = useDocument(`/loras/sheets?lora=${lora.id}`);
  const [prompts, setPrompts] = useState(null);
  const [strengths, setStrengths] = useState("0.5  1");
  const [seeds, setSeeds] = useState("0");
  const [base, setBase] = useState(null);
  const [model, setModel] = useState("");
  const [more, setMore] = useState({ negative_prompt: "", num_inference_steps: "", guidance_scale: "", width: "", height: "" });
  const [start, begin] = useState("");
  const action = useAction();
  useEffect(() => {
    // The prompts that the run itself used are the best first ones.
    const usual = lora.trigger ? "[trigger]" : "";
    if (!lora.run) begin(usual);
    else get(`/runs/${encodeURIComponent(lora.run)}/samples`).then(({ samples }) => begin([...new Set(samples.map((each) => each.prompt))].slice(0, 2).join("\n") || usual), () => begin(usual));
  }, [lora.id]);
  useLive((message) => (message.reconnected || (message.task?.kind === "sample" && message.task.about.lora === lora.id)) && load());
  const isRunning = sheets?.sheets.some((each) => each.status === "running");
  useEffect(() => {
    if (!isRunning) return undefined;
    const timer = setInterval(load, EVERY);
    return () => clearInterval(timer);
  }, [isRunning]);
  const text = prompts ?? start;
  const lines = [...new Set(text.split("\n").map((line) => line.trim()).filter(Boolean))];
  const numbers = list(strengths).map(typedNumber);
  const count = lines.length * new Set(list(seeds)).size * (1 + new Set(numbers).size);
  const fitting = bases?.bases ?? [];
  const chosen = base ?? fitting[0]?.model ?? OTHER;
  const generate = () =>
    action.act(async () => {
      const body = { lora: lora.id, prompts: lines, strengths: numbers.map((each) => (Number.isNaN(each) ? 1e9 : each)), seeds: list(seeds).map((each) => Math.trunc(typedNumber(each)) || 0) };
      for (const [name, value] of Object.entries(more)) if (value.trim()) body[name] = name === "negative_prompt" ? value : (typedNumber(value) || 0);
      // Of its own run the model's other parts, such as another VAE, belong to it.
      const own = fitting.find((each) => each.is_default)?.model;
      if (chosen === OTHER) body.model = model.trim() || null;
      else if (chosen !== own) body.model = chosen;
      await post("/loras/sheets", body);
      await load();
    });
  const field = (name, label, about) => html`<${Field} label=${label} about=${about}>${(id) => html`<input id=${id} inputmode=${name === "negative_prompt" ? "text" : "decimal"} value=${more[name]} onInput=${(event) => setMore({ ...more, [name]: event.target.value })} />`}<//>`;
  return html`<section class="card"><h2>Sample</h2>
    <${Field} label="Prompts, one on each line" about=${lora.trigger ? "[trigger] is replaced by the trigger word" : undefined}>${(id) => html`<textarea id=${id} class="low" value=${text} onInput=${(event) => setPrompts(event.target.value)}></textarea>`}<//>
    <div class="three of-base">
      <${Field} label="Base model" about=${fitting.find((each) => each.model === chosen)?.fits === false ? "Of another family than the LoRA" : undefined}>${(id) => html`<select id=${id} value=${chosen} onChange=${(event) => setBase(event.target.value)}>
        ${fitting.map((each) => html`<option value=${each.model}>${each.name}${each.family ? ` (${each.family})` : ""}${each.is_default ? ", of its run" : ""}</option>`)}<option value=${OTHER}>another …</option></select>`}<//>
      <${Field} label="Strengths" about="Beside the images without it">${(id) => html`<input id=${id} value=${strengths} onInput=${(event) => setStrengths(event.target.value)} />`}<//>
      <${Field} label="Seeds">${(id) => html`<input id=${id} value=${seeds} onInput=${(event) => setSeeds(event.target.value)} />`}<//>
    </div>
    ${chosen === OTHER && html`<${PathField} label="Model" about="A folder, a checkpoint, or an id of a hub that was downloaded before" value=${model} kinds=${["model folder", "model"]} onChange=${setModel} />`}
    <details><summary>Steps, size, guidance</summary><div class="three">
      ${field("num_inference_steps", "Steps", "Empty: usual for the model")}${field("guidance_scale", "Guidance scale", "Empty: usual for the model")}${field("negative_prompt", "Negative prompt")}
      ${field("width", "Width", "Empty: the model's own")}${field("height", "Height", "Empty: the model's own")}</div></details>
    <div class="row"><${Button} kind="main" busy=${action.busy || isRunning} disabled=${!lines.length} onClick=${generate}>Generate ${whole(count)} image${count === 1 ? "" : "s"}<//>
      <span class="note">${isRunning ? "One sheet at a time is generated here." : ""}</span></div>
    <${Result} action=${{ ...action, problems: [...problems, ...action.problems] }} /></section>
    ${(sheets?.sheets ?? []).map((sheet, at) => html`<${Sheet} key=${sheet.id} sheet=${sheet} isOpen=${at === 0} onChange=${load} />`)}`;
}

function Sheet({ sheet, isOpen, onChange }) {
  const [place, look] = useState(null); // row and column
  const action = useAction();
  if (!sheet.rows.length) return null;
  const facts = [sheet.base && `base model ${sheet.base}`, sheet.steps && `${whole(sheet.steps)} steps`, sheet.guidance && `guidance ${shown(sheet.guidance)}`, sheet.size && sheet.size.join("×"), sheet.negative_prompt && `without: ${sheet.negative_prompt}`];
  const drawn = sheet.rows.flatMap((row, at) => row.urls.map((url, column) => url && { at, column })).filter(Boolean);
  return html`<section class="card"><details open=${isOpen || sheet.status === "running"}>
    <summary>${whole(sheet.rows.length)} × ${whole(sheet.columns.length)} images <span class="note">${moment(sheet.created)}</span></summary>
    <${TaskState} task=${sheet.task ?? null} onChange=${onChange} />
    <div class="sheet-scroll" tabindex="0" role="region" aria-label="Images by prompt and strength"><div class="sheet" style=${{ "--columns": sheet.columns.length }}>
      ${sheet.columns.map((strength) => html`<b class="column">${strengthWords(strength)}</b>`)}
      ${sheet.rows.map((row, at) => html`<p class="prompt">${row.prompt} <span class="note">seed ${row.seed}</span></p>
        ${row.urls.map((url, column) => url
          ? html`<button type="button" class="image" onClick=${() => look({ at, column })}><img src=${`${url}?width=512`} alt=${`${strengthWords(sheet.columns[column])}: ${row.prompt}, seed ${row.seed}`} loading="lazy" /></button>`
          : html`<span class="image waiting">${sheet.status === "running" ? "…" : "none"}</span>`)}`)}</div></div>
    <div class="row"><span class="note grow">${facts.filter(Boolean).join(" · ")}</span>
      ${sheet.status !== "running" && html`<${Button} kind="small" aria-label=${`Delete the images of ${moment(sheet.created)}`} busy=${action.busy} onClick=${() => action.act(async () => { await remove(`/loras/sheets/${sheet.id}`); await onChange(); })}>Delete<//>`}</div>
    <${Result} action=${action} /></details>
    ${place && html`<${Large} sheet=${sheet} drawn=${drawn} place=${place} onMove=${look} onClose=${() => look(null)} />`}</section>`;
}

function Large({ sheet, drawn, place, onMove, onClose }) {
  const row = sheet.rows[place.at];
  const now = drawn.findIndex((each) => each.at === place.at && each.column === place.column);
  const move = (by) => onMove(drawn[(now + by + drawn.length) % drawn.length]);
  const keys = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (by) move(by);
  };
  return html`<div onKeyDown=${keys}><${Dialog} title=${strengthWords(sheet.columns[place.column])} onClose=${onClose}>
    <img class="large" src=${row.urls[place.column]} alt=${`${strengthWords(sheet.columns[place.column])}: ${row.prompt}`} />
    <p>${row.prompt} <span class="note">seed ${row.seed}</span></p>
    <div class="row"><${Button} onClick=${() => move(-1)}>Previous<//><${Button} onClick=${() => move(1)}>Next<//>
      <a class="button" href=${row.urls[place.column]} download>Save</a><${Button} onClick=${onClose}>Close<//></div><//></div>`;
}
