// A mask as bytes, one for each pixel: white counts. Strokes, their undo, and the gray PNG that is sent.

const MOST_SIDE = 2048; // larger images are drawn on at this size, and the mask is enlarged when it is saved
const MOST_HISTORY = 96 * 1024 * 1024; // bytes

export class Raster {
  constructor(width, height) {
    const scale = Math.min(1, MOST_SIDE / Math.max(width, height));
    Object.assign(this, { scale, full: { width, height }, width: Math.max(1, Math.round(width * scale)), height: Math.max(1, Math.round(height * scale)) });
    this.bytes = new Uint8Array(this.width * this.height);
    this.undone = [];
    this.done = [];
    this.begun = null;
  }

  // A line with round ends of this radius, painted or erased; its edge is smooth. Gives what has changed: {x, y, width, height}.
  stroke([fromX, fromY], [toX, toY], radius, isErased) {
    const box = this.clip(Math.min(fromX, toX) - radius - 1, Math.min(fromY, toY) - radius - 1, Math.max(fromX, toX) + radius + 2, Math.max(fromY, toY) + radius + 2);
    const [alongX, alongY] = [toX - fromX, toY - fromY];
    const length = alongX * alongX + alongY * alongY;
    for (let y = box.y; y < box.y + box.height; y += 1) {
      for (let x = box.x; x < box.x + box.width; x += 1) {
        const [dx, dy] = [x + 0.5 - fromX, y + 0.5 - fromY];
        const share = length ? Math.min(1, Math.max(0, (dx * alongX + dy * alongY) / length)) : 0;
        const distance = Math.hypot(dx - share * alongX, dy - share * alongY);
        const cover = 255 * Math.min(1, Math.max(0, radius + 0.5 - distance));
        if (cover <= 0) continue;
        const at = y * this.width + x;
        this.bytes[at] = isErased ? Math.min(this.bytes[at], 255 - cover) : Math.max(this.bytes[at], cover);
      }
    }
    if (this.begun) this.begun.box = this.begun.box ? around(this.begun.box, box) : box;
    return box;
  }

  clip(left, top, right, bottom) {
    const [x, y] = [Math.max(0, Math.floor(left)), Math.max(0, Math.floor(top))];
    return { x, y, width: Math.max(0, Math.min(this.width, Math.ceil(right)) - x), height: Math.max(0, Math.min(this.height, Math.ceil(bottom)) - y) };
  }

  get whole() {
    return { x: 0, y: 0, width: this.width, height: this.height };
  }

  // What happens between the two can be taken back at once.
  begin() {
    this.begun = { before: this.bytes.slice(), box: null };
  }

  end() { // true where something has changed
    const { before, box } = this.begun ?? {};
    this.begun = null;
    if (!box || !box.width || !box.height) return false;
    this.done.push({ box, before: part(before, this.width, box), after: part(this.bytes, this.width, box) });
    this.undone = [];
    let size = 0;
    for (let at = this.done.length - 1; at >= 0; at -= 1) {
      size += 2 * this.done[at].before.length;
      if (size > MOST_HISTORY && at < this.done.length - 1) {
        this.done.splice(0, at + 1);
        break;
      }
    }
    return true;
  }

  // Everything by a function of its byte.
  map(change) {
    this.begin();
    this.begun.box = this.whole;
    this.bytes = this.bytes.map(change);
    this.end();
  }

  // Take the last change back, or make it again; what has changed, null where there is none.
  go(isBack) {
    const step = (isBack ? this.done : this.undone).pop();
    if (!step) return null;
    (isBack ? this.undone : this.done).push(step);
    const { box } = step;
    const from = isBack ? step.before : step.after;
    for (let y = 0; y < box.height; y += 1) {
      this.bytes.set(from.subarray(y * box.width, (y + 1) * box.width), (box.y + y) * this.width + box.x);
    }
    return box;
  }

  // Which share of the image counts.
  get share() {
    let sum = 0;
    for (const byte of this.bytes) sum += byte;
    return sum / (255 * this.bytes.length);
  }

  // The mask at the image's own size as an 8-bit gray PNG. Made here: what a canvas gives may have noise against tracking.
  async png() {
    const { width, height } = this.full;
    const packed = new CompressionStream("deflate");
    const writer = packed.writable.getWriter();
    const written = (async () => {
      for (let y = 0; y < height; y += 1) await writer.write(this.row(y, width, height));
      await writer.close();
    })();
    const [data] = await Promise.all([new Response(packed.readable).arrayBuffer(), written]);
    const header = new DataView(new ArrayBuffer(13));
    header.setUint32(0, width);
    header.setUint32(4, height);
    header.setUint8(8, 8);
    return new Blob([Uint8Array.of(137, 80, 78, 71, 13, 10, 26, 10), chunk("IHDR", new Uint8Array(header.buffer)), chunk("IDAT", new Uint8Array(data)), chunk("IEND", new Uint8Array())], { type: "image/png" });
  }

  // A row of the enlarged mask, between its neighbors; the first byte is PNG's filter, none.
  row(y, width, height) {
    const row = new Uint8Array(width + 1);
    if (this.width === width) {
      row.set(this.bytes.subarray(y * width, (y + 1) * width), 1);
      return row;
    }
    const [top, below] = between(y, height, this.height);
    for (let x = 0; x < width; x += 1) {
      const [left, right] = between(x, width, this.width);
      const upper = this.bytes[top[0] * this.width + left[0]] * left[1] + this.bytes[top[0] * this.width + right[0]] * right[1];
      const lower = this.bytes[below[0] * this.width + left[0]] * left[1] + this.bytes[below[0] * this.width + right[0]] * right[1];
      row[x + 1] = Math.round(upper * top[1] + lower * below[1]);
    }
    return row;
  }
}

// The two cells that a cell of a finer division lies between, with their weights.
function between(at, count, coarse) {
  const place = Math.min(coarse - 1, Math.max(0, ((at + 0.5) * coarse) / count - 0.5));
  const first = Math.floor(place);
  return [[first, 1 - (place - first)], [Math.min(coarse - 1, first + 1), place - first]];
}

function part(bytes, width, box) {
  const found = new Uint8Array(box.width * box.height);
  for (let y = 0; y < box.height; y += 1) found.set(bytes.subarray((box.y + y) * width + box.x, (box.y + y) * width + box.x + box.width), y * box.width);
  return found;
}

function around(one, other) {
  const [x, y] = [Math.min(one.x, other.x), Math.min(one.y, other.y)];
  return { x, y, width: Math.max(one.x + one.width, other.x + other.width) - x, height: Math.max(one.y + one.height, other.y + other.height) - y };
}

const CRC = Uint32Array.from({ length: 256 }, (_, number) => {
  let value = number;
  for (let bit = 0; bit < 8; bit += 1) value = value & 1 ? (value >>> 1) ^ 0xedb88320 : value >>> 1;
  return value;
});

function chunk(kind, data) {
  const found = new Uint8Array(12 + data.length);
  const view = new DataView(found.buffer);
  view.setUint32(0, data.length);
  found.set([...kind].map((letter) => letter.charCodeAt(0)), 4);
  found.set(data, 8);
  let sum = 0xffffffff;
  for (let at = 4; at < 8 + data.length; at += 1) sum = CRC[(sum ^ found[at]) & 255] ^ (sum >>> 8);
  view.setUint32(8 + data.length, (sum ^ 0xffffffff) >>> 0);
  return found;
}
