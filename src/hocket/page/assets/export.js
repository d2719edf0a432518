// Handing over: files, the picture, and the trace to Perfetto's page.

const PERFETTO = "https://ui.perfetto.dev";
const PING_EVERY = 50; // ms, as Perfetto's own guide asks
const GIVE_UP = 60_000;

function download(name, content, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([content], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

const picked = (app) => Number(document.getElementById("picked").value || 0);

const fileName = (view) => view.label.replace(/[^\w.-]+/g, "-").replace(/^-+|-+$/g, "") || "hocket";

const LINE = 18; // pixels
const EDGE = 8;

// The picture on a surface of its own, its headings above and its legend below.
function drawWhole(app, makeSurface) {
  const { scene, views, colours } = app;
  const entries = placedLegend(app);
  const top = views.length * LINE + EDGE;
  const height = top + scene.height + (entries.at(-1)?.y ?? 0) + LINE + 2 * EDGE;
  const surface = makeSurface(scene.width, height);
  surface.rect(0, 0, scene.width, height, colours.ground);
  views.forEach(({ label, facts }, i) => {
    const text = [label, ...facts].join("  ·  ");
    surface.text(text, EDGE, EDGE + i * LINE + 5, 13, colours.ink, "start");
  });
  surface.shift(top);
  paint(app, surface);
  surface.shift(scene.height + EDGE);
  for (const { x, y, paint: colour, text } of entries) {
    surface.rect(x, y, 11, 11, colour);
    surface.text(text, x + 16, y + 6, 11, colours.faint, "start");
  }
  return surface;
}

function placedLegend(app) {
  let x = EDGE;
  let y = 0;
  return legend(app).map(([paint, text]) => {
    const width = 36 + 6 * text.length;
    if (x > EDGE && x + width > app.scene.width) [x, y] = [EDGE, y + LINE];
    const entry = { x, y, paint, text };
    x += width;
    return entry;
  });
}

function asSvg(app) {
  const title = app.views.map((view) => view.label).join(", ");
  return drawWhole(app, (width, height) => new SvgSurface(width, height, title)).toString();
}

function asCanvas(app) {
  const canvas = document.createElement("canvas");
  drawWhole(app, (width, height) => new CanvasSurface(canvas, width, height));
  return canvas;
}

// The order as hocket's text; the head (names, paths) came with the data.
function asSched(view) {
  const lines = view.rows.map((row) => {
    const slots = [];
    for (let i = view.first[row.index]; i < view.first[row.index + 1]; i = slotStop(view, i)) {
      slots.push(slotName(view, i));
    }
    return `${row.name}: ${slots.join(" ")}`.trimEnd() + "\n";
  });
  return view.head + lines.join("");
}

// The trace of a view: carried by the page (maybe of its first ranks only), or asked from hocket.
async function traceOf(app, index) {
  const { trace, label } = app.views[index];
  if (!trace) return askTrace(app, index);
  const bytes = await decompress(fromBase64(trace.gzip), "gzip");
  const isPart = trace.ranks < app.views[index].memoryOfRank.length;
  return { bytes, title: isPart ? `${label}, ranks 0 to ${trace.ranks - 1}` : label };
}

// The window is opened at once, in the click: later the browser would take it for an advertisement.
async function openInPerfetto(app, index) {
  const base = app.perfetto ?? PERFETTO;
  const other = window.open(base);
  if (!other) throw new Error("the browser did not open a window; allow pop-ups for this page");
  const { bytes, title } = await traceOf(app, index);
  await perfettoReady(other, base);
  const message = {
    perfetto: { buffer: bytes.buffer, title, fileName: `${fileName({ label: title })}.pftrace` },
  };
  other.postMessage(message, new URL(base).origin, [bytes.buffer]);
}

// Perfetto answers PONG to the first PING that it hears.
function perfettoReady(other, base) {
  const { origin } = new URL(base);
  return new Promise((resolve, reject) => {
    const started = Date.now();
    const timer = setInterval(() => {
      if (Date.now() - started > GIVE_UP) end(reject, new Error(`${origin} does not answer`));
      else other.postMessage("PING", origin);
    }, PING_EVERY);
    const heard = (event) => {
      if (event.source === other && event.data === "PONG") end(resolve);
    };
    const end = (finish, value) => {
      clearInterval(timer);
      window.removeEventListener("message", heard);
      finish(value);
    };
    window.addEventListener("message", heard);
  });
}

const EXPORTS = {
  svg: (app) => download(`${fileName(app.views[0])}.svg`, asSvg(app), "image/svg+xml"),
  png: (app) => new Promise((resolve) => asCanvas(app).toBlob((blob) => {
    download(`${fileName(app.views[0])}.png`, blob, "image/png");
    resolve();
  })),
  sched: (app) => {
    const view = app.views[picked(app)];
    download(`${fileName(view)}.sched`, asSched(view), "text/plain");
  },
  trace: async (app) => {
    const { bytes, title } = await traceOf(app, picked(app));
    download(`${fileName({ label: title })}.pftrace`, bytes, "application/octet-stream");
  },
  perfetto: (app) => openInPerfetto(app, picked(app)),
};
