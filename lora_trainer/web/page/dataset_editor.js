// The caption of one image: as text and as tags, saved when it is left. What somebody else wrote meanwhile is never lost.

import { ApiError, post } from "./api.js";
import { Framed } from "./dataset_grid.js";
import { imageUrl } from "./dataset_rows.js";
import { Button, Problems, html, useEffect, useId, useRef, useState, whole } from "./ui.js";

const LARGE = 768;
const ORIGINS = { text: "caption file", table: "table", folder: "name of the folder", shard: "shard", none: "no caption" };

export const tagsOf = (text) => [...new Set(text.split(/[,\n]/).map((each) => each.trim()).filter(Boolean))];

// `handle.current.save()` writes what is typed; false where it could not be written.
export function Editor({ handle, path, rows, opened, open, isEditable, isCropped, onCopy, onMask }) {
  const at = rows.rowAt(opened.index);
  const last = useRef(null);
  // A filter may have lost the image by its new caption: it stays until the next one is opened.
  if (at?.name === opened.name) last.current = at;
  const row = last.current?.name === opened.name ? last.current : at;
  // The mask is loaded again only with a new row: one from before it was removed would ask for what is gone.
  const fresh = useRef({});
  if (fresh.current.at !== at) fresh.current = { at, version: rows.document.version };
  const [text, setText] = useState(row?.caption ?? "");
  const [base, setBase] = useState(row?.caption ?? "");
  const [state, setState] = useState({ words: "", problems: [], theirs: null });
  const area = useRef(null);
  const id = useId();
  useEffect(() => {
    const caption = rows.rowAt(opened.index)?.caption ?? row?.caption ?? "";
    setText(caption);
    setBase(caption);
    setState({ words: "", problems: [], theirs: null });
    rows.need(Math.max(0, opened.index - 1), opened.index + 2);
    if (opened.isByKey) area.current?.focus({ preventScroll: true });
  }, [opened.name]);
  useEffect(() => {
    // Changed elsewhere: taken where nothing is typed.
    if (at?.name === opened.name && at.caption !== base && text === base) {
      setText(at.caption);
      setBase(at.caption);
      setState((before) => (before.words === "Saved" ? { ...before, words: "" } : before));
    }
  }, [at?.caption, at?.name]);
  const stored = useRef(base); // as of the last save, whatever was drawn since
  stored.current = state.words === "Saving …" ? stored.current : base;
  const waiting = useRef(Promise.resolve(true));
  const writeNow = async (caption, before) => {
    if (caption === before) return true;
    setState({ words: "Saving …", problems: [], theirs: null });
    try {
      await post("/datasets/captions", { path, changes: [{ name: opened.name, caption, before }] });
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      await rows.reload();
      setState({ words: "", problems: error.problems, theirs: error.status === 409 ? true : null });
      return false;
    }
    stored.current = caption;
    setBase(caption);
    setState({ words: "Saved", problems: [], theirs: null });
    if (last.current?.name === opened.name) last.current = { ...last.current, caption };
    await rows.reload();
    return true;
  };
  // One after the other: a click on a button leaves the field, and saves too.
  const write = (caption, before = null) => (waiting.current = waiting.current.then(() => writeNow(caption, before ?? stored.current)));
  const save = () => (isEditable ? write(text) : true);
  handle.current = { save };
  const newest = useRef(null);
  newest.current = { save, isTyped: isEditable && text !== base };
  useEffect(() => {
    const stay = (event) => newest.current.isTyped && event.preventDefault();
    window.addEventListener("beforeunload", stay);
    return () => {
      window.removeEventListener("beforeunload", stay);
      newest.current.save(); // also when the browser goes back in its history
      handle.current = null;
    };
  }, []);
  const change = (caption) => {
    setText(caption);
    write(caption);
  };
  const move = async (by) => {
    const isThere = rows.rowAt(opened.index)?.name === opened.name;
    if (!(await save())) return;
    const index = by < 0 ? opened.index - 1 : isThere ? opened.index + 1 : opened.index;
    if (index < 0 || index >= rows.document.total) return;
    await rows.need(index, index + 1);
    const next = rows.rowAt(index);
    if (next) open({ index, name: next.name });
    requestAnimationFrame(() => area.current?.focus({ preventScroll: true }));
  };
  const close = async () => {
    if (!(await save())) return;
    open(null);
    requestAnimationFrame(() => document.querySelector(`.image-grid [data-index="${opened.index}"]`)?.focus());
  };
  const press = (event) => {
    if (event.key === "Escape") {
      event.preventDefault(); // a dialog around it would close without saving
      close();
    } else if ((event.ctrlKey || event.metaKey) && event.key === "Enter") {
      event.preventDefault();
      save();
    } else if (event.altKey && (event.key === "ArrowDown" || event.key === "ArrowUp")) {
      event.preventDefault();
      move(event.key === "ArrowDown" ? 1 : -1);
    }
  };
  if (!row) return html`<aside class="card editor" aria-label="Caption"><p class="lead">Loading …</p></aside>`;
  const tags = tagsOf(text);
  const theirs = at?.name === opened.name ? at.caption : base;
  const removeTag = (tag) => change(text.split("\n").map((line) => (tagsOf(line).includes(tag) ? line.split(",").map((each) => each.trim()).filter((each) => each && each !== tag).join(", ") : line)).join("\n"));
  const findings = row.findings.filter((each) => !each.is_old);
  return html`<aside class="card editor" aria-label=${`Caption of ${row.name}`} onKeyDown=${press}>
    <div class="row"><${Button} kind="small" title="Alt+Up" disabled=${opened.index === 0} onClick=${() => move(-1)}>Previous<//>
      <${Button} kind="small" title="Alt+Down" disabled=${opened.index + 1 >= rows.document.total} onClick=${() => move(1)}>Next<//>
      <span class="note">${whole(opened.index + 1)} of ${whole(rows.document.total)}</span>
      <${Button} kind="small" onClick=${close}>Close<//></div>
    <div class="editor-image"><a href=${imageUrl(path, row)} target="_blank" rel="noopener" aria-label=${`Open ${row.name} in full`}><${Framed} path=${path} row=${row} width=${LARGE} isCropped=${isCropped} masked=${row.has_mask ? fresh.current.version : null} /></a></div>
    <div class="row"><h2>${row.name}</h2>${isEditable && row.width && html`<${Button} kind="small" onClick=${() => onMask(row)}>${row.has_mask ? "Change the mask" : "Draw a mask"}<//>`}</div>
    <label class="editor-label" for=${id}>Caption</label>
    <textarea id=${id} ref=${area} value=${text} readonly=${!isEditable} spellcheck=${true} onInput=${(event) => setText(event.target.value)} onBlur=${() => state.theirs || save()}></textarea>
    <div class="row" role="status">${isEditable
      ? html`<span class="note">${state.words || (text !== base ? "Not saved yet" : "Saved when you leave it, or by Ctrl+Enter")}</span>`
      : html`<span class="note">These images are only read.</span> <${Button} kind="small" onClick=${onCopy}>Edit a copy<//>`}</div>
    <${Problems} problems=${state.problems} />
    ${state.theirs && html`<div class="row"><${Button} kind="small" onClick=${() => { setText(theirs); setBase(theirs); setState({ words: "", problems: [], theirs: null }); }}>Take theirs<//>
      <${Button} kind="small" onClick=${() => write(text, theirs)}>Save mine over it<//></div>`}
    <${Tags} tags=${tags} known=${rows.document.tags} isEditable=${isEditable} onRemove=${removeTag} onAdd=${(tag) => !tags.includes(tag) && change(text.trim() ? `${text.trim().replace(/,$/, "")}, ${tag}` : tag)} />
    ${findings.length > 0 && html`<ul class="editor-findings">${findings.map((each) => html`<li><span class=${`badge ${each.severity}`}>${each.severity}</span> ${each.message} <span class="note">${each.fix}</span></li>`)}</ul>`}
    <dl class="editor-facts"><div><dt>Size</dt><dd>${row.width ? `${row.width} × ${row.height}` : "–"}</dd></div><div><dt>Bucket</dt><dd>${row.bucket ?? "–"}</dd></div>
      <div><dt>Repeats</dt><dd>${row.repeats}</dd></div><div><dt>Caption from</dt><dd>${row.caption_file ?? ORIGINS[row.origin]}</dd></div>
      ${row.controls > 0 && html`<div><dt>Control images</dt><dd>${row.controls}</dd></div>`}${row.has_mask && html`<div><dt>Mask</dt><dd>what is painted counts</dd></div>`}</dl></aside>`;
}

function Tags({ tags, known, isEditable, onRemove, onAdd }) {
  const [text, set] = useState("");
  const id = useId();
  const add = () => {
    if (text.trim()) onAdd(text.trim());
    set("");
  };
  return html`<div class="chips" role="group" aria-label="Tags">
    ${tags.map((tag) => html`<span class="chip" key=${tag}>${tag}${isEditable && html`<button type="button" aria-label=${`Remove ${tag}`} onClick=${() => onRemove(tag)}>×</button>`}</span>`)}
    ${isEditable && html`<datalist id=${id}>${known.slice(0, 200).map((each) => html`<option value=${each.tag}></option>`)}</datalist>
      <input class="add-tag" aria-label="Add a tag" placeholder="Add a tag" list=${id} value=${text} onInput=${(event) => set(event.target.value)} onKeyDown=${(event) => event.key === "Enter" && !event.ctrlKey && !event.metaKey && (event.preventDefault(), add())} onBlur=${add} />`}</div>`;
}
