// The lines between the pools, and the batons that travel along them.

const SVG = 'http://www.w3.org/2000/svg';
const MAX_LINES = 400; // more cannot be told apart, and take long to draw
const MAX_BATONS = 48;
const MAX_AT_ONCE = 6;
const TRAVEL_MS = 900;
const SPREAD_MS = 380;
const calm = matchMedia('(prefers-reduced-motion: reduce)');

export class Tracks {
  constructor(relay, lines, batons) {
    this.relay = relay;
    this.lines = lines;
    this.batons = batons;
    this.paths = new Map(); // names of the cards → {line, d}
    this.prefill = [];
    this.decode = [];
    const observer = new ResizeObserver(() => this.draw());
    for (const part of [relay, ...relay.querySelectorAll('.lane')]) observer.observe(part);
  }

  /** These cards are there, in this order. */
  arrange(prefill, decode) {
    const same = (one, other) => one.length === other.length && one.every((card, index) => card === other[index]);
    if (same(prefill, this.prefill) && same(decode, this.decode)) return;
    this.prefill = prefill;
    this.decode = decode;
    this.draw();
  }

  /** A line from each prefill worker to each decode worker, unless these are too many. They are added together, because
   * after each addition the browser lays out the page again when it is asked where a card is. */
  draw() {
    const frame = this.relay.getBoundingClientRect();
    this.lines.setAttribute('viewBox', `0 0 ${frame.width} ${frame.height}`);
    this.lines.replaceChildren();
    this.paths.clear();
    const numLines = this.prefill.length * this.decode.length;
    if (!numLines || numLines > MAX_LINES) return;
    const made = document.createDocumentFragment();
    made.append(gradient(this.between(this.prefill[0], this.decode[0])));
    for (const from of this.prefill) {
      for (const to of this.decode) {
        const d = curve(this.between(from, to));
        const line = document.createElementNS(SVG, 'path');
        line.setAttribute('d', d);
        line.setAttribute('class', 'line');
        made.append(line);
        this.paths.set(key(from, to), { d, line });
      }
    }
    this.lines.append(made);
  }

  /** Where a line begins and ends, and which way it goes: across, or down where the pools lie below each other. */
  between(from, to) {
    const frame = this.relay.getBoundingClientRect();
    const [a, b] = [from.item.getBoundingClientRect(), to.item.getBoundingClientRect()];
    if (a.right <= b.left) {
      const [start, end] = [middle(from.track), middle(to.track)];
      return {
        x1: a.right - frame.left, y1: start - frame.top, x2: b.left - frame.left, y2: end - frame.top, across: true,
      };
    }
    const share = (card, cards) => (cards.indexOf(card) + 1) / (cards.length + 1);
    const [above, below] = [from, to].map((card) => card.item.closest('.lane').getBoundingClientRect());
    return {
      x1: above.left - frame.left + above.width * share(from, this.prefill),
      y1: above.bottom - frame.top,
      x2: below.left - frame.left + below.width * share(to, this.decode),
      y2: below.top - frame.top,
      across: false,
    };
  }

  /** Batons go from one card to another, one after the other. */
  launch(from, to, number) {
    if (!from || !to || number <= 0) return;
    const path = this.paths.get(key(from, to));
    path?.line.animate([{ strokeOpacity: 1 }, { strokeOpacity: 0.28 }], { duration: 1600, easing: 'ease-out' });
    if (calm.matches) return;
    const d = path?.d ?? (from.role === 'prefill' ? curve(this.between(from, to)) : this.aside(from, to));
    const shown = Math.min(number, MAX_AT_ONCE, MAX_BATONS - this.batons.childElementCount);
    for (let each = 0; each < shown; each += 1) {
      const baton = document.createElement('span');
      baton.className = 'baton';
      baton.style.offsetPath = `path("${d}")`;
      this.batons.append(baton);
      const run = baton.animate(
        [
          { offsetDistance: '0%', opacity: 0 },
          { opacity: 1, offset: 0.12 },
          { opacity: 1, offset: 0.85 },
          { offsetDistance: '100%', opacity: 0 },
        ],
        { duration: TRAVEL_MS, delay: (each * SPREAD_MS) / shown, easing: 'cubic-bezier(0.45, 0, 0.3, 1)', fill: 'both' },
      );
      run.onfinish = () => baton.remove();
    }
  }

  /** From one decode worker to another, past the cards' near edge. */
  aside(from, to) {
    const frame = this.relay.getBoundingClientRect();
    const x = from.item.getBoundingClientRect().left - frame.left;
    const [y1, y2] = [middle(from.track) - frame.top, middle(to.track) - frame.top];
    return `M ${x} ${y1} C ${x - 60} ${y1} ${x - 60} ${y2} ${x} ${y2}`;
  }
}

function key(from, to) {
  return `${from.name}→${to.name}`;
}

function middle(track) {
  const box = track.getBoundingClientRect();
  return box.top + box.height / 2;
}

function curve({ x1, y1, x2, y2, across }) {
  if (across) {
    const bend = (x2 - x1) * 0.55;
    return `M ${x1} ${y1} C ${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
  }
  const bend = (y2 - y1) * 0.55;
  return `M ${x1} ${y1} C ${x1} ${y1 + bend} ${x2} ${y2 - bend} ${x2} ${y2}`;
}

/** Warm where a line leaves, cool where it arrives. */
function gradient({ x1, y1, x2, y2, across }) {
  const made = document.createElementNS(SVG, 'linearGradient');
  const ends = across ? { x1, y1: 0, x2, y2: 0 } : { x1: 0, y1, x2: 0, y2 };
  made.setAttribute('id', 'line-gradient');
  made.setAttribute('gradientUnits', 'userSpaceOnUse');
  for (const [name, value] of Object.entries(ends)) made.setAttribute(name, value);
  for (const [offset, className] of [[0, 'stop-warm'], [1, 'stop-cool']]) {
    const stop = document.createElementNS(SVG, 'stop');
    stop.setAttribute('offset', offset);
    stop.setAttribute('class', className);
    made.append(stop);
  }
  return made;
}
