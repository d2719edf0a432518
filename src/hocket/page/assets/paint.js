// Drawing a scene on a surface: the canvas, or the one that writes SVG.
//
// Where tiles are narrower than a few pixels, a row is drawn as a strip: every pixel gets the mean
// colour of what runs in it, so that 100,000 tiles cost no more than their pixels.

const FEW_PIXELS = 4;
const LABEL = 0.6; // width of a digit, in font sizes
const ARROWS_FROM = 30; // pixels of a tile from which on messages are drawn as arrows
const MOST_ARROWS = 3000;

function paint(app, surface) {
  const { scene, colours } = app;
  surface.rect(0, 0, scene.width, scene.height, colours.ground);
  for (const item of scene.rows) {
    if (item.y > scene.height || item.y + scene.lane + scene.memory < AXIS) continue;
    paintLane(app, surface, item);
    if (item.memory) paintMemory(app, surface, item);
  }
  if (surface.putStrips) surface.putStrips();
  paintOverlays(app, surface);
  surface.rect(0, 0, scene.width, AXIS, colours.ground);
  paintMargins(app, surface);
  paintAxis(app, surface);
  if (scene.overflow > 0) paintScroll(app, surface);
}

// Where the rows that are seen lie among all of them.
function paintScroll({ scene, colours, state }, surface) {
  const room = scene.height - AXIS;
  const part = room / (room + scene.overflow);
  const top = AXIS + (state.top / (room + scene.overflow)) * room;
  surface.rect(scene.width - 2, top, 2, room * part, colours.line);
}

// --- tiles -------------------------------------------------------------------------------------

// The slots that the window shows: positions in `slots`, the works of a row or all it is busy with.
function visible(scene, view, slots) {
  const low = firstEndingAfter(view, slots, scene.from / view.per_step);
  const last = scene.to / view.per_step;
  let high = firstEndingAfter(view, slots, last);
  if (high < slots.length && view.begin[slots[high]] < last) high++;
  return [low, high];
}

function paintLane(app, surface, item) {
  const { scene, colours } = app;
  const { view, row } = item;
  const [low, high] = visible(scene, view, row.works);
  const isFine = surface.strip && (high - low) * FEW_PIXELS > scene.plot;
  const end = Math.min(xOf(scene, view, view.steps), scene.right);
  if (isFine) {
    paintStrip(app, surface, item, low, high);
  } else {
    surface.rect(scene.left, item.y, end - scene.left, item.height, colours.lane);
    if (app.state.show.gaps) paintGaps(app, surface, item);
    paintMessages(app, surface, item);
    paintTiles(app, surface, item, low, high);
  }
}

function clipped(scene, view, a, b) {
  const x0 = Math.max(xOf(scene, view, a), scene.left);
  return [x0, Math.min(xOf(scene, view, b), scene.right) - x0];
}

function paintGaps(app, surface, { view, row, y, height }) {
  const { scene, colours } = app;
  const [low, high] = visible(scene, view, row.busy);
  const paintOne = (a, b, colour) => {
    const [x, width] = clipped(scene, view, a, b);
    if (b > a && width > 0) surface.rect(x, y, width, height, colour);
  };
  for (let k = low; k < Math.min(high + 1, row.busy.length); k++) {
    const i = row.busy[k];
    paintOne(view.free[i], view.until[i], colours.dependency);
    paintOne(view.until[i], view.begin[i], colours.transfer);
  }
  paintOne(row.last, view.steps, colours.end);
}

// Thin, at half height: SEND and RECV of the order, and transfers around a slot's work.
function paintMessages(app, surface, { view, row, y, height }) {
  const { scene, colours } = app;
  const paintOne = (a, b) => {
    const [x, width] = clipped(scene, view, a, b);
    const paint = messagePaint(colours, view.kinds);
    if (b > a && width > 0) surface.rect(x, y + height * 0.3, width, height * 0.4, paint);
  };
  for (const i of row.messages) paintOne(view.begin[i], view.finish[i]);
  if (!view.columns.before) return;
  const [low, high] = visible(scene, view, row.works);
  for (let k = low; k < high; k++) {
    const i = row.works[k];
    paintOne(view.begin[i], view.start[i]);
    paintOne(view.end[i], view.finish[i]);
  }
}

function paintTiles(app, surface, item, low, high) {
  for (let k = low; k < high; k++) paintSlot(app, surface, item, item.row.works[k]);
}

// The actions of a slot share its lane, one above the other.
function paintSlot(app, surface, { view, y, height }, first) {
  const { scene, colours } = app;
  const stop = slotStop(view, first);
  const part = height / (stop - first);
  const [x, width] = clipped(scene, view, view.start[first], view.end[first]);
  if (width <= 0) return;
  const gap = width >= 4 ? 1 : 0;
  for (let i = first; i < stop; i++) {
    const tile = colours.tiles[view.columns.kind[i]];
    const top = y + (i - first) * part;
    surface.rect(x + gap / 2, top, width - gap, part, tile.fill);
    paintNumber(surface, String(view.columns.mb[i]), x, top, width, part, tile.ink);
  }
}

function paintNumber(surface, number, x, y, width, height, ink) {
  const size = Math.min(11, Math.floor(height * 0.85));
  if (size < 7 || number.length * LABEL * size + 3 > width) return;
  surface.number(number, x + width / 2, y + height / 2, size, ink);
}

// --- strips ------------------------------------------------------------------------------------

// Work and gaps are summed up by column of pixels; what they leave free is the lane.
function paintStrip(app, surface, { view, row, y, height }, low, high) {
  const { scene, colours, state } = app;
  const strip = surface.strip(scene.plot);
  const unit = (strip.columns / scene.plot) * scene.scale * view.per_step;
  const first = scene.from / view.per_step;
  if (state.show.gaps) addGapSpans(app, strip, view, row, first, unit);
  const { start, end } = view;
  const { kind, joined } = view.columns;
  for (let k = low; k < high; k++) {
    const i = row.works[k];
    const from = (start[i] - first) * unit;
    const to = (end[i] - first) * unit;
    if (!joined) addSpan(strip, from, to, colours.tiles[kind[i]].rgb, 1);
    else {
      const stop = slotStop(view, i);
      for (let part = i; part < stop; part++) {
        addSpan(strip, from, to, colours.tiles[kind[part]].rgb, 1 / (stop - i));
      }
    }
  }
  const lane = [-first * unit, (view.steps - first) * unit];
  surface.putStrip(strip, lane, scene.left, y, scene.plot, height, colours);
}

function addGapSpans({ scene, colours }, strip, view, row, first, unit) {
  const { dependencyRgb, transferRgb, endRgb } = colours;
  const { free, until, begin } = view;
  const [low, high] = visible(scene, view, row.busy);
  for (let k = low; k < Math.min(high + 1, row.busy.length); k++) {
    const i = row.busy[k];
    if (begin[i] <= free[i]) continue;
    const middle = (until[i] - first) * unit;
    addSpan(strip, (free[i] - first) * unit, middle, dependencyRgb, 1);
    addSpan(strip, middle, (begin[i] - first) * unit, transferRgb, 1);
  }
  addSpan(strip, (row.last - first) * unit, (view.steps - first) * unit, endRgb, 1);
}

// Adds a colour over a stretch of columns, by the part of each column that it covers.
function addSpan({ columns, sums }, from, to, rgb, weight) {
  const a = from > 0 ? from : 0;
  const b = to < columns ? to : columns;
  if (!(b > a)) return;
  const last = Math.min(Math.floor(b), columns - 1);
  for (let column = Math.floor(a); column <= last; column++) {
    const cover = ((b < column + 1 ? b : column + 1) - (a > column ? a : column)) * weight;
    const k = 4 * column;
    sums[k] += rgb[0] * cover;
    sums[k + 1] += rgb[1] * cover;
    sums[k + 2] += rgb[2] * cover;
    sums[k + 3] += cover;
  }
}

// --- memory ------------------------------------------------------------------------------------

// The level under a rank's tiles: of each pixel column its highest; what is above the limit in red.
function paintMemory(app, surface, { view, row, memory }) {
  const { scene, colours, state } = app;
  const { limit } = state;
  const highest = Math.max(...app.views.flatMap((v) => v.peaks), limit ?? 0) || 1;
  const unit = (memory.height - 1) / highest;
  const bottom = memory.y + memory.height;
  forLevels(scene, view, row.rank, (x, width, value) => {
    const under = limit === null ? value : Math.min(value, limit);
    surface.rect(x, bottom - under * unit, width, under * unit, colours.level);
    if (value > under) {
      surface.rect(x, bottom - value * unit, width, (value - under) * unit, colours.over);
    }
  });
  if (limit !== null) {
    surface.rect(scene.left, bottom - limit * unit - 0.5, scene.plot, 1, colours.over);
  }
}

// Draws stretches of whole pixels with one level: x, width, highest value.
function forLevels(scene, view, rank, draw) {
  const { times, values } = view.memoryOfRank[rank];
  const columns = Math.ceil(scene.plot);
  const highest = new Float64Array(columns);
  const unit = scene.scale * view.per_step;
  const first = scene.from / view.per_step;
  let k = firstAfter(times, first);
  let level = k ? values[k - 1] : view.static[rank];
  let from = 0; // the column in which this level begins
  for (let isLast = false; !isLast && from < columns; k++) {
    isLast = k >= times.length;
    const x = ((isLast ? view.steps : times[k]) - first) * unit;
    const stop = Math.min(Math.max(Math.ceil(x), from + 1), columns);
    for (let c = from; c < stop; c++) if (level > highest[c]) highest[c] = level;
    if (!isLast) level = values[k];
    from = Math.max(Math.floor(x), 0);
  }
  for (let c = 0, before = 0; c < columns; c = before) {
    while (before < columns && highest[before] === highest[c]) before++;
    if (highest[c] > 0) draw(scene.left + c, before - c, highest[c]);
  }
}

// Index of the first of these rising times that is later.
function firstAfter(times, time) {
  let low = 0;
  let high = times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

// --- on top of the tiles -----------------------------------------------------------------------

function paintOverlays(app, surface) {
  const { state, colours, scene } = app;
  app.views.forEach((view, index) => {
    const marks = marksOf(app, view, index);
    if (marks.length) dim(app, surface, index);
    for (const [actions, colour] of marks) paintMarked(app, surface, index, actions, colour);
    const only = marks.length ? new Set(marks.flatMap(([actions]) => [...actions])) : null;
    if (state.show.arrows) paintArrows(app, surface, view, index, only);
    const twin = state.selected?.twins[index] ?? null; // the selected action, in the other timeline
    if (twin !== null) paintMarked(app, surface, index, [twin], colours.selected);
  });
  surface.rect(0, AXIS, scene.left, scene.height - AXIS, colours.ground);
  surface.rect(scene.right, AXIS, scene.width - scene.right, scene.height - AXIS, colours.ground);
}

// What is lit, the rest being dimmed: (actions, colour of their frames).
function marksOf({ state, colours }, view, index) {
  const marks = state.show.path ? [[pathOf(view), colours.path]] : [];
  if (state.selected?.view === index) {
    const { action, chain } = state.selected;
    marks.push([chain.before, colours.before], [chain.after, colours.after]);
    marks.push([[action], colours.selected]);
  }
  return marks;
}

const pathOf = (view) => view.columns.path;

function dim(app, surface, index) {
  const { scene, colours } = app;
  for (const item of scene.rows) {
    if (item.index === index) {
      surface.rect(scene.left, item.y, scene.plot, item.height, colours.ground, 0.66);
    }
  }
}

function paintMarked(app, surface, index, actions, colour) {
  const { scene } = app;
  const items = scene.rows.filter((item) => item.index === index);
  for (const action of actions) {
    const item = items.find(({ view, row }) => action < view.first[row.index + 1]);
    const first = slotFirst(item.view, action);
    const [x, width] = clipped(scene, item.view, item.view.start[first], item.view.end[first]);
    if (width <= 0 || item.y + item.height < AXIS || item.y > scene.height) continue;
    if (width >= FEW_PIXELS) paintSlot(app, surface, item, first);
    if (width >= FEW_PIXELS) surface.frame(x, item.y, width, item.height, colour);
    else surface.rect(x, item.y, Math.max(width, 1), item.height, colour);
  }
}

// Messages between ranks, from the end of what makes them to the start of what needs them; only
// those between lit tiles where there are some.
function paintArrows(app, surface, view, index, only) {
  const { scene } = app;
  const items = scene.rows.filter((item) => item.index === index);
  const rankOf = (action) => items.find(({ row }) => action < view.first[row.index + 1]);
  let left = MOST_ARROWS;
  for (const item of items) {
    const [low, high] = visible(scene, view, item.row.works);
    if ((high - low) * ARROWS_FROM > scene.plot) return;
    const shown = [...item.row.works.subarray(low, Math.min(high + 1, item.row.works.length)),
      ...item.row.messages];
    for (const first of shown) {
      for (let i = first; i < slotStop(view, first) && left > 0; i++) {
        if (only && !only.has(i) && !only.has(first)) continue;
        left -= paintArrowsTo(app, surface, item, i, rankOf, only);
      }
    }
  }
}

function paintArrowsTo({ scene, colours }, surface, item, action, rankOf, only) {
  const { view } = item;
  let count = 0;
  for (let e = view.needStarts[action]; e < view.needStarts[action + 1]; e++) {
    const source = view.source[e];
    if (only && !only.has(source) && !only.has(slotFirst(view, source))) continue;
    const from = rankOf(source);
    if (from.row.rank === item.row.rank) continue;
    const x0 = xOf(scene, view, view.end[source]);
    const arrives = kindRow(view, action).receive ? view.end : view.start;
    const x1 = xOf(scene, view, arrives[action]);
    if (Math.max(x0, x1) < scene.left || Math.min(x0, x1) > scene.right) continue;
    const ink = only ? colours.ink : colours.faint;
    surface.arrow(x0, from.y + from.height / 2, x1, item.y + item.height / 2, ink);
    count++;
  }
  return count;
}

// --- around the tiles --------------------------------------------------------------------------

function paintMargins(app, surface) {
  const { scene, colours } = app;
  const size = Math.min(12, Math.max(8, scene.lane + scene.memory));
  const every = Math.ceil(size / (scene.lane + scene.memory + scene.gap));
  for (const { view, y } of scene.heads) {
    if (y >= AXIS - 4) surface.text(view.label, scene.left, y + HEAD / 2 + 1, 12, colours.ink, "start");
  }
  for (const { view, row, y, height } of scene.rows) {
    if (y + height / 2 < AXIS || y > scene.height || row.index % every) continue;
    const middle = y + height / 2;
    const name = scene.isNarrow ? row.name : `rank ${row.name}`;
    surface.text(name, scene.left - (scene.isNarrow ? 4 : 8), middle, size, colours.ink, "end");
    if (row.index && view.rows[row.index - 1].rank === row.rank) continue;
    const idle = `${Math.round(100 * view.idle[row.rank])}%`;
    if (!scene.isNarrow) {
      surface.text(idle, scene.right + 38, middle, size, colours.faint, "end");
    }
    const peak = short(view.peaks[row.rank]);
    const isOver = app.state.limit !== null && view.peaks[row.rank] > app.state.limit;
    const ink = isOver ? colours.over : colours.faint;
    surface.text(peak, scene.width - 4, middle, size, ink, "end");
  }
}

function paintAxis(app, surface) {
  const { scene, colours, data } = app;
  surface.rect(scene.left, AXIS - 1, scene.plot, 1, colours.line);
  const step = niceStep((scene.to - scene.from) / Math.max(scene.plot / 80, 2));
  for (let k = Math.ceil(scene.from / step); k * step <= scene.to * (1 + 1e-12); k++) {
    const x = scene.left + (k * step - scene.from) * scene.scale;
    surface.rect(x, AXIS - 5, 1, 5, colours.line);
    surface.text(String(Number((k * step).toPrecision(9))), x, 9, 11, colours.faint, "middle");
  }
  if (!scene.isNarrow) {
    surface.text(data.unit ? `time (${data.unit})` : "time", 4, 9, 11, colours.faint, "start");
    surface.text("idle", scene.right + 38, 9, 11, colours.faint, "end");
  }
  const isBytes = app.views.some((view) => view.memory.quantity === "bytes");
  surface.text(isBytes ? "peak" : "in flight", scene.width - 4, 9, 11, colours.faint, "end");
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= least * 0.999999);
}

// --- the canvas --------------------------------------------------------------------------------

class CanvasSurface {
  constructor(canvas, width, height) {
    const ratio = window.devicePixelRatio || 1;
    this.ratio = ratio;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    this.context = canvas.getContext("2d", { alpha: false });
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.context.textBaseline = "middle";
  }

  shift(y) {
    this.context.translate(0, y);
  }

  rect(x, y, width, height, paint, opacity = 1) {
    this.context.fillStyle = paint;
    if (opacity !== 1) this.context.globalAlpha = opacity;
    this.context.fillRect(x, y, width, height);
    if (opacity !== 1) this.context.globalAlpha = 1;
  }

  frame(x, y, width, height, paint) {
    this.context.strokeStyle = paint;
    this.context.lineWidth = 2;
    this.context.strokeRect(x + 1, y + 1, Math.max(width - 2, 1), Math.max(height - 2, 1));
  }

  text(text, x, y, size, ink, anchor) {
    if (size !== this.size) this.context.font = fontOf(this.size = size);
    this.context.textAlign = anchor === "middle" ? "center" : anchor;
    this.context.fillStyle = ink;
    this.context.fillText(text, x, y);
  }

  number(text, x, y, size, ink) {
    this.text(text, x, y + 0.5, size, ink, "middle");
  }

  arrow(x0, y0, x1, y1, paint) {
    const { context } = this;
    const angle = Math.atan2(y1 - y0, x1 - x0);
    context.strokeStyle = context.fillStyle = paint;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(x0, y0);
    context.lineTo(x1, y1);
    context.stroke();
    context.beginPath();
    context.moveTo(x1, y1);
    for (const side of [-0.4, 0.4]) {
      context.lineTo(x1 - 6 * Math.cos(angle + side), y1 - 6 * Math.sin(angle + side));
    }
    context.fill();
  }

  // Strips are collected in one picture, a row of pixels each, and drawn when all are there.
  strip(width) {
    const columns = Math.max(1, Math.round(width * this.ratio));
    if (this.sheet?.columns !== columns) this.sheet = makeSheet(columns);
    this.sheet.sums.fill(0);
    return this.sheet;
  }

  // The mean colour of every column: sums over the lane over the page's ground.
  putStrip({ columns, sums, rows, places }, lane, x, y, width, height, colours) {
    const at = places.length;
    places.push([x, y, width, height]);
    if (at >= rows.length) rows.push(new Uint32Array(columns));
    const pixels = rows[at];
    const [laneRed, laneGreen, laneBlue] = colours.laneRgb;
    const [pageRed, pageGreen, pageBlue] = colours.groundRgb;
    for (let column = 0, k = 0; column < columns; column++, k += 4) {
      const inside = Math.min(lane[1], column + 1) - Math.max(lane[0], column);
      const outer = inside >= 1 ? 0 : 1 - Math.max(inside, 0);
      const free = Math.max(1 - outer - sums[k + 3], 0);
      const red = sums[k] + laneRed * free + pageRed * outer;
      const green = sums[k + 1] + laneGreen * free + pageGreen * outer;
      const blue = sums[k + 2] + laneBlue * free + pageBlue * outer;
      pixels[column] = (255 << 24) | (byte(blue) << 16) | (byte(green) << 8) | byte(red);
    }
  }

  putStrips() {
    const { sheet } = this;
    if (!sheet?.places.length) return;
    const { columns, rows, places, piece } = sheet;
    if (piece.height !== rows.length) piece.height = rows.length;
    const context = piece.getContext("2d");
    const image = new ImageData(columns, places.length);
    const pixels = new Uint32Array(image.data.buffer);
    places.forEach((_, i) => pixels.set(rows[i], i * columns));
    context.putImageData(image, 0, 0);
    this.context.imageSmoothingEnabled = false;
    places.forEach(([x, y, width, height], i) => {
      this.context.drawImage(piece, 0, i, columns, 1, x, y, width, height);
    });
    places.length = 0;
  }
}

function makeSheet(columns) {
  const piece = document.createElement("canvas");
  piece.width = columns;
  return { columns, piece, sums: new Float32Array(4 * columns), rows: [], places: [] };
}

const byte = (value) => (value < 255 ? (value + 0.5) | 0 : 255);

const fontOf = (size) => `${size}px Inter, "Helvetica Neue", Helvetica, Arial, sans-serif`;
