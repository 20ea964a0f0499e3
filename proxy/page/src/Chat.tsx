/** A chat for trying the endpoint, with the route of each reply. */

import { useEffect, useRef, useState } from 'preact/hooks';
import { EMPTY, send } from './chat';
import type { Reply, Settings, Turn } from './chat';
import { Refusal } from './endpoint';
import { count, duration, tokenRate } from './format';
import { memo } from './memo';
import { label, problem } from './words';

const SAMPLE_TOOLS = `[{"type": "function", "function": {
  "name": "get_weather",
  "description": "The weather in a city",
  "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
}}]`;

/** The words of `x-baton-route`, such as `handoff; prefill=prefill-1; decode=local; reason=faster`. */
function Route({ reply }: { reply: Reply }) {
  const [kind, ...pairs] = reply.route.split('; ');
  const said = new Map(pairs.map((pair) => pair.split('=', 2) as [string, string]));
  const failure = said.get('failure');
  const path = said.has('prefill') ? `${said.get('prefill')} → ${said.get('decode')}` : (said.get('decode') ?? said.get('upstream') ?? '');
  return (
    <p class="route-of" title={reply.route}>
      {kind && (
        <span>
          <span class="tag">{kind}</span> {path}
          {said.has('reason') && ` · ${label(said.get('reason') ?? '')}`}
        </span>
      )}
      {failure && <span class="why">fell back: {problem(failure)}</span>}
      {reply.firstMs !== null && <span class="num">first token {duration(reply.firstMs)}</span>}
      {reply.tokens !== null && <span class="num">{count(reply.tokens)} tokens</span>}
      {reply.tokensPerSecond ? <span class="num">{tokenRate(reply.tokensPerSecond)}</span> : null}
      {reply.end === 'stopped' && <span>stopped</span>}
    </p>
  );
}

function ReplyView({ reply }: { reply: Reply }) {
  const isOpen = reply.end === 'open';
  return (
    <>
      {reply.reasoning && (
        <details class="reasoning" open={isOpen && !reply.text}>
          <summary>Reasoning</summary>
          <p>{reply.reasoning}</p>
        </details>
      )}
      {reply.text && <p class="text">{reply.text}</p>}
      {reply.calls.map((call, i) => (
        <div class="call" key={i}>
          <span class="tag">tool call</span> <code>{call.name}</code>
          <pre tabIndex={0}>{call.arguments}</pre>
        </div>
      ))}
      {isOpen && !reply.text && !reply.reasoning && reply.calls.length === 0 && <p class="muted">Waiting for the first token…</p>}
      {typeof reply.end === 'object' && (
        <p class="notice bad" role="alert">{reply.end.error}</p>
      )}
      <Route reply={reply} />
    </>
  );
}

function invitation(models: string[] | null): string {
  if (models === null) return 'The models are not known yet.';
  return models.length > 0 ? 'Ask something. A long text shows whether a handoff pays.' : 'No model is served yet.';
}

export const Chat = memo(({ models, isShown }: { models: string[] | null; isShown: boolean }) => {
  const [turns, setTurns] = useState<Turn[]>([]);
  const [reply, setReply] = useState<Reply | null>(null);
  const [draft, setDraft] = useState('');
  const [chosen, choose] = useState('');
  const [settings, set] = useState<Omit<Settings, 'model'>>({ system: '', maxTokens: 512, temperature: 0.7, tools: '' });
  const running = useRef<AbortController | null>(null);
  const input = useRef<HTMLTextAreaElement>(null);
  const log = useRef<HTMLDivElement>(null);
  const model = models?.includes(chosen) ? chosen : (models?.[0] ?? '');

  useEffect(() => () => running.current?.abort(), []);
  useEffect(() => log.current?.scrollTo({ top: log.current.scrollHeight }), [turns, reply, isShown]);

  const submit = async () => {
    const text = draft.trim();
    if (!text || running.current) return;
    const asked: Turn[] = [...turns, { role: 'user', text }];
    setTurns(asked);
    setDraft('');
    const stop = new AbortController();
    running.current = stop;
    let latest = EMPTY;
    // Tokens may come faster than the screen changes: the text is drawn once a frame.
    let frame = 0;
    const show = (now: Reply) => {
      latest = now;
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        setReply(latest);
      });
    };
    show(EMPTY);
    try {
      latest = await send(asked, { ...settings, model }, stop.signal, show);
    } catch (error) {
      const why = error instanceof Refusal || error instanceof SyntaxError ? error.message : 'The endpoint cannot be reached.';
      latest = { ...latest, end: stop.signal.aborted ? 'stopped' : { error: why } };
    }
    cancelAnimationFrame(frame);
    running.current = null;
    setReply(null);
    setTurns([...asked, latest]);
    input.current?.focus();
  };

  const onKey = (event: KeyboardEvent) => {
    if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      void submit();
    }
  };

  const isRunning = reply !== null;
  const shown = reply ? [...turns, reply] : turns;
  return (
    <section class="panel chat" aria-labelledby="try">
      <h2 id="try">
        Try it <small>nothing is stored; a new chat forgets everything</small>
      </h2>
      <div class="actions">
        <label for="chat-model">Model</label>
        <select id="chat-model" value={model} onChange={(event) => choose(event.currentTarget.value)}>
          {models?.map((name) => (
            <option key={name}>{name}</option>
          ))}
        </select>
        <button type="button" class="quiet" disabled={turns.length === 0 || isRunning} onClick={() => setTurns([])}>
          New chat
        </button>
      </div>
      <details class="settings">
        <summary>Settings</summary>
        <label for="system">System message</label>
        <textarea id="system" rows={2} value={settings.system} onInput={(event) => set({ ...settings, system: event.currentTarget.value })} />
        <div class="pair">
          <label>
            Most tokens
            <input type="number" min={1} max={100000} value={settings.maxTokens} onInput={(event) => set({ ...settings, maxTokens: Number(event.currentTarget.value) || 512 })} />
          </label>
          <label>
            Temperature
            <input type="number" min={0} max={2} step={0.1} value={settings.temperature} onInput={(event) => set({ ...settings, temperature: Number(event.currentTarget.value) })} />
          </label>
        </div>
        <label for="tools">Tools, as JSON. The model's calls are shown, and nothing runs them</label>
        <textarea id="tools" rows={4} value={settings.tools} placeholder={SAMPLE_TOOLS} onInput={(event) => set({ ...settings, tools: event.currentTarget.value })} />
        <button type="button" class="quiet" onClick={() => set({ ...settings, tools: settings.tools ? '' : SAMPLE_TOOLS })}>
          {settings.tools ? 'Remove the tools' : 'Add a sample tool'}
        </button>
      </details>
      <div class="log" ref={log} role="log" aria-label="Messages" tabIndex={0}>
        {shown.length === 0 && <p class="empty">{invitation(models)}</p>}
        {shown.map((turn, i) => (
          <article class={`turn ${turn.role}`} key={i}>
            <h3 class="unseen">{turn.role === 'user' ? 'You' : 'Reply'}</h3>
            {turn.role === 'user' ? <p class="text">{turn.text}</p> : <ReplyView reply={turn} />}
          </article>
        ))}
      </div>
      <form
        class="ask"
        onSubmit={(event) => {
          event.preventDefault();
          void submit();
        }}
      >
        <label for="message" class="unseen">Message</label>
        <textarea id="message" ref={input} rows={3} value={draft} onInput={(event) => setDraft(event.currentTarget.value)} onKeyDown={onKey} placeholder="Message. Enter sends, Shift+Enter begins a line" />
        <div class="actions">
          {isRunning ? (
            <button type="button" class="stop" onClick={() => running.current?.abort()}>Stop</button>
          ) : (
            <button type="submit" disabled={!draft.trim() || !model}>Send</button>
          )}
        </div>
      </form>
    </section>
  );
});
