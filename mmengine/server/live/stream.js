// Reads server-sent events from the server. Uses fetch, because EventSource cannot send the API key in a header.

const LEAST_WAIT_MS = 500, MOST_WAIT_MS = 5000;

/** An error response from the server. */
class Refused extends Error {
  /** @param {number} status @param {string} message */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** @param {string} key @returns {Record<string, string>} */
function authorization(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** @param {string} path @param {string} key @param {RequestInit} [options] */
async function ask(path, key, options = {}) {
  const response = await fetch(path, { ...options, headers: { ...authorization(key), ...options.headers } });
  if (response.ok) return response;
  const said = await response.json().catch(() => ({}));
  throw new Refused(response.status, said.error?.message ?? `the server answers ${response.status}`);
}

/**
 * Yields the events of a response as they arrive.
 * @param {Response} response
 * @returns {AsyncGenerator<{ event: string, data: string }>}
 */
async function* eventsOf(response) {
  const body = /** @type {ReadableStream<Uint8Array>} */ (response.body);
  const reader = body.pipeThrough(/** @type {any} */ (new TextDecoderStream())).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = /** @type {string} */ (parts.pop());
    for (const part of parts) {
      const lines = part.split("\n"), field = (/** @type {string} */ name) => lines.find((line) => line.startsWith(`${name}: `))?.slice(name.length + 2);
      const data = field("data");
      if (data !== undefined) yield { event: field("event") ?? "message", data };
    }
  }
}

/**
 * Follows /live/events forever: reconnects after the connection or the server has ended.
 * @param {() => string} key
 * @param {{ take: (event: string, data: any) => void, status: (text: string, error?: unknown) => void }} told
 * @param {() => Promise<void>} keyGiven resolves when the user has entered another key
 */
async function follow(key, told, keyGiven) {
  for (let wait = LEAST_WAIT_MS; ; wait = Math.min(2 * wait, MOST_WAIT_MS)) {
    try {
      told.status("connecting");
      const response = await ask("/live/events", key());
      told.status("live");
      for await (const { event, data } of eventsOf(response)) {
        wait = LEAST_WAIT_MS;
        told.take(event, JSON.parse(data));
      }
      told.status("reconnecting");
    } catch (error) {
      if (error instanceof Refused && error.status === 401) {
        const text = key() ? "The server does not accept this API key." : "The server needs an API key.";
        told.status("key needed", new Refused(401, text));
        await keyGiven();
        continue;
      }
      told.status("reconnecting", error);
    }
    await new Promise((done) => setTimeout(done, wait));
  }
}
