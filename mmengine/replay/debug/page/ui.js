// The debugger's page: sends command lines to a backend, and shows the tables and texts that the backend returns.
// Texts from a log are inserted as text, never as HTML.

/** @typedef {{ title: string, header: string[], rows: (string | number)[][], note: string }} Table */
/** @typedef {{ lines: string[] }} Lines */
/** @typedef {{ blocks: (Table | Lines)[], error: string }} Answer */
/**
 * Runs commands. `name`: the log. `commands`: names and aliases. `views`: the names that `info` accepts.
 * @typedef {{ name: string, commands: string[], views: string[], run: (lines: string[]) => Promise<Answer[]> }} Backend
 */

const MOVES = [
  ["reverse-continue", "C"], ["reverse-step", "S"], ["reverse-stepi", "I"], ["stepi", "i"], ["step", "s"],
  ["continue", "c"],
];
const KEYS = { ...Object.fromEntries(MOVES.map(([name, key]) => [key, name])), n: "next", N: "reverse-next", "?": "help" };
const STARTS = { "/": "", ":": "", g: "goto ", b: "break ", w: "watch ", l: "last " };
const AROUND = 9, MAX_SAID = 400;

function element(/** @type {string} */ name, /** @type {string} */ text = "", /** @type {string} */ kind = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function byId(/** @type {string} */ id) {
  return /** @type {HTMLElement} */ (document.getElementById(id));
}

function shownBlock(/** @type {Table | Lines} */ block, /** @type {string} */ kind = "") {
  if ("lines" in block) return element("pre", block.lines.join("\n"), kind);
  const box = element("div"), scroll = element("div", "", "scroll"), table = element("table");
  if (block.title) box.append(element("h2", block.title));
  const head = element("tr"), body = element("tbody");
  for (const name of block.header) head.append(element("th", name));
  for (const cells of block.rows) {
    const row = element("tr");
    for (const cell of cells) row.append(element("td", String(cell)));
    body.append(row);
  }
  const top = element("thead");
  top.append(head);
  table.append(top, body);
  scroll.append(table);
  if (block.rows.length || !block.note) box.append(scroll);
  if (block.note) box.append(element("p", block.note, "note"));
  return box;
}

// Fills the parts of the page that never change: the log's name, the moves, the tabs, and the command names for
// completion.
function fillPage(
  /** @type {Backend} */ backend, /** @type {(text: string) => void} */ run, /** @type {(name: string) => void} */ choose,
) {
  byId("name").textContent = backend.name;
  document.title = `debug ${backend.name}`;
  document.documentElement.classList.toggle("dark", matchMedia("(prefers-color-scheme: dark)").matches);
  for (const [name, key] of MOVES) {
    const button = element("button", `${name} `);
    button.setAttribute("type", "button");
    button.append(element("kbd", key));
    button.addEventListener("click", () => run(name));
    byId("moves").append(button);
  }
  for (const [number, name] of backend.views.entries()) {
    const tab = element("button", name);
    tab.setAttribute("type", "button");
    tab.setAttribute("role", "tab");
    tab.setAttribute("data-view", name);
    if (number < 9) tab.setAttribute("title", `${name} (${number + 1})`);
    tab.addEventListener("click", () => choose(name));
    byId("tabs").append(tab);
  }
  byId("words").replaceChildren(...backend.commands.map((name) => {
    const option = element("option");
    option.setAttribute("value", name);
    return option;
  }));
}

function toggleTheme() {
  document.documentElement.classList.toggle("dark");
}

function showRecords(/** @type {Answer} */ answer, /** @type {(text: string) => void} */ run) {
  const box = byId("records");
  box.replaceChildren(...answer.blocks.map((block) => shownBlock(block)));
  for (const row of box.querySelectorAll("tbody tr")) {
    const number = row.children[1].textContent ?? "";
    if (row.firstElementChild?.textContent) {
      row.classList.add("here");
      row.setAttribute("aria-current", "true");
    }
    row.addEventListener("click", () => run(`goto event ${number}`));
  }
  const here = /** @type {HTMLElement | null} */ (box.querySelector(".here"));
  if (here) box.scrollTop += here.getBoundingClientRect().top - box.getBoundingClientRect().top - box.clientHeight / 2;
}

function startDebugger(/** @type {Backend} */ backend) {
  const line = /** @type {HTMLInputElement} */ (byId("line")), said = byId("said"), tabs = byId("tabs");
  const past = /** @type {string[]} */ ([]);
  let view = backend.views[0], place = 0, last = "", queue = Promise.resolve();

  function say(/** @type {string} */ command, /** @type {Answer} */ answer) {
    said.append(element("pre", `(mm) ${command}`, "command"));
    for (const block of answer.blocks) said.append(shownBlock(block));
    if (answer.error) said.append(element("pre", answer.error, "error"));
    while (said.childElementCount > MAX_SAID) said.firstElementChild?.remove();
    said.scrollTop = said.scrollHeight;
  }

  async function answers(/** @type {string[]} */ lines) {
    try {
      return await backend.run(lines);
    } catch (error) {
      return lines.map(() => ({ blocks: [], error: `the debugger does not answer: ${error}` }));
    }
  }

  async function refresh(/** @type {string[]} */ lines) {
    const all = await answers([...lines, "where", `list ${AROUND}`, `info ${view}`]);
    const [where, records, shown] = all.splice(lines.length);
    const [text] = /** @type {Lines[]} */ (where.blocks);
    byId("place").textContent = where.error || text.lines.join(" · ");
    showRecords(records, run);
    const blocks = shown.blocks.map((block) => shownBlock(block));
    byId("shown").replaceChildren(...(shown.error ? [element("pre", shown.error, "error")] : blocks));
    return all;
  }

  // Runs commands one after the other, however fast keys are pressed.
  function run(/** @type {string} */ text) {
    queue = queue.then(async () => {
      const command = text.trim() || last;
      if (!command) return;
      last = command;
      document.body.setAttribute("aria-busy", "true");
      const [answer] = await refresh([command]);
      say(command, answer);
      document.body.removeAttribute("aria-busy");
      document.body.dataset.done = String(Number(document.body.dataset.done ?? 0) + 1);
    });
    return queue;
  }

  function choose(/** @type {string} */ name) {
    view = name;
    for (const tab of tabs.children) tab.setAttribute("aria-selected", String(tab.getAttribute("data-view") === name));
    queue = queue.then(async () => {
      await refresh([]);
      document.body.dataset.view = name;
    });
  }

  function onKey(/** @type {KeyboardEvent} */ event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (document.activeElement === line) {
      if (event.key === "Escape") line.blur();
      else if (event.key === "ArrowUp" || event.key === "ArrowDown") {
        place = Math.max(0, Math.min(past.length, place + (event.key === "ArrowUp" ? -1 : 1)));
        line.value = past[place] ?? "";
        event.preventDefault();
      }
      return;
    }
    const number = "123456789".indexOf(event.key);
    if (event.key in KEYS) run(KEYS[/** @type {keyof typeof KEYS} */ (event.key)]);
    else if (event.key in STARTS) {
      line.value = STARTS[/** @type {keyof typeof STARTS} */ (event.key)];
      line.focus();
    } else if (event.key === "t") toggleTheme();
    else if (number >= 0 && number < backend.views.length) choose(backend.views[number]);
    else return;
    event.preventDefault();
  }

  fillPage(backend, run, choose);
  byId("theme").addEventListener("click", toggleTheme);
  byId("form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (line.value.trim()) past.push(line.value);
    place = past.length;
    run(line.value);
    line.value = "";
  });
  document.addEventListener("keydown", onKey);
  choose(view);
  Object.assign(window, { mmengineDebugger: { run, answers } });
}
