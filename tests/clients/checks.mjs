// The same as checks.py, for clients in JavaScript.

export const { BASE_URL, SMALL_URL, MODEL, IMAGE_URL } = process.env;
export const QUESTION = "What is a triangle?";
export const TAUGHT = "Return JSON for this image.";
const checks = [];

export class Skipped extends Error {}

export function check(capability, asked) {
  checks.push([capability, asked]);
}

export function needsTools() {
  if (process.env.TAKES_TOOLS !== "1") throw new Skipped("the server takes no tools");
}

export function assert(isTrue, text = "it does not hold") {
  if (!isTrue) throw new Error(text);
}

export async function run() {
  for (const [capability, asked] of checks) {
    const begun = performance.now();
    let outcome = "ok", detail = "";
    try {
      await asked();
    } catch (error) {
      const said = `${error?.name}: ${error?.message} ${error?.responseBody ?? ""} ${error?.code ?? ""}`;
      if (error instanceof Skipped) [outcome, detail] = ["skipped", error.message];
      else if (said.includes("unsupported_parameter")) [outcome, detail] = ["refused", said.slice(0, 300)];
      else [outcome, detail] = ["failed", (said + "\n" + error?.stack).slice(0, 3000)];
    }
    const seconds = Math.round((performance.now() - begun) / 10) / 100;
    console.log(JSON.stringify({ capability, outcome, detail, seconds }));
  }
}

function post(fields, signal) {
  const body = JSON.stringify({ messages: [{ role: "user", content: QUESTION }], ...fields });
  return fetch(`${SMALL_URL}/chat/completions`, { method: "POST", body, signal });
}

// Fills the queue of the small server, then starts `asked`, and frees the queue after `milliseconds`.
export async function fullQueue(asked, milliseconds = 600) {
  const leaving = new AbortController();
  const long = { max_tokens: 3000, ignore_eos: true, stream: true };
  const occupy = async () => {
    while (!leaving.signal.aborted) {
      await (await post(long, leaving.signal)).text();
      await new Promise((resume) => setTimeout(resume, 10));
    }
  };
  for (let i = 0; i < 3; i++) occupy().catch(() => {});
  const end = performance.now() + 10000;
  for (;;) {
    const got = await post({ max_tokens: 1 }, AbortSignal.timeout(300)).catch(() => null);
    if (got?.status === 429) break;
    assert(performance.now() < end, "the queue does not fill");
  }
  setTimeout(() => leaving.abort(), milliseconds);
  return asked();
}
