// Numbers as people read them.

export function seconds(value) {
  if (value === null || value === undefined) return '–';
  if (value < 0.0995) return `${(value * 1000).toPrecision(2)} ms`;
  if (value < 0.9995) return `${Math.round(value * 1000)} ms`;
  return value < 9.95 ? `${value.toFixed(1)} s` : `${Math.round(value)} s`;
}

export function count(value) {
  if (value === null || value === undefined) return '–';
  if (value >= 9999.5) return `${Math.round(value / 1000)}k`;
  if (value >= 999.5) return `${(value / 1000).toFixed(1)}k`;
  return value >= 9.95 || Number.isInteger(value) ? String(Math.round(value)) : value.toFixed(1);
}

export function percent(share) {
  if (share === null || share === undefined) return '–';
  if (share > 0.99 && share < 1) return '99 %'; // not quite all is not all
  return `${Math.round(share * 100)} %`;
}

/** Write only what has changed: what is being read aloud, or selected, stays as it is. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
