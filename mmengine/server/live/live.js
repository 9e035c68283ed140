// The live page. It draws the same charts as a log's report, for a log that is still being written.

const NOTHING = { type: /** @type {"begin"} */ ("begin"), name: "", version: "", states: [], first_step: 0, config: { num_blocks: 1, token_budget: 1, encoder_cache_size: 1, encoder_budget: 1, max_num_seqs: 1 } };
const KEY = "mmengine key";
const WARM_UP = "warm-up-"; // The ids of a server's warm-up requests begin with this text.

class LivePage {
  constructor() {
    this.byId = (/** @type {string} */ id) => /** @type {any} */ (document.getElementById(id));
    this.columns = new LiveColumns(NOTHING);
    this.view = new View(this.columns.data());
    this.lanes = new LaneChart(this.byId("lanes"), this.view);
    this.tracks = new TrackChart(this.byId("tracks"), this.view);
    this.isDue = this.isStale = false;
    this.frames = 0; // Number of frames drawn so far.
    this.key = () => sessionStorage.getItem(KEY) ?? "";
    this.draw = this.draw.bind(this);
    this.choose = this.choose.bind(this);
    this.find = this.find.bind(this);
    this.redraw = this.redraw.bind(this);
  }

  draw() {
    this.isDue = false;
    if (this.isStale) this.renew();
    this.lanes.draw();
    this.tracks.draw();
    this.frames++;
  }

  redraw() {
    if (!this.isDue) requestAnimationFrame(this.draw);
    this.isDue = true;
  }

  /** Updates the page after new data from the log. */
  renew() {
    const { view, byId } = this, data = this.columns.data();
    this.isStale = false;
    view.renew(data);
    this.tracks.renew();
    byId("slider").max = Math.max(0, data.numSteps - 1);
    byId("slider").value = view.step;
    this.showPanel();
    writeSummary(byId("summary"), data);
  }

  showPanel() {
    const { view, byId } = this;
    if (!view.data.numSteps) return;
    drawPanel(byId("panel"), view, (/** @type {number} */ lane, step = view.step) => this.choose(step, lane));
    if (view.lane >= 0) byId("panel").append(...actionsOf(view.data.ids[view.lane], this.key, byId("story")));
  }

  /** @param {number} step */
  choose(step, lane = this.view.lane) {
    const { view, byId } = this;
    if (lane !== view.lane) byId("story").replaceChildren();
    view.lane = lane;
    view.choose(step);
    byId("slider").value = view.step;
    this.showPanel();
    this.redraw();
  }

  /** @param {number} lane */
  find(lane) {
    this.view.focus(lane);
    this.choose(this.view.step, lane);
  }

  resize() {
    this.lanes.resize();
    this.tracks.resize();
    this.redraw();
  }

  recolour() {
    const style = getComputedStyle(document.documentElement);
    this.lanes.recolour(style);
    this.tracks.recolour(style);
    this.redraw();
  }

  toggleTheme() {
    document.documentElement.classList.toggle("dark");
    this.recolour();
  }

  showAll() {
    this.view.showAll();
    this.redraw();
  }

  /** @param {string} tab */
  show(tab) {
    for (const each of ["live", "playground"]) {
      this.byId(each).hidden = each !== tab;
      this.byId(`to-${each}`).setAttribute("aria-selected", String(each === tab));
    }
    this.resize();
  }

  begin() {
    const { byId, view, choose } = this;
    document.documentElement.classList.toggle("dark", matchMedia("(prefers-color-scheme: dark)").matches);
    for (const canvas of [this.lanes.canvas, this.tracks.canvas]) listenTo(canvas, view, choose, this.redraw);
    listenToTip(this.lanes.canvas, view, byId("tip"));
    listenToSearch(view, byId, this.find);
    byId("slider").addEventListener("input", () => choose(Number(byId("slider").value)));
    byId("whole").addEventListener("click", () => this.showAll());
    byId("theme").addEventListener("click", () => this.toggleTheme());
    byId("to-live").addEventListener("click", () => this.show("live"));
    byId("to-playground").addEventListener("click", () => this.show("playground"));
    this.listenToKeys();
    new ResizeObserver(() => this.resize()).observe(byId("charts"));
    this.resize();
    this.recolour();
    new Playground(byId, this.key);
    void follow(this.key, { take: this.take.bind(this), status: this.status.bind(this) }, () => this.keyGiven());
  }

  listenToKeys() {
    const { view, byId, choose } = this;
    listenToKeys({
      ArrowLeft: (event) => choose(view.step - (event.shiftKey ? 10 : 1)),
      ArrowRight: (event) => choose(view.step + (event.shiftKey ? 10 : 1)),
      ArrowDown: () => this.find(Math.min(view.lane + 1, view.data.numLanes - 1)),
      ArrowUp: () => this.find(Math.max(view.lane - 1, 0)),
      End: () => {
        this.showAll();
        choose(view.data.numSteps - 1);
      },
      0: () => this.showAll(),
      1: () => this.show("live"),
      2: () => {
        this.show("playground");
        byId("question").focus();
      },
      t: () => this.toggleTheme(),
      w: () => byId("panel").querySelector(".why")?.click(),
      "/": () => byId("query").focus(),
      Escape: () => choose(view.step, -1),
    });
  }

  /** Handles a message from the server. @param {string} event @param {any} data */
  take(event, data) {
    if (event === "begin") {
      this.columns = new LiveColumns(data);
      writeLegend(this.byId("legend"), data.states);
      this.byId("name").textContent = data.name;
    } else this.columns.add(data);
    this.isStale = true;
    this.redraw();
  }

  /** Shows the connection's state. If the server refused a call, also shows the reason below the page's header. @param {string} text @param {unknown} [error] */
  status(text, error) {
    const status = this.byId("status"), problem = this.byId("problem");
    status.textContent = text;
    status.className = text.split(" ")[0];
    if (text === "connecting") return;
    problem.hidden = !(error instanceof Refused);
    problem.textContent = error instanceof Error ? error.message : "";
  }

  /** Resolves when the user has entered another key. @returns {Promise<void>} */
  keyGiven() {
    const form = this.byId("key-form"), key = this.byId("key");
    form.hidden = false;
    key.focus();
    return new Promise((done) => {
      const take = (/** @type {Event} */ event) => {
        event.preventDefault();
        sessionStorage.setItem(KEY, key.value);
        form.hidden = true;
        done();
      };
      form.addEventListener("submit", take, { once: true });
    });
  }
}

/** @param {HTMLElement} summary @param {any} data */
function writeSummary(summary, data) {
  const last = data.numSteps - 1;
  if (last < 0) return;
  const { running, waiting } = openOf(data);
  const requests = data.ids.filter((/** @type {string} */ id) => !id.startsWith(WARM_UP)).length;
  const parts = [
    `${formatCount(running)} running, ${formatCount(waiting)} waiting`,
    `${formatCount(requests)} requests`,
    `step ${formatCount(last + data.first_step)}`,
    ...data.notes.slice(-1).map((/** @type {[number, string]} */ [step, text]) => `step ${formatCount(step)}: ${text}`),
  ];
  summary.textContent = parts.join(" · ");
}

/** Returns how many requests are running and how many are waiting after the last step. @param {any} data */
function openOf(data) {
  const open = { running: 0, waiting: 0 };
  for (let lane = 0; lane < data.numLanes; lane++) {
    if (data.ends[lane]) continue;
    const last = data.lane_segments[lane + 1] - 1;
    const state = last < data.lane_segments[lane] ? QUEUED : data.segment_state[last];
    if (state === PREFILL || state === DECODE || state === PASSED_OVER) open.running++;
    else open.waiting++;
  }
  return open;
}

/**
 * Returns the buttons for a request. "Why?" writes the reasons for the request's course into `story`. "Perfetto
 * trace" downloads the log's trace.
 * @param {string} name
 * @param {() => string} key
 * @param {HTMLElement} story
 */
function actionsOf(name, key, story) {
  const tell = async () => {
    story.replaceChildren(element("p", { className: "more" }, "reading the log …"));
    try {
      const claims = await (await ask(`/live/ask/why?request=${encodeURIComponent(name)}`, key())).json();
      const items = claims.map((/** @type {{ step: number, text: string }} */ claim) =>
        element("li", {}, `step ${formatCount(claim.step)}: ${claim.text}`),
      );
      story.replaceChildren(element("h3", {}, `Why ${name} went as it did`), element("ol", {}, ...items));
    } catch (error) {
      story.replaceChildren(element("p", { className: "note" }, error instanceof Error ? error.message : String(error)));
    }
  };
  const save = async () => {
    const trace = await (await ask("/live/ask/trace", key())).blob();
    const link = element("a", { href: URL.createObjectURL(trace), download: "mmengine-trace.json" });
    link.click();
    URL.revokeObjectURL(link.href);
  };
  return [
    element(
      "p",
      { className: "actions" },
      element("button", { type: "button", className: "why", click: () => void tell() }, "Why? (w)"),
      element("button", { type: "button", className: "trace", click: () => void save() }, "Perfetto trace"),
    ),
  ];
}

const shown = new LivePage();
Object.assign(window, { mmengineReport: shown });
shown.begin();
