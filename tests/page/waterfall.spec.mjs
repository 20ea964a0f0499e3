// Where the time of a request went, for routes that no test cluster has.
import { expect, test } from '@playwright/test';
import { course } from '../../proxy/page/src/waterfall.ts';

const REQUEST = {
  decode: 'pair',
  prefill: 'prefill-1',
  admitted_ms: 1,
  before_plan_ms: 2,
  slot_ms: 2,
  ttft_ms: 100,
  e2e_ms: 200,
  handoff: null,
  predicted: null,
  outcome: 'done',
};

test("the prompt of an upstream's pair is drawn on its prefill server", () => {
  const spans = (more) => course({ ...REQUEST, ...more }).spans.map(({ label, from, to }) => [label, from, to]);
  expect(spans({ upstream_prefill: { prefill_ms: 80, n_transferred: 1_049 } }).slice(2)).toEqual([
    ['Prefill on prefill-1', 2, 82],
    ['First token on pair', 82, 102],
    ['Decode', 102, 200],
  ]);
  expect(spans({ prefill: null }).slice(2)).toEqual([
    ['Prefill on pair', 2, 102],
    ['Decode', 102, 200],
  ]);
});

test('a prompt waits for the node that is to compute it until that node has begun', () => {
  const running = { ...REQUEST, ttft_ms: null, outcome: null };
  const spans = (more) => course({ ...running, ...more }).spans.map(({ label, from, to }) => [label, from, to]);
  expect(spans({ waiting_since_ms: 0 }).slice(2)).toEqual([['Wait for prefill-1', 2, 200]]);
  expect(spans({ running_since_ms: 150 }).slice(2)).toEqual([
    ['Wait for prefill-1', 2, 150],
    ['Prefill on prefill-1 and transfer', 150, 200],
  ]);
});

test('a choice that waits for a slot after a first token has lost no machine', () => {
  const running = { ...REQUEST, outcome: null, waiting_since_ms: 150 };
  expect(course(running).spans.at(-1)).toMatchObject({ label: 'Wait for a slot', from: 150, to: 200 });
});
