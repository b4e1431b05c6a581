// The page: navigation, and what is shown for each address after `#`.

import { post } from "./api.js";
import { Field, Problems, Result, bytes, html, render, useAction, useEffect, useLive, useRef, useState } from "./ui.js";
import { Start } from "./start.js";

// Address, name in the navigation, and what loads the page. One with an id, such as run/cat, gets it and the rest.
const PAGES = [
  ["", "Start", async () => Start],
  ["runs", "Runs", async () => (await import("./runs.js")).Runs],
  ["new", "New run", async () => (await import("./new_run.js")).NewRun],
  ["datasets", "Datasets", async () => (await import("./datasets.js")).Datasets],
  ["queue", "Queue", async () => (await import("./queue.js")).Queue],
  ["library", "Library", async () => (await import("./library.js")).Library],
  ["doctor", "Doctor", async () => (await import("./doctor.js")).Doctor],
];
const OF_A_RUN = {
  run: async () => (await import("./run.js")).Run,
  verdict: async () => (await import("./verdict.js")).Verdict,
};
const STAY = ["doctor"]; // pages that keep what was typed and loaded when the id changes
const loaded = new Map();

// Of `#/page/id/rest`, each part decoded; a part that cannot be decoded stays as it is.
function address() {
  const [page, ...rest] = location.hash.replace(/^#\/?/, "").split("/").map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
  return { page, id: rest[0] ?? null, rest: rest.slice(1) };
}

function Loaded({ where }) {
  const load = (where.id !== null && OF_A_RUN[where.page]) || PAGES.find(([name]) => name === where.page)?.[2];
  const [, again] = useState(0);
  const [problems, set] = useState([]);
  useEffect(() => {
    if (!load || loaded.has(load)) return;
    load().then(
      (Page) => {
        loaded.set(load, Page);
        again((number) => number + 1);
      },
      () => set([{ message: "This page did not load.", fix: "Load it again when the server answers." }]),
    );
  }, [load]);
  if (!load) return html`<div class="card empty"><p>There is no such page.</p><a class="button" href="#/">Start</a></div>`;
  const Page = loaded.get(load);
  return Page ? html`<${Page} key=${STAY.includes(where.page) ? where.page : `${where.page} ${where.id}`} id=${where.id} rest=${where.rest} />` : html`<${Problems} problems=${problems} />`;
}

// The place on the page for each address, which going back in the browser's history returns to.
const places = new Map();
let left = location.hash;
let isBack = false;
history.scrollRestoration = "manual";
window.addEventListener("popstate", () => (isBack = history.state === "seen"));
history.replaceState("seen", "");

// After a move: the new page's heading is focused, so that keys and screen readers begin there, and the scroll position
// is that of before after going back. Both wait until the page is loaded, for at most `ARRIVE_MS`, and until somebody acts.
const ARRIVE_MS = 10_000;
let leave = () => {};

function arrive(main) {
  leave();
  const wanted = isBack ? (places.get(location.hash) ?? 0) : 0;
  isBack = false;
  history.replaceState("seen", "");
  if (!main.contains(document.activeElement)) main.focus({ preventScroll: true });
  const settle = () => {
    const heading = main.querySelector("h1");
    if (heading && [document.body, main].includes(document.activeElement)) {
      heading.tabIndex = -1;
      heading.focus({ preventScroll: true });
    }
    if (wanted && window.scrollY !== wanted) window.scrollTo(0, wanted);
  };
  const watcher = new MutationObserver(settle);
  watcher.observe(main, { childList: true, subtree: true });
  const timer = setTimeout(() => leave(), ARRIVE_MS);
  const actions = ["keydown", "pointerdown", "wheel", "touchstart"];
  leave = () => {
    watcher.disconnect();
    clearTimeout(timer);
    for (const each of actions) window.removeEventListener(each, leave, true);
  };
  for (const each of actions) window.addEventListener(each, leave, { capture: true, passive: true });
  settle();
}

function Machine() {
  const [machine, set] = useState(null);
  useLive((message) => message.machine && set(message.machine));
  if (!machine) return null;
  const gpus = machine.gpus.map((gpu) => `${gpu.name}, memory ${bytes(gpu.memory_used)} of ${bytes(gpu.memory_total)}`);
  return html`<span class="machine">${gpus.length ? gpus.join(" · ") : "no NVIDIA GPU"} · disk ${bytes(machine.disk.free)} free</span>`;
}

function Login({ onDone }) {
  const [token, set] = useState("");
  const action = useAction();
  const send = (event) => {
    event.preventDefault();
    action.act(async () => {
      await post("/login", { token: token.trim() });
      onDone();
    });
  };
  return html`<form class="card" onSubmit=${send}>
    <h1>Sign in</h1>
    <p class="lead">The command lora-trainer ui printed a token when it was first started with --host.</p>
    <${Field} label="Token">
      ${(id) => html`<input id=${id} type="password" autocomplete="current-password" value=${token} onInput=${(event) => set(event.target.value)} />`}
    <//>
    <button class="button main" disabled=${action.busy || !token.trim()}>Sign in</button>
    <${Result} action=${action} />
  </form>`;
}

function App() {
  const [where, go] = useState(address());
  const [needsToken, askForToken] = useState(false);
  const [isConnected, setConnected] = useState(true);
  const [isOpen, openMenu] = useState(false);
  const main = useRef(null);
  useLive((message) => message.connected !== undefined && setConnected(message.connected));
  useEffect(() => {
    const moved = () => {
      places.set(left, scrolled);
      left = location.hash;
      go(address());
      openMenu(false);
      window.scrollTo(0, 0);
    };
    let scrolled = window.scrollY; // read before the next page is there
    const scroll = () => (scrolled = window.scrollY);
    window.addEventListener("scroll", scroll, { passive: true });
    const ask = () => askForToken(true);
    window.addEventListener("hashchange", moved);
    window.addEventListener("token-needed", ask);
    return () => {
      window.removeEventListener("scroll", scroll);
      window.removeEventListener("hashchange", moved);
      window.removeEventListener("token-needed", ask);
    };
  }, []);
  const before = useRef(null);
  useEffect(() => {
    const name = where.id ?? PAGES.find(([page]) => page === where.page)?.[1];
    document.title = name ? `${name} · lora-trainer` : "lora-trainer";
    const stays = STAY.includes(where.page) && before.current === where.page; // it moves the focus by itself
    if (before.current !== null && !stays) arrive(main.current);
    before.current = where.page;
  }, [where]);
  return html`
    <a class="skip" href="#content" onClick=${(event) => { event.preventDefault(); document.querySelector("main").focus(); }}>Skip to content</a>
    <header class="bar"><div>
      <a class="brand" href="#/">lora-trainer</a>
      <button type="button" class="button small menu" aria-expanded=${isOpen} aria-controls="pages" onClick=${() => openMenu(!isOpen)}>Menu</button>
      <nav id="pages" aria-label="Pages" class=${isOpen ? "open" : ""}>
        ${PAGES.map(
          ([name, label]) =>
            html`<a href=${`#/${name}`} aria-current=${where.page === name ? "page" : name === "runs" && where.page in OF_A_RUN ? "true" : undefined}>${label}</a>`,
        )}
      </nav>
      <${Machine} />
    </div></header>
    <main id="content" class=${`on-${where.page || "start"}`} tabindex="-1" ref=${main}>
      ${!isConnected && !needsToken && html`<div class="problems" role="status">The server does not answer. <span class="fix">Runs continue without it; start it again with lora-trainer ui. This page connects by itself.</span></div>`}
      ${
        needsToken
          ? html`<${Login} onDone=${() => location.reload()} />`
          : html`<${Loaded} where=${where} />`
      }
    </main>`;
}

render(html`<${App} />`, document.getElementById("page"));
