// SPDX-License-Identifier: Apache-2.0
// The state that a reload of this tab restores: the form without its files, and which sections are open.

import { useState } from "./vendor/preact-htm.js";

export function load(key) {
  try {
    return JSON.parse(sessionStorage.getItem(`wanjax ${key}`));
  } catch {
    return null; // written by another version, or the browser stores nothing
  }
}

export function store(key, value) {
  try {
    sessionStorage.setItem(`wanjax ${key}`, JSON.stringify(value));
  } catch {
    // the browser stores nothing, or its storage is full: the page works without it
  }
}

// A state variable that a reload restores.
export function useStored(key, initial) {
  const [value, setValue] = useState(() => load(key) ?? initial);
  const setAndStore = (value) => {
    store(key, value); // at once, because a reload may come before the next render
    setValue(value);
  };
  return [value, setAndStore];
}
