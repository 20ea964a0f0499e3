/** One turn of a chat with the endpoint, as a stream. */

import { call, events } from '../endpoint';

export interface ToolCall {
  name: string;
  arguments: string;
}

/** A reply as far as it has come. */
export interface Reply {
  role: 'assistant';
  /** The model that was asked. */
  model: string;
  text: string;
  reasoning: string;
  calls: ToolCall[];
  /** The reply's `x-baton-route`. */
  route: string;
  /** Milliseconds from sending to the first piece. */
  firstMs: number | null;
  /** Tokens of the prompt, and how many of these a cache had. */
  promptTokens: number | null;
  cachedTokens: number | null;
  tokens: number | null;
  tokensPerSecond: number | null;
  /** It is complete, or why it is not. */
  end: 'open' | 'complete' | 'stopped' | { error: string };
}

/** A file whose text goes with a message. */
export interface TextFile {
  name: string;
  text: string;
}

/** A picture, as a `data:` URL. */
export interface Picture {
  name: string;
  url: string;
}

export interface Said {
  role: 'user';
  text: string;
  pictures: Picture[];
  files: TextFile[];
}

export type Turn = Said | Reply;

/** How a chat's replies are drawn. A number that is null is left to the endpoint. */
export interface Settings {
  system: string;
  maxTokens: number;
  temperature: number;
  topP: number | null;
  seed: number | null;
  /** JSON, as in the request. */
  tools: string;
}

export const FIRST_SETTINGS: Settings = { system: '', maxTokens: 512, temperature: 0.7, topP: null, seed: null, tools: '' };

export const EMPTY: Reply = {
  role: 'assistant',
  model: '',
  text: '',
  reasoning: '',
  calls: [],
  route: '',
  firstMs: null,
  promptTokens: null,
  cachedTokens: null,
  tokens: null,
  tokensPerSecond: null,
  end: 'open',
};

interface Delta {
  content?: string | null;
  refusal?: string | null;
  reasoning_content?: string | null;
  tool_calls?: { index: number; function?: { name?: string; arguments?: string } }[];
}

interface Chunk {
  choices?: { delta?: Delta }[];
  usage?: { prompt_tokens?: number; completion_tokens: number; prompt_tokens_details?: { cached_tokens?: number } | null } | null;
  timings?: { predicted_n: number; predicted_per_second: number };
  error?: { message: string };
}

/** A model is told nothing about a reply that failed, or was stopped before its text began. */
function isLeftOut(turn: Turn | undefined): boolean {
  if (turn?.role !== 'assistant') return false;
  return typeof turn.end === 'object' || (turn.end === 'stopped' && !turn.text);
}

/** The turns without those that are left out, nor the questions that they answer. */
function told(turns: Turn[]): Turn[] {
  return turns.filter((turn, i) => !isLeftOut(turn) && !(turn.role === 'user' && isLeftOut(turns[i + 1])));
}

/** A fence of a code block that the text does not close. */
function fence(text: string): string {
  const longest = Math.max(2, ...[...text.matchAll(/`{3,}/g)].map(([run]) => run.length));
  return '`'.repeat(longest + 1);
}

/** A message's text with its files. */
export function withFiles({ text, files }: Pick<Said, 'text' | 'files'>): string {
  return [...files.map((file) => `${file.name}:\n${fence(file.text)}\n${file.text}\n${fence(file.text)}`), text].filter(Boolean).join('\n\n');
}

function content(turn: Turn): unknown {
  if (turn.role === 'assistant') return turn.text;
  const text = withFiles(turn);
  if (turn.pictures.length === 0) return text;
  const pictures = turn.pictures.map(({ url }) => ({ type: 'image_url', image_url: { url } }));
  return [...(text ? [{ type: 'text', text }] : []), ...pictures];
}

function messages(turns: Turn[], system: string): unknown[] {
  const before = system.trim() ? [{ role: 'system', content: system }] : [];
  return [...before, ...told(turns).map((turn) => ({ role: turn.role, content: content(turn) }))];
}

/** The reply with another piece. */
function added(reply: Reply, delta: Delta): Reply {
  const calls = [...reply.calls];
  for (const { index, function: step } of delta.tool_calls ?? []) {
    const before = calls[index] ?? { name: '', arguments: '' };
    calls[index] = { name: before.name + (step?.name ?? ''), arguments: before.arguments + (step?.arguments ?? '') };
  }
  return {
    ...reply,
    calls,
    text: reply.text + (delta.content ?? '') + (delta.refusal ?? ''),
    reasoning: reply.reasoning + (delta.reasoning_content ?? ''),
  };
}

function withCounts(reply: Reply, { usage, timings }: Chunk): Reply {
  if (usage) {
    const cachedTokens = usage.prompt_tokens_details?.cached_tokens ?? null;
    reply = { ...reply, tokens: usage.completion_tokens, promptTokens: usage.prompt_tokens ?? null, cachedTokens };
  }
  return timings ? { ...reply, tokens: timings.predicted_n, tokensPerSecond: timings.predicted_per_second } : reply;
}

/** Sends the turns, and shows the reply after every piece. Throws what [`call`] throws. */
export async function send(turns: Turn[], model: string, settings: Settings, signal: AbortSignal, show: (reply: Reply) => void): Promise<Reply> {
  const sent = performance.now();
  const response = await call('./v1/chat/completions', {
    signal,
    body: {
      model,
      messages: messages(turns, settings.system),
      stream: true,
      stream_options: { include_usage: true },
      max_tokens: settings.maxTokens,
      temperature: settings.temperature,
      ...(settings.topP === null ? {} : { top_p: settings.topP }),
      ...(settings.seed === null ? {} : { seed: settings.seed }),
      ...(settings.tools.trim() ? { tools: JSON.parse(settings.tools) } : {}),
    },
  });
  let reply: Reply = { ...EMPTY, model, route: response.headers.get('x-baton-route') ?? '' };
  show(reply);
  // The head of a request that waits for long leaves before its route is known; a comment names it later.
  const LATE_ROUTE = 'x-baton-route: ';
  const heard = (comment = '') => {
    if (comment.startsWith(LATE_ROUTE)) reply = { ...reply, route: comment.slice(LATE_ROUTE.length) };
  };
  for await (const data of events(response, heard)) {
    if (data === '[DONE]') return { ...reply, end: 'complete' };
    const chunk = JSON.parse(data) as Chunk;
    if (chunk.error) return { ...reply, end: { error: chunk.error.message } };
    const delta = chunk.choices?.[0]?.delta;
    if (delta) {
      const now = added(reply, delta);
      const isResult = now.text !== reply.text || now.reasoning !== reply.reasoning || now.calls.length > 0;
      reply = { ...now, firstMs: reply.firstMs ?? (isResult ? performance.now() - sent : null) };
    }
    reply = withCounts(reply, chunk);
    show(reply);
  }
  return { ...reply, end: { error: 'The reply broke off: the stream ended without its last event.' } };
}
