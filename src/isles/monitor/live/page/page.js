"use strict";
// Shows snapshots of a run (isles/monitor/live/model.py): those of the server as they come, or those
// that this file was saved with.
(() => {
  const {
    $, NONE, known, or, whole, percent, loss, count, size, rate, gib, short, span, ago, date,
    make, write, attribute, text, meter, state, Table, color, chart,
  } = view;

  const STATE_TONES = {
    running: "good", finished: "info", failed: "bad", killed: "bad", unreachable: "bad", lost: "bad", missing: "bad",
    unknown: "warn",
  };

  // ---- The columns of the tables.

  const WIDE = -170;
  const plain = (head, width, get) => ({ head, width, cell: text((row) => get(row) || NONE), sort: get, when: get });
  const number = (head, width, get, style) => ({
    head, width, n: true, cell: text((row) => or(get(row), style)), sort: get, when: (row) => known(get(row)),
  });
  const bar = (head, width, get, draw, name = "", label = null) => ({
    head, width, sort: get, when: (row) => known(get(row)), cell: meter(draw, name, label),
  });
  const cluster = plain("Cluster", 76, (row) => row.cluster);
  const heard = number("Heard", 80, (row) => row.heard_s, ago);
  const filled = (share) => (known(share) ? [[Math.min(1, share), "var(--bar)"]] : []);

  function memory({ memory_bytes: now, peak_bytes: peak, limit_bytes: limit }) {
    if (!known(now)) return [[], NONE];
    const words = [now, peak, limit].filter(known).map(gib).join(" / ");
    if (!limit) return [[], words];
    const parts = filled(now / limit);
    if (known(peak) && peak > now) {
      parts.push([(peak - now) / limit - 0.03, "color-mix(in srgb, var(--bar) 35%, transparent)"], [0.03, "var(--dim)"]);
    }
    return [parts, words];
  }
  const PARTS = ["data", "compute", "communication", "waiting"];
  /** Seconds of each of PARTS: the model counts waiting as communication too. */
  function seconds({ parts }) {
    if (!parts) return null;
    const { data_s: data = 0, compute_s: compute = 0, communication_s: all = 0, waiting_s: waiting = 0 } = parts;
    return [data, compute, Math.max(0, all - waiting), waiting];
  }
  const step_s = (row) => (row.parts ? seconds(row).reduce((sum, part) => sum + part, 0) : null);
  function step_parts(row) {
    const total = step_s(row);
    if (!total) return [[], NONE];
    return [seconds(row).map((part, index) => [part / total, `var(--${PARTS[index]})`]), short(total)];
  }
  function parts_in_words(row) {
    const total = step_s(row);
    return total ? seconds(row).map((part, index) => `${PARTS[index]} ${percent(part / total)}`).join(", ") : "";
  }
  const doing = ({ stage, stage_s: s }) => (stage ? stage + (s >= 10 ? ` for ${span(s)}` : "") : "");
  const condition = (otherwise) => ({
    head: "State", width: WIDE, sort: (row) => (row.mark ? ` ${row.mark}` : otherwise(row)), cell: state(otherwise),
  });
  const clock = (s) => (Math.abs(s) < 0.001 ? "0 ms" : `${s > 0 ? "+" : "−"}${short(Math.abs(s))}`);

  const tables = {
    runs: new Table("runs", "Runs side by side", (row) => row.key, (row) => [row.name], [
      { head: "Run", width: WIDE, sort: (row) => row.name, cell: (cell) => {
        const swatch = make(cell, "span", "swatch");
        const set = text((row) => row.name)(cell);
        return (row) => { swatch.style.setProperty("--c", color(row.key)); set(row); };
      } },
      plain("State", 100, (row) => row.state),
      number("Step", 80, (row) => row.step, whole),
      number("Of", 80, (row) => row.total_steps, whole),
      number("Tokens", 90, (row) => row.tokens || null, count),
      number("Time", 110, (row) => row.elapsed_s, span),
      number("Loss", 86, (row) => row.loss, loss),
      number("Lowest", 86, (row) => row.lowest, loss),
      number("Validation", 90, (row) => row.eval_loss, loss),
      plain("Differs in", -190, (row) => row.differs),
      number("Tokens/s", 90, (row) => row.tokens_per_second, count),
      number("MFU", 70, (row) => row.mfu, percent),
      number("Goodput", 90, (row) => row.goodput, percent),
      number("Restarts", 90, (row) => row.restarts || 0, whole),
    ]),
    clusters: new Table("clusters", "Clusters", (row) => row.name, (row) => [row.name, row.state, row.mark], [
      plain("Cluster", -110, (row) => row.name),
      condition((row) => row.state || ""),
      number("Step", 70, (row) => row.step, whole),
      number("Outer step", 90, (row) => row.outer_step, whole),
      number("Inner steps", 94, (row) => row.inner_steps, whole),
      number("Lag", 50, (row) => row.lag, whole),
      number("Weight", 70, (row) => row.weight, percent),
      number("Up", 84, (row) => row.up_bytes, size),
      number("Down", 84, (row) => row.down_bytes, size),
      number("Sync", 74, (row) => row.sync_s, short),
      number("Hidden", 70, (row) => row.hidden_share, percent),
      number("Loss", 80, (row) => row.loss, loss),
      number("Tokens/s", 84, (row) => row.tokens_per_second, count),
      plain("Started by", 92, (row) => row.launcher),
      heard,
    ]),
    ranks: new Table("ranks", "Ranks", (row) => `${row.cluster} ${row.rank}`,
      (row) => [row.cluster, `rank ${row.rank}`, row.host, row.device, row.mark, row.stage, row.note], [
      { head: "Rank", width: 56, sort: (row) => row.rank, cell: text((row) => `${row.rank}`) },
      cluster,
      plain("Host", 100, (row) => row.host),
      condition(doing),
      plain("Device", 138, (row) => (row.device || "").replace(/^NVIDIA /, "")),
      number("Step", 62, (row) => row.step, whole),
      { ...number("Rows × batch", 94, (row) => row.rows),
        cell: text((row) => or(row.rows, (rows) => `${rows} × ${or(row.micro_batch, whole)}`)) },
      bar("Use", 114, (row) => row.use, (row) => [filled(row.use), or(row.use, percent)]),
      bar("Memory / peak / limit, GiB", 196, (row) => row.memory_bytes, memory),
      number("°C", 46, (row) => row.temperature_c, whole),
      number("W", 50, (row) => row.power_w, whole),
      bar("Parts of the step", 166, step_s, step_parts, "parts", parts_in_words),
      heard,
    ]),
    hosts: new Table("hosts", "Hosts", (row) => `${row.cluster} ${row.node}`,
      (row) => [row.cluster, row.host, row.address, row.state, row.mark, row.note], [
      plain("Host", -130, (row) => row.host || row.address),
      cluster,
      condition((row) => row.state || ""),
      { head: "Ranks", width: 84, sort: (row) => row.ranks && row.ranks[0], when: (row) => row.ranks,
        cell: text(({ ranks }) => (ranks ? [...new Set(ranks)].join("–") : NONE)) },
      bar("Processor", 116, (row) => row.cpu, (row) => [filled(row.cpu), or(row.cpu, percent)]),
      bar("Memory, GiB", 188, (row) => row.memory_bytes,
        (row) => memory({ memory_bytes: row.memory_bytes, limit_bytes: row.memory_total_bytes })),
      number("Disk free", 84, (row) => row.disk_free_bytes, size),
      number("In", 88, (row) => row.net_in, rate),
      number("Out", 88, (row) => row.net_out, rate),
      number("Clock", 84, (row) => row.skew_s, clock),
      heard,
    ]),
    links: new Table("links", "Links", (row) => [row.cluster, row.source, row.target].join("\n"),
      (row) => [row.cluster, row.source, row.target, row.state], [
      { head: "From → to", width: WIDE, sort: (row) => row.source,
        cell: text((row) => `${row.source} → ${row.target}`) },
      cluster,
      condition((row) => row.state || NONE),
      bar("Used", 164, (row) => row.used,
        (row) => [known(row.used) && row.measured ? filled(row.used / row.measured) : [], or(row.used, rate)]),
      number("Of", 92, (row) => row.measured, rate),
      plain("Known by", 92, (row) => row.measured_by),
      number("Round trip", 92, (row) => row.rtt_s, short),
    ]),
  };
  const legend = make(tables.ranks.bar, "span", "legend");
  for (const name of PARTS) {
    const item = make(legend, "span");
    item.style.setProperty("--c", `var(--${name})`);
    write(item, name);
  }
  const hub = document.createElement("p");
  hub.className = "hub";
  tables.clusters.bar.after(hub);

  // ---- The whole page.

  const tiles = new Map();
  function tile(name, value, more) {
    if (!tiles.has(name)) {
      const group = make($("tiles"), "div");
      write(make(group, "dt"), name);
      tiles.set(name, [make(group, "dd"), make(group, "dd")]);
    }
    const [first, second] = tiles.get(name);
    write(first, value);
    write(second, more);
    attribute(second, "title", more.length > 40 ? more : null);
  }

  let snapshot = null;
  let others = [];
  let filter = [];

  function head(run, at) {
    const done = known(run.step) && run.total_steps ? Math.min(1, run.step / run.total_steps) : null;
    write($("name"), run.name || "isles");
    write($("state"), run.state);
    attribute($("state"), "data-tone", STATE_TONES[run.state] || null);
    write($("phase"), [run.phase, run.reason].filter((words) => words && words !== run.state).join(": "));
    write($("step"), known(run.step) ? `Step ${whole(run.step)}` : "No step yet");
    write($("total"), run.total_steps ? `of ${whole(run.total_steps)}` : "");
    if (done === null) attribute($("bar"), "value", "0");
    else attribute($("bar"), "value", done.toFixed(4));
    write($("left"), known(run.left_s) ? `${span(run.left_s)} left` : "");
    write($("begun"), run.begun_at ? `started ${span(Math.max(0, at - run.begun_at))} ago` : "");
    const curve = snapshot.curve || [];
    const evaluated = curve.filter((point) => known(point.eval_loss)).pop();
    tile("Loss", or(run.loss, loss), evaluated ? `validation ${loss(evaluated.eval_loss)}` : "");
    tile("Tokens per second", or(run.tokens_per_second, count), run.tokens ? `${count(run.tokens)} so far` : "");
    tile("MFU", or(run.mfu, percent), known(run.mfu) ? "of the cards' peak" : "not known here");
    tile("Goodput", or(run.goodput, percent), "of the time in steps");
    const saved = known(run.saved_step);
    tile("Checkpoint", saved ? `step ${whole(run.saved_step)}` : "none yet", saved && known(run.saved_age_s) ? ago(run.saved_age_s) : "");
    tile("Restarts", whole(run.restarts || 0), run.last_restart || "");
    document.title = [known(run.step) ? `step ${whole(run.step)}` : run.state, run.name, "isles"].filter(Boolean).join(" · ");
  }

  const notes = [];
  let spoken = "";
  function tell(found, is_running) {
    const list = $("note-list");
    const words = found.length ? found : is_running ? ["Nothing is wrong."] : [];
    while (notes.length > words.length) notes.pop().remove();
    words.forEach((word, index) => {
      notes[index] = notes[index] || make(list, "li");
      write(notes[index], word);
      attribute(notes[index], "class", found.length ? "wrong" : "right");
    });
    // Only what is new is said aloud, not each second that it goes on.
    const kinds = words.join("\n").replace(/[\d.,]+/g, "");
    if (kinds !== spoken) write($("spoken"), words.slice(0, 5).join(" "));
    spoken = kinds;
  }

  /** The keys of which the runs do not all have the same value. */
  function differing(values) {
    const keys = new Set(values.flatMap(Object.keys));
    return [...keys].filter((key) => values.some((of_run) => of_run[key] !== values[0][key]));
  }

  function run_row({ run, curve = [] }, key, keys) {
    const differs = keys.map((name) => `${name.split(".").pop()} ${or((run.values || {})[name], String)}`).join(", ");
    const losses = curve.map((point) => point.loss).filter(known);
    const last = curve[curve.length - 1];
    const lowest = losses.length ? losses.reduce((a, b) => Math.min(a, b)) : null;
    return { ...run, key, differs, elapsed_s: last && last.elapsed_s, lowest };
  }

  function draw_runs() {
    const all = [snapshot, ...others];
    const keys = differing(all.map(({ run }) => run.values || {}));
    chart.series = all.map(({ run, curve = [] }, index) => ({ key: `${index}`, name: run.name, curve }));
    tables.runs.show(others.length ? all.map((one_run, index) => run_row(one_run, `${index}`, keys)) : [], []);
    chart.draw();
  }

  function draw_hub(found) {
    hub.hidden = !found;
    if (!found) return;
    const waits = (found.waits_for || []).join(", ");
    const due = known(found.due_s) ? `, which closes in ${span(found.due_s)}` : "";
    write(hub, [`Hub ${found.address}`, known(found.round) ? `round ${found.round}${due}` : "",
      waits ? `waits for ${waits}` : "waits for nobody", found.error].filter(Boolean).join(" · "));
  }

  function draw_tables() {
    draw_hub(snapshot.hub);
    tables.clusters.show(snapshot.clusters || [], []);
    for (const name of ["ranks", "hosts", "links"]) tables[name].show(snapshot[name] || [], filter);
  }

  function draw(next) {
    const from = performance.now();
    const before = snapshot;
    snapshot = next;
    head(next.run, next.at);
    tell(next.notes || [], next.run.state === "running");
    const last = (curve) => curve && curve.length && curve[curve.length - 1];
    const moved = !before || (before.curve || []).length !== (next.curve || []).length
      || last(before.curve).step !== last(next.curve).step || before.run.name !== next.run.name;
    if (moved || others.length) draw_runs();
    draw_tables();
    write($("place"), next.run.path || "");
    performance.clearMeasures("update");
    performance.measure("update", { start: from });
  }

  $("filter").addEventListener("input", (event) => {
    filter = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (snapshot) draw_tables();
  });

  const dark = matchMedia("(prefers-color-scheme: dark)");
  function theme(name) {
    document.documentElement.dataset.theme = name;
    write($("theme"), name === "dark" ? "Light" : "Dark");
    attribute($("theme"), "aria-label", `Show ${name === "dark" ? "light" : "dark"} colors`);
  }
  theme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => theme(dark.matches ? "dark" : "light"));
  $("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  new ResizeObserver(() => chart.draw()).observe($("chart"));

  function warn(words, tone) {
    write($("lost"), words);
    attribute($("lost"), "data-tone", words ? tone : null);
    document.body.classList.toggle("stale", tone === "bad" && words !== "");
  }

  // ---- Where snapshots come from: this file itself, or the server, again and again.

  const saved = $("data");
  if (saved) {
    const { exported_at, runs } = JSON.parse(saved.textContent);
    others = runs.slice(1);
    draw(runs[0]);
    warn(`Saved on ${date(exported_at)}. This page does not move.`, "info");
    write($("source"), `isles ${runs[0].version || ""}`);
    return;
  }

  const QUIET_S = 10;
  const source = new EventSource(`events${location.search}`);
  let arrived = performance.now();
  let trouble = "";
  let is_connected = true;
  const listen = (name, use) => source.addEventListener(name, (event) => use(JSON.parse(event.data)));
  listen("run", (next) => {
    arrived = performance.now();
    draw(next);
    look();
  });
  listen("others", (next) => {
    others = next;
    if (snapshot) draw_runs();
  });
  listen("trouble", (words) => {
    trouble = words;
    look();
  });
  source.onopen = () => { is_connected = true; look(); };
  source.onerror = () => { is_connected = false; look(); };

  function look() {
    const quiet_s = (performance.now() - arrived) / 1000;
    const since = snapshot ? `What is below is ${span(quiet_s)} old.` : "";
    if (source.readyState === EventSource.CLOSED) {
      warn(`This link is no longer valid: type isles dashboard again, and open its new link. ${since}`, "bad");
    } else if (!is_connected) {
      warn(`Connection lost: isles dashboard has ended, or cannot be reached. Trying again … ${since}`, "bad");
    } else if (trouble) {
      warn(`${trouble} ${since}`, quiet_s > QUIET_S ? "bad" : "warn");
    } else if (!snapshot) {
      warn(quiet_s > QUIET_S ? `Nothing has come yet, for ${span(quiet_s)}.` : "", "warn");
    } else {
      warn(quiet_s > QUIET_S ? `No news from the run. ${since}` : "", "bad");
    }
    write($("source"), snapshot ? `isles ${snapshot.version || ""}, ${quiet_s < QUIET_S ? "live" : "not live"}` : "");
  }
  setInterval(look, 1000);
})();
