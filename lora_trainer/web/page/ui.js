// What all pages are made of: elements, numbers, fields, problems.

import { Fragment, h, render } from "./vendor/preact/preact.js";
import { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/preact/hooks.js";
import htm from "./vendor/htm/htm.js";
import { ApiError, get, listen } from "./api.js";

export const html = htm.bind(h);
export { Fragment, h, render, useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState };

// Numbers

export function shown(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e6)) {
    return new Intl.NumberFormat(undefined, { notation: "scientific", maximumSignificantDigits: digits }).format(value);
  }
  return new Intl.NumberFormat(undefined, { maximumSignificantDigits: Math.max(digits, 3) }).format(value);
}

export const whole = (value) =>
  value === null || value === undefined ? "–" : new Intl.NumberFormat(undefined, { maximumFractionDigits: 0 }).format(value);

export const score = (value) =>
  value === null || value === undefined
    ? "–"
    : new Intl.NumberFormat(undefined, { minimumFractionDigits: 2, maximumFractionDigits: 2 }).format(value);

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${new Intl.NumberFormat(undefined, { maximumSignificantDigits: 3 }).format(value)} ${units[at]}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.001) return "under 1 ms";
  if (seconds < 1) return `${shown(1000 * seconds, 3)} ms`;
  const rounded = Math.round(seconds);
  if (rounded < 60) return `${seconds < 10 ? shown(seconds, 2) : rounded} s`;
  const [hours, minutes] = [Math.floor(rounded / 3600), Math.floor((rounded % 3600) / 60)];
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${rounded % 60} s`;
}

export const moment = (seconds) =>
  seconds ? new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" }).format(seconds * 1000) : "–";

// A number as people type it: 0.5, 0,5, 1e-4. NaN for what is none.
export function typedNumber(text) {
  const plain = text.trim().replace(/\s/g, "").replace(",", ".");
  return /^[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/i.test(plain) ? Number(plain) : NaN;
}

// Loading

// The document at a path, and a function that loads it again. While it loads the earlier one stays.
export function useDocument(path, again = []) {
  const [state, set] = useState({ document: null, problems: [] });
  const newest = useRef(0);
  const load = useCallback(async () => {
    if (path === null) return;
    const number = ++newest.current;
    try {
      const document = await get(path);
      if (number === newest.current) set({ document, problems: [] });
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (number === newest.current) set((before) => ({ ...before, problems: error.problems }));
    }
  }, [path]);
  useEffect(() => {
    load();
    return () => (newest.current += 1);
  }, [load, ...again]);
  return [state.document, load, state.problems];
}

export function useLive(onMessage) {
  const newest = useRef(onMessage);
  newest.current = onMessage;
  useEffect(() => listen((message) => newest.current(message)), []);
}

// Does something once, and shows what is wrong with it. An error of the page itself is shown too, and is in the console.
export function useAction() {
  const [state, set] = useState({ busy: false, problems: [], message: null });
  const act = async (work) => {
    set({ busy: true, problems: [], message: null });
    try {
      const message = await work();
      set({ busy: false, problems: [], message: typeof message === "string" ? message : null });
      return true;
    } catch (error) {
      const isKnown = error instanceof ApiError;
      const own = { message: `This page made a mistake: ${error.message}.`, fix: "Load it again; the browser's console shows more." };
      set({ busy: false, problems: isKnown ? error.problems : [own], message: null });
      if (!isKnown) console.error(error);
      return false;
    }
  };
  return { ...state, act, clear: () => set((before) => (before.busy ? before : { busy: false, problems: [], message: null })) };
}

// Elements

export function Problems({ problems, title }) {
  if (!problems.length) return null;
  return html`<div class="problems" role="alert">
    ${title && html`<p class="title">${title}</p>`}
    <ul>
      ${problems.map((each) => html`<li>${each.message} <span class="fix">${each.fix}</span></li>`)}
    </ul>
  </div>`;
}

export function Result({ action }) {
  return html`<div aria-live="polite">
    ${action.busy && html`<${Working} />`}
    <${Problems} problems=${action.problems} />
    ${action.message && html`<p class="done">${action.message}</p>`}
  </div>`;
}

// Shown only for what takes long, such as an edit of 100,000 captions.
const LONG_MS = 1000;

function Working() {
  const [isLong, set] = useState(false);
  useEffect(() => {
    const timer = setTimeout(() => set(true), LONG_MS);
    return () => clearTimeout(timer);
  }, []);
  return isLong ? html`<p class="note">The server works on it …</p>` : null;
}

export function Button({ kind = "", busy = false, children, ...more }) {
  return html`<button type="button" class=${`button ${kind}`} ...${more} disabled=${busy || more.disabled}>${children}</button>`;
}

// Copies a text. Without TLS browsers offer the clipboard on this computer alone: elsewhere by a selection.
export function Copy({ text, label = "Copy" }) {
  const [isDone, set] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    set(true);
    setTimeout(() => set(false), 2000);
  };
  return html`<${Button} kind="small copy" onClick=${copy}><span aria-live="polite">${isDone ? "Copied" : label}</span><//>`;
}

const TONES = {
  running: "active", starting: "active", waiting: "", done: "good", finished: "good", passed: "good", unresolved: "warn", completed: "good",
  failed: "bad", refused: "bad", missing: "bad", crashed: "bad", error: "bad", stopped: "warn", cancelled: "warn", paused: "warn",
};

// `words` are shown in place of the status.
export function Status({ status, isLive, words }) {
  const gone = status === "running" && isLive === false;
  return html`<span class=${`status ${gone ? "warn" : (TONES[status] ?? "")}`}>${gone ? "interrupted" : (words ?? status)}</span>`;
}

// How much of something is used; in another color where little is left of what is scarce.
export function Bar({ label, share, words, isScarce = false }) {
  const used = Math.min(1, Math.max(0, share || 0));
  const tone = !isScarce || used < 0.85 ? "" : used < 0.95 ? "warn" : "bad";
  return html`<div class="used"><div class=${`gauge-bar ${tone}`} role="meter" aria-label=${label} aria-valuemin="0" aria-valuemax="1" aria-valuenow=${used.toFixed(3)} aria-valuetext=${words}>
    <span style=${{ width: `${100 * used}%` }}></span></div><span class="note">${words}</span></div>`;
}

export function Progress({ step, total, label }) {
  const share = total ? Math.min(1, step / total) : 0;
  return html`<progress class="progress" max="1" value=${share} aria-label=${label ?? "progress"}></progress>`;
}

export function ScoreBox({ name, value, minimum, passed }) {
  const tone = passed === undefined || passed === null ? "" : passed ? "good" : "bad";
  return html`<div class=${`score ${tone}`}>
    <span class="name">${name}</span><span class="value">${score(value)}</span>
    ${minimum !== undefined && minimum !== null && html`<span class="note">minimum ${score(minimum)}</span>`}
  </div>`;
}

let fields = 0;
export function useId() {
  return useMemo(() => `field-${(fields += 1)}`, []);
}

export function Field({ label, about, problems = [], children }) {
  const id = useId();
  const isDescribed = Boolean(problems.length || about);
  useLayoutEffect(() => {
    // Here, so that no caller can forget it.
    const input = document.getElementById(id);
    const found = { "aria-describedby": isDescribed ? `${id}-about` : null, "aria-invalid": problems.length ? "true" : null };
    for (const [name, value] of Object.entries(found)) value === null ? input?.removeAttribute(name) : input?.setAttribute(name, value);
  });
  return html`<div class=${problems.length ? "field wrong" : "field"}>
    <label for=${id}>${label}</label>
    ${children(id, isDescribed ? `${id}-about` : undefined)}
    <div id=${`${id}-about`}>
      ${about && html`<p class="about">${about}</p>`}
      <${Problems} problems=${problems} />
    </div>
  </div>`;
}

// While it is busy the Escape key does not close it.
export function Dialog({ title, onClose, isBusy = false, children }) {
  const place = useRef(null);
  useEffect(() => {
    const opener = document.activeElement;
    place.current.showModal();
    // Once the dialog is gone: before, nothing else can have the focus.
    return () => setTimeout(() => document.activeElement === document.body && opener?.focus());
  }, []);
  return html`<dialog ref=${place} aria-label=${title} onClose=${onClose} onCancel=${(event) => isBusy && event.preventDefault()}><h2>${title}</h2>${children}</dialog>`;
}

const READERS = { kohya: "for ComfyUI, Forge, A1111", diffusers: "for diffusers" };

export function FileList({ files }) {
  return html`<ul class="runs">${files.map((file) => html`<li class="row"><a href=${file.url} download>${file.name}</a><span class="note">${[READERS[file.kind], bytes(file.size)].filter(Boolean).join(", ")}</span></li>`)}</ul>`;
}
