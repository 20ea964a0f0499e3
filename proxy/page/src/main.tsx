/** The page: its head, its views, and which of them is shown. */

import { render } from 'preact';
import { useEffect, useState } from 'preact/hooks';
import { Charts } from './Charts';
import { Chat } from './Chat';
import { Cluster, clusterProps } from './Cluster';
import { call, key, setKey } from './endpoint';
import { age, count } from './format';
import { Key } from './Key';
import { connect, useLive } from './live';
import type { Connection } from './live';
import { Plan } from './Plan';
import { Requests } from './Requests';
import type { State } from './state';
import './style/base.css';
import './style/cluster.css';
import './style/requests.css';
import './style/forms.css';
import './style/narrow.css';

const VIEWS = [
  ['overview', 'Overview'],
  ['plan', 'Plan'],
  ['try', 'Try it'],
] as const;

type View = (typeof VIEWS)[number][0];

function shownView(): View {
  const name = location.hash.slice(1);
  return VIEWS.some(([view]) => view === name) ? (name as View) : 'overview';
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
  const words = { connecting: 'Connecting', live: 'Live', lost: 'Connection lost', locked: 'Locked' }[connection.kind];
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
    <div class="banner">
      <span>
        <span role="alert">
          <strong>Connection lost.</strong> {connection.why} It is tried again.
        </span>{' '}
        What you see is {age(now - connection.since)} old.
      </span>
      <button type="button" onClick={connect}>Try now</button>
    </div>
  );
}

/** The models that may be asked. With a key that may not see the state, the list comes from `/v1/models`. */
function useModels(state: State, connection: Connection): string[] {
  const [listed, list] = useState<string[]>([]);
  const served = state.models.map((model) => model.name).filter(Boolean);
  const known = [...new Set([...served, ...state.upstreams.flatMap((upstream) => upstream.models)])];
  // Each key may use other models.
  const refused = connection.kind === 'locked' ? connection.refused : null;
  useEffect(() => {
    if (refused === null) return;
    call('./v1/models')
      .then((response) => response.json())
      .then((body: { data: { id: string }[] }) => list(body.data.map((model) => model.id)))
      .catch(() => list([]));
  }, [refused]);
  return known.length > 0 ? known : listed;
}

function Overview({ state, theme }: { state: State; theme: string }) {
  return (
    <div class="overview">
      <Cluster {...clusterProps(state)} />
      <Requests running={state.running} ended={state.routes} />
      <Charts history={state.history} theme={theme} />
    </div>
  );
}

function Page() {
  const { connection, state } = useLive();
  const [theme, shownTheme, nextTheme] = useTheme();
  const [view, setView] = useState(shownView());
  const models = useModels(state, connection);
  useEffect(() => {
    const changed = () => setView(shownView());
    addEventListener('hashchange', changed);
    connect();
    return () => removeEventListener('hashchange', changed);
  }, []);
  const { admitted, places, limit, waiting } = state.requests;
  document.title = admitted > 0 ? `Baton: ${count(admitted)} running` : 'Baton';
  const forget = () => {
    setKey('');
    location.reload();
  };
  const isKnown = state.at_ms > 0;
  return (
    <>
      <a class="skip" href="#content">Skip to the content</a>
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
                <strong class="num">{count(admitted)}</strong> running in <span class="num">{count(places)}</span> of <span class="num">{count(limit)}</span> places
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
      {state.is_stopping && (
        <div class="banner" role="status">The endpoint is stopping: running requests may finish, and no more are taken.</div>
      )}
      <main id="content" tabIndex={-1}>
        {connection.kind === 'locked' && <Key refused={connection.refused} />}
        {view === 'plan' && (connection.kind !== 'locked' || connection.refused !== null) && <Plan models={models} />}
        {view === 'try' && (connection.kind !== 'locked' || connection.refused !== null) && <Chat models={models} />}
        {view === 'overview' && connection.kind !== 'locked' && (isKnown ? <Overview state={state} theme={shownTheme} /> : <p class="empty">Connecting to the endpoint…</p>)}
      </main>
    </>
  );
}

const root = document.getElementById('app');
if (root) render(<Page />, root);
