/** A chat with a model, or with two side by side, and the route of each reply. */

import { useEffect, useRef, useState } from 'preact/hooks';
import { whyFailed } from '../endpoint';
import { memo } from '../memo';
import { Composer } from './Composer';
import { Copy } from './Code';
import { History } from './History';
import { SettingsForm } from './SettingsForm';
import { ReplyView, SaidView } from './TurnView';
import { download } from './clipboard';
import { asMarkdown, keepsChats, load, remove, save, summaries, titleOf } from './history';
import type { StoredChat, Summary } from './history';
import { askedBy, linkTo } from './link';
import { EMPTY, FIRST_SETTINGS, send } from './turns';
import type { Reply, Said, Turn } from './turns';

function newChat(from?: StoredChat): StoredChat {
  const { models = [''], settings = FIRST_SETTINGS } = from ?? {};
  return { id: `${Date.now()}-${Math.random().toString(36).slice(2, 8)}`, at_ms: Date.now(), models, settings, lanes: models.map(() => []) };
}

function invitation(models: string[] | null): string {
  if (models === null) return 'The models are not known yet.';
  return models.length > 0 ? 'Ask something. A long text shows whether a handoff pays.' : 'No model is served yet.';
}

/** The chats that are kept, and what went wrong with that. */
function useHistory() {
  const [chats, setChats] = useState<Summary[]>([]);
  const [isKeeping, keep] = useState(keepsChats());
  const [problem, tell] = useState<string | null>(null);
  const failed = (error: unknown) => tell(`This browser does not keep the chat: ${error instanceof Error ? error.message : String(error)}`);
  useEffect(() => void summaries().then(setChats, failed), []);
  const store = (chat: StoredChat) => {
    if (isKeeping) save(chat).then(setChats, failed);
  };
  return { chats, setChats, isKeeping, keep, problem, tell, failed, store };
}

/** Replies that run, one for a lane. */
function useReplies() {
  const [running, setRunning] = useState<(Reply | null)[]>([]);
  const stops = useRef<(AbortController | null)[]>([]);
  useEffect(() => () => stops.current.forEach((stop) => stop?.abort()), []);

  /** Asks for the reply of a lane, and returns it when it has ended. */
  const ask = async (lane: number, turns: Turn[], model: string, settings: StoredChat['settings']): Promise<Reply> => {
    const stop = new AbortController();
    stops.current[lane] = stop;
    let latest: Reply = { ...EMPTY, model };
    // Tokens may come faster than the screen changes: the text is drawn once a frame.
    let frame = 0;
    const put = (reply: Reply | null) => setRunning((before) => Object.assign([...before], { [lane]: reply }));
    const show = (now: Reply) => {
      latest = now;
      frame ||= requestAnimationFrame(() => {
        frame = 0;
        put(latest);
      });
    };
    put(latest);
    try {
      latest = await send(turns, model, settings, stop.signal, show);
    } catch (error) {
      const why = error instanceof SyntaxError ? error.message : whyFailed(error);
      latest = { ...latest, end: stop.signal.aborted ? 'stopped' : { error: why } };
    }
    cancelAnimationFrame(frame);
    stops.current[lane] = null;
    put(null);
    return latest;
  };
  const stop = () => stops.current.forEach((one) => one?.abort());
  return { running, isRunning: running.some(Boolean), ask, stop };
}

/** The models of a chat, as far as they are served; the first one that is served stands for one that nobody chose. */
function served(chat: StoredChat, models: string[] | null): string[] {
  const first = models?.[0] ?? '';
  return chat.models.map((name) => (models === null || models.includes(name) ? name || first : first));
}

interface ModelsProps {
  id: string;
  label: string;
  value: string;
  models: string[] | null;
  none?: string;
  isDisabled: boolean;
  choose: (model: string) => void;
}

function ModelChoice({ id, label, value, models, none, isDisabled, choose }: ModelsProps) {
  return (
    <>
      <label for={id}>{label}</label>
      <select id={id} value={value} disabled={isDisabled} onChange={(event) => choose(event.currentTarget.value)}>
        {none !== undefined && <option value="">{none}</option>}
        {models?.map((name) => (
          <option key={name} value={name}>{name}</option>
        ))}
      </select>
    </>
  );
}

interface LaneProps {
  turns: Turn[];
  reply: Reply | null;
  /** Named above a lane that stands beside another one. */
  model: string | null;
  empty: string;
  isShown: boolean;
  again: (() => void) | null;
  edit: ((at: number, text: string) => void) | null;
}

/** How near to its end a log still follows what is added, pixels. */
const FOLLOWS = 80;

function Lane({ turns, reply, model, empty, isShown, again, edit }: LaneProps) {
  const log = useRef<HTMLDivElement>(null);
  const follows = useRef(true);
  useEffect(() => {
    if (follows.current) log.current?.scrollTo({ top: log.current.scrollHeight });
  }, [turns, reply, isShown]);
  useEffect(() => void (follows.current = true), [turns.length]);
  const onScroll = () => {
    const { scrollHeight, scrollTop, clientHeight } = log.current!;
    follows.current = scrollHeight - scrollTop - clientHeight < FOLLOWS;
  };
  const shown = reply ? [...turns, reply] : turns;
  return (
    <div class="log" ref={log} role="log" aria-label={model === null ? 'Messages' : `Messages of ${model}`} tabIndex={0} onScroll={onScroll}>
      {model !== null && <p class="lane-name">{model}</p>}
      {shown.length === 0 && <p class="empty">{empty}</p>}
      {shown.map((turn, i) => (
        <article class={`turn ${turn.role}`} key={i}>
          <h3 class="unseen">{turn.role === 'user' ? 'You' : 'Reply'}</h3>
          {turn.role === 'user' ? (
            <SaidView said={turn} edit={edit && ((text) => edit(i, text))} />
          ) : (
            <ReplyView reply={turn} again={!reply && i === shown.length - 1 ? again : null} />
          )}
        </article>
      ))}
    </div>
  );
}

export const Chat = memo(({ models, isShown }: { models: string[] | null; isShown: boolean }) => {
  const [chat, setChat] = useState<StoredChat>(() => newChat());
  const [draft, setDraft] = useState('');
  const { chats, setChats, isKeeping, keep, problem, tell, failed, store } = useHistory();
  const { running, isRunning, ask, stop } = useReplies();
  const input = useRef<HTMLTextAreaElement>(null);
  const latest = useRef(chat);
  latest.current = chat;
  const chosen = served(chat, models);
  const isPair = chosen.length > 1;
  const missing = models === null ? [] : chat.models.filter((name) => name && !models.includes(name));

  const change = (now: StoredChat) => {
    latest.current = now;
    setChat(now);
  };
  // A link fills the form; the reader sends it.
  useEffect(() => {
    const opened = () => {
      const asked = askedBy(location.hash);
      if (!asked) return;
      stop();
      const first = newChat();
      const names = asked.models.length > 0 ? asked.models : first.models;
      change({ ...first, models: names, lanes: names.map(() => []) });
      setDraft(asked.prompt);
      history.replaceState(null, '', '#try');
    };
    opened();
    addEventListener('hashchange', opened);
    return () => removeEventListener('hashchange', opened);
  }, []);

  /** Asks the models of these lanes for their replies to the turns that they have. */
  const answer = async (asked: StoredChat, lanes: number[]) => {
    change(asked);
    store(asked);
    await Promise.all(
      lanes.map(async (lane) => {
        const turns = asked.lanes[lane] ?? [];
        const reply = await ask(lane, turns, chosen[lane] ?? '', asked.settings);
        const now = latest.current;
        if (now.id !== asked.id) return;
        change({ ...now, at_ms: Date.now(), lanes: now.lanes.map((before, i) => (i === lane ? [...turns, reply] : before)) });
      }),
    );
    if (latest.current.id === asked.id) store(latest.current);
    input.current?.focus();
  };
  const everyLane = chosen.map((_, i) => i);
  const submit = (said: Said) => void answer({ ...chat, models: chosen, at_ms: Date.now(), lanes: chat.lanes.map((turns) => [...turns, said]) }, everyLane);
  const edit = (at: number, text: string) => {
    const changed = (turns: Turn[]): Turn[] => {
      const before = turns[at];
      return before?.role === 'user' ? [...turns.slice(0, at), { ...before, text }] : turns;
    };
    void answer({ ...chat, at_ms: Date.now(), lanes: chat.lanes.map(changed) }, everyLane);
  };
  const again = (lane: number) => {
    const without = (turns: Turn[], i: number) => (i === lane ? turns.slice(0, -1) : turns);
    void answer({ ...chat, lanes: chat.lanes.map(without) }, [lane]);
  };
  const compare = (second: string) => {
    const [turns = []] = chat.lanes;
    const first = chosen[0] ?? '';
    if (second) change({ ...chat, models: [first, second], lanes: [turns, chat.lanes[1] ?? turns] });
    else change({ ...chat, models: [first], lanes: [turns] });
  };
  const open = (id: string) => load(id).then((found) => (found ? change(found) : tell('This chat was deleted.')), failed);
  const drop = (id: string) => {
    if (id === chat.id) stop();
    remove(id).then(setChats, failed);
    if (id === chat.id) change(newChat(chat));
  };
  const prompt = draft.trim() || (chat.lanes[0]?.findLast((turn): turn is Said => turn.role === 'user')?.text ?? '');
  const link = linkTo({ models: chosen, prompt }, location.href);
  const isEmpty = chat.lanes.every((turns) => turns.length === 0);
  return (
    <section class={isPair ? 'panel chat two' : 'panel chat'} aria-labelledby="try">
      <h2 id="try">
        Try it <small>{isEmpty ? 'chats stay in this browser' : titleOf(chat)}</small>
      </h2>
      <div class="actions">
        <ModelChoice id="chat-model" label="Model" value={chosen[0] ?? ''} models={models} isDisabled={isRunning} choose={(model) => change({ ...chat, models: [model, ...chosen.slice(1)] })} />
        <ModelChoice id="second-model" label="Beside" value={chosen[1] ?? ''} models={models} none="no other model" isDisabled={isRunning} choose={compare} />
        <button type="button" class="quiet" disabled={isEmpty || isRunning} onClick={() => change(newChat(chat))}>New chat</button>
        <button type="button" class="quiet" disabled={isEmpty} onClick={() => download(`${titleOf(chat).replace(/\W+/g, '-')}.md`, 'text/markdown', asMarkdown(chat))}>Export</button>
        {prompt && link && <Copy key={link} text={link} what="link with these models and this prompt" isNamed />}
      </div>
      {missing.length > 0 && <p class="notice">{missing.join(', ')} {missing.length === 1 ? 'is' : 'are'} not served here, so {chosen[0] || 'no model'} answers.</p>}
      {problem !== null && <p class="notice bad" role="alert">{problem}</p>}
      <SettingsForm settings={chat.settings} set={(settings) => change({ ...chat, settings })} />
      <History chats={chats} current={chat.id} isKeeping={isKeeping} open={(id) => isRunning || open(id)} remove={drop} changed={setChats} keep={keep} tell={tell} />
      <div class="lanes">
        {chat.lanes.map((turns, lane) => (
          <Lane
            key={lane}
            turns={turns}
            reply={running[lane] ?? null}
            model={isPair ? (chosen[lane] ?? '') : null}
            empty={invitation(models)}
            isShown={isShown}
            again={isRunning ? null : () => again(lane)}
            edit={isRunning ? null : edit}
          />
        ))}
      </div>
      <Composer input={input} draft={draft} write={setDraft} isRunning={isRunning} canSend={Boolean(chosen[0])} submit={submit} stop={stop} />
    </section>
  );
});
