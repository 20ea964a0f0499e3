/** Where the time of a request went, as spans on its own time line. Times in milliseconds from its arrival. */

import type { Request } from './state';

export type Phase = 'wait' | 'plan' | 'slot' | 'restore' | 'remote-queue' | 'prefill' | 'hidden' | 'transfer' | 'broken' | 'import' | 'decode';

export interface Span {
  phase: Phase;
  label: string;
  from: number;
  to: number;
  /** It has not ended yet. */
  open?: boolean;
}

export interface Course {
  spans: Span[];
  /** What was predicted, from the plan on. */
  predicted: Span[];
  firstToken: number | null;
  end: number;
}

/** From arrival to the first token. */
export function firstTokenOf(request: Request): number | null {
  return request.ttft_ms === null ? null : request.before_plan_ms + request.ttft_ms;
}

/** The spans of a request, in the order in which they began. Those of a running request end now. */
export function course(request: Request): Course {
  const { e2e_ms: end, slot_ms: slot, handoff, upstream_prefill } = request;
  const isRunning = request.outcome === null;
  const hasRoute = request.decode !== '';
  const firstToken = firstTokenOf(request);
  const spans: Span[] = [];
  const add = (phase: Phase, label: string, from: number, to: number | null) => {
    const open = to === null && isRunning;
    const until = Math.min(to ?? end, end);
    if (until - from > 0.05 || open) spans.push(open ? { phase, label, from, to: end, open } : { phase, label, from, to: until });
  };
  add('wait', 'Wait in the queue', 0, request.admitted_ms);
  if (request.admitted_ms !== null) {
    add('plan', 'Prompt and plan', request.admitted_ms, hasRoute ? request.before_plan_ms : null);
  }
  if (hasRoute) {
    // The node says that it has begun once its store has given what it has.
    const restored = slot === null ? null : Math.max(request.before_plan_ms, slot - (request.restore_ms ?? 0));
    add('slot', `Wait for a slot on ${request.decode}`, request.before_plan_ms, restored);
    if (slot !== null && restored !== null) add('restore', `Restore on ${request.decode}`, restored, slot);
  }
  if (slot !== null) {
    let prompt = slot;
    if (handoff) {
      const imported = slot + handoff.total_ms;
      if (handoff.failure) {
        add('broken', 'Broken handoff', slot, imported);
      } else {
        const computed = imported - handoff.after_prefill_ms;
        const began = Math.max(slot, computed - handoff.prefill_ms);
        add('remote-queue', `Wait for ${request.prefill}`, slot, began);
        add('prefill', `Prefill on ${request.prefill}`, began, computed);
        add('hidden', 'Transfer during the prefill', Math.max(slot, computed - handoff.during_prefill_ms), computed);
        add('transfer', 'Transfer after the prefill', computed, imported);
        add('import', 'Import', Math.max(slot, imported - handoff.import_ms), imported);
      }
      prompt = imported;
    } else if (upstream_prefill) {
      prompt = slot + upstream_prefill.prefill_ms;
      add('prefill', `Prefill on ${request.prefill}`, slot, prompt);
    } else if (request.prefill && firstToken === null && isRunning) {
      const began = request.running_since_ms === undefined ? null : Math.max(slot, request.running_since_ms);
      add('remote-queue', `Wait for ${request.prefill}`, slot, began);
      if (began !== null) add('prefill', `Prefill on ${request.prefill} and transfer`, began, null);
      prompt = end;
    }
    if (prompt < end || firstToken !== null) {
      const isElsewhere = upstream_prefill || (handoff && !handoff.failure);
      add('prefill', isElsewhere ? `First token on ${request.decode}` : `Prefill on ${request.decode}`, prompt, firstToken);
    }
  }
  // A stream whose machine was lost waits for a slot on another one, as further choices do for a free one.
  const lost = firstToken !== null && isRunning ? request.waiting_since_ms : undefined;
  if (firstToken !== null) add('decode', 'Decode', firstToken, isRunning ? (lost ?? null) : end);
  if (lost !== undefined) add('wait', 'Wait for a slot', lost, null);
  return { spans, predicted: predicted(request), firstToken, end };
}

function predicted(request: Request): Span[] {
  const said = request.predicted;
  if (!said) return [];
  const spans: Span[] = [];
  let at = request.before_plan_ms;
  const add = (phase: Phase, label: string, ms: number) => {
    if (ms > 0.05) spans.push({ phase, label, from: at, to: at + ms });
    at += ms;
  };
  add('slot', 'Wait', said.queue_ms);
  const restore = said.restore_ms ?? 0;
  add('restore', 'Restore', restore);
  const prefill = Math.max(0, said.ttft_ms - said.queue_ms - restore - said.after_prefill_ms);
  add('prefill', 'Prefill', prefill);
  add('transfer', 'Transfer after the prefill', said.after_prefill_ms);
  add('decode', 'Decode', Math.max(0, request.n_completion - 1) * said.step_ms);
  return spans;
}

/** The spans without those that overlap with others, for one bar. */
export function bar(course: Course): Span[] {
  return course.spans.filter((span) => span.phase !== 'hidden' && span.phase !== 'import');
}

export interface Scale {
  /** The share of the width at a time. */
  at: (ms: number) => number;
  /** The time at which the scale changes, if it does: a long decode is drawn smaller. */
  break: number | null;
}

/** The width that the time until the first token gets at least. */
const PROMPT_SHARE = 0.62;

export function scale(course: Course): Scale {
  const ends = [...course.spans, ...course.predicted].map((span) => span.to);
  const end = Math.max(course.end, ...ends, 1);
  const saidFirst = course.predicted.find((span) => span.phase === 'decode')?.from ?? 0;
  const first = Math.max(course.firstToken ?? end, saidFirst);
  if (first >= end * PROMPT_SHARE || course.firstToken === null) return { at: (ms) => Math.min(ms / end, 1), break: null };
  const after = (ms: number) => PROMPT_SHARE + ((ms - first) / (end - first)) * (1 - PROMPT_SHARE);
  return { at: (ms) => (ms <= first ? (ms / first) * PROMPT_SHARE : Math.min(after(ms), 1)), break: first };
}
