// Writes the panel next to the charts, which describes the selected step and request. Texts from the log are inserted
// as text, never as HTML.

const MOST_ROWS = 60;

/**
 * @param {string} tag
 * @param {Record<string, any>} properties
 * @param {(string | Node)[]} children
 * @returns {any}
 */
function element(tag, properties = {}, ...children) {
  const made = /** @type {any} */ (document.createElement(tag));
  for (const [name, value] of Object.entries(properties)) {
    if (name === "width") made.style.width = value;
    else if (name === "click") made.addEventListener("click", value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

/** Shows or hides the panel on a narrow screen. On a wide screen, the panel is always visible. @param {boolean} isOpen */
function openPanel(isOpen) {
  document.body.classList.toggle("panel-open", isOpen);
}

function drawPanel(/** @type {HTMLElement} */ panel, /** @type {View} */ view, /** @type {(lane: number, step?: number) => void} */ choose) {
  const { data, step } = view;
  const parts = [
    element("button", { type: "button", className: "close", title: "Close", click: () => openPanel(false) }, "✕"),
    element("h2", {}, `Step ${formatCount(step + data.first_step)}`),
    element("p", { className: "when" }, whenOf(data, step)),
    ...notesAt(data, step).map((/** @type {string} */ note) => element("p", { className: "note" }, note)),
    ...metersOf(data, step),
  ];
  const { batch, waiting } = stepAt(data, step);
  const tokens = tokensAt(data, step);
  parts.push(
    ...tableOf(`In the batch (${batch.length})`, batch, ({ lane, segment }) => [
      `${formatCount(tokens.get(lane) ?? 1)} ${data.states[data.segment_state[segment]]}`,
    ], view, choose),
    ...tableOf(`Waiting (${waiting.length})`, waiting, ({ segment }) => [
      reasonOf(data, segment, step, firstThatDoesNotFit(data, waiting)),
    ], view, choose),
  );
  if (view.lane >= 0) parts.push(...lifeOf(data, view.lane, choose));
  panel.replaceChildren(...parts);
}

function whenOf(/** @type {Data} */ data, /** @type {number} */ step) {
  const parts = [`${formatMs(data.step_time_ms[step])} after the first step`];
  parts.push(data.step_failed[step] ? "the step failed" : `${formatMs(data.step_device_ms[step])} on the device`);
  return parts.join(", ");
}

function notesAt(/** @type {Data} */ data, /** @type {number} */ step) {
  const number = step + data.first_step, end = data.numSteps - 1;
  return data.notes
    .filter(([at]) => at === number || (step === end && at > number))
    .slice(0, 4)
    .map(([, text]) => text);
}

function metersOf(/** @type {Data} */ data, /** @type {number} */ step) {
  const { config } = data, blocks = config.num_blocks - 1;
  const rows = [
    ["tokens", data.step_tokens[step], config.token_budget],
    ["rows", data.step_rows[step], config.max_num_seqs],
    ["KV blocks", blocks - data.step_free_blocks[step], blocks],
    ["encoder held", data.step_encoder_held[step], config.encoder_cache_size],
    ["encoded", data.step_encoded[step], config.encoder_budget],
  ];
  return rows.map(([name, used, whole]) =>
    element(
      "div",
      { className: "meter" },
      element("span", {}, name),
      element("div", { className: "bar" }, element("i", { width: `${Math.min(100, (100 * used) / Math.max(whole, 1))}%` })),
      element("span", { className: "number" }, `${formatCount(used)} / ${formatCount(whole)}`),
    ),
  );
}

function tableOf(/** @type {string} */ title, /** @type {Placed[]} */ entries, /** @type {(entry: Placed) => string[]} */ cells, /** @type {View} */ view, /** @type {(lane: number, step?: number) => void} */ choose) {
  const { data } = view, parts = [element("h3", {}, title)];
  const rows = entries.slice(0, MOST_ROWS).map((/** @type {Placed} */ entry) => {
    const state = data.segment_state[entry.segment];
    return element(
      "tr",
      { className: entry.lane === view.lane ? "chosen" : "", click: () => choose(entry.lane) },
      element("td", {}, element("i", { className: `dot ${STATE_CLASSES[state]}` })),
      element("td", { className: "name", title: data.ids[entry.lane] }, data.ids[entry.lane]),
      ...cells(entry).map((/** @type {string} */ text) => element("td", {}, text)),
    );
  });
  parts.push(element("table", {}, element("tbody", {}, ...rows)));
  if (entries.length > MOST_ROWS) {
    parts.push(element("p", { className: "more" }, `and ${formatCount(entries.length - MOST_ROWS)} more`));
  }
  return parts;
}

// Returns the id of the request that blocks all later waiting requests, or "another". The blocking
// request is the first request without a row that lacks KV blocks.
function firstThatDoesNotFit(/** @type {Data} */ data, /** @type {Placed[]} */ waiting) {
  const first = waiting.find(({ segment }) => {
    const kind = data.reasons[data.segment_reason[segment]];
    return data.segment_state[segment] !== PASSED_OVER && (kind === "blocks");
  });
  return first ? data.ids[first.lane] : "another";
}

// Returns a short text that says why a lane gets no tokens at a step. `segment`: the lane's segment. `ahead`: the
// request that comes first.
function reasonOf(/** @type {Data} */ data, /** @type {number} */ segment, /** @type {number} */ step, ahead = "another") {
  const kind = data.reasons[data.segment_reason[segment] || data.step_common_reason[step]];
  const needed = formatCount(data.segment_needed[segment]);
  /** @type {Record<string, string>} */
  const sentences = {
    "": "arrived",
    blocks: `needs ${needed} free blocks`,
    rows: "all rows are taken",
    "token budget": "the token budget is spent",
    "encoder budget": `encoder budget: needs ${needed}`,
    "encoder cache": `encoder cache: needs ${needed}`,
    "encoder work": `encoder work: needs ${needed}`,
    "encoder pieces": `encoded in pieces: takes ${needed}`,
    grammar: "its grammar is not compiled yet",
    "group prefill": "another computes the prompt they share",
    behind: `behind ${ahead}`,
    "in flight": "its last token is still in flight",
    "gave way": "was preempted in this step",
    "preempting step": "no request starts in a step that preempts",
    "prefill first": "prompts go first",
  };
  return sentences[kind] ?? kind;
}

function lifeOf(/** @type {Data} */ data, /** @type {number} */ lane, /** @type {(lane: number, step?: number) => void} */ choose) {
  const end = data.lane_end[lane] < data.numSteps || data.ends[lane] ? data.ends[lane] || "ended" : "no end in this log";
  const facts = [
    `${formatCount(data.lane_prompt[lane])} prompt tokens`,
    `${formatCount(Math.max(0, data.lane_cached[lane]))} of them cached`,
    data.lane_media[lane] ? `${data.lane_media[lane]} media, ${formatCount(data.lane_embeds[lane])} embeddings` : "no media",
    `${formatCount(data.lane_answer[lane])} tokens of answer`,
    `${data.lane_preemptions[lane]} preemptions`,
    end,
  ];
  const rows = [], last = data.lane_segments[lane + 1];
  let before = "";
  for (let segment = data.lane_segments[lane]; segment < last && rows.length < MOST_ROWS; segment++) {
    const state = data.segment_state[segment], step = data.segment_step[segment];
    const waits = state !== PREFILL && state !== DECODE;
    const text = `${data.states[state]}${waits && data.segment_reason[segment] ? `: ${reasonOf(data, segment, step)}` : ""}`;
    if (text === before) continue;
    before = text;
    rows.push(
      element(
        "tr",
        { click: () => choose(lane, step) },
        element("td", {}, element("i", { className: `dot ${STATE_CLASSES[state]}` })),
        element("td", { className: "number" }, formatCount(step + data.first_step)),
        element("td", {}, text),
      ),
    );
  }
  return [
    element("h3", {}, "Request"),
    element("b", {}, data.ids[lane]),
    element("p", { className: "more" }, facts.join(" · ")),
    element("table", {}, element("tbody", {}, ...rows)),
  ];
}
