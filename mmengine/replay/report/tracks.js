// Draws curves of memory, budgets and queues below the lanes, over the same steps.

const TRACK_GAP = 8, AXIS = 20;

class TrackChart {
  constructor(/** @type {HTMLCanvasElement} */ canvas, /** @type {View} */ view) {
    this.canvas = canvas;
    this.view = view;
    this.context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    this.scale = this.width = this.height = 1;
    /** @type {Record<string, string>} */
    this.style = {};
    /** @type {Track[]} */
    this.tracks = [];
    this.renew();
  }

  // Called when the view gets other data.
  renew() {
    this.tracks = tracksOf(this.view.data);
  }

  resize() {
    this.scale = window.devicePixelRatio || 1;
    const { width, height } = this.canvas.getBoundingClientRect();
    this.canvas.width = Math.max(1, Math.round(width * this.scale));
    this.canvas.height = Math.max(1, Math.round(height * this.scale));
    this.width = width;
    this.height = height;
  }

  recolour(/** @type {CSSStyleDeclaration} */ style) {
    this.style = Object.fromEntries(
      ["text", "faint", "line", "mark", "shade", ...STATE_CLASSES, "good"].map((name) => [
        name,
        style.getPropertyValue(`--${name}`),
      ]),
    );
  }

  draw() {
    const { context, tracks } = this;
    context.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    const height = (this.height - AXIS - 4) / tracks.length;
    tracks.forEach((track, number) => this.drawTrack(track, 4 + number * height, height - TRACK_GAP));
    this.drawAxis();
    drawCursor(context, this.view, this.style.mark, this.height - AXIS);
  }

  drawTrack(/** @type {Track} */ track, /** @type {number} */ top, /** @type {number} */ height) {
    const { context, view, style } = this;
    context.fillStyle = style.shade;
    context.fillRect(GUTTER, top, view.inner, height);
    const scale = height / Math.max(track.whole, 1);
    for (const { pyramid, colour, share } of track.curves) {
      this.drawCurve(pyramid, top, height, scale, style[colour], share);
    }
    context.font = '11px system-ui, "DejaVu Sans", sans-serif';
    context.textBaseline = "top";
    this.drawLabel(track.name, GUTTER + 5, top + 3, "left");
    if (view.data.numSteps) this.drawLabel(track.now(view.step), GUTTER + view.inner - 5, top + 3, "right");
  }

  // For each pixel, draws the maximum over its steps in a pale colour, and the mean in a strong colour.
  drawCurve(/** @type {Pyramid} */ pyramid, /** @type {number} */ top, /** @type {number} */ height, /** @type {number} */ scale, /** @type {string} */ colour, /** @type {number} */ share) {
    const { context, view } = this;
    const bottom = top + height;
    /** @type {{ left: number, right: number, high: number, low: number }[]} */
    const runs = [];
    context.fillStyle = colour;
    const wide = Math.max(1, view.stepWidth); // The width of a step, or of a pixel if a pixel covers several steps.
    const end = GUTTER + view.inner;
    for (let x = GUTTER + (wide > 1 ? (Math.floor(view.first) - view.first) * wide : 0); x < end; x += wide) {
      const first = Math.round(view.stepAt(x)), last = Math.max(first + 1, Math.round(view.stepAt(x + wide)));
      if (last <= 0 || first >= pyramid.length) continue;
      const { mean, most } = pyramid.over(first, last);
      // Rounded to whole pixels, because the edges between rectangles would be visible otherwise.
      const left = Math.max(Math.round(x), GUTTER), right = Math.min(Math.round(x + wide), end);
      const high = Math.round(most * scale * this.scale) / this.scale, low = Math.round(mean * scale * this.scale) / this.scale;
      const before = runs[runs.length - 1];
      if (before && before.right === left && before.high === high && before.low === low) before.right = right;
      else runs.push({ left, right, high, low });
    }
    // Neighbouring pixels with equal values are drawn as a single rectangle, because drawing time depends on the number
    // of rectangles.
    context.globalAlpha = 0.3 * share;
    for (const { left, right, high, low } of runs) context.fillRect(left, bottom - high, right - left, high - low);
    context.globalAlpha = share;
    for (const { left, right, low } of runs) context.fillRect(left, bottom - low, right - left, low);
    context.globalAlpha = 1;
  }

  drawLabel(/** @type {string} */ text, /** @type {number} */ x, /** @type {number} */ y, /** @type {CanvasTextAlign} */ align) {
    const { context, style } = this;
    context.textAlign = align;
    context.lineWidth = 3;
    context.lineJoin = "round";
    context.strokeStyle = style.shade;
    context.strokeText(text, x, y);
    context.fillStyle = style.text;
    context.fillText(text, x, y);
    context.textAlign = "left";
  }

  drawAxis() {
    const { context, view, style } = this, { data } = view;
    const wanted = (view.last - view.first) / Math.max(2, view.inner / 110);
    const power = 10 ** Math.floor(Math.log10(wanted));
    const each = Math.max(1, power * ([1, 2, 5, 10].find((times) => times * power >= wanted) ?? 10));
    context.fillStyle = style.faint;
    context.font = '11px system-ui, "DejaVu Sans", sans-serif';
    context.textBaseline = "bottom";
    for (let step = Math.ceil(view.first / each) * each; step < view.last; step += each) {
      if (step < 0 || step >= data.numSteps) continue;
      const x = view.x(step);
      context.fillRect(x, this.height - AXIS, 1, 4);
      const text = `${formatCount(step + data.first_step)}  ·  ${formatMs(data.step_time_ms[step])}`;
      if (x + 100 < this.width) context.fillText(text, x + 3, this.height - 3);
    }
  }
}

// Returns the tracks. A track's curves are drawn on top of each other, largest curve first. `now` returns a text with a
// step's values.
function tracksOf(/** @type {Data} */ data) {
  const { config } = data, blocks = config.num_blocks - 1, count = formatCount;
  const used = data.step_free_blocks.map((/** @type {number} */ free) => blocks - free);
  const present = data.step_running.map((/** @type {number} */ running, /** @type {number} */ step) => running + data.step_waiting[step]);
  const most = present.reduce((/** @type {number} */ high, /** @type {number} */ value) => Math.max(high, value), 1);
  const curve = (/** @type {Int32Array} */ values, /** @type {string} */ colour, share = 0.85) => ({ pyramid: new Pyramid(values), colour, share });
  const held = data.step_encoder_held, kept = data.step_encoder_used;
  return [
    {
      name: "KV blocks in use",
      whole: blocks,
      now: (/** @type {number} */ step) => `${count(used[step])} of ${count(blocks)}`,
      curves: [curve(used, "decode")],
    },
    {
      name: "encoder cache: held, and kept",
      whole: config.encoder_cache_size,
      now: (/** @type {number} */ step) => `${count(held[step])} held, ${count(kept[step] - held[step])} kept, of ${count(config.encoder_cache_size)}`,
      curves: [curve(kept, "queued", 0.9), curve(held, "swapped")],
    },
    {
      name: "token budget",
      whole: config.token_budget,
      now: (/** @type {number} */ step) => `${count(data.step_tokens[step])} of ${count(config.token_budget)}`,
      curves: [curve(data.step_tokens, "prefill")],
    },
    {
      name: "encoder budget",
      whole: config.encoder_budget,
      now: (/** @type {number} */ step) => `${count(data.step_encoded[step])} of ${count(config.encoder_budget)}`,
      curves: [curve(data.step_encoded, "good")],
    },
    {
      name: "drafts: computed, and kept",
      whole: data.step_drafted.reduce((/** @type {number} */ high, /** @type {number} */ value) => Math.max(high, value), 1),
      now: (/** @type {number} */ step) => `${count(data.step_kept[step])} of ${count(data.step_drafted[step])} kept`,
      curves: [curve(data.step_drafted, "queued", 0.9), curve(data.step_kept, "good")],
    },
    {
      name: "running, and waiting",
      whole: most,
      now: (/** @type {number} */ step) => `${count(data.step_running[step])} run, ${count(data.step_waiting[step])} wait`,
      curves: [curve(present, "queued", 0.9), curve(data.step_running, "decode")],
    },
  ];
}
