// The rows of a dataset as they are needed: pages of them are fetched where the grid is, and again when something changed.

import { ApiError, get } from "./api.js";
import { useCallback, useEffect, useRef, useState, whole } from "./ui.js";

const PAGE = 100;
const MOST_PAGES = 40;
const POLL_MS = 3000;
const READING_MS = 600;

export function imageUrl(path, row, width) {
  const asked = { path, name: row.name, ...(width ? { width } : {}), ...(row.content && width ? { content: row.content } : {}) };
  return `/api/datasets/image?${new URLSearchParams(asked)}`;
}

// What is said where only a part of the images has a mask.
export const fewMasks = (masks, without) =>
  `${whole(masks)} of ${whole(masks + without)} images ${masks === 1 ? "has a mask" : "have a mask"}. The other ${without === 1 ? "one" : whole(without)} would be trained in full, and the dataset check counts ${without === 1 ? "it as a missing mask" : "them as missing masks"}.`;

const queryOf = (path, asked) => {
  const found = new URLSearchParams({ path });
  for (const [name, value] of Object.entries(asked)) if (value) found.set(name, value);
  return found.toString();
};

// `asked` are filters, sort and sizes. While others are loaded the earlier ones stay.
export function useRows(path, asked) {
  const [state, set] = useState({ document: null, reading: null, isEmpty: false, problems: [] });
  const [, again] = useState(0);
  const query = queryOf(path, asked);
  const store = useRef(null);
  if (store.current?.query !== query) {
    const last = store.current;
    store.current = { query, pages: new Map(), waiting: new Map(), range: [0, PAGE], version: null, before: last?.pages.size ? last.pages : (last?.before ?? null) };
  }
  // A page that is on its way is not asked for twice: who needs it waits for the same answer.
  const load = useCallback((page, limit = PAGE) => {
    const { waiting } = store.current;
    if (!limit) return fetchPage(page, limit);
    if (!waiting.has(page)) waiting.set(page, fetchPage(page, limit));
    return waiting.get(page);
  }, []);
  const fetchPage = useCallback(async (page, limit) => {
    const own = store.current;
    try {
      const found = await get(`/datasets/images?${own.query}&offset=${page * PAGE}&limit=${limit}`);
      if (store.current !== own) return;
      if (found.version === undefined) {
        set((before) => ({ ...before, isEmpty: found.is_empty ?? false, reading: found.is_empty ? null : (found.reading ?? { done: 0, total: 0 }), problems: [] }));
        return;
      }
      own.before = null;
      if (limit) {
        own.pages.delete(page);
        own.pages.set(page, { rows: found.rows, version: found.version });
        while (own.pages.size > MOST_PAGES) own.pages.delete(own.pages.keys().next().value);
      }
      const isNew = own.version !== found.version;
      own.version = found.version;
      const { rows, ...rest } = found;
      set({ document: rest, reading: found.reading, isEmpty: false, problems: [] });
      if (isNew) {
        if (limit) own.waiting.delete(page);
        await need(...own.range);
      }
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (store.current === own) set((before) => ({ ...before, reading: null, problems: error.problems }));
    } finally {
      if (limit) own.waiting.delete(page);
      again((number) => number + 1);
    }
  }, []);
  const need = useCallback(async (first, end) => {
    const own = store.current;
    own.range = [first, end];
    const wanted = [];
    for (let page = Math.floor(first / PAGE); page * PAGE < end; page += 1) {
      if (own.pages.get(page)?.version !== own.version || own.version === null) wanted.push(load(page));
    }
    await Promise.all(wanted);
  }, []);
  useEffect(() => void load(0), [query]);
  const isReading = state.reading !== null;
  useEffect(() => {
    let isAsked = false; // one at a time: the server answers late while it changes many captions
    const ask = async () => {
      if (document.hidden || isAsked) return;
      isAsked = true;
      await load(0, state.document ? 0 : PAGE).finally(() => (isAsked = false));
    };
    const timer = setInterval(ask, isReading ? READING_MS : POLL_MS);
    return () => clearInterval(timer);
  }, [isReading, state.document === null, query]);
  const reload = useCallback(() => load(0, 0), []);
  return {
    ...state,
    need,
    reload,
    rowAt: (index) => {
      const pages = store.current.before ?? store.current.pages;
      return pages.get(Math.floor(index / PAGE))?.rows[index % PAGE] ?? null;
    },
    // Of a range, else of all.
    names: async (first = 0, end = null) => {
      const part = end === null ? "" : `&offset=${first}&limit=${end - first}`;
      return (await get(`/datasets/names?${store.current.query}${part}`)).names;
    },
  };
}
