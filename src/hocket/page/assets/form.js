// The served page: its form asks hocket for another schedule, and shows the answer at once.

const PAUSE = 150; // ms without a change before hocket is asked

const FIELDS = [
  { name: "schedule", label: "Schedule" },
  { name: "p", label: "Ranks p", type: "number" },
  { name: "m", label: "Microbatches m", type: "number" },
  { name: "v", label: "Stages a rank v", type: "number" },
  { name: "options", label: "Options" },
  { name: "beside", label: "Beside" },
  { name: "limit", label: "Memory limit a rank", type: "number" },
  { name: "costs", label: "Costs (TOML, or a profile's name)", isLong: true,
    hint: "F = 1\nI = 1\nW = 1" },
];

function makeForm(app) {
  const form = document.getElementById("form");
  form.hidden = false;
  form.replaceChildren(...FIELDS.map((field) => labelled(app.data.served, field)));
  form.addEventListener("submit", (event) => event.preventDefault());
  showWhatItTakes(app);
  let timer = null;
  form.addEventListener("input", () => {
    showWhatItTakes(app);
    clearTimeout(timer);
    timer = setTimeout(() => ask(app), PAUSE);
  });
}

// What the schedule takes: fields that mean nothing to it are closed, the others say what.
function showWhatItTakes({ data }) {
  const { schedule, p, m, v, options } = document.getElementById("form").elements;
  const taken = data.served.takes[schedule.value];
  const names = taken ? taken.options : [];
  schedule.title = taken && taken.needs.length ? `needs ${taken.needs.join(", ")}` : "";
  for (const input of [p, m]) input.disabled = !taken;
  v.disabled = !taken?.v;
  options.disabled = !names.length;
  options.placeholder = names.map((name) => `${name}=`).join(" ") || "none";
}

function labelled(served, field) {
  const label = document.createElement("label");
  label.append(field.label, inputOf(served, field));
  return label;
}

function inputOf(served, { name, type, hint, isLong }) {
  if (name === "schedule" || name === "beside") return choiceOf(served, name);
  const input = document.createElement(isLong ? "textarea" : "input");
  input.name = name;
  if (type) input.type = type;
  if (type === "number") input.min = name === "limit" ? 0 : 1;
  if (name === "limit") input.step = "any";
  if (hint) input.placeholder = hint;
  input.value = served.asked[name] ?? "";
  input.spellcheck = false;
  input.autocomplete = "off";
  return input;
}

function choiceOf(served, name) {
  const select = document.createElement("select");
  select.name = name;
  const options = name === "beside" ? [["", "nothing"], ...served.schedules] : served.schedules;
  for (const [value, text] of options) select.add(new Option(text, value));
  select.value = served.asked[name] ?? "";
  return select;
}

const formWords = () => Object.fromEntries(new FormData(document.getElementById("form")));

// Fills the form from a shared address, where that asks for something else than the page shows.
function restoreForm(app) {
  const { asked } = app.state;
  const form = document.getElementById("form");
  for (const [key, value] of Object.entries(asked)) {
    const input = form.elements.namedItem(key.slice(2));
    if (input) input.value = value;
  }
  showWhatItTakes(app);
  return Object.keys(asked).length ? ask(app) : Promise.resolve();
}

// Answers may overtake each other: only that to the last question is shown.
async function ask(app) {
  const words = formWords();
  const number = app.question = (app.question ?? 0) + 1;
  try {
    const data = await asJson("view", words);
    if (number !== app.question) return;
    await showData(app, { ...app.data, ...data });
    const first = app.data.served.asked;
    const changed = Object.entries(words).filter(([key, value]) => value !== (first[key] ?? ""));
    app.state.asked = Object.fromEntries(changed.map(([key, value]) => [`q.${key}`, value]));
    showError("");
  } catch (error) {
    if (number !== app.question) return;
    showError(error.message);
  }
  app.answered = number;
  app.isResized = true;
  app.redraw();
}

async function asJson(path, words) {
  const answer = await fetch(`${path}?${new URLSearchParams(words)}`).catch(() => {
    throw new Error("hocket does not answer any more; was `hocket view` ended?");
  });
  const data = await answer.json();
  if (data.error) throw new Error(data.error);
  return data;
}

async function askTrace(app, index) {
  const words = new URLSearchParams({ ...formWords(), view: index });
  const answer = await fetch(`trace?${words}`);
  if (!answer.ok) throw new Error((await answer.json()).error);
  return { bytes: new Uint8Array(await answer.arrayBuffer()), title: app.views[index].label };
}
