// SPDX-License-Identifier: Apache-2.0
// The viewer of one video with its settings, and the comparison of two videos.

import { contentOf } from "./api.js";
import { labelOf } from "./fields.js";
import { Notes, isSmall, videoSeconds, shapeOf, stateOf, titleOf } from "./gallery.js";
import { text } from "./texts.js";
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";

const SHOWN_FIRST = ["prompt", "model", "seed", "width", "height"]; // shown first, even if they have default values
const ALWAYS_SHOWN = ["frames", "steps"]; // in the details, even if they have default values

// The settings that differ from the model's defaults.
function changedSettings(video, model) {
  const defaults = model?.defaults ?? {};
  return Object.entries(video.settings).filter(([name, value]) =>
    !SHOWN_FIRST.includes(name) && !["dtype", "vae_dtype", "precision", "original_prompt"].includes(name)
    && value !== null && value !== "" && String(value) !== String(defaults[name] ?? ""));
}

const isDefaultSize = (video, model) => model?.defaults.width === video.settings.width && model?.defaults.height === video.settings.height;
const shellQuoted = (value) => `'${String(value).replaceAll("'", "'\\''")}'`;
const shellWord = (value) => (/^[\w.,:=/+-]+$/.test(value) ? value : shellQuoted(value));
const uploadedFiles = (video) => Object.values(video.inputs).flat();
const isQuantized = (video) => !["none", undefined].includes(video.settings.precision);
const lorasOf = (video) => video.lora.map(({ name, strength }) => `${name}:${strength}`);

export function commandOf(video, model) {
  const words = ["wanjax", shellQuoted(video.prompt), "--model", video.model, "--seed", video.settings.seed];
  if (!isDefaultSize(video, model)) words.push("--size", video.size);
  for (const [name, value] of changedSettings(video, model)) {
    const option = `--${name.replaceAll("_", "-")}`;
    if (typeof value === "boolean") words.push(value ? option : option.replace("--", "--no-"));
    else for (const item of name === "then" ? String(value).split("\n") : [value]) words.push(option, shellWord(String(item)));
  }
  if (video.scheduler) words.push("--scheduler", shellWord(video.scheduler));
  if (isQuantized(video)) words.push("--precision", video.settings.precision);
  for (const lora of lorasOf(video)) words.push("--lora", shellWord(lora));
  for (const [name, files] of Object.entries(video.inputs)) {
    const option = `--${name === "references" ? "reference" : name.replaceAll("_", "-")}`;
    for (const file of [files].flat()) words.push(option, shellWord(file));
  }
  return words.join(" ");
}

// The settings with which a model is loaded: the scheduler, the precision, and the LoRAs as texts NAME:STRENGTH.
function loadSettingsOf(video) {
  const loras = lorasOf(video);
  return {
    ...(video.scheduler ? { scheduler: video.scheduler } : {}),
    ...(isQuantized(video) ? { precision: video.settings.precision } : {}),
    ...(loras.length ? { lora: loras } : {}),
  };
}

function callSettingsOf(video, model) {
  const size = isDefaultSize(video, model) ? {} : { size: video.size };
  return { ...size, ...Object.fromEntries(changedSettings(video, model)), ...video.inputs };
}

export function requestOf(video, model) {
  const { lora, ...load } = loadSettingsOf(video);
  const loras = lora ? { lora: lora.join() } : {};
  return { prompt: video.prompt, model: video.model, seed: video.settings.seed, ...callSettingsOf(video, model), ...load, ...loras };
}

// The digits of a seed are copied as text, because a seed may be too large for a JavaScript number.
export const jsonOf = (video, model) =>
  JSON.stringify(requestOf(video, model), null, 2).replace(/"seed": "(\d+)"/, '"seed": $1');

export function pythonOf(video, model) {
  const literal = (value) => (typeof value === "boolean" ? (value ? "True" : "False") : JSON.stringify(value));
  const keywords = (settings) => Object.entries(settings).map(([name, value]) => `, ${name}=${literal(value)}`).join("");
  const files = uploadedFiles(video);
  const note = files.length ? `  # ${text("uploaded", { name: files.join(", ") })}` : "";
  return `import wanjax\n\npipe = wanjax.load(${literal(video.model)}${keywords(loadSettingsOf(video))})\n`
    + `video = pipe(${literal(video.prompt)}, seed=${video.settings.seed}${keywords(callSettingsOf(video, model))})${note}\nvideo.save("video.mp4")\n`;
}

function Details({ video, model, children }) {
  const rows = [[text("model"), video.model], [text("seed"), video.settings.seed], [text("shape"), video.size.replace("x", " × ")],
    ...ALWAYS_SHOWN.map((name) => [labelOf(name), video.settings[name]]),
    ...changedSettings(video, model).filter(([name]) => !ALWAYS_SHOWN.includes(name)).map(([name, value]) => [labelOf(name), value])];
  if (video.scheduler) rows.push([labelOf("scheduler"), video.scheduler]);
  for (const { name, strength } of video.lora ?? []) rows.push([labelOf(`lora ${name}`), strength]);
  return html`<details class="details"><summary>${text("details")}</summary>
    <table><tbody>${rows.map(([label, value]) => html`<tr key=${label}><th scope="row">${label}</th><td>${String(value)}</td></tr>`)}</tbody></table>
    ${video.pictures.length > 0 && html`<p class="made-from">${uploadedFiles(video).map((file, n) => html`
      <a key=${file} href=${contentOf(video, video.pictures[n])} download=${file}><img src=${contentOf(video, video.pictures[n])} alt="" loading="lazy" />${text("uploaded", { name: file })}</a>`)}</p>`}
    ${children}
  </details>`;
}

function Dialog({ label, close, onKeyDown, children, name }) {
  const dialog = useRef(null);
  useEffect(() => {
    const focusedBefore = document.activeElement;
    dialog.current.showModal();
    return () => focusedBefore?.focus?.();
  }, []);
  return html`<dialog ref=${dialog} class=${name} aria-label=${label} onClose=${close} onKeyDown=${onKeyDown}
    onClick=${(event) => event.target === dialog.current && close()}>${children}
    <button type="button" class="plain close" aria-label=${text("close")} title=${text("close")} onClick=${close}>✕</button></dialog>`;
}

export function Viewer({ video, model, step, close, act, onError, children }) {
  const player = useRef(null);
  const [copied, setCopied] = useState("");
  const done = video.status === "completed";
  const copy = (name, value) => navigator.clipboard.writeText(value).then(() => setCopied(name)).catch(onError);
  const onKey = (event) => {
    if (event.target.closest("input, textarea, video:focus")) return;
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") step(event.key === "ArrowLeft" ? -1 : 1);
    else if (event.key === " " && player.current && event.target.tagName !== "BUTTON" && event.target.tagName !== "SUMMARY" && event.target.tagName !== "A") {
      if (player.current.paused) player.current.play();
      else player.current.pause();
    } else if (event.key === "Delete") act("remove", video);
    else return;
    event.preventDefault();
  };
  const button = (name, attributes = {}) => html`<button type="button" class=${name} title=${text(`${name}_does`) ?? ""} onClick=${() => act(name, video)} ...${attributes}>${text(name)}</button>`;
  return html`<${Dialog} name="viewer" label=${titleOf(video)} close=${close} onKeyDown=${onKey}>
    <button type="button" class="plain previous" aria-label=${text("previous")} title=${text("previous")} onClick=${() => step(-1)}>‹</button>
    <div class=${`frame${isSmall(video) ? " small" : ""}`} style=${{ "--shape": shapeOf(video) }}>
      ${done ? html`<video key=${video.id} ref=${player} src=${contentOf(video)} poster=${contentOf(video, "thumbnail")} controls loop muted autoplay playsinline
        aria-label=${titleOf(video)} style=${{ aspectRatio: shapeOf(video) }} />` : html`<p class="failure">${stateOf(video)}</p>`}
    </div>
    <button type="button" class="plain next" aria-label=${text("next")} title=${text("next")} onClick=${() => step(1)}>›</button>
    <div class="about">
      <p class="prompt">${titleOf(video)}</p>
      <p class="state">${stateOf(video)}</p>
      <${Notes} video=${video} />
      <div class="acts">
        ${button("again")}
        ${done && button("vary")}
        ${done && model?.settings.windows && button("extend")}
        ${done && model?.pictures.image && button("last_frame")}
        ${done && html`<a class="button download" href=${contentOf(video)} download=${`${video.id}.mp4`}>${text("download")}</a>`}
        <button type="button" class="delete" onClick=${() => act("remove", video)}>${text("delete")}</button>
      </div>
      <${Details} video=${video} model=${model}><div class="acts copies">${[["copy_command", commandOf], ["copy_json", jsonOf], ["copy_python", pythonOf]].map(([name, format]) => html`
        <button type="button" key=${name} class=${name} onClick=${() => copy(name, format(video, model))}>${text(name)}${copied === name ? ` · ${text("copied")}` : ""}</button>`)}
        <span class="silent" role="status">${copied && text("copied")}</span></div><//>
    </div>
    ${children}
  <//>`;
}

// Plays two videos in sync. The shorter one waits at its end for the longer one.
export function Compare({ pair, close, children }) {
  const players = [useRef(null), useRef(null)];
  const [playback, setPlayback] = useState({ seconds: 0, all: 0, paused: false });
  const longest = () => {
    const [first, second] = players.map((player) => player.current);
    return first?.duration && second?.duration ? (second.duration > first.duration ? [second, first] : [first, second]) : [];
  };
  useEffect(() => {
    const timer = setInterval(() => {
      const [longer, shorter] = longest();
      if (!longer) return;
      if (longer.ended) {
        longer.currentTime = 0;
        longer.play();
      }
      setPlayback({ seconds: longer.currentTime, all: longer.duration, paused: longer.paused });
      const target = Math.min(longer.currentTime, shorter.duration);
      if (Math.abs(shorter.currentTime - target) > 0.08) shorter.currentTime = target;
      const shouldPause = longer.paused || longer.currentTime >= shorter.duration;
      if (shorter.paused !== shouldPause) shorter[shouldPause ? "pause" : "play"]();
    }, 60);
    return () => clearInterval(timer);
  }, []);
  const seek = (event) => {
    const [longer] = longest();
    if (longer) longer.currentTime = Number(event.target.value);
  };
  const toggle = () => {
    const [longer] = longest();
    longer?.[longer.paused ? "play" : "pause"]();
  };
  const pressed = (event) => {
    if (event.key !== " " || ["BUTTON", "INPUT"].includes(event.target.tagName)) return;
    event.preventDefault();
    toggle();
  };
  const differences = (video) => {
    const other = pair.find((candidate) => candidate !== video);
    return Object.entries(video.settings).filter(([name, value]) =>
      name !== "prompt" && value !== null && String(value) !== String(other.settings[name] ?? ""));
  };
  const time = (seconds) => seconds.toFixed(1);
  return html`<${Dialog} name="viewer compared" label=${text("compare")} close=${close} onKeyDown=${pressed}>
    <div class="sides">${pair.map((video, index) => html`<figure key=${video.id} class=${isSmall(video) ? "small" : ""}>
      <video ref=${players[index]} src=${contentOf(video)} muted autoplay playsinline aria-label=${`${"AB"[index]}: ${titleOf(video)}`} style=${{ aspectRatio: shapeOf(video) }} />
      <figcaption><b>${"AB"[index]}</b> · ${text("seconds", { n: videoSeconds(video) })} · ${titleOf(video)}
        <table><tbody>${differences(video).map(([name, value]) => html`<tr key=${name}>
        <th scope="row">${name === "seed" ? text("seed") : labelOf(name)}</th><td>${String(value)}</td></tr>`)}</tbody></table></figcaption>
    </figure>`)}</div>
    <div class="player"><button type="button" class="toggle" onClick=${toggle}>${text(playback.paused ? "play_both" : "pause")}</button>
      <input type="range" min="0" max=${playback.all} step="0.01" value=${playback.seconds} aria-label=${text("position")}
        aria-valuetext=${text("seconds", { n: time(playback.seconds) })} onInput=${seek} />
      <output>${text("time_of", { at: time(playback.seconds), all: time(playback.all) })}</output></div>
    ${children}
  <//>`;
}
