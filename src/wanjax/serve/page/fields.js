// SPDX-License-Identifier: Apache-2.0
// The form: its fields for each model, the checks of their values, and the request that the form sends.

import { RequestError } from "./api.js";
import { text } from "./texts.js";

const LARGEST_SEED = 2n ** 64n - 1n;
const SEEDS = /^\s*\d+(\.\.\d+)?(\s*,\s*\d+(\.\.\d+)?)*\s*$/;
const CLIP_INPUTS = ["video", "face", "background", "mask"]; // inputs that may be video files

// The settings of each group in the drawer, in order. Settings that are not listed come last.
export const GROUPS = {
  look: ["steps", "guidance_scale", "guidance_scale_2", "negative_prompt", "strength"],
  speed: ["cache"],
  shape: ["width", "height", "resize", "outpaint", "frames", "fps", "windows", "then", "overlap", "match"],
  loras: [],
  expert: ["scheduler", "guidance_rule", "dynamic_guidance", "flow_shift", "boundary", "boundary_step", "follow", "sigmas", "rng"],
};
const SEPARATE_FIELDS = ["prompt", "seed", "width", "height"]; // fields that are shown outside the drawer

// Slider ranges: minimum, maximum and step.
const SLIDER_RANGES = {
  steps: ({ steps }) => [1, Math.max(8, 2 * steps), 1],
  guidance_scale: () => [1, 12, 0.5],
  guidance_scale_2: () => [1, 12, 0.5],
  strength: () => [0.05, 1, 0.05],
  flow_shift: () => [1, 20, 0.5],
  boundary: () => [0, 1, 0.025],
  lora: () => [0, 1.5, 0.05],
};

export const spacedName = (name) => name.replaceAll("_", " ");

export function labelOf(name) {
  const lora = name.startsWith("lora ") ? name.slice(5) : null;
  return (lora ? text("label_lora", { name: lora }) : text(`label_${name}`)) ?? spacedName(name);
}

export function helpOf(name, model) {
  const values = { grid: model.grid, step: model.frames_step, second: 1 + model.frames_step, third: 1 + 2 * model.frames_step };
  return text(`does_${name.startsWith("lora ") ? "lora" : name}`, values) ?? model.settings[name]?.description ?? "";
}

// The fields of a model's drawer, each with its schema, kind of control and group.
export function fieldsOf(model) {
  const schemas = { ...model.settings };
  if (model.schedulers.length > 1) {
    schemas.scheduler = { type: "string", default: model.schedulers[0], examples: model.schedulers };
  }
  for (const { name, strength } of model.loras) schemas[`lora ${name}`] = { type: "number", default: strength };
  const groupOf = (name) =>
    name.startsWith("lora ") ? "loras" : (Object.keys(GROUPS).find((group) => GROUPS[group].includes(name)) ?? "expert");
  const fields = Object.entries(schemas)
    .filter(([name]) => !SEPARATE_FIELDS.includes(name))
    .map(([name, schema]) => {
      const range = SLIDER_RANGES[name.split(" ")[0]]?.(model.defaults);
      const choices = schema.enum ?? schema.examples;
      const kind = schema.type === "boolean" ? "switch" : choices ? "choice" : schema.several ? "lines"
        : name === "negative_prompt" ? "line" : schema.type === "string" ? "line" : range ? "range" : "number";
      return { name, schema, kind, range, choices, open: !schema.enum, default: String(schema.default ?? ""), group: groupOf(name) };
    });
  const order = Object.values(GROUPS).flat();
  return fields.sort((a, b) => (order.indexOf(a.name) + 1 || 99) - (order.indexOf(b.name) + 1 || 99));
}

// Creates an empty form for a model.
export function emptyForm(model) {
  return { model: model.id, prompt: "", values: {}, files: {}, shape: "", resolution: "", count: 1, seed: "", locked: false, from: null, lost: [] };
}

// The part of a form that is stored for a reload. Of files, only the names of their inputs are stored.
export function storedForm(form) {
  const lost = Object.keys(form.files).filter((name) => form.files[name].length);
  return { ...form, files: {}, from: lost.length ? null : form.from, lost: lost.length ? lost : form.lost };
}

// A form with the fields of a request that the server has read from a file. Chosen pictures stay if the model takes them.
export function formOfRequest(request, form, models) {
  const model = models.find((model) => model.id === request.model) ?? models[0];
  const { prompt = "", seed = "", lora = {}, width, height, ...settings } = omit(request, ["model"]);
  const values = Object.fromEntries(Object.entries(settings).map(([name, value]) => [name, [value].flat().join("\n")]));
  for (const [name, strength] of Object.entries(lora)) values[`lora ${name}`] = String(strength);
  const sides = { width: width ?? model.defaults.width, height: height ?? model.defaults.height };
  const isDefaultSize = sides.width === model.defaults.width && sides.height === model.defaults.height;
  if (!isDefaultSize) Object.assign(values, { width: String(sides.width), height: String(sides.height) });
  const files = Object.fromEntries(Object.entries(form.files).filter(([name]) => name in model.pictures));
  return { ...emptyForm(model), prompt, values, files, shape: isDefaultSize ? "" : "own", seed: String(seed), locked: seed !== "" };
}

// Restores a stored form, without fields that these models lack.
export function restoredForm(stored, models) {
  const model = models.find((model) => model.id === stored?.model);
  const prompt = typeof stored?.prompt === "string" ? stored.prompt : "";
  if (!model) return { ...emptyForm(models[0]), prompt };
  const names = ["width", "height", ...fieldsOf(model).map((field) => field.name)];
  const values = Object.fromEntries(Object.entries(stored.values ?? {}).filter(([name, value]) => names.includes(name) && typeof value === "string"));
  return { ...emptyForm(model), ...stored, prompt, values, files: {} };
}

const WINDOW_SETTINGS = ["windows", "then", "overlap", "match"];
export const omit = (values, names) => Object.fromEntries(Object.entries(values).filter(([name]) => !names.includes(name)));
export const withOneWindow = (form) => ({ ...form, values: omit(form.values, WINDOW_SETTINGS) });

// After a request: resets the seed and the number of parts if an action ("variations", "extend") had set them.
export function formAfterRequest(form) {
  const { act, seed } = form.from ?? {};
  const baseForm = act === "extend" ? withOneWindow(form) : form;
  const seedFields = ["vary", "extend"].includes(act) && form.seed === seed ? { seed: "", locked: false, count: 1 } : {};
  return { ...baseForm, ...seedFields, from: null, lost: [] };
}

export function valueOf(form, model, name) {
  return form.values[name] ?? String(model.defaults[name] ?? model.settings[name]?.default ?? "");
}

// Returns whether a field has an effect, given the values of the other fields.
export function isUseful(name, form, model) {
  const number = (name) => Number(valueOf(form, model, name) || 0);
  const hasFiles = Object.values(form.files).some((files) => files.length);
  switch (name) {
    case "negative_prompt":
      return valueOf(form, model, "guidance_rule").startsWith("nag")
        || Math.max(number("guidance_scale"), number("guidance_scale_2")) > 1;
    case "strength": return Boolean(form.files.video?.length);
    case "overlap":
    case "match":
    case "then": return number("windows") > 1;
    case "boundary": return number("boundary_step") === 0;
    case "sigmas": return !model.settings.follow || valueOf(form, model, "sigmas").startsWith("comfy")
      || valueOf(form, model, "follow") === String(model.settings.follow.default);
    case "resize": return hasFiles;
    case "outpaint": return Boolean(form.files.video?.length);
    case "width":
    case "height": return form.shape === "own";
    default: return true;
  }
}

// Checks a number, and returns an error message or null. Values must be `from` plus a multiple of `step`.
function numberError(label, value, schema, step = 1, from = null) {
  const number = Number(value);
  const message = (key, values = {}) => text(`wrong_${key}`, { label, value, ...values });
  if (value.trim() === "" || !Number.isFinite(number)) return message("number");
  if (schema.type === "integer" && !Number.isInteger(number)) return message("whole");
  const minimum = from ?? schema.minimum;
  if (minimum !== undefined && number < minimum) return message("least", { bound: minimum });
  if (schema.exclusiveMinimum !== undefined && number <= schema.exclusiveMinimum) return message("above", { bound: schema.exclusiveMinimum });
  if (schema.maximum !== undefined && number > schema.maximum) return message("most", { bound: schema.maximum });
  const remainder = (number - (from ?? 0)) % step;
  if (step > 1 && remainder) return message("step", { below: number - remainder, above: number - remainder + step });
  return null;
}

// The largest number of frames that the server allows at the size of a form. A picture or several windows are checked by the server.
function maxFrames(form, model, maximum) {
  const { width, height, windows = 1 } = settingsOf(form, model);
  if (hasPicture(form) || windows > 1 || !(width * height > 0)) return maximum;
  const step = model.frames_step;
  const frames = Math.floor((model.limits.pixels / (width * height) - 1) / step) * step + 1;
  return Math.min(Math.max(frames, 1), maximum ?? Infinity);
}

// Checks a form, and returns {field: message} in the order of the page.
export function formErrors(form, model) {
  const errors = {};
  for (const [name, schema] of Object.entries(model.pictures)) {
    if (schema.required && !form.files[name]?.length) errors[name] = text("wrong_missing", { label: inputLabel(name) });
  }
  if (form.shape === "own") {
    for (const side of ["width", "height"]) {
      const value = form.values[side] ?? "";
      const message = value === "" ? text("wrong_missing", { label: labelOf(side) })
        : numberError(labelOf(side), value, model.settings[side], model.grid, model.grid);
      if (message) errors[side] = message;
    }
  }
  const countSchema = { type: "integer", minimum: 1, maximum: model.limits.queue };
  const countError = numberError(text("count"), String(form.count), countSchema);
  if (countError) errors.count = countError;
  try {
    seedsOf(form, model);
  } catch (error) {
    errors.seed = error.message;
  }
  for (const { name, schema, kind } of fieldsOf(model)) {
    const value = form.values[name];
    if (value === undefined || !["number", "range"].includes(kind) || !isUseful(name, form, model)) continue;
    const step = name === "frames" ? [model.frames_step, 1] : [];
    const bounds = name === "frames" ? { ...schema, maximum: maxFrames(form, model, schema.maximum) } : schema;
    const message = numberError(labelOf(name), value, bounds, ...step);
    if (message) errors[name] = message;
  }
  return errors;
}

// Returns whether a setting is invalid, so that no time can be estimated. A missing picture does not matter.
export function hasWrongSettings(form, model) {
  return Object.keys(formErrors(form, model)).some((name) => !(name in model.pictures));
}

export function inputLabel(name) {
  return text(`input_${name}`) ?? spacedName(name);
}

// The help text of a picture or clip. Some models start from a clip, and other models follow its motion.
export function inputHelp(name, model) {
  const key = name === "video" && "strength" in model.settings ? "does_video_begun" : `does_${name}`;
  return text(key) ?? model.pictures[name].description;
}

// The number of videos, or 1 if the number is invalid. It is a text once the user has typed it.
export function countOf({ count }, maxCount) {
  const number = Number(count);
  return Number.isInteger(number) && number >= 1 && number <= maxCount ? number : 1;
}

// Parses the seeds of a form. Ranges are counted before they are expanded, because a range may be huge. "" means a random seed.
export function seedsOf(form, model) {
  const seedError = (key, values) => new RequestError(null, text(`wrong_${key}`, values), "seed");
  const value = form.seed.trim();
  const maxCount = model.limits.queue;
  const count = countOf(form, maxCount);
  if (!value) return Array(count).fill("");
  if (!SEEDS.test(value)) throw seedError("seed", { value });
  const ranges = value.split(",").map((part) => {
    const [first, last = first] = part.split("..").map((number) => BigInt(number.trim()));
    if (last < first) throw seedError("range", { first, last });
    return [first, last];
  });
  if (ranges.length === 1 && ranges[0][0] === ranges[0][1]) ranges[0][1] += BigInt(count) - 1n;
  const tooLarge = ranges.map(([, last]) => last).find((last) => last > LARGEST_SEED);
  if (tooLarge) throw seedError("large", { value: tooLarge, most: LARGEST_SEED });
  const seedCount = ranges.reduce((sum, [first, last]) => sum + last - first + 1n, 0n);
  if (seedCount > maxCount) throw seedError("many", { n: seedCount, most: maxCount });
  const expandRange = ([first, last]) => Array.from({ length: Number(last - first) + 1 }, (_, i) => String(first + BigInt(i)));
  return [...new Set(ranges.flatMap(expandRange))];
}

// The aspect ratios of a model, with sizes by resolution, for example {landscape: {"480p": "832x480"}}.
export function shapesOf(model) {
  const shapes = {};
  const add = (shape, name, size) => ((shapes[shape] ??= {})[name] ??= size);
  for (const [name, size] of Object.entries(model.sizes)) {
    const [width, height] = size.split("x").map(Number);
    const shape = width > height ? "landscape" : width < height ? "portrait" : "square";
    add(shape, /^\d+p$/.test(name) ? name : `${Math.min(width, height)}p`, size);
    if (width > height) add("portrait", /^\d+p$/.test(name) ? name : `${height}p`, `${height}x${width}`);
  }
  if (shapes.square && Object.values(shapes.square).every((size) => size === Object.values(shapes.square)[0])) {
    shapes.square = Object.fromEntries(Object.entries(shapes.square).slice(0, 1));
  }
  return shapes;
}

export function hasPicture(form) {
  return Boolean(form.files.image?.length || form.files.video?.length);
}

// The size of a request: "" for the default, "832x480", or "480p" with the aspect ratio of a picture.
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

// The number of frames of a video with several windows.
export const lengthOf = ({ frames, windows = 1, overlap = 1 }) => frames * windows - overlap * (windows - 1);

// The settings of the requested video, to estimate its time.
export function settingsOf(form, model) {
  const settings = { ...model.defaults };
  for (const [name, value] of Object.entries(form.values)) {
    if (value !== "") settings[name] = typeof settings[name] === "number" ? Number(value) : value;
  }
  const size = sizeOf(form, model);
  const [width, height] = (model.sizes[size] ?? size).split("x").map(Number);
  return width && height ? { ...settings, width, height } : settings;
}

// The names of the fields that differ from the model's defaults.
export function changedFields(form, model) {
  return fieldsOf(model)
    .filter((field) => form.values[field.name] !== undefined && form.values[field.name] !== field.default)
    .map((field) => field.name);
}

// The body of a request with this seed. It contains only the settings that differ from the model's defaults.
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

const isClipFile = (file) => file.type.startsWith("video/") || /\.(mkv|mov|webm|mp4)$/i.test(file.name);

// Returns the reason why no input of the model accepts a file.
export function unusableFile(file, model) {
  const names = Object.keys(model.pictures);
  const values = { name: file.name, model: model.id };
  if (!names.length) return text("wrong_no_inputs", values);
  if (names.some(acceptsClips)) return text("wrong_file", values);
  return text(isClipFile(file) ? "wrong_no_clips" : "wrong_picture", values);
}

export const isMedia = (file) => isClipFile(file) || file.type.startsWith("image/");

// Whether a dropped file is read as a request: a workflow, or a picture or clip that no input accepts.
export const isRequestFile = (file, form, model) => /\.json$/i.test(file.name) || (isMedia(file) && inputFor(file, form, model) === null);

// The first free input that accepts a file, or null.
export function inputFor(file, form, model) {
  const isClip = isClipFile(file);
  if (!isClip && !file.type.startsWith("image/")) return null;
  const names = Object.keys(model.pictures).filter((name) => (isClip ? CLIP_INPUTS.includes(name) : name !== "video"));
  const freeInput = names.find((name) => model.pictures[name].several || !form.files[name]?.length);
  return freeInput ?? names[0] ?? (isClip ? null : Object.keys(model.pictures)[0]) ?? null;
}

export const acceptsClips = (name) => CLIP_INPUTS.includes(name);
