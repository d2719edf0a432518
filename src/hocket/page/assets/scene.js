// Where things are: rows, the time axis, zoom and scroll. CSS pixels; nothing is drawn here.

const AXIS = 22;
const HEAD = 20; // the name above each of two timelines
const RIGHT = 96;
const NARROW = 560; // pixels of a picture below which its margins hold numbers only
const ROOMY = { lane: 28, memory: 20, gap: 6 };
const TIGHT = { lane: 6, memory: 2, gap: 1 };
const NEAREST = 4; // steps that fill the picture at the closest zoom

function makeScene(app) {
  const { width, height, state } = app;
  const longest = Math.max(...app.views.flatMap((v) => v.rows.map((row) => row.name.length)));
  const isNarrow = width < NARROW;
  const left = isNarrow ? 12 + 7 * longest : Math.max(66, 46 + 7 * longest);
  const right = Math.max(width - (isNarrow ? 44 : RIGHT), left + 40);
  const sizes = rowSizes(app, height);
  const scene = {
    left, right, plot: right - left, isNarrow, width, height, ...sizes,
    from: state.from ?? 0, to: state.to ?? wholeLength(app),
    heads: [], rows: [],
  };
  scene.scale = scene.plot / (scene.to - scene.from);
  const bottom = placeRows(app, scene);
  scene.overflow = Math.max(0, bottom - height);
  scroll(scene, Math.min(state.top, scene.overflow));
  return scene;
}

const wholeLength = (app) => Math.max(...app.views.map((view) => view.makespan)) || 1;

// Roomy rows where they fit, else all alike smaller, down to where they can still be told apart.
function rowSizes(app, height) {
  const [least, most] = [heightOf(app, TIGHT), heightOf(app, ROOMY)];
  const part = Math.min(1, Math.max(0, (height - least) / (most - least)));
  const mix = (name) => Math.floor(TIGHT[name] + part * (ROOMY[name] - TIGHT[name]));
  return { lane: mix("lane"), memory: app.state.show.memory ? mix("memory") : 0, gap: mix("gap") };
}

// Of the whole picture, with rows of these sizes.
function heightOf({ views, state }, { lane, memory, gap }) {
  const lanes = views.reduce((n, view) => n + view.rows.length, 0);
  const ranks = views.reduce((n, view) => n + view.memoryOfRank.length, 0);
  const heads = views.length > 1 ? views.length * HEAD : 0;
  return AXIS + heads + lanes * (lane + gap) + (state.show.memory ? ranks * memory : 0);
}

function placeRows(app, scene) {
  let y = AXIS;
  app.views.forEach((view, index) => {
    if (app.views.length > 1) {
      scene.heads.push({ view, y });
      y += HEAD;
    }
    view.rows.forEach((row, i) => {
      const isLast = i + 1 === view.rows.length || view.rows[i + 1].rank !== row.rank;
      const memory = isLast && scene.memory ? { y: y + scene.lane, height: scene.memory } : null;
      scene.rows.push({ view, index, row, y, height: scene.lane, memory });
      y += scene.lane + (memory ? scene.memory : 0) + scene.gap;
    });
  });
  return y;
}

function scroll(scene, top) {
  for (const item of [...scene.heads, ...scene.rows]) item.y -= top;
  for (const { memory } of scene.rows) if (memory) memory.y -= top;
}

const xOf = (scene, view, step) =>
  scene.left + (step * view.per_step - scene.from) * scene.scale;

const stepAt = (scene, view, x) =>
  ((x - scene.left) / scene.scale + scene.from) / view.per_step;

function rowAt(scene, y) {
  return scene.rows.find((item) => y >= item.y && y < item.y + item.height +
    (item.memory ? item.memory.height : 0));
}

// --- moving ------------------------------------------------------------------------------------

function setWindow(app, from, to) {
  const whole = wholeLength(app);
  const finest = Math.min(...app.views.map((view) => view.per_step)) * NEAREST;
  const length = Math.min(Math.max(to - from, finest, whole * 1e-7), whole);
  const middle = (from + to) / 2;
  const start = Math.min(Math.max(middle - length / 2, 0), whole - length);
  const isWhole = length >= whole * 0.9999;
  app.state.from = isWhole ? null : start;
  app.state.to = isWhole ? null : start + length;
}

function zoom(app, factor, x) {
  const { scene } = app;
  const at = scene.from + ((x ?? (scene.left + scene.right) / 2) - scene.left) / scene.scale;
  const from = at - (at - scene.from) * factor;
  const to = at + (scene.to - at) * factor;
  const whole = wholeLength(app);
  if (factor > 1) { // near an end the pointer's time gives way to the end
    const length = Math.min(to - from, whole);
    const start = Math.min(Math.max(from, 0), whole - length);
    setWindow(app, start, start + length);
  } else setWindow(app, from, to);
}

function pan(app, pixels) {
  const { scene, state } = app;
  if (state.from === null) return;
  const length = scene.to - scene.from;
  const start = Math.min(
    Math.max(scene.from + pixels / scene.scale, 0), wholeLength(app) - length);
  state.from = start;
  state.to = start + length;
}

// Rows up or down, where they do not all fit.
function scrollBy(app, pixels) {
  app.state.top = Math.min(Math.max(app.state.top + pixels, 0), app.scene.overflow);
}
