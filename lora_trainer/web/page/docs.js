// These docs without a network: the list of pages, a search, and a page with its contents.

import { Copy, Field, Problems, html, render, useDocument, useEffect, useRef, useState, whole } from "./ui.js";

const TYPING = 150; // milliseconds without a key before it searches
const isWide = () => window.matchMedia("(min-width: 1100px)").matches;
const link = (name, anchor) => `#/docs/${name}${anchor ? `/${encodeURIComponent(anchor)}` : ""}`;

export function Docs({ id, rest }) {
  const [list, , problems] = useDocument("/docs");
  const [text, setText] = useState("");
  const [isSearching, search] = useState(false);
  const isFirst = useRef(true); // until a page was shown
  const place = [id, ...rest].filter(Boolean).join("/");
  useEffect(() => search(false), [place]);
  if (!list) return html`<h1>Docs</h1><${Problems} problems=${problems} />`;
  const names = new Set(list.pages.map((page) => page.name));
  const at = place.lastIndexOf("/");
  // The rest of the address is a heading; names of pages may have a slash, too.
  const [name, anchor] = names.has(place) || at < 0 ? [place || list.pages[0]?.name, ""] : [place.slice(0, at), place.slice(at + 1)];
  return html`<div class="docs">
    <div class="docs-side">
      <form role="search" onSubmit=${(event) => event.preventDefault()}>
        <${Field} label="Search the docs">${(field) => html`<input id=${field} type="search" placeholder="lora.rank" value=${text}
          onFocus=${() => search(text.trim() !== "")} onInput=${(event) => { setText(event.target.value); search(event.target.value.trim() !== ""); }}
          onKeyDown=${(event) => event.key === "Escape" && search(false)} />`}<//></form>
      <${Choice} pages=${list.pages} name=${name} />
      <${Tree} pages=${list.pages} name=${name} />
    </div>
    ${isSearching
      ? html`<${Found} text=${text.trim()} onChosen=${() => search(false)} />`
      : names.has(name)
        ? html`<${DocsPage} name=${name} anchor=${anchor} pages=${list.pages} isFirst=${isFirst} />`
        : html`<div class="empty"><h1>${list.pages.length ? "There is no such page" : "The docs are not installed"}</h1><p>${list.pages.length ? "Choose one from the list, or search." : "Install lora-trainer again: its package contains them."}</p></div>`}
  </div>`;
}

// The pages by section, in order: [["How-to", [["Train", [page, …]], …]], …].
function grouped(pages, level) {
  const groups = [];
  for (const page of pages) {
    const key = page.section[level] ?? "";
    if (!groups.length || groups.at(-1)[0] !== key) groups.push([key, []]);
    groups.at(-1)[1].push(page);
  }
  return groups;
}

function Tree({ pages, name }) {
  const place = useRef(null);
  const current = pages.find((page) => page.name === name)?.section[0];
  useEffect(() => {
    const chosen = place.current?.querySelector("[aria-current]");
    if (!chosen) return;
    chosen.closest("details")?.setAttribute("open", "");
    const side = chosen.closest(".docs-side"); // scrolled by itself: scrollIntoView would move the text, too
    if (side.scrollHeight > side.clientHeight) side.scrollTop += chosen.getBoundingClientRect().top - side.getBoundingClientRect().top - side.clientHeight / 3;
  }, [name]);
  const links = (listed) => html`<ul>${listed.map((page) => html`<li><a href=${link(page.name)} aria-current=${page.name === name ? "page" : undefined}>${page.label}</a></li>`)}</ul>`;
  return html`<nav class="tree" aria-label="Docs" ref=${place}>
    ${grouped(pages, 0).map(([section, below]) =>
      section
        ? html`<details open=${section === current}><summary>${section}</summary>
            ${grouped(below, 1).map(([part, listed]) => html`${part && html`<p class="about">${part}</p>`}${links(listed)}`)}</details>`
        : links(below),
    )}</nav>`;
}

// The list of a narrow screen.
function Choice({ pages, name }) {
  const option = (page) => html`<option value=${page.name}>${page.label}</option>`;
  return html`<div class="docs-choice"><${Field} label="Page">${(field) => html`<select id=${field} value=${name} onChange=${(event) => { location.hash = link(event.target.value); }}>
    ${grouped(pages, 0).map(([section, below]) => (section ? html`<optgroup label=${section}>${below.map(option)}</optgroup>` : below.map(option)))}
  </select>`}<//></div>`;
}

function Found({ text, onChosen }) {
  const [words, set] = useState(text);
  useEffect(() => {
    const timer = setTimeout(() => set(text), TYPING);
    return () => clearTimeout(timer);
  }, [text]);
  const [found, , problems] = useDocument(`/docs?search=${encodeURIComponent(words.slice(0, 200))}`);
  const rows = found?.found ?? [];
  return html`<section class="docs-found" aria-label="Places found">
    <h1>Search</h1>
    <p class="lead" role="status">${found && (rows.length ? `${whole(rows.length)} places, the best first` : "No section has all of these words. Try fewer, or a part of a word.")}</p>
    <${Problems} problems=${problems} />
    <ol>${rows.map((row) => html`<li key=${`${row.name} ${row.anchor}`}>
      <a href=${link(row.name, row.anchor)} onClick=${onChosen}>${row.heading || row.title}</a> ${row.heading && html`<span class="note">${row.title}</span>`}
      <p><${Marked} text=${row.excerpt} words=${found.search} /></p></li>`)}</ol></section>`;
}

function Marked({ text, words }) {
  const all = words.split(/\s+/).filter(Boolean);
  const long = all.filter((word) => word.length > 2);
  const wanted = (long.length ? long : all).map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  if (!wanted.length) return text;
  return text.split(new RegExp(`(?<![\\p{L}\\p{N}])(${wanted.join("|")})(?![\\p{L}\\p{N}])`, "iu")).map((part, index) => (index % 2 ? html`<mark>${part}</mark>` : part));
}

function DocsPage({ name, anchor, pages, isFirst }) {
  const [page, , problems] = useDocument(`/docs/${name}`);
  if (!page) return html`<${Problems} problems=${problems} />`;
  const label = (of) => pages.find((each) => each.name === of)?.label ?? of;
  const isShown = page.name === name; // the earlier page stays until this one comes
  return html`<article class="docs-page" aria-busy=${!isShown}>
    <${Contents} page=${page} anchor=${anchor} />
    <div class="docs-text">
      ${page.section.length > 0 && html`<p class="note">${page.section.join(" › ")}</p>`}
      <${Text} page=${page} anchor=${anchor} isShown=${isShown} isFirst=${isFirst} />
      <nav class="row docs-near" aria-label="Next pages">
        ${page.before && html`<a class="button" rel="prev" href=${link(page.before)}>← ${label(page.before)}</a>`}
        ${page.after && html`<a class="button" rel="next" href=${link(page.after)}>${label(page.after)} →</a>`}
      </nav>
    </div></article>`;
}

function Contents({ page, anchor }) {
  const headings = page.headings.filter((heading) => heading.level > 1 && heading.level < 4);
  if (headings.length < 2) return html`<div class="docs-contents"></div>`;
  return html`<nav class="docs-contents" aria-label="On this page"><details open=${isWide()}><summary>On this page</summary>
    <ul>${headings.map((heading) => html`<li class=${`level${heading.level}`}><a href=${link(page.name, heading.anchor)} aria-current=${heading.anchor === anchor ? "location" : undefined}
      onClick=${() => heading.anchor === anchor && show(document.getElementById(anchor))}>${heading.text}</a></li>`)}</ul></details></nav>`;
}

// Lets the keyboard and screen readers continue at a heading, and scrolls to it where the address names it.
function show(heading, isNamed = true) {
  heading.tabIndex = -1;
  if (isNamed) heading.scrollIntoView();
  heading.focus({ preventScroll: true });
}

function Text({ page, anchor, isShown, isFirst }) {
  const place = useRef(null);
  useEffect(() => {
    document.title = `${page.title} · lora-trainer`;
    return enriched(place.current);
  }, [page]);
  useEffect(() => {
    if (!isShown) return;
    const heading = place.current.querySelector(anchor ? `[id="${CSS.escape(anchor)}"]` : "h1");
    const isChosen = document.activeElement?.tagName === "SELECT"; // whose next key may choose another page
    if (heading && (anchor || !(isFirst.current || isChosen))) show(heading, anchor !== "");
    isFirst.current = false;
  }, [page, anchor, isShown]);
  // Safe as HTML: the server made it from the Markdown files of this package, in which HTML is text (documentation.py),
  // and the page's security policy runs no script and loads nothing from elsewhere.
  return html`<div ref=${place} dangerouslySetInnerHTML=${{ __html: page.html }}></div>`;
}

// Adds what HTML from Markdown lacks: a button that copies each code block, and wide blocks and tables that scroll by
// themselves, also from the keyboard. Returns what removes the listeners.
function enriched(text) {
  const boxed = (element, kind) => {
    const box = document.createElement("div");
    box.className = kind;
    element.replaceWith(box);
    box.append(element);
    return box;
  };
  for (const pre of text.querySelectorAll("pre")) {
    const holder = document.createElement("div");
    boxed(pre, "code").append(holder);
    render(html`<${Copy} text=${pre.textContent.trimEnd()} />`, holder);
  }
  for (const code of text.querySelectorAll(":not(pre) > code")) code.classList.toggle("short", code.textContent.length < 25); // not broken at a hyphen
  const tables = [...text.querySelectorAll("table")].map((table) => boxed(table, "table"));
  const fit = () => {
    for (const box of [...tables, ...text.querySelectorAll("pre")]) {
      if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
    }
  };
  fit();
  window.addEventListener("resize", fit);
  return () => window.removeEventListener("resize", fit);
}
