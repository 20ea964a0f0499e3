/** Numbers with their units. */

const grouped = new Intl.NumberFormat('en-US', { maximumFractionDigits: 0 });

/** Three significant digits at most, without trailing zeros. */
function short(value: number): string {
  return value >= 100 ? grouped.format(value) : String(Number(value.toPrecision(value < 1 ? 2 : 3)));
}

export function count(value: number): string {
  return grouped.format(value);
}

export function plural(n: number, one: string, many = `${one}s`): string {
  return `${count(n)} ${n === 1 ? one : many}`;
}

/** A duration in milliseconds. */
export function duration(ms: number): string {
  // The unit is chosen by the rounded value: 999.6 ms are 1.00 s.
  if (ms < 0.05) return '0 ms';
  if (ms < 0.95) return `${ms.toFixed(1)} ms`;
  if (ms < 999.5) return `${Math.round(ms)} ms`;
  if (ms < 9_995) return `${(ms / 1000).toFixed(2)} s`;
  if (ms < 59_950) return `${(ms / 1000).toFixed(1)} s`;
  const seconds = Math.round(ms / 1000);
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes} min ${seconds % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** The time since something, coarse. */
export function age(ms: number): string {
  const seconds = Math.max(0, Math.round(ms / 1000));
  if (seconds < 60) return `${seconds} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days`;
}

const BINARY = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];

export function bytes(value: number): string {
  let unit = 0;
  while (value >= 1024 && unit < BINARY.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${short(value)} ${BINARY[unit]}`;
}

/** A rate in bytes per second, with decimal units, as links are sold. */
export function byteRate(value: number): string {
  if (value >= 1e9) return `${short(value / 1e9)} GB/s`;
  if (value >= 1e6) return `${short(value / 1e6)} MB/s`;
  return `${short(value / 1e3)} kB/s`;
}

export function tokenRate(value: number): string {
  return `${short(value)} tok/s`;
}

const time = new Intl.DateTimeFormat('en-GB', { hour: '2-digit', minute: '2-digit', second: '2-digit' });

/** The time of day in the browser's time zone. */
export function clock(at_ms: number): string {
  return time.format(at_ms);
}

export function percent(share: number): string {
  return `${Math.round(share * 100)} %`;
}
