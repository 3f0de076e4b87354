// Three small plots of the last five minutes, drawn here; the same as a table, and in a sentence, for who cannot see them.

import { count, percent, seconds, setText } from './format.js';

const SVG = 'http://www.w3.org/2000/svg';
const HEIGHT = 132;
const MARGIN = { left: 46, right: 8, top: 10, bottom: 20 };
const SLOTS_PER_BAR = 3;
const MINUTES = 5;
const element = (id) => document.getElementById(id);

export class Plots {
  constructor() {
    this.slots = new Map(); // number → slot
    this.drawn = null;
    new ResizeObserver(() => this.draw()).observe(element('ttft-plot').parentElement);
  }

  /** The next slots may be another gateway's, with numbers of its own. */
  forget() {
    this.slots.clear();
    this.drawn = null;
  }

  /** Take in what is new. Lines move on with each slot that is complete. */
  show(recent, summary) {
    for (const slot of recent.slots) this.slots.set(slot.number, slot);
    for (const number of this.slots.keys()) {
      if (number <= recent.current - recent.num_slots) this.slots.delete(number);
    }
    this.recent = recent;
    this.summary = summary;
    setText(element('ttft-now'), seconds(summary.ttft_p50_s));
    setText(element('itl-now'), seconds(summary.itl_p50_s));
    setText(element('goodput-now'), percent(summary.goodput_share));
    if (this.drawn !== recent.current) this.draw();
  }

  draw() {
    if (!this.recent) return;
    this.drawn = this.recent.current;
    const ages = Array.from({ length: this.recent.num_slots - 1 }, (_, index) => this.recent.num_slots - 1 - index);
    const slots = ages.map((age) => this.slots.get(this.recent.current - age) ?? null);
    this.drawLatency('ttft', 'Time to first token', slots);
    this.drawLatency('itl', 'Gap between tokens', slots);
    this.drawGoodput(slots);
    this.fillTable(slots);
  }

  drawLatency(name, title, slots) {
    const medians = slots.map((slot) => slot?.[`${name}_p50_s`] ?? null);
    const tails = slots.map((slot) => slot?.[`${name}_p95_s`] ?? null);
    const peak = Math.max(...tails, 0);
    const chart = new Chart(element(`${name}-plot`), slots.length, withoutSpikes(tails), seconds);
    chart.band(medians, tails);
    chart.line(tails, 'tail');
    chart.line(medians, 'median');
    const [median, tail] = [this.summary[`${name}_p50_s`], this.summary[`${name}_p95_s`]];
    const now = median === null ? 'nothing in the last half minute'
      : `in the last half minute median ${seconds(median)}, 95th percentile ${seconds(tail)}`;
    if (peak > chart.top) chart.text(`highest ${seconds(peak)}`, chart.width - MARGIN.right, MARGIN.top, 'end');
    const highest = peak ? `; highest 95th percentile of five minutes ${seconds(peak)}` : '';
    chart.svg.setAttribute('aria-label', `${title}: ${now}${highest}`);
  }

  drawGoodput(slots) {
    const bars = [];
    // Bars begin at multiples, so that they move on as they are and do not change on the way.
    const first = this.recent.current - slots.length;
    for (const [index, slot] of slots.entries()) {
      const place = Math.floor((first + index) / SLOTS_PER_BAR);
      if (bars.at(-1)?.place !== place) bars.push({ place, from: index, to: index + 1, parts: [0, 0, 0] });
      const bar = bars.at(-1);
      bar.to = index + 1;
      if (!slot) continue;
      bar.parts[0] += slot.met;
      bar.parts[1] += slot.finished - slot.met;
      bar.parts[2] += slot.refused + slot.failed;
    }
    for (const bar of bars) { // the first and the last one may have fewer slots
      const lasts = (bar.to - bar.from) * this.recent.slot_s;
      bar.parts = bar.parts.map((number) => number / lasts);
    }
    const highest = Math.max(...bars.map((bar) => bar.parts[0] + bar.parts[1] + bar.parts[2]), 0);
    const chart = new Chart(element('goodput-plot'), slots.length, highest, count);
    for (const bar of bars) chart.bar(bar, ['met', 'missed', 'lost']);
    const { goodput_share: share, goodput_per_s: rate } = this.summary;
    const now = share === null ? 'no request in the last half minute'
      : `in the last half minute ${count(rate)} requests a second within target, ${percent(share)} of all`;
    chart.svg.setAttribute('aria-label', `Goodput: ${now}`);
  }

  fillTable(slots) {
    const perMinute = Math.round(60 / this.recent.slot_s);
    const rows = [];
    for (let minute = 0; minute < MINUTES; minute += 1) {
      const end = slots.length - minute * perMinute;
      const part = slots.slice(Math.max(0, end - perMinute), end).filter(Boolean);
      const sum = (field) => part.reduce((total, slot) => total + slot[field], 0);
      const values = (field) => part.map((slot) => slot[field]).filter((value) => value !== null);
      const worst = (field) => (values(field).length ? Math.max(...values(field)) : null);
      rows.push([
        minute === 0 ? 'the last' : `${minute} to ${minute + 1} ago`,
        count(sum('finished')), count(sum('met')), count(sum('refused') + sum('failed')),
        seconds(median(values('ttft_p50_s'))), seconds(worst('ttft_p95_s')),
        seconds(median(values('itl_p50_s'))), seconds(worst('itl_p95_s')),
      ]);
    }
    const body = element('table-rows');
    while (body.rows.length < rows.length) addRow(body, rows[0].length);
    for (const [row, cells] of rows.entries()) {
      for (const [column, text] of cells.entries()) setText(body.rows[row].cells[column], text);
    }
  }
}

function addRow(body, numCells) {
  const row = body.insertRow();
  const head = document.createElement('th');
  head.scope = 'row';
  row.append(head);
  while (row.cells.length < numCells) row.insertCell();
}

/** One plot: time to the right until now, values upwards from zero. */
class Chart {
  constructor(svg, numSlots, peak, label) {
    this.svg = svg;
    this.width = Math.max(svg.getBoundingClientRect().width, 160);
    this.numSlots = numSlots;
    this.top = niceAbove(peak);
    svg.setAttribute('viewBox', `0 0 ${this.width} ${HEIGHT}`);
    svg.replaceChildren();
    for (const share of [0, 0.5, 1]) {
      const y = this.y(this.top * share);
      this.add('line', { x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y, y2: y, class: share ? 'grid' : 'axis' });
      if (share && peak) this.text(label(this.top * share), MARGIN.left - 6, y + 4, 'end');
    }
    this.text('5 min ago', MARGIN.left, HEIGHT - 5, 'start');
    this.text('now', this.width - MARGIN.right, HEIGHT - 5, 'end');
  }

  x(index) {
    return MARGIN.left + ((this.width - MARGIN.left - MARGIN.right) * index) / this.numSlots;
  }

  /** What is higher than the plot runs along its upper edge. */
  y(value) {
    return HEIGHT - MARGIN.bottom - ((HEIGHT - MARGIN.top - MARGIN.bottom) * Math.min(value, this.top)) / this.top;
  }

  /** The runs of neighbouring slots in which there are values. */
  runs(values) {
    const runs = [];
    for (const [index, value] of values.entries()) {
      if (value === null) continue;
      const run = runs.at(-1);
      if (run && run.at(-1) === index - 1) run.push(index);
      else runs.push([index]);
    }
    return runs;
  }

  line(values, className) {
    for (const run of this.runs(values)) {
      // A value that stands alone gets the width of its slot.
      const points = run.length > 1 ? run.map((index) => [this.x(index + 0.5), this.y(values[index])])
        : [[this.x(run[0]), this.y(values[run[0]])], [this.x(run[0] + 1), this.y(values[run[0]])]];
      this.add('path', { d: `M ${points.map((point) => point.join(' ')).join(' L ')}`, class: className });
    }
  }

  band(low, high) {
    for (const run of this.runs(high)) {
      const points = [
        ...run.map((index) => [this.x(index + 0.5), this.y(high[index])]),
        ...run.map((index) => [this.x(index + 0.5), this.y(low[index])]).reverse(),
      ];
      this.add('path', { d: `M ${points.map((point) => point.join(' ')).join(' L ')} Z`, class: 'band' });
    }
  }

  bar({ from, to, parts }, classNames) {
    let sum = 0;
    for (const [index, part] of parts.entries()) {
      if (!part) continue;
      const [bottom, top] = [this.y(sum), this.y(sum + part)];
      const [left, right] = [this.x(from), this.x(to)];
      this.add('rect', {
        x: left, width: Math.max(right - left - 1, 0.5), y: top, height: bottom - top, class: classNames[index],
      });
      sum += part;
    }
  }

  text(words, x, y, anchor) {
    this.add('text', { x, y, 'text-anchor': anchor }).textContent = words;
  }

  add(name, attributes) {
    const made = document.createElementNS(SVG, name);
    for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
    this.svg.append(made);
    return made;
  }
}

/** The highest value, but for the few that would leave the others no room. */
function withoutSpikes(values) {
  const sorted = values.filter((value) => value !== null).sort((one, other) => one - other);
  if (!sorted.length) return 0;
  const usual = sorted[Math.floor((sorted.length - 1) * 0.95)];
  return Math.min(sorted.at(-1), usual * 2);
}

/** A round number not below `value`. */
function niceAbove(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

function median(values) {
  if (!values.length) return null;
  const sorted = [...values].sort((one, other) => one - other);
  return sorted[Math.floor(sorted.length / 2)];
}
