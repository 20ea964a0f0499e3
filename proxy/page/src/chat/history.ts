/** The chats of this browser, in its IndexedDB. They leave it only in requests and in files that somebody saves. */

import { clear, createStore, del, get, set, setMany, update } from 'idb-keyval';
import { EMPTY, FIRST_SETTINGS, withFiles } from './turns';
import type { Settings, Turn } from './turns';

/** A chat with one model, or with two that get the same prompts: a lane for each. */
export interface StoredChat {
  id: string;
  /** Its last change, milliseconds since the Unix epoch. */
  at_ms: number;
  models: string[];
  settings: Settings;
  lanes: Turn[][];
}

export interface Summary {
  id: string;
  at_ms: number;
  title: string;
}

/** More are not kept: the oldest goes. */
const MAX_CHATS = 200;

const MAX_TITLE = 60;

const INDEX = 'index';
/** Set if chats are not to be kept. */
const FORGETFUL = 'baton-forgets-chats';

// The database has another name than idb-keyval's own: other pages of the same address may use that one.
let opened: ReturnType<typeof createStore> | undefined;
const database = () => (opened ??= createStore('baton-chats', 'chats'));

export function keepsChats(): boolean {
  return localStorage.getItem(FORGETFUL) === null;
}

/** Chooses whether chats are kept. What is there is deleted if they are not. Errors: the browser's. */
export async function keepChats(isWanted: boolean): Promise<void> {
  if (isWanted) return localStorage.removeItem(FORGETFUL);
  localStorage.setItem(FORGETFUL, 'yes');
  await clear(database());
}

export function titleOf(chat: Pick<StoredChat, 'lanes'>): string {
  const first = chat.lanes[0]?.[0];
  const text = first?.role === 'user' ? first.text || (first.files[0]?.name ?? first.pictures[0]?.name ?? '') : '';
  const line = text.trim().split('\n')[0] ?? '';
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE)}…` : line || 'New chat';
}

/** All chats, the newest first. */
export async function summaries(): Promise<Summary[]> {
  return (await get<Summary[]>(INDEX, database())) ?? [];
}

/** Keeps a chat, and returns the new list. Errors: the browser has no room, or refuses. */
export async function save(chat: StoredChat): Promise<Summary[]> {
  await set(chat.id, chat, database());
  const gone: string[] = [];
  await update<Summary[]>(
    INDEX,
    (before = []) => {
      const now = [{ id: chat.id, at_ms: chat.at_ms, title: titleOf(chat) }, ...before.filter(({ id }) => id !== chat.id)];
      gone.push(...now.slice(MAX_CHATS).map(({ id }) => id));
      return now.slice(0, MAX_CHATS);
    },
    database(),
  );
  for (const id of gone) await del(id, database());
  return summaries();
}

/** The chat, or undefined if it was deleted. A reply that ran when the page was left counts as stopped. */
export async function load(id: string): Promise<StoredChat | undefined> {
  const chat = await get<StoredChat>(id, database());
  const ended = (turn: Turn): Turn => (turn.role === 'assistant' && turn.end === 'open' ? { ...turn, end: 'stopped' } : turn);
  return chat && { ...chat, lanes: chat.lanes.map((turns) => turns.map(ended)) };
}

export async function remove(id: string): Promise<Summary[]> {
  await del(id, database());
  await update<Summary[]>(INDEX, (before = []) => before.filter((chat) => chat.id !== id), database());
  return summaries();
}

export async function removeAll(): Promise<void> {
  await clear(database());
}

/** Every chat that is kept. */
export async function all(): Promise<StoredChat[]> {
  const chats = await Promise.all((await summaries()).map(({ id }) => load(id)));
  return chats.filter((chat) => chat !== undefined);
}

const isText = (value: unknown): value is string => typeof value === 'string';
const areTexts = (value: object, ...names: string[]) => names.every((name) => isText((value as Record<string, unknown>)[name]));
const isObject = (value: unknown): value is object => typeof value === 'object' && value !== null;
const isList = (value: unknown, isItem: (item: object) => boolean) => Array.isArray(value) && value.every((item) => isObject(item) && isItem(item));

/** Everything that is drawn of a turn is there. */
function isTurn(turn: object): turn is Turn {
  const { role, pictures, files, calls, end } = turn as Record<string, unknown>;
  if (role === 'user') {
    const isPicture = (picture: object) => areTexts(picture, 'name', 'url') && (picture as { url: string }).url.startsWith('data:image/');
    return areTexts(turn, 'text') && isList(pictures, isPicture) && isList(files, (file) => areTexts(file, 'name', 'text'));
  }
  const hasEnd = isText(end) || (isObject(end) && areTexts(end, 'error'));
  return role === 'assistant' && hasEnd && areTexts(turn, 'text', 'reasoning', 'route', 'model') && isList(calls, (call) => areTexts(call, 'name', 'arguments'));
}

/** The chat of a file, or null if it is none. */
function chatOf(value: unknown): StoredChat | null {
  if (!isObject(value)) return null;
  const { id, at_ms, models, settings, lanes } = value as Record<string, unknown>;
  const isWhole = isText(id) && id !== INDEX && typeof at_ms === 'number' && Number.isFinite(at_ms) && Array.isArray(models) && models.every(isText);
  if (!isWhole || !Array.isArray(lanes) || lanes.length !== models.length || lanes.length < 1 || lanes.length > 2) return null;
  if (!lanes.every((turns) => isList(turns, isTurn))) return null;
  const setting = ([name, standard]: [string, unknown]) => {
    const given = isObject(settings) ? (settings as Record<string, unknown>)[name] : undefined;
    const fits = isText(standard) ? isText(given) : typeof given === 'number' || (standard === null && given === null);
    return [name, fits ? given : standard];
  };
  const known = Object.fromEntries(Object.entries(FIRST_SETTINGS).map(setting)) as unknown as Settings;
  const whole = (turn: Turn): Turn => (turn.role === 'assistant' ? { ...EMPTY, ...turn } : turn);
  return { id, at_ms, models, settings: known, lanes: lanes.map((turns: Turn[]) => turns.map(whole)) };
}

/** Takes chats from a file that was exported. Errors: it is no such file; then none is taken. */
export async function take(text: string): Promise<Summary[]> {
  const wrong = new Error('This file has no exported chats.');
  let listed: unknown;
  try {
    listed = (JSON.parse(text) as { chats?: unknown }).chats;
  } catch {
    throw wrong;
  }
  if (!Array.isArray(listed) || listed.length === 0 || listed.length > MAX_CHATS) throw wrong;
  const chats = listed.map(chatOf).filter((chat) => chat !== null);
  if (chats.length < listed.length) throw wrong;
  const known = await summaries();
  await setMany(chats.map((chat) => [chat.id, chat]), database());
  const taken = chats.map((chat) => ({ id: chat.id, at_ms: chat.at_ms, title: titleOf(chat) }));
  const others = known.filter(({ id }) => !taken.some((chat) => chat.id === id));
  await set(INDEX, [...taken, ...others].slice(0, MAX_CHATS), database());
  return summaries();
}

/** A chat as a text that people read. */
export function asMarkdown(chat: StoredChat): string {
  const lane = (turns: Turn[], i: number) => {
    const head = chat.lanes.length > 1 ? `# ${chat.models[i] ?? ''}\n\n` : '';
    return head + turns.map((turn) => (turn.role === 'user' ? `## You\n\n${withFiles(turn)}` : `## ${turn.model || 'Reply'}\n\n${turn.text}`)).join('\n\n');
  };
  return `${chat.lanes.map(lane).join('\n\n')}\n`;
}
