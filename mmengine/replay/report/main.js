// Starts the report page: connects the input, the drawing, the search field and the colour theme.

async function main() {
  const byId = (/** @type {string} */ id) => /** @type {any} */ (document.getElementById(id));
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
  const choose = (/** @type {number} */ step, lane = view.lane) => {
    view.lane = lane;
    view.choose(step);
    byId("slider").value = view.step;
    drawPanel(byId("panel"), view, (/** @type {number} */ lane, step = view.step) => choose(step, lane));
    redraw();
  };
  const find = (/** @type {number} */ lane) => {
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
    const next = data.step_preempted.findIndex((/** @type {number} */ count, /** @type {number} */ step) => step > view.step && count > 0);
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
  listenToSearch(view, byId, find);
  byId("slider").addEventListener("input", (/** @type {any} */ event) => choose(Number(event.target.value)));
  byId("play").addEventListener("click", play);
  byId("whole").addEventListener("click", showAll);
  byId("theme").addEventListener("click", toggleTheme);
  const keys = {
    ArrowLeft: (/** @type {any} */ event) => choose(view.step - (event.shiftKey ? 10 : 1)),
    ArrowRight: (/** @type {any} */ event) => choose(view.step + (event.shiftKey ? 10 : 1)),
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
  listenToKeys(keys);
  new ResizeObserver(resize).observe(byId("charts"));
  resize();
  recolour();
  choose(data.notes.length ? data.numSteps - 1 : 0);
  Object.assign(window, { mmengineReport: { data, view, draw, choose, find, stepAt: (/** @type {number} */ step) => stepAt(data, step) } });
}

function writeHead(/** @type {Data} */ data) {
  const byId = (/** @type {string} */ id) => /** @type {any} */ (document.getElementById(id));
  document.title = `${data.name} · mmengine log`;
  byId("name").textContent = data.name;
  const seconds = data.step_time_ms[data.numSteps - 1];
  const answer = data.lane_answer.reduce((/** @type {number} */ sum, /** @type {number} */ count) => sum + count, 0);
  const preempted = data.lane_preemptions.reduce((/** @type {number} */ sum, /** @type {number} */ count) => sum + count, 0);
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
  writeLegend(byId("legend"), data.states);
}

main();
