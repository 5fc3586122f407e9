// SPDX-License-Identifier: Apache-2.0
// The page of `wanjax serve`: asks for videos, follows their progress by server-sent events, and shows the gallery.
"use strict";

const $ = (id) => document.getElementById(id);
const HIDDEN = ["model", "prompt", "dtype"]; // settings without a field of their own below the prompt
const CHOICES = { resize: ["crop", "pad", "stretch"], sigmas: ["official", "diffusers"] };
const cards = new Map(); // id -> {video, element}
const gone = new Set(); // ids of removed videos, which an answer that was under way may still name
let model = null;
let source = null;
let last = null; // id of the oldest video that is shown

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  const answer = await fetch(path, options);
  if (answer.ok) return answer.status === 204 ? null : answer.json();
  let message = `${answer.status} ${answer.statusText}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // the answer is no JSON, so its status has to do
  }
  throw new Refused(answer.status, message);
}

function words(name) {
  return name.replaceAll("_", " ");
}

function field(name, value) {
  const label = document.createElement("label");
  label.textContent = words(name);
  let input;
  if (CHOICES[name] || typeof value === "boolean") {
    input = document.createElement("select");
    for (const choice of CHOICES[name] ?? ["true", "false"]) input.add(new Option(choice, choice));
    input.value = String(value);
  } else {
    input = document.createElement("input");
    input.type = typeof value === "number" || value === null ? "number" : "text";
    if (input.type === "number") input.step = "any";
    if (["height", "width"].includes(name)) input.step = input.min = model.grid;
    if (["steps", "fps", "frames"].includes(name)) input.min = input.step = 1;
    if (name === "frames") input.step = model.frames_step;
    if (name === "seed") input.min = -1;
    input.placeholder = value === null ? "the model's" : name === "seed" ? "drawn" : String(value);
  }
  input.name = name;
  label.append(input);
  if (name === "negative_prompt") label.className = "wide";
  return label;
}

function fields() {
  const own = Object.entries(model.defaults).filter(([name]) => !HIDDEN.includes(name));
  $("settings").replaceChildren(...own.map(([name, value]) => field(name, value)));
}

// Returns the form's data with what the user changed alone; the model's own settings hold for the others.
function asked() {
  const data = new FormData($("ask"));
  for (const [name, value] of [...data]) {
    const untouched = $("ask").elements[name].tagName === "SELECT" && value === String(model.defaults[name]);
    if (value === "" || untouched || (value instanceof File && !value.size)) data.delete(name);
  }
  if (data.has("height") !== data.has("width")) {
    for (const name of ["height", "width"]) if (!data.has(name)) data.set(name, model.defaults[name]);
  }
  if (!data.has("seed")) data.set("seed", "-1");
  return data;
}

async function make(event) {
  event.preventDefault();
  $("make").disabled = true;
  $("told").textContent = "";
  try {
    show(await ask("/v1/videos", { method: "POST", body: asked() }));
  } catch (error) {
    refused(error);
  } finally {
    $("make").disabled = false;
  }
}

function refused(error) {
  if (error.status === 401) return needToken();
  $("told").textContent = error.message;
}

function needToken() {
  source?.close();
  $("login").hidden = false;
  $("ask").hidden = true;
  $("state").textContent = "a token is needed";
  $("token").focus();
}

async function login(event) {
  event.preventDefault();
  try {
    await ask("/login", { method: "POST", body: new URLSearchParams({ token: $("token").value }) });
    $("login").hidden = true;
    $("ask").hidden = false;
    await begin();
  } catch (error) {
    $("state").textContent = error.message;
  }
}

function stateOf(video) {
  if (video.status === "failed") return video.error?.message ?? "failed";
  if (video.status === "queued") return video.queue_position ? `waits behind ${video.queue_position}` : "waits";
  if (video.status === "completed") {
    const seconds = Object.values(video.stage_seconds).reduce((sum, one) => sum + one, 0);
    return seconds ? `made in ${seconds.toFixed(1)} s` : "made";
  }
  return video.stage_total ? `${video.stage}: ${video.stage_done} of ${video.stage_total}` : video.stage || "begins";
}

function newCard(video) {
  const element = $("card").content.firstElementChild.cloneNode(true);
  element.dataset.id = video.id;
  element.querySelector(".remove").addEventListener("click", () => remove(video.id));
  element.querySelector(".again").addEventListener("click", () => again(video.id));
  return element;
}

// Shows a video's state, unless a newer one is shown: an answer may arrive after a later event.
function show(video, older = false) {
  if (video.deleted) return forget(video.id);
  let card = cards.get(video.id);
  if (gone.has(video.id) || card?.video?.version > video.version) return;
  if (!card) {
    const element = newCard(video);
    if (older) $("videos").append(element);
    else $("videos").prepend(element);
    card = { element, video: null };
    cards.set(video.id, card);
  }
  const { element, video: previous } = card;
  card.video = video;
  element.className = `card ${video.status}`;
  element.querySelector(".prompt").textContent = video.prompt;
  element.querySelector(".state").textContent = [stateOf(video), ...video.notes].join("; ");
  const bar = element.querySelector("progress");
  bar.value = video.progress;
  bar.hidden = ["completed", "failed"].includes(video.status);
  element.querySelector(".remove").textContent = bar.hidden ? "Delete" : "Cancel";
  if (previous?.status !== video.status) finish(element, video);
  if (video.status === "in_progress" && video.preview > (previous?.preview ?? 0)) look(element, video);
  $("empty").hidden = cards.size > 0;
}

function finish(element, video) {
  const done = video.status === "completed";
  const link = element.querySelector(".download");
  link.hidden = !done;
  const list = element.querySelector("dl");
  list.replaceChildren();
  for (const [name, value] of Object.entries(video.settings)) {
    if (value === null || value === "" || name === "prompt") continue;
    const [term, told] = [document.createElement("dt"), document.createElement("dd")];
    [term.textContent, told.textContent] = [words(name), String(value)];
    list.append(term, told);
  }
  const picture = element.querySelector(".picture");
  if (!done) return picture.replaceChildren();
  link.href = `/v1/videos/${video.id}/content`;
  link.download = `${video.id}.mp4`;
  const player = document.createElement("video");
  player.src = link.href;
  player.poster = `${link.href}?variant=thumbnail`;
  Object.assign(player, { controls: true, loop: true, muted: true, playsInline: true, preload: "none" });
  player.style.aspectRatio = `${video.settings.width} / ${video.settings.height}`;
  player.classList.toggle("small", video.settings.width < 256);
  player.setAttribute("aria-label", video.prompt);
  picture.replaceChildren(player);
}

// Shows small pictures of a video that is not finished.
function look(element, video) {
  const strip = document.createElement("img");
  strip.src = `/v1/videos/${video.id}/content?variant=preview&after=${video.preview}`;
  strip.alt = `preview after step ${video.preview}`;
  element.querySelector(".picture").replaceChildren(strip);
}

function forget(id) {
  gone.add(id);
  cards.get(id)?.element.remove();
  cards.delete(id);
  $("empty").hidden = cards.size > 0;
}

// A first press cancels what is not finished; what is finished is deleted after a question.
async function remove(id) {
  const { video } = cards.get(id);
  const over = ["completed", "failed"].includes(video.status);
  if (video.status === "completed" && !confirm("Delete this video?")) return;
  try {
    if (over) {
      await ask(`/v1/videos/${id}`, { method: "DELETE" });
      forget(id);
    } else {
      show(await ask(`/v1/videos/${id}/cancel`, { method: "POST" }));
    }
  } catch (error) {
    refused(error);
  }
}

function again(id) {
  const { settings } = cards.get(id).video;
  for (const [name, value] of Object.entries(settings)) {
    const input = $("ask").elements[name];
    if (input && value !== null) input.value = String(value);
  }
  document.querySelector("#ask details").open = true;
  $("prompt").focus();
  scrollTo({ top: 0, behavior: "smooth" });
}

async function more() {
  const page = await ask(`/v1/videos?limit=24${last ? `&after=${last}` : ""}`);
  for (const video of page.data) show(video, true);
  last = page.last_id ?? last;
  $("more").hidden = !page.has_more;
}

function follow() {
  source?.close();
  source = new EventSource("/v1/events");
  source.onmessage = (event) => show(JSON.parse(event.data));
  source.onopen = () => refresh().catch(refused);
  source.onerror = () => {
    $("state").textContent = "the server does not answer; trying again …";
    if (source.readyState === EventSource.CLOSED) setTimeout(() => begin().catch(refused), 3000);
  };
}

// Shows what changed while there was no connection.
async function refresh() {
  const health = await ask("/health");
  $("state").textContent = health.status === "ready" ? model.id : `${model.id}: ${health.status}`;
  if (health.status === "loading") setTimeout(() => refresh().catch(refused), 2000);
  const page = await ask("/v1/videos?limit=24");
  for (const video of [...page.data].reverse()) show(video);
  const known = new Set(page.data.map((video) => video.id));
  if (!page.has_more) for (const id of [...cards.keys()]) if (!known.has(id)) forget(id);
}

async function begin() {
  model = (await ask("/v1/models")).data[0];
  if (!$("settings").children.length) fields();
  last = null;
  await more();
  follow();
}

$("ask").addEventListener("submit", make);
$("login").addEventListener("submit", login);
$("more").addEventListener("click", () => more().catch(refused));
$("image").addEventListener("change", () => {
  const [file] = $("image").files;
  URL.revokeObjectURL($("chosen").src);
  $("chosen").hidden = !file;
  if (file) $("chosen").src = URL.createObjectURL(file);
});
$("ask").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
});
begin().catch((error) => {
  $("state").textContent = error.message;
  refused(error);
});
