// SPDX-License-Identifier: Apache-2.0
// The queue and the gallery of finished videos.

import { contentOf } from "./api.js";
import { finishTimes } from "./estimate.js";
import { lengthOf } from "./fields.js";
import { duration, text } from "./texts.js";
import { html, Component, useEffect, useRef, useState } from "./vendor/preact-htm.js";

export const prefersReducedMotion = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
export const totalSeconds = (video) => Object.values(video.stage_seconds).reduce((sum, seconds) => sum + seconds, 0);
export const videoSeconds = ({ settings }) => (lengthOf(settings) / settings.fps).toFixed(1);
export const shapeOf = ({ settings }) => `${settings.width} / ${settings.height}`;
export const titleOf = (video) => (video.prompt.trim() ? video.prompt : text("no_prompt"));
export const isSmall = ({ settings }) => settings.width < 256;

// Labels that distinguish videos with the same prompt.
function inputMarks({ settings, pictures }) {
  const inputs = ["image", "clip"].filter((name) => pictures.includes(name)).map((name) => text(`mark_${name}`));
  return settings.windows > 1 ? [text("mark_longer", { n: settings.windows }), ...inputs] : inputs;
}

export function stateOf(video) {
  if (video.status === "failed") return video.cancelled ? "" : (video.error?.message ?? text("failed"));
  if (video.status === "completed") return totalSeconds(video) ? text("made_in", { time: duration(totalSeconds(video)) }) : "";
  if (video.cancelled) return text("ends_soon");
  if (video.status === "queued") return video.queue_position ? text("waits", { place: video.queue_position + 1 }) : text("waits_next");
  const { stage, stage_done: done, stage_total: all } = video;
  if (stage === "compile") return all ? text("compiling", { done, total: all }) : text("stage_compile");
  const windows = video.settings.windows ?? 1;
  const part = windows > 1 && stage ? text("window", { window: video.window, windows }) : "";
  const key = stage && (all || stage === "encode") ? stage : "begin"; // nothing is counted before the first step
  return part + (text(`stage_${key}`, { done, total: all }) ?? stage);
}

// Notes on a video from the server, for example about unknown words of the prompt.
export function Notes({ video }) {
  return video.notes.map((note) => html`<p class="state note" key=${note}>${note}</p>`);
}

export function Queue({ videos, onError }) {
  const [, tick] = useState(0);
  const queue = videos.queue;
  useEffect(() => {
    if (!queue.length) return undefined;
    const timer = setInterval(() => tick((n) => n + 1), 1000);
    return () => clearInterval(timer);
  }, [queue.length > 0]);
  if (!queue.length) return null;
  const endTimes = finishTimes(queue, videos.stageStarts, [...videos.byId.values()]);
  return html`<section class="queue" aria-labelledby="queue-title">
    <h2 id="queue-title">${text("queue")}</h2>
    <ul>${queue.map((video) => {
      const secondsLeft = endTimes.get(video.id);
      const time = secondsLeft === null || secondsLeft === undefined ? "" : text("left", { time: duration(secondsLeft) });
      return html`<li key=${video.id} class=${`item ${video.status}`} data-id=${video.id}>
        ${video.preview > 0 && html`<img class="preview" src=${`${contentOf(video, "preview")}&after=${video.preview}`}
          alt=${text("preview", { step: video.preview })} />`}
        <p class="prompt">${titleOf(video)}</p>
        <p class="state">${stateOf(video)}${time && html`<span class="left"> · ${time}</span>`}</p>
        <${Notes} video=${video} />
        <progress max="100" value=${video.stage === "compile" ? (100 * video.stage_done) / (video.stage_total || 1) : video.progress} aria-label=${titleOf(video)}></progress>
        <button type="button" class="cancel" disabled=${video.cancelled} onClick=${() => videos.cancel(video).catch(onError)}>${text("cancel")}</button>
      </li>`;
    })}</ul>
  </section>`;
}

// A video in the gallery. A card is rendered again only if it changed, because there may be a thousand cards.
class Card extends Component {
  shouldComponentUpdate(next, state) {
    return ["video", "selecting", "selected", "language"].some((name) => next[name] !== this.props[name]) || state.plays !== this.state.plays;
  }

  render({ video, selecting, selected, open, select }, { plays }) {
    const done = video.status === "completed";
    const play = (on) => () => done && !prefersReducedMotion() && this.setState({ plays: on });
    const marks = inputMarks(video).join(" · ");
    const press = () => (selecting ? select(video.id) : open(video.id));
    return html`<li class=${`card ${video.status}${selected ? " selected" : ""}`} data-id=${video.id}
        onMouseEnter=${play(true)} onMouseLeave=${play(false)} onFocusIn=${play(true)} onFocusOut=${play(false)}>
      <button type="button" class="open" aria-pressed=${selecting ? selected : null}
          aria-label=${text(selecting ? "select_this" : "play", { prompt: titleOf(video) })} onClick=${press}>
        <span class=${`frame${isSmall(video) ? " small" : ""}`} style=${{ aspectRatio: shapeOf(video) }}>
          ${!done ? html`<span class="failure">${text(video.cancelled ? "cancelled" : "failed")}</span>`
            : plays ? html`<video src=${contentOf(video)} poster=${contentOf(video, "thumbnail")} autoplay loop muted playsinline aria-hidden="true" />`
            : html`<img src=${contentOf(video, "thumbnail")} loading="lazy" alt="" />`}
          ${done && html`<span class="badge">${text("seconds", { n: videoSeconds(video) })}</span>`}
          ${selecting && html`<span class="tick" aria-hidden="true">${selected ? "✓" : ""}</span>`}
        </span>
        <span class="prompt">${titleOf(video)}</span>
        ${marks && html`<span class="state marks">${marks}</span>`}
        <span class="state">${done && html`${text("seed_of", { seed: video.settings.seed })}<br />`}${stateOf(video)}</span>
      </button>
    </li>`;
  }
}

// A group of cards, rendered again only if one of them changed.
class Cards extends Component {
  shouldComponentUpdate(next) {
    const { videos, selection, language } = this.props;
    return next.selection !== selection || next.language !== language || next.videos.length !== videos.length
      || next.videos.some((video, index) => video !== videos[index]);
  }

  render({ videos, selection, open, select, language }) {
    return videos.map((video) => html`<${Card} key=${video.id} video=${video} open=${open} select=${select}
      selecting=${selection !== null} selected=${selection !== null && selection.includes(video.id)} language=${language} />`);
  }
}

const CARDS_PER_GROUP = 48; // how many cards are rendered together

export function Gallery({ videos, open, selection, setSelection, compare, download, remove, language, onError }) {
  const listEnd = useRef(null);
  const [query, setQuery] = useState("");
  const gallery = videos.gallery;
  const groups = Array.from({ length: Math.ceil(gallery.length / CARDS_PER_GROUP) }, (_, i) => gallery.slice(i * CARDS_PER_GROUP, (i + 1) * CARDS_PER_GROUP));
  const selecting = selection !== null;
  useEffect(() => {
    if (!listEnd.current) return undefined;
    const watcher = new IntersectionObserver(([entry]) => entry.isIntersecting && videos.loadMore().catch(onError), { rootMargin: "600px" });
    watcher.observe(listEnd.current);
    return () => watcher.disconnect();
  }, [videos.hasMore, gallery.length]);
  useEffect(() => {
    const words = query.trim();
    if (words === videos.query) return undefined;
    const timer = setTimeout(() => videos.search(words).catch(onError), 250);
    return () => clearTimeout(timer);
  }, [query]);
  const select = (id) => setSelection((chosen) => (chosen.includes(id) ? chosen.filter((other) => other !== id) : [...chosen, id]));
  const completed = selecting ? selection.filter((id) => videos.byId.get(id)?.status === "completed") : [];
  return html`<section class="gallery" aria-labelledby="videos-title">
    <div class="bar">
      <h2 id="videos-title">${text("videos")}</h2>
      ${(gallery.length > 0 || query !== "") && html`<input id="find" type="search" aria-label=${text("find")} placeholder=${text("find")} value=${query} onInput=${(event) => setQuery(event.target.value)} />`}
      ${selecting
        ? html`<div class="selecting"><span class="chosen" role="status">${text("chosen", { n: selection.length })}</span>
          <button type="button" id="delete" disabled=${!selection.length} onClick=${() => remove(selection)}>${text("delete")}</button>
          <button type="button" id="download" disabled=${!completed.length} onClick=${() => download(completed)}>${text("download")}</button>
          <button type="button" id="compare" disabled=${completed.length !== 2} title=${text("compare_does")} onClick=${() => compare(completed)}>${text("compare")}</button>
          <button type="button" id="select" onClick=${() => setSelection(null)}>${text("done")}</button></div>`
        : gallery.length > 0 && html`<button type="button" id="select" onClick=${() => setSelection([])}>${text("select")}</button>`}
    </div>
    ${!gallery.length && videos.isLoaded && !videos.loading && html`<p class="empty">${text(videos.matchingIds ? "none_found" : "none")}</p>`}
    <ul class="cards">${groups.map((group, index) => html`<${Cards} key=${index} videos=${group} open=${open} select=${select}
      selection=${selection} language=${language} />`)}</ul>
    ${videos.hasMore && html`<p ref=${listEnd} class="end" aria-hidden="true">…</p>`}
  </section>`;
}
