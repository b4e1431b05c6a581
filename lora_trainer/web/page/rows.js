// Rows of runs, kept up to date while a page shows them; and how an outcome is called.

import { ApiError, get } from "./api.js";
import { useCallback, useEffect, useLive, useRef, useState } from "./ui.js";

export const OUTCOMES = { passed: "passed, ready to use", refused: "refused, below the minimum", unresolved: "not decided", missing: "its file is missing" };

// To order rows by their verdict; -1 without one.
export const rankOf = (row) => ["refused", "unresolved", "passed"].indexOf(row.outcome);

export const placeOf = (row) => `#/${!row.is_live && row.scores.lora !== null ? "verdict" : "run"}/${encodeURIComponent(row.id)}`;

export const leftOf = (row, seconds) => (row?.is_live && row.total > (row.step ?? 0) && seconds ? (row.total - (row.step ?? 0)) * seconds : null);

// The runs of a list such as /runs?limit=20, as a Map by id, and all that change later; how many there are in all; problems.
// With `isWhole` the rest is fetched too.
export function useRows(path, isWhole = false) {
  const [state, set] = useState({ rows: null, count: 0, problems: [] });
  const meanwhile = useRef(null); // messages that come while the list is on its way: it may be older
  const load = useCallback(async () => {
    const mine = (meanwhile.current = []);
    try {
      let { runs, count } = await get(path);
      while (isWhole && runs.length < count) {
        const next = await get(`${path}&offset=${runs.length}`);
        if (!next.runs.length) break;
        runs = [...runs, ...next.runs];
      }
      if (meanwhile.current !== mine) return;
      const rows = new Map(runs.map((row) => [row.id, row]));
      set(mine.reduce(changed, { rows, count, problems: [] }));
    } catch (error) {
      if (meanwhile.current !== mine) return;
      set((before) => ({ ...before, problems: error instanceof ApiError ? error.problems : [] }));
      if (!(error instanceof ApiError)) throw error;
    }
    meanwhile.current = null;
  }, [path]);
  useEffect(() => {
    load();
    return () => (meanwhile.current = []);
  }, [load]);
  useLive((message) => {
    if (message.reconnected) load();
    if (!message.runs) return;
    meanwhile.current?.push(message);
    set((before) => (before.rows ? changed(before, message) : before));
  });
  return [state.rows, state.count, state.problems];
}

function changed(state, message) {
  const rows = new Map(state.rows);
  let count = state.count;
  for (const row of message.runs) {
    if (!rows.has(row.id)) count += 1;
    rows.set(row.id, row);
  }
  for (const id of message.removed) if (rows.delete(id)) count -= 1;
  return { ...state, rows, count };
}
