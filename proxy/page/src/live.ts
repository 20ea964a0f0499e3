/** The live state: one stream of changes, which is opened again when it breaks. */

import { useEffect, useState } from 'preact/hooks';
import { call, events, key, keyRefusal, whyFailed } from './endpoint';
import type { KeyRefusal } from './endpoint';
import { after, NOTHING } from './state';
import type { Changes, State } from './state';

export type Connection =
  | { kind: 'connecting' }
  | { kind: 'live' }
  /** The endpoint finishes its last requests, and ends each stream. */
  | { kind: 'stopping' }
  /** `since` is the last sign of life by this machine's clock, milliseconds; null if there never was one. */
  | { kind: 'lost'; since: number | null; why: string }
  /** The endpoint wants a key; `refused` says why the one that was sent does not do. */
  | { kind: 'locked'; refused: KeyRefusal | null };

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
/** The last event, by this machine's clock. */
let heardAt: number | null = null;

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

/** Keeps the stream open while the tab is visible: the endpoint has few places for streams. Returns how to end this. */
export function connectWhileVisible(): () => void {
  const changed = () => {
    if (!document.hidden) return connect();
    attempt.abort();
    // What is shown grows old from here on.
    show(live.connection.kind === 'live' ? { connection: { kind: 'connecting' } } : {});
  };
  document.addEventListener('visibilitychange', changed);
  connect();
  return () => document.removeEventListener('visibilitychange', changed);
}

/** Opens the stream now: at the start, with another key, or because somebody does not want to wait. */
export function connect(): void {
  attempt.abort();
  if (document.hidden) return;
  attempt = new AbortController();
  void stay(attempt.signal);
}

async function stay(stop: AbortSignal): Promise<void> {
  let pause = FIRST_PAUSE_MS;
  while (!stop.aborted) {
    const end = await follow(stop, () => (pause = FIRST_PAUSE_MS));
    if (stop.aborted || end === null) return;
    // A stopping endpoint answers each stream with one event until it is gone.
    const wasStopping = live.state.is_stopping;
    if (!(wasStopping && end.answered)) {
      const why = wasStopping ? 'The endpoint was stopping, and no longer answers.' : end.why;
      show({ connection: { kind: 'lost', since: heardAt, why } });
    }
    if (wasStopping) pause = LONGEST_PAUSE_MS;
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(2 * pause, LONGEST_PAUSE_MS);
  }
}

interface StreamEnd {
  /** The endpoint sent at least one event. */
  answered: boolean;
  why: string;
}

/**
 * Follows one stream to its end; `isSteady` is called once it lasts. Returns why it ended, or null if another try would
 * end in the same way.
 */
async function follow(stop: AbortSignal, isSteady: () => void): Promise<StreamEnd | null> {
  let n_events = 0;
  const ended = (why: string): StreamEnd => ({ answered: n_events > 0, why });
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
      n_events += 1;
      heardAt = Date.now();
      // One event proves little: an endpoint that ends every stream at once sends one, too.
      if (n_events > 1) isSteady();
      show({ state, connection: { kind: state.is_stopping ? 'stopping' : 'live' } });
    }
    return ended('The endpoint ended the stream. It may be restarting.');
  } catch (error) {
    if (stop.aborted) return null;
    if (silence.signal.aborted) return ended('The endpoint has not answered for 5 s.');
    const refused = keyRefusal(error);
    if (refused) {
      // What another key has shown is not for this one.
      heardAt = null;
      show({ state: NOTHING, connection: { kind: 'locked', refused: key() ? refused : null } });
      return null;
    }
    return ended(whyFailed(error));
  } finally {
    clearTimeout(timer);
  }
}
