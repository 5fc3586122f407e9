// SPDX-License-Identifier: Apache-2.0
// The page of `wanjax serve`: asks for videos, follows their progress by server-sent events, and shows the gallery.
"use strict";

const $ = (id) => document.getElementById(id);
const APART = ["prompt", "height", "width", "seed"]; // settings that have a place of their own in the form
const LARGEST_SEED = 2n ** 64n - 1n;
const OF_WINDOWS = ["encode", "denoise", "decode"]; // stages through which each window of a video goes
const cards = new Map(); // id -> {video, element}
const gone = new Set(); // ids of removed videos, which an answer that was under way may still name
let models = [];
let model = null; // the one that the form is for; null until the server has answered
let source = null;
let last = null; // id of the oldest video that is shown

// A request that the server refused, or that the page does not send; `param` names the field that is wrong.
class Refused extends Error {
  constructor(status, message, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

async function ask(path, options = {}) {
  const answer = await fetch(path, options);
  if (answer.ok) return answer.status === 204 ? null : JSON.parse(await answer.text(), exact);
  let error = { message: `${answer.status} ${answer.statusText}`, param: null };
  try {
    error = (await answer.json()).error ?? error;
  } catch {
    // the answer is no JSON, so its status has to do
  }
  throw new Refused(answer.status, error.message, error.param);
}

function words(name) {
  return name.replaceAll("_", " ");
}

// Keeps the digits of a seed, which may be larger than a number of this language.
function exact(name, value, context) {
  return name === "seed" && context?.source ? context.source : value;
}

function made(tag, more = {}) {
  return Object.assign(document.createElement(tag), more);
}

// Returns a setting's label with its input and its help, from the server's description.
function field(name, known) {
  const wide = name === "negative_prompt" || known.several;
  const label = made("label", { textContent: words(name), className: wide ? "wide" : "" });
  const choices = known.enum ?? (known.type === "boolean" ? ["true", "false"] : null);
  const input = made(choices ? "select" : known.several ? "textarea" : "input", { name });
  label.append(input);
  if (choices) {
    for (const choice of choices) input.add(new Option(choice));
    input.value = String(known.default);
  } else {
    const numeric = known.type !== "string";
    const type = numeric ? "number" : "text";
    const step = name === "frames" ? model.frames_step : known.type === "integer" ? 1 : "any";
    const min = name === "frames" ? 1 : known.minimum ?? "";
    Object.assign(input, { placeholder: String(known.default) }, known.several ? { rows: 2 } : { type });
    if (numeric) Object.assign(input, { step, min, max: known.maximum ?? "" });
  }
  if (known.examples) {
    const list = made("datalist", { id: `some-${name}` });
    list.append(...known.examples.map((example) => new Option(example)));
    input.setAttribute("list", list.id);
    label.append(list);
  }
  label.append(made("small", { textContent: known.description }));
  return label;
}

// Returns the label of a picture or a clip, with the chosen pictures shown.
function picture(name, known) {
  const label = made("label", { textContent: words(name === "video" ? "clip" : name) });
  const input = made("input", { name, id: name, type: "file", multiple: known.several, required: known.required });
  input.accept = ["video", "mask"].includes(name) ? "image/*,video/*,.mkv" : "image/*";
  const shown = made("span");
  input.addEventListener("change", () => {
    for (const old of shown.children) URL.revokeObjectURL(old.src);
    const images = [...input.files].filter((file) => file.type.startsWith("image/"));
    shown.replaceChildren(...images.map((file) => made("img", { src: URL.createObjectURL(file), alt: file.name })));
    reveal();
  });
  label.append(input, shown, made("small", { textContent: known.description }));
  return label;
}

// Makes the form of a model, with the fields for which it has a use.
function fit(chosen) {
  model = chosen;
  const { settings, pictures, sizes, schedulers, loras } = model;
  const shown = Object.entries(settings).filter(([name]) => !APART.includes(name));
  if (schedulers.length > 1) {
    const description = "The solver that takes the steps.";
    shown.push(["scheduler", { type: "string", description, default: schedulers[0], examples: schedulers }]);
  }
  for (const { name, strength } of loras) {
    shown.push([`lora ${name}`, { type: "number", description: "The strength of this LoRA.", default: strength }]);
  }
  $("settings").replaceChildren(...shown.map(([name, known]) => field(name, known)));
  $("pictures").replaceChildren(...Object.entries(pictures).map(([name, known]) => picture(name, known)));
  const { model: input, size, height, width } = $("ask").elements;
  const pictured = Object.keys(pictures).some((name) => name === "image" || name === "video");
  const own = Object.entries(sizes);
  const options = [new Option(pictured ? `${own[0][1]}, or like a picture` : own[0][1], "")];
  options.push(...own.slice(pictured ? 0 : 1).map(([name, one]) => new Option(`${one} (${name})`, one)));
  options.push(new Option("another", "other"));
  input.value = model.id;
  $("tasks").textContent = `A video from ${model.tasks.join(", ")}.`;
  size.replaceChildren(...options);
  for (const side of [height, width]) Object.assign(side, { step: model.grid, min: model.grid });
  reveal();
}

// Shows the fields that are of use as the form is now. The others are disabled: they are neither checked nor sent.
function reveal() {
  if (model === null) return;
  const fields = $("ask").elements;
  const show = (name, wanted) => {
    if (!fields[name]) return;
    fields[name].closest("label").hidden = !wanted;
    fields[name].disabled = !wanted;
  };
  const scales = ["guidance_scale", "guidance_scale_2"].map((name) => fields[name]?.value || model.settings[name]?.default);
  for (const name of ["height", "width"]) {
    show(name, fields.size.value === "other");
    fields[name].required = fields.size.value === "other";
  }
  const rule = fields.guidance_rule?.value || String(model.settings.guidance_rule?.default ?? "");
  show("negative_prompt", rule.startsWith("nag") || scales.some((scale) => Number(scale ?? 0) > 1));
  show("strength", fields.video?.files.length);
  show("overlap", fields.then?.value || Number(fields.windows?.value) > 1);
  show("sigmas", fields.follow?.value === model.settings.follow?.default);
  show("resize", Object.keys(model.pictures).some((name) => fields[name].files.length));
}

// Returns the seeds that the form asks for, counted before they are listed; "" is one that the server draws.
function seeds() {
  const { seed, count } = $("ask").elements;
  const wrong = (message) => new Refused(null, message, "seed");
  const [text, many] = [seed.value.trim(), BigInt(count.value || 1)];
  if (!text) return Array(Number(many)).fill("");
  const ranges = text.split(",").map((part) => {
    const [first, last = first] = part.split("..").map((number) => BigInt(number.trim()));
    if (last < first) throw wrong(`the seeds ${part.trim()} end before they begin: ${last}..${first} are in order`);
    return [first, last];
  });
  if (ranges.length === 1 && ranges[0][0] === ranges[0][1]) ranges[0][1] += many - 1n;
  const largest = ranges.map(([, last]) => last).find((last) => last > LARGEST_SEED);
  if (largest) throw wrong(`the seed ${largest} is too large: ${LARGEST_SEED} is the largest`);
  const total = ranges.reduce((sum, [first, last]) => sum + last - first + 1n, 0n);
  const most = model.limits.queue;
  if (total > most) throw wrong(`${total} videos are asked for, and ${most} may wait: ask for fewer seeds`);
  const listed = ([first, last]) => Array.from({ length: Number(last - first) + 1 }, (_, i) => String(first + BigInt(i)));
  return [...new Set(ranges.flatMap(listed))];
}

// Throws what the browser finds wrong with a field, of which it would tell nothing in settings that are closed.
function check() {
  if (!$("prompt").value.trim()) throw new Refused(null, "Say what the video shows", "prompt");
  const input = [...$("ask").elements].find((one) => !one.checkValidity());
  if (!input) return;
  const label = input.closest("label")?.firstChild.textContent.trim() || input.name;
  throw new Refused(null, `${label}: ${input.title || input.validationMessage}`, input.name);
}

// Returns the form's data with what the user changed alone; the model's own settings hold for the others.
function asked() {
  const data = new FormData($("ask"));
  const loras = [];
  for (const [name, value] of [...data]) {
    const input = $("ask").elements[name];
    const untouched = input.tagName === "SELECT" && value === String(model.settings[name]?.default);
    if (name.startsWith("lora ") && value) loras.push(`${name.slice(5)}:${value}`);
    if (value === "" || untouched || (value instanceof File && !value.size)) data.delete(name);
  }
  if (!data.has("prompt")) data.set("prompt", "");
  if (data.get("size") === "other") data.set("size", `${data.get("width")}x${data.get("height")}`);
  if (loras.length) data.set("lora", loras.join());
  for (const name of [...data.keys()]) {
    if (["width", "height", "count", "seed"].includes(name) || name.startsWith("lora ")) data.delete(name);
  }
  return data;
}

async function make(event) {
  event.preventDefault();
  if (model === null) return;
  $("make").disabled = true;
  $("told").textContent = "";
  for (const input of $("ask").querySelectorAll("[aria-invalid]")) input.removeAttribute("aria-invalid");
  try {
    check();
    for (const seed of seeds()) {
      const body = asked();
      if (seed) body.set("seed", seed);
      show(await ask("v1/videos", { method: "POST", body }));
    }
  } catch (error) {
    refused(error);
  } finally {
    $("make").disabled = false;
  }
}

// Shows why nothing is made, and leads to the field that is wrong; settings that are closed open.
function refused(error) {
  if (error.status === 401) return needToken();
  $("told").textContent = error.message;
  const of = (input) => error.param && !input.disabled && input.name.split(" ")[0] === error.param; // of each LoRA too
  const input = [...$("ask").elements].find(of);
  if (input?.closest("details") || (error.status === 422 && !input)) $("ask").querySelector("details").open = true;
  input?.setAttribute("aria-invalid", "true");
  input?.focus();
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
    await ask("login", { method: "POST", body: new URLSearchParams({ token: $("token").value }) });
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
  const unit = { compile: "program", decode: "chunk" }[video.stage] ?? "step";
  if (video.cancelled) return `ends after this ${unit}`;
  if (video.stage === "compile" && video.stage_total) {
    return `compiling program ${video.stage_done} of ${video.stage_total}`;
  }
  const windows = video.settings.windows ?? 1;
  const where = windows > 1 && OF_WINDOWS.includes(video.stage) ? `window ${video.window} of ${windows}, ` : "";
  const done = video.stage_total ? `: ${video.stage_done} of ${video.stage_total}` : "";
  return `${where}${video.stage || "begins"}${done}`;
}

function newCard(video) {
  const element = $("card").content.firstElementChild.cloneNode(true);
  element.dataset.id = video.id;
  element.querySelector(".remove").addEventListener("click", () => remove(video.id));
  element.querySelector(".again").addEventListener("click", () => again(video.id).catch(refused));
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
  const loras = video.lora?.map(({ name, strength }) => `${name}:${strength}`).join();
  for (const [name, value] of Object.entries({ ...video.settings, scheduler: video.scheduler, lora: loras ?? null })) {
    if (value === null || value === "" || name === "prompt") continue;
    const [term, told] = [document.createElement("dt"), document.createElement("dd")];
    [term.textContent, told.textContent] = [words(name), String(value)];
    list.append(term, told);
  }
  const picture = element.querySelector(".picture");
  if (!done) return picture.replaceChildren();
  link.href = `v1/videos/${video.id}/content`;
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
  strip.src = `v1/videos/${video.id}/content?variant=preview&after=${video.preview}`;
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
      await ask(`v1/videos/${id}`, { method: "DELETE" });
      forget(id);
    } else {
      show(await ask(`v1/videos/${id}/cancel`, { method: "POST" }));
    }
  } catch (error) {
    refused(error);
  }
}

// Fills the form with all that a video was made from, so that one thing may be changed.
async function again(id) {
  const { video } = cards.get(id);
  const record = video.status === "completed" ? await ask(`v1/videos/${id}/record`) : video.settings;
  fit(models.find((one) => one.id === record.model) ?? model);
  const fields = $("ask").elements;
  for (const [name, value] of Object.entries(record)) {
    if (fields[name] && fields[name].type !== "file") fields[name].value = String(value ?? "");
  }
  for (const { name, strength } of video.lora ?? []) {
    if (fields[`lora ${name}`]) fields[`lora ${name}`].value = strength;
  }
  const size = `${record.width}x${record.height}`;
  fields.size.value = [...fields.size.options].some((option) => option.value === size) ? size : "other";
  fields.count.value = 1;
  await Promise.all(Object.keys(model.pictures).map((name) => choose(video, name)));
  reveal();
  document.querySelector("#ask details").open = true;
  $("prompt").focus();
  scrollTo({ top: 0, behavior: "smooth" });
}

// Chooses the pictures of a video, as if by hand.
async function choose(video, name) {
  const chosen = new DataTransfer();
  const own = video.pictures.filter((variant) => variant.replace(/_\d+$/, "") === (name === "video" ? "clip" : name));
  for (const variant of own) {
    const answer = await fetch(`v1/videos/${video.id}/content?variant=${variant}`);
    if (!answer.ok) throw new Refused(answer.status, `the ${words(variant)} of this video is gone`);
    const type = answer.headers.get("content-type");
    chosen.items.add(new File([await answer.blob()], `${variant}.${type.split("/").pop()}`, { type }));
  }
  $(name).files = chosen.files;
  $(name).dispatchEvent(new Event("change"));
}

async function more() {
  const page = await ask(`v1/videos?limit=24${last ? `&after=${last}` : ""}`);
  for (const video of page.data) show(video, true);
  last = page.last_id ?? last;
  $("more").hidden = !page.has_more;
}

function follow() {
  source?.close();
  source = new EventSource("v1/events");
  source.onmessage = (event) => show(JSON.parse(event.data));
  source.onopen = () => refresh().catch(refused);
  source.onerror = () => {
    $("state").textContent = "the server does not answer; trying again …";
    if (source.readyState === EventSource.CLOSED) setTimeout(() => begin().catch(refused), 3000);
  };
}

// Shows what changed while there was no connection.
async function refresh() {
  const health = await ask("health");
  $("state").textContent = health.status === "ready" ? health.model : `${health.model}: ${health.status}`;
  if (health.status === "loading") setTimeout(() => refresh().catch(refused), 2000);
  const page = await ask("v1/videos?limit=24");
  for (const video of [...page.data].reverse()) show(video);
  const known = new Set(page.data.map((video) => video.id));
  if (!page.has_more) for (const id of [...cards.keys()]) if (!known.has(id)) forget(id);
}

async function begin() {
  models = (await ask("v1/models")).data;
  if (model === null) {
    $("models").hidden = $("ask").elements.model.disabled = models.length === 1;
    $("ask").elements.model.replaceChildren(...models.map((one) => new Option(one.id)));
    fit(models[0]);
    $("make").disabled = false;
  }
  last = null;
  await more();
  follow();
}

$("ask").addEventListener("submit", make);
$("login").addEventListener("submit", login);
$("more").addEventListener("click", () => more().catch(refused));
$("ask").addEventListener("input", reveal);
$("ask").elements.model.addEventListener("change", (event) => fit(models.find((one) => one.id === event.target.value)));
$("ask").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
});
begin().catch((error) => {
  $("state").textContent = error.message;
  refused(error);
});
