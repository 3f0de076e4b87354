// The chat: its history lives in this page and nowhere else. What the model says is text, never markup.

import { ApiError, pieces, stream } from './api.js';
import { count, seconds, setText } from './format.js';

const element = (id) => document.getElementById(id);

export class Chat {
  constructor() {
    this.messages = [];
    this.controller = null;
    this.onUnauthorized = () => {};
    this.prompt = element('prompt');
    this.turns = element('turns');
    element('composer').addEventListener('submit', (event) => {
      event.preventDefault();
      this.submit();
    });
    this.prompt.addEventListener('keydown', (event) => {
      if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.submit();
    });
    element('chat-title').closest('section').addEventListener('keydown', (event) => {
      if (event.key === 'Escape') this.stop();
    });
    element('stop').addEventListener('click', () => this.stop());
    element('new-chat').addEventListener('click', () => this.clear());
  }

  get busy() {
    return this.controller !== null;
  }

  submit() {
    const text = this.prompt.value;
    if (this.busy || !text.trim()) return;
    this.prompt.value = '';
    this.ask(text);
  }

  stop() {
    this.controller?.abort();
  }

  clear() {
    this.stop();
    this.setBusy(null);
    this.messages = [];
    element('turn-list').replaceChildren();
    element('welcome').hidden = false;
    this.prompt.focus();
  }

  /** Ask, and show the answer as it comes. */
  async ask(text) {
    const controller = new AbortController();
    this.setBusy(controller);
    element('welcome').hidden = true;
    addTurn('user', 'You').write({ text });
    const answer = addTurn('assistant', 'Model');
    this.scrollDown();
    const question = { role: 'user', content: text };
    const watch = new Stopwatch();
    let said = '';
    let failure = null;
    try {
      const body = this.body([...this.messages, question]);
      for await (const piece of pieces(await stream('/v1/chat/completions', body, controller.signal))) {
        watch.see(piece);
        said += piece.text;
        answer.write(piece, () => this.scrollDown());
      }
    } catch (error) {
      failure = error;
    }
    if (this.controller !== controller) return; // a new chat has begun
    if (!failure || controller.signal.aborted) this.messages.push(question, { role: 'assistant', content: said });
    this.conclude(answer, said, watch, controller.signal.aborted ? 'stopped' : null, failure, text);
    this.setBusy(null);
  }

  conclude(answer, said, watch, stopped, failure, text) {
    const failed = failure && !stopped;
    answer.end(watch.describe(stopped));
    if (failed) {
      answer.fail(wordError(failure));
      if (!this.prompt.value) this.prompt.value = text; // to be sent again
      if (failure instanceof ApiError && failure.status === 401) this.onUnauthorized();
    }
    this.scrollDown();
    const end = failed ? `Error: ${wordError(failure)}` : stopped ?? '';
    setText(element('answer-live'), [said && `Answer: ${said}`, end].filter(Boolean).join('. '));
  }

  body(messages) {
    const body = {
      messages,
      stream: true,
      stream_options: { include_usage: true },
      service_tier: element('tier').value,
    };
    const temperature = element('temperature').valueAsNumber;
    const maxTokens = element('max-tokens').valueAsNumber;
    if (!Number.isNaN(temperature)) body.temperature = temperature;
    if (!Number.isNaN(maxTokens)) body.max_tokens = maxTokens;
    return body;
  }

  setBusy(controller) {
    this.controller = controller;
    const [shown, gone] = controller ? [element('stop'), element('send')] : [element('send'), element('stop')];
    const focused = document.activeElement === gone;
    shown.hidden = false;
    gone.hidden = true;
    if (focused) shown.focus();
    if (controller) setText(element('answer-live'), 'Waiting for the answer');
    this.turns.setAttribute('aria-busy', String(Boolean(controller)));
  }

  scrollDown() {
    this.turns.scrollTop = this.turns.scrollHeight;
  }
}

/** A turn of the conversation on the page. */
function addTurn(role, name) {
  const item = document.createElement('li');
  item.className = 'turn';
  item.dataset.role = role;
  const who = document.createElement('p');
  who.className = 'who';
  who.textContent = name;
  const said = document.createElement('p');
  said.className = 'said';
  const text = pendingText(said);
  item.append(who, said);
  if (role === 'assistant') item.dataset.state = 'waiting';
  element('turn-list').append(item);
  let thought = null;
  let frame = 0;
  const flush = () => {
    frame = 0;
    text.flush();
    thought?.text.flush();
  };
  const note = (className, words) => {
    const line = document.createElement('p');
    line.className = className;
    line.textContent = words;
    item.append(line);
  };
  return {
    /** Text is shown once a frame, however many tokens come. */
    write(piece, shown = () => {}) {
      if (!piece.text && !piece.reasoning) return;
      if (piece.reasoning) {
        thought ??= addThought(said);
        thought.text.add(piece.reasoning);
      }
      if (piece.text) {
        if (thought && !text.begun) thought.details.open = false;
        text.add(piece.text);
      }
      if (item.dataset.state === 'waiting') item.dataset.state = 'writing';
      frame ||= requestAnimationFrame(() => {
        flush();
        shown();
      });
    },
    end(words) {
      cancelAnimationFrame(frame);
      flush();
      delete item.dataset.state;
      if (words) note('stats', words);
    },
    fail(words) {
      note('failure', words);
    },
  };
}

/** What the model thinks, above what it says: open until it says something. */
function addThought(said) {
  const details = document.createElement('details');
  details.className = 'thought';
  details.open = true;
  const summary = document.createElement('summary');
  summary.textContent = 'Reasoning';
  const words = document.createElement('p');
  details.append(summary, words);
  said.before(details);
  return { details, text: pendingText(words) };
}

/** Text at the end of `parent` that is added to, and shown when it is flushed. */
function pendingText(parent) {
  const node = document.createTextNode('');
  parent.append(node);
  let pending = '';
  return {
    begun: false,
    add(more) {
      pending += more;
      this.begun = true;
    },
    flush() {
      node.data += pending;
      pending = '';
    },
  };
}

/** Times of one answer, as its reader has them. */
class Stopwatch {
  constructor() {
    this.askedMs = performance.now();
    this.firstMs = null;
    this.lastMs = null;
    this.numPieces = 0;
    this.usage = null;
    this.finishReason = null;
  }

  see(piece) {
    if (piece.usage) this.usage = piece.usage;
    if (piece.finishReason) this.finishReason = piece.finishReason;
    if (!piece.text && !piece.reasoning) return;
    this.lastMs = performance.now();
    this.firstMs ??= this.lastMs;
    this.numPieces += 1;
  }

  describe(stopped) {
    const parts = [];
    if (this.firstMs !== null) {
      const tokens = this.usage?.completion_tokens ?? this.numPieces;
      const elapsedS = (this.lastMs - this.askedMs) / 1000;
      parts.push(`TTFT ${seconds((this.firstMs - this.askedMs) / 1000)}`);
      parts.push(`${count(tokens)} ${tokens === 1 ? 'token' : 'tokens'} in ${seconds(elapsedS)}`);
      parts.push(`${count(tokens / elapsedS)} tokens/s`);
    }
    if (stopped) parts.push(stopped);
    else if (this.finishReason === 'length') parts.push('cut at max tokens');
    return parts.join(' · ');
  }
}

function wordError(error) {
  if (!(error instanceof ApiError)) return 'The gateway cannot be reached.';
  const hint = error.retryAfterS ? ` Try again in ${error.retryAfterS} s.` : '';
  const code = error.code ? ` (${error.code})` : '';
  return `${error.message}${code}.${hint}`;
}
