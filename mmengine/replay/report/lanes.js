// Draws the lanes, one per request. Draws pixel by pixel, so that a frame with 100,000 steps takes no longer than a
// frame with 100.

class LaneChart {
  constructor(/** @type {HTMLCanvasElement} */ canvas, /** @type {View} */ view) {
    this.canvas = canvas;
    this.view = view;
    this.context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    this.scale = 1;
    this.image = this.context.createImageData(1, 1);
    this.pixels = new Uint32Array(this.image.data.buffer);
    /** @type {number[]} */
    this.colours = [];
    this.back = 0;
    this.text = this.mark = "";
  }

  resize() {
    this.scale = window.devicePixelRatio || 1;
    const { width, height } = this.canvas.getBoundingClientRect();
    this.canvas.width = Math.max(1, Math.round(width * this.scale));
    this.canvas.height = Math.max(1, Math.round(height * this.scale));
    this.image = this.context.createImageData(this.canvas.width, this.canvas.height);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.view.width = width;
    this.view.height = height;
  }

  recolour(/** @type {CSSStyleDeclaration} */ style) {
    this.colours = STATE_CLASSES.map((name) => pixelOf(style.getPropertyValue(`--${name}`)));
    this.back = pixelOf(style.getPropertyValue("--card"));
    this.text = style.getPropertyValue("--text");
    this.mark = style.getPropertyValue("--mark");
  }

  draw() {
    const { view, pixels, canvas } = this, { data } = view;
    pixels.fill(this.back);
    const slotHeight = view.slotHeight * this.scale;
    const gap = slotHeight >= 4 ? Math.min(3, Math.round(slotHeight * 0.2)) : 0;
    const firstSlot = Math.max(0, Math.floor(view.top));
    const lastSlot = Math.min(data.numSlots, Math.ceil(view.bottom));
    for (let slot = firstSlot; slot < lastSlot; slot++) {
      const top = Math.round((slot - view.top) * slotHeight);
      const bottom = Math.max(top + 1, Math.round((slot + 1 - view.top) * slotHeight) - gap);
      this.drawSlot(slot, Math.max(0, top), Math.min(canvas.height, bottom));
    }
    this.context.putImageData(this.image, 0, 0);
    this.drawOver(slotHeight, gap, firstSlot, lastSlot);
  }

  drawSlot(/** @type {number} */ slot, /** @type {number} */ top, /** @type {number} */ bottom) {
    const { view } = this, { data } = view, { starts, lanes } = data.bySlot;
    const scale = view.stepWidth * this.scale, left = GUTTER * this.scale - view.first * scale;
    let low = starts[slot], high = starts[slot + 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (data.lane_end[lanes[middle]] < view.first) low = middle + 1;
      else high = middle;
    }
    for (let place = low; place < starts[slot + 1]; place++) {
      const lane = lanes[place];
      if (data.lane_start[lane] >= view.last) break;
      this.drawLane(lane, top, bottom, scale, left);
    }
  }

  drawLane(/** @type {number} */ lane, /** @type {number} */ top, /** @type {number} */ bottom, /** @type {number} */ scale, /** @type {number} */ left) {
    const { data, first, last: lastStep } = this.view, { span_step: steps, span_state: states } = data;
    const last = data.lane_spans[lane + 1], end = data.lane_end[lane];
    let span = data.lane_spans[lane], drawn = -1;
    if (last - span > 8) span = Math.max(span, lastAtMost(steps, span, last, first));
    for (; span < last && steps[span] <= lastStep; span++) {
      const state = states[span], to = span + 1 < last ? steps[span + 1] : end;
      if (to < first) continue;
      const x0 = Math.floor(left + steps[span] * scale), x1 = Math.max(Math.floor(left + to * scale), x0 + 1);
      // A span narrower than a pixel is drawn only if its pixel is still free. Preemptions are always drawn.
      if (x1 > drawn || state === PREEMPTED || state === SWAPPED) this.fill(x0, x1, top, bottom, state);
      if (x1 > drawn) drawn = x1;
    }
  }

  fill(/** @type {number} */ x0, /** @type {number} */ x1, /** @type {number} */ top, /** @type {number} */ bottom, /** @type {number} */ state) {
    const { width } = this.canvas, colour = this.colours[state];
    const low = Math.max(0, x0), high = Math.min(width, x1);
    const from = state === QUEUED && bottom - top > 6 ? top + Math.floor((bottom - top) / 3) : top;
    const to = from > top ? bottom - Math.floor((bottom - top) / 3) : bottom;
    if (low >= high) return;
    for (let y = from; y < to; y++) this.pixels.fill(colour, y * width + low, y * width + high);
  }

  // Draws the names, the selected lane and the selected step on top of the lanes.
  drawOver(/** @type {number} */ slotHeight, /** @type {number} */ gap, /** @type {number} */ firstSlot, /** @type {number} */ lastSlot) {
    const { context, view, scale } = this, { data } = view;
    context.save();
    context.scale(scale, scale);
    const height = slotHeight / scale;
    if (height >= 12) this.drawNames(height, firstSlot, lastSlot);
    if (view.lane >= 0) {
      const y = (data.lane_slot[view.lane] - view.top) * height;
      const x0 = view.x(data.lane_start[view.lane]), x1 = view.x(data.lane_end[view.lane]);
      context.strokeStyle = this.mark;
      context.lineWidth = 1.5;
      context.strokeRect(x0 - 1, y - 1, Math.max(x1 - x0, 2) + 2, Math.max(height - gap / scale, 2) + 2);
    }
    drawCursor(context, view, this.mark, view.height);
    context.restore();
  }

  drawNames(/** @type {number} */ height, /** @type {number} */ firstSlot, /** @type {number} */ lastSlot) {
    const { context, view } = this, { data } = view;
    context.font = `${Math.min(12, Math.round(height * 0.62))}px system-ui, "DejaVu Sans", sans-serif`;
    context.textBaseline = "middle";
    for (let slot = firstSlot; slot < lastSlot; slot++) {
      const { starts, lanes } = data.bySlot;
      for (let place = starts[slot]; place < starts[slot + 1]; place++) {
        const lane = lanes[place];
        if (data.lane_start[lane] >= view.last) break;
        const x0 = Math.max(view.x(data.lane_start[lane]), 4), x1 = view.x(data.lane_end[lane]);
        if (x1 - x0 < 46) continue;
        context.save();
        context.beginPath();
        context.rect(x0, (slot - view.top) * height, x1 - x0 - 4, height);
        context.clip();
        context.fillStyle = this.text;
        context.fillText(data.ids[lane].slice(0, 80), x0 + 5, (slot - view.top + 0.45) * height);
        context.restore();
      }
    }
  }
}

function drawCursor(/** @type {CanvasRenderingContext2D} */ context, /** @type {View} */ view, /** @type {string} */ colour, /** @type {number} */ height) {
  if (!view.data.numSteps) return;
  const x = view.x(view.step), width = Math.max(view.stepWidth, 1);
  context.globalAlpha = width > 3 ? 0.18 : 0.75;
  context.fillStyle = colour;
  context.fillRect(x, 0, width, height);
  context.globalAlpha = 1;
}

// Converts "#rrggbb" to a pixel of an ImageData on a little-endian machine.
function pixelOf(/** @type {string} */ colour) {
  const value = parseInt(colour.trim().slice(1), 16);
  return ((255 << 24) | ((value & 255) << 16) | (value & 0xff00) | (value >> 16)) >>> 0;
}
