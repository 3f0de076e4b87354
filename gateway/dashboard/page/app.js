// The page: one feed of the pools, from which everything but the chat is drawn.

import { ApiError, apiKey, events, keepApiKey, request } from './api.js';
import { Chat } from './chat.js';
import { count, setText } from './format.js';
import { Plots } from './plots.js';
import { Relay } from './relay.js';
import * as samples from './samples.js';

const element = (id) => document.getElementById(id);
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 8000;

const chat = new Chat();
const relay = new Relay();
const plots = new Plots();
let wake = () => {};

function feedState(state, words) {
  element('feed').dataset.state = state;
  setText(element('feed'), words);
}

function show(view) {
  setText(element('model'), view.model);
  document.title = `Baton · ${view.model}`;
  if (view.model === 'demo' && element('samples').hidden) {
    element('samples').hidden = false;
    element('temperature').value = '0'; // its likeliest answer is the right one
  }
  const { summary } = view;
  setText(element('figure-in-flight'), count(view.in_flight));
  setText(element('figure-requests'), count(summary.requests_per_s));
  setText(element('figure-tokens'), count(summary.output_tokens_per_s));
  setText(element('figure-refused'), count(summary.refused_per_s));
  relay.show(view);
  plots.show(view.recent, summary);
}

/** Watch for as long as somebody looks at the page; come back after every end of the stream. */
async function watch() {
  let waitMs = FIRST_WAIT_MS;
  for (;;) {
    while (document.hidden) await nextWake();
    const controller = new AbortController();
    const leave = () => document.hidden && controller.abort();
    document.addEventListener('visibilitychange', leave);
    try {
      const response = await request('/pools/events', { signal: controller.signal });
      plots.forget(); // this stream may be of another gateway, and its first event has all slots
      for await (const data of events(response)) {
        feedState('live', 'live');
        waitMs = FIRST_WAIT_MS;
        show(JSON.parse(data));
      }
      feedState('waiting', 'reconnecting');
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) {
        askForKey();
        await nextWake();
        continue;
      }
      if (!(error instanceof ApiError) && !(error instanceof TypeError) && !controller.signal.aborted) {
        console.error(error); // no refusal and no broken connection: a bug
      }
      const full = error instanceof ApiError && error.status === 429;
      if (!controller.signal.aborted) feedState('waiting', full ? 'too many watch already' : 'reconnecting');
    } finally {
      document.removeEventListener('visibilitychange', leave);
    }
    await Promise.race([nextWake(), new Promise((resolve) => { setTimeout(resolve, waitMs); })]);
    waitMs = Math.min(waitMs * 2, LONGEST_WAIT_MS);
  }
}

function nextWake() {
  return new Promise((resolve) => { wake = resolve; });
}

function askForKey() {
  feedState('locked', 'needs an API key');
  element('settings').open = true;
  element('api-key').focus();
}

document.addEventListener('visibilitychange', () => wake());
element('api-key').value = apiKey();
element('api-key').addEventListener('change', () => {
  keepApiKey(element('api-key').value.trim());
  wake();
});
chat.onUnauthorized = askForKey;
element('sample').addEventListener('click', () => !chat.busy && chat.ask(samples.question(8)));
let bursting = false;
element('burst').addEventListener('click', async () => {
  if (bursting) return;
  bursting = true;
  element('burst').setAttribute('aria-disabled', 'true');
  setText(element('burst-result'), 'Watch the pools.');
  setText(element('burst-result'), await samples.burst());
  element('burst').removeAttribute('aria-disabled');
  bursting = false;
});
watch();
