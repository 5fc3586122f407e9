// SPDX-License-Identifier: Apache-2.0
// The page of `wanjax serve`: the form, the queue and the gallery.

import { contentOf, fetchJson, fileOf, lastFrame } from "./api.js";
import { Composer } from "./composer.js";
import { emptyForm, restoredForm, storedForm, withOneWindow } from "./fields.js";
import { Gallery, Queue, titleOf } from "./gallery.js";
import { TEXTS, language as initialLanguage, setLanguage as storeLanguage, text } from "./texts.js";
import { load, store } from "./storage.js";
import { Compare, Viewer } from "./viewer.js";
import { UNDO_SECONDS, Videos } from "./videos.js";
import { html, render, useEffect, useLayoutEffect, useRef, useState } from "./vendor/preact-htm.js";

const VARIATION_COUNT = 4;
const FORM_KEY = "form";
const SKIPPED_SETTINGS = ["prompt", "height", "width", "seed", "model", "original_prompt", "dtype", "vae_dtype", "precision"]; // copied separately, or set by the server

function Login({ login, error }) {
  return html`<form class="login" id="login" onSubmit=${(event) => { event.preventDefault(); login(new FormData(event.target).get("token")); }}>
    <label for="token">${text("token")}</label>
    <span class="pair"><input id="token" name="token" type="password" autocomplete="current-password" required /><button class="main">${text("enter")}</button></span>
    <p class="wrong" role="alert">${error}</p></form>`;
}

function Toasts({ toasts, undo, close }) {
  return html`<div class="toasts" role="status">${toasts.map((toast) => html`<p key=${toast.key}><span>${toast.message}</span>
    ${toast.ids && html`<button type="button" class="undo" onClick=${() => undo(toast)}>${text("undo")}</button>`}
    <button type="button" class="plain" aria-label=${text("close")} title=${text("close")} onClick=${() => close(toast)}>✕</button></p>`)}</div>`;
}

function App() {
  const [, redraw] = useState(0);
  const [language, setLanguage] = useState(initialLanguage);
  const [state, setState] = useState({ key: "state_connecting" });
  const [models, setModels] = useState([]);
  const [form, setForm] = useState(null);
  const [token, setToken] = useState({ needed: false, wrong: "" });
  const [viewed, setViewed] = useState(null);
  const [comparedVideos, setComparedVideos] = useState(null);
  const [selection, setSelection] = useState(null);
  const [toasts, setToasts] = useState([]);
  const [announcement, announce] = useState("");
  const videosRef = useRef(null);
  const eventSource = useRef(null);
  const isFilled = useRef(false); // whether an action has filled the form, so that the next render shows it

  if (videosRef.current === null) {
    let isScheduled = false;
    videosRef.current = new Videos((before, video) => {
      if (before && video && before.status !== video.status) {
        if (video.status === "completed") announce(text("announce_made", { prompt: titleOf(video) }));
        if (video.status === "failed") announce(video.cancelled ? text("cancelled") : text("announce_failed", { message: video.error?.message ?? "" }));
      }
      if (isScheduled) return; // render at most once per animation frame
      isScheduled = true;
      requestAnimationFrame(() => {
        isScheduled = false;
        redraw((n) => n + 1);
      });
    });
  }
  const videos = videosRef.current;

  const toast = (message, ids = null) => {
    const key = `${Date.now()} ${message}`;
    setToasts((all) => [...all.filter((other) => other.ids || other.message !== message), { key, message, ids }]);
    setTimeout(() => setToasts((all) => all.filter((other) => other.key !== key)), (ids ? UNDO_SECONDS : 10) * 1000);
  };
  const closeToast = (toast) => setToasts((all) => all.filter((other) => other !== toast));
  const showError = (error) => {
    if (error.status === 401) return needToken();
    return toast(error.message);
  };
  const needToken = () => {
    eventSource.current?.close();
    setToken({ needed: true, wrong: "" });
    setState({ key: "state_token" });
  };

  const updateState = async () => {
    const answer = await fetchJson("health").catch((error) => {
      if (error.status === 401) throw error;
      return { status: "broken" };
    });
    setState({ key: `state_${answer.status}`, model: answer.model });
    if (answer.status === "loading") setTimeout(() => updateState().catch(showError), 2000);
  };
  const followEvents = () => {
    eventSource.current?.close();
    const stream = new EventSource("v1/events");
    eventSource.current = stream;
    stream.onmessage = (event) => videos.update(JSON.parse(event.data));
    stream.onopen = () => Promise.all([updateState(), videos.refresh()]).catch(showError);
    stream.onerror = () => {
      setState({ key: "state_away" });
      if (stream.readyState === EventSource.CLOSED) setTimeout(() => loadPage().catch(retryLater), 3000);
    };
  };
  const retryLater = (error) => {
    if (error.status === 401) return needToken();
    if (error.status < 500) return setState({ message: error.message }); // a retry would fail the same way
    setState({ key: "state_away" });
    return setTimeout(() => loadPage().catch(retryLater), 3000);
  };
  const loadPage = async () => {
    const { data } = await fetchJson("v1/models");
    setModels(data);
    const typed = document.getElementById("prompt")?.value;
    setForm((form) => form ?? { ...restoredForm(load(FORM_KEY), data), ...(typed && { prompt: typed }) });
    if (!videos.byId.size) await videos.loadMore();
    followEvents();
  };
  useEffect(() => {
    loadPage().catch(retryLater);
  }, []);

  useLayoutEffect(() => {
    if (!isFilled.current) return;
    isFilled.current = false;
    document.getElementById("make").focus({ preventScroll: true });
    document.querySelector(".composer").scrollIntoView({ behavior: "instant" }); // the button must not move under a pointer
  }, [form]);

  useEffect(() => {
    if (form) store(FORM_KEY, storedForm(form)); // per tab, to survive a reload
  }, [form]);

  const login = async (value) => {
    try {
      await fetchJson("login", { method: "POST", body: new URLSearchParams({ token: value }) });
      setToken({ needed: false, wrong: "" });
      await loadPage();
    } catch (error) {
      setToken({ needed: true, wrong: error.message });
    }
  };

  // Creates a form with all settings and inputs of a video.
  const formOf = async (video) => {
    const model = models.find((model) => model.id === video.model) ?? models[0];
    const record = video.status === "completed" ? await fetchJson(`v1/videos/${video.id}/record`) : video.settings;
    const values = Object.fromEntries(Object.entries(record)
      .filter(([name, value]) => name in model.settings && !SKIPPED_SETTINGS.includes(name) && value !== null)
      .map(([name, value]) => [name, String(value)]));
    if (video.scheduler) values.scheduler = video.scheduler;
    for (const { name, strength } of video.lora ?? []) values[`lora ${name}`] = String(strength);
    const { width, height } = video.settings;
    const isDefaultSize = model.defaults.width === width && model.defaults.height === height;
    if (!isDefaultSize) Object.assign(values, { width: String(width), height: String(height) });
    const files = {};
    for (const variant of video.pictures) {
      const name = variant === "clip" ? "video" : variant.replace(/_\d+$/, "");
      const file = await fileOf(video, variant);
      if (file) files[name] = [...(files[name] ?? []), file];
      else toast(text("gone"));
    }
    const prompt = record.original_prompt?.split("\n")[0] || record.prompt || video.prompt;
    return { ...emptyForm(model), prompt, values, files, shape: isDefaultSize ? "" : "own", seed: String(video.settings.seed), locked: true };
  };
  const fillForm = (video, act, form) => {
    const picture = video.status === "completed" ? contentOf(video, "thumbnail") : null;
    setForm({ ...form, from: { act, picture, seed: form.seed } });
    setViewed(null);
    setComparedVideos(null);
    isFilled.current = true;
  };
  const remove = (ids) => {
    videos.remove(ids);
    const prompts = ids.map((id) => videos.byId.get(id)?.prompt ?? "").join("; ");
    toast(text("deleted_one", { prompt: prompts.length > 80 ? `${prompts.slice(0, 80)} …` : prompts }), ids);
    setSelection(null);
    setTimeout(() => [...document.querySelectorAll(".undo")].at(-1)?.focus());
  };
  const undo = (toast) => {
    videos.undo(toast.ids);
    closeToast(toast);
  };
  const showNeighbour = (offset) => {
    const gallery = videos.gallery;
    const index = gallery.findIndex((video) => video.id === viewed);
    const neighbour = gallery[index + offset];
    if (neighbour) setViewed(neighbour.id);
  };
  const actions = {
    again: async (video) => fillForm(video, "again", await formOf(video)),
    vary: async (video) => {
      const seed = String(BigInt(video.settings.seed) + 1n);
      fillForm(video, "vary", { ...(await formOf(video)), seed, count: Math.min(VARIATION_COUNT, models[0].limits.queue) });
    },
    extend: async (video) => {
      const form = await formOf(video);
      fillForm(video, "extend", { ...form, values: { ...form.values, windows: String(Number(video.settings.windows ?? 1) + 1) } });
    },
    last_frame: async (video) => {
      const form = withOneWindow(await formOf(video));
      fillForm(video, "last_frame", { ...form, seed: "", locked: false, files: { image: [await lastFrame(video)] } });
    },
    remove: async (video) => {
      setViewed(null);
      remove([video.id]);
    },
  };
  const act = (name, video) => actions[name](video).catch(showError);
  const download = (ids) => {
    for (const id of ids) {
      const link = Object.assign(document.createElement("a"), { href: contentOf({ id }), download: `${id}.mp4` });
      link.click();
    }
  };

  const video = viewed && videos.byId.get(viewed);
  const toastList = (toasts) => html`<${Toasts} toasts=${toasts} undo=${undo} close=${closeToast} />`; // an open dialog covers everything else, so it needs its own toasts
  return html`
    <header>
      <h1>wanjax</h1>
      <p id="state" role="status">${state.message ?? [state.model && `${text("model")} ${state.model}`, text(state.key)].filter(Boolean).join(": ")}</p>
      <label class="language"><span class="silent">language</span><select id="language" value=${language}
        onChange=${(event) => { storeLanguage(event.target.value); setLanguage(event.target.value); }}>
        ${Object.entries(TEXTS).map(([tag, texts]) => html`<option key=${tag} value=${tag} lang=${tag}>${texts.language}</option>`)}</select></label>
    </header>
    <main>
      ${token.needed ? html`<${Login} login=${login} error=${token.wrong} />` : html`
        <div class="left">
          <${Composer} form=${form} setForm=${form ? setForm : () => {}} models=${models} videos=${videos} connection=${state.key}
            announce=${announce} needToken=${needToken} open=${setViewed} />
        </div>
        <div class="right">
          <${Queue} videos=${videos} onError=${showError} />
          <${Gallery} videos=${videos} open=${setViewed} selection=${selection} setSelection=${setSelection} download=${download}
            remove=${remove} compare=${(ids) => setComparedVideos(ids.map((id) => videos.byId.get(id)))} language=${language} onError=${showError} />
        </div>`}
    </main>
    ${video && html`<${Viewer} video=${video} model=${models.find((model) => model.id === video.model)} step=${showNeighbour} close=${() => setViewed(null)} act=${act} onError=${showError}>${toastList(toasts)}<//>`}
    ${comparedVideos && html`<${Compare} pair=${comparedVideos} close=${() => setComparedVideos(null)}>${toastList(toasts)}<//>`}
    ${toastList(video || comparedVideos ? [] : toasts)}
    <p class="silent" role="status">${announcement}</p>`;
}

render(html`<${App} />`, document.getElementById("app"));
