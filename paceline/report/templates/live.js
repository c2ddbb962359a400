// Shows each state that the server sends. Everything is text or an SVG path; nothing is kept here.
const byId = (id) => document.getElementById(id);
const digits = (value, places = 0) =>
  value == null ? "–" : value.toLocaleString("en", { maximumFractionDigits: places });
const milliseconds = (ms) =>
  ms == null ? "–" : ms >= 1000 ? `${(ms / 1000).toFixed(2)} s` : `${ms.toPrecision(3)} ms`;

function bytes(count) {
  if (count == null) return "–";
  for (const unit of ["B", "kB", "MB"]) {
    if (count < 1000) return `${Number(count.toPrecision(3))} ${unit}`;
    count /= 1000;
  }
  return `${Number(count.toPrecision(3))} GB`;
}

function showBreakdown(parts) {
  const whole = Object.values(parts).reduce((sum, ms) => sum + ms, 0);
  byId("duration").textContent = whole ? milliseconds(whole) : "–";
  const named = Object.fromEntries(Object.entries(parts).map(([key, ms]) => [key.replace("_", " "), ms]));
  for (const phase of Object.keys(COLOURS)) {
    const ms = named[phase] ?? 0;
    const id = `part-${phase.replace(" ", "-")}`;
    let part = byId(id);
    if (!part) {
      part = byId("stack").appendChild(document.createElement("div"));
      part.id = id;
      part.style.background = COLOURS[phase];
    }
    part.style.flexGrow = ms;
    part.title = `${phase}: ${milliseconds(ms)}`;
    document.querySelector(`[data-phase="${phase}"]`).textContent = ms ? milliseconds(ms) : "–";
  }
}

function showCurve(id, points, fromZero) {
  const svg = byId(id);
  if (points.length < 2) return;
  const width = svg.clientWidth, height = svg.clientHeight, left = 52, bottom = 20;
  const xs = points.map((p) => p[0]), ys = points.map((p) => p[1]);
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  const [low, high] = [fromZero ? 0 : Math.min(...ys), Math.max(...ys)];
  const x = (value) => left + ((value - x0) / (x1 - x0 || 1)) * (width - left - 4);
  const y = (value) => 6 + (1 - (value - low) / (high - low || 1)) * (height - bottom - 6);
  const label = (value) => Number(value.toPrecision(3)).toLocaleString("en");
  const line = points.map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`);
  const grid = [low, (low + high) / 2, high].map((value) =>
    `<line x1="${left}" x2="${width}" y1="${y(value)}" y2="${y(value)}"/>` +
    `<text x="${left - 8}" y="${y(value) + 4}" text-anchor="end">${label(value)}</text>`);
  const unit = id === "rate-curve" ? " s" : "";
  svg.innerHTML = grid.join("") + `<path d="${line.join("")}"/>` +
    `<text x="${left}" y="${height - 2}">${label(x0)}${unit}</text>` +
    `<text x="${width}" y="${height - 2}" text-anchor="end">${label(x1)}${unit}</text>`;
}

function showMembers(members) {
  const body = byId("members").tBodies[0];
  const latest = Math.max(...members.map((member) => member.late_ms ?? 0));
  for (const member of members) {
    let row = byId(`member-${member.name}`);
    if (!row) {
      row = body.insertRow();
      row.id = `member-${member.name}`;
      for (let cell = 0; cell < 10; cell++) row.insertCell();
    }
    const texts = [member.name, member.status, member.host, digits(member.step), milliseconds(member.step_ms),
      milliseconds(member.late_ms), digits(member.cpu, 2), bytes(member.memory_bytes),
      member.sent == null ? "–" : `${bytes(member.sent)}/s`,
      member.received == null ? "–" : `${bytes(member.received)}/s`];
    texts.forEach((text, cell) => { row.cells[cell].textContent = text; });
    const late = latest > 0 && member.late_ms === latest;
    row.className = `${member.status}${late ? " late" : ""}`;
  }
}

function show(state) {
  byId("name").textContent = `${state.model}, ${state.architecture}`;
  const dead = state.members.some((member) => ["failed", "silent"].includes(member.status));
  const status = state.status === "running" && dead ? "lost" : state.status;
  byId("status").textContent = status === "lost" ? "a member is lost" : status;
  byId("status").className = `pill ${status}`;
  byId("verdict").hidden = !state.verdict;
  byId("verdict").textContent = state.verdict ?? "";
  byId("rate").textContent = digits(state.samples_per_second, state.samples_per_second < 100 ? 1 : 0);
  byId("step").textContent = digits(state.step);
  byId("steps").textContent = state.steps ? `of ${digits(state.steps)}` : "";
  byId("loss").textContent = state.loss.length ? state.loss.at(-1)[1].toPrecision(4) : "–";
  showBreakdown(state.breakdown_ms);
  showCurve("rate-curve", state.rate, true);
  showCurve("loss-curve", state.loss, false);
  showMembers(state.members);
  byId("said").hidden = !state.events.length;
  byId("events").replaceChildren(...state.events.map((text) => {
    const item = document.createElement("li");
    item.textContent = text;
    return item;
  }));
}

const source = new EventSource(`events${location.search}`);
source.onmessage = (event) => show(JSON.parse(event.data));
source.onerror = () => { byId("status").textContent = "no connection"; byId("status").className = "pill lost"; };
