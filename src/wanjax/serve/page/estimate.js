// SPDX-License-Identifier: Apache-2.0
// How long a video takes, from the seconds that this server took for others or, before the first, from `wanjax plan`.

const NEAREST = 8;

const median = (numbers) => [...numbers].sort((a, b) => a - b)[Math.floor(numbers.length / 2)];
const cells = ({ width, height, frames, windows = 1 }) => width * height * frames * windows;
const prompts = ({ guidance_scale = 1, guidance_scale_2 = 1 }) => (Math.max(guidance_scale, guidance_scale_2 ?? 1) > 1 ? 2 : 1);
const work = (settings) => cells(settings) * settings.steps * prompts(settings);

// Returns the seconds of each stage of a video, or null where this server has made none of this model.
export function stagesOf(model, settings, videos) {
  return scaled(settings, videos.filter((one) => one.status === "completed" && one.model === model && one.stage_seconds.denoise));
}

// Returns the same from the estimates of `wanjax plan` for this model on such devices, or null where there are none.
export const estimatedStages = (model, settings) => scaled(settings, model.estimates);

function scaled(settings, examples) {
  const distance = (other) => Math.abs(Math.log(work(other.settings) / work(settings)));
  const near = examples
    .filter((one) => one.settings.cache === settings.cache)
    .sort((a, b) => distance(a) - distance(b))
    .slice(0, NEAREST);
  if (!near.length) return null;
  const rate = (stage, amount) => median(near.map((one) => (one.stage_seconds[stage] ?? 0) / amount(one.settings)));
  return {
    encode: rate("encode", () => 1),
    denoise: rate("denoise", work) * work(settings),
    decode: rate("decode", cells) * cells(settings),
  };
}

export const total = (stages) => Object.values(stages).reduce((sum, one) => sum + one, 0);

// Returns the seconds until a video is made that is under way, or null where that is not known, as before all is compiled.
export function secondsLeft(video, clock, videos) {
  const stages = stagesOf(video.model, video.settings, videos);
  const windows = video.settings.windows ?? 1;
  const after = { encode: ["denoise", "decode"], denoise: ["decode"], decode: [] }[video.stage];
  if (!after) return null;
  const open = video.stage_total - video.stage_done;
  const seen = clock && clock.stage === video.stage ? video.stage_done - clock.done : 0;
  const measured = seen > 0 ? (open * (performance.now() - clock.at)) / 1000 / seen : null;
  const share = video.stage_total ? open / video.stage_total : 1;
  const here = measured ?? (stages ? (stages[video.stage] / windows) * share : null);
  if (here === null) return null;
  const rest = stages ? after.reduce((sum, name) => sum + stages[name] / windows, 0) : 0;
  const parts = stages ? (total(stages) / windows) * (windows - (video.window || 1)) : 0;
  return here + rest + parts;
}

// Returns the seconds until each video of a queue is made, by id; workers make several at a time.
export function finishes(queue, clocks, videos) {
  const found = new Map();
  const workers = [];
  for (const video of queue) {
    if (video.status === "in_progress") {
      const left = secondsLeft(video, clocks.get(video.id), videos);
      found.set(video.id, left);
      workers.push(left);
      continue;
    }
    if (!workers.length) workers.push(0);
    const own = stagesOf(video.model, video.settings, videos);
    const first = workers.indexOf(Math.min(...workers));
    const end = own === null || workers.includes(null) ? null : workers[first] + total(own);
    workers[first] = end;
    found.set(video.id, end);
  }
  return found;
}
