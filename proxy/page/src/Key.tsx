/** Asks for the operator's key. */

import { useState } from 'preact/hooks';
import { Refusal, call, keyRefusal, setKey } from './endpoint';
import type { KeyRefusal } from './endpoint';
import { connect } from './live';

const WHY: Record<KeyRefusal, string> = {
  unknown_key: 'The endpoint does not know this key.',
  guest: 'This key may not see the cluster. Ask for an operator\u2019s key, or use Plan and Try it with this one.',
};

/** A browser refuses to send other characters in a header, so no request with such a key would leave it. */
const SENDABLE = /^[\x20-\x7e]+$/;

/** Why this key is of no use, or null if the endpoint knows it. */
async function problemOf(typed: string): Promise<string | null> {
  if (!SENDABLE.test(typed)) {
    return 'A key has only letters without accents, digits, punctuation and spaces. This one has other characters; perhaps something else was pasted.';
  }
  try {
    const response = await call('./baton/state', { key: typed });
    await response.body?.cancel();
    return null;
  } catch (error) {
    const refused = keyRefusal(error);
    if (refused) return refused === 'guest' ? null : WHY[refused];
    return error instanceof Refusal ? error.message : 'The endpoint cannot be reached, so the key was not checked.';
  }
}

export function Key({ refused }: { refused: KeyRefusal | null }) {
  const [typed, type] = useState('');
  const [problem, setProblem] = useState<string | null>(null);
  const [isChecking, setChecking] = useState(false);
  const submit = async (event: Event) => {
    event.preventDefault();
    const entered = typed.trim();
    setChecking(true);
    const found = await problemOf(entered);
    setChecking(false);
    setProblem(found);
    type('');
    if (found) return;
    setKey(entered);
    connect();
  };
  const shown = problem ?? (refused && WHY[refused]);
  return (
    <section class="panel key-gate" aria-labelledby="key">
      <h2 id="key">This endpoint asks for a key</h2>
      <p>
        Enter an operator's key from its configuration (<code>api_keys</code>, or <code>[[keys]]</code> with <code>operator = true</code>). It
        stays in this tab. A duplicate of the tab gets it, too, and so does the tab if it is closed and opened again:{' '}
        <strong>Forget key</strong> deletes it.
      </p>
      {shown && (
        <p class="notice bad" role="alert">{shown}</p>
      )}
      <form class="ask inline" onSubmit={submit}>
        <label for="typed-key">API key</label>
        <input id="typed-key" type="password" autocomplete="off" value={typed} onInput={(event) => type(event.currentTarget.value)} />
        <button type="submit" disabled={!typed.trim() || isChecking}>{isChecking ? 'Checking…' : 'Unlock'}</button>
      </form>
    </section>
  );
}
