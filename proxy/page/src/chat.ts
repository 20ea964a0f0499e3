/** One turn of a chat with the endpoint, as a stream. Nothing of it is stored. */

import { call, events } from './endpoint';

export interface ToolCall {
  name: string;
  arguments: string;
}

/** A reply as far as it has come. */
export interface Reply {
  role: 'assistant';
  text: string;
  reasoning: string;
  calls: ToolCall[];
  /** The reply's `x-baton-route`. */
  route: string;
  /** Milliseconds from sending to the first piece. */
  firstMs: number | null;
  tokens: number | null;
  tokensPerSecond: number | null;
  /** It is complete, or why it is not. */
  end: 'open' | 'complete' | 'stopped' | { error: string };
}

export interface Said {
  role: 'user';
  text: string;
}

export type Turn = Said | Reply;

export interface Settings {
  model: string;
  system: string;
  maxTokens: number;
  temperature: number;
  /** JSON, as in the request. */
  tools: string;
}

export const EMPTY: Reply = {
  role: 'assistant',
  text: '',
  reasoning: '',
  calls: [],
  route: '',
  firstMs: null,
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
  usage?: { completion_tokens: number } | null;
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

function messages(turns: Turn[], system: string): unknown[] {
  const before = system.trim() ? [{ role: 'system', content: system }] : [];
  return [...before, ...told(turns).map((turn) => ({ role: turn.role, content: turn.text }))];
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

/** Sends the turns, and shows the reply after every piece. Throws what [`call`] throws. */
export async function send(turns: Turn[], settings: Settings, signal: AbortSignal, show: (reply: Reply) => void): Promise<Reply> {
  const sent = performance.now();
  const response = await call('./v1/chat/completions', {
    signal,
    body: {
      model: settings.model,
      messages: messages(turns, settings.system),
      stream: true,
      stream_options: { include_usage: true },
      max_tokens: settings.maxTokens,
      temperature: settings.temperature,
      ...(settings.tools.trim() ? { tools: JSON.parse(settings.tools) } : {}),
    },
  });
  let reply: Reply = { ...EMPTY, route: response.headers.get('x-baton-route') ?? '' };
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
    if (chunk.usage) reply = { ...reply, tokens: chunk.usage.completion_tokens };
    if (chunk.timings) reply = { ...reply, tokens: chunk.timings.predicted_n, tokensPerSecond: chunk.timings.predicted_per_second };
    show(reply);
  }
  return { ...reply, end: { error: 'The reply broke off: the stream ended without its last event.' } };
}
