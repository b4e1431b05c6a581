// The settings of a run, taken over into the page of a new one.

import { get } from "./api.js";

const KEPT = "new run";

// Keeps what a run was asked to be, as the fields of a new run, and opens that page. The name is kept for a run that never began.
export async function startLike(run, id) {
  const [asked, schema] = await Promise.all([get(`/runs/${encodeURIComponent(id)}/request`), get("/settings")]);
  const kinds = new Map(schema.presets.map((each) => [each.name, each.kind]));
  const tier = asked.presets.find((each) => each === schema.auto || kinds.get(each) === "tiers") ?? "";
  const goal = asked.presets.find((each) => kinds.get(each) === "goals") ?? "";
  const more = asked.presets.find((each) => each !== tier && each !== goal) ?? "";
  const { "data.sources": sources, ...others } = asked.settings;
  // Sources with the masks beside their images: the page looks for masks by itself.
  const isPlain = Array.isArray(sources) && sources.every((each) => each?.path && Object.keys(each).every((key) => ["path", "masks"].includes(key)));
  const data = isPlain && !asked.data.length ? sources.map((each) => each.path) : asked.data;
  const found = { model: asked.model ?? "", data: data.length ? data : [""], tier, goal, more, settings: isPlain ? others : asked.settings };
  const name = run.has_record === false ? (asked.name ?? "") : "";
  sessionStorage.setItem(KEPT, JSON.stringify({ ...found, name, enforce: asked.command === "produce" }));
  location.hash = "#/new";
}

// The fields that were kept, once.
export function takeLike() {
  const kept = sessionStorage.getItem(KEPT);
  sessionStorage.removeItem(KEPT);
  return kept ? JSON.parse(kept) : {};
}
