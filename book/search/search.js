// The search page: ranks the entries of index.js by MiniSearch (7.2.0, MIT; BM25+). No network; works from disk.

const KINDS = "theorem|lemma|proposition|corollary|definition|observation|exercise|remark|assumption|algorithm|table|"
  + "figure|claim|section|chapter|appendix|eq";
// A place with its number, such as Lemma 5.1; or a word, with what hyphens and points hold to it, such as chen-lem-5.1.
const PLACE = `\\b(?:${KINDS})s?\\.? (?:[a-z]{1,2}\\.?)?\\d+(?:\\.\\d+)*`;
const TOKEN = new RegExp(`${PLACE}|[\\p{L}\\d]+(?:[-._/][\\p{L}\\d]+)*`, "giu");
const STOP = new Set(("a an the is are was were be been am my your our i we you it its of to in on at for by with and or does "
  + "do did how what when which why who whom then than that this these those as if can could should will would there any "
  + "anything has have had so from but into me").split(" "));
const GREEK = Object.fromEntries(("α alpha β beta γ gamma δ delta ε epsilon ζ zeta η eta θ theta κ kappa λ lambda "
  + "μ mu ν nu ξ xi π pi ρ rho σ sigma τ tau φ phi χ chi ψ psi ω omega").match(/\S+ \S+/g).map((pair) => pair.split(" ")));

// Singular, without -ing and -ed, British and American spelling as one: routes, routed and routing are one word.
function stem(word) {
  if (/\d/.test(word) || word.length < 4) return word;
  let root = word.replace(/(?<=.{4})is(e[sd]?|ing|ations?)$/, "iz$1").replace(/(?<=.{4})ization(s?)$/, "ize")
    .replace(/tre(s?)$/, "ter$1").replace(/our(s?)$/, "or$1")
    .replace(/ies$/, "y").replace(/(ss|[xz]|ch|sh)es$/, "$1").replace(/(?<![su])s$/, "");
  const cut = root.replace(/(?<=[aeiouy].*)(?:ing|ed)$/, "");
  if (cut.length > 2) root = cut === root ? root : cut.replace(/([bdgmnprt])\1$/, "$1");
  return root.length > 3 ? root.replace(/e$/, "") : root;
}

const spelled = (text) => text.toLowerCase().replace(/[α-ω]/g, (letter) => ` ${GREEK[letter] ?? letter} `);

// The terms of one token: itself whole, and the words that it is made of.
function terms(token) {
  const whole = token.replace(/^(\p{L}+?)(?:ses|s)?\.? (?=\S*\d)/u, "$1 ");
  const parts = token.split(/[-_/ ]/).filter((part) => part.length > 1 && !STOP.has(part)).map(stem);
  return parts.length === 1 && !/[-_/ ]/.test(token) ? parts : [whole, ...parts];
}

const tokens = (text) => spelled(text).match(TOKEN) ?? [];
const said = (text) => tokens(text).filter((token) => !STOP.has(token));

function words(text) {
  const kept = said(text);
  return (kept.length ? kept : tokens(text)).flatMap(terms);
}

// The stems of a text in a row, each between blanks: what an exact phrase is looked for in.
const row = (text) => ` ${said(text).flatMap((token) => token.split(/[-_/ ]/)).map(stem).join(" ")} `;

const LEAST = 0.03;  // of the best score
const FIELDS = { title: 4, names: 4, page: 1, text: 1 };
const BOXED = new RegExp(`^(?:${KINDS}) [A-Z]?\\d`, "i");
const LIGHT = /^(?:\S+ )?(?:Exercises|What comes next|Change one thing)$|^(?:Exercise|What the book cites)/;

function indexed({ pages, entries }) {
  const found = entries.map(([page, anchor, kind, title, names, text], id) =>
    ({ id, address: `${pages[page][0]}#${anchor}`, page: pages[page][1], kind, title, names, text }));
  const search = new MiniSearch({
    fields: Object.keys(FIELDS), tokenize: words, processTerm: (term) => term,
    searchOptions: {
      boost: FIELDS, prefix: (term) => term.length > 3 && !/\d/.test(term), weights: { prefix: 0.2, fuzzy: 0.1 },
    },
  });
  search.addAll(found);
  return { search, found };
}

// A lone letter belongs to its neighbour: z loss is z-loss, and top k is top-k.
const LETTER = "[b-hj-z]", joined = (query) => query.replace(new RegExp(`\\b(${LETTER}) (?=\\p{L}{3})`, "giu"), "$1-")
  .replace(new RegExp(`(?<=\\p{L}{3}) (?=${LETTER}(?![\\p{L}-]))`, "giu"), "-");

// Entries by score: what has all words, or the words in a row, comes before what has some of them.
function ranked({ search, found }, written) {
  const query = joined(written), asked = new Set(words(query)), phrase = row(query), several = phrase.trim().includes(" ");
  let results = search.search(query);
  if (!results.length) results = search.search(query, { fuzzy: 0.2 });
  const seen = new Set();
  const scored = results.map((result) => {
    const entry = found[result.id], title = row(entry.title);
    let score = result.score * (new Set(result.queryTerms).size / asked.size) ** 2;
    if (several && row(`${entry.names} ${entry.text}`).includes(phrase)) score *= 1.3;
    if (title.startsWith(phrase)) score *= BOXED.test(entry.title) ? 3 : 1.5;  // the book's own Theorem 4.2
    else if (several && title.includes(phrase)) score *= 1.3;
    if (LIGHT.test(entry.title)) score *= 0.4;
    if (entry.kind === "question") score *= 1.5;
    return { entry, score, terms: new Set(result.terms) };
  }).sort((a, b) => b.score - a.score);
  return scored.filter(({ entry: { address }, score }) =>
    score > LEAST * scored[0].score && !seen.has(address) && seen.add(address));
}

// Whether an entry has every word of a query, the parts of a word with hyphens in a row; the last may be begun only.
function complete({ title, names, text }, query) {
  const all = row(`${title} ${names} ${text}`);
  return said(query).every((token) => all.includes(row(token).trimEnd()));
}

// --- what is shown ------------------------------------------------------------------------------

const EXCERPT = 230;

function element(name, className, ...inside) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...inside);
  return made;
}

// Where a text has words that were found: their first and last characters.
function hits(text, found) {
  return [...text.matchAll(TOKEN)].filter(([token]) => terms(spelled(token).trim()).some((term) => found.has(term)))
    .map((match) => [match.index, match.index + match[0].length]);
}

function marked(text, found) {
  const pieces = [];
  let at = 0;
  hits(text, found).forEach(([start, end]) => {
    pieces.push(text.slice(at, start), element("mark", "", text.slice(start, end)));
    at = end;
  });
  return [...pieces, text.slice(at)];
}

// The part of a text with the most of the words, begun at a word.
function excerpt(text, found) {
  const places = hits(text, found).map(([start]) => start);
  const near = (start) => new Set(places.filter((p) => p >= start && p < start + EXCERPT - 30)
    .map((p) => text.slice(p, p + 12))).size;
  const first = places.reduce((best, start) => (near(start) > near(best) ? start : best), places[0] ?? 0);
  const from = first < EXCERPT / 2 ? 0 : text.lastIndexOf(" ", first - 40) + 1;
  const to = from + EXCERPT < text.length ? text.lastIndexOf(" ", from + EXCERPT) : text.length;
  return ["… ".repeat(from > 0), ...marked(text.slice(from, to), found), " …".repeat(to < text.length)];
}

function shown({ entry, terms: found }) {
  const link = element("a", "", ...marked(entry.title, found));
  link.href = entry.address;
  const where = element("span", "search-where", `${entry.kind} · ${entry.page}`);
  if (entry.kind === "claim") {
    const ledger = element("a", "", "ledger");
    ledger.href = `book/ledger.html#${entry.address.split("#")[1].replace(/^claim-/, "")}`;
    where.append(" · ", element("code", "", entry.names.split(" ")[0]), " · ", ledger);
  }
  return element("li", "", link, where, element("p", "", ...excerpt(entry.text, found)));
}

const AT_ONCE = 20;

function counted(query, results) {
  if (!query) return "";
  if (!results.length) return "Nothing found. Fewer or other words may help; Questions is the book's index.";
  if (!results.some(({ entry }) => complete(entry, query))) return "Nothing has all these words. The nearest:";
  return `${results.length} result${"s".repeat(results.length > 1)}`;
}

function searchPage() {
  const form = document.querySelector(".bd-search-container form"), field = form.elements.q;
  const place = document.getElementById("search-results");
  const count = element("p", "search-count"), list = element("ol", "search-list");
  const more = element("button", "search-more", "Show all");
  count.setAttribute("role", "status");
  count.setAttribute("aria-live", "polite");
  place.append(count, list, more);
  const index = indexed(searchIndex);
  const show = () => {
    const query = field.value.trim(), results = query ? ranked(index, query) : [];
    list.replaceChildren(...results.slice(0, AT_ONCE).map(shown));
    more.hidden = results.length <= AT_ONCE;
    more.onclick = () => {
      list.append(...results.slice(AT_ONCE).map(shown));
      more.hidden = true;
      list.children[AT_ONCE].querySelector("a").focus();
    };
    count.textContent = counted(query, results);
  };
  let typing;
  form.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => {
      history.replaceState(null, "", field.value ? `?${new URLSearchParams({ q: field.value })}` : location.pathname);
      show();
    }, 200);
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    show();
  });
  field.focus();
  field.value = new URLSearchParams(location.search).get("q") ?? "";
  show();
}

document.addEventListener("DOMContentLoaded", searchPage);
