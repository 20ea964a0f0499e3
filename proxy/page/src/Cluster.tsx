/** Machines, their engines, and the links between them, in words and figures. */

import { age, byteRate, bytes, count, duration, percent, plural, tokenRate } from './format';
import { memo } from './memo';
import { busyLinks, machines } from './picture';
import type { Machine } from './picture';
import { Status } from './Status';
import type { Discovery, Found, Link, MeasuredModel, Model, NodeReport, Request, State, Upstream } from './state';
import { LOADS, label, life, problem, worst } from './words';

function Meter({ label, value, max, text }: { label: string; value: number; max: number; text: string }) {
  const share = max > 0 ? Math.min(1, value / max) : 0;
  return (
    <div class="meter">
      <span>{label}</span>
      <span class="track" aria-hidden="true">
        <span class={share >= 0.9 ? 'fill full' : 'fill'} style={{ width: `${share * 100}%` }} />
      </span>
      <span class="num">{text}</span>
    </div>
  );
}

function Fact({ name, whole, children }: { name: string; whole?: boolean; children: preact.ComponentChildren }) {
  return (
    <div class={whole ? 'whole' : ''}>
      <dt>{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}

function MachineCard({ machine, now }: { machine: Machine; now: number }) {
  const node = worst(machine);
  const prefill = machine.tasks.find((task) => task.node.task === 'prefill')?.node;
  const decode = machine.tasks.find((task) => task.node.task === 'decode')?.node;
  const shown = decode ?? prefill ?? node;
  const state = life(node);
  const isGone = state.life === 'down';
  const cells = shown.kv_cells;
  const tasks = [...new Set(machine.tasks.map((task) => task.node.task))];
  const unused = [...new Set(machine.tasks.flatMap((task) => (task.node.unused ? [task.node.unused] : [])))];
  const reasons = unused.length > 0 ? [] : [...new Set(machine.tasks.flatMap((task) => (task.node.unused_reason ? [task.node.unused_reason] : [])))];
  const breaker = machine.tasks.find((task) => task.node.breaker.is_open)?.node.breaker;
  // A node that is not used for a model runs its own. What runs on a machine that never answered, nobody knows.
  const known = machine.tasks.filter((task) => task.node.has_answered || task.node.own);
  const models = [...new Set(known.map((task) => (task.node.unused_reason && task.node.model ? task.node.model : task.model)).filter(Boolean))];
  return (
    <li class={`card machine ${state.life}`}>
      <header>
        <h3>{machine.name}</h3>
        <Status {...state} />
      </header>
      <p class="since">
        {isGone ? 'Gone' : state.label} for <span class="num">{age(now - node.life_since_ms)}</span>
        {node.address && <span class="address"> · {node.address.replace(/^https?:\/\//, '')}</span>}
        {node.own && ' · the endpoint\u2019s own machine'}
      </p>
      {node.reason && !node.unused && <p class={isGone ? 'why lost' : 'why'}>{isGone ? `Lost: ${node.reason}` : node.reason}</p>}
      {breaker && <p class="why">Requests are kept away: {problem(breaker.last_reason ?? '')}</p>}
      {unused.map((why) => (
        <p class="why" key={why}>{why}.</p>
      ))}
      {reasons.map((word) => (
        <p class="why" key={word}>Not used: {problem(word)}</p>
      ))}
      <p class="tags">
        {tasks.map((task) => (
          <span class={`tag ${task}`} key={task}>{task}</span>
        ))}
        {shown.engine && <span class={shown.simulated ? 'tag simulated' : 'tag'}>{shown.simulated ? 'simulated' : shown.engine}</span>}
        {shown.devices?.filter((device) => device !== 'simulated').map((device) => <span class="tag" key={device}>{device}</span>)}
      </p>
      {shown.slots > 0 && (
        <>
          <Meter label="Slots" value={shown.active_slots} max={shown.slots} text={`${shown.active_slots} of ${shown.slots}`} />
          {cells > 0 && (
            <Meter label="KV" value={cells - shown.free_kv_cells} max={cells} text={`${percent(1 - Math.min(1, shown.free_kv_cells / cells))} of ${count(cells)} tok`} />
          )}
        </>
      )}
      <dl class="facts">
        <Fact name="Model">{models.join(', ') || shown.model || 'not known yet'}</Fact>
        {shown.memory_bytes > 0 && <Fact name="Memory">{bytes(shown.memory_bytes)}</Fact>}
        <Rates prefill={(prefill ?? decode)?.prefill_rates} decode={decode?.decode_rates} />
        {shown.workers && (
          <Fact name="Layers" whole>
            {shown.workers.map((worker) => `${worker.name} ${count(worker.layers)}`).join(', ')}
          </Fact>
        )}
        {shown.queued > 0 && <Fact name="Queue">{plural(shown.queued, 'request')}</Fact>}
        {shown.prefill_backlog_tokens > 0 && <Fact name="To prefill">{count(shown.prefill_backlog_tokens)} tok</Fact>}
        {shown.options && (
          <Fact name="Options" whole>
            {options(shown.options)}
          </Fact>
        )}
      </dl>
    </li>
  );
}

/** As in a configuration file. */
function options(set: Record<string, unknown>): string {
  return Object.entries(set).map(([key, value]) => `${key} = ${JSON.stringify(value)}`).join(', ');
}

function Rates({ prefill, decode }: { prefill?: NodeReport['prefill_rates']; decode?: NodeReport['decode_rates'] }) {
  const fast = prefill?.at(-1);
  const alone = decode?.[0];
  return (
    <>
      {fast && <Fact name="Prefill">{tokenRate(fast.tokens_per_second)}</Fact>}
      {alone && <Fact name="Decode">{tokenRate(alone.tokens_per_second)}</Fact>}
    </>
  );
}

function measured({ constant_ms, prefill_rates, decode_rates, replies }: MeasuredModel): string {
  const prefill = prefill_rates.at(-1);
  const decode = decode_rates[0];
  return [
    prefill && `prefill ${tokenRate(prefill.tokens_per_second)}`,
    decode && `decode ${tokenRate(decode.tokens_per_second)}`,
    constant_ms > 0 && `first token after ${duration(constant_ms)} at least`,
    plural(replies, 'reply', 'replies'),
  ]
    .filter(Boolean)
    .join(', ');
}

function UpstreamCard({ upstream }: { upstream: Upstream }) {
  return (
    <li class={`card machine ${upstream.life}`}>
      <header>
        <h3>{upstream.name}</h3>
        <Status life={upstream.life} />
      </header>
      {upstream.address && <p class="since address">{upstream.address.replace(/^https?:\/\//, '')}</p>}
      {upstream.reason && <p class="why lost">Lost: {label(upstream.reason)}</p>}
      {upstream.busy_ms > 0 && <p class="why">Busy: no requests for {age(upstream.busy_ms)}</p>}
      <p class="tags">
        <span class="tag">upstream</span>
        <span class="tag">{upstream.kind}</span>
      </p>
      <Meter label="Replies" value={upstream.running} max={upstream.limit} text={`${upstream.running} of ${upstream.limit}`} />
      <dl class="facts">
        <Fact name="Models">{upstream.models.join(', ') || 'none listed yet'}</Fact>
        {upstream.measured?.map((it) => (
          <Fact name={`Measured of ${it.model}`} whole key={it.model}>
            {measured(it)}
          </Fact>
        ))}
      </dl>
    </li>
  );
}

interface LinkRowProps {
  link: Link;
  isBusy: boolean;
  lost: Set<string>;
  /** Machines that have never answered. */
  silent: Set<string>;
}

function LinkRow({ link, isBusy, lost, silent }: LinkRowProps) {
  const ends = [link.prefill, link.decode];
  const gone = ends.filter((name) => lost.has(name));
  const unknown = ends.filter((name) => silent.has(name));
  const why = link.unused_reason ?? (link.breaker.is_open ? (link.breaker.last_reason ?? '') : undefined);
  const kv =
    link.kv_distance !== undefined
      ? `KV distance ${link.kv_distance.toPrecision(2)}`
      : link.same_weights === undefined
        ? 'KV not compared yet'
        : link.same_weights
          ? 'KV: same weights'
          : 'KV: other weights, not measured yet';
  return (
    <li class={gone.length > 0 ? 'link lost' : why !== undefined ? 'link broken' : isBusy ? 'link busy' : 'link'}>
      <span class="ends">
        <strong class={lost.has(link.prefill) ? 'gone' : ''}>{link.prefill}</strong>
        <span class="wire" aria-label="hands KV to" role="img" />
        <strong class={lost.has(link.decode) ? 'gone' : ''}>{link.decode}</strong>
      </span>
      <span class="num">{link.bytes_per_second > 0 ? byteRate(link.bytes_per_second) : 'rate not measured yet'}</span>
      <span class="num">{link.rtt_ms > 0 ? `${link.rtt_ms.toFixed(2)} ms round trip` : ''}</span>
      {link.unused_reason === undefined && <span>{kv}</span>}
      {gone.length > 0 && <span class="why lost">No handoffs: {gone.join(' and ')} cannot be reached</span>}
      {gone.length === 0 && why !== undefined && <span class="why">No handoffs: {problem(why)}</span>}
      {gone.length === 0 && why === undefined && unknown.length > 0 && <span class="why">No handoffs: no answer yet from {unknown.join(' and ')}</span>}
    </li>
  );
}

function ModelRow({ model, now }: { model: Model; now: number }) {
  const fallbacks = Object.entries(model.fallbacks).sort((a, b) => b[1].last_ms - a[1].last_ms);
  return (
    <li class="modelrow">
      <strong>{model.name || 'name not known yet'}</strong>
      <span>policy {model.policy}</span>
      {model.prediction_error > 0 && <span>half of the first tokens within {percent(model.prediction_error)} of their prediction</span>}
      {model.residency && (
        <span>
          {LOADS[model.residency.life] ?? model.residency.life}, {bytes(model.residency.measured_bytes || model.residency.bytes)}
          {model.residency.last_failure ? `; ${model.residency.last_failure}` : ''}
        </span>
      )}
      {fallbacks.length === 0 ? (
        <span>no fallbacks</span>
      ) : (
        fallbacks.map(([word, { count: n, last_ms }]) => (
          <span class="fallback" key={word} title={problem(word)}>
            {label(word)} × {count(n)}, last {age(now - last_ms)} ago
          </span>
        ))
      )}
    </li>
  );
}

function FoundRow({ found }: { found: Found }) {
  const addresses = (found.addresses ?? []).map(({ address }) => address).join(', ');
  return (
    <li>
      <strong>{found.name}</strong> {found.role && `(${found.role}) `}
      <span title={addresses}>{found.reason}</span>
    </li>
  );
}

interface ClusterProps {
  models: Model[];
  upstreams: Upstream[];
  discovery: Discovery | null;
  open: Request[];
  /** The endpoint's clock. */
  now: number;
}

/** Lost machines. */
function lostOf(all: Machine[]): Machine[] {
  return all.filter((machine) => life(worst(machine)).life === 'down');
}

/** What somebody should do something about. */
export function Notices({ models, warnings }: { models: Model[]; warnings: string[] }) {
  const missed = lostOf(machines(models)).filter((machine) => machine.tasks.some((task) => !task.node.unused_reason));
  return (
    <>
      {missed.length > 0 && (
        <p class="notice bad" role="status">
          <strong>{missed.map((machine) => machine.name).join(', ')}</strong> {missed.length === 1 ? 'is' : 'are'} lost. Requests go
          where they can; {missed.length === 1 ? 'it is' : 'they are'} taken back as soon as {missed.length === 1 ? 'it answers' : 'they answer'}.
        </p>
      )}
      {warnings.map((warning) => (
        <p class="notice" key={warning}>{warning}</p>
      ))}
    </>
  );
}

export const Cluster = memo(({ models, upstreams, discovery, open, now }: ClusterProps) => {
  const all = machines(models);
  const links = models.flatMap((model) => model.links.map((link) => ({ model: model.name, link })));
  const busy = busyLinks(open);
  const lost = lostOf(all);
  const silent = all.filter((machine) => machine.tasks.every(({ node }) => node.life === 'down' && !node.has_answered && !node.unused));
  const names = (some: Machine[]) => new Set(some.map((machine) => machine.name));
  return (
    <section class="panel" aria-labelledby="machines">
      <h2 id="machines">
        Machines <small>in words and figures</small>
      </h2>
      {all.length + upstreams.length > 0 && (
        <ul class="cards">
          {all.map((machine) => (
            <MachineCard machine={machine} now={now} key={machine.name} />
          ))}
          {upstreams.map((upstream) => (
            <UpstreamCard upstream={upstream} key={`upstream ${upstream.name}`} />
          ))}
        </ul>
      )}
      {links.length > 0 ? (
        <>
          <h3 class="sub">Links</h3>
          <ul class="links">
            {links.map(({ model, link }) => (
              <LinkRow link={link} isBusy={busy.has(`${link.prefill}>${link.decode}`)} lost={names(lost)} silent={names(silent)} key={`${model} ${link.prefill} ${link.decode}`} />
            ))}
          </ul>
        </>
      ) : (
        all.length > 0 && (
          <p class="empty small">
            No prefill node, so no handoffs. <code>baton serve --prefill HOST:9000</code> adds one.
          </p>
        )
      )}
      {discovery && (
        <>
          <h3 class="sub">Found in the network</h3>
          {discovery.problem && <p class="notice">{discovery.problem}</p>}
          {discovery.found.length === 0 && <p class="empty small">No node announces itself.</p>}
          <ul class="models">
            {discovery.found.map((found) => (
              <FoundRow found={found} key={found.name} />
            ))}
          </ul>
        </>
      )}
      {models.length > 0 && (
        <>
          <h3 class="sub">Models</h3>
          <ul class="models">
            {models.map((model) => (
              <ModelRow model={model} now={now} key={model.name} />
            ))}
          </ul>
        </>
      )}
    </section>
  );
});

export function clusterProps(state: State): ClusterProps {
  const { models, upstreams, discovery, open } = state;
  // Ages are coarse, so the cards need not be drawn more often than every second.
  return { models, upstreams, discovery, open, now: state.at_ms };
}
