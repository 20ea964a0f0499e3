/** For operators: the keys and who used what, the configuration, the last lines of the log. */

import { age, clock, count, duration } from './format';
import { summed, useRoute } from './operate';
import type { Answer, ConfigReport, KeyState, ReloadPreview, SettingChange, UsageReport } from './operate';
import { WideTable } from './WideTable';
import { CHANGE_EFFECTS, SETTING_SOURCES } from './words';

/** An answer, or a sentence about why there is none. */
function Answered<T>({ answer, absent, draw }: { answer: Answer<T>; absent: string; draw: (value: T) => preact.ComponentChild }) {
  switch (answer.kind) {
    case 'asking':
      return <p class="empty small">Asking…</p>;
    case 'absent':
      return <p class="empty small">{absent}</p>;
    case 'refused':
      return <p class="notice">{answer.why}</p>;
    case 'here':
      return <>{draw(answer.value)}</>;
  }
}

function limits(key: KeyState): string {
  const all = [
    key.requests_per_minute !== null && `${count(key.requests_per_minute)} requests a minute`,
    key.tokens_per_minute !== null && `${count(key.tokens_per_minute)} tokens a minute`,
    key.max_concurrent !== null && `${count(key.max_concurrent)} at once`,
    key.tokens_per_day !== null && `${count(key.tokens_today)} of ${count(key.tokens_per_day)} tokens today`,
    key.tokens_per_month !== null && `${count(key.tokens_this_month)} of ${count(key.tokens_per_month)} tokens this month`,
    key.models.length > 0 && `only ${key.models.join(', ')}`,
  ];
  return all.filter(Boolean).join('; ') || 'none';
}

function lastUse(key: KeyState): string {
  const last = Math.max(0, ...key.secrets.map((secret) => secret.last_used_ms ?? 0));
  return last > 0 ? `${age(Date.now() - last)} ago` : 'never';
}

function expires(key: KeyState): string {
  const days = key.secrets.map((secret) => secret.expires);
  const last = days.some((day) => day === null) ? null : days.sort().at(-1) ?? null;
  if (last === null) return 'never';
  // Both are days in UTC.
  return last < new Date().toISOString().slice(0, 10) ? `${last} (over)` : last;
}

function Keys({ keys }: { keys: KeyState[] }) {
  if (keys.length === 0) return <p class="empty small">No keys are configured: everybody who reaches the endpoint may use it.</p>;
  return (
    <WideTable label="Keys" columns={['Key', 'Limits', 'Last use', 'Expires']}>
      {keys.map((key) => (
        <tr key={key.name}>
          <th scope="row">
            {key.name} {key.operator && <span class="tag">operator</span>} {key.secrets.length > 1 && <span class="tag">being replaced</span>}
          </th>
          <td>{limits(key)}</td>
          <td class="num">{lastUse(key)}</td>
          <td class="num">{expires(key)}</td>
        </tr>
      ))}
    </WideTable>
  );
}

function Usage({ usage }: { usage: UsageReport }) {
  const sums = summed(usage.rows);
  return (
    <>
      <p class="small muted">
        From {usage.since} to {usage.until} (UTC).
        {!usage.is_kept && ' Since the endpoint started: it keeps no usage.'}
        {usage.is_truncated && ' There are more rows than are shown.'}
      </p>
      {sums.length === 0 ? (
        <p class="empty small">Nobody has used a model yet.</p>
      ) : (
        <WideTable label="Usage" kind="usage" columns={['Key', 'Model', 'Requests', 'Tokens of prompts', 'of these cached', 'Tokens of replies', 'Engine’s time']}>
          {sums.map((sum) => (
            <tr key={`${sum.key} ${sum.model}`}>
              <th scope="row">{sum.key}</th>
              <td>{sum.model}</td>
              <td class="num">{count(sum.requests)}</td>
              <td class="num">{count(sum.prompt)}</td>
              <td class="num">{count(sum.cached)}</td>
              <td class="num">{count(sum.generated)}</td>
              <td class="num">{duration(sum.seconds * 1000)}</td>
            </tr>
          ))}
        </WideTable>
      )}
    </>
  );
}

function Config({ config }: { config: ConfigReport }) {
  return (
    <>
      {config.problem && (
        <p class="notice bad" role="alert">
          <strong>The file is not in force as it is now:</strong> <span class="log-line">{config.problem}</span>
        </p>
      )}
      {config.waiting.length > 0 && <p class="notice">A restart applies what has changed since the start: {config.waiting.join(', ')}.</p>}
      <p class="small muted">
        {config.path ? (
          <>
            <code>{config.path}</code>, applied at {clock(config.applied_at_ms)}. A change is applied by itself within some seconds.
          </>
        ) : (
          'No file: flags and defaults alone.'
        )}{' '}
        A key that is not listed has its default; a flag wins over the file.
      </p>
      {config.settings.length > 0 && (
        <WideTable label="Settings" kind="settings-of" columns={['Key', 'Value', 'From']}>
          {config.settings.map(({ key, value, source }, i) => (
            <tr key={i}>
              <th scope="row">
                <code>{key}</code>
              </th>
              <td>{value === undefined ? <span class="muted">set, and not shown</span> : <code>{value}</code>}</td>
              <td>{SETTING_SOURCES[source] ?? source}</td>
            </tr>
          ))}
        </WideTable>
      )}
    </>
  );
}

/** A value as it is written; a secret only as being set. */
function Written({ value, isSet }: { value: string | undefined; isSet: boolean }) {
  if (!isSet) return <span class="muted">not set</span>;
  return value === undefined ? <span class="muted">not shown</span> : <code>{value}</code>;
}

function Changes({ changes }: { changes: SettingChange[] }) {
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="What a reload would change">
      <table class="plan settings-of changes-of">
        <thead>
          <tr>
            <th scope="col">Key</th>
            <th scope="col">In force</th>
            <th scope="col">In the file</th>
            <th scope="col">Takes effect</th>
          </tr>
        </thead>
        <tbody>
          {changes.map(({ key, kind, before, after, effect }) => (
            <tr key={key}>
              <th scope="row">
                <code>{key}</code>
              </th>
              <td>
                <Written value={before} isSet={kind !== 'added'} />
              </td>
              <td>
                <Written value={after} isSet={kind !== 'removed'} />
              </td>
              <td>{CHANGE_EFFECTS[effect] ?? effect}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Preview({ preview }: { preview: ReloadPreview }) {
  if (!preview.path) return <p class="empty small">Without a file there is nothing to reload.</p>;
  return (
    <>
      <p class="small muted">
        <code>{preview.path}</code>
        {preview.mistakes.length > 0 ? ' would not be applied:' : preview.changes.length > 0 ? ' sets otherwise:' : ' sets what is in force.'}
      </p>
      {preview.mistakes.length > 0 && (
        <ul class="notice bad mistakes">
          {preview.mistakes.map((line, i) => (
            <li key={i} class="log-line">
              {line}
            </li>
          ))}
        </ul>
      )}
      {preview.changes.length > 0 && <Changes changes={preview.changes} />}
      {preview.is_truncated && <p class="small muted">There may be more: a thousand keys of a file are compared.</p>}
      {preview.downloads.length > 0 && <p class="notice">It would download {preview.downloads.join(', ')} first.</p>}
    </>
  );
}

function Log({ lines }: { lines: string[] }) {
  if (lines.length === 0) return <p class="empty small">Nothing was logged since the start.</p>;
  return (
    <pre class="log-lines" tabIndex={0} role="region" aria-label="The last lines of the log">
      {lines.join('\n')}
    </pre>
  );
}

export function Operate() {
  const keys = useRoute<{ keys: KeyState[] }>('./baton/keys');
  const usage = useRoute<UsageReport>('./baton/usage?days=30');
  const config = useRoute<ConfigReport>('./baton/config');
  const preview = useRoute<ReloadPreview>('./baton/config/changes');
  const log = useRoute<{ lines: string[] }>('./baton/log');
  return (
    <div class="overview operate">
      <div>
        <section class="panel" aria-labelledby="keys">
          <h2 id="keys">Keys <small>their secrets are never shown</small></h2>
          <Answered answer={keys} absent="This endpoint does not list its keys." draw={({ keys }) => <Keys keys={keys} />} />
        </section>
        <section class="panel" aria-labelledby="usage">
          <h2 id="usage">Usage <small>the last 30 days</small></h2>
          <Answered answer={usage} absent="This endpoint does not count usage." draw={(usage) => <Usage usage={usage} />} />
        </section>
        <section class="panel" aria-labelledby="log">
          <h2 id="log">Log <small>the last lines of the endpoint's own process</small></h2>
          <Answered answer={log} absent="This endpoint does not show its log." draw={({ lines }) => <Log lines={lines} />} />
        </section>
      </div>
      <div>
        <section class="panel" aria-labelledby="config">
          <h2 id="config">Configuration <small>what is set, and where</small></h2>
          <Answered answer={config} absent="This endpoint does not show its configuration." draw={(config) => <Config config={config} />} />
        </section>
        <section class="panel" aria-labelledby="preview">
          <h2 id="preview">Next reload <small>what it would change</small></h2>
          <Answered answer={preview} absent="This endpoint cannot say what a reload would change." draw={(preview) => <Preview preview={preview} />} />
        </section>
      </div>
    </div>
  );
}
