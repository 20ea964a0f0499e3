// What an operator looks after: configuration, log, keys and usage; and that no secret is ever shown.
import { mkdtemp, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, expectAccessible, expectNoSidewaysScroll, test } from './browser.mjs';

const OWNER = "the owner's secret key";
const FILE = `api_keys = ["${OWNER}"]\nmax_waiting = 7\n[model]\nname = "sim"\n[model.engine]\nengine = "sim"\n[[upstream]]\nname = "other"\nkind = "openai"\nurl = "http://127.0.0.1:9"\nkey = "upstream-secret-key"\nmodels = { far = "far" }\n`;

const key = (name, changes = {}) => ({
  name, operator: false, models: [], requests_per_minute: null, tokens_per_minute: null, max_concurrent: null, priority: 0, tokens_per_day: null,
  tokens_per_month: null, tokens_today: 0, tokens_this_month: 0, secrets: [{ id: 'ab12', expires: null, last_used_ms: null }], ...changes,
});
const used = (day, name, model, tokens) => ({ day, key: name, model, requests: 2, prompt_tokens: tokens, cached_tokens: 10, generated_tokens: 5, engine_seconds: 1.5 });

test('an operator sees what is set, what a change waits for, and the log, but no secret', async ({ page, problems, cluster }) => {
  const file = join(await mkdtemp(join(tmpdir(), 'page-')), 'baton.toml');
  await writeFile(file, FILE);
  const { url } = await cluster.serve('--config', file, '--no-calibration');
  const sections = ['keys', 'usage'];
  await page.route(/\/baton\/(keys|usage)(\?|$)/, (route) => {
    const body = sections.find((name) => route.request().url().includes(`/baton/${name}`)) === 'keys'
      ? { keys: [key('guest', { requests_per_minute: 60, tokens_per_day: 1000, tokens_today: 250, models: ['sim'] }), key('owner', { operator: true, secrets: [{ id: 'cd34', expires: '2027-01-31', last_used_ms: Date.now() - 120_000 }] })] }
      : { since: '2026-11-01', until: '2026-11-30', is_kept: false, is_truncated: false, rows: [used('2026-11-29', 'guest', 'sim', 40), used('2026-11-28', 'guest', 'sim', 60), used('2026-11-28', 'owner', 'sim', 1000)] };
    return route.fulfill({ json: body });
  });
  await page.goto(`${url}/#operate`);
  await page.getByLabel('API key').fill(OWNER);
  await page.getByRole('button', { name: 'Unlock' }).click();
  const part = (name) => page.locator(`section[aria-labelledby=${name}]`);
  const setting = (name) => part('config').locator('tbody tr', { hasText: name });
  await expect(setting('max_waiting')).toHaveText('max_waiting7file');
  await expect(setting('model.engine.engine')).toContainText('"sim"');
  await expect(setting('--no-calibration')).toContainText('command line');
  await expect(setting('api_keys')).toHaveText('api_keysset, and not shownfile');
  await expect(setting('upstream[0].key')).toContainText('not shown');
  await expect(setting('upstream[0].url')).toContainText('http://127.0.0.1:9');
  await expect(part('keys').locator('tbody tr')).toHaveText([
    'guest 60 requests a minute; 250 of 1,000 tokens today; only simnevernever',
    'owner operator none2 min ago2027-01-31',
  ]);
  await expect(part('usage').locator('tbody tr')).toHaveText(['ownersim21,000105' + '1.50 s', 'guestsim410020103.00 s']);
  await expect(part('usage')).toContainText('Since the endpoint started');

  // A change that is applied at once, one that waits, and a file with a mistake.
  await writeFile(file, FILE.replace('max_waiting = 7', 'max_waiting = 8').replace('engine = "sim"', 'engine = "sim"\nslots = 3'));
  await expect(setting('max_waiting')).toHaveText('max_waiting8file');
  await expect(part('config').locator('.notice')).toContainText('A restart applies what has changed since the start: model.engine.');
  await expect(part('log')).toContainText('the configuration was reloaded');
  await writeFile(file, FILE.replace('max_waiting = 7', 'max_wating = 7'));
  await expect(part('config').getByRole('alert')).toContainText('max_wating');
  await expect(setting('max_waiting'), 'what is in force stays').toHaveText('max_waiting8file');
  await expect(part('log')).toContainText('stays as it was');
  expect(await page.locator('main').textContent()).not.toMatch(/secret.key/);
  for (const width of [2560, 360]) {
    await page.setViewportSize({ width, height: 900 });
    await expectNoSidewaysScroll(page);
    await expectAccessible(page, `operate, ${width} px`);
  }
  expect(problems).toEqual([]);
});

test('without an operator’s key neither configuration nor log is shown', async ({ page, request, problems, cluster }) => {
  const { url } = await cluster.serve('--engine', 'sim', '--name', 'sim');
  await page.route(/\/baton\/(keys|usage)(\?|$)/, (route) => route.fulfill({ status: 404, json: { error: { message: 'no' } } }));
  await page.goto(`${url}/#operate`);
  const part = (name) => page.locator(`section[aria-labelledby=${name}]`);
  await expect(part('config')).toContainText("Only an operator's API key may see the configuration.");
  await expect(part('log')).toContainText("Only an operator's API key may see the log.");
  await expect(part('keys')).toContainText('does not list its keys');
  await expect(part('usage')).toContainText('does not count usage');
  for (const path of ['config', 'log']) expect((await request.get(`${url}/baton/${path}`)).status(), path).toBe(403);
  expect(problems).toEqual([]);
});
