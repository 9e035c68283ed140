// Collects a growing log's columns from the server's messages, and builds the data that the charts draw.

/** @typedef {{ type: "begin", name: string, version: string, states: string[], first_step: number, config: Record<string, number> }} Begin */
/** @typedef {{ ids: string[], start: number[], prompt: number[], media: number[], embeds: number[] }} Arrived */
/** @typedef {{ lane: number[], step: number[], state: number[], reason: number[], needed: number[] }} Segments */
/** @typedef {{ type: "more", steps: Record<string, number[]>, failed: number[], lanes: Arrived, changed: [number, number, number, number, number, string][], segments: Segments, chunks: number[][], reasons: string[], notes: [number, string][] }} More */

const CHANGING = ["end", "cached", "answer", "preemptions"];
const SEGMENTS = ["lane", "step", "state", "reason", "needed"];
const STEPS = [
  ..."time_ns device_ns tokens rows running waiting free_blocks encoder_used encoder_held".split(" "),
  ..."encoded preempted admitted common_reason drafted kept".split(" "),
];
const COLUMNS = [
  ...STEPS.map((name) => `step_${name}`),
  ...["start", "prompt", "media", "embeds", ...CHANGING].map((name) => `lane_${name}`),
  ...SEGMENTS.map((name) => `segment_${name}`),
  ...["step", "lane", "tokens"].map((name) => `chunk_${name}`),
];

/** An array of numbers that grows. */
class Growing {
  constructor() {
    this.values = new Float64Array(256);
    this.length = 0;
  }

  /** @param {number[]} more */
  push(more) {
    const length = this.length + more.length;
    if (length > this.values.length) {
      const larger = new Float64Array(Math.max(length, 2 * this.values.length));
      larger.set(this.values);
      this.values = larger;
    }
    this.values.set(more, this.length);
    this.length = length;
  }

  ints() { return Int32Array.from(this.values.subarray(0, this.length)); }
  floats() { return this.values.slice(0, this.length); }
}

class LiveColumns {
  /** @param {Begin} head */
  constructor(head) {
    this.head = head;
    /** @type {Record<string, Growing>} */
    this.columns = Object.fromEntries(COLUMNS.map((name) => [name, new Growing()]));
    /** @type {string[]} */
    this.ids = [];
    /** @type {string[]} */
    this.ends = [];
    /** @type {string[]} */
    this.reasons = [];
    /** @type {[number, string][]} */
    this.notes = [];
    /** @type {number[]} */
    this.failed = [];
  }

  /** @param {string} name @param {number[]} more */
  push(name, more) {
    this.columns[name]?.push(more);
  }

  /** @param {More} more */
  add(more) {
    for (const [name, values] of Object.entries(more.steps)) this.push(`step_${name}`, values);
    const { ids, ...arrived } = more.lanes;
    this.ids.push(...ids);
    this.ends.push(...ids.map(() => ""));
    for (const [name, values] of Object.entries(arrived)) this.push(`lane_${name}`, values);
    for (const name of CHANGING) this.push(`lane_${name}`, ids.map(() => (name === "end" || name === "cached" ? -1 : 0)));
    for (const [lane, ...said] of more.changed) {
      CHANGING.forEach((name, place) => (this.columns[`lane_${name}`].values[lane] = Number(said[place])));
      this.ends[lane] = String(said[CHANGING.length]);
    }
    for (const name of SEGMENTS) this.push(`segment_${name}`, more.segments[/** @type {keyof Segments} */ (name)]);
    for (const flat of more.chunks) {
      ["step", "lane", "tokens"].forEach((name, place) => this.push(`chunk_${name}`, flat.filter((_, at) => at % 3 === place)));
    }
    this.reasons.push(...more.reasons);
    this.notes.push(...more.notes);
    this.failed.push(...more.failed);
  }

  /** Returns the data for the charts, in the same format as readData. @returns {Data} */
  data() {
    const { head, ids, ends } = this, first = head.first_step;
    const column = (/** @type {string} */ name) => this.columns[name];
    const numSteps = column("step_rows").length;
    const data = /** @type {Data} */ (/** @type {unknown} */ ({ name: head.name, version: head.version, states: head.states, first_step: first, config: head.config }));
    Object.assign(data, { ids, ends, notes: this.notes, reasons: this.reasons, torn: false, numSteps, numLanes: ids.length });
    for (const name of Object.keys(this.columns)) {
      if (name.startsWith("step_") && !name.endsWith("_ns")) data[name] = column(name).ints();
      if (name.startsWith("lane_") || name.startsWith("chunk_")) data[name] = column(name).ints();
    }
    data.step_time_ms = column("step_time_ns").floats().map((ns) => ns / 1e6);
    data.step_device_ms = column("step_device_ns").floats().map((ns) => ns / 1e6);
    data.step_failed = new Int32Array(numSteps);
    for (const step of this.failed) if (step < numSteps) data.step_failed[step] = 1;
    const within = (/** @type {number} */ step) => Math.min(Math.max(step - first, 0), numSteps);
    data.lane_start = data.lane_start.map(within);
    data.lane_end = data.lane_end.map((/** @type {number} */ end) => (end < 0 ? numSteps : within(end)));
    data.chunk_step = data.chunk_step.map((/** @type {number} */ step) => step - first);
    data.lane_slot = slotsOf(data.lane_start, data.lane_end);
    Object.assign(data, this.byLane(ids.length, within));
    data.numSlots = data.lane_slot.reduce((/** @type {number} */ most, /** @type {number} */ slot) => Math.max(most, slot + 1), 1);
    data.bySlot = groupBySlot(data);
    return Object.assign(data, spansOf(data));
  }

  /**
   * Returns the segments sorted by lane, and within a lane by time.
   * @param {number} numLanes
   * @param {(step: number) => number} within
   */
  byLane(numLanes, within) {
    const segments = Object.fromEntries(SEGMENTS.map((name) => [name, this.columns[`segment_${name}`].ints()]));
    const starts = new Int32Array(numLanes + 1);
    for (const lane of segments.lane) starts[lane + 1]++;
    for (let lane = 0; lane < numLanes; lane++) starts[lane + 1] += starts[lane];
    const next = starts.slice(), count = segments.lane.length;
    const sorted = Object.fromEntries(SEGMENTS.slice(1).map((name) => [`segment_${name}`, new Int32Array(count)]));
    for (let place = 0; place < count; place++) {
      const to = next[segments.lane[place]]++;
      sorted.segment_step[to] = within(segments.step[place]);
      sorted.segment_state[to] = segments.state[place];
      sorted.segment_reason[to] = segments.reason[place];
      sorted.segment_needed[to] = segments.needed[place];
    }
    return { ...sorted, lane_segments: starts };
  }
}

/**
 * Returns the slot (line of the chart) for each lane (request): the lowest slot that is free from the lane's start
 * to the lane's end.
 * @param {Int32Array} start
 * @param {Int32Array} end
 */
function slotsOf(start, end) {
  const slots = new Int32Array(start.length), free = new Heap(), busy = new Heap();
  let count = 0;
  for (let lane = 0; lane < start.length; lane++) {
    while (busy.size && busy.least[0] <= start[lane]) free.push([busy.pop()[1], 0]);
    const slot = free.size ? free.pop()[0] : count++;
    slots[lane] = slot;
    busy.push([Math.max(end[lane], start[lane] + 1), slot]);
  }
  return slots;
}

/** A binary heap of pairs. The smallest pair comes first. */
class Heap {
  constructor() {
    /** @type {[number, number][]} */
    this.items = [];
  }

  get size() { return this.items.length; }
  get least() { return this.items[0]; }

  /** @param {[number, number]} item */
  push(item) {
    let at = this.items.push(item) - 1;
    for (let up = (at - 1) >> 1; at > 0 && this.before(at, up); at = up, up = (at - 1) >> 1) this.swap(at, up);
  }

  pop() {
    const least = this.items[0], last = /** @type {[number, number]} */ (this.items.pop());
    if (this.items.length) {
      this.items[0] = last;
      for (let at = 0; ; ) {
        let next = at;
        for (const down of [2 * at + 1, 2 * at + 2]) if (down < this.items.length && this.before(down, next)) next = down;
        if (next === at) break;
        this.swap(at, next);
        at = next;
      }
    }
    return least;
  }

  /** @param {number} one @param {number} other */
  before(one, other) {
    const [a, b] = [this.items[one], this.items[other]];
    return a[0] < b[0] || (a[0] === b[0] && a[1] < b[1]);
  }

  /** @param {number} one @param {number} other */
  swap(one, other) {
    [this.items[one], this.items[other]] = [this.items[other], this.items[one]];
  }
}
