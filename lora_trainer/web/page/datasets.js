// Datasets: those that are here, and the page of one of them.

import { get, post } from "./api.js";
import { CopyDialog, AutoCaptionDialog, EDITS, EditDialog } from "./dataset_dialogs.js";
import { Editor } from "./dataset_editor.js";
import { Filters } from "./dataset_filters.js";
import { ImageGrid } from "./dataset_grid.js";
import { fewMasks, imageUrl, useRows } from "./dataset_rows.js";
import { PathField } from "./settings_form.js";
import { TaskState, useTask } from "./task.js";
import { AddFiles, NewDataset, Uploads } from "./upload.js";
import { Button, Dialog, Problems, Progress, Result, html, score, useAction, useCallback, useDocument, useEffect, useRef, useState, whole } from "./ui.js";

// Its rules come with it: the other pages do not need them.
const sheet = document.createElement("link");
Object.assign(sheet, { rel: "stylesheet", href: "datasets.css" });
await new Promise((resolve) => {
  sheet.onload = sheet.onerror = resolve;
  document.head.append(sheet);
});

export function Datasets({ id }) {
  return id === null ? html`<${DatasetList} />` : html`<${Dataset} key=${id} path=${id} />`;
}

export const addressOf = (path) => `#/datasets/${encodeURIComponent(path)}`;

function DatasetList() {
  const [found, load, problems] = useDocument("/datasets");
  const [path, setPath] = useState("");
  useEffect(() => {
    window.addEventListener("focus", load);
    return () => window.removeEventListener("focus", load);
  }, [load]);
  if (!found) return html`<h1>Datasets</h1><${Problems} problems=${problems} />`;
  const open = (event) => {
    event.preventDefault();
    if (path.trim()) location.hash = addressOf(path.trim());
  };
  return html`
    <div class="head"><h1>Datasets</h1><div class="right"><${NewDataset} onMade=${(made) => (location.hash = addressOf(made))} /></div></div>
    <form class="card" onSubmit=${open}>
      <${PathField} label="Open images" about="A folder, a .tar, .parquet, .jsonl, .csv or kohya's .toml file on the server's computer. They are only read: a copy can be edited."
        value=${path} kinds=${["folder", "data"]} onChange=${setPath} />
      <button class="button main" disabled=${!path.trim()}>Open</button>
    </form>
    <section><h2>To edit</h2>
      ${found.datasets.length
        ? html`<ul class="datasets">${found.datasets.map((each) => html`<li key=${each.path}><${Card} dataset=${each} /></li>`)}</ul>`
        : html`<p class="lead">None yet. Drop images here, or open some and make a copy of them. They are kept in ${found.folder}.</p>`}
    </section>
    ${found.used.length > 0 && html`<section><h2>Used by runs</h2>
      <ul class="datasets">${found.used.map((each) => html`<li key=${each.path}><${Card} dataset=${each} note=${`${whole(each.runs)} ${each.runs === 1 ? "run" : "runs"}`} /></li>`)}</ul></section>`}
    <section><h2>Built in</h2><ul class="datasets"><li><${Card} dataset=${found.builtin} /></li></ul></section>`;
}

function Card({ dataset, note }) {
  const count = dataset.images === undefined ? null : `${whole(dataset.images)}${dataset.is_more ? " or more" : ""} ${dataset.images === 1 ? "image" : "images"}`;
  const words = [count, note].filter(Boolean).join(" · ");
  return html`<a class="card dataset" href=${addressOf(dataset.path)}>
    ${dataset.first ? html`<img src=${imageUrl(dataset.path, { name: dataset.first }, 96)} alt="" loading="lazy" onError=${(event) => (event.target.hidden = true)} />` : html`<span class="blank"></span>`}
    <span><span class="name">${dataset.name}</span><span class="note">${words}</span><span class="note place">${dataset.path}</span></span></a>`;
}

const NOTHING = { search: "", tag: "", finding: "", bucket: "" };
const SORTS = { order: "as trained", name: "name", newest: "newest", short: "shortest caption", long: "longest caption", small: "smallest", large: "largest" };
const isNarrow = window.matchMedia("(max-width: 1000px)");

function useNarrow() {
  const [value, set] = useState(isNarrow.matches);
  useEffect(() => {
    const look = () => set(isNarrow.matches);
    isNarrow.addEventListener("change", look);
    return () => isNarrow.removeEventListener("change", look);
  }, []);
  return value;
}

function Dataset({ path }) {
  const [known] = useDocument("/datasets");
  const [filter, setFilter] = useState(NOTHING);
  const [sort, setSort] = useState("order");
  const [size, setSize] = useState({ family: "", resolution: "" });
  const [isCropped, showCrops] = useState(true);
  const [selected, select] = useState(new Set());
  const [opened, open] = useState(null); // the image in the editor: {index, name}
  const [dialog, setDialog] = useState(null);
  const [drawn, setDrawn] = useState(null); // the image whose mask is drawn, and what draws it
  const action = useAction();
  const narrow = useNarrow();
  const asked = { ...filter, sort, family: size.family, resolution: size.resolution };
  const rows = useRows(path, asked);
  const editor = useRef(null);
  const tasks = useTasks(path, rows.reload);
  const document_ = rows.document;
  const isEditable = document_?.is_editable ?? false;
  const change = (more) => {
    setFilter((before) => ({ ...before, ...more }));
    window.scrollTo({ top: Math.min(window.scrollY, grid.current?.offsetTop ?? 0) });
  };
  const grid = useRef(null);
  const goInJournal = (way) =>
    !action.busy && action.act(async () => {
      if (!(await (editor.current?.save() ?? true))) return undefined;
      const { title, changed } = await post(`/datasets/${way}`, { path });
      await rows.reload();
      return `${way === "undo" ? "Undone" : "Done again"}: ${title}${changed > 1 ? `, ${whole(changed)} captions` : ""}`;
    });
  const keys = useRef(null);
  keys.current = (event) => {
    if (!isEditable || !(event.ctrlKey || event.metaKey) || event.target.matches("input:not([type='checkbox']), textarea, select") || document.querySelector("dialog[open]")) return;
    const key = event.key.toLowerCase();
    const way = key === "z" && !event.shiftKey ? "undo" : key === "y" || (key === "z" && event.shiftKey) ? "redo" : null;
    if (!way || !document_[way]) return;
    event.preventDefault();
    goInJournal(way);
  };
  useEffect(() => {
    const press = (event) => keys.current(event);
    window.addEventListener("keydown", press);
    return () => window.removeEventListener("keydown", press);
  }, []);
  if (!document_) {
    const { reading } = rows;
    const own = known?.datasets.find((each) => each.path === path);
    const isEmpty = rows.isEmpty || (own && rows.problems.length > 0 && !own.images);
    if (isEmpty) {
      return html`<div class="head"><div><p class="crumb"><a href="#/datasets">Datasets</a></p><h1>${path.split("/").pop()}</h1></div></div>
        <${Uploads} path=${path} onDone=${rows.reload} />
        <div class="card empty"><p>No images yet. Drop them here, with their captions as .txt files.</p><${AddFiles} path=${path} kind="main" /></div>`;
    }
    return html`<div class="head"><h1>${path.split("/").pop()}</h1></div>
      ${own && html`<${Uploads} path=${path} onDone=${rows.reload} />`}
      <${Problems} problems=${rows.problems} />
      ${rows.problems.length > 0 && html`<p><a class="button" href="#/datasets">Datasets</a></p>`}
      ${!rows.problems.length && html`<div class="card" role="status"><p>Reading the images${reading?.total ? `: ${whole(reading.done)} of ${whole(reading.total)}` : " …"}</p>
        ${reading?.total > 0 && html`<${Progress} step=${reading.done} total=${reading.total} label="Images read" />`}
        <p class="about">The first time each file is opened once. Later only what is new.</p></div>`}`;
  }
  const start = (kind, body) => action.act(async () => {
    await post(`/datasets/${kind}`, { path, ...body });
    tasks[kind].load();
  });
  const sizes = { family: size.family || document_.family, resolution: size.resolution ? Number(size.resolution) : null };
  const chosen = selected.size ? { names: [...selected] } : { ...filter };
  const whom = selected.size ? `${whole(selected.size)} selected` : `all ${whole(document_.total)} shown`;
  const edit = async (document, more = {}) => {
    const body = { path, edit: document, ...chosen, family: size.family || null, resolution: sizes.resolution, ...more };
    return post("/datasets/edit", body);
  };
  const applyEdit = (document) => !action.busy && action.act(async () => {
    const { changed } = await edit(document);
    await rows.reload();
    return `${whole(changed)} ${changed === 1 ? "caption" : "captions"} changed`;
  });
  const drawMask = (row) => action.act(async () => {
    const { MaskDialog } = await import("./mask.js");
    const found = await get(`/datasets/images?${new URLSearchParams({ path, search: row.name })}`); // the row may be from before its mask
    setDrawn({ MaskDialog, image: found.rows?.find((each) => each.name === row.name) ?? row });
  });
  const panel = opened && html`<${Editor} key="editor" handle=${editor} path=${path} rows=${rows} opened=${opened} open=${open} isEditable=${isEditable} isCropped=${isCropped}
    onCopy=${() => setDialog("copy")} onMask=${drawMask} />`;
  const total = html`<b aria-live="polite">${document_.total === document_.count ? `${whole(document_.total)} images` : `${whole(document_.total)} of ${whole(document_.count)} images`}</b>
          ${document_.reading && html`<span class="note">reading what is new …</span>`}`;
  const view = html`
          <label class="row"><input type="checkbox" checked=${isCropped} onChange=${(event) => showCrops(event.target.checked)} /> Show crops</label>
          <label class="row">Sort <select value=${sort} onChange=${(event) => setSort(event.target.value)}>${Object.entries(SORTS).map(([value, words]) => html`<option value=${value}>${words}</option>`)}</select></label>
          <label class="row">Model <select value=${size.family} onChange=${(event) => setSize({ family: event.target.value, resolution: "" })}><option value="">${document_.family}</option>
            ${(known?.families ?? []).filter((each) => each.name !== document_.family || size.family).map((each) => html`<option value=${each.name}>${each.name}</option>`)}</select></label>
          <${Resolution} value=${size.resolution} now=${document_.resolution} onChange=${(resolution) => setSize({ ...size, resolution })} />`;
  const tools = isEditable && html`<div class="toolbar row" role="group" aria-label="Edit captions">
          <${Button} kind="small" disabled=${!document_.undo} busy=${action.busy} title=${document_.undo ?? "Nothing to undo"} onClick=${() => goInJournal("undo")}>Undo<//>
          <${Button} kind="small" disabled=${!document_.redo} busy=${action.busy} title=${document_.redo ?? "Nothing to redo"} onClick=${() => goInJournal("redo")}>Redo<//>
          ${Object.entries(EDITS).map(([kind, each]) => html`<${Button} kind="small" key=${kind} onClick=${() => setDialog(kind)}>${each.title}<//>`)}</div>`;
  return html`
    <div class="head"><div><p class="crumb"><a href="#/datasets">Datasets</a></p><h1>${document_.name}</h1>
        <p class="lead">${whole(document_.count)} ${document_.count === 1 ? "image" : "images"} · trained at ${document_.resolution} px (${document_.family})${isEditable ? "" : " · only read"}</p></div>
      <div class="right">
        ${isEditable && html`<${AddFiles} path=${path} /><${Button} onClick=${() => setDialog("caption")}>Auto-caption<//>`}
        <${Button} busy=${action.busy || tasks.check.isRunning} onClick=${() => start("check", { family: size.family || null, resolution: sizes.resolution })}>Check<//>
        <${Button} onClick=${() => setDialog("clean")}>Clean copy<//>
        <${Button} onClick=${() => setDialog("copy")}>${isEditable ? "Copy" : "Edit a copy"}<//>
        <a class="button main" href=${`#/new/${encodeURIComponent(path)}`}>Train on this</a></div></div>
    <${Problems} problems=${rows.problems} />
    <${Result} action=${action} />
    ${isEditable && html`<${Uploads} path=${path} onDone=${rows.reload} />`}
    ${Object.entries(tasks).map(([kind, each]) => html`<${TaskState} key=${kind} task=${each.seen} onChange=${each.load} />`)}
    ${["copy", "clean"].map((kind) => tasks[kind].isNew && tasks[kind].task.document && html`<p class="done">${tasks[kind].task.title}: done. <a href=${addressOf(tasks[kind].task.about.target)}>Open ${tasks[kind].task.about.name}</a></p>`)}
    ${document_.check && html`<${CheckResult} check=${document_.check} seen=${document_} onLook=${() => change({ finding: "any" })} />`}
    ${document_.left_out > 0 && html`<p class="note">${whole(document_.left_out)} files lead out of the folders that this server may read, and are not shown.</p>`}
    <div class=${opened && !narrow ? "dataset-columns with-editor" : "dataset-columns"}>
      <${Filters} document=${document_} filter=${filter} change=${change} narrow=${narrow} whom=${selected.size ? whom : null} onTag=${isEditable ? applyEdit : null} />
      <section aria-label="Images" ref=${grid}>
        ${narrow
          ? html`<details class="card filters tools"><summary>View${isEditable ? " and edit captions" : ""}</summary><div class="toolbar row">${view}</div>${tools}</details>`
          : html`<div class="toolbar row">${total}${view}</div>${tools}`}
        <div class="toolbar row">${narrow && total}<span class="note">${selected.size ? `${whole(selected.size)} selected` : narrow ? "" : "Select with the boxes, Shift or Ctrl and click, Space or Ctrl+A"}</span>
          <${Button} kind="small" onClick=${() => rows.names().then((names) => select(new Set(names)))}>Select all<//>
          ${selected.size > 0 && html`<${Button} kind="small" onClick=${() => select(new Set())}>Clear selection<//>`}</div>
        ${document_.total ? html`<${ImageGrid} path=${path} rows=${rows} isCropped=${isCropped} selected=${selected} select=${select} opened=${opened} onOpen=${async (next) => (await (editor.current?.save() ?? true)) && open(next)} />`
          : html`<div class="card empty"><p>No image is left by these filters.</p><${Button} onClick=${() => setFilter(NOTHING)}>Show all<//></div>`}
      </section>
      ${!narrow && panel}
    </div>
    ${narrow && panel && html`<${Dialog} title=${opened.name} onClose=${() => open(null)}>${panel}<//>`}
    ${dialog in EDITS && html`<${EditDialog} kind=${dialog} whom=${whom} version=${document_.version} edit=${edit} onClose=${() => setDialog(null)}
      onDone=${(changed) => { setDialog(null); action.act(async () => { await rows.reload(); return `${whole(changed)} ${changed === 1 ? "caption" : "captions"} changed`; }); }} />`}
    ${(dialog === "copy" || dialog === "clean") && html`<${CopyDialog} kind=${dialog} path=${path} name=${document_.name} onClose=${() => setDialog(null)} onStarted=${() => { tasks[dialog].load(); setDialog(null); }} />`}
    ${drawn && html`<${drawn.MaskDialog} path=${path} image=${drawn.image} onClose=${() => setDrawn(null)} onSaved=${rows.reload} />`}
    ${dialog === "caption" && html`<${AutoCaptionDialog} path=${path} onClose=${() => setDialog(null)} onStarted=${() => { tasks.caption.load(); setDialog(null); }} />`}`;
}

// The tasks of this dataset. Those that ended before the page was opened are not shown; `reload` is called at each end.
function useTasks(path, reload) {
  const opened = useRef(Date.now() / 1000);
  const found = {};
  for (const kind of ["check", "copy", "clean", "caption"]) {
    const [task, load] = useTask({ kind, about: { dataset: path } });
    const isRunning = task?.status === "running";
    const isNew = Boolean(task) && (isRunning || (task.ended ?? task.started) > opened.current);
    found[kind] = { task, load, isRunning, isNew, seen: isNew ? task : null };
    const before = useRef(isRunning);
    useEffect(() => {
      if (before.current && !isRunning) reload();
      before.current = isRunning;
    }, [isRunning]);
  }
  return found;
}

function Resolution({ value, now, onChange }) {
  const [text, set] = useState(value);
  useEffect(() => set(value), [value]);
  const take = () => onChange(/^\d+$/.test(text.trim()) && Number(text) >= 16 && Number(text) <= 8192 ? String(Number(text)) : "");
  return html`<label class="row">Resolution <input size="5" inputmode="numeric" placeholder=${now} value=${text} onInput=${(event) => set(event.target.value)} onBlur=${take} onKeyDown=${(event) => event.key === "Enter" && take()} /></label>`;
}

// `seen` is the dataset for the model and the resolution that are chosen now.
function CheckResult({ check, seen, onLook }) {
  const { family, resolution } = check.about;
  const isOther = family && resolution && (family !== seen.family || resolution !== seen.resolution);
  const without = seen.count - seen.masks;
  return html`<div class=${`card check ${check.passed ? "good" : "bad"}`}>
    <p><b>Checked: score ${score(check.score)}</b> (minimum ${score(check.gate)}), ${check.passed ? "passes" : "refused"}${family ? `, for ${family}` : ""}${resolution ? ` at ${resolution} px` : ""}
      <${Button} kind="small" onClick=${onLook}>Images with findings<//></p>
    ${isOther && html`<p>You have chosen ${seen.family} at ${seen.resolution} px since: check again for these.</p>`}
    ${seen.masks > 0 && without > 0 && html`<p class="about">With masks: ${fewMasks(seen.masks, without)}</p>`}
    ${check.refusals.length > 0 && html`<${Problems} problems=${check.refusals} />`}</div>`;
}
