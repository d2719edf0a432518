// Pointer, wheel, keys and buttons: each changes the state and asks for a new picture.

const DRAG = 4; // pixels from which on a press is a drag
const WHEEL = 0.0016;

const toggle = (name) => (app) => { app.state.show[name] = !app.state.show[name]; };

const DO = {
  fit: (app) => { app.state.from = app.state.to = null; app.state.top = 0; },
  in: (app) => zoom(app, 1 / 1.5),
  out: (app) => zoom(app, 1.5),
  left: (app) => pan(app, -app.scene.plot / 6),
  right: (app) => pan(app, app.scene.plot / 6),
  up: (app) => scrollBy(app, -app.height / 2),
  down: (app) => scrollBy(app, app.height / 2),
  path: toggle("path"),
  gaps: toggle("gaps"),
  memory: toggle("memory"),
  arrows: toggle("arrows"),
  theme: switchTheme,
  help: (app) => {
    const keys = document.getElementById("keys");
    keys.hidden = !keys.hidden;
    document.querySelector('[data-do="help"]').setAttribute("aria-expanded", String(!keys.hidden));
    app.isResized = true;
  },
  clear: (app) => { app.state.selected = null; },
  next: (app) => step(app, 1),
  previous: (app) => step(app, -1),
  above: (app) => cross(app, -1),
  below: (app) => cross(app, 1),
  focus: zoomToChain,
};

const KEYS = {
  w: "in", "+": "in", "=": "in", s: "out", "-": "out", a: "left", d: "right", 0: "fit", f: "fit",
  c: "path", g: "gaps", m: "memory", e: "arrows", p: "perfetto", t: "theme", "?": "help",
  Escape: "clear", ArrowRight: "next", ArrowLeft: "previous", ArrowUp: "above", ArrowDown: "below",
  Enter: "focus", PageUp: "up", PageDown: "down",
};

// Does what a button or key stands for; errors are shown on the page.
async function perform(app, name) {
  try {
    if (EXPORTS[name]) await EXPORTS[name](app);
    else DO[name](app);
    showError("");
  } catch (error) {
    showError(error.message);
  }
  app.redraw();
}

function showError(text) {
  const place = document.getElementById("error");
  place.textContent = text;
  place.hidden = !text;
}

function switchTheme(app) {
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = app.state.theme || (isDark ? "dark" : "light");
  app.state.theme = now === "dark" ? "light" : "dark";
  applyTheme(app);
}

function applyTheme(app) {
  document.documentElement.dataset.theme = app.state.theme;
  app.colours = readColours(app.data.kinds);
}

// --- selecting ---------------------------------------------------------------------------------

function select(app, view, action) {
  if (action === null) {
    app.state.selected = null;
    return;
  }
  const model = app.views[view];
  const first = slotFirst(model, action);
  const name = actionName(model, first);
  const twins = app.views.map((other) => (other === model ? null : findAction(other, name)));
  app.state.selected = { view, action: first, chain: chainOf(model, first), twins };
}

// The tile that keys start from: the selected one, or the first in view.
function current(app) {
  const { selected } = app.state;
  if (selected) return selected;
  const some = app.scene.rows.find(({ row }) => row.works.length);
  if (!some) return null;
  const { view, row, index } = some;
  const [low] = visible(app.scene, view, row.works);
  select(app, index, row.works[Math.min(low, row.works.length - 1)]);
  return null;
}

function step(app, by) {
  const from = current(app);
  if (!from) return;
  const model = app.views[from.view];
  const { works } = rowOf(model, from.action);
  const next = works.indexOf(from.action) + by;
  if (next >= 0 && next < works.length) select(app, from.view, works[next]);
  reveal(app);
}

// To the tile of the next row at the same time, or the one after it.
function cross(app, by) {
  const from = current(app);
  if (!from) return;
  const model = app.views[from.view];
  const at = app.scene.rows.findIndex(
    ({ index, row }) => index === from.view && row === rowOf(model, from.action));
  const to = app.scene.rows[at + by];
  if (!to || !to.row.works.length) return;
  const middle = (model.start[from.action] + model.end[from.action]) / 2;
  const k = firstEndingAfter(to.view, to.row.works, (middle * model.per_step) / to.view.per_step);
  select(app, to.index, to.row.works[Math.min(k, to.row.works.length - 1)]);
  reveal(app);
}

// Moves the window so that the selected tile is in it.
function reveal(app) {
  const { scene, state, views } = app;
  if (!state.selected) return;
  const view = views[state.selected.view];
  const item = scene.rows.find(({ index, row }) => index === state.selected.view &&
    row === rowOf(view, state.selected.action));
  if (item.y < AXIS) scrollBy(app, item.y - AXIS - item.height);
  if (item.y + 2 * item.height > scene.height) scrollBy(app, item.y + 2 * item.height - scene.height);
  if (state.from === null) return;
  const x = xOf(scene, view, view.start[state.selected.action]);
  if (x < scene.left || x > scene.right - 20) pan(app, x - scene.left - scene.plot / 2);
}

function zoomToChain(app) {
  const { selected } = app.state;
  if (!selected) return;
  const view = app.views[selected.view];
  const actions = [selected.action, ...selected.chain.before, ...selected.chain.after];
  let from = Infinity;
  let to = 0;
  for (const i of actions) {
    from = Math.min(from, view.start[i]);
    to = Math.max(to, view.end[i]);
  }
  const edge = (to - from) * 0.05;
  setWindow(app, (from - edge) * view.per_step, (to + edge) * view.per_step);
}

// --- pointer -----------------------------------------------------------------------------------

function place(app, event) {
  const box = app.canvas.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

function listen(app) {
  const { canvas } = app;
  const fingers = new Map(); // what is pressed: the pointer's number, and where it is
  let pressed = null;
  canvas.addEventListener("pointerdown", (event) => {
    const at = place(app, event);
    fingers.set(event.pointerId, at);
    pressed = { at, isDrag: fingers.size > 1 };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const at = place(app, event);
    if (!fingers.has(event.pointerId)) return showHover(app, ...at);
    pressed.isDrag ||= Math.hypot(at[0] - pressed.at[0], at[1] - pressed.at[1]) > DRAG;
    if (pressed.isDrag) moveFinger(app, fingers, event.pointerId, at);
  });
  const release = (event) => fingers.delete(event.pointerId);
  canvas.addEventListener("pointerup", (event) => {
    if (release(event) && !pressed.isDrag) click(app, ...place(app, event));
  });
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => hideHover());
  canvas.addEventListener("wheel", (event) => turn(app, event), { passive: false });
  canvas.addEventListener("dblclick", () => perform(app, "focus"));
  document.addEventListener("keydown", (event) => press(app, event));
  document.getElementById("tools").addEventListener("click", ({ target }) => {
    const name = target.dataset.do ?? target.dataset.show;
    if (name) perform(app, name);
  });
}

// One finger (or the mouse) drags; two also zoom, by how far apart they are in time.
function moveFinger(app, fingers, id, at) {
  const before = middleAndSpread(fingers);
  fingers.set(id, at);
  const after = middleAndSpread(fingers);
  pan(app, before.x - after.x);
  scrollBy(app, before.y - after.y);
  app.scene = makeScene(app); // the next move may come before the next picture
  if (before.spread && after.spread) {
    zoom(app, before.spread / after.spread, after.x);
    app.scene = makeScene(app);
  }
  hideHover();
  app.redraw();
}

function middleAndSpread(fingers) {
  const xs = [...fingers.values()].map(([x]) => x);
  const ys = [...fingers.values()].map(([, y]) => y);
  const mean = (values) => values.reduce((sum, value) => sum + value) / values.length;
  const spread = xs.length > 1 ? Math.max(Math.max(...xs) - Math.min(...xs), 8) : 0;
  return { x: mean(xs), y: mean(ys), spread };
}

function click(app, x, y) {
  const found = probe(app, x, y);
  const { selected } = app.state;
  const isSame = selected && found && found.view === selected.view &&
    found.action === selected.action;
  if (!found || found.action === null || isSame) app.state.selected = null;
  else select(app, found.view, found.action);
  hideHover(); // its text now stands below, and its box would hide the chain
  app.redraw();
}

function turn(app, event) {
  event.preventDefault();
  const [x] = place(app, event);
  const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(app, sideways);
  else zoom(app, Math.exp(event.deltaY * WHEEL), x);
  app.redraw();
}

function press(app, event) {
  const { target } = event;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (/^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName)) return;
  if (event.key === "Enter" && target !== app.canvas) return; // a button's own key
  const name = KEYS[event.key];
  if (!name) return;
  event.preventDefault();
  perform(app, name);
}

function showHover(app, x, y) {
  const found = probe(app, x, y);
  const hover = document.getElementById("hover");
  app.canvas.style.cursor = found && found.action !== null ? "pointer" : "default";
  hover.hidden = !found;
  if (!found) return;
  hover.textContent = found.text;
  const { offsetWidth: width, offsetHeight: height } = hover;
  hover.style.left = `${Math.max(0, Math.min(x + 14, app.width - width - 4))}px`;
  hover.style.top = `${y + 18 + height > app.height ? Math.max(0, y - height - 10) : y + 18}px`;
}

function hideHover() {
  document.getElementById("hover").hidden = true;
}
