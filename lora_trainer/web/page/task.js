// A command that the server runs: started, followed while it runs, and its result.

import { get, post, remove } from "./api.js";
import { Button, Problems, Result, Status, duration, html, useAction, useCallback, useEffect, useLive, useRef, useState } from "./ui.js";

// The newest task, with `document` and `log` once it has ended. `find` is what it was started for: {kind, about}.
export function useTask(find) {
  const [task, set] = useState(null);
  const key = JSON.stringify(find);
  const isIt = (row) => row.kind === find.kind && Object.entries(find.about ?? {}).every(([name, value]) => row.about[name] === value);
  const newest = useRef(0);
  const load = useCallback(async () => {
    const number = ++newest.current;
    const { tasks } = await get(`/tasks?kind=${encodeURIComponent(find.kind)}`);
    const row = tasks.find(isIt);
    const found = row ? await get(`/tasks/${row.id}`) : null;
    if (number === newest.current) set(found); // an earlier answer may come last
  }, [key]);
  useEffect(() => void load().catch(() => {}), [load]);
  useLive((message) => {
    if (message.reconnected) load().catch(() => {});
    if (!message.task || !isIt(message.task)) return;
    if (message.task.status === "running") set((before) => ({ ...(before?.id === message.task.id ? before : {}), ...message.task }));
    else load().catch(() => {});
  });
  return [task, load];
}

// What a task does now, and what is wrong with it. Nothing for one that went well: its page shows the result.
export function TaskState({ task, onChange }) {
  const action = useAction();
  const [now, tick] = useState(Date.now());
  const isRunning = task?.status === "running";
  useEffect(() => {
    if (!isRunning) return undefined;
    const timer = setInterval(() => tick(Date.now()), 1000);
    return () => clearInterval(timer);
  }, [isRunning]);
  if (!task || task.status === "done") return null;
  if (!isRunning) {
    return html`<${Problems} title=${`${task.title}: ${task.status}`} problems=${[{ message: task.last_line || "It ended without a word.", fix: "" }]} />
      ${task.log && html`<details><summary>Log</summary><pre tabindex="0" aria-label="Log">${task.log}</pre></details>`}`;
  }
  return html`<div class="task" role="status">
    <div class="row"><b>${task.title}</b> <${Status} status="running" /> <span class="note">${duration(Math.max(0, now / 1000 - task.started))}</span>
      <${Button} kind="small" busy=${action.busy} onClick=${() => action.act(async () => { const { message } = await post(`/tasks/${task.id}/stop`); onChange?.(); return message; })}>Stop<//></div>
    <progress class="progress" aria-label=${task.title}></progress>
    ${task.last_line && html`<p class="note">${task.last_line}</p>`}
    <${Result} action=${action} /></div>`;
}

export const forget = (task) => remove(`/tasks/${task.id}`);
