// SPDX-License-Identifier: Apache-2.0
// The videos that the page has loaded. Events keep them up to date.

import { fetchJson } from "./api.js";

const PAGE = 24;
export const UNDO_SECONDS = 25;
const END_STATES = ["completed", "failed"];

export const isOver = (video) => END_STATES.includes(video.status);

export class Videos {
  constructor(onChange) {
    this.onChange = onChange; // called after each change, with the old and the new state of the video
    this.byId = new Map(); // id -> video
    this.pendingDeletes = new Map(); // id -> timer; when the timer ends, the video is deleted, unless the user clicked undo
    this.deletedIds = new Set(); // ids to ignore in responses that arrive later
    this.stageStarts = new Map(); // id -> the stage, its progress and the time when it was first seen
    this.arrivalOrder = new Map(); // id -> order among videos of the same second
    this.newest = this.oldest = 0;
    Object.assign(this, { last: null, hasMore: false, query: "", loading: false, isLoaded: false, matchingIds: null });
  }

  // Stores the state of a video. Responses may arrive out of order, so an older state is ignored.
  update(video, older = false) {
    if (video.deleted) return this.forget(video.id);
    if (!this.arrivalOrder.has(video.id)) this.arrivalOrder.set(video.id, older ? --this.oldest : ++this.newest);
    const before = this.byId.get(video.id);
    if (this.deletedIds.has(video.id) || before?.version > video.version) return;
    this.byId.set(video.id, video);
    const stageStart = this.stageStarts.get(video.id);
    if (stageStart?.stage !== video.stage || stageStart?.window !== video.window) {
      const { stage, window, stage_done: done } = video;
      this.stageStarts.set(video.id, { stage, window, done, at: performance.now() });
    }
    this.onChange(before, video);
  }

  forget(id) {
    this.deletedIds.add(id);
    this.byId.delete(id);
    this.matchingIds?.delete(id);
    this.onChange();
  }

  // Running and waiting videos, in the order of the queue.
  get queue() {
    const position = (video) => (video.status === "in_progress" ? -1 : video.queue_position);
    return [...this.byId.values()].filter((video) => !isOver(video)).sort((a, b) => position(a) - position(b));
  }

  // Finished videos that match the search, the newest first.
  get gallery() {
    const isShown = (video) => isOver(video) && !this.pendingDeletes.has(video.id) && (!this.matchingIds || this.matchingIds.has(video.id));
    const order = (video) => this.arrivalOrder.get(video.id);
    return [...this.byId.values()].filter(isShown).sort((a, b) => b.created_at - a.created_at || order(b) - order(a));
  }

  async loadMore() {
    if (this.loading) return;
    this.loading = true;
    const query = this.query;
    try {
      const fields = new URLSearchParams({ limit: PAGE, ...(this.last && { after: this.last }), ...(query && { query }) });
      const page = await fetchJson(`v1/videos?${fields}`);
      if (query !== this.query) return;
      for (const video of page.data) {
        this.matchingIds?.add(video.id);
        this.update(video, true);
      }
      this.last = page.last_id ?? this.last;
      this.hasMore = page.has_more;
      this.isLoaded = true;
    } finally {
      this.loading = false;
      this.onChange();
      if (query !== this.query) await this.loadMore();
    }
  }

  async search(query) {
    Object.assign(this, { query, last: null, hasMore: false, matchingIds: query ? new Set() : null });
    await this.loadMore();
  }

  // Loads the changes since the connection was lost: new videos and deleted videos.
  async refresh() {
    const knownIds = [...this.byId.keys()]; // a video that is requested meanwhile may be missing in the response
    const page = await fetchJson(`v1/videos?limit=${PAGE}`);
    for (const video of [...page.data].reverse()) this.update(video);
    const serverIds = new Set(page.data.map((video) => video.id));
    if (!page.has_more) for (const id of knownIds) if (!serverIds.has(id)) this.forget(id);
    this.last ??= page.last_id;
    if (!this.matchingIds) this.hasMore ||= page.has_more && this.byId.size <= PAGE;
  }

  // Hides videos, and deletes them after a delay in which the user can undo it. If the user leaves the page first, nothing is deleted.
  remove(ids) {
    for (const id of ids) this.pendingDeletes.set(id, setTimeout(() => this.deleteNow(id), (UNDO_SECONDS + 1) * 1000));
    this.onChange();
  }

  undo(ids) {
    for (const id of ids) {
      clearTimeout(this.pendingDeletes.get(id));
      this.pendingDeletes.delete(id);
    }
    this.onChange();
  }

  async deleteNow(id) {
    clearTimeout(this.pendingDeletes.get(id));
    try {
      await fetchJson(`v1/videos/${id}`, { method: "DELETE", keepalive: true });
    } catch (error) {
      if (error.status !== 404) {
        this.pendingDeletes.delete(id);
        this.onChange();
        throw error;
      }
    }
    this.forget(id);
    this.pendingDeletes.delete(id);
  }

  async cancel(video) {
    this.byId.set(video.id, { ...video, cancelled: true }); // shown before the server answers
    this.onChange();
    this.update(await fetchJson(`v1/videos/${video.id}/cancel`, { method: "POST" }));
  }
}
