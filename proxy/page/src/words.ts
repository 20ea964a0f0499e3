/** The endpoint's words for people; glossary.json has them for `baton status`, too. Unknown words are shown as they are. */

// Node, which runs the tests, asks for the type.
import glossary from './glossary.json' with { type: 'json' };
import type { Life, NodeReport, Outcome, Request } from './state';

export const LIFE: Record<Life, string> = glossary.states;

/** The states of a model that is loaded on demand. */
export const LOADS: Record<string, string> = glossary.loads;

/** How far a model is on its way to a machine. */
export const TRANSFERS: Record<string, string> = glossary.transfers;

/** Where a setting comes from. */
export const SETTING_SOURCES: Record<string, string> = glossary.setting_sources;

/** When a change of the configuration takes effect. */
export const CHANGE_EFFECTS: Record<string, string> = glossary.change_effects;

export const OUTCOME: Record<Outcome, string> = glossary.outcomes;

/** A short label and a clause. */
type Said = Record<string, [string, string]>;

/** Why a node or a pair of nodes is not used, or how it failed. */
export const PROBLEMS = glossary.problems as unknown as Said;

export const REASONS = glossary.reasons as unknown as Said;

const RANK: Life[] = ['down', 'suspect', 'draining', 'waking', 'starting', 'asleep', 'ready', 'unloaded'];

/** The node of a machine whose state needs attention most. */
export function worst(machine: { tasks: { node: NodeReport }[] }): NodeReport {
  const nodes = machine.tasks.map((task) => task.node);
  return nodes.reduce((a, b) => (RANK.indexOf(b.life) < RANK.indexOf(a.life) ? b : a));
}

/** The state of a node, as its card shows it. */
export function life(node: NodeReport): { life: Life; label: string } {
  if (node.unused) return { life: 'suspect', label: 'Not used' };
  if (node.life === 'down' && !node.has_answered) return { life: 'starting', label: 'No answer yet' };
  return { life: node.life, label: LIFE[node.life] };
}

export function problem(word: string): string {
  return PROBLEMS[word]?.[1] ?? word.replaceAll('_', ' ');
}

/** A short label for a problem or a reason. */
export function label(word: string): string {
  return (PROBLEMS[word] ?? REASONS[word])?.[0] ?? word.replaceAll('_', ' ');
}

/** Why a request took its route, and why it was not handed over. */
export function reason(request: Pick<Request, 'reason' | 'prefill'>): string {
  const { reason: word, prefill } = request;
  if (REASONS[word]) return REASONS[word][1];
  return PROBLEMS[word] && !prefill ? `not handed over, because ${problem(word)}` : problem(word);
}

export function route(request: Pick<Request, 'decode' | 'prefill'> & { outcome?: Outcome | null }): string {
  if (!request.decode) return request.outcome ? 'no route' : 'no route yet';
  return request.prefill ? `${request.prefill} → ${request.decode}` : request.decode;
}
