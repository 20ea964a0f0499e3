// Numbers with their units, at the edges of their units.
import { expect, test } from '@playwright/test';
import { duration } from '../../proxy/page/src/format.ts';

test('a duration is rounded before its unit is chosen', () => {
  const check = (ms, expected) => expect(duration(ms), `${ms} ms`).toBe(expected);
  check(0.04, '0 ms');
  check(0.3, '0.3 ms');
  check(0.96, '1 ms');
  check(999.4, '999 ms');
  check(999.6, '1.00 s');
  check(9_994, '9.99 s');
  check(9_996, '10.0 s');
  check(59_940, '59.9 s');
  check(59_960, '1 min 0 s');
  check(119_700, '2 min 0 s');
  check(3_599_600, '1 h 0 min');
  check(7_260_000, '2 h 1 min');
});
