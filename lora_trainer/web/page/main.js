// The page: navigation, and what is shown for each address after `#`.

import { post } from "./api.js";
import { Button, Field, Result, bytes, html, render, useAction, useEffect, useLive, useState } from "./ui.js";
import { NewRun } from "./new_run.js";
import { Queue } from "./queue.js";
import { Run } from "./run.js";
import { Start } from "./start.js";
import { Verdict } from "./verdict.js";

const PAGES = [
  ["", "Runs", Start],
  ["new", "New run", NewRun],
  ["queue", "Queue", Queue],
];
const OF_A_RUN = { run: Run, verdict: Verdict };

function address() {
  const [page, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  return { page, id: rest.length ? decodeURIComponent(rest.join("/")) : null };
}

function Machine() {
  const [machine, set] = useState(null);
  useLive((message) => message.machine && set(message.machine));
  if (!machine) return null;
  const gpus = machine.gpus.map((gpu) => `${gpu.name} ${bytes(gpu.memory_used)} of ${bytes(gpu.memory_total)}`);
  return html`<span class="machine">${gpus.length ? gpus.join(" · ") : "no NVIDIA GPU"} · ${bytes(machine.disk.free)} free</span>`;
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
  useLive((message) => message.connected !== undefined && setConnected(message.connected));
  useEffect(() => {
    const moved = () => {
      go(address());
      window.scrollTo(0, 0);
    };
    const ask = () => askForToken(true);
    window.addEventListener("hashchange", moved);
    window.addEventListener("token-needed", ask);
    return () => {
      window.removeEventListener("hashchange", moved);
      window.removeEventListener("token-needed", ask);
    };
  }, []);
  const Page = where.id === null ? PAGES.find(([name]) => name === where.page)?.[2] : OF_A_RUN[where.page];
  useEffect(() => {
    const name = where.id ?? PAGES.find(([page]) => page === where.page)?.[1];
    document.title = name ? `${name} · lora-trainer` : "lora-trainer";
  }, [where.page, where.id]);
  return html`
    <a class="skip" href="#content" onClick=${(event) => { event.preventDefault(); document.querySelector("main").focus(); }}>Skip to content</a>
    <header class="bar"><div>
      <a class="brand" href="#/">lora-trainer</a>
      <nav aria-label="Pages">
        ${PAGES.map(
          ([name, label]) =>
            html`<a href=${`#/${name}`} aria-current=${where.id === null && where.page === name ? "page" : undefined}>${label}</a>`,
        )}
      </nav>
      <${Machine} />
    </div></header>
    <main id="content" tabindex="-1">
      ${!isConnected && !needsToken && html`<div class="problems" role="status">The server does not answer. <span class="fix">Runs continue without it; start it again with lora-trainer ui. This page connects by itself.</span></div>`}
      ${
        needsToken
          ? html`<${Login} onDone=${() => location.reload()} />`
          : Page
            ? html`<${Page} key=${`${where.page} ${where.id}`} id=${where.id} />`
            : html`<div class="card empty"><p>There is no such page.</p><a class="button" href="#/">Runs</a></div>`
      }
    </main>`;
}

render(html`<${App} />`, document.getElementById("page"));
