// SPDX-License-Identifier: Apache-2.0
// The videos that the page knows, kept as the server has them: pages of its list, and events as they change.

import { ask } from "./api.js";

const PAGE = 24;
export const UNDO_SECONDS = 25;
const OVER = ["completed", "failed"];

export const isOver = (video) => OVER.includes(video.status);

export class Videos {
  constructor(changed) {
    this.changed = changed; // called after each change, with the video before and after it if one changed
    this.known = new Map(); // id -> video
    this.removed = new Map(); // id -> timer, of those that are deleted unless that is undone
    this.gone = new Set(); // ids that an answer which was under way may still name
    this.clocks = new Map(); // id -> where and when a stage was first seen
    this.places = new Map(); // id -> its place among those of the same second
    this.newest = this.oldest = 0;
    Object.assign(this, { last: null, hasMore: false, query: "", loading: false, found: null });
  }

  // Takes a video as the server tells of it, unless a newer state of it is known: answers may overtake each other.
  put(video, older = false) {
    if (video.deleted) return this.forget(video.id);
    if (!this.places.has(video.id)) this.places.set(video.id, older ? --this.oldest : ++this.newest);
    const before = this.known.get(video.id);
    if (this.gone.has(video.id) || before?.version > video.version) return;
    this.known.set(video.id, video);
    const clock = this.clocks.get(video.id);
    if (clock?.stage !== video.stage || clock?.window !== video.window) {
      const { stage, window, stage_done: done } = video;
      this.clocks.set(video.id, { stage, window, done, at: performance.now() });
    }
    this.changed(before, video);
  }

  forget(id) {
    this.gone.add(id);
    this.known.delete(id);
    this.found?.delete(id);
    this.changed();
  }

  // Those in making and those that wait, in the order in which they are made.
  get queue() {
    const place = (video) => (video.status === "in_progress" ? -1 : video.queue_position);
    return [...this.known.values()].filter((video) => !isOver(video)).sort((a, b) => place(a) - place(b));
  }

  // Those that are over, the newest first, of a search those that it found.
  get gallery() {
    const shown = (video) => isOver(video) && !this.removed.has(video.id) && (!this.found || this.found.has(video.id));
    const place = (video) => this.places.get(video.id);
    return [...this.known.values()].filter(shown).sort((a, b) => b.created_at - a.created_at || place(b) - place(a));
  }

  async more() {
    if (this.loading) return;
    this.loading = true;
    const query = this.query;
    try {
      const fields = new URLSearchParams({ limit: PAGE, ...(this.last && { after: this.last }), ...(query && { query }) });
      const page = await ask(`v1/videos?${fields}`);
      if (query !== this.query) return;
      for (const video of page.data) {
        this.found?.add(video.id);
        this.put(video, true);
      }
      this.last = page.last_id ?? this.last;
      this.hasMore = page.has_more;
    } finally {
      this.loading = false;
      this.changed();
      if (query !== this.query) await this.more();
    }
  }

  async search(query) {
    Object.assign(this, { query, last: null, hasMore: false, found: query ? new Set() : null });
    await this.more();
  }

  // Learns what changed while there was no connection: new videos, and those that were deleted by others.
  async refresh() {
    const page = await ask(`v1/videos?limit=${PAGE}`);
    for (const video of [...page.data].reverse()) this.put(video);
    const there = new Set(page.data.map((video) => video.id));
    if (!page.has_more) for (const id of [...this.known.keys()]) if (!there.has(id)) this.forget(id);
    this.last ??= page.last_id;
    if (!this.found) this.hasMore ||= page.has_more && this.known.size <= PAGE;
  }

  // Hides videos, and deletes them after a while in which it can be undone.
  remove(ids) {
    for (const id of ids) this.removed.set(id, setTimeout(() => this.send(id), (UNDO_SECONDS + 1) * 1000));
    this.changed();
  }

  undo(ids) {
    for (const id of ids) {
      clearTimeout(this.removed.get(id));
      this.removed.delete(id);
    }
    this.changed();
  }

  async send(id) {
    clearTimeout(this.removed.get(id));
    try {
      await ask(`v1/videos/${id}`, { method: "DELETE", keepalive: true });
    } catch (error) {
      if (error.status !== 404) {
        this.removed.delete(id);
        this.changed();
        throw error;
      }
    }
    this.forget(id);
    this.removed.delete(id);
  }

  // Deletes at once what waits for that: the page is left.
  leave() {
    for (const id of this.removed.keys()) this.send(id).catch(() => {});
  }

  async cancel(video) {
    this.known.set(video.id, { ...video, cancelled: true }); // shown at once; the server's answer follows
    this.changed();
    this.put(await ask(`v1/videos/${video.id}/cancel`, { method: "POST" }));
  }
}
