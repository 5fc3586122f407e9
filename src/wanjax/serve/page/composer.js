// SPDX-License-Identifier: Apache-2.0
// The form: prompt, pictures and clips, aspect ratio, length, number, seed, and a drawer with more settings.

import { fetchJson } from "./api.js";
import { estimatedStages, stagesOf, total } from "./estimate.js";
import * as fields from "./fields.js";
import { stateOf, prefersReducedMotion } from "./gallery.js";
import { useStored } from "./storage.js";
import { duration, text } from "./texts.js";
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";

// Icons are drawn as SVG, because not every system has fonts with these symbols.
const ICONS = {
  add: "M12 5v14M5 12h14",
  dice: "M5 4h14a1 1 0 0 1 1 1v14a1 1 0 0 1-1 1H5a1 1 0 0 1-1-1V5a1 1 0 0 1 1-1zM8.5 8.5h.01M15.5 8.5h.01M12 12h.01M8.5 15.5h.01M15.5 15.5h.01",
  locked: "M6 11h12v9H6zM8.5 11V8a3.5 3.5 0 0 1 7 0v3",
  open: "M6 11h12v9H6zM8.5 11V7a3.5 3.5 0 0 1 6.8-1.2",
};

function Icon({ name }) {
  return html`<svg class="icon" viewBox="0 0 24 24" aria-hidden="true"><path d=${ICONS[name]} /></svg>`;
}

const REQUEST_FILES = ".json,.png,.apng,.webp,.gif,.mp4,.mov,.webm,.mkv,.m4v"; // files that the server can read as requests
const WIDE_SCREEN = "(min-width: 62rem)"; // on a wide screen page.css puts the videos next to the form
const classes = (...names) => names.filter(Boolean).join(" ");

// The error message of a field, if there is one.
function FieldError({ name, message }) {
  return message ? html`<p class="wrong" id=${`wrong-${name}`} role="alert">${message}</p>` : null;
}

// The error message of a refused file, with a button to dismiss it.
function RefusedFile({ name, message, dismiss }) {
  return message ? html`<div class="refused"><${FieldError} name=${name} message=${message} />
    <button type="button" class="plain" aria-label=${text("dismiss")} title=${text("dismiss")} onClick=${() => dismiss(name)}>✕</button></div>` : null;
}

// Attributes that mark the control of an invalid field for screen readers.
const errorAttributes = (name, error) => (error ? { "aria-invalid": "true", "aria-errormessage": `wrong-${name}` } : {});

function Chips({ name, label, options, value, choose }) {
  return html`<fieldset class="chips">
    <legend>${label}</legend>
    ${options.map(([key, shown]) => html`<label key=${key} class=${classes("chip", key === value && "on")}>
      <input type="radio" name=${name} value=${key} checked=${key === value} onChange=${() => choose(key)} />${shown}</label>`)}
  </fieldset>`;
}

// A selected picture or clip, with its size and a button to remove it.
function Thumbnail({ file, remove }) {
  const [url, setUrl] = useState(null);
  const [size, setSize] = useState("");
  useEffect(() => {
    const objectUrl = URL.createObjectURL(file);
    setUrl(objectUrl);
    return () => URL.revokeObjectURL(objectUrl);
  }, [file]);
  const onMeasured = ({ target }) => setSize(text("pixels", {
    width: target.naturalWidth || target.videoWidth, height: target.naturalHeight || target.videoHeight,
  }));
  const isClip = file.type.startsWith("video/");
  return html`<span class="thumbnail">
    ${url && (isClip ? html`<video src=${url} muted autoplay loop playsinline onLoadedMetadata=${onMeasured} aria-label=${file.name} />`
      : html`<img src=${url} alt=${file.name} onLoad=${onMeasured} />`)}
    <small>${size}</small>
    <button type="button" class="plain" aria-label=${`${text("remove")}: ${file.name}`} onClick=${remove}>✕</button>
  </span>`;
}

function Input({ name, model, files, isLost, error, refused, add, remove, dismiss }) {
  const schema = model.pictures[name];
  const [isDragOver, setDragOver] = useState(false);
  const accept = fields.acceptsClips(name) ? "image/*,video/*,.mkv" : "image/*";
  const onDrop = (event) => {
    event.preventDefault();
    event.stopPropagation();
    setDragOver(false);
    add(name, [...event.dataTransfer.files]);
  };
  const isFull = files.length > 0 && !schema.several;
  return html`<div class=${classes("input", isDragOver && "over", (error || refused) && "bad")} data-input=${name}
      onDragOver=${(event) => { event.preventDefault(); setDragOver(true); }} onDragLeave=${() => setDragOver(false)} onDrop=${onDrop}>
    <span class="name" id=${`name-${name}`}>${fields.inputLabel(name)}${schema.required ? html` <i>${text("needed")}</i>` : null}</span>
    ${files.map((file, index) => html`<${Thumbnail} key=${`${file.name} ${file.size} ${file.lastModified}`} file=${file} remove=${() => remove(name, index)} />`)}
    <label class=${classes("drop", isFull && "silent")}><${Icon} name="add" /><span>${text("drop")}</span>
      <input id=${`file-${name}`} name=${name} class="silent" type="file" accept=${accept} multiple=${schema.several}
        aria-labelledby=${`name-${name}`} aria-describedby=${`does-${name}`} ...${errorAttributes(name, refused ?? error)}
        onChange=${(event) => { add(name, [...event.target.files]); event.target.value = ""; }} /></label>
    <small id=${`does-${name}`}>${fields.inputHelp(name, model)}</small>
    ${isLost && html`<small class="lost" role="status">${text("lost")}</small>`}
    ${refused ? html`<${RefusedFile} name=${name} message=${refused} dismiss=${dismiss} />` : html`<${FieldError} name=${name} message=${error} />`}
  </div>`;
}

// A control that fills the form from a workflow or a video. It lists what was left out.
function RequestFile({ read, state, dismiss }) {
  const [isDragOver, setDragOver] = useState(false);
  const onDrop = (event) => {
    event.preventDefault();
    event.stopPropagation();
    setDragOver(false);
    read(event.dataTransfer.files[0]);
  };
  return html`<div class=${classes("request", isDragOver && "over")}
      onDragOver=${(event) => { event.preventDefault(); setDragOver(true); }} onDragLeave=${() => setDragOver(false)} onDrop=${onDrop}>
    <label class="drop"><${Icon} name="add" /><span>${text(state.isReading ? "file_reading" : "file")}</span>
      <input id="file-request" class="silent" type="file" accept=${REQUEST_FILES} ...${errorAttributes("request", state.error)}
        onChange=${(event) => { read(event.target.files[0]); event.target.value = ""; }} /></label>
    <div role="status">${state.name && html`<div class="filled"><span>${text("file_filled", { name: state.name })}${state.notes.length > 0 && ` ${text("file_notes")}`}
      ${state.notes.length > 0 && html`<ul>${state.notes.map((note) => html`<li key=${note}>${note}</li>`)}</ul>`}</span>
      <button type="button" class="plain" aria-label=${text("dismiss")} title=${text("dismiss")} onClick=${dismiss}>✕</button></div>`}</div>
    <${RefusedFile} name="request" message=${state.error} dismiss=${dismiss} />
  </div>`;
}

function Setting({ field, form, model, error, set }) {
  const { name, schema, kind, range, choices } = field;
  const value = form.values[name] ?? field.default;
  const changed = form.values[name] !== undefined && form.values[name] !== field.default;
  const onInput = (event) => set(name, event.target.value);
  const id = `field-${name.replaceAll(" ", "-")}`;
  const common = { id, name, "aria-describedby": `${id}-does`, ...errorAttributes(name, error) };
  let control;
  if (kind === "switch") {
    control = html`<select ...${common} value=${value} onChange=${onInput}>
      <option value="true">${text("yes")}</option><option value="false">${text("no")}</option></select>`;
  } else if (kind === "choice") {
    const custom = field.open && !choices.map(String).includes(value);
    control = html`<span class="pair"><select ...${common} value=${custom ? "\0" : value}
        onChange=${(event) => set(name, event.target.value === "\0" ? "" : event.target.value)}>
      ${choices.map((choice) => html`<option key=${choice} value=${String(choice)}>${String(choice)}</option>`)}
      ${field.open && html`<option value=${"\0"}>${text("custom")}</option>`}</select>
      ${custom && html`<input name=${`${name}-own`} aria-label=${fields.labelOf(name)} value=${value} onInput=${onInput} />`}</span>`;
  } else if (kind === "lines") {
    control = html`<textarea ...${common} rows="2" value=${value} onInput=${onInput} />`;
  } else if (kind === "line") {
    control = html`<input ...${common} value=${value} onInput=${onInput} />`;
  } else {
    const [min, max, step] = range ?? [];
    control = html`<span class="pair">
      ${range && html`<input type="range" min=${min} max=${max} step=${step} value=${value} tabindex="-1" aria-hidden="true" onInput=${onInput} />`}
      <input ...${common} type="text" inputmode=${schema.type === "integer" ? "numeric" : "decimal"} value=${value} onInput=${onInput} /></span>`;
  }
  return html`<div class=${classes("setting", changed && "changed", kind === "lines" && "wide")} data-setting=${name}>
    <label for=${id}>${fields.labelOf(name)}${changed && html` <i class="mark">${text("changed")}</i>`}</label>
    ${control}
    <small id=${`${id}-does`}>${fields.helpOf(name, model)}${changed && field.default !== ""
      && html` <span class="own">${text("own_value", { value: field.default })}</span>`}</small>
    <${FieldError} name=${name} message=${error} />
  </div>`;
}

const PRESET_SETTINGS = ["steps", "cache"]; // settings that presets change

// The presets that have an effect on a model.
function presetsOf(model, models) {
  const { steps } = model.defaults;
  const presets = [{ name: "published", values: {} }];
  if (steps >= 10) presets.push({ name: "draft", values: { steps: String(Math.ceil(steps / 2.5)) } });
  if (model.settings.cache?.examples?.includes("auto")) presets.push({ name: "cached", values: { cache: "auto" } });
  if (steps >= 10) presets.push({ name: "fine", values: { steps: String(Math.min(model.limits.steps, Math.round(steps * 1.5))) } });
  for (const other of models) {
    if (other.id !== model.id && other.defaults.steps < 10) presets.push({ name: "few", model: other, values: {} });
  }
  return presets;
}

// The expected time of videos, as text: from videos of this server or, if there are none, from `wanjax plan`.
function timeText(form, model, videos, count = 1) {
  if (fields.hasWrongSettings(form, model)) return null;
  const settings = fields.settingsOf(form, model);
  const measured = stagesOf(model.id, settings, videos);
  const stages = measured ?? estimatedStages(model, settings);
  return stages && text(measured ? "takes_about" : "takes_estimated", { time: duration(total(stages) * count) });
}

function Presets({ form, model, models, videos, apply }) {
  return html`<div class="presets" role="group" aria-label=${text("presets")}>
    ${presetsOf(model, models).map((preset) => {
      const presetModel = preset.model ?? model;
      const presetForm = { ...form, values: { ...fields.omit(form.values, PRESET_SETTINGS), ...preset.values } };
      const { steps } = fields.settingsOf(presetForm, presetModel);
      const time = timeText(presetForm, presetModel, videos);
      const isSelected = !preset.model && PRESET_SETTINGS.every((name) => fields.valueOf(form, model, name)
        === (preset.values[name] ?? String(model.defaults[name] ?? "")));
      return html`<button type="button" key=${preset.name + presetModel.id} class=${classes("preset", isSelected && "on")} aria-pressed=${isSelected}
          data-preset=${preset.name} onClick=${() => apply(preset)}>
        <b>${text(`preset_${preset.name}`) ?? presetModel.id}</b>
        <span>${text(`preset_${preset.name}_does`, { n: presetModel.defaults.steps })}</span>
        <span class="cost">${text("preset_steps", { n: steps })}${time && `, ${time}`}</span>
      </button>`;
    })}
  </div>`;
}

function Length({ form, model, set, change }) {
  const step = model.frames_step;
  const frames = fields.valueOf(form, model, "frames");
  const fps = Number(fields.valueOf(form, model, "fps")) || 1;
  const maxFrames = 1 + step * Math.max(4, Math.round((2 * (model.defaults.frames - 1)) / step));
  const windows = Number(fields.valueOf(form, model, "windows")) || 1;
  const frameCount = fields.lengthOf({ frames: Number(frames), windows, overlap: Number(fields.valueOf(form, model, "overlap")) || 1 });
  const lengthText = text(windows > 1 ? "seconds_windows" : "seconds_frames", { seconds: (frameCount / fps).toFixed(1), frames, windows });
  return html`<div class="length">
    <label for="length">${text("length")}</label>
    <input id="length" type="range" min="1" max=${maxFrames} step=${step} value=${frames} aria-valuetext=${lengthText}
      onInput=${(event) => set("frames", event.target.value)} />
    <output for="length">${lengthText}</output>
    ${windows > 1 && html`<button type="button" class="chip on windows" aria-label=${`${text("remove")}: ${text("parts", { n: windows })}`}
      onClick=${() => change(fields.withOneWindow(form))}>${text("parts", { n: windows })} ✕</button>`}
  </div>`;
}

function Shape({ form, model, change }) {
  const shapes = fields.shapesOf(model);
  const hasPicture = fields.hasPicture(form);
  const options = ["landscape", "portrait", "square"].filter((shape) => shapes[shape]).map((shape) => [shape, text(`shape_${shape}`)]);
  if (hasPicture) options.unshift(["picture", text("shape_picture")]);
  options.push(["own", text("shape_own")]);
  const shape = form.shape || (hasPicture ? "picture" : fields.firstShape(model));
  const sizes = shapes[shape === "picture" ? fields.firstShape(model) : shape] ?? {};
  const { width, height } = model.defaults;
  const defaultName = Object.entries(sizes).find(([, size]) => size === `${width}x${height}` || size === `${height}x${width}`)?.[0];
  const sizeOptions = Object.entries(sizes).map(([name, size]) => [name, shape === "picture" ? name : `${name} · ${size.replace("x", " × ")}`]);
  return html`<${Chips} name="shape" label=${text("shape")} options=${options} value=${shape} choose=${(key) => change({ shape: key })} />
    ${sizeOptions.length > 1 && html`<${Chips} name="resolution" label=${text("resolution")} options=${sizeOptions}
      value=${form.resolution in sizes ? form.resolution : defaultName ?? sizeOptions[0][0]} choose=${(key) => change({ resolution: key })} />`}`;
}

function Seed({ form, errors, change, maxCount, count }) {
  const chosenCount = fields.countOf(form, maxCount);
  const isCountOfSeeds = count !== chosenCount;
  const draw = () => change({ seed: String(crypto.getRandomValues(new Uint32Array(1))[0]), locked: true });
  return html`<div class="numbers">
    <div><label for="count">${text("count")}</label>
      <span class="stepper"><button type="button" aria-label=${text("fewer")} disabled=${chosenCount <= 1 || isCountOfSeeds} onClick=${() => change({ count: chosenCount - 1 })}>−</button>
      <input id="count" name="count" inputmode="numeric" value=${isCountOfSeeds ? count : form.count} readonly=${isCountOfSeeds}
        ...${errorAttributes("count", errors.count)} onInput=${(event) => change({ count: event.target.value })} />
      <button type="button" aria-label=${text("more")} disabled=${chosenCount >= maxCount || isCountOfSeeds} onClick=${() => change({ count: chosenCount + 1 })}>+</button></span>
      ${isCountOfSeeds && html`<small>${text("count_seeds")}</small>`}
      <${FieldError} name="count" message=${errors.count} />
    </div>
    <div class="seed"><label for="seed">${text("seed")}</label>
      <span class="stepper"><input id="seed" name="seed" placeholder=${text("seed_drawn")} value=${form.seed} aria-describedby="does-seed"
        ...${errorAttributes("seed", errors.seed)} onInput=${(event) => change({ seed: event.target.value, locked: event.target.value !== "" })} />
      <button type="button" title=${text("dice")} aria-label=${text("dice")} onClick=${draw}><${Icon} name="dice" /> ${text("dice_short")}</button>
      <button type="button" class="lock" title=${text(form.locked ? "seed_unlock" : "seed_lock")} aria-pressed=${form.locked}
        aria-label=${text("seed_lock")} onClick=${() => (form.locked ? change({ seed: "", locked: false }) : draw())}><${Icon} name=${form.locked ? "locked" : "open"} /> ${text("lock")}</button></span>
      <small id="does-seed">${text("seed_help")}</small>
      <${FieldError} name="seed" message=${errors.seed} />
    </div>
  </div>`;
}

// The videos of the last request, with a button that scrolls to them.
function RequestedVideos({ ids, videos, open }) {
  const requestedVideos = ids.map((id) => videos.byId.get(id)).filter(Boolean);
  if (!requestedVideos.length) return null;
  const [activeVideo] = videos.queue.filter((video) => ids.includes(video.id));
  const show = () => (activeVideo ? document.getElementById("queue-title").scrollIntoView() : open(requestedVideos[0].id));
  return html`<p class="asked"><span>${activeVideo ? text("being_made", { state: stateOf(activeVideo) }) : stateOf(requestedVideos[0])}</span>
    <button type="button" class="see" onClick=${show}>${text("see")}</button></p>`;
}

export function Composer({ form, setForm, models, videos, connection, announce, needToken, open: openVideo }) {
  const model = models.find((model) => model.id === form?.model) ?? models[0];
  const [errors, setErrors] = useState({});
  const [refusedFiles, setRefusedFiles] = useState({}); // error messages by input, "" for a file that no input accepts
  const [message, setMessage] = useState("");
  const [isSending, setSending] = useState(false);
  const [asksForPrompt, setAsksForPrompt] = useState(false);
  const [open, setOpen] = useStored("drawer", false);
  const [expert, setExpert] = useStored("expert", false); // the expert settings in the drawer
  const [isDragOver, setDragOver] = useState(false);
  const [requestedIds, setRequestedIds] = useState([]);
  const [requestFile, setRequestFile] = useState({}); // the file that filled the form, with its notes, or its error
  const prompt = useRef(null);
  const root = useRef(null);
  const scrollTarget = useRef(null); // the id of the video to scroll to once it is listed

  useEffect(() => {
    const item = scrollTarget.current && document.querySelector(`.right [data-id="${scrollTarget.current}"]`);
    if (!item) return;
    scrollTarget.current = null;
    if (matchMedia(WIDE_SCREEN).matches) item.scrollIntoView({ block: "nearest", behavior: prefersReducedMotion() ? "auto" : "smooth" });
  });

  useEffect(() => {
    if (connection === "state_ready") setMessage(""); // the server may answer again
  }, [connection]);
  useEffect(() => setRefusedFiles({}), [form?.model, form?.from]); // another form has other inputs

  const change = (changes) => {
    setForm((form) => ({ ...form, ...changes }));
    setErrors({});
    setMessage("");
  };
  const set = (name, value) => change({ values: { ...form.values, [name]: value } });

  // Fills the form with the request in a file. `refusal` is the message for a picture or clip that no input takes.
  const readRequest = async (file, refusal = null) => {
    if (!file || requestFile.isReading) return;
    setRequestFile({ isReading: true });
    const body = new FormData();
    body.set("file", file);
    try {
      const request = await fetchJson("v1/requests", { method: "POST", body });
      change(fields.formOfRequest(request.fields, form, models));
      setRequestFile({ name: file.name, notes: request.notes });
    } catch (error) {
      if (error.status === 401) needToken();
      setRequestFile(refusal ? {} : { error: error.message });
      if (refusal) setRefusedFiles((before) => ({ ...before, "": refusal }));
    }
  };
  const dismissRequest = () => {
    setRequestFile({});
    root.current.querySelector("#file-request").focus();
  };

  const add = (name, files) => {
    if (name === null && files.length === 1 && fields.isRequestFile(files[0], form, model)) {
      return readRequest(files[0], fields.isMedia(files[0]) ? fields.unusableFile(files[0], model) : null);
    }
    const acceptedFiles = [];
    const refused = {};
    for (const file of files) {
      const input = name ?? fields.inputFor(file, form, model);
      if (input === null) refused[""] = fields.unusableFile(file, model);
      else if (file.type && !/^(image|video)\//.test(file.type)) {
        refused[input] = text(fields.acceptsClips(input) ? "wrong_file" : "wrong_kind", { name: file.name, label: fields.inputLabel(input) });
      } else if (file.type.startsWith("video/") && !fields.acceptsClips(input)) {
        refused[input] = text("wrong_kind", { name: file.name, label: fields.inputLabel(input) });
      } else acceptedFiles.push([input, file]);
    }
    if (!files.length) return; // nothing was chosen
    const answeredInputs = ["", name, ...acceptedFiles.map(([input]) => input)];
    setRefusedFiles((before) => ({ ...fields.omit(before, answeredInputs), ...refused }));
    if (!acceptedFiles.length) return;
    const allFiles = { ...form.files };
    for (const [input, file] of acceptedFiles) allFiles[input] = model.pictures[input].several ? [...(allFiles[input] ?? []), file] : [file];
    change({ files: allFiles, lost: form.lost.filter((input) => !allFiles[input]?.length) });
  };
  const remove = (name, index) => change({ files: { ...form.files, [name]: form.files[name].filter((_, i) => i !== index) } });

  const dismissRefused = (name) => {
    setRefusedFiles((before) => fields.omit(before, [name]));
    root.current.querySelector(`#file-${name || Object.keys(model.pictures)[0]}`)?.focus();
  };

  // Shows errors at their fields, and focuses the first wrong field: `first`, or that of the first error.
  const focusField = (errors, first = Object.keys(errors)[0]) => {
    setErrors(errors);
    const field = form && fields.fieldsOf(model).find((field) => field.name === first);
    if (field) setOpen(true);
    if (field?.group === "expert") setExpert(true);
    setTimeout(() => {
      const input = root.current.querySelector(`[aria-invalid=true]`) ?? root.current.querySelector(`#file-${first}`);
      input?.focus();
      input?.scrollIntoView?.({ block: "nearest" });
    });
  };

  const make = async (event, allowed = false) => {
    event?.preventDefault();
    if (isSending) return;
    if (!form) return setMessage(text("connecting_first"));
    setMessage("");
    if (!form.prompt.trim() && !allowed) {
      setAsksForPrompt(true);
      return setTimeout(() => root.current.querySelector(".question button")?.focus());
    }
    setAsksForPrompt(false);
    const errors = fields.formErrors(form, model);
    const [refusedInput] = Object.keys(fields.omit(refusedFiles, [""]));
    if (refusedInput || Object.keys(errors).length) return focusField(errors, refusedInput);
    if (refusedFiles[""]) return root.current.querySelector(".go .refused button").focus();
    setSending(true);
    const ids = [];
    try {
      for (const seed of fields.seedsOf(form, model)) {
        const video = await fetchJson("v1/videos", { method: "POST", body: fields.bodyOf(form, model, seed) });
        videos.update(video);
        ids.push(video.id);
      }
      setForm((now) => (now.from === form.from ? fields.formAfterRequest(now) : now));
    } catch (error) {
      if (error.status === 401) needToken();
      const names = [...fields.fieldsOf(model).map((field) => field.name), ...Object.keys(model.pictures), "seed", "width", "height"];
      const field = names.find((name) => name === error.param || (error.param === "lora" && name.startsWith("lora ")));
      if (error.param === "prompt") prompt.current.focus();
      if (field) focusField({ [field]: field in model.pictures ? error.message.replace(new RegExp(`^${field}\\b`), fields.inputLabel(field)) : error.message });
      else setMessage(error.message);
    } finally {
      setSending(false);
      if (ids.length) {
        setRequestedIds(ids);
        [scrollTarget.current] = ids;
        announce(text("announce_queued", { n: ids.length }));
      }
    }
  };

  const onPaste = (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!form || !files.length) return;
    event.preventDefault();
    add(null, files);
  };
  const onDrop = (event) => {
    event.preventDefault();
    setDragOver(false);
    if (form) add(null, [...event.dataTransfer.files]);
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) make(event);
  };

  // Toggles the drawer, and scrolls to it when it opens.
  const toggleDrawer = (event) => {
    const { currentTarget: summary } = event;
    event.preventDefault();
    setOpen(!open);
    if (!open) setTimeout(() => summary.scrollIntoView());
  };

  const count = form && !errors.seed ? countVideos(form, model) : 1;
  const time = form && timeText(form, model, [...videos.byId.values()], count);
  const changed = form ? fields.changedFields(form, model) : [];
  return html`<form class=${classes("composer", isDragOver && "over")} ref=${root} novalidate onSubmit=${make} onPaste=${onPaste} onKeyDown=${onKeyDown}
      onDragOver=${(event) => { event.preventDefault(); setDragOver(true); }} onDragLeave=${() => setDragOver(false)} onDrop=${onDrop}>
    <label class="big" for="prompt">${text("prompt")}</label>
    <textarea id="prompt" name="prompt" ref=${prompt} rows="3" placeholder=${text("prompt_example")} title=${text("prompt_key")}
      maxlength=${model?.limits.prompt} value=${form?.prompt} onInput=${(event) => { setAsksForPrompt(false); change({ prompt: event.target.value }); }} />
    ${form && html`
      ${models.length > 1 && html`<div class="model"><label for="model">${text("model")}</label>
        <select id="model" name="model" value=${model.id} onChange=${(event) => change({ model: event.target.value, values: {}, shape: "", resolution: "", lost: [] })}>
          ${models.map(({ id }) => html`<option key=${id} value=${id}>${id}</option>`)}</select></div>`}
      ${Object.keys(model.pictures).length > 0 && html`<div class="inputs">
        ${Object.keys(model.pictures).map((name) => html`<${Input} key=${name} name=${name} model=${model}
          files=${form.files[name] ?? []} isLost=${form.lost.includes(name)} error=${errors[name]} refused=${refusedFiles[name]}
          add=${add} remove=${remove} dismiss=${dismissRefused} />`)}</div>`}
      <${RequestFile} read=${readRequest} state=${requestFile} dismiss=${dismissRequest} />
      <${Shape} form=${form} model=${model} change=${change} />
      ${form.shape === "own" && html`<div class="numbers size">${["width", "height"].map((side) => html`<div key=${side}>
        <label for=${`field-${side}`}>${fields.labelOf(side)}</label>
        <input id=${`field-${side}`} name=${side} inputmode="numeric" value=${form.values[side] ?? ""} ...${errorAttributes(side, errors[side])}
          onInput=${(event) => set(side, event.target.value)} /><small>${fields.helpOf(side, model)}</small><${FieldError} name=${side} message=${errors[side]} /></div>`)}</div>`}
      <${Length} form=${form} model=${model} set=${set} change=${change} />
      <${Seed} form=${form} errors=${errors} change=${change} maxCount=${model.limits.queue} count=${count} />
      <details class="drawer" open=${open} onToggle=${(event) => setOpen(event.target.open)}>
        <summary onClick=${toggleDrawer}>${changed.length ? text("drawer_changed", { n: changed.length }) : text("drawer")}</summary>
        ${open && html`<button type="button" class="reset" disabled=${!changed.length} onClick=${() => change({ values: {} })}>${text("reset")}</button>
        <${Presets} form=${form} model=${model} models=${models} videos=${[...videos.byId.values()]} apply=${(preset) =>
          change({ model: (preset.model ?? model).id, values: { ...fields.omit(form.values, PRESET_SETTINGS), ...preset.values } })} />
        ${Object.keys(fields.GROUPS).map((group) => {
          const groupFields = fields.fieldsOf(model).filter((field) => field.group === group && fields.isUseful(field.name, form, model));
          const settings = groupFields.map((field) => html`<${Setting} key=${field.name} field=${field} form=${form} model=${model} error=${errors[field.name]} set=${set} />`);
          if (!groupFields.length) return null;
          return group === "expert" ? html`<details key=${group} class="expert" open=${expert} onToggle=${(event) => setExpert(event.target.open)}>
            <summary>${text(`group_${group}`)}</summary><div class="group">${settings}</div></details>`
            : html`<fieldset key=${group} class="group"><legend>${text(`group_${group}`)}</legend>${settings}</fieldset>`;
        })}
`}
      </details>`}
    ${asksForPrompt && html`<div class="question" role="alertdialog" aria-label=${text("empty_prompt")}><p>${text("empty_prompt")}</p>
      <button type="button" onClick=${() => { setAsksForPrompt(false); prompt.current.focus(); }}>${text("empty_no")}</button>
      <button type="button" onClick=${() => make(null, true)}>${text("empty_yes")}</button></div>`}
    <div class="go">
      <div class="source" role="status">${form?.from && html`${form.from.picture && html`<img src=${form.from.picture} alt="" />`}
        <span>${text(`from_${form.from.act}`)}</span>
        <button type="button" class="plain" aria-label=${text("from_none")} title=${text("from_none")}
          onClick=${() => change({ ...fields.emptyForm(model), prompt: form.prompt })}>✕</button>`}</div>
      <button class="main" id="make" aria-busy=${isSending}>${isSending ? text("making") : text(buttonText(form, model, count), { n: count })}</button>
      ${time && html`<span class="cost">${time}</span>`}
      <${RequestedVideos} ids=${form?.from ? [] : requestedIds} videos=${videos} open=${openVideo} />
      <${RefusedFile} name="" message=${refusedFiles[""]} dismiss=${dismissRefused} />
      <p class="wrong" id="message" role="alert">${message}</p>
    </div>
  </form>`;
}

function countVideos(form, model) {
  try {
    return fields.seedsOf(form, model).length;
  } catch {
    return fields.countOf(form, model.limits.queue);
  }
}

function buttonText(form, model, count) {
  if (count > 1) return form.from?.act === "vary" ? "make_variations" : "make_many";
  return form?.from?.act === "extend" && Number(fields.valueOf(form, model, "windows")) > 1 ? "make_longer" : "make_one";
}
