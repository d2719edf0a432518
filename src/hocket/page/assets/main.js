// The page: its state, and one picture for each change of it.

const LEAST_HEIGHT = 200;
const BELOW = 84; // pixels left for what stands under the picture

async function showData(app, data) {
  const views = await readViews(data);
  const wasWhole = app.state ? app.state.from === null : true;
  app.data = data;
  app.views = views.map((view) => asModel(view, data.kinds));
  if (app.state) {
    app.state.selected = null;
    app.state.limit = data.limit;
    if (wasWhole) DO.fit(app);
    else setWindow(app, app.state.from, app.state.to);
  }
  showHeads(app);
}

function showHeads({ views }) {
  document.getElementById("heads").replaceChildren(...views.map((view) => {
    const line = document.createElement("p");
    const name = document.createElement("h1");
    name.textContent = view.label;
    line.append(name, [...view.facts, ...(view.note ? [view.note] : [])].join("  ·  "));
    return line;
  }));
  const picks = document.getElementById("picked");
  picks.replaceChildren(...views.map((view, i) => new Option(view.label, String(i))));
  document.getElementById("which").hidden = views.length < 2;
  document.getElementById("summary-text").textContent =
    views.map((view) => view.summary).join("\n\n");
  document.title = views.map((view) => view.label).join(" and ");
}

function resize(app) {
  app.isResized = false;
  const top = app.canvas.getBoundingClientRect().top + window.scrollY;
  app.width = app.canvas.parentElement.clientWidth;
  app.room = window.innerHeight;
  const room = Math.max(window.innerHeight - top - BELOW, LEAST_HEIGHT);
  app.height = heightOf(app, rowSizes(app, Math.floor(Math.min(heightOf(app, ROOMY), room))));
  app.height = Math.min(app.height, Math.floor(room)); // rows that do not all fit are scrolled
  app.canvas.style.height = `${app.height}px`;
  app.surface = new CanvasSurface(app.canvas, app.width, app.height);
}

function drawNow(app) {
  const began = performance.now();
  if (app.isResized) resize(app);
  app.scene = makeScene(app);
  app.state.top = Math.min(app.state.top, app.scene.overflow);
  // Where all rows are seen, a finger that moves up or down moves the page.
  app.canvas.style.touchAction = app.scene.overflow > 0 ? "none" : "pan-y";
  paint(app, app.surface);
  app.drawn = { count: (app.drawn?.count ?? 0) + 1, ms: performance.now() - began };
}

function afterDrawing(app) {
  showLegend(app);
  for (const button of document.querySelectorAll("[data-show]")) {
    button.setAttribute("aria-pressed", String(app.state.show[button.dataset.show]));
  }
  const told = document.getElementById("told");
  const text = tellSelected(app);
  if (told.textContent !== text) told.textContent = text;
  writeAddressSoon(app);
}

function redrawer(app) {
  let isWaiting = false;
  return () => {
    if (isWaiting) return;
    isWaiting = true;
    requestAnimationFrame(() => {
      isWaiting = false;
      drawNow(app);
      afterDrawing(app);
    });
  };
}

function selectWanted(app) {
  const [view, name] = (app.state.wanted ?? "").split(/\.(.*)/);
  const model = app.views[Number(view)];
  const action = model && name ? findAction(model, name) : null;
  if (action !== null && action !== undefined) select(app, Number(view), action);
}

async function begin() {
  const app = { canvas: document.getElementById("picture"), isResized: true };
  const data = JSON.parse(document.getElementById("data").textContent);
  window.hocket = Object.assign(app, { drawNow, paint, probe, asSched, asSvg, asCanvas, chainOf }); // for tests
  await showData(app, data);
  app.state = stateFromAddress(data);
  app.redraw = redrawer(app);
  applyTheme(app);
  if (data.served) {
    makeForm(app);
    await restoreForm(app);
  }
  selectWanted(app);
  drawNow(app);
  app.firstDrawn = app.drawn.ms;
  afterDrawing(app);
  listen(app);
  const resized = () => {
    if (app.canvas.parentElement.clientWidth === app.width && window.innerHeight === app.room) return;
    app.isResized = true;
    app.redraw();
  };
  new ResizeObserver(resized).observe(app.canvas.parentElement);
  window.addEventListener("resize", resized);
  for (const left of ["blur", "pagehide"]) window.addEventListener(left, () => writeAddress(app));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    applyTheme(app);
    app.redraw();
  });
  app.isReady = true;
}

begin();
