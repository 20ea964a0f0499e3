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
