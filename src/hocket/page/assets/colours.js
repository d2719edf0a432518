// Colours: those of kinds come with the data (the same as in hocket's SVG), the rest from the CSS.

const NAMES = [
  "ground", "ink", "faint", "line", "lane", "dependency", "transfer", "end", "path", "before",
  "after", "selected", "level", "over",
];

const CAUSES = {
  dependency: "idle: what it needs has not ended",
  transfer: "idle: the message is under way",
  end: "idle: nothing left to do",
};

function readColours(kinds) {
  const style = getComputedStyle(document.documentElement);
  const colours = {};
  for (const name of NAMES) colours[name] = style.getPropertyValue(`--${name}`).trim();
  colours.tiles = [];
  kinds.forEach(({ colours: shades }, kind) => shades.forEach(([fill, ink], shade) => {
    colours.tiles[kind + SHADE * shade] = { fill, ink, rgb: rgbOf(fill) };
  }));
  for (const name of ["ground", "lane", "dependency", "transfer", "end"]) {
    colours[`${name}Rgb`] = rgbOf(colours[name]);
  }
  return colours;
}

function rgbOf(hex) {
  const full = hex.length === 4 ? hex.replace(/[0-9a-f]/gi, "$&$&") : hex;
  const value = parseInt(full.slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

function swatch([paint, text]) {
  const item = document.createElement("span");
  const colour = document.createElement("i");
  colour.style.background = paint;
  item.append(colour, text);
  return item;
}

// Made anew only where something of it has changed: most pictures differ in their window only.
function showLegend(app) {
  const { state, views, colours } = app;
  const key = JSON.stringify([state.show, state.limit, Boolean(state.selected)]);
  const last = app.legend;
  if (last && last.key === key && last.views === views && last.colours === colours) return;
  app.legend = { key, views, colours };
  document.getElementById("legend").replaceChildren(...legend(app).map(swatch));
}

// Every colour of the picture and what it stands for.
function legend(app) {
  const { colours, views, data, state } = app;
  const used = new Set(views.flatMap((view) => [...view.used]));
  const items = [];
  data.kinds.forEach(({ name }, kind) => {
    if (!data.kinds[kind].message && (used.has(kind) || used.has(kind + SHADE))) {
      items.push([colours.tiles[kind].fill, name]);
    }
  });
  const shaded = views.find((view) => view.shade);
  if (shaded) {
    const first = data.kinds.findIndex((_, kind) => used.has(kind + SHADE));
    const meaning = shaded.shade.replace(/^is /, "");
    items.push([colours.tiles[first + SHADE].fill, `lighter: ${meaning}`]);
  }
  const hasMessages = (view) => view.columns.before || view.rows.some((row) => row.messages.length);
  if (views.some(hasMessages)) items.push([messagePaint(colours, data.kinds), "message"]);
  items.push(...legendOfIdle(app));
  if (state.show.path) items.push([colours.path, "critical path"]);
  if (state.selected) {
    items.push([colours.before, "what it needs"], [colours.after, "what needs it"]);
  }
  return items;
}

function legendOfIdle({ colours, views, state }) {
  const items = [];
  if (state.show.gaps) {
    for (const [cause, text] of Object.entries(CAUSES)) {
      if (views.some((view) => view.idles[cause])) items.push([colours[cause], text]);
    }
  } else items.push([colours.lane, "idle"]);
  if (state.show.memory) {
    const isBytes = views.some((view) => view.memory.quantity === "bytes");
    items.push([colours.level, isBytes ? "memory" : "microbatches in flight"]);
    if (state.limit !== null) items.push([colours.over, "limit, and what is above it"]);
  }
  return items;
}
