// Reads the log's columns into typed arrays, and looks up values in them.

/**
 * A log's data for the charts. The columns `step_…` have a value per step, `lane_…` a value per request (ordered by
 * arrival), and `segment_…` a value per segment. A lane's segments begin at lane_segments[lane].
 * @typedef {{
 *   name: string, version: string, states: string[], reasons: string[], first_step: number, ids: string[],
 *   ends: string[], notes: [number, string][], config: Record<string, number>, torn: boolean,
 *   numSteps: number, numLanes: number, numSlots: number, bySlot: { starts: Int32Array, lanes: Int32Array },
 *   step_time_ms: Float64Array, step_device_ms: Float64Array, [column: string]: any
 * }} Data
 */
/** @typedef {{ lane: number, segment: number }} Placed a request's lane, and its segment at a step */
/** @typedef {{ name: string, whole: number, now: (step: number) => string, curves: { pyramid: Pyramid, colour: string, share: number }[] }} Track */

async function readData() {
  const text = document.getElementById("data")?.textContent ?? "";
  const letters = atob(text), packed = new Uint8Array(letters.length);
  for (let place = 0; place < letters.length; place++) packed[place] = letters.charCodeAt(place);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  const headLength = new DataView(buffer).getInt32(0, true);
  const data = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, headLength)));
  const types = { int32: Int32Array, float64: Float64Array };
  for (const [name, given] of Object.entries(data.columns)) {
    const place = /** @type {{ type: "int32" | "float64", offset: number, length: number }} */ (given);
    data[name] = new types[place.type](buffer, 4 + headLength + place.offset, place.length);
  }
  data.numSteps = data.step_rows.length;
  data.numLanes = data.ids.length;
  data.numSlots = data.lane_slot.reduce((/** @type {number} */ most, /** @type {number} */ slot) => Math.max(most, slot + 1), 1);
  data.bySlot = groupBySlot(data);
  Object.assign(data, spansOf(data));
  return data;
}

// Merges neighbouring segments with the same state into spans. The lanes are drawn from the spans.
function spansOf(/** @type {Data} */ data) {
  const { lane_segments: segments, segment_step: step, segment_state: state } = data;
  const lane_spans = new Int32Array(data.numLanes + 1);
  const span_step = new Int32Array(step.length), span_state = new Int32Array(step.length);
  let count = 0;
  for (let lane = 0; lane < data.numLanes; lane++) {
    for (let segment = segments[lane]; segment < segments[lane + 1]; segment++) {
      if (count > lane_spans[lane] && span_state[count - 1] === state[segment]) continue;
      span_step[count] = step[segment];
      span_state[count++] = state[segment];
    }
    lane_spans[lane + 1] = count;
  }
  return { lane_spans, span_step: span_step.slice(0, count), span_state: span_state.slice(0, count) };
}

// Returns all lanes, sorted by slot and then by time. Slot s has lanes[starts[s]] to lanes[starts[s + 1] - 1].
function groupBySlot(/** @type {Data} */ data) {
  const starts = new Int32Array(data.numSlots + 1);
  for (const slot of data.lane_slot) starts[slot + 1]++;
  for (let slot = 0; slot < data.numSlots; slot++) starts[slot + 1] += starts[slot];
  const next = starts.slice(), lanes = new Int32Array(data.numLanes);
  for (let lane = 0; lane < data.numLanes; lane++) lanes[next[data.lane_slot[lane]]++] = lane;
  return { starts, lanes };
}

// Returns the last index in [low, high) whose value is at most `value`, or low - 1 if there is no such index.
function lastAtMost(/** @type {Int32Array} */ column, /** @type {number} */ low, /** @type {number} */ high, /** @type {number} */ value) {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (column[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

// Returns the lane's segment at a step, or -1.
function segmentAt(/** @type {Data} */ data, /** @type {number} */ lane, /** @type {number} */ step) {
  if (step < data.lane_start[lane] || step >= data.lane_end[lane]) return -1;
  const first = data.lane_segments[lane];
  const place = lastAtMost(data.segment_step, first, data.lane_segments[lane + 1], step);
  return place < first ? -1 : place;
}

// Returns the lane that is drawn in a slot at a step, or -1.
function laneAt(/** @type {Data} */ data, /** @type {number} */ slot, /** @type {number} */ step) {
  if (slot < 0 || slot >= data.numSlots) return -1;
  const { starts, lanes } = data.bySlot;
  let low = starts[slot], high = starts[slot + 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (data.lane_start[lanes[middle]] <= step) low = middle + 1;
    else high = middle;
  }
  const lane = lanes[low - 1];
  return low > starts[slot] && Math.max(data.lane_end[lane], data.lane_start[lane] + 1) > step ? lane : -1;
}

// Returns a map from each lane to the number of tokens that it computes in a step. Lanes without an entry compute a
// single token.
function tokensAt(/** @type {Data} */ data, /** @type {number} */ step) {
  const tokens = new Map();
  let place = lastAtMost(data.chunk_step, 0, data.chunk_step.length, step);
  for (; place >= 0 && data.chunk_step[place] === step; place--) {
    tokens.set(data.chunk_lane[place], data.chunk_tokens[place]);
  }
  return tokens;
}

// Returns the requests in a step's batch and the waiting requests, each ordered by arrival.
function stepAt(/** @type {Data} */ data, /** @type {number} */ step) {
  /** @type {Placed[]} */
  const batch = [], /** @type {Placed[]} */ waiting = [];
  for (let lane = 0; lane < data.numLanes; lane++) {
    if (data.lane_start[lane] > step) break; // Lanes are ordered by arrival.
    const segment = segmentAt(data, lane, step);
    if (segment < 0) continue;
    const state = data.segment_state[segment];
    (state === PREFILL || state === DECODE ? batch : waiting).push({ lane, segment });
  }
  return { batch, waiting };
}

// Stores a column's sums and maxima over 1, 2, 4, … steps. A pixel that covers many steps then needs only a few
// numbers.
class Pyramid {
  constructor(/** @type {ArrayLike<number>} */ values) {
    this.length = values.length;
    this.sums = [Float64Array.from(values)];
    this.most = [this.sums[0]];
    for (let level = 0; this.sums[level].length > 1; level++) {
      const sums = this.sums[level], most = this.most[level], half = (sums.length + 1) >> 1;
      const nextSums = new Float64Array(half), nextMost = new Float64Array(half);
      for (let place = 0; place < half; place++) {
        const left = 2 * place, right = Math.min(left + 1, sums.length - 1);
        nextSums[place] = sums[left] + (right > left ? sums[right] : 0);
        nextMost[place] = Math.max(most[left], most[right]);
      }
      this.sums.push(nextSums);
      this.most.push(nextMost);
    }
  }

  // Returns the mean and the maximum over the steps [first, last).
  over(/** @type {number} */ first, /** @type {number} */ last) {
    let low = Math.max(0, first), high = Math.min(this.length, last), sum = 0, most = -Infinity;
    const count = high - low;
    for (let level = 0; low < high; level++) {
      if (low & 1) { sum += this.sums[level][low]; most = Math.max(most, this.most[level][low]); low++; }
      if (high & 1) { high--; sum += this.sums[level][high]; most = Math.max(most, this.most[level][high]); }
      low >>= 1;
      high >>= 1;
    }
    return { mean: count > 0 ? sum / count : 0, most: count > 0 ? most : 0 };
  }
}
