// Live updates: the page is asked for again, and the sections that differ are exchanged. Without this script the page
// loads itself anew every few seconds.
"use strict";
const EVERY_MS = 1000;
const LOST = document.getElementById("lost");

const exchange = (fresh) => {
  document.title = fresh.title;
  for (const next of fresh.querySelectorAll("[data-live]")) {
    const now = document.getElementById(next.id);
    if (!now || now.outerHTML === next.outerHTML) continue;
    for (const details of now.querySelectorAll("details[open]")) {
      const again = next.querySelector(`#${CSS.escape(details.id)}`);
      if (again) again.open = true;
    }
    const focused = now.contains(document.activeElement) ? document.activeElement.id : "";
    now.replaceWith(document.adoptNode(next));
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  }
};

const update = async () => {
  if (!document.hidden) {
    try {
      const reply = await fetch(location.pathname, { cache: "no-store", signal: AbortSignal.timeout(10 * EVERY_MS) });
      if (!reply.ok) throw new Error(`status ${reply.status}`);
      exchange(new DOMParser().parseFromString(await reply.text(), "text/html"));
      LOST.hidden = true;
    } catch {
      LOST.hidden = false;
    }
  }
  setTimeout(update, EVERY_MS);
};

setTimeout(update, EVERY_MS);
