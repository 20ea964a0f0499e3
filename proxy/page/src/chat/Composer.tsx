/** The message that is being written, with its pictures and files. */

import { useState } from 'preact/hooks';
import type { RefObject } from 'preact';
import { NOTHING_ATTACHED, attach } from './attach';
import type { Attached } from './attach';
import { Attachments } from './TurnView';
import type { Said } from './turns';

interface ComposerProps {
  input: RefObject<HTMLTextAreaElement | null>;
  draft: string;
  write: (text: string) => void;
  isRunning: boolean;
  /** A model is there. */
  canSend: boolean;
  submit: (said: Said) => void;
  stop: () => void;
}

export function Composer({ input, draft, write, isRunning, canSend, submit, stop }: ComposerProps) {
  const [attached, setAttached] = useState<Attached>(NOTHING_ATTACHED);
  const [problem, tell] = useState<string | null>(null);
  const [isOver, setOver] = useState(false);
  const isEmpty = !draft.trim() && attached.pictures.length + attached.files.length === 0;

  const send = () => {
    if (isEmpty || isRunning || !canSend) return;
    submit({ role: 'user', text: draft.trim(), ...attached });
    write('');
    setAttached(NOTHING_ATTACHED);
    tell(null);
  };
  const add = async (list: FileList | undefined | null): Promise<void> => {
    const chosen = [...(list ?? [])];
    if (chosen.length === 0) return;
    try {
      setAttached(await attach(attached, chosen));
      tell(null);
    } catch (error) {
      tell(error instanceof Error ? error.message : String(error));
    }
  };
  const onKey = (event: KeyboardEvent) => {
    if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  };
  const onPaste = (event: ClipboardEvent) => {
    const { files } = event.clipboardData ?? {};
    if (!files?.length) return;
    event.preventDefault();
    void add(files);
  };
  const onDrop = (event: DragEvent) => {
    event.preventDefault();
    setOver(false);
    void add(event.dataTransfer?.files);
  };
  const remove = (kind: 'pictures' | 'files', i: number) => setAttached({ ...attached, [kind]: attached[kind].filter((_, at) => at !== i) });
  return (
    <form
      class={isOver ? 'ask over' : 'ask'}
      onSubmit={(event) => {
        event.preventDefault();
        send();
      }}
      onDragOver={(event) => {
        event.preventDefault();
        setOver(true);
      }}
      onDragLeave={() => setOver(false)}
      onDrop={onDrop}
    >
      <Attachments {...attached} remove={remove} />
      {problem !== null && (
        <p class="notice bad" role="alert">{problem}</p>
      )}
      <label for="message" class="unseen">Message</label>
      <textarea
        id="message"
        ref={input}
        rows={3}
        value={draft}
        onInput={(event) => write(event.currentTarget.value)}
        onKeyDown={onKey}
        onPaste={onPaste}
        placeholder="Message. Enter sends, Shift+Enter begins a line. Paste or drop pictures and text files"
      />
      <div class="actions">
        {isRunning ? (
          <button type="button" class="stop" onClick={stop}>Stop</button>
        ) : (
          <button type="submit" disabled={isEmpty || !canSend}>Send</button>
        )}
        <label class="attach">
          <input
            type="file"
            multiple
            class="unseen"
            aria-label="Attach pictures or text files"
            onChange={(event) => {
              void add(event.currentTarget.files).then(() => {
                if (event.target instanceof HTMLInputElement) event.target.value = '';
              });
            }}
          />
          <span aria-hidden="true">Attach</span>
        </label>
      </div>
    </form>
  );
}
