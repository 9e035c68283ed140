// A backend for a page that contains its log. Answers the debugger's commands from the data of collect.py.

class OwnLog {
  constructor(/** @type {Log} */ log) {
    // Without prototypes, a request named "constructor" is an ordinary key.
    for (const value of Object.values(log)) if (typeof value === "object" && !Array.isArray(value)) Object.setPrototypeOf(value, null);
    this.log = log;
    this.facts = new Facts(log);
    this.at = log.first;
    this.end = log.first + log.records.length;
    this.request = "";
    this.marks = /** @type {Record<string, number>} */ (Object.create(null));
    this.stops = /** @type {Stop[]} */ ([]);
    this.next = 1;
    this.name = log.name;
    this.views = log.info;
    this.commands = log.commands.flatMap((/** @type {any[]} */ each) => [each[0], ...each[1]]);
  }

  async run(/** @type {string[]} */ lines) {
    return lines.map((line) => {
      try {
        return { blocks: this.answer(line.trim()), error: "" };
      } catch (error) {
        if (error instanceof NotUnderstood) return { blocks: [], error: error.message };
        throw error;
      }
    });
  }

  /** @returns {(Table | Lines)[]} */
  answer(/** @type {string} */ line) {
    if (!line || line.startsWith("#")) return [];
    const [word] = line.split(" ", 1), rest = line.slice(word.length).trim();
    const name = this.find(word)[0];
    const own = OWN_COMMANDS[name];
    if (!own) throw new NotUnderstood("only one log is open; open two with: mmengine log debug DIR OTHER");
    return own(this, rest);
  }

  find(/** @type {string} */ word) {
    const all = this.log.commands;
    const exact = all.find((/** @type {any[]} */ each) => each[0] === word || each[1].includes(word));
    if (exact) return exact;
    const found = all.filter((/** @type {any[]} */ each) => each[0].startsWith(word));
    if (found.length === 1) return found[0];
    const names = found.map((/** @type {any[]} */ each) => each[0]).join(", ");
    throw new NotUnderstood(found.length ? `'${word}' is ambiguous: ${names}` : `there is no command '${word}'; help lists the commands`);
  }

  record(/** @type {number} */ at) {
    return this.log.records[at - this.log.first];
  }

  /** @returns {Lines[]} */
  here(/** @type {string} */ why = "") {
    const record = this.record(this.at), lines = why ? [why] : [];
    if (record) lines.push(`step ${record[1]}, record ${record[0]}, ${record[7]} ms: ${record[2]}`, `  ${record[3]}`);
    else lines.push(`step ${this.log.end_step}: ${this.log.end_text}`);
    const found = this.log.findings.filter((/** @type {any[]} */ each) => each[0] === this.at);
    return [{ lines: [...lines, ...found.map((/** @type {any[]} */ each) => `  breaks the rule ${each[1]}: ${each[2]}`)] }];
  }

  move(/** @type {number} */ at) {
    this.at = Math.max(this.log.first, Math.min(this.end, at));
  }

  // Moves forward or back to the next hit of a stop, or else to the log's end or beginning. Returns the reason, or "".
  search(/** @type {Stop[]} */ stops, /** @type {boolean} */ back) {
    const [at, stop, why] = back ? this.lastHit(stops, this.at) : this.nextHit(stops);
    this.move(at);
    if (!stop) return "";
    stop.hits += 1;
    return `${stop.kind} ${stop.number}, ${why}`;
  }

  /** @returns {[number, Stop | null, string]} */
  nextHit(/** @type {Stop[]} */ stops) {
    for (const stop of stops) stop.begin(this.at);
    for (let at = this.at + 1; at <= this.end; at++) {
      const whys = stops.map((stop) => stop.hit(at));
      const place = whys.findIndex(Boolean);
      if (place >= 0) return [at, stops[place], whys[place]];
    }
    return [this.end, null, ""];
  }

  /** @returns {[number, Stop | null, string]} */
  lastHit(/** @type {Stop[]} */ stops, /** @type {number} */ before) {
    let found = /** @type {[number, Stop | null, string]} */ ([this.log.first, null, ""]);
    for (let at = this.log.first; at < before; at++) {
      const whys = stops.map((stop) => (at === this.log.first ? stop.first(at) : stop.hit(at)));
      const place = whys.findIndex(Boolean);
      if (place >= 0) found = [at, stops[place], whys[place]];
    }
    return found;
  }

  // Moves by `count` entries in a list of [position, value]. Returns the text that `why` makes from the last value.
  along(/** @type {[number, any][]} */ list, /** @type {number} */ count, /** @type {(value: any) => string} */ why) {
    let said = "";
    for (let left = Math.abs(count); left > 0; left--) {
      const next = count > 0 ? list.find(([at]) => at > this.at) : list.findLast(([at]) => at < this.at);
      this.move(next ? next[0] : count > 0 ? this.end : this.log.first);
      said = next ? why(next[1]) : "";
      if (!next) break;
    }
    return said;
  }

  stop(/** @type {string} */ text) {
    const number = numberOf(text, "the number of a breakpoint");
    const found = this.stops.find((each) => each.number === number);
    if (!found) throw new NotUnderstood(`there is no breakpoint ${number}; info breakpoints lists them`);
    return found;
  }

  selected(/** @type {string} */ name) {
    if (!name && !this.request) throw new NotUnderstood("name a request, or select one with: request ID");
    this.request = name || this.request;
    return this.request;
  }

  requestLines(/** @type {string} */ name) {
    return valueAt(this.log.requests[name], this.at);
  }

  /** @returns {Table | Lines} */
  view(/** @type {string} */ name, /** @type {boolean} */ isWhole) {
    if (name === "findings") {
      const lines = this.log.findings.map((/** @type {any[]} */ each) => each[3]);
      return { lines: lines.length ? lines : ["no decision read so far breaks a rule"] };
    }
    if (name === "breakpoints") {
      const rows = this.stops.map((each) => [each.number, each.kind, each.text, each.hits, each.on ? "" : "disabled"]);
      return { title: "breakpoints", header: ["number", "kind", "condition", "hits", ""], rows, note: "" };
    }
    if (name !== "requests") return this.cut(valueAt(this.log.views[name], this.at), isWhole);
    const rows = Object.entries(this.log.arrivals).map(([id, places]) => {
      const live = this.facts.object("request", id, this.at);
      return [id, places.at(-1), !live ? "" : live[1] < 0 ? "waits" : `row ${live[1]}`];
    });
    return this.cut({ title: "requests read so far", header: ["request", "arrived at record", "now"], rows, note: "" }, isWhole);
  }

  /** @returns {Table | Lines} */
  cut(/** @type {Table | Lines} */ block, /** @type {boolean} */ isWhole) {
    const most = this.log.most_rows;
    if ("lines" in block || isWhole || block.rows.length <= most) return block;
    const more = `${block.rows.length - most} more rows; add the word "all" to show them`;
    return { ...block, rows: block.rows.slice(0, most), note: block.note ? `${block.note}; ${more}` : more };
  }

  /** @returns {(Table | Lines)[]} */
  object(/** @type {string} */ kind, /** @type {string} */ name) {
    checkedObject(kind, name);
    const found = this.facts.object(kind, name, this.at);
    if (!found) throw new NotUnderstood(`the state has no ${kind} ${name} here`);
    if (kind === "request") {
      this.request = name;
      return [{ lines: this.requestLines(name) }];
    }
    const title = `${kind} ${name}`;
    if (kind === "row") return [{ title: `row ${name}`, header: this.log.object_fields.row, rows: [found], note: "" }];
    const table = valueAt(this.log.views[kind === "block" ? "blocks" : "encoder"], this.at);
    const key = kind === "block" ? Number(name) : found[0].slice(0, 16);
    const rows = table.rows.filter((/** @type {any[]} */ row) => row[0] === key);
    if (kind === "block" && !rows.length) rows.push([key, "free", 0, "", "", "", "", ""]);
    return [{ ...table, rows, title: kind === "block" ? "blocks" : table.title || title }];
  }
}

function numberOf(/** @type {string} */ text, /** @type {string} */ what, /** @type {number | null} */ otherwise = null) {
  if (!text && otherwise !== null) return otherwise;
  if (!/^[+-]?[0-9]{1,15}$/.test(text)) throw new NotUnderstood(`'${text}' is not ${what}`);
  return Number(text);
}

// Converts the text after `break` to a breakpoint's condition.
function conditionOf(/** @type {Log} */ log, /** @type {string} */ text) {
  if (!text) throw new NotUnderstood("say where to stop: break STEP, break EVENT, or break CONDITION");
  if (/^[0-9]+$/.test(text)) return `step = ${text}`;
  const [head, ...after] = text.split(" if "), condition = after.join(" if ");
  if (head.startsWith("if ") && !after.length) return head.slice(3).trim();
  let words = head.split(/\s+/);
  let kind = kindNamed(log, words[0].replace(/^event=/, ""));
  if (!kind && words[0] === "event" && words.length > 1 && kindNamed(log, words[1])) {
    words = words.slice(1);
    kind = kindNamed(log, words[0]);
  }
  if (!kind || words.length > 2) return text.replace(/^if /, "").trim();
  const parts = [`event = ${kind}`];
  if (words.length === 2) parts.push(`request = '${words[1]}'`);
  return [...parts, ...(after.length ? [condition.trim()] : [])].join(" and ");
}

async function openOwnLog() {
  const letters = atob(document.getElementById("data")?.textContent ?? ""), packed = new Uint8Array(letters.length);
  for (let place = 0; place < letters.length; place++) packed[place] = letters.charCodeAt(place);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new OwnLog(await new Response(stream).json());
}
