// The front page: a stored training of eight cubic experts (chapter 5, the first run of its second figure). Its numbers
// stand in the page; nothing is computed here but sizes.

for (const { dataset } of document.querySelectorAll("[data-explorable=training]")) {
  const { steps, learned, sent } = JSON.parse(dataset.run);  // (T), (T, K, M), (T, K, M)
  const [K, M] = [sent[0].length, sent[0][0].length];
  const most = Math.max(...learned.flat(2));
  const { expert, number } = Explorable;

  const listed = (words) => [words.slice(0, -1).join(", "), words.at(-1)].filter(String).join(" and ");
  const named = (kind, places) => `${kind}${places.length > 1 ? "s" : ""} ${listed(places.map((i) => i + 1))}`;

  function squares(plot, table, largest) {
    table.forEach((row, k) => row.forEach((value, m) => {
      plot.square(m + 1, k + 1, 0.9 * Math.sqrt(Math.max(value, 0) / largest), expert(k));
    }));
  }

  Explorable.add("training", {
    title: "Eight experts become different",
    says: "Press Play. Which comes first, that an expert learns a cluster's signal or that the router sends it the "
      + `cluster? Area shows the learned signal (a full square is ${number(most, 1)}) and the probability that the router `
      + "sends the cluster's centre to the expert (a full square is 1).",
    shows: "Two tables of squares, four clusters against eight experts: how far an expert has learned a cluster's "
      + "signal, and how likely the router sends the cluster's centre to it.",
    handles: [
      { key: "at", label: "Step", min: 0, max: steps.length - 1, step: 1, value: 0, text: (at) => `${steps[at]}` },
      { label: "Play", plays: "at", seconds: 6 },
    ],
    height: 250,
    narrow: [190, 190],
    draw({ plot }, { at }) {
      const axes = {
        x: [0.4, M + 0.6], xticks: Array.from({ length: M }, (_, m) => m + 1), xlabel: "expert",
        y: [K + 0.6, 0.4], yticks: Array.from({ length: K }, (_, k) => k + 1),
      };
      squares(plot(0, { ...axes, ylabel: "cluster (area: learned signal)" }), learned[at], most);
      squares(plot(1, { ...axes, ylabel: "cluster (area: probability)" }), sent[at], 1);
    },
    readout({ at }) {
      const likely = sent[at].map((row) => Math.max(...row)), now = `At step ${steps[at]}`;
      if (Math.max(...likely) < 1.2 / M) {
        return `${now} the largest learned signal is ${number(Math.max(...learned[at].flat()))}, and each cluster goes to all `
          + `${M} experts about equally often (chapter 5).`;
      }
      const clusters = likely.map((_, k) => k), own = clusters.filter((k) => likely[k] > 0.5);
      const alone = clusters.filter((k) => likely[k] <= 0.5);
      const none = alone.length ? `${named("cluster", alone)} ${alone.length > 1 ? "are" : "is"} split` : "";
      if (!own.length) return `${now} ${none} (chapter 5).`;
      const whom = own.map((k) => sent[at][k].indexOf(likely[k])), sure = own.map((k) => number(likely[k]));
      return `${now} ${named("cluster", own)} go${own.length > 1 ? "" : "es"} to `
        + `${named("expert", whom)}, with probability ${listed(sure)}${none && `; ${none}`} (chapter 5).`;
    },
    source: ["chapter 5", "../notebooks/05_router_centers.html"],
  });
}
