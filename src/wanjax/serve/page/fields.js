// SPDX-License-Identifier: Apache-2.0
// The fields of the form: what there is of them for a model, what is wrong in them, and what is sent.

import { Refused } from "./api.js";
import { text } from "./texts.js";

const LARGEST_SEED = 2n ** 64n - 1n;
const SEEDS = /^\s*\d+(\.\.\d+)?(\s*,\s*\d+(\.\.\d+)?)*\s*$/;
const CLIPS = ["video", "mask"]; // inputs that may be films

// The settings of each group of the drawer, in their order. What is not named here stands last.
export const GROUPS = {
  look: ["steps", "guidance_scale", "guidance_scale_2", "negative_prompt", "strength"],
  speed: ["cache"],
  shape: ["width", "height", "resize", "frames", "fps", "windows", "then", "overlap"],
  loras: [],
  expert: ["scheduler", "guidance_rule", "dynamic_guidance", "flow_shift", "boundary", "follow", "sigmas"],
};
const APART = ["prompt", "seed", "width", "height"]; // with a place of their own

// The usual range of a number, for a slider.
const RANGES = {
  steps: ({ steps }) => [1, Math.max(8, 2 * steps), 1],
  guidance_scale: () => [1, 12, 0.5],
  guidance_scale_2: () => [1, 12, 0.5],
  strength: () => [0.05, 1, 0.05],
  flow_shift: () => [1, 20, 0.5],
  boundary: () => [0, 1, 0.025],
  lora: () => [0, 1.5, 0.05],
};

export const words = (name) => name.replaceAll("_", " ");

export function labelOf(name) {
  const lora = name.startsWith("lora ") ? name.slice(5) : null;
  return (lora ? text("label_lora", { name: lora }) : text(`label_${name}`)) ?? words(name);
}

export function helpOf(name, model) {
  const values = { grid: model.grid, step: model.frames_step, second: 1 + model.frames_step, third: 1 + 2 * model.frames_step };
  return text(`does_${name.startsWith("lora ") ? "lora" : name}`, values) ?? model.settings[name]?.description ?? "";
}

// Returns the fields of a model's drawer: {name, kind, default, group} and the bounds, choices or range of each.
export function fieldsOf(model) {
  const described = { ...model.settings };
  if (model.schedulers.length > 1) {
    described.scheduler = { type: "string", default: model.schedulers[0], examples: model.schedulers };
  }
  for (const { name, strength } of model.loras) described[`lora ${name}`] = { type: "number", default: strength };
  const groupOf = (name) =>
    name.startsWith("lora ") ? "loras" : (Object.keys(GROUPS).find((group) => GROUPS[group].includes(name)) ?? "expert");
  const fields = Object.entries(described)
    .filter(([name]) => !APART.includes(name))
    .map(([name, known]) => {
      const range = RANGES[name.split(" ")[0]]?.(model.defaults);
      const choices = known.enum ?? known.examples;
      const kind = known.type === "boolean" ? "switch" : choices ? "choice" : known.several ? "lines"
        : name === "negative_prompt" ? "line" : known.type === "string" ? "line" : range ? "range" : "number";
      return { name, known, kind, range, choices, open: !known.enum, default: String(known.default ?? ""), group: groupOf(name) };
    });
  const order = Object.values(GROUPS).flat();
  return fields.sort((a, b) => (order.indexOf(a.name) + 1 || 99) - (order.indexOf(b.name) + 1 || 99));
}

// Returns an empty form for a model.
export function emptyForm(model) {
  return { model: model.id, prompt: "", values: {}, files: {}, shape: "", resolution: "", count: 1, seed: "", locked: false, from: null };
}

const PARTS = ["windows", "then", "overlap"];
export const omit = (values, names) => Object.fromEntries(Object.entries(values).filter(([name]) => !names.includes(name)));
export const inOnePart = (form) => ({ ...form, values: omit(form.values, PARTS) });

// Returns a form whose video was asked for, without what an action put into it for that video: its seeds, and its parts.
export function settled(form) {
  const { act, seed } = form.from ?? {};
  const own = act === "extend" ? inOnePart(form) : form;
  const drawn = ["vary", "extend"].includes(act) && form.seed === seed ? { seed: "", locked: false, count: 1 } : {};
  return { ...own, ...drawn, from: null };
}

export function valueOf(form, model, name) {
  return form.values[name] ?? String(model.defaults[name] ?? model.settings[name]?.default ?? "");
}

// Returns whether a field has a use, as the form is now.
export function isUseful(name, form, model) {
  const number = (name) => Number(valueOf(form, model, name) || 0);
  const pictured = Object.values(form.files).some((files) => files.length);
  switch (name) {
    case "negative_prompt":
      return valueOf(form, model, "guidance_rule").startsWith("nag")
        || Math.max(number("guidance_scale"), number("guidance_scale_2")) > 1;
    case "strength": return Boolean(form.files.video?.length);
    case "overlap":
    case "then": return number("windows") > 1;
    case "sigmas": return valueOf(form, model, "follow") === String(model.settings.follow?.default);
    case "resize": return pictured;
    case "width":
    case "height": return form.shape === "own";
    default: return true;
  }
}

// Returns what is wrong with a number, or null. `step` is that of lengths, which begin at `from`.
function wrongNumber(label, value, known, step = 1, from = null) {
  const number = Number(value);
  const say = (key, more = {}) => text(`wrong_${key}`, { label, value, ...more });
  if (value.trim() === "" || !Number.isFinite(number)) return say("number");
  if (known.type === "integer" && !Number.isInteger(number)) return say("whole");
  const least = from ?? known.minimum;
  if (least !== undefined && number < least) return say("least", { bound: least });
  if (known.exclusiveMinimum !== undefined && number <= known.exclusiveMinimum) return say("above", { bound: known.exclusiveMinimum });
  if (known.maximum !== undefined && number > known.maximum) return say("most", { bound: known.maximum });
  const over = (number - (from ?? 0)) % step;
  if (step > 1 && over) return say("step", { below: number - over, above: number - over + step });
  return null;
}

// Returns what is wrong in a form: {field: sentence}, in the order of the page.
export function problems(form, model) {
  const found = {};
  for (const [name, known] of Object.entries(model.pictures)) {
    if (known.required && !form.files[name]?.length) found[name] = text("wrong_missing", { label: inputLabel(name) });
  }
  if (form.shape === "own") {
    for (const side of ["width", "height"]) {
      const value = form.values[side] ?? "";
      const wrong = value === "" ? text("wrong_missing", { label: labelOf(side) })
        : wrongNumber(labelOf(side), value, model.settings[side], model.grid, model.grid);
      if (wrong) found[side] = wrong;
    }
  }
  try {
    seedsOf(form, model);
  } catch (error) {
    found.seed = error.message;
  }
  for (const { name, known, kind } of fieldsOf(model)) {
    const value = form.values[name];
    if (value === undefined || !["number", "range"].includes(kind) || !isUseful(name, form, model)) continue;
    const step = name === "frames" ? [model.frames_step, 1] : [];
    const wrong = wrongNumber(labelOf(name), value, known, ...step);
    if (wrong) found[name] = wrong;
  }
  return found;
}

export function inputLabel(name) {
  return text(`input_${name}`) ?? words(name);
}

// Returns what a picture or clip does for a model: some begin from a clip, others follow it.
export function inputHelp(name, model) {
  const key = name === "video" && "strength" in model.settings ? "does_video_begun" : `does_${name}`;
  return text(key) ?? model.pictures[name].description;
}

// Returns the seeds that a form asks for, counted before they are listed; "" is one that the server draws.
export function seedsOf({ seed, count }, model) {
  const wrong = (key, values) => new Refused(null, text(`wrong_${key}`, values), "seed");
  const value = seed.trim();
  const most = model.limits.queue;
  if (!value) return Array(count).fill("");
  if (!SEEDS.test(value)) throw wrong("seed", { value });
  const ranges = value.split(",").map((part) => {
    const [first, last = first] = part.split("..").map((number) => BigInt(number.trim()));
    if (last < first) throw wrong("range", { first, last });
    return [first, last];
  });
  if (ranges.length === 1 && ranges[0][0] === ranges[0][1]) ranges[0][1] += BigInt(count) - 1n;
  const large = ranges.map(([, last]) => last).find((last) => last > LARGEST_SEED);
  if (large) throw wrong("large", { value: large, most: LARGEST_SEED });
  const n = ranges.reduce((sum, [first, last]) => sum + last - first + 1n, 0n);
  if (n > most) throw wrong("many", { n, most });
  const listed = ([first, last]) => Array.from({ length: Number(last - first) + 1 }, (_, i) => String(first + BigInt(i)));
  return [...new Set(ranges.flatMap(listed))];
}

// The shapes of a model, each with its sizes by the name of their resolution, as {landscape: {"480p": "832x480"}}.
export function shapesOf(model) {
  const found = {};
  const add = (shape, name, size) => ((found[shape] ??= {})[name] ??= size);
  for (const [name, size] of Object.entries(model.sizes)) {
    const [width, height] = size.split("x").map(Number);
    const shape = width > height ? "landscape" : width < height ? "portrait" : "square";
    add(shape, /^\d+p$/.test(name) ? name : `${Math.min(width, height)}p`, size);
    if (width > height) add("portrait", /^\d+p$/.test(name) ? name : `${height}p`, `${height}x${width}`);
  }
  if (found.square && Object.values(found.square).every((size) => size === Object.values(found.square)[0])) {
    found.square = Object.fromEntries(Object.entries(found.square).slice(0, 1));
  }
  return found;
}

export function hasPicture(form) {
  return Boolean(form.files.image?.length || form.files.video?.length);
}

// Returns the size that a form asks for: "", which leaves it to the server, "832x480", or "480p" in a picture's shape.
export function sizeOf(form, model) {
  if (form.shape === "own") return `${form.values.width}x${form.values.height}`;
  const shapes = shapesOf(model);
  if (hasPicture(form) && (form.shape === "" || form.shape === "picture")) return form.resolution in model.sizes ? form.resolution : "";
  if (form.shape === "" && form.resolution === "") return "";
  const sizes = shapes[form.shape || firstShape(model)] ?? {};
  return sizes[form.resolution] ?? Object.values(sizes)[0] ?? "";
}

export function firstShape(model) {
  const { width, height } = model.defaults;
  return width > height ? "landscape" : width < height ? "portrait" : "square";
}

// Returns how many frames a video of several windows has.
export const lengthOf = ({ frames, windows = 1, overlap = 1 }) => frames * windows - overlap * (windows - 1);

// Returns the settings of the video that a form asks for, to estimate its time by.
export function settingsOf(form, model) {
  const settings = { ...model.defaults };
  for (const [name, value] of Object.entries(form.values)) {
    if (value !== "") settings[name] = typeof settings[name] === "number" ? Number(value) : value;
  }
  const size = sizeOf(form, model);
  const [width, height] = (model.sizes[size] ?? size).split("x").map(Number);
  return width && height ? { ...settings, width, height } : settings;
}

// Returns the names of the fields that differ from the model's own values.
export function changedFields(form, model) {
  return fieldsOf(model)
    .filter((field) => form.values[field.name] !== undefined && form.values[field.name] !== field.default)
    .map((field) => field.name);
}

// Returns the body of a request for a video of this seed: what differs from the model's own settings alone.
export function bodyOf(form, model, seed) {
  const body = new FormData();
  body.set("prompt", form.prompt.trim() ? form.prompt : "");
  if (!form.prompt.trim()) body.set("allow_empty_prompt", "true");
  body.set("model", model.id);
  const size = sizeOf(form, model);
  if (size) body.set("size", size);
  if (seed) body.set("seed", seed);
  const loras = [];
  for (const name of changedFields(form, model)) {
    const value = form.values[name];
    if (name.startsWith("lora ")) loras.push(`${name.slice(5)}:${value}`);
    else if (value !== "" && isUseful(name, form, model)) body.set(name, value);
  }
  if (loras.length) body.set("lora", loras.join());
  for (const name of Object.keys(model.pictures)) for (const file of form.files[name] ?? []) body.append(name, file);
  return body;
}

// Returns the input that a file fits, the first that is free, or null.
export function inputFor(file, form, model) {
  const film = file.type.startsWith("video/") || /\.(mkv|mov|webm|mp4)$/i.test(file.name);
  if (!film && !file.type.startsWith("image/")) return null;
  const names = Object.keys(model.pictures).filter((name) => (film ? CLIPS.includes(name) : name !== "video"));
  const free = names.find((name) => model.pictures[name].several || !form.files[name]?.length);
  return free ?? names[0] ?? (film ? null : Object.keys(model.pictures)[0]) ?? null;
}

export const takesFilms = (name) => CLIPS.includes(name);
