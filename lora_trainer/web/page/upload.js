// Files that come into a dataset: dropped on its page or chosen, sent a few at once, each with its progress and what is wrong.

import { ApiError, post } from "./api.js";
import { Button, Dialog, Field, Problems, Progress, Result, bytes, html, useAction, useEffect, useRef, useState, whole } from "./ui.js";

// Its rules come with it: the other pages do not need them.
document.head.append(Object.assign(document.createElement("link"), { rel: "stylesheet", href: "upload.css" }));

const AT_ONCE = 3;
const MOST_FILES = 20_000;
const MOST_BYTES = 64 * 1024 * 1024;
const MOST_SHOWN = 200;
// What the server reads, so that nothing else is sent to be refused; a test compares the two lists.
const IMAGES = [
  ...[".png", ".apng", ".jpg", ".jpeg", ".jfif", ".jpe", ".pjpeg", ".pjp", ".mpo", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff"],
  ...[".ppm", ".pgm", ".pbm", ".pnm"],
];
const TAKEN = [...IMAGES, ".txt", ".caption", ".zip"];
const endingOf = (name) => /\.[^.]*$/.exec(name)?.[0].toLowerCase() ?? "";
const isHidden = (name) => name.startsWith(".") || ["__MACOSX", "Thumbs.db", "desktop.ini"].includes(name);
const LATER = [0, 401, 507]; // not the file's fault: the others would fail, too

// All files of all datasets, in the order in which they came: they are sent on while another page is shown.
let files = [];
let count = 0;
const listeners = new Set();
const tell = () => [...listeners].forEach((listener) => listener());
const isOpen = (file) => file.state === "waiting" || file.state === "sending";
window.addEventListener("beforeunload", (event) => files.some(isOpen) && event.preventDefault());

function useFiles(path) {
  const [, again] = useState(0);
  useEffect(() => {
    const listener = () => again((number) => number + 1);
    listeners.add(listener);
    return () => listeners.delete(listener);
  }, []);
  return files.filter((file) => file.path === path);
}

// `found`: {name, size, open}, `open` gives the bytes. A name has at most one folder in front.
export function addFiles(path, found) {
  let left = MOST_FILES;
  for (const { name, size, open } of found) {
    const file = { id: (count += 1), path, name, size, open, state: "waiting", sent: 0, problems: [], request: null };
    left -= 1;
    if (left < 0) fail(file, `More than ${whole(MOST_FILES)} files at once.`, "Add the others after these.");
    else if (!TAKEN.includes(endingOf(name))) fail(file, "Neither an image nor a caption.", /\.hei[cf]$/i.test(name) ? "Convert it to JPEG." : `Taken: ${TAKEN.join(" ")}`);
    else if (size > MOST_BYTES && endingOf(name) !== ".zip") fail(file, "Larger than 64 MiB.", "Scale it down, or save it as JPEG or WebP.");
    files.push(file);
    if (left < 0) break;
  }
  tell();
  next();
}

function fail(file, message, fix = "") {
  Object.assign(file, { state: "failed", request: null, problems: [{ message, fix }] });
}

function next() {
  while (files.filter((file) => file.state === "sending").length < AT_ONCE) {
    const file = files.find((each) => each.state === "waiting");
    if (!file) break;
    file.state = "sending";
    send(file).catch((error) => fail(file, error.message || "It cannot be read.", "Choose it again.")).finally(() => {
      tell();
      next();
    });
  }
  tell();
}

async function send(file) {
  Object.assign(file, { sent: 0, problems: [] });
  if (endingOf(file.name) === ".zip") {
    const { membersOf } = await import("./unzip.js");
    const members = (await membersOf(await file.open())).filter(({ name }) => !name.split("/").some(isHidden));
    if (file.state !== "sending") return; // cancelled
    file.state = "done";
    file.note = `${whole(members.length)} files in it`;
    addFiles(file.path, members.filter(({ name }) => endingOf(name) !== ".zip").map((each) => ({ ...each, name: lastFolder(each.name) })));
    return;
  }
  const body = await file.open();
  if (file.state !== "sending") return; // cancelled
  const { status, document } = await put(file, body);
  if (file.state !== "sending") return;
  if (status === 201 || status === 200) {
    Object.assign(file, { state: "done", request: null, isNew: document.is_new, note: document.renamed_from ? `named ${document.name}` : document.is_new ? "" : "was there" });
    return;
  }
  if (status === 401) window.dispatchEvent(new Event("token-needed"));
  const problems = document?.problems ?? [{ message: status ? `The server answered ${status}.` : "The server does not answer.", fix: "Try again when it runs." }];
  Object.assign(file, { state: "failed", request: null, problems, isTaken: status === 409 });
  if (LATER.includes(status)) for (const each of files) if (each.state === "waiting") Object.assign(each, { state: "failed", problems });
}

function put(file, body) {
  return new Promise((resolve) => {
    const request = new XMLHttpRequest();
    const end = () => resolve({ status: request.status, document: request.response });
    request.open("PUT", `/api/datasets/file?${new URLSearchParams({ path: file.path, name: file.name })}`);
    request.responseType = "json";
    request.setRequestHeader("content-type", "application/octet-stream");
    request.upload.onprogress = (event) => {
      file.sent = event.loaded;
      tell();
    };
    Object.assign(request, { onload: end, onerror: end, onabort: end });
    file.request = request;
    request.send(body);
  });
}

function cancel(...chosen) {
  for (const file of chosen) {
    file.state = "cancelled";
    file.request?.abort();
  }
  files = files.filter((each) => each.state !== "cancelled");
  next();
}

function again(...chosen) {
  for (const file of chosen) Object.assign(file, { state: "waiting", problems: [], isTaken: false });
  next();
}

// cat.png, cat-2.png, cat-3.png: phones call every photo image.jpg.
function otherName(file) {
  const [, stem, number, ending] = /^(.*?)(?:-(\d+))?(\.[^.]*)$/.exec(file.name);
  return `${stem}-${Number(number ?? 1) + 1}${ending}`;
}

// What is dropped

const lastFolder = (path) => path.split("/").filter(Boolean).slice(-2).join("/");

// The files of a drop, with those below its folders; must be called while the event lasts.
function dropped(transfer) {
  const items = [...transfer.items].filter((item) => item.kind === "file");
  const entries = items.map((item) => [item.webkitGetAsEntry?.(), item.getAsFile()]);
  return (async () => {
    const found = [];
    for (const [entry, file] of entries) {
      if (entry?.isDirectory) await walk(entry, entry.name, found);
      else if (file) found.push(asFound(file, file.name));
    }
    return found;
  })();
}

const asFound = (file, name) => ({ name, size: file.size, open: async () => file });

async function walk(folder, path, found) {
  const reader = folder.createReader();
  for (;;) {
    const entries = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!entries.length) return;
    for (const entry of entries.filter((each) => !isHidden(each.name))) {
      if (found.length > MOST_FILES) return;
      if (entry.isDirectory) await walk(entry, `${path}/${entry.name}`, found);
      else found.push(asFound(await new Promise((resolve, reject) => entry.file(resolve, reject)), `${path}/${entry.name}`));
    }
  }
}

// The whole page takes what is dropped; `onFiles` gets it with whole paths.
function DropZone({ words, onFiles }) {
  const [isOver, set] = useState(false);
  const newest = useRef(null);
  newest.current = onFiles;
  useEffect(() => {
    let depth = 0;
    const has = (event) => event.dataTransfer?.types.includes("Files");
    const step = (by) => (event) => {
      if (!has(event)) return;
      event.preventDefault();
      depth = Math.max(0, depth + by);
      set(depth > 0);
    };
    const drop = (event) => {
      if (!has(event)) return;
      event.preventDefault();
      depth = 0;
      set(false);
      dropped(event.dataTransfer).then((found) => found.length && newest.current(found));
    };
    const on = { dragenter: step(1), dragleave: step(-1), dragover: step(0), drop };
    for (const [name, listener] of Object.entries(on)) window.addEventListener(name, listener);
    return () => {
      for (const [name, listener] of Object.entries(on)) window.removeEventListener(name, listener);
    };
  }, []);
  return isOver ? html`<div class="drop-zone" aria-hidden="true"><p>${words}</p></div>` : null;
}

const inDataset = (found) => found.map((each) => ({ ...each, name: lastFolder(each.name) }));

// A button that chooses files; `onFiles` gets them.
function Chooser({ words, kind = "", onFiles }) {
  const input = useRef(null);
  const take = (event) => {
    onFiles([...event.target.files].map((file) => asFound(file, file.name)));
    event.target.value = "";
  };
  return html`<${Button} kind=${kind} onClick=${() => input.current.click()}>${words}<//>
    <input ref=${input} class="chooser" type="file" multiple accept=${[...TAKEN, "image/jpeg", "image/png", "image/webp"].join(",")} aria-label=${words} tabindex="-1" onChange=${take} />`;
}

export function AddFiles({ path, kind }) {
  return html`<${Chooser} words="Add files" kind=${kind} onFiles=${(found) => addFiles(path, found)} />`;
}

// Everything that is sent to the dataset at `path`, and the drop zone over its page. `onDone` is called once all has ended.
export function Uploads({ path, onDone }) {
  const own = useFiles(path);
  const open = own.filter(isOpen);
  const isBusy = open.length > 0;
  const before = useRef(isBusy);
  useEffect(() => {
    if (before.current && !isBusy && own.some((file) => file.isNew)) {
      post("/datasets/read", { path }).catch(() => {}).then(() => onDone?.());
    }
    before.current = isBusy;
  }, [isBusy]);
  const zone = html`<${DropZone} words="Drop images and captions to add them" onFiles=${(found) => addFiles(path, inDataset(found))} />`;
  if (!own.length) return zone;
  const failed = own.filter((file) => file.state === "failed");
  const done = own.filter((file) => file.state === "done");
  const total = own.reduce((sum, file) => sum + file.size, 0);
  const sent = own.reduce((sum, file) => sum + (file.state === "sending" ? Math.min(file.sent, file.size) : file.state === "waiting" ? 0 : file.size), 0);
  const shown = [...own.filter((file) => file.state === "sending"), ...failed, ...own.filter((file) => file.state === "waiting"), ...done].slice(0, MOST_SHOWN);
  const clear = () => {
    files = files.filter((file) => file.path !== path || isOpen(file));
    tell();
  };
  return html`${zone}<section class="card uploads" aria-label="Added files">
    <div class="row"><b role="status">${isBusy ? `Adding files: ${whole(done.length)} of ${whole(own.length)}` : `${whole(done.length)} of ${whole(own.length)} files added`}${failed.length ? `, ${whole(failed.length)} not` : ""}</b>
      <span class="right row">
        ${failed.length > 1 && html`<${Button} kind="small" onClick=${() => again(...failed)}>Try all again<//>`}
        ${isBusy && html`<${Button} kind="small" onClick=${() => cancel(...open)}>Cancel<//>`}
        ${!isBusy && html`<${Button} kind="small" onClick=${clear}>Close<//>`}</span></div>
    ${isBusy && html`<${Progress} step=${sent} total=${total} label="Files sent" />`}
    <ul tabindex="0" aria-label="Files">${shown.map((file) => html`<${Row} key=${file.id} file=${file} />`)}</ul>
    ${own.length > shown.length && html`<p class="note">and ${whole(own.length - shown.length)} more</p>`}</section>`;
}

function Row({ file }) {
  const { state } = file;
  const isAll = file.size > 0 && file.sent >= file.size;
  return html`<li><span class="name">${file.name}</span> <span class="note">${bytes(file.size)}</span>
    <span class="side">${state === "sending" ? html`<span class="note">${isAll ? "checking …" : ""}</span><${Progress} step=${file.sent} total=${file.size} label=${`${file.name} sent`} />`
      : html`<span class=${`status ${state === "done" ? "good" : state === "failed" ? "bad" : ""}`}>${state === "done" ? file.note || "added" : state === "failed" ? "not added" : "waiting"}</span>`}
      ${state === "failed" && html`<${Button} kind="small" aria-label=${`Try ${file.name} again`} onClick=${() => again(file)}>Try again<//>
        ${file.isTaken && html`<${Button} kind="small" aria-label=${`Add ${file.name} as ${otherName(file)}`} onClick=${() => again(Object.assign(file, { name: otherName(file) }))}>Keep both<//>`}`}
      ${state !== "done" && html`<${Button} kind="small" aria-label=${`${state === "failed" ? "Remove" : "Cancel"} ${file.name}`} onClick=${() => cancel(file)}>×<//>`}</span>
    <${Problems} problems=${file.problems} /></li>`;
}

// A new dataset: by its name, or by files dropped on the list. `onMade` gets its path; its files are on the way.
export function NewDataset({ onMade }) {
  const [found, set] = useState(null);
  const [name, setName] = useState("");
  const action = useAction();
  const ask = (files_) => {
    // A dropped folder becomes the dataset: its own name is no folder inside of it.
    const tops = new Set(files_.map((each) => (each.name.includes("/") ? each.name.split("/")[0] : "")));
    const top = tops.size === 1 ? [...tops][0] : "";
    setName(top.replace(/[^\p{L}\p{N}_ .-]/gu, "-").replace(/^[^\p{L}\p{N}_]+/u, ""));
    action.clear();
    set(top ? files_.map((each) => ({ ...each, name: each.name.slice(top.length + 1) })) : files_);
  };
  const make = (event) => {
    event.preventDefault();
    action.act(async () => {
      const { path } = await post("/datasets/new", { name: name.trim() });
      if (!path) throw new ApiError(0, [{ message: "The dataset was not made.", fix: "Try again." }]);
      addFiles(path, inDataset(found));
      set(null);
      onMade(path);
    });
  };
  return html`<${Button} kind="main" onClick=${() => ask([])}>New dataset<//>
    <${DropZone} words="Drop images and captions to make a dataset of them" onFiles=${ask} />
    ${found && html`<${Dialog} title="New dataset" onClose=${() => set(null)}><form onSubmit=${make}>
      <p class="about">${found.length ? `Of ${whole(found.length)} files. ` : "Empty at first. "}It is a folder on the server's computer; you add images and captions on its page.</p>
      <${Field} label="Name" about="Letters, digits, spaces, points and hyphens">${(id) => html`<input id=${id} value=${name} spellcheck=${false} onInput=${(event) => setName(event.target.value)} />`}<//>
      <div class="row"><button class="button main" disabled=${!name.trim() || action.busy}>Make it</button><${Button} onClick=${() => set(null)}>Cancel<//></div>
      <${Result} action=${action} /></form><//>`}`;
}
