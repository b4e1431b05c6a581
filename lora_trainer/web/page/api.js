// Requests to the server under /api, and what changes there as server-sent events.

export class ApiError extends Error {
  constructor(status, problems) {
    super(problems.map((each) => each.message).join("\n"));
    this.status = status;
    this.problems = problems;
  }
}

const NOT_REACHED = {
  message: "The server does not answer.",
  fix: "Runs continue without it. Start it again in a terminal: lora-trainer ui",
};

async function request(method, path, body) {
  let response;
  try {
    response = await fetch(`/api${path}`, {
      method,
      headers: body === undefined ? {} : { "content-type": "application/json" },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch {
    throw new ApiError(0, [NOT_REACHED]);
  }
  const document = await response.json().catch(() => ({}));
  if (response.ok) return document;
  if (response.status === 401 && path !== "/login") window.dispatchEvent(new Event("token-needed"));
  throw new ApiError(
    response.status,
    document.problems ?? [{ message: `The server answered ${response.status}.`, fix: "Look into its terminal." }],
  );
}

export const get = (path) => request("GET", path);
export const post = (path, body = {}) => request("POST", path, body);
export const remove = (path) => request("DELETE", path);

// Calls each of `listeners` with every message. After a lost connection they get {reconnected: true}: what happened
// meanwhile is fetched anew.
//
// A hidden page has no connection: a browser opens six to one server, and a seventh page would get no answer at all.
const listeners = new Set();
const HIDDEN_MS = 5000;
const AGAIN_MS = 3000;
let source = null;
let timer = 0;
let wasLost = false;

function connect() {
  disconnect();
  const own = (source = new EventSource("/api/live"));
  own.onopen = () => {
    if (wasLost) tell({ reconnected: true });
    wasLost = false;
    tell({ connected: true });
  };
  own.onerror = () => {
    wasLost = true;
    tell({ connected: false });
    if (own === source && own.readyState === EventSource.CLOSED) {
      disconnect();
      timer = setTimeout(follow, AGAIN_MS);
    }
  };
  own.onmessage = (event) => tell(JSON.parse(event.data));
}

function disconnect() {
  clearTimeout(timer);
  source?.close();
  source = null;
}

// Connects where somebody listens and looks, and nothing is connected.
function follow() {
  if (listeners.size && !source && !document.hidden) connect();
}

function pause() {
  wasLost ||= source !== null;
  disconnect();
}

document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  if (!document.hidden) follow();
  else if (source) timer = setTimeout(pause, HIDDEN_MS);
});
// A page that was left is kept by the browser for a while, to go back to.
window.addEventListener("pagehide", pause);
window.addEventListener("pageshow", follow);

function tell(message) {
  for (const listener of [...listeners]) {
    try {
      listener(message);
    } catch (error) {
      console.error(error); // the others are told too
    }
  }
}

export function listen(listener) {
  listeners.add(listener);
  follow();
  return () => {
    listeners.delete(listener);
    if (!listeners.size) disconnect();
  };
}
