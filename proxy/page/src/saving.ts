/** The time that handoffs saved, against the predicted times of the best machine alone. */

import type { DirectPrediction, Request, Sample, State } from './state';
import { firstTokenOf } from './waterfall';
import type { Span } from './waterfall';

export interface Saving {
  ms: number;
  /** Handoffs that are compared. */
  n: number;
}

/** Of the last hour. Samples are closed every ten seconds; requests that ended since the last one are added from the list. */
export function savingOfHour({ history, routes }: Pick<State, 'history' | 'routes'>): Saving {
  const closed = history.at(-1)?.at_ms ?? 0;
  const later = routes.filter((request) => request.saved_ms !== undefined && request.at_ms + request.e2e_ms > closed);
  const sum = (of: (sample: Sample) => number | undefined) => history.reduce((all, sample) => all + (of(sample) ?? 0), 0);
  return {
    ms: later.reduce((all, request) => all + (request.saved_ms ?? 0), sum((sample) => sample.saved_ms)),
    n: later.length + sum((sample) => sample.compared),
  };
}

/** The time of the same tokens on that machine. One that generated them would have had the same neighbours, so it takes as long. */
function decodeAlone(request: Request, said: DirectPrediction): number {
  const firstToken = firstTokenOf(request);
  const isSame = said.node === request.decode && !request.moved_to && firstToken !== null;
  return isSame ? request.e2e_ms - firstToken : Math.max(0, request.n_completion - 1) * said.step_ms;
}

/** The same request on one machine alone, as predicted; for one that runs, up to the first token. Times from its arrival. */
export function alone(request: Request): Span[] {
  const said = request.predicted_direct;
  if (!said || !request.prefill || request.n_vectors !== undefined) return [];
  const from = request.before_plan_ms;
  const first = from + said.ttft_ms;
  const spans: Span[] = [{ phase: 'prefill', label: `${said.node} alone, predicted`, from, to: first }];
  const decode = request.outcome === null ? 0 : decodeAlone(request, said);
  if (decode > 0) spans.push({ phase: 'decode', label: `Decode on ${said.node} alone, predicted`, from: first, to: first + decode });
  return spans;
}
