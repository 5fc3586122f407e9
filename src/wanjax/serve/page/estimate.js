// SPDX-License-Identifier: Apache-2.0
// Estimates of the time that a video takes, from finished videos of this server or the results of `wanjax plan`.

const NEAREST_COUNT = 8;

const median = (numbers) => [...numbers].sort((a, b) => a - b)[Math.floor(numbers.length / 2)];
const pixelCount = ({ width, height, frames, windows = 1 }) => width * height * frames * windows;
const passesPerStep = ({ guidance_scale = 1, guidance_scale_2 = 1 }) => (Math.max(guidance_scale, guidance_scale_2 ?? 1) > 1 ? 2 : 1);
const work = (settings) => pixelCount(settings) * settings.steps * passesPerStep(settings);

// Estimates the seconds of each stage from finished videos of the same model. Returns null if there are none.
export function stagesOf(model, settings, videos) {
  return scaleExamples(settings, videos.filter((video) => video.status === "completed" && video.model === model && video.stage_seconds.denoise));
}

// Estimates the seconds of each stage from the results of `wanjax plan`. Returns null if there are none.
export const estimatedStages = (model, settings) => scaleExamples(settings, model.estimates);

function scaleExamples(settings, examples) {
  const distance = (other) => Math.abs(Math.log(work(other.settings) / work(settings)));
  const nearest = examples
    .filter((example) => example.settings.cache === settings.cache)
    .sort((a, b) => distance(a) - distance(b))
    .slice(0, NEAREST_COUNT);
  if (!nearest.length) return null;
  const rate = (stage, amount) => median(nearest.map((example) => (example.stage_seconds[stage] ?? 0) / amount(example.settings)));
  return {
    encode: rate("encode", () => 1),
    denoise: rate("denoise", work) * work(settings),
    decode: rate("decode", pixelCount) * pixelCount(settings),
  };
}

export const total = (stages) => Object.values(stages).reduce((sum, seconds) => sum + seconds, 0);

// Estimates the seconds until a running video is completed. Returns null if they are unknown, for example during compilation.
export function secondsLeft(video, stageStart, videos) {
  const stages = stagesOf(video.model, video.settings, videos);
  const windows = video.settings.windows ?? 1;
  const laterNames = { encode: ["denoise", "decode"], denoise: ["decode"], decode: [] }[video.stage];
  if (!laterNames) return null;
  const remainingUnits = video.stage_total - video.stage_done;
  const finishedUnits = stageStart && stageStart.stage === video.stage ? video.stage_done - stageStart.done : 0;
  const measuredSeconds = finishedUnits > 0 ? (remainingUnits * (performance.now() - stageStart.at)) / 1000 / finishedUnits : null;
  const remainingShare = video.stage_total ? remainingUnits / video.stage_total : 1;
  const currentStage = measuredSeconds ?? (stages ? (stages[video.stage] / windows) * remainingShare : null);
  if (currentStage === null) return null;
  const laterStages = stages ? laterNames.reduce((sum, name) => sum + stages[name] / windows, 0) : 0;
  const laterWindows = stages ? (total(stages) / windows) * (windows - (video.window || 1)) : 0;
  return currentStage + laterStages + laterWindows;
}

// Estimates the seconds until each video of the queue is completed. The result maps video ids to seconds. Several workers may run at the same time.
export function finishTimes(queue, stageStarts, videos) {
  const endTimes = new Map();
  const workerTimes = [];
  for (const video of queue) {
    if (video.status === "in_progress") {
      const seconds = secondsLeft(video, stageStarts.get(video.id), videos);
      endTimes.set(video.id, seconds);
      workerTimes.push(seconds);
      continue;
    }
    if (!workerTimes.length) workerTimes.push(0);
    const stages = stagesOf(video.model, video.settings, videos);
    const nextWorker = workerTimes.indexOf(Math.min(...workerTimes));
    const end = stages === null || workerTimes.includes(null) ? null : workerTimes[nextWorker] + total(stages);
    workerTimes[nextWorker] = end;
    endTimes.set(video.id, end);
  }
  return endTimes;
}
