/** The picture of the cluster: what each machine does, where it stands, and the wires between them. Sizes in pixels. */

import { count, plural, tokenRate } from './format';
import type { Link, Model, NodeReport, Request, State, Upstream } from './state';

/** A machine: all tasks of the nodes of one name. */
export interface Machine {
  name: string;
  tasks: { model: string; node: NodeReport }[];
}

export function machines(models: Model[]): Machine[] {
  const byName = new Map<string, Machine>();
  for (const model of models) {
    for (const node of model.nodes) {
      const machine = byName.get(node.name) ?? { name: node.name, tasks: [] };
      machine.tasks.push({ model: model.name, node });
      byName.set(node.name, machine);
    }
  }
  return [...byName.values()];
}

/** A machine that only computes prompts stands at the left. */
export function onlyPrefills(machine: Machine): boolean {
  return machine.tasks.every(({ node }) => node.task === 'prefill');
}

/** The requests that a machine works for now. */
export interface Work {
  /** Prompts that it computes, and their tokens. */
  prompts: number;
  promptTokens: number;
  /** Replies that it generates. */
  replies: number;
}

/** What each machine or upstream does now, by its name. */
export function workOf(open: Request[]): Map<string, Work> {
  const all = new Map<string, Work>();
  const of = (name: string) => {
    const work = all.get(name) ?? { prompts: 0, promptTokens: 0, replies: 0 };
    all.set(name, work);
    return work;
  };
  for (const request of open) {
    if (request.waiting_since_ms !== undefined || !request.decode) continue;
    if (request.ttft_ms !== null) {
      of(request.moved_to ?? request.decode).replies += 1;
      continue;
    }
    const work = of(request.prefill && !request.handoff ? request.prefill : request.decode);
    work.prompts += 1;
    work.promptTokens += request.n_prompt;
  }
  return all;
}

/** Which pairs hand KV over now: `prefill>decode`. */
export function busyLinks(open: Request[]): Set<string> {
  const handingOver = open.filter((request) => request.prefill && request.ttft_ms === null && request.waiting_since_ms === undefined);
  return new Set(handingOver.map((request) => `${request.prefill}>${request.decode}`));
}

/** Tokens that were generated until a moment, by request. */
export interface Counted {
  at_ms: number;
  tokens: Map<string, { decode: string; n: number }>;
}

export function countTokens({ at_ms, open }: Pick<State, 'at_ms' | 'open'>): Counted {
  return { at_ms, tokens: new Map(open.map((request) => [request.request_id, { decode: request.moved_to ?? request.decode, n: request.n_completion }])) };
}

/** Tokens per second by machine, of the requests that run at both moments and of those that are new. */
export function tokenRates(before: Counted, now: Counted): Map<string, number> {
  const seconds = (now.at_ms - before.at_ms) / 1000;
  const rates = new Map<string, number>();
  if (seconds <= 0) return rates;
  for (const [id, { decode, n }] of now.tokens) {
    const rate = (n - (before.tokens.get(id)?.n ?? 0)) / seconds;
    if (rate > 0) rates.set(decode, (rates.get(decode) ?? 0) + rate);
  }
  return rates;
}

/** What a machine does, in words. */
export function doing(work: Work | undefined, rate: number | undefined): string[] {
  const words = [];
  if (work?.prompts) words.push(`computes ${plural(work.prompts, 'prompt')}, ${count(work.promptTokens)} tok`);
  if (work?.replies) words.push(`generates ${plural(work.replies, 'reply', 'replies')}${rate ? `, ${tokenRate(rate)}` : ''}`);
  return words;
}

export interface Box {
  name: string;
  x: number;
  y: number;
}

export interface Wire {
  from: string;
  to: string;
  /** The path of the line. */
  path: string;
  /** The middle of its words. */
  labelX: number;
  labelY: number;
}

export interface Layout {
  width: number;
  height: number;
  boxWidth: number;
  boxHeight: number;
  boxes: Box[];
  /** Null where there is no room for it. */
  clients: Box | null;
  /** From prefill to decode. */
  links: Wire[];
  /** From what generates to the clients. */
  replies: Wire[];
}

const BOX_HEIGHT = 112;
/** Of narrow boxes, whose lines are broken. */
const NARROW_BOX_HEIGHT = 144;
export const CLIENTS_WIDTH = 148;

const ROW_GAP = 16;
const MOST_BOX_WIDTH = 330;
const NARROWEST_WITH_CLIENTS = 640;
/** What a wire needs for its words. */
const WIRE_WIDTH = 150;
const NARROW_WIRE_WIDTH = 60;
const MOST_WIRE_WIDTH = 360;

/** The middle of port `i` of `n` at the side of a box. */
function port(box: Box, height: number, i: number, n: number): number {
  return box.y + (height * (i + 1)) / (n + 1);
}

function wire(from: { name: string; x: number; y: number }, to: { name: string; x: number; y: number }, share: number): Wire {
  const bend = (to.x - from.x) / 2;
  const path = `M${from.x} ${from.y}C${from.x + bend} ${from.y} ${to.x - bend} ${to.y} ${to.x} ${to.y}`;
  // The curve of Bézier, whose inner points are at half of its width.
  const cubic = (a: number, b: number, c: number, d: number) =>
    a * (1 - share) ** 3 + 3 * b * share * (1 - share) ** 2 + 3 * c * share ** 2 * (1 - share) + d * share ** 3;
  return {
    from: from.name,
    to: to.name,
    path,
    labelX: cubic(from.x, from.x + bend, to.x - bend, to.x),
    labelY: cubic(from.y, from.y, to.y, to.y),
  };
}

/** The places of the machines in a picture of this width. */
export function layout(width: number, prefills: string[], decodes: string[], links: Pick<Link, 'prefill' | 'decode'>[]): Layout {
  const hasClients = width >= NARROWEST_WITH_CLIENTS;
  const columns = [prefills, decodes].filter((names) => names.length > 0);
  const n_wires = columns.length - 1 + (hasClients ? 1 : 0);
  const wireWidth = hasClients ? WIRE_WIDTH : NARROW_WIRE_WIDTH;
  const clientsWidth = hasClients ? CLIENTS_WIDTH : 0;
  const boxWidth = Math.max(96, Math.min(MOST_BOX_WIDTH, (width - clientsWidth - n_wires * wireWidth) / Math.max(1, columns.length)));
  const rest = width - clientsWidth - columns.length * boxWidth;
  const gap = n_wires > 0 ? Math.min(MOST_WIRE_WIDTH, rest / n_wires) : 0;
  const boxHeight = hasClients ? BOX_HEIGHT : NARROW_BOX_HEIGHT;
  const rows = Math.max(1, ...columns.map((names) => names.length));
  const height = rows * boxHeight + (rows - 1) * ROW_GAP;
  const left = Math.max(0, (rest - n_wires * gap) / 2);
  const place = (names: string[], column: number): Box[] => {
    const own = names.length * boxHeight + (names.length - 1) * ROW_GAP;
    return names.map((name, i) => ({ name, x: left + column * (boxWidth + gap), y: (height - own) / 2 + i * (boxHeight + ROW_GAP) }));
  };
  const placed = columns.map(place);
  const boxes = placed.flat();
  const generating = decodes.length > 0 ? (placed.at(-1) ?? []) : [];
  const clients = hasClients ? { name: 'Clients', x: left + columns.length * (boxWidth + gap), y: (height - boxHeight) / 2 } : null;
  const byName = new Map(boxes.map((box) => [box.name, box]));
  const drawn = links.filter((link) => byName.has(link.prefill) && byName.has(link.decode) && prefills.includes(link.prefill));
  const ends = (link: Pick<Link, 'prefill' | 'decode'>): Wire => {
    const [from, to] = [byName.get(link.prefill)!, byName.get(link.decode)!];
    const leaving = drawn.filter((other) => other.prefill === link.prefill);
    const arriving = drawn.filter((other) => other.decode === link.decode);
    const start = { name: from.name, x: from.x + boxWidth, y: port(from, boxHeight, leaving.findIndex((other) => other.decode === link.decode), leaving.length) };
    const end = { name: to.name, x: to.x, y: port(to, boxHeight, arriving.findIndex((other) => other.prefill === link.prefill), arriving.length) };
    // Curves that cross have their words before they do.
    const cross = leaving.length > 1 && arriving.length > 1;
    return wire(start, end, cross ? 0.35 : 0.5);
  };
  const replies = clients
    ? generating.map((box, i) => wire({ ...box, x: box.x + boxWidth, y: box.y + boxHeight / 2 }, { ...clients, y: port(clients, boxHeight, i, generating.length) }, 0.5))
    : [];
  return { width, height, boxWidth, boxHeight, boxes, clients, links: drawn.map(ends), replies };
}

/** Upstreams stand with the machines that generate. */
export function generatingNames(all: Machine[], upstreams: Upstream[]): string[] {
  return [...all.filter((machine) => !onlyPrefills(machine)).map((machine) => machine.name), ...upstreams.map((upstream) => upstream.name)];
}
