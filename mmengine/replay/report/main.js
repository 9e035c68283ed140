// Puts the parts together: input, redrawing, the search, the theme.

async function main() {
  const byId = (id) => document.getElementById(id);
  const data = await readData();
  const view = new View(data);
  const lanes = new LaneChart(byId("lanes"), view), tracks = new TrackChart(byId("tracks"), view);
  let due = false, playing = 0;

  const draw = () => {
    due = false;
    lanes.draw();
    tracks.draw();
  };
  const redraw = () => {
    if (!due) requestAnimationFrame(draw);
    due = true;
  };
  const choose = (step, lane = view.lane) => {
    view.lane = lane;
    view.choose(step);
    byId("slider").value = view.step;
    drawPanel(byId("panel"), view, (lane, step = view.step) => choose(step, lane));
    redraw();
  };
  const find = (lane) => {
    view.focus(lane);
    choose(view.step, lane);
  };
  const recolour = () => {
    const style = getComputedStyle(document.documentElement);
    lanes.recolour(style);
    tracks.recolour(style);
    redraw();
  };
  const resize = () => {
    lanes.resize();
    tracks.resize();
    redraw();
  };
  const play = () => {
    if (playing) clearInterval(playing);
    playing = playing ? 0 : setInterval(() => choose((view.step + Math.max(1, Math.round((view.last - view.first) / 600))) % data.numSteps), 33);
    byId("play").textContent = playing ? "❚❚" : "▶";
  };
  const showAll = () => {
    view.showAll();
    redraw();
  };
  const nextPreemption = () => {
    const next = data.step_preempted.findIndex((count, step) => step > view.step && count > 0);
    if (next >= 0) choose(next);
  };

  writeHead(data);
  byId("slider").max = data.numSteps - 1;
  document.documentElement.classList.toggle("dark", matchMedia("(prefers-color-scheme: dark)").matches);
  const toggleTheme = () => {
    document.documentElement.classList.toggle("dark");
    recolour();
  };
  for (const canvas of [lanes.canvas, tracks.canvas]) listenTo(canvas, view, choose, redraw);
  listenToTip(lanes.canvas, view, byId("tip"));
  listenToSearch(data, byId, find);
  byId("slider").addEventListener("input", (event) => choose(Number(event.target.value)));
  byId("play").addEventListener("click", play);
  byId("whole").addEventListener("click", showAll);
  byId("theme").addEventListener("click", toggleTheme);
  const keys = {
    ArrowLeft: (event) => choose(view.step - (event.shiftKey ? 10 : 1)),
    ArrowRight: (event) => choose(view.step + (event.shiftKey ? 10 : 1)),
    Home: () => choose(0),
    End: () => choose(data.numSteps - 1),
    "+": () => { view.zoom(0.7, view.x(view.step)); redraw(); },
    "-": () => { view.zoom(1 / 0.7, view.x(view.step)); redraw(); },
    0: showAll,
    p: nextPreemption,
    t: toggleTheme,
    " ": play,
    "/": () => byId("query").focus(),
    Escape: () => choose(view.step, -1),
  };
  document.addEventListener("keydown", (event) => {
    if (event.target.matches("input[type=search]") || event.ctrlKey || event.metaKey || event.altKey) return;
    const act = keys[event.key];
    if (!act) return;
    event.preventDefault();
    act(event);
  });
  new ResizeObserver(resize).observe(byId("charts"));
  resize();
  recolour();
  choose(data.notes.length ? data.numSteps - 1 : 0);
  window.mmengineReport = { data, view, draw, choose, find, stepAt: (step) => stepAt(data, step) };
}

function writeHead(data) {
  const byId = (id) => document.getElementById(id);
  document.title = `${data.name} · mmengine log`;
  byId("name").textContent = data.name;
  const seconds = data.step_time_ms[data.numSteps - 1];
  const answer = data.lane_answer.reduce((sum, count) => sum + count, 0);
  const preempted = data.lane_preemptions.reduce((sum, count) => sum + count, 0);
  const parts = [
    `${formatCount(data.numLanes)} requests`,
    `${formatCount(data.numSteps)} steps`,
    formatMs(seconds),
    `${formatCount(answer)} tokens`,
    `${formatCount(preempted)} preemptions`,
    ...(data.torn ? ["the log's tail is torn"] : []),
    ...data.notes.slice(-1).map(([step, text]) => `step ${formatCount(step)}: ${text}`),
  ];
  byId("summary").textContent = parts.join(" · ");
  byId("summary").title = byId("summary").textContent;
  byId("legend").append(
    ...data.states.map((name, state) =>
      element("span", {}, element("i", { className: `dot ${STATE_CLASSES[state]}` }), name),
    ),
  );
}

// Drag pans, a click chooses a step and the lane under it, the wheel zooms.
function listenTo(canvas, view, choose, redraw) {
  let from = null, moved = false;
  canvas.addEventListener("pointerdown", (event) => {
    from = [event.clientX, event.clientY];
    moved = false;
    canvas.setPointerCapture(event.pointerId);
    canvas.classList.add("moving");
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!from) return;
    const dx = event.clientX - from[0], dy = event.clientY - from[1];
    if (!moved && Math.hypot(dx, dy) < 4) return;
    moved = true;
    from = [event.clientX, event.clientY];
    view.pan(dx, canvas.id === "lanes" ? dy : 0);
    redraw();
  });
  canvas.addEventListener("pointerup", (event) => {
    canvas.classList.remove("moving");
    if (from && !moved) {
      const step = Math.floor(view.stepAt(event.offsetX));
      const lane = canvas.id === "lanes" ? laneAt(view.data, view.slotAt(event.offsetY), step) : view.lane;
      choose(step, lane);
    }
    from = null;
  });
  canvas.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      const factor = Math.exp((event.deltaY || event.deltaX) * 0.0015);
      if (event.shiftKey && canvas.id === "lanes") view.zoomSlots(factor, event.offsetY);
      else view.zoom(factor, event.offsetX);
      redraw();
    },
    { passive: false },
  );
}

function listenToTip(canvas, view, tip) {
  canvas.addEventListener("pointerleave", () => (tip.hidden = true));
  canvas.addEventListener("pointermove", (event) => {
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

function listenToSearch(data, byId, find) {
  const query = byId("query");
  const matching = (text) => {
    const exact = data.ids.indexOf(text);
    return exact >= 0 ? exact : data.ids.findIndex((id) => id.includes(text));
  };
  query.addEventListener("input", () => {
    const text = query.value;
    const some = text ? data.ids.filter((id) => id.includes(text)).slice(0, 12) : [];
    byId("ids").replaceChildren(...some.map((id) => element("option", { value: id })));
    query.classList.toggle("none", Boolean(text) && !some.length);
  });
  byId("search").addEventListener("submit", (event) => {
    event.preventDefault();
    const lane = query.value ? matching(query.value) : -1;
    if (lane >= 0) find(lane);
    if (lane >= 0) query.blur();
  });
}

main();
