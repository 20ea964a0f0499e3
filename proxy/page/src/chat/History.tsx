/** The list of the chats that this browser keeps. */

import { useState } from 'preact/hooks';
import { memo } from '../memo';
import { clock } from '../format';
import { download } from './clipboard';
import { all, keepChats, removeAll, take } from './history';
import type { Summary } from './history';

const day = new Intl.DateTimeFormat('en-GB', { day: 'numeric', month: 'short' });

function when(at_ms: number): string {
  return new Date(at_ms).toDateString() === new Date().toDateString() ? clock(at_ms) : day.format(at_ms);
}

interface HistoryProps {
  chats: Summary[];
  current: string;
  isKeeping: boolean;
  open: (id: string) => void;
  remove: (id: string) => void;
  changed: (chats: Summary[]) => void;
  keep: (isKept: boolean) => void;
  tell: (problem: string) => void;
}

export const History = memo(({ chats, current, isKeeping, open, remove, changed, keep, tell }: HistoryProps) => {
  const [isSure, setSure] = useState(false);
  const attempt = (act: () => Promise<void>) => act().catch((error: unknown) => tell(error instanceof Error ? error.message : String(error)));
  const exportAll = () => attempt(async () => download('baton-chats.json', 'application/json', JSON.stringify({ chats: await all() }, null, 1)));
  const removeEach = () =>
    attempt(async () => {
      await removeAll();
      changed([]);
      setSure(false);
    });
  const toggle = () =>
    attempt(async () => {
      await keepChats(!isKeeping);
      keep(!isKeeping);
      if (isKeeping) changed([]);
    });
  const importFile = (input: HTMLInputElement) => {
    const file = input.files?.[0];
    if (file) void attempt(async () => changed(await take(await file.text())));
    // The same file may be chosen again.
    input.value = '';
  };
  return (
    <details class="history">
      <summary>Chats in this browser ({chats.length})</summary>
      <label class="check">
        <input type="checkbox" checked={isKeeping} onChange={toggle} /> Keep chats in this browser. They are stored nowhere else
      </label>
      <ul>
        {chats.map(({ id, at_ms, title }) => (
          <li key={id} aria-current={id === current ? 'true' : undefined}>
            <button type="button" class="quiet title" onClick={() => open(id)}>
              {title} <span class="muted num">{when(at_ms)}</span>
            </button>
            <button type="button" class="quiet small-button" aria-label={`Delete the chat ${title}`} onClick={() => remove(id)}>×</button>
          </li>
        ))}
      </ul>
      <p class="actions">
        <button type="button" class="quiet" disabled={chats.length === 0} onClick={exportAll}>Export all</button>
        <label class="attach">
          <input type="file" accept="application/json,.json" class="unseen" aria-label="Import exported chats" onChange={(event) => importFile(event.currentTarget)} />
          <span aria-hidden="true">Import</span>
        </label>
        {isSure ? (
          <>
            <button type="button" class="stop" onClick={removeEach}>Delete all {chats.length}</button>
            <button type="button" class="quiet" onClick={() => setSure(false)}>Keep them</button>
          </>
        ) : (
          <button type="button" class="quiet" disabled={chats.length === 0} onClick={() => setSure(true)}>Delete all…</button>
        )}
      </p>
    </details>
  );
});
