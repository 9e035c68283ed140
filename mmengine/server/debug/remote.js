// The debugger page's backend: sends commands to the debug server that delivered the page.

async function openRemote() {
  const about = await (await fetch("about")).json();
  return {
    ...about,
    async run(/** @type {string[]} */ lines) {
      const body = JSON.stringify({ lines });
      const done = await fetch("run", { method: "POST", headers: { "content-type": "application/json" }, body });
      if (!done.ok) throw new Error(`${done.status} ${await done.text()}`);
      return done.json();
    },
  };
}

openRemote().then(startDebugger);
