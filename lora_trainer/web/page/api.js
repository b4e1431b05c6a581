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
const listeners = new Set();
let source = null;
let wasLost = false;

function connect() {
  source = new EventSource("/api/live");
  source.onopen = () => {
    if (wasLost) tell({ reconnected: true });
    wasLost = false;
    tell({ connected: true });
  };
  source.onerror = () => {
    wasLost = true;
    tell({ connected: false });
    if (source.readyState === EventSource.CLOSED) setTimeout(() => listeners.size && connect(), 3000);
  };
  source.onmessage = (event) => tell(JSON.parse(event.data));
}

function tell(message) {
  for (const listener of [...listeners]) listener(message);
}

// A browser has six connections to a server, for all of its tabs and for the pages that it keeps to go back to. So only
// what is seen holds one; what it missed is fetched when it is seen again.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    wasLost = source !== null;
    source?.close();
  } else if (listeners.size && source?.readyState === EventSource.CLOSED) connect();
});

export function listen(listener) {
  listeners.add(listener);
  if (!source || source.readyState === EventSource.CLOSED) connect();
  return () => {
    listeners.delete(listener);
    if (!listeners.size && source) {
      source.close();
      source = null;
    }
  };
}
