// One timeline: its tiles by queue, what each waited for, chains of dependencies. No pixels here.
//
// What an action needs comes with the data; no rule of pipelines is written here. Times are whole
// steps from the first start; `view.per_step` turns them into the time that is shown.

const SHADE = 64;

const kindOf = (view, action) => view.columns.kind[action] % SHADE;
const kindRow = (view, action) => view.kinds[kindOf(view, action)];
const messagePaint = (colours, kinds) =>
  colours.tiles[kinds.findIndex((kind) => kind.message)].fill;

function asModel(view, kinds) {
  const { columns } = view;
  const count = columns.kind.length;
  const end = columns.start.map((start, i) => start + columns.length[i]);
  const model = {
    ...view, kinds, count, end,
    start: columns.start,
    begin: columns.before ? columns.start.map((x, i) => x - columns.before[i]) : columns.start,
    finish: columns.after ? end.map((x, i) => x + columns.after[i]) : end,
    needStarts: offsets(columns.needs),
    source: new Int32Array(columns.source.length),
    delay: columns.delay,
    onPath: new Uint8Array(count),
    used: new Set(columns.kind),
  };
  for (let i = 0; i < count; i++) {
    for (let e = model.needStarts[i]; e < model.needStarts[i + 1]; e++) {
      model.source[e] = i + columns.source[e];
    }
  }
  for (const action of columns.path) model.onPath[action] = 1;
  model.rows = model.queues.map((queue, q) => asRow(model, queue, q));
  model.steps = model.makespan / model.per_step;
  addGaps(model);
  model.memoryOfRank = levelsOf(model);
  return model;
}

function offsets(counts) {
  const sums = new Int32Array(counts.length + 1);
  for (let i = 0; i < counts.length; i++) sums[i + 1] = sums[i] + counts[i];
  return sums;
}

// The work of a queue in its order (a slot is its first action), its messages, and all that
// occupies it: work, and messages that take time on the queue.
function asRow(model, queue, q) {
  const works = [];
  const messages = [];
  const busy = [];
  const { joined } = model.columns;
  const hasLane = (i) => model.begin[i] < model.start[i] || model.finish[i] > model.end[i];
  for (let i = model.first[q]; i < model.first[q + 1]; i++) {
    const isMessage = kindRow(model, i).message;
    const isFirst = !joined || !joined[i] || kindRow(model, i - 1).message;
    if (isMessage) messages.push(i);
    else if (isFirst) works.push(i);
    if (isMessage ? hasLane(i) : isFirst) busy.push(i);
  }
  const ordered = Int32Array.from(works);
  const isSame = busy.length === works.length;
  return {
    ...queue, index: q, works: ordered, messages, busy: isSame ? ordered : Int32Array.from(busy),
  };
}

// The action behind the last one of the slot that starts with this one.
function slotStop(model, first) {
  const { joined } = model.columns;
  let stop = first + 1;
  while (joined && stop < model.count && joined[stop]) stop++;
  return stop;
}

function slotFirst(model, action) {
  const { joined } = model.columns;
  while (joined && joined[action]) action--;
  return action;
}

function rowOf(model, action) {
  return model.rows.find((row) => action < model.first[row.index + 1]);
}

// What this slot waited for longest: the action that ended last with its message; through a RECV
// to its SEND, unless another action of its queue held the RECV. Null where it needed nothing from
// outside.
function binding(model, first) {
  let found = null;
  let from = first;
  let stop = slotStop(model, first);
  for (;;) {
    let best = null;
    for (let e = model.needStarts[from]; e < model.needStarts[stop]; e++) {
      const source = model.source[e];
      if (source >= from && source < stop) continue;
      const ready = model.finish[source] + model.delay[e];
      if (best === null || ready > best.ready) best = { source, ready };
    }
    const previous = from - 1; // a RECV that holds its queue until the message is there
    if (previous >= 0 && rowOf(model, previous) === rowOf(model, from) &&
        (best === null || model.finish[previous] > best.ready)) {
      if (!kindRow(model, previous).receive) {
        if (found !== null) return found;
      } else if (model.blocking) {
        best = { source: previous, ready: model.finish[previous] };
      }
    }
    if (best === null) return found;
    found = best;
    if (!kindRow(model, best.source).receive) return found;
    from = best.source;
    stop = from + 1;
  }
}

// Idle before each slot: from when its queue fell free, until when what it needed had ended.
function addGaps(model) {
  model.idles = { dependency: false, transfer: false, end: false };
  model.free = new Int32Array(model.count);
  model.until = new Int32Array(model.count);
  for (const row of model.rows) {
    let free = 0;
    for (const i of row.busy) {
      const begin = model.begin[i];
      model.free[i] = Math.min(free, begin);
      model.until[i] = begin;
      if (begin > free) {
        const held = binding(model, i);
        const ended = held === null ? begin : model.finish[held.source];
        model.until[i] = Math.min(Math.max(ended, free), begin);
        model.idles.dependency ||= model.until[i] > free;
        model.idles.transfer ||= model.until[i] < begin;
      }
      free = Math.max(free, model.finish[i]);
    }
    row.last = free;
    model.idles.end ||= free < model.steps;
  }
}

// Memory of each rank: when it changes, and to what, static memory included.
function levelsOf(model) {
  const { counts, unit } = model.memory;
  let at = 0;
  return counts.map((count, rank) => {
    const times = model.columns.level_time.subarray(at, at + count);
    const values = Float64Array.from(
      model.columns.level.subarray(at, at + count), (x) => x * unit + model.static[rank]);
    at += count;
    return { times, values };
  });
}

// --- finding -----------------------------------------------------------------------------------

// Index of the first of these slots of a queue that ends after this step.
function firstEndingAfter(model, slots, step) {
  let low = 0;
  let high = slots.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (model.finish[slots[middle]] > step) high = middle;
    else low = middle + 1;
  }
  return low;
}

function tileAt(model, row, step) {
  const i = firstEndingAfter(model, row.works, step);
  if (i === row.works.length) return null;
  const first = row.works[i];
  return model.begin[first] <= step ? first : null;
}

// The idle stretch at this step: the slot after it (null: the queue is done).
function gapAt(model, row, step) {
  if (step < 0 || step > model.steps) return null;
  const i = firstEndingAfter(model, row.busy, step);
  if (i === row.busy.length) return { before: null, from: row.last, to: model.steps };
  const before = row.busy[i];
  if (model.begin[before] <= step) return null;
  const isTransfer = step >= model.until[before];
  return {
    before, isTransfer,
    from: isTransfer ? model.until[before] : model.free[before],
    to: isTransfer ? model.begin[before] : model.until[before],
  };
}

function actionName(model, action) {
  const { kind, stage, mb } = model.columns;
  return `${stage[action]}${model.kinds[kind[action] % SHADE].letter}${mb[action]}`;
}

function slotName(model, first) {
  const names = [];
  for (let i = first; i < slotStop(model, first); i++) names.push(actionName(model, i));
  return names.join("+");
}

// The action of a name such as 2F0; null where there is none.
function findAction(model, name) {
  const [, stage, letter, mb] = name.match(/^(\d+)([A-Z_]+)(\d+)$/) ?? [];
  const wanted = model.kinds.findIndex((kind) => kind.letter === letter);
  const { columns } = model;
  for (let i = 0; i < model.count; i++) {
    if (columns.mb[i] === Number(mb) && columns.stage[i] === Number(stage) &&
        columns.kind[i] % SHADE === wanted) return i;
  }
  return null;
}

// --- chains ------------------------------------------------------------------------------------

// Who needs each action: the edges turned around, made when first asked for.
function followers(model) {
  if (!model.turned) {
    const counts = new Int32Array(model.count);
    for (const source of model.source) counts[source]++;
    const starts = offsets(counts);
    const targets = new Int32Array(model.source.length);
    const next = starts.slice();
    for (let i = 0; i < model.count; i++) {
      for (let e = model.needStarts[i]; e < model.needStarts[i + 1]; e++) {
        targets[next[model.source[e]]++] = i;
      }
    }
    model.turned = { starts, targets };
  }
  return model.turned;
}

function reach(starts, targets, from) {
  const seen = new Set(from);
  const open = [...from];
  while (open.length) {
    const i = open.pop();
    for (let e = starts[i]; e < starts[i + 1]; e++) {
      if (!seen.has(targets[e])) {
        seen.add(targets[e]);
        open.push(targets[e]);
      }
    }
  }
  for (const i of from) seen.delete(i);
  return [...seen].sort((a, b) => a - b);
}

// All that a slot needs, directly or not, and all that needs it.
function chainOf(model, first) {
  const own = [];
  for (let i = first; i < slotStop(model, first); i++) own.push(i);
  const turned = followers(model);
  return {
    before: reach(model.needStarts, model.source, own),
    after: reach(turned.starts, turned.targets, own),
  };
}
