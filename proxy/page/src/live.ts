/** The live state: one stream of changes, which is opened again when it breaks. */

import { useEffect, useState } from 'preact/hooks';
import { Refusal, call, events } from './endpoint';
import { after, NOTHING } from './state';
import type { Changes, State } from './state';

export type Connection =
  | { kind: 'connecting' }
  | { kind: 'live' }
  /** `since` is this machine's clock, milliseconds. */
  | { kind: 'lost'; since: number; why: string }
  /** The endpoint wants a key; `refused` says why the one that was sent does not do. */
  | { kind: 'locked'; refused: string | null };

export interface Live {
  connection: Connection;
  state: State;
}

/** Without a sign of life for this long, the connection counts as lost: the endpoint sends an event every second. */
const SILENCE_MS = 5_000;

const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 8_000;

let live: Live = { connection: { kind: 'connecting' }, state: NOTHING };
const watchers = new Set<(live: Live) => void>();
let attempt = new AbortController();

function show(change: Partial<Live>): void {
  live = { ...live, ...change };
  for (const watch of watchers) watch(live);
}

export function useLive(): Live {
  const [shown, set] = useState(live);
  useEffect(() => {
    watchers.add(set);
    set(live);
    return () => void watchers.delete(set);
  }, []);
  return shown;
}

/** Opens the stream now: at the start, with another key, or because somebody does not want to wait. */
export function connect(): void {
  attempt.abort();
  attempt = new AbortController();
  void stay(attempt.signal);
}

async function stay(stop: AbortSignal): Promise<void> {
  let pause = FIRST_PAUSE_MS;
  while (!stop.aborted) {
    const why = await follow(stop, () => (pause = FIRST_PAUSE_MS));
    if (stop.aborted || why === null) return;
    const { connection } = live;
    const since = connection.kind === 'lost' ? connection.since : Date.now();
    show({ connection: { kind: 'lost', since, why } });
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(2 * pause, LONGEST_PAUSE_MS);
  }
}

/** Follows one stream to its end. Returns why it ended, or null if another try would end in the same way. */
async function follow(stop: AbortSignal, began: () => void): Promise<string | null> {
  const silence = new AbortController();
  let timer = setTimeout(() => silence.abort(), SILENCE_MS);
  const heard = () => {
    clearTimeout(timer);
    timer = setTimeout(() => silence.abort(), SILENCE_MS);
  };
  try {
    const response = await call('./baton/state?stream=changes', { signal: AbortSignal.any([stop, silence.signal]) });
    let state = NOTHING;
    for await (const data of events(response, heard)) {
      if (stop.aborted) return null;
      state = after(state, JSON.parse(data) as Changes);
      began();
      show({ state, connection: { kind: 'live' } });
    }
    return 'The endpoint ended the stream. It may be restarting.';
  } catch (error) {
    if (stop.aborted) return null;
    if (silence.signal.aborted) return 'The endpoint has not answered for 5 s.';
    if (error instanceof Refusal && (error.status === 401 || error.status === 403)) {
      show({ connection: { kind: 'locked', refused: refusal(error) } });
      return null;
    }
    return error instanceof Refusal ? error.message : 'The endpoint cannot be reached.';
  } finally {
    clearTimeout(timer);
  }
}

function refusal(error: Refusal): string | null {
  const had = sessionStorage.getItem('baton-key');
  if (error.status === 403) {
    return error.code === 'operator_key_required'
      ? 'This key may not see the cluster. Ask for an operator\u2019s key, or use Try it with this one.'
      : error.message;
  }
  return had ? 'The endpoint does not know this key.' : null;
}
