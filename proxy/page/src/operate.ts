/** What an operator looks after: keys, usage, configuration, log. /openapi.json documents every field. */

import { useEffect, useState } from 'preact/hooks';
import { Refusal, call, whyFailed } from './endpoint';

export interface KeyState {
  name: string;
  operator: boolean;
  /** Empty: all. */
  models: string[];
  requests_per_minute: number | null;
  tokens_per_minute: number | null;
  max_concurrent: number | null;
  tokens_per_day: number | null;
  tokens_per_month: number | null;
  tokens_today: number;
  tokens_this_month: number;
  secrets: { id: string; expires: string | null; last_used_ms: number | null }[];
}

export interface UsageRow {
  day: string;
  key: string;
  model: string;
  requests: number;
  prompt_tokens: number;
  cached_tokens: number;
  generated_tokens: number;
  engine_seconds: number;
}

export interface UsageReport {
  since: string;
  until: string;
  is_kept: boolean;
  is_truncated: boolean;
  rows: UsageRow[];
}

export type SettingSource = 'file' | 'command_line' | 'environment';

export interface ConfigReport {
  path?: string;
  applied_at_ms: number;
  settings: { key: string; value?: string; source: SettingSource }[];
  waiting: string[];
  problem?: string;
}

export interface SettingChange {
  key: string;
  kind: 'added' | 'removed' | 'changed';
  before?: string;
  after?: string;
  effect: 'reload' | 'restart' | 'overridden';
}

/** What a reload of the file would change. */
export interface ReloadPreview {
  path?: string;
  mistakes: string[];
  changes: SettingChange[];
  is_truncated: boolean;
  downloads: string[];
}

/** An answer, or why there is none; `absent`: this endpoint has no such route. */
export type Answer<T> = { kind: 'asking' } | { kind: 'absent' } | { kind: 'refused'; why: string } | { kind: 'here'; value: T };

const PAUSE_MS = 5_000;

/** What a route answers, asked again and again as long as this is shown. */
export function useRoute<T>(path: string): Answer<T> {
  const [answer, set] = useState<Answer<T>>({ kind: 'asking' });
  useEffect(() => {
    const stop = new AbortController();
    let timer: ReturnType<typeof setTimeout>;
    const ask = async () => {
      let isOver = false;
      try {
        const text = document.hidden ? null : await (await call(path, { signal: stop.signal })).text();
        // The same answer draws nothing again.
        if (text !== null) set((before) => (before.kind === 'here' && JSON.stringify(before.value) === text ? before : { kind: 'here', value: JSON.parse(text) as T }));
      } catch (error) {
        if (stop.signal.aborted) return;
        isOver = error instanceof Refusal && [401, 403, 404].includes(error.status);
        if (error instanceof Refusal && error.status === 404) set({ kind: 'absent' });
        else set({ kind: 'refused', why: whyFailed(error) });
      }
      if (!isOver) timer = setTimeout(ask, PAUSE_MS);
    };
    void ask();
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [path]);
  return answer;
}

export interface UsageSum {
  key: string;
  model: string;
  requests: number;
  prompt: number;
  cached: number;
  generated: number;
  seconds: number;
}

/** The usage of all days by key and model, the most tokens first. */
export function summed(rows: UsageRow[]): UsageSum[] {
  const all = new Map<string, UsageSum>();
  for (const row of rows) {
    const id = JSON.stringify([row.key, row.model]);
    const sum = all.get(id) ?? { key: row.key, model: row.model, requests: 0, prompt: 0, cached: 0, generated: 0, seconds: 0 };
    sum.requests += row.requests;
    sum.prompt += row.prompt_tokens;
    sum.cached += row.cached_tokens;
    sum.generated += row.generated_tokens;
    sum.seconds += row.engine_seconds;
    all.set(id, sum);
  }
  return [...all.values()].sort((a, b) => b.prompt + b.generated - a.prompt - a.generated);
}
