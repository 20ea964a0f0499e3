/** Sentences for the endpoint's words. Unknown words are shown as they are. */

import type { Life, Outcome, Request } from './state';

function said(sentences: Record<string, string>, word: string): string {
  return sentences[word] ?? word.replaceAll('_', ' ');
}

export const LIFE: Record<Life, string> = {
  unloaded: 'Not loaded',
  starting: 'Starting',
  ready: 'Ready',
  draining: 'Draining',
  suspect: 'Suspect',
  down: 'Lost',
};

export const OUTCOME: Record<Outcome, string> = {
  done: 'Done',
  cancelled: 'Client left',
  failed: 'Failed',
  refused: 'Refused',
};

/** Why a node or a pair of nodes is not used, or how it failed. */
export const BARS: Record<string, string> = {
  unloaded: 'its model is not in memory',
  starting: 'it is still starting',
  draining: 'it is stopping and takes no new requests',
  down: 'it cannot be reached',
  suspect: 'it did not answer its last probe',
  wrong_role: 'its role excludes this task',
  other_model: 'it runs other weights',
  images: 'a prompt with images is not handed over',
  no_projector: 'it cannot see images',
  context_too_small: 'the prompt does not fit its context',
  just_failed: 'it has just failed this request',
  kv_not_divisible: "this model's KV cache cannot be handed over in parts",
  same_node: 'the KV is there already',
  decode_lost: 'the decode node was lost',
  engine_failed: 'the engine failed',
  prefill_down: 'the prefill node cannot be reached',
  prefill_busy: 'the queue of the prefill node is full',
  prefill_stalled: 'nothing came from the prefill node for too long',
  prefill_late: 'the prefill node or the link was slower than predicted',
  gave_way: 'a measurement gave way to a request',
  prefill_lost: 'the prefill node was lost in the middle',
  prefill_refused: 'the prefill node refused',
  frame_rejected: 'a KV frame failed its check',
  not_finite: 'the KV was not finite',
  fingerprint_mismatch: 'the two nodes do not run the same model',
  canary_failed: "the two nodes' KV differs too much",
  import_failed: 'the decode node could not import the KV',
  address_refused: 'its address may not be sent the cluster key',
  decode_busy: 'the queue of the decode node was full',
  decode_unavailable: 'the decode node took no requests',
  poison: 'two engines ended under the request',
  first_token_late: 'the first token was late',
  next_token_late: 'a later token was late',
  hedged: 'a second route was started',
  hedge_won: 'the second route was faster',
  upstream: 'no engine took it, so an upstream was asked',
  prefill_failed: 'the prefill server of the upstream failed',
};

export function barred(word: string): string {
  return said(BARS, word);
}

/** A short label for a fallback reason. */
export function fallback(word: string): string {
  return word.replaceAll('_', ' ');
}

export const REASONS: Record<string, string> = {
  faster: 'handed over, because that is predicted to be done first',
  not_worth_it: 'not handed over, because one machine alone is predicted to be as fast',
  only_route: 'there is one route',
  rates_unknown: 'speeds are not measured yet',
  least_time: 'this machine is predicted to be done first',
  policy: 'the policy decides without predictions',
  cached: 'not handed over, because the decode node has the whole prompt in its cache',
  no_engine: 'no engine could take it, so an upstream answers',
  only_upstream: 'one upstream serves the model',
  least_running: 'this upstream has the least load',
  next_upstream: 'the upstreams before it did not answer',
};

/** Why a request took its route, and why it was not handed over. */
export function reason(request: Pick<Request, 'reason' | 'prefill'>): string {
  const { reason: word, prefill } = request;
  if (word in REASONS) return said(REASONS, word);
  if (word in BARS && !prefill) return `not handed over, because ${barred(word)}`;
  return said(BARS, word);
}

export function route(request: Pick<Request, 'decode' | 'prefill'>): string {
  if (!request.decode) return 'no route yet';
  return request.prefill ? `${request.prefill} → ${request.decode}` : request.decode;
}
