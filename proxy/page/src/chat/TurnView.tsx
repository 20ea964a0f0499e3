/** A message and a reply, with what one can do with them. */

import { useState } from 'preact/hooks';
import { count, duration, tokenRate } from '../format';
import { memo } from '../memo';
import { label, problem } from '../words';
import { Copy } from './Code';
import { Markdown } from './Markdown';
import type { Reply, Said } from './turns';

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
      {reply.promptTokens !== null && (
        <span class="num">
          {count(reply.promptTokens)} tokens of prompt{reply.cachedTokens ? `, ${count(reply.cachedTokens)} cached` : ''}
        </span>
      )}
      {reply.tokens !== null && <span class="num">{count(reply.tokens)} tokens</span>}
      {reply.tokensPerSecond ? <span class="num">{tokenRate(reply.tokensPerSecond)}</span> : null}
      {reply.end === 'stopped' && <span>stopped</span>}
    </p>
  );
}

interface ReplyViewProps {
  reply: Reply;
  /** Asks for another reply instead; null if that is not possible now. */
  again: (() => void) | null;
}

export const ReplyView = memo(({ reply, again }: ReplyViewProps) => {
  const isOpen = reply.end === 'open';
  const error = typeof reply.end === 'object' ? reply.end.error : null;
  return (
    <>
      {reply.reasoning && (
        <details class="reasoning" open={isOpen && !reply.text}>
          <summary>Reasoning</summary>
          <p>{reply.reasoning}</p>
        </details>
      )}
      {reply.text && <Markdown text={reply.text} isOpen={isOpen} />}
      {reply.calls.map((call, i) => (
        <div class="call" key={i}>
          <span class="tag">tool call</span> <code>{call.name}</code>
          <pre tabIndex={0}>{call.arguments}</pre>
        </div>
      ))}
      {isOpen && !reply.text && !reply.reasoning && reply.calls.length === 0 && <p class="muted">Waiting for the first token…</p>}
      {error !== null && (
        <p class="notice bad" role="alert">{error}</p>
      )}
      <Route reply={reply} />
      {!isOpen && (
        <p class="actions">
          {reply.text && <Copy text={reply.text} what="the reply" />}
          {again && <button type="button" class="quiet small-button" onClick={again}>Regenerate</button>}
        </p>
      )}
    </>
  );
});

interface SaidViewProps {
  said: Said;
  /** Sends another text instead, and forgets what came after it; null if that is not possible now. */
  edit: ((text: string) => void) | null;
}

export const SaidView = memo(({ said, edit }: SaidViewProps) => {
  const [draft, setDraft] = useState<string | null>(null);
  if (draft !== null && edit) {
    const submit = (event: Event) => {
      event.preventDefault();
      setDraft(null);
      edit(draft.trim());
    };
    return (
      <form class="ask" onSubmit={submit}>
        <textarea aria-label="The message, changed" rows={3} value={draft} onInput={(event) => setDraft(event.currentTarget.value)} />
        <p class="actions">
          <button type="submit" disabled={!draft.trim() && said.files.length + said.pictures.length === 0}>Send instead</button>
          <button type="button" class="quiet" onClick={() => setDraft(null)}>Cancel</button>
        </p>
      </form>
    );
  }
  return (
    <>
      <Attachments pictures={said.pictures} files={said.files} />
      {said.text && <p class="text">{said.text}</p>}
      {edit && (
        <p class="actions">
          <button type="button" class="quiet small-button" onClick={() => setDraft(said.text)}>Edit</button>
        </p>
      )}
    </>
  );
});

interface AttachmentsProps extends Pick<Said, 'pictures' | 'files'> {
  /** Takes one of the pictures, or of the files, away. */
  remove?: (kind: 'pictures' | 'files', i: number) => void;
}

export function Attachments({ pictures, files, remove }: AttachmentsProps) {
  if (pictures.length + files.length === 0) return null;
  const away = (kind: 'pictures' | 'files', i: number, name: string) =>
    remove && <button type="button" class="quiet small-button" aria-label={`Remove ${name}`} onClick={() => remove(kind, i)}>×</button>;
  return (
    <ul class="attached">
      {pictures.map(({ name, url }, i) => (
        <li key={`picture ${i}`}>
          <img src={url} alt={name} />
          {away('pictures', i, name)}
        </li>
      ))}
      {files.map(({ name, text }, i) => (
        <li key={`file ${i}`} class="tag">
          {name} · {count(text.length)} characters {away('files', i, name)}
        </li>
      ))}
    </ul>
  );
}
