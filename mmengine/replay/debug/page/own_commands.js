// The debugger's commands, by name, for a page that contains the log.

/** @type {Record<string, (log: OwnLog, rest: string) => (Table | Lines)[]>} */
const OWN_COMMANDS = {
  step: (own, rest) => own.here(own.along(own.log.steps, numberOf(rest, "a number of steps", 1), (step) => `step ${step}`)),
  "reverse-step": (own, rest) =>
    own.here(own.along(own.log.steps, -numberOf(rest, "a number of steps", 1), (step) => `step ${step}`)),
  stepi: (own, rest) => moved(own, numberOf(rest, "a number of records", 1)),
  "reverse-stepi": (own, rest) => moved(own, -numberOf(rest, "a number of records", 1)),
  next: (own, rest) => own.here(own.along(own.log.touched[own.selected(rest)] ?? [], 1, String)),
  "reverse-next": (own, rest) => own.here(own.along(own.log.touched[own.selected(rest)] ?? [], -1, String)),
  continue: (own) => own.here(own.search(own.stops.filter((stop) => stop.on), false)),
  "reverse-continue": (own) => own.here(own.search(own.stops.filter((stop) => stop.on), true)),
  goto: (own, rest) => own.here(goTo(own, rest)),
  mark(own, rest) {
    if (!rest) throw new NotUnderstood("name the mark: mark NAME; at most 1000 are kept");
    own.marks[rest] = own.at;
    return own.here(`mark ${rest}`);
  },
  where: (own) => own.here(),
  break: (own, rest) => added(own, breakpoint(own.facts, own.next, conditionOf(own.log, rest))),
  watch(own, rest) {
    if (!rest) throw new NotUnderstood("say what to watch: block N, row N, entry KEY, request ID, or a field");
    return added(own, watchpoint(own.facts, own.next, rest));
  },
  delete(own, rest) {
    const gone = rest ? own.stop(rest) : null;
    own.stops = own.stops.filter((stop) => gone && stop !== gone);
    return [{ lines: [gone ? `breakpoint ${rest} deleted` : "all breakpoints deleted"] }];
  },
  disable: (own, rest) => enabled(own, rest, false),
  enable: (own, rest) => enabled(own, rest, true),
  info(own, rest) {
    const words = rest.split(/\s+/).filter(Boolean), isWhole = words.at(-1) === "all";
    if (isWhole) words.pop();
    if (!words.length) return [own.view("state", true)];
    if (words.length === 2 && words[0] in own.log.object_fields) return own.object(words[0], words[1]);
    const near = own.log.info.filter((/** @type {string} */ name) => name.startsWith(words[0]));
    const name = own.log.info.includes(words[0]) ? words[0] : near.length === 1 ? near[0] : "";
    if (!name) throw new NotUnderstood(`there is nothing like '${rest}' to show; use ${own.log.info.join(", ")}`);
    return [own.view(name, isWhole)];
  },
  request(own, rest) {
    const name = own.selected(rest), lines = own.requestLines(name);
    return [{ lines: lines ?? [`${name} is selected; it is not live here`] }];
  },
  list(own, rest) {
    const around = Math.min(500, numberOf(rest, "a number of records", 5)), rows = [];
    for (let at = Math.max(own.log.first, own.at - around); at <= Math.min(own.at + around, own.end - 1); at++) {
      rows.push([at === own.at ? "=>" : "", ...own.record(at).slice(0, 4)]);
    }
    return [{ title: "records", header: ["", "record", "step", "event", ""], rows, note: "" }];
  },
  last(own, rest) {
    if (!rest) throw new NotUnderstood("last needs an object: block N, row N, entry KEY, request ID, or a field");
    const read = watched(own.facts, rest), [at, stop] = own.lastHit([watchpoint(own.facts, 0, rest)], own.at + 1);
    if (!stop) return [{ lines: [`no record before this position changes ${rest}`] }];
    const record = own.record(at - 1);
    const lines = [
      `${rest} was last changed by record ${record[0]} (step ${record[1]}, ${record[2]})`,
      `  ${record[3]}`, `  ${changedText(read(at - 1), read(at))}`,
    ];
    const [kind, name] = rest.split(/\s+/);
    if (kind === "block") {
      const [before, after] = [at - 1, at].map((each) => valueAt(own.log.owners[Number(name)], each) || "no request");
      if (before !== after) lines.push(`  held by ${before} before, by ${after} after`);
    }
    return [{ lines }];
  },
  diff(own, rest) {
    const words = rest.split(/\s+/).filter(Boolean), isWhole = words.at(-1) === "all";
    if (isWhole) words.pop();
    const places = words.map((word) => own.marks[word] ?? positionOf(own, word));
    const first = places[0] ?? Math.max(own.log.first, own.at - 1), second = places[1] ?? own.at, rows = [];
    for (const [name, list] of Object.entries(own.log.values)) {
      const [before, after] = [valueAt(list, first) ?? "", valueAt(list, second) ?? ""];
      if (before !== after) rows.push([name, before, after]);
    }
    const header = ["", `before record ${first}`, `before record ${second}`];
    return [own.cut({ title: "difference", header, rows, note: "" }, isWhole)];
  },
  decide(own) {
    for (let at = own.at; at < own.end; at++) if (own.log.decided[at]) return [own.log.decided[at]];
    return [{ lines: ["no step is decided after this position"] }];
  },
  print: (own, rest) => {
    const { names, value } = watched(own.facts, rest)(own.at);
    return [{ lines: [names ? changedText({ names, value: null }, { names, value }).replace("nothing -> ", "") : python(value)] }];
  },
  help: (own, rest) => (rest === "fields" ? own.log.fields_help : helpOf(own, rest)),
  quit: () => [{ lines: ["close the page to end the session"] }],
};

function moved(/** @type {OwnLog} */ own, /** @type {number} */ count) {
  const before = own.at;
  own.move(own.at + count);
  return own.here(own.at === before ? "" : `record ${own.at}`);
}

function added(/** @type {OwnLog} */ own, /** @type {Stop} */ stop) {
  own.stops.push(stop);
  own.next += 1;
  return [{ lines: [`${stop.kind} ${stop.number}: ${stop.text}`] }];
}

function enabled(/** @type {OwnLog} */ own, /** @type {string} */ rest, /** @type {boolean} */ on) {
  const stop = own.stop(rest);
  stop.on = on;
  return [{ lines: [`${stop.kind} ${stop.number} ${on ? "enabled" : "disabled"}`] }];
}

function positionOf(/** @type {OwnLog} */ own, /** @type {string} */ word) {
  const at = numberOf(word, "the number of a record, or a mark");
  if (at < own.log.first) throw new NotUnderstood(`there is no record ${at}`);
  return at;
}

// Moves to the position that `rest` names, and returns the first line that `goto` prints.
function goTo(/** @type {OwnLog} */ own, /** @type {string} */ rest) {
  const [word] = rest.split(" ", 1), name = rest.slice(word.length).trim(), { first } = own.log;
  const toRecord = (/** @type {number} */ at) => {
    if (at < first || at > own.end) throw new NotUnderstood(`there is no record ${at}; the log has ${first} to ${own.end - 1}`);
    own.move(at);
    return `record ${at}`;
  };
  if (word === "start" && !name) return own.move(first), "the log begins";
  if (word === "end" && !name) return own.move(own.end), "";
  if ((word === "event" || word === "record") && name) return toRecord(numberOf(name, "the number of a record"));
  if (word === "mark" && name) {
    if (!(name in own.marks)) throw new NotUnderstood(`there is no mark '${name}'; mark NAME saves the position`);
    return toRecord(own.marks[name]);
  }
  if (word === "time" && name) {
    const ms = Number(name.replace(/ms$/, ""));
    if (!(ms >= 0 && ms < 1e15)) throw new NotUnderstood(`'${name}' is not a time in ms since the log's first record`);
    const found = own.log.records.findIndex((/** @type {any[]} */ record) => record[4] >= ms * 1e6);
    own.move(found < 0 ? own.end : first + found);
    return found < 0 ? "" : `${own.record(own.at)[7]} ms`;
  }
  if (word === "step" && name || /^[0-9]+$/.test(rest)) {
    const number = numberOf(name || rest, "the number of a step");
    const found = own.log.steps.find((/** @type {number[]} */ step) => step[1] === number), last = own.log.steps.at(-1)?.[1] ?? -1;
    if (!found) throw new NotUnderstood(`step ${number} has no decisions in this log${last < number ? `; the last step is ${last}` : ""}`);
    own.move(found[0]);
    return `step ${number}`;
  }
  if (!rest) throw new NotUnderstood("say where: goto STEP, event N, time MS, request ID, start or end");
  own.request = word === "request" && name ? name : rest;
  const places = own.log.arrivals[own.request];
  if (!places) throw new NotUnderstood(`no request in this log has the id '${own.request}'; info requests lists them`);
  return toRecord(places.at(-1));
}

/** @returns {(Table | Lines)[]} */
function helpOf(/** @type {OwnLog} */ own, /** @type {string} */ name) {
  if (!name) return own.log.help;
  const [word, also, usage, text] = own.find(name);
  const names = also.length ? `  (also: ${also.join(", ")})` : "";
  return [{ lines: [`${word} ${usage}`.trimEnd() + names, ...text.split("\n")] }];
}

openOwnLog().then(startDebugger);
