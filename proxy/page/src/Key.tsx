/** Asks for the operator's key. */

import { useState } from 'preact/hooks';
import { setKey } from './endpoint';
import { connect } from './live';

export function Key({ refused }: { refused: string | null }) {
  const [typed, type] = useState('');
  const submit = (event: Event) => {
    event.preventDefault();
    setKey(typed.trim());
    type('');
    connect();
  };
  return (
    <section class="panel key-gate" aria-labelledby="key">
      <h2 id="key">This endpoint asks for a key</h2>
      <p>
        Enter an operator's key from its configuration (<code>api_keys</code>, or <code>[[keys]]</code> with <code>operator = true</code>). It
        stays in this tab, and is forgotten when the tab is closed.
      </p>
      {refused && (
        <p class="notice bad" role="alert">{refused}</p>
      )}
      <form class="ask inline" onSubmit={submit}>
        <label for="typed-key">API key</label>
        <input id="typed-key" type="password" autocomplete="off" value={typed} onInput={(event) => type(event.currentTarget.value)} />
        <button type="submit" disabled={!typed.trim()}>Unlock</button>
      </form>
    </section>
  );
}
