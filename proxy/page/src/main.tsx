/** The page: its head, its views, and which of them is shown. */

import { render } from 'preact';
import { useEffect, useMemo, useState } from 'preact/hooks';
import { Charts } from './Charts';
import { Chat } from './chat/Chat';
import { Cluster, Notices, clusterProps } from './Cluster';
import { call, key, setKey } from './endpoint';
import { age, count } from './format';
import { Key } from './Key';
import { connect, connectWhileVisible, useLive } from './live';
import type { Connection } from './live';
import { Models } from './Models';
import { Operate } from './Operate';
import { Picture } from './Picture';
import { Plan } from './Plan';
import { Requests } from './Requests';
import type { Model, State } from './state';
import './style/base.css';
import './style/picture.css';
import './style/cluster.css';
import './style/requests.css';
import './style/forms.css';
import './style/chat.css';
import './style/models.css';
import './style/operate.css';
import './style/narrow.css';

const VIEWS = [
  ['overview', 'Overview'],
  ['plan', 'Plan'],
  ['models', 'Models'],
  ['operate', 'Operate'],
  ['try', 'Try it'],
] as const;

type View = (typeof VIEWS)[number][0];

/** The view that the address names, or null if it names something else. */
function namedView(): View | null {
  // What follows a question mark is the view's own matter.
  const name = location.hash.slice(1).split('?')[0] || 'overview';
  return VIEWS.some(([view]) => view === name) ? (name as View) : null;
}

/** The view of the address. An address that names something else keeps the last one. */
function useView(): View {
  const [view, setView] = useState<View>(namedView() ?? 'overview');
  useEffect(() => {
    const changed = () => setView((last) => namedView() ?? last);
    addEventListener('hashchange', changed);
    return () => removeEventListener('hashchange', changed);
  }, []);
  return view;
}

/** Moves the focus alone, so that the address keeps naming the view. */
function skip(event: Event): void {
  event.preventDefault();
  document.getElementById('content')?.focus();
}

const THEMES = ['system', 'light', 'dark'] as const;
type Theme = (typeof THEMES)[number];

/** The theme that the reader chose, and the one that is shown: charts are drawn again when it changes. */
function useTheme(): [Theme, string, () => void] {
  const [theme, set] = useState<Theme>((sessionStorage.getItem('baton-theme') as Theme | null) ?? 'system');
  const dark = matchMedia('(prefers-color-scheme: dark)');
  const [isDark, setDark] = useState(dark.matches);
  useEffect(() => {
    const changed = () => setDark(dark.matches);
    dark.addEventListener('change', changed);
    return () => dark.removeEventListener('change', changed);
  }, []);
  const shown = theme === 'system' ? (isDark ? 'dark' : 'light') : theme;
  document.documentElement.dataset.theme = shown;
  const next = () => {
    const after = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length] ?? 'system';
    sessionStorage.setItem('baton-theme', after);
    set(after);
  };
  return [theme, shown, next];
}

function Pill({ connection }: { connection: Connection }) {
  const words = { connecting: 'Connecting', live: 'Live', stopping: 'Stopping', lost: 'Connection lost', locked: 'Locked' }[connection.kind];
  return (
    <span class={`status pill ${connection.kind}`} role="status">
      <span class="dot" aria-hidden="true" />
      {words}
    </span>
  );
}

function Lost({ connection }: { connection: Connection & { kind: 'lost' } }) {
  const [now, tick] = useState(Date.now());
  useEffect(() => {
    const timer = setInterval(() => tick(Date.now()), 1000);
    return () => clearInterval(timer);
  }, []);
  return (
    <section class="banner" aria-label="Connection">
      <span>
        <span role="alert">
          <strong>Connection lost.</strong> {connection.why} It is tried again.
        </span>{' '}
        {connection.since !== null && `What you see is ${age(now - connection.since)} old.`}
      </span>
      <button type="button" onClick={connect}>Try now</button>
    </section>
  );
}

/** The models that may be asked; null: not known yet. A guest's key does not show the state, but lists its models. */
function useModels(state: State, connection: Connection): string[] | null {
  const [listed, list] = useState<string[] | null>(null);
  const isGuest = connection.kind === 'locked' && connection.refused === 'guest';
  const guestKey = isGuest ? key() : null;
  useEffect(() => {
    list(null);
    if (guestKey === null) return;
    const stop = new AbortController();
    call('./v1/models', { signal: stop.signal })
      .then((response) => response.json())
      .then((body: { data: { id: string }[] }) => list(body.data.map((model) => model.id)))
      .catch(() => stop.signal.aborted || list([]));
    return () => stop.abort();
  }, [guestKey]);
  const { models, upstreams } = state;
  const served = useMemo(() => {
    const names = models.map((model) => model.name).filter(Boolean);
    return [...new Set([...names, ...upstreams.flatMap((upstream) => upstream.models)])];
  }, [models, upstreams]);
  if (isGuest) return listed;
  return state.at_ms > 0 ? served : null;
}

/** Says on every view which figures are a simulation's. */
function Simulated({ models }: { models: Model[] }) {
  const nodes = models.flatMap((model) => model.nodes);
  const names = [...new Set(nodes.filter((node) => node.simulated).map((node) => node.name))];
  if (names.length === 0) return null;
  const isAll = nodes.every((node) => node.simulated);
  return (
    <p class="notice simulated">
      <strong>Simulated:</strong> {isAll ? 'all machines are' : `${names.join(', ')} ${names.length === 1 ? 'is' : 'are'}`} simulated, so the times
      and rates {isAll ? 'on this page' : 'of their requests'} are a simulation’s. The endpoint is real.
    </p>
  );
}

function Overview({ state, theme }: { state: State; theme: string }) {
  return (
    <div class="overview">
      <div class="story">
        <Picture state={state} notices={<Notices models={state.models} warnings={state.warnings} />} />
        <Requests requests={state.requests} open={state.open} ended={state.routes} />
      </div>
      <div class="rest">
        <Cluster {...clusterProps(state)} />
        <Charts history={state.history} theme={theme} />
      </div>
    </div>
  );
}

function Page() {
  const { connection, state } = useLive();
  const [theme, shownTheme, nextTheme] = useTheme();
  const view = useView();
  const models = useModels(state, connection);
  useEffect(connectWhileVisible, []);
  const { running, slots, limit, waiting } = state.requests;
  // A hidden tab has no stream, so its number would be old.
  document.title = running > 0 && !document.hidden ? `Baton: ${count(running)} running` : 'Baton';
  const forget = () => {
    setKey('');
    location.reload();
  };
  const isKnown = state.at_ms > 0;
  const isLocked = connection.kind === 'locked';
  const mayAsk = !isLocked || connection.refused === 'guest';
  return (
    <>
      <a class="skip" href="#content" onClick={skip}>Skip to the content</a>
      <header class="top">
        <h1>
          <svg viewBox="0 0 32 32" width="20" height="20" aria-hidden="true">
            <path d="M6 26 26 6" class="stick" />
            <path d="M20 12 26 6" class="tip" />
          </svg>
          Baton
        </h1>
        <nav aria-label="Views">
          {VIEWS.map(([name, label]) => (
            <a key={name} href={`#${name}`} aria-current={view === name ? 'page' : undefined}>{label}</a>
          ))}
        </nav>
        <p class="totals">
          {isKnown && (
            <>
              <span>
                <strong class="num">{count(running)}</strong> running in <span class="num">{count(slots)}</span> of <span class="num">{count(limit)}</span> slots
              </span>
              <span>
                <strong class="num">{count(waiting)}</strong> waiting
              </span>
              <span class="muted">v{state.version}</span>
            </>
          )}
        </p>
        <Pill connection={connection} />
        {key() && <button type="button" class="quiet" onClick={forget}>Forget key</button>}
        <button type="button" class="quiet" onClick={nextTheme} aria-label={`Theme: ${theme}. Change it`}>
          {theme === 'system' ? '◐' : theme === 'light' ? '○' : '●'} <span class="wide-only">{theme}</span>
        </button>
      </header>
      {connection.kind === 'lost' && <Lost connection={connection} />}
      {connection.kind === 'stopping' && (
        <section class="banner" aria-label="Connection">
          <span role="status">The endpoint is stopping: running requests may finish, and no more are taken.</span>
        </section>
      )}
      <main id="content" tabIndex={-1}>
        {isLocked && <Key refused={connection.refused} />}
        {!isLocked && <Simulated models={state.models} />}
        {/* Hidden instead of taken away: another view must not end a reply or lose a text. */}
        <div hidden={view !== 'plan' || !mayAsk}>
          <Plan models={models} />
        </div>
        <div hidden={view !== 'try' || !mayAsk}>
          <Chat models={models} isShown={view === 'try'} />
        </div>
        {view === 'models' && !isLocked && <Models models={state.models} isShown />}
        {view === 'operate' && !isLocked && <Operate />}
        {view === 'overview' && !isLocked && (isKnown ? <Overview state={state} theme={shownTheme} /> : <p class="empty">Connecting to the endpoint…</p>)}
      </main>
    </>
  );
}

const root = document.getElementById('app');
if (root) render(<Page />, root);
