// Where the time of a request went, for routes that no test cluster has.
import { expect, test } from '@playwright/test';
import { axisEnd, ticks } from '../../proxy/page/src/axis.ts';
import { layout } from '../../proxy/page/src/picture.ts';
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

test('the axis ends at a round time, and one long request does not squeeze the others', () => {
  const check = (lengths, end, texts) => {
    expect(axisEnd(lengths), `${lengths}`).toBe(end);
    if (texts) expect(ticks(end).map((tick) => tick.text)).toEqual(texts);
  };
  check([], 1_000, ['0', '200 ms', '400 ms', '600 ms', '800 ms', '1000 ms']);
  check([0.2], 1);
  check([2_400, 6_400], 8_000, ['0', '2 s', '4 s', '6 s', '8 s']);
  check([3_000, 3_000, 3_000, 3_000, 600_000], 6_000, ['0', '1 s', '2 s', '3 s', '4 s', '5 s', '6 s']);
  check([600_000], 600_000, ['0', '2 min', '4 min', '6 min', '8 min', '10 min']);
  for (let power = 0; power < 9; power += 1) {
    for (const digit of [1, 1.3, 2.7, 9.9]) {
      const end = axisEnd([digit * 10 ** power]);
      expect(end).toBeGreaterThanOrEqual(digit * 10 ** power);
      expect(ticks(end).length).toBeLessThanOrEqual(7);
      expect(ticks(end).length).toBeGreaterThanOrEqual(3);
    }
  }
});

test('machines stand beside each other in every width, with wires between those that work together', () => {
  const names = (what, n) => Array.from({ length: n }, (_, i) => `${what}-${i + 1}`);
  for (const width of [280, 320, 640, 1_200, 2_400]) {
    for (const [n_prefills, n_decodes] of [[0, 1], [1, 1], [2, 2], [8, 3]]) {
      const [prefills, decodes] = [names('prefill', n_prefills), names('decode', n_decodes)];
      const links = prefills.flatMap((prefill) => decodes.map((decode) => ({ prefill, decode })));
      const plan = layout(width, prefills, decodes, [...links, { prefill: 'gone', decode: 'decode-1' }]);
      expect(plan.boxes.map((box) => box.name)).toEqual([...prefills, ...decodes]);
      expect(plan.links.length).toBe(links.length);
      expect(plan.replies.length).toBe(width >= 640 ? n_decodes : 0);
      for (const box of plan.boxes) {
        expect(box.x).toBeGreaterThanOrEqual(0);
        expect(box.x + plan.boxWidth, `${width} px, ${n_prefills} and ${n_decodes} machines`).toBeLessThanOrEqual(width + 0.01);
        expect(box.y).toBeGreaterThanOrEqual(0);
        const others = plan.boxes.filter((other) => other !== box && other.x === box.x);
        others.forEach((other) => expect(Math.abs(other.y - box.y)).toBeGreaterThanOrEqual(112));
      }
    }
  }
});
