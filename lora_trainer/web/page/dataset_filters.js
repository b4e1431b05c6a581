// Which images are shown: by a text, by findings of the check, by bucket, by tag.

import { html, useEffect, useRef, useState, whole } from "./ui.js";

const AT_FIRST = 12;
const SEARCH_AFTER_MS = 250;

// `onTag(edit)` changes the captions of `whom`, where some are selected and may be edited.
export function Filters({ document, filter, change, narrow, whom, onTag }) {
  const chosen = ["finding", "bucket", "tag"].filter((each) => filter[each]);
  const inner = html`
    <${Search} value=${filter.search} onChange=${(search) => change({ search })} />
    ${chosen.length > 0 && html`<p class="chips">${chosen.map((each) => html`<button type="button" class="chip" aria-label=${`Remove the filter ${filter[each]}`} onClick=${() => change({ [each]: "" })}>${each}: ${filter[each].replaceAll(each === "finding" ? "_" : "\0", " ")} ×</button>`)}</p>`}
    <${Findings} findings=${document.findings} check=${document.check} value=${filter.finding} onChange=${(finding) => change({ finding })} />
    <${Choices} title="Buckets" about=${`Sizes that images are cut to, at ${document.resolution} px`} rows=${document.buckets.map((each) => [each.bucket, each.count])} value=${filter.bucket} onChange=${(bucket) => change({ bucket })} />
    <${Choices} title="Tags" about=${whom && onTag ? `+ and − change the ${whom}` : "Parts of captions between commas"} rows=${document.tags.map((each) => [each.tag, each.count])} value=${filter.tag} onChange=${(tag) => change({ tag })}
      buttons=${whom && onTag ? (tag) => html`<button type="button" aria-label=${`Add ${tag} to the ${whom}`} title="Add" onClick=${() => onTag({ do: "add_tag", tag })}>+</button>
        <button type="button" aria-label=${`Remove ${tag} from the ${whom}`} title="Remove" onClick=${() => onTag({ do: "remove_tag", tag })}>−</button>` : null} />`;
  if (!narrow) return html`<aside class="filters" aria-label="Filters">${inner}</aside>`;
  return html`<aside aria-label="Filters"><details class="card filters"><summary>Search and filters${chosen.length || filter.search ? html` <span class="note">some are set</span>` : ""}</summary>${inner}</details></aside>`;
}

function Search({ value, onChange }) {
  const [text, set] = useState(value);
  const sent = useRef(value);
  useEffect(() => {
    if (value !== sent.current) set((sent.current = value));
  }, [value]);
  useEffect(() => {
    if (text === sent.current) return undefined;
    const timer = setTimeout(() => onChange((sent.current = text)), SEARCH_AFTER_MS);
    return () => clearTimeout(timer);
  }, [text]);
  return html`<input type="search" aria-label="Search captions and names" placeholder="Search" value=${text} onInput=${(event) => set(event.target.value)} />`;
}

function Findings({ findings, check, value, onChange }) {
  if (!findings.length) return html`<section><h2>Findings</h2><p class="about">${check ? "None." : "None yet. Check looks at every image and caption."}</p></section>`;
  return html`<section><h2>Findings</h2><ul class="picks">
    ${findings.map((each) => html`<li key=${`${each.code} ${each.severity}`} class="finding-pick">
      ${each.images
        ? html`<button type="button" aria-pressed=${value === each.code} onClick=${() => onChange(value === each.code ? "" : each.code)}><span class=${`badge ${each.severity}`}>${each.severity}</span> <span>${each.code.replaceAll("_", " ")}</span><b>${whole(each.images)}</b></button>`
        : html`<span class="about"><span class=${`badge ${each.severity}`}>${each.severity}</span> ${each.name && `${each.name} `}${each.message}</span>`}
      ${each.fix && html`<p class="about">${each.fixes > 1 && each.name ? `${each.name}: ` : ""}${each.fix}</p>`}</li>`)}</ul></section>`;
}

function Choices({ title, about, rows, value, onChange, buttons }) {
  const [isWhole, showAll] = useState(false);
  if (!rows.length) return null;
  const shown = rows.filter(([name], at) => isWhole || at < AT_FIRST || name === value);
  return html`<section><h2>${title}</h2><p class="about">${about}</p><ul class="picks">
    ${shown.map(([name, count]) => html`<li key=${name}><button type="button" aria-pressed=${value === name} onClick=${() => onChange(value === name ? "" : name)}><span>${name}</span><b>${whole(count)}</b></button>${buttons?.(name)}</li>`)}</ul>
    ${rows.length > AT_FIRST && html`<button type="button" class="button small" aria-expanded=${isWhole} onClick=${() => showAll(!isWhole)}>${isWhole ? "Fewer" : `${whole(rows.length - AT_FIRST)} more`}</button>`}</section>`;
}
