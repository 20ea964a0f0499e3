/** Shows how a request would be served now: every route, its predicted times, and why it is not taken. */

import { useState } from 'preact/hooks';
import { call, whyFailed } from './endpoint';
import { count, duration } from './format';
import { memo } from './memo';
import type { Prediction } from './state';
import { WideTable } from './WideTable';
import { problem, reason, route as words } from './words';

interface PlannedRoute {
  decode: string;
  prefill: string | null;
  chosen: boolean;
  cached_on_decode: number;
  cached_on_prefill: number | null;
  prediction: Prediction | null;
  unused_reason: string | null;
}

interface Explanation {
  model: string;
  policy: string;
  reason: string | null;
  n_prompt: number;
  expected_output: number;
  routes: PlannedRoute[];
}

/** The body of a chat, from what somebody pasted: such a body, or the text of a prompt. */
function body(pasted: string, model: string): unknown {
  if (pasted.trimStart().startsWith('{')) {
    const parsed = JSON.parse(pasted) as Record<string, unknown>;
    return { model, ...parsed };
  }
  return { model, messages: [{ role: 'user', content: pasted }] };
}

function RouteTimes({ prediction, longest }: { prediction: Prediction; longest: number }) {
  const { queue_ms, after_prefill_ms, ttft_ms, completion_ms } = prediction;
  const parts: [string, number][] = [
    ['wait', queue_ms],
    ['prefill', Math.max(0, ttft_ms - queue_ms - after_prefill_ms)],
    ['transfer', after_prefill_ms],
    ['decode', Math.max(0, completion_ms - ttft_ms)],
  ];
  return (
    <span class="bar flow" aria-hidden="true">
      {parts.map(([phase, ms]) => (
        <span key={phase} class={`span ${phase}`} style={{ width: `${(ms / longest) * 100}%` }} />
      ))}
    </span>
  );
}

function time(ms: number | undefined): string {
  return ms === undefined ? '–' : duration(ms);
}

function Table({ explained }: { explained: Explanation }) {
  const longest = Math.max(1, ...explained.routes.map((route) => route.prediction?.completion_ms ?? 0));
  const end = (route: PlannedRoute) => (route.chosen ? -1 : (route.prediction?.completion_ms ?? Infinity));
  const routes = [...explained.routes].sort((a, b) => end(a) - end(b));
  const chosen = routes.find((route) => route.chosen);
  return (
    <>
      <p class="verdict" role="status">
        {chosen ? (
          <>
            It would run on <strong>{words(chosen)}</strong>: {reason({ reason: explained.reason ?? '', prefill: chosen.prefill })}.
          </>
        ) : (
          'No route can take it now.'
        )}{' '}
        <span class="muted">
          {count(explained.n_prompt)} prompt tokens, about {count(explained.expected_output)} in the reply, policy {explained.policy}.
        </span>
      </p>
      <WideTable label="Routes with predicted times" columns={['Route', 'Predicted', 'Wait', 'Prefill', 'Transfer after it', 'First token', 'Last token', 'Cached']}>
        {routes.map((route) => (
          <tr key={words(route)} class={route.chosen ? 'chosen' : ''}>
            <th scope="row">
              {words(route)}
              {route.chosen && <span class="tag chosen">chosen</span>}
              {route.unused_reason && <span class="why">{problem(route.unused_reason)}</span>}
            </th>
            <td class="times">
              {route.prediction ? <RouteTimes prediction={route.prediction} longest={longest} /> : <span class="muted">{route.unused_reason ? 'not possible now' : 'speeds not measured yet'}</span>}
            </td>
            <td class="num">{time(route.prediction?.queue_ms)}</td>
            <td class="num">{time(route.prediction?.prefill_ms)}</td>
            <td class="num">{time(route.prediction?.after_prefill_ms)}</td>
            <td class="num">{time(route.prediction?.ttft_ms)}</td>
            <td class="num">{time(route.prediction?.completion_ms)}</td>
            <td class="num">{count(route.cached_on_prefill ?? route.cached_on_decode)}</td>
          </tr>
        ))}
      </WideTable>
    </>
  );
}

export const Plan = memo(({ models }: { models: string[] | null }) => {
  const [pasted, paste] = useState('');
  const [model, choose] = useState('');
  const [answer, show] = useState<Explanation | string | null>(null);
  const [isAsking, setAsking] = useState(false);
  const chosen = models?.includes(model) ? model : (models?.[0] ?? '');

  const ask = async (event: Event) => {
    event.preventDefault();
    setAsking(true);
    try {
      const response = await call('./baton/plan', { body: body(pasted, chosen) });
      show((await response.json()) as Explanation);
    } catch (error) {
      if (error instanceof SyntaxError) show(`This is no JSON: ${error.message}`);
      else show(whyFailed(error));
    } finally {
      setAsking(false);
    }
  };

  return (
    <section class="panel" aria-labelledby="plan">
      <h2 id="plan">
        Plan <small>how a request would be served now; nothing is generated</small>
      </h2>
      <form class="ask" onSubmit={ask}>
        <label for="pasted">A prompt, or the JSON body of a chat request</label>
        <textarea
          id="pasted"
          rows={6}
          value={pasted}
          onInput={(event) => paste(event.currentTarget.value)}
          placeholder={'Summarise this report: …\n\nor\n\n{"messages": [{"role": "user", "content": "…"}], "max_tokens": 200}'}
        />
        <div class="actions">
          <label for="plan-model">Model</label>
          <select id="plan-model" value={chosen} onChange={(event) => choose(event.currentTarget.value)}>
            {models?.map((name) => (
              <option key={name}>{name}</option>
            ))}
          </select>
          <button type="submit" disabled={!pasted.trim() || isAsking}>
            {isAsking ? 'Asking…' : 'Show the routes'}
          </button>
        </div>
      </form>
      {answer === null ? (
        <p class="empty small">Paste a long prompt to see from which length on a handoff pays.</p>
      ) : typeof answer === 'string' ? (
        <p class="notice bad" role="alert">{answer}</p>
      ) : (
        <Table explained={answer} />
      )}
    </section>
  );
});
