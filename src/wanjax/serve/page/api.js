// SPDX-License-Identifier: Apache-2.0
// Requests to the server, whose addresses are relative: it may be behind a proxy, under a path of its own.

// A request that the server refused, or that the page does not send; `param` names the field that is wrong.
export class Refused extends Error {
  constructor(status, message, param = null) {
    super(message);
    Object.assign(this, { status, param });
  }
}

// Keeps the digits of a seed, which may be larger than a number of this language.
function exact(name, value, context) {
  return name === "seed" && context?.source ? context.source : value;
}

export async function ask(path, options = {}) {
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

export function contentOf(video, variant = null) {
  return `v1/videos/${video.id}/content${variant ? `?variant=${variant}` : ""}`;
}

// Returns a file that a video was made from, as a file to send again.
export async function fileOf(video, variant) {
  const answer = await fetch(contentOf(video, variant));
  if (!answer.ok) return null;
  const type = answer.headers.get("content-type");
  return new File([await answer.blob()], `${variant}.${type.split("/").pop()}`, { type });
}

// Returns the last frame of a video as a picture.
export async function lastFrame(video) {
  const player = Object.assign(document.createElement("video"), { muted: true, preload: "auto", src: contentOf(video) });
  const happened = (name) => new Promise((done, failed) => {
    player.addEventListener(name, done, { once: true });
    player.addEventListener("error", () => failed(new Error(player.error?.message ?? "error")), { once: true });
  });
  await happened("loadeddata");
  player.currentTime = Math.max(0, player.duration - 0.5 / video.settings.fps);
  await happened("seeked");
  const canvas = Object.assign(document.createElement("canvas"), { width: player.videoWidth, height: player.videoHeight });
  canvas.getContext("2d").drawImage(player, 0, 0);
  const blob = await new Promise((done) => canvas.toBlob(done, "image/png"));
  return new File([blob], "last-frame.png", { type: "image/png" });
}
