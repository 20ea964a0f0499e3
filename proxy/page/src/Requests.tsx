/** Running requests and the last ones, as bars on one axis of time, and each as a waterfall. */

import { useMemo, useState } from 'preact/hooks';
import { axisEnd, ticks } from './axis';
import type { Tick } from './axis';
import { bytes, clock, count, duration } from './format';
import { useGrowing } from './growing';
import { memo } from './memo';
import { alone } from './saving';
import { MAX_OPEN, firstOf } from './state';
import type { Request, RequestCounts } from './state';
import { bar, course, firstTokenOf, scale } from './waterfall';
import type { Phase, Span } from './waterfall';
import { OUTCOME, label, problem, reason, route } from './words';

const LEGEND: [Phase | 'alone', string][] = [
  ['wait', 'Waiting'],
  ['restore', 'Restore'],
  ['prefill', 'Prefill'],
  ['hidden', 'Transfer during the prefill'],
  ['transfer', 'Transfer after the prefill'],
  ['import', 'Import'],
  ['broken', 'Broken handoff'],
  ['decode', 'Decode'],
  ['alone', 'The best machine alone, predicted'],
];

/** More rows would only be scrolled past. What was not served has its own number, so that it hides nothing that was. */
const N_SHOWN: [number, number] = [24, 6];

/** What a request that has not ended does. */
function doing(request: Request): string {
  if (request.waiting_since_ms !== undefined) return 'Waiting';
  if (request.n_vectors !== undefined) return 'Computing';
  if (request.ttft_ms !== null) return 'Decoding';
  return request.prefill && !request.handoff ? 'Handing over' : 'Prefill';
}

function outcome(request: Request): { word: string; mark: string; style: string } {
  if (request.outcome === null) return { word: doing(request), mark: '▸', style: 'running' };
  if (request.outcome === 'done' && request.handoff?.failure) return { word: 'Fell back', mark: '!', style: 'fellback' };
  const mark = { done: '✓', cancelled: '–', failed: '✕', refused: '✕' }[request.outcome];
  return { word: OUTCOME[request.outcome], mark, style: request.outcome };
}

function place(span: Span, at: (ms: number) => number) {
  const left = at(span.from);
  return { left: `${left * 100}%`, width: `max(2px, ${(at(span.to) - left) * 100}%)` };
}

/** Where the time went, in words. */
function spoken(request: Request): string {
  const { spans } = course(request);
  return [...spans, ...alone(request)].map((span) => `${span.label} ${duration(span.to - span.from)}`).join(', ');
}

/** The time until a bar's end, with the prediction beside it. */
function lengthOf(request: Request): number {
  return Math.max(request.e2e_ms, ...alone(request).map((span) => span.to));
}

interface BarProps {
  request: Request;
  /** The time at the right end of all bars, ms. */
  end: number;
}

/** What happened, under it what was hidden, and under that the same on one machine alone. */
const Bar = memo(({ request, end }: BarProps) => {
  const all = course(request);
  const at = (ms: number) => Math.min(ms / end, 1);
  const hidden = all.spans.filter((span) => span.phase === 'hidden');
  const predicted = alone(request);
  const lane = (spans: Span[], style: string) => (
    <span class={`lane-of ${style}`}>
      {spans
        .filter((span) => span.from < end)
        .map((span) => (
          <span key={span.phase + span.label} class={`span ${span.phase}${span.open ? ' open' : ''}${span.to > end ? ' cut' : ''}`} style={place(span, at)} />
        ))}
    </span>
  );
  return (
    <span class="bar compared" role="img" aria-label={spoken(request)}>
      {lane(bar(all), 'main')}
      {hidden.length > 0 && lane(hidden, 'under')}
      {predicted.length > 0 && lane(predicted, 'alone')}
    </span>
  );
});

/** What a handoff saved, or why that is not known. */
function Saved({ request }: { request: Request }) {
  const { saved_ms: saved, predicted_direct: direct } = request;
  if (!request.prefill || request.n_vectors !== undefined) return <span class="num gained muted">–</span>;
  const whole = Math.max(0, ...alone(request).map((span) => span.to)) - request.before_plan_ms;
  return (
    <span class="num gained">
      {saved === undefined ? '–' : <strong class={saved >= 0 ? 'gain' : 'loss'}>{saved >= 0 ? 'saved' : 'lost'} {duration(Math.abs(saved))}</strong>}
      <span class="said">{direct ? `${direct.node} alone: ${saved === undefined ? 'first token ' : ''}${duration(saved === undefined ? direct.ttft_ms : whole)}, predicted` : 'one machine alone: not predicted'}</span>
    </span>
  );
}

function Lane({ label, spans, at, time }: { label: string; spans: Span[]; at: (ms: number) => number; time: string }) {
  return (
    <tr>
      <th scope="row">{label}</th>
      <td class="lane">
        <span class="bar">
          {spans.map((span) => (
            <span key={span.phase} class={`span ${span.phase}${span.open ? ' open' : ''}`} style={place(span, at)} />
          ))}
        </span>
      </td>
      <td class="num">{time}</td>
    </tr>
  );
}

/** Why it has its route, or why it was refused. */
function why(request: Request): string {
  if (request.outcome === 'refused' && request.error) return label(request.error);
  return request.n_vectors === undefined ? label(request.reason) : 'vectors';
}

function unplanned(request: Request): string {
  if (request.n_vectors !== undefined) return 'vectors of texts are not planned';
  return request.outcome === null ? 'not planned yet' : 'not planned';
}

function vectors(n: number): string {
  return n === 1 ? '1 vector' : `${count(n)} vectors`;
}

/** What was predicted for the first token. */
function said(request: Request): string {
  if (request.n_vectors !== undefined || request.outcome === 'refused') return '';
  const saidTtft = request.predicted?.ttft_ms;
  return saidTtft ? `predicted ${duration(saidTtft)} from the plan` : 'not predicted';
}

function compared(actual: number, predicted: number | null | undefined): string {
  if (!predicted) return '';
  const share = actual / predicted - 1;
  if (Math.abs(share) < 0.05) return 'as predicted';
  return `${Math.abs(share * 100).toFixed(0)} % ${share > 0 ? 'slower' : 'faster'} than predicted`;
}

function Details({ request }: { request: Request }) {
  const all = course(request);
  const lanes = scale(all);
  const { handoff, upstream_prefill, predicted, sources } = request;
  const inSlot = request.n_cached - (sources?.memory ?? 0) - (sources?.disk ?? 0);
  const saidTtft = predicted?.ttft_ms;
  const steps = Math.max(0, request.n_completion - 1);
  return (
    <div class="details">
      <p>
        <strong>Route:</strong> {route(request)} — {request.reason ? reason(request) : unplanned(request)}
        {request.policy && <span class="muted"> (policy {request.policy})</span>}.
        {request.simulated && ' The machines are simulated, and so are these times.'}
      </p>
      {handoff?.failure && (
        <p class="why lost">
          <strong>Fell back:</strong> {problem(handoff.failure)} (<code>{handoff.failure}</code>), so {request.decode} computed
          {handoff.n_tokens > 0 ? ` what ${request.prefill} had not sent` : ' the prompt itself'}.
        </p>
      )}
      {request.moved_to && (
        <p class="why">
          <strong>Moved:</strong> {request.decode} was lost after the first token, and {request.moved_to} went on.
        </p>
      )}
      {request.error && (
        <p class="why lost">
          <strong>Error:</strong> <code>{request.error}</code>
        </p>
      )}
      <table class="waterfall">
        <caption class="unseen">Where the time went</caption>
        <thead class="unseen">
          <tr>
            <th scope="col">Phase</th>
            <th scope="col">When</th>
            <th scope="col">Time</th>
          </tr>
        </thead>
        <tbody>
          {all.spans.map((span) => (
            <Lane key={span.phase + span.label} label={span.label} spans={[span]} at={lanes.at} time={duration(span.to - span.from)} />
          ))}
          {all.predicted.length > 0 && (
            <Lane label="Predicted" spans={all.predicted} at={lanes.at} time={`first token ${duration(saidTtft ?? 0)}`} />
          )}
        </tbody>
      </table>
      {lanes.break !== null && <p class="muted small">The decode is drawn at a smaller scale than the prompt.</p>}
      <dl class="facts wide">
        <div>
          <dt>Time to first token</dt>
          <dd>
            {all.firstToken === null ? 'none yet' : `${duration(all.firstToken)} from arrival`}
            {request.ttft_ms !== null && saidTtft ? `; ${duration(request.ttft_ms)} from the plan` : ''}
            {saidTtft ? `, predicted ${duration(saidTtft)} from the plan` : ', not predicted'}
            {request.ttft_ms !== null && saidTtft ? ` (${compared(request.ttft_ms, saidTtft)})` : ''}
          </dd>
        </div>
        {request.predicted_direct && request.prefill && (
          <div>
            <dt>Predicted for {request.predicted_direct.node} alone</dt>
            <dd>
              first token {duration(request.predicted_direct.ttft_ms)}, then {duration(request.predicted_direct.step_ms)} per token
              {request.saved_ms !== undefined && `: ${duration(Math.abs(request.saved_ms))} ${request.saved_ms >= 0 ? 'saved' : 'lost'}`}
            </dd>
          </div>
        )}
        {all.firstToken !== null && steps > 0 && (
          <div>
            <dt>Per token</dt>
            <dd>
              {duration((all.end - all.firstToken) / steps)}
              {predicted ? `, predicted ${duration(predicted.step_ms)}` : ''}
            </dd>
          </div>
        )}
        <div>
          <dt>Prompt</dt>
          <dd>
            {count(request.n_prompt)} tokens: {count(inSlot)} cached in a slot
            {sources?.memory ? `, ${count(sources.memory)} restored from memory` : ''}
            {sources?.disk ? `, ${count(sources.disk)} restored from disk` : ''}
            {handoff ? `, ${count(handoff.n_tokens)} handed over (${bytes(handoff.n_bytes)})` : ''}
            {upstream_prefill ? `, ${count(upstream_prefill.n_transferred)} transferred from ${request.prefill}` : ''}
          </dd>
        </div>
        {request.drafts && (
          <div>
            <dt>Guessed tokens</dt>
            <dd>
              {count(request.drafts.n_accepted)} of {count(request.drafts.n)} that were verified were right
            </dd>
          </div>
        )}
        <div>
          <dt>Request</dt>
          <dd><code>{request.request_id}</code></dd>
        </div>
      </dl>
    </div>
  );
}

const Row = memo(({ request, end }: BarProps) => {
  const [isOpen, setOpen] = useState(false);
  const { word, mark, style } = outcome(request);
  const firstToken = firstTokenOf(request);
  return (
    <li class={`request ${style}`}>
      <button type="button" class="row" aria-expanded={isOpen} onClick={() => setOpen(!isOpen)}>
        <span class={`outcome ${style}`}>
          <span class="mark" aria-hidden="true">{mark}</span>
          {word}
        </span>
        <span class="when num">{clock(request.at_ms)}</span>
        <span class="route">
          <strong>{route(request)}</strong>
          {request.simulated && <span class="tag simulated">simulated</span>}
          <span class="reason">
            {request.handoff?.failure ? `fell back: ${label(request.handoff.failure)}` : why(request)}
            {request.moved_to && `, moved to ${request.moved_to}`}
          </span>
        </span>
        <Bar request={request} end={end} />
        <span class="num ttft">
          {firstToken === null ? '–' : duration(firstToken)}
          <span class="said">{said(request)}</span>
        </span>
        <Saved request={request} />
        <span class="num tokens">
          {count(request.n_prompt)} → {request.n_vectors === undefined ? count(request.n_completion) : vectors(request.n_vectors)}
          <span class="said">{duration(request.e2e_ms)} in all</span>
        </span>
      </button>
      {isOpen && <Details request={request} />}
    </li>
  );
});

interface RequestsProps {
  requests: RequestCounts;
  /** Those that have not ended, the waiting ones among them. */
  open: Request[];
  ended: Request[];
}

function heading({ requests: { running, waiting }, open, ended }: RequestsProps): string {
  const n_open = running + waiting;
  const isCut = open.length >= MAX_OPEN && n_open > open.length;
  const counts = [`${count(running)} running`, `${count(waiting)} waiting`];
  const cut = isCut ? ` (${count(open.length)} of ${count(n_open)} are listed)` : '';
  return `${counts.join(', ')}${cut}, the last ${count(ended.length)}`;
}

/** The axis of time that all bars share. */
const Axis = memo(({ marks, end }: { marks: Tick[]; end: number }) => (
  <span class="axis">
    {marks.map(({ at, text }) => (
      <span key={at} class="num" style={{ left: `${(at / end) * 100}%` }}>{text}</span>
    ))}
  </span>
));

export const Requests = memo((props: RequestsProps) => {
  const { open, ended } = props;
  const [showsAll, showAll] = useState(false);
  const all = [...open, ...ended];
  const first = firstOf(all, N_SHOWN);
  const listed = showsAll ? all : first;
  const shown = listed.slice(0, useGrowing(listed.length, 8));
  const end = axisEnd(first.filter((request) => request.decode).map(lengthOf));
  const marks = useMemo(() => ticks(end), [end]);
  const step = (marks[1]?.at ?? end) / end;
  return (
    <section class="panel" aria-labelledby="requests">
      <h2 id="requests">
        Requests <small>{heading(props)}</small>
      </h2>
      <p class="legend" aria-hidden="true">
        {LEGEND.map(([phase, label]) => (
          <span key={phase}>
            <span class={`key ${phase}`} /> {label}
          </span>
        ))}
      </p>
      {all.length === 0 ? (
        <p class="empty">
          No request yet. <a href="#try">Try it</a> here, or point a client at this address: it speaks OpenAI's, Anthropic's and
          Ollama's APIs.
        </p>
      ) : (
        <>
          <p class="row heads" aria-hidden="true">
            <span>State</span>
            <span>At</span>
            <span>Route and reason</span>
            <span class="axis-head">
              <span>Time from arrival, the same scale for all</span>
              <Axis marks={marks} end={end} />
            </span>
            <span>First token</span>
            <span>Against one machine</span>
            <span>Tokens in → out</span>
          </p>
          <ul class="requests" style={{ '--tick': `${step * 100}%` }}>
            {shown.map((request) => (
              <Row request={request} end={end} key={`${request.request_id} ${request.at_ms}`} />
            ))}
          </ul>
          {all.length > first.length && (
            <button type="button" class="quiet" onClick={() => showAll(!showsAll)}>
              {showsAll ? 'Show fewer' : `Show all ${count(all.length)}`}
            </button>
          )}
        </>
      )}
    </section>
  );
});
