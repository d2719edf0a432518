// The page's state in its address, behind `#`: what is in view, selected, shown, asked for.

const SHOWN = ["path", "gaps", "memory", "arrows"];
const SHOWN_AT_FIRST = { path: false, gaps: true, memory: true, arrows: true };

function stateFromAddress(data) {
  const words = new URLSearchParams(location.hash.slice(1));
  const [from, to] = (words.get("t") ?? "").split("..").map(Number);
  const shown = words.get("show");
  const show = { ...SHOWN_AT_FIRST };
  if (shown !== null) for (const name of SHOWN) show[name] = shown.split(",").includes(name);
  const limit = words.get("limit");
  return {
    from: to > from ? from : null, to: to > from ? to : null, top: 0, show,
    selected: null, wanted: words.get("sel"), theme: words.get("theme") ?? "",
    limit: limit === null ? data.limit : limit === "" ? null : Number(limit),
    asked: Object.fromEntries([...words].filter(([key]) => key.startsWith("q."))),
  };
}

function stateAsAddress({ state, views, data }) {
  const words = new URLSearchParams();
  if (state.from !== null) words.set("t", `${digits(state.from)}..${digits(state.to)}`);
  if (state.selected) {
    const { view, action } = state.selected;
    words.set("sel", `${view}.${actionName(views[view], action)}`);
  }
  const isUsual = SHOWN.every((name) => state.show[name] === SHOWN_AT_FIRST[name]);
  if (!isUsual) words.set("show", SHOWN.filter((name) => state.show[name]).join(","));
  if (state.theme) words.set("theme", state.theme);
  if (state.limit !== data.limit) words.set("limit", state.limit ?? "");
  for (const [key, value] of Object.entries(state.asked)) words.set(key, value);
  return words.toString().replaceAll("%2C", ",");
}

const digits = (value) => String(Number(value.toPrecision(8)));

const WRITE_AFTER = 200; // ms: browsers refuse an address that changes many times a second

function writeAddressSoon(app) {
  clearTimeout(app.writing);
  app.writing = setTimeout(() => writeAddress(app), WRITE_AFTER);
}

// Not a step of the browser's history: going back leaves the page, as one expects.
function writeAddress(app) {
  clearTimeout(app.writing);
  app.writing = null;
  const hash = stateAsAddress(app);
  if (hash === app.written) return;
  app.written = hash;
  history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
}
