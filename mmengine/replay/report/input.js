// Handles the pointer, the keys and the search field, on the report page and on the live page.

/** @param {Record<string, (event: KeyboardEvent) => void>} keys maps a key to its action, which does not run while the user types into a field */
function listenToKeys(keys) {
  document.addEventListener("keydown", (event) => {
    const written = /** @type {Element} */ (event.target).matches("input:not([type=range]), textarea, select");
    if (written || event.ctrlKey || event.metaKey || event.altKey) return;
    const act = keys[event.key];
    if (!act) return;
    event.preventDefault();
    act(event);
  });
}

function writeLegend(/** @type {HTMLElement} */ legend, /** @type {string[]} */ states) {
  legend.replaceChildren(
    ...states.map((/** @type {string} */ name, /** @type {number} */ state) =>
      element("span", {}, element("i", { className: `dot ${STATE_CLASSES[state]}` }), name),
    ),
  );
}

// Makes a canvas interactive. Dragging pans the view, a click selects the step and the lane under the pointer, and the
// wheel zooms.
function listenTo(/** @type {HTMLCanvasElement} */ canvas, /** @type {View} */ view, /** @type {(step: number, lane?: number) => void} */ choose, /** @type {() => void} */ redraw) {
  /** @type {[number, number] | null} */
  let from = null, moved = false;
  canvas.addEventListener("pointerdown", (/** @type {any} */ event) => {
    from = [event.clientX, event.clientY];
    moved = false;
    canvas.setPointerCapture(event.pointerId);
    canvas.classList.add("moving");
  });
  canvas.addEventListener("pointermove", (/** @type {any} */ event) => {
    if (!from) return;
    const dx = event.clientX - from[0], dy = event.clientY - from[1];
    if (!moved && Math.hypot(dx, dy) < 4) return;
    moved = true;
    from = [event.clientX, event.clientY];
    view.pan(dx, canvas.id === "lanes" ? dy : 0);
    redraw();
  });
  canvas.addEventListener("pointerup", (/** @type {any} */ event) => {
    canvas.classList.remove("moving");
    if (from && !moved) {
      const step = Math.floor(view.stepAt(event.offsetX));
      const lane = canvas.id === "lanes" ? laneAt(view.data, view.slotAt(event.offsetY), step) : view.lane;
      choose(step, lane);
      openPanel(true);
    }
    from = null;
  });
  canvas.addEventListener(
    "wheel",
    (/** @type {any} */ event) => {
      event.preventDefault();
      const factor = Math.exp((event.deltaY || event.deltaX) * 0.0015);
      if (event.shiftKey && canvas.id === "lanes") view.zoomSlots(factor, event.offsetY);
      else view.zoom(factor, event.offsetX);
      redraw();
    },
    { passive: false },
  );
}

function listenToTip(/** @type {HTMLCanvasElement} */ canvas, /** @type {View} */ view, /** @type {HTMLElement} */ tip) {
  canvas.addEventListener("pointerleave", () => (tip.hidden = true));
  canvas.addEventListener("pointermove", (/** @type {any} */ event) => {
    const { data } = view, step = Math.floor(view.stepAt(event.offsetX));
    const lane = laneAt(data, view.slotAt(event.offsetY), step);
    const segment = lane < 0 ? -1 : segmentAt(data, lane, step);
    tip.hidden = segment < 0;
    if (tip.hidden) return;
    const state = data.segment_state[segment], waits = state !== PREFILL && state !== DECODE;
    const text = `step ${formatCount(step + data.first_step)}: ${data.states[state]}`;
    tip.replaceChildren(element("b", {}, data.ids[lane]), waits ? `${text}, ${reasonOf(data, segment, step)}` : text);
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - 330)}px`;
    tip.style.top = `${event.clientY + 16}px`;
  });
}

function listenToSearch(/** @type {View} */ view, /** @type {(id: string) => any} */ byId, /** @type {(lane: number) => void} */ find) {
  const query = byId("query");
  const matching = (/** @type {string} */ text) => {
    const exact = view.data.ids.indexOf(text);
    return exact >= 0 ? exact : view.data.ids.findIndex((/** @type {string} */ id) => id.includes(text));
  };
  query.addEventListener("input", () => {
    const text = query.value;
    const some = text ? view.data.ids.filter((/** @type {string} */ id) => id.includes(text)).slice(0, 12) : [];
    byId("ids").replaceChildren(...some.map((/** @type {string} */ id) => element("option", { value: id })));
    query.classList.toggle("none", Boolean(text) && !some.length);
  });
  byId("search").addEventListener("submit", (/** @type {any} */ event) => {
    event.preventDefault();
    const lane = query.value ? matching(query.value) : -1;
    if (lane >= 0) find(lane);
    if (lane >= 0) openPanel(true);
    if (lane >= 0) query.blur();
  });
}
