// Chapter 21: one vector c added to all rows of a router adds c . x to every logit, and the softmax stays.

{
  const ROWS = [[-0.5, 0.1], [0.1, 0.15], [0.2, -0.35], [-0.45, -0.35]];  // those of the chapter's figure
  const LENGTH = 3;  // of the input x
  const LIMIT = 0.75, STEP = 0.0125;  // of c, so that the centred rows are among the choices

  const input = (degrees) => [Math.cos(degrees * Math.PI / 180), Math.sin(degrees * Math.PI / 180)].map((t) => LENGTH * t);
  const moved = (rows, c) => rows.map((row) => row.map((w, a) => w + c[a]));
  const logits = (rows, x) => rows.map((row) => row.reduce((sum, w, a) => sum + w * x[a], 0));

  function softmax(h) {
    const weights = h.map((h_m) => Math.exp(h_m - Math.max(...h))), total = weights.reduce((sum, w) => sum + w, 0);
    return weights.map((w) => w / total);
  }

  const mean = (rows) => rows[0].map((_, a) => rows.reduce((sum, row) => sum + row[a], 0) / rows.length);

  /** The c that makes the mean row zero. */
  const centre = (rows) => mean(rows).map((part) => -part);

  const { number, expert } = Explorable;
  const coordinate = (a, value) =>
    ({ key: `c${a}`, label: `c, coordinate ${a}`, min: -LIMIT, max: LIMIT, step: STEP, value, text: (v) => number(v, 4) });

  Explorable.add("shift", {
    title: "A common shift changes no gate",
    says: "Drag c, which is added to all four rows of a linear router. The logits move; do the gates? Press Centre the "
      + "rows, and turn x: do ring and bar of a gate ever differ?",
    shows: "First, the four rows of a router in the plane with arrows to the rows after the shift by c, and a "
      + "third of the input x. Second, four logits before and after the shift, and four gates.",
    handles: [
      coordinate(1, 0.45), coordinate(2, 0.3),
      { key: "angle", label: "Angle of x", min: 0, max: 355, step: 5, value: 60, text: (v) => `${v}°` },
      { label: "Centre the rows", press: () => ({ c1: centre(ROWS)[0], c2: centre(ROWS)[1] }) },
    ],
    height: 400,
    narrow: [250, 145],
    draw({ plot }, { c1, c2, angle }) {
      const x = input(angle), c = [c1, c2], rows = moved(ROWS, c), h = logits(ROWS, x), y = logits(rows, x);
      const [before, after] = [softmax(h), softmax(y)];
      const plane = plot(0, {
        x: [-1.25, 1.25], y: [-1.25, 1.25], equal: true, xlabel: "first coordinate", ylabel: "second coordinate",
        keys: [["ink", "c; dot, ring: mean row"]],
      });
      const tip = x.map((t) => t / LENGTH);
      plane.arrow([0, 0], tip, "muted");
      plane.arrow([0, 0], c, "ink");
      ROWS.forEach((row, m) => {
        plane.arrow(row, rows[m], expert(m));
        plane.dot(...row, expert(m));
        plane.dot(...rows[m], expert(m), true);
      });
      plane.grip(...tip, "muted", (s, t) => ({ angle: (Math.atan2(t, s) * 180 / Math.PI + 360) % 360 }));
      plane.grip(...c, "ink", (s, t) => ({ c1: s, c2: t }));
      plane.dot(...mean(ROWS), "muted");
      plane.dot(...mean(rows), "ink", true);
      const above = tip[1] >= c[1];  // the names stand on the sides that face away from the other vector
      plane.text(...tip, `x / ${LENGTH}`, tip[0] < 0 ? "end" : "start", [tip[0] < 0 ? -12 : 12, above ? -4 : 14]);
      plane.text(...c, "c", "start", [10, above ? 20 : -10]);

      const experts = { x: [0.4, 4.6], xticks: [1, 2, 3, 4], xlabel: "expert" };
      const scores = plot(1, { ...experts, part: [0, 2], y: [-5, 5], ylabel: "logits; ring: after" });
      h.forEach((_, m) => {
        scores.arrow([m + 1, h[m]], [m + 1, y[m]], expert(m));
        scores.dot(m + 1, h[m], expert(m));
        scores.dot(m + 1, y[m], expert(m), true);
      });
      const shares = plot(1, {
        ...experts, part: [1, 2], y: [0, 1], ylabel: "gates; ring: after",
      });
      before.forEach((gate, m) => {
        shares.bar(m + 1, gate, 0.6, expert(m));
        shares.dot(m + 1, after[m], "ink", true);
      });
    },
    readout({ c1, c2, angle }) {
      const x = input(angle), gates = softmax(logits(moved(ROWS, [c1, c2]), x)).map((gate) => number(gate));
      const [first, second] = mean(moved(ROWS, [c1, c2])).map((part) => number(part, 4));
      return `The mean row is (${first}, ${second}). At this x the shift moves all logits by c · x = `
        + `${number(logits([[c1, c2]], x)[0])} and leaves the gates at `
        + `${gates.slice(0, 3).join(", ")} and ${gates[3]}.`;
    },
    formulas: { moved, logits, softmax, centre },
  });
}
