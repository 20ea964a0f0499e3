/** The last hour, as the endpoint keeps it: one point for ten seconds. */

import { useEffect, useRef } from 'preact/hooks';
import uPlot from 'uplot';
import 'uplot/dist/uPlot.min.css';
import { age, count, duration, tokenRate } from './format';
import { useGrowing } from './growing';
import { memo } from './memo';
import type { Sample } from './state';
import { label } from './words';

interface Line {
  label: string;
  /** The name of a colour in the style sheet. */
  colour: string;
  value: (sample: Sample) => number | null;
  /** Filled down to the axis. */
  isArea?: boolean;
}

interface ChartSpec {
  title: string;
  lines: Line[];
  unit: (value: number) => string;
  /** A bar for each value, for rare events. */
  isBars?: boolean;
}

const HEIGHT = 132;

/** A chart begins with a window of this length, so that the first minutes are not stretched over its width. */
const SHORTEST_SECONDS = 240;

/** The steps of the axis of time, seconds. */
const MINUTES = [60, 120, 300, 600, 900];

const hourAndMinute = new Intl.DateTimeFormat('en-GB', { hour: '2-digit', minute: '2-digit' });

/** The steps of an axis that counts. */
const WHOLE = [0, 1, 2, 3, 4, 5, 6].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));

function themed(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** The values that no line reaches, because those before and after them are missing. */
function isolated(plot: uPlot, series: number): number[] {
  const values = plot.data[series] ?? [];
  return [...values.keys()].filter((i) => values[i] != null && values[i - 1] == null && values[i + 1] == null);
}

function options(spec: ChartSpec, width: number): uPlot.Options {
  const grid = { stroke: themed('--line'), width: 1 };
  const axis = { stroke: themed('--muted'), grid, ticks: { show: false }, font: '11px system-ui, sans-serif' };
  const bars = uPlot.paths.bars?.({ size: [0.8, 12] });
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false } },
    scales: {
      x: { time: true, range: (_, min, max) => [Math.min(min, max - SHORTEST_SECONDS), max] },
      y: { range: (_, __, max) => [0, max > 0 ? max * 1.1 : 1] },
    },
    axes: [
      { ...axis, size: 26, space: 64, incrs: MINUTES, values: (_, seconds) => seconds.map((at) => hourAndMinute.format(at * 1000)) },
      {
        ...axis,
        size: 62,
        space: 28,
        values: (_, values) => values.map(spec.unit),
        ...(spec.unit === count ? { incrs: WHOLE } : {}),
      },
    ],
    series: [
      {},
      ...spec.lines.map((line) => ({
        label: line.label,
        stroke: themed(line.colour),
        width: 1.5,
        points: { show: false, size: 5, fill: themed(line.colour), filter: spec.isBars ? () => null : isolated },
        spanGaps: false,
        ...(line.isArea ? { fill: `${themed(line.colour)}33` } : {}),
        ...(spec.isBars && bars ? { paths: bars, fill: themed(line.colour), width: 0 } : {}),
      })),
    ],
  };
}

function dataOf(spec: ChartSpec, history: Sample[]): uPlot.AlignedData {
  return [history.map((sample) => sample.at_ms / 1000), ...spec.lines.map((line) => history.map(line.value))];
}

/** The last value that there is, and its age if later samples have none. */
function lastValue(line: Line, unit: ChartSpec['unit'], history: Sample[]): string {
  const sample = history.findLast((sample) => line.value(sample) !== null);
  const value = sample && line.value(sample);
  if (value == null) return 'none';
  const old = (history.at(-1)?.at_ms ?? 0) - sample!.at_ms;
  return old > 0 ? `${unit(value)}, ${age(old)} ago` : unit(value);
}

const Chart = memo(({ spec, history, theme }: { spec: ChartSpec; history: Sample[]; theme: string }) => {
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const names = spec.lines.map((line) => line.label).join();

  useEffect(() => {
    const element = box.current;
    if (!element) return;
    const made = new uPlot(options(spec, Math.max(200, element.clientWidth)), dataOf(spec, history), element);
    plot.current = made;
    const resized = new ResizeObserver(() => made.setSize({ width: Math.max(200, element.clientWidth), height: HEIGHT }));
    resized.observe(element);
    return () => {
      resized.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [theme, names]);

  useEffect(() => plot.current?.setData(dataOf(spec, history)), [history]);

  const last = spec.lines.map((line) => ({ ...line, text: lastValue(line, spec.unit, history) }));
  const spoken = last.map((line) => `${line.label} ${line.text}`).join(', ');
  return (
    <figure class="chart">
      <figcaption>
        <strong>{spec.title}</strong>
        {last.map((line) => (
          <span class="series" key={line.label}>
            <span class="swatch" style={{ background: `var(${line.colour})` }} aria-hidden="true" />
            {line.label} <span class="num">{line.text}</span>
          </span>
        ))}
      </figcaption>
      <div ref={box} class="plot" role="img" aria-label={`${spec.title} in the last hour. The last values: ${spoken || 'none'}.`} />
    </figure>
  );
});

const ttft: ChartSpec = {
  title: 'Time to first token',
  unit: duration,
  lines: [
    { label: 'p50', colour: '--blue', value: (sample) => sample.first_token_ms?.p50 ?? null },
    { label: 'p95', colour: '--amber', value: (sample) => sample.first_token_ms?.p95 ?? null },
    { label: 'p99', colour: '--red', value: (sample) => sample.first_token_ms?.p99 ?? null },
  ],
};

const itl: ChartSpec = {
  title: 'Time between tokens',
  unit: duration,
  lines: [
    { label: 'p50', colour: '--blue', value: (sample) => sample.itl_ms?.p50 ?? null },
    { label: 'p95', colour: '--amber', value: (sample) => sample.itl_ms?.p95 ?? null },
    { label: 'p99', colour: '--red', value: (sample) => sample.itl_ms?.p99 ?? null },
  ],
};

const rate: ChartSpec = {
  title: 'Tokens generated',
  unit: tokenRate,
  lines: [
    { label: 'all streams', colour: '--green', isArea: true, value: (sample) => sample.generated_tokens / sample.seconds },
    { label: 'guessed right', colour: '--violet', value: (sample) => (sample.accepted_tokens ?? 0) / sample.seconds },
  ],
};

const load: ChartSpec = {
  title: 'Requests',
  unit: count,
  lines: [
    { label: 'running', colour: '--blue', isArea: true, value: (sample) => sample.running },
    { label: 'waiting', colour: '--amber', value: (sample) => sample.waiting },
  ],
};

const prompts: ChartSpec = {
  title: 'Prompt tokens by source',
  unit: count,
  lines: [
    {
      label: 'slot',
      colour: '--green',
      value: (sample) => Math.max(0, sample.cached_tokens - (sample.memory_tokens ?? 0) - (sample.disk_tokens ?? 0)),
    },
    { label: 'memory', colour: '--amber', value: (sample) => sample.memory_tokens ?? 0 },
    { label: 'disk', colour: '--red', value: (sample) => sample.disk_tokens ?? 0 },
    { label: 'handoff', colour: '--violet', value: (sample) => sample.handoff_tokens },
    {
      label: 'computed here',
      colour: '--blue',
      value: (sample) => Math.max(0, sample.prompt_tokens - sample.cached_tokens - sample.handoff_tokens),
    },
  ],
};

const COLOURS = ['--red', '--amber', '--violet', '--blue', '--green'];

function fallbacks(history: Sample[]): ChartSpec {
  const words = [...new Set(history.flatMap((sample) => Object.keys(sample.fallbacks ?? {})))].sort();
  const line = (word: string, i: number): Line => ({
    label: label(word),
    colour: COLOURS[i % COLOURS.length] ?? '--red',
    value: (sample) => sample.fallbacks?.[word] ?? 0,
  });
  return { title: 'Fallbacks', unit: count, isBars: true, lines: words.map(line) };
}

export const Charts = memo(({ history, theme }: { history: Sample[]; theme: string }) => {
  const specs = [ttft, itl, rate, load, prompts, fallbacks(history)];
  const drawn = useGrowing(specs.length, 1);
  return (
    <section class="panel" aria-labelledby="time">
      <h2 id="time">
        Over time <small>the last hour, in steps of 10 s</small>
      </h2>
      {history.length === 0 ? (
        <p class="empty">The first point comes within ten seconds of the endpoint's start.</p>
      ) : (
        <div class="charts">
          {specs.slice(0, drawn).map((spec) => (
            <Chart spec={spec} history={history} theme={theme} key={spec.title} />
          ))}
        </div>
      )}
    </section>
  );
});
