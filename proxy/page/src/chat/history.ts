/** The chats of this browser, in its IndexedDB. They leave it only in requests and in files that somebody saves. */

import { clear, createStore, del, get, set, setMany, update } from 'idb-keyval';
import type { Settings, Turn } from './turns';
import { withFiles } from './turns';

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

/** Takes chats from a file that was exported. Errors: it is no such file. */
export async function take(text: string): Promise<Summary[]> {
  const wrong = new Error('This file has no exported chats.');
  let chats: StoredChat[];
  try {
    chats = (JSON.parse(text) as { chats: StoredChat[] }).chats;
  } catch {
    throw wrong;
  }
  const isChat = (chat: StoredChat) => typeof chat?.id === 'string' && chat.id !== INDEX && Array.isArray(chat.models) && Array.isArray(chat.lanes) && chat.lanes.every(Array.isArray);
  if (!Array.isArray(chats) || chats.length === 0 || chats.length > MAX_CHATS || !chats.every(isChat)) throw wrong;
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
