// What is said of a tile or a gap, on hover and for the selection; the same words as `hocket`.

// At most nine digits: times that are no small whole numbers come rounded to about as many.
function short(value) {
  const exact = Number(value.toPrecision(9));
  const text = String(exact);
  if (Number.isInteger(exact) || text.length <= 8) return text;
  const whole = Math.max(4, Math.ceil(Math.log10(Math.abs(value) + 1)));
  return String(Number(value.toPrecision(whole)));
}

function said(app, view, steps) {
  const unit = app.data.unit ? ` ${app.data.unit}` : "";
  return short(steps * view.per_step) + unit;
}

function tellSlot(app, view, first) {
  const row = rowOf(view, first);
  const lines = [];
  for (let i = first; i < slotStop(view, first); i++) {
    const { kind, stage, mb } = view.columns;
    const { name } = view.kinds[kind[i] % SHADE];
    lines.push(`${actionName(view, i)}: stage ${stage[i]}, ${name}, microbatch ${mb[i]}`);
  }
  const from = short(view.start[first] * view.per_step);
  const lasts = said(app, view, view.end[first] - view.start[first]);
  lines.push(`rank ${row.name}, ${from} to ${said(app, view, view.end[first])} (${lasts})`);
  lines.push(tellWait(app, view, first));
  if (view.onPath[first]) lines.push("on the critical path");
  lines.push(...tellOthers(app, view, first));
  return lines.filter(Boolean).join("\n");
}

// When the same action ran in the other timeline, as `predicted: 104 to 114 us (10 us)`.
function tellOthers(app, view, first) {
  const name = actionName(view, first);
  return app.views.filter((other) => other !== view).map((other) => {
    const action = findAction(other, name);
    if (action === null) return "";
    const [start, end] = [other.start[action], other.end[action]];
    const from = short(start * other.per_step);
    return `${other.label}: ${from} to ${said(app, other, end)} (${said(app, other, end - start)})`;
  });
}

// Why the slot did not start earlier.
function tellWait(app, view, first) {
  if (kindRow(view, first).message) return "";
  const waited = view.begin[first] - view.free[first];
  const held = binding(view, first);
  if (waited <= 0) return view.begin[first] > 0 ? "did not wait: its rank was busy until then" : "";
  if (held === null) return `waited ${said(app, view, waited)}`;
  const source = slotFirst(view, held.source);
  const under = view.begin[first] - view.until[first];
  const transfer = under > 0 ? `, ${said(app, view, under)} of it for the message` : "";
  return `waited ${said(app, view, waited)} for ${slotName(view, source)} on rank ` +
    `${rowOf(view, source).name}${transfer}`;
}

function tellGap(app, view, row, gap) {
  const times = `rank ${row.name} idle, ${short(gap.from * view.per_step)} to ` +
    `${said(app, view, gap.to)} (${said(app, view, gap.to - gap.from)})`;
  if (gap.before === null) return `${times}\nnothing left to do`;
  const held = binding(view, gap.before);
  const name = slotName(view, gap.before);
  if (held === null) return `${times}\n${name} waits`;
  const source = slotFirst(view, held.source);
  const verb = gap.isTransfer ? "is under way from" : "runs on";
  return `${times}\n${name} waits for ${slotName(view, source)}, ` +
    `which ${verb} ${rowOf(view, source).name}`;
}

function tellMemory(app, view, row, step) {
  const { times, values } = view.memoryOfRank[row.rank];
  let level = view.static[row.rank];
  for (let k = 0; k < times.length && times[k] <= step; k++) level = values[k];
  const what = view.memory.quantity === "bytes" ? "bytes" : "microbatches in flight";
  const limit = app.state.limit === null ? "" : `, limit ${short(app.state.limit)}`;
  return `rank ${row.rank} at ${said(app, view, Math.round(step))}: ${short(level)} ${what}\n` +
    `peak ${short(view.peaks[row.rank])}${limit}`;
}

// What is under the pointer: { text, view, action } or null.
function probe(app, x, y) {
  const { scene } = app;
  if (y < AXIS || x < scene.left || x > scene.right) return null;
  const item = rowAt(scene, y);
  if (!item) return null;
  const { view, row, index } = item;
  const step = stepAt(scene, view, x);
  if (y >= item.y + item.height) {
    return item.memory ? { text: tellMemory(app, view, row, step), view: index, action: null } : null;
  }
  const action = tileAt(view, row, step);
  if (action !== null) return { text: tellSlot(app, view, action), view: index, action };
  const message = row.messages.find((i) => view.begin[i] <= step && step < view.finish[i]);
  if (message !== undefined) {
    return { text: tellSlot(app, view, message), view: index, action: message };
  }
  const gap = gapAt(view, row, step);
  return gap && { text: tellGap(app, view, row, gap), view: index, action: null };
}

function tellSelected(app) {
  const { selected } = app.state;
  if (!selected) return "";
  const view = app.views[selected.view];
  const { before, after } = selected.chain;
  const of = app.views.length > 1 ? `${view.label}\n` : "";
  return `${of}${tellSlot(app, view, selected.action)}\n` +
    `needs ${before.length} actions, is needed by ${after.length}`;
}
