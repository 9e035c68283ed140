// The live page's chat with the model, with a system prompt and several turns. Each token in an answer has a
// colour that shows its probability, and accepted draft tokens are marked.

const SHAPE = {
  type: "object",
  properties: { shape: { enum: ["circle", "square", "triangle"] }, colour: { type: "string", maxLength: 12 } },
  required: ["shape", "colour"],
  additionalProperties: false,
};
/** @type {Record<string, object | null>} */
const FORMS = { "free text": null, "any JSON object": {}, "a shape": SHAPE };
const OWN_FORM = "a schema of your own";

/** @typedef {{ token: string, logprob: number }} Likely */
/** @typedef {Likely & { top_logprobs: Likely[] }} Entry */
/** @typedef {{ role: string, content: any }} Message */

class Playground {
  /** @param {(id: string) => any} byId @param {() => string} key */
  constructor(byId, key) {
    this.byId = byId;
    this.key = key;
    this.image = "";
    /** @type {Message[]} */
    this.turns = []; // The questions and answers so far.
    /** @type {AbortController | null} */
    this.running = null;
    byId("form").append(...[...Object.keys(FORMS), OWN_FORM].map((name) => element("option", { value: name }, name)));
    byId("form").addEventListener("change", () => (byId("schema").hidden = byId("form").value !== OWN_FORM));
    byId("ask").addEventListener("submit", (/** @type {Event} */ event) => {
      event.preventDefault();
      if (this.running) this.running.abort();
      else void this.ask();
    });
    byId("question").addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
    });
    byId("file").addEventListener("change", () => this.take(byId("file").files[0]));
    byId("clear").addEventListener("click", () => this.show(""));
    byId("new-chat").addEventListener("click", () => this.begin());
    const drop = byId("drop");
    drop.addEventListener("dragover", (/** @type {Event} */ event) => {
      event.preventDefault();
      drop.classList.add("over");
    });
    drop.addEventListener("dragleave", () => drop.classList.remove("over"));
    drop.addEventListener("drop", (/** @type {DragEvent} */ event) => {
      event.preventDefault();
      drop.classList.remove("over");
      this.take(event.dataTransfer?.files[0]);
    });
  }

  /** @param {File | undefined} file */
  take(file) {
    if (!file) return;
    const reader = new FileReader();
    reader.addEventListener("load", () => this.show(String(reader.result)));
    reader.readAsDataURL(file);
  }

  /** @param {string} image a data: URL */
  show(image) {
    this.image = image;
    this.byId("picture").hidden = this.byId("clear").hidden = !image;
    if (image) this.byId("picture").src = image;
    else this.byId("file").value = "";
  }

  /** Removes all turns. */
  begin() {
    this.running?.abort();
    this.turns = [];
    this.byId("turns").replaceChildren();
    this.byId("note").textContent = "";
  }

  /** Returns the user's next message. @returns {Message} */
  question() {
    const { byId, image } = this, text = { type: "text", text: byId("question").value };
    return { role: "user", content: image ? [{ type: "image_url", image_url: { url: image } }, text] : [text] };
  }

  /** Returns the request body. Throws if the user's schema is not valid JSON. @param {Message} question */
  body(question) {
    const { byId } = this, system = byId("system").value.trim();
    const name = byId("form").value, schema = name === OWN_FORM ? JSON.parse(byId("schema").value) : FORMS[name];
    const form = schema === null ? {} : name === "any JSON object" ? { type: "json_object" } : { type: "json_schema", json_schema: { name: "answer", schema } };
    return {
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.turns, question],
      max_completion_tokens: Number(byId("most").value),
      temperature: Number(byId("temperature").value),
      stream: true,
      logprobs: true,
      top_logprobs: 3,
      stream_options: { include_usage: true },
      ...(schema === null ? {} : { response_format: form }),
    };
  }

  async ask() {
    const { byId } = this, note = byId("note"), question = this.question(), turns = this.turns;
    const name = `live-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
    const shown = questionOf(byId("question").value, this.image), answer = element("div", { className: "answer" });
    byId("turns").append(shown, answer);
    note.textContent = "";
    this.running = new AbortController();
    byId("go").textContent = "Stop";
    try {
      const headers = { "content-type": "application/json", "x-request-id": name };
      const options = { method: "POST", headers, body: JSON.stringify(this.body(question)), signal: this.running.signal };
      const response = await ask("/v1/chat/completions", this.key(), options);
      this.keep(turns, question, answer);
      const usage = await this.read(response, answer);
      const marked = await this.mark(name, answer);
      note.textContent = `${formatCount(usage?.completion_tokens ?? 0)} answer tokens, ${formatCount(usage?.prompt_tokens ?? 0)} prompt tokens${marked}`;
    } catch (error) {
      note.textContent = error instanceof DOMException ? "stopped" : error instanceof Error ? error.message : String(error);
      if (!answer.textContent) this.takeBack(turns, question, [shown, answer]);
    } finally {
      this.running = null;
      byId("go").textContent = "Ask";
    }
  }

  /** Adds an accepted question and its answer to the turns. The answer may still grow. @param {Message[]} turns
  @param {Message} question @param {HTMLElement} answer */
  keep(turns, question, answer) {
    turns.push(question, { role: "assistant", get content() { return answer.dataset.content ?? ""; } });
    this.byId("question").value = "";
    this.show("");
  }

  /** Removes a question that got no answer, and puts its text back into the input field. @param {Message[]} turns
  @param {Message} question @param {HTMLElement[]} elements */
  takeBack(turns, question, elements) {
    for (const each of elements) each.remove();
    const place = turns.indexOf(question);
    if (place >= 0) turns.splice(place, 2);
    const field = this.byId("question");
    field.value ||= question.content.at(-1).text;
  }

  /** @param {Response} response @param {HTMLElement} answer */
  async read(response, answer) {
    let place = 0, usage = null;
    for await (const { data } of eventsOf(response)) {
      if (data === "[DONE]") break;
      const said = JSON.parse(data), choice = said.choices?.[0];
      if (said.error) throw new Error(said.error.message);
      usage = said.usage ?? usage;
      const entries = choice?.logprobs?.content ?? [];
      const content = choice?.delta.content ?? "", text = (choice?.delta.reasoning_content ?? "") + content;
      answer.dataset.content = (answer.dataset.content ?? "") + content;
      if (text || entries.length) answer.append(tokenOf(text, entries, place));
      place += entries.length;
    }
    return usage;
  }

  /**
   * Marks the tokens that the log says were accepted drafts, and returns a text with their number.
   * @param {string} name
   * @param {HTMLElement} answer
   */
  async mark(name, answer) {
    const response = await ask(`/live/ask/drafts?request=${encodeURIComponent(name)}`, this.key());
    /** @type {number[]} */
    const drafts = await response.json();
    let count = 0;
    for (const span of /** @type {NodeListOf<HTMLElement>} */ (answer.querySelectorAll(".token"))) {
      const kept = drafts.slice(Number(span.dataset.first), Number(span.dataset.last)).reduce((sum, one) => sum + one, 0);
      count += kept;
      if (kept) span.classList.add("draft");
      if (kept) span.title += "\na draft";
    }
    return count ? `, ${formatCount(count)} of them drafts` : "";
  }
}

/** Returns the element for a question. @param {string} text @param {string} image a data: URL, or "" */
function questionOf(text, image) {
  return element("div", { className: "question" }, ...(image ? [element("img", { src: image, alt: "" })] : []), text);
}

/**
 * Returns the element for a piece of text and its tokens. The element's class (p0 to p3) depends on the least likely
 * token. A less likely token gives a higher class.
 * @param {string} text
 * @param {Entry[]} entries
 * @param {number} first number of the first token in the answer
 */
function tokenOf(text, entries, first) {
  const span = element("span", { className: "token" }, text);
  const least = entries.reduce((low, entry) => Math.min(low, entry.logprob), 0);
  span.dataset.first = String(first);
  span.dataset.last = String(first + entries.length);
  span.classList.add(`p${Math.min(3, Math.floor(-least / 0.7))}`);
  const percent = (/** @type {number} */ logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
  const lineOf = (/** @type {Likely} */ each) => `${JSON.stringify(each.token)} ${percent(each.logprob)}`;
  span.title = entries.map((entry) => [lineOf(entry), ...entry.top_logprobs.map((each) => `  ${lineOf(each)}`)].join("\n")).join("\n");
  return span;
}
