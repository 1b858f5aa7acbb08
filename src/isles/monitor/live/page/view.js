"use strict";
// What the page is made of: numbers in words, elements that are written in place, tables, the curve.
// An element is made once, and only what has changed is written. Text of the data is only ever put
// in as text.
const view = (() => {
  const $ = (id) => document.getElementById(id);
  const NONE = "–";

  // ---- Numbers as people say them.

  const known = (x) => x !== null && x !== undefined;
  const or = (x, write) => (known(x) ? write(x) : NONE);
  const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
  const whole = (x) => WHOLE.format(x);
  const percent = (x) => `${(100 * x).toFixed(x < 0.1 && x > 0 ? 1 : 0)} %`;
  const loss = (x) => x.toFixed(Math.abs(x) < 0.01 ? 5 : 4);

  function scaled(x, units, base) {
    let unit = 0;
    while (Math.abs(x) >= base && unit < units.length - 1) {
      x /= base;
      unit += 1;
    }
    const digits = unit === 0 || Math.abs(x) >= 100 ? 0 : Math.abs(x) >= 10 ? 1 : 2;
    return `${x.toFixed(digits)}${units[unit]}`;
  }
  const count = (x) => scaled(x, ["", " k", " M", " B", " T"], 1000);
  // The units of `isles top`.
  const size = (x) => scaled(x, [" B", " KiB", " MiB", " GiB", " TiB", " PiB"], 1024);
  const rate = (x) => scaled(8 * x, [" bit/s", " kbit/s", " Mbit/s", " Gbit/s", " Tbit/s"], 1000);
  const gib = (x) => (x / 2 ** 30).toFixed(x < 10 * 2 ** 30 ? 2 : 1);
  const short = (s) => (s < 1 ? `${(1000 * s).toFixed(s < 0.01 ? 1 : 0)} ms` : `${s.toFixed(s < 10 ? 2 : 1)} s`);

  function span(s) {
    s = Math.round(s);
    if (s < 60) return `${s} s`;
    if (s < 3600) return `${Math.floor(s / 60)} min`;
    const [big, small, unit, part] = s < 86400 ? [3600, 60, "h", "min"] : [86400, 3600, "d", "h"];
    const rest = Math.floor((s % big) / small);
    return `${Math.floor(s / big)} ${unit}${rest ? ` ${rest} ${part}` : ""}`;
  }
  const ago = (s) => (s < 5 ? "now" : `${span(s)} ago`);
  const date = (t) => new Date(1000 * t).toLocaleString("sv-SE");

  // ---- Elements that know what they show.

  function make(parent, tag, name = "") {
    const element = parent.appendChild(document.createElement(tag));
    if (name) element.className = name;
    return element;
  }
  const shown = new WeakMap();
  function write(element, text) {
    if (shown.get(element) === text) return;
    shown.set(element, text);
    element.textContent = text;
  }
  function attribute(element, name, value) {
    if (element.getAttribute(name) === value) return;
    if (value === null) element.removeAttribute(name);
    else element.setAttribute(name, value);
  }

  const MARK_TONES = { straggler: "warn", throttled: "hot", dead: "bad", silent: "quiet" };

  // ---- Tables: a row of the data keeps its row of the page, whatever the order.

  const text = (get) => (cell) => {
    const node = cell.appendChild(document.createTextNode(""));
    let last = "";
    return (row) => {
      const now = get(row);
      if (now !== last) node.data = last = now;
    };
  };
  /** A bar of parts, [share, color] each, behind it a text. One gradient, so nothing is laid out
   *  anew; it costs more than all texts of a row, and is left out where the row is not in sight. */
  const meter = (get, name, label) => (cell) => {
    const bar = make(cell, "span", `meter ${name}`);
    const behind = make(cell, "span");
    if (name) bar.setAttribute("role", "img");
    let last = "";
    return (row, is_away) => {
      const [parts, words] = get(row);
      write(behind, words);
      if (label) attribute(bar, "aria-label", label(row));
      if (is_away) return;
      if (bar.hidden !== !parts.length) bar.hidden = !parts.length;
      let from = 0;
      const stops = parts.map(([share, color]) => {
        const start = from;
        from = Math.min(1, from + share);
        return `${color} ${(100 * start).toFixed(1)}% ${(100 * from).toFixed(1)}%`;
      });
      const now = [...stops, `transparent ${(100 * from).toFixed(1)}%`].join();
      if (now !== last) bar.style.backgroundImage = `linear-gradient(90deg, ${(last = now)})`;
    };
  };
  /** What it is marked with, in a color and in words; else what it does. */
  const state = (otherwise) => (cell) => {
    const pill = make(cell, "span", "pill");
    cell.append(" ");
    const rest = make(cell, "span", "rest");
    return (row) => {
      const word = row.mark || "";
      if (pill.hidden !== !word) pill.hidden = !word;
      write(pill, word);
      attribute(pill, "data-tone", MARK_TONES[word] || null);
      write(rest, row.note || (word ? "" : otherwise(row)));
    };
  };

  class Table {
    /** columns: {head, width, cell, sort, when, n}: `sort` gives what rows are ordered by, `when`
     *  whether a row has anything in this column; n: a number. A column in which no row has anything
     *  is left out. Widths are given, so that numbers that change move nothing, and each row is laid
     *  out by itself, only where it is in sight; the roles say what is a table all the same. */
    constructor(id, title, key, words, columns) {
      Object.assign(this, { section: $(id), id, title, key, words, columns });
      this.lines = new Map();
      this.used = new Set();
      this.sorted = null;
      this.rows = [];
      this.turn = 0;
      const bar = make(this.section, "div", "bar-of-section");
      const heading = make(bar, "h2");
      heading.id = `${id}-title`;
      heading.append(`${title} `);
      this.number = make(heading, "small");
      this.bar = bar;
      this.box = make(this.section, "div", "box");
      this.box.tabIndex = 0;
      this.box.setAttribute("role", "region");
      this.box.setAttribute("aria-labelledby", heading.id);
      this.box.addEventListener("pointerover", ({ target }) => {
        const cell = target.closest("tbody td, tbody th"); // what is cut off, or only drawn, in full
        if (cell) cell.title = [cell.textContent, ...[...cell.querySelectorAll("[aria-label]")].map((one) => one.ariaLabel)].join("\n");
      });
    }

    show(rows, filter) {
      this.rows = rows;
      this.section.hidden = rows.length === 0;
      const before = this.used.size;
      for (const column of this.columns) {
        if (!this.used.has(column) && (!column.when || rows.some(column.when))) this.used.add(column);
      }
      if (this.used.size !== before) this.build();
      const seen = new Set();
      const order = this.ordered();
      let visible = 0;
      this.turn += 1;
      for (const row of rows) {
        const key = this.key(row);
        if (seen.has(key)) continue;
        seen.add(key);
        const line = this.lines.get(key) || this.line(key);
        line.row = row;
        // Of many rows those out of sight are written one time in four, and when they come into sight.
        if (!line.is_away || rows.length < 100 || (seen.size + this.turn) % 4 === 0) {
          for (const set of line.cells) set(row, line.is_away);
        }
        attribute(line.tr, "data-mark", row.mark || null);
        const hidden = filter.length > 0 && !this.fits(row, filter);
        if (line.tr.hidden !== hidden) line.tr.hidden = hidden;
        visible += hidden ? 0 : 1;
      }
      for (const [key, line] of this.lines) {
        if (!seen.has(key)) {
          line.tr.remove();
          this.lines.delete(key);
        }
      }
      this.arrange(order);
      write(this.number, visible === seen.size ? whole(seen.size) : `${whole(visible)} of ${whole(seen.size)}`);
    }

    fits(row, filter) {
      const all = this.words(row).join(" ").toLowerCase();
      return filter.every((word) => all.includes(word));
    }

    ordered() {
      if (!this.sorted) return this.rows;
      const { column, down } = this.sorted;
      const with_values = this.rows.map((row) => [column.sort(row), row]);
      with_values.sort(([a], [b]) => {
        if (!known(a) || !known(b)) return known(b) - known(a);
        const way = typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
        return down ? -way : way;
      });
      return with_values.map(([, row]) => row);
    }

    arrange(order) {
      let place = this.body.firstChild;
      for (const row of order) {
        const { tr } = this.lines.get(this.key(row));
        if (tr === place) place = place.nextSibling;
        else this.body.insertBefore(tr, place);
      }
    }

    /** The table anew: at the beginning, and where a column has come. */
    build() {
      const focused = this.columns.find((column) => column.button && column.button === document.activeElement);
      this.lines.clear();
      this.box.replaceChildren();
      const columns = this.columns.filter((column) => this.used.has(column));
      const table = make(this.box, "table");
      // A negative width is the least of a column that takes what room there is.
      table.style.setProperty("--columns", columns.map(({ width: w }) => (w > 0 ? `${w}px` : `minmax(${-w}px, 1fr)`)).join(" "));
      table.style.minWidth = `${columns.reduce((sum, { width: w }) => sum + Math.abs(w), 0)}px`;
      table.setAttribute("role", "table");
      write(make(table, "caption", "sr"), `${this.title}; the heads of the columns sort`);
      const head = make(make(table, "thead"), "tr");
      head.parentElement.setAttribute("role", "rowgroup");
      head.setAttribute("role", "row");
      for (const column of columns) {
        const th = make(head, "th", column.n ? "n" : "");
        th.setAttribute("role", "columnheader");
        column.th = th;
        column.button = make(th, "button");
        column.button.type = "button";
        write(column.button, column.head);
        column.button.addEventListener("click", () => this.sort(column));
      }
      this.mark();
      this.body = make(table, "tbody");
      this.body.setAttribute("role", "rowgroup");
      if (focused) focused.button.focus();
    }

    line(key) {
      const tr = make(this.body, "tr");
      tr.setAttribute("role", "row");
      const cells = this.columns.filter((column) => this.used.has(column)).map((column, index) => {
        const cell = make(tr, index ? "td" : "th", column.n ? "n" : "");
        cell.setAttribute("role", index ? "cell" : "rowheader");
        return column.cell(cell);
      });
      const line = { tr, cells, row: null, is_away: false };
      tr.addEventListener("contentvisibilityautostatechange", (event) => {
        line.is_away = event.skipped;
        if (!line.is_away) for (const set of cells) set(line.row, false);
      });
      this.lines.set(key, line);
      return line;
    }

    sort(column) {
      const same = this.sorted && this.sorted.column === column;
      if (same && this.sorted.turned) {
        this.sorted = null; // a third time: as they were
      } else {
        const down = same ? !this.sorted.down : Boolean(column.n);
        this.sorted = { column, down, turned: same };
      }
      this.mark();
      this.arrange(this.ordered());
    }

    mark() {
      const { column: by, down } = this.sorted || {};
      for (const column of this.used) {
        attribute(column.th, "aria-sort", column === by ? (down ? "descending" : "ascending") : null);
      }
    }
  }

  // ---- The curve.

  const color = (key) => `var(--run-${Number(key) % 6})`;
  const chart = {
    series: [], axis: "step", log: false, at: null,

    value(point) {
      return known(point.loss) && (!this.log || point.loss > 0) ? (this.log ? Math.log10(point.loss) : point.loss) : null;
    },
    words(x) {
      return this.axis === "step" ? whole(x) : this.axis === "tokens" ? count(x) : span(x);
    },

    draw() {
      const svg = $("chart");
      const width = svg.clientWidth, height = svg.clientHeight;
      svg.replaceChildren();
      const points = this.series.flatMap(({ curve }) => curve.filter((point) => known(this.value(point))));
      if (!points.length || !width) return;
      const xs = points.map((point) => point[this.axis] || 0), ys = points.map((point) => this.value(point));
      const ticks = (low, high, most) => {
        const raw = (high - low) / most, power = 10 ** Math.floor(Math.log10(raw));
        const wide = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power;
        const first = Math.ceil(low / wide - 1e-9);
        return Array.from({ length: Math.max(0, Math.floor(high / wide + 1e-9) - first + 1) }, (_, i) => (first + i) * wide);
      };
      let low = ys.reduce((a, b) => Math.min(a, b)), high = ys.reduce((a, b) => Math.max(a, b));
      const gap = (high - low || Math.abs(high) || 1) * 0.06;
      low -= gap;
      high += gap;
      const end = xs.reduce((a, b) => Math.max(a, b)) || 1;
      const left = 46, bottom = height - 22, right = width - 10;
      this.x = (point) => left + ((right - left) * (point[this.axis] || 0)) / end;
      const y = (value) => bottom - ((bottom - 8) * (value - low)) / (high - low);
      const add = (tag, attributes, words) => {
        const element = svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", tag));
        for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
        if (words !== undefined) element.textContent = words;
        return element;
      };
      const marks = ticks(low, high, 5);
      const digits = Math.max(0, Math.ceil(-Math.log10(marks[1] - marks[0]) - 1e-9));
      for (const value of marks) {
        const place = y(value), words = this.log ? Number((10 ** value).toPrecision(4)) : value.toFixed(digits);
        add("line", { class: "grid", x1: left, x2: right, y1: place, y2: place });
        add("text", { x: left - 8, y: place + 4, "text-anchor": "end" }, words);
      }
      for (const value of ticks(0, end, Math.max(2, Math.min(8, width / 110)))) {
        const place = left + ((right - left) * value) / end;
        if (this.axis === "step" && value % 1) continue;
        add("text", { x: place, y: height - 4, "text-anchor": place > right - 24 ? "end" : "middle" }, this.words(value));
      }
      for (const { key, curve } of [...this.series].reverse()) {
        const stroke = color(key);
        const line = curve.filter((point) => known(this.value(point)));
        const path = line.map((point) => `${this.x(point).toFixed(1)} ${y(this.value(point)).toFixed(1)}`).join("L");
        const drawn = add("path", { class: "line", d: `M${path}` });
        drawn.style.stroke = stroke;
        for (const point of curve) {
          const value = known(point.eval_loss) ? this.value({ loss: point.eval_loss }) : null;
          if (known(value)) {
            add("circle", { class: "dot", r: 3, cx: this.x(point), cy: Math.max(4, y(value)) }).style.stroke = stroke;
          }
        }
      }
      if (this.at !== null) {
        const place = this.x(this.at);
        add("line", { class: "cursor", x1: place, x2: place, y1: 4, y2: bottom });
      }
      this.describe();
    },

    describe() {
      const curve = this.series[0].curve.filter((point) => known(point.loss));
      const first = curve[0], last = curve[curve.length - 1];
      if (first) {
        attribute($("chart"), "aria-label",
          `Loss from ${loss(first.loss)} at step ${first.step} to ${loss(last.loss)} at step ${last.step}; arrow keys read its points`);
      }
      const at = this.at;
      if (!at) {
        write($("readout"), this.series.some(({ curve: c }) => c.some((p) => known(p.eval_loss))) ? "○ loss on the validation data" : "");
        return;
      }
      const others = this.series.slice(1).map(({ name, curve: other }) => {
        const near = nearest(other, (point) => Math.abs((point[this.axis] || 0) - (at[this.axis] || 0)));
        return near && known(near.loss) ? `; ${name} ${loss(near.loss)}` : "";
      });
      const validation = known(at.eval_loss) ? `, on the validation data ${loss(at.eval_loss)}` : "";
      write($("readout"), `step ${whole(at.step)}, ${count(at.tokens || 0)} tokens, ${span(at.elapsed_s || 0)}: `
        + `loss ${or(at.loss, loss)}${validation}${others.join("")}`);
    },

    point(at) {
      this.at = at;
      this.draw();
    },
  };
  function nearest(points, distance) {
    return points.reduce((best, point) => (best === null || distance(point) < distance(best) ? point : best), null);
  }
  $("axis").addEventListener("change", (event) => {
    chart.axis = event.target.value;
    chart.draw();
  });
  $("log").addEventListener("change", (event) => {
    chart.log = event.target.checked;
    chart.draw();
  });
  $("chart").addEventListener("pointermove", (event) => {
    const place = event.clientX - $("chart").getBoundingClientRect().left;
    const points = chart.series.length && chart.x ? chart.series[0].curve.filter((point) => known(point.loss)) : [];
    const found = nearest(points, (point) => Math.abs(chart.x(point) - place));
    if (found !== chart.at) chart.point(found);
  });
  $("chart").addEventListener("pointerleave", () => chart.point(null));
  $("chart").addEventListener("blur", () => chart.point(null));
  $("chart").addEventListener("keydown", (event) => {
    const points = chart.series.length ? chart.series[0].curve.filter((point) => known(point.loss)) : [];
    const last = points.length - 1;
    const at = points.findIndex((point) => chart.at && point.step === chart.at.step);
    const to = {
      ArrowLeft: at < 0 ? last : Math.max(0, at - 1), ArrowRight: Math.min(last, at + 1), Home: 0, End: last,
    }[event.key];
    if (last < 0 || to === undefined) return;
    event.preventDefault();
    chart.point(points[to]);
  });

  return {
    $, NONE, known, or, whole, percent, loss, count, size, rate, gib, short, span, ago, date,
    make, write, attribute, text, meter, state, Table, color, chart,
  };
})();
