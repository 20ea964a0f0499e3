// The page has a sentence for each of the endpoint's words, and for no other: they are compared with the enums' sources.
import { readFile } from 'node:fs/promises';
import { expect, test } from '@playwright/test';
import { CHANGE_EFFECTS, LIFE, LOADS, OUTCOME, PROBLEMS, REASONS, SETTING_SOURCES, TRANSFERS } from '../../proxy/page/src/words.ts';

/**
 * The words of an enum: those that its `as_str` gives; without a written one, its variants in snake case. A transparent variant
 * has another enum's words.
 */
async function words(path, name) {
  const source = await readFile(new URL(`../../${path}`, import.meta.url), 'utf8');
  const written = [...source.matchAll(new RegExp(`${name}::\\w+ => "(\\w+)"`, 'g'))].map((match) => match[1]);
  const variants = source.match(new RegExp(`pub enum ${name} \\{\\n(.*?)\\n\\}`, 's'))?.[1] ?? '';
  const own = variants.replace(/#\[strum\(transparent\)\]\n\s*\w+\(\w+\),/g, '');
  const derived = [...own.matchAll(/^ {4}([A-Z]\w*)(?:,| \{)$/gm)].map((match) => match[1].replace(/\B[A-Z]/g, '_$&').toLowerCase());
  const all = written.length ? written : derived;
  expect(all.length, `${name} in ${path}`).toBeGreaterThan(0);
  return all;
}

const REASON = 'proxy/planner/src/reason.rs';

test('every word of a state, an outcome, a problem and a reason has a sentence', async () => {
  const sorted = (all) => [...new Set(all)].sort();
  expect(sorted(Object.keys(LIFE))).toEqual(sorted(await words('proxy/src/targets/nodes/node_state.rs', 'NodeState')));
  expect(sorted(Object.keys(LOADS))).toEqual(sorted(await words('proxy/src/targets/model_loading/load_report.rs', 'LoadState')));
  expect(sorted(Object.keys(TRANSFERS))).toEqual(sorted(await words('schemas/src/machine_models.rs', 'TransferState')));
  expect(sorted(Object.keys(SETTING_SOURCES))).toEqual(sorted(await words('proxy/src/observe/config_report.rs', 'SettingSource')));
  expect(sorted(Object.keys(CHANGE_EFFECTS))).toEqual(sorted(await words('proxy/src/observe/config_report.rs', 'ChangeEffect')));
  expect(sorted(Object.keys(OUTCOME))).toEqual(sorted(await words('proxy/src/observe/journal.rs', 'RequestOutcome')));
  expect(sorted(Object.keys(REASONS))).toEqual(sorted(await words(REASON, 'RouteReason')));
  const bars = await Promise.all([
    words(REASON, 'BarReason'),
    words(REASON, 'FailureReason'),
    words('schemas/src/handoff.rs', 'HandoffFailure'),
    words('schemas/src/model_difference.rs', 'ModelDifference'),
    words('schemas/src/no_handoff.rs', 'NoHandoffReason'),
    words('proxy/src/targets/nodes/fallbacks.rs', 'FallbackReason'),
  ]);
  // A prefill server of an upstream has failures of its own; the page shows this one's word.
  const upstream = (await words('engines/upstream/src/failure.rs', 'PrefillFailure')).filter((word) => word in PROBLEMS);
  expect(upstream).toContain('prefill_failed');
  expect(sorted(Object.keys(PROBLEMS))).toEqual(sorted([...bars.flat(), ...upstream]));
});
