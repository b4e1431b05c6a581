// Draw on an image what counts in training, by mouse, touch, pen or keys.

import { ApiError, remove } from "./api.js";
import { Raster } from "./mask_raster.js";
import { Button, Problems, html, useEffect, useMemo, useRef, useState } from "./ui.js";

const COLOR = 120 * 65536 + 45 * 256 + 255; // blue, green, red
const LARGEST = 2048; // of the image that is shown
const [LEAST_SIZE, MOST_SIZE] = [1, 1000];
const MOST_ZOOM = 16;
const STEP = 1.25;

const queryOf = (path, image, more) => new URLSearchParams({ path, name: image.name, ...more });

// `image` is a row of the dataset's images. `onSaved` is called after the mask was saved or removed.
export function MaskDialog({ path, image, onClose, onSaved }) {
  const raster = useMemo(() => new Raster(image.width, image.height), []);
  const place = useRef(null);
  const stage = useRef(null);
  const canvas = useRef(null);
  const ring = useRef(null);
  const [tool, setTool] = useState("brush");
  const [size, setSize] = useState(Math.max(8, Math.round(Math.max(image.width, image.height) / 12)));
  const [opacity, setOpacity] = useState(55);
  const [zoom, setZoom] = useState(null); // pixels of the screen for one of the image; null fits it in
  const [room, setRoom] = useState({ width: 300, height: 300 });
  const [problems, setProblems] = useState([]);
  const [busy, setBusy] = useState(image.has_mask ? "Loading …" : "");
  const [isChanged, setChanged] = useState(false);
  const [isAsked, ask] = useState(false);
  const [, again] = useState(0);
  const fit = Math.min(room.width / image.width, room.height / image.height);
  const scale = zoom ?? fit;
  const now = useRef({});
  now.current = { tool, size, scale, isChanged, busy };

  useEffect(() => {
    place.current.showModal();
    const look = () => setRoom({ width: Math.max(50, stage.current.clientWidth - 2), height: Math.max(50, stage.current.clientHeight - 2) });
    const watcher = new ResizeObserver(look);
    watcher.observe(stage.current);
    look();
    show(raster.whole);
    if (image.has_mask) load();
    return () => watcher.disconnect();
  }, []);

  const load = async () => {
    try {
      const answer = await fetch(`/api/datasets/mask?${queryOf(path, image)}`);
      if (!answer.ok) throw new Error();
      const bitmap = await createImageBitmap(await answer.blob());
      const copy = Object.assign(document.createElement("canvas"), { width: raster.width, height: raster.height }).getContext("2d", { willReadFrequently: true });
      copy.drawImage(bitmap, 0, 0, raster.width, raster.height);
      const pixels = copy.getImageData(0, 0, raster.width, raster.height).data;
      for (let at = 0; at < raster.bytes.length; at += 1) raster.bytes[at] = pixels[4 * at];
      show(raster.whole);
    } catch {
      setProblems([{ message: "The mask that was saved cannot be shown.", fix: "Draw a new one, or close this." }]);
    }
    setBusy("");
  };

  // The overlay of a part of the mask.
  const show = (box) => {
    if (!box?.width || !box.height) return;
    const pixels = new ImageData(box.width, box.height);
    const words = new Uint32Array(pixels.data.buffer);
    for (let y = 0, at = 0; y < box.height; y += 1) {
      const start = (box.y + y) * raster.width + box.x;
      for (let x = 0; x < box.width; x += 1, at += 1) words[at] = COLOR | (raster.bytes[start + x] << 24);
    }
    canvas.current?.getContext("2d").putImageData(pixels, box.x, box.y);
  };
  const changed = () => {
    setChanged(true);
    ask(false);
    again((number) => number + 1);
  };
  const all = (change) => {
    raster.map(change);
    show(raster.whole);
    changed();
  };
  const go = (isBack) => {
    if (raster.begun) return;
    const box = raster.go(isBack);
    show(box);
    if (box) changed();
  };
  const resize = (by) => setSize((before) => Math.round(Math.min(MOST_SIZE, Math.max(LEAST_SIZE, by > 1 ? Math.max(before + 1, before * by) : Math.min(before - 1, before * by)))));

  // The point of the image under a point of the screen stays where it is.
  const zoomTo = (wanted, at) => {
    const next = Math.min(MOST_ZOOM, Math.max(Math.min(fit, 1) / 2, wanted));
    const box = canvas.current.getBoundingClientRect();
    const view = stage.current.getBoundingClientRect();
    const [x, y] = at ?? [view.left + view.width / 2, view.top + view.height / 2];
    const share = [(x - box.left) / box.width, (y - box.top) / box.height];
    setZoom(next);
    requestAnimationFrame(() => {
      const after = canvas.current.getBoundingClientRect();
      stage.current.scrollBy(after.left + share[0] * after.width - x, after.top + share[1] * after.height - y);
    });
  };

  // Pointers: one draws, two move and zoom. A pen keeps the hand from drawing.
  const pointers = useRef(new Map());
  const line = useRef(null); // {id, last, isErased} of the stroke
  const pointOf = (event) => {
    const box = canvas.current.getBoundingClientRect();
    return [((event.clientX - box.left) / box.width) * raster.width, ((event.clientY - box.top) / box.height) * raster.height];
  };
  const radius = () => Math.max(0.5, (now.current.size / 2) * raster.scale);
  const draw = (point) => {
    const { last, isErased } = line.current;
    show(raster.stroke(last, point, radius(), isErased));
    line.current.last = point;
  };
  const endStroke = (isKept) => {
    if (!line.current) return;
    line.current = null;
    if (raster.end() && !isKept) {
      show(raster.go(true));
      raster.undone.pop();
    }
    changed();
  };
  const down = (event) => {
    if (now.current.busy || (event.pointerType === "mouse" && event.button > 1)) return;
    event.preventDefault();
    canvas.current.focus({ preventScroll: true });
    const isPen = [...pointers.current.values()].some((each) => each.type === "pen");
    if (isPen && event.pointerType === "touch") return;
    canvas.current.setPointerCapture(event.pointerId);
    pointers.current.set(event.pointerId, { type: event.pointerType, x: event.clientX, y: event.clientY, isMoving: event.button === 1 });
    if (pointers.current.size > 1 || event.button === 1) {
      endStroke(pointers.current.size > 2); // what the first of two fingers began is no stroke
      return;
    }
    raster.begin();
    const point = pointOf(event);
    line.current = { id: event.pointerId, last: point, isErased: now.current.tool === "eraser" || (event.buttons & 32) !== 0 };
    draw(point);
  };
  const move = (event) => {
    follow(event);
    const own = pointers.current.get(event.pointerId);
    if (!own) return;
    if (line.current?.id === event.pointerId) {
      const parts = event.getCoalescedEvents?.() ?? [];
      for (const each of parts.length ? parts : [event]) draw(pointOf(each));
      return;
    }
    const other = [...pointers.current.entries()].find(([id]) => id !== event.pointerId)?.[1];
    if (other) {
      const before = Math.hypot(own.x - other.x, own.y - other.y);
      const after = Math.hypot(event.clientX - other.x, event.clientY - other.y);
      stage.current.scrollBy((own.x - event.clientX) / 2, (own.y - event.clientY) / 2);
      if (before > 10 && Math.abs(after - before) > 0.5) zoomTo((now.current.scale * after) / before, [(event.clientX + other.x) / 2, (event.clientY + other.y) / 2]);
    } else if (own.isMoving) {
      stage.current.scrollBy(own.x - event.clientX, own.y - event.clientY);
    }
    Object.assign(own, { x: event.clientX, y: event.clientY });
  };
  const up = (event) => {
    pointers.current.delete(event.pointerId);
    if (line.current?.id === event.pointerId) endStroke(true);
  };
  // A ring as large as the brush.
  const follow = (event) => {
    const box = canvas.current.getBoundingClientRect();
    Object.assign(ring.current.style, { left: `${event.clientX - box.left}px`, top: `${event.clientY - box.top}px` });
    ring.current.hidden = event.pointerType === "touch";
  };

  // Keys: arrows move the brush, space paints.
  const spot = useRef([raster.width / 2, raster.height / 2]);
  const press = (event) => {
    if (event.target.matches("input:not([type='range'])") || now.current.busy) return;
    const key = event.key.toLowerCase();
    if (event.ctrlKey || event.metaKey) {
      if (key === "z" || key === "y") {
        event.preventDefault();
        go(key === "z" && !event.shiftKey);
      }
      return;
    }
    const actions = {
      "[": () => resize(1 / STEP), "]": () => resize(STEP), b: () => setTool("brush"), e: () => setTool("eraser"),
      "+": () => zoomTo(now.current.scale * STEP), "=": () => zoomTo(now.current.scale * STEP), "-": () => zoomTo(now.current.scale / STEP), 0: () => setZoom(null),
    };
    if (actions[key]) {
      event.preventDefault();
      actions[key]();
    } else if (event.target === canvas.current && (key.startsWith("arrow") || key === " ")) {
      event.preventDefault();
      const step = Math.max(1, radius() / 2);
      const [x, y] = spot.current;
      const moves = { arrowleft: [-step, 0], arrowright: [step, 0], arrowup: [0, -step], arrowdown: [0, step] };
      const [dx, dy] = moves[key] ?? [0, 0];
      const next = [Math.min(raster.width, Math.max(0, x + dx)), Math.min(raster.height, Math.max(0, y + dy))];
      if (key === " " || event.shiftKey) {
        raster.begin();
        show(raster.stroke(spot.current, next, radius(), now.current.tool === "eraser"));
        raster.end();
        changed();
      }
      spot.current = next;
      const box = canvas.current.getBoundingClientRect();
      follow({ clientX: box.left + (next[0] / raster.width) * box.width, clientY: box.top + (next[1] / raster.height) * box.height, pointerType: "keys" });
    }
  };
  const wheel = (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoomTo(now.current.scale * (event.deltaY < 0 ? STEP : 1 / STEP), [event.clientX, event.clientY]);
  };
  useEffect(() => {
    stage.current.addEventListener("wheel", wheel, { passive: false });
    return () => stage.current?.removeEventListener("wheel", wheel);
  });

  const close = () => (now.current.isChanged ? ask(true) : onClose());
  const act = async (words, work) => {
    setBusy(words);
    setProblems([]);
    try {
      await work();
      onSaved?.();
      onClose();
    } catch (error) {
      setProblems(error instanceof ApiError ? error.problems : [{ message: "The mask was not saved.", fix: "Try again; another browser may be needed." }]);
      setBusy("");
    }
  };
  const save = () =>
    act("Saving …", async () => {
      const answer = await fetch(`/api/datasets/mask?${queryOf(path, image)}`, { method: "PUT", headers: { "content-type": "image/png" }, body: await raster.png() }).catch(() => null);
      const document = await answer?.json().catch(() => ({}));
      if (!answer?.ok) throw new ApiError(answer?.status ?? 0, document?.problems ?? [{ message: "The server does not answer.", fix: "Save again when it runs." }]);
    });
  const drop = () => act("Removing …", () => remove(`/datasets/mask?${queryOf(path, image)}`));
  const isLarge = Math.max(image.width, image.height) > LARGEST;
  const source = `/api/datasets/image?${queryOf(path, image, isLarge ? { width: LARGEST, content: image.content ?? "" } : {})}`;
  const share = raster.share;
  const pick = (name, words, key) => html`<${Button} kind=${`small${tool === name ? " main" : ""}`} aria-pressed=${tool === name} title=${`Key ${key}`} onClick=${() => setTool(name)}>${words}<//>`;
  const small = (words, onClick, more = {}) => html`<${Button} kind="small" onClick=${onClick} disabled=${Boolean(busy)} ...${more}>${words}<//>`;
  const width = Math.max(1, Math.round(image.width * scale));
  return html`<dialog ref=${place} class="mask" aria-label=${`Mask of ${image.name}`} onKeyDown=${press} onCancel=${(event) => { event.preventDefault(); close(); }}>
    <div class="mask-head"><h2>${image.name}</h2><p class="about">What you paint counts in training, and nothing else of the image.</p></div>
    <div class="mask-tools row" role="group" aria-label="Tools">
      ${pick("brush", "Brush", "B")}${pick("eraser", "Eraser", "E")}
      <label class="row">Size <input type="range" min="0" max="1" step="0.01" aria-valuetext=${`${size} pixels`} title="Keys [ and ]" value=${Math.log(size) / Math.log(MOST_SIZE)} onInput=${(event) => setSize(Math.max(LEAST_SIZE, Math.round(MOST_SIZE ** Number(event.target.value))))} /></label>
      <label class="row">Overlay <input type="range" min="10" max="100" aria-valuetext=${`${opacity} %`} value=${opacity} onInput=${(event) => setOpacity(Number(event.target.value))} /></label>
      ${small("Undo", () => go(true), { disabled: !raster.done.length || Boolean(busy), title: "Ctrl+Z" })}${small("Redo", () => go(false), { disabled: !raster.undone.length || Boolean(busy), title: "Ctrl+Shift+Z" })}
      ${small("Fill all", () => all(() => 255))}${small("Invert", () => all((byte) => 255 - byte))}${small("Clear", () => all(() => 0))}
      <span class="row zoom" role="group" aria-label="Zoom">${small("−", () => zoomTo(scale / STEP), { "aria-label": "Zoom out" })}${small("+", () => zoomTo(scale * STEP), { "aria-label": "Zoom in" })}${small("Fit", () => setZoom(null))}</span></div>
    <div class="mask-stage" ref=${stage}><div class="mask-sheet" style=${{ width: `${width}px`, height: `${Math.max(1, Math.round(image.height * scale))}px` }}>
      <img src=${source} alt="" draggable=${false} />
      <canvas ref=${canvas} width=${raster.width} height=${raster.height} tabindex="0" role="application" aria-label="Mask: arrow keys move the brush, space paints" style=${{ opacity: opacity / 100 }}
        onPointerDown=${down} onPointerMove=${move} onPointerUp=${up} onPointerCancel=${up} onPointerLeave=${() => (ring.current.hidden = true)}></canvas>
      <i ref=${ring} class="mask-ring" hidden style=${{ width: `${size * scale}px`, height: `${size * scale}px` }}></i></div></div>
    <div class="mask-foot"><div aria-live="polite"><${Problems} problems=${problems} />
      ${isAsked && html`<p class="problems">Close without saving? <${Button} kind="small" onClick=${onClose}>Discard it<//> <${Button} kind="small" onClick=${() => ask(false)}>Draw on<//></p>`}</div>
      <div class="row"><${Button} kind="main" disabled=${Boolean(busy) || !isChanged || share === 0} onClick=${save}>Save<//>
        <${Button} onClick=${close}>Cancel<//>
        <span class="note" role="status">${busy || (share === 0 ? "Nothing is painted yet" : `${Math.max(1, Math.round(100 * share))} % of the image counts`)}</span>
        ${image.has_mask && html`<${Button} kind="danger" disabled=${Boolean(busy)} onClick=${drop}>Remove the mask<//>`}</div></div></dialog>`;
}
