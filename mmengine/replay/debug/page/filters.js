// The filter language (field, operator, literal), as in mmengine/replay/debug/filters.py, and the breakpoints and
// watchpoints that use filters. No part of a filter is evaluated as code.

/** @typedef {Record<string, any>} Log the data that mmengine/replay/debug/page/collect.py collects */
/** @typedef {{ object: string[] | null, field: string, operator: string, literal: any }} Comparison */
/** @typedef {{ kind: string, number: number, text: string, hits: number, on: boolean, begin: (at: number) => void, first: (at: number) => string, hit: (at: number) => string }} Stop */

const OPERATORS = {
  "=": (/** @type {any} */ a, /** @type {any} */ b) => a === b,
  "==": (/** @type {any} */ a, /** @type {any} */ b) => a === b,
  "!=": (/** @type {any} */ a, /** @type {any} */ b) => a !== b,
  "<": (/** @type {any} */ a, /** @type {any} */ b) => a < b,
  "<=": (/** @type {any} */ a, /** @type {any} */ b) => a <= b,
  ">": (/** @type {any} */ a, /** @type {any} */ b) => a > b,
  ">=": (/** @type {any} */ a, /** @type {any} */ b) => a >= b,
  "~": (/** @type {any} */ a, /** @type {any} */ b) => python(a).includes(python(b)),
};
const OF_RECORDS = new Set(["position", "event", "request", "reason"]);
const MAX_CHARS = 1000, MAX_COMPARISONS = 16;

class NotUnderstood extends Error {}

// Writes a value as Python does.
function python(/** @type {any} */ value) {
  if (value === null || value === undefined) return "None";
  return value === true ? "True" : value === false ? "False" : String(value);
}

// Returns the value at a position, or null. `list`: the value's changes, as [position, new value].
function valueAt(/** @type {[number, any][] | undefined} */ list, /** @type {number} */ at) {
  let low = 0, high = list?.length ?? 0;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (/** @type {[number, any][]} */ (list)[middle][0] <= at) low = middle + 1;
    else high = middle;
  }
  return low ? /** @type {[number, any][]} */ (list)[low - 1][1] : null;
}

class Facts {
  constructor(/** @type {Log} */ log) {
    this.log = log;
  }

  field(/** @type {string} */ name, /** @type {number} */ at) {
    const record = this.log.records[at - this.log.first];
    switch (name) {
      case "position": return at;
      case "event": return record ? record[2] : "";
      case "request": return record ? record[5] : "";
      case "reason": return record ? record[6] : "";
      case "time_ms": return (record ?? this.log.records.at(-1))[4] / 1e6;
    }
    return valueAt(this.log.fields[name], at);
  }

  // Returns an object's values, or null if the state does not have the object.
  object(/** @type {string} */ kind, /** @type {string} */ name, /** @type {number} */ at) {
    if (kind !== "entry") {
      const found = valueAt(this.log.objects[`${kind} ${kind === "request" ? name : Number(name)}`], at);
      const isBlock = kind === "block" && Number(name) < this.log.num_blocks;
      return found ?? (isBlock ? [Number(name), 0, -1] : null);
    }
    const start = `entry ${name.toLowerCase()}`;
    const found = Object.keys(this.log.objects)
      .filter((key) => key.startsWith(start)).map((key) => valueAt(this.log.objects[key], at)).filter(Boolean);
    if (found.length > 1) throw new NotUnderstood(`${found.length} entries begin with '${name}'; give more digits`);
    return found[0] ?? null;
  }

  holds(/** @type {Comparison} */ comparison, /** @type {number} */ at) {
    const { object, field, operator, literal } = comparison;
    let value;
    if (object) {
      const found = this.object(object[0], object[1], at);
      if (!found) return false;
      value = found[this.log.object_fields[object[0]].indexOf(field)];
    } else value = this.field(field, at);
    if ((typeof value === "string") !== (typeof literal === "string") && operator !== "~") return operator === "!=";
    const plain = (/** @type {any} */ each) => (typeof each === "boolean" && operator !== "~" ? Number(each) : each);
    return OPERATORS[/** @type {keyof typeof OPERATORS} */ (operator)](plain(value), plain(literal));
  }
}

function parseFilter(/** @type {Log} */ log, /** @type {string} */ text) {
  if (text.length > MAX_CHARS) throw new NotUnderstood(`the filter has ${text.length} characters; the limit is ${MAX_CHARS}`);
  const words = [...text.matchAll(/"([^"]*)"|'([^']*)'|([=<>!~]+)|([^\s=<>!~"']+)|(["'])/g)].map((found) => {
    if (found[5]) throw new NotUnderstood(`${text} is not a filter: No closing quotation`);
    return found[1] ?? found[2] ?? found[3] ?? found[4];
  });
  const comparisons = [];
  while (words.length) {
    if (comparisons.length && words.shift() !== "and") throw new NotUnderstood(`${text} is not a filter: join comparisons with 'and'`);
    comparisons.push(parseComparison(log, words));
    if (comparisons.length > MAX_COMPARISONS) throw new NotUnderstood(`a filter has at most ${MAX_COMPARISONS} comparisons`);
  }
  if (!comparisons.length) throw new NotUnderstood("the filter is empty; write for example: free_blocks < 4");
  return comparisons;
}

function parseComparison(/** @type {Log} */ log, /** @type {string[]} */ words) {
  let object = null, fields = Object.keys(log.field_names);
  if (words.length >= 4 && words[0] in log.object_fields && !Object.hasOwn(OPERATORS, words[1])) {
    object = checkedObject(String(words.shift()), String(words.shift()));
    fields = log.object_fields[object[0]];
  }
  if (words.length < 3) throw new NotUnderstood("a comparison is: field operator literal, such as free_blocks < 4");
  const [field, operator, word] = words.splice(0, 3);
  if (!fields.includes(field)) throw new NotUnderstood(`there is no field '${field}'; the fields are ${fields.join(", ")}`);
  if (!Object.hasOwn(OPERATORS, operator)) throw new NotUnderstood(`there is no operator '${operator}'; use ${Object.keys(OPERATORS).join(" ")}`);
  let literal = literalOf(word);
  if (!object && field === "event") {
    literal = kindNamed(log, word) ?? word;
    if (operator !== "~" && !log.kinds.includes(literal)) throw new NotUnderstood(`there is no event '${word}'; the events are ${log.kinds.join(", ")}`);
  }
  return { object, field, operator, literal };
}

function kindNamed(/** @type {Log} */ log, /** @type {string} */ word) {
  return log.kinds.find((/** @type {string} */ kind) => kind.toLowerCase() === word.toLowerCase());
}

function checkedObject(/** @type {string} */ kind, /** @type {string} */ name) {
  if ((kind === "block" || kind === "row") && !/^[0-9]{1,9}$/.test(name)) throw new NotUnderstood(`'${name}' is not the number of a ${kind}`);
  if (kind === "entry" && !/^[0-9a-f]*$/i.test(name)) throw new NotUnderstood(`'${name}' is not the beginning of a key; keys have hexadecimal digits`);
  return [kind, name];
}

function literalOf(/** @type {string} */ word) {
  if (word === "true" || word === "false") return word === "true";
  return word.trim() !== "" && !Number.isNaN(Number(word)) ? Number(word) : word;
}

/** @returns {Stop} */
function breakpoint(/** @type {Facts} */ facts, /** @type {number} */ number, /** @type {string} */ text) {
  const comparisons = parseFilter(facts.log, text);
  const readsRecord = comparisons.some((each) => !each.object && OF_RECORDS.has(each.field));
  const holds = (/** @type {number} */ at) => comparisons.every((each) => facts.holds(each, at));
  let before = false;
  const stop = {
    kind: "breakpoint", number, text, hits: 0, on: true,
    begin(/** @type {number} */ at) { before = holds(at); },
    first(/** @type {number} */ at) { before = false; return stop.hit(at); },
    hit(/** @type {number} */ at) {
      const value = holds(at), was = before;
      before = value;
      return value && (readsRecord || !was) ? text : "";
    },
  };
  return stop;
}

// Returns a function that reads `block N`, `row N`, `entry KEY`, `request ID` or a field.
function watched(/** @type {Facts} */ facts, /** @type {string} */ text) {
  const words = text.split(/\s+/);
  if (words.length === 2 && words[0] in facts.log.object_fields) {
    const [kind, name] = checkedObject(words[0], words[1]);
    return (/** @type {number} */ at) => ({ names: facts.log.object_fields[kind], value: facts.object(kind, name, at) });
  }
  if (text in facts.log.field_names) return (/** @type {number} */ at) => ({ names: null, value: facts.field(text, at) });
  const fields = Object.keys(facts.log.field_names).join(", ");
  throw new NotUnderstood(`'${text}' cannot be watched; use block N, row N, entry KEY, request ID, or a field: ${fields}`);
}

/** @typedef {{ names: string[] | null, value: any }} Seen */

function changedText(/** @type {Seen} */ old, /** @type {Seen} */ now) {
  const { names } = old;
  if (names && old.value && now.value) {
    return names.map((name, place) => [name, old.value[place], now.value[place]])
      .filter(([, a, b]) => a !== b).map(([name, a, b]) => `${name} ${python(a)} -> ${python(b)}`).join(", ");
  }
  const shown = (/** @type {any} */ value) => {
    if (value === null) return "nothing";
    return names ? names.map((name, place) => `${name} ${python(value[place])}`).join(", ") : python(value);
  };
  return `${shown(old.value)} -> ${shown(now.value)}`;
}

/** @returns {Stop} */
function watchpoint(/** @type {Facts} */ facts, /** @type {number} */ number, /** @type {string} */ text) {
  const read = watched(facts, text);
  let old = /** @type {Seen} */ ({ names: null, value: null });
  const stop = {
    kind: "watchpoint", number, text, hits: 0, on: true,
    begin(/** @type {number} */ at) { old = read(at); },
    first(/** @type {number} */ at) { stop.begin(at); return ""; },
    hit(/** @type {number} */ at) {
      const was = old;
      old = read(at);
      const differs = JSON.stringify(was.value) !== JSON.stringify(old.value);
      return differs ? `${text}: ${changedText(was, old)}` : "";
    },
  };
  return stop;
}
