// What the demo model can be asked: facts, and a question about one of them.

import { request } from './api.js';

const NAMES = ['Mira', 'Otto', 'Ada', 'Boris', 'Clara', 'Dylan', 'Elsa', 'Felix', 'Greta', 'Emil', 'Flora', 'Gavin'];
const LENGTHS = [150, 400, 800];
const PROMPTS = 8;

/** Codes are drawn anew, so that nobody thinks the model knows them by heart. */
export function question(numFacts) {
  const names = NAMES.slice(0, numFacts);
  const facts = names.map((name) => `The code of ${name} is ${String(Math.floor(Math.random() * 10000)).padStart(4, '0')}.`);
  return `${facts.join(' ')} What is the code of ${names[Math.floor(Math.random() * numFacts)]}?`;
}

/**
 * Many long answers at once, which nobody reads: the pools have something to do. A browser opens few connections to one
 * host, so each request has several prompts; inside the gateway each prompt is a request of its own.
 */
export async function burst() {
  const ask = (maxTokens) => request('/v1/completions', {
    method: 'POST',
    headers: { 'Content-Type': 'application/json' },
    body: JSON.stringify({
      prompt: Array.from({ length: PROMPTS }, () => question(NAMES.length)),
      max_tokens: maxTokens,
      ignore_eos: true,
    }),
  }).then((response) => response.json());
  const ends = await Promise.allSettled(LENGTHS.map(ask));
  const numDone = PROMPTS * ends.filter((end) => end.status === 'fulfilled').length;
  const numAsked = PROMPTS * LENGTHS.length;
  return numDone === numAsked ? `All ${numAsked} are done.` : `${numDone} of ${numAsked} are done, the others failed.`;
}
