// The pools as a relay: requests as runners at the workers, and a baton that travels with each handoff.

import { count, percent, setText } from './format.js';
import { Tracks } from './tracks.js';

const element = (id) => document.getElementById(id);
const ROLE_NAMES = { prefill: 'Prefill', decode: 'Decode' };
const MAX_RUNNERS = 24;
const RATE_WINDOW_MS = 2000;

export class Relay {
  constructor() {
    this.workers = new Map(); // id → WorkerCard
    this.tracks = new Tracks(element('relay'), element('lines'), element('batons'));
    this.handoffs = new Map(); // 'prefill decode' → count in the last event, of the pairs that it listed
    this.moving = new Set();
    this.adminPort = null;
    element('confirm').addEventListener('close', () => this.confirmed());
  }

  show(view) {
    this.adminPort = view.admin_port;
    this.view = view;
    this.showWorkers(view.workers);
    this.showRequests(view);
    this.launchBatons(view);
  }

  showWorkers(workers) {
    const numbers = { prefill: 0, decode: 0 };
    const known = new Set(workers.map((worker) => worker.id));
    for (const [id, card] of this.workers) {
      if (!known.has(id)) {
        card.item.remove();
        this.workers.delete(id);
      }
    }
    for (const worker of workers) {
      numbers[worker.role] += 1;
      let card = this.workers.get(worker.id);
      if (!card) {
        card = new WorkerCard(worker.role, (verb) => this.ask(worker.id, verb));
        this.workers.set(worker.id, card);
        element(`${worker.role}-workers`).append(card.item);
      }
      card.show(worker, numbers[worker.role], this.adminPort !== null);
    }
    element('prefill-lane').hidden = numbers.prefill === 0;
    element('relay').dataset.pools = numbers.prefill === 0 ? 'one' : 'two';
    this.tracks.arrange(
      workers.filter((worker) => worker.role === 'prefill').map((worker) => this.workers.get(worker.id)),
      workers.filter((worker) => worker.role === 'decode').map((worker) => this.workers.get(worker.id)),
    );
  }

  showRequests(view) {
    const here = new Map([...this.workers.keys()].map((id) => [id, []]));
    let seekers = 0;
    for (const each of view.requests) {
      const place = placeOf(each);
      if (place !== null && here.has(place)) here.get(place).push(each);
      else seekers += 1;
    }
    for (const [id, requests] of here) this.workers.get(id).showRunners(requests);
    const unlisted = view.in_flight - view.requests.length;
    const words = [];
    if (seekers) words.push(`${seekers} without a worker`);
    if (unlisted) words.push(`${unlisted} more not drawn`);
    setText(element('elsewhere'), words.join(', '));
  }

  /** A baton for each handoff since the last look, and for each sequence that begins to move. */
  launchBatons(view) {
    const counts = new Map();
    for (const each of view.handoffs) { // pairs with handoffs in the last few events; the first event lists none
      const pair = `${each.prefill} ${each.decode}`;
      const known = this.handoffs.get(pair) ?? each.before;
      this.tracks.launch(this.workers.get(each.prefill), this.workers.get(each.decode), each.count - known);
      counts.set(pair, each.count);
    }
    this.handoffs = counts;
    const moving = view.requests.filter((each) => each.stage === 'moving');
    for (const each of moving) {
      if (!this.moving.has(each.id)) {
        this.tracks.launch(this.workers.get(each.moving_from), this.workers.get(each.decode), 1);
      }
    }
    this.moving = new Set(moving.map((each) => each.id));
  }

  // --- drain and resume -------------------------------------------------------------------------------------------

  ask(id, verb) {
    if (verb === 'resume') {
      this.tell(id, verb);
      return;
    }
    const card = this.workers.get(id);
    const others = this.view.workers.filter((each) => each.role === card.role && each.usable && each.id !== id);
    setText(element('confirm-title'), `Drain ${card.name}?`);
    setText(element('confirm-text'), describeDrain(card.role, others.length));
    this.asked = id;
    element('confirm').returnValue = 'cancel';
    element('confirm').showModal();
  }

  confirmed() {
    if (element('confirm').returnValue === 'drain') this.tell(this.asked, 'drain');
  }

  async tell(id, verb) {
    const { name } = this.workers.get(id);
    const url = `http://${location.hostname}:${this.adminPort}/workers/${encodeURIComponent(id)}/${verb}`;
    let words;
    try {
      const response = await fetch(url, { method: 'POST' });
      const body = await response.json();
      words = response.ok ? `${name} was told to ${verb}.` : `${name}: ${body.error?.message ?? response.status}`;
    } catch {
      words = `${name}: the admin port cannot be reached from here.`;
    }
    setText(element('told'), words);
  }
}

/** Where a request is drawn; null while it has no worker. */
function placeOf(request) {
  if (request.stage === 'moving') return request.moving_from;
  if (request.stage === 'decode') return request.decode;
  return request.prefill ?? request.decode;
}

function describeDrain(role, numOthers) {
  if (role === 'prefill') {
    return numOthers
      ? 'It takes no new prompts, hands over what it has begun, and gives the rest back to the others.'
      : 'It is the only prefill worker that can be used: decode workers will compute the prompts, and slower.';
  }
  return numOthers
    ? 'It takes no new requests. What runs there moves to other decode workers that have room, or ends where it is.'
    : 'It is the only decode worker that can be used: new requests will be refused until it resumes.';
}

const STATES = {
  serving: '●', draining: '◐', drained: '○', joining: '◌', 'not ready': '◌', stalled: '!', refused: '×', lost: '×',
};

function stateOf(worker) {
  if (worker.refused !== null) return 'refused';
  if (!worker.connected) return 'lost';
  if (worker.stalled) return 'stalled';
  const phase = worker.phase ?? 'joining';
  return phase === 'serving' && !(worker.listed && worker.ready) ? 'not ready' : phase;
}

/** One worker: its state, its track with the requests there, its load. */
class WorkerCard {
  constructor(role, ask) {
    this.role = role;
    this.runners = new Map(); // request id → element
    this.item = make('li', 'worker');
    const head = make('div', 'worker-head');
    this.title = make('h4');
    this.state = make('span', 'state');
    this.address = make('span', 'address');
    head.append(this.title, this.state);
    this.track = make('div', 'track');
    this.track.setAttribute('aria-hidden', 'true');
    this.loads = make('dl', 'loads');
    this.kv = this.addLoad(role === 'decode' ? 'KV expected' : 'KV');
    this.kvBar = make('span', 'bar');
    this.kvFill = make('span', 'fill');
    this.kvBar.append(this.kvFill);
    this.kvBar.setAttribute('aria-hidden', 'true');
    this.running = this.addLoad('running');
    this.waiting = this.addLoad('queue');
    this.rate = this.addLoad('tokens/s');
    this.tokenRate = new TokenRate();
    this.button = make('button', 'quiet');
    this.button.type = 'button';
    this.button.addEventListener('click', () => ask(this.verb));
    const foot = make('div', 'worker-foot');
    foot.append(this.address, this.button);
    this.item.append(head, this.track, this.loads, this.kvBar, foot);
  }

  addLoad(term) {
    const pair = make('div');
    const value = make('dd');
    pair.append(make('dt', '', term), value);
    this.loads.append(pair);
    return value;
  }

  show(worker, number, withAdmin) {
    const state = stateOf(worker);
    this.name = `${ROLE_NAMES[this.role]} ${number}`;
    setText(this.title, worker.profile === 'latency' ? `${this.name}, for latency` : this.name);
    this.item.dataset.state = state;
    setText(this.state, `${STATES[state]} ${state}`);
    this.state.title = worker.refused ?? '';
    const used = worker.blocks_total ? worker.blocks_used / worker.blocks_total : null;
    setText(this.kv, percent(used));
    this.kvFill.style.width = `${(used ?? 0) * 100}%`;
    setText(this.running, count(worker.running));
    setText(this.waiting, count(worker.waiting));
    const tokens = this.role === 'prefill' ? worker.prompt_tokens : worker.output_tokens;
    setText(this.rate, count(this.tokenRate.read(tokens)));
    setText(this.address, describeProcess(worker));
    this.verb = worker.phase === 'draining' || worker.phase === 'drained' ? 'resume' : 'drain';
    setText(this.button, this.verb === 'drain' ? 'Drain' : 'Resume');
    this.button.setAttribute('aria-label', `${this.verb === 'drain' ? 'Drain' : 'Resume'} ${this.name}`);
    this.button.hidden = !withAdmin || !worker.connected;
  }

  showRunners(requests) {
    const shown = requests.slice(0, MAX_RUNNERS);
    const known = new Set(shown.map((each) => each.id));
    for (const [id, runner] of this.runners) {
      if (!known.has(id)) {
        runner.remove();
        this.runners.delete(id);
      }
    }
    for (const each of shown) {
      let runner = this.runners.get(each.id);
      if (!runner) {
        runner = make('span', 'runner');
        this.runners.set(each.id, runner);
        this.track.append(runner);
      }
      runner.dataset.stage = each.stage;
      runner.style.width = `${lengthOf(each)}px`;
    }
    this.track.dataset.more = requests.length > shown.length ? `+${requests.length - shown.length}` : '';
  }
}

/** An answer grows with each token: fast at first, so that a short one shows, too. */
function lengthOf(request) {
  if (request.stage !== 'decode' && request.stage !== 'moving') return 10;
  return Math.round(10 + Math.min(46, 6 * Math.log2(1 + request.tokens / 4)));
}

function describeProcess(worker) {
  const restarts = worker.restarts ? `restarted ${worker.restarts}×` : null;
  return [worker.id, worker.transport, restarts].filter(Boolean).join(' · ');
}

/** Tokens a second over the last two seconds. The counter only grows; if it has shrunk, it is a new process's. */
class TokenRate {
  constructor() {
    this.readings = [];
  }

  read(tokens) {
    const at = performance.now();
    const { readings } = this;
    if (tokens === null || tokens < readings.at(-1)?.tokens) readings.length = 0;
    if (tokens === null) return null;
    readings.push({ at, tokens });
    while (readings.length > 2 && readings[1].at <= at - RATE_WINDOW_MS) readings.shift();
    const [first] = readings;
    return at > first.at ? (1000 * (tokens - first.tokens)) / (at - first.at) : null;
  }
}

function make(name, className = '', text = '') {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}
