// SPDX-License-Identifier: Apache-2.0
// The page of `wanjax serve`: what to make, what is under way, and what was made.

import { ask, contentOf, fileOf, lastFrame } from "./api.js";
import { Composer } from "./composer.js";
import { emptyForm, inOnePart } from "./fields.js";
import { Gallery, Queue, still, titleOf } from "./gallery.js";
import { TEXTS, language as first, speak, text } from "./texts.js";
import { Compare, Viewer } from "./viewer.js";
import { UNDO_SECONDS, Videos } from "./videos.js";
import { html, render, useEffect, useRef, useState } from "./vendor/preact-htm.js";

const VARIED = 4;
const TYPED = "wanjax prompt";
const MODEL_KEYS = ["prompt", "height", "width", "seed", "model", "original_prompt", "dtype", "vae_dtype"]; // set apart or by the server

function Login({ enter, wrong }) {
  return html`<form class="login" id="login" onSubmit=${(event) => { event.preventDefault(); enter(new FormData(event.target).get("token")); }}>
    <label for="token">${text("token")}</label>
    <span class="pair"><input id="token" name="token" type="password" autocomplete="current-password" required /><button class="main">${text("enter")}</button></span>
    <p class="wrong" role="alert">${wrong}</p></form>`;
}

function Toasts({ toasts, undo, close }) {
  return html`<div class="toasts" role="status">${toasts.map((toast) => html`<p key=${toast.key}><span>${toast.message}</span>
    ${toast.ids && html`<button type="button" class="undo" onClick=${() => undo(toast)}>${text("undo")}</button>`}
    <button type="button" class="plain" aria-label=${text("close")} title=${text("close")} onClick=${() => close(toast)}>✕</button></p>`)}</div>`;
}

function App() {
  const [, redraw] = useState(0);
  const [language, setLanguage] = useState(first);
  const [state, setState] = useState({ key: "state_connecting" });
  const [models, setModels] = useState([]);
  const [form, setForm] = useState(null);
  const [token, setToken] = useState({ needed: false, wrong: "" });
  const [viewed, setViewed] = useState(null);
  const [pair, setPair] = useState(null);
  const [selection, setSelection] = useState(null);
  const [toasts, setToasts] = useState([]);
  const [said, announce] = useState("");
  const kept = useRef(null);
  const source = useRef(null);

  if (kept.current === null) {
    let drawn = false;
    kept.current = new Videos((before, video) => {
      if (before && video && before.status !== video.status) {
        if (video.status === "completed") announce(text("announce_made", { prompt: titleOf(video) }));
        if (video.status === "failed") announce(video.cancelled ? text("cancelled") : text("announce_failed", { message: video.error?.message ?? "" }));
      }
      if (drawn) return; // once a frame, whatever number of events arrives
      drawn = true;
      requestAnimationFrame(() => {
        drawn = false;
        redraw((n) => n + 1);
      });
    });
  }
  const videos = kept.current;

  const toast = (message, ids = null) => {
    const key = `${Date.now()} ${message}`;
    setToasts((all) => [...all.filter((one) => one.ids || one.message !== message), { key, message, ids }]);
    setTimeout(() => setToasts((all) => all.filter((one) => one.key !== key)), (ids ? UNDO_SECONDS : 10) * 1000);
  };
  const closeToast = (toast) => setToasts((all) => all.filter((one) => one !== toast));
  const wrong = (error) => {
    if (error.status === 401) return needToken();
    return toast(error.message);
  };
  const needToken = () => {
    source.current?.close();
    setToken({ needed: true, wrong: "" });
    setState({ key: "state_token" });
  };

  const health = async () => {
    const answer = await ask("health").catch((error) => {
      if (error.status === 401) throw error;
      return { status: "broken" };
    });
    setState({ key: `state_${answer.status}`, model: answer.model });
    if (answer.status === "loading") setTimeout(() => health().catch(wrong), 2000);
  };
  const follow = () => {
    source.current?.close();
    const opened = new EventSource("v1/events");
    source.current = opened;
    opened.onmessage = (event) => videos.put(JSON.parse(event.data));
    opened.onopen = () => Promise.all([health(), videos.refresh()]).catch(wrong);
    opened.onerror = () => {
      setState({ key: "state_away" });
      if (opened.readyState === EventSource.CLOSED) setTimeout(() => begin().catch(again), 3000);
    };
  };
  const again = (error) => {
    if (error.status === 401) return needToken();
    if (error.status < 500) return setState({ message: error.message }); // asked again it answers the same
    setState({ key: "state_away" });
    return setTimeout(() => begin().catch(again), 3000);
  };
  const begin = async () => {
    const { data } = await ask("v1/models");
    setModels(data);
    const typed = document.getElementById("prompt")?.value || sessionStorage.getItem(TYPED) || "";
    setForm((form) => form ?? { ...emptyForm(data[0]), prompt: typed });
    if (!videos.known.size) await videos.more();
    follow();
  };
  useEffect(() => {
    begin().catch(again);
    const leave = () => videos.leave();
    addEventListener("pagehide", leave);
    return () => removeEventListener("pagehide", leave);
  }, []);

  useEffect(() => {
    if (form) sessionStorage.setItem(TYPED, form.prompt); // of this tab, for a reload
  }, [form?.prompt]);

  const enter = async (value) => {
    try {
      await ask("login", { method: "POST", body: new URLSearchParams({ token: value }) });
      setToken({ needed: false, wrong: "" });
      await begin();
    } catch (error) {
      setToken({ needed: true, wrong: error.message });
    }
  };

  // Returns a form with all that a video was made from, so that one thing may be changed.
  const formOf = async (video) => {
    const model = models.find((one) => one.id === video.model) ?? models[0];
    const record = video.status === "completed" ? await ask(`v1/videos/${video.id}/record`) : video.settings;
    const values = Object.fromEntries(Object.entries(record)
      .filter(([name, value]) => name in model.settings && !MODEL_KEYS.includes(name) && value !== null)
      .map(([name, value]) => [name, String(value)]));
    if (video.scheduler) values.scheduler = video.scheduler;
    for (const { name, strength } of video.lora ?? []) values[`lora ${name}`] = String(strength);
    const { width, height } = video.settings;
    const own = model.defaults.width === width && model.defaults.height === height;
    if (!own) Object.assign(values, { width: String(width), height: String(height) });
    const files = {};
    for (const variant of video.pictures) {
      const name = variant === "clip" ? "video" : variant.replace(/_\d+$/, "");
      const file = await fileOf(video, variant);
      if (file) files[name] = [...(files[name] ?? []), file];
      else toast(text("gone"));
    }
    const prompt = record.original_prompt?.split("\n")[0] || record.prompt || video.prompt;
    return { ...emptyForm(model), prompt, values, files, shape: own ? "" : "own", seed: String(video.settings.seed), locked: true };
  };
  const write = (video, act, form) => {
    const picture = video.status === "completed" ? contentOf(video, "thumbnail") : null;
    setForm({ ...form, from: { act, picture, seed: form.seed } });
    setViewed(null);
    setPair(null);
    setTimeout(() => {
      document.getElementById("make").focus({ preventScroll: true });
      document.querySelector(".composer").scrollIntoView({ behavior: still() ? "auto" : "smooth" });
    });
  };
  const remove = (ids) => {
    videos.remove(ids);
    const prompts = ids.map((id) => videos.known.get(id)?.prompt ?? "").join("; ");
    toast(text("deleted_one", { prompt: prompts.length > 80 ? `${prompts.slice(0, 80)} …` : prompts }), ids);
    setSelection(null);
    setTimeout(() => [...document.querySelectorAll(".undo")].at(-1)?.focus());
  };
  const undo = (toast) => {
    videos.undo(toast.ids);
    closeToast(toast);
  };
  const step = (by) => {
    const list = videos.gallery;
    const place = list.findIndex((video) => video.id === viewed);
    const next = list[place + by];
    if (next) setViewed(next.id);
  };
  const acts = {
    again: async (video) => write(video, "again", await formOf(video)),
    vary: async (video) => {
      const seed = String(BigInt(video.settings.seed) + 1n);
      write(video, "vary", { ...(await formOf(video)), seed, count: Math.min(VARIED, models[0].limits.queue) });
    },
    extend: async (video) => {
      const form = await formOf(video);
      write(video, "extend", { ...form, values: { ...form.values, windows: String(Number(video.settings.windows ?? 1) + 1) } });
    },
    last_frame: async (video) => {
      const form = inOnePart(await formOf(video));
      write(video, "last_frame", { ...form, seed: "", locked: false, files: { image: [await lastFrame(video)] } });
    },
    remove: async (video) => {
      setViewed(null);
      remove([video.id]);
    },
  };
  const act = (name, video) => acts[name](video).catch(wrong);
  const download = (ids) => {
    for (const id of ids) {
      const link = Object.assign(document.createElement("a"), { href: contentOf({ id }), download: `${id}.mp4` });
      link.click();
    }
  };

  const video = viewed && videos.known.get(viewed);
  const notes = (shown) => html`<${Toasts} toasts=${shown} undo=${undo} close=${closeToast} />`; // in an open dialog, which covers all else
  return html`
    <header>
      <h1>wanjax</h1>
      <p id="state" role="status">${state.message ?? [state.model && `${text("model")} ${state.model}`, text(state.key)].filter(Boolean).join(": ")}</p>
      <label class="language"><span class="silent">language</span><select id="language" value=${language}
        onChange=${(event) => { speak(event.target.value); setLanguage(event.target.value); }}>
        ${Object.entries(TEXTS).map(([tag, texts]) => html`<option key=${tag} value=${tag} lang=${tag}>${texts.language}</option>`)}</select></label>
    </header>
    <main>
      ${token.needed ? html`<${Login} enter=${enter} wrong=${token.wrong} />` : html`
        <div class="left">
          <${Composer} form=${form} setForm=${form ? setForm : () => {}} models=${models} videos=${videos}
            announce=${announce} needToken=${needToken} open=${setViewed} />
        </div>
        <div class="right">
          <${Queue} videos=${videos} wrong=${wrong} />
          <${Gallery} videos=${videos} open=${setViewed} selection=${selection} setSelection=${setSelection} download=${download}
            remove=${remove} compare=${(ids) => setPair(ids.map((id) => videos.known.get(id)))} language=${language} wrong=${wrong} />
        </div>`}
    </main>
    ${video && html`<${Viewer} video=${video} model=${models.find((one) => one.id === video.model)} step=${step} close=${() => setViewed(null)} act=${act} wrong=${wrong}>${notes(toasts)}<//>`}
    ${pair && html`<${Compare} pair=${pair} close=${() => setPair(null)}>${notes(toasts)}<//>`}
    ${notes(video || pair ? [] : toasts)}
    <p class="silent" role="status">${said}</p>`;
}

render(html`<${App} />`, document.getElementById("app"));
