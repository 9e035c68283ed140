// The visible part of the log: a range of steps and a range of slots. Also stores the selected step and lane.

const QUEUED = 0, PREFILL = 1, DECODE = 2, PREEMPTED = 3, SWAPPED = 4, PASSED_OVER = 5;
const STATE_CLASSES = ["queued", "prefill", "decode", "preempted", "swapped", "over"];
const GUTTER = 10; // Margin in pixels on the left and right of the drawing.

class View {
  constructor(/** @type {Data} */ data) {
    this.data = data;
    this.step = 0;
    this.lane = -1;
    this.width = 1;
    this.height = 1;
    this.first = this.last = this.top = this.bottom = 0;
    this.showAll();
  }

  // Shows newer data for the same log. If the view showed the log's end before, it shows the new end.
  renew(/** @type {Data} */ data) {
    const before = this.data.numSteps, more = data.numSteps - before;
    const isAtEnd = more >= 0 && this.last >= before - 0.5, isWhole = isAtEnd && this.first <= 0.5;
    const wereSlots = this.bottom >= Math.max(this.data.numSlots, 4) - 0.5 && this.top <= 0.5;
    const wasLast = this.step >= before - 1;
    this.data = data;
    if (more < 0) this.lane = -1;
    if (more < 0 || isWhole) [this.first, this.last] = [0, Math.max(data.numSteps, 1)];
    else if (isAtEnd) [this.first, this.last] = [this.first + more, this.last + more];
    if (more < 0 || wereSlots) [this.top, this.bottom] = [0, Math.max(data.numSlots, 4)];
    if (wasLast || more < 0) this.step = data.numSteps - 1;
  }

  showAll() {
    this.first = 0; // The visible steps are [first, last). Both numbers may be fractions.
    this.last = Math.max(this.data.numSteps, 1);
    this.top = 0; // The visible slots are [top, bottom).
    this.bottom = Math.max(this.data.numSlots, 4);
  }

  get inner() { return Math.max(1, this.width - 2 * GUTTER); }
  get stepWidth() { return this.inner / (this.last - this.first); }
  get slotHeight() { return this.height / (this.bottom - this.top); }

  x(/** @type {number} */ step) { return GUTTER + (step - this.first) * this.stepWidth; }
  stepAt(/** @type {number} */ x) { return this.first + (x - GUTTER) / this.stepWidth; }
  slotAt(/** @type {number} */ y) { return Math.floor(this.top + y / this.slotHeight); }

  pan(/** @type {number} */ dx, /** @type {number} */ dy) {
    const steps = -dx / this.stepWidth, slots = -dy / this.slotHeight;
    this.first += steps;
    this.last += steps;
    this.top += slots;
    this.bottom += slots;
    this.clamp();
  }

  zoom(/** @type {number} */ factor, /** @type {number} */ x) {
    const at = this.stepAt(x);
    const span = Math.min(Math.max((this.last - this.first) * factor, 8), Math.max(this.data.numSteps, 8));
    const share = (at - this.first) / (this.last - this.first);
    this.first = at - share * span;
    this.last = this.first + span;
    this.clamp();
  }

  zoomSlots(/** @type {number} */ factor, /** @type {number} */ y) {
    const at = this.top + y / this.slotHeight, most = Math.max(this.data.numSlots, 4);
    const span = Math.min(Math.max((this.bottom - this.top) * factor, Math.min(4, most)), most);
    const share = (at - this.top) / (this.bottom - this.top);
    this.top = at - share * span;
    this.bottom = this.top + span;
    this.clamp();
  }

  clamp() {
    const shiftSteps = shiftInto(this.first, this.last, Math.max(this.data.numSteps, 1));
    this.first += shiftSteps;
    this.last += shiftSteps;
    const shiftSlots = shiftInto(this.top, this.bottom, Math.max(this.data.numSlots, 4));
    this.top += shiftSlots;
    this.bottom += shiftSlots;
  }

  choose(/** @type {number} */ step) {
    this.step = Math.min(Math.max(Math.round(step), 0), this.data.numSteps - 1);
    const span = this.last - this.first, margin = span * 0.06;
    if (this.step < this.first || this.step >= this.last) {
      this.first = this.step < this.first ? this.step - margin : this.step + margin - span;
      this.last = this.first + span;
      this.clamp();
    }
  }

  // Scrolls and zooms so that a lane is visible and large enough to see.
  focus(/** @type {number} */ lane) {
    const { lane_start: start, lane_end: end, lane_slot: slot } = this.data;
    this.lane = lane;
    const life = Math.max(end[lane] - start[lane], 4);
    this.first = start[lane] - life * 0.15;
    this.last = start[lane] + life * 1.15;
    const slots = Math.min(this.bottom - this.top, Math.max(this.height / 14, 4));
    this.top = slot[lane] + 0.5 - slots / 2;
    this.bottom = this.top + slots;
    this.clamp();
    this.choose(start[lane]);
  }
}

function shiftInto(/** @type {number} */ low, /** @type {number} */ high, /** @type {number} */ most) {
  if (high - low >= most) return (most - high - low) / 2;
  if (low < 0) return -low;
  return high > most ? most - high : 0;
}

function formatMs(/** @type {number} */ ms) {
  if (ms >= 3600e3) return `${Math.floor(ms / 3600e3)} h ${Math.floor((ms % 3600e3) / 60e3)} min`;
  if (ms >= 100e3) return `${Math.floor(ms / 60e3)} min ${Math.round((ms % 60e3) / 1e3)} s`;
  if (ms >= 1e3) return `${(ms / 1e3).toFixed(2)} s`;
  return `${ms.toFixed(ms < 10 ? 2 : 1)} ms`;
}

const formatCount = (/** @type {number} */ count) => count.toLocaleString("en-US");
