/** One axis of time for many requests, so that their bars can be compared. Times in milliseconds. */

/** An axis ends at one of these, times a power of ten: so it does not change with every request. */
const ENDS = [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10];

/** A bar of more than this many times the upper quartile is cut, so that it does not squeeze all others. */
const LONGEST = 2;

const MAX_TICKS = 6;

function atLeast(wanted: number, digits: number[]): number {
  const power = 10 ** Math.floor(Math.log10(wanted));
  return power * (digits.find((digit) => digit * power >= wanted * 0.999) ?? 10);
}

/** The end of the axis for bars of these lengths. */
export function axisEnd(lengths: number[]): number {
  const sorted = lengths.filter((ms) => ms > 0).sort((a, b) => a - b);
  const longest = sorted.at(-1) ?? 1_000;
  const quartile = sorted[Math.ceil(0.75 * (sorted.length - 1))] ?? longest;
  return atLeast(Math.max(1, Math.min(longest, LONGEST * quartile)), ENDS);
}

export interface Tick {
  at: number;
  text: string;
}

/** In one unit for the whole axis. */
function tickText(ms: number, end: number): string {
  if (ms === 0) return '0';
  if (end >= 300_000) return `${Number((ms / 60_000).toFixed(1))} min`;
  return end >= 1_500 ? `${Number((ms / 1_000).toFixed(2))} s` : `${Number(ms.toFixed(1))} ms`;
}

export function ticks(end: number): Tick[] {
  const step = end >= 300_000 ? 60_000 * atLeast(end / 60_000 / MAX_TICKS, [1, 2, 5, 10]) : atLeast(end / MAX_TICKS, [1, 2, 5, 10]);
  const n = Math.floor(end / step + 0.001);
  return Array.from({ length: n + 1 }, (_, i) => ({ at: i * step, text: tickText(i * step, end) }));
}
