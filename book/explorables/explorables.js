// Figures that move. `Explorable.add(name, spec)` fills every <div class="explorable" data-explorable="name"> of the
// page. A state is {key: value}, one value for each handle. A spec holds
//   title     heading; says: what to try; shows: one sentence, what the picture shows (for the ear)
//   handles   in order: {key, label, min, max, step, value, text?: (value, state) => words after the label}, a slider;
//             {key, label, value, choices: {value: words}}, a list; {label, press: (state) => changes}, a button;
//             {label, plays: key of a slider, seconds}, a button that moves it from end to end; {heading}, words above
//             the handles that follow
//   height    of each drawing, in pixels, side by side; narrow: their heights on a phone, one below the other
//   draw      (kit, state) => draws all; kit.plot(i, {x: [low, high], y: [low, high], xlabel, ylabel, xticks?, yticks?,
//             equal?, part?: [i, n], the i-th of n parts, one below the other or, on a phone, side by side,
//             keys?: [[colour, words, style?], ...]}) gives the i-th drawing; ticks are values or [value, words]; its
//             methods take coordinates of the data: line(points, colour, style?), area(points, colour),
//             dot(x, y, colour, open?), arrow(from, to, colour), bar(x, y, width, colour, from?), square(x, y, side, colour),
//             exit(points, colour), a tip where a path leaves the axes for good, text(x, y, words, anchor?, pixels right
//             and down?), and grip(x, y, colour, (x, y) => changes, anywhere?), a dot to drag, or to put `anywhere` by a
//             click; what it changes has handles, too, for the keyboard
//   state     {key: value}, what else a state has at the start, for buttons to change
//   readout   (state) => the result in one sentence, with its numbers; source: [words, address], a link at its words
//   formulas  {name: pure function}, for tests, which find each spec as Explorable.specs[name of the explorable]
// Colours are names of COLORS in moe_book.figures, "ink" or "muted"; styles "dashed", "thin", "thin dashed" and,
// in keys, "area". A line of custom.css keeps the height free. Explorable.number(value, digits), expert(i), a colour,
// mass(x), normals(seed) and remembered(function of the state) help.

const Explorable = (() => {
  const NS = "http://www.w3.org/2000/svg";
  const GAP = 16, WIDE = 560;  // pixels between drawings; from this width on they stand side by side
  const MARGIN = { left: 48, right: 16, bottom: 46 };
  const TICK = 11;  // pixels between axes and their numbers, which a grip on the border does not cover
  const ROOM = { x: 46, y: 24 };  // least distance of numbers on an axis
  const REACH = 26;  // pixels from a grip within which a finger takes it
  const EXPERTS = ["measured", "bound", "sharp", "paper", "linear", "tanh"];
  const specs = {};
  let count = 0;

  const colour = (name) => `var(--ex-${name})`;
  const expert = (i) => EXPERTS[i];

  /** A number as the page writes it: with a minus sign, and no minus before zero. */
  function number(value, digits = 2) {
    const text = Math.abs(value).toFixed(digits);
    return value < 0 && Number(text) ? `−${text}` : text;
  }

  /** Round numbers from low to high, at most seven and at least `room` of the axis' pixels apart. */
  function ticks([low, high], pixels, room) {
    const least = (high - low) * Math.max(1 / 6, room / pixels), power = 10 ** Math.floor(Math.log10(least));
    const step = power * [1, 2, 5, 10].find((m) => m * power > 0.999 * least);
    const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
    return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toFixed(9)));
  }

  /** The chance that a standard normal number lies between 0 and x, by a series without cancellation. */
  function mass(x) {
    if (Math.abs(x) > 9) return Math.sign(x) / 2;
    let term = x, sum = x;
    for (let k = 3; Math.abs(term) > 1e-17 * Math.abs(sum); k += 2) sum += term *= x * x / k;
    return sum * Math.exp(-x * x / 2) / Math.sqrt(2 * Math.PI);
  }

  /** A seeded source of standard normal numbers: what was drawn can be had again (mulberry32, Box and Muller). */
  function normals(seed) {
    let at = seed >>> 0;
    const uniform = () => {
      at = (at + 0x6d2b79f5) >>> 0;
      let z = Math.imul(at ^ (at >>> 15), at | 1);
      z ^= z + Math.imul(z ^ (z >>> 7), z | 61);
      return ((z ^ (z >>> 14)) >>> 0) / 2 ** 32;
    };
    return () => Math.sqrt(-2 * Math.log(1 - uniform())) * Math.cos(2 * Math.PI * uniform());
  }

  /** A function of the state that keeps its last value, since a picture and its words ask for the same. */
  function remembered(compute) {
    let of = "", value;
    return (state) => {
      const now = JSON.stringify(state);
      if (now !== of) [of, value] = [now, compute(state)];
      return value;
    };
  }

  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
    made.append(...children);
    return made;
  }

  function shape(parent, name, attributes, text = "") {
    const made = document.createElementNS(NS, name);
    Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
    made.textContent = text;
    parent.append(made);
    return made;
  }

  /** One drawing: axes over a rectangle of the picture, and marks in coordinates of the data. */
  class Plot {
    constructor(svg, place, axes, grips) {
      Object.assign(this, { svg, place, grips });
      this.box = {
        left: place.left + MARGIN.left, right: place.right - MARGIN.right,
        top: this.key(axes.keys ?? []), bottom: place.last - MARGIN.bottom,
      };
      [this.x, this.y] = axes.equal ? this.widened(axes) : [axes.x, axes.y];
      this.frame(axes);
      this.clip = `ex-clip-${++count}`;
      const { left, right, top, bottom } = this.box;
      const path = shape(svg, "clipPath", { id: this.clip });
      shape(path, "rect", { x: left, y: top, width: right - left, height: bottom - top });
    }

    /** Limits with one scale for both axes: the wider direction shows more. */
    widened({ x, y }) {
      const { left, right, top, bottom } = this.box;
      const scale = Math.max((x[1] - x[0]) / (right - left), (y[1] - y[0]) / (bottom - top));
      const around = ([low, high], pixels) => [-1, 1].map((side) => (low + high + side * scale * pixels) / 2);
      return [around(x, right - left), around(y, bottom - top)];
    }

    X(x) { return this.box.left + (x - this.x[0]) / (this.x[1] - this.x[0]) * (this.box.right - this.box.left); }
    Y(y) { return this.box.bottom - (y - this.y[0]) / (this.y[1] - this.y[0]) * (this.box.bottom - this.box.top); }

    frame({ xlabel, ylabel, xticks, yticks }) {
      const { left, right, top, bottom } = this.box;
      xticks ??= ticks(this.x, right - left, ROOM.x);
      yticks ??= ticks(this.y, bottom - top, ROOM.y);
      const digits = (values) => Math.max(...values.map((v) => `${v}`.split(".")[1]?.length ?? 0));
      const words = (values) => values.map((v) => (Array.isArray(v) ? v : [v, number(v, digits(values))]));
      for (const [x, text] of words(xticks)) {
        shape(this.svg, "line", { x1: this.X(x), x2: this.X(x), y1: top, y2: bottom, class: "grid" });
        shape(this.svg, "text", { x: this.X(x), y: bottom + TICK + 11, "text-anchor": "middle", class: "tick" }, text);
      }
      for (const [y, text] of words(yticks)) {
        shape(this.svg, "line", { x1: left, x2: right, y1: this.Y(y), y2: this.Y(y), class: "grid" });
        shape(this.svg, "text", { x: left - TICK, y: this.Y(y) + 5, "text-anchor": "end", class: "tick" }, text);
      }
      shape(this.svg, "text", { x: (left + right) / 2, y: bottom + 40, "text-anchor": "middle" }, xlabel);
      shape(this.svg, "text", { x: this.place.left, y: this.place.first + 15 }, ylabel);
    }

    path(points) {
      return points.map(([x, y], i) => `${i ? "L" : "M"}${this.X(x).toFixed(2)} ${this.Y(y).toFixed(2)}`).join("");
    }

    line(points, name, style = "") {
      shape(this.svg, "path", {
        d: this.path(points), class: `line ${style}`, stroke: colour(name), "clip-path": `url(#${this.clip})`,
      });
    }

    area(points, name) {
      shape(this.svg, "path", {
        d: `${this.path(points)}Z`, class: "area", fill: colour(name), "clip-path": `url(#${this.clip})`,
      });
    }

    dot(x, y, name, open = false) {
      const fill = open ? "none" : colour(name);
      shape(this.svg, "circle", { cx: this.X(x), cy: this.Y(y), r: 5.5, fill, stroke: colour(name), class: "dot" });
    }

    arrow([x, y], [toX, toY], name) {
      const [dx, dy] = [this.X(toX) - this.X(x), this.Y(toY) - this.Y(y)], length = Math.hypot(dx, dy);
      if (length < 1) return;
      const [ux, uy] = [dx / length, dy / length], size = Math.min(10, length);
      const [bx, by] = [this.X(toX) - size * ux, this.Y(toY) - size * uy];
      shape(this.svg, "path", { d: `M${this.X(x)} ${this.Y(y)}L${bx} ${by}`, class: "line", stroke: colour(name) });
      this.tip([bx, by], [size * ux, size * uy], name);
    }

    /** A tip of an arrow, in pixels: the middle of its base, and from there to its point. */
    tip([x, y], [dx, dy], name) {
      const wing = (side) => `${x - side * dy} ${y + side * dx}`;
      shape(this.svg, "path", { d: `M${x + dx} ${y + dy}L${wing(0.5)}L${wing(-0.5)}Z`, fill: colour(name) });
    }

    /** Whether a point lies within the axes, up to rounding: a start may lie on the border. */
    holds(point) {
      return [this.x, this.y].every(([low, high], a) => point[a] > low - 1e-9 && point[a] < high + 1e-9);
    }

    exit(points, name) {
      const last = points.findLastIndex((point) => this.holds(point)), [p, q] = points.slice(last, last + 2);
      if (!q) return;
      const until = (a, limits) => (p[a] === q[a] ? 1 : Math.max(...limits.map((t) => (t - p[a]) / (q[a] - p[a]))));
      const part = Math.min(until(0, this.x), until(1, this.y));
      const [dx, dy] = [this.X(q[0]) - this.X(p[0]), this.Y(q[1]) - this.Y(p[1])], size = 14 / Math.hypot(dx, dy);
      const back = part - size;  // the point of the tip lies on the border
      this.tip([this.X(p[0]) + back * dx, this.Y(p[1]) + back * dy], [size * dx, size * dy], name);
    }

    /** From `from` to y, `width` wide around x. */
    bar(x, y, width, name, from = 0) {
      const [a, b] = [this.Y(from), this.Y(y)];
      shape(this.svg, "rect", {
        x: this.X(x - width / 2), width: this.X(x + width / 2) - this.X(x - width / 2),
        y: Math.min(a, b), height: Math.abs(a - b), fill: colour(name),
      });
    }

    /** With its middle at (x, y), and sides of a length in the data of the x axis. */
    square(x, y, side, name) {
      const length = this.X(x + side) - this.X(x);
      shape(this.svg, "rect", {
        x: this.X(x) - length / 2, y: this.Y(y) - length / 2, width: length, height: length, fill: colour(name),
      });
    }

    text(x, y, words, anchor = "middle", [right, down] = [0, 0]) {
      const at = { x: this.X(x) + right, y: this.Y(y) + down };
      shape(this.svg, "text", { ...at, "text-anchor": anchor, class: "mark" }, words);
    }

    /** What lines and dots mean, in rows at the top of the drawing; gives the height at which the axes begin. */
    key(entries) {
      let x = Infinity, y = this.place.first + 11;
      for (const [name, words, style = ""] of entries) {
        const text = shape(this.svg, "text", {}, words), width = 32 + text.getComputedTextLength();
        if (x + width > this.place.right) [x, y] = [this.place.left, y + 20];
        const area = style === "area", paint = { [area ? "fill" : "stroke"]: colour(name) };
        const d = area ? `M${x} ${y - 7}h26v14h-26z` : `M${x} ${y}h26`;
        shape(this.svg, "path", { d, class: area ? "area" : `line ${style}`, ...paint });
        text.setAttribute("x", x + 32);
        text.setAttribute("y", y + 5);
        x += width + 14;
      }
      return y + 19;
    }

    grip(x, y, name, moved, anywhere = false) {
      const [cx, cy] = [this.X(x), this.Y(y)];
      shape(this.svg, "circle", { cx, cy, r: REACH, class: "grip" });
      shape(this.svg, "circle", { cx, cy, r: 8, fill: colour(name), class: "grip-dot" });
      const { box, x: xs, y: ys } = this;
      const back = (left, top) => moved(
        xs[0] + (left - box.left) / (box.right - box.left) * (xs[1] - xs[0]),
        ys[0] + (box.bottom - top) / (box.bottom - box.top) * (ys[1] - ys[0]),
      );
      this.grips.push({ cx, cy, back, anywhere });
    }
  }

  /** The picture of one explorable, as wide as its column. */
  class Picture {
    constructor(spec, change) {
      this.spec = spec;
      this.svg = document.createElementNS(NS, "svg");
      this.svg.setAttribute("role", "img");
      this.grips = [];
      this.drag(change);
    }

    draw(state) {
      const { shows, height, narrow } = this.spec, { width } = this, phone = width < WIDE;
      if (!width) return;  // not shown, as on paper
      const starts = narrow.map((_, i) => narrow.slice(0, i).reduce((sum, t) => sum + t, 0));
      const wide = phone ? width : (width + GAP) / narrow.length - GAP;
      const tall = phone ? starts.at(-1) + narrow.at(-1) : height;
      const { parentElement: around } = this.svg.parentElement;
      around.classList.toggle("narrow", phone);
      around.style.setProperty("--picture", `${tall}px`);
      this.svg.setAttribute("width", width);
      this.svg.setAttribute("height", tall);
      this.svg.replaceChildren();
      this.grips = [];
      const plot = (i, axes) => {
        const [part, parts] = axes.part ?? [0, 1];
        const [broad, high] = phone ? [wide / parts, narrow[i]] : [wide, height / parts];
        const [left, first] = phone ? [part * broad, starts[i]] : [i * (wide + GAP), part * high];
        return new Plot(this.svg, { left, right: left + broad, first, last: first + high }, axes, this.grips);
      };
      this.spec.draw({ plot }, state);
      this.svg.setAttribute("aria-label", `${shows} ${this.spec.readout(state)}`);
    }

    /** The nearest grip follows the pointer. It is drawn anew all the time, so the picture itself holds the pointer. */
    drag(change) {
      let held = -1;
      const place = (event) => {
        const { left, top } = this.svg.getBoundingClientRect();
        return [event.clientX - left, event.clientY - top];
      };
      this.svg.addEventListener("pointerdown", (event) => {
        const [x, y] = place(event), away = this.grips.map(({ cx, cy }) => Math.hypot(cx - x, cy - y));
        held = away.indexOf(Math.min(...away, REACH));
        if (held >= 0) this.svg.setPointerCapture(event.pointerId);
      });
      const still = (event) => { if (held >= 0) event.preventDefault(); };  // a finger moves the grip, not the page
      this.svg.addEventListener("touchstart", still, { passive: false });
      this.svg.addEventListener("pointermove", (event) => {
        if (held >= 0) change(this.grips[held].back(...place(event)));
      });
      this.svg.addEventListener("click", (event) => {
        const grip = this.grips.find(({ anywhere }) => anywhere);
        if (grip) change(grip.back(...place(event)));
      });
      ["pointerup", "pointercancel"].forEach((kind) => this.svg.addEventListener(kind, () => { held = -1; }));
    }
  }

  /** A button that moves a slider from where it stands to its end, or from its start, and stops it again. */
  function player({ label, plays, seconds }, change, state, { min, max, step }) {
    const button = element("button", { type: "button" }, label);
    let timer = 0, at;
    const stop = () => {
      timer = clearInterval(timer) ?? 0;
      button.textContent = label;
    };
    const move = (value) => {
      at = value;
      change({ [plays]: value });
    };
    button.addEventListener("click", () => {
      if (timer) return stop();
      button.textContent = "Pause";
      move(state()[plays] < max ? state()[plays] : min);
      timer = setInterval(() => {
        move(at + step);
        if (at >= max) stop();
      }, 1000 * seconds * step / (max - min));
    });
    const show = (now) => { if (timer && now[plays] !== at) stop(); };  // another hand has moved it
    return { made: button, show };
  }

  /** A handle: what stands on the page, and how it shows a state. `change` takes what of the state becomes new. */
  function control(handle, change, state, sliders) {
    if (handle.heading) return { made: element("p", { class: "explorable-heading" }, handle.heading), show() {} };
    if (handle.plays) return player(handle, change, state, sliders[handle.plays]);
    if (handle.press) {
      const button = element("button", { type: "button" }, handle.label);
      button.addEventListener("click", () => change(handle.press(state())));
      return { made: button, show() {} };
    }
    const shown = element("b");
    const options = Object.entries(handle.choices ?? {}).map(([value, text]) => element("option", { value }, text));
    const field = handle.choices
      ? element("select", {}, ...options)
      : element("input", { type: "range", min: handle.min, max: handle.max, step: handle.step });
    field.addEventListener("input", () => change({ [handle.key]: handle.choices ? field.value : Number(field.value) }));
    const words = handle.text ?? ((value) => number(value, Math.max(0, Math.ceil(-Math.log10(handle.step)))));
    const show = (now) => {
      field.value = now[handle.key];
      if (handle.choices) return;
      shown.textContent = words(now[handle.key], now);
      field.setAttribute("aria-valuetext", shown.textContent);
    };
    return { made: element("label", {}, element("span", {}, `${handle.label} `, shown), field), show };
  }

  /** A value that the handle can have, nearest to the one asked for. */
  function allowed({ min, max, step }, value) {
    const steps = Math.round((Math.min(max, Math.max(min, value)) - min) / step);
    return Number((min + steps * step).toFixed(10));
  }

  function mount(place, name, spec) {
    const sliders = Object.fromEntries(spec.handles.filter((h) => h.step).map((h) => [h.key, h]));
    const values = spec.handles.filter((h) => h.key).map(({ key, value }) => [key, value]);
    const start = { ...spec.state, ...Object.fromEntries(values) };
    let state = { ...start };
    const readout = element("output");
    const say = (text) => {
      const [words, href] = spec.source ?? [], [first, ...others] = words ? text.split(words) : [text];
      readout.replaceChildren(first, ...others.flatMap((part) => [element("a", { href }, words), part]));
    };
    const change = (news) => {
      for (const [key, value] of Object.entries(news)) state[key] = sliders[key] ? allowed(sliders[key], value) : value;
      controls.forEach(({ show }) => show(state));
      say(spec.readout(state));
      picture.draw(state);
    };
    const picture = new Picture(spec, change);
    const controls = spec.handles.map((handle) => control(handle, change, () => state, sliders));
    const again = element("button", { type: "button" }, "Reset");
    again.addEventListener("click", () => change(start));
    const title = element("p", { id: `explorable-${name}`, class: "explorable-title" }, spec.title);
    const isButton = ({ press, plays }) => Boolean(press || plays);
    const made = (buttons) => controls.filter((_, i) => isButton(spec.handles[i]) === buttons).map((c) => c.made);
    place.replaceChildren(element(
      "section", { "aria-labelledby": title.id }, title, element("p", {}, spec.says),
      element("div", { class: "explorable-picture" }, picture.svg),
      element("div", { class: "explorable-handles" }, ...made(false)),
      element("div", { class: "explorable-buttons" }, ...made(true), again),
      readout,  // last, where its length moves nothing
    ));
    new ResizeObserver(([{ contentRect }]) => {
      picture.width = contentRect.width;
      picture.draw(state);
    }).observe(picture.svg.parentElement);
    picture.width = picture.svg.parentElement.clientWidth;
    change(start);
  }

  function add(name, spec) {
    specs[name] = spec;
    document.querySelectorAll(`.explorable[data-explorable="${name}"]`).forEach((place) => mount(place, name, spec));
  }

  return { add, specs, number, expert, mass, normals, remembered };
})();
