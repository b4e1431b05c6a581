// Fields for settings, made from the schema that the server sends; and a picker of paths.

import { get } from "./api.js";
import { Button, Field, Problems, html, typedNumber, useAction, useEffect, useRef, useState, whole } from "./ui.js";

// What a field's text means. {problem} where it is no value of the setting.
export function parsed(setting, text) {
  const plain = text.trim();
  if (plain === "" && setting.can_be_empty) return { value: null };
  if (setting.types.includes("boolean") && (plain === "true" || plain === "false")) return { value: plain === "true" };
  const isNumber = setting.types.some((each) => each === "number" || each === "integer");
  const one = (part) => {
    const number = typedNumber(part);
    return isNumber && !Number.isNaN(number) ? number : part.trim();
  };
  // In lists a comma separates, so their numbers have a point.
  if (setting.is_list || (setting.types.includes("array") && plain.includes(","))) {
    return { value: plain === "" ? [] : plain.split(/[,;\n]/).map((part) => one(part)).filter((part) => part !== "") };
  }
  if (setting.types.length === 1 && isNumber && typeof one(plain) !== "number") return { problem: `${setting.name}: ${plain || "nothing"} is no number.` };
  return { value: one(plain) };
}

export function textOf(value) {
  if (value === null || value === undefined) return "";
  if (Array.isArray(value)) return value.map(textOf).join(", ");
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

export function limitsOf(setting) {
  const found = [];
  if (setting.minimum !== undefined) found.push(`at least ${setting.minimum}`);
  if (setting.above !== undefined) found.push(`above ${setting.above}`);
  if (setting.maximum !== undefined) found.push(`at most ${setting.maximum}`);
  if (setting.below !== undefined) found.push(`below ${setting.below}`);
  return found.join(", ");
}

// `now`: {value, origin, evidence} of the plan. `onChange(value)`; undefined takes the change back.
export function SettingField({ setting, now, chosen, isChosen, problems, onChange }) {
  const [text, setText] = useState(isChosen ? textOf(chosen) : "");
  const value = isChosen ? chosen : now?.value;
  // What is no value is chosen as it was typed: the server refuses it, so that no earlier one is used.
  const own = parsed(setting, text);
  const meant = (found, given) => (found.problem ? given : found.value);
  const isTyped = JSON.stringify(meant(own, text)) === JSON.stringify(chosen); // else it came from elsewhere since, as from an import
  const wrong = isChosen && isTyped ? own.problem : undefined;
  const needs = setting.needs && `acts with ${setting.needs}`;
  const about = [setting.description, needs, limitsOf(setting)].filter(Boolean).join("; ").replaceAll("`", "");
  const all = wrong ? [{ message: wrong, fix: "" }] : problems;
  const type = (given) => {
    setText(given);
    onChange(meant(parsed(setting, given), given));
  };
  const back = () => {
    setText("");
    onChange(undefined);
  };
  const isSwitch = setting.types.length === 1 && setting.types[0] === "boolean" && !setting.choices;
  const words = [...(setting.types.includes("boolean") ? [true, false] : []), ...(setting.choices ?? [])];
  // Beside words such as auto some take any number: they are typed, with the words as suggestions.
  const isTypedToo = setting.types.some((each) => each === "number" || each === "integer") && words.some((each) => typeof each !== "number");
  return html`<${Field} label=${setting.name} about=${about} problems=${all}>
    ${(id, describedBy) => html`
      ${
        isSwitch
          ? html`<select id=${id} aria-describedby=${describedBy} value=${String(Boolean(value))} onChange=${(event) => onChange(event.target.value === "true")}>
              <option value="true">true</option><option value="false">false</option></select>`
          : setting.choices && !setting.is_list && !isTypedToo
            ? html`<select id=${id} aria-describedby=${describedBy} value=${textOf(value)} onChange=${(event) => onChange(event.target.value === "" ? null : (words.find((each) => String(each) === event.target.value) ?? event.target.value))}>
                ${setting.can_be_empty && html`<option value="">(empty)</option>`}
                ${words.map((each) => html`<option value=${String(each)}>${String(each)}</option>`)}
                ${value !== null && value !== undefined && !words.map(String).includes(textOf(value)) && html`<option value=${textOf(value)}>${textOf(value)}</option>`}
              </select>`
            : html`${words.length > 0 && html`<datalist id=${`${id}-words`}>${words.map((each) => html`<option value=${String(each)} />`)}</datalist>`}
              <input id=${id} list=${words.length > 0 ? `${id}-words` : undefined} aria-describedby=${describedBy} inputmode=${setting.types.includes("string") ? undefined : "decimal"} spellcheck=${false}
                placeholder=${textOf(now?.value) || "(empty)"} value=${!isChosen ? "" : isTyped ? text : textOf(chosen)} onInput=${(event) => type(event.target.value)} />`
      }
      <span class=${isChosen ? "origin changed" : "origin"}>
        ${isChosen ? "set here " : now ? `from ${now.origin}` : ""}
        ${isChosen && html`<${Button} kind="small" onClick=${back} aria-label=${`Take back ${setting.name}`}>Take back<//>`}
        ${!isChosen && now?.evidence && ` (${now.evidence})`}
      </span>`}
  <//>`;
}

// Space, underscore and hyphen are the same in a search.
const plain = (text) => text.toLowerCase().replaceAll(/[\s_-]+/g, " ").trim();

// All settings by section, with search. `chosen`: {name: value}; `now`: the plan's settings.
export function SettingsForm({ sections, now, chosen, problems, onChange }) {
  const [text, search] = useState("");
  const [open, setOpen] = useState({});
  const wanted = plain(text);
  const fits = (row) => {
    const known = plain(`${row.name} ${row.description} ${row.aliases.join(" ")}`);
    return wanted.split(" ").every((word) => known.includes(word)) || row.aliases.some((name) => plain(name).includes(wanted));
  };
  const shownSections = sections
    .map((section) => ({ ...section, settings: section.settings.filter((row) => fits(row) && !HIDDEN.has(row.name)) }))
    .filter((section) => section.settings.length);
  return html`
    <${Field} label="Search all settings" about="By name or description, also by the name in another trainer: rank, batch size, network_dim">
      ${(id) => html`<input id=${id} type="search" value=${text} onInput=${(event) => search(event.target.value)} />`}
    <//>
    ${!shownSections.length && html`<p class="lead">No setting has all of these words in its name or description.</p>`}
    ${shownSections.map((section) => {
      const count = section.settings.filter((row) => row.name in chosen).length;
      const isOpen = Boolean(open[section.name]) || wanted !== "";
      return html`<details key=${section.name} open=${isOpen} onToggle=${(event) => wanted === "" && setOpen({ ...open, [section.name]: event.target.open })}>
        <summary>${section.name} <span class="note">${count ? `${whole(count)} changed · ` : ""}${section.description.split("\n")[0].replaceAll("`", "")}</span></summary>
        ${isOpen && html`<div class="settings">${section.settings.map(
          (row) => html`<${SettingField} key=${row.name} setting=${row} now=${now?.[row.name]} chosen=${chosen[row.name]} isChosen=${row.name in chosen}
            problems=${problems.filter((each) => belongsTo(each, row.name))} onChange=${(value) => onChange(row.name, value)} />`,
        )}</div>`}
      </details>`;
    })}`;
}

// They have fields of their own, or are refused here.
const HIDDEN = new Set(["model.path", "data.sources", "run.name", "run.output", "run.on_finish", "run.on_failure"]);

export function belongsTo(problem, name) {
  return problem.message.startsWith(name) && !/^[\w.]/.test(problem.message.slice(name.length));
}

// A path on the server's machine: typed, or chosen from folders that may be read.
export function PathField({ label, about, value, kinds, problems = [], onChange }) {
  const [place, setPlace] = useState(null);
  const box = useRef(null);
  useEffect(() => {
    if (place && document.activeElement === document.body) box.current.focus(); // the entry that had it is gone
  }, [place]);
  const action = useAction();
  const browse = (path) => action.act(async () => setPlace(await get(path ? `/browse?path=${encodeURIComponent(path)}` : "/browse")));
  const choose = (path) => {
    onChange(path);
    setPlace(null);
  };
  return html`<${Field} label=${label} about=${about} problems=${problems}>
    ${(id, describedBy) => html`<div class="row">
        <input id=${id} aria-describedby=${describedBy} value=${value} spellcheck=${false} onInput=${(event) => onChange(event.target.value)} />
        <${Button} busy=${action.busy} aria-expanded=${place !== null} onClick=${() => (place ? setPlace(null) : browse(null))}>Browse<//>
      </div>
      <${Problems} problems=${action.problems} />
      ${place && html`<div class="browse" ref=${box} tabindex="-1"><ul>
        ${place.path !== null && html`<li><button type="button" onClick=${() => browse(place.parent)}>↑ ${place.path}</button></li>`}
        ${place.path !== null && kinds.includes("folder") && html`<li><button type="button" onClick=${() => choose(place.path)}><b>Use this folder</b>${place.images ? `, ${whole(place.images)} images` : ""}</button></li>`}
        ${place.entries
          .filter((entry) => entry.kind.includes("folder") || kinds.includes(entry.kind))
          .map((entry) => html`<li key=${entry.path}><button type="button" disabled=${action.busy} onClick=${() => (entry.kind === "folder" || !kinds.includes(entry.kind) ? browse(entry.path) : choose(entry.path))}>${entry.name}${entry.kind.includes("folder") && !entry.name.endsWith("/") ? "/" : ""}</button></li>`)}
        ${place.left_out > 0 && html`<li class="note">${whole(place.left_out)} more are not shown.</li>`}
      </ul></div>`}`}
  <//>`;
}
