// The members of a .zip file, unpacked here one by one when they are sent: the server never sees the archive.

const MOST_MEMBERS = 20_000;
const MOST_BYTES = 64 * 1024 * 1024; // of one member
const END = 0x06054b50;
const ENTRY = 0x02014b50;
const UNPACK = "Unpack it, and drop the folder.";

// [{name, size, open}] of the files in it. Throws an Error with a message for people.
export async function membersOf(file) {
  const tail = new DataView(await file.slice(Math.max(0, file.size - 65_557)).arrayBuffer());
  let at = tail.byteLength - 22;
  while (at >= 0 && tail.getUint32(at, true) !== END) at -= 1;
  if (at < 0) throw new Error(`It is no .zip file. ${UNPACK}`);
  const [count, size, start] = [tail.getUint16(at + 10, true), tail.getUint32(at + 12, true), tail.getUint32(at + 16, true)];
  if (count > MOST_MEMBERS || start === 0xffffffff) throw new Error(`It has more than ${MOST_MEMBERS} files, or is larger than 4 GiB. ${UNPACK}`);
  const list = new DataView(await file.slice(start, start + size).arrayBuffer());
  const found = [];
  for (let number = 0, place = 0; number < count; number += 1) {
    if (place + 46 > list.byteLength || list.getUint32(place, true) !== ENTRY) throw new Error(`It is damaged. ${UNPACK}`);
    const [flags, method, packed, whole] = [list.getUint16(place + 8, true), list.getUint16(place + 10, true), list.getUint32(place + 20, true), list.getUint32(place + 24, true)];
    const [nameSize, extra, comment, from] = [list.getUint16(place + 28, true), list.getUint16(place + 30, true), list.getUint16(place + 32, true), list.getUint32(place + 42, true)];
    const name = new TextDecoder().decode(new Uint8Array(list.buffer, place + 46, Math.min(nameSize, list.byteLength - place - 46)));
    place += 46 + nameSize + extra + comment;
    if (name.endsWith("/")) continue;
    if (flags & 1) throw new Error(`It is encrypted. ${UNPACK}`);
    found.push({ name, size: whole, open: () => unpack(file, { method, packed, whole, from }) });
  }
  return found;
}

async function unpack(file, { method, packed, whole, from }) {
  if (whole > MOST_BYTES) throw new Error("Larger than 64 MiB. Scale it down, or save it as JPEG or WebP.");
  const head = new DataView(await file.slice(from, from + 30).arrayBuffer());
  if (head.byteLength < 30) throw new Error(`The .zip file is damaged. ${UNPACK}`);
  const start = from + 30 + head.getUint16(26, true) + head.getUint16(28, true);
  const body = file.slice(start, start + packed);
  if (method === 0) return body;
  if (method !== 8) throw new Error(`It is packed in a way that browsers do not know. ${UNPACK}`);
  const reader = body.stream().pipeThrough(new DecompressionStream("deflate-raw")).getReader();
  const parts = [];
  for (let size = 0; ; ) {
    const { done, value } = await reader.read();
    if (done) return new Blob(parts);
    size += value.length;
    if (size > whole) {
      await reader.cancel();
      throw new Error(`It holds more than its list says. ${UNPACK}`);
    }
    parts.push(value);
  }
}
