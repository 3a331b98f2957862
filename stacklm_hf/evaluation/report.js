"use strict";
// The list of trajectories. Every text in it is untrusted: it goes in as text nodes, never as HTML.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const form = document.getElementById("filters");
  const list = document.getElementById("list");
  const count = document.getElementById("count");
  const more = document.getElementById("more");
  const PAGE = 50;
  const FILTERS = ["outcome", "run", "kind", "split"];
  const SPAN_CLASS = ["plain", "own", "own forced", "ctl", "ctl own", "left-out"]; // by the code of a span
  const ROLES = {
    "<|system|>": "System", "<|user|>": "Question", "<|assistant|>": "Model", "<|tool_result|>": "Tool result",
  };
  let matches = [];
  let shown = 0;
  const PINS = ["episode", "task"]; // ids that only a link or a button sets
  let pins = {};

  function element(tag, className, text) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  }

  function outcomeName(code) {
    return data.outcomes[code] || code;
  }

  // Filters

  function fill(select, name, values, label) {
    const counts = new Map();
    for (const episode of data.episodes) counts.set(episode[name], (counts.get(episode[name]) || 0) + 1);
    select.append(new Option("all", ""));
    if (name === "outcome") {
      const failed = data.episodes.length - (counts.get("correct") || 0);
      select.append(new Option(`any failure (${failed})`, "failed"));
    }
    for (const value of values) {
      if (counts.has(value)) select.append(new Option(`${label(value)} (${counts.get(value)})`, String(value)));
    }
    if (counts.size < 2 && name !== "outcome") select.disabled = true;
  }

  function accepts(episode, wanted) {
    if (pins.episode && episode.id !== pins.episode) return false;
    if (pins.task && episode.task !== pins.task) return false;
    if (wanted.outcome === "failed" ? episode.outcome === "correct" : wanted.outcome && episode.outcome !== wanted.outcome) return false;
    if (wanted.run && String(episode.run) !== wanted.run) return false;
    if (wanted.kind && episode.kind !== wanted.kind) return false;
    if (wanted.split && episode.split !== wanted.split) return false;
    return wanted.words.every((word) => haystack(episode).includes(word));
  }

  function haystack(episode) {
    if (episode.haystack === undefined) {
      const spans = episode.spans.map((span) => span[1]).join("");
      const parts = [episode.id, episode.task, episode.question, episode.answer, episode.gold, episode.error, spans];
      episode.haystack = parts.join("\n").toLowerCase();
    }
    return episode.haystack;
  }

  // Takes the filters from the address, so that a view can be linked; false where the address names none.
  function readHash() {
    const wanted = new URLSearchParams(location.hash.slice(1));
    const names = [...FILTERS, "q"];
    if (![...names, ...PINS].some((name) => wanted.has(name))) return false;
    for (const name of names) {
      const field = form.elements[name];
      field.value = wanted.get(name) || "";
      if (field.selectedIndex === -1) field.value = ""; // a value that this report does not have
    }
    pins = Object.fromEntries(PINS.filter((name) => wanted.has(name)).map((name) => [name, wanted.get(name)]));
    return true;
  }

  function writeHash() {
    const wanted = new URLSearchParams();
    for (const name of [...FILTERS, "q"]) if (form.elements[name].value) wanted.set(name, form.elements[name].value);
    for (const name of PINS) if (pins[name]) wanted.set(name, pins[name]);
    try {
      history.replaceState(null, "", "#" + wanted);
    } catch (error) {
      // Some browsers refuse this for local files; the filters work all the same.
    }
  }

  function update() {
    const wanted = { words: form.elements.q.value.toLowerCase().split(/\s+/).filter(Boolean) };
    for (const name of FILTERS) wanted[name] = form.elements[name].value;
    matches = data.episodes.filter((episode) => accepts(episode, wanted));
    list.replaceChildren();
    shown = 0;
    showMore();
    const total = data.episodes.length.toLocaleString("en");
    count.textContent = `${matches.length.toLocaleString("en")} of ${total} trajectories` + pinned();
    if (pins.episode && list.firstElementChild) list.firstElementChild.open = true;
  }

  function pinned() {
    if (pins.episode) return " (one linked episode)";
    return pins.task ? ` (of the task ${pins.task})` : "";
  }

  function showMore() {
    const next = matches.slice(shown, shown + PAGE);
    list.append(...next.map(row));
    shown += next.length;
    more.hidden = shown >= matches.length;
    more.textContent = `Show ${Math.min(PAGE, matches.length - shown)} more of ${matches.length - shown}`;
  }

  // One trajectory

  function row(episode) {
    const details = element("details", "ep");
    const summary = element("summary");
    const good = episode.outcome === "correct";
    summary.append(element("span", good ? "badge good" : "badge bad", (good ? "✓ " : "✗ ") + outcomeName(episode.outcome)));
    summary.append(element("bdi", "q", episode.question));
    const sub = element("span", "sub");
    sub.append(element("bdi", "", data.runs[episode.run]), " · ", element("bdi", "", episode.kind), " · answer ");
    sub.append(element("b", "", clip(answerText(episode))));
    if (!good) sub.append(", gold ", element("b", "", clip(episode.gold)));
    sub.append(` · ${plural(episode.calls, "call")} · ${plural(episode.own, "own token")}`);
    summary.append(sub);
    details.append(summary);
    // A transcript is built when it is first opened: thousands of rows stay light.
    details.addEventListener("toggle", () => {
      if (details.open && details.children.length === 1) details.append(body(episode));
    });
    return details;
  }

  function answerText(episode) {
    if (episode.answer === null) return "none";
    return episode.answer.trim() ? episode.answer : "(empty)";
  }

  function clip(text) {
    return text.length > 80 ? text.slice(0, 79) + "…" : text;
  }

  function plural(number, noun) {
    return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
  }

  function body(episode) {
    const node = element("div", "body");
    const facts = element("dl", "facts");
    const rows = [
      ["answer", answerText(episode)], ["gold", episode.gold],
      ["stop", episode.stop], ["grounded", episode.grounded ? "yes" : "no"], ["steps", episode.steps],
      ["tokens", `${episode.own} own of ${episode.total}`], ["reward", episode.reward], ["split", episode.split],
      ["policy", episode.policy], ["episode", episode.id], ["error", episode.error],
    ];
    for (const [name, value] of rows) {
      if (value === null || value === "") continue;
      const pair = element("div");
      const definition = element("dd");
      definition.append(element("bdi", "", String(value)));
      pair.append(element("dt", "", name), definition);
      facts.append(pair);
    }
    node.append(facts, ...blocks(episode.spans), tools(episode));
    return node;
  }

  function tools(episode) {
    const node = element("div", "tools");
    const same = element("button", "link", "This task in every run");
    same.type = "button";
    same.addEventListener("click", () => {
      form.reset();
      pins = { task: episode.task };
      apply();
    });
    const link = element("a", "", "Link to this episode");
    link.href = "#" + new URLSearchParams({ run: episode.run, episode: episode.id });
    if (episode.task) node.append(same);
    node.append(link);
    return node;
  }

  function blocks(spans) {
    const nodes = [];
    let text = null;
    for (const [code, value] of spans) {
      const role = code === 3 ? ROLES[value] : undefined;
      if (role || text === null) {
        const block = element("div", role === "Model" ? "block model" : "block");
        block.append(element("div", "who", role || "Start"));
        text = element("div", "text");
        block.append(text);
        nodes.push(block);
      }
      text.append(span(code, value));
    }
    return nodes;
  }

  function span(code, value) {
    const own = code === 1 || code === 2;
    return element(own ? "mark" : "span", SPAN_CLASS[code], value);
  }

  // Events

  function apply() {
    writeHash();
    update();
  }

  fill(form.elements.outcome, "outcome", Object.keys(data.outcomes), outcomeName);
  fill(form.elements.run, "run", data.runs.map((_, index) => index), (index) => data.runs[index]);
  fill(form.elements.kind, "kind", data.kinds, (kind) => kind || "(none)");
  fill(form.elements.split, "split", data.splits, (split) => split || "(none)");
  let timer = 0;
  form.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(apply, 120);
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => {
    pins = {};
    setTimeout(apply); // the fields are empty only after this event
  });
  more.addEventListener("click", () => {
    const first = list.children.length;
    showMore();
    list.children[first].querySelector("summary").focus();
  });
  for (const button of document.querySelectorAll("[data-outcome]")) {
    button.addEventListener("click", () => {
      form.reset();
      pins = {};
      form.elements.outcome.value = button.dataset.outcome;
      apply();
      document.getElementById("trajectories").scrollIntoView();
    });
  }
  const follow = () => {
    const given = readHash();
    if (given) document.getElementById("trajectories").scrollIntoView();
    return given;
  };
  window.addEventListener("hashchange", () => {
    if (follow()) update();
  });
  follow();
  update();
})();
