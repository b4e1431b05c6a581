// Dialogs of a dataset: edits of many captions with what they would change, copies, captions by a model.

import { post } from "./api.js";
import { PathField } from "./settings_form.js";
import { Button, Dialog, Field, Problems, Result, html, typedNumber, useAction, useEffect, useRef, useState, whole } from "./ui.js";

const PREVIEW_AFTER_MS = 300;

// What can be done to many captions: fields, and the edit that they make, null while they are empty.
export const EDITS = {
  replace: {
    title: "Find and replace",
    fields: { find: "Find", put: "Replace with" },
    switches: { whole_tag: "Whole tags only", match_case: "Match case" },
    make: ({ find, put, whole_tag, match_case }) => find && { do: "replace", find, put, whole_tag, match_case },
  },
  add_tag: {
    title: "Add a tag",
    fields: { tag: "Tag" },
    switches: { start: "In front" },
    make: ({ tag, start }) => tag.trim() && { do: "add_tag", tag, at: start ? "start" : "end" },
  },
  remove_tag: { title: "Remove a tag", fields: { tag: "Tag" }, switches: {}, make: ({ tag }) => tag.trim() && { do: "remove_tag", tag } },
  trigger_word: {
    title: "Trigger word",
    about: "The word is put in front of captions that do not contain it.",
    fields: { word: "Trigger word" },
    switches: {},
    make: ({ word }) => word.trim() && { do: "trigger_word", word },
  },
  sort_tags: {
    title: "Sort tags",
    about: "By the alphabet. The first tags can stay in front, such as a trigger word.",
    fields: { keep: "Keep so many in front" },
    switches: {},
    make: ({ keep }) => {
      const number = keep.trim() ? typedNumber(keep) : 0;
      return Number.isInteger(number) && number >= 0 && number <= 1000 && { do: "sort_tags", keep: number };
    },
  },
  dedupe_tags: { title: "Remove repeated tags", about: "The first of equal tags stays.", fields: {}, switches: {}, make: () => ({ do: "dedupe_tags" }) },
};

export function EditDialog({ kind, whom, version, edit, onClose, onDone }) {
  const { title, about, fields, switches, make } = EDITS[kind];
  const [values, set] = useState(Object.fromEntries([...Object.keys(fields).map((each) => [each, ""]), ...Object.keys(switches).map((each) => [each, each === "match_case"])]));
  const [preview, setPreview] = useState({ found: null, problems: [] });
  const action = useAction();
  const newest = useRef(0);
  const document = make(values) || null;
  const key = JSON.stringify(document);
  useEffect(() => {
    const number = ++newest.current;
    if (!document) {
      setPreview({ found: null, problems: [] });
      return undefined;
    }
    const timer = setTimeout(async () => {
      try {
        const found = await edit(document, { dry_run: true });
        if (number === newest.current) setPreview({ found, problems: [] });
      } catch (error) {
        if (!error.problems) throw error;
        if (number === newest.current) setPreview({ found: null, problems: error.problems });
      }
    }, PREVIEW_AFTER_MS);
    return () => clearTimeout(timer);
  }, [key, version]);
  const apply = (event) => {
    event.preventDefault();
    if (document && !action.busy) action.act(async () => onDone((await edit(document)).changed));
  };
  const { found } = preview;
  return html`<${Dialog} title=${title} onClose=${onClose} isBusy=${action.busy}><form onSubmit=${apply}>
    <p class="about">${about} Captions of: ${whom}.</p>
    ${Object.entries(fields).map(([name, label]) => html`<${Field} key=${name} label=${label}>${(id) => html`<input id=${id} autocomplete="off" spellcheck=${false} value=${values[name]} onInput=${(event) => set({ ...values, [name]: event.target.value })} />`}<//>`)}
    ${Object.entries(switches).map(([name, label]) => html`<label class="row" key=${name}><input type="checkbox" checked=${values[name]} onChange=${(event) => set({ ...values, [name]: event.target.checked })} /> ${label}</label>`)}
    <div aria-live="polite"><${Problems} problems=${preview.problems} />
      ${found && html`<p><b>${found.count ? `Changes ${whole(found.count)} ${found.count === 1 ? "caption" : "captions"}.` : "Changes no caption."}</b></p>
        ${found.examples.map((each) => html`<div class="example" key=${each.name}><span class="note">${each.name}</span><del>${each.before || "(empty)"}</del><ins>${each.after || "(empty)"}</ins></div>`)}`}</div>
    <div class="row actions"><button class="button main" disabled=${!found?.count || action.busy}>${action.busy ? "Changing …" : "Change"}</button><${Button} disabled=${action.busy} onClick=${onClose}>Cancel<//></div>
    <${Result} action=${action} /></form><//>`;
}

export function CopyDialog({ kind, path, name, onClose, onStarted }) {
  const isClean = kind === "clean";
  const first = name.replace(/\.\w+$/, "").replace(/[^\p{L}\p{N}_ .-]/gu, "-").replace(/^[^\p{L}\p{N}_]+/u, "");
  const [text, set] = useState(`${first || "images"}${isClean ? "-clean" : "-copy"}`);
  const action = useAction();
  const start = (event) => {
    event.preventDefault();
    action.act(async () => {
      await post(`/datasets/${kind}`, { path, name: text.trim() });
      onStarted();
    });
  };
  return html`<${Dialog} title=${isClean ? "Clean copy" : "Edit a copy"} onClose=${onClose}><form onSubmit=${start}>
    <p class="about">${isClean
      ? "Checks every image, and copies what can be trained on: broken files and duplicates are left out, borders are cut off, captions become UTF-8. The images here stay as they are."
      : "Images, captions, masks and settings are copied as plain files. The images here stay as they are."}</p>
    <${Field} label="Name" about="Letters, digits, spaces, points and hyphens">${(id) => html`<input id=${id} value=${text} spellcheck=${false} onInput=${(event) => set(event.target.value)} />`}<//>
    <div class="row actions"><button class="button main" disabled=${!text.trim() || action.busy}>${isClean ? "Make the clean copy" : "Copy"}</button><${Button} onClick=${onClose}>Cancel<//></div>
    <${Result} action=${action} /></form><//>`;
}

export function AutoCaptionDialog({ path, onClose, onStarted }) {
  const [model, setModel] = useState("");
  const [threshold, setThreshold] = useState("0.35");
  const action = useAction();
  const number = typedNumber(threshold);
  const isWrong = !(number > 0 && number < 1);
  const start = (event) => {
    event.preventDefault();
    action.act(async () => {
      await post("/datasets/caption", { path, model: model.trim(), threshold: number });
      onStarted();
    });
  };
  return html`<${Dialog} title="Auto-caption" onClose=${onClose}><form onSubmit=${start}>
    <p class="about">A model on the server's computer describes the images that have no caption. No caption is overwritten.</p>
    <${PathField} label="Model" about="A local folder: a captioner such as BLIP or GIT, or a tagger with many labels" value=${model} kinds=${["folder", "model folder"]} onChange=${setModel} />
    <${Field} label="Least probability of a tag" about="For taggers, between 0 and 1" problems=${isWrong ? [{ message: "It lies between 0 and 1.", fix: "" }] : []}>${(id) => html`<input id=${id} inputmode="decimal" value=${threshold} onInput=${(event) => setThreshold(event.target.value)} />`}<//>
    <div class="row actions"><button class="button main" disabled=${!model.trim() || isWrong || action.busy}>Start</button><${Button} onClick=${onClose}>Cancel<//></div>
    <${Result} action=${action} /></form><//>`;
}
