/** The cluster at one look: its machines, what each of them does, and what flows between them. */

import { useEffect, useRef, useState } from 'preact/hooks';
import { byteRate, bytes, count, duration, plural, tokenRate } from './format';
import { memo } from './memo';
import { CLIENTS_WIDTH, busyLinks, countTokens, doing, generatingNames, layout, machines, onlyPrefills, tokenRates, workOf } from './picture';
import type { Box, Counted, Layout, Machine, Wire, Work } from './picture';
import { savingOfHour } from './saving';
import type { Saving } from './saving';
import type { Link, NodeReport, State, Upstream } from './state';
import { Status } from './Status';
import { life, worst } from './words';

/** The width of the picture before it was measured. */
const FIRST_WIDTH = 900;

/** The width of an element, now and whenever it changes. */
function useWidth() {
  const element = useRef<HTMLDivElement>(null);
  const [width, set] = useState(FIRST_WIDTH);
  useEffect(() => {
    if (!element.current) return;
    const resized = new ResizeObserver(([entry]) => entry && set(Math.floor(entry.contentRect.width)));
    resized.observe(element.current);
    return () => resized.disconnect();
  }, []);
  return { element, width };
}

/** Tokens per second since the state before, by machine. */
function useRates(state: Pick<State, 'at_ms' | 'open'>): Map<string, number> {
  const last = useRef<{ counted: Counted; rates: Map<string, number> }>({ counted: countTokens(state), rates: new Map() });
  const { counted } = last.current;
  if (counted.at_ms !== state.at_ms) {
    const now = countTokens(state);
    last.current = { counted: now, rates: tokenRates(counted, now) };
  }
  return last.current.rates;
}

interface FrameProps {
  box: Box;
  width: number;
  height: number;
}

function Frame({ box, width, height, children, style }: FrameProps & { style: string; children: preact.ComponentChildren }) {
  return (
    <li class={`site ${style}`} style={{ left: `${box.x}px`, top: `${box.y}px`, width: `${width}px`, height: `${height}px` }}>
      {children}
    </li>
  );
}

/** Rates that were measured, of an idle machine. */
function measured(prefill: NodeReport | undefined, decode: NodeReport | undefined): string {
  const fast = (prefill ?? decode)?.prefill_rates.at(-1);
  const alone = decode?.decode_rates[0];
  const words = [fast && `prefill ${tokenRate(fast.tokens_per_second)}`, alone && `decode ${tokenRate(alone.tokens_per_second)}`];
  return words.filter(Boolean).join(' · ') || 'speed not measured yet';
}

function MachineBox({ machine, work, rate, ...place }: FrameProps & { machine: Machine; work: Work | undefined; rate: number | undefined }) {
  const state = life(worst(machine));
  const prefill = machine.tasks.find(({ node }) => node.task === 'prefill')?.node;
  const decode = machine.tasks.find(({ node }) => node.task === 'decode')?.node;
  const shown = decode ?? prefill;
  const acts = doing(work, rate);
  const memory = [
    shown && shown.memory_bytes > 0 && `${bytes(shown.memory_bytes)} in use`,
    shown && shown.slots > 0 && `${count(shown.active_slots)} of ${plural(shown.slots, 'slot')}`,
  ].filter(Boolean);
  const style = [state.life, work?.prompts ? 'prefilling' : '', work?.replies ? 'decoding' : ''].join(' ');
  return (
    <Frame {...place} style={style}>
      <p class="site-head">
        <strong>{machine.name}</strong>
        <Status {...state} />
      </p>
      <p class="device">{shown?.devices?.join(', ') || shown?.engine || 'device not known yet'}</p>
      {memory.length > 0 && <p class="memory num">{memory.join(' · ')}</p>}
      {state.life !== 'down' && <p class={acts.length > 0 ? 'act num' : 'num rates'}>{acts.join('; ') || measured(prefill, decode)}</p>}
    </Frame>
  );
}

function UpstreamBox({ upstream, rate, ...place }: FrameProps & { upstream: Upstream; rate: number | undefined }) {
  return (
    <Frame {...place} style={`${upstream.life} ${upstream.running > 0 ? 'decoding' : ''}`}>
      <p class="site-head">
        <strong>{upstream.name}</strong>
        <Status life={upstream.life} />
      </p>
      <p class="device">upstream, {upstream.kind}</p>
      <p class="num">
        {count(upstream.running)} of {plural(upstream.limit, 'reply', 'replies')}
        {rate ? `, ${tokenRate(rate)}` : ''}
      </p>
    </Frame>
  );
}

function Line({ wire, style, words }: { wire: Wire; style: string; words: string[] }) {
  return (
    <g class={style}>
      <path class="wire-of" d={wire.path} />
      <path class="flow" d={wire.path} />
      {words.map((text, i) => (
        <text key={i} class={i > 0 ? 'second' : ''} x={wire.labelX} y={wire.labelY + (i === 0 ? -9 : 19)} text-anchor="middle">
          {text}
        </text>
      ))}
    </g>
  );
}

/** How a link looks, and what is written at it. The list of links has the whole sentence. */
function linkWords(link: Link, isBusy: boolean, isGone: boolean): { style: string; words: string[] } {
  const rate = link.bytes_per_second > 0 ? byteRate(link.bytes_per_second) : 'not measured';
  if (isGone) return { style: 'gone', words: [rate, 'lost'] };
  if (link.unused_reason !== undefined || link.breaker.is_open) return { style: 'broken', words: [rate, 'no handoffs'] };
  return isBusy ? { style: 'kv', words: [rate, 'KV crosses'] } : { style: 'idle', words: [rate] };
}

function Saved({ saving, isSimulated }: { saving: Saving; isSimulated: boolean }) {
  if (saving.n === 0) return <p class="saved muted">No handoff in the last hour that can be compared with one machine alone.</p>;
  return (
    <p class="saved">
      <strong class={saving.ms >= 0 ? 'num gain' : 'num loss'}>{duration(Math.abs(saving.ms))}</strong> {saving.ms >= 0 ? 'saved' : 'lost'} in the last hour by{' '}
      {plural(saving.n, isSimulated ? 'simulated handoff' : 'handoff')}
      <span class="muted">, measured against the predicted time of the best machine alone</span>
    </p>
  );
}

interface PictureProps {
  state: State;
  notices: preact.ComponentChildren;
}

function Drawn({ plan, all, state, rates }: { plan: Layout; all: Machine[]; state: State; rates: Map<string, number> }) {
  const { open, upstreams, requests } = state;
  const links = state.models.flatMap((model) => model.links);
  const work = workOf(open);
  const busy = busyLinks(open);
  const gone = new Set(all.filter((machine) => life(worst(machine)).life === 'down').map((machine) => machine.name));
  const total = [...rates.values()].reduce((sum, rate) => sum + rate, 0);
  const size = { width: plan.boxWidth, height: plan.boxHeight };
  const boxOf = (name: string) => plan.boxes.find((box) => box.name === name);
  return (
    <div class="sites" style={{ height: `${plan.height}px` }}>
      <svg width={plan.width} height={plan.height} aria-hidden="true">
        {plan.links.map((wire) => {
          const link = links.find((one) => one.prefill === wire.from && one.decode === wire.to);
          if (!link) return null;
          const looks = linkWords(link, busy.has(`${wire.from}>${wire.to}`), gone.has(wire.from) || gone.has(wire.to));
          return <Line key={`${wire.from}>${wire.to}`} wire={wire} {...looks} />;
        })}
        {plan.replies.map((wire) => {
          const rate = rates.get(wire.from);
          const isFlowing = (work.get(wire.from)?.replies ?? 0) > 0;
          return <Line key={wire.from} wire={wire} style={isFlowing ? 'tokens' : 'idle'} words={isFlowing && rate ? [tokenRate(rate)] : []} />;
        })}
      </svg>
      <ul>
        {all.map((machine) => {
          const box = boxOf(machine.name);
          return box && <MachineBox key={machine.name} machine={machine} box={box} {...size} work={work.get(machine.name)} rate={rates.get(machine.name)} />;
        })}
        {upstreams.map((upstream) => {
          const box = boxOf(upstream.name);
          return box && <UpstreamBox key={`upstream ${upstream.name}`} upstream={upstream} box={box} {...size} rate={rates.get(upstream.name)} />;
        })}
        {plan.clients && (
          <Frame box={plan.clients} width={CLIENTS_WIDTH} height={plan.boxHeight} style="clients">
            <p class="site-head">
              <strong>Clients</strong>
            </p>
            <p class="num">{count(requests.running)} running</p>
            <p class="num">{count(requests.waiting)} waiting</p>
            <p class="num">{total > 0 ? tokenRate(total) : 'no tokens now'}</p>
          </Frame>
        )}
      </ul>
    </div>
  );
}

export const Picture = memo(({ state, notices }: PictureProps) => {
  const { element, width } = useWidth();
  const rates = useRates(state);
  const all = machines(state.models);
  const links = state.models.flatMap((model) => model.links);
  const prefills = all.filter(onlyPrefills).map((machine) => machine.name);
  const plan = layout(width, prefills, generatingNames(all, state.upstreams), links);
  const isSimulated = all.some((machine) => machine.tasks.some(({ node }) => node.simulated));
  return (
    <section class="panel" aria-labelledby="cluster">
      <h2 id="cluster">
        Cluster <small>{plural(all.length, 'machine')}{state.upstreams.length > 0 && `, ${plural(state.upstreams.length, 'upstream')}`}</small>
      </h2>
      {notices}
      {(links.length > 0 || savingOfHour(state).n > 0) && <Saved saving={savingOfHour(state)} isSimulated={isSimulated} />}
      <div ref={element}>
        {plan.boxes.length > 0 ? (
          <Drawn plan={plan} all={all} state={state} rates={rates} />
        ) : (
          <p class="empty">
            No machine is known yet. Start one with <code>baton serve --model smollm2</code>, or add one with <code>--prefill HOST:9000</code>.
          </p>
        )}
      </div>
    </section>
  );
});

