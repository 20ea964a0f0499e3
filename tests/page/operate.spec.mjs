// What an operator looks after: keys and usage, configuration, what a reload would change, log; and that no secret is ever shown. All answers
// are those of real endpoints.
import { execFile } from 'node:child_process';
import { mkdtemp, rename, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { BATON, chat } from './cluster.mjs';
import { expect, expectAccessible, expectNoSidewaysScroll, test } from './browser.mjs';

const OWNER = "the owner's secret key";
const FILE = `api_keys = ["${OWNER}"]\nmax_waiting = 7\nstate_folder = "state"\n[model]\nname = "sim"\ncalibrate = false\n[model.engine]\nengine = "sim"\n[[upstream]]\nname = "other"\nkind = "openai"\nurl = "http://127.0.0.1:9"\nkey = "upstream-secret-key"\nmodels = { far = "far" }\n`;

/** A key of `baton key new`: its secret, and its table of the configuration. */
async function newKey(name, limits = '') {
  const { stdout } = await promisify(execFile)(BATON, ['key', 'new', '--name', name]);
  const [secret, table] = stdout.trim().split('\n\n');
  return { secret, table: `${table}\n${limits}` };
}

async function configured(text) {
  const file = join(await mkdtemp(join(tmpdir(), 'page-')), 'baton.toml');
  await writeFile(file, text);
  return file;
}

async function unlock(page, url, secret) {
  await page.goto(`${url}/#operate`);
  await page.getByLabel('API key').fill(secret);
  await page.getByRole('button', { name: 'Unlock' }).click();
}

const parts = (page) => (name) => page.locator(`section[aria-labelledby=${name}]`);

/** Chats with a key, and returns the status and what it is told of the tokens. */
async function used(url, secret, more = {}) {
  const body = { model: 'sim', messages: [{ role: 'user', content: 'How are you?' }], max_tokens: 5, ignore_eos: true, ...more };
  const reply = await fetch(`${url}/v1/chat/completions`, { method: 'POST', headers: { authorization: `Bearer ${secret}` }, body: JSON.stringify(body) });
  return { status: reply.status, usage: (await reply.json()).usage };
}

const shown = (n) => n.toLocaleString('en-US');

test('keys and usage are those of the endpoint, and change while it works', async ({ page, problems, cluster }) => {
  // The page asks every five seconds, and this waits for some answers.
  test.slow();
  const [guest, boss, late] = [
    await newKey('guest', 'requests_per_minute = 60\ntokens_per_day = 1000\nmodels = ["sim"]\n'),
    await newKey('boss', 'operator = true\nexpires = 9999-12-31\n'),
    await newKey('late', 'expires = 2020-02-29\ntokens_per_minute = 1_000_000\nmax_concurrent = 2\n'),
  ];
  const withKeys = (...tables) => FILE.replace(/^api_keys.*\n/, '').replace('[model]\n', () => `${tables.join('')}[model]\n`);
  const file = await configured(withKeys(guest.table, boss.table, late.table));
  const { url } = await cluster.serve('--config', file);
  await unlock(page, url, boss.secret);
  const part = parts(page);
  const row = (name) => part('keys').locator('tbody tr', { hasText: name });
  await expect(part('usage')).toContainText('Nobody has used a model yet.');
  await expect(row('guest')).toHaveText('guest 60 requests a minute; 0 of 1,000 tokens today; only simnevernever');
  await expect(row('boss')).toHaveText('boss operator nonenever9999-12-31');
  await expect(row('late')).toHaveText('late 1,000,000 tokens a minute; 2 at oncenever2020-02-29 (over)');

  const first = await used(url, guest.secret);
  expect(first.status).toBe(200);
  const again = await used(url, guest.secret);
  const tokens = first.usage.total_tokens + again.usage.total_tokens;
  const cached = again.usage.prompt_tokens_details.cached_tokens;
  expect(cached, 'the second prompt is cached').toBeGreaterThan(0);
  const prompts = first.usage.prompt_tokens + again.usage.prompt_tokens;
  await expect(row('guest')).toContainText(`${tokens} of 1,000 tokens today`);
  await expect(row('guest').locator('.num').first()).toHaveText(/ ago$/);
  const cells = part('usage').locator('tbody tr').first().locator('th, td');
  await expect(cells).toHaveText(['guest', 'sim', '2', shown(prompts), shown(cached), '10', /^[\d.,]+ (ms|s)$/]);
  await expect(part('usage'), 'the endpoint has a state folder').not.toContainText('keeps no usage');

  // What is refused is no usage: an expired key, and what does not fit the budget.
  expect((await used(url, late.secret)).status).toBe(401);
  expect((await used(url, guest.secret, { max_tokens: 1000 })).status).toBe(429);
  expect((await used(url, boss.secret, { max_tokens: 30 })).status).toBe(200);
  await expect(part('usage').locator('tbody tr')).toHaveText([/^guestsim2/, /^bosssim1/]);
  await expect(row('late')).toContainText('never');

  // A key that is replaced has two secrets.
  const { stdout } = await promisify(execFile)(BATON, ['key', 'rotate', 'guest', '--config', file]);
  const [fresh, lines] = stdout.trim().split('\n\n');
  const replaced = guest.table.replace(/^hash.*\n/m, `${lines}\n`);
  await writeFile(file, withKeys(replaced, boss.table, late.table));
  await expect(row('guest')).toContainText('being replaced');
  expect((await used(url, fresh)).status).toBe(200);
  expect((await used(url, guest.secret)).status).toBe(200);
  await expect(cells.nth(2)).toHaveText('4');
  const text = await page.locator('main').textContent();
  for (const secret of [guest.secret, boss.secret, late.secret, fresh]) expect(text).not.toContain(secret.slice(6, 30));
  await expectAccessible(page, 'operate, keys and usage');
  expect(problems).toEqual([]);
});

test('an operator sees what is set, what a reload would change, what waits, and the log, but no secret', async ({ page, problems, cluster }) => {
  // The page asks every five seconds, and this waits for some answers.
  test.slow();
  const file = await configured(FILE);
  const { url } = await cluster.serve('--config', file, '--no-calibration', '--max-queued', '9');
  await unlock(page, url, OWNER);
  const part = parts(page);
  const setting = (name) => part('config').locator('tbody tr', { hasText: name });
  await expect(setting('max_waiting')).toHaveText('max_waiting7file');
  await expect(setting('model.engine.engine')).toContainText('"sim"');
  await expect(setting('--no-calibration')).toContainText('command line');
  await expect(setting('api_keys')).toHaveText('api_keysset, and not shownfile');
  await expect(setting('upstream[other].key')).toContainText('not shown');
  await expect(setting('upstream[other].url')).toContainText('http://127.0.0.1:9');
  await expect(part('preview')).toContainText('sets what is in force.');

  // A file that is only looked at: what it would change, and its mistakes.
  const candidate = `${file}.new`;
  const next = FILE.replace('max_waiting = 7', 'max_waiting = 8').replace(OWNER, 'a new secret key').replace('engine = "sim"', 'engine = "sim"\nslots = 3\nmax_queued = 5');
  await writeFile(candidate, next);
  const change = (name) => part('preview').locator('tbody tr', { hasText: name });
  await expect(change('max_waiting')).toHaveText('max_waiting78when it is reloaded');
  await expect(change('api_keys')).toHaveText('api_keysnot shownnot shownwhen it is reloaded');
  await expect(change('model.engine.slots')).toHaveText('model.engine.slotsnot set3after a restart');
  await expect(change('model.engine.max_queued')).toHaveText('model.engine.max_queuednot set5never: a flag wins');
  await expect(part('preview').locator('tbody tr')).toHaveCount(4);
  await expect(part('preview')).toContainText('baton.toml.new');
  await expect(setting('max_waiting'), 'nothing is applied').toHaveText('max_waiting7file');
  await writeFile(candidate, next.replace('max_waiting', 'max_wating'));
  await expect(part('preview').locator('.mistakes li')).toHaveText(/baton\.toml\.new: line 2: .*max_wating/);

  // It is put in its place: one key is applied at once, one waits, one has no effect.
  await writeFile(candidate, next.replace('a new secret key', OWNER));
  await rename(candidate, file);
  await expect(setting('max_waiting')).toHaveText('max_waiting8file');
  await expect(part('config').locator('.notice')).toContainText('A restart applies what has changed since the start: model.engine.');
  await expect(change('model.engine.slots')).toHaveText('model.engine.slotsnot set3after a restart');
  await expect(part('log')).toContainText('the configuration was reloaded');

  // A mistake in the file in use.
  await writeFile(file, FILE.replace('max_waiting = 7', 'max_wating = 7'));
  await expect(part('config').getByRole('alert')).toContainText('max_wating');
  await expect(part('preview').locator('.mistakes li')).toHaveText(/line 2: .*max_wating/);
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

test('without keys everybody sees the usage, and nobody the configuration and the log', async ({ page, request, problems, cluster }) => {
  const { url } = await cluster.serve('--engine', 'sim', '--name', 'sim');
  await chat(url, 'How are you?', { model: 'sim', ignore_eos: true });
  await page.goto(`${url}/#operate`);
  const part = parts(page);
  await expect(part('keys')).toContainText('No keys are configured');
  await expect(part('usage').locator('tbody tr')).toHaveText(/^anyonesim1/);
  await expect(part('usage')).toContainText('Since the endpoint started: it keeps no usage.');
  for (const name of ['config', 'preview']) await expect(part(name)).toContainText("Only an operator's API key may see the configuration.");
  await expect(part('log')).toContainText("Only an operator's API key may see the log.");
  for (const path of ['config', 'config/changes', 'log']) expect((await request.get(`${url}/baton/${path}`)).status(), path).toBe(403);
  expect(problems).toEqual([]);
});
