// SPDX-License-Identifier: Apache-2.0
// Requests to the server. URLs are relative, because a proxy may serve the page under any path.

import { text } from "./texts.js";

// The error of a request, reported by the server or by the form. `param` is the wrong field, or null.
export class RequestError extends Error {
  constructor(status, message, param = null) {
    super(message);
    Object.assign(this, { status, param });
  }
}

// A JSON reviver that keeps the digits of a seed, because a seed may be too large for a JavaScript number.
function keepSeedDigits(name, value, context) {
  return name === "seed" && context?.source ? context.source : value;
}

// Sends a request; a server that does not answer gives an error in words, without a status.
async function send(path, options) {
  try {
    return await fetch(path, options);
  } catch {
    throw new RequestError(undefined, text("no_answer"));
  }
}

export async function fetchJson(path, options = {}) {
  const response = await send(path, options);
  if (response.ok) return response.status === 204 ? null : JSON.parse(await response.text(), keepSeedDigits);
  let error = { message: `${response.status} ${response.statusText}`, param: null };
  try {
    error = (await response.json()).error ?? error;
  } catch {
    // the response is not JSON: show its status
  }
  throw new RequestError(response.status, error.message, error.param);
}

export function contentOf(video, variant = null) {
  return `v1/videos/${video.id}/content${variant ? `?variant=${variant}` : ""}`;
}

// Downloads an input file of a video, so that a new request can send the file again.
export async function fileOf(video, variant) {
  const response = await send(contentOf(video, variant));
  if (!response.ok) return null;
  const type = response.headers.get("content-type");
  return new File([await response.blob()], `${variant}.${type.split("/").pop()}`, { type });
}

// Extracts the last frame of a video as a PNG file.
export async function lastFrame(video) {
  const player = Object.assign(document.createElement("video"), { muted: true, preload: "auto", src: contentOf(video) });
  const waitForEvent = (name) => new Promise((resolve, reject) => {
    player.addEventListener(name, resolve, { once: true });
    player.addEventListener("error", () => reject(new Error(player.error?.message ?? "error")), { once: true });
  });
  await waitForEvent("loadeddata");
  player.currentTime = Math.max(0, player.duration - 0.5 / video.settings.fps);
  await waitForEvent("seeked");
  const canvas = Object.assign(document.createElement("canvas"), { width: player.videoWidth, height: player.videoHeight });
  canvas.getContext("2d").drawImage(player, 0, 0);
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  return new File([blob], "last-frame.png", { type: "image/png" });
}
