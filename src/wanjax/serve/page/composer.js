// SPDX-License-Identifier: Apache-2.0
// What to make: the prompt, pictures and clips, shape, length, number and seed, and a drawer for all else.

import { ask } from "./api.js";
import { estimatedStages, stagesOf, total } from "./estimate.js";
import * as fields from "./fields.js";
import { stateOf, still } from "./gallery.js";
import { duration, text } from "./texts.js";
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";

// Drawn here, since not every system has such letters.
const ICONS = {
  add: "M12 5v14M5 12h14",
  dice: "M5 4h14a1 1 0 0 1 1 1v14a1 1 0 0 1-1 1H5a1 1 0 0 1-1-1V5a1 1 0 0 1 1-1zM8.5 8.5h.01M15.5 8.5h.01M12 12h.01M8.5 15.5h.01M15.5 15.5h.01",
  locked: "M6 11h12v9H6zM8.5 11V8a3.5 3.5 0 0 1 7 0v3",
  open: "M6 11h12v9H6zM8.5 11V7a3.5 3.5 0 0 1 6.8-1.2",
};

function Icon({ name }) {
  return html`<svg class="icon" viewBox="0 0 24 24" aria-hidden="true"><path d=${ICONS[name]} /></svg>`;
}

const BESIDE = "(min-width: 62rem)"; // where the videos are beside the form, as in page.css
const classes = (...names) => names.filter(Boolean).join(" ");

// A sentence that belongs to a field, in place of its help.
function Wrong({ of, message }) {
  return message ? html`<p class="wrong" id=${`wrong-${of}`} role="alert">${message}</p>` : null;
}

// What marks the control of a field in which something is wrong.
const marks = (name, wrong) => (wrong ? { "aria-invalid": "true", "aria-errormessage": `wrong-${name}` } : {});

function Chips({ name, label, options, value, choose }) {
  return html`<fieldset class="chips">
    <legend>${label}</legend>
    ${options.map(([key, shown]) => html`<label key=${key} class=${classes("chip", key === value && "on")}>
      <input type="radio" name=${name} value=${key} checked=${key === value} onChange=${() => choose(key)} />${shown}</label>`)}
  </fieldset>`;
}

// A chosen picture or clip: what it shows, its size, and a way to remove it.
function Thumbnail({ file, remove }) {
  const [url, setUrl] = useState(null);
  const [size, setSize] = useState("");
  useEffect(() => {
    const made = URL.createObjectURL(file);
    setUrl(made);
    return () => URL.revokeObjectURL(made);
  }, [file]);
  const onMeasured = ({ target }) => setSize(text("pixels", {
    width: target.naturalWidth || target.videoWidth, height: target.naturalHeight || target.videoHeight,
  }));
  const film = file.type.startsWith("video/");
  return html`<span class="thumbnail">
    ${url && (film ? html`<video src=${url} muted autoplay loop playsinline onLoadedMetadata=${onMeasured} aria-label=${file.name} />`
      : html`<img src=${url} alt=${file.name} onLoad=${onMeasured} />`)}
    <small>${size}</small>
    <button type="button" class="plain" aria-label=${`${text("remove")}: ${file.name}`} onClick=${remove}>✕</button>
  </span>`;
}

function Input({ name, model, files, wrong, add, remove }) {
  const known = model.pictures[name];
  const [over, setOver] = useState(false);
  const accept = fields.takesFilms(name) ? "image/*,video/*,.mkv" : "image/*";
  const dropped = (event) => {
    event.preventDefault();
    event.stopPropagation();
    setOver(false);
    add(name, [...event.dataTransfer.files]);
  };
  const full = files.length > 0 && !known.several;
  return html`<div class=${classes("input", over && "over", wrong && "bad")} data-input=${name}
      onDragOver=${(event) => { event.preventDefault(); setOver(true); }} onDragLeave=${() => setOver(false)} onDrop=${dropped}>
    <span class="name" id=${`name-${name}`}>${fields.inputLabel(name)}${known.required ? html` <i>${text("needed")}</i>` : null}</span>
    ${files.map((file, index) => html`<${Thumbnail} key=${`${file.name} ${file.size} ${file.lastModified}`} file=${file} remove=${() => remove(name, index)} />`)}
    <label class=${classes("drop", full && "silent")}><${Icon} name="add" /><span>${text("drop")}</span>
      <input id=${`file-${name}`} name=${name} class="silent" type="file" accept=${accept} multiple=${known.several}
        aria-labelledby=${`name-${name}`} aria-describedby=${`does-${name}`} ...${marks(name, wrong)}
        onChange=${(event) => { add(name, [...event.target.files]); event.target.value = ""; }} /></label>
    <small id=${`does-${name}`}>${fields.inputHelp(name, model)}</small>
    <${Wrong} of=${name} message=${wrong} />
  </div>`;
}

function Setting({ field, form, model, wrong, set }) {
  const { name, known, kind, range, choices } = field;
  const value = form.values[name] ?? field.default;
  const changed = form.values[name] !== undefined && form.values[name] !== field.default;
  const put = (event) => set(name, event.target.value);
  const id = `field-${name.replaceAll(" ", "-")}`;
  const common = { id, name, "aria-describedby": `${id}-does`, ...marks(name, wrong) };
  let control;
  if (kind === "switch") {
    control = html`<select ...${common} value=${value} onChange=${put}>
      <option value="true">${text("yes")}</option><option value="false">${text("no")}</option></select>`;
  } else if (kind === "choice") {
    const custom = field.open && !choices.map(String).includes(value);
    control = html`<span class="pair"><select ...${common} value=${custom ? "\0" : value}
        onChange=${(event) => set(name, event.target.value === "\0" ? "" : event.target.value)}>
      ${choices.map((one) => html`<option key=${one} value=${String(one)}>${String(one)}</option>`)}
      ${field.open && html`<option value=${"\0"}>${text("custom")}</option>`}</select>
      ${custom && html`<input name=${`${name}-own`} aria-label=${fields.labelOf(name)} value=${value} onInput=${put} />`}</span>`;
  } else if (kind === "lines") {
    control = html`<textarea ...${common} rows="2" value=${value} onInput=${put} />`;
  } else if (kind === "line") {
    control = html`<input ...${common} value=${value} onInput=${put} />`;
  } else {
    const [least, most, step] = range ?? [];
    control = html`<span class="pair">
      ${range && html`<input type="range" min=${least} max=${most} step=${step} value=${value} tabindex="-1" aria-hidden="true" onInput=${put} />`}
      <input ...${common} type="text" inputmode=${known.type === "integer" ? "numeric" : "decimal"} value=${value} onInput=${put} /></span>`;
  }
  return html`<div class=${classes("setting", changed && "changed", kind === "lines" && "wide")} data-setting=${name}>
    <label for=${id}>${fields.labelOf(name)}${changed && html` <i class="mark">${text("changed")}</i>`}</label>
    ${control}
    <small id=${`${id}-does`}>${fields.helpOf(name, model)}${changed && field.default !== ""
      && html` <span class="own">${text("own_value", { value: field.default })}</span>`}</small>
    <${Wrong} of=${name} message=${wrong} />
  </div>`;
}

const PRESET = ["steps", "cache"]; // the settings that presets change

// The presets of a model; each is for models that have a use for it.
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

// What videos of these settings take, in words: as measured on this server, else as estimated by `wanjax plan`.
function cost(model, settings, videos, count = 1) {
  const measured = stagesOf(model.id, settings, videos);
  const stages = measured ?? estimatedStages(model, settings);
  return stages && text(measured ? "takes_about" : "takes_estimated", { time: duration(total(stages) * count) });
}

function Presets({ form, model, models, videos, apply }) {
  return html`<div class="presets" role="group" aria-label=${text("presets")}>
    ${presetsOf(model, models).map((preset) => {
      const own = preset.model ?? model;
      const settings = fields.settingsOf({ ...form, values: { ...fields.omit(form.values, PRESET), ...preset.values } }, own);
      const takes = cost(own, settings, videos);
      const on = !preset.model && PRESET.every((name) => fields.valueOf(form, model, name)
        === (preset.values[name] ?? String(model.defaults[name] ?? "")));
      return html`<button type="button" key=${preset.name + own.id} class=${classes("preset", on && "on")} aria-pressed=${on}
          data-preset=${preset.name} onClick=${() => apply(preset)}>
        <b>${text(`preset_${preset.name}`) ?? own.id}</b>
        <span>${text(`preset_${preset.name}_does`, { n: own.defaults.steps })}</span>
        <span class="cost">${text("preset_steps", { n: settings.steps })}${takes && `, ${takes}`}</span>
      </button>`;
    })}
  </div>`;
}

function Length({ form, model, set, change }) {
  const step = model.frames_step;
  const frames = fields.valueOf(form, model, "frames");
  const fps = Number(fields.valueOf(form, model, "fps")) || 1;
  const most = 1 + step * Math.max(4, Math.round((2 * (model.defaults.frames - 1)) / step));
  const windows = Number(fields.valueOf(form, model, "windows")) || 1;
  const all = fields.lengthOf({ frames: Number(frames), windows, overlap: Number(fields.valueOf(form, model, "overlap")) || 1 });
  const shown = text(windows > 1 ? "seconds_parts" : "seconds_frames", { seconds: (all / fps).toFixed(1), frames, windows });
  return html`<div class="length">
    <label for="length">${text("length")}</label>
    <input id="length" type="range" min="1" max=${most} step=${step} value=${frames} aria-valuetext=${shown}
      onInput=${(event) => set("frames", event.target.value)} />
    <output for="length">${shown}</output>
    ${windows > 1 && html`<button type="button" class="chip on parts" aria-label=${`${text("remove")}: ${text("parts", { n: windows })}`}
      onClick=${() => change(fields.inOnePart(form))}>${text("parts", { n: windows })} ✕</button>`}
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
  const own = Object.entries(sizes).find(([, size]) => size === `${width}x${height}` || size === `${height}x${width}`)?.[0];
  const names = Object.entries(sizes).map(([name, size]) => [name, shape === "picture" ? name : `${name} · ${size.replace("x", " × ")}`]);
  return html`<${Chips} name="shape" label=${text("shape")} options=${options} value=${shape} choose=${(key) => change({ shape: key })} />
    ${names.length > 1 && html`<${Chips} name="resolution" label=${text("resolution")} options=${names}
      value=${form.resolution in sizes ? form.resolution : own ?? names[0][0]} choose=${(key) => change({ resolution: key })} />`}`;
}

function Seed({ form, wrong, change, most, count }) {
  const draw = () => change({ seed: String(crypto.getRandomValues(new Uint32Array(1))[0]), locked: true });
  return html`<div class="numbers">
    <div><label for="count">${text("count")}</label>
      <span class="stepper"><button type="button" aria-label=${text("fewer")} disabled=${form.count <= 1 || count !== form.count} onClick=${() => change({ count: form.count - 1 })}>−</button>
      <input id="count" name="count" inputmode="numeric" value=${count} readonly=${count !== form.count}
        onInput=${(event) => change({ count: Math.min(most, Math.max(1, Math.round(Number(event.target.value)) || 1)) })} />
      <button type="button" aria-label=${text("more")} disabled=${form.count >= most || count !== form.count} onClick=${() => change({ count: form.count + 1 })}>+</button></span>
      ${count !== form.count && html`<small>${text("count_seeds")}</small>`}
    </div>
    <div class="seed"><label for="seed">${text("seed")}</label>
      <span class="stepper"><input id="seed" name="seed" placeholder=${text("seed_drawn")} value=${form.seed} aria-describedby="does-seed"
        ...${marks("seed", wrong)} onInput=${(event) => change({ seed: event.target.value, locked: event.target.value !== "" })} />
      <button type="button" title=${text("dice")} aria-label=${text("dice")} onClick=${draw}><${Icon} name="dice" /> ${text("dice_short")}</button>
      <button type="button" class="lock" title=${text(form.locked ? "seed_unlock" : "seed_lock")} aria-pressed=${form.locked}
        aria-label=${text("seed_lock")} onClick=${() => (form.locked ? change({ seed: "", locked: false }) : draw())}><${Icon} name=${form.locked ? "locked" : "open"} /> ${text("lock")}</button></span>
      <small id="does-seed">${text("seed_help")}</small>
      <${Wrong} of="seed" message=${wrong} />
    </div>
  </div>`;
}

// What was asked for last and the way to it, where the videos are below the form.
function Asked({ ids, videos, open }) {
  const asked = ids.map((id) => videos.known.get(id)).filter(Boolean);
  if (!asked.length) return null;
  const [first] = videos.queue.filter((video) => ids.includes(video.id));
  const see = () => (first ? document.getElementById("queue-title").scrollIntoView() : open(asked[0].id));
  return html`<p class="asked"><span>${first ? text("being_made", { state: stateOf(first) }) : stateOf(asked[0])}</span>
    <button type="button" class="see" onClick=${see}>${text("see")}</button></p>`;
}

export function Composer({ form, setForm, models, videos, announce, needToken, open: view }) {
  const model = models.find((one) => one.id === form?.model) ?? models[0];
  const [wrong, setWrong] = useState({});
  const [message, setMessage] = useState("");
  const [asking, setAsking] = useState(false);
  const [empty, setEmpty] = useState(false);
  const [open, setOpen] = useState(false); // the drawer
  const [expert, setExpert] = useState(false); // its last part
  const [over, setOver] = useState(false);
  const [asked, setAsked] = useState([]);
  const prompt = useRef(null);
  const root = useRef(null);
  const next = useRef(null); // the id of the video that is led to once it is shown

  useEffect(() => {
    const item = next.current && document.querySelector(`.right [data-id="${next.current}"]`);
    if (!item) return;
    next.current = null;
    if (matchMedia(BESIDE).matches) item.scrollIntoView({ block: "nearest", behavior: still() ? "auto" : "smooth" });
  });

  const change = (more) => {
    setForm((form) => ({ ...form, ...more }));
    setWrong({});
    setMessage("");
  };
  const set = (name, value) => change({ values: { ...form.values, [name]: value } });

  const add = (name, files) => {
    const accepted = [];
    for (const file of files) {
      const own = name ?? fields.inputFor(file, form, model);
      if (own === null) setMessage(text("wrong_file", { name: file.name }));
      else if (file.type && !/^(image|video)\//.test(file.type)) {
        setWrong({ [own]: text("wrong_file", { name: file.name }) });
      } else if (file.type.startsWith("video/") && !fields.takesFilms(own)) {
        setWrong({ [own]: text("wrong_kind", { name: file.name, label: fields.inputLabel(own) }) });
      } else accepted.push([own, file]);
    }
    if (!accepted.length) return;
    const after = { ...form.files };
    for (const [own, file] of accepted) after[own] = model.pictures[own].several ? [...(after[own] ?? []), file] : [file];
    change({ files: after });
  };
  const remove = (name, index) => change({ files: { ...form.files, [name]: form.files[name].filter((_, i) => i !== index) } });

  // Shows a sentence at its field, which is opened and led to.
  const focusField = (errors) => {
    setWrong(errors);
    const [first] = Object.keys(errors);
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
    if (asking) return;
    if (!form) return setMessage(text("connecting_first"));
    setMessage("");
    if (!form.prompt.trim() && !allowed) {
      setEmpty(true);
      return setTimeout(() => root.current.querySelector(".question button")?.focus());
    }
    setEmpty(false);
    const errors = fields.problems(form, model);
    if (Object.keys(errors).length) return focusField(errors);
    setAsking(true);
    const ids = [];
    try {
      for (const seed of fields.seedsOf(form, model)) {
        const video = await ask("v1/videos", { method: "POST", body: fields.bodyOf(form, model, seed) });
        videos.put(video);
        ids.push(video.id);
      }
      setForm((now) => (now.from === form.from ? fields.settled(now) : now));
    } catch (error) {
      if (error.status === 401) needToken();
      const names = [...fields.fieldsOf(model).map((field) => field.name), ...Object.keys(model.pictures), "seed", "width", "height"];
      const own = names.find((name) => name === error.param || (error.param === "lora" && name.startsWith("lora ")));
      if (error.param === "prompt") prompt.current.focus();
      if (own) focusField({ [own]: own in model.pictures ? error.message.replace(new RegExp(`^${own}\\b`), fields.inputLabel(own)) : error.message });
      else setMessage(error.message);
    } finally {
      setAsking(false);
      if (ids.length) {
        setAsked(ids);
        [next.current] = ids;
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
  const dropped = (event) => {
    event.preventDefault();
    setOver(false);
    if (form) add(null, [...event.dataTransfer.files]);
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) make(event);
  };

  // Opens or closes the drawer; opened it is led to, as there is little room below.
  const turn = (event) => {
    const { currentTarget: summary } = event;
    event.preventDefault();
    setOpen(!open);
    if (!open) setTimeout(() => summary.scrollIntoView());
  };

  const count = form && !wrong.seed ? countOf(form, model) : 1;
  const takes = form && cost(model, fields.settingsOf(form, model), [...videos.known.values()], count);
  const changed = form ? fields.changedFields(form, model) : [];
  return html`<form class=${classes("composer", over && "over")} ref=${root} novalidate onSubmit=${make} onPaste=${onPaste} onKeyDown=${onKeyDown}
      onDragOver=${(event) => { event.preventDefault(); setOver(true); }} onDragLeave=${() => setOver(false)} onDrop=${dropped}>
    <label class="big" for="prompt">${text("prompt")}</label>
    <textarea id="prompt" name="prompt" ref=${prompt} rows="3" placeholder=${text("prompt_example")} title=${text("prompt_key")}
      maxlength=${model?.limits.prompt} value=${form?.prompt} onInput=${(event) => { setEmpty(false); change({ prompt: event.target.value }); }} />
    ${form && html`
      ${models.length > 1 && html`<div class="model"><label for="model">${text("model")}</label>
        <select id="model" name="model" value=${model.id} onChange=${(event) => change({ model: event.target.value, values: {}, shape: "", resolution: "" })}>
          ${models.map((one) => html`<option key=${one.id} value=${one.id}>${one.id}</option>`)}</select></div>`}
      ${Object.keys(model.pictures).length > 0 && html`<div class="inputs">
        ${Object.keys(model.pictures).map((name) => html`<${Input} key=${name} name=${name} model=${model}
          files=${form.files[name] ?? []} wrong=${wrong[name]} add=${add} remove=${remove} />`)}</div>`}
      <${Shape} form=${form} model=${model} change=${change} />
      ${form.shape === "own" && html`<div class="numbers size">${["width", "height"].map((side) => html`<div key=${side}>
        <label for=${`field-${side}`}>${fields.labelOf(side)}</label>
        <input id=${`field-${side}`} name=${side} inputmode="numeric" value=${form.values[side] ?? ""} ...${marks(side, wrong[side])}
          onInput=${(event) => set(side, event.target.value)} /><small>${fields.helpOf(side, model)}</small><${Wrong} of=${side} message=${wrong[side]} /></div>`)}</div>`}
      <${Length} form=${form} model=${model} set=${set} change=${change} />
      <${Seed} form=${form} wrong=${wrong.seed} change=${change} most=${model.limits.queue} count=${count} />
      <details class="drawer" open=${open} onToggle=${(event) => setOpen(event.target.open)}>
        <summary onClick=${turn}>${changed.length ? text("drawer_changed", { n: changed.length }) : text("drawer")}</summary>
        ${open && html`<button type="button" class="reset" disabled=${!changed.length} onClick=${() => change({ values: {} })}>${text("reset")}</button>
        <${Presets} form=${form} model=${model} models=${models} videos=${[...videos.known.values()]} apply=${(preset) =>
          change({ model: (preset.model ?? model).id, values: { ...fields.omit(form.values, PRESET), ...preset.values } })} />
        ${Object.keys(fields.GROUPS).map((group) => {
          const own = fields.fieldsOf(model).filter((field) => field.group === group && fields.isUseful(field.name, form, model));
          const settings = own.map((field) => html`<${Setting} key=${field.name} field=${field} form=${form} model=${model} wrong=${wrong[field.name]} set=${set} />`);
          if (!own.length) return null;
          return group === "expert" ? html`<details key=${group} class="expert" open=${expert} onToggle=${(event) => setExpert(event.target.open)}>
            <summary>${text(`group_${group}`)}</summary><div class="group">${settings}</div></details>`
            : html`<fieldset key=${group} class="group"><legend>${text(`group_${group}`)}</legend>${settings}</fieldset>`;
        })}
`}
      </details>`}
    ${empty && html`<div class="question" role="alertdialog" aria-label=${text("empty_prompt")}><p>${text("empty_prompt")}</p>
      <button type="button" onClick=${() => { setEmpty(false); prompt.current.focus(); }}>${text("empty_no")}</button>
      <button type="button" onClick=${() => make(null, true)}>${text("empty_yes")}</button></div>`}
    <div class="go">
      <div class="source" role="status">${form?.from && html`${form.from.picture && html`<img src=${form.from.picture} alt="" />`}
        <span>${text(`from_${form.from.act}`)}</span>
        <button type="button" class="plain" aria-label=${text("from_none")} title=${text("from_none")}
          onClick=${() => change({ ...fields.emptyForm(model), prompt: form.prompt })}>✕</button>`}</div>
      <button class="main" id="make" aria-busy=${asking}>${asking ? text("making") : text(buttonOf(form, model, count), { n: count })}</button>
      ${takes && html`<span class="cost">${takes}</span>`}
      <${Asked} ids=${form?.from ? [] : asked} videos=${videos} open=${view} />
      <p class="wrong" id="message" role="alert">${message}</p>
    </div>
  </form>`;
}

function countOf(form, model) {
  try {
    return fields.seedsOf(form, model).length;
  } catch {
    return form.count;
  }
}

function buttonOf(form, model, count) {
  if (count > 1) return form.from?.act === "vary" ? "make_variations" : "make_many";
  return form?.from?.act === "extend" && Number(fields.valueOf(form, model, "windows")) > 1 ? "make_longer" : "make_one";
}
