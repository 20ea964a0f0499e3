/** Calls of the endpoint that serves this page, with the key of this tab. */

const KEY = 'baton-key';

/** The key of this tab. A browser copies it to a tab's duplicate, and restores it with a closed tab. */
export function key(): string {
  return sessionStorage.getItem(KEY) ?? '';
}

export function setKey(key: string): void {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** What the endpoint answered instead of what was asked for. `code` is its own word for the reason. */
export class Refusal extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    message: string,
  ) {
    super(message);
  }
}

/** Why a call brought nothing, in words for a person. */
export function whyFailed(error: unknown): string {
  return error instanceof Refusal ? error.message : 'The endpoint cannot be reached.';
}

/** Why a key does not show the state: the endpoint does not have it, or it is no operator's. */
export type KeyRefusal = 'unknown_key' | 'guest';

/** How the endpoint refused the key, or null if it refused something else. */
export function keyRefusal(error: unknown): KeyRefusal | null {
  if (!(error instanceof Refusal)) return null;
  if (error.status === 401) return 'unknown_key';
  return error.code === 'operator_key_required' ? 'guest' : null;
}

interface CallOptions {
  body?: unknown;
  signal?: AbortSignal;
  /** Sent instead of the key of this tab. */
  key?: string;
}

/** Sends a request. Throws a [`Refusal`] for every status but 2xx, and a `TypeError` if there is no connection. */
export async function call(path: string, options: CallOptions = {}): Promise<Response> {
  const headers: Record<string, string> = {};
  const sent = options.key ?? key();
  if (sent) headers.authorization = `Bearer ${sent}`;
  const init: RequestInit = { headers, cache: 'no-store' };
  if (options.signal) init.signal = options.signal;
  if (options.body !== undefined) {
    init.method = 'POST';
    init.body = JSON.stringify(options.body);
    headers['content-type'] = 'application/json';
  }
  const response = await fetch(path, init);
  if (response.ok) return response;
  const text = await response.text();
  let error: { message?: string; code?: string } = {};
  try {
    error = JSON.parse(text).error ?? {};
  } catch {
    // Something between this page and the endpoint answered.
  }
  throw new Refusal(response.status, error.code ?? '', error.message ?? `The server answered ${response.status}.`);
}

/** The data of each server-sent event. `heard` is called with every piece, and with each comment. */
export async function* events(response: Response, heard: (comment?: string) => void = () => {}): AsyncGenerator<string> {
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    heard();
    rest += value;
    for (let end = rest.indexOf('\n\n'); end >= 0; end = rest.indexOf('\n\n')) {
      const lines = rest.slice(0, end).split('\n');
      lines.filter((line) => line.startsWith(':')).forEach((line) => heard(line.slice(1).trim()));
      const data = lines
        .filter((line) => line.startsWith('data:'))
        .map((line) => line.slice(5).trimStart());
      rest = rest.slice(end + 2);
      if (data.length > 0) yield data.join('\n');
    }
  }
}
