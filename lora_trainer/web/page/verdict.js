// What a run is worth: the verdict in words, its parts with their evidence, checkpoints and strengths side by side.

import { Field, FileList, Problems, ScoreBox, Status, html, score, shown, useDocument, useLive, useState, whole } from "./ui.js";

const TONES = { good: "good", fair: "warn", bad: "bad", open: "" };

export function Verdict({ id }) {
  const [verdict, load, problems] = useDocument(`/runs/${encodeURIComponent(id)}/verdict`);
  useLive((message) => {
    const mine = message.runs?.find((each) => each.id === id);
    if (message.reconnected || (mine && (!mine.is_live || mine.status !== verdict?.status))) load();
  });
  if (!verdict) return html`<h1>${id}</h1><${Problems} problems=${problems} />`;
  const { dataset } = verdict;
  return html`
    <div class="head"><h1>${verdict.name}</h1><${Status} status=${verdict.outcome ?? verdict.status} />
      <div class="right"><a class="button" href=${`#/run/${encodeURIComponent(id)}`}>Curves, log and settings</a></div></div>
    <section class=${`card verdict ${TONES[verdict.tone] ?? ""}`} aria-label="Verdict">
      <p class="headline">${verdict.headline}</p>
      ${verdict.reasons.map((each) => html`<p>${each.what} ${each.to_do}${each.command && html` <code>${each.command}</code>`}</p>`)}
      ${verdict.notes.map((each) => html`<p class="note">${typeof each === "string" ? each : each.what}</p>`)}
    </section>
    <div class="columns">
      <div class="stack">
        <section class="card"><h2>LoRA</h2>
          ${verdict.parts.map((part) => html`<${Part} part=${part} />`)}
          ${!verdict.parts.length && html`<p class="about">No part was measured.</p>`}
        </section>
        ${verdict.findings.length > 0 && html`<section class="card"><h2>What to do</h2>${verdict.findings.map((each) => html`<${Finding} finding=${each} />`)}</section>`}
        ${verdict.evidence.map((group) => html`<${Evidence} group=${group} />`)}
        <${Strengths} sheet=${verdict.sheets.strengths} />
        <${Steps} sheet=${verdict.sheets.steps} />
      </div>
      <div class="stack sticky">
        <section class="card"><h2>Files</h2>${verdict.files.length ? html`<${FileList} files=${verdict.files} />` : html`<p class="about">None was exported.</p>`}
          ${verdict.answers.length > 0 && html`<dl>${verdict.answers.map((each) => html`<dt><b>${each.question}</b></dt><dd>${each.answer} <span class="note">${each.about} ${each.command && html`<code>${each.command}</code>`}</span></dd>`)}</dl>`}
        </section>
        <section class="card"><h2>Dataset</h2>
          <${ScoreBox} name="score" value=${dataset.value} minimum=${dataset.gate} passed=${dataset.value === null ? null : dataset.passed} />
          <ul class="legend">${Object.entries(dataset.parts).map(([name, value]) => html`<li>${name}<b>${score(value)}</b></li>`)}</ul>
          ${verdict.dataset_findings.map((each) => html`<${Finding} finding=${each} />`)}
        </section>
        ${verdict.checkpoints.length > 0 && html`<section class="card table"><h2>Checkpoints</h2><table>
          <thead><tr><th class="number">step</th><th class="number">val_loss</th><th>files</th></tr></thead>
          <tbody>${verdict.checkpoints.map((each) => html`<tr><td class="number">${whole(each.step)}</td><td class="number">${shown(each.val_loss, 4)}</td>
            <td>${[each.is_released && "exported", each.can_resume && "resumable"].filter(Boolean).join(", ")} ${each.url && html`<a href=${each.url} download>LoRA</a>`}</td></tr>`)}</tbody></table></section>`}
      </div>
    </div>`;
}

// A rate between 0 and 1 with its interval.
function Part({ part }) {
  const percent = (number) => `${100 * Math.min(1, Math.max(0, number))}%`;
  const words = `${part.title}: ${part.shown}, ${score(part.low)} to ${score(part.high)}`;
  return html`<div class="part"><span><b>${part.title}</b><br /><span class="about">${part.outcome_name}</span></span>
    <span>${part.value !== null && html`<span class="range" role="img" aria-label=${words}>
        <span style=${{ left: percent(part.low), width: percent(part.high - part.low) }}></span><i style=${{ left: percent(part.value) }}></i></span>`}
      <span class="about">${part.question} ${part.about}</span></span>
    <b class="number">${part.value === null ? "–" : part.shown}</b></div>`;
}

// What several images, or the whole, have in common: [file or nothing, message] each.
function Finding({ finding }) {
  const count = finding.count ?? finding.about.length;
  const [first = []] = finding.about;
  return html`<div class="finding"><p>${count <= 1 ? first.filter(Boolean).join(": ") : first[1]} <span class="note">(${finding.severity}${count > 1 ? `, ${whole(count)} times` : ""})</span><br /><span class="about">${finding.fix}</span></p>
    ${count > 1 && html`<details><summary>All</summary><ul>${finding.about.slice(0, 100).map((each) => html`<li>${each.filter(Boolean).join(": ")}</li>`)}</ul></details>`}</div>`;
}

function Evidence({ group }) {
  return html`<section class="card"><h2>${group.heading}</h2>${group.about && html`<p class="about">${group.about}</p>`}
    <div class="images">${group.pairs.map((pair) => html`<figure><div class="pair">${pair.sides.filter((side) => side.url).map((side) => html`<a href=${side.url} target="_blank" rel="noopener"><img loading="lazy" src=${`${side.url}?width=384`} alt=${`${side.label}: ${pair.prompt ?? ""}`} /></a>`)}</div>
      <figcaption>${pair.sides.length === 2 && pair.sides.every((side) => side.url) ? `left: ${pair.sides[0].label}, right: ${pair.sides[1].label}` : pair.sides.map((side) => side.label).join(", ")}${pair.prompt ? `: ${pair.prompt}` : ""}${pair.seed !== null && pair.seed !== undefined ? `, seed ${pair.seed}` : ""}${typeof pair.about === "string" && pair.about ? ` · ${pair.about}` : ""}</figcaption></figure>`)}</div></section>`;
}

// One strength at a time: the slider goes through the drawn ones, so every image is real.
function Strengths({ sheet }) {
  const [at, move] = useState(null);
  if (!sheet.rows.length || !sheet.columns.length) return null;
  const usual = sheet.columns.findIndex((each) => Number.parseFloat(String(each).replace(/^[^\d]*/, "")) === 1);
  const place = at ?? (usual < 0 ? sheet.columns.length - 1 : usual);
  return html`<section class="card"><h2>Strengths</h2>
    <${Field} label=${String(sheet.columns[place])}>${(field) => html`<input id=${field} type="range" min="0" max=${sheet.columns.length - 1} step="1" value=${place} aria-valuetext=${String(sheet.columns[place])} onInput=${(event) => move(Number(event.target.value))} />`}<//>
    <div class="images">${sheet.rows.map((row) => html`<figure>${row.urls[place] ? html`<img src=${`${row.urls[place]}?width=384`} alt=${`${sheet.columns[place]}: ${row.prompt}`} />` : html`<span class="note">none</span>`}<figcaption>${row.prompt}</figcaption></figure>`)}</div></section>`;
}

function Steps({ sheet }) {
  if (!sheet.rows.length || !sheet.columns.length) return null;
  return html`<section class="card table"><h2>Checkpoints side by side</h2><table>
    <thead><tr><th>prompt</th>${sheet.columns.map((each) => html`<th>${each}</th>`)}</tr></thead>
    <tbody>${sheet.rows.map((row) => html`<tr><td>${row.prompt}</td>${row.urls.map((url, at) => html`<td>${url && html`<img loading="lazy" width="150" src=${`${url}?width=300`} alt=${`${sheet.columns[at]}: ${row.prompt}`} />`}</td>`)}</tr>`)}</tbody></table></section>`;
}
